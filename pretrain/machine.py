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
