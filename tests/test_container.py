"""The image's entry, as the first process of a namespace, which is what a container makes of it, or
below an init."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import termios
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
# As `docker run --init`: a signal goes to the one child, whose end ends the namespace.
INIT = """
import os, signal, subprocess, sys
child = subprocess.Popen(sys.argv[1:])
signal.signal(signal.SIGTERM, lambda number, _: child.send_signal(number))
code = child.wait()
os._exit(code if code >= 0 else 128 - code)
"""
BELOW_INIT = [*NAMESPACE, sys.executable, "-c", INIT, *ENTRY[len(NAMESPACE) :]]
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
done.with_suffix(".begun").write_text("begun")
time.sleep(60)
'''
subprocess.Popen([sys.executable, "-c", rank, done])
time.sleep(60)
"""


def stopped(command: list[str], begun: Path, container: list[str] = ENTRY) -> int:
    """The exit code of the container that is told to stop when something stands in `begun`."""
    env = os.environ | {"DS_ACCELERATOR": "cpu", "PATH": f"{BIN}:{os.environ['PATH']}"}
    with subprocess.Popen([*container, *command], env=env, stdout=subprocess.DEVNULL) as process:
        try:
            end = time.monotonic() + 120
            while not (begun.exists() and begun.stat().st_size):
                assert time.monotonic() < end and process.poll() is None
                time.sleep(0.05)
            (first,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            os.kill(int(first), signal.SIGTERM)
            return process.wait(120)
        finally:
            process.kill()


@pytest.mark.parametrize("container", [ENTRY, BELOW_INIT])
def test_what_a_launcher_leaves_has_its_time(tmp_path: Path, container: list[str]) -> None:
    done = tmp_path / "done"
    command = [sys.executable, "-c", LAUNCHER, str(done)]
    code = stopped(command, tmp_path / "done.begun", container)
    assert (code, done.read_text()) == (128 + signal.SIGTERM, "checkpoint")


def test_ranks_are_waited_for_whatever_their_launcher_returns(tmp_path: Path) -> None:
    done = tmp_path / "done"
    rank = f"(sleep 1; echo checkpoint > {done})"
    for variable in ("RANK=1", "PMI_RANK=0"):
        command = ["sh", "-c", f"{variable} sh -c '{rank}' & sleep 600 & sleep 0.5; exit 0"]
        assert subprocess.run([*ENTRY, *command], timeout=60).returncode == 0
        assert done.read_text() == "checkpoint\n"
        done.unlink()


@pytest.mark.parametrize("to_the_entry", [True, False])
def test_an_interrupt_comes_once_by_the_terminal_or_by_a_signal(
    tmp_path: Path, to_the_entry: bool
) -> None:
    heard = tmp_path / "heard"
    listens = (
        "import pathlib, signal, sys, time; heard = pathlib.Path(sys.argv[1]); times = []\n"
        "signal.signal(signal.SIGINT, lambda *_: times.append(1))\n"
        "heard.with_suffix('.begun').touch()\n"
        "while not times: time.sleep(0.05)\n"
        "time.sleep(0.5); heard.write_text(str(len(times))); sys.exit(85)"
    )
    master, terminal = os.openpty()

    def own() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    command = [*ENTRY, sys.executable, "-c", listens, str(heard)]
    with subprocess.Popen(
        command, stdin=terminal, start_new_session=True, preexec_fn=own
    ) as process:
        try:
            end = time.monotonic() + 60
            while not heard.with_suffix(".begun").exists():
                assert time.monotonic() < end and process.poll() is None
                time.sleep(0.05)
            if to_the_entry:
                below = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
                os.kill(int(below), signal.SIGINT)
            else:
                os.write(master, b"\x03")
            assert process.wait(60) == 85 and heard.read_text() == "1"
        finally:
            process.kill()
            os.close(master)
            os.close(terminal)


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (["sh", "-c", "sleep 600 & exit 7"], 7),
        (["true"], 0),
        (["sh", "-c", "kill -9 $$"], 137),
        (["/there/is/none"], 127),
        (["/etc"], 127),
        ([], 2),
    ],
)
def test_the_code_is_the_commands(command: list[str], code: int) -> None:
    for container in (ENTRY, BELOW_INIT):
        done = subprocess.run([*container, *command], stderr=subprocess.PIPE, text=True, timeout=60)
        assert done.returncode == code and "Traceback" not in done.stderr


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
