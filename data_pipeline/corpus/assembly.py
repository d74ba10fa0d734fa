"""Units to shards: duplicates found, sources checked, documents dealt to shards, shards written."""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from core.errors import UserError, disk_error
from core.files import sha256
from data_pipeline.corpus.archives import OTHER_ENDING
from data_pipeline.corpus.documents import Dropped, Problem, near_duplicates
from data_pipeline.corpus.job import SHARDS, WORK, Job
from data_pipeline.corpus.looks import looks_like
from data_pipeline.corpus.manifest import Runs, ShardInfo, SourceInfo, shard_name
from data_pipeline.corpus.ranks import Ranks
from data_pipeline.corpus.settings import PrepareConfig
from data_pipeline.corpus.shards import ShardWriter, record_bytes
from data_pipeline.corpus.source_map import runs
from data_pipeline.corpus.sources import SourceConfig
from data_pipeline.corpus.store import Store, Writer, run_tasks
from data_pipeline.corpus.units import Tally, read_records, read_signatures, read_table, refusal


@dataclass(frozen=True)
class Stretch:
    """Documents [first, last) of a unit; `at`: the first byte of their records."""

    unit: int
    first: int
    last: int
    at: int


@dataclass(frozen=True)
class ShardPlan:
    """One shard to write."""

    split: str
    number: int
    first_ordinal: int
    stretches: tuple[Stretch, ...]
    bytes: int

    @property
    def key(self) -> str:
        return shard_name(self.split, self.number)


@dataclass(frozen=True)
class Assembly:
    """The shards to write and what the manifest says of the sources. unknown: by source, the share
    of [UNK] among the tokens that were read. bad_utf8: the share of texts with some."""

    shards: list[ShardPlan]
    sources: list[SourceInfo]
    unknown: dict[str, float]
    bad_utf8: dict[str, float]
    problems: list[Problem]
    more_problems: int
    samples: dict[str, dict[str, list[Dropped]]]


def plan_assembly(job: Job, store: Store[Tally], tallies: dict[str, Tally]) -> Assembly:
    """Finds the duplicates, checks what each source gave, and deals documents to shards."""
    tables = [read_table(store, unit) for unit in job.units]
    starts = np.cumsum([0, *map(len, tables)])
    repeats = _duplicates(job, store, tables)
    keep = ~np.any([np.zeros(int(starts[-1]), bool), *repeats.values()], axis=0)
    sources, problems, samples, unknown, bad = [], {}, {}, {}, {}
    for number, source in enumerate(job.config.sources):
        own = [i for i, unit in enumerate(job.units) if unit.source == number]
        came = _came(job, number, tallies)
        rows = slice(starts[own[0]], starts[own[-1] + 1])  # units of a source stand together
        table = np.concatenate([tables[i] for i in own])[keep[rows]]
        again = {reason: int(which[rows].sum()) for reason, which in repeats.items()}
        sources.append(_summary(source, came, table, again))
        problems |= came.broken
        if some := _samples(came.tallies):
            samples[source.name] = some
        tokens = sum(tally.tokens for tally in came.tallies)
        unknown[source.name] = sum(tally.unknown for tally in came.tallies) / max(1, tokens)
        bad_utf8 = sum(tally.bad_utf8 for tally in came.tallies)
        texts = sources[-1].documents_in - came.dropped[OTHER_ENDING]
        bad[source.name] = min(1.0, bad_utf8 / max(1, texts))
    if job.strict and problems:  # of units that a start without it has read
        raise refusal(next(iter(problems)))
    more = sum(tally.more_problems for tally in tallies.values())
    dropped = sum((Counter(source.dropped) for source in sources), Counter[str]())
    shares = np.concatenate([table["share"] for table in tables])
    heldout = _held_out(shares, keep, job.config, _lost(dropped, problems, more))
    shards: list[ShardPlan] = []
    for split, which in (("train", keep & ~heldout), ("heldout", keep & heldout)):
        shards += _deal(job, split, tables, np.split(which, starts[1:-1]))
    return Assembly(shards, sources, unknown, bad, list(problems), more, samples)


def _held_out(shares: np.ndarray, keep: np.ndarray, config: PrepareConfig, lost: str) -> np.ndarray:
    """Which documents are held out, bool [documents]: those of which the share of the id is below
    the fraction, of those that are kept at least one where the fraction is above 0."""
    least = float(shares[keep].min(initial=1.0))
    bound = max(config.heldout_fraction, np.nextafter(least, 2)) if config.heldout_fraction else 0.0
    heldout = shares < bound
    if not np.any(keep & ~heldout):
        alike = " of one id (id_column)" if len(set(shares[keep])) == 1 < keep.sum() else ""
        raise UserError(
            f"heldout_fraction: {config.heldout_fraction} of {int(keep.sum()):,} documents{alike} "
            "leave none to train on; set less, or 0 for none. A file that holds many documents is "
            f"kind sentences (blank rows between them), csv or jsonl ({lost})"
        )
    return heldout


def _duplicates(job: Job, store: Store[Tally], tables: list[np.ndarray]) -> dict[str, np.ndarray]:
    """Which of all documents repeat an earlier one, bool [documents], by kind of duplicate."""
    count = sum(map(len, tables))
    repeats: dict[str, np.ndarray] = {}
    alive = np.ones(count, bool)
    if job.config.duplicates.exact:
        hashes = np.concatenate([table["hash"] for table in tables])
        exact = np.ones(count, bool)
        exact[np.unique(hashes.view("S16"), return_index=True)[1]] = False
        repeats["exact duplicate"] = exact
        alive &= ~exact
    if job.config.duplicates.near and alive.any():
        found = [s for unit in job.units if (s := read_signatures(store, unit)) is not None]
        near = np.zeros(count, bool)
        places = np.flatnonzero(alive)
        signatures = np.concatenate(found)[places]
        near[places[near_duplicates(signatures, job.config.duplicates.jaccard)]] = True
        repeats["near duplicate"] = near
    return repeats


def _deal(
    job: Job, split: str, tables: list[np.ndarray], chosen: list[np.ndarray]
) -> list[ShardPlan]:
    """The shards of a split: its documents (bool [documents] a unit), units in a seeded order."""
    shards: list[ShardPlan] = []
    stretches: list[Stretch] = []
    size, ordinal, first = 0, 0, 0

    def key(unit: int) -> bytes:
        return hashlib.blake2b(f"{job.config.seed}:{unit}".encode(), digest_size=8).digest()

    def end_shard() -> None:
        if stretches:
            shards.append(ShardPlan(split, len(shards), first, tuple(stretches), size))
            stretches.clear()

    for unit in sorted(range(len(tables)), key=key):
        sizes = tables[unit]["size"]
        at = np.concatenate(([0], np.cumsum(sizes, dtype=np.int64)))
        for document in np.flatnonzero(chosen[unit]).tolist():
            taken = record_bytes(int(sizes[document]))
            if size + taken > job.config.shard_bytes:
                end_shard()
                size, first = 0, ordinal
            last = stretches[-1] if stretches else None
            if last is not None and (last.unit, last.last) == (unit, document):
                stretches[-1] = replace(last, last=document + 1)
            else:
                stretches.append(Stretch(unit, document, document + 1, int(at[document])))
            size += taken
            ordinal += 1
    end_shard()
    return shards


def _samples(tallies: list[Tally]) -> dict[str, list[Dropped]]:
    """What was dropped, by reason."""
    found: dict[str, list[Dropped]] = {}
    for tally in tallies:
        for reason, some in tally.samples.items():
            found.setdefault(reason, []).extend(some)
    return found


@dataclass(frozen=True)
class _Came:
    """What came out of a source. promised: the bytes of text that its files let expect. broken: as
    a set; all parts of a gz or zst file meet what is wrong with the file itself."""

    tallies: list[Tally]
    dropped: Counter[str]
    broken: dict[Problem, None]
    promised: int
    first_file: str

    @property
    def broken_inputs(self) -> int:
        return len(self.broken) + sum(tally.more_problems for tally in self.tallies)


def _came(job: Job, number: int, tallies: dict[str, Tally]) -> _Came:
    units = [unit for unit in job.units if unit.source == number]
    mine = [tallies[unit.key] for unit in units]
    dropped: Counter[str] = Counter()
    for tally in mine:
        dropped.update(tally.dropped)
    broken = dict.fromkeys(problem for tally in mine for problem in tally.problems)
    return _Came(mine, dropped, broken, sum(unit.bytes for unit in units), units[0].files[0])


def _lost(dropped: Mapping[str, int], broken: dict[Problem, None], more: int) -> str:
    """What did not come out; `more`: broken inputs that are not in `broken`."""
    why = ", ".join(f"{reason} {n}" for reason, n in sorted(dropped.items()) if n) or "none dropped"
    if broken:
        first = next(iter(broken))
        why += f"; {len(broken) + more} broken inputs, the first {first.file}: {first.place}: "
        why += first.what
    return why


def check_sources(job: Job, tallies: dict[str, Tally]) -> None:
    """UserError for a source that gave no document, or far less text than its files promise."""
    for number, source in enumerate(job.config.sources):
        came = _came(job, number, tallies)
        _refuse_poor(source, came, sum(tally.documents for tally in came.tallies), came.dropped)


def _refuse_poor(
    source: SourceConfig, came: _Came, documents: int, dropped: Mapping[str, int]
) -> None:
    why = _lost(dropped, came.broken, came.broken_inputs - len(came.broken))
    expected = f"{came.promised / 1e6:.1f} MB of input ({why}); is kind {source.kind} right?"
    look = looks_like(came.first_file)
    if source.kind not in (look.kinds or ()):
        expected += f" {came.first_file} {look}"
    if not (documents or came.broken or dropped) and source.kind in ("csv", "tsv", "jsonl"):
        raise UserError(f"source {source.name}: {came.first_file} holds no rows")
    if not documents:
        raise UserError(f"source {source.name}: no document came out of {expected}")
    characters = sum(tally.characters for tally in came.tallies)
    if characters < source.least_yield * came.promised:
        raise UserError(
            f"source {source.name}: only {characters / 1e6:.2f} MB of text came out "
            f"of about {expected}; min_yield sets the bound ({source.least_yield})"
        )


def _summary(
    source: SourceConfig, came: _Came, table: np.ndarray, repeats: dict[str, int]
) -> SourceInfo:
    """What a source gave; `table` of what is kept of it; errors as of `check_sources`."""
    documents = sum(tally.documents for tally in came.tallies) + came.dropped.total()
    dropped = +(came.dropped + Counter(repeats))
    _refuse_poor(source, came, len(table), dropped)
    notes = {
        "broken inputs": came.broken_inputs,
        "cut sentences": sum(tally.cut_sentences for tally in came.tallies),
    }
    return SourceInfo(
        name=source.name,
        kind=source.kind,
        provenance=source.provenance,
        licence=source.licence,
        documents_in=documents,
        documents_out=len(table),
        **{key: int(table[key].sum(dtype=np.int64)) for key in ("words", "sentences", "tokens")},
        dropped=dict(sorted(dropped.items())),
        notes={key: n for key, n in notes.items() if n},
    )


def write_shard(
    job: Job, store: Store[Tally], done: Store[ShardInfo], plan: ShardPlan
) -> ShardInfo:
    """Copies the records of a shard from the units; a damaged unit is an error, never copied."""
    writer = ShardWriter(job.out, plan.split, plan.number, plan.first_ordinal)
    try:
        for stretch in plan.stretches:
            unit, count = job.units[stretch.unit], stretch.last - stretch.first
            for payload in read_records(store, unit, stretch.first, count, stretch.at):
                writer.write(payload)
        with Writer(done, plan.key) as mark:  # which looks where it is
            return mark.finish(writer.close())
    except UserError:
        writer.abandon()
        raise
    except OSError as error:
        writer.abandon()
        raise disk_error(error, job.out) from None


def _is_whole(info: ShardInfo, out: Path) -> bool:
    """Whether both files of a shard are there, byte for byte."""
    with contextlib.suppress(OSError):
        return all(sha256(out / file.name) == file.sha256 for file in info.files)
    return False


def source_runs(job: Job, plan: ShardPlan) -> Runs:
    """The sources of a shard's documents."""
    return runs((job.units[s.unit].source, s.last - s.first) for s in plan.stretches)


def write_shards(
    ranks: Ranks, job: Job, store: Store[Tally], assembly: Assembly | None
) -> dict[str, ShardInfo]:
    """All shards, each by one rank; on rank 0 what they are, by name."""
    dealt = f"{job.fingerprint} {job.config.heldout_fraction}"
    done = Store(job.out / WORK / SHARDS, dealt, ShardInfo, store.check)
    plans = assembly.shards if assembly is not None else []
    for plan in plans:
        info = done.load(plan.key)
        if info is not None and not _is_whole(info, job.out):
            done.forget(plan.key)
    work = partial(write_shard, job, store, done)
    return run_tasks(ranks, "shards", plans, done, work, lambda s: {"documents": s.documents})
