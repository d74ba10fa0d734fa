"""Batch: the contract between the stream and the trainer.

B rows, L tokens of a row, N = B * L flat tokens. Shapes are static for a given (B, L, phase):
the capacities below come from the phase alone, so compiled graphs never see a new shape.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    import numpy as np

IGNORE_INDEX = -100

TENSORS = (
    "input_ids",
    "token_type_ids",
    "position_ids",
    "sequence_ids",
    "cu_seqlens",
    "masked_lm_positions",
    "masked_lm_labels",
    "cls_positions",
    "next_sentence_labels",
)


@dataclass
class Batch:
    """One rank's micro-batch.

    input_ids             int64 [B, L]
    token_type_ids        int64 [B, L]   0 through the first [SEP], then 1; padding 0
    position_ids          int64 [B, L]   restart at 0 in each sequence; padding 0
    sequence_ids          int32 [B, L]   0 for padding, 1.. for the sequences of the row in order
    cu_seqlens            int32 [S + 1]  run boundaries over the flat N tokens; a row's padding tail
                                         is cut into runs of its own; filled to capacity with N
    max_seq_len           no run is longer
    masked_lm_positions   int64 [M]      flat indices into N, ascending (filler 0)
    masked_lm_labels      int64 [M]      original ids (filler IGNORE_INDEX)
    cls_positions         int64 [C]      flat indices into N, ascending (filler 0)
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

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        moved = {
            name: getattr(self, name).to(device, non_blocking=non_blocking) for name in TENSORS
        }
        return replace(self, **moved)

    def pin_memory(self) -> Batch:
        return replace(self, **{name: getattr(self, name).pin_memory() for name in TENSORS})

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
        import numpy as np

        rows, row_len = self.input_ids.shape
        tensors = {name: getattr(self, name).detach().cpu().numpy() for name in TENSORS}
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
    import numpy as np

    real = labels != IGNORE_INDEX
    positions, labels = positions[real], labels[real]
    cuts = np.searchsorted(positions, edges)
    return [
        (positions[a:b] - edge, labels[a:b])
        for a, b, edge in zip(cuts[:-1], cuts[1:], edges[:-1], strict=True)
    ]
