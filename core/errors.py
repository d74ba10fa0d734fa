"""What a user sees when something goes wrong: one line and an exit code, never a traceback."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from core.console import OutputFailed, OutputGone, look_at_stdout, notice, own_stdout

OUTPUT_GONE = 141  # as a shell says of a program that SIGPIPE ended
STOPPED = "stopped by Ctrl-C"
LONGEST = 4000  # characters of an error, which may quote a hostile file
# What a shared disk, or the way to it, says of itself and not of the file that was asked for.
_MAY_PASS = {
    errno.EIO, errno.EREMOTEIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.ENFILE,
    errno.ENETDOWN, errno.ENETUNREACH, errno.ENETRESET, errno.EHOSTDOWN, errno.EHOSTUNREACH,
    errno.ECONNABORTED, errno.ECONNREFUSED, errno.ECONNRESET, errno.ENOTCONN, errno.ESHUTDOWN,
    errno.ENOLINK, errno.ECOMM, errno.EPROTO,
}  # fmt: skip
_FULL = {errno.ENOSPC, errno.EDQUOT}
_LIMITS = {errno.EFBIG, errno.EMFILE, errno.ENOMEM}
_ENDS = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP}


class UserError(Exception):
    """A mistake the user can mend. Its text is the one line they see; no traceback follows."""

    code = 2  # of the process
    quiet = False  # another process of the same run says it
    told = False


class TryAgain(UserError):
    """An accident that the same command may not meet again, such as a process that was killed."""

    code = 85


class Killed(TryAgain):
    """A process was killed and nobody said why: memory may end another start in the same place."""

    code = 137  # as of a shell


class StoppedBySignal(KeyboardInterrupt):
    """By another signal than Ctrl-C's: whoever cleans up after that does so after this, too."""

    code: int


class StoppedInTheStart(StoppedBySignal):
    """By one that asks for another start, before there is anything to save."""

    code = 85


def stopped_by(error: KeyboardInterrupt) -> tuple[int, str]:
    """The exit code and the line."""
    return (error.code, str(error)) if isinstance(error, StoppedBySignal) else (130, STOPPED)


@contextlib.contextmanager
def stops_as_such() -> Iterator[None]:
    """A KeyboardInterrupt of which Python has made another error, as it does of one that comes
    within a `__set_name__`, is that again."""
    try:
        yield
    except Exception as error:
        cause = error.__cause__
        while not (cause is None or isinstance(cause, KeyboardInterrupt)):
            cause = cause.__cause__
        if cause is None:
            raise
        raise cause from None


class NotAllowed(UserError):
    """What this user may not read, and which may be good."""


class NoRoom(UserError):
    """A full disk or another limit of this machine, which says nothing of what was asked for."""


def short(text: str, limit: int = 60) -> str:
    """What a message quotes of a file: its beginning, for a file may be one long line."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


def may_pass(error: OSError) -> bool:
    """Whether the same call may do later, as when a file server does not answer."""
    return error.errno in _MAY_PASS or isinstance(error, TimeoutError)


def takes_no_more(error: OSError) -> bool:
    """Whether the disk is full, or can only be read."""
    return error.errno in _FULL or error.errno == errno.EROFS


def disk_error(error: OSError, place: str | Path, key: str = "") -> UserError:
    """One line for a full disk (NoRoom), a missing permission (NotAllowed) and their like, TryAgain
    where it `may_pass`; `key`: the configuration's name of the place."""
    name = f"{key}: " if key else ""
    if error.errno in _FULL:
        return NoRoom(f"{name}{place}: the disk is full; make room and run the same command again")
    path, why = error.filename or place, error.strerror or error
    path = os.fsdecode(path) if isinstance(path, bytes) else path
    if error.errno == errno.EEXIST and not os.path.isdir(path):  # of mkdir
        to = f"a link to {os.readlink(path)}, which is " if os.path.islink(path) else ""
        why = f"{to}no folder"
    kind: type[UserError] = NotAllowed if isinstance(error, PermissionError) else UserError
    kind = TryAgain if may_pass(error) else NoRoom if error.errno in _LIMITS else kind
    return kind(f"{name}{path}: {why}")


def memory_error(error: BaseException) -> UserError | None:
    """One line where `error` says that the machine's memory or a GPU's is out; else None."""
    text = str(error).partition("\n")[0]
    tensor = isinstance(error, RuntimeError) and re.search("out of memory|allocate memory", text)
    if tensor or isinstance(error, MemoryError):
        return UserError(f"memory is out: {text or 'of this process'}")
    return None


def limit_error(error: BaseException) -> UserError | None:
    """One line where `error` says that no more threads can be begun, or files opened; else None."""
    text = str(error)
    if isinstance(error, OSError) and error.errno == errno.EMFILE:
        return NoRoom("no more files can be opened (ulimit -n)")
    of_python = isinstance(error, RuntimeError) and text in (
        "can't start new thread",
        "unable to start watchdog thread",  # faulthandler's
        "Resource temporarily unavailable",  # C++'s, of torch
    )
    if of_python or "ThreadPoolBuildError" in text:  # of rayon, whose panics are no Exception
        return NoRoom("no more threads can be begun (ulimit -u, or the limit of a container)")
    return None


def tell(error: UserError) -> None:
    """Its line on stderr, once."""
    if not (error.quiet or error.told):
        error.told = True
        notice(f"error: {short(str(error), LONGEST)}", sys.stderr, lines=False)


def main_guard(run: Callable[[], int | None]) -> int:
    """Call `run` and turn a UserError into one line on stderr and its code; Ctrl-C into 130; the
    end of whoever read the output (`| head`) into `OUTPUT_GONE`; an output that cannot be written,
    a disk that is full or does not answer, what this user may not read or write, memory that is
    out, or nowhere to put temporary files, into one line too. A character that stdout's encoding
    has not is escaped, and a signal that asks for an end is heard."""
    leave_the_parents_ways()
    # A parent that waits for signals has them blocked, and a mask is inherited.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDS)
    own_stdout()
    code = 0
    try:
        _look_where_we_are()
        try:
            with stops_as_such():
                code = run() or 0
        except SystemExit:  # of argparse, which says nothing where its help is not taken
            look_at_stdout()
            raise
        sys.stdout.flush()
        return code
    except UserError as error:
        return _ended_by(error)
    except KeyboardInterrupt as error:
        code, line = stopped_by(error)
        notice(line, sys.stderr)
        return code
    except OutputFailed as error:
        _leave_stdout()
        if isinstance(error, OutputGone):
            return OUTPUT_GONE
        notice(f"error: the output cannot be written: {error.strerror}", sys.stderr)
        return code or 2
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:  # no name of our own making is
            return _ended_by(UserError(f"{short(str(error.filename))}: {error.strerror}"))
        if (out := limit_error(error)) is not None:
            return _ended_by(out)
        if isinstance(error, FileNotFoundError) and "temporary directory" in str(error):
            # Of `tempfile`, which torch asks as it is imported.
            said = f"{error.strerror}: make room in one of them, or set TMPDIR"
            return _ended_by(UserError(said))
        refused = isinstance(error, PermissionError)
        of_the_disk = refused or takes_no_more(error) or may_pass(error)
        if of_the_disk and error.filename is not None:
            return _ended_by(disk_error(error, error.filename))
        raise  # of a file or a pipe of our own
    except BaseException as error:
        if (out := memory_error(error) or limit_error(error)) is None:
            raise
        return _ended_by(out)


def _ended_by(error: UserError) -> int:
    """Its line and its code, whatever becomes of output that waits."""
    tell(error)
    try:
        sys.stdout.flush()
    except OutputFailed:
        _leave_stdout()
    return error.code


def _leave_stdout() -> None:
    """Python would complain at exit of what stdout has not taken."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _look_where_we_are() -> None:
    """UserError in a folder that was removed: MKL would end the process with words of its own."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UserError("the current folder was removed: go to one that is there") from None


def leave_the_parents_ways() -> None:
    """How children end is told where a parent wants to hear of none. stdin, stdout and stderr are
    there where it closed them: the next file would take the place, and what is printed. And they
    wait for a slow reader where it, or who shares its terminal, had them not wait: Python would
    lose what is not taken at once."""
    if threading.current_thread() is threading.main_thread():  # Python asks for it
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for handle, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.set_blocking(handle, True)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest that is free
            file = open(handle, "w" if handle else "r")
            setattr(sys, name, file)
            setattr(sys, f"__{name}__", file)
