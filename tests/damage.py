"""Seeded damage for tests of readers."""

from __future__ import annotations

import numpy as np


def flipped(data: bytes, at: int, bit: int = 0) -> bytes:
    """With another bit at the byte `at`."""
    return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]


def damaged(data: bytes, random: np.random.Generator) -> bytes:
    """One of: a flipped bit, noise, a hole, a piece twice, an early end."""
    kind, at = int(random.integers(5)), int(random.integers(len(data)))
    span = int(random.integers(1, 200))
    if kind == 0:
        return flipped(data, at, int(random.integers(8)))
    if kind == 1:
        return data[:at] + random.bytes(span) + data[at + span :]
    if kind == 2:
        return data[:at] + data[at + span :]
    return data[: at + span] + data[at:] if kind == 3 else data[:at]
