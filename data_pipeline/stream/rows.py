"""Planned rows become tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from data_pipeline.stream.batch import IGNORE_INDEX, Batch
from data_pipeline.stream.masking import choose, choose_whole_words, replacements
from data_pipeline.stream.plan import Shape, WindowPlan


@dataclass(frozen=True)
class Vocabulary:
    """The ids the stream itself puts into rows, from `Tokenizer`."""

    pad_id: int
    cls_id: int
    sep_id: int
    mask_id: int
    word_start: np.ndarray
    ordinary_ids: np.ndarray


@dataclass(frozen=True)
class Piece:
    """Rows [first, last) of a window whose ids `shards[i]` (uint16 views of whole tars) hold.

    damaged: bool [D], documents whose sequences stay empty.
    """

    plan: WindowPlan
    first: int
    last: int
    shards: Sequence[np.ndarray]
    damaged: np.ndarray


def fill(
    pieces: Sequence[Piece],
    rows: int,
    shape: Shape,
    vocabulary: Vocabulary,
    *,
    whole_word_mask: bool,
    step_sequences: int,
    step_predictions: int,
) -> Batch:
    """The micro-batch of `rows` rows; rows the pieces do not fill are padding (held-out end)."""
    row_len, flat = shape.row_len, rows * shape.row_len
    columns = _columns(pieces)
    a_length, b_length = columns["a_length"], columns["b_length"]
    length = a_length + b_length + 3
    per_row = np.zeros(rows, np.int64)
    sizes = np.concatenate([np.diff(p.plan.row_starts[p.first : p.last + 1]) for p in pieces])
    per_row[: len(sizes)] = sizes
    row = np.repeat(np.arange(rows), per_row)
    before = np.cumsum(length) - length
    row_start = np.append(0, np.cumsum(length))[np.append(0, np.cumsum(per_row))]
    tails = row_len - np.diff(row_start)
    start = before - row_start[:-1][row] + row * row_len

    raw = _raw_ids(pieces, tails, vocabulary, row_len)
    present = ~columns["damaged"]
    everywhere = bool(present.all())
    real = length if everywhere else np.where(present, length, 0)

    # A sequence and what is left of its row after it make one stretch of equal values.
    gap = np.zeros(len(length), np.int64)
    last_of_row = np.flatnonzero(np.append(row[1:] != row[:-1], True)) if len(row) else row
    gap[last_of_row] = tails[row[last_of_row]]
    stretch = length + gap
    covered = int(stretch.sum())
    position = np.zeros(flat, np.int64)
    position[:covered] = np.arange(covered) - np.repeat(start, stretch)
    inside = np.zeros(flat, bool)
    np.less(position[:covered], np.repeat(real, stretch), out=inside[:covered])
    token_type = np.zeros(flat, np.int64)
    token_type[:covered] = position[:covered] >= np.repeat(a_length + 2, stretch)
    position *= inside
    token_type *= inside
    number = np.arange(len(length)) - (np.cumsum(per_row) - per_row)[row] + 1
    sequence = np.zeros(flat, np.int32)
    sequence[:covered] = np.repeat(number.astype(np.int32), stretch)
    sequence *= inside

    some = np.flatnonzero(present) if not everywhere else slice(None)
    positions, labels, ids = _masked(
        raw, start[some], a_length[some], b_length[some], columns["predictions"][some],
        columns["mask_keys"][some], vocabulary, whole_word_mask,
    )  # fmt: skip
    return Batch(
        input_ids=torch.from_numpy(ids).view(rows, row_len),
        token_type_ids=torch.from_numpy(token_type).view(rows, row_len),
        position_ids=torch.from_numpy(position).view(rows, row_len),
        sequence_ids=torch.from_numpy(sequence).view(rows, row_len),
        cu_seqlens=_filled(
            _boundaries(start, length, tails, row_len, shape.max_seq_len),
            rows * shape.runs + 1,
            flat,
            np.int32,
        ),
        masked_lm_positions=_filled(positions, rows * shape.predictions, 0),
        masked_lm_labels=_filled(labels, rows * shape.predictions, IGNORE_INDEX),
        cls_positions=_filled(start[some], rows * shape.sequences, 0),
        next_sentence_labels=_filled(
            columns["is_random"][some], rows * shape.sequences, IGNORE_INDEX
        ),
        max_seq_len=shape.max_seq_len,
        sequences=int(present.sum()),
        predictions=len(positions),
        tokens=int(real.sum()),
        step_sequences=step_sequences,
        step_predictions=step_predictions,
    )


def sequence_range(piece: Piece) -> slice:
    starts = piece.plan.row_starts
    return slice(int(starts[piece.first]), int(starts[piece.last]))


def _columns(pieces: Sequence[Piece]) -> dict[str, Any]:
    def joined(name: str, dtype: Any) -> np.ndarray:
        parts = [getattr(p.plan, name)[sequence_range(p)] for p in pieces]
        return np.concatenate(parts).astype(dtype, copy=False)

    damaged = [
        p.damaged[p.plan.a_document[sequence_range(p)]]
        | p.damaged[p.plan.b_document[sequence_range(p)]]
        for p in pieces
    ]
    return {
        "a_length": joined("a_length", np.int64),
        "b_length": joined("b_length", np.int64),
        "predictions": joined("predictions", np.int64),
        "is_random": joined("is_random", np.int64),
        "mask_keys": joined("mask_keys", np.uint64),
        "damaged": np.concatenate(damaged),
    }


def _raw_ids(
    pieces: Sequence[Piece], tails: np.ndarray, vocabulary: Vocabulary, row_len: int
) -> np.ndarray:
    """uint16 [N]: the rows before masking."""
    cls = np.array([vocabulary.cls_id], np.uint16)
    sep = np.array([vocabulary.sep_id], np.uint16)
    padding = np.full(row_len, vocabulary.pad_id, np.uint16)
    parts: list[np.ndarray] = []
    row = 0
    for piece in pieces:
        plan, shards, some = piece.plan, piece.shards, sequence_range(piece)
        a, b = plan.a_document[some], plan.b_document[some]
        a_from, b_from = (
            plan.ids_at[a] + plan.a_offset[some],
            plan.ids_at[b] + plan.b_offset[some],
        )
        a_to, b_to = a_from + plan.a_length[some], b_from + plan.b_length[some]
        damaged = piece.damaged[a] | piece.damaged[b]
        ends = set(plan.row_starts[piece.first + 1 : piece.last + 1].tolist())
        for number, (lost, sa, fa, ta, sb, fb, tb) in enumerate(
            zip(
                damaged.tolist(),
                plan.document_shard[a].tolist(), a_from.tolist(), a_to.tolist(),
                plan.document_shard[b].tolist(), b_from.tolist(), b_to.tolist(),
                strict=True,
            ),
            some.start + 1,
        ):  # fmt: skip
            if lost:
                parts.append(padding[: ta - fa + tb - fb + 3])
            else:
                parts += (cls, shards[sa][fa:ta], sep, shards[sb][fb:tb], sep)
            if number in ends:
                if tails[row]:
                    parts.append(padding[: tails[row]])
                row += 1
    parts += [padding] * (len(tails) - row)
    return np.concatenate(parts)


def _masked(
    raw: np.ndarray,
    start: np.ndarray,
    a_length: np.ndarray,
    b_length: np.ndarray,
    counts: np.ndarray,
    keys: np.ndarray,
    vocabulary: Vocabulary,
    whole_word_mask: bool,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(positions [M] ascending, labels [M], ids int64 [N] with the replacements in place)."""
    ids = raw.astype(np.int64)
    if not len(start):
        none = np.zeros(0, np.int64)
        return none, none, ids
    if whole_word_mask:
        columns = np.arange(int((a_length + b_length).max()))
        at = start[:, None] + 1 + columns + (columns >= a_length[:, None])
        word_starts = vocabulary.word_start[ids[np.minimum(at, len(ids) - 1)]]
        sequence, candidate = choose_whole_words(a_length, b_length, counts, keys, word_starts)
    else:
        sequence, candidate = choose(a_length, b_length, counts, keys)
    position = start[sequence] + 1 + candidate + (candidate >= a_length[sequence])
    if whole_word_mask:
        order = np.argsort(position)
        position, sequence, candidate = position[order], sequence[order], candidate[order]
    labels = ids[position]
    ids[position] = replacements(
        labels, keys[sequence], candidate, vocabulary.mask_id, vocabulary.ordinary_ids
    )
    return position, labels, ids


def _boundaries(
    start: np.ndarray, length: np.ndarray, tails: np.ndarray, row_len: int, longest: int
) -> np.ndarray:
    """Ascending run boundaries: every sequence, and each padding tail in pieces of <= longest."""
    rows = len(tails)
    cuts = -(-tails // longest)
    tail_start = np.repeat(np.arange(1, rows + 1) * row_len - tails, cuts)
    piece = np.arange(int(cuts.sum())) - np.repeat(np.cumsum(cuts) - cuts, cuts)
    inner = np.concatenate((start, tail_start + piece * longest, [rows * row_len]))
    inner.sort()
    return inner


def _filled(values: np.ndarray, size: int, filler: int, dtype: Any = np.int64) -> torch.Tensor:
    assert len(values) <= size, (len(values), size)
    result = np.full(size, filler, dtype)
    result[: len(values)] = values
    return torch.from_numpy(result)
