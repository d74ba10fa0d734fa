"""Batches made ahead of the trainer, by a thread of this process or by worker processes."""

from __future__ import annotations

import contextlib
import itertools
import math
import pickle
import queue
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from core.errors import TryAgain, UserError
from data_pipeline.stream.batch import new_buffer
from data_pipeline.stream.builder import BatchBuilder, PrefetchedBatch
from data_pipeline.stream.plan import StreamConfig
from data_pipeline.stream.workers import Message, ShardsInHand, WorkerDied, WorkerPool


class NotWaitedFor(TryAgain):
    """The next batch is not there, and its taker will not wait for it any longer."""


@dataclass(frozen=True)
class Failure:
    """What went wrong where the batch was made: raised as `error` where it is taken."""

    error: type[Exception]
    text: str

    @classmethod
    def of(cls, error: Exception, worker: int, shard: str) -> Failure:
        if isinstance(error, UserError):
            return cls(type(error), f"data worker {worker}: {error}")
        where = f"unexpected error:\ndata worker {worker} at {shard}"
        return cls(RuntimeError, f"{where}: {traceback.format_exc()}")


class BatchPrefetcher:
    """The batches of `builder` in order. pin_memory: they lie in page-locked memory. Workers are
    forked at once, and end with the thread that calls this: the trainer's main one."""

    def __init__(
        self,
        builder: BatchBuilder,
        shard_names: Sequence[str],
        data: StreamConfig,
        *,
        pin_memory: bool,
    ) -> None:
        workers, self._timeout = data.workers, data.worker_timeout
        self._builder, self._pin_memory = builder, pin_memory
        self._in_hand = ShardsInHand(shard_names, workers)
        self._pool = WorkerPool(self._message, workers) if workers else None
        if self._pool is not None:
            builder.release()  # the workers have their own hold on the first window
        ready = data.prefetch_batches * max(workers, 1)
        self._queue: queue.Queue[PrefetchedBatch | Failure] = queue.Queue(ready)
        self._taken = 0
        self._stopped = threading.Event()
        on_gpu = self._pin_memory and torch.cuda.is_available()
        self._device = torch.cuda.current_device() if on_gpu else None
        self._thread = threading.Thread(target=self._run, daemon=True, name="stream")
        self._thread.start()

    @property
    def workers(self) -> list[tuple[int, str]]:
        """(pid, the shard it read from last) of each worker process."""
        pids = self._pool.pids if self._pool is not None else []
        return [(pid, self._in_hand.of(number)) for number, pid in enumerate(pids)]

    def take(self, gives_up: Callable[[], bool] = lambda: False) -> PrefetchedBatch:
        """The next batch. UserError names a damaged shard; TryAgain a worker that died or gave
        nothing for `timeout` seconds, with the shard in hand; RuntimeError whatever else it met.
        `gives_up` is asked now and then in a wait, which it may end with NotWaitedFor."""
        # In slices, each of which counts once however long it was: a job may be suspended in one.
        slices = max(10, math.ceil(self._timeout))
        # Workers take turns, so the one whose turn it is is late.
        worker = self._taken % len(self._pool.pids) if self._pool is not None else 0
        for _ in range(slices):
            with contextlib.suppress(queue.Empty):
                found = self._queue.get(timeout=self._timeout / slices)
                break
            if gives_up():
                raise NotWaitedFor(f"data worker {worker} is at {self._in_hand.of(worker)}")
        else:
            raise TryAgain(
                f"data worker {worker} gave no batch in {self._timeout:g} s at "
                f"{self._in_hand.of(worker)}"
            )
        if isinstance(found, Failure):
            raise found.error(found.text)
        self._taken += 1
        return found

    def close(self) -> None:
        """Ends workers and thread; a thread without workers at the latest with what it is making,
        which is not waited for."""
        self._stopped.set()
        if self._pool is not None:
            self._pool.kill()
        for _ in range(100):
            while not self._queue.empty():
                self._queue.get_nowait()
            self._thread.join(0.01)
            if not self._thread.is_alive():
                break
        if self._pool is not None:
            self._pool.close()

    def _run(self) -> None:
        if self._device is not None:  # a new thread's is GPU 0, and page-locked memory asks it
            torch.cuda.set_device(self._device)
        make = self._make if self._pool is None else self._receive
        for number in itertools.count():
            try:
                made = make(number)
            except Exception as error:
                made = Failure.of(error, 0, self._in_hand.of(0))
            if not self._stopped.is_set():
                self._queue.put(made)
            if self._stopped.is_set() or isinstance(made, Failure):
                return

    def _make(self, number: int) -> PrefetchedBatch:
        made = self._build(number, 0)
        return made.pin_memory() if self._pin_memory else made

    def _receive(self, number: int) -> PrefetchedBatch | Failure:
        assert self._pool is not None
        try:
            record, buffer = self._pool.receive(
                number, lambda size: new_buffer(size, self._pin_memory)
            )
        except WorkerDied as death:
            shard = self._in_hand.of(death.worker)
            return Failure(TryAgain, f"data worker {death.worker} died ({death}) at {shard}")
        if not buffer.numel():
            return pickle.loads(record)
        return PrefetchedBatch.from_message(record, buffer)

    def _message(self, number: int, worker: int) -> Message:
        try:
            return self._build(number, worker).to_message()
        except Exception as error:
            failure = Failure.of(error, worker, self._in_hand.of(worker))
            return pickle.dumps(failure), np.zeros(0, np.uint8)

    def _build(self, number: int, worker: int) -> PrefetchedBatch:
        return self._builder.build(number, lambda name: self._in_hand.note(worker, name))
