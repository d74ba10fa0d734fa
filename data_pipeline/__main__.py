"""`python -m data_pipeline prepare | fetch | verify | show | sources | audit`."""

from __future__ import annotations

import sys

from core.commands import dispatch

# One import a command: `verify` needs no MPI and `prepare` no torch.
COMMANDS = {
    "prepare": ("data_pipeline.corpus.prepare:main", "text -> shards, index and manifest (MPI)"),
    "fetch": ("data_pipeline.corpus.fetch:main", "dumps of Wikipedia, by published checksums"),
    "verify": ("data_pipeline.corpus.verify:main", "check every byte of the shards"),
    "show": ("data_pipeline.corpus.show:main", "documents back as text, lengths, counts by source"),
    "sources": ("data_pipeline.corpus.source_map:main", "which source each document is of"),
    "audit": ("data_pipeline.stream.audit:main", "prove the order and content of the batches"),
}


def main(argv: list[str] | None = None) -> int:
    """`argv`: by default the command line's."""
    argv = sys.argv[1:] if argv is None else argv
    return dispatch("data_pipeline", COMMANDS, argv, of_many="prepare")


if __name__ == "__main__":
    sys.exit(main())
