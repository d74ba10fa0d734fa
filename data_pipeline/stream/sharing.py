"""One planner a node: the window that one process has planned the others read.

A plan is a function of its place alone, so sharing it saves work and decides nothing: a process
that finds no plan, or waits too long for one, makes its own.  The slots are memory without a name
(memfd), which the ranks of a node reach through the first of them; a process that ends in any way
leaves no file and no lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import pickle
import secrets
import struct
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from io import FileIO
from typing import Any

from core.errors import UserError
from data_pipeline.stream.plan import Planner, WindowPlan

AHEAD = 4  # windows planned before they are asked for, each by another process
_SLOTS = AHEAD + 2
PATIENCE = 60.0  # seconds for a plan that another process makes: it may be stopped
# What a slot holds: the window's number since epoch 0, the plan's hash, sha256 of the pickled plan.
_HEADER = struct.Struct("<q32s32s")

# (all ranks) A small picklable value of every rank, in rank order, on every rank.
Gather = Callable[[Any], list[Any]]


class PlanSlots:
    """(all ranks, with `gather`) Memory for a few plans, which all ranks of this node share; this
    process's own where it cannot reach another's, none without memfd. Closes with the object."""

    def __init__(self, gather: Gather | None) -> None:
        token = secrets.token_hex(16)
        self._handles: list[int] = []
        weakref.finalize(self, _close, self._handles)
        with contextlib.suppress(OSError, AttributeError):
            for _ in range(_SLOTS):
                self._handles.append(os.memfd_create(f"plans-{token}"))
        offers = gather((os.getpid(), token, self._handles[:])) if gather is not None else []
        for pid, name, handles in offers:
            theirs = _reopened(pid, name, handles) if name != token else []
            if theirs:
                _close(self._handles)
                self._handles[:] = theirs
            if theirs or name == token:
                return

    @contextlib.contextmanager
    def open(self, number: int) -> Iterator[FileIO | None]:
        """The slot of a window, opened anew: a lock belongs to an open file. None: out of reach."""
        file = None
        if self._handles:
            with contextlib.suppress(OSError):
                path = f"/proc/self/fd/{self._handles[number % len(self._handles)]}"
                file = FileIO(path, "r+")
        with file or contextlib.nullcontext():
            try:
                yield file
            finally:
                if file is not None:
                    fcntl.flock(file, fcntl.LOCK_UN)  # a process forked meanwhile has a share


def _reopened(pid: int, token: str, handles: Sequence[int]) -> list[int]:
    """The files behind another process's descriptors; none where it is not of this node."""
    found: list[int] = []
    try:
        for handle in handles:
            path = f"/proc/{pid}/fd/{handle}"
            if token not in os.readlink(path):  # another process has that number here
                raise FileNotFoundError(path)
            found.append(os.open(path, os.O_RDWR))
    except OSError:
        _close(found)
        return []
    return found


def _close(handles: Sequence[int]) -> None:
    for handle in handles:
        os.close(handle)


class SharedPlans:
    """The plans of `planner`, through slots. plan_hash: 32 characters, the same where the plans
    are."""

    def __init__(self, planner: Planner, plan_hash: str, slots: PlanSlots) -> None:
        self._planner, self._hash, self._slots = planner, plan_hash.encode(), slots

    def plan(self, epoch: int, window: int) -> WindowPlan:
        """As `planner.plan`: read, where a process of this node has planned it."""
        with self._slots.open(self._number(epoch, window)) as slot:
            if slot is not None and _lock(slot, fcntl.LOCK_SH):
                found = self._read(slot, epoch, window)
                if found is not None:
                    return found
                if _lock(slot, fcntl.LOCK_EX):
                    # Between the two locks another may have planned it.
                    return self._read(slot, epoch, window) or self._make(slot, epoch, window)
        return self._planner.plan(epoch, window)

    def plan_ahead(self, epoch: int, window: int) -> None:
        """Plans the first of AHEAD windows from this one on that nobody has planned or plans now.
        What is wrong with it, whoever asks for it will hear."""
        for _ in range(AHEAD):
            number = self._number(epoch, window)
            with self._slots.open(number) as slot, contextlib.suppress(UserError):
                if slot is None:
                    return
                if self._held(slot) < number:
                    # Before the lock: whoever needs the plan would wait for the transfer.
                    self._planner.indexes(epoch, window)
                    if _lock(slot, fcntl.LOCK_EX, wait=False) and self._held(slot) < number:
                        self._make(slot, epoch, window)
                        return
            epoch, window = self._planner.after(epoch, window)

    def _number(self, epoch: int, window: int) -> int:
        return epoch * self._planner.windows + window

    def _held(self, slot: FileIO) -> int:
        """The number of the window in the slot, -1: none. A later one stays there."""
        slot.seek(0)
        header = slot.read(_HEADER.size)
        if len(header) < _HEADER.size:
            return -1
        number, plan_hash, _ = _HEADER.unpack(header)
        return number if plan_hash == self._hash else -1

    def _read(self, slot: FileIO, epoch: int, window: int) -> WindowPlan | None:
        if self._held(slot) != self._number(epoch, window):
            return None
        slot.seek(0)
        header, body = slot.read(_HEADER.size), slot.read()
        whole = hashlib.sha256(body).digest() == _HEADER.unpack(header)[2]
        return pickle.loads(body) if whole else None

    def _make(self, slot: FileIO, epoch: int, window: int) -> WindowPlan:
        plan, number = self._planner.plan(epoch, window), self._number(epoch, window)
        if self._held(slot) < number:
            body = pickle.dumps(plan, protocol=5)
            # Where there is no memory for it, or the number is out of all bounds, it is not shared.
            with contextlib.suppress(OSError, struct.error):
                slot.truncate(0)
                slot.seek(_HEADER.size)
                if slot.write(body) < len(body):  # a limit of memory
                    slot.truncate(0)
                    return plan
                # Last: a slot whose writer died before holds nothing.
                slot.seek(0)
                slot.write(_HEADER.pack(number, self._hash, hashlib.sha256(body).digest()))
        return plan


def _lock(slot: FileIO, kind: int, *, wait: bool = True) -> bool:
    """Whether the lock was had, within PATIENCE or at once."""
    end = time.monotonic() + (PATIENCE if wait else 0)
    while True:
        try:
            fcntl.flock(slot, kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= end:
                return False
            time.sleep(0.01)
