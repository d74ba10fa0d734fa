"""`python -m data_pipeline audit`: show that the stream does what it promises.

audit --config configs/pretrain_X.yaml --world W --workers N --steps S [--phase P]
    one line `step <s> <sha256>` for each global batch; the lines do not depend on W and N
audit --config configs/pretrain_X.yaml --epoch E [--phase P]
    an account of a whole epoch; exit code 1 if a promise is broken
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from pydantic import ConfigDict, Field, model_validator

from configs.load import Config, dump, load, parser
from core.errors import UserError
from data_pipeline.stream.account import Account
from data_pipeline.stream.batch import IGNORE_INDEX, Batch
from data_pipeline.stream.dataset import Dataset
from data_pipeline.stream.objective import MaskedLM, ObjectiveName
from data_pipeline.stream.packing import edges
from data_pipeline.stream.pairs import PAIR_SPECIALS, TEXT_SPECIALS
from data_pipeline.stream.plan import OBJECTIVE, SEED, PhaseSpec, Planner, PlanTrace, StreamConfig
from data_pipeline.stream.reader import Store
from data_pipeline.stream.rows import build_batch
from data_pipeline.stream.state import StreamState
from data_pipeline.stream.stream import Stream
from data_pipeline.stream.windows import WindowIterator

_COMPARE_EVERY = 16


class AuditPhase(PhaseSpec):
    """A phase of a pretraining config; what concerns the trainer alone is passed over."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    micro_batch_rows: int = Field(
        default=1, ge=1, description="packed rows a rank computes at once"
    )

    @model_validator(mode="before")
    @classmethod
    def _no_slips(cls, given: Any) -> Any:
        """The trainer's keys are not known here; a slip in one of ours is near to it."""
        for key in set(given) - set(cls.model_fields) if isinstance(given, dict) else ():
            near = difflib.get_close_matches(str(key), cls.model_fields, 1, cutoff=0.8)
            if near:
                raise ValueError(f"{key}: unknown key; did you mean {near[0]}?")
        return given


class AuditConfig(Config):
    """The keys of a pretraining config that the data hangs on."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    seed: int = SEED
    objective: ObjectiveName = OBJECTIVE
    data: StreamConfig = Field(description="shards and how they become sequences")
    phases: tuple[AuditPhase, ...] = Field(min_length=1, description="in order")

    @model_validator(mode="after")
    def _fits(self) -> AuditConfig:
        self.data.objective(self.objective)
        return self


def main(argv: list[str]) -> int:
    p = parser(AuditConfig, __doc__, prog="python -m data_pipeline audit")
    p.add_argument("--phase", type=int, default=None, help="position of the phase (all)")
    what = p.add_mutually_exclusive_group(required=True)
    what.add_argument("--steps", type=int, metavar="S", help="print digests of S steps a phase")
    what.add_argument("--epoch", type=int, metavar="E", help="account for epoch E")
    p.add_argument("--world", type=int, default=1, metavar="W", help="ranks to act as")
    p.add_argument("--workers", type=int, metavar="N", help="in place of data.workers")
    p.add_argument("--micro-batch-rows", type=int, metavar="B",
                        help="in place of the phase's")  # fmt: skip
    args = p.parse_args(argv)
    workers = [] if args.workers is None else [f"data.workers={args.workers}"]
    config = load(args.config, AuditConfig, [*args.overrides, *workers])
    if args.print_config:
        print(dump(config), end="")
        return 0
    for name, least in (("world", 1), ("micro_batch_rows", 1), ("steps", 1), ("epoch", 0)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise UserError(f"--{name.replace('_', '-')} {value}: at least {least}")
    phases = range(len(config.phases))
    if args.phase is not None and args.phase not in phases:
        raise UserError(f"--phase {args.phase}: {args.config} has {len(phases)} phases")
    broken = 0
    for phase in phases if args.phase is None else [args.phase]:
        if args.epoch is not None:
            account = epoch_account(config, phase, args.epoch)
            print(account.page(), flush=True)
            broken += len(account.broken())
            continue
        rows = args.micro_batch_rows or config.phases[phase].micro_batch_rows
        prefix = f"phase {phase} " if len(phases) > 1 and args.phase is None else ""
        for step, digest in enumerate(step_digests(config, phase, args.world, rows, args.steps)):
            print(f"{prefix}step {step} {digest}", flush=True)
    return 1 if broken else 0


def step_digests(
    config: AuditConfig,
    phase: int,
    world: int,
    micro_batch_rows: int,
    steps: int,
    state: StreamState | None = None,
) -> Iterator[str]:
    """sha256 (hex) of each global batch of `steps` steps, by running the streams of all ranks in
    turn: all tensors of all rows in the order of the plan."""
    dataset = Dataset(config.data, config.objective)
    streams = [
        Stream(
            dataset,
            config.phases[phase],
            phase_index=phase,
            seed=config.seed,
            rank=rank,
            world=world,
            micro_batch_rows=micro_batch_rows,
            state=state,
        )
        for rank in range(world)
    ]
    try:
        for _ in range(steps):
            h = hashlib.sha256()
            for _ in range(streams[0].micro_steps):
                for stream in streams:
                    for digest in next(stream).row_digests():
                        h.update(digest)
            for stream in streams:
                stream.commit_step()
            yield h.hexdigest()
    finally:
        for stream in streams:
            stream.close()


def epoch_account(config: AuditConfig, phase: int, epoch: int) -> Account:
    """Plans and makes every row of the epoch, and counts."""
    spec = config.phases[phase]
    dataset = Dataset(config.data, config.objective)
    planner = dataset.planner(spec, phase_index=phase, seed=config.seed, split="train")
    shape = planner.shape
    objective, shares = dataset.objective, None
    if isinstance(objective, MaskedLM):
        mask, same = objective.masking.mask, objective.masking.same
        rest = 1 - mask - same
        by_chance = rest / len(dataset.vocabulary.ordinary_ids)  # the random one is the same
        shares = (mask, same + by_chance, rest - by_chance)
    account = Account(
        f"Epoch {epoch} of phase {phase} (max_seq_len {shape.max_seq_len}) of {config.data.dir}, "
        f"dataset {dataset.manifest.dataset_id}, seed {config.seed}",
        shape.max_seq_len,
        shape.row_len,
        shares,
        windows=planner.windows,
        lengths=np.zeros(shape.max_seq_len + 1, np.int64),
        fills=np.zeros(shape.row_len + 1, np.int64),
        wanted_sequences=spec.sequences_per_step,
        next_sentence=config.data.next_sentence,
    )
    account.rows_per_step = planner.rows_per_step(planner.plan(0, 0))
    carried: list[np.ndarray] = []
    for window in range(planner.windows):
        trace = planner.trace(epoch, window)
        carried.append(_count_pairs(account, trace))
        _count_repeats(account, dataset, planner, trace)
        with dataset.open_store() as store:
            _count_rows(account, dataset, store, planner, trace)
    per_row = np.concatenate(carried)
    steps = len(per_row) // account.rows_per_step
    whole = per_row[: steps * account.rows_per_step]
    account.per_step = whole.reshape(steps, account.rows_per_step).sum(axis=1).tolist()
    return account


def _count_pairs(account: Account, trace: PlanTrace) -> np.ndarray:
    """Counts what the plan says; returns the sequences of each row."""
    plan, pairs, order, lengths = trace.plan, trace.pairs, trace.order, trace.sentence_lengths
    random, true, sentences = pairs.is_random, ~pairs.is_random, len(trace.sentence_lengths)
    if account.next_sentence == "none":
        account.not_once += _tokens_not_once(trace)
    else:
        used = _uses(pairs.a_begin, pairs.a_end, sentences)
        used += _uses(pairs.b_begin[true], pairs.b_end[true], sentences)
        again = _uses(pairs.b_begin[random], pairs.b_end[random], sentences)
        account.not_once += int((used != 1).sum())
        account.random_uses += np.bincount(np.minimum(again, 5), minlength=6)
    account.lost += len(pairs) - len(np.unique(order)) + abs(len(order) - len(pairs))
    account.documents += len(trace.sentence_counts)
    account.sentences += sentences
    account.source_tokens += int(lengths.sum(dtype=np.int64))
    account.sequences += len(pairs)
    account.rows += plan.rows
    account.tokens += int(pairs.lengths.sum())
    account.cut_tokens += int(pairs.cut.sum())
    account.cut_pairs += int((pairs.cut > 0).sum())
    account.random += int(random.sum())
    account.forced += int(pairs.forced.sum())
    account.short += int(pairs.short.sum())
    a_document, b_document = trace.documents(pairs.document), trace.documents(pairs.b_document)
    account.same_document += int((a_document == b_document)[random].sum())
    account.planned_predictions += int(plan.row_predictions[-1])
    account.lengths += np.bincount(pairs.lengths, minlength=len(account.lengths))
    free = account.row_len - np.diff(plan.row_tokens)
    account.fills += np.bincount(free, minlength=len(account.fills))
    return np.diff(plan.row_starts)


def _count_repeats(account: Account, dataset: Dataset, planner: Planner, trace: PlanTrace) -> None:
    if planner.repeats is None:
        return
    times = np.bincount(trace.copy_of, minlength=len(trace.plan.document_shard))
    for place, source in enumerate(dataset.manifest.sources):
        own = times[trace.plan.document_source == place]
        weight = float(planner.repeats.of_places[place])
        _, documents, before = account.sources.get(source.name, (weight, 0, 0))
        account.sources[source.name] = weight, documents + len(own), before + int(own.sum())
        account.wrong_repeats += int(((own < np.floor(weight)) | (own > np.ceil(weight))).sum())
        account.wrong_repeats += abs(own.sum() - weight * len(own)) >= 1


def _uses(begin: np.ndarray, end: np.ndarray, sentences: int) -> np.ndarray:
    """int64 [S]: how many of the ranges [begin, end) each sentence lies in."""
    begun, ended = (np.bincount(edge, minlength=sentences + 1) for edge in (begin, end))
    return np.cumsum(begun - ended)[:-1]


def _tokens_not_once(trace: PlanTrace) -> int:
    """Tokens between or twice in the sequences of a window, in the order of its text."""
    ends_of_sentences = edges(trace.sentence_lengths)
    begins = ends_of_sentences[edges(trace.sentence_counts)]
    begin = begins[trace.pairs.document] + trace.pairs.a_offset
    order = np.argsort(begin)
    end = (begin + trace.pairs.a_length)[order]
    gaps = np.append(begin[order], ends_of_sentences[-1]) - np.append(0, end)
    return int(np.abs(gaps).sum())


def _count_rows(
    account: Account, dataset: Dataset, store: Store, planner: Planner, trace: PlanTrace
) -> None:
    plan = trace.plan
    windows = WindowIterator(planner, store, (plan.epoch, plan.window, 0), stop=True)
    source = _Source(dataset, store, planner, trace)
    specials = np.array(
        [getattr(dataset.vocabulary, f"{name}_id") for name in ("pad", "cls", "sep", "mask")]
    )
    step = max(1, (1 << 16) // account.row_len)
    for first in range(0, plan.rows, step):
        last = min(first + step, plan.rows)
        batch = build_batch(
            windows.ranges(first, last),
            last - first,
            planner.shape,
            dataset.vocabulary,
            objective=dataset.objective,
            step_sequences=0,
            step_predictions=0,
        )
        original, starts = _count_batch(account, batch, specials, dataset.vocabulary.mask_id)
        place = int(plan.row_starts[first])
        for number in range(0, len(starts), _COMPARE_EVERY):
            account.compared += 1
            account.wrong_ids += not source.same(place + number, original, int(starts[number]))


class _Source:
    """Planned sentences by another road than the stream's: `Store.documents`."""

    def __init__(self, dataset: Dataset, store: Store, planner: Planner, trace: PlanTrace) -> None:
        self._trace, self._vocabulary = trace, dataset.vocabulary
        shards = planner.window_shards(trace.plan.epoch, trace.plan.window)
        store.hold([shards])
        vocab_size = dataset.manifest.vocab_size
        found = (d for shard in shards for d in store.documents(shard, vocab_size))
        self._documents = [(document.ids, edges(document.lengths)) for document in found]
        self._first_sentence = edges(trace.sentence_counts)

    def _segment(self, document: int, begin: int, end: int) -> bytes:
        """The ids of a document's sentences [begin, end), counted over the window, as bytes."""
        ids, starts = self._documents[int(self._trace.documents(np.array(document)))]
        first = int(self._first_sentence[document])
        return ids[starts[begin - first] : starts[end - first]].tobytes()

    def same(self, place: int, original: np.ndarray, start: int) -> bool:
        """The sequence at `place` of the plan stands at `start` of `original`: A and B lie within
        the sentences that the pair procedure chose, between the right special tokens."""
        pairs, pair = self._trace.pairs, int(self._trace.order[place])
        a_length, b_length = int(pairs.a_length[pair]), int(pairs.b_length[pair])
        specials = PAIR_SPECIALS if b_length else TEXT_SPECIALS
        found = original[start : start + a_length + b_length + specials].astype("<u2")
        a, b = found[1 : 1 + a_length].tobytes(), found[2 + a_length : -1].tobytes()
        voc = self._vocabulary
        return (
            found[[0, 1 + a_length, -1]].tolist() == [voc.cls_id, voc.sep_id, voc.sep_id]
            and _within(a, self._segment(
                int(pairs.document[pair]), int(pairs.a_begin[pair]), int(pairs.a_end[pair])))
            and (not b_length or _within(b, self._segment(
                int(pairs.b_document[pair]), int(pairs.b_begin[pair]), int(pairs.b_end[pair]))))
        )  # fmt: skip


def _within(part: bytes, whole: bytes) -> bool:
    """Both of 2 bytes an id."""
    at = whole.find(part)
    while at > 0 and at % 2:
        at = whole.find(part, at + 1)
    return len(part) > 0 and at >= 0


def _count_batch(
    account: Account, batch: Batch, specials: np.ndarray, mask_id: int
) -> tuple[np.ndarray, np.ndarray]:
    """Counts what the tensors say; returns (unmasked ids [N], start of each sequence)."""
    ids = batch.input_ids.numpy().ravel()
    labels = batch.masked_lm_labels.numpy()
    positions = batch.masked_lm_positions.numpy()[labels != IGNORE_INDEX]
    labels = labels[labels != IGNORE_INDEX]
    account.predictions += len(labels)
    specials_each = PAIR_SPECIALS if len(batch.next_sentence_labels) else TEXT_SPECIALS
    account.candidates += batch.tokens - specials_each * batch.sequences
    original = ids.copy()
    if account.replacement_shares is None:
        follows = np.diff(batch.position_ids.numpy().ravel(), append=0)[positions] == 1
        follows &= ids[(positions + 1) % len(ids)] == labels
        account.wrong_labels += int((~follows).sum())
    else:
        seen = ids[positions]
        account.specials_hit += int(np.isin(labels, specials).sum())
        account.replaced += (
            int((seen == mask_id).sum()),
            int((seen == labels).sum()),
            int(((seen != mask_id) & (seen != labels)).sum()),
        )
        original[positions] = labels
    first = (batch.position_ids == 0) & (batch.sequence_ids > 0)
    starts = np.flatnonzero(first.numpy())
    account.hashes.append(_sequence_hashes(original, starts, batch))
    return original, starts


def _sequence_hashes(original: np.ndarray, starts: np.ndarray, batch: Batch) -> np.ndarray:
    """uint64 of each sequence's ids and its label, if any: a polynomial in a fixed odd number."""
    position = batch.position_ids.numpy().ravel()
    real = batch.sequence_ids.numpy().ravel() > 0
    longest = int(position.max()) + 1
    powers = np.cumprod(np.full(longest, 0x9E3779B97F4A7C15, np.uint64), dtype=np.uint64)
    terms = (original.astype(np.uint64) + np.uint64(1)) * powers[position] * real
    sums = np.add.reduceat(terms, starts)
    labels = batch.next_sentence_labels.numpy()[: batch.next_sentences].astype(np.uint64)
    return sums * np.uint64(2) + (labels if len(labels) else np.uint64(0))
