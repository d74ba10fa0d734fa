"""The scripts for arrays on a real Slurm: shared jobs, stop and requeue, one report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from configs.load import dump
from pretrain.run_state import finished_steps
from tests.finetune.test_train import config, make_files
from tests.pretrain.test_sweep import make_runs
from tests.slurm.cluster import Cluster, why_not

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(why_not() is not None, reason=f"no Slurm cluster here: {why_not()}"),
]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("slurm")) as running:
        yield running


def test_array_stop_requeue_and_report(cluster, tmp_path) -> None:
    make_files(tmp_path)
    run = tmp_path / "run"
    settings = config(tmp_path, run, grid_={"seeds": [0, 1, 2], "epochs": [1]})
    path = tmp_path / "glue.yaml"
    path.write_text(dump(settings))
    array = cluster.sbatch(
        "--array=0-1", "--gpus=0", "--cpus-per-task=1", "--time=10", f"--chdir={ROOT}",
        f"--output={tmp_path}/%a.log",
        f"--export=ALL,CONFIG={path},VENV={Path(sys.executable).parents[1]},"
        "SETTINGS=grid.epochs=[400]",
        str(ROOT / "slurm/finetune_glue.sh"),
    )  # fmt: skip

    deadline = time.monotonic() + 150
    while not list(run.rglob("metrics.jsonl")):
        assert time.monotonic() < deadline, _logs(tmp_path)
        time.sleep(0.2)
    # The array's id is this task's own id as well.
    cluster.run("scancel", "--signal=USR1", "--batch", f"{array}_1")
    while "requeue:" not in _logs(tmp_path):
        assert time.monotonic() < deadline, _logs(tmp_path)
        time.sleep(0.2)

    for task in ("0", "1"):
        assert cluster.wait(f"{array}_{task}", 400) == "COMPLETED", _logs(tmp_path)
    assert "start 2" not in (tmp_path / "0.log").read_text()
    results = [json.loads(p.read_text()) for p in run.glob("SST-2/*/result.json")]
    assert sorted(r["seed"] for r in results) == [0, 1, 2]
    assert all(r["steps"] == 1200 for r in results)
    # The last task to end reports for all.
    assert (run / "report.md").read_text().count("SST-2") == 1
    assert (run / "submission/SST-2.tsv").read_text().startswith("index\tprediction\n0\t")


def test_pretraining_runs_are_shared_by_the_tasks_of_an_array(cluster, tmp_path) -> None:
    files = make_runs(tmp_path, {"a": "", "b": "seed: 3", "c": "seed: 4"})
    array = cluster.sbatch(
        "--array=0-1", "--gpus=0", "--cpus-per-task=1", "--time=10", f"--chdir={ROOT}",
        f"--output={tmp_path}/%a.log",
        f"--export=ALL,CONFIGS={' '.join(files)},VENV={Path(sys.executable).parents[1]}",
        str(ROOT / "slurm/pretrain_sweep.sh"),
    )  # fmt: skip
    for task in ("0", "1"):
        assert cluster.wait(f"{array}_{task}", 400) == "COMPLETED", _logs(tmp_path)
    assert [finished_steps(tmp_path / f"runs/{name}") for name in "abc"] == [2, 2, 2]
    assert _logs(tmp_path).count("sweep: ") == 3


@pytest.mark.parametrize(
    ("script", "command"),
    [
        ("finetune_glue.sh", "finetune/run.py --config c.yaml --set seed=1 device=cpu"),
        ("pretrain_sweep.sh", "-m pretrain sweep a.yaml b.yaml --set seed=1 device=cpu"),
    ],
)
def test_dry_run_prints_the_exact_command(script: str, command: str) -> None:
    variables = {
        "CONFIG": "c.yaml", "CONFIGS": "a.yaml b.yaml", "SETTINGS": "seed=1 device=cpu"
    }  # fmt: skip
    done = subprocess.run(
        ["bash", str(ROOT / f"slurm/{script}"), "--dry-run"],
        env=os.environ | variables, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert command in done.stdout


def _logs(folder: Path) -> str:
    texts = [p.read_text() for p in sorted(folder.glob("*.log"))]
    return "\n".join(texts) + os.linesep
