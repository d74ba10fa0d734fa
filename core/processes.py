"""A process whose end is that of whoever started it, and what a launcher says of it."""

from __future__ import annotations

import contextlib
import math
import os
import re
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from core.console import last_words
from core.errors import StoppedBySignal, StoppedInTheStart, UserError, leave_the_parents_ways, short

# A launcher's and a terminal's, which reach every process of a job.
OF_THE_JOB = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

_SIZES = (
    "PMI_SIZE",
    "OMPI_COMM_WORLD_SIZE",
    "MV2_COMM_WORLD_SIZE",
    "MPI_LOCALNRANKS",
    "SLURM_STEP_NUM_TASKS",
)
_PR_SET_PDEATHSIG = 1
_prctl = None
with contextlib.suppress(ImportError):  # of a Python without libffi, as torch's import will say
    import ctypes

    _prctl = getattr(ctypes.CDLL(None), "prctl", None)  # before a fork, which may hold its locks


def stated(name: str, what: str = "number of processes") -> int | None:
    """By a launcher's variable; None where it is not there or empty. UserError for no number."""
    value = os.environ.get(name, "")
    if value and not re.fullmatch("[0-9]{1,9}", value):
        raise UserError(f"{name}={short(value)}: is no {what}")
    return int(value) if value else None


def started_together() -> dict[str, int]:
    """What each variable of srun and of MPI's launchers says: how many processes were started."""
    return {name: size for name in _SIZES if (size := stated(name)) is not None}


def by_srun() -> bool:
    """Whether srun has started this process with others, and no mpiexec under it."""
    with contextlib.suppress(UserError):
        sizes = started_together()
        return sizes.get("SLURM_STEP_NUM_TASKS", 1) > 1 and "MPI_LOCALNRANKS" not in sizes
    return False


def hear(does: Callable[[], object]) -> None:
    """A signal of the job that is not ignored `does` this from here on."""
    for number in OF_THE_JOB:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda *_: does())
    _leave_the_start()  # whoever leaves has heard it


_IN_THE_START = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
PATIENCE = 5.0  # seconds
_end_of_start: Callable[[], str] | None = None  # gives the line of a signal that came


def hear_in_the_start() -> None:
    """SIGTERM, SIGUSR1 or SIGHUP, if it is not ignored, raises StoppedInTheStart from here on, up
    to `started`, which raises it again where Python has let it go, as it does within a `__del__`.
    Where Python does not come to that, as in a wait for other ranks, the process ends with its code
    some seconds later."""
    global _end_of_start
    leave_the_parents_ways()  # before the pipe here takes a place
    heard = [n for n in _IN_THE_START if signal.getsignal(n) == signal.SIG_DFL]
    came, tells = os.pipe()
    os.set_blocking(tells, False)
    over = threading.Event()
    hook, came_first = sys.unraisablehook, 0

    def line(number: int) -> str:
        return f"{signal.Signals(number).name}: stopped in the start"

    def stop(number: int, _: object) -> None:
        nonlocal came_first
        came_first = number
        for other in heard:  # the first counts
            signal.signal(other, ignore)
        raise StoppedInTheStart(line(number))

    def let_go(failure: Any) -> None:
        if not isinstance(failure.exc_value, StoppedInTheStart):
            hook(failure)

    def ignore(*_: object) -> None:
        pass

    def watch() -> None:
        number = 0
        while number not in heard and (byte := os.read(came, 1)):
            number = byte[0]
        if number in heard and not over.wait(PATIENCE):
            last_words(line(number))
            end_the_others(StoppedInTheStart.code)
            os._exit(StoppedInTheStart.code)
        os.close(came)

    def end() -> str:
        sys.unraisablehook = hook
        signal.set_wakeup_fd(-1)
        over.set()
        os.close(tells)
        for number in heard:
            if signal.getsignal(number) in (stop, ignore):
                signal.signal(number, signal.SIG_DFL)
        return line(came_first) if came_first else ""

    _end_of_start, sys.unraisablehook = end, let_go
    signal.set_wakeup_fd(tells, warn_on_full_buffer=False)
    threading.Thread(target=watch, daemon=True).start()
    for number in heard:
        signal.signal(number, stop)


@contextlib.contextmanager
def ends_are_heard() -> Iterator[None]:
    """SIGTERM and SIGHUP, where they would end this process, raise StoppedBySignal: what it has
    half written is removed, and its code is that of a shell."""
    heard = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) == signal.SIG_DFL]

    def stop(number: int, _: object) -> None:
        for other in heard:  # the first counts
            signal.signal(other, signal.SIG_IGN)
        error = StoppedBySignal(f"stopped by {signal.Signals(number).name}")
        error.code = 128 + number
        raise error

    for number in heard:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in heard:
            signal.signal(number, signal.SIG_DFL)


def started() -> None:
    """What hears signals from here on is another's, or nothing. StoppedInTheStart where one came
    and was let go."""
    if came := _leave_the_start():
        raise StoppedInTheStart(came)


def _leave_the_start() -> str:
    """The line of a signal that came in it."""
    global _end_of_start
    end, _end_of_start = _end_of_start, None
    return end() if end is not None else ""


def in_background(run: Callable[[], object], name: str) -> threading.Thread | None:
    """`run` on a thread, which keeps no process that is told to end; where no more threads can be
    begun, here and now."""
    thread = threading.Thread(target=run, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError:
        run()
        return None
    return thread


def hear_no_more() -> None:
    """For the interpreter's teardown, in which a signal that is not ignored ends the process with a
    code of its own."""
    for number in OF_THE_JOB:
        signal.signal(number, signal.SIG_IGN)


def leave_apart(code: int, seconds: float) -> NoReturn:
    """Leave with `code`, not 0, where the others have not met this process, or no more: srun ends
    them with the first that leaves, and returns the largest of their codes, so they get some
    seconds to come here; MPICH's mpiexec is told."""

    def leave() -> NoReturn:
        end_the_others(code)
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(code)  # in the interpreter's teardown a launcher's SIGTERM would be the code

    hear(leave)
    time.sleep(seconds)
    leave()


def end_the_others(code: int) -> None:
    """Where MPI has not begun, MPICH's mpiexec does not end the ranks that wait there for one that
    leaves with a code: it is told, in the words of MPI_Abort (PMI-1)."""
    given = os.environ.get("PMI_FD", "")
    if "mpi4py.MPI" in sys.modules or not given.isdecimal() or by_srun():
        return
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        sys.stdout.flush()
        with socket.socket(fileno=int(given)) as launcher:
            launcher.settimeout(10)
            time.sleep(0.5)  # mpiexec may drop what was said in the moment of the end
            launcher.sendall(f"cmd=abort exitcode={code}\n".encode())
            launcher.recv(1)  # until it ends this one, too
    except (OSError, OverflowError):  # of another launcher, or not handed on to this process
        pass


@contextlib.contextmanager
def no_longer_than(seconds: float, code: int, line: str) -> Iterator[None]:
    """For what waits in C, where Python hears nothing: if it takes longer, `line` is said, and the
    ranks that were started together end with `code`."""
    parent, (ends, held) = os.getpid(), os.pipe()
    child = os.fork()
    if not child:
        try:
            begin_command(parent)
            os.close(held)
            if not select.select([ends], [], [], seconds)[0]:
                os.write(2, f"{line}\n".encode())
                end_the_others(code)
                os.kill(parent, signal.SIGKILL)  # of a launcher that was not told
        finally:
            os._exit(code)
    try:
        yield
    finally:
        os.close(held)
        os.close(ends)
        os.waitpid(child, 0)


def go_on_within(seconds: float) -> None:
    """Where this process is stopped, it goes on after so long, once: the kernel sees to it, since
    nobody else may be left who could. One that runs does not notice."""
    try:
        library = ctypes.CDLL("librt.so.1")  # glibc's, of any age
    except OSError:
        return
    event = (ctypes.c_int * 16)(0, 0, signal.SIGCONT)  # sigevent: 8 bytes of value, the signal
    after = (ctypes.c_long * 4)(0, 0, math.ceil(seconds))  # itimerspec: not again; when
    timer = ctypes.c_void_p()
    if library.timer_create(time.CLOCK_MONOTONIC, event, ctypes.byref(timer)) == 0:
        library.timer_settime(timer, 0, after, None)


def hand_on(number: int, pid: int, whole_group: bool = False) -> None:
    """The signal, to a child that was not waited for, or to the group that it leads. One that is
    stopped hears it, too."""
    send = os.killpg if whole_group else os.kill
    with contextlib.suppress(ProcessLookupError):
        send(pid, number)
        send(pid, signal.SIGCONT)


def end_with(parent: int, number: int) -> None:
    """From here on the end of `parent`, and of the thread of it that made this process, is the
    signal `number` to it; if that has ended already, it ends here. Linux alone."""
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(128 + number)  # a handler of the parent's may stand here still


def begin_command(parent: int) -> None:
    """In the child that is to become a command: it hears signals, whatever `parent` ignores, and
    SIGTERM at its end."""
    for number in OF_THE_JOB:
        signal.signal(number, signal.SIG_DFL)
    end_with(parent, signal.SIGTERM)
