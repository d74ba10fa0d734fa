"""What psutil knows of the machine: who started this process, and the network. Its only import."""

from __future__ import annotations

import contextlib
import os

import psutil


def launchers() -> list[int]:
    """This process's parent; and the parent of that where both are of `deepspeed`, whose runner
    starts a launcher that does not hear of its end. Others' grandparents may be a shell."""
    with contextlib.suppress(psutil.Error, OSError):
        parent = psutil.Process().parent()
        found = [parent, parent and parent.parent()]
        if all(p is not None and "deepspeed" in " ".join(p.cmdline()) for p in found):
            return [p.pid for p in found]
    return [os.getppid()]


def left_by_deepspeed() -> bool:
    """Whether its launcher ended while this process started, or its runner while the launcher did.

    Whoever takes a process over is of another session; where it is not, as the first process of
    many a container, this is not seen."""
    if "CROSS_RANK" not in os.environ:  # of deepspeed.launcher.launch
        return False
    with contextlib.suppress(psutil.Error, OSError):
        me = psutil.Process()
        return any(_taken_over(process) for process in (me, me.parent()) if process is not None)
    return False


def _taken_over(process: psutil.Process) -> bool:
    above, led = process.ppid(), os.getpgid(process.pid) == process.pid  # begun as a job of its own
    return above > 0 and not led and os.getsid(above) != os.getsid(process.pid)


class Launchers:
    """Those of `launchers()` that this process began under."""

    def __init__(self, began_under: list[int]) -> None:
        self._began_under, self._missed = began_under, False

    def gone(self) -> bool:
        """Whether two looks in a row, this and the one before, found others: one may fail."""
        before, self._missed = (
            self._missed,
            launchers()[: len(self._began_under)] != self._began_under,
        )
        return before and self._missed


def interface_of(address: str | None) -> str | None:
    """The network interface with this address; None if there is none."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(a.address.partition("%")[0] == address for a in addresses):
            return name
    return None
