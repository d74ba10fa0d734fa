"""Files cut into parts, and the records of a part: here is all that knows of parts.

A part is a range of bytes where a file can be entered in the middle (lines, pages, bzip2 blocks), a
range of row groups, or else every n-th run of records, for which each part reads the whole file.
Each function here yields the records that begin in the part, in order, and `Broken` for what cannot
be read; nothing is kept in memory beyond one record. The readers (wikipedia.py, books.py and
tables.py) make documents of records.
"""

from __future__ import annotations

import contextlib
import os
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from core.errors import UserError
from data_pipeline.corpus.compressed import (
    CHUNK,
    Broken,
    Trailing,
    bzip2_blocks,
    chunks,
    numbered_lines,
    packing,
)

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_RUN = 64  # records dealt to one part at a time


@dataclass(frozen=True)
class Part:
    """Bytes [start, end) of a file; with an end of 0 the part `index` of `count` that are dealt."""

    start: int = 0
    end: int = 0
    index: int = 0
    count: int = 1

    def holds(self, ordinal: int, run: int = _RUN) -> bool:
        """Whether record `ordinal` of those that were read belongs to the part."""
        return self.end > 0 or (ordinal // run) % self.count == self.index


@dataclass(frozen=True)
class Input:
    """A part of a file, and what its reader needs to know. `name`: the file's, for document ids."""

    file: str
    name: str
    part: Part = Part()
    text_column: str = "text"
    id_column: str = "id"
    min_paragraph_words: int = 0
    max_document_bytes: int = 20_000_000

    def too_large(self, place: str, size: int) -> Broken:
        return Broken(
            place, f"{size:,} bytes, over max_document_bytes ({self.max_document_bytes:,})"
        )


class Record(NamedTuple):
    """`at`: where it stands in the file: a byte, or the name of an archive's member."""

    at: int | str
    data: bytes


class Row(NamedTuple):
    """One row of a table. `at`: its byte or number in the file."""

    at: int
    id: Any
    text: Any


def decode(data: bytes, place: str) -> tuple[str, list[Broken]]:
    """The text, and what is wrong with it."""
    try:
        return data.decode("utf-8"), []
    except UnicodeDecodeError as error:
        broken = Broken(f"{place}, byte {error.start} of it", "bad UTF-8")
        return data.decode("utf-8", "replace"), [broken]


# ------------------------------------------------------------------------------------------ lines


def _numbered_lines(source: Input) -> Iterator[tuple[int, bytes | Broken]]:
    """(byte, line) from the part's beginning to the end of the file."""
    file, start = source.file, source.part.start
    with contextlib.closing(chunks(file)) as pieces:
        try:
            head = next(pieces, b"")
        except Broken:
            head = b""
    # Lines of old Macs end in CR alone.
    ending = b"\r" if b"\r" in head and b"\n" not in head else b"\n"
    # What begins before the part is another's, but a line that ends there is not.
    pieces = (data for _, data in _range(file, start - 1)) if start else chunks(file)
    numbered = numbered_lines(pieces, max(0, start - 1), source.max_document_bytes, ending)
    if start:
        next(numbered, None)
    for at, line in numbered:
        yield at, line if at or isinstance(line, Broken) else line.removeprefix(_BYTE_ORDER_MARK)


def line_records(source: Input, run: int = _RUN) -> Iterator[Record | Broken]:
    """One record a line."""
    for ordinal, (at, line) in enumerate(_numbered_lines(source)):
        if source.part.end and at >= source.part.end:
            return
        if source.part.holds(ordinal, run):
            yield line if isinstance(line, Broken) else Record(at, line)


def text_rows(source: Input) -> Iterator[Row | Broken]:
    """One row a line, in long runs: a part's ends cut books."""
    for record in line_records(source, run=65536):
        if isinstance(record, Broken):
            yield record
        else:
            text, broken = decode(record.data, f"byte {record.at}")
            yield from broken
            yield Row(int(record.at), None, text)


# ------------------------------------------------------------------------------------------ pages

_PAGE, _PAGE_END = b"<page>", b"</page>"
_Pieces = Iterator[tuple[bool, bytes | Broken]]  # whether a record may begin there


def pages(source: Input) -> Iterator[Record | Broken]:
    """The <page> elements of a MediaWiki dump."""
    file, part = source.file, source.part
    if part.end and packing(file) == "bzip2":
        pieces: _Pieces = (
            (at < part.end, data) for at, data in bzip2_blocks(file, part.start, part.end)
        )
    elif part.end:
        pieces = _range(file, part.start, part.end)
    else:
        pieces = ((True, data) for data in chunks(file))
    for ordinal, page in enumerate(_pages(pieces, source)):
        if isinstance(page, Broken):
            yield page
        elif part.holds(ordinal):
            yield Record(ordinal, page)


def _range(file: str, start: int, end: int = 1 << 62) -> Iterator[tuple[bool, bytes]]:
    """Pieces of a plain file from byte `start` to its end, and whether they begin before `end`."""
    with open(file, "rb") as handle:
        handle.seek(start)
        while data := handle.read(min(CHUNK, end - start) if start < end else CHUNK // 16):
            yield start < end, data
            start += len(data)


def _pages(
    pieces: Iterator[tuple[bool, bytes | Broken]], source: Input
) -> Iterator[bytes | Broken]:
    """The <page> elements that begin in pieces marked True; later pieces only complete the last."""
    buffer = bytearray()
    own = 0  # bytes of the buffer in which a page may begin
    seen = 0  # bytes of the buffer in which the next mark does not begin
    looking = True  # for <page>; else for its end

    def forget(count: int) -> None:
        nonlocal own, seen
        del buffer[:count]
        own, seen = own - count, 0

    for mine, data in pieces:
        if isinstance(data, Broken):
            if not mine:
                return  # named by the part the block belongs to
            yield data
            forget(len(buffer))
            own, looking = 0, True
            continue
        buffer += data
        if mine:
            own = len(buffer)
        while True:
            # A mark cut in two by the piece's end is found with the next piece.
            whole = max(0, len(buffer) - len(_PAGE_END) + 1)
            if looking:
                at = buffer.find(_PAGE, seen)
                if at < 0 or at >= own:
                    forget(max(0, len(buffer) - len(_PAGE) + 1))
                    break
                forget(at)
                looking, seen = False, len(_PAGE)
            at = buffer.find(_PAGE_END, seen)
            end = at + len(_PAGE_END) if at >= 0 else len(buffer)
            again = buffer.find(_PAGE, seen, end)
            if again >= 0:
                yield Broken(page_title(buffer), "bad XML: the page has no end")
                forget(again)
                looking = True
            elif end > source.max_document_bytes:
                yield source.too_large(page_title(buffer), end)
                forget(end if at >= 0 else whole)
                looking = True
            elif at >= 0:
                yield bytes(buffer[:end])
                forget(end)
                looking = True
            else:
                seen = max(seen, whole)
                break
        if not mine and looking and own <= 0:
            return
    if not looking:
        yield Broken(page_title(buffer), "the file ends inside a page")


def page_title(page: bytes | bytearray) -> str:
    """How a page is named that cannot be parsed."""
    match = re.search(rb"<(title|id)>([^<]*)", page[:4096])
    title = match[2].decode("utf-8", "replace") if match else "?"
    return f'page "{title}"'


DOC_LINE = re.compile(rb'<doc id="([^"]*)"(?:[^>]*? title="([^"]*)")?[^>]*>')


def extracted_pages(source: Input) -> Iterator[Record | Broken]:
    """WikiExtractor's documents: the lines from <doc> to before </doc>, or one of JSON."""
    part = source.part
    ordinal, stray = -1, False
    body: list[bytes] = []  # of the document that is open; its first line names it
    size = 0

    def place() -> str:
        head = DOC_LINE.match(body[0])
        assert head is not None
        return f"document {head[1].decode('utf-8', 'replace')}"

    for at, line in _numbered_lines(source):
        if isinstance(line, Broken):
            if not part.end or at < part.end:
                yield line
            continue
        opens = line.startswith(b"<doc ") and DOC_LINE.match(line) is not None
        if body:
            if line.startswith(b"</doc>"):
                if part.holds(ordinal):
                    large = size > source.max_document_bytes
                    yield source.too_large(place(), size) if large else Record(at, b"\n".join(body))
                body = []
            elif opens:
                yield Broken(place(), "no </doc>")
                body, size = [line], len(line)
            else:
                size += len(line) + 1
                if size <= source.max_document_bytes:
                    body.append(line)
        elif part.end and at >= part.end:
            return
        elif opens:
            ordinal += 1
            body, size = [line], len(line)
        elif line.startswith(b"{"):
            ordinal += 1
            if part.holds(ordinal):
                yield Record(at, line)
        elif not stray and line.strip() and (ordinal >= 0 or not part.start):
            # Before the first <doc> of a later part stands the end of an earlier part's.
            what = "a <doc> line that cannot be read"
            known = line.startswith(b"<doc ")
            yield Broken(f"byte {at}", what if known else "text outside of any document")
            stray = True
    if body:
        yield Broken(place(), "the file ends inside the document")


# ---------------------------------------------------------------------------- whole files, archives


def whole_file(source: Input) -> Iterator[Record | Broken]:
    """The file as one record."""
    pieces: list[bytes] = []
    size, trailing = 0, None
    try:
        for piece in chunks(source.file):
            pieces.append(piece)
            size += len(piece)
            if size > source.max_document_bytes:
                yield source.too_large("file", os.path.getsize(source.file))
                return
    except Trailing as broken:
        trailing = broken
    yield Record(source.name, b"".join(pieces).removeprefix(_BYTE_ORDER_MARK))
    if trailing is not None:
        yield trailing


def is_tar(file: str) -> bool:
    return re.search(r"\.(?:tar|tgz|tar\.gz|tar\.bz2|tar\.zst)$", file, re.I) is not None


def without_endings(name: str) -> str:
    """A text file's name in document ids."""
    return re.sub(r"(?:\.epub)?\.(?:txt|text)(?:\.(?:gz|bz2|zst))?$", "", name, flags=re.I)


class _Bytes:
    """Pieces read by count."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._rest = b""
        self.at = 0

    def read(self, count: int, keep: bool = True) -> bytes:
        """The next `count` bytes, fewer at the end; without `keep` they are passed over."""
        found: list[bytes] = []
        while count and (piece := self._rest or next(self._pieces, b"")):
            taken, self._rest = piece[:count], piece[count:]
            self.at += len(taken)
            count -= len(taken)
            if keep:
                found.append(taken)
        return b"".join(found)


_ABOUT_THE_NEXT = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)


def tar_members(source: Input) -> Iterator[Record | Broken]:
    """The text files in a tar, of which every header, the end, and the packing's checksum count."""
    stream = _Bytes(chunks(source.file))
    ordinal = -1
    name, size, sparse = None, None, False  # of the next member, where they stand before its header
    while True:
        at = stream.at
        block = stream.read(tarfile.BLOCKSIZE)
        try:
            header = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
            if header.size < 0:
                raise tarfile.HeaderError("a size below 0")
        except tarfile.EOFHeaderError:
            break
        except (tarfile.HeaderError, ValueError) as error:
            what = f"bad header ({error})" if block else "no end blocks"
            raise Broken(f"byte {at}", f"broken archive: {what}; what follows is lost") from None
        length = header.size if size is None else size
        if header.type in _ABOUT_THE_NEXT:
            data = _member_bytes(stream, header.name, length, 1 << 20)
            if data is None:
                raise Broken(f"byte {at}", "broken archive: an endless name; what follows is lost")
            if header.type == tarfile.GNUTYPE_LONGNAME:
                name = data.rstrip(b"\0").decode("utf-8", "surrogateescape")
            elif header.type == tarfile.XHDTYPE:
                if found := re.search(rb"\d+ path=([^\n]*)\n", data):
                    name = found[1].decode("utf-8", "surrogateescape")
                if found := re.search(rb"\d+ size=(\d{1,18})\n", data):
                    size = int(found[1])
                sparse = b" GNU.sparse." in data
            continue
        more = header.type == tarfile.GNUTYPE_SPARSE and block[482]
        while more:
            more = stream.read(tarfile.BLOCKSIZE)[504:505].strip(b"\0")
        member = name or header.name
        holes = sparse or header.type == tarfile.GNUTYPE_SPARSE
        name, size, sparse = None, None, False
        text = header.isreg() and member.lower().endswith((".txt", ".text"))
        ordinal += text
        wanted = text and source.part.holds(ordinal, run=1)
        if not header.isreg() and header.type in tarfile.SUPPORTED_TYPES:
            length = 0
        limit = source.max_document_bytes if wanted and not holes else 0
        data = _member_bytes(stream, member, length, limit)
        if wanted and holes:
            yield Broken(f"member {member}", "a sparse file")
        elif wanted and data is None:
            yield source.too_large(f"member {member}", length)
        elif wanted:
            yield Record(without_endings(member), data.removeprefix(_BYTE_ORDER_MARK))
    rest = stream.read(tarfile.BLOCKSIZE)
    whole = len(rest) == tarfile.BLOCKSIZE
    while rest and not rest.strip(b"\0"):
        rest = stream.read(CHUNK)
    if rest or not whole:
        what = "bytes after the end of the archive" if rest else "one of two end blocks is missing"
        yield Broken(f"byte {stream.at}", what)


def _member_bytes(stream: _Bytes, name: str, size: int, limit: int) -> bytes | None:
    """The bytes of a member, None where they are more than `limit`; Broken where they end early."""
    padded = size + -size % tarfile.BLOCKSIZE
    start = stream.at
    data = stream.read(padded, keep=size <= limit)
    if stream.at < start + padded:
        raise Broken(f"member {name}", "the archive ends early")
    return data[:size] if size <= limit else None


# --------------------------------------------------------------------------------------- parquet


def row_groups(file: str) -> int:
    """How many parts a parquet file can have."""
    import pyarrow
    import pyarrow.parquet

    try:
        return max(1, pyarrow.parquet.ParquetFile(file).num_row_groups)
    except (pyarrow.ArrowException, OSError):
        return 1


def parquet_rows(source: Input) -> Iterator[Row | Broken]:
    """The rows of a parquet file's row groups."""
    import pyarrow
    import pyarrow.parquet

    def corrupt(place: str, error: Exception) -> Broken:
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        return Broken(place, f"corrupt parquet ({first_line[:200]})")

    try:
        table = pyarrow.parquet.ParquetFile(source.file, page_checksum_verification=True)
    except (pyarrow.ArrowException, OSError) as error:
        yield corrupt("file", error)
        return
    with table:
        columns = table.schema_arrow.names
        if source.text_column not in columns:
            raise UserError(
                f"{source.file}: no column {source.text_column!r}; there are: "
                f"{', '.join(columns)} (set text_column of the source)"
            )
        held = table.schema_arrow.field(columns.index(source.text_column)).type
        held = held.value_type if pyarrow.types.is_dictionary(held) else held
        if held not in (pyarrow.string(), pyarrow.large_string(), pyarrow.string_view()):
            raise UserError(
                f"{source.file}: column {source.text_column!r} holds {held}, not text (set "
                "text_column of the source)"
            )
        named = source.id_column in columns
        wanted = [source.id_column, source.text_column] if named else [source.text_column]
        part, count = source.part, table.num_row_groups
        sizes = [table.metadata.row_group(group).num_rows for group in range(count)]
        for group in range(
            part.index * count // part.count, (part.index + 1) * count // part.count
        ):
            number = sum(sizes[:group])
            try:
                for batch in table.iter_batches(100, row_groups=[group], columns=wanted):
                    texts = batch.column(source.text_column).to_pylist()
                    ids = _ids(batch.column(source.id_column)) if named else [None] * len(texts)
                    for identity, text in zip(ids, texts, strict=True):
                        if text is not None and len(text) > source.max_document_bytes:
                            yield source.too_large(f"row {number}", len(text))
                        else:
                            yield Row(number, identity, text)
                        number += 1
            except (pyarrow.ArrowException, OSError, ValueError) as error:
                yield corrupt(f"row group {group}", error)


def _ids(column: Any) -> list[Any]:
    import pyarrow

    try:
        return column.to_pylist()
    except (ValueError, OverflowError):  # times that Python cannot hold: as numbers
        return column.cast(pyarrow.int64()).to_pylist()
