"""The learning rate as a pure function of the step, and what a change of batch asks of it.

Steps count from 0 within a phase, skipped ones too: a step that overflows keeps its place as its
batch does. Nothing else enters, so neither a resume nor an overflow shifts the rate.
"""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field, model_validator

from configs.load import Config

# Peak rates and sequences a step that are known to go together, for a BASE: NVIDIA's LAMB recipe,
# the first phase; Devlin et al. 2018, A.2.
RECIPES = {"lamb": (6e-3, 65536), "adamw": (1e-4, 256)}
FAR = 5.0  # times the scaled rate or below it. Smaller models take more, continued ones less


class ScheduleConfig(Config):
    """Warm-up to a peak rate, then decay over the rest of a phase."""

    learning_rate: float = Field(6e-3, gt=0, description="peak rate")
    warmup: float = Field(
        0.2843, ge=0, le=1, description="fraction of the phase's steps with a rising rate"
    )
    decay: Literal["polynomial", "linear", "cosine", "constant", "wsd"] = Field(
        "polynomial",
        description="shape of the rate after warm-up; wsd: stable at the peak, then a cooldown",
    )
    degree: float = Field(
        0.5,
        gt=0,
        description="exponent of the polynomial decay; of wsd's cooldown, 1 - t^degree: 0.5 is "
        "1 - sqrt, 1 a straight line",
    )
    cooldown: float = Field(
        0.2,
        gt=0,
        le=1,
        description="wsd: fraction of the phase's steps, the last ones, with a falling rate; 1: "
        "the whole phase is a cooldown",
    )
    final: float = Field(0.0, ge=0, le=1, description="fraction of the peak that the decay ends at")
    convention: Literal["nvidia", "continuous"] = Field(
        "nvidia",
        description="nvidia: decay counts from step 0, so the rate drops at once when warm-up ends "
        "(as in the script the recipe was tuned with); continuous: decay counts from its end",
    )
    tuned_for_sequences: int | None = Field(
        None,
        ge=1,
        description="sequences a step that the rate was tuned for; a step of another size gives a "
        "warning with the scaled rate; null: those of the optimiser's recipe, from 5 times too far",
    )

    @property
    def only_cools(self) -> bool:
        """Whether the phase is nothing but a cooldown: the optimiser then goes on as it was."""
        return self.decay == "wsd" and self.cooldown == 1

    @model_validator(mode="after")
    def _cooldown_fits(self) -> ScheduleConfig:
        if self.decay == "wsd" and self.warmup + self.cooldown > 1:
            raise ValueError(
                f"cooldown: {self.cooldown:g} and warmup {self.warmup:g} are more than the phase"
            )
        return self


def learning_rate(step: int, steps: int, config: ScheduleConfig) -> float:
    """Rate of step `step` (from 0) of a phase of `steps`.

    nvidia: with t = (step + 1) / steps the rate is peak * t / warmup before t reaches warmup, then
    peak * shape(1 - t): the last step has the final rate, as in NVIDIA's PolyWarmUpScheduler.
    continuous: with W = round(warmup * steps) the rate is peak * (step + 1) / W for the first W
    steps, then peak * shape((steps - step) / (steps - W)), which stays above the final rate.

    shape runs from 1 to `final`. wsd (warm-up, stable, decay: Hu et al. 2024, MiniCPM, section 4;
    cooldown of 1 - sqrt: Haegele et al. 2024, section 3) has the peak until the cooldown, which
    counts from its own beginning: rates between the two do not depend on where a phase will end.
    """
    if not 0 <= step < steps:
        raise ValueError(f"step {step} is outside the phase's {steps} steps")
    cools = config.decay == "wsd"
    if config.convention == "nvidia":
        progress = (step + 1) / steps
        if progress < config.warmup:
            return config.learning_rate * progress / config.warmup
        left = (1 - progress) / (config.cooldown if cools else 1)
    else:
        warm = round(config.warmup * steps)
        if step < warm:
            return config.learning_rate * (step + 1) / warm
        falling = max(round(config.cooldown * steps), 1) if cools else steps - warm
        left = (steps - step) / falling
    return config.learning_rate * _shape(min(left, 1.0), config)


def _shape(left: float, config: ScheduleConfig) -> float:
    """Fraction of the peak when the fraction `left` of the decay remains."""
    shape = {
        "polynomial": lambda: left**config.degree,
        "linear": lambda: left,
        "cosine": lambda: 0.5 - 0.5 * math.cos(math.pi * left),
        "constant": lambda: 1.0,
        "wsd": lambda: 1 - (1 - left) ** config.degree,
    }[config.decay]()
    return config.final + (1 - config.final) * shape


def near(sequences: float, asked: int) -> bool:
    """Whether a step holds what was asked for: rows that are rounded move it by some per cent."""
    return abs(sequences - asked) <= max(0.05 * asked, 0.5)


def rate_advice(config: ScheduleConfig, sequences: float, optimizer: str = "lamb") -> str | None:
    """A one-line warning when a step's sequences are not those the rate was tuned for: those of
    `tuned_for_sequences`, else, where the rate is further off than `FAR`, the recipe's.

    The rate for a batch k times as large is sqrt(k) times as large. lamb: You et al. 2020, section
    4.3, which assumes the same number of epochs, warm-up of the same number of epochs, and a batch
    below the one where noise no longer dominates. adamw: gradients' noise averages out (Malladi et
    al. 2022); betas are assumed unchanged, which holds for k near 1 only.
    """
    rate, tuned = config.learning_rate, config.tuned_for_sequences
    cure = "set tuned_for_sequences to your batch once the rate is your own"
    if tuned is not None:
        if near(sequences, tuned):
            return None
        scaled = rate * math.sqrt(sequences / tuned)
        return (
            f"learning_rate {rate:g} was tuned for {tuned} sequences a step, this run takes "
            f"{sequences:.0f}: square-root scaling suggests {scaled:.3g} "
            f"(assumes the same epochs and warm-up in epochs); {cure}"
        )
    known, batch = RECIPES[optimizer]
    scaled = known * math.sqrt(sequences / batch)
    if 1 / FAR <= rate / scaled <= FAR:
        return None
    return (
        f"learning_rate {rate:g} is far from that of {sequences:.0f} sequences a step: "
        f"{optimizer}'s {known:g} is for {batch:,}, for these square-root scaling gives "
        f"{scaled:.3g}; {cure}"
    )


def batch_changed_without_rate(
    old_sequences: int, old_rate: float, new_sequences: int, new_rate: float
) -> str | None:
    """A one-line warning when a resumed phase has another batch and still the old rate."""
    if old_sequences == new_sequences or old_rate != new_rate:
        return None
    return (
        f"sequences_per_step changed from {old_sequences} to {new_sequences} while learning_rate "
        f"stayed {new_rate:g}"
    )
