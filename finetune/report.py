"""One table of all results beside the paper's: console, markdown and csv.

Every finished job below the given folders is counted: of each setting (batch, rate, epochs) all
seeds, of each task the setting with the best median, and the best single job; the task's main
measure chooses, its other measures have rows of their own.
"""

from __future__ import annotations

import argparse
import csv
import io
import math
import os
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from core.console import markdown_table, notice, show, wrap
from core.console import table as in_columns
from core.errors import UserError, short
from core.files import check_own, disk_errors, write_atomically
from core.urls import path_here
from finetune.results import (
    NO_NUMBER,
    PAPER,
    REPORT,
    RESULT,
    Contents,
    Result,
    check_alike,
    has_papers_records,
    read,
)


@dataclass(frozen=True)
class Row:
    """One measure of one task from one encoder, 0 to 100."""

    run: str
    task: str
    init: str
    trained: str
    measure: str
    best: float | None
    setting: str
    jobs: int
    seeds: int
    median: float | None
    mean: float | None
    deviation: float | None
    failed: int
    failed_all: int
    base: float | None
    large: float | None


COLUMNS = {
    "run": "run",
    "task": "task",
    "init": "weights",
    "trained": "trained",
    "measure": "measure",
    "best": "best",
    "setting": "best setting",
    "seeds": "seeds",
    "median": "median",
    "mean": "mean",
    "deviation": "+-",
    "failed": "failed",
    "jobs": "all jobs",
    "failed_all": "failed of all",
    "base": "BASE*",
    "large": "LARGE*",
}
_LEVELS = 3  # of a folder of runs: run, task, job
_SHOWN = ("best", "median", "mean", "deviation", "base", "large")
_OF_PAPER = ("base", "large")
NOTE = (
    "Dev scores, but where a measure says test. A task's first measure chooses the best job, whose "
    "scores are best, and the setting with the best median. median, mean, +- (standard deviation "
    "of the sample) and failed (ended at a constant guess or diverged; counted in all of them) are "
    "over its seeds; - where some have no such score."
)
_PAPER_NOTE = " * the paper's: GLUE test, the rest as ours."


def results(folders: Iterable[str | Path]) -> list[tuple[str, Result]]:
    """(run folder, result) of every finished job below the folders, each once.

    Of a folder that is missing, a link to nothing, or a folder or result that cannot be read, there
    is a warning.
    """

    def leave_out(error: OSError) -> None:
        notice(f"warning: left out: {error.filename}: {error.strerror}", sys.stderr)

    found, here = [], Path.cwd()
    seen: dict[str, float] = {}
    known: dict[Path, Contents] = defaultdict(dict)
    for folder in folders:
        if not Path(folder).is_dir():
            notice(f"warning: left out: {folder}: no such folder", sys.stderr)
            continue
        for job in sorted(_jobs(os.path.realpath(folder), seen, leave_out)):
            run = job.parent.parent
            name = run.relative_to(here) if run.is_relative_to(here) else run
            try:
                result = read(job / RESULT)
                check_alike(job / RESULT, result, known[job.parent])
                found.append((str(name), result))
            except UserError as error:
                notice(f"warning: job left out: {short(str(error), 500)}", sys.stderr)
    return found


def _jobs(
    folder: str, seen: dict[str, float], leave_out: Callable[[OSError], None]
) -> Iterator[Path]:
    """Those below the folder, each once; behind a link, which may lead anywhere, as deep as in a
    folder of runs. Of many links by the deepest, which is the likeliest to stand for a job.
    seen: of the folders that were looked at, by their paths without links, how many levels below
    them; added to."""
    waiting = [folder]
    while waiting:
        waiting.sort(key=lambda path: (-path.count("/"), path))
        start = waiting.pop(0)
        for parent, below, names in os.walk(start, onerror=leave_out):
            left = math.inf if start == folder else _LEVELS - parent.count("/") + start.count("/")
            before = seen.get(real := os.path.realpath(parent), -1)
            if left <= before:
                below.clear()
                continue
            seen[real] = left
            if before < 0:
                if RESULT in names:
                    yield Path(parent)
                _tell_links_to_nothing(parent, names, leave_out)
            if not left:
                below.clear()
            waiting += filter(os.path.islink, (os.path.join(parent, name) for name in below))


def _tell_links_to_nothing(
    folder: str, names: Iterable[str], leave_out: Callable[[OSError], None]
) -> None:
    for path in (os.path.join(folder, name) for name in sorted(names) if name[0] != "."):
        if os.path.islink(path):
            try:
                os.stat(path)
            except OSError as error:
                leave_out(error)


def rows(found: Iterable[tuple[str, Result]]) -> list[Row]:
    """A row a measure, the main one of a task first."""
    tasks: dict[tuple, list[Result]] = defaultdict(list)
    for run, r in found:
        tasks[run, r.task, r.init, r.trained, r.main].append(r)
    table = []
    for (run, task, init, trained, main), jobs in tasks.items():
        settings: dict[tuple, list[Result]] = defaultdict(list)
        for r in jobs:
            settings[r.batch_size, r.learning_rate, r.epochs].append(r)
        (batch_size, rate, epochs), chosen = max(
            settings.items(), key=lambda kv: (statistics.median(r.value for r in kv[1]), kv[0])
        )
        best = max(jobs, key=lambda r: r.value)
        paper = PAPER.get(task, {})
        if any(not has_papers_records(task, r.records) for r in jobs):
            paper = dict.fromkeys(paper, NO_NUMBER)
        # Of a task that the paper has not, all but the measures of single classes (f1/LABEL).
        others = paper or [m for m in best.scores if "/" not in m]
        for measure in dict.fromkeys([main, *others, f"test {main}"]):
            if all(r.of(measure) is None for r in jobs):
                continue
            scores = [s for r in chosen if (s := r.of(measure)) is not None]
            if len(scores) < len(chosen):  # some seeds only: not what the other rows are over
                median = mean = deviation = None
            else:
                median, mean = statistics.median(scores), statistics.fmean(scores)
                deviation = statistics.stdev(scores) if len(scores) > 1 else 0.0
            base, large = paper.get(measure, NO_NUMBER)
            table.append(
                Row(
                    run=run,
                    task=task,
                    init=init,
                    trained=trained,
                    measure=measure,
                    best=best.of(measure),
                    setting=f"b{batch_size} lr{rate:g} e{epochs:g}",
                    jobs=len(jobs),
                    seeds=len(chosen),
                    median=median,
                    mean=mean,
                    deviation=deviation,
                    failed=sum(r.failed for r in chosen),
                    failed_all=sum(r.failed for r in jobs),
                    base=base,
                    large=large,
                )
            )
    places = {task: n for n, task in enumerate(PAPER)}
    return sorted(table, key=lambda r: (places.get(r.task, 99), r.task, r.run, r.init, r.trained))


def columns_of(table: Sequence[Row]) -> dict[str, str]:
    """`COLUMNS`, without the paper's where no row has its numbers."""
    paper = any(row.base is not None or row.large is not None for row in table)
    return _columns(paper)


def _columns(paper: bool) -> dict[str, str]:
    return {key: head for key, head in COLUMNS.items() if paper or key not in _OF_PAPER}


def text(table: Sequence[Row]) -> str:
    """For a console of 80 columns: a heading a task, a line a measure."""
    # What is the same in every row says nothing.
    varied = [k for k in ("run", "init", "trained") if len({getattr(r, k) for r in table}) > 1]
    shown = [key for key in _SHOWN if key in columns_of(table)]
    cells = [["", *(f"{COLUMNS[key]:>6}" for key in shown), ""]]
    cells += [[f"  {r.measure}", *(_cell(getattr(r, k)) for k in shown), ""] for r in table]
    first, *measures = (line.rstrip() for line in in_columns(cells))
    lines, heading = [first], None
    for r, line in zip(table, measures, strict=True):
        name = "  ".join([r.task, *(getattr(r, key) for key in varied)])
        counts = f"seeds {r.seeds} ({r.failed} failed), jobs {r.jobs} ({r.failed_all} failed)"
        before, heading = heading, [name, f"{r.setting}: {counts}"]
        if heading != before:
            lines.append(("  " if len("  ".join(heading)) <= 80 else "\n  ").join(heading))
        lines.append(line)
    return "\n".join([*lines, *wrap(_note(table), rest="")])


def _note(table: Sequence[Row]) -> str:
    return NOTE + (_PAPER_NOTE if "base" in columns_of(table) else "")


def write(
    folders: Sequence[str | Path], out: str | Path, tell: Callable[[str], None] = show
) -> None:
    """`tell` the table and write report.md and report.csv to `out`."""
    table = rows(results(folders))
    if not table:
        raise UserError(f"{', '.join(map(str, folders))}: no finished job ({RESULT}) below")
    tell(text(table))
    columns = columns_of(table)
    cells = [[_cell(getattr(r, key)) for key in columns] for r in table]
    page = [*markdown_table([list(columns.values()), *cells]), "", _note(table), ""]
    folder = Path(out)
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name in REPORT:
            check_own(folder / name, lambda line: line.decode(errors="replace").strip() in _heads())
        write_atomically(folder / REPORT[0], "\n".join(page))
        lines = io.StringIO()
        writer = csv.writer(lines)
        writer.writerow(columns)
        writer.writerows([["" if c == "-" else c for c in row] for row in cells])
        write_atomically(folder / REPORT[1], lines.getvalue())


def _heads() -> list[str]:
    """The first lines of reports."""
    every = [_columns(paper) for paper in (True, False)]
    return [line for c in every for line in (markdown_table([list(c.values())])[0], ",".join(c))]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m finetune report", description=__doc__)
    parser.add_argument("runs", nargs="+", help="run folders (run_dir), or a folder above them")
    parser.add_argument(
        "--out",
        type=path_here,
        help="folder of report.md and report.csv; default: the first run that is there",
    )
    arguments = parser.parse_args(argv)
    with disk_errors(arguments.runs[0]):
        there = [run for run in arguments.runs if Path(run).is_dir()] or arguments.runs
    write(arguments.runs, arguments.out or there[0])
    return 0


def _cell(value: str | float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)
