"""`python -m pretrain plan | doctor | sweep | status | export | import | report`."""

from __future__ import annotations

import sys

from core.commands import dispatch

COMMANDS = {
    "plan": ("pretrain.plan:main", "GPUs in; hours, memory, EFLOP, checkpoint bytes out"),
    "doctor": ("pretrain.doctor:main", "what a run would trip over on these machines"),
    "sweep": ("pretrain.sweep:main", "a list of runs, one after the other or shared by many"),
    "status": ("pretrain.status:main", "where runs stand, from their files alone"),
    "export": ("pretrain.convert:export_main", "checkpoint -> Hugging Face folder"),
    "import": ("pretrain.convert:import_main", "Hugging Face folder -> a folder for `init_from`"),
    "report": ("pretrain.report:main", "what a run learned: accuracies, filled-in sentences"),
}


def main(argv: list[str] | None = None) -> int:
    """`argv`: by default the command line's."""
    argv = sys.argv[1:] if argv is None else argv
    return dispatch("pretrain", COMMANDS, argv, of_many="doctor")


if __name__ == "__main__":
    sys.exit(main())
