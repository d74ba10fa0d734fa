from __future__ import annotations

import math
from typing import Any

import pytest

from configs.load import check
from core.errors import UserError
from pretrain.schedule import (
    ScheduleConfig,
    batch_changed_without_rate,
    learning_rate,
    rate_advice,
)

# The published recipe: (config, steps) of sequences of 128, then 512.
PHASES = (
    (ScheduleConfig(learning_rate=6e-3, warmup=0.2843), 7038),
    (ScheduleConfig(learning_rate=4e-3, warmup=0.128), 1563),
)


def _with(config: ScheduleConfig, **changes: Any) -> ScheduleConfig:
    return config.model_copy(update=changes)


@pytest.mark.parametrize("phase", [0, 1])
def test_nvidia_convention_at_its_corners(phase: int) -> None:
    config, steps = PHASES[phase]
    # The first step of decay: NVIDIA counts its progress from 1 and from the phase's start.
    first_of_decay = {0: 2000, 1: 200}[phase]
    closed_form = {
        0: config.learning_rate / steps / config.warmup,
        first_of_decay - 1: config.learning_rate * first_of_decay / steps / config.warmup,
        first_of_decay: config.learning_rate * math.sqrt(1 - (first_of_decay + 1) / steps),
        first_of_decay + 1: config.learning_rate * math.sqrt(1 - (first_of_decay + 2) / steps),
        steps // 2: config.learning_rate * math.sqrt(1 - (steps // 2 + 1) / steps),
        steps - 2: config.learning_rate * math.sqrt(1 / steps),
        steps - 1: 0.0,
    }
    for step, expected in closed_form.items():
        assert learning_rate(step, steps, config) == pytest.approx(expected, rel=1e-12), step


def test_nvidia_jump_is_the_published_one() -> None:
    before = [6e-3, 4e-3]
    after = [5.076e-3, 3.735e-3]
    for (config, steps), peak, dropped in zip(PHASES, before, after, strict=True):
        last = math.ceil(config.warmup * steps) - 2
        assert learning_rate(last, steps, config) == pytest.approx(peak, rel=6e-3)
        assert learning_rate(last + 1, steps, config) == pytest.approx(dropped, rel=5e-4)


@pytest.mark.parametrize("phase", [0, 1])
def test_continuous_convention_at_its_corners(phase: int) -> None:
    config, steps = PHASES[phase]
    config = _with(config, convention="continuous")
    warm = {0: 2001, 1: 200}[phase]
    peak, left = config.learning_rate, steps - warm
    closed_form = {
        0: peak / warm,
        warm - 2: peak * (warm - 1) / warm,
        warm - 1: peak,
        warm: peak,
        warm + 1: peak * math.sqrt((left - 1) / left),
        warm + left // 2: peak * math.sqrt((left - left // 2) / left),
        steps - 1: peak * math.sqrt(1 / left),
    }
    for step, expected in closed_form.items():
        assert learning_rate(step, steps, config) == pytest.approx(expected, rel=1e-12), step
    rates = [learning_rate(step, steps, config) for step in range(steps)]
    assert max(abs(a - b) for a, b in zip(rates[:-8], rates[1:-7], strict=True)) < 0.02 * peak


@pytest.mark.parametrize(
    "decay, shape",
    [
        ("linear", lambda left: left),
        ("cosine", lambda left: (1 - math.cos(math.pi * left)) / 2),
        ("constant", lambda left: 1.0),
        ("polynomial", lambda left: left**2),
    ],
)
@pytest.mark.parametrize("convention", ["nvidia", "continuous"])
def test_other_shapes(decay: str, shape: Any, convention: str) -> None:
    config = ScheduleConfig(
        learning_rate=2.0, warmup=0.25, decay=decay, degree=2, convention=convention
    )
    for step in (25, 50, 73, 99):
        left = 1 - (step + 1) / 100 if convention == "nvidia" else (100 - step) / 75
        assert learning_rate(step, 100, config) == pytest.approx(2 * shape(left), abs=1e-12)


@pytest.mark.parametrize("convention", ["nvidia", "continuous"])
def test_wsd_is_stable_to_its_cooldown_wherever_that_is(convention: str) -> None:
    config = ScheduleConfig(
        learning_rate=3e-3, warmup=0.1, decay="wsd", cooldown=0.25, convention=convention
    )
    rates = [learning_rate(step, 80, config) for step in range(80)]
    assert rates[8:60] == [3e-3] * 52 and rates[:8] == sorted(rates[:8]) and rates[0] < 1e-3
    # 1 - sqrt of the share of the cooldown that is done
    done = (step + (convention == "nvidia") for step in range(20))
    assert rates[60:] == pytest.approx([3e-3 * (1 - math.sqrt(d / 20)) for d in done], abs=1e-15)
    line = _with(config, degree=1.0, final=0.1)
    assert learning_rate(69, 80, line) == pytest.approx(
        3e-3 * {"nvidia": 0.55, "continuous": 0.595}[convention]
    )
    # A phase of its own that only cools down, behind one that is constant, has the same rates.
    own = _with(config, warmup=0.0, cooldown=1.0)
    assert [learning_rate(step, 20, own) for step in range(20)] == pytest.approx(rates[60:])
    # A run that was meant to be longer has the same rates up to where the cooldown begins.
    longer = _with(config, warmup=0.05)
    assert [learning_rate(step, 160, longer) for step in range(60)] == pytest.approx(rates[:60])


def test_the_original_recipe_is_one_line_cut_in_two() -> None:
    """Devlin et al. 2018: 10,000 steps of warm-up, then 1e-4 * (1 - step / 1 M)."""
    from configs.load import load
    from pretrain.config import PretrainConfig

    config = load("configs/pretrain_base_adamw.yaml", PretrainConfig)
    first, second = config.phases
    assert (first.steps, second.steps) == (900_000, 100_000)
    for step in (0, 5_000, 9_998, 10_000, 450_000, 899_999, 900_000, 950_000, 999_998):
        phase, at = (first, step) if step < first.steps else (second, step - first.steps)
        t = step + 1
        expected = 1e-4 * (t / 1e4 if t < 1e4 else 1 - t / 1e6)
        rate = learning_rate(at, phase.steps, phase)
        assert rate == pytest.approx(expected, rel=1e-4), step
    assert config.optimizer.name == "adamw" and not config.optimizer.restart_bias_correction


def test_edges() -> None:
    for convention in ("nvidia", "continuous"):
        none = ScheduleConfig(learning_rate=1.0, warmup=0, convention=convention)
        whole = ScheduleConfig(learning_rate=1.0, warmup=1, convention=convention)
        rates = [learning_rate(step, 10, none) for step in range(10)]
        assert rates == sorted(rates, reverse=True) and max(rates) <= 1
        rising = [learning_rate(step, 10, whole) for step in range(9)]
        assert rising == pytest.approx([(k + 1) / 10 for k in range(9)])
        assert 0 <= learning_rate(0, 1, none) <= 1
    for step in (-1, 10):
        with pytest.raises(ValueError, match="outside"):
            learning_rate(step, 10, none)


def test_a_resume_an_overflow_or_a_phase_switch_leave_the_rate_on_its_curve() -> None:
    """By the loop's own bookkeeping: each step has its place, and phases start from 0."""
    from pretrain.run_state import Position

    position, rates = Position(), []
    while position.phase < 2:
        config, _ = PHASES[position.phase]
        rates.append(learning_rate(position.phase_step, 15, config))
        position = position.after_step(skipped=position.step in (3, 4, 20))
        if position.step in (7, 15, 22):
            position = Position(**vars(position))  # what a checkpoint restores
        if position.phase_step == 15:
            position = position.next_phase(0)
    assert rates == [learning_rate(step, 15, config) for config, _ in PHASES for step in range(15)]
    assert position.skipped == 3


def test_scaling_helpers_say_what_they_assume() -> None:
    tuned = ScheduleConfig(learning_rate=6e-3, tuned_for_sequences=65536)
    assert rate_advice(tuned, 65536) is None
    assert rate_advice(tuned, 66700) is None  # the rounding of rows
    advice = rate_advice(tuned, 4096)
    assert advice and "0.0015" in advice and "assumes" in advice and "65536" in advice
    assert batch_changed_without_rate(256, 1e-4, 256, 1e-4) is None
    assert batch_changed_without_rate(256, 1e-4, 512, 2e-4) is None
    assert "256 to 512" in str(batch_changed_without_rate(256, 1e-4, 512, 1e-4))


@pytest.mark.parametrize(
    ("optimizer", "rate", "sequences", "scaled"),
    [
        ("lamb", 6e-3, 16, "9.38e-05"),  # the default rate
        ("lamb", 6e-3, 65536, None),
        ("lamb", 5e-3, 32768, None),  # You et al. 2020, table 4
        ("lamb", 6.25e-4, 512, None),
        ("adamw", 7e-4, 2048, None),  # Liu et al. 2019, table 3
        ("adamw", 2e-5, 256, None),
        ("adamw", 1e-3, 32, "3.54e-05"),
        ("adamw", 1e-6, 256, "0.0001"),
    ],
)
def test_a_rate_far_from_its_batch_is_told_which_would_be_near(
    optimizer: str, rate: float, sequences: int, scaled: str | None
) -> None:
    advice = rate_advice(ScheduleConfig(learning_rate=rate), sequences, optimizer)
    assert (advice is None) == (scaled is None)
    if advice is not None:
        assert f"{rate:g} is far" in advice and f"square-root scaling gives {scaled};" in advice
        own = ScheduleConfig(learning_rate=rate, tuned_for_sequences=sequences)
        assert rate_advice(own, sequences, optimizer) is None


@pytest.mark.parametrize(
    "tree, key",
    [
        ({"warmup": 1.5}, "warmup"),
        ({"learning_rate": 0}, "learning_rate"),
        ({"decay": "x"}, "decay"),
        ({"decay": "wsd", "cooldown": 0}, "cooldown"),
        ({"decay": "wsd", "cooldown": 0.8}, "cooldown: 0.8 and warmup 0.2843 are more than"),
    ],
)
def test_config_refuses(tree: dict[str, Any], key: str) -> None:
    with pytest.raises(UserError, match=key):
        check(tree, ScheduleConfig, "x.yaml")
