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
import hashlib
import os
import shutil
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from configs.load import dump, load, parser
from core.console import Progress
from core.errors import UserError
from core.files import disk_errors, write_atomically
from data_pipeline.corpus.assembly import Assembly, plan_assembly, write_shards
from data_pipeline.corpus.job import VERSION, Job, plan_job, text_rules
from data_pipeline.corpus.output import WORK, locked
from data_pipeline.corpus.ranks import MpiRanks, Ranks, Stopped
from data_pipeline.corpus.report import closing_table, write_rejects
from data_pipeline.corpus.settings import PrepareConfig
from data_pipeline.corpus.shards import (
    MANIFEST,
    VOCAB,
    Manifest,
    ShardInfo,
    load_manifest,
    vocab_bytes,
)
from data_pipeline.corpus.tokenizer import Tokenizer
from data_pipeline.corpus.units import (
    Sentences,
    Tally,
    UnitStore,
    documents_of,
    encode_unit,
)
from data_pipeline.corpus.vocabulary import make_text_unit, read_text_unit, vocabulary

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
        progress.add(job.units[number].bytes, {"documents": documents, "broken inputs": problems})

    def one(number: int) -> tuple[int, int, int]:
        with disk_errors(store.folder):
            facts = work(number)
        return number, facts["tally"]["documents"], len(facts["tally"]["problems"])

    ranks.deal(numbers, one, done)
    if progress is not None and numbers:
        progress.close()


def _finished(store: UnitStore, number: int, job: Job) -> dict[str, Any] | None:
    facts = store.load(number)
    return facts if facts is not None and facts["job"] == job.fingerprint else None


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
    with contextlib.ExitStack() as held:
        ranks.first(lambda: held.enter_context(locked(out)))
        tokenizer: Tokenizer | None = None

        def plan() -> Job | None:
            nonlocal tokenizer
            if rejects is not None:
                with disk_errors(rejects):
                    rejects.mkdir(parents=True, exist_ok=True)
            path = config.vocabulary.path
            if path is not None:
                tokenizer = Tokenizer.from_file(path, config.vocabulary.lowercase)
            return plan_job(config, out, fresh, tokenizer)

        job = ranks.first(plan)
        if job is None:
            manifest = ranks.first(lambda: load_manifest(out))
            if ranks.rank == 0:
                print(f"{out}: all is done already, dataset {manifest.dataset_id} is used as it is")
                if rejects is not None:
                    print(f"{rejects}: left as it is; --fresh reads the sources again")
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
        pieces = ranks.first(
            lambda: tokenizer.pieces if texts is None else vocabulary(config, job, out, texts)
        )
        if tokenizer is None:
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


def _finish(
    config: PrepareConfig,
    out: Path,
    tokenizer: Tokenizer,
    assembly: Assembly,
    infos: dict[str, ShardInfo],
    rejects: Path | None,
) -> Manifest:
    vocab = vocab_bytes(tokenizer.pieces)
    names = [
        f"{'shard' if p.split == 'train' else 'heldout'}-{p.number:06d}" for p in assembly.shards
    ]
    manifest = Manifest(
        vocab_size=len(tokenizer),
        vocab_sha256=hashlib.sha256(vocab).hexdigest(),
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
    with disk_errors(out):
        # Left by an earlier run that was planned otherwise, or that was killed.
        for path in [*out.glob("shard-*"), *out.glob("heldout-*"), *out.glob(".*.part")]:
            if path.name.split(".")[0] not in infos:
                path.unlink()
        write_atomically(out / VOCAB, vocab)
        write_atomically(out / MANIFEST, manifest.to_json())
        if rejects is not None:
            write_rejects(rejects, assembly)
        shutil.rmtree(out / WORK, ignore_errors=True)
    for problem in assembly.problems[:20]:
        print(f"broken input: {problem['file']}: {problem['place']}: {problem['what']}")
    if len(assembly.problems) > 20:
        print(f"broken input: and {len(assembly.problems) - 20} more")
    print(closing_table(manifest))
    print(f"dataset {manifest.dataset_id} in {out}")
    return manifest


def main(argv: list[str]) -> int:
    """`python -m data_pipeline prepare`."""
    what = "Turn text into shards. Restartable: run the same command."
    arguments = parser(PrepareConfig, what, prog="python -m data_pipeline prepare")
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
