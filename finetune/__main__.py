"""`python -m finetune report RUNS`."""

from __future__ import annotations

import sys

from core.commands import dispatch

COMMANDS = {"report": ("finetune.report:main", "one table of the results of runs")}


def main(argv: list[str]) -> int:
    return dispatch("finetune", COMMANDS, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
