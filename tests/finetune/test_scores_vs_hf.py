"""The comparison of scores begins at the same place on both sides, and goes on where it stopped."""

from __future__ import annotations

import argparse
import json

import numpy as np
import pytest
import torch

from benchmarks import finetune_scores_vs_hf as scores
from benchmarks.finetune_vs_hf import Padded
from core.console import Console
from finetune import loading
from finetune.tasks import Context, open_task
from tests.finetune import tiny
from tests.finetune.test_features import TEXT
from tests.finetune.test_train import make_files

CPU = torch.device("cpu")


@pytest.fixture
def options(tmp_path, monkeypatch) -> argparse.Namespace:
    make_files(tmp_path)
    tiny.encoder(tmp_path / "deep" / "encoder", num_hidden_layers=5, max_position_embeddings=128)
    (tmp_path / "conll2003").mkdir()
    for name in ("eng.train", "eng.testa"):
        (tmp_path / "conll2003" / name).write_text(TEXT * 3)
    budget = scores.Budget(8, 8, 4, 1e-3, 1, 2)
    monkeypatch.setattr(scores, "BUDGETS", dict.fromkeys(scores.BUDGETS, budget))
    return argparse.Namespace(
        tasks_dir=tmp_path,
        weights=tmp_path / "deep" / "encoder",
        out=tmp_path / "out",
        share=1,
        without_dropout=False,
    )


def test_their_loader_and_ours_begin_alike(options) -> None:
    config = scores.config_of("NER-concat_last_four", "hf", options)
    source = loading.read(config.encoder, 128)
    ner = open_task(config, "NER", source.tokenizer)
    model, _ = loading.build(source, ner.head, config.encoder, 3)
    theirs = Padded(model, source.tokenizer.pad_id, CPU, options.weights)
    items = ner.encoded["dev"]
    batch = model.eval().collate(items, CPU)
    with torch.no_grad():
        ours = model.split(model(batch), batch)
    for a, b in zip(ours, theirs.predict(items), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    assert scores.differing_tokens(ner, source.tokenizer, options.weights)[0] == 0

    tagger, _ = ner.model(Context(config, source, CPU, Console(False)), 0)
    other = scores.PaddedFeatures(ner, tagger, options.weights)
    np.testing.assert_allclose(
        np.concatenate(tagger.features, 1), other.states.numpy(), rtol=2e-3, atol=2e-3
    )
    batch = tagger.eval().collate(ner.sets["dev"], CPU)
    with torch.no_grad():
        ours = tagger.split(tagger(batch), batch)
    for a, b in zip(ours, other.predict(ner.sets["dev"]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-2, atol=2e-3)


def test_finished_runs_are_kept(options, capsys) -> None:
    (options.tasks_dir / "glue" / "SST-2" / "test.tsv").unlink()
    given = ["--tasks", "SST-2", "--out", str(options.out)]
    given += ["--tasks-dir", str(options.tasks_dir), "--weights", str(options.weights)]
    assert scores.main(given) == 0
    plain = json.loads(capsys.readouterr().out.splitlines()[-1])
    detail = plain["detail"]["SST-2"]
    assert (len(detail["ours"]), len(detail["hugging_face"]), len(detail["random"])) == (2, 2, 1)
    stamps = {p: p.stat().st_mtime_ns for p in options.out.rglob("result.json")}
    assert len(stamps) == 5
    next(iter(stamps)).unlink()
    assert scores.main(given) == 0
    again = {p: p.stat().st_mtime_ns for p in options.out.rglob("result.json")}
    assert sum(again[p] != stamps[p] for p in stamps) == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["difference"] == plain["difference"]

    given[3] = str(options.out / "still")
    assert scores.main([*given, "--without-dropout", "--seeds", "1"]) == 0
    folder = options.out / "still" / "weights"
    assert json.loads((folder / "config.json").read_text())["hidden_dropout_prob"] == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["difference"] == {"SST-2": 0}


def test_a_difference_is_measured_against_both_spreads() -> None:
    same = scores.compare([1.0, 2.0, 3.0], [1.5, 2.5, 3.5])
    assert same["difference"] == -0.5 and same["within"] and same["half_width"] > 2
    apart = scores.compare([1.0, 1.1, 1.2], [5.0, 5.1, 5.2])
    assert not apart["within"] and not apart["within_their_deviation"]
    assert "within" not in scores.compare([1.0], [1.0])
