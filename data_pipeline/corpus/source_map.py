"""`python -m data_pipeline sources DIR`: sources.json, which says of each document what source it
is of, for a data set that was prepared without it."""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Iterable
from pathlib import Path

from core.console import printable
from core.errors import UserError
from core.files import disk_errors
from core.urls import is_url, join, local_path, open_file
from data_pipeline.corpus.manifest import SOURCES, Runs, ShardInfo, load_manifest, write_source_map
from data_pipeline.corpus.shards import SOURCE_AT, index_of


def runs(pieces: Iterable[tuple[int, int]]) -> Runs:
    """(source, documents) of pieces that follow one another, those of one source as one."""
    grouped = itertools.groupby(pieces, key=lambda piece: piece[0])
    return [(source, sum(documents for _, documents in some)) for source, some in grouped]


def scan(directory: Path, shard: ShardInfo) -> Runs:
    """From the records themselves, two bytes of each. UserError where the shard is cut."""
    path = join(directory, shard.files[0].name)
    pieces = []
    with open_file(path) as file, disk_errors(path):
        for offset in index_of(directory, shard).offsets.tolist():
            source = os.pread(file.fileno(), 2, offset + SOURCE_AT)
            if len(source) < 2:
                raise UserError(f"{path}: ends before byte {offset + SOURCE_AT + 2}")
            pieces.append((int.from_bytes(source, "little"), 1))
    return runs(pieces)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m data_pipeline sources", description=__doc__)
    parser.add_argument("directory", metavar="DIR", help="its folder")
    options = parser.parse_args(argv)
    if is_url(options.directory):
        raise UserError(f"{options.directory}: a folder is expected: the file is written into it")
    folder = local_path(options.directory)
    manifest = load_manifest(folder)
    write_source_map(folder, manifest, {s.name: scan(folder, s) for s in manifest.shards})
    counts = (f"{source.name} {source.documents_out:,}" for source in manifest.sources)
    print(printable(f"{folder / SOURCES}: documents: {', '.join(counts)}"))
    return 0
