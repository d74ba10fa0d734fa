"""Small packed batches for the tests of this room, made by hand from lists of token ids."""

from __future__ import annotations

import numpy as np
import torch

from pretrain.model import ModelConfig, Packed

TINY = ModelConfig(
    vocab_size=101,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=64,
    max_position_embeddings=64,
    vocab_multiple=32,
)
STILL = TINY.model_copy(update={"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0})


def sequences(lengths: list[int], vocab_size: int, seed: int) -> list[tuple[list[int], list[int]]]:
    """(input ids, token types) of each length; types switch to 1 somewhere inside."""
    rng = np.random.default_rng(seed)
    result = []
    for length in lengths:
        split = int(rng.integers(1, length))
        ids = rng.integers(1, vocab_size, length).tolist()
        result.append((ids, [0] * split + [1] * (length - split)))
    return result


def pack(rows: list[list[tuple[list[int], list[int]]]], row_len: int, max_seq_len: int) -> Packed:
    """Rows of sequences as packed inputs: padding tails are runs of at most `max_seq_len`."""
    B = len(rows)
    tensors = {k: torch.zeros(B, row_len, dtype=torch.int64) for k in ("ids", "types", "pos")}
    sequence_ids = torch.zeros(B, row_len, dtype=torch.int32)
    bounds = [0]
    for b, row in enumerate(rows):
        at = 0
        for i, (ids, types) in enumerate(row):
            here = slice(at, at + len(ids))
            tensors["ids"][b, here] = torch.tensor(ids)
            tensors["types"][b, here] = torch.tensor(types)
            tensors["pos"][b, here] = torch.arange(len(ids))
            sequence_ids[b, here] = i + 1
            at += len(ids)
            bounds.append(b * row_len + at)
        while at < row_len:
            at = min(row_len, at + max_seq_len)
            bounds.append(b * row_len + at)
    bounds += [B * row_len] * (B * row_len // 4 - len(bounds))
    return Packed(
        tensors["ids"],
        tensors["types"],
        tensors["pos"],
        sequence_ids,
        torch.tensor(bounds, dtype=torch.int32),
        max_seq_len,
    )
