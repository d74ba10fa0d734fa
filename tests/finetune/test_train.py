"""Whole jobs and sweeps on a task of twelve sentences."""

from __future__ import annotations

import contextlib
import csv
import importlib
import json
import math
import multiprocessing
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import finetune.train
from configs.load import dump, load
from core.console import Console
from core.errors import TryAgain, UserError, main_guard
from core.files import Lock, read_sealed, sha256, write_sealed
from finetune import grid, report, results
from finetune.config import FinetuneConfig, GlueConfig
from finetune.examples import IGNORE_LABEL, Item, Tokens
from finetune.heads import FineTuned, HeadSpec, initialise_head
from finetune.predict import Predictor
from finetune.results import RESULT
from finetune.run import main
from finetune.train import Trainer, is_scored, seed_dropout
from pretrain.config import PretrainConfig
from pretrain.model import initialise
from tests.damage import flipped
from tests.finetune import tiny
from tests.pretrain.test_sweep import stand_in_for_squeue
from tests.pretrain.test_writer import mounted

CPU, MATMUL = torch.device("cpu"), torch.backends.cuda.matmul


def make_files(folder: Path) -> None:
    """An encoder, and SST-2 in which cats are good and dogs are not."""
    tiny.encoder(folder / "encoder")
    place = folder / "glue" / "SST-2"
    place.mkdir(parents=True)
    ends = ["sat", "ran in the sun", "was big", "was red", "saw a king", "is old"]
    rows = [f"the {a} {e}\t{n}" for e in ends for n, a in enumerate(("dog", "cat"))]
    for name in ("train.tsv", "dev.tsv"):
        (place / name).write_text("sentence\tlabel\n" + "\n".join(rows) + "\n")
    (place / "test.tsv").write_text("index\tsentence\n0\ta cat sat\n1\ta dog sat\n")


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    make_files(folder)
    return folder


def config(files, run_dir, *, train=(), grid_=(), **encoder) -> FinetuneConfig:
    return FinetuneConfig(
        run_dir=str(run_dir),
        encoder={"path": str(files / "encoder")} | encoder,
        glue={"dir": str(files / "glue"), "tasks": ["SST-2"], "max_seq_len": 32},
        grid={"batch_size": [4], "learning_rate": [3e-3], "epochs": [12], **dict(grid_)},
        train={"save_minutes": 0, **dict(train)},
        device="cpu",
        threads=1,
        workers=1,
    )


def result(run_dir) -> dict:
    return json.loads(next(Path(run_dir).glob(f"*/*/{RESULT}")).read_text())


def weights(run_dir) -> dict:
    return load_file(next(Path(run_dir).glob("*/*/model/model.safetensors")))


def test_tokens_added_to_an_encoder_are_said(tmp_path, capsys) -> None:
    make_files(tmp_path)
    (tmp_path / "encoder" / "added_tokens.json").write_text('{"covid19": 100}')
    two = {"epochs": [1], "learning_rate": [3e-3, 1e-3]}
    path = tmp_path / "glue.yaml"
    path.write_text(dump(config(tmp_path, tmp_path / "run", grid_=two)))
    assert main(["--config", str(path)]) == 0
    told = "added_tokens.json: without the tokens added to it: covid19"
    assert capsys.readouterr().out.count(told) == 1
    assert any(told in note for note in result(tmp_path / "run")["notes"])


def test_a_process_that_finds_no_free_job_leaves_the_report_to_others(
    files, tmp_path, capsys
) -> None:
    settings = config(files, tmp_path / "run")
    path = tmp_path / "glue.yaml"
    path.write_text(dump(settings))
    (job,) = grid.jobs(settings)
    with grid.claim(grid.folder_of(settings, job)) as mine:
        assert mine and main(["--config", str(path)]) == 0
    assert "no job has ended yet" in "".join(capsys.readouterr())


def test_jobs_that_another_process_has_are_told(files, tmp_path, capsys) -> None:
    settings = config(files, tmp_path / "run", grid_={"seeds": [0, 1], "epochs": [1]})
    path = tmp_path / "glue.yaml"
    path.write_text(dump(settings))
    for at_another, told in ((True, 1), (False, 0)):
        with contextlib.ExitStack() as others:
            if at_another:
                others.enter_context(grid.claim(grid.folder_of(settings, grid.jobs(settings)[1])))
            assert main(["--config", str(path)]) == 0
            said = capsys.readouterr().out
            assert said.count("1 of 2 jobs have no result yet: another process") == told
            assert "--collect" not in said
            assert main(["--config", str(path), "--collect"]) == 0
            said = capsys.readouterr().out
            assert said.count("or else the same command without --collect does them") == told


def test_a_job_that_an_ended_start_of_a_job_holds_is_not_taken_for_done(
    files, tmp_path, monkeypatch, capsys
) -> None:
    """Its node may be down for Slurm alone, or its lock be held by a file server alone."""
    squeue = stand_in_for_squeue(tmp_path / "bin", monkeypatch, "echo 7 RUNNING")
    settings = config(files, tmp_path / "run")
    path = tmp_path / "glue.yaml"
    path.write_text(dump(settings))
    folder = grid.folder_of(settings, grid.jobs(settings)[0])
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    with grid.claim(folder) as mine:
        assert mine and main(["--config", str(path)]) == 0  # of this start: another process's
        monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
        assert main(["--config", str(path)]) == 85
        assert f"an ended start of a Slurm job holds {folder}/lock" in capsys.readouterr().err
        monkeypatch.setenv("SLURM_JOB_ID", "8")
        assert main(["--config", str(path)]) == 0
        squeue.write_text("#!/bin/bash\n")
        assert main(["--config", str(path)]) == 85


def test_a_job_that_another_process_had_and_left_is_not_passed_over(
    files, tmp_path, monkeypatch
) -> None:
    settings = config(files, tmp_path / "run", grid_={"seeds": [0, 1], "epochs": [1]})
    first, second = grid.jobs(settings)
    run = grid.run
    with ExitStack() as other:
        assert other.enter_context(grid.claim(grid.folder_of(settings, first)))

        def ends_meanwhile(*arguments):
            other.close()
            return run(*arguments)

        monkeypatch.setattr(grid, "run", ends_meanwhile)
        assert grid.sweep(settings) == 0
    assert grid.done(settings, second) and grid.done(settings, first)


def test_a_start_in_a_folder_that_another_holds_has_an_end(files, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(grid, "FOLDER_PATIENCE", 0.1)
    settings = config(files, tmp_path / "run")
    (tmp_path / "run").mkdir()
    with Lock(tmp_path / "run/lock") as lock:
        assert lock.take()
        with pytest.raises(TryAgain, match="run/lock: another process begins"):
            grid.sweep(settings)


def test_of_processes_that_end_together_the_last_reports_all(files, tmp_path, monkeypatch) -> None:
    """And one that does not let go of the lock does not hold up the others for ever."""
    settings = config(files, tmp_path / "run", grid_={"seeds": [0, 1], "epochs": [1]})
    path = tmp_path / "glue.yaml"
    path.write_text(dump(settings))
    assert grid.sweep(settings, (0, 2)) == 0
    plain, go_on = report.results, threading.Event()
    did: queue.Queue[str] = queue.Queue()

    def slow(folders):
        found = plain(folders)
        did.put("reads")
        assert len(found) == 2 or go_on.wait(60)
        return found

    monkeypatch.setattr(report, "results", slow)
    monkeypatch.setattr(grid, "notice", lambda text, _: did.put(text))
    ends = [
        threading.Thread(target=main, args=(["--config", str(path), "--collect"],)) for _ in ".."
    ]
    ends[0].start()
    assert did.get(timeout=60) == "reads"
    of_0, of_1 = (grid.folder_of(settings, job) for job in grid.jobs(settings))
    shutil.copytree(of_0, of_1)
    write_sealed(of_1 / RESULT, read_sealed(of_0 / RESULT) | {"seed": 1})
    ends[1].start()
    assert "another process reports; waiting" in did.get(timeout=60)
    go_on.set()
    for end in ends:
        end.join(60)
    assert len(plain([tmp_path / "run"])) == 2
    (row,) = csv.DictReader((tmp_path / "run/report.csv").read_text().splitlines())
    assert row["seeds"] == "2"

    monkeypatch.setattr(grid, "REPORT_PATIENCE", 0.0)
    (tmp_path / "run/report.csv").unlink()
    with Lock(tmp_path / "run/report.lock") as lock:
        assert lock.take() and main(["--config", str(path), "--collect"]) == 0
    assert any("`--collect` after its end" in text for text in list(did.queue))
    assert (tmp_path / "run/report.csv").exists()


def test_a_run_ends_well_and_reports_where_stdout_is_on_a_full_disk(
    files, tmp_path, monkeypatch
) -> None:
    path = tmp_path / "glue.yaml"
    path.write_text(dump(config(files, tmp_path / "run", grid_={"epochs": [1]})))
    with open("/dev/full", "w") as full, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", full)
        assert main(["--config", str(path)]) == 0
    assert (tmp_path / "run/report.csv").exists() and (tmp_path / "run/report.md").exists()


def test_a_job_learns_scores_and_predicts(files, tmp_path, capsys) -> None:
    settings = config(files, tmp_path / "run")
    MATMUL.allow_bf16_reduced_precision_reduction = True
    assert grid.sweep(settings) == 0
    assert not MATMUL.allow_bf16_reduced_precision_reduction  # sums of bf16 products are fp32
    grid.collect(settings)
    found = result(tmp_path / "run")
    assert found["scores"] == {"accuracy": 100} and not found["failed"]
    assert found["steps"] == 36 and len(found["history"]) == 12
    lines = (tmp_path / "run/submission/SST-2.tsv").read_text()
    assert lines == "index\tprediction\n0\t1\n1\t0\n"
    assert list((tmp_path / "run/SST-2").glob("*/events.out.tfevents.*"))
    assert not list((tmp_path / "run").rglob("last.pt"))
    assert "new layer: classifier" in capsys.readouterr().out
    (card,) = (tmp_path / "run").rglob("model/README.md")
    for line in ("| train | 12 |", "| accuracy | 100.00 |", "- seed 0 of 0; kept: best on dev"):
        assert line in card.read_text()

    new = tmp_path / "new.csv"
    new.write_text("sentence,index\na cat sat,7\na dog sat,8\n")
    answers = Predictor(tmp_path / "run", [], CPU).answers(new, Console(False))
    assert [row["label"] for row in answers] == ["1", "0"]


@pytest.mark.parametrize(("call", "step"), [(2, 6), (5, 12)])
def test_a_signal_while_a_set_is_predicted_loses_nothing(
    files, tmp_path, monkeypatch, capsys, call, step
) -> None:
    settings = {name: config(files, tmp_path / name, grid_={"epochs": [4]}) for name in "ab"}
    assert grid.sweep(settings["a"]) == 0
    calls, plain = [], finetune.train.predict

    def interrupted(*arguments):
        calls.append(0)
        if len(calls) == call:  # four times dev, then dev and test at the end
            os.kill(os.getpid(), signal.SIGTERM)
        return plain(*arguments)

    monkeypatch.setattr(finetune.train, "predict", interrupted)
    assert grid.sweep(settings["b"]) == 85 and len(calls) == call
    monkeypatch.setattr(finetune.train, "predict", plain)
    capsys.readouterr()
    assert grid.sweep(settings["b"]) == 0
    assert f"goes on from step {step}" in capsys.readouterr().out
    assert result(tmp_path / "a")["history"] == result(tmp_path / "b")["history"]
    files_a, files_b = (
        {p.name: p.read_bytes() for p in (tmp_path / name).rglob("predictions/*")} for name in "ab"
    )
    assert files_a == files_b and len(files_a) > 1


@pytest.mark.parametrize(("spoiled", "call"), [(12, 4), (6, 0), (6, 2), (2, 1)])
def test_a_job_that_diverged_is_one_after_a_stop_too(
    files, tmp_path, monkeypatch, spoiled, call
) -> None:
    """It is stopped after the step `spoiled` that it ended with, or in that set's prediction."""
    settings = {name: config(files, tmp_path / name, grid_={"epochs": [4]}) for name in "ab"}
    step, plain, calls, stops = Trainer.train_step, finetune.train.predict, [], []

    def spoil(self):
        found = step(self)
        if self.step == spoiled - 1:
            self.model.bert.embeddings.word_embeddings.weight.data.fill_(math.nan)
            if stops and call == 0:
                os.kill(os.getpid(), stops.pop())
            return math.nan, math.nan
        return found

    def interrupted(*arguments):
        calls.append(0)
        if stops and len(calls) == call:
            os.kill(os.getpid(), stops.pop())
        return plain(*arguments)

    monkeypatch.setattr(Trainer, "train_step", spoil)
    assert grid.sweep(settings["a"]) == 0
    monkeypatch.setattr(finetune.train, "predict", interrupted)
    stops.append(signal.SIGUSR1)
    assert grid.sweep(settings["b"]) == 85
    assert grid.sweep(settings["b"]) == 0
    a, b = (result(tmp_path / name) for name in "ab")
    assert a["diverged"] and b["diverged"] and b["failed"]
    assert a["history"] == b["history"] and a["scores"] == b["scores"]
    files_a, files_b = (
        {p.name: p.read_bytes() for p in (tmp_path / name).rglob("predictions/*")} for name in "ab"
    )
    assert files_a == files_b


@pytest.mark.parametrize("added", ["the sun is red,c", "the sun is red,b", ""])
def test_a_stopped_job_does_not_go_on_with_other_data(
    files, tmp_path, monkeypatch, capsys, added
) -> None:
    """Of another number, with other labels, or of the same with other words."""
    table = tmp_path / "mine.csv"
    table.write_text("text,label\n" + "the cat sat,a\nthe dog ran,b\n" * 4)
    mine = {"train_file": str(table), "dev_file": str(table), "max_seq_len": 32}
    plain = config(files, tmp_path / "run", grid_={"epochs": [1]}).model_dump(
        exclude={"glue", "classify"}
    )
    settings = FinetuneConfig(**plain, classify=mine)
    step = Trainer.train_step

    def interrupt(self):
        os.kill(os.getpid(), signal.SIGTERM)
        return step(self)

    monkeypatch.setattr(Trainer, "train_step", interrupt)
    assert grid.sweep(settings) == 85
    monkeypatch.setattr(Trainer, "train_step", step)
    before = table.read_text()
    table.write_text(before + f"{added}\n" * 2 if added else before.replace("cat", "king"))
    said = "8 examples .*" if added else f"another content of {table};.*"
    with pytest.raises(UserError, match=f"last.pt: was made of {said}remove it"):
        grid.sweep(settings)
    table.write_text(before)
    assert grid.sweep(settings) == 0


@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("changed", ["dev.tsv", "test.tsv", "weights", "vocabulary"])
def test_jobs_of_one_sweep_are_of_one_content(tmp_path, changed, left) -> None:
    make_files(tmp_path)
    settings = config(tmp_path, tmp_path / "run", grid_={"epochs": [1]})
    more = settings.model_copy(update={"grid": settings.grid.model_copy(update={"seeds": (0, 1)})})
    assert grid.sweep(settings) == 0 == grid.sweep(settings)
    path = tmp_path / "encoder"
    if changed.endswith(".tsv"):
        path = tmp_path / "glue/SST-2" / changed
        path.write_text(path.read_text().replace("sat", "ran"))
    elif changed == "weights":
        shutil.rmtree(path)
        tiny.encoder(path, initializer_range=0.03)
    else:
        vocabulary = path / "vocab.txt"
        vocabulary.write_text(vocabulary.read_text().replace("\nparis\n", "\nlondon\n"))
    with pytest.raises(UserError, match=f"{RESULT}: was made of another content of {path};"):
        grid.sweep(more if left else settings)
    assert len(list(tmp_path.rglob(RESULT))) == 1


def test_results_of_two_contents_are_no_row(tmp_path) -> None:
    """As where the encoder is replaced between the starts of two parts of one sweep."""
    make_files(tmp_path)
    settings = config(tmp_path, tmp_path / "run", grid_={"epochs": [1], "seeds": [0, 1]})
    assert grid.sweep(settings) == 0
    first, second = sorted((tmp_path / "run").rglob(RESULT))
    facts = json.loads(first.read_text())
    facts.pop("sha256", None)
    write_sealed(first, facts | {"made_of": dict.fromkeys(facts["made_of"], "0" * 64)})
    said = f"^{second}: was made of another content of .* than {first}; remove"
    for shows in (grid.collect, grid.sweep):
        with pytest.raises(UserError, match=said):
            shows(settings)


@pytest.mark.parametrize("replaced", [True, False])
@pytest.mark.parametrize("at", ["start", "job", "between"])
def test_a_run_folder_that_was_taken_away_is_not_made_again(
    files, tmp_path, monkeypatch, at, replaced
) -> None:
    """Its result would stand for that of the next sweep there, whose config is another."""
    settings = config(files, tmp_path / "run", grid_={"epochs": [1], "seeds": [0, 1]})
    places = {
        "start": (grid, "prepare"),
        "job": (Trainer, "train_step"),
        "between": (grid, "write_sealed"),
    }
    holder, name = places[at]
    plain = getattr(holder, name)

    def taken(*given):
        done = plain(*given)
        monkeypatch.undo()
        (tmp_path / "run").rename(tmp_path / "moved")
        if replaced:
            other = config(files, tmp_path / "run", train={"clip": 0.5})
            following.enter_context(grid.shared_folder(other))
        return done

    monkeypatch.setattr(holder, name, taken)
    with ExitStack() as following:
        with pytest.raises(UserError, match=f"^run_dir: {tmp_path}/run was removed or replaced"):
            grid.sweep(settings)
        there = {path.name for path in (tmp_path / "run").rglob("*")}
    assert there == ({"config.yaml", "lock"} if replaced else set())
    assert len(list((tmp_path / "moved").rglob(RESULT))) == (at == "between")


def test_a_stopped_job_goes_on_whatever_its_labels(files, tmp_path, monkeypatch, capsys) -> None:
    """Scores are told by label, which may be a text; a pickle's keys and values have bounds."""
    step = Trainer.train_step

    def interrupt(self):
        if self.step == 7:
            last = dict(self.history[-1])
            self.history.append(last | {f"f1/{'a' * 9000}": 0.5})
            self.history += [last | {f"f1/{n}": 0.5 for n in range(1000)} for _ in range(1100)]
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self)

    settings = config(files, tmp_path / "run", grid_={"epochs": [4], "seeds": [3]})
    monkeypatch.setattr(Trainer, "train_step", interrupt)
    assert grid.sweep(settings) == 85
    monkeypatch.setattr(Trainer, "train_step", step)
    assert grid.sweep(settings) == 0
    assert "goes on from step 8" in capsys.readouterr().out


def test_a_stopped_job_goes_on_exactly(files, tmp_path, monkeypatch, capsys) -> None:
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    few = {"epochs": [4], "seeds": [3]}
    train = {"select": "last"}
    assert grid.sweep(config(files, straight, train=train, grid_=few)) == 0

    step = Trainer.train_step

    def interrupt(self):
        if self.step == 7:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self)

    settings = config(files, stopped, train=train, grid_=few)
    monkeypatch.setattr(Trainer, "train_step", interrupt)
    assert grid.sweep(settings) == 85
    assert not list(stopped.rglob(RESULT))
    monkeypatch.setattr(Trainer, "train_step", step)
    torch.manual_seed(99)
    assert grid.sweep(settings) == 0
    assert "goes on from step 8" in capsys.readouterr().out
    a, b = weights(straight), weights(stopped)
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert result(straight)["history"] == result(stopped)["history"]
    lines = next(stopped.rglob("metrics.jsonl")).read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines]
    assert steps == sorted(steps) and len(set(steps)) >= 4


@pytest.mark.parametrize("name", ["last.pt", "model.safetensors"])
def test_a_stopped_job_does_not_go_on_from_other_bits(
    files, tmp_path, monkeypatch, capsys, name
) -> None:
    settings = config(files, tmp_path / "run", grid_={"epochs": [2]})
    calls, plain = [], finetune.train.predict

    def interrupted(*arguments):
        calls.append(0)
        if len(calls) == 3:  # twice dev, then both sets at the end
            os.kill(os.getpid(), signal.SIGTERM)
        return plain(*arguments)

    monkeypatch.setattr(finetune.train, "predict", interrupted)
    assert grid.sweep(settings) == 85
    monkeypatch.setattr(finetune.train, "predict", plain)
    path = next(tmp_path.rglob(name))
    whole = path.read_bytes()
    path.write_bytes(flipped(whole, len(whole) // 2))
    capsys.readouterr()
    if name == "last.pt":
        assert grid.sweep(settings) == 0
        assert f"{path} is damaged: the job begins anew" in capsys.readouterr().out
        return
    with pytest.raises(UserError, match=f"{path}: is not what was scored; remove .*/last.pt"):
        grid.sweep(settings)
    path.write_bytes(whole)
    assert grid.sweep(settings) == 0


def test_a_job_does_not_go_on_from_what_is_anothers(files, tmp_path, monkeypatch) -> None:
    settings = config(files, tmp_path / "run", grid_={"epochs": [2]})
    other = settings.model_copy(update={"grid": settings.grid.model_copy(update={"seeds": (1,)})})
    calls, plain = [], finetune.train.predict

    def interrupted(*arguments):
        calls.append(0)
        if len(calls) == 3:  # twice dev, then both sets at the end
            os.kill(os.getpid(), signal.SIGTERM)
        return plain(*arguments)

    monkeypatch.setattr(finetune.train, "predict", interrupted)
    assert grid.sweep(settings) == 85
    mine, theirs = (grid.folder_of(s, *grid.jobs(s)) for s in (settings, other))
    shutil.copytree(mine, theirs)
    with pytest.raises(UserError, match=f"{theirs}/last.pt: is of the job SST-2 {mine.name}; "):
        grid.sweep(other)
    assert grid.sweep(settings) == 0


def test_parts_of_a_batch_make_the_same_step(files, tmp_path) -> None:
    """micro_batch_tokens changes memory, not the result (without dropout)."""
    encoder = tmp_path / "still"
    tiny.encoder(encoder, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    made = {}
    for tokens in (7, 10**6):
        settings = config(
            files,
            tmp_path / str(tokens),
            train={"micro_batch_tokens": tokens, "select": "last"},
            grid_={"epochs": [1]},
            path=str(encoder),
        )
        assert grid.sweep(settings) == 0
        made[tokens] = weights(tmp_path / str(tokens))
    for name, tensor in made[7].items():
        torch.testing.assert_close(tensor, made[10**6][name], rtol=1e-3, atol=2e-5)


def test_only_the_head_is_trained(files, tmp_path) -> None:
    settings = config(
        files, tmp_path / "run", trained="head", train={"select": "last"}, grid_={"epochs": [2]}
    )
    assert grid.sweep(settings) == 0
    before = load_file(files / "encoder/model.safetensors")
    after = weights(tmp_path / "run")
    assert all(torch.equal(after[n], before[n]) for n in after if n.startswith("bert."))
    assert after["classifier.bias"].abs().sum() > 0


def test_a_sweep_goes_on_where_it_stopped_and_all_seeds_are_reported(
    files, tmp_path, capsys
) -> None:
    settings = {"seeds": [0, 1], "learning_rate": [3e-3, 1e-9], "epochs": [12]}
    first = config(files, tmp_path / "run", grid_={**settings, "seeds": [0]})
    second = config(files, tmp_path / "run", grid_=settings)
    assert len(grid.jobs(second)) == 4
    assert grid.sweep(first) == 0
    stamps = {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob(RESULT)}
    assert len(stamps) == 2
    assert grid.sweep(second, (1, 2)) == 0
    assert grid.sweep(second, (0, 2)) == 0
    assert len(list((tmp_path / "run").rglob(RESULT))) == 4
    assert all(p.stat().st_mtime_ns == t for p, t in stamps.items())
    assert len(list((tmp_path / "run").rglob("model.safetensors"))) == 1
    assert "FAILED: ended at a constant guess" in capsys.readouterr().out
    (row,) = report.rows(report.results([tmp_path]))
    assert (row.jobs, row.seeds, row.failed_all) == (4, 2, 2)
    assert row.setting == "b4 lr0.003 e12" and row.base is None
    made = [json.loads(p.read_text()) for p in (tmp_path / "run").rglob(RESULT)]
    assert all(result["paper"] == [None, None] for result in made)


@pytest.mark.parametrize(
    ("kilobytes", "before", "file", "goes_on"),
    [
        (300, None, "last.pt", ""),
        (4000, "run", RESULT, "goes on from step 6"),
        (4000, "collect", "submission/SST-2.tsv", ""),
    ],
)
def test_a_full_disk_is_one_line_and_loses_nothing(
    files, tmp_path, monkeypatch, capsys, kilobytes, before, file, goes_on
) -> None:
    """It is full from the start, or when this function of the grid has ended or begins."""
    disk = tmp_path / "disk"
    disk.mkdir()

    def fill() -> None:
        with suppress(OSError), (disk / "stone").open("wb", buffering=0) as stone:
            while True:
                stone.write(bytes(4096))

    def run(*arguments):
        result = plain["run"](*arguments)
        fill()
        return result

    def collect(settings):
        fill()
        return plain["collect"](settings)

    plain = {"run": grid.run, "collect": grid.collect}
    settings = {name: tmp_path / f"{name}.yaml" for name in ("disk", "plain")}
    for name, path in settings.items():
        path.write_text(dump(config(files, tmp_path / name / "run", grid_={"epochs": [2]})))
    assert main(["--config", str(settings["plain"])]) == 0
    capsys.readouterr()
    with mounted(disk, f"size={kilobytes}k"):
        if before:
            monkeypatch.setattr(grid, before, {"run": run, "collect": collect}[before])
        assert main(["--config", str(settings["disk"])]) == 2
        monkeypatch.undo()
        (line,) = capsys.readouterr().err.splitlines()
        assert f"{file}: the disk is full" in line
        assert not list(disk.rglob(".*.part")) + list(disk.rglob("*.new"))
        (disk / "stone").unlink(missing_ok=True)
        subprocess.run(["mount", "-o", "remount,size=8m", str(disk)], check=True)
        assert main(["--config", str(settings["disk"])]) == 0
        assert goes_on in capsys.readouterr().out
        whole = {p.name: p.read_bytes() for p in disk.rglob("*.tsv")}
        assert whole == {p.name: p.read_bytes() for p in tmp_path.glob("plain/**/*.tsv")}
        assert result(disk / "run")["history"] == result(tmp_path / "plain/run")["history"]


def test_a_sweep_whose_workers_are_killed_goes_on(files, tmp_path) -> None:
    settings = config(files, tmp_path / "run", grid_={"seeds": [0, 1], "epochs": [1]})
    others, killed = set(multiprocessing.active_children()), []

    def kill() -> None:
        end = time.monotonic() + 60
        while len(workers := set(multiprocessing.active_children()) - others) < 2:
            if time.monotonic() > end:
                return
            time.sleep(0.01)
        for worker in workers:
            os.kill(worker.pid, signal.SIGKILL)
            killed.append(worker)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(TryAgain, match="a worker was killed .* 2 jobs are left to do"):
        grid.sweep(settings.model_copy(update={"workers": 2}))
    killer.join()
    assert len(killed) == 2
    assert grid.sweep(settings) == 0 and len(list((tmp_path / "run").rglob(RESULT))) == 2


@pytest.mark.parametrize(
    ("codes", "left", "wanted"),
    [
        ([0, -9], 1, 137),
        ([-15, 85], 1, 85),
        ([85, 0], 1, 85),
        ([-9, 2], 1, 2),
        ([2, 85], 1, 2),
        ([-9, -11], 1, 2),
        ([0, -6], 1, 2),
        ([-9, 1], 1, 2),
        ([1, 0], 1, 1),
        ([-9, -15], 0, 0),
        ([0, -11], 0, 0),
    ],
)
def test_only_what_may_pass_is_tried_again(codes, left, wanted) -> None:
    """A crash or a mistake of one worker comes again, whatever ended the others."""

    def outcome() -> int:
        try:
            return grid.outcome(codes, left)
        except UserError as error:
            assert str(codes) in str(error)
            return error.code

    assert outcome() == wanted


@pytest.mark.slow
def test_processes_share_a_sweep(files, tmp_path) -> None:
    settings = config(files, tmp_path / "run", grid_={"seeds": [0, 1], "epochs": [1]})
    assert grid.sweep(settings.model_copy(update={"workers": 2})) == 0
    assert len(list((tmp_path / "run").rglob(RESULT))) == 2


def test_processes_that_are_told_to_stop_before_they_hear_are_no_mistake(files, tmp_path) -> None:
    settings = config(files, tmp_path / "run", grid_={"seeds": [0, 1], "epochs": [1]})
    threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGTERM]).start()  # they import torch
    assert grid.sweep(settings.model_copy(update={"workers": 2})) == 85


def test_a_worker_that_is_stopped_hears_that_the_sweep_ends(files, tmp_path) -> None:
    settings = config(files, tmp_path / "run", grid_={"seeds": [0, 1], "epochs": [1]})
    others, hung = set(multiprocessing.active_children()), []

    def stop() -> None:
        while len(workers := set(multiprocessing.active_children()) - others) < 2:
            time.sleep(0.01)
        stopped = workers.pop().pid
        os.kill(stopped, signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGTERM)
        end = time.monotonic() + 30
        while Path("/proc", str(stopped)).exists():
            if time.monotonic() > end:
                hung.append(stopped)
                os.kill(stopped, signal.SIGKILL)
                return
            time.sleep(0.01)

    stopper = threading.Thread(target=stop)
    stopper.start()
    assert grid.sweep(settings.model_copy(update={"workers": 2})) == 85
    stopper.join()
    assert not hung


def test_a_locked_job_is_left_to_its_owner(files, tmp_path) -> None:
    settings = config(files, tmp_path / "run", grid_={"epochs": [1]})
    with grid.claim(grid.folder_of(settings, grid.jobs(settings)[0])) as mine:
        assert mine
        assert grid.sweep(settings) == 0
        assert not list((tmp_path / "run").rglob(RESULT))


def test_what_a_killed_start_was_writing_goes_with_the_next(files, tmp_path) -> None:
    settings = config(files, tmp_path / "run", grid_={"epochs": [1]}, train={"save_minutes": 9})
    job = grid.folder_of(settings, grid.jobs(settings)[0])
    (job / ".model.x1_y2_z3/new").mkdir(parents=True)
    (job / ".model.x1_y2_z3/new/model.safetensors").touch()
    (job / ".result.json.9999999.part").touch()
    (job / "last.pt.new").touch()
    for name in ("config.yaml", "submission-SST-2.tsv", "report.md"):
        (tmp_path / f"run/.{name}.9999999.part").touch()
    at_work = f"report.md.{os.getppid()}"
    mine = {tmp_path / f"run/.{name}.part" for name in ("mine", "mine.9999999", at_work)}
    mine |= {job / ".model.march", job / ".mine.csv.9999999.part"}
    for path in mine:
        path.touch()
    assert grid.sweep(settings) == 0 and (job / RESULT).exists()
    with grid.one_after_another(settings):
        grid.collect(settings)
    assert set([*(tmp_path / "run").rglob(".*"), *job.glob("last.pt*")]) == mine


@pytest.mark.parametrize(("keep", "kept"), [("best", 1), ("none", 0), ("all", 2)])
def test_weights_are_kept_as_asked_and_an_archive_behind_a_link_stays(
    files, tmp_path, keep, kept
) -> None:
    def swept(seeds: list[int]) -> list[Path]:
        grid_ = {"epochs": [1], "seeds": seeds}
        settings = config(files, tmp_path / "run", grid_=grid_, train={"keep_weights": keep})
        assert grid.sweep(settings) == 0
        found = results.of_task(tmp_path / "run/SST-2")
        return [results.best(found)[0], *(job for job, _ in found)]

    best, *done = swept([0, 1])
    assert sum((job / "model").is_dir() for job in done) == kept
    assert keep != "best" or (best / "model").is_dir()
    other, archive = next(job for job in done if job != best), tmp_path / "archive"
    if not (other / "model").exists():
        (other / "model").mkdir()
        (other / "model" / "model.safetensors").write_text("mine")
    shutil.move(other, archive)
    other.symlink_to(archive)
    assert len(swept([0, 1, 2])) == 4 and (archive / "model" / "model.safetensors").exists()


def test_results_of_another_config_are_not_mixed(files, tmp_path) -> None:
    grid.prepare(config(files, tmp_path))
    grid.prepare(config(files, tmp_path, train={"warmup": 0.3}))  # nothing trained yet
    grid.prepare(config(files, tmp_path))
    job = tmp_path / "SST-2" / "b4"
    job.mkdir(parents=True)
    (job / RESULT).write_text("{}")
    grid.prepare(config(files, tmp_path, grid_={"seeds": [7]}))
    with pytest.raises(UserError, match="train.warmup: 0.1, the config says 0.2"):
        grid.prepare(config(files, tmp_path, train={"warmup": 0.2}))
    other = config(files, tmp_path)
    other = other.model_copy(update={"glue": other.glue.model_copy(update={"dir": "elsewhere"})})
    with pytest.raises(UserError, match="glue.dir: .*, the config says elsewhere"):
        grid.prepare(other)


def test_jobs_of_one_sweep_are_of_one_checkpoint(files, tmp_path) -> None:
    """A run that is fine-tuned while it trains has a newer one at the next start."""

    def checkpoint(step: int, whole: bool = True) -> Path:
        folder = tmp_path / f"trains/checkpoints/step-{step:08d}"
        tiny.encoder(folder)  # what is read of it is a Hugging Face folder
        (folder / "engine").mkdir()
        names = ("vocab.txt", "state.json", "engine/0")
        for name in names[1:]:
            (folder / name).write_text("0")
        listed = {n: [(folder / n).stat().st_size, sha256(folder / n)] for n in names}
        (folder / "COMPLETE.json").write_text(json.dumps({"files": listed if whole else {}}))
        return folder

    first = checkpoint(10)
    given = config(files, tmp_path / "run", grid_={"epochs": [1]}, path=str(tmp_path / "trains"))
    more = given.model_copy(update={"grid": given.grid.model_copy(update={"seeds": (0, 1)})})
    assert grid.sweep(given) == 0 and result(tmp_path / "run")["encoder"] == str(first)
    checkpoint(20, whole=False)
    assert grid.sweep(given) == 0
    newer = checkpoint(30)
    with pytest.raises(UserError, match=f"encoder.path: {first}, the config says {newer}"):
        grid.sweep(more)
    named = more.encoder.model_copy(update={"path": str(first)})
    assert grid.sweep(more.model_copy(update={"encoder": named})) == 0
    found = [json.loads(path.read_text())["encoder"] for path in tmp_path.rglob(RESULT)]
    assert found == [str(first)] * 2


def test_a_start_that_fails_on_its_data_leaves_no_folder(tmp_path) -> None:
    make_files(tmp_path / "files")
    (tmp_path / "files/glue/SST-2/dev.tsv").write_text("sentence\tclass\na cat sat\t1\n")
    settings = config(tmp_path / "files", tmp_path / "runs/x", grid_={"seeds": [0, 1]})
    for workers in (1, 2):
        several = settings.model_copy(update={"workers": workers})
        assert main_guard(lambda of=several: grid.sweep(of)) == 2
        assert [path.name for path in tmp_path.iterdir()] == ["files"]
    (tmp_path / "runs/x").mkdir(parents=True)
    assert main_guard(lambda: grid.sweep(settings)) == 2
    assert (tmp_path / "runs/x/config.yaml").exists()  # one that was there stays


@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoints/latest", "checkpoints/step-10/a"])
def test_the_folder_of_a_pretraining_run_is_refused(files, tmp_path, name) -> None:
    own = tmp_path / "run/config.yaml"
    (tmp_path / "run" / name).parent.mkdir(parents=True)
    (tmp_path / "run" / name).touch()
    own.write_text("the run's own\n")
    with pytest.raises(UserError, match="run_dir: .*run holds a pretraining run"):
        grid.sweep(config(files, tmp_path / "run"))
    assert own.read_text() == "the run's own\n" and not (tmp_path / "run/lock").exists()


def test_a_config_of_the_user_s_own_and_the_root_are_refused(files, tmp_path) -> None:
    own = tmp_path / "mine/config.yaml"
    own.parent.mkdir()
    own.write_text("theirs\n")
    with pytest.raises(UserError, match=f"run_dir: {own} was written by no run"):
        grid.sweep(config(files, own.parent))
    assert own.read_text() == "theirs\n" and [p.name for p in own.parent.iterdir()] == [own.name]
    with pytest.raises(UserError, match="run_dir: / is /"):
        grid.sweep(config(files, Path("/")))


def test_a_folder_that_another_start_takes_away_is_one_line(files, tmp_path, monkeypatch) -> None:
    """Between the moments in which its lock is opened and taken."""
    take, settings = Lock.take, config(files, tmp_path / "runs/x")
    other = grid.shared_folder(settings)
    other.__enter__()

    def take_when_it_is_gone(lock, **how):
        monkeypatch.setattr(Lock, "take", take)
        other.__exit__(None, None, None)
        return lock.take(**how)

    monkeypatch.setattr(Lock, "take", take_when_it_is_gone)
    with pytest.raises(TryAgain, match="runs/x was taken away"), grid.shared_folder(settings):
        pass
    with grid.shared_folder(settings):
        pass


def test_another_config_is_refused_while_a_sweep_begins(files, tmp_path) -> None:
    with grid.shared_folder(config(files, tmp_path)):
        with grid.shared_folder(config(files, tmp_path, grid_={"seeds": [7]})):
            pass
        with pytest.raises(UserError, match="train.warmup"):
            grid.sweep(config(files, tmp_path, train={"warmup": 0.2}))
    with grid.shared_folder(config(files, tmp_path, train={"warmup": 0.2})):
        pass


def test_damaged_files_of_a_run_are_named(files, tmp_path, capsys) -> None:
    settings = config(files, tmp_path / "run", grid_={"epochs": [1]})
    job = grid.folder_of(settings, grid.jobs(settings)[0])
    job.mkdir(parents=True)
    (job / "last.pt").write_bytes(b"half")
    assert grid.sweep(settings) == 0
    assert "last.pt is damaged: the job begins anew" in capsys.readouterr().out
    shutil.rmtree(job / "predictions")
    with pytest.raises(UserError, match=f"{job / 'predictions'}: No such file or directory"):
        grid.collect(settings)
    (job / RESULT).write_text("{")
    with pytest.raises(UserError, match=f"{job / RESULT}: not JSON.*remove it"):
        grid.collect(settings)
    for place in (files / "encoder/config.json", files / "encoder/config.json/x"):
        with pytest.raises(UserError, match=f"run_dir: {place}"):
            grid.sweep(config(files, place))


@pytest.mark.parametrize("collected", [False, True])
def test_a_copy_of_a_job_is_not_the_job_of_its_folder(files, tmp_path, collected) -> None:
    settings = config(files, tmp_path / "run", grid_={"epochs": [1]})
    assert grid.sweep(settings) == 0
    (done,) = (grid.folder_of(settings, job) for job in grid.jobs(settings))
    both = settings.model_copy(update={"grid": settings.grid.model_copy(update={"seeds": (0, 1)})})
    _, of_1 = (grid.folder_of(both, job) for job in grid.jobs(both))
    for copy, asked in ((Path(f"{done}.bak"), settings), (of_1, both)):
        shutil.copytree(done, copy)
        with pytest.raises(UserError, match=f"{copy / RESULT}: is of the job SST-2/{done.name} "):
            grid.collect(asked) if collected else grid.sweep(asked)
        shutil.rmtree(copy)
    assert grid.sweep(both) == 0


def test_a_submission_of_a_job_that_is_gone_is_taken_away(files, tmp_path) -> None:
    settings = config(files, tmp_path / "run", grid_={"epochs": [1]})
    assert grid.sweep(settings) == 0 and len(grid.collect(settings)) == 1
    shutil.rmtree(tmp_path / "run/SST-2")
    train = settings.train.model_copy(update={"predict_test": False})
    settings = settings.model_copy(update={"train": train})
    assert grid.sweep(settings) == 0
    (left,) = tmp_path.glob("run/SST-2/*/result.json")
    other = tmp_path / "run/submission/QNLI.tsv"
    other.write_text("of another task")
    _, said = grid.collect(settings)
    assert f"submission/SST-2.tsv, of another job, is taken away: {left.parent.name} has" in said
    assert list(other.parent.iterdir()) == [other] and len(grid.collect(settings)) == 1


def test_a_submission_is_what_the_jobs_wrote(files, tmp_path) -> None:
    """Also after a loss of power, which may leave an empty file beside a result."""
    settings = config(files, tmp_path / "run", grid_={"epochs": [1]})
    assert grid.sweep(settings) == 0
    file = next(tmp_path.rglob("predictions/SST-2.tsv"))
    whole = file.read_bytes()
    for spoil, said in (
        (lambda: file.write_bytes(whole[: len(whole) // 2]), "is not what its job wrote; remove"),
        (lambda: file.write_bytes(b""), "is not what its job wrote; remove"),
        (file.unlink, "No such file"),
    ):
        spoil()
        with pytest.raises(UserError, match=f"{file}: {said}"):
            grid.collect(settings)
    assert not (tmp_path / "run/submission/SST-2.tsv").exists()
    file.write_bytes(whole)
    assert grid.collect(settings)
    assert (tmp_path / "run/submission/SST-2.tsv").read_bytes() == whole


@pytest.mark.parametrize("killed", ["finetune.tables.replacing", "finetune.grid.replacing"])
def test_half_files_of_a_killed_start_are_not_submitted(files, tmp_path, killed) -> None:
    settings = config(files, tmp_path / "run", grid_={"epochs": [1]})

    def start() -> None:
        module = importlib.import_module(killed.rpartition(".")[0])
        whole = module.replacing

        @contextmanager
        def half(path, **options):
            with whole(path, **options) as part:
                yield part
                if path.name == "SST-2.tsv":
                    os.kill(os.getpid(), signal.SIGKILL)

        module.replacing = half
        grid.sweep(settings)
        grid.collect(settings)

    process = multiprocessing.get_context("fork").Process(target=start)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL and list(tmp_path.rglob(".*SST-2.tsv.*.part"))
    assert grid.sweep(settings) == 0 and grid.collect(settings)
    for folder in ("submission", "SST-2/*/predictions"):
        for file in tmp_path.glob(f"run/{folder}/*"):
            assert file.name in ("SST-2.tsv", "dev.tsv")


def test_a_vocabulary_for_other_text_is_refused(files, tmp_path) -> None:
    place = tmp_path / "glue" / "SST-2"
    place.mkdir(parents=True)
    for name in ("train.tsv", "dev.tsv"):
        (place / name).write_text("sentence\tlabel\n\u0416\u0416 \u042f\u042f the\t1\n")
    settings = config(files, tmp_path / "run").model_copy(
        update={"glue": GlueConfig(dir=str(tmp_path / "glue"), tasks=("SST-2",), max_seq_len=32)}
    )
    with pytest.raises(UserError, match="40 % of the tokens of SST-2 are .UNK."):
        grid.sweep(settings)


def test_a_diverged_run_is_a_failed_run(files, tmp_path) -> None:
    settings = config(files, tmp_path, grid_={"learning_rate": [1e18], "epochs": [1]})
    assert grid.sweep(settings) == 0
    found = result(tmp_path)
    assert found["diverged"] and found["failed"] and found["scores"] == {"accuracy": 50}


def test_bf16_products_stay_near_fp32(files, tmp_path) -> None:
    for precision in ("fp32", "bf16"):
        settings = config(
            files,
            tmp_path / precision,
            train={"precision": precision, "select": "last"},
            grid_={"epochs": [1]},
        )
        assert grid.sweep(settings) == 0
    a, b = weights(tmp_path / "fp32"), weights(tmp_path / "bf16")
    assert b["classifier.weight"].dtype == torch.float32
    moved = max(float((a[n] - b[n]).abs().max()) for n in a)
    assert 0 < moved < 0.02


@pytest.mark.parametrize("diverges", ["", "loss", "gradient", "weight"])
def test_predictions_are_those_of_the_kept_weights(diverges, files, tmp_path, monkeypatch) -> None:
    """Also when the last epoch scores as well as the best one, ends in a loss of nan, has a
    gradient of nan in its last step, or leaves one in the weights of a word that dev lacks."""
    step, run, ends = Trainer.train_step, Trainer.run, []

    def spoil(self):
        loss, norm = step(self)
        if self.step == {"loss": 34, "gradient": 35}.get(diverges):
            self.model.classifier.bias.data.fill_(math.nan)
            return (math.nan, norm) if diverges == "loss" else (loss, math.nan)
        if self.step == 34 and diverges == "weight":
            rows = self.model.bert.embeddings.word_embeddings.weight
            rows.data[tiny.PIECES.index("rome")] = math.inf
        return loss, norm

    def look(self, *arguments):
        measured = run(self, *arguments)
        ends.append({name: t.clone() for name, t in self.model.state_dict().items()})
        return measured

    monkeypatch.setattr(Trainer, "train_step", spoil)
    monkeypatch.setattr(Trainer, "run", look)
    assert grid.sweep(config(files, tmp_path)) == 0
    found = result(tmp_path)
    scores = [entry["accuracy"] for entry in found["history"]]
    assert scores[-1] == max(scores) == 100 and scores.index(100) < len(scores) - 1
    kept = weights(tmp_path)
    assert all(torch.equal(tensor, kept[name]) for name, tensor in ends[0].items())
    assert found["diverged"] is bool(diverges)


def test_a_score_of_weights_that_are_not_finite_is_that_of_a_guess(
    files, tmp_path, monkeypatch
) -> None:
    """The first score, of a model that is right where dev looks; nothing answers with it later."""
    settings = config(files, tmp_path, train={"evaluations_per_epoch": 1}, grid_={"epochs": [1]})
    step = Trainer.train_step

    def spoil(self):
        found = step(self)
        self.model.load_state_dict(trained)
        rows = self.model.bert.embeddings.word_embeddings.weight
        rows.data[tiny.PIECES.index("rome")] = math.nan
        return found

    assert grid.sweep(config(files, tmp_path / "good")) == 0
    trained = weights(tmp_path / "good")
    monkeypatch.setattr(Trainer, "train_step", spoil)
    settings = settings.model_copy(update={"run_dir": str(tmp_path / "bad")})
    assert grid.sweep(settings) == 0
    found = result(tmp_path / "bad")
    assert found["diverged"] and found["failed"] and found["scores"] == {"accuracy": 50}
    with pytest.raises(UserError, match="not finite"):
        Predictor(tmp_path / "bad", [], CPU)


@pytest.mark.parametrize(
    "head",
    [HeadSpec("sequence", 3), HeadSpec("choice", 2), HeadSpec("span", 2), HeadSpec("tokens", 3)],
    ids=lambda h: h.kind,
)
def test_a_frozen_encoder_has_no_gradient_and_no_dropout(head) -> None:
    shape = tiny.shape()
    model = FineTuned(shape, head, frozen=True)
    initialise(model.bert, shape, torch.Generator().manual_seed(1))
    initialise_head(model, shape, torch.Generator().manual_seed(2))
    model.dropout_p = 0.0
    label = {"span": (1, 2), "tokens": np.array([IGNORE_LABEL, 1, 2, 0, 1])}.get(head.kind, 1)
    part = Tokens(np.array([2, 7, 8, 9, 3]), np.zeros(5, np.int64))
    batch = model.collate([Item((part,) * (2 if head.kind == "choice" else 1), label)] * 2, CPU)
    model.train()
    logits = model(batch)
    assert torch.equal(logits, model(batch))
    model.loss_sum(logits, batch).backward()
    trained = {name for name, p in model.named_parameters() if p.grad is not None}
    assert trained == {f"{head.layer}.weight", f"{head.layer}.bias"}


def test_the_largest_seed_draws_dropout_of_its_own() -> None:
    def draw(seed: int, step: int) -> float:
        seed_dropout(seed, step)
        return float(torch.rand(()))

    with torch.random.fork_rng():
        drawn = [draw(seed, step) for seed in (0, 2**63 - 1) for step in (0, 1)]
        assert len(set(drawn)) == 4 and draw(2**63 - 1, 1) == drawn[-1]


def test_evaluation_points() -> None:
    def points(steps: int, per_epoch: int, times: int) -> list[int]:
        return [s for s in range(steps + 1) if is_scored(s, steps, per_epoch, times)]

    assert points(30, 10, 1) == [10, 20, 30]
    assert points(25, 10, 2) == [5, 10, 15, 20, 25]
    assert points(3, 10, 1) == [3]
    assert points(7, 3, 2) == [2, 3, 5, 6, 7]
    assert points(4, 2, 10**18) == [1, 2, 3, 4]
    assert is_scored(10**18, 10**24, 10, 1) and not is_scored(10**18 + 1, 10**24, 10, 1)


@pytest.mark.parametrize("name", ["last.pt", RESULT])
def test_a_file_that_cannot_be_read_is_not_taken_for_damaged(files, tmp_path, name) -> None:
    """An I/O error (here: of a process's memory at 0), a folder or a pipe in its place stop, by
    name."""
    settings = config(files, tmp_path / "run", grid_={"epochs": [1], "seeds": [0, 1]})
    path = grid.folder_of(settings, grid.jobs(settings)[0]) / name
    path.parent.mkdir(parents=True)
    for spoil, reason, code in (
        (lambda: path.symlink_to("/proc/self/mem"), "Input/output error", TryAgain.code),
        (lambda: (path.unlink(), path.mkdir()), "Is a directory", UserError.code),
        (lambda: (path.rmdir(), os.mkfifo(path)), "not a regular file", UserError.code),
    ):
        spoil()
        with pytest.raises(UserError, match=f"{path}: {reason}") as caught:
            grid.sweep(settings)
        assert caught.value.code == code


@pytest.mark.parametrize("missing", ["encoder.path", "glue.dir"])
def test_a_sweep_that_cannot_start_leaves_no_folder(files, tmp_path, missing) -> None:
    settings = config(files, tmp_path / "run")
    section, key = missing.split(".")
    wrong = getattr(settings, section).model_copy(update={key: str(tmp_path / "none")})
    with pytest.raises(UserError, match=f"{missing}: .*/none: no such"):
        grid.sweep(settings.model_copy(update={section: wrong}))
    assert not (tmp_path / "run").exists()


def test_the_shipped_grids_read_a_run_that_a_shipped_config_makes() -> None:
    shipped = Path(grid.__file__).parents[1] / "configs"
    runs = {load(path, PretrainConfig).run_dir for path in shipped.glob("pretrain_*.yaml")}
    grids = [load(path, FinetuneConfig) for path in shipped.glob("finetune_*.yaml")]
    assert len(grids) >= 4 and {found.encoder.path for found in grids} <= runs
