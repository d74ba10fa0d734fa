"""The feature-based approach: states of the frozen encoder, computed once."""

from __future__ import annotations

import os
import signal
import socket
import subprocess

import numpy as np
import pytest
import torch

from core.console import Console
from core.errors import UserError
from finetune import features, grid, loading, results
from finetune.config import LAYER_CHOICES, FinetuneConfig
from finetune.heads import FineTuned
from finetune.tasks import Context, open_task
from tests.damage import flipped
from tests.finetune import tiny
from tests.pretrain.test_writer import mounted

CPU = torch.device("cpu")
TEXT = "-DOCSTART- O\n\nParis I-LOC\nis O\nbig O\n\nthe O\nking I-PER\nsat O\nin O\nRome I-LOC\n\n"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ner")
    tiny.encoder(folder / "encoder", num_hidden_layers=5)
    (folder / "train.txt").write_text(TEXT * 6)
    return folder


def config(files, run_dir, choice, **grid_) -> FinetuneConfig:
    return FinetuneConfig(
        run_dir=str(run_dir),
        encoder={"path": str(files / "encoder")},
        ner={
            "train_file": str(files / "train.txt"),
            "dev_file": str(files / "train.txt"),
            "max_seq_len": 32,
            "features": choice,
            "lstm_size": 16,
            "cache_dir": str(run_dir / "cache"),
        },
        grid={"batch_size": [4], "learning_rate": [1e-2], "epochs": [12], **grid_},
        device="cpu",
        threads=1,
    )


class Prepared:
    """A feature task, the encoder under it, its tagger."""

    def __init__(self, files, tmp_path, choice, train=None):
        settings = config(files, tmp_path, choice)
        if train is not None:
            ner = settings.ner.model_copy(update={"train_file": str(train)})
            settings = settings.model_copy(update={"ner": ner})
        encoder = loading.read(settings.encoder, 32)
        self.context = Context(settings, encoder, CPU, Console(True))
        self.task = open_task(settings, "NER", encoder.tokenizer)
        self.encoder, _ = loading.build(encoder, self.task.head, settings.encoder, 0)
        self.tagger = self.build(0)

    def build(self, seed):
        return self.task.model(self.context, seed)[0]


def test_a_signal_while_features_are_computed_leaves_no_half_files(
    files, tmp_path, monkeypatch
) -> None:
    settings = config(files, tmp_path / "run", "last")
    (tmp_path / "run").mkdir()  # one that the start makes would go again
    collate, calls = FineTuned.collate, []

    def interrupted(self, items, device):
        calls.append(0)
        os.kill(os.getpid(), signal.SIGTERM)
        return collate(self, items, device)

    monkeypatch.setattr(features, "TOKENS", 1)
    monkeypatch.setattr(FineTuned, "collate", interrupted)
    assert grid.sweep(settings) == 85 and len(calls) == 1
    assert not list((tmp_path / "run/cache").iterdir())
    monkeypatch.setattr(FineTuned, "collate", collate)
    assert grid.sweep(settings) == 0


@pytest.mark.parametrize("choice", LAYER_CHOICES)
def test_features_are_the_encoder_s_states_of_first_pieces(choice, files, tmp_path) -> None:
    p = Prepared(files, tmp_path, choice)
    item, window = p.task.encoded["train"][0], p.task.windows["train"][0]
    model, tagger = p.encoder, p.tagger.eval()
    batch = model.eval().collate([item], CPU)
    with torch.no_grad():
        states = [
            s[0, window.places].numpy() for s in model.bert.encode(*batch.packed, all_layers=True)
        ]
    wanted = {
        "embeddings": states[0],
        "second_to_last": states[4],
        "last": states[5],
        "sum_last_four": sum(states[2:]),
        "concat_last_four": np.concatenate(states[2:], 1),
        "weighted_sum": sum(states[1:]) / 5,
    }[choice]
    words = [i for i in p.task.sets["train"] if i.rows[0] in window.words]
    got = tagger.inputs(tagger.collate(words[:2], CPU))
    rows = got.detach().numpy()
    np.testing.assert_allclose(rows, wanted[: len(rows)], atol=0.02)


def test_features_are_computed_once_and_the_bilstm_learns(files, tmp_path, capsys) -> None:
    settings = config(files, tmp_path / "run", "concat_last_four")
    assert grid.sweep(settings) == 0
    more = config(files, tmp_path / "run", "concat_last_four", seeds=[0, 1])
    assert grid.sweep(more) == 0
    text = capsys.readouterr().out
    assert "features of train: layers [2, 3, 4, 5]: computed 4, re-used 0" in text
    assert text.count("computed 0, re-used 4") >= 2
    table = [r for _, r in results.of_task(tmp_path / "run/NER-concat_last_four")]
    assert [r.scores["f1"] for r in table] == [100, 100]
    assert {r.trained for r in table} == {"features"}


def test_other_weights_have_other_features(files, tmp_path) -> None:
    p = Prepared(files, tmp_path, "last")
    model, items = p.encoder, p.task.encoded["train"]
    places = [w.places for w in p.task.windows["train"]]
    key = features.cache_key(model, items, places)
    with torch.no_grad():
        model.bert.encoder.layer[0].output.dense.bias[0] += 1e-3
    assert features.cache_key(model, items, places) != key
    assert features.cache_key(model, items[:-1], places[:-1]) != key


@pytest.mark.parametrize("damage", [0, 60, -8, "bit", "header", "shape", "pipe"])
def test_a_damaged_file_is_made_anew(damage, files, tmp_path, capsys) -> None:
    wanted = Prepared(files, tmp_path, "last").tagger.features[0]
    (path,) = (tmp_path / "cache").glob("*.npy")
    held = path.read_bytes()
    if damage == "pipe":
        path.unlink()
        os.mkfifo(path)
    elif damage in ("header", "shape"):
        place, put = (b"}", b"|") if damage == "header" else (b"'shape': (", b"'shape': )")
        path.write_bytes(held.replace(place, put, 1))
    else:
        path.write_bytes(flipped(held, len(held) - 1000) if damage == "bit" else held[:damage])
    capsys.readouterr()
    got = Prepared(files, tmp_path, "last").tagger.features[0]
    np.testing.assert_array_equal(got, wanted)
    text = capsys.readouterr().out
    assert "features of train: layers [5]: computed 1, re-used 0 (1 damaged" in text
    Prepared(files, tmp_path, "last")
    assert "computed 0, re-used 1\n" in capsys.readouterr().out


def test_a_disk_without_room_for_the_features_is_one_line(files, tmp_path) -> None:
    """And not the end of the process, which is writing into mapped pages."""
    (tmp_path / "many.txt").write_text(TEXT * 300)
    (tmp_path / "cache").mkdir()
    with mounted(tmp_path / "cache", "size=40k"):
        with pytest.raises(UserError, match="ner.cache_dir: .*: the disk is full"):
            Prepared(files, tmp_path, "last", train=tmp_path / "many.txt")
        assert list((tmp_path / "cache").iterdir()) == []


def test_a_cache_dir_that_is_a_file_is_refused(files, tmp_path) -> None:
    (tmp_path / "cache").touch()
    with pytest.raises(UserError, match="ner.cache_dir: .*cache: no folder"):
        Prepared(files, tmp_path, "last")


def test_what_a_killed_run_left_is_removed(files, tmp_path) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    cache = tmp_path / "cache"
    cache.mkdir()
    here, own = socket.gethostname(), "0a" * 12
    for pid in (dead.pid, os.getpid()):
        for host in (here, "elsewhere"):
            (cache / f"{own}-layer01.{host}.{pid}.new").touch()
    kept = {f"notes.{here}.{dead.pid}.new", f"plan.{here}.2026-11.new", f"{own}.{here}.1.new"}
    for name in kept:  # the user's own
        (cache / name).touch()
    kept.add(f"plan.{here}.{dead.pid}.new")
    (cache / f"plan.{here}.{dead.pid}.new").mkdir()
    Prepared(files, tmp_path, "last")
    alive = ((here, os.getpid()), ("elsewhere", os.getpid()), ("elsewhere", dead.pid))
    kept |= {f"{own}-layer01.{host}.{pid}.new" for host, pid in alive}
    assert {p.name for p in cache.glob("*.new")} == kept


def test_padding_in_a_batch_changes_nothing(files, tmp_path) -> None:
    p = Prepared(files, tmp_path, "last")
    tagger, items = p.tagger.eval(), p.task.sets["train"][:5]
    with torch.no_grad():
        batch = tagger.collate(items, CPU)
        together = tagger.split(tagger(batch), batch)
        for item, got in zip(items, together, strict=True):
            alone = tagger(tagger.collate([item], CPU)).numpy()
            np.testing.assert_allclose(got, alone, atol=1e-5)


def test_a_tagger_s_start_depends_on_its_seed_alone(files, tmp_path) -> None:
    p = Prepared(files, tmp_path, "weighted_sum")
    a, b, c = (p.build(seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(a[n], b[n]) for n in a)
    assert not torch.equal(a["lstm.weight_ih_l0"], c["lstm.weight_ih_l0"])
