"""Pretrain BERT: `deepspeed pretrain/run.py --config configs/pretrain_demo.yaml`.

Also started by torchrun, srun or mpiexec with one process a GPU, or alone as
`python pretrain/run.py`. Resumes by itself from the newest good checkpoint in run_dir.
Exit codes: 0 done, 1 an error of the program, 2 a mistake in config or data, 85 start the same
command again (stopped by SIGTERM, SIGUSR1 or SIGHUP after a checkpoint, another rank hangs or
died, or a disk or network did not answer), 130 stopped by Ctrl-C after a checkpoint, 141 nobody
reads the first lines.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
import traceback
from pathlib import Path

BEGAN_UNDER = [os.getppid()]  # before the imports, in whose seconds a launcher can end
if not __package__:  # the modules beside it, whichever checkout is installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

try:
    from core.errors import (
        UserError,
        limit_error,
        main_guard,
        memory_error,
        stopped_by,
        stops_as_such,
    )
    from core.processes import (
        go_on_within,
        hear,
        hear_in_the_start,
        hear_no_more,
        leave_apart,
        started_together,
    )

    if __name__ == "__main__":
        hear_in_the_start()
    with stops_as_such():
        from pretrain.machine import launchers

        if (found := launchers())[:1] == BEGAN_UNDER:
            BEGAN_UNDER = found  # with the runner of deepspeed

        from configs.load import dump, parser
        from core.console import notice
except (Exception, KeyboardInterrupt) as early:
    code, line = getattr(early, "code", 130), str(early) or "stopped by Ctrl-C"
    if isinstance(early, ModuleNotFoundError):
        code = 1
        line = f"error: {early}: install the project first: pip install -r requirements.txt"
    elif isinstance(early, Exception):
        code, line = 1, traceback.format_exc().rstrip()
    with contextlib.suppress(OSError):  # which nobody reads, perhaps
        os.write(2, f"{line}\n".encode())
    from core.processes import end_the_others  # again: it may not have come to that

    end_the_others(code)
    os._exit(code)

_SPOKEN_SECONDS, _SILENT_SECONDS = 1.0, 5.0


def main() -> None:
    code, world, watchdog, mistake, quiet = 2, None, None, "", False
    silent = _SILENT_SECONDS

    def start_and_train() -> int:
        nonlocal world, watchdog, silent
        arguments, config = read_command_line()
        if arguments.print_config:
            print(dump(config), end="")
            return 0

        # torch and deepspeed take seconds to import; --help and config errors do not wait.
        from pretrain import distributed, numerics, preflight, trackers
        from pretrain.train import Trainer
        from pretrain.watchdog import Progress, Watchdog

        numerics.set_switches(deterministic=config.engine.deterministic)
        world = distributed.start(config.device, BEGAN_UNDER)
        seconds, progress = config.watchdog_seconds, Progress()
        with distributed.ends_with_another():
            preflight.require_same_orders(seconds, arguments.stop_at_step, world)
            preflight.set_threads(config.threads, world)
            if seconds:
                folder = Path(config.run_dir)
                watchdog = Watchdog(world, seconds, folder, progress, BEGAN_UNDER)
        with preflight.run_folder(config, world) as lock:
            dataset = preflight.check(config, world)
            trainer = Trainer(config, world, progress, dataset, lock)
            silent += trackers.PATIENCE * len(config.logging.trackers)  # rank 0 closes them
            return trainer.run(arguments.stop_at_step)

    def run() -> int:
        nonlocal mistake, quiet
        try:
            with stops_as_such():
                return start_and_train()
        except (UserError, OSError) as error:
            mistake, quiet = str(error), getattr(error, "quiet", False)
            raise
        except KeyboardInterrupt as error:
            _, mistake = stopped_by(error)  # of this rank alone, perhaps: the others hear of it
            raise
        except (MemoryError, RuntimeError) as error:
            if (out := limit_error(error)) is not None:
                mistake = str(out)
                raise out from None
            if (out := memory_error(error)) is None:
                raise
            mistake = f"{out} (phases.N.micro_batch_rows and `python -m pretrain plan` help)"
            raise UserError(mistake) from None

    try:
        code = main_guard(run)
    except SystemExit as left:  # argparse has said why
        code = left.code if type(left.code) is int else 1
        if isinstance(left.code, str):
            notice(left.code, sys.stderr)
        mistake = "usage" if code else ""
    except Exception as error:
        try:
            if watchdog is not None:
                watchdog.failed(error)
            notice(traceback.format_exc().rstrip(), sys.stderr)
            code, mistake = 1, f"{type(error).__name__}: {error}"
        except KeyboardInterrupt as stopped:
            code, mistake = stopped_by(stopped)
            notice(mistake, sys.stderr)

    # From here on it only waits: for the others, whose watchdog takes one that leaves without a
    # word for dead, and for those that are to hear of the end.
    hear(lambda: os._exit(code) if watchdog is None else None)
    if world is not None and code == 0:
        from pretrain import distributed

        if watchdog is not None:  # which ends one that is stopped here, but for the last moment
            go_on_within(distributed.TIMEOUT.total_seconds())
        distributed.meet(world)
    if watchdog is not None:
        # Of a quiet rank rank 0 has the error itself, and may still be closing the trackers.
        watchdog.close(code, "" if quiet else mistake)
    # srun and launchers end all ranks with the first that leaves: the one that spoke gives the
    # others time to come here, those that are silent leave after it, all with one code.
    if world is not None:
        from pretrain import distributed

        hear(lambda: os._exit(code))
        if quiet or (mistake and world.size > 1):
            time.sleep(silent if quiet else _SPOKEN_SECONDS)
        distributed.finish(code)
    if quiet or (code and _has_others()):  # which are on their way, perhaps in the imports
        leave_apart(code, _SILENT_SECONDS)
    hear_no_more()
    sys.exit(code)


def _has_others() -> bool:
    with contextlib.suppress(UserError):
        return max(started_together().values(), default=1) > 1
    return False


def read_command_line() -> tuple[argparse.Namespace, object]:
    from pretrain.config import PretrainConfig, load_run

    p = parser(PretrainConfig, __doc__)
    p.add_argument(
        "--stop-at-step",
        type=int,
        metavar="N",
        help="write a checkpoint and stop when step N of the run is done; start again to go on",
    )
    p.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # the launcher's
    arguments = p.parse_args()
    if arguments.stop_at_step is not None and arguments.stop_at_step < 1:
        p.error("--stop-at-step: steps are counted from 1")
    try:
        return arguments, load_run(arguments.config, arguments.overrides)
    except UserError as error:
        error.quiet = bool(arguments.local_rank)  # the first rank of the host has read the same
        raise


if __name__ == "__main__":
    main()
