"""`python -m finetune report RUNS`, `python -m finetune ablations RUNS`."""

from __future__ import annotations

import sys

from core.commands import dispatch

COMMANDS = {
    "report": ("finetune.report:main", "one table of the results of runs"),
    "ablations": ("finetune.ablations:main", "the paper's tables 5, 6 and 8 with our numbers"),
}


def main(argv: list[str] | None = None) -> int:
    """`argv`: by default the command line's."""
    return dispatch("finetune", COMMANDS, sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
