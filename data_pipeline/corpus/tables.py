"""Documents from rows: JSON lines, and columns of parquet."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

from core.errors import UserError
from core.files import open_regular
from data_pipeline.corpus.documents import Document, Dropped, clean_text, squeeze
from data_pipeline.corpus.parts import Input, Row, line_records

if TYPE_CHECKING:
    import pyarrow.parquet

# Bytes that the rows of a batch may unpack to. A dictionary holds a text once that stands in many
# rows; reading dictionaries as such takes 100 times as long on ordinary files.
UNPACKED = 1 << 30
_ROWS = 100


def json_rows(source: Input) -> Iterator[Row]:
    """One JSON object a line; blank lines are passed over."""
    good = False
    for at, line in line_records(source):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            text = row[source.text_column]
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


def read_row(source: Input, row: Row) -> Document | Dropped | None:
    """A row whose text is a document, one paragraph a line."""
    name = f"{source.name}:{row.at}" if row.id is None else str(row.id)
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


def row_groups(file: str) -> int:
    """How many parts a parquet file can have."""
    import pyarrow
    import pyarrow.parquet

    try:
        open_regular(file).close()  # the library would wait for a pipe
        return max(1, pyarrow.parquet.ParquetFile(file).num_row_groups)
    except (pyarrow.ArrowException, OSError):
        return 1


def parquet_rows(source: Input) -> Iterator[Row]:
    """The rows of a parquet file's row groups."""
    import pyarrow
    import pyarrow.parquet

    def corrupt(place: str, error: Exception) -> None:
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        source.report(place, f"corrupt parquet ({first_line[:200]})")

    try:
        open_regular(source.file).close()
        table = pyarrow.parquet.ParquetFile(source.file, page_checksum_verification=True)
    except (pyarrow.ArrowException, OSError) as error:
        corrupt("file", error)
        return
    with table:
        columns = table.schema_arrow.names
        for column in {source.text_column, source.id_column}:
            if columns.count(column) > 1:
                raise UserError(f"{source.file}: column {column!r} stands there twice")
        if source.text_column not in columns:
            raise UserError(
                f"{source.file}: no column {source.text_column!r}; there are: "
                f"{', '.join(columns)[:200]} (set text_column of the source)"
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
            rows = _rows_at_once(table.metadata.row_group(group), source)
            if not rows:
                source.report(f"row group {group}", "unpacks to over a hundred times its size")
                continue
            try:
                for batch in table.iter_batches(rows, row_groups=[group], columns=wanted):
                    texts = batch.column(source.text_column).to_pylist()
                    ids = _ids(batch.column(source.id_column)) if named else [None] * len(texts)
                    for identity, text in zip(ids, texts, strict=True):
                        if text is not None and len(text) > source.max_document_bytes:
                            source.too_large(f"row {number}", len(text))
                        else:
                            yield Row(number, identity, text)
                        number += 1
            except (pyarrow.ArrowException, OSError, ValueError) as error:
                corrupt(f"row group {group}", error)


def _rows_at_once(group: pyarrow.parquet.RowGroupMetaData, source: Input) -> int:
    """How many rows of a group may be unpacked together: none of their texts is larger than all
    that the group holds of the column. 0 of one that is made to fill the memory, since a page is
    unpacked at once."""
    columns = map(group.column, range(group.num_columns))
    text = next(column for column in columns if column.path_in_schema == source.text_column)
    unpacked = text.total_uncompressed_size
    if unpacked > max(100 * text.total_compressed_size, 2 * source.max_document_bytes):
        return 0
    if not text.has_dictionary_page:
        return _ROWS
    return max(1, min(_ROWS, UNPACKED // max(1, unpacked)))


def _ids(column: pyarrow.Array) -> list[object]:
    try:
        return column.to_pylist()
    except (ValueError, OverflowError):  # times that Python cannot hold: as numbers
        pass
    try:
        return column.view(f"int{column.type.bit_width}").to_pylist()
    except ValueError:  # in lists and the like
        return [None] * len(column)
