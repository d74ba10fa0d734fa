"""The first process of the container: `entry.py COMMAND...`.

A launcher passes few signals on, the first process of a container hears none that it does not ask
for, and where it ends, all others are killed. So a signal goes to every process here, and a command
that a signal ended is followed by what it left, ranks that write their checkpoint. Its exit code is
returned, 128 + N for a signal.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


def main(command: list[str]) -> int:
    if os.getpid() != 1:  # `kill -1` would reach all that the user runs
        os.execvp(command[0], command)
    told = False

    def pass_on(number: int, _: object) -> None:
        nonlocal told
        told = True
        # Ctrl-C reaches all that a terminal holds by itself.
        if number != signal.SIGINT or not os.isatty(0):
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, number)

    for number in _PASSED_ON:
        signal.signal(number, pass_on)
    try:
        child = subprocess.Popen(command)
    except OSError as error:
        print(f"error: {command[0]}: {error.strerror}", file=sys.stderr)
        return 127
    code = None
    while True:
        try:
            ended, status = os.wait()
        except ChildProcessError:
            return code or 0
        if ended == child.pid:
            left = os.waitstatus_to_exitcode(status)
            code = 128 - left if left < 0 else left
            if not told and left >= 0:
                return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
