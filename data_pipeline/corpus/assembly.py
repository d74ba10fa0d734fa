"""Units to shards: duplicates found, sources checked, documents dealt to shards, shards written."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from core.errors import UserError
from core.files import disk_error
from data_pipeline.corpus.documents import Dropped, Problem, near_duplicates
from data_pipeline.corpus.job import WORK, Job
from data_pipeline.corpus.manifest import Runs, ShardInfo, SourceInfo, shard_name
from data_pipeline.corpus.ranks import Ranks
from data_pipeline.corpus.shards import ShardWriter, record_bytes
from data_pipeline.corpus.source_map import runs
from data_pipeline.corpus.sources import SourceConfig
from data_pipeline.corpus.store import Store, Writer, run_tasks
from data_pipeline.corpus.units import Tally, read_signatures, read_table


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
    of [UNK] among the tokens that were read."""

    shards: list[ShardPlan]
    sources: list[SourceInfo]
    unknown: dict[str, float]
    problems: list[Problem]
    more_problems: int
    samples: dict[str, dict[str, list[Dropped]]]


def plan_assembly(job: Job, store: Store[Tally], tallies: dict[str, Tally]) -> Assembly:
    """Finds the duplicates, checks what each source gave, and deals documents to shards."""
    tables = [read_table(store, unit) for unit in job.units]
    starts = np.cumsum([0, *map(len, tables)])
    repeats = _duplicates(job, store, tables)
    keep = ~np.any([np.zeros(int(starts[-1]), bool), *repeats.values()], axis=0)
    sources, problems, samples, unknown = [], {}, {}, {}
    for number, source in enumerate(job.config.sources):
        own = [i for i, unit in enumerate(job.units) if unit.source == number]
        mine = [tallies[job.units[i].key] for i in own]
        rows = slice(starts[own[0]], starts[own[-1] + 1])  # units of a source stand together
        table = np.concatenate([tables[i] for i in own])[keep[rows]]
        again = {reason: int(which[rows].sum()) for reason, which in repeats.items()}
        # All parts of a gz or zst file meet what is wrong with the file itself.
        broken = dict.fromkeys(problem for tally in mine for problem in tally.problems)
        promised = sum(job.units[i].bytes for i in own)
        sources.append(_summary(source, mine, table, again, [*broken], promised))
        problems |= broken
        if some := _samples(mine):
            samples[source.name] = some
        tokens = sum(tally.tokens for tally in mine)
        unknown[source.name] = sum(tally.unknown for tally in mine) / max(1, tokens)
    shards: list[ShardPlan] = []
    for split, heldout in (("train", False), ("heldout", True)):
        chosen = [
            keep[starts[i] : starts[i + 1]] & (table["heldout"] == heldout)
            for i, table in enumerate(tables)
        ]
        dealt = _deal(job, split, tables, chosen)
        if not dealt and (not heldout or job.config.heldout_fraction > 0):
            raise UserError(
                f"the {'held-out' if heldout else 'training'} split is empty: "
                f"{int(keep.sum())} documents, heldout_fraction {job.config.heldout_fraction}; set "
                f"{'more, or 0 for none' if heldout else 'less'}, and use --fresh"
            )
        shards += dealt
    more = sum(tally.more_problems for tally in tallies.values())
    return Assembly(shards, sources, unknown, list(problems), more, samples)


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


def _summary(
    source: SourceConfig,
    tallies: list[Tally],
    table: np.ndarray,
    repeats: dict[str, int],
    broken: list[Problem],
    promised: int,
) -> SourceInfo:
    """What a source gave; `table` of what is kept of it. UserError when that is nothing, or far
    less than `promised`, the bytes of text that its files let expect."""
    dropped: Counter[str] = Counter()
    for tally in tallies:
        dropped.update(tally.dropped)
    came = sum(tally.documents for tally in tallies) + dropped.total()
    dropped = +(dropped + Counter(repeats))
    why = ", ".join(f"{reason} {n}" for reason, n in sorted(dropped.items())) or "none dropped"
    count = len(broken) + sum(tally.more_problems for tally in tallies)
    if broken:
        first = broken[0]
        why += f"; {count} broken inputs, the first {first.file}: {first.place}: {first.what}"
    expected = f"{promised / 1e6:.1f} MB of input ({why}); is kind {source.kind} right?"
    if not len(table):
        raise UserError(f"source {source.name}: no document came out of {expected}")
    characters = sum(tally.characters for tally in tallies)
    if characters < source.least_yield * promised:
        raise UserError(
            f"source {source.name}: only {characters / 1e6:.2f} MB of text came out "
            f"of about {expected} min_yield sets the bound ({source.least_yield})"
        )
    notes = {
        "broken inputs": count,
        "cut sentences": sum(tally.cut_sentences for tally in tallies),
    }
    return SourceInfo(
        name=source.name,
        kind=source.kind,
        provenance=source.provenance,
        licence=source.licence,
        documents_in=came,
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
            unit = job.units[stretch.unit]
            sizes = read_table(store, unit)["size"][stretch.first : stretch.last].tolist()
            with open(store.path(unit.key, "records"), "rb") as file:
                file.seek(stretch.at)
                for size in sizes:
                    payload = file.read(size)
                    if len(payload) != size:
                        raise UserError(f"{file.name}: ends early; run the same command again")
                    writer.write(payload)
        with Writer(done, plan.key) as mark:
            return mark.finish(writer.close())
    except OSError as error:
        writer.abandon()
        raise disk_error(error, job.out) from None


def source_runs(job: Job, plan: ShardPlan) -> Runs:
    """The sources of a shard's documents."""
    return runs((job.units[s.unit].source, s.last - s.first) for s in plan.stretches)


def write_shards(
    ranks: Ranks, job: Job, store: Store[Tally], assembly: Assembly | None
) -> dict[str, ShardInfo]:
    """All shards, each by one rank; on rank 0 what they are, by name."""
    done = Store(job.out / WORK / "shards", job.fingerprint, ShardInfo)
    plans = assembly.shards if assembly is not None else []
    for plan in plans:
        info = done.load(plan.key)
        if info is not None and info.missing_from(job.out):
            done.forget(plan.key)
    work = partial(write_shard, job, store, done)
    return run_tasks(ranks, "shards", plans, done, work, lambda s: {"documents": s.documents})
