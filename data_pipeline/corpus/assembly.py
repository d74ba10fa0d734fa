"""Units to shards: duplicates found, sources checked, documents dealt to shards, shards written."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from core.console import Progress
from core.errors import UserError
from core.files import disk_error
from data_pipeline.corpus.documents import near_duplicates
from data_pipeline.corpus.job import Job
from data_pipeline.corpus.output import WORK
from data_pipeline.corpus.ranks import Ranks
from data_pipeline.corpus.settings import PrepareConfig
from data_pipeline.corpus.shards import ShardInfo, ShardWriter, SourceInfo, record_bytes
from data_pipeline.corpus.units import UnitStore


@dataclass(frozen=True)
class ShardPlan:
    """One shard to write: `parts` are (unit, first document, after the last, first byte)."""

    split: str
    number: int
    first_ordinal: int
    parts: tuple[tuple[int, int, int, int], ...]
    bytes: int


@dataclass
class Assembly:
    """The shards to write and what the manifest says of the sources."""

    shards: list[ShardPlan]
    sources: list[SourceInfo]
    problems: list[dict[str, str]]
    samples: dict[str, dict[str, list[dict[str, str]]]]


def plan_assembly(config: PrepareConfig, job: Job, store: UnitStore) -> Assembly:
    """Finds the duplicates, checks what each source gave, and deals documents to shards."""
    count = len(job.units)
    tables = [store.table(number) for number in range(count)]
    starts = np.cumsum([0, *map(len, tables)])
    keep = np.ones(int(starts[-1]), bool)
    reasons: dict[str, np.ndarray] = {}
    if config.duplicates.exact:
        hashes = np.concatenate([t["hash"] for t in tables]) if count else np.empty(0, "V16")
        order = np.argsort(hashes.view("S16").reshape(-1), kind="stable") if len(hashes) else []
        ranked = hashes[order]
        repeats = np.zeros(len(keep), bool)
        if len(hashes):
            repeats[np.asarray(order)[1:][ranked[1:] == ranked[:-1]]] = True
        reasons["exact duplicate"] = repeats
        keep &= ~repeats
        del hashes, order, ranked
    if config.duplicates.near:
        found = [s for n in range(count) if (s := store.signatures(n)) is not None]
        alive = np.flatnonzero(keep)
        if len(alive):
            signatures = np.concatenate(found)[alive]
            near = np.zeros(len(keep), bool)
            near[alive[near_duplicates(signatures, config.duplicates.jaccard)]] = True
            reasons["near duplicate"] = near
            keep &= ~near
    sources, problems, samples = _summaries(config, job, store, tables, starts, keep, reasons)
    shards: list[ShardPlan] = []
    order_of_units = sorted(
        range(count),
        key=lambda n: hashlib.blake2b(f"{config.seed}:{n}".encode(), digest_size=8).digest(),
    )
    for split, flag in (("train", 0), ("heldout", 1)):
        parts: list[tuple[int, int, int, int]] = []
        size, ordinal, first, written = 0, 0, 0, 0

        for number in order_of_units:
            table = tables[number]
            chosen = keep[starts[number] : starts[number + 1]] & (table["heldout"] == flag)
            at = np.concatenate(([0], np.cumsum(table["size"], dtype=np.int64)))
            for document in np.flatnonzero(chosen).tolist():
                taken = record_bytes(int(table["size"][document]))
                if size and size + taken > config.shard_bytes:
                    shards.append(ShardPlan(split, written, first, tuple(parts), size))
                    parts, size, first, written = [], 0, ordinal, written + 1
                last = parts[-1] if parts else None
                if last is not None and last[0] == number and last[2] == document:
                    parts[-1] = (number, last[1], document + 1, last[3])
                else:
                    parts.append((number, document, document + 1, int(at[document])))
                size += taken
                ordinal += 1
        if parts:
            shards.append(ShardPlan(split, written, first, tuple(parts), size))
        if not ordinal and (flag == 0 or config.heldout_fraction > 0):
            raise UserError(
                f"the {'training' if flag == 0 else 'held-out'} split is empty: "
                f"{int(keep.sum())} documents, heldout_fraction {config.heldout_fraction}; set "
                f"{'less' if flag == 0 else 'more, or 0 for none'}, and use --fresh"
            )
    return Assembly(shards, sources, problems, samples)


def _summaries(
    config: PrepareConfig,
    job: Job,
    store: UnitStore,
    tables: list[np.ndarray],
    starts: np.ndarray,
    keep: np.ndarray,
    reasons: dict[str, np.ndarray],
) -> tuple[list[SourceInfo], list[dict[str, str]], dict[str, dict[str, list[dict[str, str]]]]]:
    infos, problems = [], []
    samples: dict[str, dict[str, list[dict[str, str]]]] = {}
    for index, source in enumerate(config.sources):
        total = {"in": 0, "out": 0, "words": 0, "sentences": 0, "tokens": 0}
        dropped: dict[str, int] = {}
        notes = {"broken inputs": 0, "cut sentences": 0}
        characters, promised = 0, 0
        for number, unit in enumerate(job.units):
            if unit.source != index:
                continue
            tally = store.facts(number)["tally"]
            alive = keep[starts[number] : starts[number + 1]]
            table = tables[number][alive]
            total["in"] += tally["documents"] + sum(tally["dropped"].values())
            total["out"] += len(table)
            for key in ("words", "sentences", "tokens"):
                total[key] += int(table[key].sum(dtype=np.int64))
            for reason, n in tally["dropped"].items():
                dropped[reason] = dropped.get(reason, 0) + n
            for reason, which in reasons.items():
                n = int(which[starts[number] : starts[number + 1]].sum())
                if n:
                    dropped[reason] = dropped.get(reason, 0) + n
            for reason, some in tally["samples"].items():
                samples.setdefault(source.name, {}).setdefault(reason, []).extend(some)
            # All parts of a gz or zst file meet what is wrong with the file itself.
            new = [problem for problem in tally["problems"] if problem not in problems]
            notes["broken inputs"] += len(new)
            notes["cut sentences"] += tally["cut_sentences"]
            problems += new
            characters += tally["characters"]
            promised += unit.bytes
        why = ", ".join(f"{reason} {n}" for reason, n in sorted(dropped.items())) or "none dropped"
        if not total["out"]:
            broken = f"; {notes['broken inputs']} broken inputs" if notes["broken inputs"] else ""
            raise UserError(
                f"source {source.name}: no document came out of {promised / 1e6:.1f} MB of input "
                f"({why}{broken}); is kind {source.kind} right?"
            )
        if characters < source.least_yield * promised:
            raise UserError(
                f"source {source.name}: only {characters / 1e6:.2f} MB of text came out of about "
                f"{promised / 1e6:.1f} MB of input ({why}; {notes['broken inputs']} broken inputs)"
                f"; is kind {source.kind} right? min_yield sets the bound ({source.least_yield})"
            )
        infos.append(
            SourceInfo(
                name=source.name,
                kind=source.kind,
                provenance=source.provenance,
                licence=source.licence,
                documents_in=total["in"],
                documents_out=total["out"],
                words=total["words"],
                sentences=total["sentences"],
                tokens=total["tokens"],
                dropped=dict(sorted(dropped.items())),
                notes={key: n for key, n in notes.items() if n},
            )
        )
    return infos, problems, samples


def write_shard(
    out: Path, store: UnitStore, done: UnitStore, job: Job, plan: ShardPlan
) -> ShardInfo:
    """Copies the records of a shard from the units; a damaged unit is an error, never copied."""
    writer = ShardWriter(out, plan.split, plan.number, plan.first_ordinal)
    try:
        for unit, first, last, at in plan.parts:
            sizes = store.table(unit)["size"][first:last].tolist()
            with store.open(unit, "records") as file:
                file.seek(at)
                for size in sizes:
                    payload = file.read(size)
                    if len(payload) != size:
                        raise UserError(f"{file.name}: ends early; run the same command again")
                    writer.write(payload)
        info = writer.close()
        with done.write(_shard_key(plan)) as mark:
            mark.finish({"job": job.fingerprint, "shard": asdict(info)})
    except OSError as error:
        writer.abandon()
        raise disk_error(error, out) from None
    return info


def _shard_key(plan: ShardPlan) -> int:
    return plan.number + (500_000 if plan.split == "heldout" else 0)


def _written(out: Path, done: UnitStore, job: Job, plan: ShardPlan) -> ShardInfo | None:
    facts = done.load(_shard_key(plan))
    if facts is None or facts["job"] != job.fingerprint:
        return None
    info = ShardInfo(**facts["shard"])
    for name, size in ((f"{info.name}.tar", info.bytes), (f"{info.name}.idx", info.idx_bytes)):
        try:
            if (out / name).stat().st_size != size:
                return None
        except OSError:
            return None
    return info


def write_shards(
    ranks: Ranks, out: Path, store: UnitStore, job: Job, assembly: Assembly | None
) -> dict[str, ShardInfo]:
    """All shards, each by one rank; on rank 0 what they are, by name."""
    done_store = UnitStore(out / WORK / "shards")
    infos: dict[str, ShardInfo] = {}
    plans: list[ShardPlan] = []
    progress: Progress | None = None
    if assembly is not None:
        for plan in assembly.shards:
            info = _written(out, done_store, job, plan)
            if info is None:
                plans.append(plan)
            else:
                infos[info.name] = info
        total = sum(plan.bytes for plan in assembly.shards)
        progress = Progress("shards", total, total - sum(plan.bytes for plan in plans))

    def done(info: ShardInfo) -> None:
        assert progress is not None
        infos[info.name] = info
        progress.add(info.bytes, {"documents": info.documents})

    ranks.deal(plans, lambda plan: write_shard(out, store, done_store, job, plan), done)
    if progress is not None and plans:
        progress.close()
    return infos
