"""Datasets of invented ids, for tests and benchmarks of what comes after preparation."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from data_pipeline.corpus.manifest import (
    MANIFEST,
    VOCAB,
    Manifest,
    ShardInfo,
    SourceInfo,
    Split,
    vocab_bytes,
    write_source_map,
)
from data_pipeline.corpus.shards import ShardWriter, pack_document
from data_pipeline.corpus.source_map import runs
from data_pipeline.corpus.tokenizer import SPECIAL_TOKENS

Documents = Iterable[Sequence[Sequence[int]]]  # ids of sentences of documents


def write_dataset(
    directory: str | Path,
    documents: Documents,
    *,
    heldout: Documents = (),
    vocab: Sequence[str] | int = 1000,
    lowercase: bool = True,
    documents_per_shard: int = 100,
    sources: Sequence[str] = ("test",),
    source_of: Callable[[str], int] = lambda name: 0,
) -> Manifest:
    """A whole dataset; its documents have the ids "train-0", "train-1", ..., "heldout-0", ..., by
    which `source_of` gives the place of their source.

    `vocab` is the list of pieces, or a size: then pieces are invented, [PAD] [UNK] [CLS] [SEP]
    [MASK] first, and every third ordinary piece continues a word (`##...`).
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    if isinstance(vocab, int):
        ordinary = range(vocab - len(SPECIAL_TOKENS))
        vocab = [*SPECIAL_TOKENS, *(f"##p{i}" if i % 3 == 2 else f"p{i}" for i in ordinary)]
    shards: list[ShardInfo] = []
    given: dict[str, list[tuple[int, int, int]]] = {}  # by shard: source, sentences, tokens
    splits: tuple[tuple[Split, Documents], ...] = (("train", documents), ("heldout", heldout))
    for split, chosen in splits:
        found = list(chosen)
        for number, first in enumerate(range(0, len(found), documents_per_shard)):
            writer = ShardWriter(directory, split, number, first)
            rows = given.setdefault(writer.name, [])
            for ordinal, sentences in enumerate(found[first : first + documents_per_shard], first):
                ids = np.array([i for sentence in sentences for i in sentence], np.uint16)
                lengths = np.array([len(sentence) for sentence in sentences], np.uint16)
                name = f"{split}-{ordinal}"
                writer.write(pack_document(ids, lengths, name, source_of(name)))
                rows.append((source_of(name), len(lengths), len(ids)))
            shards.append(writer.close())
    data = vocab_bytes(vocab)
    (directory / VOCAB).write_bytes(data)
    every = np.array([row for rows in given.values() for row in rows]).reshape(-1, 3)
    manifest = Manifest(
        vocab_size=len(vocab),
        vocab_sha256=hashlib.sha256(data).hexdigest(),
        lowercase=lowercase,
        shards=tuple(shards),
        sources=tuple(
            SourceInfo(
                name=name,
                documents_in=len(own),
                documents_out=len(own),
                sentences=int(own[:, 1].sum()),
                tokens=int(own[:, 2].sum()),
            )
            for place, name in enumerate(sources)
            for own in [every[every[:, 0] == place]]
        ),
    )
    (directory / MANIFEST).write_text(manifest.to_json())
    pieces = {shard: runs((source, 1) for source, *_ in rows) for shard, rows in given.items()}
    write_source_map(directory, manifest, pieces)
    return manifest


def given_to_benchmark(folder: Path, config: str) -> list[str]:
    """Arguments of a benchmark for a small data set and this configuration, made in `folder`, and
    for FOLDER/out."""
    rng = np.random.default_rng(0)
    documents = [[rng.integers(5, 60, 9).tolist() for _ in range(9)] for _ in range(40)]
    write_dataset(folder / "data", documents, heldout=documents[:4], vocab=60)
    (folder / "c.yaml").write_text("run_dir: none\n" + config)
    named = {"--data": folder / "data", "--out": folder / "out", "--config": folder / "c.yaml"}
    return [str(word) for pair in named.items() for word in pair]
