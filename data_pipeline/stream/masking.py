"""Masked LM: which tokens are predicted, and what stands in their place.

n sequences of [CLS] A [SEP] B [SEP] or [CLS] A [SEP]; the candidates of a sequence are the tokens
of A and B, and candidate j stands at position j + 1 in A and j + 2 in B.

Legend of `choose_whole_words`: S sequences, C candidates of the longest, W words of the richest, in
random order. first, size, pieces: a word's first candidate, its candidates, and how many of them
are taken; left: still to be taken.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from data_pipeline.stream import draws

# Counters of a sequence's key: the choice of candidate j, then its replacement.
_REPLACE = 1 << 16
_LOW16 = np.uint64(0xFFFF)
_NEVER = np.uint64(0xFFFF_FFFF_FFFF_FFFF)


@dataclass(frozen=True)
class Masking:
    """How predicted tokens are chosen, and the shares of them that become [MASK] and that stay; a
    random token stands for the rest."""

    whole_words: bool = False
    mask: float = 0.8
    same: float = 0.1


def prediction_counts(
    lengths: np.ndarray, candidates: np.ndarray, masked_lm_prob: float, max_predictions: int
) -> np.ndarray:
    """int64 [n]: min(max_predictions, max(1, round(prob * length))) of sequences of `lengths`
    tokens with their specials; never more than the candidates. Always reached exactly."""
    wanted = np.maximum(1, np.rint(lengths * masked_lm_prob).astype(np.int64))
    return np.minimum(np.minimum(wanted, max_predictions), candidates)


def choose(
    a_lengths: np.ndarray, b_lengths: np.ndarray, counts: np.ndarray, keys: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """`counts[i]` different candidates of sequence i, each set equally likely.

    Returns (sequence, candidate), int64 [sum of counts], ascending.
    """
    candidates = a_lengths + b_lengths
    order = _shuffled(keys, candidates, None)
    most = int(counts.max(initial=0))
    if most < order.shape[1]:
        order = np.partition(order, most - 1, axis=1)[:, :most]
    order.sort(axis=1)
    taken = np.arange(order.shape[1]) < counts[:, None]
    chosen = np.where(taken, order & _LOW16, _LOW16).astype(np.uint16)
    chosen.sort(axis=1)
    return np.nonzero(taken)[0], chosen[taken].astype(np.int64)


def choose_whole_words(
    a_lengths: np.ndarray,
    b_lengths: np.ndarray,
    counts: np.ndarray,
    keys: np.ndarray,
    word_starts: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """As `choose`, but whole words: words in random order, each taken if it still fits; a sequence
    where none fits any more gets the first pieces of one word, so `counts` is always reached.
    Sequences ascend, candidates do not.

    word_starts bool [n, widest]: candidate begins a word (a segment's first always does).
    """
    candidates_S = a_lengths + b_lengths
    n, width = word_starts.shape
    columns_C = np.arange(width)
    starts_SC = word_starts | (columns_C == 0) | (columns_C == a_lengths[:, None])
    starts_SC &= columns_C < candidates_S[:, None]
    at_row, at_column = np.nonzero(starts_SC)
    after = np.append(at_column[1:], 0)
    last = np.append(at_row[1:] != at_row[:-1], True)
    word_length_SC = np.zeros((n, width), np.int64)
    word_length_SC[at_row, at_column] = np.where(last, candidates_S[at_row], after) - at_column

    order_SW = _shuffled(keys, candidates_S, starts_SC)
    order_SW.sort(axis=1)
    words_S = starts_SC.sum(axis=1)
    order_SW = order_SW[:, : int(words_S.max(initial=0))]
    real_SW = np.arange(order_SW.shape[1]) < words_S[:, None]
    first_SW = np.where(real_SW, (order_SW & _LOW16).astype(np.int64), 0)
    size_SW = np.where(real_SW, np.take_along_axis(word_length_SC, first_SW, axis=1), 0)

    pieces_SW = np.where(size_SW.cumsum(axis=1) <= counts[:, None], size_SW, 0)
    left_S = counts - pieces_SW.sum(axis=1)
    open_rows = np.flatnonzero(left_S > 0)
    while open_rows.size:
        free = (pieces_SW[open_rows] == 0) & real_SW[open_rows]
        fits = free & (size_SW[open_rows] <= left_S[open_rows, None])
        some = fits.any(axis=1)
        word = np.where(some, fits.argmax(axis=1), free.argmax(axis=1))
        take = np.minimum(size_SW[open_rows, word], left_S[open_rows])
        pieces_SW[open_rows, word] = take
        left_S[open_rows] -= take
        open_rows = open_rows[left_S[open_rows] > 0]

    row, word = np.nonzero(pieces_SW)
    many = pieces_SW[row, word]
    within = np.arange(int(many.sum())) - np.repeat(np.cumsum(many) - many, many)
    return np.repeat(row, many), np.repeat(first_SW[row, word], many) + within


def replacements(
    originals: np.ndarray,
    keys: np.ndarray,
    candidates: np.ndarray,
    mask_id: int,
    ordinary_ids: np.ndarray,
    masking: Masking,
) -> np.ndarray:
    """What the model sees at the chosen positions: [MASK], the same, or a random one of
    `ordinary_ids`, by the shares of `masking`. All arrays [M]; `keys` are those of the sequences.
    """
    drawn = draws.bits(keys, candidates + _REPLACE)
    random_ids = ordinary_ids[draws.randint(drawn << np.uint64(32), len(ordinary_ids))]
    kept = np.where(draws.bernoulli(drawn, masking.mask + masking.same), originals, random_ids)
    return np.where(draws.bernoulli(drawn, masking.mask), mask_id, kept)


def _shuffled(keys: np.ndarray, candidates: np.ndarray, only: np.ndarray | None) -> np.ndarray:
    """uint64 [n, widest]: random in the high 48 bits, the candidate in the low 16; all ones where
    there is none. Sorting a row shuffles its candidates."""
    columns = np.arange(int(candidates.max(initial=1)))
    order = draws.bits(keys[:, None], columns)
    order &= ~_LOW16
    order |= columns.astype(np.uint64)
    order[columns >= candidates[:, None] if only is None else ~only] = _NEVER
    return order
