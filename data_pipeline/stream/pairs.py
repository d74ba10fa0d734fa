"""BERT's sentence pairs, or texts without a segment B, from sentence lengths alone.

The procedure of google-research/bert `create_pretraining_data.py`: walk a document collecting
whole sentences until a target length; A ends at a random sentence; B is the rest (true next) or a
run from a random place in another document (then the unused sentences are put back); cut the longer
side, from front or back by a coin, until the pair fits.  All documents walk in lock-step here: one
pass of the loop makes the next pair of every document that has sentences left.

Texts (`plan_texts`) are the tokens of a document, cut wherever its target length is reached.

Legend: D documents, S sentences of all of them, P pairs. In `_walk` the arrays have one entry a
document that has sentences left: at (which document), cursor (its next sentence), end (its last,
exclusive), goal (tokens of a chunk), of (its key), stop and a_end (where chunk and A end).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from data_pipeline.stream import draws
from data_pipeline.stream.packing import edges

PAIR_SPECIALS, TEXT_SPECIALS = 3, 2  # [CLS] A [SEP] B [SEP]; [CLS] A [SEP]

# Counters of a document's key; a pair's own draws follow, _PER_PAIR for each.
_SHORT, _TARGET, _FIRST_PAIR, _PER_PAIR = 0, 1, 2, 5
_A_END, _COIN, _OTHER, _START, _CUTS = range(_PER_PAIR)


@dataclass(frozen=True)
class Pairs:
    """P pairs, or texts, whose B is empty, as arrays [P].

    document, b_document        index of the document A and B come from
    a_begin, a_end, b_begin, b_end   sentence ranges (indices into all sentences) before cutting
    a_offset, a_length, b_offset, b_length   tokens after cutting; offsets from the document's start
    is_random                   B is a random place, not the continuation
    forced                      random because the chunk had one sentence only
    short                       the document drew a short target
    cut                         tokens taken off A and B together
    """

    document: np.ndarray
    b_document: np.ndarray
    a_begin: np.ndarray
    a_end: np.ndarray
    b_begin: np.ndarray
    b_end: np.ndarray
    a_offset: np.ndarray
    a_length: np.ndarray
    b_offset: np.ndarray
    b_length: np.ndarray
    is_random: np.ndarray
    forced: np.ndarray
    short: np.ndarray
    cut: np.ndarray

    def __len__(self) -> int:
        return len(self.document)

    @property
    def lengths(self) -> np.ndarray:
        """int64 [P]: tokens of the finished sequences, specials included."""
        return sequence_lengths(self.a_length, self.b_length)


def sequence_lengths(a_lengths: np.ndarray, b_lengths: np.ndarray) -> np.ndarray:
    """int64: tokens with specials, of which a sequence without B has one fewer."""
    b_lengths = b_lengths.astype(np.int64)
    return a_lengths + b_lengths + np.where(b_lengths > 0, PAIR_SPECIALS, TEXT_SPECIALS)


def plan_pairs(
    sentence_lengths: np.ndarray,
    sentence_counts: np.ndarray,
    *,
    key: int,
    max_seq_len: int,
    short_seq_prob: float,
    random_prob: float = 0.5,
    copy_of: np.ndarray | None = None,
) -> Pairs:
    """All pairs of a set of documents, in an order that means nothing (permute them).

    sentence_lengths [S] tokens of every sentence, each >= 1, document after document;
    sentence_counts [D]; random_prob: of a random B where the chunk leaves a choice.
    A document without sentences gives no pair. With one document B is drawn from that document.
    copy_of [D], ascending: what each is a copy of; copies of one are one document to a random B.
    """
    room = max_seq_len - PAIR_SPECIALS
    text = _Text.of(sentence_lengths, sentence_counts, key, room, short_seq_prob)
    walk = _walk(text, random_prob)
    cum, begins, ends = text.cum, text.begins, text.ends
    document, a_begin, a_end = walk.document, walk.begin, walk.a_end
    b_end, is_random, forced = walk.end, walk.is_random, walk.forced
    counter = _FIRST_PAIR + _PER_PAIR * walk.step.astype(np.int64)
    of = text.keys[document]

    b_document, b_begin = document.copy(), a_end.copy()
    r = np.flatnonzero(is_random)
    b_document[r], b_begin[r], b_end[r] = _random_places(
        cum, begins, ends, text.filled, copy_of, document[r], of[r], counter[r],
        text.targets[document[r]] - (cum[a_end[r]] - cum[a_begin[r]]),
    )  # fmt: skip

    a_length, b_length = cum[a_end] - cum[a_begin], cum[b_end] - cum[b_begin]
    cut_a, cut_b = cuts(a_length, b_length, room)
    pair_keys = draws.bits(of, counter + _CUTS)
    front_a = draws.binomial(pair_keys, 0, cut_a)
    front_b = draws.binomial(pair_keys, 1 << 32, cut_b)
    return Pairs(
        document=document,
        b_document=b_document,
        a_begin=a_begin,
        a_end=a_end,
        b_begin=b_begin,
        b_end=b_end,
        a_offset=cum[a_begin] - cum[begins[document]] + front_a,
        a_length=a_length - cut_a,
        b_offset=cum[b_begin] - cum[begins[b_document]] + front_b,
        b_length=b_length - cut_b,
        is_random=is_random,
        forced=forced,
        short=text.is_short[document],
        cut=cut_a + cut_b,
    )


def plan_texts(
    sentence_lengths: np.ndarray,
    sentence_counts: np.ndarray,
    *,
    key: int,
    max_seq_len: int,
    short_seq_prob: float,
) -> Pairs:
    """As `plan_pairs`, but sequences of one segment: a document's tokens in order, each once, as
    many a sequence as its target says; the last one of a document has what is left."""
    room = max_seq_len - TEXT_SPECIALS
    text = _Text.of(sentence_lengths, sentence_counts, key, room, short_seq_prob)
    first = text.cum[text.begins]
    tokens = text.cum[text.ends] - first
    pieces = -(-tokens // text.targets)
    document = np.repeat(np.arange(len(tokens)), pieces)
    number = np.arange(len(document)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    offset = number * text.targets[document]
    length = np.minimum(text.targets[document], tokens[document] - offset)
    begin = np.searchsorted(text.cum, first[document] + offset, side="right") - 1
    end = np.searchsorted(text.cum, first[document] + offset + length)
    none, no = np.zeros(len(document), np.int64), np.zeros(len(document), bool)
    return Pairs(
        document=document,
        b_document=document,
        a_begin=begin,
        a_end=end,
        b_begin=end,
        b_end=end,
        a_offset=offset,
        a_length=length,
        b_offset=none,
        b_length=none,
        is_random=no,
        forced=no,
        short=text.is_short[document],
        cut=none,
    )


@dataclass(frozen=True)
class _Text:
    """cum [S + 1] tokens before each sentence; begins, ends [D] its sentences; filled: documents
    that have any; targets [D] tokens; keys [D]."""

    cum: np.ndarray
    begins: np.ndarray
    ends: np.ndarray
    filled: np.ndarray
    keys: np.ndarray
    is_short: np.ndarray
    targets: np.ndarray

    @classmethod
    def of(
        cls,
        sentence_lengths: np.ndarray,
        sentence_counts: np.ndarray,
        key: int,
        room: int,
        short_seq_prob: float,
    ) -> _Text:
        cum, bounds = edges(sentence_lengths), edges(sentence_counts)
        begins, ends = bounds[:-1], bounds[1:]
        keys = draws.fold_in(key, np.arange(len(begins)))
        is_short = draws.bernoulli(draws.bits(keys, _SHORT), short_seq_prob)
        drawn = 2 + draws.randint(draws.bits(keys, _TARGET), room - 1)
        targets = np.where(is_short, drawn, room)
        return cls(cum, begins, ends, np.flatnonzero(ends > begins), keys, is_short, targets)


@dataclass(frozen=True)
class _Walk:
    """Chunks of sentences [begin, end), A to a_end; step: which of its document's chunks."""

    document: np.ndarray
    step: np.ndarray
    begin: np.ndarray
    a_end: np.ndarray
    end: np.ndarray
    is_random: np.ndarray

    @property
    def forced(self) -> np.ndarray:
        return self.end - self.begin == 1


def _walk(text: _Text, random_prob: float) -> _Walk:
    parts: list[tuple[np.ndarray, ...]] = []
    at, step = text.filled, 0
    cursor, end, goal, of = text.begins[at], text.ends[at], text.targets[at], text.keys[at]
    while at.size or not parts:
        counter = _FIRST_PAIR + _PER_PAIR * step
        stop = np.minimum(np.searchsorted(text.cum, text.cum[cursor] + goal), end)
        sentences = stop - cursor
        choice = draws.randint(draws.bits(of, counter + _A_END), np.maximum(sentences - 1, 1))
        a_end = cursor + 1 + np.where(sentences > 1, choice, 0)
        is_random = draws.bernoulli(draws.bits(of, counter + _COIN), random_prob) | (sentences == 1)
        parts.append((at, np.full(at.size, step, np.int32), cursor, a_end, stop, is_random))
        cursor = np.where(is_random, a_end, stop)
        more = cursor < end
        if not more.all():
            at, cursor, goal, end, of = at[more], cursor[more], goal[more], end[more], of[more]
        step += 1
    return _Walk(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _random_places(
    cum: np.ndarray,
    begins: np.ndarray,
    ends: np.ndarray,
    filled: np.ndarray,
    copy_of: np.ndarray | None,
    document: np.ndarray,
    of: np.ndarray,
    counter: np.ndarray,
    wanted: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(document, first sentence, end sentence) of random B: any other document, any sentence of it,
    then on until `wanted` tokens or its end."""
    own = np.searchsorted(filled, document)
    after: np.ndarray = own + 1
    others: np.ndarray | int = len(filled) - 1
    if copy_of is not None:
        texts = copy_of[filled]
        after = np.searchsorted(texts, texts[own], side="right")
        others = len(filled) - (after - np.searchsorted(texts, texts[own]))
    if np.min(others, initial=len(filled)) > 0:
        own = after + draws.randint(draws.bits(of, counter + _OTHER), others)
        own %= len(filled)
    other = filled[own]
    begin = begins[other] + draws.randint(
        draws.bits(of, counter + _START), ends[other] - begins[other]
    )
    # In ascending order the searches walk through memory instead of missing the cache each time.
    order = np.argsort(begin)
    stop = np.empty_like(begin)
    stop[order] = np.searchsorted(cum, (cum[begin] + np.maximum(wanted, 1))[order])
    return other, begin, np.minimum(stop, ends[other])


def cuts(a: np.ndarray, b: np.ndarray, room: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens to take off A and B: one at a time from the longer (from B when equal), until
    a + b <= room."""
    excess = np.maximum(a + b - room, 0)
    uneven = np.minimum(excess, np.abs(a - b))
    rest = excess - uneven
    longer_a = a > b
    cut_a = np.where(longer_a, uneven, 0) + rest // 2
    return cut_a, excess - cut_a


def balanced_random_prob(
    sentence_lengths: np.ndarray,
    sentence_counts: np.ndarray,
    *,
    key: int,
    max_seq_len: int,
    short_seq_prob: float,
) -> float:
    """The `random_prob` with which `plan_pairs` of the same arguments makes half of its pairs
    random although one-sentence chunks have no choice: (1/2 - f) / (1 - f), where f is the share of
    such chunks (a fixed point, since put-back sentences make new chunks)."""
    room = max_seq_len - PAIR_SPECIALS
    text = _Text.of(sentence_lengths, sentence_counts, key, room, short_seq_prob)
    probability = 0.5
    for _ in range(2):
        forced = _walk(text, probability).forced
        share = float(forced.mean()) if len(forced) else 0.0
        probability = max(0.0, (0.5 - share) / (1 - share)) if share < 0.5 else 0.0
    return probability
