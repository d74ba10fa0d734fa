"""Batch: the contract between the stream and the trainer.

B rows, L tokens of a row, N = B * L flat tokens. Shapes come from (B, L, phase) alone, so compiled
graphs never see a new one; but for `cu_seqlens`, whose length S + 1 follows the text in steps of
`RUNS_MULTIPLE`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import numpy as np
import torch

IGNORE_INDEX = -100
# Attention launches blocks for every run, empty ones too; few lengths keep a compiler's guards few.
RUNS_MULTIPLE = 32

# In the order in which one buffer holds them: what varies in length is the last.
DTYPES = {
    "input_ids": torch.int64,
    "token_type_ids": torch.int64,
    "position_ids": torch.int64,
    "sequence_ids": torch.int32,
    "masked_lm_positions": torch.int64,
    "masked_lm_labels": torch.int64,
    "cls_positions": torch.int64,
    "next_sentence_labels": torch.int64,
    "cu_seqlens": torch.int32,
}
TENSORS = tuple(DTYPES)
_ALIGNMENT = 128  # bytes, of each tensor in a buffer

Shapes = Mapping[str, tuple[int, ...]]


@dataclass
class Batch:
    """One rank's micro-batch.

    input_ids             int64 [B, L]
    token_type_ids        int64 [B, L]   0 through the first [SEP], then 1 (none without segments
                                         B); padding 0
    position_ids          int64 [B, L]   restart at 0 in each sequence; padding 0
    sequence_ids          int32 [B, L]   0 for padding, 1.. for the sequences of the row in order
    cu_seqlens            int32 [S + 1]  run boundaries over the flat N tokens; a row's padding tail
                                         is cut into runs of its own; filled with N to a
                                         multiple of RUNS_MULTIPLE
    max_seq_len           no run is longer
    masked_lm_positions   int64 [M]      flat indices into N, ascending (filler 0)
    masked_lm_labels      int64 [M]      original ids (filler IGNORE_INDEX)
    cls_positions         int64 [C]      flat indices into N, ascending (filler 0); C is 0 where
                                         next sentence is no task
    next_sentence_labels  int64 [C]      0: B follows A, 1: B is random (filler IGNORE_INDEX)
    sequences, predictions, tokens       real ones in this micro-batch
    step_sequences, step_predictions     of the whole optimiser step over all ranks and micro-steps,
                                         known from the plan: the denominators of the loss
    """

    input_ids: torch.Tensor
    token_type_ids: torch.Tensor
    position_ids: torch.Tensor
    sequence_ids: torch.Tensor
    cu_seqlens: torch.Tensor
    masked_lm_positions: torch.Tensor
    masked_lm_labels: torch.Tensor
    cls_positions: torch.Tensor
    next_sentence_labels: torch.Tensor
    max_seq_len: int
    sequences: int
    predictions: int
    tokens: int
    step_sequences: int
    step_predictions: int

    @property
    def next_sentences(self) -> int:
        """Sequences with a next-sentence label: all or none."""
        return self.sequences if len(self.next_sentence_labels) else 0

    @classmethod
    def of(cls, arrays: Mapping[str, np.ndarray], counts: Mapping[str, int]) -> Batch:
        """A copy of `arrays` in one buffer; `counts`: the fields that are no tensors."""
        shapes = {name: array.shape for name, array in arrays.items()}
        batch = cls.over(new_buffer(_size(shapes)), shapes, counts)
        for name, array in arrays.items():
            np.copyto(getattr(batch, name).numpy(), array, casting="no")
        return batch

    @classmethod
    def over(cls, buffer: torch.Tensor, shapes: Shapes, counts: Mapping[str, int]) -> Batch:
        """Views of `buffer`, uint8 as `split` gives it."""
        return cls(**_views(buffer, shapes), **counts)

    def split(self) -> tuple[Shapes, dict[str, int], np.ndarray]:
        """(shapes, counts, uint8 buffer on the host) that `over` makes the same batch of."""
        buffer = self.buffer()
        if buffer is None:
            return Batch.of(self._arrays(), self._counts()).split()
        return self._shapes(), self._counts(), buffer.numpy()

    def buffer(self) -> torch.Tensor | None:
        """uint8: the one buffer that all tensors lie in; None where they lie apart."""
        storage, shapes = self.input_ids.untyped_storage(), self._shapes()
        if storage.nbytes() != _size(shapes):
            return None
        whole = torch.empty(0, dtype=torch.uint8, device=self.input_ids.device).set_(storage)
        places = {name: view.data_ptr() for name, view in _views(whole, shapes).items()}
        mine = all(getattr(self, name).data_ptr() == places[name] for name in TENSORS)
        return whole if mine else None

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """On `device`, by one copy where the tensors lie in one buffer."""
        buffer = self.buffer()
        if buffer is not None:
            moved = buffer.to(device, non_blocking=non_blocking)
            return replace(self, **_views(moved, self._shapes()))
        apart = {name: getattr(self, name) for name in TENSORS}
        return replace(
            self, **{n: t.to(device, non_blocking=non_blocking) for n, t in apart.items()}
        )

    def pin_memory(self) -> Batch:
        """The same in page-locked memory, from which a GPU copies while the host goes on."""
        shapes, counts, buffer = self.split()
        pinned = new_buffer(buffer.nbytes, pin_memory=True)
        np.copyto(pinned.numpy(), buffer)
        return Batch.over(pinned, shapes, counts)

    def _shapes(self) -> Shapes:
        return {name: tuple(getattr(self, name).shape) for name in TENSORS}

    def _counts(self) -> dict[str, int]:
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in DTYPES}

    def _arrays(self) -> dict[str, np.ndarray]:
        return {name: getattr(self, name).detach().cpu().numpy() for name in TENSORS}

    def digest(self) -> str:
        """sha256 (hex) over every tensor and count: equal exactly when the micro-batches are."""
        h = hashlib.sha256()
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, torch.Tensor):
                h.update(f"{field.name}:{tuple(value.shape)}:{value.dtype};".encode())
                h.update(value.detach().cpu().contiguous().numpy().tobytes())
            else:
                h.update(f"{field.name}={value};".encode())
        return h.hexdigest()

    def row_digests(self) -> list[bytes]:
        """sha256 of each row with row-local positions: free of how rows were dealt to ranks."""
        rows, row_len = self.input_ids.shape
        tensors = self._arrays()
        edges = np.arange(rows + 1) * row_len
        bounds = np.unique(tensors["cu_seqlens"])
        masks = _row_split(tensors["masked_lm_positions"], tensors["masked_lm_labels"], edges)
        heads = _row_split(tensors["cls_positions"], tensors["next_sentence_labels"], edges)
        digests = []
        for row in range(rows):
            h = hashlib.sha256(f"{self.step_sequences},{self.step_predictions};".encode())
            for name in ("input_ids", "token_type_ids", "position_ids", "sequence_ids"):
                h.update(np.ascontiguousarray(tensors[name][row]).tobytes())
            inside = bounds[(bounds >= edges[row]) & (bounds <= edges[row + 1])] - edges[row]
            h.update(inside.astype(np.int64).tobytes())
            for positions, labels in (masks[row], heads[row]):
                h.update(len(positions).to_bytes(8, "little"))
                h.update(positions.astype(np.int64).tobytes())
                h.update(labels.astype(np.int64).tobytes())
            digests.append(h.digest())
        return digests


def _row_split(
    positions: np.ndarray, labels: np.ndarray, edges: np.ndarray
) -> list[tuple[np.ndarray, np.ndarray]]:
    real = labels != IGNORE_INDEX
    positions, labels = positions[real], labels[real]
    cuts = np.searchsorted(positions, edges)
    return [
        (positions[a:b] - edge, labels[a:b])
        for a, b, edge in zip(cuts[:-1], cuts[1:], edges[:-1], strict=True)
    ]


def new_buffer(size: int, pin_memory: bool = False) -> torch.Tensor:
    """uint8 [size] on the host."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=pin_memory)


def _views(buffer: torch.Tensor, shapes: Shapes) -> dict[str, torch.Tensor]:
    views, at = {}, 0
    for name, dtype in DTYPES.items():
        size = math.prod(shapes[name]) * dtype.itemsize
        views[name] = buffer[at : at + size].view(dtype).view(shapes[name])
        at += -(-size // _ALIGNMENT) * _ALIGNMENT
    return views


def _size(shapes: Shapes) -> int:
    sizes = (math.prod(shapes[name]) * dtype.itemsize for name, dtype in DTYPES.items())
    return sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)
