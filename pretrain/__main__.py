"""`python -m pretrain plan | export | import | report`."""

from __future__ import annotations

import importlib
import sys

from core.errors import main_guard

COMMANDS = {
    "plan": ("pretrain.planner", "GPUs in; hours, memory, EFLOP, checkpoint bytes out"),
    "export": ("pretrain.convert", "checkpoint -> Hugging Face folder"),
    "import": ("pretrain.convert", "Hugging Face folder -> a folder for `init_from`"),
    "report": ("pretrain.report", "what a run learned: accuracies, filled-in sentences"),
}


def main(argv: list[str]) -> int:
    if not argv or argv[0] not in COMMANDS:
        print("usage: python -m pretrain COMMAND [--help]\n")
        for name, (_, help_text) in COMMANDS.items():
            print(f"  {name:<8} {help_text}")
        return 0 if argv[:1] in (["-h"], ["--help"]) else 2
    module, _ = COMMANDS[argv[0]]
    command = importlib.import_module(module)
    # convert serves two commands and is told which.
    rest = argv if module == "pretrain.convert" else argv[1:]
    return main_guard(lambda: command.main(rest))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
