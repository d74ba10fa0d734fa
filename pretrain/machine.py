"""What psutil knows of the machine: who started this process, and the network. Its only import."""

from __future__ import annotations

import contextlib
import os

import psutil


def launchers() -> list[int]:
    """This process's parent; and the parent of that where both are of `deepspeed`, whose runner
    starts a launcher that does not hear of its end. Others' grandparents may be a shell."""
    with contextlib.suppress(psutil.Error):
        found = psutil.Process().parents()[:2]
        if len(found) == 2 and all("deepspeed" in " ".join(p.cmdline()) for p in found):
            return [p.pid for p in found]
    return [os.getppid()]


def interface_of(address: str | None) -> str | None:
    """The network interface with this address; None if there is none."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(a.address.partition("%")[0] == address for a in addresses):
            return name
    return None
