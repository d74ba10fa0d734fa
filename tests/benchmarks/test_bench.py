"""`make bench` is one command: what it starts needs no arguments."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_every_benchmark_that_make_starts_needs_no_arguments() -> None:
    made = subprocess.run(["make", "-n", "bench"], cwd=ROOT, capture_output=True, text=True)
    scripts = re.findall(r"benchmarks/\w+\.py", made.stdout)
    asks = {
        path.name
        for path in (ROOT / "benchmarks").glob("*.py")
        if re.search(r"required=True|import .*\bparser\b|a stage of another", path.read_text())
    }
    assert scripts and not asks & {Path(script).name for script in scripts}
    assert asks | {Path(script).name for script in scripts} == {
        path.name for path in (ROOT / "benchmarks").glob("*.py")
    }


def test_every_benchmark_finds_the_program_in_a_checkout_that_is_not_installed() -> None:
    own = "|".join(p.parent.name for p in ROOT.glob("*/__init__.py")) + "|benchmarks|configs"
    for path in (ROOT / "benchmarks").glob("*.py"):
        first, *imports = re.split(rf"^ *from (?:{own})\b", path.read_text(), flags=re.MULTILINE)
        assert not imports or "sys.path.insert(0, " in first, path


@pytest.mark.parametrize(
    "line",
    [
        "wikitext --dump none",
        "pretrain_vs_hf --data none --out OUT --config none",
        "prepare --wiki OUT/wiki --vocab OUT/vocab.txt",
        "scale --paper --config none",
    ],
)
def test_a_benchmark_of_what_is_not_there_is_one_line(tmp_path: Path, line: str) -> None:
    (tmp_path / "wiki").mkdir()
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\n")
    script, *arguments = line.replace("OUT", str(tmp_path)).split()
    command = [sys.executable, ROOT / f"benchmarks/{script}.py", *arguments]
    made = subprocess.run(command, capture_output=True, text=True)
    assert made.returncode == 2 and "Traceback" not in made.stderr, made.stderr
    assert made.stderr.splitlines()[-1].startswith("error: ")
