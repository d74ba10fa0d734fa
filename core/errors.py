"""What a user sees when something goes wrong: one line and an exit code, never a traceback."""

from __future__ import annotations

import sys
from collections.abc import Callable

from core.console import printable


class UserError(Exception):
    """A mistake the user can mend. Its text is the one line they see; no traceback follows."""

    code = 2  # of the process


class TryAgain(UserError):
    """An accident that the same command may not meet again, such as a process that was killed."""

    code = 85


def short(text: str, limit: int = 60) -> str:
    """What a message quotes of a file: its beginning, for a file may be one long line."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


def main_guard(run: Callable[[], int | None]) -> int:
    """Call `run` and turn a UserError into one line on stderr and its code; Ctrl-C into 130."""
    try:
        return run() or 0
    except UserError as error:
        print(f"error: {printable(str(error))}", file=sys.stderr, flush=True)
        return error.code
    except KeyboardInterrupt:
        print("stopped by Ctrl-C", file=sys.stderr, flush=True)
        return 130
    except BrokenPipeError:
        # The reader (`| head`) went away; without this Python complains again at exit.
        sys.stdout = open("/dev/null", "w")  # noqa: SIM115
        return 0
