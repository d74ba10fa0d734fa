"""A list of runs: each is trained once, by whoever comes first; a mistake in one stops no other."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core.files import Lock
from pretrain import distributed, preflight
from pretrain.__main__ import main
from pretrain.model_config import ModelConfig
from pretrain.run_state import finished_steps, mark_finished
from tests.datasets import write_dataset

BASE = """
device: cpu
threads: 1
model: {hidden_size: 8, num_hidden_layers: 1, num_attention_heads: 2, intermediate_size: 16,
        max_position_embeddings: 32}
engine: {precision: fp32}
data: {workers: 0, dir: DATA}
phases:
  - {max_seq_len: 32, row_len: 64, rows_per_step: 2, sequences_per_step: 4, max_predictions: 5,
     micro_batch_rows: 2, steps: 2, learning_rate: 1.0e-3}
evaluation: {every_steps: 0}
"""


def make_runs(folder: Path, runs: dict[str, str]) -> list[str]:
    """A data set and a config a run, with the lines that it adds to BASE."""
    rng = np.random.default_rng(0)
    documents = [[rng.integers(5, 60, 9).tolist() for _ in range(9)] for _ in range(20)]
    write_dataset(folder / "data", documents, heldout=documents[:2], vocab=60)
    (folder / "base.yaml").write_text(BASE.replace("DATA", str(folder / "data")))
    for name, more in runs.items():
        text = f"extends: base.yaml\nrun_dir: {folder}/runs/{name}\n{more}\n"
        (folder / f"{name}.yaml").write_text(text)
    return [str(folder / f"{name}.yaml") for name in runs]


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Configs a, b and c; b names a data set that is not there."""
    return make_runs(tmp_path, {"a": "", "b": f"data: {{dir: {tmp_path}/none}}", "c": "seed: 3"})


def sweep(*arguments: str) -> int:
    return main(["sweep", *arguments])


def test_a_run_that_outlives_its_sweep_has_not_failed(
    files: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(preflight, "LOCK_PATIENCE", 0.0)
    (tmp_path / "runs/a").mkdir(parents=True)
    with Lock(tmp_path / "runs/a/lock") as run:
        assert run.take()
        assert sweep(files[0], "--launcher", "false") == 85
    assert "another run is at work in" in capsys.readouterr().out
    assert sweep(files[0], "--launcher", "false") == 2
    for killed in ("kill -KILL $$", "exit 137", "exit 9", "exit 247"):
        assert sweep(files[0], "--launcher", f"bash -c '{killed}'") == 137
    for hidden in (
        "true",
        "bash -c 'exit 143'",
        "bash -c 'kill -HUP $$'",
        "bash -c 'exit 138'",
    ):  # of a launcher whose ranks may have ended with 85
        assert sweep(files[0], "--launcher", hidden) == 85
    by_file = f"bash -c '[ $2 = {files[0]} ] && kill -KILL $$; exit 2'"
    capsys.readouterr()
    assert sweep(*files[:2], "--launcher", by_file) == 2
    assert f"failed: {files[1]}; to be started again: {files[0]}" in capsys.readouterr().err


def test_a_run_that_ends_within_a_run_s_patience_is_waited_for(
    files: list[str], tmp_path: Path
) -> None:
    (tmp_path / "runs/a").mkdir(parents=True)
    run = Lock(tmp_path / "runs/a/lock")
    assert run.take()
    ending = threading.Timer(0.2, run.close)
    ending.start()
    try:
        assert sweep(files[0], "--launcher", "false") == 2
    finally:
        ending.join()


def stand_in_for_squeue(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> Path:
    """A command in an own folder, first in PATH."""
    folder.mkdir()
    squeue = folder / "squeue"
    squeue.write_text(f"#!/bin/bash\n{script}\n")
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    return squeue


@pytest.mark.parametrize(
    ("job", "start", "of_slurm", "code"),
    [
        ("7", "1", "", 85),
        ("7", "0", "", 0),
        ("8", "1", "echo 7 RUNNING; echo 6 COMPLETING", 0),
        ("8", "1", "echo 7 PENDING", 0),
        ("8", "1", "echo 7 COMPLETING; echo 6 RUNNING", 85),
        ("8", "1", "", 85),
        ("8", "1", "echo error: Invalid job id specified >&2; exit 1", 85),
        ("8", "1", "echo error: Unable to contact the controller >&2; exit 1", 0),
        ("8", "1", "echo an answer of its own; echo", 0),
        ("8", "1", "printf '7 \\377\\n'", 0),
        ("8", "1", '[ -n "$SQUEUE_STATES" ] || echo 7 RUNNING', 0),
        ("8 elsewhere", "1", "", 0),
        (None, "0", "", 85),
    ],
)
def test_what_an_ended_start_of_a_job_holds_is_not_taken_for_done(
    files: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    job: str | None,
    start: str,
    of_slurm: str,
    code: int,
) -> None:
    """Its node may be down for Slurm alone, or its lock be held by a file server alone: no other
    would do it. What a job that goes on holds is that one's to do."""
    stand_in_for_squeue(tmp_path / "bin", monkeypatch, of_slurm)
    monkeypatch.setenv("SQUEUE_STATES", "PENDING")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "here")
    (tmp_path / "runs/a").mkdir(parents=True)
    with Lock(tmp_path / "runs/.a.sweep.lock") as lock:
        assert distributed.claim(lock)
        monkeypatch.delenv("SLURM_JOB_ID")
        monkeypatch.delenv("SLURM_CLUSTER_NAME")
        if job is not None:
            number, _, cluster = job.partition(" ")
            monkeypatch.setenv("SLURM_JOB_ID", number)
            monkeypatch.setenv("SLURM_CLUSTER_NAME", cluster or "here")
        monkeypatch.setenv("SLURM_RESTART_COUNT", start)
        assert sweep(files[0], "--launcher", "false") == code
        assert ("an ended start of a Slurm job" in capsys.readouterr().out) == (code == 85)
        mark_finished(tmp_path / "runs/a", 2)
        assert sweep(files[0], "--launcher", "false") == 0


def test_slurm_is_asked_once_of_a_job_that_holds_several_runs(
    files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in_for_squeue(tmp_path / "bin", monkeypatch, f"echo $3 >>{tmp_path}/asked; exit 1")
    (tmp_path / "runs").mkdir()
    with contextlib.ExitStack() as held:
        for name, job in (("a", "7"), ("b", "7"), ("c", "6")):
            monkeypatch.setenv("SLURM_JOB_ID", job)
            lock = held.enter_context(Lock(tmp_path / f"runs/.{name}.sweep.lock"))
            assert distributed.claim(lock)
        monkeypatch.setenv("SLURM_JOB_ID", "8")
        assert sweep(*files, "--launcher", "false") == 0
    assert (tmp_path / "asked").read_text().split() == ["7", "6"]


def test_a_run_that_another_sweep_had_and_left_is_not_passed_over(
    files: list[str], tmp_path: Path
) -> None:
    (tmp_path / "runs").mkdir()
    holds = f"exec 9>{tmp_path}/runs/.a.sweep.lock; flock 9; echo; exec sleep 60"
    other = subprocess.Popen(["bash", "-c", holds], stdout=subprocess.PIPE)
    assert other.stdout is not None and other.stdout.readline()
    launcher = tmp_path / "launcher"
    launcher.write_text(
        f"echo $3 >>{tmp_path}/ran; kill {other.pid} 2>/dev/null && sleep 0.2; exit 85\n"
    )
    with other:
        assert sweep(files[0], files[2], "--launcher", f"bash {launcher}") == 85
    assert (tmp_path / "ran").read_text().split() == [files[2], files[0]]


def test_a_rank_that_does_not_end_after_a_signal_holds_up_the_list_no_longer_than_a_run(
    files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "LOCK_PATIENCE", 0.0)
    launcher, lock, pid = tmp_path / "launcher", tmp_path / "runs/a/lock", tmp_path / "pid"
    launcher.write_text(
        f"mkdir -p {lock.parent}; exec 9> {lock}; flock 9; sleep 60 & echo $! > {pid}\n"
        "kill -TERM $PPID; wait\n"
    )
    try:
        assert sweep(*files, "--launcher", f"bash {launcher}") == 85
        with Lock(lock) as run:
            assert not run.take(wait=False)
    finally:
        os.kill(int(pid.read_text()), signal.SIGKILL)
    assert not (tmp_path / "runs/c").exists()


def test_a_folder_that_cannot_be_had_stops_no_other_run(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    Path(files[1]).write_text(f"extends: base.yaml\nrun_dir: {tmp_path}/file/b\n")
    launcher = tmp_path / "launcher"
    launcher.write_text(f"echo $3 >>{tmp_path}/ran; exit 85\n")
    assert sweep(*files, "--launcher", f"bash {launcher}") == 2
    assert (tmp_path / "ran").read_text().split() == [files[0], files[2]]
    said = capsys.readouterr()
    assert f"sweep: {files[1]}: run_dir: {tmp_path}/file: no folder\n" in said.out
    assert f"1 of 3 runs failed: {files[1]}; to be started again: {files[0]}, " in said.err


@pytest.mark.parametrize("place", [".", "./", "..", "../a", "x/..", "../../runs/a/."])
def test_a_run_folder_may_be_that_of_the_moment(
    files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    folder = tmp_path / "runs/a"
    (folder / "x").mkdir(parents=True)
    monkeypatch.chdir(folder / "x" if place == ".." else folder)
    mark = tmp_path / "started"
    script = tmp_path / "launch"
    script.write_text(f"#!/bin/sh\ntouch {mark}\nexit 2\n")
    script.chmod(0o755)
    arguments = [files[0], "--launcher", str(script), "--set", f"run_dir={place}"]
    with Lock(tmp_path / "runs/.a.sweep.lock") as other:  # of a sweep that goes by its name
        assert other.take()
        assert sweep(*arguments) == 0 and not mark.exists()
    assert sweep(*arguments) == 2 and mark.exists()
    assert [p.name for p in tmp_path.rglob(".*")] == [".a.sweep.lock"]


@pytest.mark.parametrize("place", ["/", "/..", "//"])
def test_the_root_is_no_run_s_folder(
    files: list[str], capsys: pytest.CaptureFixture[str], place: str
) -> None:
    assert sweep(files[0], "--launcher", "false", "--set", f"run_dir={place}") == 2
    said = capsys.readouterr().err
    assert said == f"error: {files[0]}: run_dir: {place} is /, which is no run's own\n"


def test_a_run_s_folder_ends_in_no_line_end(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep(files[0], "--launcher", "false", "--set", f'run_dir="{tmp_path}/run\\n"') == 2
    said = capsys.readouterr().err
    assert "/run\\n ends in a line end" in said and said.count("\n") == 1


def test_a_disk_that_does_not_answer_for_a_run_s_folder_may_do_later(
    files: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stat = os.stat

    def fails(path: Any, *arguments: Any, **named: Any) -> os.stat_result:
        if str(path).endswith("runs/a/config.yaml"):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)
        return stat(path, *arguments, **named)

    monkeypatch.setattr(os, "stat", fails)
    assert sweep(files[0], "--list") == 85
    assert capsys.readouterr().err.startswith(f"error: {files[0]}: run_dir: ")


@pytest.mark.parametrize("launcher", ["bash -c 'exit", "", "/no/such launcher"])
def test_a_launcher_that_is_no_command_is_one_line(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], launcher: str
) -> None:
    assert sweep(files[0], "--launcher", launcher) == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"error: --launcher: {launcher}: ") and not said.out
    assert not (tmp_path / "runs").exists()


def test_python_may_lie_in_a_folder_with_a_space(
    files: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    python = tmp_path / "an environment"
    python.symlink_to("/bin/false")
    monkeypatch.setattr(sys, "executable", str(python))
    assert sweep(files[0]) == 2
    assert f"sweep: {files[0]} ended with 1 and" in capsys.readouterr().out


def test_runs_that_are_not_begun_are_listed_and_one_folder_is_one_run(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "runs/a").mkdir(parents=True)
    mark_finished(tmp_path / "runs/a", 2)
    assert sweep("--list", *files) == 0
    lines = capsys.readouterr().out.splitlines()
    assert ["2 of 2" in line for line in lines] == [True, False, False]
    assert not (tmp_path / "runs/b").exists()
    odd = shutil.copy(files[0], tmp_path / "\x1b[31m.yaml")
    assert sweep("--list", str(odd)) == 0
    assert f"{tmp_path}/\\x1b[31m.yaml" in capsys.readouterr().out
    assert sweep(*files, "--set", f"run_dir={tmp_path}/runs/x") == 2
    assert f"run_dir: {tmp_path}/runs/x is {files[0]}'s, too" in capsys.readouterr().err
    (tmp_path / "link").symlink_to(tmp_path / "runs")
    for name in ("runs/a/", "runs/none/../a", "link/a"):
        Path(files[2]).write_text(f"extends: base.yaml\nrun_dir: {tmp_path}/{name}\nseed: 3\n")
        assert sweep(files[0], files[2]) == 2
        assert f"{name} is {files[0]}'s, too" in capsys.readouterr().err
    # A model that `init_from` makes longer than the default, and one that is still to come.
    (tmp_path / "first").mkdir()
    shape = ModelConfig(max_position_embeddings=1024).model_dump(mode="json")
    (tmp_path / "first/state.json").write_text(json.dumps({"config": {"model": shape}}))
    long = ["model={}", "phases.0.max_seq_len=600", "phases.0.row_len=600"]
    for folder, length in (("first", long), ("later", ["model={}"])):
        assert sweep("--list", files[0], "--set", *length, f"init_from={tmp_path}/{folder}") == 0
    # More steps than the mark says are more to do.
    assert sweep("--list", files[0], "--set", "phases.0.steps=3") == 0
    assert "2 of 3" in capsys.readouterr().out


@pytest.mark.slow
def test_every_run_is_trained_once_and_a_mistake_stops_no_other(
    files: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert sweep(*files) == 2
    said = capfd.readouterr()
    assert f"1 of 3 runs failed: {files[1]}" in said.err and f"{tmp_path}/none" in said.err
    assert [finished_steps(tmp_path / f"runs/{n}") for n in "abc"] == [2, None, 2]
    assert not (tmp_path / "runs/b").exists()
    with Lock(tmp_path / "runs/.c.sweep.lock") as lock:  # another sweep is at its further steps
        assert lock.take(wait=False)
        assert sweep(files[0], files[2], "--set", "phases.0.steps=3") == 0
    said = capfd.readouterr()
    assert f"sweep: {files[0]}" in said.out and f"sweep: {files[2]}" not in said.out
    assert [finished_steps(tmp_path / f"runs/{n}") for n in "ac"] == [3, 2]
    assert sweep(files[0], "--set", "phases.0.steps=3") == 0
    assert not capfd.readouterr().out
    assert sweep(files[0], "--set", "phases.0.steps=3", "seed=5") == 0
    assert "is finished; changed since: seed: 42 -> 5\n" in capfd.readouterr().out
    assert sweep(files[0], files[2], "--set", "model.intermediate_size=8") == 2
    said = capfd.readouterr()
    assert "model.intermediate_size: 16, the config says 8" in said.out and "2 of 2" in said.err
    checkpoints = tmp_path / "runs/c/checkpoints"
    checkpoints.rename(tmp_path / "kept")
    assert sweep(files[2]) == 0
    assert "c is finished; no checkpoint is left: what its" in capfd.readouterr().out
    shutil.copytree(tmp_path / "kept", checkpoints)
    (cut,) = checkpoints.glob("step-00000002/engine/rank-00000*")
    os.truncate(cut, 1000)
    (checkpoints / "step-original").mkdir()  # a user's own
    assert sweep(files[2]) == 2
    assert f"finished by its mark, but {cut}: 1000 bytes where" in capfd.readouterr().out
    shutil.rmtree(checkpoints)
    (tmp_path / "kept").rename(checkpoints)
    (tmp_path / "data").rename(tmp_path / "gone")
    assert sweep(files[2]) == 0
    with socket.create_server(("127.0.0.1", 0)) as silent:  # data elsewhere are not waited for
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/data"
        assert sweep(files[2], "--set", f"data.dir={url}") == 0
        silent.setblocking(False)
        with pytest.raises(BlockingIOError):
            silent.accept()
    write_dataset(tmp_path / "data", [[[7, 8, 9]] * 9] * 9, heldout=[[[7, 8]]], vocab=60)
    assert sweep(files[2]) == 2
    assert "step-00000002: trained on dataset_id" in capfd.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGUSR1, 85), (signal.SIGINT, 130)])
def test_a_signal_ends_the_list_and_not_the_run_alone(
    files: list[str], tmp_path: Path, number: signal.Signals, code: int
) -> None:
    command = [sys.executable, "-m", "pretrain", "sweep", files[0], files[2]]
    more = ["--set", "phases.0.steps=100000", "logging.every_steps=1"]
    process = subprocess.Popen(
        [*command, *more], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    metrics, end = tmp_path / "runs/a/metrics.jsonl", time.monotonic() + 120
    while not (metrics.exists() and metrics.stat().st_size):
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.1)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert children
    for run in children:
        os.kill(int(run), signal.SIGSTOP)  # and hears it nevertheless
    if number == signal.SIGINT:  # as from a terminal
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == code and "stopped at step" in said
    assert not (tmp_path / "runs/c").exists()
    # Nor does a run go on when its list is killed: the next one would meet it in its folder.
    process = subprocess.Popen([*command, *more], stdout=subprocess.PIPE, text=True)
    size = metrics.stat().st_size
    while metrics.stat().st_size <= size:
        assert time.monotonic() < end + 120 and process.poll() is None
        time.sleep(0.1)
    process.kill()
    said, _ = process.communicate(timeout=120)  # the run has the pipe too
    assert "SIGTERM: stopped at step" in said
