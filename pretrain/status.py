"""Where runs stand, from their files alone: `python -m pretrain status RUN [RUN ...]`.

On any machine that sees the folders; it asks no process of a run and no GPU. Exit codes, for cron:
0 every run has ended, is stopped or goes on, 2 a mistake, 3 one is silent or has recorded nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import stat
import sys
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from configs.load import load
from core.console import clock_text, notice, printable, show, wrap
from core.errors import UserError
from core.files import disk_errors, look
from pretrain.checkpoint import newest_checkpoint, step_folder
from pretrain.config import PhaseConfig, PretrainConfig
from pretrain.layout import tokens_left
from pretrain.metrics import last_evaluation, records_from_the_end
from pretrain.preflight import is_let_go
from pretrain.rollback import Rollbacks
from pretrain.run_state import PROBE, PROBES, ROLLBACKS, finished_steps

_SILENT = 3  # exit code
_PATIENCE = 900.0  # seconds
_CLOCKS_DIFFER = 60.0  # at most, of two machines whose clocks are set
_INTERVALS = 3.0  # between two records, or of an evaluation, as the last ones came


@dataclass(frozen=True)
class Status:
    """Of one run. Seconds, and seconds since 1970; None: not known from its files."""

    run: str
    state: str  # finished, training, stopped (nobody trains it), silent or empty
    step: int
    total_steps: int
    phase: int  # from 1
    phases: int
    max_seq_len: int
    phase_step: int
    phase_steps: int
    silent_for: float | None
    tokens_per_second: float | None
    step_seconds: float | None
    mfu: float | None
    mlm_loss: float | None
    heldout_step: int | None
    heldout_max_seq_len: int | None
    heldout_mlm_loss: float | None
    heldout_mlm_accuracy: float | None
    probe_step: int | None  # newest checkpoint that `finetune follow` has scored
    probes: dict[str, float]  # by TASK/MEASURE
    left: float | None
    ends_at: float | None
    checkpoint_step: int
    checkpoint_age: float | None
    starts: int  # that the newest checkpoint knows of
    rollbacks: int

    @property
    def well(self) -> bool:
        return self.state in ("finished", "training", "stopped")

    @property
    def overdue(self) -> bool:
        """It counts as training, but the end that its last record promised is past."""
        return self.ends_at is not None and (self.silent_for or 0.0) > (self.left or 0.0)

    def to_json(self) -> str:
        """One line; what is no number is null."""
        plain = dataclasses.asdict(self)
        odd = {k for k, v in plain.items() if isinstance(v, float) and not math.isfinite(v)}
        return json.dumps(plain | dict.fromkeys(odd))

    def lines(self) -> list[str]:
        """For people, at most 80 columns wide but for the folder's name; scores of tasks are broken
        at the terminal's width."""
        silence = "" if self.silent_for is None else f", last record {_ago(self.silent_for)}"
        if self.silent_for is not None and self.silent_for < -_CLOCKS_DIFFER:
            silence = f", last record {clock_text(-self.silent_for)} ahead of this clock"
        lines = [
            f"{self.run}: {self.state}{silence}",
            f"  step {self.step:,} of {self.total_steps:,}; phase {self.phase}/{self.phases} "
            f"({self.max_seq_len}): {self.phase_step:,} of {self.phase_steps:,}",
        ]
        if self.tokens_per_second is not None and self.step_seconds is not None:
            mfu = "" if self.mfu is None else f", MFU {self.mfu:.1%}"
            lines.append(
                f"  {self.tokens_per_second:,.0f} tokens/s, {self.step_seconds:.2f} s a step{mfu}"
            )
        if self.left is not None and self.ends_at is not None and self.overdue:
            last = _date(self.ends_at - self.left)
            lines.append(f"  was to end at {_date(self.ends_at)}, silent since {last}")
        elif self.left is not None:
            when = "" if self.ends_at is None else f", {_date(self.ends_at)}"
            lines.append(f"  left at this rate: {clock_text(self.left)}{when}")
        if self.mlm_loss is not None:
            lines.append(f"  training: masked LM {self.mlm_loss:.3f} nats")
        if self.heldout_mlm_loss is not None and self.heldout_mlm_accuracy is not None:
            length = "" if self.heldout_max_seq_len is None else f" {self.heldout_max_seq_len}"
            lines.append(
                f"  held-out{length} at step {self.heldout_step:,}: masked LM "
                f"{self.heldout_mlm_loss:.3f} nats, {self.heldout_mlm_accuracy:.1%} right"
            )
        if self.probe_step is not None:
            scores = (f"{name} {value:.2f}" for name, value in self.probes.items())
            told = f"fine-tuned from step {self.probe_step:,}: {', '.join(scores)}"
            lines += wrap(printable(told), "  ", "    ")
        newest = "none"
        if self.checkpoint_age is not None:
            newest = f"step {self.checkpoint_step:,}, {_ago(self.checkpoint_age)}"
        rollbacks = f"; {count_text(self.rollbacks, 'rollback')}" if self.rollbacks else ""
        starts = f"{count_text(self.starts, 'start')} up to it{rollbacks}"
        lines.append(f"  newest whole checkpoint: {newest}; {starts}")
        return lines


def main(argv: list[str]) -> int:
    p = argparse.ArgumentParser(
        prog="python -m pretrain status",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("runs", nargs="+", metavar="RUN", help="a run folder (run_dir)")
    p.add_argument(
        "--silent-after", type=float, default=_PATIENCE, metavar="SECONDS",
        help="without a record a run counts as silent after so long, and after three times its own "
        "interval between records or its last evaluation's time if that is longer "
        f"(default {_PATIENCE:g})",
    )  # fmt: skip
    p.add_argument("--json", action="store_true", help="one JSON object a run and line")
    a = p.parse_args(argv)
    failure: UserError | None = None
    silent = False
    for run in a.runs:
        try:
            found = status(Path(run), time.time(), a.silent_after)
        except UserError as error:  # the others are told all the same
            if failure is not None:
                notice(f"error: {failure}", sys.stderr)
            failure = error
            continue
        silent |= not found.well
        show(found.to_json() if a.json else "\n".join(found.lines()))
    if failure is not None:
        raise failure
    return _SILENT if silent else 0


def status(run_dir: Path, now: float, silent_after: float = _PATIENCE) -> Status:
    """Of the run in `run_dir` at the time `now`. UserError where there is none."""
    config, metrics = read_config(run_dir), run_dir / "metrics.jsonl"
    finished = finished_steps(run_dir) == config.total_steps
    times: list[float] = []
    trained: dict[str, float] = {}
    heldout: dict[str, float] = {}
    evaluated = config.evaluation.every_steps > 0
    checkpoints = run_dir / "checkpoints"
    found = newest_checkpoint(checkpoints)
    checkpoint_step = 0 if found is None else found[0]
    saved_at = None
    with disk_errors(metrics):
        for record in records_from_the_end(metrics):
            if "train/loss" in record and len(times) < 2:
                trained = trained or record
                times.append(record["time"])
            elif "heldout/mlm_loss" in record:
                heldout = heldout or record
            later = 0 < checkpoint_step <= record["step"]
            if later and ("checkpoint/bytes" in record or record["step"] == checkpoint_step):
                saved_at = record["time"]
            if len(times) == 2 and (heldout or not evaluated) and not later:
                break
    age, starts, rollbacks = None, 0, 0
    if found is not None:
        folder, saved = step_folder(checkpoints, checkpoint_step), found[1]
        with disk_errors(folder):
            age = now - (saved_at or folder.stat().st_mtime)  # a copied folder's is the copy's
        starts = sum(e.get("event") in ("start", "init_from", "resume") for e in saved.history)
        known = Rollbacks(run_dir / ROLLBACKS, 0, 0).read(saved.rollbacks)
        rollbacks = len(known)

    step = config.total_steps if finished else int(trained.get("step", checkpoint_step))
    index, phase_step = _place(config.phases, step)
    phase = config.phases[index]
    silent_for = now - times[0] if times else None
    interval = times[0] - times[1] if len(times) == 2 else 0.0
    # Nothing is recorded while held-out text is evaluated, at one length after the other.
    lengths = last_evaluation(metrics).values() if heldout else ()
    evaluating = sum(r.get("heldout/seconds", 0.0) for r in lengths)
    limit = max(silent_after, _INTERVALS * max(interval, evaluating))
    probed = next(records_from_the_end(run_dir / PROBES), {})
    state = "finished" if finished else "empty"
    if not finished and silent_for is not None:
        lock = run_dir / "lock"
        with disk_errors(lock):
            state = "stopped" if lock.exists() and is_let_go(lock) else "training"
        # Of a record that is to come nothing tells when it was written.
        since = abs(silent_for) if state == "stopped" else silent_for
        state = state if since <= limit else "silent"
    rate = trained.get("throughput/tokens_per_second")
    seconds = trained.get("throughput/step_seconds")
    left = None
    if state in ("training", "stopped", "silent") and rate and seconds:
        left = tokens_left(config.phases, index, phase_step, rate * seconds) / rate
    return Status(
        run=str(run_dir),
        state=state,
        step=step,
        total_steps=config.total_steps,
        phase=index + 1,
        phases=len(config.phases),
        max_seq_len=phase.max_seq_len,
        phase_step=phase_step,
        phase_steps=phase.steps,
        silent_for=silent_for,
        tokens_per_second=rate,
        step_seconds=seconds,
        mfu=trained.get("throughput/mfu"),
        mlm_loss=trained.get("train/mlm_loss"),
        heldout_step=int(heldout["step"]) if heldout else None,
        heldout_max_seq_len=int(heldout.get("heldout/max_seq_len", 0)) or None,
        heldout_mlm_loss=heldout.get("heldout/mlm_loss"),
        heldout_mlm_accuracy=heldout.get("heldout/mlm_accuracy"),
        probe_step=int(probed["step"]) if probed else None,
        probes={k.removeprefix(PROBE): v for k, v in probed.items() if k.startswith(PROBE)},
        left=left,
        ends_at=times[0] + left if left is not None and state == "training" else None,
        checkpoint_step=checkpoint_step,
        checkpoint_age=age,
        starts=starts,
        rollbacks=rollbacks,
    )


def read_config(run_dir: Path) -> PretrainConfig:
    """UserError where there is no run."""
    file = run_dir / "config.yaml"
    found = look(file)
    if found is None or not stat.S_ISREG(found.st_mode):
        raise UserError(f"{run_dir}: no run folder (no config.yaml in it)")
    return load(str(file), PretrainConfig)


def _place(phases: tuple[PhaseConfig, ...], step: int) -> tuple[int, int]:
    """(index of the phase, step in it) of a step of the run; at a phase's end, that phase."""
    for index, phase in enumerate(phases):
        if step <= phase.steps or index + 1 == len(phases):
            return index, step
        step -= phase.steps
    raise AssertionError("a run has a phase")


def count_text(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _ago(seconds: float) -> str:
    return f"{clock_text(seconds)} ago"


def _date(at: float) -> str:
    return datetime.fromtimestamp(at).strftime("%Y-%m-%d %H:%M")
