"""Held-out batches: the same rows at every evaluation, planned and made once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from core.errors import UserError
from data_pipeline.stream.batch import Batch
from data_pipeline.stream.dataset import Dataset
from data_pipeline.stream.plan import PhaseSpec
from data_pipeline.stream.rows import build_batch
from data_pipeline.stream.windows import RowRange, WindowIterator


@dataclass
class HeldOutBatch(Batch):
    """prediction_sources: int64 [M] on the host, the place in `manifest.sources` of the document
    that a sequence's first segment is of, for each of its predictions (filler -1)."""

    prediction_sources: torch.Tensor


class HeldOut:
    """The first `rows` rows (or all, if fewer) of the held-out split in a fixed random order, the
    same for any world size; every rank gets equally many batches, the last padded with empty rows.

    step_sequences and step_predictions of its batches are those of all rows together. The batches
    are made when they are first asked for, and kept: 28 bytes a token of this rank's rows.
    """

    def __init__(
        self,
        dataset: Dataset,
        phase: PhaseSpec,
        *,
        seed: int,
        rank: int,
        world: int,
        micro_batch_rows: int,
        rows: int,
    ) -> None:
        self._dataset = dataset
        self._planner = dataset.planner(phase, phase_index=0, seed=seed, split="heldout")
        self._rank, self._world = rank, world
        self._micro_batch_rows, self._rows = micro_batch_rows, rows
        self._batches: list[HeldOutBatch] = []

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the data set's sources, in the order of their places."""
        return tuple(source.name for source in self._dataset.manifest.sources)

    def __iter__(self) -> Iterator[HeldOutBatch]:
        if not self._batches:
            try:
                self._batches = list(self._made())
            except UserError as error:
                raise type(error)(f"rank {self._rank}: held-out data: {error}") from None
        return iter(self._batches)

    def _made(self) -> Iterator[HeldOutBatch]:
        with self._dataset.open_store() as store:
            windows = WindowIterator(self._planner, store, (0, 0, 0), stop=True)
            rows = min(self._rows, windows.first_plan().rows)
            if rows == 0:
                raise UserError("no row can be made of its documents")
            (whole,) = windows.ranges(0, rows)
            for begin in range(0, rows, self._world * self._micro_batch_rows):
                first = min(begin + self._rank * self._micro_batch_rows, rows)
                last = min(first + self._micro_batch_rows, rows)
                mine = RowRange(whole.window, first, last)
                batch = build_batch(
                    [mine],
                    self._micro_batch_rows,
                    self._planner.shape,
                    self._dataset.vocabulary,
                    objective=self._dataset.objective,
                    step_sequences=whole.sequences,
                    step_predictions=whole.predictions,
                )
                of_sequences = mine.window.sources(mine.plan.a_document[mine.places])
                found = np.full(len(batch.masked_lm_labels), -1)
                found[: batch.predictions] = np.repeat(
                    of_sequences, mine.plan.predictions[mine.places]
                )
                found[found >= len(self.sources)] = -1  # of no source that the manifest names
                yield HeldOutBatch(**vars(batch), prediction_sources=torch.from_numpy(found))
