"""Tables by column: csv, tsv, jsonl and parquet, told apart by suffix and first bytes. Of a file no
more than a run of rows is in memory."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from core.errors import UserError, short
from core.files import disk_errors, open_regular, replacing
from data_pipeline.corpus.parquet import Parquet, raise_if_no_damage
from finetune.examples import Label, Problems

if TYPE_CHECKING:
    import pyarrow

JSON_LINES = (".jsonl", ".ndjson", ".json")
_MARK = b"\xef\xbb\xbf"  # of UTF-8
_OTHER = {
    b"\xff\xfe": "UTF-16 text; save it as UTF-8",
    b"\xfe\xff": "UTF-16 text; save it as UTF-8",
    b"\x1f\x8b": "packed by gzip; unpack it",
    b"BZh": "packed by bzip2; unpack it",
    b"PK\x03\x04": "a zip or Excel file; save the table as csv",
}
_PIECE = 1 << 20
UNPACKED = 1 << 30  # bytes of a column in a row group of parquet, where that is much
csv.field_size_limit(1 << 30)  # a field may be a book
_PARTING = re.compile(r"[\t\r\n]")  # stand in a field of a tsv in quotation marks alone
# No text has a NUL; of halves of surrogate pairs json takes what UTF-8 does not.
NO_TEXT = re.compile(r"[\0\ud800-\udfff]")
# What a record holds by column, or what is wrong with it.
Record = dict[str, Any] | str


@dataclass(frozen=True)
class Table:
    """columns: of jsonl those of its first object. read: (place, record) in order, once, of at
    least the columns that are named; places are of `unit`, counted from 1."""

    path: Path
    columns: Sequence[str]
    read: Callable[[Sequence[str]], Iterator[tuple[int, Record]]]
    unit: str = "line"

    def records(
        self, wanted: Iterable[str], others: Iterable[str] = (), remedy: str = ""
    ) -> Iterator[tuple[int, Record]]:
        """What is `read`, of `others` what is there. UserError unless each of the columns wanted
        is there, and none twice."""
        wanted = list(wanted)
        missing = [column for column in wanted if column not in self.columns]
        if missing:
            there = short(", ".join(self.columns), 200)
            raise UserError(
                f"{self.path}:1: no column {', '.join(missing)}; it has {there}{remedy}"
            )
        wanted += [column for column in others if column in self.columns]
        twice = [column for column in wanted if list(self.columns).count(column) > 1]
        if twice:
            raise UserError(
                f"{self.path}:1: column {twice[0]!r} is there twice; rename one of them"
            )
        return self.read(wanted)


def open_table(
    path: Path, *, quotes: bool | None = None, header: Sequence[str] = (), quotes_key: str = ""
) -> Table:
    """`quotes`: fields of csv and tsv may stand in quotation marks; off: the marks are text; None:
    they may, but of a tsv UserError for one that holds a line end or a tab, as marks that are text
    would seem to. `quotes_key`: how a user sets it, up to its value; empty: cannot.
    `header`: the columns of a csv or tsv without a line of them."""
    kind = format_of(path)
    if kind == "parquet":
        return _parquet(path)
    if kind == "jsonl":
        return _json_lines(path)
    lines = _delimited(path, kind, quotes, quotes_key)
    place, columns = (0, list(header)) if header else next(lines, (1, [""]))
    return Table(path, columns, lambda _: _by_column(lines, columns))


def format_of(path: Path) -> str:
    """parquet, jsonl, or the delimiter of a table of text. UserError for a file that is empty, or
    whose first bytes are another kind's."""
    with disk_errors(path), open_regular(path) as file:
        head = file.read(1 << 16)
    for start, what in _OTHER.items():
        if head.startswith(start):
            raise UserError(f"{path}: is {what}")
    suffix, text = path.suffix.lower(), head.removeprefix(_MARK).strip()
    if not text:
        raise UserError(f"{path}: is empty; a table of examples is expected")
    if head.startswith(b"PAR1"):
        return "parquet"
    if suffix == ".parquet":
        raise UserError(f"{path}: is no parquet file; name it by what it is: .csv, .tsv or .jsonl")
    if suffix in JSON_LINES and text.startswith(b"["):
        raise UserError(f"{path}: is a JSON array; write one object a line (jsonl)")
    if suffix in JSON_LINES or (text.startswith(b"{") and suffix not in (".csv", ".tsv")):
        return "jsonl"
    first = text.split(b"\n")[0].decode("utf-8", "replace")
    return "\t" if suffix == ".tsv" else max(",;\t", key=first.count)


def holds_lists(path: Path) -> bool:
    """Whether it is jsonl or parquet, whose fields may be lists, by suffix or first bytes."""
    with disk_errors(path), open_regular(path) as file:
        head = file.read(64).removeprefix(_MARK).lstrip()
    named = path.suffix.lower() in (*JSON_LINES, ".parquet")
    return named or head.startswith((b'{"', b"PAR1"))


@contextmanager
def text_of(path: Path) -> Iterator[TextIO]:
    """The file as UTF-8 without a byte-order mark, whose lines end at \\n alone. UserError for
    another, and for one with zeros in it: a hole takes the lines around it along."""
    with disk_errors(path), open_regular(path) as raw:
        for n, piece in enumerate(iter(lambda: raw.read(_PIECE), b"")):
            if (zero := piece.find(b"\0")) >= 0:
                raise UserError(
                    f"{path}: byte {n * _PIECE + zero}: a NUL, as of a damaged disk or of UTF-16; "
                    "text in UTF-8 is expected"
                )
        raw.seek(0)
        try:
            yield TextIOWrapper(raw, encoding="utf-8-sig", newline="\n")
        except UnicodeDecodeError:
            raise UserError(f"{path}: is not UTF-8; save it as UTF-8") from None


def _delimited(
    path: Path, delimiter: str, quotes: bool | None, quotes_key: str
) -> Iterator[tuple[int, list[str]]]:
    """(line where it begins, fields) of each record; blank lines at the end are none."""
    with text_of(path) as file:
        if quotes is not False:
            records = _quoted(path, file, delimiter, quotes, quotes_key)
        else:
            whole = (line.removesuffix("\n").removesuffix("\r") for line in file)
            records = (
                (n, line.split(delimiter) if line else []) for n, line in enumerate(whole, 1)
            )
        blank: list[int] = []
        for place, fields in records:
            if not fields:
                blank.append(place)
                continue
            yield from ((line, []) for line in blank)
            blank.clear()
            yield place, fields


def _quoted(
    path: Path, file: TextIO, delimiter: str, quotes: bool | None, quotes_key: str
) -> Iterator[tuple[int, list[str]]]:
    reader, place = csv.reader(file, delimiter=delimiter, strict=True), 1
    doubtful = quotes is None and delimiter == "\t" and path.suffix.lower() != ".csv"
    off = f"{quotes_key}false" if quotes_key else "write it as jsonl"
    off += " where the marks are text"
    try:
        for fields in reader:
            if doubtful and any(_PARTING.search(field) for field in fields):
                on = f", {quotes_key}true where they are not" if quotes_key else ""
                raise UserError(
                    f"{path}:{place}: a field in quotation marks holds a line end or a tab; "
                    f"{off}{on}"
                )
            yield place, fields
            place = reader.line_num + 1
    except csv.Error as error:
        of_quotes = "expected after" in str(error) or "unexpected end" in str(error)
        remedy = f"; a quotation mark inside a quoted field is written twice; {off}"
        raise UserError(f"{path}:{place}: {error}{remedy if of_quotes else ''}") from None


def _by_column(
    lines: Iterator[tuple[int, list[str]]], columns: Sequence[str]
) -> Iterator[tuple[int, Record]]:
    for place, fields in lines:
        if not fields or (len(columns) > 1 and not any(field.strip() for field in fields)):
            yield place, "empty row"
        elif len(fields) != len(columns):
            yield place, f"not {len(columns)} columns"
        else:
            yield place, dict(zip(columns, fields, strict=True))


def _json_lines(path: Path) -> Table:
    def records() -> Iterator[tuple[int, Record]]:
        with text_of(path) as file:
            for place, line in enumerate(file, 1):
                if line.strip():
                    yield place, _object(line)

    first = next((r for _, r in records() if isinstance(r, dict)), None)
    if first is None:
        place, wrong = next(records())
        raise UserError(f"{path}:{place}: no line is a JSON object that can be read; here: {wrong}")
    return Table(path, list(first), lambda _: records())


class Twice(ValueError):
    """A field stands in an object of JSON twice."""


def each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For json: an object. Twice where a field stands there again, of which json would keep the
    last alone."""
    row: dict[str, Any] = {}
    for name, value in pairs:
        if name in row:
            of = next((short(repr(short(v))) for v in row.values() if isinstance(v, str)), "")
            raise Twice(f"field {short(name)!r} stands twice in an object{of and f', of {of}'}")
        row[name] = value
    return row


def _object(line: str) -> Record:
    try:
        row = json.loads(line, object_pairs_hook=each_once)
    except Twice:
        return "a field twice in an object"
    except (ValueError, RecursionError):
        return "not JSON"
    return row if isinstance(row, dict) else "not a JSON object"


def _parquet(path: Path) -> Table:
    import pyarrow

    @contextmanager
    def errors() -> Iterator[None]:
        try:
            yield
        except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
            raise_if_no_damage(error, str(path))
            why = (str(error).splitlines() or [type(error).__name__])[0]
            raise UserError(f"{path}: damaged parquet: {short(why, 200)}") from None

    def records(wanted: Sequence[str]) -> Iterator[tuple[int, Record]]:
        place = told = 0
        with errors(), file:
            if lost := file.rows_lost():
                raise ValueError(lost)
            texts = file.texts(wanted)
            for group in range(file.table.num_row_groups):
                if not (rows := _rows_told(file, group, texts)):
                    continue  # its pages, if there are any, hold nothing
                told += rows
                most = file.rows_at_once(group, wanted, 1000, UNPACKED)
                if not most:
                    raise ValueError(f"row group {group} unpacks to over a hundred times its size")
                for batch in file.table.iter_batches(most, row_groups=[group], columns=wanted):
                    columns = [_values(batch.column(name)) for name in wanted]
                    for values in zip(*columns, strict=True):
                        place += 1
                        yield place, dict(zip(wanted, values, strict=True))
                if place != told:
                    raise ValueError(f"row group {group}: not the rows that its footer tells of")

    with errors():
        file = Parquet(str(path))
        names = file.table.schema_arrow.names
    return Table(path, names, records, "row")


def _rows_told(file: Parquet, group: int, texts: Sequence[int]) -> int:
    """Of a row group, by the footer. ValueError where it tells of other numbers of texts."""
    file.check(group, texts)
    schema, chunk = file.table.schema, file.table.metadata.row_group(group)
    for leaf in texts:
        values = chunk.column(leaf).num_values
        if values != chunk.num_rows and not (
            values > chunk.num_rows and schema.column(leaf).max_repetition_level
        ):
            raise ValueError(f"row group {group}: {values} values for {chunk.num_rows} rows")
    return chunk.num_rows


def _values(column: pyarrow.Array) -> list[Any]:
    """Of a column; of times that Python cannot hold, bytes, which are no text."""
    import pyarrow

    def of_times(kind: pyarrow.DataType) -> bool:
        inner = (kind.field(n).type for n in range(kind.num_fields))
        return pyarrow.types.is_temporal(kind) or any(map(of_times, inner))

    try:
        return column.to_pylist()
    except (pyarrow.ArrowException, OverflowError, ValueError):
        if not of_times(column.type):
            raise
        return [b""] * len(column)


class Row(NamedTuple):
    """A record of a table: its place and id, its texts, its label (None on a test set)."""

    place: int
    index: str
    texts: tuple[str, ...]
    label: Label | str | tuple[str, ...]


def read_rows(
    problems: Problems,
    table: Table,
    *,
    texts: Sequence[str],
    label: str | None = None,
    value: Callable[[Any], Any] = str,
    index: str | None = None,
    optional: Sequence[str] = (),
    remedy: str = "",
) -> list[Row]:
    """The good rows of a table; bad ones are counted in `problems`.

    texts, label, index: names of columns. value: of a label; the text of its ValueError is what is
    wrong. optional: texts that may be empty. A table without `index` numbers its
    records from 0, bad ones too.
    remedy: what is added where a column is missing.
    """
    wanted = [*texts, *([label] if label else [])]
    records = table.records(wanted, [] if index is None else [index], remedy)
    problems.unit = table.unit
    rows: list[Row] = []
    seen: set[str] = set()
    for place, record in records:
        problems.total += 1
        if isinstance(record, str):
            problems.add(record, place)
            continue
        try:
            found = tuple(text_in(record, column, column in optional) for column in texts)
        except ValueError as error:
            problems.add(str(error), place)
            continue
        if label and label not in record:
            problems.add(f"no column {label}", place)
            continue
        try:
            given = value(record[label]) if label else None
        except ValueError as error:
            problems.add(str(error), place, record[label])
            continue
        at = problems.total - 1
        name = str(at if index is None else record.get(index, at))
        if name in seen:
            problems.add("duplicate id", place, name)
        else:
            seen.add(name)
            rows.append(Row(place, name, found, given))
    return rows


def text_in(record: Mapping[str, Any], column: str, optional: bool = False) -> str:
    """The text of a column, a number as it is written. ValueError where there is none;
    `optional`: it may be empty."""
    if column not in record:
        raise ValueError(f"no column {column}")
    value = record[column]
    if isinstance(value, bool | list | dict | bytes):
        raise ValueError("text that is none")
    text = "" if value is None else str(value).strip()
    if value is None or value != value or not (text or optional):  # as pandas writes an empty one
        raise ValueError("empty text")
    if NO_TEXT.search(text):
        raise ValueError("text with NUL or a lone surrogate")
    return text


def one_of(labels: Sequence[str]) -> Callable[[Any], int]:
    """For `value` of `read_rows`: the number of a label."""
    places = {label: place for place, label in enumerate(labels)}

    def place_of(value: Any) -> int:
        if (place := places.get(str(value))) is None:  # a number where rows are of JSON or parquet
            raise ValueError("unknown label")
        return place

    return place_of


def number(low: float = -math.inf, high: float = math.inf) -> Callable[[Any], float]:
    """For `value` of `read_rows`: a finite number from `low` to `high`."""

    def number_of(value: Any) -> float:
        with suppress(TypeError, ValueError, OverflowError):
            found = float(value)
            if math.isfinite(found) and low <= found <= high and not isinstance(value, bool):
                return found
        bounds = "" if low == -math.inf else f" from {low:g} to {high:g}"
        raise ValueError(f"not a number{bounds}")

    return number_of


def write_table(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """csv, tsv or jsonl by the suffix of `path`, row by row, whole or not at all.

    The columns of csv and tsv are those of the first row; of a mapping each value has a column of
    its own, and a list is one field, joined by `|`.
    """
    suffix = path.suffix.lower()
    if suffix not in (".csv", ".tsv", ".jsonl", ".ndjson"):
        raise UserError(f"{path}: .csv, .tsv or .jsonl can be written")
    with disk_errors(path), replacing(path, durable=False) as part:
        with part.open("w", encoding="utf-8", newline="") as file:
            if suffix in JSON_LINES:
                file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
                return
            writer = None
            for row in map(flat, rows):
                if writer is None:
                    delimiter = "," if suffix == ".csv" else "\t"
                    writer = csv.DictWriter(_Lines(file), list(row), delimiter=delimiter)
                    writer.writeheader()
                writer.writerow(row)


class _Lines:
    """Takes a csv writer's rows, which end in CR LF: only so are fields with a CR in quotes. In the
    file they end in LF."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, row: str) -> None:
        self._file.write(row.removesuffix("\r\n") + "\n")


def flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a row of csv or tsv, by column, as `write_table` writes them."""
    fields: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            fields |= {f"{name}.{key}": inner for key, inner in flat(value).items()}
        else:
            fields[name] = "|".join(map(str, value)) if isinstance(value, list) else value
    # Nine digits tell all numbers of fp32 apart: a measure of the file is that of the job.
    return {n: float(f"{v:.9g}") if isinstance(v, float) else v for n, v in fields.items()}
