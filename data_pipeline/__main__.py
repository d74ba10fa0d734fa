"""`python -m data_pipeline prepare | verify | show | audit`."""

from __future__ import annotations

import importlib
import sys

from core.errors import main_guard

COMMANDS = {
    "prepare": ("data_pipeline.corpus.prepare", "text -> shards, index and manifest (MPI)"),
    "verify": ("data_pipeline.corpus.verify", "check every byte of the shards"),
    "show": ("data_pipeline.corpus.show", "documents back as text, lengths, counts by source"),
    "audit": ("data_pipeline.stream.audit", "prove the order and content of the batches"),
}


def main(argv: list[str]) -> int:
    if not argv or argv[0] not in COMMANDS:
        print("usage: python -m data_pipeline COMMAND [--help]\n")
        for name, (_, help_text) in COMMANDS.items():
            print(f"  {name:<8} {help_text}")
        return 0 if argv[:1] in (["-h"], ["--help"]) else 2
    # One import a command: `verify` needs no MPI and `prepare` no torch.
    command = importlib.import_module(COMMANDS[argv[0]][0])
    return main_guard(lambda: command.main(argv[1:]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
