"""A process whose end is that of whoever started it, and what a launcher says of it."""

from __future__ import annotations

import ctypes
import os
import re
import signal

from core.errors import UserError, short

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
_prctl = getattr(ctypes.CDLL(None), "prctl", None)  # found before a fork, which may hold its locks


def stated(name: str, what: str = "number of processes") -> int | None:
    """By a launcher's variable; None where it is not there or empty. UserError for no number."""
    value = os.environ.get(name, "")
    if value and not re.fullmatch("[0-9]{1,9}", value):
        raise UserError(f"{name}={short(value)}: is no {what}")
    return int(value) if value else None


def started_together() -> dict[str, int]:
    """What each variable of srun and of MPI's launchers says: how many processes were started."""
    return {name: size for name in _SIZES if (size := stated(name)) is not None}


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
