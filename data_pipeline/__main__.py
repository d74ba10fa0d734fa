"""`python -m data_pipeline prepare | fetch | verify | show | sources | audit`."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
import traceback

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
    code = 1
    try:
        code = dispatch("data_pipeline", COMMANDS, argv)
    except SystemExit as end:  # of argparse
        code = end.code if isinstance(end.code, int) else 0
        raise
    except Exception:
        traceback.print_exc()
    finally:
        if code and argv[:1] == ["prepare"]:
            _end_the_others(code)
    return code


def _end_the_others(code: int) -> None:
    """Where MPI has not begun, MPICH's mpiexec does not end the ranks that wait there for one that
    leaves with a code: it is told, in the words of MPI_Abort (PMI-1)."""
    given = os.environ.get("PMI_FD", "")
    if "mpi4py.MPI" in sys.modules or not given.isdecimal():
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        sys.stdout.flush()
        with socket.socket(fileno=int(given)) as launcher:
            launcher.settimeout(10)
            time.sleep(0.5)  # mpiexec may drop what was said in the moment of the end
            launcher.sendall(f"cmd=abort exitcode={code}\n".encode())
            launcher.recv(1)  # until it ends this one, too
    except (OSError, OverflowError):  # of another launcher, or not handed on to this process
        pass


if __name__ == "__main__":
    sys.exit(main())
