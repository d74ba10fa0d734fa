"""What psutil knows of the machine: who started this process, and the network. Its only import."""

from __future__ import annotations

import contextlib
import os

import psutil

_LAUNCH = "deepspeed.launcher.launch"
_TORCHRUN = {"torchrun", "torch.distributed.run", "torch.distributed.launch"}
# Of MPI and Slurm, of which the ranks' parents are the last that is to be looked at.
_OTHERS = set("mpiexec mpirun mpiexec.hydra hydra_pmi_proxy orted prted prterun slurmstepd".split())


def launchers() -> list[int]:
    """The processes above this one, from its parent to its launcher: between the two may be a
    script that waits for it. And the runner of deepspeed, whose launch.py does not hear of its end.
    What stands above others may be a shell."""
    with contextlib.suppress(psutil.Error, OSError):
        above = _above()
        for at, process in enumerate(above):
            words = process.cmdline()
            if process.name() in _OTHERS:
                break
            if _LAUNCH in words or _TORCHRUN & set(map(os.path.basename, words)):
                runner = [p for p in above[at + 1 : at + 2] if _has_begun(p, process)]
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
