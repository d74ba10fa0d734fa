"""Readers: one a shape of text, from the bytes of a unit to documents.

`read_unit` yields, in order, a `Document`, a `Dropped` (with its reason) or a `Problem` (broken
input, with its place). Nothing is kept in memory beyond one document.
"""

from __future__ import annotations

import contextlib
import json
import re
import tarfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from typing import Any

from core.errors import UserError
from data_pipeline.corpus import wikitext
from data_pipeline.corpus.compressed import (
    Broken,
    bzip2_blocks,
    chunks,
    is_compressed,
    lines,
    lines_from,
)
from data_pipeline.corpus.documents import (
    Document,
    book_paragraphs,
    clean_text,
    cut_gutenberg,
    squeeze,
)
from data_pipeline.corpus.sources import Dropped, Item, Problem, SourceConfig, Unit, is_tar

_MOST_SENTENCES_A_BOOK = 20_000


def read_unit(source: SourceConfig, unit: Unit, names: dict[str, str]) -> Iterator[Item]:
    """The documents of a unit in order; `names` from `list_files`."""
    for file in unit.files:
        reader = _READERS[source.kind]
        if is_tar(file):
            reader = _read_tar
        elif file.endswith(".parquet"):
            reader = _read_parquet
        try:
            yield from reader(source, unit, file, names[file])
        except Broken as broken:
            yield Problem(file, broken.place, broken.what)
        except FileNotFoundError:
            raise UserError(f"{file}: the file is gone") from None
        except PermissionError:
            raise UserError(f"{file}: no permission to read it") from None


def _decode(data: bytes, file: str, place: str) -> tuple[str, Problem | None]:
    try:
        return data.decode("utf-8"), None
    except UnicodeDecodeError as error:
        problem = Problem(file, f"{place}, byte {error.start} of it", "bad UTF-8")
        return data.decode("utf-8", "replace"), problem


def _mine(unit: Unit, ordinal: int) -> bool:
    return unit.parts == 1 or (ordinal // 64) % unit.parts == unit.part


def _paragraphs(source: SourceConfig, text: str) -> list[str]:
    least = source.least_paragraph_words
    found = (squeeze(line) for line in text.split("\n"))
    return [line for line in found if line and (not least or line.count(" ") + 1 >= least)]


# --- Wikipedia XML


def _read_dump(source: SourceConfig, unit: Unit, file: str, name: str) -> Iterator[Item]:
    if unit.end and file.endswith(".bz2"):
        pieces: Iterator[tuple[bool, bytes | Broken]] = (
            (at < unit.end, data) for at, data in bzip2_blocks(file, unit.start, unit.end)
        )
    elif unit.end:
        pieces = _range_pieces(file, unit.start, unit.end)
    else:
        pieces = ((True, data) for data in chunks(file))
    for ordinal, page in enumerate(_pages(pieces, file)):
        if isinstance(page, Problem):
            yield page
        elif unit.end or _mine(unit, ordinal):
            yield _article(source, file, page)


def _range_pieces(file: str, start: int, end: int) -> Iterator[tuple[bool, bytes]]:
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


_PAGE, _PAGE_END = b"<page>", b"</page>"


def _pages(pieces: Iterator[tuple[bool, bytes | Broken]], file: str) -> Iterator[bytes | Problem]:
    """The <page> elements that begin in pieces marked True; later pieces only complete the last."""
    buffer, own = b"", 0
    looking = True  # for <page>; else for its end
    for mine, data in pieces:
        if isinstance(data, Broken):
            if not mine:
                return  # named by the part the block belongs to
            yield Problem(file, data.place, data.what)
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
                yield Problem(file, _title_of(buffer), "bad XML: the page has no end")
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
        yield Problem(file, _title_of(buffer), "the file ends inside a page")


def _title_of(page: bytes) -> str:
    match = re.search(rb"<(title|id)>([^<]*)", page[:4096])
    title = match[2].decode("utf-8", "replace") if match else "?"
    return f'page "{title}"'


def _article(source: SourceConfig, file: str, page: bytes) -> Item:
    try:
        element = ElementTree.fromstring(page)
    except ElementTree.ParseError as error:
        return Problem(file, _title_of(page), f"bad XML: {error}")
    title = element.findtext("title") or ""
    number = element.findtext("id") or title
    if (element.findtext("ns") or "0") != "0":
        return Dropped("other namespace", number, title)
    text = element.findtext("revision/text") or ""
    if element.find("redirect") is not None or text[:20].lstrip().lower().startswith("#redirect"):
        return Dropped("redirect", number, title)
    if wikitext.is_disambiguation(title, text):
        return Dropped("disambiguation", number, title)
    paragraphs = wikitext.passages(clean_text(text))
    least = source.least_paragraph_words
    paragraphs = [p for p in paragraphs if p.count(" ") + 1 >= least]
    if not paragraphs:
        return Dropped("no prose", number, title)
    return Document(number, paragraphs)


# --- WikiExtractor

_DOC = re.compile(rb'<doc id="([^"]*)"(?:[^>]*? title="([^"]*)")?[^>]*>')
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_FORMULA = re.compile(r"\b(?:formula|codice)_\d+\b")


def _read_wikiextractor(source: SourceConfig, unit: Unit, file: str, name: str) -> Iterator[Item]:
    body: list[bytes] | None = None
    head: tuple[str, str] = ("", "")
    ordinal = -1
    stray = False
    for offset, line in _numbered_lines(file, unit):
        if body is None:
            if unit.end and offset >= unit.end:
                return
            if line.startswith(b"<doc "):
                match = _DOC.match(line)
                if match is None:
                    yield Problem(file, f"byte {offset}", "a <doc> line that cannot be read")
                    stray = True
                    continue
                ordinal += 1
                head = (
                    match[1].decode("utf-8", "replace"),
                    (match[2] or b"").decode("utf-8", "replace"),
                )
                body = []
            elif line.startswith(b"{"):
                ordinal += 1
                if unit.end or _mine(unit, ordinal):
                    yield from _json_article(source, file, offset, line)
            elif not stray and line.strip() and (ordinal >= 0 or not unit.start):
                # Before the first <doc> of a later part stands the end of an earlier part's.
                yield Problem(file, f"byte {offset}", "text outside of any document")
                stray = True
        elif line.startswith(b"</doc>"):
            if unit.end or _mine(unit, ordinal):
                text, problem = _decode(b"\n".join(body), file, f"document {head[0]}")
                if problem:
                    yield problem
                yield _extracted(source, head[0], head[1], text)
            body = None
        elif line.startswith(b"<doc ") and _DOC.match(line):
            yield Problem(file, f"document {head[0]}", "no </doc>")
            match = _DOC.match(line)
            assert match is not None
            head = (
                match[1].decode("utf-8", "replace"),
                (match[2] or b"").decode("utf-8", "replace"),
            )
            body = []
        else:
            body.append(line)
    if body is not None:
        yield Problem(file, f"document {head[0]}", "the file ends inside the document")


def _json_article(source: SourceConfig, file: str, offset: int, line: bytes) -> Iterator[Item]:
    try:
        row = json.loads(line)
        number, title, text = str(row["id"]), str(row.get("title", "")), str(row["text"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        yield Problem(
            file, f"byte {offset}", f"not a JSON article ({type(error).__name__}: {error})"
        )
        return
    yield _extracted(source, number, title, text)


def _extracted(source: SourceConfig, number: str, title: str, text: str) -> Item:
    lines_ = clean_text(text).strip().split("\n")
    if lines_ and lines_[0].strip() == _unescape(title):
        lines_ = lines_[1:]
    least = source.least_paragraph_words
    paragraphs = []
    for line in lines_:
        if line.count(" ") + 1 < least:
            continue
        if "formula_" in line or "codice_" in line:
            line = _FORMULA.sub("", line)
        line = wikitext.clean_line(line)
        if line and line.count(" ") + 1 >= least:
            paragraphs.append(line)
    if not paragraphs:
        return Dropped("no prose", number, title)
    if len(paragraphs) <= 3 and paragraphs[0].endswith(("refer to:", "refers to:", "refer to")):
        return Dropped("disambiguation", number, title)
    return Document(number, paragraphs)


def _unescape(text: str) -> str:
    import html

    return html.unescape(text)


def _numbered_lines(file: str, unit: Unit) -> Iterator[tuple[int, bytes]]:
    if is_compressed(file):
        numbered = _with_offsets(lines(chunks(file)))
    else:
        numbered = lines_from(file, unit.start)
    for at, line in numbered:
        yield at, line if at else line.removeprefix(_BYTE_ORDER_MARK)


def _with_offsets(found: Iterator[bytes]) -> Iterator[tuple[int, bytes]]:
    at = 0
    for line in found:
        yield at, line
        at += len(line) + 1


# --- books and other texts


def _read_book(source: SourceConfig, unit: Unit, file: str, name: str) -> Iterator[Item]:
    pieces = []
    try:
        for piece in chunks(file):
            pieces.append(piece)
    except Broken as broken:
        yield Problem(file, broken.place, broken.what)
        return
    yield from _book(source, file, name, b"".join(pieces))


def _book(source: SourceConfig, file: str, name: str, data: bytes) -> Iterator[Item]:
    text, problem = _decode(data.removeprefix(_BYTE_ORDER_MARK), file, name)
    if problem:
        yield problem
    text = clean_text(text)
    if source.kind == "crawl" and text[:500].lstrip().lower().startswith(
        ("<!doctype", "<html", "<?xml")
    ):
        yield Dropped("not a text (HTML)", name, text[:200])
        return
    text, _ = cut_gutenberg(text)
    paragraphs = book_paragraphs(text)
    least = source.least_paragraph_words
    if least:
        paragraphs = [p for p in paragraphs if p.count(" ") + 1 >= least]
    yield Document(name, paragraphs) if paragraphs else Dropped("empty", name)


def _read_tar(source: SourceConfig, unit: Unit, file: str, name: str) -> Iterator[Item]:
    import zstandard

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
                if unit.parts > 1 and ordinal % unit.parts != unit.part:
                    continue
                handle = archive.extractfile(member)
                data = handle.read() if handle else b""
                if len(data) != member.size:
                    yield Problem(file, f"member {member.name}", "the archive ends early")
                    return
                book = re.sub(r"(?:\.epub)?\.(?:txt|text)$", "", member.name)
                yield from _book(source, f"{file}:{member.name}", book, data)
    except (tarfile.TarError, EOFError, OSError, zstandard.ZstdError) as error:
        if isinstance(error, PermissionError | FileNotFoundError):
            raise
        yield Problem(file, f"after member {ordinal + 1}", f"broken archive ({error})")


# --- one sentence a row, no book boundaries

_FRONT_MATTER = re.compile(
    r"\bisbn\b|all rights reserved|copyright (?:©|\(c\)|\d{4})|©\s*\d{4}|smashwords edition|"
    r"this (?:book|novel|story) is a work of fiction|published by\b"
)
_FIRST_CHAPTER = re.compile(r"(?:chapter (?:one|1|i)|prologue)\b[\s.:]*\S{0,30}$")
_THE_END = re.compile(r"(?:the end|~? ?fin ?~?|end of book \w+)[\s.!*~]*$")


class BookBoundaries:
    """Infers where books begin in a list of lower-cased sentences. Rules, in this order:

    1. A row of front matter (ISBN, copyright, "all rights reserved", ...) begins a book, unless
       one began within the last 100 rows (front matter is several rows).
    2. After "the end" the next row begins a book.
    3. "chapter one" or "prologue" as a row begins a book, unless one began within the last 100
       rows (it follows front matter) .
    4. A blank row is a boundary (google-research/bert's own input format has them).
    5. A run of 20,000 rows without any sign is cut.
    """

    def __init__(self) -> None:
        self.since = 0
        self.counts: dict[str, int] = {}
        self._ended = False

    def begins(self, row: str) -> bool:
        """Whether a new book begins with this row. Call once for each row, in order."""
        sign = None
        text = row.strip().lower()
        if self.since:
            if not text:
                sign = "blank row"
            elif self._ended:
                sign = "the end"
            elif self.since > 100 and len(text) < 300 and _FRONT_MATTER.search(text):
                sign = "front matter"
            elif self.since > 100 and _FIRST_CHAPTER.match(text):
                sign = "first chapter"
            elif self.since >= _MOST_SENTENCES_A_BOOK:
                sign = "length"
        self._ended = len(text) < 30 and _THE_END.match(text) is not None
        if sign:
            self.counts[sign] = self.counts.get(sign, 0) + 1
            self.since = 0
        if text:
            self.since += 1
        return sign is not None


def _books_of_rows(rows: Iterator[tuple[int, str]], name: str) -> Iterator[Item]:
    boundaries = BookBoundaries()
    first, paragraphs = 0, []
    for number, row in rows:
        if boundaries.begins(row) and paragraphs:
            yield Document(f"{name}:{first}", paragraphs)
            paragraphs = []
        row = squeeze(clean_text(row))
        if row:
            if not paragraphs:
                first = number
            paragraphs.append(row)
    if paragraphs:
        yield Document(f"{name}:{first}", paragraphs)


def _read_rows(source: SourceConfig, unit: Unit, file: str, name: str) -> Iterator[Item]:
    problems: list[Problem] = []

    def rows() -> Iterator[tuple[int, str]]:
        for number, (offset, line) in enumerate(_numbered_lines(file, unit)):
            if unit.end and offset >= unit.end:
                return
            if not unit.end and unit.parts > 1 and (number // 65536) % unit.parts != unit.part:
                continue
            text, problem = _decode(line, file, f"byte {offset}")
            if problem:
                problems.append(problem)
            yield offset, text

    for item in _books_of_rows(rows(), name):
        yield from problems
        problems.clear()
        yield item
    yield from problems


# --- jsonl and parquet


def _read_jsonl(source: SourceConfig, unit: Unit, file: str, name: str) -> Iterator[Item]:
    good = False
    for ordinal, (offset, line) in enumerate(_numbered_lines(file, unit)):
        if unit.end and offset >= unit.end:
            return
        if not line.strip() or not (unit.end or _mine(unit, ordinal)):
            continue
        try:
            row = json.loads(line)
            text = row[source.text_column]
        except (ValueError, TypeError, RecursionError) as error:
            yield Problem(file, f"byte {offset}", f"not a JSON object on one line ({error})")
            continue
        except KeyError:
            if good:
                yield Problem(file, f"byte {offset}", f"no field {source.text_column!r}")
                continue
            raise UserError(
                f"{file}: byte {offset}: no field {source.text_column!r}; there are: "
                + ", ".join(sorted(row))[:200]
                + f" (set text_column of source {source.name})"
            ) from None
        good = True
        identity = row.get(source.id_column)
        yield _plain(source, f"{name}:{offset}" if identity is None else str(identity), text)


def _plain(source: SourceConfig, number: str, text: Any) -> Item:
    paragraphs = _paragraphs(source, clean_text(text)) if isinstance(text, str) else []
    return Document(number, paragraphs) if paragraphs else Dropped("empty", number)


def _read_parquet(source: SourceConfig, unit: Unit, file: str, name: str) -> Iterator[Item]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(file)
    except (pyarrow.ArrowException, OSError) as error:
        yield Problem(file, "file", f"corrupt parquet ({_first_line(error)})")
        return
    with table:
        columns = table.schema_arrow.names
        if source.text_column not in columns:
            raise UserError(
                f"{file}: no column {source.text_column!r}; there are: {', '.join(columns)} "
                f"(set text_column of source {source.name})"
            )
        wanted = [c for c in (source.id_column, source.text_column) if c in columns]
        first = unit.part * table.num_row_groups // unit.parts
        last = (unit.part + 1) * table.num_row_groups // unit.parts
        problems: list[Problem] = []

        def rows() -> Iterator[tuple[int, Any, Any]]:
            number = sum(table.metadata.row_group(g).num_rows for g in range(first))
            for group in range(first, last):
                after = number + table.metadata.row_group(group).num_rows
                try:
                    for batch in table.iter_batches(1000, row_groups=[group], columns=wanted):
                        data = batch.to_pydict()
                        texts = data[source.text_column]
                        ids = data.get(source.id_column, [None] * len(texts))
                        for text, identity in zip(texts, ids, strict=True):
                            yield number, text, identity
                            number += 1
                except (pyarrow.ArrowException, OSError, ValueError) as error:
                    problem = f"corrupt parquet ({_first_line(error)})"
                    problems.append(Problem(file, f"row group {group}", problem))
                number = after

        if source.kind == "sentences":
            plain_rows = ((number, text or "") for number, text, _ in rows())
            items: Iterator[Item] = _books_of_rows(plain_rows, name)
        else:
            items = (
                _plain(source, str(f"{name}:{number}" if identity is None else identity), text)
                for number, text, identity in rows()
            )
        for item in items:
            yield from problems
            problems.clear()
            yield item
        yield from problems


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__


_READERS: dict[str, Callable[[SourceConfig, Unit, str, str], Iterator[Item]]] = {
    "wikipedia": _read_dump,
    "wikiextractor": _read_wikiextractor,
    "books": _read_book,
    "crawl": _read_book,
    "text": _read_book,
    "sentences": _read_rows,
    "jsonl": _read_jsonl,
    "parquet": _read_parquet,
}
