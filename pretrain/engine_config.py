"""Keys of the engine: ZeRO, precision, clipping, and what may pass through to DeepSpeed.

Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from configs.load import Config
from core.errors import short

# Keys of DeepSpeed's JSON that the engine sets or that would undo what the tests promise.
_OWNED = {
    "train_batch_size": "phases.N.sequences_per_step",
    "train_micro_batch_size_per_gpu": "phases.N.micro_batch_rows",
    "gradient_accumulation_steps": "phases.N.micro_batch_rows (accumulation is derived)",
    "managed_gradient_accumulation": "nothing: the engine marks the last micro-step",
    "gradient_clipping": "engine.gradient_clipping",
    "optimizer": "optimizer.name",
    "scheduler": "phases.N.learning_rate and its neighbours",
    "zero_optimization.stage": "engine.zero_stage",
    "bf16.enabled": "engine.precision",
    "fp16.enabled": "engine.precision",
    "fp16.auto_cast": "engine.precision",
    "amp": "engine.precision",
    "torch_autocast": "engine.precision",
    "data_types": "engine.precision (gradients are accumulated in fp32)",
    "zero_allow_untested_optimizer": "nothing: the engine sets it",
    "zero_force_ds_cpu_optimizer": "nothing: the engine sets it",
    "tensorboard": "run_dir",
    "activation_checkpointing": "model.activation_checkpointing",
}
MONITORS = ("wandb", "csv_monitor", "comet")  # of DeepSpeed's own
_SECTIONS = {
    *("zero_optimization", "bf16", "fp16", "data_types", "checkpoint", "compile", "timers"),
    *("comms_logger", "aio", *MONITORS),
}
_REFUSED = {
    "zero_optimization.round_robin_gradients": "DeepSpeed then reports the pieces of tensors at "
    "the places they had before its reordering, and LAMB would mix up their norms",
    "zero_optimization.offload_param": "it belongs to ZeRO stage 3",
    "zero_optimization.zenflow": "it updates parts of a slice at other steps than the rest",
    "zero_optimization.elastic_checkpoint": "checkpoints are of this program's own format",
    "zero_optimization.load_from_fp32_weights": "a resume would lose the fp32 master weights",
    "zero_optimization.compute_grad_norm": "clipping and the overflow check need the norm",
    "prescale_gradients": "the loss is scaled for DeepSpeed's plain average over the ranks",
    "gradient_predivide_factor": "the loss is scaled for DeepSpeed's plain average over the ranks",
    "load_universal_checkpoint": "checkpoints are of this program's own format",
    "flops_profiler": "DeepSpeed does not look at its values before it needs them, in the midst of "
    "training; throughput/mfu counts the operations",
    "sparse_gradients": "LAMB needs the norm of the whole gradient",
    "bf16.bf16_master_weights_and_grads": "master weights are fp32",
    "bf16.bf16_optimizer_states": "optimiser states are fp32",
    "bf16.check_grad_overflow": "a non-finite gradient must skip the step",
    "bf16.immediate_grad_update": "gradients are accumulated once a micro-step",
    "fp16.fp16_master_weights_and_grads": "master weights are fp32",
}


STAGE_0 = (
    "DeepSpeed then sums bf16 gradients in bf16 and unscales fp16 gradients that it never scaled; "
    "use zero_stage 1 (the same update, also on one GPU), or precision fp32"
)


class EngineConfig(Config):
    """ZeRO, precision, clipping; anything else of DeepSpeed passes through `deepspeed`."""

    zero_stage: int = Field(
        1,
        ge=0,
        description="ZeRO: 0 none (fp32 only), 1 splits optimiser states, 2 gradients too",
    )
    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        "auto", description="auto: bf16 where the GPU has it, else fp16 on a GPU, fp32 on a CPU"
    )
    gradient_clipping: float = Field(
        1.0, ge=0, description="bound on the global gradient norm before the update; 0: none"
    )
    deterministic: bool = Field(
        False,
        description="kernels that add in one order only: a resume on a GPU is bitwise with this "
        "alone (flash attention's backward at 512 adds by atomics); price not measured",
    )
    max_skipped_steps: int = Field(
        20,
        ge=1,
        description="steps in a row with overflow or a non-finite loss that are too many: back to "
        "the last checkpoint, past their batches (checkpoint.max_rollbacks)",
    )
    trust_ratios_every: int = Field(
        100, ge=0, description="optimiser steps between reports of LAMB's trust ratios; 0: none"
    )
    deepspeed: dict[str, Any] = Field(
        default_factory=dict,
        description="more keys of DeepSpeed's JSON, such as zero_optimization.reduce_bucket_size; "
        "keys that this config owns are refused",
    )

    @model_validator(mode="after")
    def _is_supported(self) -> EngineConfig:
        if self.zero_stage > 2:
            raise ValueError(
                f"zero_stage: {self.zero_stage} is refused: stage 3 gathers the weights for every "
                "layer of every micro-step to save memory that BERT does not need (LARGE: 0.7 GB "
                "of bf16 weights a rank at stage 1 or 2); use 1 or 2"
            )
        if self.zero_stage == 0 and self.precision not in ("auto", "fp32"):
            raise ValueError(f"zero_stage: 0 with precision {self.precision} is refused: {STAGE_0}")
        for key in _SECTIONS & set(self.deepspeed):
            if not isinstance(self.deepspeed[key], Mapping):
                raise ValueError(f"deepspeed.{key}: is a section of keys, not one value")
        zero = self.deepspeed.get("zero_optimization", {})
        numbers = {"zero_optimization.reduce_bucket_size": zero.get("reduce_bucket_size", 1)}
        if self.deepspeed.get("steps_per_print") is not None:  # null: DeepSpeed prints none
            numbers["steps_per_print"] = self.deepspeed["steps_per_print"]
        for key, value in numbers.items():
            number = isinstance(value, int | float) and not isinstance(value, bool) and value >= 1
            if not number:
                raise ValueError(
                    f"deepspeed.{key}: a number of 1 or more is expected, given "
                    f"{short(repr(value))}"
                )
        for key in _flat_keys(self.deepspeed):
            for owned, instead in _OWNED.items():
                if key == owned or key.startswith(owned + "."):
                    raise ValueError(f"deepspeed.{key}: is set by {instead}, not here")
            for refused, reason in _REFUSED.items():
                if key == refused or key.startswith(refused + "."):
                    raise ValueError(f"deepspeed.{key}: is refused: {reason}")
        if self.zero_stage == 0 and "zero_optimization" in self.deepspeed:
            raise ValueError("deepspeed.zero_optimization: has no effect at zero_stage 0")
        return self


def _flat_keys(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat_keys(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"
