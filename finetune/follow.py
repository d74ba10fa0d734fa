"""Scores of a pretraining run as it goes: each new whole checkpoint of RUN is fine-tuned by the
grid of a config, small and fixed, in a process of its own, on this machine.

The run itself knows nothing of it. A line a checkpoint is appended to RUN/probes.jsonl, the medians
of the grid's jobs, and TensorBoard shows probe/TASK/MEASURE below RUN/probes. Start it again to go
on; it ends when the run has ended and its last checkpoint is scored, or with --once when there is
no new checkpoint.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from configs.load import load
from core.console import Console
from core.errors import TryAgain, UserError, short
from core.files import disk_errors
from finetune import results
from finetune.config import FinetuneConfig
from pretrain.checkpoint import complete_steps, step_folder
from pretrain.distributed import REQUEUE_EXIT_CODE
from pretrain.metrics import Recorder, records_from_the_end
from pretrain.run_state import finished_steps

PROBES = "probes.jsonl"


def command(config: str, checkpoint: Path, run_dir: Path, overrides: Sequence[str]) -> list[str]:
    """The fine-tuning of one checkpoint: no weights are kept and no test set is predicted."""
    return [
        sys.executable, str(Path(__file__).with_name("run.py")), "--config", config, "--set",
        "train.keep_weights=none", "train.predict_test=false", *overrides,
        f"encoder.path={checkpoint}", f"run_dir={run_dir}",
    ]  # fmt: skip


def run(line: Sequence[str], log: Path) -> int:
    """Exit code of a command whose output goes to `log`. SIGTERM is handed on to it."""
    started: list[subprocess.Popen] = []
    asked: list[int] = []

    def hand_on(number: int, _frame: object) -> None:
        asked.append(number)
        for process in started:
            process.terminate()

    before = signal.signal(signal.SIGTERM, hand_on)
    try:
        with disk_errors(log):
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("ab") as file:
                started.append(subprocess.Popen(line, stdout=file, stderr=subprocess.STDOUT))
        if asked:  # while it was started
            hand_on(asked[0], None)
        return started[0].wait()
    finally:
        signal.signal(signal.SIGTERM, before)


def medians(run_dir: Path) -> dict[str, float]:
    """By TASK/MEASURE, over all jobs of the grid."""
    found: dict[str, float] = {}
    for task in sorted({path.parent.parent for path in run_dir.glob(f"*/*/{results.RESULT}")}):
        jobs = [result for _, result in results.of_task(task)]
        for measure in jobs[0].scores:
            values = [job.scores[measure] for job in jobs if measure in job.scores]
            found[f"probe/{task.name}/{measure}"] = statistics.median(values)
    return found


class Follower:
    """One run that is followed."""

    def __init__(self, run: Path, config: str, overrides: Sequence[str], console: Console) -> None:
        self.run, self.config, self.overrides, self.console = run, config, overrides, console
        self.checkpoints = run / "checkpoints"
        with disk_errors(run):
            if not run.is_dir():
                raise UserError(f"{run}: no such folder")
        self.asked = load(config, FinetuneConfig, [*overrides, f"encoder.path={run}"])
        self.failed: set[int] = set()

    def next_step(self) -> int | None:
        """Of the oldest whole checkpoint that is newer than all that are scored."""
        done = next(records_from_the_end(self.run / PROBES), {}).get("step", 0)
        found = (s for s in complete_steps(self.checkpoints) if s > done and s not in self.failed)
        return min(found, default=None)

    def score(self, step: int) -> dict[str, Any] | None:
        """Of one checkpoint; None where its fine-tuning failed, which is said."""
        run_dir = self.run / "probes" / f"step-{step:08d}"
        line = command(self.config, step_folder(self.checkpoints, step), run_dir, self.overrides)
        log = run_dir.with_suffix(".log")
        self.console.say(f"step {step:,}: {', '.join(self.asked.task.names)} -> {log}")
        code = run(line, log)
        if code in (REQUEUE_EXIT_CODE, 130):
            raise TryAgain(f"{run_dir}: stopped by a signal; the same command goes on from here")
        found = medians(run_dir) if code == 0 else {}
        if not found:
            self.failed.add(step)
            last = (log.read_text(errors="replace").splitlines() or [""])[-1]
            self.console.say(f"step {step:,}: not scored (exit code {code}): {short(last, 300)}")
            return None
        recorder = Recorder(self.run / "probes", step - 1, active=True, lines=self.run / PROBES)
        recorder.write(step, found)
        recorder.close()
        shown = "  ".join(f"{name.removeprefix('probe/')} {v:.2f}" for name, v in found.items())
        self.console.say(f"step {step:,}: {shown}")
        return found


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m finetune follow",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", metavar="RUN", help="run_dir of a pretraining run")
    parser.add_argument("--config", required=True, metavar="FILE", help="of finetune/run.py")
    parser.add_argument(
        "--set",
        dest="overrides",
        action="extend",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="override keys of the file; encoder.path and run_dir are set here",
    )
    parser.add_argument("--every", type=float, default=60, metavar="SECONDS", help="between looks")
    parser.add_argument("--once", action="store_true", help="end when nothing is new")
    arguments = parser.parse_args(argv)
    run = Path(arguments.run)
    follower = Follower(run, arguments.config, arguments.overrides, Console(True))
    while True:
        ended = finished_steps(run) is not None  # looked at first: no checkpoint comes after it
        step = follower.next_step()
        if step is not None:
            follower.score(step)
        elif ended or arguments.once:
            return 1 if follower.failed else 0
        else:
            time.sleep(max(arguments.every, 0.1))
