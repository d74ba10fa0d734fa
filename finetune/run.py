"""Fine-tune BERT and score it: `python finetune/run.py --config configs/finetune_glue.yaml`.

Runs every job of the grid that has no result yet; start it again to go on, or several times at
once to share the work. Exit codes: 0 done, 2 a mistake in config or data or a crash of one of
several workers, 85 start the same command again (stopped by SIGTERM, SIGUSR1 or SIGHUP after a
checkpoint, a disk did not answer, or an earlier start of this Slurm job, or one that has ended,
holds the lock of a job of the grid), 137 the same and one of several workers was killed, 130
stopped by Ctrl-C.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

if not __package__:  # the modules beside it, whichever checkout is installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

try:
    from core.errors import UserError, main_guard, stops_as_such
    from core.processes import hear_in_the_start, hear_no_more

    if __name__ == "__main__":
        hear_in_the_start()
    with stops_as_such():
        from configs.load import dump, load, parser
        from core.console import notice, show
except ModuleNotFoundError as missing:
    sys.exit(f"error: {missing}: install the project first: pip install -r requirements.txt")
except KeyboardInterrupt as early:
    code, line = (early.code, early) if hasattr(early, "code") else (130, "stopped by Ctrl-C")
    with contextlib.suppress(OSError):  # which nobody reads, perhaps
        os.write(2, f"{line}\n".encode())
    os._exit(code)


def main(argv: list[str] | None = None) -> int:
    def run() -> int:
        from finetune.config import FinetuneConfig

        p = parser(FinetuneConfig, __doc__)
        p.add_argument(
            "--part", default="0/1", metavar="I/N", help="only every N-th job from the I-th"
        )
        p.add_argument(
            "--list", action="store_true", help="print the jobs and what is done, and stop"
        )
        p.add_argument(
            "--collect", action="store_true", help="only choose the best of the results and report"
        )
        arguments = p.parse_args(argv)
        config = load(arguments.config, FinetuneConfig, arguments.overrides)
        if arguments.print_config:
            print(dump(config), end="")
            return 0

        # torch takes seconds to import; --help and config errors do not wait for it.
        from finetune import grid, report

        if arguments.list:
            for job in grid.jobs(config):
                show(f"{'done' if grid.done(config, job) else '-':<6}{job.task}/{job.name}")
            return 0
        code = 0 if arguments.collect else grid.sweep(config, _part(arguments.part))
        if code == 0:
            with grid.one_after_another(config):
                # Asked for, or told at the end of the work.
                lines = grid.collect(config)
                if not lines and not arguments.collect:
                    notice("no job has ended yet; the processes that are at work report")
                    return 0
                tell = show if arguments.collect else notice
                tell("\n".join(lines))
                report.write([config.run_dir], config.run_dir, tell)
                jobs = grid.jobs(config)
                if left := sum(not grid.done(config, job) for job in jobs):
                    said = "another process is at them, or another --part has them"
                    if arguments.collect:
                        said += ", or else the same command without --collect does them"
                    tell(f"{left} of {len(jobs)} jobs have no result yet: {said}")
        return code

    return main_guard(run)


def _part(text: str) -> tuple[int, int]:
    i, slash, n = text.partition("/")
    if not (slash and text.isascii() and i.isdigit() and n.isdigit() and int(i) < int(n)):
        raise UserError(f"--part {text}: expected I/N with I from 0 to N-1, such as 0/4")
    return int(i), int(n)


if __name__ == "__main__":
    code = main()
    hear_no_more()
    sys.exit(code)
