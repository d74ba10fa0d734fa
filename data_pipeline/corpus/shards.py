"""Shards: tokenised documents in plain tar files, and an index beside each.

`docs/corpus.md` gives the layout byte by byte. All numbers are little-endian; a token id is a
uint16; no record holds a special token.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from core.errors import TryAgain, UserError
from core.files import MOST_IN_MEMORY, disk_errors, part_of, put_in_place, write_atomically
from core.urls import is_url, join, open_file, read
from data_pipeline.corpus.manifest import (
    Manifest,
    ShardFile,
    ShardInfo,
    Split,
    load_manifest,
    read_checked,
    shard_name,
)

_INDEX_MAGIC = b"BERTIDX1"
_INDEX_HEAD = struct.Struct("<8sIQ")
_INDEX_COLUMNS = ("<u8", "<u4", "<u4", "<u4", "<u2")
_RECORD_HEAD = struct.Struct("<IIHH")
SOURCE_AT = 8  # bytes of a payload before the two that name its source
BLOCK = 512
END_OF_TAR = bytes(2 * BLOCK)
_READ = 4 << 20


class DamagedRecord(UserError):
    """A record's bytes are not a document (cut, flipped, or not of this format)."""


@dataclass(frozen=True)
class TokenDocument:
    """One document as ids. `ids` uint16 [tokens]; `lengths` uint16 [sentences], tokens of each
    sentence."""

    ids: np.ndarray
    lengths: np.ndarray
    id: str
    source: int

    def sentences(self) -> list[np.ndarray]:
        """The ids of each sentence, in order."""
        return np.split(self.ids, np.cumsum(self.lengths[:-1], dtype=np.int64))


def pack_document(ids: np.ndarray, lengths: np.ndarray, doc_id: str, source: int) -> bytes:
    """The payload of one record. `lengths` must sum to `len(ids)`, each 1..65535."""
    name = doc_id.encode("utf-8", "replace")[:65534]
    name += b"\0" * (len(name) % 2)
    head = _RECORD_HEAD.pack(len(lengths), len(ids), source, len(name))
    numbers = (values.astype("<u2", copy=False).tobytes() for values in (lengths, ids))
    return b"".join((head, name, *numbers))


def parse_document(payload: bytes | memoryview) -> TokenDocument:
    """The inverse of `pack_document`; the arrays are views of `payload`. DamagedRecord if it
    cannot be one."""
    if len(payload) < _RECORD_HEAD.size:
        raise DamagedRecord(f"record of {len(payload)} bytes is shorter than its head")
    n_sentences, n_tokens, source, id_bytes = _RECORD_HEAD.unpack_from(payload)
    at = _RECORD_HEAD.size + id_bytes
    if len(payload) != at + 2 * n_sentences + 2 * n_tokens:
        raise DamagedRecord(f"record of {len(payload)} bytes does not match the counts in its head")
    lengths = np.frombuffer(payload, "<u2", n_sentences, at)
    ids = np.frombuffer(payload, "<u2", n_tokens, at + 2 * n_sentences)
    if int(lengths.sum(dtype=np.int64)) != n_tokens:
        raise DamagedRecord("sentence lengths do not sum to the number of tokens")
    name = bytes(payload[_RECORD_HEAD.size : at]).rstrip(b"\0").decode("utf-8", "replace")
    return TokenDocument(ids, lengths, name, source)


@dataclass(frozen=True)
class ShardIndex:
    """What a `.idx` file says. Arrays over the shard's documents; `sentence_lengths` over all its
    sentences.

    offsets uint64 [documents] of the payload in the tar; sizes uint32, payload bytes; crcs uint32
    of the payload; sentence_counts uint32; sentence_lengths uint16 [sentences], in tokens.
    """

    offsets: np.ndarray
    sizes: np.ndarray
    crcs: np.ndarray
    sentence_counts: np.ndarray
    sentence_lengths: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets)

    def document_tokens(self) -> np.ndarray:
        """int64 [documents]: the tokens of each."""
        counts, lengths = self.sentence_counts, self.sentence_lengths
        before = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
        return np.diff(before[np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))])


def _index_bytes(index: ShardIndex) -> bytes:
    head = _INDEX_HEAD.pack(_INDEX_MAGIC, len(index), len(index.sentence_lengths))
    columns = zip(vars(index).values(), _INDEX_COLUMNS, strict=True)
    return b"".join([head, *(column.astype(dtype).tobytes() for column, dtype in columns)])


def read_index(path: str | Path) -> ShardIndex:
    """Reads a `.idx` file (a path or URL). UserError if it is not one or is cut."""
    return parse_index(read(path), str(path))


def parse_index(data: bytes, name: str, consistent: bool = True) -> ShardIndex:
    """`read_index` for bytes already in hand; `name` is for the message."""
    if len(data) < _INDEX_HEAD.size or data[:8] != _INDEX_MAGIC:
        raise UserError(f"{name}: not a shard index (bad magic)")
    _, documents, sentences = _INDEX_HEAD.unpack_from(data)
    if len(data) != _INDEX_HEAD.size + 20 * documents + 2 * sentences:
        raise UserError(
            f"{name}: {len(data)} bytes do not fit {documents} documents, {sentences} sentences"
        )
    at, columns = _INDEX_HEAD.size, []
    for dtype, count in zip(_INDEX_COLUMNS, (*[documents] * 4, sentences), strict=True):
        columns.append(np.frombuffer(data, dtype, count, at))
        at += columns[-1].nbytes
    if consistent and int(columns[3].sum(dtype=np.int64)) != sentences:
        raise UserError(f"{name}: sentence counts do not sum to {sentences}")
    return ShardIndex(*columns)


def checked_index(data: bytes, name: str, shard: ShardInfo) -> ShardIndex:
    """`parse_index` of bytes that are what the manifest says; UserError of others: with other
    lengths the ranks would plan different batches."""
    _, size, stated = shard.files[1]
    sha256 = hashlib.sha256(data).hexdigest()
    if len(data) != size or sha256 != stated:
        raise UserError(
            f"{name}: stale or damaged index: {len(data)} bytes, sha256 {sha256[:12]}; "
            f"the manifest says {size} bytes, {stated[:12]}"
        )
    index = parse_index(data, name)
    check_rows(index, name, shard)
    return index


def check_rows(index: ShardIndex, name: str, shard: ShardInfo) -> None:
    """UserError for an index that is as its author meant it, and says of a document what cannot be:
    readers go by it."""
    counts, tokens = index.sentence_counts.astype(np.int64), index.document_tokens()
    for what, found, stated in (
        ("documents", len(index), shard.documents),
        ("sentences", len(index.sentence_lengths), shard.sentences),
        ("tokens", int(tokens.sum()), shard.tokens),
    ):
        if found != stated:
            raise UserError(f"{name}: {found:,} {what}, the manifest says {stated:,}")
    if not index.sentence_lengths.all():
        raise UserError(f"{name}: a sentence of no tokens")
    offsets, sizes = index.offsets.astype(np.int64), index.sizes.astype(np.int64)
    id_bytes = sizes - _RECORD_HEAD.size - 2 * (counts + tokens)
    wrong = (id_bytes < 0) | (id_bytes > 0xFFFF) | (id_bytes % 2 > 0) | (offsets % BLOCK > 0)
    wrong |= (offsets < BLOCK) | (offsets > shard.bytes - sizes)
    wrong[1:] |= offsets[1:] - BLOCK < offsets[:-1] + sizes[:-1]  # they lie one after another
    if wrong.any():
        raise UserError(f"{name}: row {int(np.argmax(wrong))} is that of no document")


def index_of(directory: str | Path, shard: ShardInfo) -> ShardIndex:
    """The `checked_index` of a shard in a folder or at a URL."""
    path = join(directory, shard.files[1].name)
    return read_checked(path, lambda data: checked_index(data, path, shard), size=shard.idx_bytes)


# Of a header, between name, size and checksum: mode, owner and group; time; type and magic.
_OWNER = b"0000644\0" + 2 * b"0000000\0"
_TIME = b"\0" + b"%011o\0" % 0
_TYPE = b"\0 0" + bytes(100) + b"ustar\x0000" + bytes(247)
_FIXED_SUM = sum(_OWNER + _TIME + _TYPE[2:]) + 8 * ord(" ")  # the checksum counts as spaces


def tar_header(ordinal: int, size: int) -> bytes:
    """The ustar header of a split's document number `ordinal`, `size` bytes: no owner, no time.
    Readers compare every record's, so the parts that never change are added up once."""
    name, octal = b"%08d.doc" % ordinal, b"%011o" % size
    checksum = b"%06o" % (_FIXED_SUM + sum(name) + sum(octal))
    return b"".join((name.ljust(100, b"\0"), _OWNER, octal, _TIME, checksum, _TYPE))


class ShardWriter:
    """Writes one shard: NAME.tar and NAME.idx appear whole at `close()`, or not at all.

    `first_ordinal` is the number, in the split, of the shard's first document.
    """

    def __init__(
        self, directory: str | Path, split: Split, number: int, first_ordinal: int = 0
    ) -> None:
        self.directory = Path(directory)
        self.split = split
        self.name = shard_name(split, number)
        self._ordinal = first_ordinal
        self._part = part_of(self.directory / f"{self.name}.tar")
        self._file = open(self._part, "wb", buffering=1 << 20)
        self._sha = hashlib.sha256()
        self._at = 0
        self._tokens = 0
        self._rows: list[tuple[int, int, int, int]] = []
        self._lengths: list[bytes] = []

    def write(self, payload: bytes) -> None:
        """Appends one record (from `pack_document`)."""
        n_sentences, n_tokens, _, id_bytes = _RECORD_HEAD.unpack_from(payload)
        header = tar_header(self._ordinal, len(payload))
        padding = bytes(-len(payload) % BLOCK)
        for part in (header, payload, padding):
            self._file.write(part)
            self._sha.update(part)
        at = _RECORD_HEAD.size + id_bytes
        self._lengths.append(bytes(payload[at : at + 2 * n_sentences]))
        self._rows.append((self._at + BLOCK, len(payload), zlib.crc32(payload), n_sentences))
        self._tokens += n_tokens
        self._at += BLOCK + len(payload) + len(padding)
        self._ordinal += 1

    def close(self) -> ShardInfo:
        """Puts both files in place, durably, and says what they are."""
        self._file.write(END_OF_TAR)
        self._sha.update(END_OF_TAR)
        self._file.close()
        rows = np.array(self._rows, dtype=np.uint64).reshape(-1, 4)
        lengths = np.frombuffer(b"".join(self._lengths), "<u2")
        index = _index_bytes(ShardIndex(rows[:, 0], rows[:, 1], rows[:, 2], rows[:, 3], lengths))
        write_atomically(self.directory / f"{self.name}.idx", index)
        put_in_place(self._part, self.directory / f"{self.name}.tar")
        return ShardInfo(
            name=self.name,
            split=self.split,
            bytes=self._at + len(END_OF_TAR),
            sha256=self._sha.hexdigest(),
            idx_bytes=len(index),
            idx_sha256=hashlib.sha256(index).hexdigest(),
            documents=len(self._rows),
            sentences=len(lengths),
            tokens=self._tokens,
        )

    def abandon(self) -> None:
        """Removes what was written."""
        with contextlib.suppress(OSError):  # a full disk refuses what is still buffered
            self._file.close()
        self._part.unlink(missing_ok=True)


@dataclass(frozen=True)
class Member:
    """A record as it lies in a tar. `offset`: the first byte of its payload."""

    offset: int
    header: bytes
    payload: bytes
    padding: bytes


def scan(file: BinaryIO, sizes: Sequence[int] | None = None) -> Iterator[Member]:
    """The members of a shard in order, damaged or not, up to the end blocks; what a cut file still
    holds of its last member is given too. `sizes`: of the payloads, where the headers are not to
    be trusted; else DamagedRecord where a header tells none."""
    number, at = 0, 0
    while sizes is None or number < len(sizes):
        header = file.read(BLOCK)
        if sizes is None and not header.strip(b"\0"):
            return
        try:
            size = int(header[124:135], 8) if sizes is None else int(sizes[number])
            if sizes is None and not 0 <= size <= MOST_IN_MEMORY:
                raise ValueError
        except ValueError:
            raise DamagedRecord(f"record {number}: its tar header has changed") from None
        yield Member(at + BLOCK, header, file.read(size), file.read(-size % BLOCK))
        number, at = number + 1, at + record_bytes(size)


def record_bytes(payload_bytes: int) -> int:
    """Bytes a record takes in the tar: header, payload, padding."""
    return BLOCK + payload_bytes + (-payload_bytes % BLOCK)


def iterate_documents(
    directory: str | Path, split: Split = "train", manifest: Manifest | None = None
) -> Iterator[TokenDocument]:
    """All documents of a split in order, read through the index. Errors of `shard_documents`."""
    manifest = manifest or load_manifest(directory)
    for shard in manifest.split(split):
        yield from shard_documents(directory, shard, manifest.vocab_size)


def as_webdataset(directory: str | Path, split: Split = "train") -> Iterable[TokenDocument]:
    """The same documents as a stock `webdataset.WebDataset`, for programs that are built on one: to
    shuffle, share among workers and batch by its own means."""
    import webdataset

    urls = [join(directory, shard.files[0].name) for shard in load_manifest(directory).split(split)]
    return webdataset.WebDataset(urls, shardshuffle=False).map(
        lambda sample: parse_document(sample["doc"])
    )


def shard_documents(
    directory: str | Path, shard: ShardInfo, vocab_size: int
) -> Iterator[TokenDocument]:
    """`read_documents` of a shard in a folder or at a URL; also UserError where a file is missing
    or the index is not the manifest's."""
    tar, index = join(directory, shard.files[0].name), index_of(directory, shard)
    with contextlib.ExitStack() as opened:
        fetch = functools.partial(open_file, tar, size=shard.bytes)
        if is_url(tar):
            file, _, _ = opened.enter_context(open_hashed(fetch, shard.files[0], remote=True))
        else:
            file = opened.enter_context(fetch())
        yield from read_documents(file, tar, index, vocab_size)


@contextlib.contextmanager
def open_hashed(
    fetch: Callable[[], BinaryIO],
    stated: ShardFile,
    remote: bool,
    progress: Callable[[int], None] = lambda _: None,
) -> Iterator[tuple[BinaryIO, str, int]]:
    """The file that `fetch` opens, with its sha256 and size. A remote one that is not as stated is
    fetched once more, since a connection can change bytes, and look whole; TryAgain where it comes
    otherwise each time. progress: told how many bytes were just read."""
    with contextlib.ExitStack() as opened:
        with disk_errors(stated.name):
            file = opened.enter_context(fetch())
            found, size = _hash(file, progress)
            if remote and found != stated.sha256:
                file = opened.enter_context(fetch())
                before, (found, size) = found, _hash(file, lambda _: None)
                if found not in (before, stated.sha256):
                    raise TryAgain(f"{stated.name}: its origin gives other bytes each time")
        yield file, found, size


def _hash(file: BinaryIO, progress: Callable[[int], None]) -> tuple[str, int]:
    """sha256 and size of an open file, which is at its beginning again afterwards."""
    digest, size = hashlib.sha256(), 0
    buffer = bytearray(_READ)
    view = memoryview(buffer)
    while n := file.readinto(buffer):  # type: ignore[attr-defined]
        digest.update(view[:n])
        size += n
        progress(n)
    file.seek(0)
    return digest.hexdigest(), size


def read_documents(
    tar: BinaryIO,
    name: str,
    index: ShardIndex,
    vocab_size: int,
    stride: int = 1,
    *,
    skip_damage: bool = False,
) -> Iterator[TokenDocument]:
    """The documents of an open tar, in order, or every `stride`-th; DamagedRecord, which names the
    record, on a wrong checksum or a token beyond the vocabulary, unless `skip_damage` leaves such
    documents out; TryAgain where the disk does not answer."""
    rows = zip(index.offsets.tolist(), index.sizes.tolist(), index.crcs.tolist(), strict=True)
    with disk_errors(name):
        for number, (offset, size, crc) in itertools.islice(enumerate(rows), None, None, stride):
            tar.seek(offset)
            try:
                document = _checked_document(tar.read(size), crc, vocab_size)
            except DamagedRecord as error:
                if skip_damage:
                    continue
                raise DamagedRecord(f"{name} record {number}: {error}") from None
            yield document


def _checked_document(payload: bytes, crc: int, vocab_size: int) -> TokenDocument:
    if zlib.crc32(payload) != crc:
        raise DamagedRecord("its bytes do not match their crc32")
    document = parse_document(payload)
    if (highest := document.ids.max(initial=0)) >= vocab_size:
        raise DamagedRecord(f"has a token {highest}, of a vocabulary of {vocab_size}")
    return document
