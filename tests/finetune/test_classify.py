"""A user's own table: classes, several classes or a score, found in the file."""

from __future__ import annotations

import csv
from collections import Counter

import numpy as np
import pytest
import torch

from core.errors import UserError
from finetune.classify import Classify
from finetune.config import ClassifyConfig, TrainConfig
from finetune.heads import FineTuned, HeadSpec
from tests.finetune import tiny

TEXTS = ["the cat sat", "a dog ran", "he saw paris", "who is old"]


def table(path, *labels, texts=TEXTS, head="text,label") -> str:
    lines = [f'"{texts[n % 4]}","{label}"' for n, label in enumerate(labels)]
    path.write_text("\n".join([head, *lines]) + "\n")
    return str(path)


def classify(tmp_path, *labels, **changes) -> Classify:
    train = table(tmp_path / "train.csv", *labels)
    if "dev_share" not in changes:
        changes = {"dev_file": train} | changes
    config = ClassifyConfig(train_file=train, **changes)
    return Classify("mine", config, TrainConfig(), tiny.tokenizer())


def right(task, name) -> list[np.ndarray]:
    """Logits that say what the set says."""
    found = []
    for row in task.rows[name]:
        if task.head.regression:
            found.append(np.array([row.label], np.float32))
        elif task.head.multi:
            found.append(np.where(row.label == 1, 4.0, -4.0))
        else:
            found.append(5.0 * np.eye(task.head.outputs)[row.label])
    return found


@pytest.mark.parametrize(
    ("kind", "labels", "names", "measures"),
    [
        ("single", ["10", "9", "10", "x y"], ("10", "9", "x y"), 4 + 3),
        ("single", ["10", "9", "10", "9"], ("9", "10"), 4 + 2),
        ("single", ["1" + "0" * 5000, "9"] * 2, ("9", "1" + "0" * 5000), 4 + 2),
        ("multi", ["a, b", "b", "", "c,a"], ("a", "b", "c"), 3 + 3),
        ("score", ["1", "2.5", "-3", "1e3"], (), 2),
    ],
)
def test_from_a_table_to_its_scores_and_predictions(
    kind, labels, names, measures, tmp_path
) -> None:
    test = tmp_path / "test.csv"
    test.write_text('text\n"the ""cat"" sat"\na dog\n')
    task = classify(tmp_path, *labels, kind=kind, test_file=str(test))
    assert task.head == HeadSpec("sequence", max(1, len(names)), names, kind == "multi")
    outputs = {name: right(task, name) for name in ("train", "dev")}
    score = task.score(outputs)
    assert list(score.values.values()) == pytest.approx([100] * measures) and not score.failed
    assert task.score({"dev": [np.ones(task.head.outputs)] * 4}).failed
    assert task.test_scores(outputs | {"test": outputs["dev"][:2]}) == {}

    task.write({"test": outputs["dev"][:2]}, score, tmp_path)
    with test.open() as file:
        found = list(csv.DictReader(file))
    said = {"single": ("label", labels[0]), "multi": ("labels", "a|b"), "score": ("score", "1.0")}
    assert [row["row"] for row in found] == ["0", "1"]
    assert found[0][said[kind][0]] == said[kind][1]
    shares = [float(found[0][f"probabilities.{name}"]) for name in names]
    assert kind != "single" or sum(shares) == pytest.approx(1, abs=1e-5)


def test_a_test_file_with_labels_is_scored(tmp_path) -> None:
    test = table(tmp_path / "test.csv", "yes", "no", "no")
    task = classify(tmp_path, "no", "yes", "no", "yes", test_file=test)
    found = task.test_scores({"test": [np.array([1.0, 0.0])] * 3})
    assert found["accuracy"] == pytest.approx(200 / 3)


def test_pairs_numbers_and_columns_by_name(tmp_path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"q": "the cat", "a": 1854, "good": true}\n{"q": "x", "a": "y", "good": 0}\n')
    config = ClassifyConfig(
        train_file=str(path), dev_file=str(path), text=["q", "a"], label="good", metric="f1_macro"
    )
    task = Classify("mine", config, TrainConfig(), tiny.tokenizer())
    assert task.head.labels == ("0", "true") and task.measures[0] == "f1_macro"
    item = task.sets["train"][0]
    assert (
        " ".join(tiny.PIECES[i] for i in item.sequences[0].ids) == "[CLS] the cat [SEP] 1854 [SEP]"
    )


def test_marks_of_a_tsv_that_are_text_join_no_examples(tmp_path) -> None:
    path = tmp_path / "x.tsv"
    path.write_text('text\tlabel\n"a cat\tyes\nb"\tno\nc\tyes\n')
    files = {"train_file": str(path), "dev_file": str(path)}
    made = ClassifyConfig(**files), ClassifyConfig(**files, quotes=False)
    with pytest.raises(UserError, match="x.tsv:2: a field .*; classify.quotes: false where the"):
        Classify("mine", made[0], TrainConfig(), tiny.tokenizer())
    task = Classify("mine", made[1], TrainConfig(), tiny.tokenizer())
    assert [row.texts[0] for row in task.rows["train"]] == ['"a cat', 'b"', "c"]
    assert task.reading["quotes"] is False


def test_a_share_for_dev_is_stratified_and_the_same_every_time(tmp_path) -> None:
    labels = ["a"] * 40 + ["b"] * 20
    one, two = (classify(tmp_path, *labels, dev_share=0.2) for _ in range(2))
    places = [[[row.place for row in t.rows[n]] for n in ("train", "dev")] for t in (one, two)]
    assert places[0] == places[1]
    assert sorted(sum(places[0], [])) == list(range(2, 62))
    assert Counter(row.label for row in one.rows["dev"]) == {0: 8, 1: 4}


@pytest.mark.parametrize(
    ("labels", "changes", "message"),
    [
        (["a", "a"], {}, r"train.csv: only the label 'a' in column 'label'"),
        (
            ["a", "b", "a"],
            {"dev_share": 0.5},
            r"train.csv:3: the only example of 'b', and classify",
        ),
        (["a", "b"] * 9, {"dev_share": 0.01}, r"train.csv: classify.dev_share: The test_size = 1"),
        (["a", ""] * 2, {}, r"train.csv: 2 of 4 left out: no label \(line 3 '', 5 ''\); mend"),
        (["1", "x"], {"kind": "score"}, r"train.csv: 1 of 2 left out: not a number \(line 3 'x'\)"),
        (["a", "b\0"], {}, r"train.csv: byte 43: a NUL, as of a damaged disk"),
        (["", ""], {"kind": "multi"}, r"train.csv: no label in column 'label'"),
        (["a", "b"], {"label": "y"}, r"train.csv:1: no column y; .*classify.label name the col"),
        (["a", "b"], {"text": "words"}, r"train.csv:1: no column words; it has text, label; class"),
    ],
)
def test_what_no_task_can_be_made_of_is_one_line(labels, changes, message, tmp_path) -> None:
    with pytest.raises(UserError, match=message) as error:
        classify(tmp_path, *labels, **changes)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("key", ["dev_file", "test_file"])
def test_a_label_that_training_has_not_is_named(key, tmp_path) -> None:
    other = table(tmp_path / "other.csv", "a", "maybe")
    with pytest.raises(UserError, match=r"other.csv:3: label 'maybe' is not in .*train.csv; add"):
        classify(tmp_path, "a", "b", **{key: other})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "give either dev_file or dev_share"),
        ({"dev_file": "d", "dev_share": 0.1}, "give either dev_file or dev_share"),
        ({"dev_file": "d", "metric": "pearson"}, "metric: kind single has accuracy"),
        ({"dev_file": "d", "name": "a/b"}, "name"),
        ({"dev_file": "d", "name": "report.md"}, "name: report.md stands in run_dir"),
        ({"dev_file": "d", "label": ""}, "label"),
    ],
)
def test_keys_that_do_not_fit_are_refused(changes, message) -> None:
    with pytest.raises(ValueError, match=message):
        ClassifyConfig(train_file="x", **changes)


def test_the_loss_of_several_classes_is_hugging_face_s(tmp_path) -> None:
    from finetune.batches import labelled

    task = classify(tmp_path, "a,b", "b", "", "c", kind="multi")
    model = FineTuned(tiny.shape(), task.head)
    batch = model.collate(task.sets["train"], torch.device("cpu"))
    logits = torch.tensor(np.random.Generator(np.random.Philox(key=1)).normal(size=(4, 3)))
    gold = torch.tensor([[1.0, 1, 0], [0, 1, 0], [0, 0, 0], [0, 0, 1]])
    wanted = torch.nn.BCEWithLogitsLoss()(logits, gold.double())
    got = model.loss_sum(logits.float(), batch) / labelled(task.sets["train"])
    assert float(got) == pytest.approx(float(wanted), rel=1e-6)


def test_many_labels_cost_their_number_and_not_the_square_of_it(tmp_path) -> None:
    names = [str(n) for n in range(30_000)]
    task = classify(tmp_path, *names)
    assert [row.label for row in task.rows["dev"]] == list(range(30_000))
