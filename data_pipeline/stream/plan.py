"""The plan: which pair stands in which row, in which order, as arithmetic on sentence lengths.

(dataset, seed, phase, epoch) -> shards in random order -> windows of shards -> pairs of a window ->
random order -> rows -> random order.  Every process can compute it alone.  Only the index files are
read; a window is the unit of planning, and the pool that random B's and neighbours come from.
Documents need no permutation of their own: the pairs get one.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, model_validator

from configs.load import Config, LocalPath, PathOrUrl
from core.errors import UserError
from data_pipeline.corpus.manifest import Manifest, ShardInfo
from data_pipeline.corpus.shards import ShardIndex
from data_pipeline.stream import draws
from data_pipeline.stream.masking import Masking
from data_pipeline.stream.objective import LeftToRight, MaskedLM, Objective, ObjectiveName
from data_pipeline.stream.packing import edges, pack, permute_rows
from data_pipeline.stream.pairs import (
    Pairs,
    balanced_random_prob,
    plan_pairs,
    plan_texts,
    sequence_lengths,
)
from data_pipeline.stream.repeats import Repeats, copied

# Raise it when other batches come from the same settings: old positions mean nothing then.
PLAN_VERSION = 1

_SHARDS, _PAIRS, _ORDER, _ROWS, _MASKS, _REPEATS = range(6)
SPLITS = ("train", "heldout")

SEED = Field(
    default=42, ge=0, lt=2**63, description="of initialisation, data order, masks and dropout"
)


OBJECTIVE = Field(
    default="masked",
    description="masked: some tokens are hidden and predicted from both sides; left_to_right: each "
    "token is predicted from those before it, under a causal mask; it takes data.next_sentence: "
    "none, and data.mask, masked_lm_prob, whole_word_mask and max_predictions then say nothing",
)


class MaskConfig(Config):
    """What stands in the place of a predicted token; the shares add up to 1."""

    mask: float = Field(default=0.8, ge=0, le=1, description="share that becomes [MASK]")
    same: float = Field(default=0.1, ge=0, le=1, description="share that stays as it is")
    random: float = Field(default=0.1, ge=0, le=1, description="share that becomes a random token")

    @model_validator(mode="after")
    def _whole(self) -> MaskConfig:
        total = self.mask + self.same + self.random
        if abs(total - 1) > 1e-6:
            raise ValueError(f"mask, same and random add up to {total:g}, not to 1")
        return self


class StreamConfig(Config):
    """Where the shards are and how batches are made of them."""

    dir: PathOrUrl = Field(
        default="data",
        description="folder of the shards, or http(s)://, s3://, gs://, pipe:COMMAND before /NAME",
    )
    workers: int = Field(
        default=1,
        ge=0,
        le=256,
        description="loader processes a rank; 0: a thread; the batches are the same",
    )
    prefetch_batches: int = Field(
        default=4, ge=1, le=1024, description="micro-batches made ahead by each worker"
    )
    masked_lm_prob: float = Field(
        default=0.15, gt=0, le=1, description="share of a sequence's tokens to predict"
    )
    short_seq_prob: float = Field(
        default=0.1, ge=0, le=1, description="share of documents cut to a random shorter target"
    )
    whole_word_mask: bool = Field(default=False, description="mask all pieces of a word together")
    mask: MaskConfig = Field(
        default_factory=MaskConfig, description="what stands in the place of a predicted token"
    )
    next_sentence: Literal["original", "balanced", "none"] = Field(
        default="original",
        description="original: one-sentence chunks get a random B, so more than half are random; "
        "balanced: half of all; none: no segment B and no such task, a sequence is contiguous text "
        "of one document",
    )
    weights: dict[str, Annotated[float, Field(strict=True, ge=0, le=1000)]] = Field(
        default_factory=dict,
        description="by source, as the manifest names it, how often each of its documents stands "
        "in an epoch; 1.5: once, and a half of them, drawn anew each epoch, twice; 0: never; a "
        "source that is not named: 1",
    )
    window_tokens: int = Field(
        default=1 << 26,
        ge=1,
        description="tokens of a window of shards, the pool that is shuffled and planned together; "
        "repeats by data.weights count",
    )
    on_damage: Literal["stop", "empty"] = Field(
        default="stop",
        description="a damaged record: stop, or leave its sequences empty and write the ledger",
    )
    max_damaged: int = Field(
        default=100,
        ge=0,
        description="documents found damaged in one start, over all ranks, before it stops",
    )
    ledger: LocalPath | None = Field(
        default=None,
        description="file that names each damaged document, a line each; null: damaged.jsonl in "
        "the run's folder",
    )
    agree_every: int = Field(
        default=100,
        ge=1,
        description="optimiser steps between comparisons of position and damage over the ranks",
    )
    worker_timeout: float = Field(
        default=600.0,
        gt=0,
        le=10**6,
        description="seconds without a batch after which a worker is given up",
    )
    accept_changed: tuple[str, ...] = Field(
        default=(),
        description="names of what may differ from the checkpoint's data position, for example "
        "[seed]; the next epoch then starts, and the history keeps it. Of init_from: vocab_sha256, "
        "lowercase",
    )
    cache_dir: LocalPath = Field(
        default_factory=lambda: f"/tmp/bert-shard-cache-{os.geteuid()}",
        description="node-local folder for shards of a remote dir; yours alone",
    )
    cache_bytes: int = Field(
        default=32 << 30,
        ge=1,
        description="bytes the cache may hold on a node: at least two windows and a shard, of the "
        "largest, and all held-out shards",
    )
    prefetch_bytes: int = Field(
        default=2 << 30, ge=0, description="bytes of shards fetched ahead of the current window"
    )
    fetch_retries: int = Field(
        default=5,
        ge=0,
        le=1000,
        description="further tries after a transfer fails, with growing pauses",
    )
    fetch_timeout: float = Field(
        default=60.0,
        gt=0,
        le=10**6,
        description="seconds without a byte, with less than a kB a second, to the end of an http "
        "answer's head, or for a MB of a cloud store, after which a transfer has failed",
    )
    fetch_pause: float = Field(
        default=1.0,
        ge=0,
        description="seconds before the second try; doubles with each, with jitter",
    )

    @property
    def paired(self) -> bool:
        """Whether a sequence is a pair of segments, with the next-sentence task."""
        return self.next_sentence != "none"

    def objective(self, name: ObjectiveName) -> Objective:
        """ValueError where it does not go with the rest."""
        if name == "left_to_right":
            if self.paired:
                raise ValueError(
                    "objective: left_to_right takes data.next_sentence: none, not "
                    f"{self.next_sentence}: [CLS] comes first, so it sees nothing to judge"
                )
            return LeftToRight()
        masking = Masking(self.whole_word_mask, self.mask.mask, self.mask.same)
        return MaskedLM(self.masked_lm_prob, masking)


_MOST_OF_A_STEP = 1 << 24  # sequences or rows; the largest batches that are known have 2^16


class PhaseSpec(Config):
    """The shape of a phase's rows and steps."""

    max_seq_len: int = Field(default=128, ge=8, le=32768, description="longest sequence, tokens")
    row_len: int = Field(
        default=0, ge=0, le=65535, description="tokens of a packed row; 0: 4 x max_seq_len"
    )
    max_predictions: int = Field(
        default=20, ge=1, le=32768, description="most masked positions of a sequence"
    )
    sequences_per_step: int = Field(
        default=256,
        ge=1,
        le=_MOST_OF_A_STEP,
        description="the recipe's batch: sequences an optimiser step, all ranks",
    )
    rows_per_step: int | None = Field(
        default=None,
        ge=1,
        le=_MOST_OF_A_STEP,
        description="rows of an optimiser step; null: from sequences_per_step",
    )
    rows_multiple: int = Field(
        default=8,
        ge=1,
        le=_MOST_OF_A_STEP,
        description="a derived rows_per_step is a multiple of this; what divides it is a number of "
        "ranks that works",
    )
    max_sequences_per_row: int = Field(
        default=0,
        ge=0,
        le=65535,
        description="0: row_len / 64, at least 16; bounds the shapes of a batch",
    )
    packing: bool = Field(
        default=True, description="several sequences a row; false: one, and row_len = max_seq_len"
    )

    @model_validator(mode="after")
    def _shapes(self) -> PhaseSpec:
        if self.packing and 0 < self.row_len < self.max_seq_len:
            raise ValueError(
                f"row_len: {self.row_len} is shorter than max_seq_len {self.max_seq_len}"
            )
        if not self.packing and self.row_len not in (0, self.max_seq_len):
            raise ValueError(
                f"row_len: without packing it is max_seq_len {self.max_seq_len}, not {self.row_len}"
            )
        return self

    def step_rows(self, sequences_a_row: float) -> int:
        """Rows of an optimiser step, given how many sequences a row holds in the mean."""
        if self.rows_per_step is not None:
            return self.rows_per_step
        rows = self.sequences_per_step / sequences_a_row
        return max(1, round(rows / self.rows_multiple)) * self.rows_multiple


@dataclass(frozen=True)
class Shape:
    """The static sizes of a row, from the phase alone."""

    max_seq_len: int
    row_len: int
    sequences: int  # most of a row
    predictions: int  # most of a row
    next_sentences: int  # labels, most of a row

    @classmethod
    def of(cls, phase: PhaseSpec, data: StreamConfig, objective: ObjectiveName = "masked") -> Shape:
        longest, row_len, sequences = phase.max_seq_len, phase.max_seq_len, 1
        if phase.packing:
            row_len = phase.row_len or 4 * longest
            sequences = phase.max_sequences_per_row or max(16, row_len // 64)
        most = data.objective(objective).capacity(
            row_len, longest, sequences, phase.max_predictions
        )
        return cls(longest, row_len, sequences, most, sequences if data.paired else 0)


@dataclass(frozen=True)
class WindowPlan:
    """A planned window: D documents, P sequences in row order, R rows.

    shards: names, in the order of `document_shard`; first_ordinal: of each shard in its split.
    document_*  [D]: shard (index into `shards`), record in the shard
    payload_*   [D]: byte offset, size, crc32; ids_at: where the ids begin, in uint16s of the tar
    a_*, b_*    [P]: document, token offset in it, length (of b 0: no such segment); is_random;
    mask_keys (uint64); predictions [P]
    row_starts  [R + 1] into P; row_predictions, row_tokens [R + 1]: running sums over rows
    document_source  [D], with data.weights: the places of their sources by which they were drawn
    """

    epoch: int
    window: int
    shards: tuple[str, ...]
    first_ordinal: tuple[int, ...]
    document_shard: np.ndarray
    document_record: np.ndarray
    payload_offset: np.ndarray
    payload_size: np.ndarray
    payload_crc: np.ndarray
    ids_at: np.ndarray
    a_document: np.ndarray
    a_offset: np.ndarray
    a_length: np.ndarray
    b_document: np.ndarray
    b_offset: np.ndarray
    b_length: np.ndarray
    is_random: np.ndarray
    mask_keys: np.ndarray
    predictions: np.ndarray
    row_starts: np.ndarray
    row_predictions: np.ndarray
    row_tokens: np.ndarray
    document_source: np.ndarray | None = None

    @property
    def rows(self) -> int:
        return len(self.row_starts) - 1

    def require_rows(self) -> None:
        """UserError where it has none."""
        if not self.rows:
            raise UserError(f"shards {', '.join(self.shards)}: no sentence to train on")

    @property
    def sequences(self) -> int:
        return len(self.a_length)

    @property
    def lengths(self) -> np.ndarray:
        """int64 [P]: tokens of the sequences, specials included."""
        return sequence_lengths(self.a_length, self.b_length)

    def digest(self) -> str:
        """sha256 (hex) over all of it."""
        h = hashlib.sha256()
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None:  # as if there were no such field
                continue
            h.update(f"{field.name}:".encode())
            h.update(value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode())
        return h.hexdigest()


@dataclass(frozen=True)
class PlanTrace:
    """How a plan came about: its pairs, order [P] (the pair at each place of the plan), and the
    lengths of all sentences [S] and the number of each document's. With data.weights the documents
    of `pairs`, S and sentence_counts are copies, of the plan's documents copy_of."""

    plan: WindowPlan
    pairs: Pairs
    order: np.ndarray
    sentence_lengths: np.ndarray
    sentence_counts: np.ndarray
    copy_of: np.ndarray | None

    def documents(self, copies: np.ndarray) -> np.ndarray:
        """The plan's documents, of those of `pairs`."""
        return copies if self.copy_of is None else self.copy_of[copies]


def _predicted(phase: PhaseSpec, data: StreamConfig, objective: str) -> dict[str, Any]:
    """The settings that choose which tokens are predicted."""
    if objective != "masked":
        return {"objective": objective}  # the keys of masks say nothing
    # The usual shares are not named, as in checkpoints that know of no others.
    shares = {} if data.mask == MaskConfig() else {"mask": data.mask.model_dump()}
    return {
        "max_predictions": phase.max_predictions,
        "masked_lm_prob": data.masked_lm_prob,
        "whole_word_mask": data.whole_word_mask,
        **shares,
    }


class Planner:
    """Plans windows of one split in one phase. `read_index(shard)` gives its `checked_index`."""

    def __init__(
        self,
        manifest: Manifest,
        read_index: Callable[[ShardInfo], ShardIndex],
        data: StreamConfig,
        phase: PhaseSpec,
        *,
        phase_index: int,
        seed: int,
        split: str = "train",
        objective: ObjectiveName = "masked",
        repeats: Repeats | None = None,
    ) -> None:
        self.shards = tuple(s for s in manifest.split(split) if s.documents)
        if not self.shards:
            raise UserError(
                f"{data.dir}/manifest.json: split {split!r} holds no documents; "
                "prepare the dataset with more text"
            )
        if repeats is not None:
            self.shards = tuple(s for s in self.shards if repeats.present(s))
            if not self.shards:
                raise UserError(f"data.weights: no document of split {split!r} is left")
        self.vocab_size = manifest.vocab_size
        self.shape = Shape.of(phase, data, objective)
        self._objective = data.objective(objective)
        self.repeats = repeats
        self._read_index = read_index
        self._data, self._phase, self._split = data, phase, split
        self._key = draws.key(seed, SPLITS.index(split), phase_index)
        self._first_ordinals = manifest.first_ordinals
        tokens = sum(s.tokens for s in self.shards)
        # The held-out rows must not depend on how the shards of a split were cut: one window.
        wanted = tokens if split == "heldout" else min(tokens, data.window_tokens)
        if repeats is not None:
            # Neither planned nor on the disk does a window hold more than it would without.
            tokens = max(tokens, round(sum(map(repeats.tokens_of, self.shards))))
        windows = max(1, round(tokens / max(wanted, 1)))
        self.windows = min(windows, len(self.shards))
        self.settings: dict[str, Any] = {
            "split": split,
            "max_seq_len": phase.max_seq_len,
            "row_len": self.shape.row_len,
            "max_sequences_per_row": self.shape.sequences,
            "packing": phase.packing,
            "short_seq_prob": data.short_seq_prob,
            **_predicted(phase, data, objective),
            "next_sentence": data.next_sentence,
            **({} if repeats is None else {"weights": repeats.weights}),
            "window_tokens": data.window_tokens,
            "rows_per_step": phase.rows_per_step,
            # A derived number of rows follows the recipe's batch; a given one does not.
            "sequences_per_step": None if phase.rows_per_step else phase.sequences_per_step,
        }

    def window_shards(self, epoch: int, window: int) -> tuple[ShardInfo, ...]:
        """The shards of a window: an even cut of the epoch's random order."""
        key = draws.key(self._key, epoch, _SHARDS)
        order = draws.permutation(key, len(self.shards))
        edges = np.arange(self.windows + 1) * len(self.shards) // self.windows
        return tuple(self.shards[i] for i in order[edges[window] : edges[window + 1]])

    def after(self, epoch: int, window: int) -> tuple[int, int]:
        return (epoch, window + 1) if window + 1 < self.windows else (epoch + 1, 0)

    def plan(self, epoch: int, window: int) -> WindowPlan:
        return self.trace(epoch, window).plan

    def indexes(self, epoch: int, window: int) -> list[ShardIndex]:
        """Of a window's shards; they are fetched where they are not here."""
        return [self._read_index(shard) for shard in self.window_shards(epoch, window)]

    def trace(self, epoch: int, window: int) -> PlanTrace:
        """The plan of a window with what an audit wants to know of it."""
        shards, indexes = self.window_shards(epoch, window), self.indexes(epoch, window)
        key = draws.key(self._key, epoch, window)
        lengths = np.concatenate([index.sentence_lengths for index in indexes])
        counts = np.concatenate([index.sentence_counts for index in indexes]).astype(np.int64)
        document_tokens = np.diff(edges(lengths)[edges(counts)])
        source = copy_of = None
        if self.repeats is not None:
            source = self.repeats.sources_of(shards)
            drawn = self.repeats.draw(draws.key(key, _REPEATS), source)
            copy_of = np.repeat(np.arange(len(drawn)), drawn)
            lengths, counts = copied(lengths, counts, copy_of)
        shape = self.shape
        pair_settings = {
            "key": draws.key(key, _PAIRS),
            "max_seq_len": shape.max_seq_len,
            "short_seq_prob": self._data.short_seq_prob,
        }
        if self._data.paired:
            random_prob = 0.5
            if self._data.next_sentence == "balanced":
                random_prob = balanced_random_prob(lengths, counts, **pair_settings)
            pairs = plan_pairs(
                lengths, counts, random_prob=random_prob, copy_of=copy_of, **pair_settings
            )
        else:
            pairs = plan_texts(lengths, counts, **pair_settings)
        shuffled = draws.permutation(draws.key(key, _ORDER), len(pairs))
        if self._phase.packing:
            order, starts = pack(pairs.lengths[shuffled], shape.row_len, shape.sequences)
            rows = draws.permutation(draws.key(key, _ROWS), len(starts) - 1)
            order, starts = permute_rows(order, starts, rows)
            order = shuffled[order]
        else:
            order, starts = shuffled, np.arange(len(pairs) + 1)

        a_document, b_document = pairs.document[order], pairs.b_document[order]
        if copy_of is not None:
            a_document, b_document = copy_of[a_document], copy_of[b_document]
        offsets = np.concatenate([index.offsets for index in indexes]).astype(np.int64)
        sizes = np.concatenate([index.sizes for index in indexes]).astype(np.int64)
        documents = [len(index) for index in indexes]
        predictions = self._objective.counts(
            pairs.lengths[order],
            (pairs.a_length + pairs.b_length)[order],
            self._phase.max_predictions,
        )
        plan = WindowPlan(
            epoch=epoch,
            window=window,
            shards=tuple(shard.name for shard in shards),
            first_ordinal=tuple(self._first_ordinals[shard.name] for shard in shards),
            document_shard=np.repeat(np.arange(len(shards), dtype=np.int32), documents),
            document_record=np.concatenate([np.arange(n, dtype=np.int32) for n in documents]),
            payload_offset=offsets,
            payload_size=sizes,
            payload_crc=np.concatenate([index.crcs for index in indexes]),
            # A payload ends with its ids; tar keeps payloads on multiples of 512 bytes.
            ids_at=(offsets + sizes) // 2 - document_tokens,
            a_document=a_document.astype(np.int32),
            a_offset=pairs.a_offset[order].astype(np.int32),
            a_length=pairs.a_length[order].astype(np.uint16),
            b_document=b_document.astype(np.int32),
            b_offset=pairs.b_offset[order].astype(np.int32),
            b_length=pairs.b_length[order].astype(np.uint16),
            is_random=pairs.is_random[order],
            mask_keys=draws.fold_in(draws.key(key, _MASKS), order),
            predictions=predictions,
            row_starts=starts,
            row_predictions=edges(predictions)[starts],
            row_tokens=edges(pairs.lengths[order])[starts],
            document_source=None if source is None else source.astype(np.uint16),
        )
        return PlanTrace(plan, pairs, order, lengths, counts, copy_of)

    def rows_per_step(self, plan: WindowPlan) -> int:
        """The phase's rows a step; derived from how many sequences a row of `plan` holds. UserError
        where it has none."""
        plan.require_rows()
        return self._phase.step_rows(plan.sequences / plan.rows)


def plan_hash(
    settings: dict[str, Any], *, dataset_id: str, vocab_sha256: str, seed: int, phase: int
) -> str:
    """32 hex digits that stand for every setting the plan depends on."""
    facts = [PLAN_VERSION, dataset_id, vocab_sha256, seed, phase, settings]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]
