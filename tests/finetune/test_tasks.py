"""The table of tasks: a section of the configuration names the class of what it describes."""

from __future__ import annotations

import importlib
from functools import partial

import pytest

from finetune.config import FinetuneConfig, TaskConfig
from finetune.tasks import Task

SECTIONS = {
    "glue": {"dir": "d", "tasks": ["RTE", "CoLA"]},
    "squad": {"version": "2.0", "train_file": "t", "dev_file": "d"},
    "swag": {"train_file": "t", "dev_file": "d"},
    "ner": {"train_file": "t", "dev_file": "d"},
    "ner features": {"train_file": "t", "dev_file": "d", "features": "last"},
}
NAMES = [("RTE", "CoLA"), ("SQuAD-2.0",), ("SWAG",), ("NER",), ("NER-last",)]


def config(kind: str) -> FinetuneConfig:
    encoder = {"path": "x"}
    return FinetuneConfig(run_dir="r", encoder=encoder, **{kind.split()[0]: SECTIONS[kind]})


@pytest.mark.parametrize(("kind", "names"), list(zip(SECTIONS, NAMES, strict=True)))
def test_a_section_names_its_task_and_its_jobs(kind: str, names: tuple[str, ...]) -> None:
    section = config(kind).task
    assert isinstance(section, TaskConfig) and section.names == names
    module, _, made = section.reader.partition(":")
    found = getattr(importlib.import_module(module), made)
    assert issubclass(found, Task) and not found.__abstractmethods__


def test_what_chooses_tasks_changes_no_job() -> None:
    one, other = config("glue"), config("glue")
    other = other.model_copy(update={"glue": other.glue.model_copy(update={"tasks": ("RTE",)})})
    assert one.of_a_job == other.of_a_job
    other = other.model_copy(update={"glue": other.glue.model_copy(update={"max_seq_len": 64})})
    assert one.of_a_job != other.of_a_job
    assert config("ner").of_a_job != config("ner features").of_a_job


def test_only_the_leaderboard_s_files_of_glue_are_submitted() -> None:
    glue, swag = config("glue").task, config("swag").task
    assert glue.submitted("RTE", "RTE.tsv") == "RTE.tsv"
    assert glue.submitted("RTE", "dev.tsv") is None
    assert swag.submitted("SWAG", "dev.csv") == "SWAG/dev.csv"


@pytest.mark.parametrize("kind", ["squad", "swag", "ner"])
def test_answers_to_a_test_set_are_known_by_their_whole_name(kind: str) -> None:
    of = partial(config(kind).task.is_of, "NER")
    ours = ["test.csv", "test.jsonl", "test.txt", "test_predictions.json", "test_null_odds.json"]
    assert all(of(f"NER/{name}") for name in [*ours, "test_nbest_predictions.json"])
    mine = ["test-of-mine.md", "testimony.txt", "test.txt.bak", "x/test.txt", "dev.txt"]
    assert not any(map(of, [*(f"NER/{name}" for name in mine), "test.txt", "SST-2/test.txt"]))
