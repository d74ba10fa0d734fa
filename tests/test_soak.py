"""A handful of the soak's faults on real processes; `python -m tests.soak` throws all of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

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
