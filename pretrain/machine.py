"""What psutil knows of the machine: who started this process, and the network. Its only import."""

from __future__ import annotations

import contextlib
import os

import psutil

# What deepspeed's launch.py or torchrun sets for a rank, and what tells it from another run's.
_SET, _OF_THE_RUN = ("CROSS_RANK", "TORCHELASTIC_RUN_ID"), "MASTER_PORT"
_LAUNCH = "deepspeed.launcher.launch"


def launchers() -> list[int]:
    """The processes above this one, from its parent to its launcher: between the two may be a
    script that waits for it. And the runner of deepspeed, whose launch.py does not hear of its end.
    What stands above others may be a shell."""
    with contextlib.suppress(psutil.Error, OSError):
        above, mine = _above(), psutil.Process().environ()
        names = [name for name in _SET if name in mine]
        if names and _OF_THE_RUN in mine:
            names.append(_OF_THE_RUN)
            for at, process in enumerate(above):
                theirs = process.environ()
                if any(theirs.get(name) != mine[name] for name in names):
                    runner = above[at + 1 : at + 2]
                    if not (runner and _has_begun(runner[0], process)):
                        runner = []
                    return [p.pid for p in (*above[: at + 1], *runner)]
    return [os.getppid()]


def _has_begun(runner: psutil.Process, launch: psutil.Process) -> bool:
    """By the command that it hands on, or, of a shell that ssh was given, has in one word."""
    words, handed_on = runner.cmdline(), launch.cmdline()
    return _LAUNCH in handed_on and (words[-1:] == handed_on[-1:] or _LAUNCH in " ".join(words))


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


def _above() -> list[psutil.Process]:
    """All processes above this one. Those of another container cannot be known, nor any where
    /proc is another's."""
    above = psutil.Process().parents()
    return above if above and above[0].pid == os.getppid() else []


def _pids_above() -> list[int]:
    with contextlib.suppress(psutil.Error, OSError):
        if above := [process.pid for process in _above()]:
            return above
    return [os.getppid()]


class Launchers:
    """Those of `launchers()` that this process began under."""

    def __init__(self, began_under: list[int]) -> None:
        self._began_under, self._missed = began_under, False

    def gone(self) -> bool:
        """Whether two looks in a row, this and the one before, found others: one may fail."""
        before, found = self._missed, _pids_above()[: len(self._began_under)]
        self._missed = found != self._began_under
        return before and self._missed


def interface_of(address: str | None) -> str | None:
    """The network interface with this address; None if there is none."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(a.address.partition("%")[0] == address for a in addresses):
            return name
    return None
