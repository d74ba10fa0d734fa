"""slurm/finetune_glue.sh on a real Slurm: array, stop and requeue, collecting job."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from configs.load import dump
from tests.finetune.test_train import config, make_files
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
    settings = config(tmp_path, run, grid_={"seeds": [0, 1, 2], "epochs": [400]})
    path = tmp_path / "glue.yaml"
    path.write_text(dump(settings))
    environment = cluster.environment | {
        "FINETUNE_GPUS": "0",
        "SBATCH_ARGS": f"--output={tmp_path}/%x-%A_%a.log",
    }
    started = subprocess.run(
        ["slurm/finetune_glue.sh", "-n", "2", "-c", str(path)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=90,
    )  # fmt: skip
    assert started.returncode == 0, started.stderr
    words = started.stdout.split()
    array, last = words[1], words[words.index("report") + 1].rstrip(";")

    deadline = time.monotonic() + 150
    while not list(run.rglob("metrics.jsonl")):
        assert time.monotonic() < deadline, _logs(tmp_path)
        time.sleep(0.2)
    cluster.run("scancel", "--signal=USR1", "--batch", f"{array}_0")
    while "requeued" not in _logs(tmp_path):
        assert time.monotonic() < deadline, _logs(tmp_path)
        time.sleep(0.2)

    assert cluster.wait(last, 400) == "COMPLETED", _logs(tmp_path)
    results = [json.loads(p.read_text()) for p in run.glob("SST-2/*/result.json")]
    assert sorted(r["seed"] for r in results) == [0, 1, 2]
    assert all(r["steps"] == 1200 for r in results)
    assert (run / "report.md").read_text().count("SST-2") == 1
    assert (run / "submission/SST-2.tsv").read_text().startswith("index\tprediction\n0\t")


def _logs(folder: Path) -> str:
    texts = [p.read_text() for p in sorted(folder.glob("*.log"))]
    return "\n".join(texts) + os.linesep
