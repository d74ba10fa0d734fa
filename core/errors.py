"""What a user sees when something goes wrong: one line and an exit code, never a traceback."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable

from core.console import show

OUTPUT_GONE = 141  # as a shell says of a program that SIGPIPE ended
_LONGEST = 4000  # characters of an error, which may quote a hostile file


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
    """Call `run` and turn a UserError into one line on stderr and its code; Ctrl-C into 130; the
    end of whoever read the output (`| head`) into `OUTPUT_GONE`."""
    try:
        code = run() or 0
        sys.stdout.flush()
        return code
    except UserError as error:
        show(f"error: {short(str(error), _LONGEST)}", sys.stderr, lines=False)
        return error.code
    except KeyboardInterrupt:
        show("stopped by Ctrl-C", sys.stderr)
        return 130
    except BrokenPipeError:
        if not _output_is_gone():
            raise  # of a pipe to a process of our own
        # Without this Python complains again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno())
        return OUTPUT_GONE


def _output_is_gone() -> bool:
    """Whether stdout is a pipe that nobody reads."""
    poll = select.poll()
    poll.register(sys.__stdout__.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))
