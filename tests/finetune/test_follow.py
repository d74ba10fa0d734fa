"""Each whole checkpoint of a run is scored once, by a process of its own."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from configs.load import load
from core.console import Console
from core.errors import TryAgain, UserError
from finetune import follow
from finetune.__main__ import main
from finetune.config import FinetuneConfig
from finetune.grid import folder_of, jobs
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
        """Results as finetune/run.py leaves them, and one that another grid left."""
        named = dict(part.split("=", 1) for part in line if "=" in part)
        calls.append(int(Path(named["encoder.path"]).name[-2:]))
        log.write_text("what is wrong\nerror: no room\n")
        if len(calls) in (2, 4):
            return {2: 2, 4: 85}[len(calls)]
        made = load(grid(tmp_path), FinetuneConfig, [f"run_dir={named['run_dir']}"])
        scores = {folder_of(made, job): len(calls) + job.seed for job in jobs(made)}
        scores[Path(named["run_dir"]) / "SST-2/other"] = 99
        for folder, score in list(scores.items())[len(calls) == 1 :]:
            folder.mkdir(parents=True, exist_ok=True)
            result = {"task": "SST-2", "init": "pretrained", "trained": "all", "failed": False}
            result |= {"batch_size": 4, "learning_rate": 1.0, "epochs": 1, "main": "accuracy"}
            result |= {"scores": {"accuracy": score}}
            (folder / "result.json").write_text(json.dumps(result))
        return 0

    def scored() -> list[tuple[int, float]]:
        lines = map(json.loads, (run / "probes.jsonl").read_text().splitlines())
        return [(line["step"], line["probe/SST-2/accuracy"]) for line in lines]

    (run / "probes").mkdir()
    monkeypatch.setattr(follow, "run", finetuned)
    for step, whole in ((30, True), (20, False), (10, True)):
        checkpoint(run, step, whole)
    line = ["follow", str(run), "--config", grid(tmp_path), "--once"]
    assert main(line) == 1 and calls == [10, 30]
    said = capsys.readouterr().out
    assert "step 10: not scored (not every job has a result): error: no room" in said
    assert "step 30: not scored (exit code 2): error: no room" in said
    assert main(line) == 1 and calls[2:] == [10, 30]  # 85 of its own: no signal came here
    assert "step 30: not scored (exit code 85): error: no room" in capsys.readouterr().out
    checkpoint(run, 40)
    assert main(line) == main(line) == 0 and calls[4:] == [30, 40]
    assert scored() == [(10, 3.5), (30, 5.5), (40, 6.5)]
    assert list((run / "probes").glob("events.out.tfevents*"))
    # New weights at a step that is scored.
    listed = dict.fromkeys(("state.json", "vocab.txt", "engine/0"), [0, "other"])
    marker = run / "checkpoints/step-00000030/COMPLETE.json"
    marker.write_text(json.dumps({"files": listed}))
    assert main(line) == main(line) == 0 and calls[6:] == [30, 40]
    assert scored() == [(10, 3.5), (30, 7.5), (40, 8.5)]
    assert len(list((run / "probes").glob("step-*30-*.log"))) == 2


@pytest.mark.parametrize("mark", ["NaN", "1e999", "-1", "1e30"])
def test_a_mark_that_is_none_is_no_score_of_another_config(run, tmp_path, mark, capsys) -> None:
    (run / "probes.jsonl").write_text(f'{{"step": 10, "time": 1.0, "checkpoint": {mark}}}\n')
    assert main(["follow", str(run), "--config", grid(tmp_path), "--once"]) == 0
    assert capsys.readouterr() == ("", "")


def test_one_process_follows_a_run(run, tmp_path, capsys) -> None:
    line = ["follow", str(run), "--config", grid(tmp_path), "--once"]
    with follow.Follower(run, grid(tmp_path), [], Console(False)).alone():
        assert main(line) == 2
        assert "another process follows this run" in capsys.readouterr().err
    assert main(line) == 0
    for every in ("nan", "inf", "-1"):
        assert main([*line, "--every", every]) == 2
        assert "error: --every: seconds from 0" in capsys.readouterr().err


def test_it_ends_when_the_run_has_ended(run, tmp_path) -> None:
    (run / "FINISHED").write_text("30\n")
    assert main(["follow", str(run), "--config", grid(tmp_path)]) == 0
    with pytest.raises(UserError, match="none: no such folder"):
        follow.Follower(tmp_path / "none", grid(tmp_path), [], Console(False))


def test_a_checkpoint_that_goes_while_it_is_scored_is_said(
    run, tmp_path, monkeypatch, capsys
) -> None:
    folder = checkpoint(run, 10)

    def finetuned(line, log):
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("error: no such folder; hf download NAME\n")
        shutil.rmtree(folder)
        return 2

    monkeypatch.setattr(follow, "run", finetuned)
    assert main(["follow", str(run), "--config", grid(tmp_path), "--once"]) == 1
    said = capsys.readouterr().out
    assert "step 10: not scored: its checkpoint is gone" in said and "hf download" not in said


def test_a_run_that_is_removed_is_not_waited_for(run, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: shutil.rmtree(run))
    assert main(["follow", str(run), "--config", grid(tmp_path)]) == 2
    assert f"{run}: was removed" in capsys.readouterr().err
    run.mkdir()
    checkpoint(run, 10)
    monkeypatch.setattr(follow, "run", lambda line, log: shutil.rmtree(run) or 2)  # at its work
    assert main(["follow", str(run), "--config", grid(tmp_path)]) == 2
    assert re.fullmatch("error: .*: No such file or directory\n", capsys.readouterr().err)


def test_a_run_in_the_place_of_another_is_left_to_its_own_follower(
    run, tmp_path, monkeypatch, capsys
) -> None:
    with ExitStack() as second:

        def replace(_: float) -> None:
            run.rename(tmp_path / "moved")
            checkpoint(run, 10)
            follower = follow.Follower(run, grid(tmp_path), [], Console(False))
            second.enter_context(follower.alone())

        monkeypatch.setattr(time, "sleep", replace)
        assert main(["follow", str(run), "--config", grid(tmp_path)]) == 2
        assert f"{run}: was removed or replaced" in capsys.readouterr().err
        assert [path.name for path in (run / "probes").iterdir()] == ["lock"]


@pytest.mark.parametrize(
    ("number", "wanted"), [(signal.SIGTERM, TryAgain), (signal.SIGINT, KeyboardInterrupt)]
)
@pytest.mark.parametrize("stopped", [False, True])
def test_a_signal_is_handed_on_and_what_is_said_is_kept(number, wanted, stopped, tmp_path) -> None:
    """Also to a command that is stopped at the moment."""
    log = tmp_path / "probes" / "step.log"
    before = signal.signal(number, signal.SIG_DFL)
    late = "n=0; while kill -0 $$ 2>&-; do sleep 0.1; n=$((n + 1)); [ $n = 200 ] && break; done"
    tell = f"(sleep 0.3; kill -{number} $PPID; {late}; [ $n = 200 ] && echo late && kill -9 $$)"
    does = f"{tell} & kill -STOP $$" if stopped else f"kill -{number} $PPID; exec sleep 60"
    try:
        line = ["sh", "-c", f"echo said; {does}"]
        with pytest.raises(wanted):
            follow.run(line, log)
        assert log.read_text() == "said\n" and signal.getsignal(number) == signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_a_command_ends_with_whoever_follows(tmp_path) -> None:
    log = tmp_path / "log"
    if (child := os.fork()) == 0:
        try:
            follow.run(["sh", "-c", "echo $$; exec sleep 30"], log)
        finally:
            os._exit(0)
    while not (log.exists() and log.read_text().endswith("\n")):
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    command, end = Path("/proc", log.read_text().strip(), "stat"), time.monotonic() + 20
    while command.exists() and ") Z " not in command.read_text():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.slow
def test_a_checkpoint_is_fine_tuned_by_a_process_of_its_own(run, tmp_path, capsys) -> None:
    checkpoint(run, 10)
    line = ["follow", str(run), "--config", grid(tmp_path), "--once"]
    assert main(line) == 0
    (scored,) = map(json.loads, (run / "probes.jsonl").read_text().splitlines())
    assert scored["step"] == 10 and 0 <= scored["probe/SST-2/accuracy"] <= 100
    assert not list(run.rglob("probes/**/model.safetensors"))
    checkpoint(run, 20)
    assert main(line) == 0 and "warning" not in capsys.readouterr().out
    with (tmp_path / "glue/SST-2/train.tsv").open("a") as file:
        file.write("one more\t1\n")
    checkpoint(run, 30)
    assert main(line) == 0
    assert (
        "step 30: warning: the task's files have changed since step 20" in capsys.readouterr().out
    )
    assert main(line) == 0 and not capsys.readouterr().out
    for key, old, new in (("grid.learning_rate.0", 0.003, 0.002), ("glue.max_seq_len", 32, 16)):
        changed = [*line, "--set", f"{key.removesuffix('.0')}={[new] if key[-1] == '0' else new}"]
        assert main(changed) == 0
        said = capsys.readouterr().out
        assert f"warning: the config has changed since step 30 was scored ({key}: {old} ->" in said
