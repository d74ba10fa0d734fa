"""The processes of a job: what rank 0 finds out for all, and work dealt to the next free rank."""

from __future__ import annotations

import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from core.console import notice
from core.errors import TryAgain, UserError

T = TypeVar("T")
J = TypeVar("J")  # a job, never None
R = TypeVar("R")  # its result
_ASK, _ANSWER = 1, 2
SILENCE = 300.0  # seconds after which a rank without a word is named, again and again


class Stopped(Exception):
    """Another rank has said what is wrong; this one only leaves, with the same exit code: mpiexec
    gives all of them joined bit by bit."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class Ranks:
    """One process alone. Also the interface of `MpiRanks`."""

    rank = 0
    size = 1

    def first(self, compute: Callable[[], T]) -> T:
        """`compute()` on rank 0; its result on all. A UserError there ends all ranks."""
        return compute()

    def only_first(self, compute: Callable[[], T]) -> T | None:
        """As `first`, for what is too large to be sent: None on the other ranks."""
        return compute()

    def deal(self, jobs: Sequence[J], work: Callable[[J], R], done: Callable[[R], None]) -> None:
        """Every job is given to one rank, the next free one; `done(result)` is called on rank 0.

        `jobs` counts on rank 0 only.
        """
        for job in jobs:
            done(work(job))


class MpiRanks(Ranks):
    """The ranks of an MPI job. Rank 0 works as well; a thread of it deals."""

    def __init__(self, mpi: ModuleType) -> None:
        self._mpi = mpi
        self._comm = mpi.COMM_WORLD.Dup()
        self.rank, self.size = self._comm.Get_rank(), self._comm.Get_size()
        self._meet()
        # The ranks of a node hold MPICH's memory by now; its name would outlive a killed one.
        maps = Path("/proc/self/maps").read_text() if sys.platform == "linux" else ""
        for name in set(re.findall(r"/dev/shm/mpich_shm_\w+$", maps, re.MULTILINE)):
            Path(name).unlink(missing_ok=True)

    def _meet(self) -> None:
        # MPI waits by spinning; a rank that waits for minutes should leave its core to others.
        request = self._comm.Ibarrier()
        while not request.Test():
            time.sleep(0.002)

    def first(self, compute: Callable[[], T]) -> T:
        value = self.only_first(compute)
        return self._comm.bcast(value, root=0)

    def only_first(self, compute: Callable[[], T]) -> T | None:
        value, error = None, None
        if self.rank == 0:
            try:
                value = compute()
            except UserError as caught:
                error = caught
        self._agree(error)
        return value

    def _agree(self, error: UserError | None) -> None:
        """All go on, or none where rank 0 has an error."""
        self._meet()
        code = self._comm.bcast(error and error.code, root=0)
        if error is not None:
            raise error
        if code is not None:
            raise Stopped(code)

    def deal(self, jobs: Sequence[J], work: Callable[[J], R], done: Callable[[R], None]) -> None:
        # A rank that finds no job left may be long done when the last job of another fails.
        error = None
        if self.rank == 0:
            error = self._deal_and_work(jobs, work, done)
        else:
            self._ask_and_work(work)
        self._agree(error)

    def _ask_and_work(self, work: Callable[[J], R]) -> None:
        outcome: tuple[str, R | UserError | None] = ("ready", None)
        while True:
            self._comm.send(outcome, dest=0, tag=_ASK)
            while not self._comm.Iprobe(source=0, tag=_ANSWER):
                time.sleep(0.0005)
            job = self._comm.recv(source=0, tag=_ANSWER)
            if job is None:
                return
            try:
                outcome = ("done", work(job))
            except UserError as error:
                # Of the two kinds that differ in their exit code; others may not be sent.
                kind = TryAgain if isinstance(error, TryAgain) else UserError
                outcome = ("failed", kind(str(error)))

    def _name(self, silent: Sequence[int]) -> None:
        if silent:
            who = ", ".join(map(str, silent[:8])) + (", ..." if silent[8:] else "")
            notice(
                f"waiting for {len(silent)} of {self.size} ranks ({who}): no word for {SILENCE:g} "
                "s; at a large unit, or stopped"
            )

    def _deal_and_work(
        self, jobs: Sequence[J], work: Callable[[J], R], done: Callable[[R], None]
    ) -> UserError | None:
        """The first job's error, after which no other is begun."""
        lock = threading.Lock()
        waiting = iter(jobs)
        failures: list[UserError] = []

        def take() -> J | None:
            with lock:
                return None if failures else next(waiting, None)

        def finish(result: R) -> None:
            with lock:
                done(result)

        def serve() -> None:
            heard = dict.fromkeys(range(1, self.size), time.monotonic())
            named = time.monotonic()
            status = self._mpi.Status()
            while heard:
                if not self._comm.Iprobe(tag=_ASK, status=status):
                    time.sleep(0.001)
                    now = time.monotonic()
                    if now - named > SILENCE:
                        named = now
                        self._name([rank for rank, at in heard.items() if now - at > SILENCE])
                    continue
                asker = status.Get_source()
                word, value = self._comm.recv(source=asker, tag=_ASK)
                heard[asker] = time.monotonic()
                if word == "done":
                    finish(value)
                elif word == "failed":
                    failures.append(value)
                job = take()
                if job is None:
                    del heard[asker]
                self._comm.send(job, dest=asker, tag=_ANSWER)

        def serve_or_abort() -> None:
            try:
                serve()
            except BaseException:
                abort(self._comm, 1, traceback.format_exc().rstrip())

        dealer = threading.Thread(target=serve_or_abort, daemon=True)
        dealer.start()
        while (job := take()) is not None:
            try:
                finish(work(job))
            except UserError as error:
                failures.append(error)
        while dealer.is_alive():
            dealer.join(0.05)
        return failures[0] if failures else None


def abort(comm: Any, code: int, text: str) -> None:
    """Ends all ranks, which might wait for this one for ever, and says why."""
    notice(text, sys.stderr)
    time.sleep(0.5)  # mpiexec may drop what was said in the moment of the end
    comm.Abort(code)
