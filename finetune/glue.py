"""GLUE in the official layout. A task is a row of the table below; the code knows none of them."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from core.errors import UserError
from finetune.config import GlueConfig
from finetune.examples import (
    Item,
    Problems,
    Row,
    fit,
    read_rows,
    read_text,
    sequence,
    subset,
    write_lines,
)
from finetune.heads import HeadSpec
from finetune.metrics import GLUE_METRICS
from finetune.tasks import Outputs, Score, Task


@dataclass(frozen=True)
class GlueTask:
    """texts, label, index: names of columns, or their places in a file without header.

    labels: in the order of the classes; none: a score. metrics: the first chooses.
    dev, test: (name, file) pairs; a test set's name is that of the leaderboard's file, and where
    there are more files the first that exists is taken.
    bare: train and dev have no header line, and these columns.
    """

    texts: tuple[str, ...]
    metrics: tuple[str, ...]
    label: str = "label"
    labels: tuple[str, ...] = ("0", "1")
    index: str = "index"
    dev: tuple[tuple[str, str], ...] = (("dev", "dev.tsv"),)
    test: tuple[tuple[str, ...], ...] = ()
    bare: tuple[str, ...] = ()


_TWO = ("sentence1", "sentence2")
_NLI = ("contradiction", "entailment", "neutral")
_RTE = ("entailment", "not_entailment")

TASKS = {
    "CoLA": GlueTask(("sentence",), ("matthews",), bare=("source", "label", "mark", "sentence")),
    "SST-2": GlueTask(("sentence",), ("accuracy",)),
    "MRPC": GlueTask(("#1 String", "#2 String"), ("f1", "accuracy"), label="Quality"),
    "STS-B": GlueTask(_TWO, ("spearman", "pearson"), label="score", labels=()),
    "QQP": GlueTask(("question1", "question2"), ("f1", "accuracy"), "is_duplicate", index="id"),
    "MNLI": GlueTask(
        _TWO,
        ("accuracy",),
        label="gold_label",
        labels=_NLI,
        dev=(("dev", "dev_matched.tsv"), ("dev-mm", "dev_mismatched.tsv")),
        test=(
            ("MNLI-m", "test_matched.tsv"),
            ("MNLI-mm", "test_mismatched.tsv"),
            ("AX", "../AX/diagnostic.tsv", "../diagnostic/diagnostic.tsv"),
        ),
    ),
    "QNLI": GlueTask(("question", "sentence"), ("accuracy",), labels=_RTE),
    "RTE": GlueTask(_TWO, ("accuracy",), labels=_RTE),
    "WNLI": GlueTask(_TWO, ("accuracy",)),
}


def read(
    path: Path, task: GlueTask, *, labelled: bool, bare: tuple[str, ...] = ()
) -> tuple[list[Row], Problems]:
    """Rows of one official tsv. Fields are split at tabs alone: quotation marks are text.

    Bad rows are left out and counted.
    """
    lines = [line.removesuffix("\r").split("\t") for line in read_text(path).split("\n")]
    while lines and lines[-1] == [""]:
        lines.pop()
    header = bare or (lines[0] if lines else ())
    problems = Problems(path)
    rows = read_rows(
        problems,
        header,
        list(enumerate(lines, 1))[0 if bare else 1 :],
        texts=task.texts,
        label=task.label if labelled else None,
        value=lambda text: _label(text, task),
        index=task.index,
    )
    return rows, problems


def _label(text: str, task: GlueTask) -> int | float | None:
    if task.labels:
        return task.labels.index(text) if text in task.labels else None
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 <= value <= 5 else None


class Glue(Task):
    config: GlueConfig

    def load(self) -> None:
        config, name = self.config, self.name
        self.task = task = TASKS[name]
        self.head = HeadSpec("sequence", max(1, len(task.labels)), task.labels)
        self.rows: dict[str, list[Row]] = {}
        folder = Path(config.dir) / name
        if not folder.is_dir():
            raise UserError(f"glue.dir: {folder} is not there")
        self._cut = 0
        self._add("train", folder / "train.tsv")
        for n, (set_name, file) in enumerate(task.dev):
            if n == 0 or (folder / file).exists():
                self._add(set_name, folder / file)
            else:
                self.notes.append(f"{folder / file} is not there: not scored")
        for set_name, *files in task.test or ((name, "test.tsv"),):
            # By name, not through links: AX is beside the folder of the task as it is given here.
            paths = [Path(os.path.normpath(folder / file)) for file in files]
            path = next((path for path in paths if path.exists()), paths[0])
            if path.exists():
                self._add(f"test {set_name}", path)
            else:
                self.notes.append(f"{path} is not there: no {set_name}.tsv for the leaderboard")
        if self._cut:
            self.notes.append(f"{self._cut} texts were cut to {config.max_seq_len} tokens")
        if task.labels:
            counts = Counter(row.label for row in self.rows["dev"])
            self.notes.append(
                f"dev: {100 * max(counts.values()) / counts.total():.1f} % are of the largest class"
            )

    def _add(self, name: str, path: Path) -> None:
        labelled = not name.startswith("test")
        rows, problems = read(
            path, self.task, labelled=labelled, bare=self.task.bare if labelled else ()
        )
        self.checked(problems, whole=not labelled)
        self.rows[name] = rows = subset(rows, self.wanted(name))
        encode = self.tokenizer.encode_batch
        parts = [encode(texts) for texts in zip(*(r.texts for r in rows), strict=True)]
        items = []
        for n, row in enumerate(rows):
            second = parts[1][n] if len(parts) > 1 else None
            a, b, cut = fit(parts[0][n], second, self.config.max_seq_len)
            self._cut += cut
            items.append(Item((sequence(self.tokenizer, a, b),), row.label))
        self.sets[name] = items

    def _guess(self, outputs: list[np.ndarray]) -> np.ndarray:
        """Classes, or scores as the leaderboard's file has them: 0 to 5, three decimals."""
        values = np.stack(outputs)
        if self.task.labels:
            return values.argmax(1)
        return values[:, 0].astype(np.float64).clip(0, 5).round(3)

    def score(self, outputs: Outputs) -> Score:
        values = {}
        for name in self.dev_sets:
            gold = np.array([row.label for row in self.rows[name]])
            guess = self._guess(outputs[name])
            suffix = name.removeprefix("dev")
            for metric in self.task.metrics:
                values[metric + suffix] = 100 * GLUE_METRICS[metric](gold, guess)
        guess = self._guess(outputs["dev"])
        failed = len(np.unique(guess)) == 1 if self.task.labels else float(guess.std()) < 1e-3
        return Score(values, self.task.metrics[0], bool(failed))

    def write(self, outputs: Outputs, score: Score, folder: Path) -> None:
        for name in outputs:
            file = name.removeprefix("test ") if name in self.test_sets else name
            lines = ["index\tprediction"]
            for row, guess in zip(self.rows[name], self._guess(outputs[name]), strict=True):
                text = self.task.labels[guess] if self.task.labels else f"{guess:.3f}"
                lines.append(f"{row.index}\t{text}")
            write_lines(folder / f"{file}.tsv", lines)
