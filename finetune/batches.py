"""Items become packed batches: no token of padding is computed, and an order that only the seed
and the epoch decide.

Legend: T tokens of the batch, C its sequences, S boundaries, B rows of L tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from finetune.examples import IGNORE_LABEL, Example, Item
from pretrain.model import Packed


@dataclass(frozen=True)
class Batch:
    """packed: inputs of the encoder. positions int64 [T]: place of each real token in the flat
    B*L, sequence after sequence. lengths: of the C sequences. labels: the items', or None.
    """

    packed: Packed
    positions: Tensor
    lengths: tuple[int, ...]
    labels: Tensor | None
    items: int

    @property
    def starts(self) -> Tensor:
        """int64 [C]: places of the [CLS] tokens in the flat B*L."""
        after = torch.tensor(self.lengths, device=self.positions.device).cumsum(0)
        return self.positions[torch.nn.functional.pad(after[:-1], (1, 0))]

    @property
    def ends(self) -> Tensor:
        """int64 [C]: places of the last tokens."""
        after = torch.tensor(self.lengths, device=self.positions.device).cumsum(0)
        return self.positions[after - 1]


@lru_cache(maxsize=1)
def order(items: int, seed: int, epoch: int) -> np.ndarray:
    """The permutation of one epoch; made once, as its length may be many steps'."""
    made = np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(items)
    made.flags.writeable = False
    return made


def steps_of(items: int, batch_size: int, epochs: float) -> int:
    return max(1, math.ceil(math.ceil(items / batch_size) * epochs))


def step_items(items: int, batch_size: int, seed: int, step: int) -> np.ndarray:
    """Indices of the examples of one optimiser step: a pure function, so a resume is exact."""
    per_epoch = math.ceil(items / batch_size)
    epoch, at = divmod(step, per_epoch)
    return order(items, seed, epoch)[at * batch_size : (at + 1) * batch_size]


def by_tokens(items: Sequence[Example], limit: int) -> Iterator[Sequence[Example]]:
    """Runs of items with at most `limit` tokens together (an item alone may have more)."""
    start, tokens = 0, 0
    for at, item in enumerate(items):
        if at > start and tokens + item.tokens > limit:
            yield items[start:at]
            start, tokens = at, 0
        tokens += item.tokens
    if start < len(items):
        yield items[start:]


def collate(
    items: Sequence[Item], pad_id: int, device: torch.device, row_len: int | None = None
) -> Batch:
    """Pack the items' sequences: all into one row (None), or best-fit into rows of `row_len`.

    One row is right for kernels that take boundaries; rows are for those that take a mask, whose
    cost grows with the square of a row.
    """
    sequences = [s for item in items for s in item.sequences]
    lengths = [len(s.ids) for s in sequences]
    if row_len is None:
        rows = [list(range(len(sequences)))]
        L = sum(lengths)
    else:
        rows, L = _best_fit(lengths, row_len), row_len
    shape = (len(rows), L)
    input_ids = np.full(shape, pad_id, np.int64)
    token_type_ids, position_ids = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    sequence_ids = np.zeros(shape, np.int32)
    place = np.zeros(len(sequences), np.int64)
    boundaries = [0]
    for b, row in enumerate(rows):
        at = 0
        for number, s in enumerate(row, 1):
            n = lengths[s]
            here = slice(at, at + n)
            input_ids[b, here] = sequences[s].ids
            token_type_ids[b, here] = sequences[s].types
            position_ids[b, here] = np.arange(n)
            sequence_ids[b, here] = number
            place[s] = b * L + at
            at += n
            boundaries.append(b * L + at)
        if at < L:
            boundaries.append((b + 1) * L)
    positions = np.concatenate([np.arange(p, p + n) for p, n in zip(place, lengths, strict=True)])
    packed = Packed(
        *(_to(x, device) for x in (input_ids, token_type_ids, position_ids, sequence_ids)),
        _to(np.array(boundaries, np.int32), device),
        row_len or max(lengths),
    )
    labels = _labels([item.label for item in items])
    return Batch(
        packed,
        _to(positions, device),
        tuple(lengths),
        None if labels is None else labels.to(device),
        len(items),
    )


def _best_fit(lengths: Sequence[int], row_len: int) -> list[list[int]]:
    rows: list[list[int]] = []
    free: list[int] = []
    for s in sorted(range(len(lengths)), key=lambda s: (-lengths[s], s)):
        fitting = [r for r, room in enumerate(free) if room >= lengths[s]]
        if fitting:
            r = min(fitting, key=lambda r: (free[r], r))
        else:
            r = len(rows)
            rows.append([])
            free.append(row_len)
        rows[r].append(s)
        free[r] -= lengths[s]
    return rows


def _labels(labels: Sequence[Any]) -> Tensor | None:
    if not labels or any(label is None for label in labels):
        return None
    if isinstance(labels[0], np.ndarray):
        return torch.from_numpy(np.concatenate(labels))
    if isinstance(labels[0], float):
        return torch.tensor(labels, dtype=torch.float32)
    return torch.tensor(labels, dtype=torch.int64)


def labelled(items: Sequence[Example]) -> int:
    """Predictions that the loss of these items is the mean of."""
    if items and isinstance(items[0].label, np.ndarray):
        return max(1, sum(int((item.label != IGNORE_LABEL).sum()) for item in items))
    return len(items)


def _to(array: np.ndarray, device: torch.device) -> Tensor:
    tensor = torch.from_numpy(array)
    return (
        tensor.to(device)
        if device.type == "cpu"
        else tensor.pin_memory().to(device, non_blocking=True)
    )
