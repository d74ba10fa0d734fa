"""Exact beside naive LAMB: real runs of a few steps on two processes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import lamb_loss
from tests.benchmarks.test_pretrain_vs_hf import CONFIG
from tests.datasets import given_to_benchmark


@pytest.mark.slow
def test_the_kinds_differ_by_their_ratios_alone_and_are_not_run_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    command = ["lamb_loss.py", *given_to_benchmark(tmp_path, CONFIG), "--processes", "2"]
    command += ["--seeds", "3"]
    # Without decay every ratio is 1, so the two are one.
    for bounds, alike in ((["optimizer.weight_decay=0"], True), ([], False)):
        folder = tmp_path / str(alike)
        command[4] = str(folder)
        monkeypatch.setattr(sys, "argv", [*command, "--set", "phases.0.steps=6", *bounds])
        lamb_loss.main()
        last = capfd.readouterr().out.splitlines()[-1]
        found = json.loads(last)["heldout"]
        assert (found["exact"]["2"]["3"] == found["naive"]["2"]["3"]) == alike
    monkeypatch.setattr(lamb_loss.subprocess, "run", lambda *_, **__: pytest.fail("run again"))
    lamb_loss.main()
    assert capfd.readouterr().out.splitlines()[-1] == last


def test_the_launcher_of_a_run_ends_with_it(tmp_path: Path) -> None:
    """SIGTERM reaches what stands for torchrun; the pipe ends with the last of both."""
    launcher = tmp_path / "python"
    launcher.write_text(
        f"#!{sys.executable}\nimport signal\nprint(1, flush=True)\nsignal.pause()\n"
    )
    launcher.chmod(0o755)
    main = f"import sys; from benchmarks import lamb_loss; sys.executable = {str(launcher)!r}"
    command = [sys.executable, "-c", f"{main}; lamb_loss.main()", "--data", "x", "--out", tmp_path]
    root = lamb_loss.ROOT
    process = subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"1\n"
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGTERM
