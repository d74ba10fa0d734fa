"""The command of the container: `entry.py COMMAND...`.

A launcher passes few signals on, and when the command ends the container kills what is left. So a
signal goes to all that the command has begun, and what it leaves has time to end: everything, where
a signal ended it, and ranks, which write their checkpoint, in any case. The command's exit code is
returned, 128 + N for a signal.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
_RANKS = (b"RANK=", b"PMI_RANK=", b"SLURM_PROCID=")  # in the environment that a launcher gives
_ADOPT = 36  # prctl(2): PR_SET_CHILD_SUBREAPER, also where another program is process 1


def main(command: list[str]) -> int:
    if not command:
        print("error: entry.py COMMAND...: no command is given", file=sys.stderr)
        return 2
    ctypes.CDLL(None).prctl(_ADOPT, 1, 0, 0, 0)
    told = False

    def pass_on(number: int, _: object) -> None:
        nonlocal told
        told = True
        for pid in _begun():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)

    for number in _PASSED_ON:
        signal.signal(number, pass_on)
    try:
        child = subprocess.Popen(command, process_group=0, preexec_fn=_take_the_terminal)
    except OSError as error:
        print(f"error: {command[0]}: {error.strerror}", file=sys.stderr)
        return 127
    code = None
    while True:
        try:
            ended, status = os.waitpid(-1, 0 if code is None or told else os.WNOHANG)
        except ChildProcessError:
            return code or 0
        if ended == child.pid:
            left = os.waitstatus_to_exitcode(status)
            code = 128 - left if left < 0 else left
            told = told or left < 0
        elif ended == 0:
            if not any(map(_is_rank, _begun())):
                return code or 0
            time.sleep(0.2)


def _take_the_terminal() -> None:
    """In the child: Ctrl-C is the command's alone, and a SIGINT that comes here is passed on."""
    if os.isatty(0):
        kept = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        with contextlib.suppress(OSError):
            os.tcsetpgrp(0, os.getpid())
        signal.signal(signal.SIGTTOU, kept)


def _begun() -> list[int]:
    """The processes below this one."""
    parents: dict[int, int] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            # Behind the name, which may hold anything: ") STATE PARENT ...".
            fields = Path("/proc", name, "stat").read_bytes().rpartition(b")")[2].split()
            parents[int(name)] = int(fields[1])
    found, at = [os.getpid()], 0
    while at < len(found):
        found += [pid for pid, parent in parents.items() if parent == found[at]]
        at += 1
    return found[1:]


def _is_rank(pid: int) -> bool:
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        return any(word.startswith(_RANKS) for word in words)
    return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
