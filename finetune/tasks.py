"""What the training loop asks of a task, and which file answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from finetune.examples import Item, Problems
from finetune.heads import HeadSpec

Outputs = Mapping[str, list[np.ndarray]]


@dataclass(frozen=True)
class Score:
    """values: measures of the dev set, 0 to 100. main: name of the one that chooses. failed: the
    run ended where a constant guess would (the majority class, no entity, no answer).
    state: what else a prediction needs, such as a threshold.
    """

    values: dict[str, float]
    main: str
    failed: bool
    state: dict[str, Any] = field(default_factory=dict)

    @property
    def value(self) -> float:
        return self.values[self.main]


class Task:
    """One task with its data in memory. `sets`: train, then dev and test sets by name."""

    name: str
    head: HeadSpec
    sets: dict[str, list[Item]]
    problems: list[Problems]
    notes: list[str]

    @property
    def dev_sets(self) -> list[str]:
        return [name for name in self.sets if name.startswith("dev")]

    @property
    def test_sets(self) -> list[str]:
        return [name for name in self.sets if name.startswith("test")]

    def score(self, outputs: Outputs) -> Score:
        """From the head's outputs for every item of the dev sets."""
        raise NotImplementedError

    def test_scores(self, outputs: Outputs) -> dict[str, float]:
        """Measures of the test set where it has labels; they never choose anything."""
        return {}

    def write(self, outputs: Outputs, score: Score, folder: Path) -> None:
        """Prediction files of the sets in `outputs`, in the official formats."""
        raise NotImplementedError
