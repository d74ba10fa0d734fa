"""`python -m finetune report RUNS`."""

from __future__ import annotations

import sys

from core.errors import main_guard

USAGE = (
    "usage: python -m finetune report RUN [RUN ...] [--out DIR]\n\n  report   one table of results"
)


def main(argv: list[str]) -> int:
    if argv[:1] != ["report"]:
        print(USAGE)
        return 0 if argv[:1] in (["-h"], ["--help"]) else 2
    from finetune import report

    return main_guard(lambda: report.main(argv[1:]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
