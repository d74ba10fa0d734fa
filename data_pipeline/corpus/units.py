"""One unit of work: documents of a source as sentences, sentences as records."""

from __future__ import annotations

import io
import json
import time
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import Any, BinaryIO

import numpy as np
import zstandard

from core.errors import UserError, short
from core.files import open_regular
from data_pipeline.corpus.documents import Document, Dropped, Problem, minhash, share, text_hash
from data_pipeline.corpus.job import Job
from data_pipeline.corpus.sentences import slices, splitter
from data_pipeline.corpus.shards import pack_document
from data_pipeline.corpus.sources import Unit, read_unit
from data_pipeline.corpus.store import Store, Writer, changed
from data_pipeline.corpus.tokenizer import Tokenizer

# One row a document. size: payload bytes; crc: theirs. hash: of the normalised text. share: a hash
# of the id, in [0, 1): below the fraction to hold out it is held out.
TABLE = np.dtype(
    [
        ("hash", "V16"),
        ("size", "<u4"),
        ("crc", "<u4"),
        ("sentences", "<u4"),
        ("tokens", "<u4"),
        ("words", "<u4"),
        ("share", "<f8"),
    ]
)
_ENCODED_AT_ONCE = 1 << 17  # characters; their words still fit a core's own cache
_SAMPLES = 3
_MOST_PROBLEMS = 1000  # named of a unit, fewer where there are many: rank 0 holds those of all
_MOST_OF_ALL = 100_000
_SAMPLE_CHARACTERS = 300
_NAME_CHARACTERS = 1000  # of an id or place, which may be as long as a document


@dataclass(frozen=True)
class SegmentedDocument:
    """A document as sentences, ready to encode."""

    id: str
    sentences: list[str]
    hash: bytes
    words: int
    share: float
    signature: np.ndarray | None = None


@dataclass
class Tally:
    """What happened in a unit. `seconds` by part of the work."""

    documents: int = 0
    characters: int = 0
    words: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    samples: dict[str, list[Dropped]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    bad_utf8: int = 0
    more_problems: int = 0  # that are not named: of a file of another kind every line may be one
    cut_sentences: int = 0
    tokens: int = 0
    unknown: int = 0  # of the tokens
    seconds: dict[str, float] = field(default_factory=dict)

    def drop(self, dropped: Dropped) -> None:
        self.dropped[dropped.reason] = self.dropped.get(dropped.reason, 0) + 1
        samples = self.samples.setdefault(dropped.reason, [])
        if len(samples) < _SAMPLES:
            name, sample = short(dropped.id, _NAME_CHARACTERS), dropped.sample[:_SAMPLE_CHARACTERS]
            samples.append(replace(dropped, id=name, sample=sample))

    def spend(self, part: str, since: float) -> float:
        """Books the time since `since` under `part`; returns now."""
        now = time.thread_time()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - since
        return now


_splitter = cache(splitter)


def refusal(problem: Problem) -> UserError:
    return UserError(f"{problem.file}: {problem.place}: {problem.what} (--strict)")


def documents_of(job: Job, unit: Unit, tally: Tally, checked: bool) -> Iterator[SegmentedDocument]:
    """The documents of a unit that are kept, as sentences, in order; the others go to the tally.
    checked: as of `read_unit`."""
    config = job.config
    source = config.sources[unit.source]
    rows = "lines" if source.kind == "sentences" else config.sentences
    split = _splitter(source.sentences or rows)

    named = max(10, min(_MOST_PROBLEMS, _MOST_OF_ALL // len(job.units)))

    def told(problem: Problem) -> None:
        if job.strict:
            raise refusal(problem)
        tally.bad_utf8 += problem.what.endswith("bad UTF-8")
        if len(tally.problems) < named:
            place, what = (short(text, _NAME_CHARACTERS) for text in (problem.place, problem.what))
            tally.problems.append(Problem(problem.file, place, what))
        else:
            tally.more_problems += 1

    items = read_unit(source, unit, job.names[unit.source], told, checked)
    while True:
        clock = time.thread_time()
        try:
            item = next(items, None)
        except UserError:
            job.check_unchanged(unit)  # which explains it better
            raise
        clock = tally.spend("read and clean", clock)
        if item is None:
            job.check_unchanged(unit)
            return
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
        document = SegmentedDocument(
            id=item.id,
            sentences=sentences,
            hash=text_hash(item.paragraphs),
            words=item.words,
            share=share(f"{source.name}\n{item.id}"),
            signature=minhash(item.paragraphs) if config.duplicates.near else None,
        )
        tally.documents += 1
        tally.words += document.words
        tally.characters += sum(map(len, sentences))
        tally.spend("hash", clock)
        yield document


def _batches(documents: Iterable[SegmentedDocument]) -> Iterator[list[SegmentedDocument]]:
    batch: list[SegmentedDocument] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document.id) + sum(map(len, document.sentences))
        if characters >= _ENCODED_AT_ONCE:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def encode_unit(
    documents: Iterable[SegmentedDocument],
    source: int,
    tokenizer: Tokenizer,
    max_sentence_tokens: int,
    tally: Tally,
    records: BinaryIO,
) -> tuple[np.ndarray, np.ndarray | None]:
    """Writes one record a document to `records`; returns the table and the MinHash signatures."""
    rows: list[tuple[Any, ...]] = []
    signatures: list[np.ndarray] = []
    for batch in _batches(documents):
        clock = time.thread_time()
        ids, counts = _encode([s for d in batch for s in d.sentences], tokenizer)
        tally.tokens += len(ids)
        tally.unknown += int(np.count_nonzero(ids == tokenizer.unk_id))
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
            counted = (len(lengths), total, document.words)
            checked = (len(payload), zlib.crc32(payload))
            rows.append((document.hash, *checked, *counted, document.share))
            if document.signature is not None:
                signatures.append(document.signature)
        tally.spend("write", clock)
    return np.array(rows, TABLE), np.array(signatures) if signatures else None


def make_record_unit(
    job: Job,
    store: Store[Tally],
    texts: Store[Tally] | None,
    tokenizer: Tokenizer,
    unit: Unit,
    checked: bool,
) -> Tally:
    """A unit as records, from its source, or from `texts` where its sentences were kept: the files
    `records`, `table` and, for near duplicates, `minhash`."""
    if texts is None:
        tally = Tally()
        documents = documents_of(job, unit, tally, checked)
    else:
        tally = texts.result(unit.key)
        documents = read_text_unit(texts, unit)
    with Writer(store, unit.key) as writer:
        records, bound = writer.file("records"), job.config.max_sentence_tokens
        table, signatures = encode_unit(documents, unit.source, tokenizer, bound, tally, records)
        writer.file("table").write(table.tobytes())
        if signatures is not None:
            held = io.BytesIO()  # numpy tells of a file that it cannot write, and not why
            np.save(held, signatures)
            writer.file("minhash").write(held.getbuffer())
        return writer.finish(tally)


def make_text_unit(job: Job, store: Store[Tally], unit: Unit, checked: bool) -> Tally:
    """A unit as sentences, kept because the vocabulary has still to be trained on them."""
    tally = Tally()
    with Writer(store, unit.key) as writer:
        compressor = zstandard.ZstdCompressor(level=1)
        with compressor.stream_writer(writer.file("text"), closefd=False) as packed:
            for document in documents_of(job, unit, tally, checked):
                row = asdict(document)
                row["hash"] = document.hash.hex()
                if document.signature is not None:
                    row["signature"] = document.signature.tolist()
                packed.write(json.dumps(row).encode() + b"\n")
        return writer.finish(tally)


def read_text_unit(store: Store[Tally], unit: Unit) -> Iterator[SegmentedDocument]:
    """The documents of a unit made by `make_text_unit`; errors as of `Store.open`."""
    with store.open(unit.key, "text") as file:
        reader = zstandard.ZstdDecompressor().stream_reader(file)
        for line in io.TextIOWrapper(reader, encoding="utf-8"):
            row = json.loads(line)
            row["hash"] = bytes.fromhex(row["hash"])
            if row["signature"] is not None:
                row["signature"] = np.array(row["signature"], np.uint64)
            yield SegmentedDocument(**row)


def read_table(store: Store[Tally], unit: Unit) -> np.ndarray:
    """The unit's documents, dtype TABLE; errors as of `Store.open`."""
    with store.open(unit.key, "table") as file:
        return np.fromfile(file, TABLE)


def read_records(
    store: Store[Tally], unit: Unit, first: int, count: int, at: int
) -> Iterator[bytes]:
    """The payloads of `count` documents from number `first` on, whose records begin at byte `at`.
    UserError where one is not what was written."""
    # Of a unit whose every second document repeats another there are many stretches: its whole
    # files are not read for each.
    table, path = store.path(unit.key, "table"), store.path(unit.key, "records")
    with open_regular(table) as file:
        rows = np.fromfile(file, TABLE, count, offset=first * TABLE.itemsize)
    if len(rows) != count:
        raise changed(table)
    with open_regular(path, 1 << 13) as file:
        file.seek(at)
        for size, crc in rows[["size", "crc"]].tolist():
            payload = file.read(size)
            if not payload or len(payload) != size or zlib.crc32(payload) != crc:
                raise changed(f"{path} (or {table.name})")
            yield payload


def read_signatures(store: Store[Tally], unit: Unit) -> np.ndarray | None:
    """MinHash signatures [documents, 128], if they were made; errors as of `Store.open`."""
    if not store.has(unit.key, "minhash"):
        return None
    with store.open(unit.key, "minhash") as file:
        return np.load(file)


def _encode(sentences: list[str], tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """`tokenizer.encode_sentences` in slices, so that a long book or sentence takes no more memory
    than short ones."""
    ids = [np.empty(0, np.uint16)]
    counts = np.zeros(len(sentences), np.int64)
    pieces: list[str] = []
    owners: list[int] = []  # the sentence of each piece

    def encode_pieces() -> None:
        found, lengths = tokenizer.encode_sentences(pieces)
        ids.append(found)
        np.add.at(counts, owners, lengths)
        pieces.clear()
        owners.clear()

    characters = 0
    for number, sentence in enumerate(sentences):
        for piece in slices(sentence, _ENCODED_AT_ONCE):
            pieces.append(piece)
            owners.append(number)
            characters += len(piece)
            if characters >= _ENCODED_AT_ONCE:
                encode_pieces()
                characters = 0
    encode_pieces()
    return np.concatenate(ids), counts


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
