"""`python -m data_pipeline sources DIR`: sources.json, which says of each document what source it
is of, for a data set that was prepared without it."""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from core.console import printable
from core.errors import UserError
from core.files import disk_errors
from core.urls import is_url, join, local_path, open_file
from data_pipeline.corpus.manifest import SOURCES, Runs, ShardInfo, load_manifest, write_source_map
from data_pipeline.corpus.shards import SOURCE_AT, ShardIndex, index_of


def runs(pieces: Iterable[tuple[int, int]]) -> Runs:
    """(source, documents) of pieces that follow one another, those of one source as one."""
    grouped = itertools.groupby(pieces, key=lambda piece: piece[0])
    return [(source, sum(documents for _, documents in some)) for source, some in grouped]


def sources_of(tar: BinaryIO, index: ShardIndex, name: str) -> Runs:
    """Of a shard's documents, from two bytes of each record. UserError where `tar` is cut."""
    pieces = []
    for offset in index.offsets.tolist():
        source = os.pread(tar.fileno(), 2, offset + SOURCE_AT)
        if len(source) < 2:
            raise UserError(f"{name}: ends before byte {offset + SOURCE_AT + 2}")
        pieces.append((int.from_bytes(source, "little"), 1))
    return runs(pieces)


def _scan(folder: Path, shard: ShardInfo) -> Runs:
    path = join(folder, shard.files[0].name)
    with open_file(path) as tar, disk_errors(path):
        return sources_of(tar, index_of(folder, shard), path)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m data_pipeline sources", description=__doc__)
    parser.add_argument("directory", metavar="DIR", help="its folder")
    options = parser.parse_args(argv)
    if is_url(options.directory):
        raise UserError(f"{options.directory}: a folder is expected: the file is written into it")
    folder = local_path(options.directory)
    manifest = load_manifest(folder)
    write_source_map(folder, manifest, {s.name: _scan(folder, s) for s in manifest.shards})
    counts = (f"{source.name} {source.documents_out:,}" for source in manifest.sources)
    print(printable(f"{folder / SOURCES}: documents: {', '.join(counts)}"))
    return 0
