"""Benchmarks run on what everybody has: a small data set, or nothing at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.datasets import write_dataset

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.slow


def result(script: str, *arguments: str) -> dict[str, Any]:
    """The last line of a benchmark."""
    done = subprocess.run(
        [sys.executable, f"benchmarks/{script}.py", *arguments],
        cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_stream_of_less_than_a_step(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    documents = [
        [rng.integers(5, 200, rng.integers(3, 30)).tolist() for _ in range(40)] for _ in range(300)
    ]
    write_dataset(tmp_path, documents, vocab=200)
    found = result("stream", "--dir", str(tmp_path), "--seconds", "0.2")
    rates = [found["detail"][phase]["tokens_per_second"] for phase in ("128", "512")]
    assert all(rate["ours"] > 0 for rate in rates)
    assert {"hf_collator", "original_procedure"} == found["ratio"].keys()


def test_scores_without_arguments_are_equal_and_learned() -> None:
    found = result("finetune_scores_vs_hf")
    assert found["difference"] == {"SST-2": 0}
    assert found["detail"]["SST-2"]["failed"] == {"ours": 0, "hf": 0, "random": 0}
