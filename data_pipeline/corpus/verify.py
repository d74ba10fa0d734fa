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

from core.errors import UserError
from data_pipeline.corpus.shards import (
    VOCAB,
    DamagedRecord,
    Manifest,
    ShardIndex,
    ShardInfo,
    load_manifest,
    member_name,
    parse_document,
    parse_index,
    read_index,
    tar_header,
)

_BLOCK = 512
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
            findings += [f"{tar.name}: {line}" for line in _damaged_records(tar, index, first)]
    elif good.get(tar) and good.get(idx) is False:
        findings += [f"{idx.name}: {line}" for line in _damaged_index(tar, idx)]
    elif good.get(tar) is False:
        findings += [f"{tar.name}: {line}" for line in _walk(tar, idx, first)]
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


def _damaged_records(tar: Path, index: ShardIndex, first: int) -> list[str]:
    """Checks each record against the index: its checksum, its header, its padding."""
    found: list[str] = []
    end = 0
    with open(tar, "rb") as file:
        for number in range(len(index)):
            offset, size = int(index.offsets[number]), int(index.sizes[number])
            file.seek(offset - _BLOCK)
            header, payload = file.read(_BLOCK), file.read(size)
            padding = file.read(-size % _BLOCK)
            end = offset + size + (-size % _BLOCK)
            where = f"record {number} (byte {offset}"
            if len(payload) < size or len(padding) < -size % _BLOCK:
                name = f", document {_name_of(payload)!r}" if len(payload) > 12 else ""
                found.append(f"{where}{name}): the file ends here; later records are lost too")
                return found
            where += f", document {_name_of(payload)!r})"
            if zlib.crc32(payload) != int(index.crcs[number]):
                found.append(f"{where}: its bytes have changed")
            if header != tar_header(member_name(first + number), size):
                found.append(f"{where}: its tar header has changed")
            if padding.strip(b"\0"):
                found.append(f"{where}: the padding after it has changed")
            if len(found) >= 10:
                return [*found, "and perhaps more"]
        file.seek(end)
        tail = file.read()
        if tail != bytes(2 * _BLOCK):
            found.append(
                f"after the last record (byte {end}): {len(tail)} bytes, 1024 zeros expected"
            )
    return found


def _damaged_index(tar: Path, idx: Path) -> list[str]:
    """The tar is right, the index is not: which of its rows is wrong?"""
    try:
        index = parse_index(idx.read_bytes(), idx.name, consistent=False)
    except UserError as error:
        return [str(error).removeprefix(f"{idx.name}: ")]
    with open(tar, "rb") as file:
        at, number, sentence = 0, 0, 0
        while True:
            header = file.read(_BLOCK)
            if len(header) < _BLOCK or header == bytes(_BLOCK):
                break
            size = int(header[124:135], 8)
            payload = file.read(size)
            file.seek(-size % _BLOCK, 1)
            document = parse_document(payload)
            where = f"row {number} (document {document.id!r})"
            if number >= len(index):
                return [f"{where} is missing"]
            right = (at + _BLOCK, size, zlib.crc32(payload), len(document.lengths))
            row = (index.offsets, index.sizes, index.crcs, index.sentence_counts)
            for name, column, value in zip(
                ("offset", "size", "checksum", "number of sentences"), row, right, strict=True
            ):
                if int(column[number]) != value:
                    return [f"{where}: wrong {name}"]
            lengths = index.sentence_lengths[sentence : sentence + len(document.lengths)]
            if not np.array_equal(lengths, document.lengths):
                return [f"{where}: wrong sentence lengths"]
            sentence += len(document.lengths)
            number += 1
            at += _BLOCK + size + (-size % _BLOCK)
    return []


def _walk(tar: Path, idx: Path, first: int) -> list[str]:
    """Neither tar nor index is right: how far do the headers lead, and where do the two differ?"""
    try:
        index = parse_index(idx.read_bytes(), idx.name, consistent=False)
    except (OSError, UserError):
        index = None
    with open(tar, "rb") as file:
        number, at = 0, 0
        while True:
            header = file.read(_BLOCK)
            if header == bytes(_BLOCK):
                return []
            try:
                size = int(header[124:135], 8)
            except ValueError:
                return [f"record {number} (byte {at}): its tar header has changed"]
            if header != tar_header(member_name(first + number), size):
                return [f"record {number} (byte {at}): its tar header has changed"]
            payload = file.read(size)
            try:
                parse_document(payload)
            except DamagedRecord as error:
                name = _name_of(payload)
                return [f"record {number} (byte {at + _BLOCK}, document {name!r}): {error}"]
            if index is not None and number < len(index):
                if zlib.crc32(payload) != int(index.crcs[number]):
                    where = f"record {number} (byte {at + _BLOCK}, document {_name_of(payload)!r})"
                    return [f"{where}: its bytes or its checksum in the index have changed"]
            file.seek(-size % _BLOCK, 1)
            at += _BLOCK + size + (-size % _BLOCK)
            number += 1


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
        print(finding)
    speed = f"{read / 1e6:,.1f} MB in {seconds:.1f} s, {read / 1e6 / seconds:,.0f} MB/s"
    if findings:
        print(f"{options.directory}: DAMAGED, {len(findings)} findings ({speed})", file=sys.stderr)
        return 1
    print(f"{options.directory}: all as the manifest says ({speed})")
    return 0
