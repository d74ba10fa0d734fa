"""A list of runs: `python -m pretrain sweep configs/ablations/*.yaml`.

Trains those that are not finished, one after the other; start it again to go on, or several times
at once, as in a Slurm array, to share the list. Exit codes: 0 all are finished or another sweep
is at them, 2 some ended with a mistake (the others are trained), 85 and 130 stopped by a signal,
or a run asks to be started again.
"""

from __future__ import annotations

import argparse
import contextlib
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from configs.load import load
from core.console import table
from core.errors import UserError
from core.files import Lock, disk_errors
from pretrain.config import PretrainConfig
from pretrain.run_state import finished_steps

_RUN = Path(__file__).with_name("run.py")
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


def main(argv: list[str]) -> int:
    p = argparse.ArgumentParser(
        prog="python -m pretrain sweep",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("files", nargs="+", metavar="FILE", help="a run's config, with its own run_dir")
    p.add_argument(
        "--set", dest="overrides", action="extend", nargs="+", default=[], metavar="KEY=VALUE",
        help="override keys of all files, for example --set device=cpu",
    )  # fmt: skip
    p.add_argument(
        "--launcher", default=sys.executable, metavar="COMMAND",
        help="what starts pretrain/run.py, for example 'deepspeed --num_gpus 8'; by default one "
        "process",
    )  # fmt: skip
    p.add_argument("--list", action="store_true", help="print the runs and what is done, and stop")
    a = p.parse_args(argv)
    runs = {file: load(file, PretrainConfig, a.overrides) for file in a.files}
    folders: dict[str, str] = {}
    for file, config in runs.items():
        if (other := folders.setdefault(config.run_dir, file)) != file:
            raise UserError(f"{file}: run_dir: {config.run_dir} is {other}'s, too")
    if a.list:
        rows = [[file, _state(config), config.run_dir] for file, config in runs.items()]
        print("\n".join(table(rows)))
        return 0
    failed = []
    for file, config in runs.items():
        if _finished(config):
            continue
        folder = Path(config.run_dir)
        with disk_errors(folder, "run_dir"):
            folder.mkdir(parents=True, exist_ok=True)
            lock = Lock(folder / "sweep.lock")
        with lock:
            if not lock.take(wait=False) or _finished(config):
                continue
            print(f"sweep: {file} -> {folder}", flush=True)
            code = _start(
                [*shlex.split(a.launcher), str(_RUN), "--config", file]
                + (["--set", *a.overrides] if a.overrides else [])
            )
            if not _finished(config):
                lock.path.unlink()
                with contextlib.suppress(OSError):  # a start that was refused left nothing
                    folder.rmdir()
        if code in (85, 130):
            return code
        if not _finished(config):
            failed.append(file)
            print(f"sweep: {file} ended with {code} and is not finished", flush=True)
    if failed:
        raise UserError(f"{len(failed)} of {len(runs)} runs failed: {', '.join(failed)}")
    return 0


def _state(config: PretrainConfig) -> str:
    return f"{finished_steps(Path(config.run_dir)) or '-'} of {config.total_steps}"


def _finished(config: PretrainConfig) -> bool:
    """Whether all steps that the config asks for are done and on disk."""
    return finished_steps(Path(config.run_dir)) == config.total_steps


def _start(command: Sequence[str]) -> int:
    """Exit code of the command, which gets the signals that come meanwhile."""
    process = subprocess.Popen(command)
    # Ctrl-C reaches it by itself, through the terminal.
    handlers = {number: lambda n, _: process.send_signal(n) for number in _SIGNALS}
    handlers[signal.SIGINT] = signal.SIG_IGN
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code
