"""Planned rows become tensors.

Legend of `build_batch`, all int64 and in the order of the rows: B rows of L places, N = B * L flat
places, n sequences. a_length, b_length, length, real (0 where damaged), start (flat place of
[CLS]), gap (places after a row's last sequence), row, number (in its row, from 1) [n]; per_row,
tails (places no sequence covers) [B]; row_start [B + 1]: tokens before each row; position, inside,
token_type, sequence, raw [N].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from data_pipeline.stream.batch import IGNORE_INDEX, RUNS_MULTIPLE, Batch
from data_pipeline.stream.masking import Masking, choose, choose_whole_words, replacements
from data_pipeline.stream.plan import Shape
from data_pipeline.stream.windows import RowRange


@dataclass(frozen=True)
class Vocabulary:
    """The ids the stream itself puts into rows, from `Tokenizer`."""

    pad_id: int
    cls_id: int
    sep_id: int
    mask_id: int
    word_start: np.ndarray
    ordinary_ids: np.ndarray


def build_batch(
    ranges: Sequence[RowRange],
    rows: int,
    shape: Shape,
    vocabulary: Vocabulary,
    *,
    masking: Masking,
    step_sequences: int,
    step_predictions: int,
    on_shard: Callable[[str], None] = lambda _: None,
) -> Batch:
    """Checks what the ranges touch and fills the micro-batch of `rows` rows; rows that the ranges
    do not fill are padding (held-out end). Sequences of damaged documents stay empty.

    `on_shard` is told each shard before it is read.
    """
    for some in ranges:
        some.window.check(some.first, some.last, on_shard)
    row_len, flat = shape.row_len, rows * shape.row_len
    columns = _columns(ranges)
    a_length, b_length = columns["a_length"], columns["b_length"]
    length = a_length + b_length + 3
    per_row = np.zeros(rows, np.int64)
    sizes = np.concatenate([np.diff(r.plan.row_starts[r.first : r.last + 1]) for r in ranges])
    per_row[: len(sizes)] = sizes
    row = np.repeat(np.arange(rows), per_row)
    before = np.cumsum(length) - length
    row_start = np.append(0, np.cumsum(length))[np.append(0, np.cumsum(per_row))]
    tails = row_len - np.diff(row_start)
    start = before - row_start[:-1][row] + row * row_len

    raw = unmasked_ids(ranges, tails, vocabulary, row_len)
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
        columns["mask_keys"][some], vocabulary, masking,
    )  # fmt: skip
    boundaries = _boundaries(start, length, tails, row_len, shape.max_seq_len)
    return Batch.of(
        {
            "input_ids": ids.reshape(rows, row_len),
            "token_type_ids": token_type.reshape(rows, row_len),
            "position_ids": position.reshape(rows, row_len),
            "sequence_ids": sequence.reshape(rows, row_len),
            "cu_seqlens": _filled(
                boundaries, -(-len(boundaries) // RUNS_MULTIPLE) * RUNS_MULTIPLE, flat, np.int32
            ),
            "masked_lm_positions": _filled(positions, rows * shape.predictions, 0),
            "masked_lm_labels": _filled(labels, rows * shape.predictions, IGNORE_INDEX),
            "cls_positions": _filled(start[some], rows * shape.sequences, 0),
            "next_sentence_labels": _filled(
                columns["is_random"][some], rows * shape.sequences, IGNORE_INDEX
            ),
        },
        {
            "max_seq_len": shape.max_seq_len,
            "sequences": int(present.sum()),
            "predictions": len(positions),
            "tokens": int(real.sum()),
            "step_sequences": step_sequences,
            "step_predictions": step_predictions,
        },
    )


def _columns(ranges: Sequence[RowRange]) -> dict[str, Any]:
    def joined(name: str, dtype: Any) -> np.ndarray:
        parts = [getattr(r.plan, name)[r.places] for r in ranges]
        return np.concatenate(parts).astype(dtype, copy=False)

    damaged = [
        r.window.damaged[r.plan.a_document[r.places]]
        | r.window.damaged[r.plan.b_document[r.places]]
        for r in ranges
    ]
    return {
        "a_length": joined("a_length", np.int64),
        "b_length": joined("b_length", np.int64),
        "predictions": joined("predictions", np.int64),
        "is_random": joined("is_random", np.int64),
        "mask_keys": joined("mask_keys", np.uint64),
        "damaged": np.concatenate(damaged),
    }


def unmasked_ids(
    ranges: Sequence[RowRange], tails: np.ndarray, vocabulary: Vocabulary, row_len: int
) -> np.ndarray:
    """uint16 [N]: the rows before masking."""
    cls = np.array([vocabulary.cls_id], np.uint16)
    sep = np.array([vocabulary.sep_id], np.uint16)
    padding = np.full(row_len, vocabulary.pad_id, np.uint16)
    parts: list[np.ndarray] = []
    row = 0
    for row_range in ranges:
        plan, window, some = row_range.plan, row_range.window, row_range.places
        shards = window.shards
        a, b = plan.a_document[some], plan.b_document[some]
        a_from, b_from = (
            plan.ids_at[a] + plan.a_offset[some],
            plan.ids_at[b] + plan.b_offset[some],
        )
        a_to, b_to = a_from + plan.a_length[some], b_from + plan.b_length[some]
        damaged = window.damaged[a] | window.damaged[b]
        ends = set(plan.row_starts[row_range.first + 1 : row_range.last + 1].tolist())
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
    masking: Masking,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(positions [M] ascending, labels [M], ids int64 [N] with the replacements in place)."""
    ids = raw.astype(np.int64)
    if not len(start):
        none = np.zeros(0, np.int64)
        return none, none, ids
    if masking.whole_words:
        columns = np.arange(int((a_length + b_length).max()))
        at = start[:, None] + 1 + columns + (columns >= a_length[:, None])
        word_starts = vocabulary.word_start[ids[np.minimum(at, len(ids) - 1)]]
        sequence, candidate = choose_whole_words(a_length, b_length, counts, keys, word_starts)
    else:
        sequence, candidate = choose(a_length, b_length, counts, keys)
    position = start[sequence] + 1 + candidate + (candidate >= a_length[sequence])
    if masking.whole_words:
        order = np.argsort(position)
        position, sequence, candidate = position[order], sequence[order], candidate[order]
    labels = ids[position]
    ids[position] = replacements(
        labels, keys[sequence], candidate, vocabulary.mask_id, vocabulary.ordinary_ids, masking
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


def _filled(values: np.ndarray, size: int, filler: int, dtype: Any = np.int64) -> np.ndarray:
    assert len(values) <= size, (len(values), size)
    result = np.full(size, filler, dtype)
    result[: len(values)] = values
    return result
