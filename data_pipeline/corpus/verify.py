"""Is every byte of a dataset what its manifest says? Reads all files once, at the speed of the disk
or of the connection.

In a file whose sha256 is not right the records are checked one by one, so the answer names the
record and the source document, not only the file. In one whose sha256 is right they are read as
training reads them: a writer may have meant what training refuses.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import numpy as np

from core.console import notice, printable, show
from core.errors import LONGEST, NoRoom, TryAgain, UserError, short
from core.files import disk_errors
from core.urls import (
    NotThere,
    Patience,
    Refused,
    Wrong,
    is_url,
    join,
    local_path,
    open_file,
    read,
    read_open,
)
from data_pipeline.corpus.manifest import (
    MANIFEST,
    SOURCES,
    VOCAB,
    Manifest,
    Runs,
    ShardFile,
    ShardInfo,
    load_manifest,
    load_source_map,
    load_vocabulary,
    shard_files,
)
from data_pipeline.corpus.shards import (
    BLOCK,
    END_OF_TAR,
    DamagedRecord,
    ShardIndex,
    check_rows,
    open_hashed,
    parse_document,
    parse_index,
    read_documents,
    record_bytes,
    scan,
    tar_header,
)
from data_pipeline.corpus.source_map import runs


def verify(
    directory: str | Path,
    progress: Callable[[int], None] = lambda _: None,
    patience: Patience | None = None,
) -> list[str]:
    """Everything that is wrong with a dataset, as `findings_of` tells it; empty: nothing."""
    return list(findings_of(directory, progress, patience))


def findings_of(
    directory: str | Path,
    progress: Callable[[int], None] = lambda _: None,
    patience: Patience | None = None,
) -> Iterator[str]:
    """What is wrong with a dataset, one line each, as it is found.

    directory: a folder, or a URL, whose shards are fetched one by one and not kept, and once more
    where they are not right; as a URL cannot be listed, files that the manifest does not name are
    found in folders alone. `progress` is called with the number of bytes just read. UserError if
    there is no such folder, NotThere if there is no manifest at the URL, Refused if manifest or
    vocabulary is not given, NoRoom for what is fetched, TryAgain if nobody answers, or not alike.
    """
    remote = is_url(directory)
    if not remote and not local_path(directory).is_dir():
        raise UserError(f"{directory}: no such folder")
    findings: list[str] = []
    if remote:  # what is wrong with the URL, or the way to it, is no finding
        read(join(directory, MANIFEST), patience)
    with _errors_into(findings, gone=remote):
        manifest = load_manifest(directory, patience)
    if findings:
        yield from findings
        return
    with _errors_into(findings):
        pieces = load_vocabulary(directory, manifest, patience).count(b"\n")
        if pieces != manifest.vocab_size:
            findings.append(f"{VOCAB}: {pieces} pieces, the manifest says {manifest.vocab_size}")
    sources: dict[str, Runs] = {}
    # S3 refuses what is not there to whom it does not list the rest.
    with contextlib.suppress(NotThere, Refused), _errors_into(findings, gone=True):
        sources = load_source_map(directory, manifest, patience).shards
    if not remote:
        findings += _extra_files(local_path(directory), manifest)
    yield from findings
    by_hash = {shard.sha256: shard.name for shard in manifest.shards}
    firsts = manifest.first_ordinals

    def fetch(file: ShardFile) -> BinaryIO:
        return open_file(join(directory, file.name), patience, limit=file.bytes)

    def check(shard: ShardInfo) -> list[str]:
        named = sources.get(shard.name)
        size = manifest.vocab_size
        first = firsts[shard.name]
        return _verify_shard(fetch, remote, shard, first, by_hash, size, named, progress)

    # Hashing leaves the interpreter lock alone, so threads keep a fast disk busy.
    with ThreadPoolExecutor(4) as pool:
        try:
            for found in pool.map(check, manifest.shards):
                yield from found
        finally:  # who is no longer asked waits for the shards that are begun alone
            pool.shutdown(wait=False, cancel_futures=True)


@contextlib.contextmanager
def _errors_into(findings: list[str], gone: bool = False) -> Iterator[None]:
    """A UserError inside becomes a finding; not that nobody answers, that the origin refuses, that
    this machine has no room, nor, with `gone`, that a file is not there."""
    try:
        yield
    except UserError as error:
        of_the_way = isinstance(error, TryAgain | Refused | NoRoom) and not isinstance(error, Wrong)
        if of_the_way or (gone and isinstance(error, NotThere)):
            raise
        findings.append(str(error))


def _extra_files(directory: Path, manifest: Manifest) -> list[str]:
    known = {file.name for shard in manifest.shards for file in shard.files}
    paths = sorted(shard_files(directory))
    return [
        f"{path.name}: extra file, not in the manifest" for path in paths if path.name not in known
    ]


def _verify_shard(
    fetch: Callable[[ShardFile], BinaryIO],
    remote: bool,
    shard: ShardInfo,
    first: int,
    by_hash: dict[str, str],
    vocab_size: int,
    sources: Runs | None,
    progress: Callable[[int], None],
) -> list[str]:
    """first: the number, in its split, of the shard's first document. sources: of its documents,
    as sources.json says."""
    findings: list[str] = []
    files: dict[str, BinaryIO] = {}  # those that are to be looked into
    right: set[str] = set()
    with contextlib.ExitStack() as opened:
        for ending, stated in zip(("tar", "idx"), shard.files, strict=True):
            name = stated.name
            try:
                with _errors_into(findings, gone=True):
                    file, found, size = opened.enter_context(
                        open_hashed(functools.partial(fetch, stated), stated, remote, progress)
                    )
                    sized = f"{name}: {size} bytes, the manifest says {stated.bytes}"
                    if found == stated.sha256:
                        right.add(ending)
                        if size != stated.bytes:
                            findings.append(sized)
                    elif ending == "tar" and found in by_hash:
                        other = by_hash[found]
                        findings.append(f"{name}: holds the content of {other}.tar (swapped)")
                        continue
                    elif size != stated.bytes:
                        findings.append(sized)
                    else:
                        findings.append(f"{name}: sha256 differs from the manifest's")
                    files[ending] = file
            except NotThere:
                findings.append(f"{name}: missing")
            except Refused as error:
                findings.append(f"{name}: not given, not checked ({error})")
        index = None
        if "idx" in files:
            with _errors_into(findings), disk_errors(f"{shard.name}.idx"):
                data = read_open(files["idx"], f"{shard.name}.idx")
                index = parse_index(data, f"{shard.name}.idx", "idx" in right)
        if index is not None and "idx" in right:
            with _errors_into(findings):
                check_rows(index, f"{shard.name}.idx", shard)
                if "tar" in right:
                    _check_headers(shard, files["tar"], index, first)
                    _check_documents(shard, files["tar"], index, vocab_size, sources)
        if "tar" in files and "tar" not in right:
            records = _damaged_records(files["tar"], index, "idx" in right, first)
            findings += [f"{shard.name}.tar: {line}" for line in records]
        elif "tar" in files and index is not None and "idx" not in right:
            findings += [f"{shard.name}.idx: {line}" for line in _damaged_rows(files["tar"], index)]
    return findings


def _check_headers(shard: ShardInfo, tar: BinaryIO, index: ShardIndex, first: int) -> None:
    """UserError for records that are not numbered as training counts them."""
    places = zip(index.offsets.tolist(), index.sizes.tolist(), strict=True)
    with disk_errors(name := shard.files[0].name):
        for number, (offset, size) in enumerate(places):
            tar.seek(max(0, offset - BLOCK))
            if tar.read(BLOCK) != tar_header(first + number, size):
                why = "its tar header is not the one written"
                raise DamagedRecord(f"{name} record {number}: {why}")


def _check_documents(
    shard: ShardInfo, tar: BinaryIO, index: ShardIndex, vocab_size: int, sources: Runs | None
) -> None:
    """UserError for records that are as their author meant them, and that training refuses, or
    reads otherwise than they are since the index has other lengths."""
    own, first = [], 0
    for number, document in enumerate(read_documents(tar, shard.files[0].name, index, vocab_size)):
        end = first + int(index.sentence_counts[number])
        if not np.array_equal(index.sentence_lengths[first:end], document.lengths):
            why = "its sentence lengths are not those of its record"
            raise DamagedRecord(f"{shard.files[1].name} row {number}: {why}")
        own.append(document.source)
        first = end
    found = runs((source, 1) for source in own)
    if sources is not None and found != runs(run for run in sources if run[1]):
        raise UserError(f"{SOURCES}: names other sources than the records of {shard.name}")


def _name_of(payload: bytes) -> str:
    """The document's id as far as a damaged record still tells it."""
    try:
        return parse_document(payload).id
    except DamagedRecord:
        length = int.from_bytes(payload[10:12], "little")
        return payload[12 : 12 + min(length, 80)].rstrip(b"\0").decode("utf-8", "replace")


def _damaged_records(
    file: BinaryIO, index: ShardIndex | None, index_is_right: bool, first: int
) -> list[str]:
    """What is wrong with a tar, record by record, as its index says, or else as it says itself."""
    found: list[str] = []
    end = 0
    sizes = index.sizes if index is not None and index_is_right else None
    try:
        for number, member in enumerate(scan(file, sizes)):
            name = _name_of(member.payload)
            where = f"record {number} (byte {member.offset}, document {name!r})"
            size = len(member.payload) if sizes is None else int(sizes[number])
            end = member.offset + record_bytes(size) - BLOCK
            if member.offset + len(member.payload) + len(member.padding) < end:
                return [*found, f"{where}: the file ends here; later records are lost too"]
            wrong = None
            if index is not None and number < len(index):
                wrong = zlib.crc32(member.payload) != int(index.crcs[number])
            if wrong and index_is_right:
                found.append(f"{where}: its bytes have changed")
            elif wrong:
                found.append(f"{where}: its bytes or its checksum in the index have changed")
            elif wrong is None:
                parse_document(member.payload)
            if member.header != tar_header(first + number, size):
                found.append(f"{where}: its tar header has changed")
                if sizes is None:
                    return found  # where the next record begins is not known
            if member.padding.strip(b"\0"):
                found.append(f"{where}: the padding after it has changed")
            if len(found) >= 10:
                return [*found, "and perhaps more"]
    except DamagedRecord as error:
        return [*found, f"after byte {end}: {error}"]
    tail = file.seek(0, os.SEEK_END) - end
    file.seek(end)
    if tail != len(END_OF_TAR) or file.read() != END_OF_TAR:
        found.append(f"after the last record (byte {end}): {tail} bytes, 1024 zeros expected")
    return found


def _damaged_rows(tar: BinaryIO, index: ShardIndex) -> list[str]:
    """The tar is right, the index is not: its first wrong row."""
    sentence = 0
    for number, member in enumerate(scan(tar)):
        document = parse_document(member.payload)
        where = f"row {number} (document {document.id!r})"
        if number >= len(index):
            return [f"{where} is missing"]
        for name, column, right in (
            ("offset", index.offsets, member.offset),
            ("size", index.sizes, len(member.payload)),
            ("checksum", index.crcs, zlib.crc32(member.payload)),
            ("number of sentences", index.sentence_counts, len(document.lengths)),
        ):
            if int(column[number]) != right:
                return [f"{where}: wrong {name}"]
        after = sentence + len(document.lengths)
        if not np.array_equal(index.sentence_lengths[sentence:after], document.lengths):
            return [f"{where}: wrong sentence lengths"]
        sentence = after
    return []


def main(argv: list[str]) -> int:
    """`python -m data_pipeline verify DIR`: exit code 0 if all is right, 1 if not."""
    parser = argparse.ArgumentParser(
        prog="python -m data_pipeline verify", description="Check every byte of a dataset."
    )
    parser.add_argument("directory", metavar="DIR", help="a folder or URL")
    options = parser.parse_args(argv)
    sizes: list[int] = []
    started = time.monotonic()
    findings = 0
    for finding in findings_of(options.directory, sizes.append):
        show(printable(short(finding, LONGEST)))
        findings += 1
    read, seconds = sum(sizes), max(1e-9, time.monotonic() - started)
    speed = f"{read / 1e6:,.1f} MB in {seconds:.1f} s, {read / 1e6 / seconds:,.0f} MB/s"
    if findings:
        notice(f"{options.directory}: {findings} findings ({speed})", sys.stderr, lines=False)
        return 1
    show(printable(f"{options.directory}: all as the manifest says ({speed})"))
    return 0
