"""Rates are arithmetic, records hold each step once, and the console fits its terminal."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pretrain.metrics import Console, Recorder, Throughput, clock_text


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (path / "metrics.jsonl").read_text().splitlines()]


def test_a_resume_drops_what_lies_past_it(tmp_path: Path) -> None:
    first = Recorder(tmp_path, 0, active=True)
    for step in (1, 2, 3, 4):
        first.write(step, {"train/loss": step})
    first.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "tr')  # killed while writing
    second = Recorder(tmp_path, 2, active=True)
    for step in (3, 4, 5):
        second.write(step, {"train/loss": 10 * step, "train/none": None})
    second.close()
    assert steps(tmp_path) == [1, 2, 3, 4, 5]
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    shown = {e.step: e.value for e in events.Scalars("train/loss")}
    assert shown == {1: 1, 2: 2, 3: 30, 4: 40, 5: 50}
    assert events.Tags()["scalars"] == ["train/loss"]


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, 0, active=False)
    recorder.write(1, {"a": 1.0})
    recorder.close()
    assert not list(tmp_path.iterdir())


def test_rates_count_real_tokens_and_all_devices() -> None:
    now = [10.0]
    meter = Throughput(clock=lambda: now[0])
    for _ in range(4):
        meter.add(tokens=900, sequences=9, positions=1000, flops=2e12, wait=0.1)
    now[0] = 14.0
    rates = meter.rates(world_size=2, peak_tflops=2.0)
    assert rates["throughput/tokens_per_second"] == 900
    assert rates["throughput/sequences_per_second"] == 9
    assert rates["throughput/padding_share"] == pytest.approx(0.1)
    assert rates["throughput/loader_wait_share"] == pytest.approx(0.1)
    assert rates["throughput/tflops_per_device"] == pytest.approx(1.0)
    assert rates["throughput/mfu"] == pytest.approx(0.5)
    assert rates["throughput/step_seconds"] == 1
    assert meter.rates(2, None)["throughput/mfu"] is None


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_live_line_never_wraps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    out = Terminal()
    console = Console(True, out)
    console.progress("x" * 100)
    console.say("a line that stays")
    console.progress("y" * 100, last=True)
    pieces = out.getvalue().split("\r\x1b[K")
    assert pieces == ["", "x" * 39, "a line that stays\n", "y" * 39 + "\n"]


def test_plain_output_is_not_flooded() -> None:
    out = io.StringIO()
    console = Console(True, out)
    for i in range(100):
        console.progress(f"step {i}")
    console.progress("step 100", last=True)
    assert out.getvalue() == "step 0\nstep 100\n"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (75, "1:15"), (4000, "1:06:40"), (100000, "1d 3:46:40"), (-3, "0:00")],
)
def test_clock(seconds: float, text: str) -> None:
    assert clock_text(seconds) == text
