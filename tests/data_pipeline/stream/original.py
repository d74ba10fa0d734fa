"""BERT's pair and mask procedure, written plainly: one document, one pair, one token at a time.

What google-research/bert's `create_pretraining_data.py` does, with Python's `random`: the yardstick
for the statistics of the vectorised plan (tests) and for its speed (benchmarks/stream.py).
"""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass
class Instance:
    a: list[int]
    b: list[int]
    is_random: bool
    forced: bool
    short: bool
    cut: int


def cut_pair(a: list[int], b: list[int], room: int, rng: random.Random) -> int:
    count = 0
    while len(a) + len(b) > room:
        longer = a if len(a) > len(b) else b
        if rng.random() < 0.5:
            del longer[0]
        else:
            longer.pop()
        count += 1
    return count


def pairs_of_document(
    documents: list[list[list[int]]],
    number: int,
    max_seq_len: int,
    short_seq_prob: float,
    rng: random.Random,
) -> list[Instance]:
    document = documents[number]
    room = max_seq_len - 3
    target = room
    short = rng.random() < short_seq_prob
    if short:
        target = rng.randint(2, room)
    found, chunk, length, i = [], [], 0, 0
    while i < len(document):
        chunk.append(document[i])
        length += len(document[i])
        if i == len(document) - 1 or length >= target:
            a_end = rng.randint(1, len(chunk) - 1) if len(chunk) > 1 else 1
            a = [token for sentence in chunk[:a_end] for token in sentence]
            b: list[int] = []
            is_random = len(chunk) == 1 or rng.random() < 0.5
            if is_random:
                other = number
                while other == number:
                    other = rng.randint(0, len(documents) - 1)
                start = rng.randint(0, len(documents[other]) - 1)
                for sentence in documents[other][start:]:
                    b.extend(sentence)
                    if len(b) >= target - len(a):
                        break
                i -= len(chunk) - a_end
            else:
                for sentence in chunk[a_end:]:
                    b.extend(sentence)
            cut = cut_pair(a, b, room, rng)
            found.append(Instance(a, b, is_random, len(chunk) == 1, short, cut))
            chunk, length = [], 0
        i += 1
    return found


def mask_instance(
    instance: Instance,
    ids: tuple[int, int, int],
    ordinary: list[int],
    masked_lm_prob: float,
    max_predictions: int,
    rng: random.Random,
) -> tuple[list[int], list[int], list[int], list[int]]:
    """(input_ids, token_type_ids, masked_lm_positions, masked_lm_labels)."""
    cls, sep, mask = ids
    tokens = [cls, *instance.a, sep, *instance.b, sep]
    types = [0] * (len(instance.a) + 2) + [1] * (len(instance.b) + 1)
    candidates = [i for i, token in enumerate(tokens) if token != cls and token != sep]
    rng.shuffle(candidates)
    count = min(max_predictions, max(1, int(round(len(tokens) * masked_lm_prob))))
    chosen = sorted(candidates[:count])
    labels = [tokens[i] for i in chosen]
    for i in chosen:
        if rng.random() < 0.8:
            tokens[i] = mask
        elif rng.random() >= 0.5:
            tokens[i] = ordinary[rng.randint(0, len(ordinary) - 1)]
    return tokens, types, chosen, labels


def pad(
    made: tuple[list[int], list[int], list[int], list[int]],
    max_seq_len: int,
    max_predictions: int,
) -> dict[str, list[int]]:
    """The features the script writes."""
    tokens, types, positions, labels = (list(part) for part in made)
    mask = [1] * len(tokens)
    while len(tokens) < max_seq_len:
        tokens.append(0)
        types.append(0)
        mask.append(0)
    weights = [1.0] * len(positions)
    while len(positions) < max_predictions:
        positions.append(0)
        labels.append(0)
        weights.append(0.0)
    return {
        "input_ids": tokens,
        "input_mask": mask,
        "segment_ids": types,
        "masked_lm_positions": positions,
        "masked_lm_ids": labels,
        "masked_lm_weights": weights,
    }
