"""Sequences into rows: best-fit decreasing inside groups, all groups in lock-step.

A row may be longer than the longest sequence: four of 128 in a row of 512 waste less than one in a
row of 128.  Groups keep rows random: a row mixes neighbours of a random order only.
"""

from __future__ import annotations

import numpy as np


def pack(
    lengths: np.ndarray, row_len: int, max_per_row: int, group: int = 2048
) -> tuple[np.ndarray, np.ndarray]:
    """Rows of at most `row_len` tokens and `max_per_row` sequences.

    lengths [P] in tokens, each <= row_len. Returns (order int64 [P]: sequences row after row,
    row_starts int64 [rows + 1] into it).
    """
    assert int(lengths.max(initial=0)) <= row_len < 1 << 16
    count = len(lengths)
    groups = -(-count // group)
    padded = np.zeros(groups * group, np.uint16)
    padded[:count] = lengths
    padded = padded.reshape(groups, group)
    by_length = np.argsort(-padded.astype(np.int32), axis=1, kind="stable")
    longest_first = np.take_along_axis(padded, by_length, axis=1)

    row_of = np.empty((groups, group), np.int64)
    every = np.arange(groups)
    free = np.full((groups, 64), row_len, np.uint16)
    held = np.zeros((groups, 64), np.uint16)
    opened = 0
    for step in range(group):
        length = longest_first[:, step]
        if not length.any():
            row_of[:, step:] = -1
            break
        if opened + 1 >= free.shape[1]:
            free = np.hstack((free, np.full_like(free, row_len)))
            held = np.hstack((held, np.zeros_like(held)))
        # Room left after placing, as unsigned: a row too full wraps round and is never the least.
        # Untouched rows have the most room of all, so one is opened only when no other fits.
        row = (free[:, : opened + 1] - length[:, None]).argmin(axis=1)
        real = length > 0
        row_of[:, step] = np.where(real, row, -1)
        free[every, row] -= length
        held[every, row] += real
        opened = max(opened, int(row[real].max()) + 1)
        closed = held[every, row] >= max_per_row
        free[every[closed], row[closed]] = 0

    width = opened + 1
    flat = np.where(row_of >= 0, row_of + every[:, None] * width, groups * width).ravel()
    sequence = (by_length + every[:, None] * group).ravel()
    place = np.argsort(flat, kind="stable")[:count]
    order, rows = sequence[place], flat[place]
    starts = np.flatnonzero(np.append(True, rows[1:] != rows[:-1])) if count else np.zeros(0, int)
    return order, np.append(starts, count)


def edges(sizes: np.ndarray) -> np.ndarray:
    """int64 [n + 1]: where each of n stretches in a row begins, and where the last one ends."""
    result = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, dtype=np.int64, out=result[1:])
    return result


def permute_rows(
    order: np.ndarray, row_starts: np.ndarray, rows: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The same rows in the order `rows`."""
    sizes = np.diff(row_starts)[rows]
    starts = edges(sizes)
    shift = np.repeat(row_starts[:-1][rows] - starts[:-1], sizes)
    return order[shift + np.arange(len(order))], starts
