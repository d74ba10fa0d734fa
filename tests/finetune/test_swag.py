"""SWAG's official csv."""

from __future__ import annotations

import json

import numpy as np
import pytest

from core.errors import UserError
from finetune.config import SwagConfig, TrainConfig
from finetune.swag import Swag, read
from tests.finetune import tiny

HEADER = ",video-id,fold-ind,startphrase,sent1,sent2,gold-source,ending0,ending1,ending2,ending3"
GOOD = '{n},v,1,x,"A cat, big, sat.",He,gold,saw a dog.,"ran, ran",is red,"was ""big"""'


def test_four_choices_share_the_first_sentence(tmp_path) -> None:
    path = tmp_path / "train.csv"
    path.write_text("\n".join([HEADER + ",label", *(GOOD.format(n=n) + f",{n}" for n in range(4))]))
    test = tmp_path / "test.csv"
    test.write_text("\n".join([HEADER, GOOD.format(n=7)]))
    config = SwagConfig(train_file=str(path), dev_file=str(path), test_file=str(test))
    task = Swag("SWAG", config, TrainConfig(), tiny.tokenizer())
    item = task.sets["train"][2]
    assert item.label == 2 and len(item.sequences) == 4
    texts = [" ".join(tiny.PIECES[i] for i in s.ids) for s in item.sequences]
    assert texts[0] == "[CLS] a cat , big , sat . [SEP] he saw a dog . [SEP]"
    assert texts[3] == '[CLS] a cat , big , sat . [SEP] he was " big " [SEP]'
    outputs = {"dev": [np.eye(4)[n] for n in range(4)], "test": [np.eye(4)[3]]}
    score = task.score(outputs)
    assert score.value == 100 and not score.failed
    assert task.score({"dev": [np.eye(4)[1]] * 4}).failed
    task.write(outputs, score, tmp_path)
    assert (tmp_path / "test.csv").read_text() == "index,label\n7,3\n"


def test_labels_of_json_are_numbers(tmp_path) -> None:
    path = tmp_path / "train.jsonl"
    row = {"sent1": "A cat.", "sent2": "", **{f"ending{n}": "ran" for n in range(4)}}
    labels = [3, "2", [1], None, True, 4]
    path.write_text("".join(json.dumps(row | {"label": label}) + "\n" for label in labels))
    kept, problems = read(path, labelled=True)
    assert [found.label for found in kept] == [3, 2]
    assert [place.split()[0] for place in problems.where["unknown label"]] == ["3", "4", "5", "6"]


def test_bad_rows_are_counted_by_line(tmp_path) -> None:
    path = tmp_path / "train.csv"
    rows = [GOOD.format(n=0) + ",1", GOOD.format(n=0) + ",1", GOOD.format(n=1) + ",4"]
    rows += ["2,short", GOOD.format(n=3).replace("is red", " ") + ",1"]
    path.write_text("\n".join([HEADER + ",label", *rows]))
    kept, problems = read(path, labelled=True)
    assert len(kept) == 1
    assert dict(problems.where) == {
        "duplicate id": ["3 '0'"],
        "unknown label": ["4 '4'"],
        "not 12 columns": ["5"],
        "empty text": ["6"],
    }
    with pytest.raises(UserError, match="no column label"):
        path.write_text(HEADER)
        read(path, labelled=True)


@pytest.mark.parametrize("text", ["x," * 10**6, "y" * 10**6, '"' + "z" * 10**6])
def test_a_file_of_one_long_line_is_a_short_error(tmp_path, text) -> None:
    path = tmp_path / "train.csv"
    path.write_text(text)
    with pytest.raises(UserError, match=f"{path}:[01]: ") as error:
        read(path, labelled=True)
    assert len(str(error.value)) < 1000
