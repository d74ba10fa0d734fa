"""Ports for tests, which another process takes only some time after they are chosen."""

from __future__ import annotations

import contextlib
import functools
import itertools
import socket

# Below those that Linux gives to outgoing connections, which are not asked for.
_FIRST, _LAST, _BLOCK = 17000, 29000, 1000
_turns = itertools.count()


def free_port(neighbours: int = 1) -> int:
    """The first of so many ports in a row that are free and that no other test process is given."""
    for _ in range(_BLOCK):
        port = _own_block() + next(_turns) % (_BLOCK - neighbours + 1)
        if all(map(_free, range(port, port + neighbours))):
            for _ in range(neighbours - 1):
                next(_turns)
            return port
    raise AssertionError("no free port")


@functools.cache
def _own_block() -> int:
    """The first port of this process's block, which it holds by an abstract name to its end."""
    for first in range(_FIRST, _LAST, _BLOCK):
        with socket.socket(socket.AF_UNIX) as claim, contextlib.suppress(OSError):
            claim.bind(f"\0tests-ports-{first}")
            claim.detach()
            return first
    raise AssertionError("too many test processes at once")


def _free(port: int) -> bool:
    with socket.socket() as door:
        try:
            door.bind(("0.0.0.0", port))
        except OSError:
            return False
    return True
