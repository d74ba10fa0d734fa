"""Ports for tests, which another process takes only some time after they are chosen."""

from __future__ import annotations

import contextlib
import itertools
import socket
from collections.abc import Iterator

# Below those that Linux gives to outgoing connections, which are not asked for.
_FIRST, _LAST, _BLOCK = 17000, 29000, 1000
_claims: list[socket.socket] = []


def free_port(neighbours: int = 1) -> int:
    """The first of so many ports in a row that are free and that no other test process is given."""
    if not _claims:
        _claims.append(_claim())
    first = _FIRST + _BLOCK * int(_claims[0].getsockname().rsplit(b"-", 1)[1])
    for _ in range(_BLOCK):
        port = first + next(_turns) % (_BLOCK - neighbours + 1)
        if all(map(_free, range(port, port + neighbours))):
            for _ in range(neighbours - 1):
                next(_turns)
            return port
    raise AssertionError("no free port")


_turns: Iterator[int] = itertools.count()


def _claim() -> socket.socket:
    """This process's block of ports: an abstract name, which ends with the process."""
    for number in range((_LAST - _FIRST) // _BLOCK):
        claim = socket.socket(socket.AF_UNIX)
        with contextlib.suppress(OSError):
            claim.bind(f"\0tests-ports-{number}")
            return claim
        claim.close()
    raise AssertionError("too many test processes at once")


def _free(port: int) -> bool:
    with socket.socket() as door:
        try:
            door.bind(("0.0.0.0", port))
        except OSError:
            return False
    return True
