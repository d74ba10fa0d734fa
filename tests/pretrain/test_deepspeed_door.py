from __future__ import annotations

import dataclasses
import multiprocessing as mp
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from core.errors import UserError
from pretrain import numerics
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


def test_patches_are_in_place_and_say_nothing() -> None:
    """A warning of DeepSpeed goes to standard error; the two that are meant go nowhere. Its group
    waits as long as the run's. What compiles is loaded by those who compile."""
    spawn = mp.get_context("spawn")
    out, err, timeouts, compiler_loaded = gloo.run(1, engine_cases.spoken, context=spawn)[0]
    assert out == "" and err.count("something else") == 1
    assert not compiler_loaded
    assert timeouts and set(timeouts) == {TIMEOUT}
    assert "OVERFLOW" not in err and "untested optimizer" not in err


def switches(rank: int, size: int, deterministic: bool) -> list[Any]:
    """In a process of its own, since they are the process's."""
    numerics.set_switches(deterministic=deterministic)
    matmul = torch.backends.cuda.matmul
    return [
        torch.are_deterministic_algorithms_enabled(),
        os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
        matmul.allow_bf16_reduced_precision_reduction,
        matmul.allow_fp16_reduced_precision_reduction,
        torch.cuda.is_initialized(),
    ]


@pytest.mark.parametrize("deterministic, workspace", [(False, None), (True, ":4096:8")])
def test_switches(
    deterministic: bool, workspace: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    (found,) = gloo.run(1, switches, deterministic)
    assert found == [deterministic, workspace] + [False] * 5


def test_a_step_runs_under_deterministic_algorithms() -> None:
    same, switched = gloo.run(1, engine_cases.deterministic_steps)[0]
    assert same and switched
