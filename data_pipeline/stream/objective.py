"""What is predicted of a row: how many tokens, what the model sees, what the labels are.

Two objectives with the same three methods. What else depends on the choice is the mask of attention
(`model.is_decoder`).

Legend of `apply`: S sequences, M predictions; ids [N] of the flat rows, changed in place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from data_pipeline.stream.masking import (
    Masking,
    choose,
    choose_whole_words,
    prediction_counts,
    replacements,
)

ObjectiveName = Literal["masked", "left_to_right"]


@dataclass(frozen=True)
class Vocabulary:
    """The ids the stream itself puts into rows, from `Tokenizer`."""

    pad_id: int
    cls_id: int
    sep_id: int
    mask_id: int
    word_start: np.ndarray
    ordinary_ids: np.ndarray


_SHORTEST = 3  # tokens of a sequence: [CLS], another, [SEP]


@dataclass(frozen=True)
class Sequences:
    """[S] each: flat place of [CLS], tokens of A and B, planned predictions, keys of the draws."""

    start: np.ndarray
    a_length: np.ndarray
    b_length: np.ndarray
    predictions: np.ndarray
    keys: np.ndarray


@dataclass(frozen=True)
class MaskedLM:
    """Some tokens of each sequence are hidden, and predicted from both sides."""

    prob: float
    masking: Masking

    def counts(self, lengths: np.ndarray, candidates: np.ndarray, most: int) -> np.ndarray:
        """int64 [S]: predictions of sequences of `lengths` tokens, `candidates` of them no
        specials; `most`: the phase's max_predictions."""
        return prediction_counts(lengths, candidates, self.prob, most)

    def capacity(self, row_len: int, longest: int, sequences: int, most: int) -> int:
        """Predictions that a row of up to `sequences` sequences of up to `longest` tokens holds."""
        if sequences == 1:
            return min(most, max(1, round(self.prob * longest)))
        # A row's tokens at a price each, and its sequences at what they hold beyond that of their
        # own: at no price does a row hold more, and the lowest sum is nearly reached (the dual of a
        # linear program).
        lengths = np.arange(_SHORTEST, longest + 1)
        counts = prediction_counts(lengths, lengths - 2, self.prob, most)

        def most_at(price: float) -> float:
            return price * row_len + sequences * max(0.0, float((counts - price * lengths).max()))

        low, high = 0.0, 1.0
        for _ in range(80):
            third = (high - low) / 3
            if most_at(low + third) < most_at(high - third):
                high -= third
            else:
                low += third
        return int(most_at(low) + 1e-6)

    def apply(
        self, ids: np.ndarray, sequences: Sequences, vocabulary: Vocabulary
    ) -> tuple[np.ndarray, np.ndarray]:
        """(places [M] ascending, the original ids there); something else stands there now."""
        start, a_length, b_length = sequences.start, sequences.a_length, sequences.b_length
        if not len(start):
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        counts, keys = sequences.predictions, sequences.keys
        if self.masking.whole_words:
            columns = np.arange(int((a_length + b_length).max()))
            at = start[:, None] + 1 + columns + (columns >= a_length[:, None])
            word_starts = vocabulary.word_start[ids[np.minimum(at, len(ids) - 1)]]
            sequence, candidate = choose_whole_words(a_length, b_length, counts, keys, word_starts)
        else:
            sequence, candidate = choose(a_length, b_length, counts, keys)
        position = start[sequence] + 1 + candidate + (candidate >= a_length[sequence])
        if self.masking.whole_words:
            order = np.argsort(position)
            position, sequence, candidate = position[order], sequence[order], candidate[order]
        labels = ids[position]
        ids[position] = replacements(
            labels,
            keys[sequence],
            candidate,
            vocabulary.mask_id,
            vocabulary.ordinary_ids,
            self.masking,
        )
        return position, labels


@dataclass(frozen=True)
class LeftToRight:
    """Every token but a sequence's first is predicted from those before it; nothing is hidden."""

    def counts(self, lengths: np.ndarray, candidates: np.ndarray, most: int) -> np.ndarray:
        return lengths - 1

    def capacity(self, row_len: int, longest: int, sequences: int, most: int) -> int:
        # The fewest sequences that fill the row have the fewest last tokens.
        return min(row_len - -(-row_len // longest), sequences * (longest - 1))

    def apply(
        self, ids: np.ndarray, sequences: Sequences, vocabulary: Vocabulary
    ) -> tuple[np.ndarray, np.ndarray]:
        """(places [M] of all tokens but the last of each sequence, the ids that follow there)."""
        counts = sequences.predictions
        before = np.repeat(np.cumsum(counts) - counts, counts)
        position = np.repeat(sequences.start, counts) + np.arange(len(before)) - before
        return position, ids[position + 1]


Objective = MaskedLM | LeftToRight
