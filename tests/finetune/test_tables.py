"""Tables are read by column, whatever their kind; what is wrong is named by file and line."""

from __future__ import annotations

import csv
import errno
import json
import math

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from core.errors import TryAgain, UserError
from finetune.examples import Problems
from finetune.tables import number, open_table, read_rows, write_table

ROWS = [
    {"text": 'a "red" cat,\nbig', "label": "yes"},
    {"text": "tab\there", "label": "no"},
    {"text": "caf\u00e9 \u2028 ;", "label": "yes"},
]


def write(path, rows=ROWS, mark=""):
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix in (".jsonl", ".data"):
        path.write_text(mark + "".join(json.dumps(row) + "\n\n" for row in rows), "utf-8")
    else:
        with path.open("w", encoding="utf-8", newline="") as file:
            file.write(mark)
            delimiter = {".tsv": "\t", ".txt": ";"}.get(path.suffix, ",")
            writer = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
            writer.writeheader()
            writer.writerows(rows)
    return path


def rows(path, *, quotes=True, **options):
    problems = Problems(path)
    table = open_table(path, quotes=quotes, **options)
    return read_rows(problems, table, texts=["text"], label="label"), problems


def read(table):
    """All columns of all its records."""
    return list(table.records(table.columns))


@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".txt", ".jsonl", ".data", ".parquet"])
def test_every_kind_holds_the_same_rows(suffix, mark, tmp_path) -> None:
    found, problems = rows(write(tmp_path / f"x{suffix}", mark=mark))
    assert [(r.texts[0], r.label) for r in found] == [(r["text"], r["label"]) for r in ROWS]
    assert (problems.total, problems.bad) == (3, 0)
    lines = {".csv": [2, 4, 5], ".jsonl": [1, 3, 5], ".parquet": [1, 2, 3]}
    if suffix in lines:
        assert [r.place for r in found] == lines[suffix]


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl"])
def test_what_is_written_is_read_again(suffix, tmp_path) -> None:
    path = tmp_path / f"out{suffix}"
    given = [*ROWS, ROWS[0] | {"text": "a\rline end of \r\n any kind\n"}]
    write_table(path, iter(given))
    found = [(r.texts[0], r.label) for r in rows(path)[0]]
    assert found[:-1] == [tuple(r.values()) for r in ROWS]
    assert found[-1][0].split() == given[-1]["text"].split() and len(found) == len(given)


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl"])
def test_scores_are_written_to_the_bit(suffix, tmp_path) -> None:
    scores = np.random.Generator(np.random.Philox(1)).normal(0.2, 1e-6, 99).astype(np.float32)
    path = tmp_path / f"out{suffix}"
    write_table(path, ({"text": "a", "label": float(score)} for score in scores))
    table = open_table(path)
    found = read_rows(Problems(path), table, texts=["text"], label="label", value=number())
    found = [row.label for row in found]
    assert (np.float32(found) == scores).all() and len(found) == 99


def test_nothing_is_written_when_a_row_fails(tmp_path) -> None:
    path = tmp_path / "out.csv"
    with pytest.raises(ZeroDivisionError):
        write_table(path, ({"a": 1 // n} for n in (1, 0)))
    assert not list(tmp_path.iterdir())
    for name in ("out.xls", "out.json"):
        with pytest.raises(UserError, match=f"{name}: .csv, .tsv or .jsonl can be written"):
            write_table(tmp_path / name, ROWS)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.csv", b"", ": is empty"),
        ("x.csv", b"\xef\xbb\xbf \n", ": is empty"),
        ("x.csv", b"\xff\xfet\0e\0", ": is UTF-16 text; save it as UTF-8"),
        ("x.csv", b"PK\x03\x04", ": is a zip or Excel file; save the table as csv"),
        ("x.csv", b"\x1f\x8b\x08", ": is packed by gzip; unpack it"),
        ("x.csv", b"text,label\ncaf\xe9,yes\n", ": is not UTF-8; save it as UTF-8"),
        ("x.csv", b"words,label\na,b\n", ":1: no column text; it has words, label"),
        ("x.csv", b"text,label,text\na,b,c\n", ":1: column 'text' is there twice; rename"),
        ("x.csv", b'text,label\na,b\n"c,d\ne,f\n', ":3: unexpected end of data; a quotation mark"),
        ("x.csv", b"text,label\na\rb,c\n", ":2: new-line character seen in unquoted field"),
        ("x.csv", b'text,label\n"a" b,c\n', ":2: ',' expected after '\"'; a quotation mark"),
        ("x.jsonl", b'[{"text": "a"}]', ": is a JSON array; write one object a line"),
        (
            "x.csv",
            b"text,label\na,b\n" + bytes(4096) + b"c,d\n",
            ": byte 15: a NUL, as of a",
        ),
        ("x.tsv", "text\tlabel\na\tb\n".encode("utf-16-le"), ": byte 1: a NUL, as of a damaged"),
        ("x.jsonl", b'{"text": "a"}\n' * 80_000 + b"\0", ": byte 1120000: a NUL, as of a"),
        ("x.jsonl", b"\ntext,label\n", ":2: no line is a JSON object that can be read; here: not"),
        ("x.jsonl", b'{"text": 1, "text": 2}', ":1: no line is a JSON object that can be read"),
        ("x.jsonl", b'{"label": 1}\n', ":1: no column text; it has label"),
        ("x.parquet", b"text,label\n", ": is no parquet file"),
        ("x.parquet", b"PAR1 and no more PAR1", ": damaged parquet"),
    ],
)
def test_a_file_that_is_no_table_is_one_line(name, content, message, tmp_path) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError) as error:
        rows(path)
    assert str(error.value).startswith(f"{path}{message}") and "\n" not in str(error.value)
    assert ("quotation mark" in str(error.value)) == ("quotation mark" in message)


def test_bad_rows_are_counted_by_line(tmp_path) -> None:
    path = tmp_path / "x.csv"
    path.write_text('text,label\n"two\nlines",1\nshort\n\n ,2\na,nan\nb,x\nc,1,2\n\n\n')
    problems = Problems(path)
    found = read_rows(problems, open_table(path), texts=["text"], label="label", value=number())
    assert [r.label for r in found] == [1.0] and problems.total == 7
    assert dict(problems.where) == {
        "not 2 columns": ["4", "9"],
        "empty row": ["5"],
        "empty text": ["6"],
        "not a number": ["7 'nan'", "8 'x'"],
    }
    path = tmp_path / "x.jsonl"
    path.write_text(
        '{"text": "a", "label": 1}\n7\n{\n{"text": ["b"]}\n{"text": "\\ud800"}\n{}\n'
        '{"text": null}\n{"text": "a"}\n{"text": "b", "label": 2}\n{"text": "a\\u0000b"}\n'
        '{"text": "a", "label": 1, "text": "b"}\n{"text": "a", "te\\u0078t": "b", "label": 1}\n'
        '{"text": "a", "label": 1, "more": {"a": 1, "b": {"a": 2, "a": 3}}}\n'
        '{"text": "a", "label": 1, "more": [{"a": 1}, {"a": {"a": 2}}]}\n'
    )
    found, problems = rows(path)
    assert [row.index for row in found] == ["0", "8", "13"]  # numbers of the file's records
    assert dict(problems.where) == {
        "not a JSON object": ["2"],
        "not JSON": ["3"],
        "text that is none": ["4"],
        "text with NUL or a lone surrogate": ["5", "10"],
        "no column text": ["6"],
        "empty text": ["7"],
        "no column label": ["8"],
        "a field twice in an object": ["11", "12", "13"],
    }


def test_numbers_that_are_none_and_times_past_the_calendar_are_no_text(tmp_path) -> None:
    """As pandas writes an empty cell of a column of numbers."""
    path = tmp_path / "x.parquet"
    table = {"text": [1.0, math.nan], "label": ["a", "b"]}
    pyarrow.parquet.write_table(pyarrow.table(table), path)
    found, problems = rows(path)
    assert len(found) == 1 and dict(problems.where) == {"empty text": ["2"]}
    with pytest.raises(ValueError, match="not a number"):
        number()(10**400)
    far = pyarrow.array([2**60] * 2, pyarrow.timestamp("us"))
    pyarrow.parquet.write_table(pyarrow.table(table | {"when": far}), path)
    assert len(rows(path)[0]) == 1
    near = pyarrow.array([1, 2], pyarrow.timestamp("ns"))
    for times in (far, near):
        for odd in (times, pyarrow.array([[t] for t in times]), [{"a": t} for t in times]):
            pyarrow.parquet.write_table(pyarrow.table(table | {"when": odd}), path)
            assert len(rows(path)[0]) == 1
            pyarrow.parquet.write_table(pyarrow.table(table | {"text": odd}), path)
            assert times is near or dict(rows(path)[1].where) == {"text that is none": ["1", "2"]}


@pytest.mark.parametrize("packed", [True, False])
def test_a_turned_bit_of_parquet_with_checksums_is_told_or_changes_nothing(
    tmp_path, packed
) -> None:
    path = tmp_path / "x.parquet"
    table = {
        "text": [f"Words of row {n}." for n in range(40)],
        "label": [f"{n % 3}" for n in range(40)],
        "score": [n % 5 for n in range(40)],
        "spans": [[n, n + 1] for n in range(40)],
        "names": [["a", f"{n}"] for n in range(40)],
    }
    how = {} if packed else {"compression": "none", "use_dictionary": False}
    pyarrow.parquet.write_table(
        pyarrow.table(table), path, row_group_size=10, write_page_checksum=True, **how
    )
    data, truth = bytearray(path.read_bytes()), read(open_table(path))
    assert [record for _, record in truth] == pyarrow.table(table).to_pylist()
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    rng = np.random.Generator(np.random.Philox(packed))
    told = 0
    for n in range(300):
        bit = int(
            rng.integers(32, 8 * footer) if n % 2 else rng.integers(8 * footer, 8 * len(data))
        )
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        data[bit // 8] ^= 1 << bit % 8
        try:
            changed = open_table(path)
            if "text" in changed.columns:  # else `Table.records` tells
                found = [(place, record.get("text")) for place, record in read(changed)]
                assert found == [(place, record["text"]) for place, record in truth], bit
        except UserError as error:
            assert "x.parquet: " in str(error) and "\n" not in str(error)
            told += 1
    assert told > 100


@pytest.mark.parametrize("lie", [b"\x16\x0c", b"\x16\x00"])
def test_a_footer_that_tells_of_fewer_rows_is_damage(tmp_path, lie) -> None:
    path = tmp_path / "x.parquet"
    table = {"text": [f"Words {n}." for n in range(30)], "label": ["a"] * 30}
    pyarrow.parquet.write_table(pyarrow.table(table), path, row_group_size=10, store_schema=False)
    data = path.read_bytes()
    begin = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    places = [at for at in range(begin, len(data)) if data.startswith(b"\x16\x14", at)]  # 10
    told = 0
    for at in places:
        path.write_bytes(data[:at] + lie + data[at + 2 :])
        try:
            assert len(rows(path)[0]) == 30, at - begin
        except UserError as error:
            told += "damaged parquet: row group" in str(error)
    assert told >= 3
    (at,) = (at for at in range(begin, len(data)) if data.startswith(b"\x16\x3c", at))  # 30
    path.write_bytes(data[:at] + b"\x16\x50" + data[at + 2 :])
    with pytest.raises(UserError, match="damaged parquet: row groups of 30 rows, 40 by its footer"):
        rows(path)


def test_row_groups_without_rows_are_passed_over(tmp_path) -> None:
    path = tmp_path / "x.parquet"
    table = pyarrow.table({"text": ["a", "b"], "label": ["x", "y"], "names": [["n"], []]})
    with pyarrow.parquet.ParquetWriter(path, table.schema) as writer:
        for part in (table.slice(0, 0), table.slice(0, 1), table.slice(0, 0), table.slice(1)):
            writer.write_table(part)
    assert [row.texts for row in rows(path)[0]] == [("a",), ("b",)]
    pyarrow.parquet.write_table(table.slice(0, 0), path)
    assert rows(path)[0] == []


@pytest.mark.parametrize("place", ["ParquetFile", "iter_batches"])
def test_a_disk_that_does_not_answer_is_no_damaged_parquet(tmp_path, monkeypatch, place) -> None:
    def fail(*_, **__):
        raise OSError(errno.ESTALE, "Failed to open. Detail: [errno 116]")

    path = write(tmp_path / "x.parquet")
    where = pyarrow.parquet if place == "ParquetFile" else pyarrow.parquet.ParquetFile
    monkeypatch.setattr(where, place, fail)
    with pytest.raises(TryAgain, match=f"^{path}: Stale file handle$"):
        rows(path)


def test_a_parquet_file_that_is_made_to_fill_the_memory_is_refused(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("finetune.tables.UNPACKED", 2_000_000)
    path = tmp_path / "x.parquet"
    table = pyarrow.table({"text": ["x" * 3_000_000, "Words."], "label": ["a", "b"]})
    pyarrow.parquet.write_table(table, path, compression="zstd")
    with pytest.raises(UserError, match="x.parquet: damaged parquet: row group 0 unpacks to over"):
        rows(path)


def test_of_parquet_no_more_is_unpacked_than_is_asked_for_and_a_batch_takes(tmp_path) -> None:
    path, size, pool = tmp_path / "x.parquet", 4_000_000, pyarrow.default_memory_pool()
    big = pyarrow.DictionaryArray.from_arrays([0] * 60, ["x" * size])
    table = {"text": ["a"] * 60, "label": ["b"] * 60, "big": big}
    pyarrow.parquet.write_table(pyarrow.table(table), path, store_schema=False)
    before = pool.max_memory()
    assert len(rows(path)[0]) == 60
    assert pool.max_memory() < before + size
    found = sum(len(record["big"]) for _, record in open_table(path).records(["big"]))
    assert found == 60 * size
    assert pool.max_memory() < before + 40 * size  # all at once take 180


def test_a_text_may_be_long_and_an_only_one_empty(tmp_path) -> None:
    path = tmp_path / "x.csv"
    path.write_text(f'text\n{"a" * 200_000}\n""\n\nb\n\n')
    found = dict(read(open_table(path)))
    assert len(found.pop(2)["text"]) == 200_000
    assert found == {3: {"text": ""}, 4: "empty row", 5: {"text": "b"}}


def test_quotation_marks_may_be_text(tmp_path) -> None:
    path = tmp_path / "x.tsv"
    path.write_text('text\tlabel\n"a cat\tyes\nb" \tno\n')
    assert [r.texts[0] for r in rows(path, quotes=False)[0]] == ['"a cat', 'b"']
    with pytest.raises(UserError, match="x.tsv:2: "):
        rows(path)


def test_marks_of_a_tsv_that_are_text_join_no_rows(tmp_path) -> None:
    path = tmp_path / "x.tsv"
    path.write_text('text\tlabel\na\tno\n"a cat\tyes\nb\tno\nthe end"\tyes\n"c"\tno\n')
    options = {"quotes_key": "classify.quotes: "}
    marks = ["a", '"a cat', "b", 'the end"', '"c"']
    assert [r.texts[0] for r in rows(path, quotes=False, **options)[0]] == marks
    joined = ["a", "a cat\tyes\nb\tno\nthe end", "c"]
    assert [r.texts[0] for r in rows(path, quotes=True, **options)[0]] == joined
    with pytest.raises(UserError) as error:
        rows(path, quotes=None, **options)
    assert str(error.value) == (
        f"{path}:3: a field in quotation marks holds a line end or a tab; classify.quotes: false "
        "where the marks are text, classify.quotes: true where they are not"
    )
    for field in ("a\tb", "a\nb", "a\rb"):
        path.write_text(f'text\tlabel\na\tno\n"{field}"\tyes\n', newline="")
        with pytest.raises(UserError, match="x.tsv:3: a field in quotation marks"):
            rows(path, quotes=None, **options)
        with pytest.raises(
            UserError, match="x.tsv:3: a field .* or a tab; write it as jsonl where"
        ):
            rows(path, quotes=None)
    for text in ('"a" b\tc\n', '"a\tb\n'):
        path.write_text(f"text\tlabel\n{text}")
        for quotes in (True, None):
            with pytest.raises(UserError, match="twice; classify.quotes: false where the marks"):
                rows(path, quotes=quotes, **options)
    assert rows(write(tmp_path / "x.csv"), quotes=None, **options)[1].bad == 0
