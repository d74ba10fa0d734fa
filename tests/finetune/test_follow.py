"""Each whole checkpoint of a run is scored once, by a process of its own."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from core.console import Console
from core.errors import UserError
from finetune import follow
from finetune.__main__ import main
from tests.finetune import tiny
from tests.finetune.test_train import config, make_files


def checkpoint(run: Path, step: int, whole: bool = True) -> Path:
    """By its marker a checkpoint; what fine-tuning reads of it is a Hugging Face folder."""
    folder = run / "checkpoints" / f"step-{step:08d}"
    tiny.encoder(folder)
    if whole:
        listed = dict.fromkeys(("state.json", "vocab.txt", "engine/0"), [0, ""])
        (folder / "COMPLETE.json").write_text(json.dumps({"files": listed}))
    return folder


@pytest.fixture
def run(tmp_path) -> Path:
    make_files(tmp_path)
    made = tmp_path / "run"
    made.mkdir()
    return made


def grid(tmp_path) -> str:
    from configs.load import dump

    path = tmp_path / "probe.yaml"
    settings = config(tmp_path, tmp_path / "unused", grid_={"epochs": [1], "seeds": [0, 1]})
    path.write_text(dump(settings))
    return str(path)


def test_new_whole_checkpoints_are_scored_in_order(run, tmp_path, monkeypatch, capsys) -> None:
    calls = []

    def finetuned(line, log):
        """Results as finetune/run.py leaves them."""
        named = dict(part.split("=", 1) for part in line if "=" in part)
        calls.append(Path(named["encoder.path"]).name)
        if len(calls) == 2:
            log.write_text("what is wrong\nerror: no room\n")
            return 2
        if len(calls) == 4:
            return 85
        for seed in range(3):
            job = Path(named["run_dir"]) / "SST-2" / f"b4-s{seed}"
            job.mkdir(parents=True)
            result = {"task": "SST-2", "init": "pretrained", "trained": "all", "failed": False}
            result |= {"batch_size": 4, "learning_rate": 1.0, "epochs": 1, "main": "accuracy"}
            result |= {"scores": {"accuracy": 50.0 + seed**2}}
            (job / "result.json").write_text(json.dumps(result))
        return 0

    (run / "probes").mkdir()
    monkeypatch.setattr(follow, "run", finetuned)
    for step, whole in ((30, True), (20, False), (10, True)):
        checkpoint(run, step, whole)
    assert main(["follow", str(run), "--config", grid(tmp_path), "--once"]) == 1
    assert calls == ["step-00000010", "step-00000030"]
    assert "step 30: not scored (exit code 2): error: no room" in capsys.readouterr().out
    checkpoint(run, 40)
    assert main(["follow", str(run), "--config", grid(tmp_path), "--once"]) == 85
    assert "stopped by a signal; the same command goes on" in capsys.readouterr().err
    assert main(["follow", str(run), "--config", grid(tmp_path), "--once"]) == 0
    assert calls[2:] == ["step-00000030", "step-00000040", "step-00000040"]
    lines = [json.loads(line) for line in (run / "probes.jsonl").read_text().splitlines()]
    assert [(line["step"], line["probe/SST-2/accuracy"]) for line in lines] == [
        (10, 51.0), (30, 51.0), (40, 51.0),
    ]  # fmt: skip
    assert list((run / "probes").glob("events.out.tfevents*"))


def test_it_ends_when_the_run_has_ended(run, tmp_path) -> None:
    (run / "FINISHED").write_text("30\n")
    assert main(["follow", str(run), "--config", grid(tmp_path)]) == 0
    with pytest.raises(UserError, match="none: no such folder"):
        follow.Follower(tmp_path / "none", grid(tmp_path), [], Console(False))


def test_a_signal_is_handed_on_and_what_is_said_is_kept(tmp_path) -> None:
    log = tmp_path / "probes" / "step.log"
    before = signal.getsignal(signal.SIGTERM)
    line = ["sh", "-c", "echo said; kill -TERM $PPID; sleep 60"]
    assert follow.run(line, log) == -signal.SIGTERM
    assert log.read_text() == "said\n" and signal.getsignal(signal.SIGTERM) == before


@pytest.mark.slow
def test_a_checkpoint_is_fine_tuned_by_a_process_of_its_own(run, tmp_path) -> None:
    checkpoint(run, 10)
    assert main(["follow", str(run), "--config", grid(tmp_path), "--once"]) == 0
    (line,) = map(json.loads, (run / "probes.jsonl").read_text().splitlines())
    assert line["step"] == 10 and 0 <= line["probe/SST-2/accuracy"] <= 100
    assert not list(run.rglob("probes/**/model.safetensors"))
