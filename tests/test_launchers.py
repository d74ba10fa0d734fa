"""What launchers return is what docs/running.md says; of srun in tests/slurm/test_slurm.py."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ports import free_port
from tests.test_soak import processes

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
# Each rank ends as its argument says: with that code, by SIGKILL, or after a minute, or as a run
# does at a signal.
RANK = """
import os, pathlib, signal, sys, time
names = ("RANK", "PMI_RANK", "SLURM_PROCID")
rank = next((int(os.environ[name]) for name in names if name in os.environ), 0)
end = sys.argv[rank - 2]
if end == "waits":
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, lambda *_: os._exit(85))
    pathlib.Path(f"{sys.argv[0]}-{rank}").touch()
    time.sleep(60)
if end == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
os._exit(int(end))
"""


SIGNALS = {  # rows of the table
    "launcher ended by TERM": signal.SIGTERM,
    "launcher ended by HUP (without nohup)": signal.SIGHUP,
    "launcher ended by USR1": signal.SIGUSR1,
}


def table() -> dict[str, list[str]]:
    """Cells of the launchers by the first of their row."""
    text = (ROOT / "docs/running.md").read_text()
    (rows,) = re.findall(r"^\| the ranks end with \|.*\n(?:\|.*\n)+", text, re.MULTILINE)
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows.splitlines()]
    return {first.strip("`"): more for first, *more in cells}


RUN, DOCTOR = [str(ROOT / "pretrain/run.py")], ["-m", "pretrain", "doctor"]
INSTALL, TERM = "install the project first", "import signal; signal.raise_signal(15)"


@pytest.mark.parametrize(
    ("command", "code", "said", "alone", "source"),
    [
        (RUN, 2, "error: none: ", "there=none", ""),
        (RUN, 2, "error: the current folder was removed", "mkdir $0 && cd $0 && rmdir $0", ""),
        (RUN, 1, "ImportError: libffi", "_ctypes", "raise ImportError('libffi')"),
        (RUN, 1, f"error: lost: {INSTALL}", "psutil", "raise ModuleNotFoundError('lost')"),
        (RUN, 1, "OSError: lost", "pydantic", "raise OSError('lost')"),
        (RUN, 85, "SIGTERM: stopped in the start", "psutil", TERM),
        (DOCTOR, 2, f"error: lost: {INSTALL}", "torch", "raise ModuleNotFoundError('lost')"),
        (DOCTOR, 1, "OSError: lost", "torch", "raise OSError('lost')"),
    ],
    ids="config folder libffi module library TERM doctor-torch doctor-library".split(),
)
def test_mpiexec_returns_the_code_of_a_rank_that_leaves_before_the_others_meet_it(
    tmp_path: Path, command: list[str], code: int, said: str, alone: str, source: str
) -> None:
    """Of such a rank it takes no notice by itself, and the other waits for half an hour.

    alone: what its shell does, or the name of a module that it finds first."""
    own = tmp_path / "own"
    if source:
        own.mkdir()
        (own / f"{alone}.py").write_text(source)
        alone = "export PYTHONPATH=$0"
    there = f"{ROOT}/configs/pretrain_demo.yaml"
    one = f'there={there}; [ $PMI_RANK = 0 ] || {{ {alone}; }}; exec "$@" --config $there'
    done = subprocess.run(
        [
            BIN / "mpiexec", "-n", "2", "bash", "-c", one, own, sys.executable, *command,
            "--set", f"run_dir={tmp_path}/run",
        ],
        env=os.environ | {"MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE, text=True, timeout=120, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == code and said in done.stderr, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["python", "mpiexec", "deepspeed", "torchrun"])
def test_launchers_return_what_the_table_says(tmp_path: Path, launcher: str) -> None:
    script = tmp_path / "rank.py"
    script.write_text(RANK)

    def code(
        *ends: str,
        meanwhile: Callable[[subprocess.Popen], None] | None = None,
        interrupt: signal.Handlers = signal.SIG_DFL,
    ) -> str:
        command = {
            "python": [sys.executable],
            "mpiexec": [BIN / "mpiexec", "-n", "2", sys.executable],
            "deepspeed": [
                BIN / "deepspeed", "--log_level=error", "--num_gpus=2",
                f"--master_port={free_port()}",
            ],
            "torchrun": [
                BIN / "torchrun", "--nproc_per_node=2", f"--master_port={free_port()}"
            ],
        }[launcher]  # fmt: skip
        process = subprocess.Popen(
            [*command, script, *ends], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            env=os.environ | {"DS_ACCELERATOR": "cpu", "PATH": f"{BIN}:{os.environ['PATH']}"},
            start_new_session=True,
            preexec_fn=lambda: (
                signal.signal(signal.SIGINT, interrupt),
                signal.signal(signal.SIGHUP, signal.SIG_DFL),  # ignored under nohup
            ),
        )  # fmt: skip
        try:
            if meanwhile is not None:
                end = time.monotonic() + 120
                while len(list(tmp_path.glob("rank.py-*"))) < (1 if launcher == "python" else 2):
                    assert time.monotonic() < end and process.poll() is None
                    time.sleep(0.05)
                meanwhile(process)
            found = process.wait(120)
        finally:
            process.kill()
            for pid in processes(str(script)):
                os.kill(pid, signal.SIGKILL)
            for mark in tmp_path.glob("rank.py-*"):
                mark.unlink()
        return str(found if found >= 0 else 128 - found)

    def kill_what_stands_below(process: subprocess.Popen) -> None:
        ((pid, _),) = (
            found for found in processes(str(script)).items() if found[1][0] == process.pid
        )
        os.kill(pid, signal.SIGKILL)

    def ctrl_c(process: subprocess.Popen) -> None:
        os.killpg(process.pid, signal.SIGINT)

    rows = table()
    place = rows["the ranks end with"].index(f"`{launcher}`")
    said = {first: cells[place] for first, cells in rows.items()}
    assert code("0", "0") == said["0"]
    for end in ("2", "85", "130"):
        assert code(end, end) == said["2, 85 or 130"].replace("the same", end)
    one_killed = re.findall(r"\d+", said["one killed (`kill -9`), the others 85"])
    for ends in (("killed", "85"), ("85", "killed"))[: 1 if launcher == "python" else 2]:
        assert code(*ends) in one_killed
    found = [code("waits", "waits", meanwhile=ctrl_c)]
    if launcher == "deepspeed":  # a `&` of a script ignores SIGINT
        found.append(code("waits", "waits", meanwhile=ctrl_c, interrupt=signal.SIG_IGN))
    assert found == re.findall(r"\d+", said["Ctrl-C"])
    for row, number in SIGNALS.items():
        if launcher != "python":
            ended = code("waits", "waits", meanwhile=lambda p, n=number: p.send_signal(n))
            assert ended == said[row], row
    if by_kill := said["launcher killed by KILL"]:
        found = [code("waits", "waits", meanwhile=subprocess.Popen.kill)]
        if launcher == "deepspeed":
            found.append(code("waits", "waits", meanwhile=kill_what_stands_below))
        assert found == re.findall(r"\d+", by_kill)
