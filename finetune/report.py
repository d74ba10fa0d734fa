"""One table of all results beside the paper's: console, markdown and csv.

Every finished job below the given folders is counted: of each setting (batch, rate, epochs) all
seeds, of each task the setting with the best median, and the best single job.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.load import UserError
from finetune.train import RESULT

# Devlin et al. 2019: GLUE test (table 1; F1 of QQP and MRPC, Spearman of STS-B), SQuAD dev (tables
# 2 and 3, single model), SWAG dev (table 4), NER dev F1 (table 7).
PAPER = {
    "MNLI": (84.6, 86.7),
    "QQP": (71.2, 72.1),
    "QNLI": (90.5, 92.7),
    "SST-2": (93.5, 94.9),
    "CoLA": (52.1, 60.5),
    "STS-B": (85.8, 86.5),
    "MRPC": (88.9, 89.3),
    "RTE": (66.4, 70.1),
    "SQuAD-1.1": (88.5, 90.9),
    "SQuAD-2.0": (None, 81.9),
    "SWAG": (81.6, 86.6),
    "NER": (96.4, 96.6),
    "NER-embeddings": (91.0, None),
    "NER-second_to_last": (95.6, None),
    "NER-last": (94.9, None),
    "NER-weighted_sum": (95.5, None),
    "NER-sum_last_four": (95.9, None),
    "NER-concat_last_four": (96.1, None),
}


@dataclass(frozen=True)
class Row:
    """One task from one encoder; scores of the main measure on dev, 0 to 100."""

    run: str
    task: str
    init: str
    trained: str
    measure: str
    best: float
    setting: str
    jobs: int
    seeds: int
    median: float
    mean: float
    deviation: float
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
NOTE = (
    "Dev scores. median, mean, +- (standard deviation of the sample) and failed (ended at a "
    "constant guess or diverged; counted in all of them) are over the seeds of the setting with "
    "the best median. * the paper's: GLUE test, the rest dev."
)


def results(folders: Iterable[str | Path]) -> list[tuple[str, dict[str, Any]]]:
    """(run folder, result) of every finished job below the folders."""
    found = []
    for folder in folders:
        if not Path(folder).is_dir():
            raise UserError(f"{folder}: no such folder")
        for path in sorted(Path(folder).rglob(RESULT)):
            found.append(
                (str(path.parent.parent.parent), json.loads(path.read_text(encoding="utf-8")))
            )
    return found


def rows(found: Iterable[tuple[str, dict[str, Any]]]) -> list[Row]:
    tasks: dict[tuple, list[dict[str, Any]]] = defaultdict(list)
    for run, r in found:
        tasks[run, r["task"], r["init"], r["trained"]].append(r)
    table = []
    for (run, task, init, trained), jobs in tasks.items():
        settings: dict[tuple, list[dict[str, Any]]] = defaultdict(list)
        for r in jobs:
            settings[r["batch_size"], r["learning_rate"], r["epochs"]].append(r)
        (batch_size, rate, epochs), chosen = max(
            settings.items(), key=lambda kv: (statistics.median(map(_score, kv[1])), kv[0])
        )
        scores = [_score(r) for r in chosen]
        base, large = PAPER.get(task, (None, None))
        table.append(
            Row(
                run=run,
                task=task,
                init=init,
                trained=trained,
                measure=jobs[0]["main"],
                best=max(map(_score, jobs)),
                setting=f"b{batch_size} lr{rate:g} e{epochs:g}",
                jobs=len(jobs),
                seeds=len(scores),
                median=statistics.median(scores),
                mean=statistics.fmean(scores),
                deviation=statistics.stdev(scores) if len(scores) > 1 else 0.0,
                failed=sum(r["failed"] for r in chosen),
                failed_all=sum(r["failed"] for r in jobs),
                base=base,
                large=large,
            )
        )
    places = {task: n for n, task in enumerate(PAPER)}
    return sorted(table, key=lambda r: (places.get(r.task, 99), r.task, r.run, r.init, r.trained))


def write(folders: Sequence[str | Path], out: str | Path) -> None:
    """Print the table and write report.md and report.csv to `out`."""
    table = rows(results(folders))
    if not table:
        raise UserError(f"{', '.join(map(str, folders))}: no finished job ({RESULT}) below")
    cells = [[_cell(getattr(r, key)) for key in COLUMNS] for r in table]
    header = list(COLUMNS.values())
    # What is the same in every row says nothing on a console.
    shown = [c for c in range(len(header)) if c == 1 or len({row[c] for row in cells}) > 1 or c > 3]
    widths = [max(len(row[c]) for row in [header, *cells]) for c in range(len(header))]
    for row in [header, *cells]:
        print("  ".join(row[c].ljust(widths[c]) for c in shown).rstrip())
    print(NOTE)
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    lines = [f"| {' | '.join(row)} |" for row in [header, ["---"] * len(header), *cells]]
    (folder / "report.md").write_text("\n".join([*lines, "", NOTE, ""]), encoding="utf-8")
    with (folder / "report.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerows([["" if c == "-" else c for c in row] for row in cells])


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m finetune report", description=__doc__)
    parser.add_argument("runs", nargs="+", help="run folders (run_dir), or a folder above them")
    parser.add_argument("--out", help="folder of report.md and report.csv; default: the first run")
    arguments = parser.parse_args(argv)
    write(arguments.runs, arguments.out or arguments.runs[0])
    return 0


def _score(result: dict[str, Any]) -> float:
    return result["scores"][result["main"]]


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)
