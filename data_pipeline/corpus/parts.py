"""Files cut into parts, and the records of a part: here is all that knows of parts.

A part is a range of bytes where a file can be entered in the middle (lines, pages, bzip2 blocks), a
range of row groups, or else every n-th run of records, for which each part reads the whole file.
Each function here yields the records that begin in the part, in order, and `Broken` for what cannot
be read; nothing is kept in memory beyond one record. The readers (wikipedia.py, books.py and
tables.py) make documents of records.
"""

from __future__ import annotations

import contextlib
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from core.errors import UserError
from data_pipeline.corpus.compressed import (
    Broken,
    bzip2_blocks,
    chunks,
    is_compressed,
    lines,
    lines_from,
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


def _numbered_lines(source: Input) -> Iterator[tuple[int, bytes]]:
    """(byte, line) from the part's beginning to the end of the file."""
    if is_compressed(source.file):
        numbered = _with_offsets(lines(chunks(source.file)))
    else:
        numbered = lines_from(source.file, source.part.start)
    for at, line in numbered:
        yield at, line if at else line.removeprefix(_BYTE_ORDER_MARK)


def _with_offsets(found: Iterator[bytes]) -> Iterator[tuple[int, bytes]]:
    at = 0
    for line in found:
        yield at, line
        at += len(line) + 1


def line_records(source: Input, run: int = _RUN) -> Iterator[Record]:
    """One record a line."""
    for ordinal, (at, line) in enumerate(_numbered_lines(source)):
        if source.part.end and at >= source.part.end:
            return
        if source.part.holds(ordinal, run):
            yield Record(at, line)


def text_rows(source: Input) -> Iterator[Row | Broken]:
    """One row a line, in long runs: a part's ends cut books."""
    for at, line in line_records(source, run=65536):
        text, broken = decode(line, f"byte {at}")
        yield from broken
        yield Row(int(at), None, text)


# ------------------------------------------------------------------------------------------ pages

_PAGE, _PAGE_END = b"<page>", b"</page>"


def pages(source: Input) -> Iterator[Record | Broken]:
    """The <page> elements of a MediaWiki dump."""
    file, part = source.file, source.part
    if part.end and file.endswith(".bz2"):
        pieces: Iterator[tuple[bool, bytes | Broken]] = (
            (at < part.end, data) for at, data in bzip2_blocks(file, part.start, part.end)
        )
    elif part.end:
        pieces = _range(file, part.start, part.end)
    else:
        pieces = ((True, data) for data in chunks(file))
    for ordinal, page in enumerate(_pages(pieces)):
        if isinstance(page, Broken):
            yield page
        elif part.holds(ordinal):
            yield Record(ordinal, page)


def _range(file: str, start: int, end: int) -> Iterator[tuple[bool, bytes]]:
    with open(file, "rb") as handle:
        handle.seek(start)
        while start < end:
            data = handle.read(min(1 << 20, end - start))
            if not data:
                return
            start += len(data)
            yield True, data
        while data := handle.read(1 << 16):
            yield False, data


def _pages(pieces: Iterator[tuple[bool, bytes | Broken]]) -> Iterator[bytes | Broken]:
    """The <page> elements that begin in pieces marked True; later pieces only complete the last."""
    buffer, own = b"", 0
    looking = True  # for <page>; else for its end
    for mine, data in pieces:
        if isinstance(data, Broken):
            if not mine:
                return  # named by the part the block belongs to
            yield data
            buffer, own, looking = b"", 0, True
            continue
        buffer += data
        if mine:
            own = len(buffer)
        while True:
            if looking:
                at = buffer.find(_PAGE)
                if at < 0 or at >= own:
                    # A mark cut in two by the piece's end is found with the next piece.
                    keep = len(_PAGE) - 1
                    cut = max(0, len(buffer) - keep)
                    buffer, own = buffer[cut:], own - cut
                    break
                buffer, own, looking = buffer[at:], own - at, False
            at = buffer.find(_PAGE_END)
            again = buffer.find(_PAGE, len(_PAGE), at if at >= 0 else len(buffer))
            if again >= 0:
                yield Broken(page_title(buffer), "bad XML: the page has no end")
                buffer, own = buffer[again:], own - again
                looking = True
                continue
            if at < 0:
                break
            end = at + len(_PAGE_END)
            yield buffer[:end]
            buffer, own, looking = buffer[end:], own - end, True
        if not mine and looking and own <= 0:
            return
    if not looking:
        yield Broken(page_title(buffer), "the file ends inside a page")


def page_title(page: bytes) -> str:
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

    def broken(what: str) -> Broken:
        head = DOC_LINE.match(body[0])
        assert head is not None
        return Broken(f"document {head[1].decode('utf-8', 'replace')}", what)

    for at, line in _numbered_lines(source):
        opens = line.startswith(b"<doc ") and DOC_LINE.match(line) is not None
        if body:
            if line.startswith(b"</doc>"):
                if part.holds(ordinal):
                    yield Record(at, b"\n".join(body))
                body = []
            elif opens:
                yield broken("no </doc>")
                body = [line]
            else:
                body.append(line)
        elif part.end and at >= part.end:
            return
        elif opens:
            ordinal += 1
            body = [line]
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
        yield broken("the file ends inside the document")


# ---------------------------------------------------------------------------- whole files, archives


def whole_file(source: Input) -> Iterator[Record]:
    """The file as one record."""
    yield Record(source.name, b"".join(list(chunks(source.file))).removeprefix(_BYTE_ORDER_MARK))


def is_tar(file: str) -> bool:
    return re.search(r"\.(?:tar|tgz|tar\.gz|tar\.bz2|tar\.zst)$", file) is not None


def without_endings(name: str) -> str:
    """A text file's name in document ids."""
    return re.sub(r"(?:\.epub)?\.(?:txt|text)(?:\.(?:gz|bz2|zst))?$", "", name)


def tar_members(source: Input) -> Iterator[Record | Broken]:
    """The text files in a tar."""
    import zstandard

    file = source.file
    mode = "r|*" if is_compressed(file) else "r:"
    ordinal = -1
    try:
        with contextlib.ExitStack() as opened:
            packed = None
            if file.endswith(".zst"):
                packed, mode = opened.enter_context(zstandard.open(file, "rb")), "r|"
            archive = opened.enter_context(tarfile.open(file, mode, fileobj=packed))
            for member in archive:
                if not member.isfile() or not member.name.endswith((".txt", ".text")):
                    continue
                ordinal += 1
                if not source.part.holds(ordinal, run=1):
                    continue
                handle = archive.extractfile(member)
                data = handle.read() if handle else b""
                if len(data) != member.size:
                    yield Broken(f"member {member.name}", "the archive ends early")
                    return
                yield Record(without_endings(member.name), data.removeprefix(_BYTE_ORDER_MARK))
    except (tarfile.TarError, EOFError, OSError, zstandard.ZstdError) as error:
        if isinstance(error, PermissionError | FileNotFoundError):
            raise
        yield Broken(f"after member {ordinal + 1}", f"broken archive ({error})")


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
        table = pyarrow.parquet.ParquetFile(source.file)
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
        wanted = [c for c in (source.id_column, source.text_column) if c in columns]
        part, count = source.part, table.num_row_groups
        sizes = [table.metadata.row_group(group).num_rows for group in range(count)]
        for group in range(
            part.index * count // part.count, (part.index + 1) * count // part.count
        ):
            number = sum(sizes[:group])
            try:
                for batch in table.iter_batches(1000, row_groups=[group], columns=wanted):
                    data = batch.to_pydict()
                    texts = data[source.text_column]
                    ids = data.get(source.id_column, [None] * len(texts))
                    for identity, text in zip(ids, texts, strict=True):
                        yield Row(number, identity, text)
                        number += 1
            except (pyarrow.ArrowException, OSError, ValueError) as error:
                yield corrupt(f"row group {group}", error)
