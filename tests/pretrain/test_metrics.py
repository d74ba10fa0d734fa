"""Rates are arithmetic, records hold each step once, and the console fits its terminal."""

from __future__ import annotations

import io
import json
import os
import re
import resource
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from configs.load import check, load
from core.console import Console, clock_text, short_number
from core.errors import UserError
from pretrain import metrics
from pretrain.board import TAGS, heat_map, is_matrix, scalars, settings
from pretrain.config import PretrainConfig
from pretrain.distributed import World
from pretrain.metrics import (
    Recorder,
    Throughput,
    last_evaluation,
    lines_from_the_end,
    memory_gb,
    shares_text,
)
from pretrain.monitor import Monitor
from pretrain.stopwatch import PARTS, Stopwatch
from tests.datasets import write_dataset

ALONE = World(0, 1, 0, 1, "alone", torch.device("cpu"), None)


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (path / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("ahead", [0, 7200])
def test_a_resume_drops_what_lies_past_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: float
) -> None:
    """Also where the clock was ahead at the first start."""
    with monkeypatch.context() as patched:
        patched.setattr(time, "time", lambda now=time.time: now() + ahead)
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
    events = EventAccumulator(str(tmp_path)).Reload()
    shown = {e.step: e.value for e in events.Scalars("train/loss")}
    assert len(events.Scalars("train/loss")) == 5 and shown == {1: 1, 2: 2, 3: 30, 4: 40, 5: 50}
    assert events.Tags()["scalars"] == ["train/loss"]


def test_damaged_lines_are_left_out_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = [
        bytes(40),
        b"\xff\xfe",
        b"",
        b"{}",
        b"7",
        b'{"step": "2"}',
        b'{"step": 2',
        b"[" * 9999,
        b'{"step": 2, "x": "%b"}' % (b"x" * (1 << 24)),
    ]
    path = tmp_path / "metrics.jsonl"
    whole = b'{"step": %d, "of 10,000 sources": "' + b"x" * (2 << 20) + b'"}\n%b\n'
    path.write_bytes(b"".join(whole % (i, d) for i, d in enumerate(damaged)))
    for _ in range(2):
        assert [r["step"] for r in lines_from_the_end(path)] == [*reversed(range(len(damaged)))]
    assert capsys.readouterr().err == f"{path}: lines that are damaged are passed over\n"
    for _ in range(2):
        Recorder(tmp_path, 5, active=True).close()
        assert steps(tmp_path) == [0, 1, 2, 3, 4, 5]
    assert capsys.readouterr().err == f"{path}: {len(damaged)} damaged line(s) are left out\n"


@pytest.mark.parametrize(
    ("end", "damaged"),
    [
        (b'{"st', False),
        (b"", False),
        (bytes(40), True),  # after a loss of power
        (b'{"step": 3' + bytes(40), True),
        (b"\xfe\xff", True),
        (b"step", True),
    ],
)
@pytest.mark.parametrize("block", [1, 5, 1 << 20])
def test_a_line_that_is_being_written_is_no_damage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], end: bytes, damaged: bool, block: int
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n' + end)
    assert [r["step"] for r in lines_from_the_end(path, block)] == [2, 1]
    assert ("damaged are passed over" in capsys.readouterr().err) == damaged


def test_a_file_that_fails_when_it_is_closed_ends_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder = Recorder(tmp_path, 0, active=True)
    recorder.write(1, {"train/loss": 1.0})
    lines, opened = tmp_path / "metrics.jsonl", Path("/proc/self/fd")
    (number,) = [int(f.name) for f in opened.iterdir() if f.exists() and f.samefile(lines)]
    os.close(number)
    recorder.close()
    said = "metrics not written: Bad file descriptor; training goes on\n"
    assert capsys.readouterr().err == said
    assert EventAccumulator(str(tmp_path)).Reload().Scalars("train/loss")


def test_lines_that_come_to_no_file_of_the_run_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As where an editor has saved the file meanwhile."""
    recorder = Recorder(tmp_path, 0, active=True)
    recorder.write(1, {"train/loss": 1.0})
    lines, edited = tmp_path / "metrics.jsonl", tmp_path / "edited"
    edited.write_bytes(lines.read_bytes())
    edited.rename(lines)
    for step in (2, 3):
        recorder.write(step, {"train/loss": 1.0})
    recorder.close()
    said = f"metrics not written: {lines} was removed or replaced; training goes on\n"
    assert capsys.readouterr().err == said


def test_records_that_cannot_be_gone_on_with_after_a_rollback_are_one_line(tmp_path: Path) -> None:
    data, lines = tmp_path / "data", tmp_path / "run/metrics.jsonl"
    manifest = write_dataset(data, [[[5, 6, 7]]])
    phase = {
        "max_seq_len": 16, "sequences_per_step": 4, "max_predictions": 3, "micro_batch_rows": 1,
        "steps": 9,
    }  # fmt: skip
    tree = {"run_dir": str(lines.parent), "data": {"dir": str(data)}, "phases": [phase]}
    lines.parent.mkdir()
    monitor = Monitor(check(tree, PretrainConfig, "test"), ALONE)
    monitor.start(0, manifest)
    lines.unlink()
    lines.mkdir()
    with pytest.raises(UserError, match="not a regular file|Is a directory"):
        monitor.start(0, manifest)
    monitor.close()


def test_events_that_fail_at_once_are_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Slow(metrics.SummaryWriter):
        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **settings)
            time.sleep(0.5)  # its thread is sooner

    monkeypatch.setattr(metrics, "SummaryWriter", Slow)
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        recorder = Recorder(tmp_path, 0, active=True)
        recorder.write(1, {"train/loss": 1.0})
        recorder.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    said = "metrics not written: File too large; training goes on\n"
    assert capsys.readouterr().err == said


def test_the_last_evaluation_is_of_one_step(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, 0, active=True)
    for step, lengths in ((2, (32, 64)), (4, (32, 64)), (6, (64,))):
        for length in lengths:
            scores = {"mlm_loss": step + length / 100, "mlm_accuracy": 0.5, "max_seq_len": length}
            recorder.write(step, {f"heldout/{name}": value for name, value in scores.items()})
        recorder.write(step + 1, {"train/loss": 1.0})
    recorder.close()
    for up_to, step, lengths in ((9, 6, [64]), (5, 4, [32, 64]), (4, 4, [32, 64]), (1, 0, [])):
        found = last_evaluation(tmp_path / "metrics.jsonl", up_to)
        assert list(found) == lengths
        for length, record in found.items():
            assert record["heldout/mlm_loss"] == step + length / 100


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, 0, active=False)
    recorder.write(1, {"a": 1.0})
    recorder.close()
    assert not list(tmp_path.iterdir())


def test_rates_count_real_tokens_and_all_devices() -> None:
    now = [10.0]
    meter = Throughput(clock=lambda: now[0])
    for _ in range(4):
        meter.add(tokens=900, sequences=9, positions=1000, flops=2e12, wait=0.1, parts={})
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


def test_parts_and_the_rest_add_up_to_the_step() -> None:
    now = [0.0]
    meter = Throughput(clock=lambda: now[0])
    for _ in range(2):
        parts = {"data": 1.0, "forward": 6.0, "backward": 12.0, "reduce": 2.0, "update": 3.0}
        meter.add(tokens=1, sequences=1, positions=1, flops=0, wait=0, parts=parts)
        now[0] += 25.0
    rates = meter.rates(1, None)
    assert {p: rates[f"time/{p}"] for p in (*PARTS, "other")} == parts | {"other": 1.0}
    assert rates["throughput/overhead_share"] == pytest.approx(2 / 25)
    text = "data 4 forward 24 backward 48 reduce 8 update 12 other 4 %"
    assert shares_text(rates) == text


def test_what_stands_aside_is_in_no_rate() -> None:
    now = [0.0]
    meter = Throughput(clock=lambda: now[0])
    meter.add(tokens=60, sequences=1, positions=60, flops=0, wait=0, parts={"data": 1.0})
    now[0] += 3
    with meter.aside():
        now[0] += 100
    rates = meter.rates(1, None)
    assert rates["throughput/tokens_per_second"] == 20
    assert rates["time/other"] == 2
    meter.restart()
    now[0] += 5
    assert meter.rates(1, None)["throughput/step_seconds"] == 5


def test_a_part_lasts_until_the_next_and_an_inner_one_interrupts() -> None:
    now = [0.0]
    watch = Stopwatch(torch.device("cpu"), clock=lambda: now[0])

    def takes(seconds: float) -> None:
        now[0] += seconds

    def outer() -> None:
        takes(2)
        watch.timed("reduce", takes)(4)
        with pytest.raises(TypeError):
            watch.timed("reduce", takes)("no number")
        takes(8)

    takes(100)  # before the first part
    for _ in range(2):
        watch.switch("forward")
        takes(1)
        watch.timed("backward", outer)()
        takes(16)
        watch.switch("")
        takes(32)
    assert watch.lap()() == dict.fromkeys(PARTS, 0) | {"forward": 34, "backward": 20, "reduce": 8}
    assert set(watch.lap()().values()) == {0}


def test_memory_is_what_the_process_holds() -> None:
    before = memory_gb(torch.device("cpu"))["memory/process_gb"]
    held = np.ones(25_000_000)
    after = memory_gb(torch.device("cpu"))["memory/process_gb"]
    assert after - before == pytest.approx(held.nbytes / 1e9, rel=0.2)


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


@pytest.mark.parametrize(
    ("columns", "text"), [(30, "step 1  more  too"), (14, "step 1  more"), (12, "step 1")]
)
def test_what_does_not_fit_is_left_out_whole(
    monkeypatch: pytest.MonkeyPatch, columns: int, text: str
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    out = Terminal()
    Console(True, out).progress("step 1", ("more", "too"))
    assert out.getvalue() == "\r\x1b[K" + text


def test_plain_output_is_not_flooded() -> None:
    out = io.StringIO()
    console = Console(True, out)
    for i in range(100):
        console.progress(f"step {i}")
    console.progress("step 100", last=True)
    assert out.getvalue() == "step 0\nstep 100\n"


def test_plain_lines_calm_down_and_are_dated(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    out = io.StringIO()
    console = Console(True, out, dated=True)
    shown = []
    for second in range(0, 1200, 5):
        now = 1000.0 + second
        before = len(out.getvalue())
        console.progress(f"second {second}")
        if len(out.getvalue()) > before:
            shown.append(second)
    assert shown == [*range(0, 601, 10), *range(660, 1200, 60)]
    console.say("an event")
    for line in out.getvalue().splitlines():
        assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d (second \d+|an event)", line)


def test_the_board_has_few_folds_and_leaves_tensors_to_the_file() -> None:
    values = {"train/mlm_loss": 1.0, "trust_ratio_x/layer_00": 2.0, "heldout/mlm_loss": 3.0}
    assert scalars(values, 128) == {"1_loss/masked_lm": 1.0, "heldout_128/masked_lm": 3.0}
    assert {tag.split("/")[0] for tag in TAGS.values()} == {"1_loss", "2_speed", "3_health"}
    assert is_matrix("output.dense.weight")
    assert not is_matrix("output.dense.bias") and not is_matrix("output.LayerNorm.weight")


def test_the_heat_map_orders_its_colours_by_value() -> None:
    values = {("a", "x"): 0.1, ("a", "y"): 1.0, ("b", "x"): 10.0}  # ("b", "y") is not there
    picture = heat_map(values, cell=20).astype(int)
    left, top = 7 + 8, 16
    red, green, blue = (
        [int(picture[top + 3 + 20 * j, left + 3 + 20 * i, c]) for j, i in ((0, 0), (0, 1), (1, 0))]
        for c in range(3)
    )
    assert red == sorted(red) and green == sorted(green) and blue == sorted(blue, reverse=True)
    assert len(set(red)) == 3
    assert (picture[top + 23, left + 23] == 255).all()


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (950, "950"), (1234, "1.23k"), (61_204, "61.2k"), (999_000, "999k"),
     (1_234_567, "1.23M"), (5e10, "50.0G"), (7e12, "7000G")],
)  # fmt: skip
def test_short_numbers(value: float, text: str) -> None:
    assert short_number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (75, "1:15"), (4000, "1:06:40"), (100000, "1d 3:46:40"), (-3, "0:00")],
)
def test_clock(seconds: float, text: str) -> None:
    assert clock_text(seconds) == text


def test_the_table_of_runs_begins_with_what_sweeps_vary(tmp_path: Path) -> None:
    config = load(Path(__file__).parents[2] / "configs/pretrain_demo.yaml", PretrainConfig)
    recorder = Recorder(tmp_path, 0, active=True)
    recorder.show(0, settings=settings(config))
    recorder.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    content = events.SummaryMetadata("_hparams_/experiment").plugin_data.content
    infos = HParamsPluginData.FromString(content).experiment.hparam_infos
    shown = sorted(infos, key=lambda info: (not info.differs, info.name))[:5]
    first = {"learning_rate", "sequences_per_step", "steps"}
    assert {x.name.removeprefix("phases.0.") for x in shown} == first | {"optimizer.name", "seed"}
