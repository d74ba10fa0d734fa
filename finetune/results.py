"""What is read of a finished job's result.json, for the sweep and the report."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pydantic

from configs.load import Config, check
from core.errors import TryAgain, UserError, short
from core.files import read_sealed

RESULT = "result.json"
REPORT = "report.md", "report.csv"
Score = tuple[float | None, float | None]
NO_NUMBER: Score = (None, None)
# Devlin et al. 2019, BASE and LARGE: GLUE test (table 1), SQuAD dev (tables 2 and 3, single model),
# SWAG dev (table 4), NER dev and test (table 7). What the report shows of a task beside its main
# measure: GLUE's own second measures have no number in the paper.
PAPER: dict[str, dict[str, Score]] = {
    "MNLI": {"accuracy": (84.6, 86.7), "accuracy-mm": (83.4, 85.9)},
    "QQP": {"f1": (71.2, 72.1), "accuracy": NO_NUMBER},
    "QNLI": {"accuracy": (90.5, 92.7)},
    "SST-2": {"accuracy": (93.5, 94.9)},
    "CoLA": {"matthews": (52.1, 60.5)},
    "STS-B": {"spearman": (85.8, 86.5), "pearson": NO_NUMBER},
    "MRPC": {"f1": (88.9, 89.3), "accuracy": NO_NUMBER},
    "RTE": {"accuracy": (66.4, 70.1)},
    "SQuAD-1.1": {"f1": (88.5, 90.9), "exact": (80.8, 84.1)},
    "SQuAD-2.0": {"f1": (None, 81.9), "exact": (None, 78.7)},
    "SWAG": {"accuracy": (81.6, 86.6)},
    "NER": {"f1": (96.4, 96.6), "test f1": (92.4, 92.8)},
    "NER-embeddings": {"f1": (91.0, None)},
    "NER-second_to_last": {"f1": (95.6, None)},
    "NER-last": {"f1": (94.9, None)},
    "NER-weighted_sum": {"f1": (95.5, None)},
    "NER-sum_last_four": {"f1": (95.9, None)},
    "NER-concat_last_four": {"f1": (96.1, None)},
}
# Records of the dev sets that the paper's numbers are of (MNLI: matched). A result of other data
# stands without those numbers.
_DEV_RECORDS = {
    "MNLI": 9815, "QQP": 40430, "QNLI": 5463, "SST-2": 872, "CoLA": 1043, "STS-B": 1500,
    "MRPC": 408, "RTE": 277, "SQuAD-1.1": 10570, "SQuAD-2.0": 11873, "SWAG": 20006, "NER": 3250,
}  # fmt: skip


class Result(Config):
    """scores: measures of the dev set, 0 to 100; main: the one that chooses; test: of the test set,
    where it has labels. encoder: its folder. records: of each set's file. failed: it ended at a
    constant guess, or diverged. seed, made_of (digests of what it was made of, by name): not known
    of results of older versions.
    predictions: those of its prediction files, by name; {}: not known."""

    model_config = pydantic.ConfigDict(extra="ignore")

    task: str
    init: str
    trained: str
    encoder: str = ""
    batch_size: int
    learning_rate: float
    epochs: float
    seed: int | None = None
    main: str
    scores: dict[str, float]
    test: dict[str, float] = {}
    records: dict[str, int] = {}
    failed: bool
    made_of: dict[str, str] = {}
    predictions: dict[str, str] = {}

    @pydantic.model_validator(mode="after")
    def _has_a_score(self) -> Result:
        if self.main not in self.scores:
            raise ValueError(f"main: {short(repr(self.main))} is not among the scores")
        return self

    @property
    def value(self) -> float:
        return self.scores[self.main]

    def of(self, measure: str) -> float | None:
        return (self.scores | {f"test {m}": v for m, v in self.test.items()}).get(measure)


def has_papers_records(task: str, records: Mapping[str, int]) -> bool:
    """Whether the dev set has as many as the paper's, or its number is not known."""
    known = _DEV_RECORDS.get(task.partition("-")[0] if "NER" in task else task)
    return not records or records.get("dev") == known


def papers_score(task: str, measure: str, records: Mapping[str, int]) -> Score:
    """The paper's (BASE, LARGE) for a job on data of the paper's size, None where it has none."""
    there = records and has_papers_records(task, records)
    return PAPER.get(task, {}).get(measure, NO_NUMBER) if there else NO_NUMBER


def job_name(batch_size: int, learning_rate: float, epochs: float, seed: int) -> str:
    """The folder of a job below run_dir/TASK."""
    return f"b{batch_size}-lr{learning_rate:.15g}-e{epochs:.15g}-s{seed}"


def read(path: Path) -> Result:
    """UserError where it cannot be read, or stands in another folder than its job's own."""
    try:
        found = check(read_sealed(path), Result, str(path))
    except TryAgain:
        raise
    except UserError as error:
        raise UserError(f"{error}; if it is damaged, remove it to run its job again") from None
    if found.seed is not None:
        name = job_name(found.batch_size, found.learning_rate, found.epochs, found.seed)
        if path.parts[-3:-1] != (found.task, name):
            raise UserError(
                f"{path}: is of the job {found.task}/{name} and counts in its folder alone; take "
                "it out of the run"
            )
    return found


def check_same(path: Path, before: Mapping[str, str], now: Mapping[str, str]) -> None:
    """UserError where what a file was made of has other content `now`."""
    for name, digest in now.items():
        if before.get(name, digest) != digest:
            raise UserError(
                f"{path}: was made of another content of {name}; use another run_dir, or remove it "
                "to begin its job anew"
            )


Contents = dict[str, tuple[str, Path]]  # digests by name, and the first result that has each


def check_alike(path: Path, result: Result, known: Contents) -> None:
    """UserError where a result was made of other content than those before it of its task have
    `known`, to which its own is added."""
    for name, digest in result.made_of.items():
        before, other = known.setdefault(name, (digest, path))
        if before != digest:
            raise UserError(
                f"{path}: was made of another content of {name} than {other}; remove the one that "
                "is not wanted"
            )


def of_task(folder: Path) -> list[tuple[Path, Result]]:
    """(folder, result) of a task's finished jobs. UserError where one cannot be read, or two were
    made of other content under one name."""
    found = [(path.parent, read(path)) for path in sorted(folder.glob(f"*/{RESULT}"))]
    known: Contents = {}
    for job, result in found:
        check_alike(job / RESULT, result, known)
    return found


def best(found: list[tuple[Path, Result]]) -> tuple[Path, Result]:
    """The job with the best dev score."""
    return max(found, key=lambda job: job[1].value)
