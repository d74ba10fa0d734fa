"""`make demo` goes on to the export when the training has ended, whatever its launcher says."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("before", [True, False])  # with fewer steps
@pytest.mark.parametrize("finished", [True, False])
def test_an_exit_code_of_0_is_not_taken_for_the_end(
    tmp_path: Path, finished: bool, before: bool
) -> None:
    # `deepspeed` exits with 0 when its own launcher is killed.
    run, log = tmp_path / "run", tmp_path / "log"
    run.mkdir()
    if before:
        (run / "FINISHED").write_text("5\n")
    end = f"echo 10 > {run}/FINISHED" if finished else "true"
    for name, text in {
        "activate": f"PATH={tmp_path}:$PATH",
        "python": f'#!/bin/sh\necho "$*" >> {log}',
        "deepspeed": f"#!/bin/sh\n{end}",
    }.items():
        (tmp_path / name).write_text(text + "\n")
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(
        ["make", "--old-file=.venv/.demo", "demo", f"BIN={tmp_path}", f"DEMO_RUN={run}"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    commands = [line.split()[2] for line in log.read_text().splitlines()]
    if finished:
        assert (done.returncode, commands) == (0, ["prepare", "export", "report"]), done.stderr
    else:
        assert done.returncode != 0 and commands == ["prepare"]
        assert "the training has not ended" in done.stdout
