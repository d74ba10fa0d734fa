import random
from collections.abc import Callable

import numpy as np
import pytest

from data_pipeline.stream.pairs import (
    Pairs,
    balanced_random_prob,
    cuts,
    plan_pairs,
    plan_texts,
)
from tests.data_pipeline.stream.original import cut_pair, pairs_of_document


def plan(
    documents: list[list[int]],
    key: int = 1,
    max_seq_len: int = 64,
    how: Callable[..., Pairs] = plan_pairs,
    **more: float,
) -> Pairs:
    """Pairs of documents given as lists of sentence lengths."""
    return how(
        np.array([n for document in documents for n in document], np.uint16),
        np.array([len(document) for document in documents]),
        key=key,
        max_seq_len=max_seq_len,
        short_seq_prob=more.pop("short_seq_prob", 0.1),
        **more,
    )


def some_lengths(count: int, seed: int, longest: int = 50) -> list[list[int]]:
    """Documents with the skew of real ones: many short, a few very long."""
    rng = np.random.default_rng(seed)
    return [
        np.clip(rng.lognormal(2.9, 0.6, n), 1, 300).astype(int).tolist()
        for n in np.clip(rng.lognormal(2.2, 1.0, count), 1, longest).astype(int)
    ]


def test_every_sentence_is_once_a_or_true_b() -> None:
    documents = some_lengths(400, 0)
    total = sum(map(len, documents))
    for max_seq_len in (16, 64, 512):
        pairs = plan(documents, max_seq_len=max_seq_len)
        used = np.zeros(total, int)
        for p in range(len(pairs)):
            used[pairs.a_begin[p] : pairs.a_end[p]] += 1
            if not pairs.is_random[p]:
                used[pairs.b_begin[p] : pairs.b_end[p]] += 1
        assert (used == 1).all()


def test_segments_are_never_empty_and_fit() -> None:
    for max_seq_len in (8, 33, 128):
        pairs = plan(some_lengths(300, 2), max_seq_len=max_seq_len)
        assert pairs.a_length.min() >= 1 and pairs.b_length.min() >= 1
        assert pairs.lengths.max() <= max_seq_len


def test_true_next_follows_and_random_comes_from_elsewhere() -> None:
    pairs = plan(some_lengths(300, 3))
    true = ~pairs.is_random
    assert (pairs.b_begin[true] == pairs.a_end[true]).all()
    assert (pairs.b_document[true] == pairs.document[true]).all()
    assert (pairs.b_document[~true] != pairs.document[~true]).all()
    assert pairs.is_random[pairs.forced].all()


def test_unused_sentences_are_put_back() -> None:
    """The walk goes on behind A after a random B, behind B after a true one."""
    documents = some_lengths(60, 4)
    pairs = plan(documents)
    starts = np.cumsum([0, *map(len, documents)])
    for number in range(len(documents)):
        mine = np.flatnonzero(pairs.document == number)
        mine = mine[np.argsort(pairs.a_begin[mine])]
        expected = starts[number]
        for p in mine:
            assert pairs.a_begin[p] == expected
            expected = pairs.a_end[p] if pairs.is_random[p] else pairs.b_end[p]
        assert expected == starts[number + 1]


@pytest.mark.parametrize("short_seq_prob", [0.0, 0.5])
def test_texts_are_documents_cut_wherever_their_target_is_reached(short_seq_prob: float) -> None:
    documents = [[], *some_lengths(300, 3), [3], [62], [63]]
    pairs = plan(documents, how=plan_texts, short_seq_prob=short_seq_prob)
    assert (pairs.lengths == pairs.a_length + 2).all()
    assert not (pairs.b_length | pairs.cut | pairs.is_random).any()
    short = 0
    for number, sentences in enumerate(documents):
        mine = np.flatnonzero(pairs.document == number)
        tokens = np.repeat(np.arange(len(sentences)), sentences)  # by their sentence
        target = max(pairs.a_length[mine], default=0)
        target = 62 if not pairs.short[mine].any() else target
        short += bool(pairs.short[mine].any())
        plain = [tokens[at : at + target] for at in range(0, len(tokens), max(target, 1))]
        before = sum(map(len, documents[:number]))
        assert pairs.a_offset[mine].tolist() == [at * target for at in range(len(mine))]
        for text, p in zip(plain, mine, strict=True):
            assert pairs.a_length[p] == len(text) > 0
            assert pairs.a_begin[p] - before == text[0] and pairs.a_end[p] - before == text[-1] + 1
    assert short == 0 if short_seq_prob == 0 else abs(short / 300 - 0.5) < 0.15


def test_cuts_equal_the_plain_loop() -> None:
    rng = random.Random(0)
    a, b = np.array([(rng.randint(1, 90), rng.randint(1, 90)) for _ in range(500)]).T
    cut_a, cut_b = cuts(a, b, 61)
    for p in range(500):
        left, right = [0] * a[p], [0] * b[p]
        cut_pair(left, right, 61, rng)
        assert (len(left), len(right)) == (a[p] - cut_a[p], b[p] - cut_b[p])


def test_cut_tokens_come_from_both_ends() -> None:
    """A long document of long sentences: what is kept begins evenly within what was there."""
    pairs = plan([[40] * 4000, [40] * 4000], max_seq_len=64, short_seq_prob=0.0)
    true = ~pairs.is_random
    front = pairs.a_offset - pairs.a_begin % 4000 * 40
    assert true.sum() > 1000 and front[true].max() > 0
    taken = (40 * (pairs.a_end - pairs.a_begin) - pairs.a_length)[true]
    assert (front[true] <= taken).all()
    b_front = (pairs.b_offset - pairs.b_begin % 4000 * 40)[true]
    b_taken = (40 * (pairs.b_end - pairs.b_begin) - pairs.b_length)[true]
    for fronts, cut in ((front[true], taken), (b_front, b_taken)):
        assert abs(fronts.sum() / cut.sum() - 0.5) < 5 * np.sqrt(0.25 / cut.sum())


def test_a_document_alone_takes_b_from_itself_and_empty_ones_give_nothing() -> None:
    pairs = plan([[10] * 50])
    assert (pairs.b_document == 0).all() and pairs.is_random.any()
    assert len(plan([])) == 0
    assert len(plan([[], []])) == 0
    pairs = plan([[], [5, 6], [], [7]])
    assert set(pairs.document.tolist()) == {1, 3}
    assert set(pairs.b_document[pairs.is_random].tolist()) <= {1, 3}


def test_another_key_another_plan_same_key_same_plan() -> None:
    documents = some_lengths(100, 5)
    one, same, other = plan(documents, 1), plan(documents, 1), plan(documents, 2)
    for name in Pairs.__dataclass_fields__:
        assert np.array_equal(getattr(one, name), getattr(same, name))
    assert not np.array_equal(one.a_end[:50], other.a_end[:50])


@pytest.mark.parametrize("max_seq_len", [128, 512])
def test_statistics_are_those_of_the_original_procedure(max_seq_len: int) -> None:
    documents = some_lengths(3000, 6, longest=120)
    tokens = [[[0] * n for n in document] for document in documents]
    plain, by_document = [], []
    for seed in range(3):
        rng = random.Random(seed)
        for number in range(len(documents)):
            made = pairs_of_document(tokens, number, max_seq_len, 0.1, rng)
            plain += made
            by_document.append(len(made))
    ours = [plan(documents, key, max_seq_len) for key in range(6)]

    def both(name: str, plainly: list[float], planned: np.ndarray) -> None:
        x, y = np.array(plainly, float), planned.astype(float)
        # Pairs of a document share its target, so they count for fewer than they are: 6 sigma.
        error = np.sqrt(x.var() / len(x) + y.var() / len(y))
        assert abs(x.mean() - y.mean()) <= 6 * error, (name, x.mean(), y.mean(), error)

    def joined(name: str) -> np.ndarray:
        return np.concatenate([getattr(p, name) for p in ours])

    both("A", [len(i.a) for i in plain], joined("a_length"))
    both("B", [len(i.b) for i in plain], joined("b_length"))
    both("random", [i.is_random for i in plain], joined("is_random"))
    both("one-sentence", [i.forced for i in plain], joined("forced"))
    both("short", [i.short for i in plain], joined("short"))
    both("cut", [i.cut for i in plain], joined("cut"))
    both("is cut", [i.cut > 0 for i in plain], joined("cut") > 0)
    counts = np.concatenate([np.bincount(p.document, minlength=len(documents)) for p in ours])
    both("pairs of a document", by_document, counts)
    for edge in np.linspace(5, max_seq_len - 3, 12).astype(int):
        lengths = joined("lengths") - 3
        both(f"length <= {edge}", [len(i.a) + len(i.b) <= edge for i in plain], lengths <= edge)
        both(f"A <= {edge}", [len(i.a) <= edge for i in plain], joined("a_length") <= edge)


def test_balanced_variant_gives_half() -> None:
    documents = some_lengths(6000, 7)
    lengths = np.array([n for document in documents for n in document], np.uint16)
    counts = np.array([len(document) for document in documents])
    settings = {"max_seq_len": 64, "short_seq_prob": 0.1}
    plain = plan_pairs(lengths, counts, key=1, **settings)
    assert plain.is_random.mean() > 0.55
    for key in (1, 2):
        share = balanced_random_prob(lengths, counts, key=key, **settings)
        balanced = plan_pairs(lengths, counts, key=key, random_prob=share, **settings)
        assert abs(balanced.is_random.mean() - 0.5) < 5 * np.sqrt(0.25 / len(balanced))


def test_balanced_variant_holds_where_one_document_is_most_of_the_text() -> None:
    """A long document with a short target makes one-sentence chunks by the thousand."""
    documents = [[20] * 4000, [20] * 2000, *some_lengths(60, 8)]
    lengths = np.array([n for document in documents for n in document], np.uint16)
    counts = np.array([len(document) for document in documents])
    for key in range(6):
        settings = {"key": key, "max_seq_len": 64, "short_seq_prob": 0.5}
        share = balanced_random_prob(lengths, counts, **settings)
        balanced = plan_pairs(lengths, counts, random_prob=share, **settings)
        possible = max(0.5, float(balanced.forced.mean()))
        assert abs(balanced.is_random.mean() - possible) < 0.02
