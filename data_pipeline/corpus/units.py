"""Units of work on disk: each is done by one rank and is either finished, with checksums, or
absent.

A finished unit is `NNNNNN.json` (written last) beside the files it names with their sizes and
CRCs. `documents_of` turns a unit of a source into sentences; `encode_unit` those into records.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from core.errors import UserError
from core.files import part_of, put_in_place, sync, write_atomically
from data_pipeline.corpus.documents import Document, minhash, share, text_hash
from data_pipeline.corpus.readers import read_unit
from data_pipeline.corpus.sentences import SentenceSplitter, splitter
from data_pipeline.corpus.shards import pack_document
from data_pipeline.corpus.sources import Dropped, Problem, SourceConfig, Unit
from data_pipeline.corpus.tokenizer import Tokenizer

# One row a document. size: payload bytes. hash: of the normalised text.
TABLE = np.dtype(
    [
        ("hash", "V16"),
        ("size", "<u4"),
        ("sentences", "<u4"),
        ("tokens", "<u4"),
        ("words", "<u4"),
        ("heldout", "u1"),
    ]
)
_ENCODED_AT_ONCE = 1 << 17  # characters; their words still fit a core's own cache
_SAMPLES = 3
_SAMPLE_CHARACTERS = 300


@dataclass
class Sentences:
    """A document ready to encode."""

    id: str
    sentences: list[str]
    hash: bytes
    words: int
    heldout: bool
    signature: np.ndarray | None = None


@dataclass
class Tally:
    """What happened in a unit. `seconds` by part of the work."""

    documents: int = 0
    characters: int = 0
    words: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    samples: dict[str, list[dict[str, str]]] = field(default_factory=dict)
    problems: list[dict[str, str]] = field(default_factory=list)
    cut_sentences: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    def drop(self, dropped: Dropped) -> None:
        self.dropped[dropped.reason] = self.dropped.get(dropped.reason, 0) + 1
        samples = self.samples.setdefault(dropped.reason, [])
        if len(samples) < _SAMPLES:
            samples.append({"id": dropped.id, "text": dropped.sample[:_SAMPLE_CHARACTERS]})

    def spend(self, part: str, since: float) -> float:
        """Books the time since `since` under `part`; returns now."""
        now = time.thread_time()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - since
        return now


@dataclass(frozen=True)
class TextRules:
    """What of the configuration decides the sentences of a document."""

    sentences: SentenceSplitter
    heldout_fraction: float
    near_duplicates: bool
    strict: bool = False


_SPLITTERS: dict[str, Callable[[str], list[str]]] = {}


def documents_of(
    source: SourceConfig, unit: Unit, names: dict[str, str], rules: TextRules, tally: Tally
) -> Iterator[Sentences]:
    """The documents of a unit that are kept, as sentences, in order; the others go to the tally."""
    name = source.sentences or ("lines" if source.kind == "sentences" else rules.sentences)
    if name not in _SPLITTERS:
        _SPLITTERS[name] = splitter(name)
    split = _SPLITTERS[name]
    items = read_unit(source, unit, names)
    while True:
        clock = time.thread_time()
        item = next(items, None)
        clock = tally.spend("read and clean", clock)
        if item is None:
            return
        if isinstance(item, Problem):
            if rules.strict:
                raise UserError(f"{item.file}: {item.place}: {item.what} (--strict)")
            tally.problems.append({"file": item.file, "place": item.place, "what": item.what})
            continue
        if isinstance(item, Document):
            reason = source.filters.reason(item)
            if reason is not None:
                item = Dropped(reason, item.id, " ".join(item.paragraphs)[:_SAMPLE_CHARACTERS])
        if isinstance(item, Dropped):
            tally.drop(item)
            continue
        clock = tally.spend("filter", clock)
        sentences = [s for paragraph in item.paragraphs for s in split(paragraph)]
        clock = tally.spend("sentences", clock)
        document = Sentences(
            id=item.id,
            sentences=sentences,
            hash=text_hash(item.paragraphs),
            words=item.words,
            heldout=share(f"{source.name}\n{item.id}") < rules.heldout_fraction,
            signature=minhash(item.paragraphs) if rules.near_duplicates else None,
        )
        tally.documents += 1
        tally.words += document.words
        tally.characters += sum(map(len, sentences))
        tally.spend("hash", clock)
        yield document


def encode_unit(
    documents: Iterable[Sentences],
    source: int,
    tokenizer: Tokenizer,
    max_sentence_tokens: int,
    tally: Tally,
    records: BinaryIO,
) -> tuple[np.ndarray, np.ndarray | None]:
    """Writes one record a document to `records`; returns the table and the MinHash signatures."""
    rows: list[tuple[Any, ...]] = []
    signatures: list[np.ndarray] = []
    batch: list[Sentences] = []
    characters = 0

    def flush() -> None:
        clock = time.thread_time()
        ids, counts = _encode([s for d in batch for s in d.sentences], tokenizer)
        clock = tally.spend("encode", clock)
        at, sentence = 0, 0
        for document in batch:
            lengths = counts[sentence : sentence + len(document.sentences)]
            sentence += len(document.sentences)
            total = int(lengths.sum())
            own = ids[at : at + total]
            at += total
            lengths = lengths[lengths > 0]
            if total == 0:
                tally.documents -= 1
                tally.drop(Dropped("empty", document.id, " ".join(document.sentences)))
                continue
            if int(lengths.max()) > max_sentence_tokens:
                before = len(lengths)
                lengths = cut_sentences(own, lengths, max_sentence_tokens, tokenizer.word_start)
                tally.cut_sentences += len(lengths) - before
            payload = pack_document(own, lengths, document.id, source)
            records.write(payload)
            rows.append(
                (document.hash, len(payload), len(lengths), total, document.words, document.heldout)
            )
            if document.signature is not None:
                signatures.append(document.signature)
        tally.spend("write", clock)

    for document in documents:
        batch.append(document)
        characters += sum(map(len, document.sentences))
        if characters >= _ENCODED_AT_ONCE:
            flush()
            batch, characters = [], 0
    if batch:
        flush()
    return np.array(rows, TABLE), np.array(signatures) if signatures else None


def _encode(sentences: list[str], tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """`tokenizer.encode_sentences` in slices, so that a long book takes no more memory than short
    ones."""
    slices, start, characters = [], 0, 0
    for end, sentence in enumerate(sentences, 1):
        characters += len(sentence)
        if characters >= _ENCODED_AT_ONCE or end == len(sentences):
            slices.append(tokenizer.encode_sentences(sentences[start:end]))
            start, characters = end, 0
    if not slices:
        return np.empty(0, np.uint16), np.empty(0, np.int64)
    ids, counts = zip(*slices, strict=True)
    return np.concatenate(ids), np.concatenate(counts)


def cut_sentences(
    ids: np.ndarray, lengths: np.ndarray, bound: int, word_start: np.ndarray
) -> np.ndarray:
    """Lengths with each sentence of over `bound` tokens cut, between words where it can be."""
    result: list[int] = []
    at = 0
    for length in lengths.tolist():
        while length > bound:
            starts = np.flatnonzero(word_start[ids[at + 1 : at + bound + 1]])
            piece = int(starts[-1]) + 1 if len(starts) else bound
            result.append(piece)
            at += piece
            length -= piece
        result.append(length)
        at += length
    return np.array(result, np.int64)


# ------------------------------------------------------------------------------------------ on disk


class UnitStore:
    """A folder of finished units. Nothing half-written is ever seen as finished."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _path(self, number: int, kind: str) -> Path:
        return self.folder / f"{number:06d}.{kind}"

    def open(self, number: int, kind: str) -> BinaryIO:
        """A file of a finished unit, for reading."""
        return open(self._path(number, kind), "rb")

    def write(self, number: int) -> UnitWriter:
        """Begins a unit; use as a context manager, `finish` inside it."""
        return UnitWriter(self, number)

    def load(self, number: int) -> dict[str, Any] | None:
        """The facts of a finished unit, its files checked byte for byte; else None."""
        try:
            facts = json.loads(self._path(number, "json").read_bytes())
            for kind, (size, crc) in facts["files"].items():
                if self._path(number, kind).stat().st_size != size:
                    return None
                if self._crc(number, kind) != crc:
                    return None
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return facts

    def facts(self, number: int) -> dict[str, Any]:
        """As `load`, without reading the files again."""
        return json.loads(self._path(number, "json").read_bytes())

    def table(self, number: int) -> np.ndarray:
        """The unit's documents, dtype TABLE."""
        return np.frombuffer(self._path(number, "table").read_bytes(), TABLE)

    def signatures(self, number: int) -> np.ndarray | None:
        """MinHash signatures [documents, 128], if they were made."""
        path = self._path(number, "minhash")
        return np.load(path) if path.exists() else None

    def _crc(self, number: int, kind: str) -> int:
        crc = 0
        with self.open(number, kind) as file:
            while data := file.read(1 << 20):
                crc = zlib.crc32(data, crc)
        return crc


class UnitWriter:
    """The files of one unit while it is worked on, under names that no one reads."""

    def __init__(self, store: UnitStore, number: int) -> None:
        self.store, self.number = store, number
        self._open: dict[str, tuple[Path, BinaryIO]] = {}
        store.folder.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> UnitWriter:
        return self

    def __exit__(self, *_: object) -> None:
        for path, file in self._open.values():
            file.close()
            path.unlink(missing_ok=True)

    def file(self, kind: str) -> BinaryIO:
        path = part_of(self.store._path(self.number, kind))
        file = open(path, "wb", buffering=1 << 18)  # noqa: SIM115
        self._open[kind] = (path, file)
        return file

    def finish(self, facts: dict[str, Any]) -> dict[str, Any]:
        """Puts the files in place, then the facts: from here on the unit is finished."""
        files: dict[str, tuple[int, int]] = {}
        for kind, (path, file) in self._open.items():
            file.close()
            size, crc = 0, 0
            with open(path, "rb") as written:
                while data := written.read(1 << 20):
                    size += len(data)
                    crc = zlib.crc32(data, crc)
            files[kind] = (size, crc)
            sync(path)
            put_in_place(path, self.store._path(self.number, kind), durable=False)
        self._open = {}
        facts = {**facts, "files": files}
        target = self.store._path(self.number, "json")
        write_atomically(target, json.dumps(facts).encode())
        return facts
