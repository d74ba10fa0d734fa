"""`python -m ROOM COMMAND ...`: one table of commands a room."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence

from core.errors import main_guard


def dispatch(room: str, commands: Mapping[str, tuple[str, str]], argv: Sequence[str]) -> int:
    """Runs the command that `argv` names; returns the exit code.

    `commands`: by name the "module:function" that takes the arguments left, imported when asked
    for, and a line of help.
    """
    name, *rest = argv or [""]

    def run() -> int:
        if name not in commands:
            print(f"usage: python -m {room} COMMAND [--help]\n")
            for command, (_, help_text) in commands.items():
                print(f"  {command:<8} {help_text}")
            return 0 if name in ("-h", "--help") else 2
        module, _, function = commands[name][0].partition(":")
        return getattr(importlib.import_module(module), function)(rest)

    return main_guard(run)
