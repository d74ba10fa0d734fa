"""Random numbers as a pure function of (key, counter): SplitMix64, vectorised.

A draw never depends on what was drawn before it, so any rank or worker can make the numbers of any
sequence alone, in any order.  numpy's Philox would do as well, but one generator object a sequence
costs more than the sequence; here a whole batch of keys is one array expression.
"""

from __future__ import annotations

import numpy as np

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_U64 = np.uint64


def key(*parts: int) -> int:
    """One 64-bit key from whole numbers (seed, phase, epoch, ...), each of any size below 2^64."""
    state = 0
    for part in parts:
        state = _mix_int((state + _GAMMA + part) & _MASK)
    return state


def fold_in(base: int, numbers: np.ndarray) -> np.ndarray:
    """uint64 keys, one for each of `numbers` (whole, >= 0), below the key `base`."""
    return bits(np.full(1, base, _U64), numbers)


def bits(of: np.ndarray, counter: np.ndarray | int) -> np.ndarray:
    """uint64 draws; `of` (uint64 keys) and `counter` (whole, >= 0) broadcast."""
    at = np.atleast_1d(np.asarray(counter, dtype=_U64)) + _U64(1)
    x = of + at * _U64(_GAMMA)
    y = x >> _U64(30)
    x ^= y
    x *= _U64(0xBF58476D1CE4E5B9)
    np.right_shift(x, _U64(27), out=y)
    x ^= y
    x *= _U64(0x94D049BB133111EB)
    np.right_shift(x, _U64(31), out=y)
    x ^= y
    return x


def randint(draws: np.ndarray, bound: np.ndarray | int) -> np.ndarray:
    """int64 in [0, bound) from the high half of uint64 draws; 1 <= bound < 2^31."""
    high = draws >> _U64(32)
    return ((high * np.asarray(bound, dtype=_U64)) >> _U64(32)).astype(np.int64)


def bernoulli(draws: np.ndarray, probability: float) -> np.ndarray:
    """bool: true with `probability`, from the high half of uint64 draws."""
    return (draws >> _U64(32)) < _U64(round(probability * 2**32))


def binomial(of: np.ndarray, counter: int, tosses: np.ndarray) -> np.ndarray:
    """int64: heads among `tosses` (>= 0) fair coins, one count for each key. Uses the counters from
    `counter` on, one for every 64 tosses."""
    result = np.zeros(len(of), np.int64)
    left = np.asarray(tosses, np.int64).copy()
    at = np.flatnonzero(left > 0)
    while at.size:
        count = np.minimum(left[at], 64).astype(_U64)
        tossed = bits(of[at], counter) >> (_U64(64) - count)
        result[at] += np.bitwise_count(tossed)
        left[at] -= 64
        at = at[left[at] > 0]
        counter += 1
    return result


def permutation(of: int, size: int) -> np.ndarray:
    """int64 [size]: a random order of range(size)."""
    return np.argsort(fold_in(of, np.arange(size)), kind="stable")


def _mix_int(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
