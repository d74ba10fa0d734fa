"""A list of runs: `python -m pretrain sweep a.yaml b.yaml`.

Trains those that are not finished, one after the other; start it again to go on, or several times
at once, as in a Slurm array, to share the list. Of a finished one it says what its config has
changed since, and counts it as failed where that is the model or the data, or where its last
checkpoint is not whole. Exit codes: 0 all are finished or another sweep is at them, 2 some failed
(the others are trained), 85 stopped by a signal, or some are to be started again (also where an
earlier start of this Slurm job, or one that has ended, holds their lock), 137 the same and one of
them was killed, 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from configs.load import add_overrides, load
from core.console import Console, printable, show, table
from core.errors import Killed, TryAgain, UserError
from core.files import CHECKPOINT, Lock, check_run_dir, disk_errors
from core.processes import end_with, hand_on
from core.urls import NotThere, is_url
from data_pipeline.corpus.manifest import load_manifest
from pretrain import checkpoint, distributed, preflight
from pretrain.config import PretrainConfig
from pretrain.origin import with_shape_of_origin
from pretrain.run_state import changes_since, check_resumable, finished_steps

_RUN = Path(__file__).with_name("run.py")
# By itself or below srun, mpiexec (9) or deepspeed (247); docs/running.md has the launchers' codes.
_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL, 9, 247)
# A launcher that a signal ended, or whose own child was killed, hides the 85 of its ranks; a run
# that met one before it heard any has no code of its own.
_ENDS = [code for n in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1) for code in (-n, 128 + n)]
_MAY_PASS = (TryAgain.code, 0, *_ENDS, *_KILLED)


def main(argv: list[str]) -> int:
    p = argparse.ArgumentParser(
        prog="python -m pretrain sweep",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("files", nargs="+", metavar="FILE", help="a run's config, with its own run_dir")
    add_overrides(p, "override keys of all files, for example --set device=cpu")
    p.add_argument(
        "--launcher", default=shlex.quote(sys.executable), metavar="COMMAND",
        help="what starts pretrain/run.py, for example 'torchrun --standalone --nproc-per-node 8'; "
        "by default one process. torchrun ends with 1 after a kill as after a mistake: both count "
        "as failed",
    )  # fmt: skip
    p.add_argument("--list", action="store_true", help="print the runs and what is done, and stop")
    a = p.parse_args(argv)
    try:
        launcher = shlex.split(a.launcher)
    except ValueError as error:
        raise UserError(f"--launcher: {a.launcher}: {error}") from None
    if not launcher or shutil.which(launcher[0]) is None:
        raise UserError(f"--launcher: {a.launcher}: no such command")
    runs = {file: load(file, PretrainConfig, a.overrides, _filled) for file in a.files}
    folders: dict[str, str] = {}
    for file, config in runs.items():
        try:
            check_run_dir(Path(config.run_dir))
        except UserError as error:
            raise type(error)(f"{file}: {error}") from None
        if (other := folders.setdefault(os.path.realpath(config.run_dir), file)) != file:
            raise UserError(f"{file}: run_dir: {config.run_dir} is {other}'s, too")
    if a.list:
        rows = [[file, _state(config), config.run_dir] for file, config in runs.items()]
        show("\n".join(map(printable, table(rows))))
        return 0
    failed, again, killed, say = [], [], False, Console(active=True).say
    open_runs, taken = deque(runs.items()), list[tuple[str, PretrainConfig]]()
    with _Signals() as signals:
        while open_runs and not signals.asked:
            file, config = open_runs.popleft()
            folder = Path(config.run_dir)
            try:
                with disk_errors(folder, "run_dir"):
                    folder.parent.mkdir(parents=True, exist_ok=True)
                    lock = Lock(_lock_of(config))
                with lock, disk_errors(lock.path):
                    if _finished(config):
                        for line in _changes(config):
                            say(f"sweep: {file}: {folder} is finished; {line.strip()}")
                        continue
                    if not distributed.claim(lock):
                        taken.append((file, config))
                        continue
                    if _finished(config):
                        continue
                    if _at_work(folder, signals):  # by hand, or ending after its sweep
                        again.append(file)
                        say(f"sweep: {file}: another run is at work in {folder}")
                        continue
                    say(f"sweep: {file} -> {folder}")
                    code = signals.start(
                        [*launcher, str(_RUN), "--config", file]
                        + (["--set", *a.overrides] if a.overrides else [])
                    )
                    if signals.asked and (folder / "lock").exists():
                        with Lock(folder / "lock") as run:  # a launcher may end before its ranks
                            run.take_within(preflight.LOCK_PATIENCE)
                open_runs += taken  # whoever had them may have been stopped meanwhile
                taken.clear()
                if _finished(config) or signals.asked:
                    continue
                (again if code in _MAY_PASS else failed).append(file)
                killed |= code in _KILLED
                say(f"sweep: {file} ended with {code} and is not finished")
            except UserError as error:  # of this run's folder
                (again if isinstance(error, TryAgain) else failed).append(file)
                say(f"sweep: {file}: {error}")
    if signals.asked:
        return 130 if signal.SIGINT in signals.asked else TryAgain.code
    held = {_lock_of(config): file for file, config in taken if not _finished(config)}
    for lock in distributed.left_behind(held):
        again.append(held[lock])
        say(f"sweep: {held[lock]}: an ended start of a Slurm job holds {lock}")
    left = f"to be started again: {', '.join(again)}"
    if failed:
        lost = f"{len(failed)} of {len(runs)} runs failed: {', '.join(failed)}"
        raise UserError(f"{lost}; {left}" if again else lost)
    if again:
        raise (Killed if killed else TryAgain)(left)
    return 0


def _filled(tree: Any) -> Any:
    """What a run starts from may be still to come, as a run of the list."""
    try:
        return with_shape_of_origin(tree)
    except UserError:
        return tree


def _state(config: PretrainConfig) -> str:
    return f"{finished_steps(Path(config.run_dir)) or '-'} of {config.total_steps}"


def _at_work(folder: Path, signals: _Signals) -> bool:
    """Whether a run holds the lock of its folder for as long as a run would wait for it."""
    if not (folder / "lock").exists():
        return False
    with Lock(folder / "lock") as run:
        return not run.take_within(preflight.LOCK_PATIENCE, lambda: bool(signals.asked))


def _lock_of(config: PretrainConfig) -> Path:
    folder = Path(config.run_dir)
    if folder.name in ("", ".."):  # of `.` and `..`, whose own names stand elsewhere
        folder = Path(os.path.realpath(folder))
    return folder.parent / f".{folder.name}.sweep.lock"


def _finished(config: PretrainConfig) -> bool:
    """Whether all steps that the config asks for are done and on disk."""
    return finished_steps(Path(config.run_dir)) == config.total_steps


def _changes(config: PretrainConfig) -> list[str]:
    """What a finished run was trained with that its config says otherwise now. UserError where a
    start of it would be refused for that, or its last checkpoint is not whole by the sizes of its
    files; data that are elsewhere are not asked."""
    checkpoints = Path(config.run_dir) / "checkpoints"
    newest = checkpoint.newest_checkpoint(checkpoints)
    if newest is None or newest[0] < config.total_steps:
        last = max(checkpoints.glob(CHECKPOINT), default=None)
        if last is None:
            return ["no checkpoint is left: what its config has changed since cannot be told"]
        damage = checkpoint.verify(last, checksums=False) or f"{last} is the last checkpoint"
        raise UserError(
            f"{config.run_dir} is finished by its mark, but {damage}; {_RUN.name} "
            "trains again from one that is whole, if any is"
        )
    step, saved = newest
    if not is_url(config.data.dir):
        with contextlib.suppress(NotThere):  # they may be gone since
            manifest = load_manifest(config.data.dir)
            found = checkpoint.step_folder(checkpoints, step)
            check_resumable(saved, found, config, manifest)
    return changes_since(saved, config)[1]


class _Signals:
    """Hears SIGTERM, SIGUSR1, SIGHUP and SIGINT from here on, and hands them to the run of the
    moment. Ctrl-C reaches that by itself, through the terminal."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> _Signals:
        numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
        heard = [n for n in numbers if signal.getsignal(n) != signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._hear) for number in heard}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def start(self, command: Sequence[str]) -> int:
        """Exit code of the command."""
        end_with_this = functools.partial(end_with, os.getpid(), signal.SIGTERM)
        self._process = subprocess.Popen(command, preexec_fn=end_with_this)
        for number in self.asked:
            self._hand_on(number)
        return self._process.wait()

    def _hear(self, number: int, _frame: object) -> None:
        self.asked.append(number)
        self._hand_on(number)

    def _hand_on(self, number: int) -> None:
        process = self._process
        if process is not None and process.poll() is None:
            # Of Ctrl-C, which it has, it hears where it is stopped.
            hand_on(signal.SIGCONT if number == signal.SIGINT else number, process.pid)
