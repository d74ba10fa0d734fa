"""`python -m data_pipeline sources DIR`: sources.json, which says of each document what source it
is of, for a data set that was prepared without it."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterable

from core.console import printable
from core.errors import UserError
from core.urls import is_url, local_path
from data_pipeline.corpus.manifest import SOURCES, Runs, load_manifest, write_source_map
from data_pipeline.corpus.shards import shard_documents


def runs(pieces: Iterable[tuple[int, int]]) -> Runs:
    """(source, documents) of pieces that follow one another, those of one source as one."""
    grouped = itertools.groupby(pieces, key=lambda piece: piece[0])
    return [(source, sum(documents for _, documents in some)) for source, some in grouped]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m data_pipeline sources", description=__doc__)
    parser.add_argument("directory", metavar="DIR", help="its folder")
    options = parser.parse_args(argv)
    if is_url(options.directory):
        raise UserError(f"{options.directory}: a folder is expected: the file is written into it")
    folder = local_path(options.directory)
    manifest = load_manifest(folder)
    shards: dict[str, Runs] = {}
    for shard in manifest.shards:
        documents = shard_documents(folder, shard, manifest.vocab_size)
        shards[shard.name] = runs((document.source, 1) for document in documents)
    write_source_map(folder, manifest, shards)
    counts = (f"{source.name} {source.documents_out:,}" for source in manifest.sources)
    print(printable(f"{folder / SOURCES}: documents: {', '.join(counts)}"))
    return 0
