"""What is read of a finished job's result.json, for the sweep and the report."""

from __future__ import annotations

from pathlib import Path

import pydantic

from configs.load import Config, check
from core.errors import TryAgain, UserError, short
from core.files import read_json

RESULT = "result.json"


class Result(Config):
    """scores: measures of the dev set, 0 to 100; main: the one that chooses; test: of the test set,
    where it has labels. encoder: its folder. records: of each set's file. failed: it ended at a
    constant guess, or diverged."""

    model_config = pydantic.ConfigDict(extra="ignore")

    task: str
    init: str
    trained: str
    encoder: str = ""
    batch_size: int
    learning_rate: float
    epochs: float
    main: str
    scores: dict[str, float]
    test: dict[str, float] = {}
    records: dict[str, int] = {}
    failed: bool

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


def read(path: Path) -> Result:
    return check(read_json(path), Result, str(path))


def of_task(folder: Path) -> list[tuple[Path, Result]]:
    """(folder, result) of a task's finished jobs; UserError where one cannot be read."""
    found = []
    for path in sorted(folder.glob(f"*/{RESULT}")):
        try:
            found.append((path.parent, read(path)))
        except TryAgain:
            raise
        except UserError as error:
            raise UserError(f"{error}; if it is damaged, remove it to run its job again") from None
    return found


def best(found: list[tuple[Path, Result]]) -> tuple[Path, Result]:
    """The job with the best dev score."""
    return max(found, key=lambda job: job[1].value)
