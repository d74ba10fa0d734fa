from pathlib import Path

import numpy as np
import pytest

from data_pipeline.stream import draws
from data_pipeline.stream.dataset import Dataset
from data_pipeline.stream.masking import (
    Masking,
    choose,
    choose_whole_words,
    prediction_counts,
    replacements,
)
from data_pipeline.stream.objective import MaskedLM
from data_pipeline.stream.plan import PhaseSpec, StreamConfig


def some_lengths(n: int, seed: int, longest: int = 60) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.integers(1, longest, n), rng.integers(1, longest, n)


def test_prediction_counts_are_the_original_formula() -> None:
    lengths = np.arange(5, 513)
    for most in (20, 80):
        got = prediction_counts(lengths, lengths - 3, 0.15, most)
        plain = [min(most, max(1, int(round(n * 0.15)))) for n in lengths.tolist()]
        assert got.tolist() == plain
    assert prediction_counts(np.array([5, 8]), np.array([2, 5]), 1.0, 99).tolist() == [2, 5]


@pytest.mark.parametrize("prob", [0.01, 0.05, 0.1, 0.15, 0.4, 1.0])
@pytest.mark.parametrize(
    ("row_len", "longest", "sequences"),
    [(96, 24, 16), (96, 96, 8), (128, 32, 40), (60, 20, 60), (64, 16, 4)],
)
def test_a_row_holds_the_predictions_of_any_sequences(
    prob: float, row_len: int, longest: int, sequences: int
) -> None:
    """The worst there are, by dynamic programming."""
    lengths = np.arange(3, longest + 1)
    counts = prediction_counts(lengths, lengths - 2, prob, 20)
    worst = np.zeros(row_len + 1, np.int64)
    for _ in range(sequences):
        with_another = worst.copy()
        for length, count in zip(lengths, counts, strict=True):
            with_another[length:] = np.maximum(with_another[length:], worst[:-length] + count)
        worst = with_another
    capacity = MaskedLM(prob, Masking()).capacity(row_len, longest, sequences, 20)
    assert worst.max() <= capacity <= 1.2 * worst.max() + 1


@pytest.mark.parametrize("whole_words", [False, True])
def test_exactly_the_planned_count_without_repeats(whole_words: bool) -> None:
    a, b = some_lengths(400, 0)
    counts = prediction_counts(a + b + 3, a + b, 0.15, 20)
    keys = draws.fold_in(3, np.arange(400))
    if whole_words:
        starts = np.random.default_rng(1).random((400, int((a + b).max()))) < 0.6
        sequence, candidate = choose_whole_words(a, b, counts, keys, starts)
    else:
        sequence, candidate = choose(a, b, counts, keys)
    assert np.bincount(sequence, minlength=400).tolist() == counts.tolist()
    assert (candidate >= 0).all() and (candidate < (a + b)[sequence]).all()
    assert len({*zip(sequence.tolist(), candidate.tolist(), strict=True)}) == len(sequence)


def test_every_candidate_is_equally_likely() -> None:
    n, size, count = 40_000, 20, 3
    ones = np.ones(n, np.int64)
    _, candidate = choose(ones * 8, ones * 12, ones * count, draws.fold_in(5, np.arange(n)))
    seen = np.bincount(candidate, minlength=size)
    expected = n * count / size
    assert abs(seen - expected).max() < 5 * np.sqrt(expected)
    # And so is every pair of them.
    sets = candidate.reshape(n, count)
    together = np.bincount(sets[:, 0] * size + sets[:, 1], minlength=size * size)
    together = together.reshape(size, size)
    first = np.array([(sets[:, 0] == i).sum() for i in range(size)])
    # P(smallest is i) = C(19 - i, 2) / C(20, 3)
    chance = np.array([(19 - i) * (18 - i) / 2 / 1140 for i in range(size)])
    assert abs(first - n * chance).max() < 5 * np.sqrt(n * chance.max())
    assert together[0, 1] > 0


def test_a_sequence_does_not_depend_on_its_neighbours() -> None:
    a, b = some_lengths(100, 2)
    counts = prediction_counts(a + b + 3, a + b, 0.15, 20)
    keys = draws.fold_in(4, np.arange(100))
    starts = np.random.default_rng(1).random((100, int((a + b).max()))) < 0.6
    whole = choose(a, b, counts, keys)
    words = choose_whole_words(a, b, counts, keys, starts)
    for i in (0, 17, 99):
        one = slice(i, i + 1)
        alone = choose(a[one], b[one], counts[one], keys[one])[1]
        assert alone.tolist() == whole[1][whole[0] == i].tolist()
        width = int((a + b)[i])
        alone = choose_whole_words(a[one], b[one], counts[one], keys[one], starts[one, :width])[1]
        assert alone.tolist() == words[1][words[0] == i].tolist()


def test_whole_words_are_whole() -> None:
    a, b = some_lengths(500, 3)
    b[::2] = 0  # without a segment B
    width = int((a + b).max())
    starts = np.random.default_rng(4).random((500, width)) < 0.55
    counts = prediction_counts(a + b + 3, a + b, 0.15, 20)
    sequence, candidate = choose_whole_words(a, b, counts, draws.fold_in(6, np.arange(500)), starts)
    broken = 0
    for i in range(500):
        chosen = set(candidate[sequence == i].tolist())
        begins = [j for j in range(a[i] + b[i]) if starts[i, j] or j in (0, a[i])]
        words = [range(x, y) for x, y in zip(begins, [*begins[1:], a[i] + b[i]], strict=True)]
        partly = [w for w in words if 0 < len(chosen & set(w)) < len(w)]
        broken += len(partly)
        # At most one word is cut, and only where no other word would have fitted.
        assert len(partly) <= 1
        if partly:
            left = len(chosen & set(partly[0]))
            assert all(len(w) > left for w in words if not chosen & set(w))
    assert broken < 50


def test_a_segment_begins_a_word_even_in_the_middle_of_one() -> None:
    """B cut at its front may begin with a `##` piece; it is no part of A's last word."""
    n = 2000
    ones = np.ones(n, np.int64)
    starts = np.zeros((n, 8), bool)  # by their pieces, A and B would be one word of 8
    sequence, candidate = choose_whole_words(
        ones * 4, ones * 4, ones * 4, draws.fold_in(2, np.arange(n)), starts
    )
    chosen = candidate.reshape(n, 4)
    in_a = (chosen < 4).sum(axis=1)
    assert set(in_a.tolist()) == {0, 4}
    assert abs((in_a == 4).mean() - 0.5) < 5 * np.sqrt(0.25 / n)
    assert len(sequence) == 4 * n


def test_whole_words_of_one_piece_are_as_likely_as_each_other() -> None:
    n = 30_000
    ones = np.ones(n, np.int64)
    starts = np.ones((n, 10), bool)
    _, candidate = choose_whole_words(
        ones * 5, ones * 5, ones * 2, draws.fold_in(8, np.arange(n)), starts
    )
    seen = np.bincount(candidate, minlength=10)
    assert abs(seen - n / 5).max() < 5 * np.sqrt(n / 5)


@pytest.mark.parametrize(
    ("mask", "same"), [(0.8, 0.1), (1.0, 0.0), (0.8, 0.0), (0.8, 0.2), (0.0, 0.2), (0.0, 0.0)]
)
def test_replacements_have_the_shares_asked_for(mask: float, same: float) -> None:
    """Those of the paper's appendix C.2."""
    count = 200_000
    ordinary = np.arange(10, 1010)
    originals = np.full(count, 7)  # not among the ordinary ids: "unchanged" shows
    keys, places = draws.fold_in(1, np.arange(count) // 10), np.arange(count) % 10
    seen = replacements(originals, keys, places, 3, ordinary, Masking(False, mask, same))
    is_mask, is_same = seen == 3, seen == 7
    rest = ~is_mask & ~is_same
    for share, flag in ((mask, is_mask), (same, is_same), (max(1 - mask - same, 0), rest)):
        assert abs(flag.mean() - share) <= 5 * np.sqrt(share * (1 - share) / count)
    drawn = seen[rest]
    assert set(drawn.tolist()) <= set(ordinary.tolist())
    counts = np.bincount(drawn - 10, minlength=1000)
    assert not len(drawn) or abs(counts - len(drawn) / 1000).max() < 6 * np.sqrt(len(drawn) / 1000)


def test_shares_of_replacements_add_up_and_the_usual_ones_have_no_name_in_the_plan(
    toy: Path,
) -> None:
    for given in ({"mask": 0.5}, {"mask": 0.9, "same": 0.2, "random": -0.1}):
        with pytest.raises(ValueError, match="mask"):
            StreamConfig(mask=given)
    settings = {
        share: Dataset(StreamConfig(dir=str(toy), mask={"mask": share, "same": 0.9 - share}))
        .planner(PhaseSpec(), phase_index=0, seed=1, split="train")
        .settings
        for share in (0.8, 0.9)
    }
    assert settings[0.9] == settings[0.8] | {"mask": {"mask": 0.9, "same": 0.0, "random": 0.1}}
