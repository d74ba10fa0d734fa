"""Documents from rows: JSON lines, columns of csv and tsv, columns of parquet."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain
from typing import TYPE_CHECKING

from core.errors import UserError, short
from core.files import open_regular
from data_pipeline.corpus.compressed import Broken
from data_pipeline.corpus.documents import Document, Dropped, clean_text, squeeze
from data_pipeline.corpus.parquet import Parquet, raise_if_no_damage
from data_pipeline.corpus.parts import Input, Row, line_records, lines_of, stands_twice

if TYPE_CHECKING:
    import pyarrow

_ROWS = 100  # of parquet that are unpacked together
# Python's words for what is wrong with a row, by their beginnings.
_WHY = {
    "unexpected end": "a quotation mark is not closed",
    "new-line chara": "a carriage return within the line: save it with line ends of LF",
}
csv.field_size_limit(1 << 30)  # the library's own bound is small; max_document_bytes is ours


def json_rows(source: Input) -> Iterator[Row]:
    """One JSON object a line; blank lines are passed over."""
    good = source.part.index > 0  # a column that is missing is told by the file's beginning
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
        alone = columns[0] if len(columns) == 1 else ""
        other = max(",;", key=alone.count)
        if other in alone and source.text_column in (n.strip(' "') for n in alone.split(other)):
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
    except (pyarrow.ArrowException, OSError, ValueError) as error:  # told where it is read
        raise_if_no_damage(error, file)
        return 1


def parquet_rows(source: Input) -> Iterator[Row]:
    """The rows of a parquet file's row groups."""
    import pyarrow

    def corrupt(place: str, error: Exception) -> None:
        if "worker thread" in str(error):
            raise UserError(f"{source.file}: {place}: no thread to read it (ulimit -u, or -v)")
        raise_if_no_damage(error, source.file)
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        source.report(place, f"corrupt parquet ({first_line[:200]})")

    try:
        file = Parquet(source.file)
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        corrupt("file", error)
        return
    with file:
        table = file.table
        columns = table.schema_arrow.names
        if source.part.index == 0 and (lost := file.rows_lost()):
            source.report("file", f"corrupt parquet ({lost})")
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
        sizes = list(map(file.rows_of, range(count)))
        starts = list(accumulate(sizes, initial=0))
        sized = file.texts(wanted)
        leaf = next(n for n in sized if table.schema.column(n).path == source.text_column)
        for group in range(
            part.index * count // part.count, (part.index + 1) * count // part.count
        ):
            number = starts[group]
            chunk, told = table.metadata.row_group(group), sizes[group]
            try:
                file.check(group, sized)
                if not told and not chunk.column(leaf).num_values:
                    continue  # its pages, if there are any, hold nothing
                most = 2 * source.max_document_bytes
                rows = file.rows_at_once(group, wanted, _ROWS, most)
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
                if chunk.column(leaf).num_values != told or number < starts[group] + told:
                    what = f"not the {told} rows that its footer tells of"
                    source.report(f"row group {group}", what)
            except (pyarrow.ArrowException, OSError, ValueError) as error:
                corrupt(f"row group {group}", error)


def _ids(column: pyarrow.Array) -> list[object]:
    try:
        return column.to_pylist()
    except (ValueError, OverflowError):  # times that Python cannot hold: as numbers
        pass
    try:
        return column.view(f"int{column.type.bit_width}").to_pylist()
    except ValueError:  # in lists and the like
        return [None] * len(column)
