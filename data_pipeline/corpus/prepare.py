"""The preparation job: sources -> documents -> sentences -> ids -> shards, by one process or many.

    python -m data_pipeline prepare --config configs/data_wikibooks.yaml
    mpiexec -n 64 python -m data_pipeline prepare --config configs/data_wikibooks.yaml

Ranks take units, which do not depend on their number, one at a time from rank 0. A finished unit
stays on disk with its checksums, so a job that was killed goes on where it was. Then duplicates are
found over all units, the shards are planned, and ranks take shards to write.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

from configs.load import dump, load, override, parser
from core.console import OutputGone, notice
from core.errors import OUTPUT_GONE, STOPPED, TryAgain, UserError, limit_error, memory_error
from core.files import disk_errors, write_atomically
from core.processes import no_longer_than, started_together
from core.urls import path_here
from data_pipeline.corpus.assembly import (
    Assembly,
    check_sources,
    plan_assembly,
    source_runs,
    write_shards,
)
from data_pipeline.corpus.compressed import Broken
from data_pipeline.corpus.job import (
    RECORDS,
    TEXT,
    VERSION,
    WORK,
    Job,
    locked,
    made_files,
    plan_job,
    remove_work,
)
from data_pipeline.corpus.manifest import (
    EXTENDS,
    MANIFEST,
    VOCAB,
    Manifest,
    ShardInfo,
    load_manifest,
    vocab_bytes,
    write_source_map,
)
from data_pipeline.corpus.ranks import MpiRanks, Ranks, Stopped, abort
from data_pipeline.corpus.report import (
    REJECTS,
    bad_utf8_lines,
    begin_rejects,
    closing_table,
    unknown_lines,
    write_rejects,
)
from data_pipeline.corpus.settings import PrepareConfig
from data_pipeline.corpus.sources import Unit
from data_pipeline.corpus.store import Store, run_tasks
from data_pipeline.corpus.tokenizer import Tokenizer
from data_pipeline.corpus.units import Tally, make_record_unit, make_text_unit
from data_pipeline.corpus.vocabulary import vocabulary

MPI_PATIENCE = 600.0  # seconds between the beginnings of the first rank and of the last


def join_ranks() -> Ranks:
    """The ranks that were started together. UserError when they did not find each other."""
    sizes = started_together()
    if not sizes:
        return Ranks()
    started = max(sizes.values())
    if started == 1:
        return Ranks()
    if os.environ.get("SLURM_MPI_TYPE") == "pmi2":
        # MPICH's UCX sends 4 kB of memory for an address; Slurm cuts a request at 1,024 bytes
        # (mpi/pmi2: handle_pmi1_cmd). An address of OFI has 70. Few bytes pass between ranks.
        os.environ.setdefault("MPIR_CVAR_CH4_NETMOD", "ofi")
    os.environ.setdefault("UCX_DEBUG_SIGNO", "0")  # by default SIGHUP begins its log, and ends none
    # MPI begins with the import and waits for the other ranks, of which one may have gone before it
    # came here: until there is something to abort, Ctrl-C ends the process, which mpiexec sees.
    before = signal.getsignal(signal.SIGINT)
    if before != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        line = f"error: waited {MPI_PATIENCE:g} s for the others: a rank has left, or never began"
        with no_longer_than(MPI_PATIENCE, TryAgain.code, line), warnings.catch_warnings():
            # mpi4py warns of just what is checked below.
            warnings.simplefilter("ignore", RuntimeWarning)
            from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise UserError(f"started by MPI or Slurm, but mpi4py does not load: {error}") from None
    finally:
        signal.signal(signal.SIGINT, before)
    size = MPI.COMM_WORLD.Get_size()
    if size != started:
        name = max(sizes, key=sizes.__getitem__)
        raise UserError(
            f"{name}={started} processes were started, but MPI sees {size}: each would do all the "
            "work alone. Start with the mpiexec of this environment (.venv/bin/mpiexec), or with "
            "`srun --mpi=pmi2`"
        )
    if MPI.COMM_WORLD.Get_rank():  # rank 0 alone trains a vocabulary
        os.environ.setdefault("RAYON_NUM_THREADS", "1")  # the library's own: as many as cores
    return MpiRanks(MPI)


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
    guarded = disk_errors(out)  # of rank 0's own work; what is dealt has its own
    with contextlib.ExitStack() as held:

        def begin() -> Job | None:
            return plan_job(config, fresh, strict, held.enter_context(locked(out)))

        job = ranks.first(guarded(begin))
        if job is None:
            manifest = ranks.first(lambda: _found(out))
            if ranks.rank == 0:
                notice(
                    f"{out}: all is done already, dataset {manifest.dataset_id} is used as it is; "
                    f"`python -m data_pipeline verify {out}` reads every byte of it"
                )
                if strict:
                    notice("--strict: nothing was read; --fresh reads the sources again")
                if rejects is not None:
                    notice(f"{rejects}: left as it is; --fresh reads the sources again")
            return manifest
        if rejects is not None:
            ranks.first(lambda: begin_rejects(rejects, job))
        if ranks.rank == 0:
            notice(f"{len(job.units)} units of work, {ranks.size} rank{'s' * (ranks.size > 1)}")
        tokenizer, texts, check = job.given, None, job.check_of(ranks.rank)
        if tokenizer is None or config.vocabulary.extend is not None:
            texts = Store(out / WORK / TEXT, job.fingerprint, Tally, check)
            read = _run_units(ranks, "read", job, texts, partial(make_text_unit, job, texts))
            ranks.first(guarded(lambda: check_sources(job, read)))
            pieces = ranks.first(guarded(lambda: vocabulary(job, texts, read)))
            tokenizer = Tokenizer(pieces, job.lowercase)
        store = Store(out / WORK / RECORDS, job.fingerprint, Tally, check)
        work = partial(make_record_unit, job, store, texts, tokenizer)
        tallies = _run_units(ranks, "encode" if texts else "read and encode", job, store, work)
        assembly = ranks.only_first(guarded(lambda: plan_assembly(job, store, tallies)))
        shards = write_shards(ranks, job, store, assembly)
        return ranks.first(lambda: finish(job, tokenizer, assembly, shards, rejects))


def _found(out: Path) -> Manifest:
    manifest = load_manifest(out)
    remove_work(out)  # of a start that was killed in its last moment
    return manifest


def _run_units(
    ranks: Ranks, label: str, job: Job, store: Store[Tally], work: Callable[[Unit, bool], Tally]
) -> dict[str, Tally]:
    def once_or_twice(unit: Unit) -> Tally:
        # Most files are whole, so only a damaged one pays for looking at its sums first. A column
        # that is not there may be damage, too.
        try:
            return work(unit, False)
        except (Broken, UserError):
            return work(unit, True)

    def counts(tally: Tally) -> dict[str, int]:
        return {
            "documents": tally.documents,
            "broken inputs": len(tally.problems) + tally.more_problems,
        }

    return run_tasks(ranks, label, job.units, store, once_or_twice, counts)


def finish(
    job: Job,
    tokenizer: Tokenizer,
    assembly: Assembly,
    shards: dict[str, ShardInfo],
    rejects: Path | None,
) -> Manifest:
    config, out = job.config, job.out
    job.check_place()
    if rejects is not None:
        with disk_errors(rejects, REJECTS):
            write_rejects(rejects, assembly, job)
    manifest = Manifest(
        vocab_size=len(tokenizer),
        vocab_sha256=tokenizer.sha256,
        lowercase=tokenizer.lowercase,
        shards=tuple(shards[plan.key] for plan in assembly.shards),
        sources=tuple(assembly.sources),
        settings={
            "version": VERSION,
            "sentences": config.sentences,
            "max_sentence_tokens": config.max_sentence_tokens,
            "heldout_fraction": config.heldout_fraction,
            "duplicates": config.duplicates.model_dump(mode="json"),
            "seed": config.seed,
            **({EXTENDS: job.given.sha256} if config.vocabulary.extend is not None else {}),
        },
    )
    with disk_errors(out):
        # Left by an earlier run that was planned otherwise, or that was killed.
        for path in made_files(out):
            if path.stem not in shards:
                path.unlink()
        write_atomically(out / VOCAB, vocab_bytes(tokenizer.pieces))
        write_source_map(out, manifest, {p.key: source_runs(job, p) for p in assembly.shards})
    # Before the manifest: a start after that does nothing, and says nothing of them.
    for problem in assembly.problems[:20]:
        notice(f"broken input: {problem.file}: {problem.place}: {problem.what}", lines=False)
    if more := max(0, len(assembly.problems) - 20) + assembly.more_problems:
        notice(f"broken input: and {more} more")
    notice(closing_table(manifest))
    for line in [*unknown_lines(assembly), *bad_utf8_lines(assembly)]:
        notice(line)
    job.check_place()
    with disk_errors(out):
        write_atomically(out / MANIFEST, manifest.to_json())
        remove_work(out)
    notice(f"dataset {manifest.dataset_id} in {out}")
    return manifest


def main(argv: list[str]) -> int:
    """`python -m data_pipeline prepare`."""
    what = "Turn text into shards. Restartable: run the same command."
    arguments = parser(PrepareConfig, what, prog="python -m data_pipeline prepare")
    arguments.add_argument("--out", metavar="DIR", help="folder of the dataset, in place of `out`")
    arguments.add_argument("--fresh", action="store_true", help="make the dataset again from zero")
    arguments.add_argument("--strict", action="store_true", help="stop at the first broken input")
    arguments.add_argument(
        REJECTS, metavar="DIR", type=path_here, help="keep samples of the dropped"
    )
    options = arguments.parse_args(argv)
    out = [override("out", options.out)] if options.out is not None else []
    read = partial(load, options.config, PrepareConfig, [*options.overrides, *out])
    if options.print_config:
        print(dump(read()), end="")
        return 0
    try:
        # A rank that left before it came to MPI, for a file that is not on its node, would leave
        # the others waiting there.
        ranks = join_ranks()
        prepare(
            ranks.first(read),
            ranks,
            fresh=options.fresh,
            strict=options.strict,
            rejects=options.rejects,
        )
    except Stopped as stopped:
        return stopped.code
    except UserError:
        raise
    except BaseException as error:  # of a library in Rust some are no Exception
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # which may come twice
        mpi = sys.modules.get("mpi4py.MPI")
        if mpi is None or mpi.COMM_WORLD.Get_size() == 1:
            raise
        code, text = 1, traceback.format_exc().rstrip()
        if (out := memory_error(error) or limit_error(error)) is not None:
            code, text = out.code, f"error: {out}"
        elif isinstance(error, OutputGone):
            code, text = OUTPUT_GONE, "nobody reads the output"
        elif isinstance(error, KeyboardInterrupt):
            code, text = 130, STOPPED
        abort(mpi.COMM_WORLD, code, text)
    return 0
