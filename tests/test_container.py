"""The image's entry, as the first process of a namespace, which is what a container makes of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pretrain.checkpoint import newest_checkpoint
from tests.datasets import write_dataset
from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
NAMESPACE = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
ENTRY = [*NAMESPACE, sys.executable, str(ROOT / "containers/entry.py")]
CAN = subprocess.run([*NAMESPACE, "true"], capture_output=True).returncode == 0
pytestmark = pytest.mark.skipif(not CAN, reason="needs a PID namespace of its own: root")

# A launcher that TERM ends at once, and the rank that it leaves.
LAUNCHER = """
import pathlib, signal, subprocess, sys, time
done = pathlib.Path(sys.argv[1])
rank = '''
import pathlib, signal, sys, time
done = pathlib.Path(sys.argv[1])
def write(*_):
    time.sleep(0.5)
    done.write_text("checkpoint")
    sys.exit(85)
signal.signal(signal.SIGTERM, write)
done.with_suffix(".begun").touch()
time.sleep(60)
'''
subprocess.Popen([sys.executable, "-c", rank, done])
time.sleep(60)
"""


def stopped(command: list[str], begun: Path) -> int:
    """The exit code of the container that is told to stop when `begun` is there."""
    env = os.environ | {"DS_ACCELERATOR": "cpu", "PATH": f"{BIN}:{os.environ['PATH']}"}
    with subprocess.Popen([*ENTRY, *command], env=env, stdout=subprocess.DEVNULL) as process:
        try:
            end = time.monotonic() + 120
            while not begun.exists():
                assert time.monotonic() < end and process.poll() is None
                time.sleep(0.05)
            (first,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            os.kill(int(first), signal.SIGTERM)
            return process.wait(120)
        finally:
            process.kill()


def test_what_a_launcher_leaves_has_its_time(tmp_path: Path) -> None:
    done = tmp_path / "done"
    code = stopped([sys.executable, "-c", LAUNCHER, str(done)], tmp_path / "done.begun")
    assert (code, done.read_text()) == (128 + signal.SIGTERM, "checkpoint")


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (["sh", "-c", "sleep 600 & exit 7"], 7),
        (["true"], 0),
        (["sh", "-c", "kill -9 $$"], 137),
        (["/there/is/none"], 127),
    ],
)
def test_the_code_is_the_commands(command: list[str], code: int) -> None:
    assert subprocess.run([*ENTRY, *command], timeout=60).returncode == code


@pytest.mark.slow
def test_a_stop_ends_in_a_checkpoint(tmp_path: Path) -> None:
    write_dataset(tmp_path / "data", [[[5, 6, 7, 8], [9, 5, 6]]] * 8)
    run = tmp_path / "run"
    settings = {
        "run_dir": run, "data.dir": tmp_path / "data", "data.workers": 0, "model.hidden_size": 64,
        "checkpoint.every_steps": 90_000, "evaluation.every_steps": 0, "logging.every_steps": 1,
        "phases.0.steps": 100_000,
    }  # fmt: skip
    port = f"--master_port={free_port()}"
    code = stopped(
        ["deepspeed", "--log_level=error", "--num_gpus=2", port, str(ROOT / "pretrain/run.py")]
        + ["--config", str(ROOT / "configs/pretrain_demo.yaml"), "--set"]
        + [f"{key}={value}" for key, value in settings.items()],
        run / "metrics.jsonl",
    )
    assert code == 128 + signal.SIGTERM and newest_checkpoint(run / "checkpoints") is not None
