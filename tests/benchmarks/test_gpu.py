"""`make gpu` without a GPU: it says so, all of its code runs, and a stage that fails is a line."""

from __future__ import annotations

import json
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu


def result(arguments: list[str], capsys: Any) -> tuple[int, dict[str, Any]]:
    gpu.STARTED = time.monotonic()  # its time is counted from the import
    code = gpu.main(["--device=cpu", "--tiny", *arguments])
    last = capsys.readouterr().out.splitlines()[-1]
    return code, json.loads(last)["detail"]


def test_what_torch_says_of_its_looking_for_waits_ends_no_gpu_test() -> None:
    # Once a process, by torch/csrc/cuda/Module.cpp, THCPModule_cudaSetSyncDebugMode.
    said = "Synchronization debug mode is a prototype feature and does not yet detect all "
    warnings.warn(f"{said}synchronizing operations", stacklevel=1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_one_line(capsys: Any) -> None:
    assert gpu.main([]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("no GPU here")


@pytest.mark.slow
def test_every_stage_runs_on_a_tiny_model(tmp_path: Path, capsys: Any) -> None:
    code, found = result([f"--out={tmp_path}"], capsys)
    assert {name: stage["state"] for name, stage in found.items()} == dict.fromkeys(
        gpu.STAGES, "ok"
    )
    assert code == 0
    page = (tmp_path / "gpu.md").read_text()
    for name, stage in found.items():
        assert stage["rows"] and f"## {name}: ok" in page
        assert not any("note" in row for row in stage["rows"]), name
    cases = {row["case"]: row for row in found["step"]["rows"]}
    assert list(cases) == ["128 compiled", "512 compiled", "128 eager", "512 eager"]
    # No data sheet has a CPU's peak, and no allocator counts its memory.
    assert all(row["step ms"] > 0 and row["MFU"] is row["GB"] is None for row in cases.values())
    said = {row["what"]: row["value"] for row in found["run"]["rows"]}
    assert (said["first: exit code"], said["resumed: exit code"]) == (85, 0)
    assert "resumed from" in said["resumed: said"]


@pytest.mark.slow
def test_a_stage_that_fails_is_late_or_lacks_a_package_is_a_line(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = {"lamb": {"limit": 0.5}, "hf": {"needs": ("no_such_package",)}}
    for name, change in limits.items():
        monkeypatch.setitem(gpu.STAGES, name, replace(gpu.STAGES[name], **change))
    data = tmp_path / "data"
    data.mkdir()
    wanted = [f"--out={tmp_path}", f"--data={data}", "--only=env,kernels,hf,lamb"]
    code, found = result(wanted, capsys)
    assert code == 1
    assert found["env"]["state"] == "ok"
    state = found["kernels"]["state"]
    assert state.startswith("failed: ") and str(data) in state and "\n" not in state
    assert found["hf"]["state"] == "not run: no_such_package not installed"
    assert found["lamb"]["state"].startswith("late")
