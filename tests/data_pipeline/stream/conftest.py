"""Small datasets for the stream's tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.datasets import write_dataset

VOCAB = 1000


def random_documents(count: int, seed: int, longest: int = 40) -> list[list[list[int]]]:
    """Documents of 1..longest sentences of 1..60 tokens; every ordinary id occurs."""
    rng = np.random.default_rng(seed)
    return [
        [
            rng.integers(5, VOCAB, rng.integers(1, 60)).tolist()
            for _ in range(rng.integers(1, longest))
        ]
        for _ in range(count)
    ]


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """300 documents in 12 shards, about 180 thousand tokens, and 40 held-out documents."""
    folder = tmp_path_factory.mktemp("toy")
    write_dataset(
        folder,
        random_documents(300, 0),
        heldout=random_documents(40, 1),
        vocab=VOCAB,
        documents_per_shard=25,
    )
    return folder
