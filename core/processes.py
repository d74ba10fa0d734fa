"""A process whose end is that of whoever started it."""

from __future__ import annotations

import ctypes
import os

_PR_SET_PDEATHSIG = 1


def end_with(parent: int, number: int) -> None:
    """From here on the end of `parent`, and of the thread of it that made this process, is the
    signal `number` to it; so it is if that has ended already. Linux alone."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "prctl"):
        libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)
