"""Scores of a pretraining run as it goes: each new whole checkpoint of RUN is fine-tuned by the
grid of a config, small and fixed, in a process of its own, on this machine.

The run itself knows nothing of it. A line a checkpoint is appended to RUN/probes.jsonl, the medians
of the grid's jobs, and TensorBoard shows probe/TASK/MEASURE below RUN/probes. Start it again to go
on; it ends when the run has ended and its last checkpoint is scored, or with --once when there is
no new checkpoint. A checkpoint whose fine-tuning fails is not scored, and tried again at the next
start only if no later one has been scored. New weights at a step that is scored are scored anew,
and so is what comes after it. Changes of the config or the task's files since the last score are
said.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from configs.load import add_overrides, differences, load, override
from core.console import Console
from core.errors import TryAgain, UserError, short
from core.files import Lock, disk_errors
from core.processes import end_with, hand_on
from finetune import grid, results
from finetune.config import FinetuneConfig
from pretrain.checkpoint import complete_steps, digest, step_folder
from pretrain.metrics import Recorder, records_from_the_end
from pretrain.run_state import PROBE, PROBES, finished_steps

# Of a line, beginnings of digests as numbers: of the checkpoint, and of the task's files.
_MARK, _DATA = "checkpoint", "task_files"
_QUICK = ("train.keep_weights=none", "train.predict_test=false")
_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


def command(config: str, checkpoint: Path, run_dir: Path, overrides: Sequence[str]) -> list[str]:
    """The fine-tuning of one checkpoint: no weights are kept and no test set is predicted."""
    return [
        sys.executable, str(Path(__file__).with_name("run.py")), "--config", config, "--set",
        *_QUICK, *overrides,
        override("encoder.path", str(checkpoint)), override("run_dir", str(run_dir)),
    ]  # fmt: skip


def run(line: Sequence[str], log: Path) -> int:
    """Exit code of a command whose output goes to `log`. A signal that asks this process to stop is
    handed on, and the command's end waited for: then KeyboardInterrupt or TryAgain."""
    started: list[subprocess.Popen] = []
    asked: list[int] = []

    def stop(number: int, _frame: object) -> None:
        asked.append(number)
        for process in started:
            if process.poll() is None:
                # As from a terminal Ctrl-C is for the workers too; a sweep forwards the others.
                ctrl_c = number == signal.SIGINT
                hand_on(number if ctrl_c else signal.SIGTERM, process.pid, whole_group=ctrl_c)

    before = {n: f for n in _STOPS if (f := signal.getsignal(n)) != signal.SIG_IGN}
    for number in before:
        signal.signal(number, stop)
    try:
        with disk_errors(log):
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("ab") as file:
                started.append(
                    # In a group of its own: signals come from here alone, each once.
                    subprocess.Popen(
                        line,
                        stdout=file,
                        stderr=subprocess.STDOUT,
                        process_group=0,
                        preexec_fn=partial(end_with, os.getpid(), signal.SIGTERM),
                    )
                )
        if asked:  # while it was started
            stop(asked[0], None)
        code = started[0].wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if signal.SIGINT in asked[:1]:
        raise KeyboardInterrupt
    if asked:
        raise TryAgain(f"{log}: stopped by a signal; the same command goes on from here")
    return code


def results_of(config: FinetuneConfig) -> list[results.Result]:
    """Of the jobs of the grid; none where a job has no result."""
    paths = [grid.folder_of(config, job) / results.RESULT for job in grid.jobs(config)]
    return [results.read(path) for path in paths] if all(p.exists() for p in paths) else []


def medians(found: Sequence[results.Result]) -> dict[str, float]:
    """By TASK/MEASURE."""
    values: dict[str, list[float]] = defaultdict(list)
    for result in found:
        for measure, score in result.scores.items():
            values[f"{PROBE}{result.task}/{measure}"].append(score)
    return {name: statistics.median(scores) for name, scores in values.items()}


def task_files(found: Sequence[results.Result]) -> int:
    """A number that stands for what the task's files held, wherever they were."""
    digests = {d for r in found for name, d in r.made_of.items() if name != r.encoder}
    return _number(hashlib.sha256("".join(sorted(digests)).encode()).hexdigest())


def _number(digest: str) -> int:
    return int(digest[:12], 16)


class Follower:
    """One run that is followed."""

    def __init__(self, run: Path, config: str, overrides: Sequence[str], console: Console) -> None:
        self.run, self.config, self.overrides, self.console = run, config, overrides, console
        self.checkpoints = run / "checkpoints"
        with disk_errors(run):
            if not run.is_dir():
                raise UserError(f"{run}: no such folder")
        own = override("encoder.path", str(run))
        self.asked = load(config, FinetuneConfig, [*_QUICK, *overrides, own])
        self.failed: set[int] = set()
        self._lock: Lock | None = None

    def alone(self) -> Lock:
        """Held while this process follows the run; UserError where another does."""
        folder = self.run / "probes"
        with disk_errors(folder):
            folder.mkdir(exist_ok=True)
            lock = Lock(folder / "lock")
        with suppress(OSError):  # a file system without locks
            if not lock.take(wait=False):
                lock.close()
                raise UserError(f"{folder}: another process follows this run")
        self._lock = lock
        return lock

    def check_place(self) -> None:
        """UserError where another run stands there since it was followed, or none."""
        with disk_errors(self.run):
            if self._lock is not None and not self._lock.is_in_place():
                raise UserError(f"{self.run}: was removed or replaced while it was followed")

    def say_changes(self) -> None:
        """Of the config since the newest score: what is scored stays as it is."""
        if (newest := next(records_from_the_end(self.run / PROBES), None)) is None:
            return
        step = int(newest["step"])
        try:
            mark = newest.get(_MARK, 0)
            scored_in = self._run_dir(step, int(mark) if math.isfinite(mark) else 0)
            before = load(str(scored_in / "config.yaml"), FinetuneConfig)
        except UserError:  # removed since, perhaps
            return
        encoder = before.encoder.model_copy(update={"path": self.asked.encoder.path})
        old, new = (
            config.of_a_job | {"grid": config.grid.model_dump()}
            for config in (before.model_copy(update={"encoder": encoder}), self.asked)
        )
        for key, (was, now) in itertools.islice(differences(old, new).items(), 1):
            self.console.say(
                f"warning: the config has changed since step {step:,} was scored ({key}: "
                f"{short(str(was))} -> {short(str(now))}): scores do not compare, and steps that "
                f"are scored stay so; to score all anew, remove {self.run / 'probes'} and "
                f"{self.run / PROBES}"
            )

    def _run_dir(self, step: int, mark: int) -> Path:
        return self.run / "probes" / f"step-{step:08d}-{mark:012x}"

    def next_step(self) -> int | None:
        """Of the oldest whole checkpoint that is newer than all that are scored, or has other
        weights than those that were."""
        scored = {int(r["step"]): r.get(_MARK) for r in records_from_the_end(self.run / PROBES)}
        newest = max(scored, default=0)
        for step in sorted(complete_steps(self.checkpoints)):
            if step in self.failed or (step <= newest and scored.get(step) is None):
                continue
            if step > newest or self.mark(step) not in (None, scored[step]):
                return step
        return None

    def mark(self, step: int) -> int | None:
        """A number that stands for what a checkpoint holds; None where it is gone."""
        found = digest(step_folder(self.checkpoints, step))
        return None if found is None else _number(found)

    def _say_gone(self, step: int) -> None:
        self.failed.add(step)
        self.console.say(f"step {step:,}: not scored: its checkpoint is gone")

    def score(self, step: int) -> dict[str, float] | None:
        """Of one checkpoint; None where its fine-tuning failed, which is said."""
        mark = self.mark(step)
        if mark is None:
            return self._say_gone(step)
        run_dir = self._run_dir(step, mark)
        line = command(self.config, step_folder(self.checkpoints, step), run_dir, self.overrides)
        log = run_dir.with_suffix(".log")
        self.console.say(f"step {step:,}: {', '.join(self.asked.task.names)} -> {log}")
        code = run(line, log)
        made = self.asked.model_copy(update={"run_dir": str(run_dir)})
        found = results_of(made) if code == 0 else []
        if not found:
            with disk_errors(log):  # the run may have been removed meanwhile
                last = (log.read_text(errors="replace").splitlines() or [""])[-1]
            if self.mark(step) is None:
                return self._say_gone(step)
            self.failed.add(step)
            why = f"exit code {code}" if code else "not every job has a result"
            self.console.say(f"step {step:,}: not scored ({why}): {short(last, 300)}")
            return None
        self.check_place()
        scores, data = medians(found), task_files(found)
        before = next(records_from_the_end(self.run / PROBES), {})
        if before.get(_DATA, data) != data:
            self.console.say(
                f"step {step:,}: warning: the task's files have changed since step "
                f"{before['step']:,} was scored: the scores do not compare"
            )
        recorder = Recorder(self.run / "probes", step - 1, active=True, lines=self.run / PROBES)
        recorder.write(step, {_MARK: mark, _DATA: data, **scores}, scores)
        recorder.close()
        shown = "  ".join(f"{name.removeprefix(PROBE)} {v:.2f}" for name, v in scores.items())
        self.console.say(f"step {step:,}: {shown}")
        return scores


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m finetune follow",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", metavar="RUN", help="run_dir of a pretraining run")
    parser.add_argument("--config", required=True, metavar="FILE", help="of finetune/run.py")
    add_overrides(parser, "override keys of the file; encoder.path and run_dir are set here")
    parser.add_argument("--every", type=float, default=60, metavar="SECONDS", help="between looks")
    parser.add_argument("--once", action="store_true", help="end when nothing is new")
    arguments = parser.parse_args(argv)
    if not 0 <= arguments.every <= 1e6:
        raise UserError("--every: seconds from 0 to 1000000 are expected")
    run = Path(arguments.run)
    follower = Follower(run, arguments.config, arguments.overrides, Console(True))
    with follower.alone():
        follower.say_changes()
        while True:
            follower.check_place()
            ended = finished_steps(run) is not None  # looked at first: no checkpoint comes after it
            step = follower.next_step()
            if step is not None:
                follower.score(step)
            elif ended or arguments.once:
                return 1 if follower.failed else 0
            else:
                time.sleep(max(arguments.every, 0.1))
