"""Shards: tokenised documents in plain tar files, an index beside each, one manifest for all.

A folder holds `manifest.json`, `vocab.txt`, and for each shard `NAME.tar` and `NAME.idx`, where
NAME is `shard-NNNNNN` (split "train") or `heldout-NNNNNN` (split "heldout").  `docs/corpus.md`
gives the layout byte by byte.  All numbers are little-endian; a token id is a uint16; no record
holds a special token.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np

from core.errors import UserError
from core.files import part_of, put_in_place, write_atomically
from core.urls import NotThere, Patience, is_url, join, open_file, read

T = TypeVar("T")

FORMAT = "bert-shards-1"
MANIFEST = "manifest.json"
VOCAB = "vocab.txt"
PREFIX = {"train": "shard", "heldout": "heldout"}
SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
MAX_SENTENCE_TOKENS = 65535

_INDEX_MAGIC = b"BERTIDX1"
_INDEX_HEAD = struct.Struct("<8sIQ")
_RECORD_HEAD = struct.Struct("<IIHH")
BLOCK = 512
END_OF_TAR = bytes(2 * BLOCK)


class DamagedRecord(ValueError):
    """A record's bytes are not a document (cut, flipped, or not of this format)."""


# ---------------------------------------------------------------------------------------- records


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
    return b"".join(
        (
            head,
            name,
            lengths.astype("<u2", copy=False).tobytes(),
            ids.astype("<u2", copy=False).tobytes(),
        )
    )


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


# ------------------------------------------------------------------------------------------ index


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


def _index_bytes(index: ShardIndex) -> bytes:
    return b"".join(
        (
            _INDEX_HEAD.pack(_INDEX_MAGIC, len(index.offsets), len(index.sentence_lengths)),
            index.offsets.astype("<u8").tobytes(),
            index.sizes.astype("<u4").tobytes(),
            index.crcs.astype("<u4").tobytes(),
            index.sentence_counts.astype("<u4").tobytes(),
            index.sentence_lengths.astype("<u2").tobytes(),
        )
    )


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
    for dtype, count in (("<u8", documents), *((("<u4", documents),) * 3), ("<u2", sentences)):
        columns.append(np.frombuffer(data, dtype, count, at))
        at += columns[-1].nbytes
    if consistent and int(columns[3].sum(dtype=np.int64)) != sentences:
        raise UserError(f"{name}: sentence counts do not sum to {sentences}")
    return ShardIndex(*columns)


# --------------------------------------------------------------------------------------- manifest


@dataclass(frozen=True)
class ShardInfo:
    """One shard. `bytes` and `sha256` are of NAME.tar, `idx_bytes` and `idx_sha256` of NAME.idx."""

    name: str
    split: str
    bytes: int
    sha256: str
    idx_bytes: int
    idx_sha256: str
    documents: int
    sentences: int
    tokens: int

    def missing_from(self, directory: Path) -> Path | None:
        """The first of the two files that is not there, or not of its size."""
        for ending, size in (("tar", self.bytes), ("idx", self.idx_bytes)):
            path = directory / f"{self.name}.{ending}"
            if not path.is_file() or path.stat().st_size != size:
                return path
        return None


def shard_name(split: str, number: int) -> str:
    return f"{PREFIX[split]}-{number:06d}"


@dataclass(frozen=True)
class SourceInfo:
    """One source of text: where it came from, and what became of its documents."""

    name: str
    kind: str = "text"
    provenance: str = ""
    licence: str = ""
    documents_in: int = 0
    documents_out: int = 0
    words: int = 0
    sentences: int = 0
    tokens: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    notes: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Manifest:
    """The table of contents of a dataset; `dataset_id` is the hash of everything else in it."""

    vocab_size: int
    vocab_sha256: str
    lowercase: bool
    shards: tuple[ShardInfo, ...]
    sources: tuple[SourceInfo, ...]
    settings: dict[str, Any] = field(default_factory=dict)

    def split(self, name: str) -> tuple[ShardInfo, ...]:
        """The shards of split "train" or "heldout", in order."""
        return tuple(shard for shard in self.shards if shard.split == name)

    @property
    def dataset_id(self) -> str:
        return hashlib.sha256(_canonical(self._body())).hexdigest()[:32]

    def _body(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self)}

    def to_json(self) -> str:
        return (
            json.dumps(
                {"dataset_id": self.dataset_id, **self._body()}, indent=1, ensure_ascii=False
            )
            + "\n"
        )


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode(
        "utf-8"
    )


def load_manifest(directory: str | Path, patience: Patience | None = None) -> Manifest:
    """Reads DIR/manifest.json. UserError if missing, of another format, or edited by hand (the id
    disagrees)."""
    path = join(directory, MANIFEST)
    try:
        body = json.loads(read(path, patience))
    except NotThere as error:
        if is_url(path):
            raise
        raise NotThere(
            f"{error}; make the dataset with `python -m data_pipeline prepare`"
        ) from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON ({error})") from None
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise UserError(f"{path}: format is not {FORMAT!r}")
    stated = body.pop("dataset_id", None)
    del body["format"]
    manifest = _checked(Manifest, body, path)
    _check_names(manifest.shards, path)
    try:
        found = manifest.dataset_id
    except ValueError as error:  # half a character, which UTF-8 cannot write
        raise UserError(f"{path}: {error}") from None
    if stated != found:
        raise UserError(
            f"{path}: dataset_id {stated} is not the hash of its content; the file was changed"
        )
    return manifest


def _checked(kind: type[T], plain: Any, where: str) -> T:
    """The dataclass `kind` from what a file holds: every field there, known, and of its type."""
    if not isinstance(plain, dict):
        raise UserError(f"{where}: an object is expected, not {_short(plain)}")
    known = {f.name: str(f.type) for f in fields(kind)}  # type: ignore[arg-type]
    for name in [*plain, *known]:
        if name not in known or name not in plain:
            what = "required, but missing" if name in known else "no such field"
            raise UserError(f"{where}: {name}: {what}")
    values = {}
    for name, type_name in known.items():
        value, place = plain[name], f"{where}: {name}"
        part = _PARTS.get(type_name)
        if part is not None and isinstance(value, list):
            values[name] = tuple(
                _checked(part, item, f"{place}.{number}") for number, item in enumerate(value)
            )
        elif part is None and _IS[type_name](value):
            values[name] = value
        else:
            raise UserError(f"{place}: {type_name} is expected, not {_short(value)}")
    return kind(**values)


_PARTS: dict[str, Any] = {
    "tuple[ShardInfo, ...]": ShardInfo,
    "tuple[SourceInfo, ...]": SourceInfo,
}


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62


_IS: dict[str, Callable[[Any], bool]] = {
    "int": _is_count,
    "str": lambda value: isinstance(value, str),
    "bool": lambda value: isinstance(value, bool),
    "dict[str, int]": lambda value: isinstance(value, dict) and all(map(_is_count, value.values())),
    "dict[str, Any]": lambda value: isinstance(value, dict),
}


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _check_names(shards: Sequence[ShardInfo], where: str) -> None:
    """Names become parts of paths, of URLs and of a pipe's command: only the writer's pass."""
    if not shards:
        raise UserError(f"{where}: shards: names none")
    for number, shard in enumerate(shards):
        prefix = PREFIX.get(shard.split)
        if prefix is None:
            raise UserError(
                f"{where}: shards.{number}: split {shard.split!r} is none of {[*PREFIX]}"
            )
        if not re.fullmatch(f"{prefix}-[0-9]{{1,12}}", shard.name):
            raise UserError(
                f"{where}: shards.{number}: name {shard.name!r} is not that of a shard of split "
                f"{shard.split!r}, such as {shard_name(shard.split, 0)}"
            )
    if len({shard.name for shard in shards}) < len(shards):
        raise UserError(f"{where}: shards: a name stands there twice")


def load_vocabulary(
    directory: str | Path, manifest: Manifest, patience: Patience | None = None
) -> bytes:
    """DIR/vocab.txt. UserError if missing, or not the one the shards were made with."""
    path = join(directory, VOCAB)
    found = read(path, patience)
    if hashlib.sha256(found).hexdigest() != manifest.vocab_sha256:
        raise UserError(f"{path}: not the vocabulary these shards were made with (sha256 differs)")
    return found


def webdataset_reader(directory: str | Path, split: str = "train") -> Iterable[TokenDocument]:
    """The same documents by way of a stock `webdataset.WebDataset`, in order; for a look, not for
    training."""
    import webdataset

    urls = [join(directory, f"{shard.name}.tar") for shard in load_manifest(directory).split(split)]
    return webdataset.WebDataset(urls, shardshuffle=False).map(
        lambda sample: parse_document(sample["doc"])
    )


# ---------------------------------------------------------------------------------------- writing


def tar_header(name: str, size: int) -> bytes:
    """A ustar header that depends on name and size alone: no owner, no time."""
    block = bytearray(BLOCK)
    block[0 : len(name)] = name.encode("ascii")
    block[100:108] = b"0000644\0"
    block[108:116] = block[116:124] = b"0000000\0"
    block[124:136] = b"%011o\0" % size
    block[136:148] = b"%011o\0" % 0
    block[148:156] = b" " * 8
    block[156:157] = b"0"
    block[257:265] = b"ustar\x0000"
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def member_name(ordinal: int) -> str:
    """The name in the tar of a split's document number `ordinal`."""
    return f"{ordinal:08d}.doc"


class ShardWriter:
    """Writes one shard: NAME.tar and NAME.idx appear whole at `close()`, or not at all.

    `first_ordinal` is the number, in the split, of the shard's first document.
    """

    def __init__(
        self, directory: str | Path, split: str, number: int, first_ordinal: int = 0
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
        header = tar_header(member_name(self._ordinal), len(payload))
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
        except ValueError:
            raise DamagedRecord(f"record {number}: its tar header has changed") from None
        yield Member(at + BLOCK, header, file.read(size), file.read(-size % BLOCK))
        number, at = number + 1, at + record_bytes(size)


def record_bytes(payload_bytes: int) -> int:
    """Bytes a record takes in the tar: header, payload, padding."""
    return BLOCK + payload_bytes + (-payload_bytes % BLOCK)


def vocab_bytes(tokens: Sequence[str]) -> bytes:
    """vocab.txt: one piece a line, the line number is its id."""
    return "".join(f"{token}\n" for token in tokens).encode("utf-8")


def iterate_documents(
    directory: str | Path, split: str = "train", manifest: Manifest | None = None
) -> Iterator[TokenDocument]:
    """All documents of a split in order, read through the index; DamagedRecord on a wrong
    checksum, UserError where a file is missing."""
    for shard in (manifest or load_manifest(directory)).split(split):
        index = read_index(join(directory, f"{shard.name}.idx"))
        with open_file(join(directory, f"{shard.name}.tar")) as file:
            yield from shard_documents(file, index, f"{shard.name}.tar")


def shard_documents(file: BinaryIO, index: ShardIndex, name: str) -> Iterator[TokenDocument]:
    """The documents of an open tar, in order; DamagedRecord on a wrong checksum."""
    at = 0
    for offset, size, crc in zip(
        index.offsets.tolist(), index.sizes.tolist(), index.crcs.tolist(), strict=True
    ):
        file.read(offset - at)
        payload = file.read(size)
        at = offset + size
        if zlib.crc32(payload) != crc:
            raise DamagedRecord(f"{name}: record at byte {offset} has a wrong checksum")
        yield parse_document(payload)


def write_dataset_from_token_documents(
    directory: str | Path,
    documents: Iterable[Sequence[Sequence[int]]],
    *,
    heldout: Iterable[Sequence[Sequence[int]]] = (),
    vocab: Sequence[str] | int = 1000,
    lowercase: bool = True,
    documents_per_shard: int = 100,
    source: str = "test",
) -> Manifest:
    """A whole dataset from documents given as lists of sentences, each a list of ids. A small
    helper for tests.

    `vocab` is the list of pieces, or a size: then pieces are invented, [PAD] [UNK] [CLS] [SEP]
    [MASK] first, and every third ordinary piece continues a word (`##...`). Documents get the ids
    "train-0", "train-1", ...
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    if isinstance(vocab, int):
        ordinary = range(vocab - len(SPECIAL_TOKENS))
        vocab = [*SPECIAL_TOKENS, *(f"##p{i}" if i % 3 == 2 else f"p{i}" for i in ordinary)]
    shards: list[ShardInfo] = []
    total = 0
    for split, split_documents in (("train", documents), ("heldout", heldout)):
        writer, ordinal = None, 0
        for sentences in split_documents:
            if writer is None:
                writer = ShardWriter(directory, split, ordinal // documents_per_shard, ordinal)
            ids = np.array([token for sentence in sentences for token in sentence], dtype=np.uint16)
            lengths = np.array([len(sentence) for sentence in sentences], dtype=np.uint16)
            writer.write(pack_document(ids, lengths, f"{split}-{ordinal}", 0))
            ordinal += 1
            if ordinal % documents_per_shard == 0:
                shards.append(writer.close())
                writer = None
        if writer is not None:
            shards.append(writer.close())
        total += ordinal
    data = vocab_bytes(vocab)
    write_atomically(directory / VOCAB, data)
    manifest = Manifest(
        vocab_size=len(vocab),
        vocab_sha256=hashlib.sha256(data).hexdigest(),
        lowercase=lowercase,
        shards=tuple(shards),
        sources=(
            SourceInfo(
                name=source,
                documents_in=total,
                documents_out=total,
                sentences=sum(shard.sentences for shard in shards),
                tokens=sum(shard.tokens for shard in shards),
            ),
        ),
    )
    write_atomically(directory / MANIFEST, manifest.to_json())
    return manifest
