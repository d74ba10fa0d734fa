"""Which rows a rank's micro-batch of any number holds, and the micro-batch itself.

Step s of the phase is rows [s R, (s + 1) R) of the plan; micro-step a, rank r, slot j is row
s R + a W B + r B + j, with R rows a step, W ranks, B rows a micro-batch.  Which process makes a
batch never matters.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from data_pipeline.stream.batch import Batch
from data_pipeline.stream.objective import Objective, Vocabulary
from data_pipeline.stream.plan import Shape
from data_pipeline.stream.reader import Damage
from data_pipeline.stream.rows import build_batch
from data_pipeline.stream.steps import Division
from data_pipeline.stream.windows import Place, WindowIterator
from data_pipeline.stream.workers import Message


@dataclass(frozen=True)
class PrefetchedBatch:
    """A micro-batch, and what its optimiser step adds to the state: the place after the step, its
    tokens. damage: what was found on the way."""

    batch: Batch
    after: Place
    tokens: int
    damage: tuple[Damage, ...]

    def to_message(self) -> Message:
        """One buffer instead of nine tensors, which torch would send as a file descriptor each; and
        /dev/shm is small in many containers."""
        shapes, counts, buffer = self.batch.split()
        return pickle.dumps((replace(self, batch=None), shapes, counts)), buffer

    def pin_memory(self) -> PrefetchedBatch:
        return replace(self, batch=self.batch.pin_memory())

    @classmethod
    def from_message(cls, record: bytes, buffer: torch.Tensor) -> PrefetchedBatch:
        rest, shapes, counts = pickle.loads(record)
        return replace(rest, batch=Batch.over(buffer, shapes, counts))


class BatchBuilder:
    """Builds the micro-batch of any number, in ascending order within a process."""

    def __init__(
        self,
        windows: WindowIterator,
        shape: Shape,
        vocabulary: Vocabulary,
        *,
        division: Division,
        rank: int,
        objective: Objective,
    ) -> None:
        self._windows, self._shape, self._vocabulary = windows, shape, vocabulary
        self._division, self._rank, self._objective = division, rank, objective

    def build(
        self, number: int, on_shard: Callable[[str], None] = lambda _: None
    ) -> PrefetchedBatch:
        """`on_shard` is told each shard before it is read."""
        division = self._division
        step, micro_step = divmod(number, division.micro_steps)
        first = step * division.rows_per_step
        last = first + division.rows_per_step
        self._windows.let_go(first)
        whole_step = self._windows.ranges(first, last)
        after = self._windows.place(last)
        if len(whole_step) == 1:
            # While a step lies across two windows a third would not fit a cache made for two.
            self._windows.look_ahead()
        rows = division.micro_batch_rows
        begin = first + (micro_step * division.world + self._rank) * rows
        mine = self._windows.ranges(begin, begin + rows)
        batch = build_batch(
            mine,
            rows,
            self._shape,
            self._vocabulary,
            objective=self._objective,
            step_sequences=sum(some.sequences for some in whole_step),
            step_predictions=sum(some.predictions for some in whole_step),
            on_shard=on_shard,
        )
        return PrefetchedBatch(
            batch,
            after,
            sum(some.tokens for some in whole_step),
            tuple(damage for some in mine for damage in some.window.taken()),
        )

    def release(self) -> None:
        """Lets the windows go; nothing can be built here any more."""
        self._windows.release()
