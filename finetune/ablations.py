"""The paper's tables 5, 6 and 8 with our numbers: `python -m finetune ablations FOLDER...`.

A row is a pretraining run of configs/ablations, known by the name of its folder, which is the
encoder of a result below the folders or holds it as checkpoints/step-N; of several checkpoints of a
run the last one counts.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from configs.load import load
from core.console import notice, show, table
from core.errors import UserError
from finetune import loading
from finetune.config import FinetuneConfig
from finetune.report import Row, results, rows
from finetune.results import RESULT, Result
from pretrain.metrics import records_from_the_end

PERPLEXITY = "perplexity"


@dataclass(frozen=True)
class Line:
    """name: ours; paper: what stands in the paper, its numbers by column. bilstm: fine-tuned with a
    BiLSTM on top."""

    name: str
    run: str
    paper: tuple[float, ...]
    of_paper: str = "paper"
    bilstm: bool = False


@dataclass(frozen=True)
class Table:
    """columns: (task, measure), or (PERPLEXITY, what it is called)."""

    title: str
    columns: tuple[tuple[str, str], ...]
    lines: tuple[Line, ...]


_MINI = "mini"
_LTR = "table5_left_to_right"
# Devlin et al. 2019: dev scores.
TABLES = (
    Table(
        "Table 5: pretraining tasks (accuracy; SQuAD: F1)",
        (
            ("MNLI", "accuracy"),
            ("QNLI", "accuracy"),
            ("MRPC", "accuracy"),
            ("SST-2", "accuracy"),
            ("SQuAD-1.1", "f1"),
        ),
        (
            Line("masked, NSP", _MINI, (84.4, 88.4, 86.7, 92.7, 88.5)),
            Line("no NSP", "table5_no_nsp", (83.9, 84.9, 86.5, 92.6, 87.9)),
            Line("left to right", _LTR, (82.1, 84.3, 77.5, 92.1, 77.8)),
            Line("  + BiLSTM", _LTR, (82.1, 84.1, 75.7, 91.6, 84.9), bilstm=True),
        ),
    ),
    Table(
        "Table 6: sizes (layers-width-heads; the paper's are three times ours)",
        (
            (PERPLEXITY, "held-out"),
            ("MNLI", "accuracy"),
            ("MRPC", "accuracy"),
            ("SST-2", "accuracy"),
        ),
        (
            Line("1-256-4", "table6_1_256_4", (5.84, 77.9, 79.8, 88.4), "3-768-12"),
            Line("2-256-1", "table6_2_256_1", (5.24, 80.6, 82.2, 90.7), "6-768-3"),
            Line("2-256-4", "table6_2_256_4", (4.68, 81.9, 84.8, 91.3), "6-768-12"),
            Line("4-256-4", _MINI, (3.99, 84.4, 86.7, 92.9), "12-768-12"),
            Line("4-320-5", "table6_4_320_5", (3.54, 85.7, 86.9, 93.3), "12-1024-16"),
            Line("8-320-5", "table6_8_320_5", (3.23, 86.6, 87.8, 93.7), "24-1024-16"),
        ),
    ),
    Table(
        "Table 8: what stands at a predicted token, % [MASK]-same-random (NER: F1)",
        (("MNLI", "accuracy"), ("NER", "f1"), ("NER-concat_last_four", "f1")),
        (
            Line("80-10-10", _MINI, (84.2, 95.4, 94.9)),
            Line("100-0-0", "table8_100_0_0", (84.3, 94.9, 94.0)),
            Line("80-0-20", "table8_80_0_20", (84.1, 95.2, 94.6)),
            Line("80-20-0", "table8_80_20_0", (84.4, 95.2, 94.7)),
            Line("0-20-80", "table8_0_20_80", (83.7, 94.8, 94.6)),
            Line("0-0-100", "table8_0_0_100", (83.6, 94.9, 94.6)),
        ),
    ),
)
NOTE = (
    "mean+-deviation/seeds on dev, of the setting with the best median; - not run.\n"
    "perplexity: of masked words, held out; not to be compared over vocabularies."
)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m finetune ablations", description=__doc__)
    parser.add_argument("runs", nargs="+", help="run folders of fine-tuning, or a folder above")
    folders = parser.parse_args(argv).runs
    found = results(folders)
    if not found:
        raise UserError(f"{', '.join(folders)}: no finished job ({RESULT}) below")
    named = {line.run for page in TABLES for line in page.lines}
    if strange := sorted({_folder(result).name for _, result in found} - named):
        theirs = ", ".join(sorted(named))
        said = f"no line of the tables is of {', '.join(strange)}; theirs are {theirs}"
        notice(f"warning: {said}", sys.stderr)
    show(text([result for _, result in found], _replaced(found)))
    return 0


def _replaced(found: Iterable[tuple[str, Result]]) -> set[str]:
    """The encoders that do not hold what was fine-tuned, or of which nobody knows, since they are
    gone: what a run of that name has measured may be of other weights. A line is said of each.
    UserError where results are of two contents of one."""
    made: dict[str, tuple[str, str, Result]] = {}
    for run, result in found:
        if content := result.made_of.get(result.encoder):
            first, other, _ = made.setdefault(result.encoder, (content, run, result))
            if content != first:
                raise UserError(f"{other} and {run} have results of different contents of "
                                f"{result.encoder}; give those of one of them")  # fmt: skip
    replaced = set()
    for encoder, (content, run, result) in made.items():
        if not os.path.exists(_metrics(result)):
            continue
        try:
            config = load(f"{run}/config.yaml", FinetuneConfig).encoder
            now = loading.read(config.model_copy(update={"path": encoder}), 1).digest
        except UserError as error:
            notice(f"warning: no perplexity of {encoder}: {error}", sys.stderr)
            replaced.add(encoder)
            continue
        if now != content:
            said = f"the results in {run} are of another content"
            notice(f"warning: no perplexity of {encoder}: {said}", sys.stderr)
            replaced.add(encoder)
    return replaced


def text(found: Sequence[Result], replaced: Container[str] = ()) -> str:
    """The tables, two lines a row: ours and the paper's. replaced: encoders that get no
    perplexity."""
    blocks = []
    for page in TABLES:
        cells = [
            ["", *(task.replace("-concat_last_four", " features") for task, _ in page.columns)]
        ]
        for line in page.lines:
            chosen = of_run(found, line)
            measured = rows((line.run, result) for result in chosen)
            ours = [
                _perplexity([result for result in chosen if result.encoder not in replaced])
                if task == PERPLEXITY
                else _cell(measured, task, measure)
                for task, measure in page.columns
            ]
            cells += [[line.name, *ours], [f"  {line.of_paper}", *map(str, line.paper)]]
        # The last column of a table is a text's, at the left.
        aligned = table([[*row, ""] for row in cells])
        blocks.append("\n".join([page.title, *(row.rstrip() for row in aligned)]))
    return "\n\n".join([*blocks, NOTE])


def of_run(found: Iterable[Result], line: Line) -> list[Result]:
    """Results from the last checkpoint of the line's run, trained as the line says. UserError where
    two runs have its name, or a job stands twice: its seed would count as two."""
    mine = [
        result
        for result in found
        if line.run == _folder(result).name
        and result.init == "pretrained"
        and ("BiLSTM" in result.trained) == line.bilstm
    ]
    last = max((_step(result) for result in mine), default=0)
    by_folder = {_place(result): result.encoder for result in mine}
    mine = [result for result in mine if _step(result) == last]
    encoders = sorted({result.encoder for result in mine})
    if others := by_folder.keys() - {_place(result) for result in mine}:  # which have no such step
        raise _two_runs(line.run, by_folder[min(others)], encoders[0])
    # A run that was moved between two sweeps is one, by its content.
    if len(encoders) > 1 < len({result.made_of.get(result.encoder) for result in mine} - {None}):
        raise _two_runs(line.run, *encoders[:2])
    jobs = Counter(
        (r.task, r.trained, r.batch_size, r.learning_rate, r.epochs, r.seed) for r in mine
    )
    for (task, _, batch_size, rate, epochs, seed), count in jobs.items():
        if count > 1 and seed is not None:
            raise UserError(
                f"{count} results of {line.run} are of {task}, b{batch_size} lr{rate:g} "
                f"e{epochs:g}, seed {seed}; give the folder of one of them"
            )
    return mine


def _two_runs(name: str, one: str, other: str) -> UserError:
    return UserError(
        f"two runs are named {name}: {one} and {other}; give the results of one of them"
    )


def _folder(result: Result) -> Path:
    """Of the pretraining run."""
    folder = Path(result.encoder)
    return folder.parents[1] if folder.parent.name == "checkpoints" else folder


def _place(result: Result) -> str:
    """Of the pretraining run, however its path is written."""
    return os.path.realpath(_folder(result))


def _step(result: Result) -> int:
    found = re.fullmatch("step-([0-9]{8})", Path(result.encoder).name)
    return int(found[1]) if found else 0


def _metrics(result: Result) -> Path:
    return Path(result.encoder).parent.parent / "metrics.jsonl"


def _cell(measured: Sequence[Row], task: str, measure: str) -> str:
    for row in measured:
        if (row.task, row.measure) == (task, measure) and row.mean is not None:
            return f"{row.mean:.1f}+-{row.deviation:.1f}/{row.seeds}"
    return "-"


def _perplexity(found: Sequence[Result]) -> str:
    """At the last evaluation up to the checkpoint."""
    for result in found:
        try:
            for record in records_from_the_end(_metrics(result)):
                if record["step"] <= _step(result) and (loss := record.get("heldout/mlm_loss")):
                    return f"{math.exp(loss):.2f}" if loss < 100 else "-"  # it has diverged
        except UserError as error:
            notice(f"warning: no perplexity of {result.encoder}: {error}", sys.stderr)
            return "-"
    return "-"
