"""A data set, opened once: its manifest, vocabulary and files, wherever they are."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property

from core.urls import NotThere, Patience, is_url, join, local_path
from data_pipeline.corpus.manifest import (
    VOCAB,
    Manifest,
    ShardInfo,
    load_manifest,
    load_source_map,
    load_vocabulary,
)
from data_pipeline.corpus.shards import ShardIndex, TokenDocument
from data_pipeline.corpus.tokenizer import Tokenizer
from data_pipeline.stream.cache import Cache, CachedStore, require_room
from data_pipeline.stream.objective import Objective, ObjectiveName, Vocabulary
from data_pipeline.stream.plan import PhaseSpec, Planner, StreamConfig
from data_pipeline.stream.reader import Damage, Store
from data_pipeline.stream.repeats import Repeats, other_weights

_SAMPLED_SHARDS = 16  # at most; remote ones are fetched whole


class Dataset:
    """The data set of `data.dir`. Each part is read when it is first asked for, and kept.

    UserError if manifest or vocabulary is missing or not what it says; TryAgain while a remote
    origin does not answer. damaged: the records that streams of it, one after the other, left out.
    """

    def __init__(self, data: StreamConfig, objective: ObjectiveName = "masked") -> None:
        self.data, self._objective = data, objective
        self._patience = Patience(data.fetch_timeout, data.fetch_retries, data.fetch_pause)
        self.damaged: set[Damage] = set()

    @property
    def objective(self) -> Objective:
        """What batches are made for."""
        return self.data.objective(self._objective)

    @cached_property
    def manifest(self) -> Manifest:
        return load_manifest(self.data.dir, self._patience)

    @cached_property
    def _repeats(self) -> Repeats | None:
        """None: each document of training text stands once in an epoch."""
        weights = other_weights(self.data.weights, self.manifest, "data.weights")
        if not weights:
            return None
        sources = load_source_map(self.data.dir, self.manifest, self._patience)
        return Repeats.of(weights, self.manifest, sources)

    @property
    def at_hand(self) -> bool:
        """False: nothing has been prepared there yet."""
        try:
            return bool(self.manifest)
        except NotThere:
            return False

    @cached_property
    def vocab_bytes(self) -> bytes:
        """vocab.txt, as its sha256 in the manifest says."""
        return load_vocabulary(self.data.dir, self.manifest, self._patience)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        path = join(self.data.dir, VOCAB)
        return Tokenizer.from_bytes(self.vocab_bytes, self.manifest, path)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """What the making of batches needs of the tokenizer."""
        t = self.tokenizer
        return Vocabulary(t.pad_id, t.cls_id, t.sep_id, t.mask_id, t.word_start, t.ordinary_ids)

    @cached_property
    def _cache(self) -> Cache | None:
        """Where its files are kept on this node; None where `data.dir` is a folder."""
        remote = is_url(self.data.dir)
        return Cache(self.data, self.manifest, self._patience) if remote else None

    def open_store(self) -> Store:
        """The files, for one reader: what it holds is its own, and is let go when it closes."""
        cache = self._cache
        return Store(local_path(self.data.dir)) if cache is None else CachedStore(cache)

    def planner(self, phase: PhaseSpec, *, phase_index: int, seed: int, split: str) -> Planner:
        """Of a remote data set UserError, too, where the cache may not hold what is held at once:
        a window; in training the next one too, and a shard that an evaluation reads."""
        planner = Planner(
            self.manifest,
            self.index,
            self.data,
            phase,
            phase_index=phase_index,
            seed=seed,
            split=split,
            objective=self._objective,
            repeats=self._repeats if split == "train" else None,
        )
        if is_url(self.data.dir):
            windows = 1 if split == "heldout" else 2
            most = math.ceil(windows * len(planner.shards) / planner.windows)
            beside = max(map(_size, self.manifest.shards)) if split == "train" else 0
            require_room(self.data, sum(sorted(map(_size, planner.shards))[-most:]) + beside)
        return planner

    def index(self, shard: ShardInfo) -> ShardIndex:
        """The shard's index, as its sha256 in the manifest says."""
        with self.open_store() as store:
            return store.index(shard)

    def documents(self, split: str) -> Iterator[TokenDocument]:
        """All documents of a split in order; under `data.on_damage: empty` without damaged ones.
        Errors of `Store.documents`."""
        yield from self._read(self.manifest.split(split))

    def sample(self, split: str, tokens: int) -> Iterator[TokenDocument]:
        """Documents of about so many tokens from all over a split, of a few of its shards: units
        of all sources lie in them in a random order. Damage and errors as of `documents`."""
        shards = self.manifest.split(split)
        shards = shards[:: -(-len(shards) // _SAMPLED_SHARDS) or 1]
        yield from self._read(shards, max(1, sum(s.tokens for s in shards) // tokens))

    def _read(self, shards: Sequence[ShardInfo], stride: int = 1) -> Iterator[TokenDocument]:
        size, skip = self.manifest.vocab_size, self.data.on_damage == "empty"
        for shard in shards:
            with self.open_store() as store:
                store.hold([(shard,)])
                yield from store.documents(shard, size, stride, skip_damage=skip)


def _size(shard: ShardInfo) -> int:
    return shard.bytes + shard.idx_bytes
