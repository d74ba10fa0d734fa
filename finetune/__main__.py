"""`python -m finetune predict | follow | report | ablations`."""

from __future__ import annotations

import sys

from core.commands import dispatch

COMMANDS = {
    "predict": ("finetune.predict:main", "answers of a fine-tuned model for a file"),
    "follow": ("finetune.follow:main", "scores of each checkpoint of a pretraining run"),
    "report": ("finetune.report:main", "one table of the results of runs"),
    "ablations": ("finetune.ablations:main", "the paper's tables 5, 6 and 8 with our numbers"),
}


def main(argv: list[str] | None = None) -> int:
    """`argv`: by default the command line's."""
    return dispatch("finetune", COMMANDS, sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
