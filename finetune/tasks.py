"""What a task brings: its files, its model, its score, its prediction files.

The configuration has one section a kind of task (`TaskConfig`), which names the class below; the
sweep and the training loop know no task. CONTRIBUTING.md says what to touch to add one.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from configs.load import Config
from core.console import Console
from core.files import disk_errors, sha256
from data_pipeline.corpus.tokenizer import Tokenizer
from finetune import loading
from finetune.config import FinetuneConfig, TaskConfig, TrainConfig
from finetune.examples import Example, Problems
from finetune.heads import HeadSpec, TaskModel
from pretrain.distributed import StopRequest
from pretrain.hugging_face import Pretrained

# Of each set the head's outputs, an array an item, in order.
Outputs = Mapping[str, list[np.ndarray]]


class Stopped(Exception):
    """The signal that came."""


@dataclass(frozen=True)
class Context:
    """What the jobs of one process share."""

    config: FinetuneConfig
    encoder: Pretrained
    device: torch.device
    console: Console
    stop: StopRequest | None = None

    def heed(self) -> None:
        """Stopped if a signal has come."""
        if self.stop is not None and (signal := self.stop.agreed()) is not None:
            raise Stopped(signal)


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


class Task(ABC):
    """One task with its data in memory. `sets`: train, then dev and test sets by name.

    `problems`: bad records of each file. `records`: of each set's file, how many it has. `notes`:
    lines for console and result.json. `digests`: of the bytes of each file that scores and
    predictions depend on, by its name.
    """

    head: HeadSpec
    needed: type[Config] | None = None  # keys of the section that a prediction depends on

    def __init__(
        self, name: str, config: TaskConfig, train: TrainConfig, tokenizer: Tokenizer
    ) -> None:
        self.name, self.config, self.train, self.tokenizer = name, config, train, tokenizer
        self.sets: dict[str, Sequence[Example]] = {}
        self.problems: list[Problems] = []
        self.records: dict[str, int] = {}
        self.notes: list[str] = []
        self.digests: dict[str, str] = {}
        self.load()

    @abstractmethod
    def load(self) -> None:
        """Read the files: `head` and `sets`."""

    @property
    def reading(self) -> dict[str, Any]:
        """How other data are read for this model, kept beside its weights."""
        return self.config.model_dump(include=set(self.needed.model_fields)) if self.needed else {}

    @property
    def dev_sets(self) -> list[str]:
        return [name for name in self.sets if name.startswith("dev")]

    @property
    def test_sets(self) -> list[str]:
        return [name for name in self.sets if name.startswith("test")]

    def checked(self, problems: Problems, set_name: str) -> None:
        """Keep what is bad in a set's file; UserError when it is too much: for a test, anything."""
        if set_name.startswith("test"):
            problems.check_whole()
        if self.train.predict_test or not set_name.startswith("test"):
            with disk_errors(problems.path):
                self.digests[str(problems.path)] = sha256(problems.path)
        problems.check(self.train.max_bad_share)
        self.problems.append(problems)
        self.records[set_name] = problems.total

    def wanted(self, set_name: str) -> int:
        """Examples of a set to take, as configured; 0: all."""
        if set_name.startswith("test"):
            return 0
        return self.train.train_examples if set_name == "train" else self.train.dev_examples

    def training_ids(self) -> np.ndarray:
        """Token ids of all of the training set, one after the other."""
        return np.concatenate([s.ids for item in self.sets["train"] for s in item.sequences])

    def model(self, context: Context, seed: int) -> tuple[TaskModel, list[str]]:
        """The model to train, and what is new in it or was left behind, a line each."""
        return loading.build(context.encoder, self.head, context.config.encoder, seed)

    @abstractmethod
    def score(self, outputs: Outputs) -> Score:
        """From the head's outputs for every item of the dev sets."""

    def test_scores(self, outputs: Outputs) -> dict[str, float]:
        """Measures of the test set where it has labels; they never choose anything."""
        return {}

    @abstractmethod
    def write(self, outputs: Outputs, score: Score, folder: Path) -> None:
        """Prediction files of the sets in `outputs`, in the official formats."""


def open_task(config: FinetuneConfig, name: str, tokenizer: Tokenizer) -> Task:
    """The task of that name with its files read."""
    module, _, kind = config.task.reader.partition(":")
    made = getattr(importlib.import_module(module), kind)
    return made(name, config.task, config.train, tokenizer)
