"""Planned rows become tensors.

Legend of `build_batch`, all int64 and in the order of the rows: B rows of L places, N = B * L flat
places, S sequences. real: length, 0 where damaged; start: flat place of [CLS]; gap: places after a
row's last sequence; number: in its row, from 1; tails: places no sequence covers; row_start, one
more than B: tokens before each row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import DTypeLike

from data_pipeline.stream.batch import IGNORE_INDEX, RUNS_MULTIPLE, Batch
from data_pipeline.stream.objective import Objective, Sequences, Vocabulary
from data_pipeline.stream.packing import edges
from data_pipeline.stream.pairs import sequence_lengths
from data_pipeline.stream.plan import Shape
from data_pipeline.stream.windows import RowRange


def build_batch(
    ranges: Sequence[RowRange],
    rows: int,
    shape: Shape,
    vocabulary: Vocabulary,
    *,
    objective: Objective,
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
    a_length_S, b_length_S = columns["a_length"], columns["b_length"]
    length_S = sequence_lengths(a_length_S, b_length_S)
    per_row_B = np.zeros(rows, np.int64)
    sizes = np.concatenate([np.diff(r.plan.row_starts[r.first : r.last + 1]) for r in ranges])
    per_row_B[: len(sizes)] = sizes
    row_S = np.repeat(np.arange(rows), per_row_B)
    before_S = np.cumsum(length_S) - length_S
    row_start_B = edges(length_S)[edges(per_row_B)]
    tails_B = row_len - np.diff(row_start_B)
    start_S = before_S - row_start_B[:-1][row_S] + row_S * row_len

    raw_N = unmasked_ids(ranges, tails_B, vocabulary, row_len)
    present_S = ~columns["damaged"]
    everywhere = bool(present_S.all())
    real_S = length_S if everywhere else np.where(present_S, length_S, 0)

    # A sequence and what is left of its row after it make one stretch of equal values.
    gap_S = np.zeros(len(length_S), np.int64)
    last_of_row = np.flatnonzero(np.append(row_S[1:] != row_S[:-1], True)) if len(row_S) else row_S
    gap_S[last_of_row] = tails_B[row_S[last_of_row]]
    number_S = np.arange(len(length_S)) - edges(per_row_B)[row_S] + 1
    position_N, token_type_N, sequence_N = _of_places(
        flat, length_S + gap_S, start_S, real_S, a_length_S, number_S
    )

    some = np.flatnonzero(present_S) if not everywhere else slice(None)
    judged = some if shape.next_sentences else slice(0)
    sequences = Sequences(
        start_S[some], a_length_S[some], b_length_S[some], columns["predictions"][some],
        columns["mask_keys"][some],
    )  # fmt: skip
    ids_N = raw_N.astype(np.int64)
    positions, labels = objective.apply(ids_N, sequences, vocabulary)
    boundaries = _boundaries(start_S, length_S, tails_B, row_len, shape.max_seq_len)
    return Batch.of(
        {
            "input_ids": ids_N.reshape(rows, row_len),
            "token_type_ids": token_type_N.reshape(rows, row_len),
            "position_ids": position_N.reshape(rows, row_len),
            "sequence_ids": sequence_N.reshape(rows, row_len),
            "cu_seqlens": _filled(
                boundaries, -(-len(boundaries) // RUNS_MULTIPLE) * RUNS_MULTIPLE, flat, np.int32
            ),
            "masked_lm_positions": _filled(positions, rows * shape.predictions, 0),
            "masked_lm_labels": _filled(labels, rows * shape.predictions, IGNORE_INDEX),
            "cls_positions": _filled(start_S[judged], rows * shape.next_sentences, 0),
            "next_sentence_labels": _filled(
                columns["is_random"][judged], rows * shape.next_sentences, IGNORE_INDEX
            ),
        },
        {
            "max_seq_len": shape.max_seq_len,
            "sequences": int(present_S.sum()),
            "predictions": len(positions),
            "tokens": int(real_S.sum()),
            "step_sequences": step_sequences,
            "step_predictions": step_predictions,
        },
    )


def _of_places(
    flat: int,
    stretch_S: np.ndarray,
    start_S: np.ndarray,
    real_S: np.ndarray,
    a_length_S: np.ndarray,
    number_S: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(position ids, token types, sequence ids), [N] each, 0 where no token stands; stretch: length
    and gap."""
    covered = int(stretch_S.sum())
    position_N = np.zeros(flat, np.int64)
    position_N[:covered] = np.arange(covered) - np.repeat(start_S, stretch_S)
    inside_N = np.zeros(flat, bool)
    np.less(position_N[:covered], np.repeat(real_S, stretch_S), out=inside_N[:covered])
    token_type_N = np.zeros(flat, np.int64)
    token_type_N[:covered] = position_N[:covered] >= np.repeat(a_length_S + 2, stretch_S)
    position_N *= inside_N
    token_type_N *= inside_N
    sequence_N = np.zeros(flat, np.int32)
    sequence_N[:covered] = np.repeat(number_S.astype(np.int32), stretch_S)
    sequence_N *= inside_N
    return position_N, token_type_N, sequence_N


def _columns(ranges: Sequence[RowRange]) -> dict[str, np.ndarray]:
    def joined(name: str, dtype: DTypeLike) -> np.ndarray:
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
                parts.append(padding[: ta - fa + tb - fb + 2 + (tb > fb)])
            else:
                parts += (cls, shards[sa][fa:ta], sep)
                if tb > fb:
                    parts += (shards[sb][fb:tb], sep)
            if number in ends:
                if tails[row]:
                    parts.append(padding[: tails[row]])
                row += 1
    parts += [padding] * (len(tails) - row)
    return np.concatenate(parts)


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


def _filled(values: np.ndarray, size: int, filler: int, dtype: DTypeLike = np.int64) -> np.ndarray:
    assert len(values) <= size, (len(values), size)
    result = np.full(size, filler, dtype)
    result[: len(values)] = values
    return result
