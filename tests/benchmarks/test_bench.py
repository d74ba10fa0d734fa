"""`make bench` is one command: what it starts needs no arguments."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_benchmark_that_make_starts_needs_no_arguments() -> None:
    made = subprocess.run(["make", "-n", "bench"], cwd=ROOT, capture_output=True, text=True)
    scripts = re.findall(r"benchmarks/\w+\.py", made.stdout)
    asks = {
        path.name
        for path in (ROOT / "benchmarks").glob("*.py")
        if re.search(r"required=True|import .*\bparser\b", path.read_text())
    }
    asks |= {p.name for p in (ROOT / "benchmarks").glob("*.py") if "__main__" not in p.read_text()}
    assert scripts and not asks & {Path(script).name for script in scripts}
    assert asks | {Path(script).name for script in scripts} == {
        path.name for path in (ROOT / "benchmarks").glob("*.py")
    }
