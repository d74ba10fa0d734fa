"""What psutil knows of the machine: who started this process, and the network. Its only import."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable

import psutil

_LAUNCH = "deepspeed.launcher.launch"
# Names of programs and modules, and of files of torch.distributed.
_TORCHRUN = {"torchrun", "accelerate", "torch.distributed.run", "torch.distributed.launch"}
_TORCHRUN_FILE = re.compile(r"(?:.*/)?torch/distributed/(?:run|launch)\.py")
_VALUED = re.compile(r"-[A-Za-z]*?[mXW]")  # options of Python with a value, the others before it
_SHELLS = set("sh bash dash ash busybox ksh zsh fish".split())
# Of MPI and Slurm, of which the ranks' parents are the last that is to be looked at.
_OTHERS = set("mpiexec mpirun mpiexec.hydra hydra_pmi_proxy orted prted prterun slurmstepd".split())


def launchers() -> list[int]:
    """The processes above this one, from its parent to its launcher: between the two may be a
    script that waits for it. And the runner of deepspeed, whose launch.py does not hear of its end.
    What stands above others may be a shell."""
    with contextlib.suppress(psutil.Error, OSError):
        above = _above()
        for at, process in enumerate(above):
            if process.name() in _OTHERS:
                break
            program, found = _program(process), above[: at + 1]
            if program == _LAUNCH:
                runner = [p for p in above[at + 1 : at + 2] if _has_begun(p, process)]
                return [p.pid for p in found + runner]
            if os.path.basename(program) in _TORCHRUN or _TORCHRUN_FILE.fullmatch(program):
                return [p.pid for p in found]
    return [os.getppid()]


def _program(process: psutil.Process) -> str:
    """The file or module that a Python runs; of another program but a shell its first argument."""
    runs, *rest = process.cmdline() or [""]
    if os.path.basename(runs).lstrip("-") in _SHELLS:
        return ""
    words = iter(rest)
    for word in words:
        if not (option := _VALUED.match(word)):
            if word.startswith("-"):
                continue
            return word
        value = word[option.end() :] or next(words, "")
        if option[0].endswith("m"):
            return value
    return ""


def _has_begun(runner: psutil.Process, launch: psutil.Process) -> bool:
    """By the command that it hands on, or, of a shell that ssh was given, has in one word."""
    words = runner.cmdline()
    return words[-1:] == launch.cmdline()[-1:] or _LAUNCH in " ".join(words)


def left_by_deepspeed() -> bool:
    """Whether its launcher ended while this process started, or its runner while the launcher did.

    Whoever takes a process over is of another session; where it is not, as the first process of
    many a container, this is not seen."""
    if "CROSS_RANK" not in os.environ:  # of deepspeed.launcher.launch
        return False
    with contextlib.suppress(psutil.Error, OSError):
        for process in (psutil.Process(), *_above()):
            launch = _program(process) == _LAUNCH
            # A shell that ends lets its jobs go on. Below launch.py `timeout` begins one too.
            if _taken_over(process, os.getpgid if launch else os.getsid):
                return True
            if launch or "CROSS_RANK" not in process.environ():
                break  # what stands below may be a script that waits for this one
    return False


def _taken_over(process: psutil.Process, leader: Callable[[int], int]) -> bool:
    """One that began a job, or a session, of its own, as `leader` tells, is not."""
    above, pid = process.ppid(), process.pid
    return above > 0 and leader(pid) != pid and os.getsid(above) != os.getsid(pid)


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
