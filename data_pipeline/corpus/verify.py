"""Is every byte of a dataset what its manifest says? Reads all files once, at disk speed.

A file whose sha256 is right needs no closer look. In one that is not, the records are checked one
by one, so the answer names the record and the source document, not only the file.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from core.console import printable
from core.errors import UserError
from data_pipeline.corpus.manifest import VOCAB, Manifest, ShardInfo, load_manifest
from data_pipeline.corpus.shards import (
    BLOCK,
    END_OF_TAR,
    DamagedRecord,
    ShardIndex,
    member_name,
    parse_document,
    parse_index,
    read_index,
    record_bytes,
    scan,
    tar_header,
)

_READ = 4 << 20


def verify(directory: str | Path, progress: Callable[[int], None] = lambda _: None) -> list[str]:
    """Everything that is wrong with the dataset in `directory`, one line each; empty: nothing.

    `progress` is called with the number of bytes just read. UserError if there is no such folder.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise UserError(f"{directory}: no such folder")
    try:
        manifest = load_manifest(directory)
    except UserError as error:
        return [str(error)]
    findings = _verify_vocabulary(directory, manifest)
    known = {shard.name for shard in manifest.shards}
    for path in sorted([*directory.glob("shard-*"), *directory.glob("heldout-*")]):
        if path.stem not in known or path.suffix not in (".tar", ".idx"):
            findings.append(f"{path.name}: extra file, not in the manifest")
    by_hash = {shard.sha256: shard.name for shard in manifest.shards}
    firsts: dict[str, int] = {}
    for split in ("train", "heldout"):
        ordinal = 0
        for shard in manifest.split(split):
            firsts[shard.name] = ordinal
            ordinal += shard.documents

    def check(shard: ShardInfo) -> list[str]:
        return _verify_shard(directory, shard, firsts[shard.name], by_hash, progress)

    # Hashing leaves the interpreter lock alone, so threads keep a fast disk busy.
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(check, manifest.shards):
            findings += found
    return findings


def _verify_vocabulary(directory: Path, manifest: Manifest) -> list[str]:
    path = directory / VOCAB
    try:
        data = path.read_bytes()
    except OSError as error:
        return [f"{VOCAB}: {error.strerror}"]
    if hashlib.sha256(data).hexdigest() != manifest.vocab_sha256:
        return [f"{VOCAB}: not the vocabulary these shards were made with (sha256 differs)"]
    pieces = data.count(b"\n")
    if pieces != manifest.vocab_size:
        return [f"{VOCAB}: {pieces} pieces, the manifest says {manifest.vocab_size}"]
    return []


def _hash(path: Path, progress: Callable[[int], None]) -> tuple[str, int]:
    digest, size = hashlib.sha256(), 0
    buffer = bytearray(_READ)
    view = memoryview(buffer)
    with open(path, "rb", buffering=0) as file:
        while n := file.readinto(buffer):
            digest.update(view[:n])
            size += n
            progress(n)
    return digest.hexdigest(), size


def _verify_shard(
    directory: Path,
    shard: ShardInfo,
    first: int,
    by_hash: dict[str, str],
    progress: Callable[[int], None],
) -> list[str]:
    findings: list[str] = []
    tar, idx = directory / f"{shard.name}.tar", directory / f"{shard.name}.idx"
    good: dict[Path, bool | None] = {}
    for path, sha256, size in (
        (tar, shard.sha256, shard.bytes),
        (idx, shard.idx_sha256, shard.idx_bytes),
    ):
        try:
            found, found_size = _hash(path, progress)
        except FileNotFoundError:
            findings.append(f"{path.name}: missing")
            continue
        except OSError as error:
            findings.append(f"{path.name}: {error.strerror}")
            continue
        good[path] = found == sha256
        if not good[path]:
            other = by_hash.get(found)
            if other is not None and path is tar:
                findings.append(f"{path.name}: holds the content of {other}.tar (swapped)")
                good[path] = None
            elif found_size != size:
                findings.append(f"{path.name}: {found_size} bytes, the manifest says {size}")
            else:
                findings.append(f"{path.name}: sha256 differs from the manifest's")
    if good.get(idx):
        index = read_index(idx)
        findings += _verify_counts(shard, index)
        if good.get(tar) is False:
            records = _damaged_records(tar, index, True, first)
            findings += [f"{tar.name}: {line}" for line in records]
    elif good.get(tar) is not None:
        try:
            index = parse_index(idx.read_bytes(), idx.name, consistent=False)
        except OSError:
            index = None
        except UserError as error:
            index = None
            findings.append(str(error))
        if not good[tar]:
            records = _damaged_records(tar, index, False, first)
            findings += [f"{tar.name}: {line}" for line in records]
        elif index is not None:
            findings += [f"{idx.name}: {line}" for line in _damaged_rows(tar, index)]
    return findings


def _verify_counts(shard: ShardInfo, index: ShardIndex) -> list[str]:
    stated = (shard.documents, shard.sentences, shard.tokens)
    found = (
        len(index),
        len(index.sentence_lengths),
        int(index.sentence_lengths.sum(dtype=np.int64)),
    )
    return [
        f"{shard.name}: {b:,} {what}, the manifest says {a:,}"
        for what, a, b in zip(("documents", "sentences", "tokens"), stated, found, strict=True)
        if a != b
    ]


def _name_of(payload: bytes) -> str:
    """The document's id as far as a damaged record still tells it."""
    try:
        return parse_document(payload).id
    except DamagedRecord:
        length = int.from_bytes(payload[10:12], "little")
        return payload[12 : 12 + min(length, 80)].rstrip(b"\0").decode("utf-8", "replace")


def _damaged_records(
    tar: Path, index: ShardIndex | None, index_is_right: bool, first: int
) -> list[str]:
    """What is wrong with a tar, record by record, as its index says, or else as it says itself."""
    found: list[str] = []
    end = 0
    sizes = index.sizes if index is not None and index_is_right else None
    with open(tar, "rb") as file:
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
                if member.header != tar_header(member_name(first + number), size):
                    found.append(f"{where}: its tar header has changed")
                    if sizes is None:
                        return found  # where the next record begins is not known
                if member.padding.strip(b"\0"):
                    found.append(f"{where}: the padding after it has changed")
                if len(found) >= 10:
                    return [*found, "and perhaps more"]
        except DamagedRecord as error:
            return [*found, f"after byte {end}: {error}"]
        file.seek(end)
        tail = file.read()
    if tail != END_OF_TAR:
        found.append(f"after the last record (byte {end}): {len(tail)} bytes, 1024 zeros expected")
    return found


def _damaged_rows(tar: Path, index: ShardIndex) -> list[str]:
    """The tar is right, the index is not: its first wrong row."""
    sentence = 0
    with open(tar, "rb") as file:
        for number, member in enumerate(scan(file)):
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
    parser.add_argument("directory", metavar="DIR")
    options = parser.parse_args(argv)
    read = 0
    started = time.monotonic()

    def progress(amount: int) -> None:
        nonlocal read
        read += amount

    findings = verify(options.directory, progress)
    seconds = max(1e-9, time.monotonic() - started)
    for finding in findings:
        print(printable(finding))
    speed = f"{read / 1e6:,.1f} MB in {seconds:.1f} s, {read / 1e6 / seconds:,.0f} MB/s"
    if findings:
        print(f"{options.directory}: DAMAGED, {len(findings)} findings ({speed})", file=sys.stderr)
        return 1
    print(f"{options.directory}: all as the manifest says ({speed})")
    return 0
