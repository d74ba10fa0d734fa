"""Where a run stands is read from its files alone, also from damaged ones."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from configs.load import check, dump
from core.errors import UserError
from pretrain import metrics, preflight
from pretrain.checkpoint import Checkpoints, step_folder
from pretrain.config import CheckpointConfig, PretrainConfig
from pretrain.distributed import World, slurm_job
from pretrain.metrics import records_from_the_end
from pretrain.origin import shape_of
from pretrain.rollback import Rollback, Rollbacks
from pretrain.run_state import ROLLBACKS, Position, State, mark_finished
from pretrain.status import main, read_config, status

ALONE = World(0, 1, 0, 1, "alone", torch.device("cpu"), None)
SHAPE = {"sequences_per_step": 4, "max_predictions": 3, "micro_batch_rows": 1}
NOW = 1_000_000.0


def training(step: int, at: float) -> dict[str, float]:
    rates = {"throughput/tokens_per_second": 50.0, "throughput/step_seconds": 2.0}
    return {"step": step, "time": at, "train/loss": 6.5, "train/mlm_loss": 6.0, **rates}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two phases, 30 steps of 16 tokens and 10 of 64; 25 done, an evaluation and a checkpoint."""
    folder = tmp_path / "run"
    phases = [{"max_seq_len": n, "steps": s, **SHAPE} for n, s in ((16, 30), (64, 10))]
    config = {"run_dir": str(folder), "data": {"dir": "data"}, "phases": phases}
    folder.mkdir()
    (folder / "config.yaml").write_text(dump(check(config, PretrainConfig, "test")))
    heldout = {"heldout/mlm_loss": 6.0, "heldout/mlm_accuracy": 0.25}
    record(folder, {"step": 20, "time": NOW - 40, **heldout})
    record(folder, training(20, NOW - 35), training(25, NOW - 30))
    save(folder, 20, "start", "phase", "resume", "resume")
    return folder


def save(run: Path, step: int, *events: str) -> Path:
    saved = State(Position(step=step), None, {}, {}, 1, tuple({"event": e} for e in events))
    keeper = Checkpoints(run, ALONE, CheckpointConfig(asynchronous=False))
    keeper.save(saved, b"[PAD]\n", lambda: write)
    return step_folder(run / "checkpoints", step)


def write(folder: Path) -> list[str]:
    (folder / "weights").write_bytes(b"x")
    return ["weights"]


def test_the_loss_is_the_one_that_the_held_out_text_has(run: Path) -> None:
    found = status(run, NOW)
    assert (found.mlm_loss, found.heldout_mlm_loss) == (6.0, 6.0)
    text = "\n".join(found.lines())
    assert text.count("masked LM 6.000 nats") == 2 and "6.5" not in text


def test_the_newest_checkpoint_that_was_fine_tuned_is_told(run: Path) -> None:
    assert status(run, NOW).probes == {} and "fine-tuned" not in "\n".join(status(run, NOW).lines())
    for step, score in ((10, 60.0), (20, 81.25)):
        with (run / "probes.jsonl").open("a") as file:
            line = {"step": step, "time": NOW, "checkpoint": 7, "probe/SST-2/accuracy": score}
            file.write(json.dumps(line) + "\n")
    found = status(run, NOW)
    assert (found.probe_step, found.probes) == (20, {"SST-2/accuracy": 81.25})
    assert "  fine-tuned from step 20: SST-2/accuracy 81.25" in found.lines()
    assert json.loads(found.to_json())["probes"] == {"SST-2/accuracy": 81.25}


@pytest.mark.parametrize("late", [False, True])
def test_an_end_that_is_past_is_no_end_to_come(run: Path, late: bool) -> None:
    end = status(run, NOW).ends_at
    found = status(run, end + (1 if late else -1))
    text = "\n".join(found.lines())
    assert found.state == "training"
    assert ("was to end at" in text, "left at this rate" in text) == (late, not late)


def test_a_copied_checkpoint_is_as_old_as_its_record(run: Path) -> None:
    assert status(run, NOW).checkpoint_age == 40  # the first record of its step
    record(run, {"step": 21, "time": NOW - 20, "checkpoint/bytes": 9.0})  # as it was written
    assert status(run, NOW).checkpoint_age == 40
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(x for x in lines if '"step": 20' not in x))
    assert status(run, NOW).checkpoint_age == 20
    (run / "metrics.jsonl").unlink()
    folder = run / "checkpoints/step-00000020"
    assert status(run, NOW).checkpoint_age == NOW - folder.stat().st_mtime


@pytest.mark.parametrize("name", ["COMPLETE.json", "state.json", "vocab.txt", "engine/weights"])
@pytest.mark.parametrize("left", [None, b"", b"["])
def test_a_newer_checkpoint_that_lacks_something_is_not_the_newest(
    run: Path, name: str, left: bytes | None
) -> None:
    file = save(run, 24, "start") / name
    assert status(run, NOW).checkpoint_step == 24
    file.unlink()
    if left is not None:
        file.write_bytes(left * 2)
    found = status(run, NOW)
    assert (found.checkpoint_step, found.starts) == (20, 3)


def record(folder: Path, *lines: dict[str, float]) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def test_a_run_that_goes_on(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = status(run, NOW)
    assert (found.state, found.step, found.phase, found.phase_step) == ("training", 25, 1, 25)
    # 5 steps of 100 tokens, then 10 of 4 full sequences of 64, at 50 tokens a second.
    assert found.left == (5 * 100 + 10 * 4 * 64) / 50
    assert found.ends_at == NOW - 30 + found.left
    assert (found.heldout_step, found.heldout_mlm_accuracy) == (20, 0.25)
    assert (found.checkpoint_step, found.starts, found.rollbacks) == (20, 3, 0)
    text = "\n".join(found.lines())
    for said in (
        "step 25 of 40",
        "phase 1/2 (16): 25 of 30",
        "step 20,",
        "3 starts up to it",
        "0:30 ago",
    ):
        assert said in text
    assert max(map(len, found.lines()[1:])) <= 80


def denied(pid: int, number: int) -> None:
    raise PermissionError


def test_a_run_whose_last_start_ended_in_order_is_stopped_until_it_is_silent(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run / "lock").write_text("boot 7 host -\n")
    assert status(run, NOW).state == "training"
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    for pid, state in ((os.getpid(), "training"), (2**22, "stopped")):  # this one was killed
        note = f"{boot}/{os.readlink('/proc/self/ns/pid')} {pid} host -\n"
        (run / "lock").write_text(note)
        assert status(run, NOW).state == state
    monkeypatch.setattr(os, "kill", denied)
    assert status(run, NOW).state == "training"  # another user's, where /proc hides it
    monkeypatch.setattr(preflight, "BOOT_ID", run / "none")
    assert status(run, NOW).state == "training"
    with preflight.run_folder(read_config(run), ALONE):
        note = (run / "lock").read_text()
        assert preflight.is_let_go(run / "lock") is False
    assert note == f"- {os.getpid()} {socket.gethostname()} {slurm_job()}\n"
    (run / "lock").write_text("")
    found = status(run, NOW)
    assert (found.state, found.well, found.ends_at) == ("stopped", True, None)
    assert status(run, NOW + 1000).state == "silent"
    early = status(run, NOW - 7200)  # the clock of the run was ahead
    assert early.state == "silent" and ", last record 1:59:30 ahead" in early.lines()[0]
    record(run, {"step": 25, "time": NOW, "heldout/mlm_loss": 5.0, "heldout/mlm_accuracy": 0.3}
           | {"heldout/max_seq_len": 64})  # fmt: skip
    assert "  held-out 64 at step 25: masked LM 5.000 nats, 30.0% right" in status(run, NOW).lines()


def test_silence_is_measured_by_the_runs_own_interval(run: Path) -> None:
    assert status(run, NOW + 800).state == "training"
    assert status(run, NOW + 871).state == "silent"
    record(run, training(30, NOW + 970))  # 1,000 s after the one before
    later = status(run, NOW + 970 + 2999)
    assert (later.state, later.phase, later.phase_step) == ("training", 1, 30)
    assert status(run, NOW + 970 + 3001).state == "silent"


def test_a_run_without_evaluations_is_not_read_to_its_beginning(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = read_config(run)
    never = config.evaluation.model_copy(update={"every_steps": 0})
    (run / "config.yaml").write_text(dump(config.model_copy(update={"evaluation": never})))
    shutil.rmtree(run / "checkpoints")
    record(run, *(training(step, NOW) for step in range(26, 40)))
    read, plain = [], metrics.lines_from_the_end

    def counted(path: Path, block: int) -> Iterator[dict[str, Any]]:
        for line in plain(path, block):
            read.append(line)
            yield line

    monkeypatch.setattr(metrics, "lines_from_the_end", counted)
    assert status(run, NOW).step == 39
    assert len(read) == 2


def test_an_evaluation_is_no_silence(run: Path) -> None:
    for step, seconds in ((10, 9000.0), (25, 400.0), (25, 600.0)):  # the last at two lengths
        scores = {"heldout/mlm_loss": 6.0, "heldout/mlm_accuracy": 0.25, "heldout/seconds": seconds}
        record(run, {"step": step, "time": NOW - 20, "heldout/max_seq_len": seconds, **scores})
    assert status(run, NOW - 30 + 2999).state == "training"
    assert status(run, NOW - 30 + 3001).state == "silent"


def test_exit_codes(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run)]) == 3  # its records are old
    assert main([str(run), "--silent-after", "1e12"]) == 0
    mark_finished(run, 40)
    assert main([str(run), "--json"]) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (last["state"], last["step"], last["phase"], last["left"]) == ("finished", 40, 2, None)
    (run / "metrics.jsonl").unlink()
    mark_finished(run, None)
    assert main([str(run), str(run)]) == 3
    assert "empty" in capsys.readouterr().out
    with pytest.raises(UserError, match="no run folder"):
        main([str(tmp_path), str(run)])
    assert "empty" in capsys.readouterr().out  # the others are told all the same


@pytest.mark.parametrize("newest", [False, True])
def test_a_folder_that_cannot_be_looked_into_is_one_line(
    monkeypatch: pytest.MonkeyPatch, newest: bool
) -> None:
    if newest:  # as Python 3.14 looks
        monkeypatch.setattr(Path, "is_file", lambda path: os.path.isfile(path))
        monkeypatch.setattr(Path, "is_dir", lambda path: os.path.isdir(path))
    with pytest.raises(UserError, match="^n+: File name too long$"):
        shape_of("n" * 300)
    with pytest.raises(UserError, match="config.yaml: File name too long$"):
        main(["n" * 300])


def test_json_has_no_bare_nan(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(run, training(26, NOW) | {"train/mlm_loss": float("nan")})
    main([str(run), "--json"])
    told = capsys.readouterr().out
    assert "NaN" not in told and json.loads(told)["mlm_loss"] is None


def test_a_rollback_counts_before_the_next_checkpoint(run: Path) -> None:
    assert status(run, NOW).rollbacks == 0
    done = Rollbacks(run / ROLLBACKS, 1, 3)
    done.done = (Rollback(24, 20, (), "not finite"),)
    done.write()
    assert status(run, NOW).rollbacks == 1


def test_damaged_records_are_passed_over(run: Path) -> None:
    before = status(run, NOW)
    scores = b', "heldout/mlm_loss": 1, "heldout/mlm_accuracy": 1}'
    for line in (
        b"\0" * 30, b'{"step": 99}', b'{"step": 99, "time": "x", "train/loss": 1}', b"[" * 9999,
        b'{"step": 99, "time": NaN, "train/loss": 1}',
        b'{"step": 99, "time": 1' + b"0" * 400 + b"}",
        b'{"step": 99, "time": 1, "train/loss": []}',
        b'{"step": 99, "time": 9e18, "train/loss": 1}',
        b'{"step": 99, "time": 1, "heldout/max_seq_len": NaN%b' % scores,
        b'{"step": 99, "time": 1, "heldout/max_seq_len": 1e999%b' % scores,
        b'{"step": 99, "time": 1%b' % scores.replace(b"accuracy", b"accurady"),
        b'{"step": 99, "time": 1, "optimizer/learning_rate": -1e308%b' % scores,
        b'{"step": 99, "time": 5, "tr',
    ):  # fmt: skip
        with (run / "metrics.jsonl").open("ab") as file:
            file.write(line + b"\n")
    assert status(run, NOW) == before


@pytest.mark.parametrize("block", [1, 7, 64, 1 << 20])
def test_lines_are_read_from_the_end_whatever_the_block(run: Path, block: int) -> None:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    found = list(records_from_the_end(run / "metrics.jsonl", block))
    assert found == [json.loads(line) for line in reversed(lines)]
