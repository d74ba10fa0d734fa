import numpy as np
import pytest

from data_pipeline.stream.packing import pack, permute_rows


def plain_best_fit(lengths: list[int], row_len: int, most: int) -> list[list[int]]:
    """Best-fit decreasing, a sequence at a time; ties go to the row opened first."""
    rows: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        best, least = None, row_len + 1
        for row in rows:
            free = row_len - sum(lengths[j] for j in row) - lengths[i]
            if len(row) < most and 0 <= free < least:
                best, least = row, free
        if best is None:
            rows.append([i])
        else:
            best.append(i)
    return rows


def some_lengths(n: int, seed: int, longest: int = 128) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.where(rng.random(n) < 0.7, longest, rng.integers(5, longest + 1, n))


@pytest.mark.parametrize(("row_len", "most"), [(512, 16), (512, 4), (128, 16), (300, 1000)])
def test_rows_are_those_of_plain_best_fit(row_len: int, most: int) -> None:
    lengths = some_lengths(300, 1)
    order, starts = pack(lengths, row_len, most, group=100)
    got = [order[a:b].tolist() for a, b in zip(starts[:-1], starts[1:], strict=True)]
    expected = []
    for base in range(0, 300, 100):
        part = plain_best_fit(lengths[base : base + 100].tolist(), row_len, most)
        expected += [[base + i for i in sorted(row)] for row in part]
    assert [sorted(row) for row in got] == expected


def test_every_sequence_once_and_no_row_too_full() -> None:
    for n in (0, 1, 2, 5000):
        lengths = some_lengths(n, 2)
        order, starts = pack(lengths, 512, 16)
        assert sorted(order.tolist()) == list(range(n))
        sums = np.add.reduceat(lengths[order], starts[:-1]) if n else np.zeros(0)
        assert (sums <= 512).all()
        assert np.diff(starts).max(initial=0) <= 16 and np.diff(starts).min(initial=1) >= 1


def test_fill_of_bert_like_lengths() -> None:
    lengths = some_lengths(20_000, 3)
    _, starts = pack(lengths, 512, 16)
    assert lengths.sum() / (512 * (len(starts) - 1)) > 0.99


def test_permuted_rows_keep_their_sequences() -> None:
    order, starts = pack(some_lengths(500, 4), 512, 16)
    rows = np.random.default_rng(0).permutation(len(starts) - 1)
    new_order, new_starts = permute_rows(order, starts, rows)
    for place, row in enumerate(rows):
        assert (
            new_order[new_starts[place] : new_starts[place + 1]].tolist()
            == order[starts[row] : starts[row + 1]].tolist()
        )
    assert new_starts[-1] == 500
