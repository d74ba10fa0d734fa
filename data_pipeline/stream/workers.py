"""Micro-batches made ahead of time, by a thread of this process or by worker processes."""

from __future__ import annotations

import pickle
import queue
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Any

import torch
from torch.utils.data import Dataset, get_worker_info

from core.errors import UserError
from data_pipeline.stream.batch import TENSORS, Batch
from data_pipeline.stream.reader import Damage, OpenWindow
from data_pipeline.stream.rows import Piece, Vocabulary, fill
from data_pipeline.stream.windows import Course, Position


@dataclass(frozen=True)
class Made:
    """A micro-batch with what its optimiser step does to the state."""

    batch: Batch
    after: Position
    rows: int
    tokens: int
    found: tuple[Damage, ...]


@dataclass(frozen=True)
class Failed:
    """What went wrong in a worker; `known`: a line for the user, else a traceback; `lost`: the
    worker died or hangs, which another start may not meet."""

    text: str
    known: bool
    lost: bool = False


class Maker(Dataset):
    """Makes the micro-batch of any number, in ascending order within a process."""

    def __init__(
        self,
        course: Course,
        vocabulary: Vocabulary,
        *,
        rows_per_step: int,
        micro_steps: int,
        micro_batch_rows: int,
        rank: int,
        world: int,
        whole_word_mask: bool,
        shard_names: list[str],
        workers: int,
    ) -> None:
        self._course, self._vocabulary = course, vocabulary
        self._rows_per_step, self._micro_steps = rows_per_step, micro_steps
        self._micro_batch_rows, self._rank, self._world = micro_batch_rows, rank, world
        self._whole_word_mask = whole_word_mask
        self._numbers = {name: number for number, name in enumerate(shard_names)}
        self._names = shard_names
        self._in_hand = get_context("fork").RawArray("i", [-1] * max(workers, 1))

    def shard_in_hand(self, worker: int) -> str:
        """The shard the worker read from last."""
        number = self._in_hand[worker]
        return self._names[number] if number >= 0 else "its first shard"

    def make(self, number: int, worker: int = 0) -> Made:
        step, micro = divmod(number, self._micro_steps)
        first = step * self._rows_per_step
        last = first + self._rows_per_step
        whole = self._course.pieces(first, last)
        after = self._course.position(last)
        if len({id(window) for window, _, _ in whole}) == 1:
            # While a step lies across two windows a third would not fit a cache made for two.
            self._course.look_ahead()
        begin = first + (micro * self._world + self._rank) * self._micro_batch_rows
        mine = self._course_pieces(begin, whole, first)
        for window, a, b in mine:
            window.check(a, b, lambda name: self._touch(worker, name))
        batch = fill(
            [Piece(w.plan, a, b, w.shards, w.damaged) for w, a, b in mine],
            self._micro_batch_rows,
            self._course.shape,
            self._vocabulary,
            whole_word_mask=self._whole_word_mask,
            step_sequences=_sum("row_starts", whole),
            step_predictions=_sum("row_predictions", whole),
        )
        found = tuple(damage for window, _, _ in mine for damage in window.taken())
        return Made(batch, after, self._rows_per_step, _sum("row_tokens", whole), found)

    def _course_pieces(
        self, begin: int, whole: list[tuple[OpenWindow, int, int]], first: int
    ) -> list[tuple[OpenWindow, int, int]]:
        skip, left, mine = begin - first, self._micro_batch_rows, []
        for window, a, b in whole:
            a, skip = a + min(skip, b - a), max(skip - (b - a), 0)
            take = min(b - a, left)
            if take:
                mine.append((window, a, a + take))
                left -= take
        return mine

    def _touch(self, worker: int, name: str) -> None:
        self._in_hand[worker] = self._numbers[name]

    def __getitem__(self, number: int) -> bytes | Failed:
        info = get_worker_info()
        worker = info.id if info is not None else 0
        result = self.attempt(number, worker)
        return result if isinstance(result, Failed) else packed(result)

    def attempt(self, number: int, worker: int) -> Made | Failed:
        """`make`, or what went wrong with shard and worker named."""
        try:
            return self.make(number, worker)
        except UserError as error:
            return Failed(f"data worker {worker}: {error}", True)
        except Exception:
            where = f"data worker {worker} at {self.shard_in_hand(worker)}"
            return Failed(f"{where}: {traceback.format_exc()}", False)


def _sum(name: str, pieces: list[tuple[OpenWindow, int, int]]) -> int:
    sums = [getattr(w.plan, name) for w, _, _ in pieces]
    return int(sum(s[b] - s[a] for s, (_, a, b) in zip(sums, pieces, strict=True)))


def packed(made: Made) -> bytes:
    # Plain bytes through the pipe: tensors would travel as a file descriptor each, and /dev/shm is
    # small in many containers.
    arrays = {name: getattr(made.batch, name).numpy() for name in TENSORS}
    rest = replace(made, batch=replace(made.batch, **dict.fromkeys(TENSORS)))
    return pickle.dumps((rest, arrays), protocol=5)


def unpacked(data: bytes) -> Made:
    made, arrays = pickle.loads(data)
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return replace(made, batch=replace(made.batch, **tensors))


class Count:
    """0, 1, 2, ... without end, as a sampler."""

    def __iter__(self) -> Iterator[int]:
        number = 0
        while True:
            yield number
            number += 1


def same(made: Any) -> Any:
    return made


def init_worker(worker: int) -> None:
    # Ctrl-C and the scheduler's warnings reach every process of a job, but are the trainer's to
    # answer: it still needs batches for the step in hand. A second SIGTERM is meant.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: signal.signal(signal.SIGTERM, signal.SIG_DFL))


class Thread:
    """Keeps `depth` batches ready in this process, so that to take one is no wait."""

    def __init__(self, make: Callable[[int], Made | Failed], depth: int) -> None:
        self._make = make
        self._queue: queue.Queue[Made | Failed] = queue.Queue(depth)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="stream")
        self._thread.start()

    def _run(self) -> None:
        number = 0
        while not self._stopped.is_set():
            made = self._make(number)
            number += 1
            while not self._stopped.is_set():
                try:
                    self._queue.put(made, timeout=0.2)
                    break
                except queue.Full:
                    continue
            if isinstance(made, Failed):
                return

    def take(self, timeout: float) -> Made | Failed | None:
        """The next; None if there is none in `timeout` seconds."""
        try:
            return self._queue.get(timeout=timeout)
        except queue.Empty:
            return None

    def stop(self) -> None:
        self._stopped.set()
        # One that waits for a stuck worker is left to end with it.
        self._thread.join(1.0)
