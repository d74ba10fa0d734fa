"""Precision, and the switches of torch that decide how sums are made, for the whole process."""

from __future__ import annotations

import os

import torch

from core.errors import UserError
from pretrain.engine_config import STAGE_0, EngineConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def set_switches(*, deterministic: bool) -> None:
    """Call before the first product on a GPU; cuBLAS reads its workspace's size once.

    Products of bf16 or fp16 tensors keep their partial sums in fp32. `deterministic`: the same
    inputs give the same bits again; an operation that cannot raises RuntimeError.
    """
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    if deterministic:
        # NVIDIA: cuBLAS repeats itself with a workspace of fixed size alone.
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(deterministic)
    # It would fill every new tensor with NaN, which shows errors and costs a pass over memory.
    torch.utils.deterministic.fill_uninitialized_memory = False


def resolve_precision(config: EngineConfig, device: torch.device) -> str:
    """fp32, bf16 or fp16: what `engine.precision` means on this device."""
    if config.precision != "auto":
        return config.precision
    if device.type != "cuda":
        return "fp32"
    found = "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    if config.zero_stage == 0:
        raise UserError(
            f"engine.zero_stage: 0 with precision auto, which is {found} on this GPU: {STAGE_0}"
        )
    return found
