"""`python -m ROOM COMMAND ...`: one table of commands a room."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence

from core.errors import UserError, main_guard
from core.processes import by_srun, end_the_others, leave_apart


def dispatch(
    room: str, commands: Mapping[str, tuple[str, str]], argv: Sequence[str], of_many: str = ""
) -> int:
    """Runs the command that `argv` names; returns the exit code.

    `commands`: by name the "module:function" that takes the arguments left, imported when asked
    for, and a line of help. `of_many`: that whose processes are started together.
    """
    name, *rest = argv or [""]

    def run() -> int:
        if name not in commands:
            print(f"usage: python -m {room} COMMAND [--help]\n")
            for command, (_, help_text) in commands.items():
                print(f"  {command:<8} {help_text}")
            return 0 if name in ("-h", "--help") else 2
        module, _, function = commands[name][0].partition(":")
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError as missing:
            what = "install the project first: pip install -r requirements.txt"
            raise UserError(f"{missing}: {what}") from None
        return getattr(found, function)(rest)

    return _together(run) if name and name == of_many else main_guard(run)


def _together(run: Callable[[], int]) -> int:
    """As `main_guard`; a process that leaves with an error ends the others, which would wait."""
    code = 1
    try:
        code = main_guard(run)
    except SystemExit as end:  # of argparse
        code = end.code if isinstance(end.code, int) else 0
        raise
    except Exception:
        traceback.print_exc()
    finally:
        if code:
            if by_srun():
                if (mpi := sys.modules.get("mpi4py.MPI")) is not None:
                    mpi.Finalize()  # until then what was said last may be on its way
                leave_apart(code, 2.0)
            end_the_others(code)
    return code
