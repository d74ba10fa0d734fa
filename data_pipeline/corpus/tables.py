"""Documents from rows: JSON lines, columns of csv and tsv, columns of parquet."""

from __future__ import annotations

import csv
import io
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain
from typing import TYPE_CHECKING, BinaryIO

from core.errors import UserError, short
from core.files import open_regular
from data_pipeline.corpus.compressed import Broken
from data_pipeline.corpus.documents import Document, Dropped, clean_text, squeeze
from data_pipeline.corpus.parts import Input, Row, line_records, lines_of, stands_twice

if TYPE_CHECKING:
    import pyarrow.parquet

# Bytes that the rows of a batch may unpack to: a text that a page holds once may stand in many.
UNPACKED = 1 << 30
_ROWS = 100
# Python's words for what is wrong with a row, by their beginnings.
_WHY = {
    "unexpected end": "a quotation mark is not closed",
    "new-line chara": "a carriage return within the line",
}
csv.field_size_limit(1 << 30)  # the library's own bound is small; max_document_bytes is ours


def json_rows(source: Input) -> Iterator[Row]:
    """One JSON object a line; blank lines are passed over."""
    good = False
    for at, line, _ in line_records(source):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            text = row[source.text_column]
            if stands_twice(line, source.text_column):
                source.report(f"byte {at}", f"field {source.text_column!r} stands there twice")
                continue
            source.tell_left_out(text, f"byte {at}")
            yield Row(int(at), row.get(source.id_column), text)
            good = True
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            what = "a JSON array" if line.lstrip().startswith(b"[") else str(error)
            source.report(f"byte {at}", f"not a JSON object on one line ({what})")
        except KeyError:
            if not good:
                raise UserError(
                    f"{source.file}: byte {at}: no field {source.text_column!r}; there are: "
                    f"{', '.join(sorted(row))[:200]} (set text_column of the source)"
                ) from None
            source.report(f"byte {at}", f"no field {source.text_column!r}")


def csv_rows(source: Input) -> Iterator[Row]:
    """The rows of a table with a header and commas, semicolons or tabs; fields may stand in
    quotation marks, and then hold line ends."""
    return _delimited(source, quotes=True)


def tsv_rows(source: Input) -> Iterator[Row]:
    """The rows of a table with a header and tabs, one a line; quotation marks are text."""
    return _delimited(source, quotes=False)


_Numbered = Iterator[tuple[int, bytes | Broken]]
_MOST_BLANK = 10_000  # lines, up to the end of the header, in which its delimiter is looked for


class _Lines:
    """A file's lines for Python's csv, which may take several for a row; bytes that are no UTF-8
    go through as surrogates. `begin`: where the row begins; `next_row` before each."""

    def __init__(self, lines: _Numbered, limit: int) -> None:
        self._lines, self._limit = lines, limit
        self.next_row()

    def next_row(self) -> None:
        self.begin, self._size = -1, 0

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        at, line = next(self._lines)
        self.begin = at if self.begin < 0 else self.begin
        if isinstance(line, Broken):
            raise csv.Error(line.what)
        self._size += len(line) + 1
        if self._size > self._limit:
            raise csv.Error(f"over max_document_bytes ({self._limit:,}); is a quote left open?")
        return line.decode("utf-8", "surrogateescape") + "\n"


def _rows(lines: _Lines, delimiter: str, quotes: bool) -> Iterator[tuple[int, list[str], str]]:
    """(byte, fields, what is wrong with them) of each row but those without a field."""
    quoting = csv.QUOTE_MINIMAL if quotes else csv.QUOTE_NONE
    rows = csv.reader(lines, delimiter=delimiter, quoting=quoting, strict=True)
    while True:
        fields, wrong = [], ""
        try:
            fields = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            wrong = f"not a row ({_WHY.get(str(error)[:14], error)})"
        at = max(0, lines.begin)
        lines.next_row()
        if fields or wrong:
            yield at, fields, wrong


def _name(field: str) -> str:
    """A column's; behind a byte order mark another may stand."""
    return field.strip().strip("\ufeff").strip()


def _delimited(source: Input, quotes: bool) -> Iterator[Row]:
    """Each part reads the whole file: whether a line begins a row is told by all before it."""
    numbered, limit = lines_of(source), source.max_document_bytes
    seen: list[tuple[int, bytes | Broken]] = []

    def from_the_first() -> _Numbered:
        yield from seen
        while len(seen) < _MOST_BLANK and (not seen or seen[-1][0] < limit):
            if (line := next(numbered, None)) is None:
                return
            seen.append(line)
            yield line

    # What parts the columns is told by the whole header: a name may hold line ends and commas.
    delimiters = ",;\t" if quotes else "\t"
    headers = {d: _header(_rows(_Lines(from_the_first(), limit), d, quotes)) for d in delimiters}
    first = next((line for _, line in seen if not isinstance(line, Broken) and line.strip()), b"")
    fitting = [d for d in delimiters if source.text_column in headers[d][0]]
    delimiter = max(
        fitting or delimiters,
        key=lambda d: len(headers[d][0]) if fitting else first.count(d.encode()),
    )
    rows = _rows(_Lines(chain(seen, numbered), limit), delimiter, quotes)
    columns, wrong = _header(rows)
    if source.part.index == 0 and not wrong:
        # What is no text is told as such, and not as columns.
        data = delimiter.join(columns).encode("utf-8", "surrogateescape")
        wrong = "" if source.decode(data, "byte 0") else "not text"
    if wrong:
        if source.part.index == 0:
            source.report("byte 0", f"no header ({wrong})")
        return
    text = _column(source, columns)
    named = columns.index(source.id_column) if source.id_column in columns else None
    for ordinal, (at, fields, wrong) in enumerate(rows):
        if not source.part.holds(ordinal):
            continue
        if not wrong and len(fields) != len(columns):
            wrong = f"{len(fields)} columns, the header has {len(columns)}"
        if wrong:
            source.report(f"byte {at}", wrong)
        else:
            data = fields[text].encode("utf-8", "surrogateescape")
            identity = None if named is None else fields[named]
            yield Row(at, identity, source.decode(data, f"byte {at}"))


def _header(rows: Iterator[tuple[int, list[str], str]]) -> tuple[list[str], str]:
    """The names of the columns: the first row that is not blank. Else what is wrong with it."""
    for _, fields, wrong in rows:
        if wrong:
            return [], wrong
        if any(names := list(map(_name, fields))):
            return names, ""
    return [], "no line of text"


def _column(source: Input, columns: Sequence[str]) -> int:
    """The place of the column of text. UserError unless it is there once, as the ids' may be."""
    for column in (source.text_column, source.id_column):
        if list(columns).count(column) > 1:
            raise UserError(f"{source.file}: column {column!r} stands there twice")
    if source.text_column not in columns:
        other = max(",;", key=columns[0].count) if len(columns) == 1 else ""
        if other and source.text_column in next(csv.reader(columns, delimiter=other)):
            raise UserError(f"{source.file}: its columns stand between {other!r}: set kind: csv")
        raise UserError(
            f"{source.file}: no column {source.text_column!r}; there are: "
            f"{short(', '.join(columns), 200)} (set text_column of the source)"
        )
    return list(columns).index(source.text_column)


def read_row(source: Input, row: Row) -> Document | Dropped | None:
    """A row whose text is a document, one paragraph a line."""
    given = "" if row.id is None else str(row.id)
    name = given if given.strip() else f"{source.name}:{row.at}"
    if not isinstance(row.text, str | None):
        kind = type(row.text).__name__
        source.report(f"byte {row.at}", f"{source.text_column!r} is a {kind}, not text")
        return None
    paragraphs: list[str] = []
    if isinstance(row.text, str):
        least = source.min_paragraph_words
        found = (squeeze(line) for line in clean_text(row.text).split("\n"))
        paragraphs = [
            line for line in found if line and (not least or line.count(" ") + 1 >= least)
        ]
    return Document(name, paragraphs) if paragraphs else Dropped("empty", name)


def row_groups(file: str, few: int) -> int:
    """How many parts a parquet file can have: each reads the whole footer, so that more than a
    `few` may read no more of footers than the file has bytes."""
    import pyarrow
    import pyarrow.parquet

    try:
        open_regular(file).close()  # the library would wait for a pipe
        footer = pyarrow.parquet.read_metadata(file)
        shared = max(few, os.path.getsize(file) // footer.serialized_size)
        return max(1, min(shared, footer.num_row_groups))
    except (pyarrow.ArrowException, OSError) as error:
        _raise_if_memory_is_out(error, file)
        return 1


def _raise_if_memory_is_out(error: Exception, file: str) -> None:
    """MemoryError where the library met the end of this machine's memory, and not a damaged number
    of bytes."""
    asked = re.search(r"size (\d+)", str(error))
    damaged = asked is not None and int(asked[1]) > 4 * UNPACKED
    if "bad_alloc" in str(error) or (isinstance(error, MemoryError) and not damaged):
        raise MemoryError(f"of {file}: {error}") from None


def parquet_rows(source: Input) -> Iterator[Row]:
    """The rows of a parquet file's row groups."""
    import pyarrow
    import pyarrow.parquet

    def corrupt(place: str, error: Exception) -> None:
        _raise_if_memory_is_out(error, source.file)
        if "worker thread" in str(error):
            raise UserError(f"{source.file}: {place}: no thread to read it (ulimit -u, or -v)")
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        source.report(place, f"corrupt parquet ({first_line[:200]})")

    try:
        open_regular(source.file).close()
        table = pyarrow.parquet.ParquetFile(source.file, page_checksum_verification=True)
        bare = _FooterAlone(source.file)
        footer = pyarrow.parquet.ParquetFile(bare)
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        corrupt("file", error)
        return
    with table, bare, footer:
        bare.pages = False
        columns = table.schema_arrow.names
        held = table.schema_arrow.field(_column(source, columns)).type
        held = held.value_type if pyarrow.types.is_dictionary(held) else held
        if held == pyarrow.null():  # as some libraries write a part of a table that has no text
            if rows := table.metadata.num_rows * (source.part.index == 0):
                source.report(f"column {source.text_column!r}", f"{rows:,} rows, none with text")
            return
        if held not in (pyarrow.string(), pyarrow.large_string(), pyarrow.string_view()):
            raise UserError(
                f"{source.file}: column {source.text_column!r} holds {held}, not text (set "
                "text_column of the source)"
            )
        named = source.id_column in columns
        wanted = [source.id_column, source.text_column] if named else [source.text_column]
        part, count = source.part, table.num_row_groups
        sizes = [table.metadata.row_group(group).num_rows for group in range(count)]
        starts = list(accumulate(sizes, initial=0))
        # The library ends the process over some forged columns of numbers.
        texts_of = {
            column.path: leaf
            for leaf, column in enumerate(map(table.schema.column, range(len(table.schema))))
            if column.physical_type == "BYTE_ARRAY" and column.path in wanted
        }
        for group in range(
            part.index * count // part.count, (part.index + 1) * count // part.count
        ):
            number = starts[group]
            chunk, told = table.metadata.row_group(group), sizes[group]
            try:
                _check_footer(footer, bare, group, texts_of)
                if not told and not chunk.column(texts_of[source.text_column]).num_values:
                    continue  # its pages, if there are any, hold nothing
                rows = _rows_at_once(list(map(chunk.column, texts_of.values())), source)
                if not rows:
                    source.report(f"row group {group}", "unpacks to over a hundred times its size")
                    continue
                for batch in table.iter_batches(
                    rows, row_groups=[group], columns=wanted, use_threads=False
                ):
                    texts = batch.column(source.text_column)
                    if pyarrow.types.is_dictionary(texts.type):  # of all rows
                        texts = texts.dictionary.take(texts.indices)
                    texts = texts.cast(pyarrow.large_binary())
                    ids = _ids(batch.column(source.id_column)) if named else [None] * len(texts)
                    for identity, data in zip(ids, texts.to_pylist(), strict=True):
                        if data is None:
                            yield Row(number, identity, None)
                        elif len(data) > source.max_document_bytes:
                            source.too_large(f"row {number}", len(data))
                        else:
                            text = source.decode(data, f"row {number}")
                            yield Row(number, identity, text)
                        number += 1
                if (
                    chunk.column(texts_of[source.text_column]).num_values != told
                    or number < starts[group] + told
                ):
                    what = f"not the {told} rows that its footer tells of"
                    source.report(f"row group {group}", what)
            except (pyarrow.ArrowException, OSError, ValueError) as error:
                corrupt(f"row group {group}", error)


class _FooterAlone(io.FileIO):
    """A file whose `pages` may be closed to the library once it has read the footer: it finds the
    end there. (An exception would keep the library's reader in memory for ever.)"""

    pages, asked = True, False

    def read(self, size: int | None = -1) -> bytes | None:
        self.asked = True
        return super().read(size) if self.pages else b""


def _check_footer(
    footer: pyarrow.parquet.ParquetFile, bare: _FooterAlone, group: int, columns: Iterable[str]
) -> None:
    """OSError where the footer tells of a column what cannot be: asked for that column's sizes the
    library would end the process, and not where it reads the column, here up to its first page."""
    import pyarrow

    for column in columns:
        bare.asked = False
        try:
            footer.read_row_group(group, columns=[column], use_threads=False)
        except (pyarrow.ArrowException, OSError):
            if not bare.asked:
                raise


def _rows_at_once(columns: list[pyarrow.parquet.ColumnChunkMetaData], source: Input) -> int:
    """How many rows of a group may be unpacked together: no value is larger than all that the
    group holds of its column. 0 where one is made to fill the memory, since a page is unpacked at
    once."""
    unpacked, most = 0, 2 * source.max_document_bytes
    for column in columns:
        packed, size = _page_bytes(column, source.file)
        if size > max(100 * packed, most):
            return 0
        unpacked = max(unpacked, size)
    return max(1, min(_ROWS, UNPACKED // max(1, unpacked)))


def _page_bytes(column: pyarrow.parquet.ColumnChunkMetaData, file: str) -> tuple[int, int]:
    """The bytes of a column's pages, packed and unpacked, by their own headers, which the library
    obeys whatever the footer says. ValueError where one cannot be read."""
    at = column.data_page_offset
    if column.has_dictionary_page and column.dictionary_page_offset:
        at = min(at, column.dictionary_page_offset)
    packed = unpacked = 0
    with open_regular(file) as handle:
        end = min(at + column.total_compressed_size, handle.seek(0, os.SEEK_END))
        while at < end:
            handle.seek(at)
            numbers = dict(_thrift_numbers(handle))
            size, length = numbers.get(2, -1), numbers.get(3, -1)
            if min(size, length) < 0:
                raise ValueError("a page without its size")
            at = handle.tell() + length
            if at > end:
                raise ValueError("a page goes beyond its column")
            packed, unpacked = packed + length, unpacked + size
    return packed, unpacked


def _thrift_numbers(handle: BinaryIO) -> Iterator[tuple[int, int]]:
    """(field, value) of the numbers of 32 bits of a struct in Thrift's compact protocol; reads to
    its end. ValueError where it is none, or where the library might find other fields: in order,
    within their bits, none is there twice."""

    def byte() -> int:
        if not (data := handle.read(1)):
            raise ValueError("a page's header ends early")
        return data[0]

    def number() -> int:
        value = shift = 0
        while shift < 70:
            more = byte()
            value |= (more & 127) << shift
            shift += 7
            if more < 128:
                return value
        raise ValueError("bad number in a page's header")

    def signed() -> int:
        value = number()
        return (value >> 1) ^ -(value & 1)

    fields = [0]  # the last one of each struct that is open
    while fields:
        mark = byte()
        kind = mark & 15
        if not mark:
            fields.pop()
            continue
        field = fields[-1] + (mark >> 4) if mark >> 4 else signed()
        if not fields[-1] < field < 1 << 15 or len(fields) > 16:
            raise ValueError("a page's header cannot be read")
        fields[-1] = field
        if kind in (4, 5, 6):
            value = signed()
            if len(fields) == 1 and kind == 5:
                yield field, value
        elif kind == 8 and (length := number()) < 1 << 31:
            handle.seek(length, os.SEEK_CUR)
        elif kind == 12:
            fields.append(0)
        elif kind not in (1, 2):
            raise ValueError("a page's header cannot be read")


def _ids(column: pyarrow.Array) -> list[object]:
    try:
        return column.to_pylist()
    except (ValueError, OverflowError):  # times that Python cannot hold: as numbers
        pass
    try:
        return column.view(f"int{column.type.bit_width}").to_pylist()
    except ValueError:  # in lists and the like
        return [None] * len(column)
