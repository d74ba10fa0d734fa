"""A handful of the soak's faults on real processes; `python -m tests.soak` throws all of them."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[1]
KINDS = "kill_rank_in_checkpoint,rank_stopped,signal_rank,worker_killed,disk_full,nan"


@pytest.mark.slow
def test_a_handful_of_faults_end_in_the_same_weights(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.soak", "--tries", "6", "--seed", "7", "--kinds", KINDS],
        cwd=ROOT, env=os.environ | {"TMPDIR": str(tmp_path)}, capture_output=True, text=True,
        timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["equal"] == result["tries"] > 0 and not result["failures"]


def processes(mark: str) -> dict[int, tuple[int, str]]:
    """pid -> (parent, command line) of every process that has `mark` in its command line."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_text()
            if mark in line:
                fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
                found[int(folder.name)] = (int(fields[1]), line)
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["mpiexec", "torchrun"])
def test_a_launcher_returns_when_a_rank_with_full_pipes_is_killed(
    tmp_path: Path, launcher: str
) -> None:
    """Its workers hold the launcher's output and wait for room in their pipes; one is stopped."""
    from tests import soak

    soak.make_data(tmp_path)
    run = tmp_path / "run"
    bin_ = Path(sys.executable).parent
    start = {
        "mpiexec": [bin_ / "mpiexec", "-n", 2, sys.executable],
        "torchrun": [bin_ / "torchrun", "--nproc_per_node=2", f"--master_port={free_port()}"],
    }[launcher]
    # Batches of a quarter of a megabyte.
    sets = [
        f"data.dir={tmp_path}", f"run_dir={run}", "data.prefetch_batches=1", "phases.0.row_len=512",
        "phases.0.micro_batch_rows=16", "phases.0.rows_per_step=32", "phases.0.steps=100000",
    ]  # fmt: skip
    command = [*start, ROOT / "pretrain/run.py", "--config", tmp_path / "run.yaml", "--set", *sets]
    pipeline = shlex.join(map(str, command)) + " 2>&1 | cat"
    shell = subprocess.Popen(
        ["bash", "-c", pipeline], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=os.environ | {"MASTER_PORT": str(free_port()), "DS_ACCELERATOR": "cpu"},
    )  # fmt: skip
    try:
        end = time.monotonic() + 300
        metrics = run / "metrics.jsonl"
        while not metrics.exists() or metrics.read_bytes().count(b"\n") < 3:
            assert time.monotonic() < end and shell.poll() is None, "no third step"
            time.sleep(0.1)
        there = processes(str(run))
        # A forked process has its rank's command line.
        workers = {
            pid: rank
            for pid, (rank, line) in there.items()
            if rank in there and there[rank][1] == line
        }
        assert len(workers) == len(set(workers.values())) == 2, there
        worker, rank = workers.popitem()
        os.kill(worker, signal.SIGSTOP)
        os.kill(rank, signal.SIGKILL)
        shell.communicate(timeout=120)
        while processes(str(run)):
            assert time.monotonic() < end, "somebody stays"
            time.sleep(0.1)
    finally:
        for pid in processes(str(run)):
            os.kill(pid, signal.SIGKILL)
        shell.kill()
        shell.communicate()
