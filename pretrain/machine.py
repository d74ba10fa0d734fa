"""What psutil knows of the machine: who started this process, and the network. Its only import."""

from __future__ import annotations

import contextlib
import os

import psutil

# What deepspeed's launch.py and torchrun set for their ranks, and have not themselves.
_SET = ("CROSS_RANK", "TORCHELASTIC_RUN_ID")


def launchers() -> list[int]:
    """The processes above this one, from its parent to its launcher: between the two may be a
    script that waits for it. And the runner of deepspeed, whose launch.py does not hear of its end.
    What stands above others may be a shell."""
    with contextlib.suppress(psutil.Error, OSError):
        above = psutil.Process().parents()
        for name in (name for name in _SET if name in os.environ):
            for at, process in enumerate(above):
                if name not in process.environ():
                    next_ = above[at + 1 : at + 2] if name == "CROSS_RANK" else []
                    return [p.pid for p in (*above[: at + 1], *filter(_is_runner, next_))]
    return [os.getppid()]


def _is_runner(process: psutil.Process) -> bool:
    """By whatever name: a Python, or on another host the shell that ssh was given."""
    words = process.cmdline()
    python = os.path.basename("".join(words[:1])).startswith("python")
    return python or "deepspeed.launcher" in " ".join(words)


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


def _above() -> list[int]:
    """All processes above this one; its parent at least, which may be of another container."""
    with contextlib.suppress(psutil.Error, OSError):
        if above := [process.pid for process in psutil.Process().parents()]:
            return above
    return [os.getppid()]


class Launchers:
    """Those of `launchers()` that this process began under."""

    def __init__(self, began_under: list[int]) -> None:
        self._began_under, self._missed = began_under, False

    def gone(self) -> bool:
        """Whether two looks in a row, this and the one before, found others: one may fail."""
        before, found = self._missed, _above()[: len(self._began_under)]
        self._missed = found != self._began_under
        return before and self._missed


def interface_of(address: str | None) -> str | None:
    """The network interface with this address; None if there is none."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(a.address.partition("%")[0] == address for a in addresses):
            return name
    return None
