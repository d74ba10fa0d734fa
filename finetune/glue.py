"""GLUE in the official layout. A task is a row of the table below; the code knows none of them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from core.errors import UserError
from core.files import is_there
from finetune.classify import TableTask
from finetune.config import GlueConfig, TextConfig
from finetune.examples import Problems
from finetune.heads import HeadSpec
from finetune.tables import Row, number, one_of, open_table, read_rows


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

    Bad rows are left out and counted; a test's whose index is no number are only counted, as a
    test file must be whole.
    """
    problems = Problems(path)
    rows = read_rows(
        problems,
        open_table(path, quotes=False, header=bare),
        texts=task.texts,
        label=task.label if labelled else None,
        value=one_of(task.labels) if task.labels else number(0, 5),
        index=task.index,
    )
    for row in [] if labelled else rows:
        if not (row.index.isascii() and row.index.isdecimal()):  # of a second header line, say
            problems.add("an index that is no whole number", row.place, row.index)
    return rows, problems


class Glue(TableTask):
    config: GlueConfig

    def load_rows(self) -> None:
        config, name = self.config, self.name
        self.task = task = TASKS[name]
        self.head = HeadSpec("sequence", max(1, len(task.labels)), task.labels)
        self.measures = task.metrics
        folder = Path(config.dir) / name
        if not folder.is_dir():
            raise UserError(f"glue.dir: {folder} is not there")
        self._read("train", folder / "train.tsv")
        for n, (set_name, file) in enumerate(task.dev):
            if n == 0 or is_there(folder / file):
                self._read(set_name, folder / file)
            else:
                self.notes.append(f"{folder / file} is not there: not scored")
        for set_name, *files in task.test or ((name, "test.tsv"),):
            # By name, not through links: AX is beside the folder of the task as it is given here.
            paths = [Path(os.path.normpath(folder / file)) for file in files]
            path = next((path for path in paths if is_there(path)), paths[0])
            if is_there(path):
                self._read(f"test {set_name}", path)
            else:
                self.notes.append(f"{path} is not there: no {set_name}.tsv for the leaderboard")

    def _read(self, name: str, path: Path) -> None:
        labelled = not name.startswith("test")
        bare = self.task.bare if labelled else ()
        rows, problems = read(path, self.task, labelled=labelled, bare=bare)
        self.checked(problems, name)
        self.add(name, rows)

    @property
    def reading(self) -> dict[str, Any]:
        texts, longest = self.task.texts, self.config.max_seq_len
        return TextConfig(text=texts, quotes=False, max_seq_len=longest).model_dump()

    def decide(self, outputs: Sequence[np.ndarray]) -> np.ndarray:
        """Scores as the leaderboard's file has them: 0 to 5, three decimals."""
        found = super().decide(outputs)
        return found.clip(0, 5).round(3) if self.head.regression else found

    def file_of(self, set_name: str) -> str:
        return f"{set_name.removeprefix('test ')}.tsv"

    def said(self, row: Row, values: np.ndarray) -> dict[str, Any]:
        (guess,) = self.decide([values])
        text = self.task.labels[guess] if self.task.labels else f"{guess:.3f}"
        return {"index": row.index, "prediction": text}
