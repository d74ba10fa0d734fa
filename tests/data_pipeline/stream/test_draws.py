import numpy as np

from data_pipeline.stream import draws

MASK = (1 << 64) - 1


def splitmix(seed: int, count: int) -> list[int]:
    """SplitMix64 as published (Steele, Lea, Flood 2014), one number after the other."""
    found = []
    for _ in range(count):
        seed = (seed + 0x9E3779B97F4A7C15) & MASK
        z = seed
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        found.append(z ^ (z >> 31))
    return found


def test_draws_are_splitmix64() -> None:
    for seed in (0, 1, 0xFFFF_FFFF_FFFF_FFFF, draws.key(1, 2, 3)):
        got = draws.bits(np.array([seed], np.uint64), np.arange(50))
        assert got.tolist() == splitmix(seed, 50)
    # The first numbers of seed 1234567, as other implementations give them.
    assert draws.bits(np.array([1234567], np.uint64), np.arange(2)).tolist() == [
        6457827717110365317,
        3203168211198807973,
    ]


def test_keys_differ_by_every_part() -> None:
    parts = [draws.key(a, b, c) for a in range(10) for b in range(10) for c in range(10)]
    assert len(set(parts)) == 1000
    assert draws.key(1, 2) != draws.key(2, 1)


def test_below_is_even_and_in_range() -> None:
    many = draws.bits(np.array([5], np.uint64), np.arange(120_000))
    counts = np.bincount(draws.randint(many, 12), minlength=12)
    assert len(counts) == 12
    assert abs(counts - 10_000).max() < 5 * np.sqrt(10_000)
    assert draws.randint(many, 1).max() == 0


def test_heads_are_binomial() -> None:
    of = draws.fold_in(9, np.arange(20_000))
    for tosses in (0, 1, 7, 64, 65, 200):
        got = draws.binomial(of, 3, np.full(len(of), tosses))
        assert got.min() >= 0 and got.max() <= tosses
        assert abs(got.mean() - tosses / 2) < 5 * np.sqrt(tosses / 4 / len(of)) + 1e-9
        if tosses:
            assert abs(got.var() - tosses / 4) < 0.05 * tosses / 4 + 0.01


def test_permutation_is_one() -> None:
    order = draws.permutation(77, 1000)
    assert sorted(order.tolist()) == list(range(1000))
    assert order.tolist() != draws.permutation(78, 1000).tolist()
    assert draws.permutation(1, 0).size == 0
