"""What a run shows: TensorBoard, metrics.jsonl and the console. The only import of tensorboard."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import math
import os
import re
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from tensorboard.summary.writer import event_file_writer
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from core.console import notice
from core.files import disk_errors, is_in_place, open_regular, write_atomically
from pretrain.stopwatch import PARTS
from pretrain.trackers import Sink


class Recorder:
    """Numbers by name to TensorBoard and metrics.jsonl; does nothing on ranks other than 0.

    After a resume at step s what an earlier attempt wrote past s is dropped, so that each step
    stands once; so are damaged lines, which one line says. A write that fails is said once and
    does not end the run: lines wait in memory, TensorBoard stays behind until the next start. That
    another file took the place of this one, to which no lines come, is said, too. TensorBoard's
    events lie in the run folder itself, whose name a run has there. lines: another file than
    metrics.jsonl. sinks: what gets TensorBoard's numbers, too; they outlive the recorder.
    """

    def __init__(
        self,
        run_dir: Path,
        first_step: int,
        active: bool,
        lines: Path | None = None,
        sinks: Sequence[Sink] = (),
    ) -> None:
        self._active, self._sinks = active, sinks
        if not active:
            return
        self._path = lines or run_dir / "metrics.jsonl"
        self._waiting = b""
        self._said = False
        threading.excepthook = _thread_failed
        with disk_errors(self._path):
            kept, damaged = _lines_up_to(first_step, self._path)
            write_atomically(self._path, b"".join(kept), durable=False)
            if damaged:
                notice(f"{self._path}: {damaged} damaged line(s) are left out", sys.stderr)
            self._jsonl = self._path.open("ab", buffering=0)
        self._writer: SummaryWriter | None = None
        try:
            with _named_last(run_dir):
                self._writer = SummaryWriter(str(run_dir), purge_step=first_step + 1)
        except OSError as error:
            self._say(error)

    def write(
        self,
        step: int,
        values: Mapping[str, float | None],
        board: Mapping[str, float | None] | None = None,
    ) -> None:
        """`values` by tag, such as `train/mlm_loss`; None values are left out. board: what
        TensorBoard shows of them, by its tags; None: the same."""
        known = {name: float(value) for name, value in values.items() if value is not None}
        self.note(step, known)
        board = known if board is None else board
        shown = {name: float(value) for name, value in board.items() if value is not None}
        for name, value in shown.items():
            self._draw(lambda w, n=name, v=value: w.add_scalar(n, v, step))
        for sink in self._sinks if self._active and shown else ():
            sink.log(step, shown)

    def note(self, step: int, facts: Mapping[str, object]) -> None:
        """A line of metrics.jsonl of more than numbers."""
        if not self._active:
            return
        line = json.dumps({"step": step, "time": round(time.time(), 3)} | dict(facts)) + "\n"
        self._waiting += line.encode()
        self._append()

    def show(
        self,
        step: int,
        *,
        texts: Mapping[str, str] | None = None,
        picture: tuple[str, np.ndarray] | None = None,
        charts: Mapping[str, Mapping[str, list[object]]] | None = None,
        settings: tuple[Mapping[str, bool | float | str], Sequence[str]] | None = None,
    ) -> None:
        """For TensorBoard alone: texts in Markdown by tag; (tag, uint8 [H, W, 3]); a layout of
        charts, as `SummaryWriter.add_custom_scalars` takes it; (settings of the run by name, tags
        of the numbers that stand beside them) for the table of runs."""
        for name, text in (texts or {}).items():
            self._draw(lambda w, n=name, t=text: w.add_text(n, t, step))
        if picture is not None:
            self._draw(lambda w: w.add_image(*picture, step, dataformats="HWC"))
        if charts is not None:
            self._draw(lambda w: w.add_custom_scalars(charts))
        if settings is not None:
            # `add_hparams` would make a run of its own of them.
            about, *more = hparams(dict(settings[0]), dict.fromkeys(settings[1]))
            for summary in (_first_columns(about), *more):
                self._draw(lambda w, s=summary: w.file_writer.add_summary(s))

    def _draw(self, call: Callable[[SummaryWriter], None]) -> None:
        if not self._active or self._writer is None:
            return
        try:
            call(self._writer)
        except OSError as error:
            self._writer = None
            self._say(error)

    def close(self) -> None:
        if not self._active:
            return
        self._append()
        try:
            self._jsonl.close()
        except OSError as error:  # a file server may tell only here
            self._say(error)
        self._draw(lambda writer: writer.close())

    def _append(self) -> None:
        try:
            if not (self._said or is_in_place(self._jsonl.fileno(), self._path)):
                gone = f"{self._path} was removed or replaced"  # an editor saves another file
                self._say(OSError(errno.ESTALE, gone))
            self._waiting = self._waiting[self._jsonl.write(self._waiting) :]
        except OSError as error:
            self._say(error)

    def _say(self, error: OSError) -> None:
        if not self._said:
            self._said = True
            notice(f"metrics not written: {error.strerror}; training goes on", sys.stderr)


_EVENTS = re.compile(r"events\.out\.tfevents\.([0-9]{10})\.")


@contextlib.contextmanager
def _named_last(folder: Path) -> Iterator[None]:
    """TensorBoard reads the files of a folder by the times in their names, and lets what an earlier
    start drew drop what a later one drew where the clock went back between them: within this, a
    file is named later than those that are there."""
    names = map(_EVENTS.match, os.listdir(folder)) if folder.is_dir() else ()
    latest = max((int(name[1]) for name in names if name), default=0)
    kept, named = event_file_writer.time, max(time.time(), latest + 1)
    event_file_writer.time = SimpleNamespace(time=lambda: named)
    try:
        yield
    finally:
        event_file_writer.time = kept


def _thread_failed(failure: threading.ExceptHookArgs) -> None:
    """TensorBoard's thread hands its error to the next add_scalar; no traceback as well."""
    if not isinstance(failure.exc_value, OSError):
        threading.__excepthook__(failure)


class Throughput:
    """Rates over a window of steps: real tokens (no padding), sequences, model FLOPs."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.restart()

    def restart(self, at: float | None = None) -> None:
        """The window begins `at`, by the clock; None: now."""
        self._start = self._clock() if at is None else at
        self.steps = 0
        self.tokens = 0
        self.sequences = 0
        self.positions = 0
        self.flops = 0.0
        self.wait = 0.0
        self.aside_seconds = 0.0
        self.parts = dict.fromkeys(PARTS, 0.0)

    def add(
        self,
        *,
        tokens: int,
        sequences: int,
        positions: int,
        flops: float,
        wait: float,
        parts: Mapping[str, float],
    ) -> None:
        """One optimiser step, all ranks together; `positions` counts padding too. `wait` and
        `parts` (seconds, `stopwatch.PARTS`) are this rank's."""
        self.steps += 1
        self.tokens += tokens
        self.sequences += sequences
        self.positions += positions
        self.flops += flops
        self.wait += wait
        for part, seconds in parts.items():
            self.parts[part] += seconds

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """What happens inside is no part of a step: an evaluation, a checkpoint."""
        start = self._clock()
        yield
        self.aside_seconds += self._clock() - start

    def rates(
        self, world_size: int, peak_tflops: float | None, at: float | None = None
    ) -> dict[str, float | None]:
        """By tag, of a window that ends `at`, by the clock; None: now. `time/`: mean seconds of a
        step, which add up to `throughput/step_seconds`; `other` is what lies outside the parts:
        the loop, its records, the losses' sum."""
        end = self._clock() if at is None else at
        seconds = max(end - self._start - self.aside_seconds, 1e-9)
        steps = max(self.steps, 1)
        # A GPU's events and the host's clock differ by microseconds.
        parts = self.parts | {"other": max(seconds - sum(self.parts.values()), 0.0)}
        mfu = None
        if peak_tflops:
            mfu = self.flops / seconds / (peak_tflops * 1e12 * world_size)
        return {
            "throughput/tokens_per_second": self.tokens / seconds,
            "throughput/sequences_per_second": self.sequences / seconds,
            "throughput/step_seconds": seconds / steps,
            "throughput/padding_share": 1 - self.tokens / max(self.positions, 1),
            "throughput/loader_wait_share": self.wait / seconds,
            "throughput/tflops_per_device": self.flops / seconds / 1e12 / world_size,
            "throughput/mfu": mfu,
            "throughput/overhead_share": (parts["data"] + parts["other"]) / seconds,
            **{f"time/{part}": value / steps for part, value in parts.items()},
        }


def shares_text(rates: Mapping[str, float | None]) -> str:
    """The `time/` tags of `Throughput.rates` in per cent of the step: `data 0 forward 31 ... %`."""
    step = rates["throughput/step_seconds"]
    parts = (f"{part} {rates[f'time/{part}'] / step:.0%}"[:-1] for part in (*PARTS, "other"))
    return " ".join(parts) + " %"


def memory_gb(device: torch.device) -> dict[str, float]:
    """By tag, of this process, in 1e9 bytes: a GPU's peak since the start, or memory in use now."""
    if device.type == "cuda":
        return {"memory/device_peak_gb": torch.cuda.max_memory_allocated(device) / 1e9}
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {"memory/process_gb": pages * resource.getpagesize() / 1e9}


def _lines_up_to(step: int, path: Path) -> tuple[list[bytes], int]:
    """(lines of steps up to `step`, damaged lines left out); one cut short by a kill is no line."""
    if not path.exists():
        return [], 0
    with open_regular(path) as file:
        *lines, _ = file.read().split(b"\n")
    numbered = [(step_of(line), line + b"\n") for line in lines]
    kept = [line for number, line in numbered if number is not None and number <= step]
    return kept, sum(number is None for number, _ in numbered)


_LONGEST_LINE = 1 << 24  # bytes; after a loss of power a file may be all zeros


def step_of(line: bytes) -> int | None:
    """Of a line of metrics.jsonl; None where it is damaged."""
    if len(line) > _LONGEST_LINE:
        return None
    try:
        step = json.loads(line)["step"]
    except (ValueError, TypeError, LookupError, RecursionError):
        return None
    return step if isinstance(step, int) else None


def _is_number(value: object) -> bool:
    """Of a damaged or foreign line: an integer may have more digits than a float has room for, and
    the distance of two floats may have none."""
    if isinstance(value, float):
        return not 1e100 < abs(value) < math.inf
    return isinstance(value, int) and abs(value) < 1 << 63


_LAST = 1e11  # seconds since 1970: a clock of the year 5138, which a date can still be made of

# Of the table of runs TensorBoard shows five settings: those said to differ, then by name.
_COLUMNS = ("optimizer.name", "phases.0.learning_rate", "phases.0.sequences_per_step",
            "phases.0.steps", "seed")  # fmt: skip


def _first_columns(about: Summary) -> Summary:
    """The table's description, with what sweeps mostly vary as its first columns."""
    plugin = about.value[0].metadata.plugin_data
    described = HParamsPluginData.FromString(plugin.content)
    for setting in described.experiment.hparam_infos:
        setting.differs = setting.name in _COLUMNS
    plugin.content = described.SerializeToString()
    return about


def records_from_the_end(path: Path, block: int = 1 << 20) -> Iterator[dict[str, float]]:
    """The `lines_from_the_end` of metrics.jsonl that are of numbers alone and have a time and,
    of an evaluation, a length, a loss and an accuracy."""
    for record in lines_from_the_end(path, block):
        numbers = all(map(_is_number, record.values()))
        dated = numbers and 0 <= record.get("time", math.nan) < _LAST
        whole = ("heldout/mlm_loss" in record) == ("heldout/mlm_accuracy" in record)
        if dated and whole and math.isfinite(record.get("heldout/max_seq_len", 0)):
            yield record


def last_evaluation(path: Path, up_to: float = math.inf) -> dict[int, dict[str, float]]:
    """What metrics.jsonl has of the newest step that was evaluated, of those up to `up_to`: its
    records by the length of sequences, in order. Empty where there is none."""
    found: dict[int, dict[str, float]] = {}
    for record in records_from_the_end(path):
        if "heldout/mlm_loss" in record and record["step"] <= up_to:
            if any(record["step"] != other["step"] for other in found.values()):
                break
            found.setdefault(int(record.get("heldout/max_seq_len", 0)), record)
    return dict(reversed(found.items()))


_BEGUN = re.compile(rb"\{[ -~]*")  # a line that is being written, or was cut by a kill


@functools.cache
def _tell_damaged(path: Path) -> None:
    notice(f"{path}: lines that are damaged are passed over", sys.stderr)


def lines_from_the_end(path: Path, block: int = 1 << 20) -> Iterator[dict[str, Any]]:
    """The lines of metrics.jsonl, the last first, read `block` bytes at a time; damaged ones are
    passed over, which is told once, and a file that is not there has none."""
    if not path.exists():
        return
    with disk_errors(path), open_regular(path) as file:
        begin, head = file.seek(0, 2), b""
        unfinished = True  # as what stands behind the last line end
        while begin > 0:
            end, begin = begin, max(begin - block, 0)
            file.seek(begin)
            head, *lines = (file.read(end - begin) + head).split(b"\n")
            for line in reversed(lines if begin else [head, *lines]):
                if step_of(line) is not None:
                    yield json.loads(line)
                elif line and not (unfinished and _BEGUN.fullmatch(line)):
                    _tell_damaged(path)
                unfinished = False
            head = head[: _LONGEST_LINE + 1]
            block = max(block, len(head))  # each byte of a long line is copied a few times, not 16
