"""The data set opened: its manifest, files and vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

from data_pipeline.corpus.shards import Manifest, load_manifest
from data_pipeline.corpus.tokenizer import Tokenizer
from data_pipeline.stream.cache import open_store
from data_pipeline.stream.plan import PhaseSpec, Planner, StreamConfig
from data_pipeline.stream.reader import Store, checked_index
from data_pipeline.stream.rows import Vocabulary


@dataclass(frozen=True)
class OpenDataset:
    """An opened dataset: its manifest, files and vocabulary."""

    data: StreamConfig
    manifest: Manifest
    store: Store
    vocabulary: Vocabulary

    def planner(self, phase: PhaseSpec, *, phase_index: int, seed: int, split: str) -> Planner:
        return Planner(
            self.manifest,
            lambda shard: checked_index(self.store, shard),
            self.data,
            phase,
            phase_index=phase_index,
            seed=seed,
            split=split,
        )


def open_dataset(data: StreamConfig) -> OpenDataset:
    """UserError if the folder, its manifest or its vocabulary is missing or not what it says."""
    store, directory = open_store(data)
    manifest = load_manifest(directory)
    tokenizer = Tokenizer.from_dataset(directory)
    vocabulary = Vocabulary(
        tokenizer.pad_id,
        tokenizer.cls_id,
        tokenizer.sep_id,
        tokenizer.mask_id,
        tokenizer.word_start,
        tokenizer.ordinary_ids,
    )
    return OpenDataset(data, manifest, store, vocabulary)
