"""Messages made ahead of time, in order: worker i of N forked processes makes number i, i + N, ...

Each worker has a pipe of its own, and what it makes is a function of the number alone, so nothing
is handed out, shared or locked. A worker that dies leaves the end of its pipe; a rank that dies
takes its workers along.
"""

from __future__ import annotations

import gc
import itertools
import mmap
import os
import signal
import struct
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import torch

from core.errors import TryAgain, limit_error, tell
from core.processes import OF_THE_JOB, end_with

# A small record and the bytes of a buffer.
Message = tuple[bytes, np.ndarray]

_SIZES = struct.Struct("<QQ")  # of a message's two parts


class ShardsInHand:
    """Which shard each worker read from last, seen by all processes forked after."""

    def __init__(self, names: Sequence[str], workers: int) -> None:
        self._names = names
        self._numbers = {name: number for number, name in enumerate(names)}
        size = 8 * max(workers, 1)
        self._shared = np.frombuffer(mmap.mmap(-1, size), np.int64)
        self._shared[:] = -1

    def note(self, worker: int, name: str) -> None:
        self._shared[worker] = self._numbers[name]

    def of(self, worker: int) -> str:
        number = int(self._shared[worker])
        return self._names[number] if number >= 0 else "its first shard"


class WorkerDied(Exception):
    """The pipe of `worker` has ended; the text says how its process did."""

    def __init__(self, worker: int, how: str) -> None:
        super().__init__(how)
        self.worker = worker


@dataclass
class _Worker:
    pid: int
    pipe: int  # its reading end
    status: int | None = None  # of waitpid


class WorkerPool:
    """`count` processes, forked at once; `make(number, worker)` runs in them without end.

    Fork from a thread that lasts as long as the pool: a worker is killed with the thread that
    made it. TryAgain where none can be made.
    """

    def __init__(self, make: Callable[[int, int], Message], count: int) -> None:
        self._make, self._count = make, count
        self._workers: list[_Worker] = []
        for index in range(count):
            self._workers.append(self._fork(index))

    @property
    def pids(self) -> list[int]:
        return [worker.pid for worker in self._workers]

    def receive(
        self, number: int, new_buffer: Callable[[int], torch.Tensor]
    ) -> tuple[bytes, torch.Tensor]:
        """The message of `number`; to be asked for in ascending order. `new_buffer(n)`: uint8 [n].
        WorkerDied if it will never come."""
        index = number % self._count
        worker = self._workers[index]
        try:
            record_size, buffer_size = _SIZES.unpack(_read(worker.pipe, bytearray(_SIZES.size)))
            record = _read(worker.pipe, bytearray(record_size))
            buffer = new_buffer(buffer_size)
            _read(worker.pipe, buffer.numpy())
        except EOFError:
            raise WorkerDied(index, self._ended(worker)) from None
        return bytes(record), buffer

    def kill(self) -> None:
        """Ends all workers, stopped ones too; they hold nothing that could be lost. A call of
        `receive` under way ends with WorkerDied."""
        for worker in self._workers:
            if worker.status is None:
                os.kill(worker.pid, signal.SIGKILL)

    def close(self) -> None:
        """After `kill`, when nobody receives any more: leaves neither zombies nor descriptors."""
        for worker in self._workers:
            self._ended(worker)
            os.close(worker.pipe)
        self._workers = []

    def _ended(self, worker: _Worker) -> str:
        """How a worker ended; waits for it."""
        if worker.status is None:
            try:
                worker.status = os.waitpid(worker.pid, 0)[1]
            except ChildProcessError:
                return "unknown how"
        code = os.waitstatus_to_exitcode(worker.status)
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"

    def _fork(self, index: int) -> _Worker:
        read_end, write_end = os.pipe()
        parent = os.getpid()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # or the worker would write what waits there a second time
        with warnings.catch_warnings():
            # Python 3.12 warns of threads; the worker uses none of theirs.
            warnings.simplefilter("ignore", DeprecationWarning)
            try:
                pid = os.fork()
            except OSError as error:  # of memory, or of processes in a container
                raise TryAgain(f"data.workers: no process can be made: {error.strerror}") from None
        if pid == 0:
            self._child(index, parent, write_end, [read_end, *(w.pipe for w in self._workers)])
        # A later fork must not inherit it: then the end of this worker would not be the pipe's.
        os.close(write_end)
        return _Worker(pid, read_end)

    def _child(self, index: int, parent: int, pipe: int, others: list[int]) -> NoReturn:
        code = 1
        try:
            _tie_to(parent)
            # Nothing that was there before is ever collected here: pages stay shared, and no
            # destructor of the trainer's runs twice.
            gc.freeze()
            for handle in others:
                os.close(handle)
            for number in itertools.count(index, self._count):
                record, buffer = self._make(number, index)
                _write(pipe, _SIZES.pack(len(record), buffer.nbytes))
                _write(pipe, record)
                _write(pipe, buffer)
        except BrokenPipeError:
            code = 0  # nobody wants more
        except BaseException as error:
            if (out := limit_error(error)) is not None:
                tell(out)
            else:
                traceback.print_exc()
        finally:
            os._exit(code)


def _tie_to(parent: int) -> None:
    # Also where it is stopped or waits for room in its pipe: what stays alive keeps the launcher's
    # output open and the GPU's memory taken.
    end_with(parent, signal.SIGKILL)
    # Some come twice, but they are the trainer's to answer: it still needs batches for the step in
    # hand, and ends its workers.
    for number in OF_THE_JOB:
        signal.signal(number, signal.SIG_IGN)


def _read(pipe: int, into: bytearray | np.ndarray) -> bytearray | np.ndarray:
    view = memoryview(into)
    while len(view):
        count = os.readv(pipe, [view])
        if not count:
            raise EOFError
        view = view[count:]
    return into


def _write(pipe: int, data: bytes | np.ndarray) -> None:
    view = memoryview(data)
    while len(view):
        view = view[os.write(pipe, view) :]
