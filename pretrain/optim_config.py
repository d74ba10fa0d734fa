"""Keys of the optimiser. Imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from configs.load import Config


class OptimizerConfig(Config):
    """Which optimiser and its constants; the rate itself comes from the schedule each step."""

    name: Literal["lamb", "adamw"] = Field("lamb", description="the update rule")
    beta1: float = Field(0.9, ge=0, lt=1, description="decay of the mean of gradients")
    beta2: float = Field(0.999, ge=0, lt=1, description="decay of the mean of squared gradients")
    eps: float = Field(1e-6, gt=0, description="added to the root of the second moment")
    weight_decay: float = Field(
        0.01, ge=0, description="decay of matrices and embeddings; biases and LayerNorms have none"
    )
    trust_ratio_min: float | None = Field(
        None, ge=0, description="lower clamp of LAMB's trust ratio; null: none"
    )
    trust_ratio_max: float | None = Field(
        None, gt=0, description="upper clamp of LAMB's trust ratio; null: none"
    )

    restart_bias_correction: bool = Field(
        True,
        description="count the steps of bias correction from 0 at each phase, as NVIDIA's LAMB "
        "recipe does, but not at one that only cools down (wsd with cooldown 1); the moments are "
        "kept either way",
    )

    compile: bool = Field(
        True,
        description="torch.compile the first pass of LAMB over long slices, where there is a "
        "compiler; no effect on adamw",
    )

    @model_validator(mode="after")
    def _clamp_makes_sense(self) -> OptimizerConfig:
        low, high = self.trust_ratio_min, self.trust_ratio_max
        if low is not None and high is not None and low > high:
            raise ValueError(f"trust_ratio_min: {low} is above trust_ratio_max {high}")
        if self.name != "lamb" and (low is not None or high is not None):
            raise ValueError(f"trust_ratio_min: a trust ratio is LAMB's, not {self.name}'s")
        return self
