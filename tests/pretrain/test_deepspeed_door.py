from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from core.errors import UserError
from pretrain.deepspeed_door import PATCHES, apply
from pretrain.distributed import TIMEOUT
from tests import gloo
from tests.pretrain import engine_cases

TESTS = Path(__file__).parent


@pytest.mark.parametrize("target", ["gone", "DeepSpeedEngine.gone", "Gone.step"])
def test_a_patch_without_its_target_is_one_line(target: str) -> None:
    patch = dataclasses.replace(PATCHES[0], target=f"deepspeed.runtime.engine:{target}")
    with pytest.raises(UserError, match=rf"^deepspeed \S+ has no .*{target}, .* 0\.19\.8$"):
        apply(patch)


def test_every_patch_names_a_test() -> None:
    for patch in PATCHES:
        file, _, name = patch.test.partition("::")
        assert f"def {name}(" in (TESTS / file).read_text(), patch.test


def test_patches_are_in_place_and_say_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """A warning of DeepSpeed goes to standard error; the two that are meant go nowhere. Its group
    waits as long as the run's."""
    out, err, timeouts = gloo.run(1, engine_cases.spoken)[0]
    assert out == "" and err.count("something else") == 1
    assert timeouts and set(timeouts) == {TIMEOUT}
    assert "OVERFLOW" not in err and "untested optimizer" not in err


@pytest.mark.parametrize("deterministic", [False, True])
def test_switches(deterministic: bool) -> None:
    """In a process of its own, since they are the process's."""
    code = (
        "import os, torch; from pretrain import numerics\n"
        f"numerics.set_switches(deterministic={deterministic})\n"
        "matmul = torch.backends.cuda.matmul\n"
        "print(torch.are_deterministic_algorithms_enabled(),\n"
        "    torch.is_deterministic_algorithms_warn_only_enabled(),\n"
        "    os.environ.get('CUBLAS_WORKSPACE_CONFIG'),\n"
        "    torch.utils.deterministic.fill_uninitialized_memory,\n"
        "    matmul.allow_bf16_reduced_precision_reduction,\n"
        "    matmul.allow_fp16_reduced_precision_reduction, torch.cuda.is_initialized())\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "CUBLAS_WORKSPACE_CONFIG"}
    printed = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    ).stdout.split()
    workspace = ":4096:8" if deterministic else "None"
    assert printed == [str(deterministic), "False", workspace, "False", "False", "False", "False"]


def test_a_step_runs_under_deterministic_algorithms() -> None:
    same, switched = gloo.run(1, engine_cases.deterministic_steps)[0]
    assert same and switched
