import bz2
import csv
import dataclasses
import gzip
import io
import json
import os
import re
import tarfile
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from configs.load import check
from core.errors import UserError
from data_pipeline.corpus import compressed, parts
from data_pipeline.corpus.books import BookBoundaries
from data_pipeline.corpus.documents import Document, Dropped, Problem
from data_pipeline.corpus.markup import markdown_paragraphs, rst_paragraphs
from data_pipeline.corpus.sources import KINDS, SourceConfig, list_files, resolve
from data_pipeline.corpus.web_pages import html_paragraphs
from data_pipeline.corpus.wikitext import clean_line, passages
from tests.data_pipeline.corpus.text import (
    document,
    documents,
    dump,
    multistream,
    problems,
    read,
    wikiextractor,
    with_peak,
)

PAGES = range(1, 60)


ARTICLES = {str(seed): document(seed) for seed in PAGES}


# --- Wikipedia dumps


def write_dump(path):
    text = dump(PAGES).encode()
    if path.name == "multi.xml.bz2":
        path.write_bytes(multistream(PAGES, 5))
    elif path.name == "blocks.xml.bz2":
        path.write_bytes(bz2.compress(text * 1, 1))
    elif path.name.endswith(".bz2"):
        path.write_bytes(bz2.compress(text))
    elif path.name.endswith(".gz"):
        path.write_bytes(gzip.compress(text))
    else:
        path.write_bytes(text)
    return path


@pytest.mark.parametrize("name", ["d.xml", "d.xml.bz2", "multi.xml.bz2", "d.xml.gz"])
@pytest.mark.parametrize("unit_bytes", [10**9, 30_000, 3_000])
def test_dumps_of_every_packing_cut_anywhere_give_the_articles(tmp_path, name, unit_bytes):
    items, units = read("wikipedia", write_dump(tmp_path / name), unit_bytes)
    expected = {k: v for k, v in ARTICLES.items() if int(k) % 10}
    assert documents(items) == expected
    assert [i.reason for i in items if isinstance(i, Dropped)] == ["redirect"] * 5
    ids = [item.id for item in items]
    assert sorted(ids) == sorted(set(ids))
    assert units > 1 or unit_bytes == 10**9
    if name == "d.xml" and unit_bytes == 3_000:
        assert units > 10


def test_other_namespaces_disambiguation_and_pages_without_prose_are_dropped(tmp_path):
    def page(number, title, namespace, text, model="wikitext"):
        return (
            f"<page><title>{title}</title><ns>{namespace}</ns><id>{number}</id>"
            f"<revision><model>{model}</model><text>{text}</text></revision></page>\n"
        )

    prose = "Some words of prose that stand here for a page."
    extra = (
        page(101, "Talk:X", 1, prose)
        + page(102, "X (disambiguation)", 0, prose)
        + page(103, "Y", 0, prose + " {{disambig}}")
        + page(104, "List of things", 0, "* a\n* b")
        + page(105, "Z", 0, prose)
        + page(106, "Q1", 0, prose, "wikibase-item")
    )
    path = tmp_path / "d.xml"
    path.write_text(dump([1], extra))
    items, _ = read("wikipedia", path)
    reasons = {i.id: i.reason for i in items if isinstance(i, Dropped)}
    assert reasons == {
        "101": "other namespace",
        "102": "disambiguation",
        "103": "disambiguation",
        "104": "no prose",
        "106": "not wikitext",
    }
    assert documents(items)["105"] == [prose]


@pytest.mark.parametrize("chunk", [100, 1 << 20])
def test_bad_pages_are_named_and_the_rest_is_read(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(compressed, "CHUNK", chunk)
    text = dump(range(1, 10))
    text = text.replace("<title>Page 3</title>", "<title>Page 3</title><open>", 1)
    before, after = text.split("<title>Page 6</title>")
    after = after.replace("</page>", "", 1)
    path = tmp_path / "d.xml"
    path.write_text(before + "<title>Page 6</title>" + after)
    items, _ = read("wikipedia", path)
    problems = [(i.place, i.what) for i in items if isinstance(i, Problem)]
    assert [place for place, _ in problems] == ['page "Page 3"', 'page "Page 6"']
    assert problems[0][1].startswith("bad XML") and "no end" in problems[1][1]
    assert set(documents(items)) == set("1245789")
    path.write_text(
        dump(range(1, 10)).replace("<page>\n    <title>Page 4<", "<p*ge><title>Page 4<")
    )
    items, _ = read("wikipedia", path)
    assert [i.what for i in items if isinstance(i, Problem)] == [
        "bad XML: the page has no beginning"
    ]
    assert set(documents(items)) == set("12356789")
    path.write_text(text[: text.index("<title>Page 8</title>") + 30])
    items, _ = read("wikipedia", path)
    assert [i.what for i in items if isinstance(i, Problem)][-1] == "the file ends inside a page"


@pytest.mark.parametrize("begin", ["<page >", "<PAGE>", "<page\n>", '<page x="1">', "<m:page>"])
@pytest.mark.parametrize("end", ["</page>", "</page >", "</PAGE>"])
def test_a_page_whose_marks_are_written_otherwise_is_named_once(tmp_path, begin, end):
    before, page, after = dump(range(1, 7)).partition("  <page>\n    <title>Page 3<")
    page = page.replace("<page>", begin)
    path = tmp_path / "d.xml"
    path.write_text(before + page + after.replace("</page>", end, 1))
    for unit_bytes in (10**9, *range(1000, 1600, 37)):
        items, _ = read("wikipedia", path, unit_bytes)
        assert set(documents(items)) == set("12456"), unit_bytes
        found = [(i.place, i.what) for i in items if isinstance(i, Problem)]
        assert found == [('page "Page 3"', "bad XML: the page has no beginning")], unit_bytes


@pytest.mark.parametrize("chunk", [160, 1 << 20])
@pytest.mark.parametrize("pack", [bytes, bz2.compress])
def test_a_page_that_has_lost_its_beginning_is_named_wherever_a_part_ends(
    tmp_path, monkeypatch, chunk, pack
):
    monkeypatch.setattr(parts, "CHUNK", chunk)
    monkeypatch.setattr(compressed, "CHUNK", chunk)
    path = tmp_path / "d.xml"
    whole = dump(range(1, 7))
    for lost in ("", "1", "2", "3", "4", "5", "6", "23", "125", "56", "123456"):
        text = whole
        for number in lost:
            text = text.replace(f"<page>\n    <title>Page {number}", f"<qage><title>Page {number}")
        path.write_bytes(pack(text.encode()))
        for unit_bytes in {len(text) // n + 1 for n in range(1, 60)}:
            items, _ = read("wikipedia", path, unit_bytes)
            assert set(documents(items)) == set("123456") - set(lost), unit_bytes
            found = [i.what for i in items if isinstance(i, Problem)]
            assert found == ["bad XML: the page has no beginning"] * len(lost), unit_bytes


def test_no_page_is_lost_where_a_mark_lies_over_several_streams(tmp_path):
    head, *rest = dump(range(1, 5)).encode().split(b"<page>")
    streams = [head, *(piece for page in rest for piece in (b"<p", b"ag", b"e>", page))]
    path = tmp_path / "d.xml.bz2"
    path.write_bytes(b"".join(map(bz2.compress, streams)))
    for unit_bytes in range(40, 400, 9):
        items, units = read("wikipedia", path, unit_bytes)
        assert (sorted(documents(items)), len(items)) == (list("1234"), 4), unit_bytes
        assert units > 3


def test_a_page_without_beginning_is_named_where_the_end_before_lies_over_several_streams(tmp_path):
    head, *rest = dump(range(1, 6)).encode().split(b"<page>")
    rest = [f"<page>{page.decode()}" for page in rest]
    rest[2] = rest[2].replace("<page>", "<qage>")
    streams = [head]
    for page in rest:
        begin, _, behind = page.encode().partition(b"</page>")
        streams += [begin[:200], begin[200:], b"</", b"pa", b"ge", b">", behind]
    path = tmp_path / "d.xml.bz2"
    path.write_bytes(b"".join(bz2.compress(stream) for stream in streams))
    for unit_bytes in range(40, 400, 3):
        items, _ = read("wikipedia", path, unit_bytes)
        found = [i.what for i in items if isinstance(i, Problem)]
        assert set(documents(items)) == set("1245"), unit_bytes
        assert found == ["bad XML: the page has no beginning"], unit_bytes


def test_two_pages_that_became_one_are_named(tmp_path):
    text = dump(range(1, 6))
    before, mark, after = text.partition("</page>\n  <page>\n    <title>Page 3<")
    assert mark
    for lost in (mark.replace("</page>", "=/page>").replace("<page>", "=page>"), mark[16:]):
        (tmp_path / "d.xml").write_text(before + lost + after)
        items, _ = read("wikipedia", tmp_path / "d.xml")
        assert set(documents(items)) == set("145"), lost
        found = [(i.place, i.what) for i in items if isinstance(i, Problem)]
        assert found == [('page "Page 2"', "two titles or ids: two pages in one")]


@pytest.mark.parametrize("limit", [10**6, 3000])
@pytest.mark.parametrize("damage", ["mark", "zeros", "ones"])
def test_two_pages_with_history_that_became_one_are_named(tmp_path, damage, limit):
    """Of pages above the limit, too, of which old revisions are taken out before they are read."""
    revision = "<revision><timestamp>20{:02}</timestamp><text>{}</text></revision>\n"

    def page(n):
        body = "".join(revision.format(k, f"{n} words. " * 60) for k in range(1, 12))
        return f"<page><title>T {n}</title><ns>0</ns><id>{n}</id>\n{body}</page>\n"

    data = bytearray("".join(page(n) for n in range(1, 5)).encode())
    begin, end = data.index(b"</page>\n<page><title>T 3"), data.index(b"<title>T 3")
    if damage != "mark":
        begin, end = begin - 300, data.index(b"<text>", end) + 50
    data[begin:end] = (b"\0" if damage == "zeros" else b"\xff") * (end - begin) * (damage != "mark")
    (tmp_path / "d.xml").write_bytes(data)
    items, _ = read("wikipedia", tmp_path / "d.xml", max_document_bytes=limit)
    assert set(documents(items)) == set("14")
    assert [problem.place for problem in problems(items)] == ['page "T 2"']


# --- WikiExtractor


@pytest.mark.parametrize("noise", [b"\0", b"\xff"])
def test_documents_under_noise_that_ends_in_the_line_of_another_are_named(tmp_path, noise):
    data = bytearray(wikiextractor(range(1, 5)).encode())
    begin, end = data.index(b' title="Page 2'), data.index(b' title="Page 3')
    data[begin:end] = noise * (end - begin)
    (tmp_path / "wiki_00").write_bytes(data)
    items, _ = read("wikiextractor", tmp_path)
    assert set(documents(items)) == set("14")
    assert "a <doc> line that cannot be read" in [problem.what for problem in problems(items)]


def test_two_documents_of_wikiextractor_that_became_one_are_named(tmp_path):
    text = wikiextractor(range(1, 5))
    end, begin = text.index("</doc>"), text.index("<doc ", 9)
    text = f"{text[:end]}<.doc>{text[end + 6 : begin]}<doc ad{text[begin + 7 :]}"
    (tmp_path / "wiki_00").write_text(text)
    items, _ = read("wikiextractor", tmp_path)
    assert set(documents(items)) == set("134")
    assert [i.what for i in items if isinstance(i, Problem)] == ["a <doc> line that cannot be read"]


@pytest.mark.parametrize("unit_bytes", [300, 10**9])
@pytest.mark.parametrize("left", ["", "<doc id=", '<doc id="2" url="a" tit', "Page 2\n\nSome wor"])
def test_a_cut_file_of_wikiextractor_that_was_joined_with_the_next_is_named(
    tmp_path, left, unit_bytes
):
    text = wikiextractor(range(1, 5))
    starts = [found.start() for found in re.finditer("<doc ", text)]
    head = text[starts[1] : text.index("\n", starts[1]) + 1] if left.startswith("Page") else ""
    cut = text[: starts[1]] + head + left
    (tmp_path / "wiki_00").write_text((cut if left else cut.rstrip()) + text[starts[2] :])
    items, _ = read("wikiextractor", tmp_path, unit_bytes)
    assert set(documents(items)) >= set("14") and problems(items)


@pytest.mark.parametrize("unit_bytes", [10**9, 5_000])
@pytest.mark.parametrize("ending", ["", ".bz2", ".gz"])
@pytest.mark.parametrize("as_json", [False, True])
def test_wikiextractor_folders(tmp_path, ending, as_json, unit_bytes):
    pack = {"": bytes, ".bz2": bz2.compress, ".gz": gzip.compress}[ending]
    for part, pages in enumerate((range(1, 30), range(30, 60))):
        text = wikiextractor(pages)
        if as_json:
            rows = (
                {
                    "id": str(n),
                    "title": f"Page {n}",
                    "text": f"Page {n}\n\n" + "\n".join(document(n)),
                }
                for n in pages
            )
            text = "".join(json.dumps(row) + "\n" for row in rows)
        folder = tmp_path / f"A{part}"
        folder.mkdir()
        (folder / f"wiki_00{ending}").write_bytes(pack(text.encode()))
    items, units = read("wikiextractor", tmp_path, unit_bytes)
    assert documents(items) == ARTICLES
    assert len(items) == len(ARTICLES)
    assert units > 1 or unit_bytes == 10**9


def test_wikiextractor_pages_that_are_cut_or_bad_are_named(tmp_path):
    text = wikiextractor([1, 2, 3, 4]).encode()
    at = text.index(b"</doc>", text.index(b'<doc id="2"'))
    text = text[:at] + text[at + 7 :]
    at = text.index(b"Page 3\n\n") + 20
    text = text[:at] + b"\xff" + text[at:]
    (tmp_path / "wiki_00").write_bytes(text[:-8])
    items, _ = read("wikiextractor", tmp_path)
    assert [(i.place.split(",")[0], i.what) for i in items if isinstance(i, Problem)] == [
        ("document 2", "no </doc>"),
        ("document 3", "bad UTF-8"),
        ("document 4", "the file ends inside the document"),
    ]
    assert set(documents(items)) == {"1", "3"}


# --- books


BOOKS = {f"book{n}": [p for seed in range(n, n + 5) for p in document(seed)] for n in range(6)}


@pytest.mark.parametrize("shape", ["folder", "epub", "tar", "tar.gz", "crawl", "gz"])
@pytest.mark.parametrize("unit_bytes", [10**9, 3_000])
def test_books_in_their_shapes(tmp_path, shape, unit_bytes):
    ending = {"epub": ".epub.txt", "gz": ".txt.gz"}.get(shape, ".txt")
    folder = tmp_path / "books1" / ("out_txts" if shape == "crawl" else "epubtxt")
    folder.mkdir(parents=True)
    for name, paragraphs in BOOKS.items():
        data = "\n\n".join(paragraphs).encode()
        (folder / f"{name}{ending}").write_bytes(gzip.compress(data) if shape == "gz" else data)
    path, kind = tmp_path / "books1", "crawl" if shape == "crawl" else "books"
    if shape == "crawl":
        (path / "url_list.jsonl").write_text('{"page": "x"}\n')
        (folder / "error.txt").write_text("<!DOCTYPE html><html>404</html>")
    if shape.startswith("tar"):
        path = tmp_path / f"books1.{shape}"
        with tarfile.open(path, "w:gz" if shape == "tar.gz" else "w") as tar:
            tar.add(folder, arcname="books1/epubtxt")
    items, units = read(kind, path, unit_bytes)
    found = {name.split("/")[-1]: p for name, p in documents(items).items()}
    assert found == BOOKS
    assert units > 1 or unit_bytes == 10**9
    if shape == "crawl":
        assert [i.reason for i in items if isinstance(i, Dropped)] == ["not a text (HTML)"]


def test_a_broken_archive_gives_the_books_before_the_break(tmp_path):
    for name, paragraphs in BOOKS.items():
        (tmp_path / f"{name}.txt").write_text("\n\n".join(paragraphs))
    path = tmp_path / "b.tar"
    with tarfile.open(path, "w") as tar:
        for name in BOOKS:
            tar.add(tmp_path / f"{name}.txt", arcname=f"{name}.txt")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    items, _ = read("books", path)
    found = documents(items)
    assert 0 < len(found) < 6 and all(BOOKS[name] == p for name, p in found.items())
    assert isinstance(items[-1], Problem)


def test_book_boundaries_are_inferred_by_the_documented_rules():
    rows = (
        [("isbn 123", None), ("all rights reserved", None), ("chapter one", None)]
        + [("he went on .", None)] * 150
        + [("copyright 2010 by b", "front matter"), ("isbn 9", None), ("prologue", None)]
        + [("she went on .", None)] * 150
        + [("the end", None), ("next book .", "the end")]
        + [("it went on .", None)] * 150
        + [("chapter 1", "first chapter"), ("", "blank row"), ("isbn 5", None)]
    )
    boundaries = BookBoundaries()
    for number, (row, sign) in enumerate(rows):
        assert boundaries.begins(row) == (sign or ""), (number, row)
    endless = BookBoundaries()
    cuts = [(n, sign) for n in range(45_000) if (sign := endless.begins("on and on ."))]
    assert cuts == [(20_000, "length"), (40_000, "length")]


@pytest.mark.parametrize("shape", ["txt", "parquet"])
def test_one_sentence_a_row(tmp_path, shape):
    rows = []
    for book in range(3):
        rows += ["copyright 2011 by someone"] + [f"book {book} row {n} ." for n in range(120)]
    if shape == "txt":
        path = tmp_path / "books_large_p1.txt"
        path.write_text("\n".join(rows) + "\n")
    else:
        path = tmp_path / "bookcorpus.parquet"
        table = pyarrow.table({"text": rows})
        pyarrow.parquet.write_table(table, path, row_group_size=50)
    items, _ = read("sentences", path)
    found = list(documents(items).values())
    assert [len(p) for p in found] == [121, 121, 121]
    assert [row for p in found for row in p] == rows


# --- jsonl, parquet, text


@pytest.mark.parametrize("unit_bytes", [10**9, 4_000])
@pytest.mark.parametrize("ending", ["", ".gz", ".zst", ".bz2"])
def test_jsonl(tmp_path, ending, unit_bytes):
    pack = {
        "": bytes,
        ".gz": gzip.compress,
        ".bz2": bz2.compress,
        ".zst": zstandard.ZstdCompressor().compress,
    }[ending]
    rows = [json.dumps({"id": n, "text": "\n".join(document(n))}) for n in PAGES]
    rows[10] = "{broken"
    rows[11] = "[1]"
    (tmp_path / f"a.jsonl{ending}").write_bytes(pack("\n".join(rows).encode()))
    items, _ = read("jsonl", tmp_path, unit_bytes)
    assert documents(items) == {k: v for k, v in ARTICLES.items() if k not in ("11", "12")}
    assert len([i for i in items if isinstance(i, Problem)]) == 2


@pytest.mark.parametrize("unit_bytes", [10**9, 4_000])
def test_parquet_with_a_column_of_text(tmp_path, unit_bytes):
    texts = ["\n\n".join(document(n)) for n in PAGES]
    table = pyarrow.table({"id": [str(n) for n in PAGES], "title": texts, "text": texts})
    pyarrow.parquet.write_table(table, tmp_path / "train-0.parquet", row_group_size=7)
    items, units = read("parquet", tmp_path, unit_bytes)
    assert documents(items) == ARTICLES
    assert units > 1 or unit_bytes == 10**9
    with pytest.raises(UserError, match="no column 'body'.*id, title, text.*text_column"):
        read("parquet", tmp_path, text_column="body")


def test_corrupt_parquet_is_named_with_its_row_group(tmp_path):
    path = tmp_path / "a.parquet"
    texts = ["\n".join(document(n)) for n in PAGES]
    table = pyarrow.table({"text": texts})
    pyarrow.parquet.write_table(
        table, path, row_group_size=20, compression="zstd", use_dictionary=False
    )
    data = bytearray(path.read_bytes())
    start = pyarrow.parquet.ParquetFile(path).metadata.row_group(1).column(0).data_page_offset
    data[start : start + 4000] = b"\xff" * 4000
    path.write_bytes(data)
    items, _ = read("parquet", path)
    assert [i.place for i in items if isinstance(i, Problem)] == ["row group 1"]
    assert len(documents(items)) == 59 - 20
    path.write_bytes(b"PAR1 not at all")
    items, _ = read("parquet", path)
    assert [i.place for i in items] == ["file"]


def test_folder_of_texts_and_bad_utf8(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.txt").write_text("\n".join(document(1)))
    (tmp_path / "y.txt").write_bytes(b"Good words \xff\xfe here.\n")
    (tmp_path / "empty.txt").write_text("\n \n")
    items, _ = read("text", tmp_path)
    assert documents(items) == {"a/x": document(1), "y": ["Good words here."]}
    assert [i.reason for i in items if isinstance(i, Dropped)] == ["empty"]
    (problem,) = [i for i in items if isinstance(i, Problem)]
    assert problem.what == "bad UTF-8" and "byte 11" in problem.place


# --- csv, tsv


@pytest.mark.parametrize("unit_bytes", [10**9, 4_000])
@pytest.mark.parametrize(("delimiter", "ending"), [(",", "\r\n"), (";", "\n"), ("\t", "\r")])
def test_tables_as_pythons_csv_writes_them(tmp_path, delimiter, ending, unit_bytes):
    def quoted(n):
        return [f'"{p}", said{delimiter}he' for p in document(n)]

    with open(tmp_path / "a.csv", "w", newline="", encoding="utf-8-sig") as file:
        writer = csv.writer(file, delimiter=delimiter, lineterminator=ending)
        writer.writerow(["id", "n", "text"])
        writer.writerows(
            [n, n, "\n".join(quoted(n)) if ending != "\r" else quoted(n)[0]] for n in PAGES
        )
    items, units = read("csv", tmp_path, unit_bytes)
    rows = {str(n): quoted(n) if ending != "\r" else quoted(n)[:1] for n in PAGES}
    whole = {n: [p.replace("\t", " ") for p in row] for n, row in rows.items()}
    assert documents(items) == whole and len(items) == len(whole)
    assert units > 1 or unit_bytes == 10**9
    with pytest.raises(UserError, match="no column 'body'; there are: id, n, text.*text_column"):
        read("csv", tmp_path, text_column="body")


@pytest.mark.parametrize("unit_bytes", [10**9, 300])
def test_bad_rows_of_a_table_are_named_once_and_the_rest_is_read(tmp_path, unit_bytes):
    good = [f"Words of row {n}." for n in range(40)]
    rows = [f"{n},{text}" for n, text in enumerate(good)]
    rows[7] = "7,one, two, three"
    rows[9] = '9,"a quote" inside'
    rows[20] = '20,"never closed'
    rows[23] = '23,"the end of it'
    rows[30] = '30,"' + "x" * 5000 + '"'
    data = "\n".join(["id,text", *rows]).encode().replace(b"row 12", b"row \xff12")
    (tmp_path / "a.csv").write_bytes(data)
    items, _ = read("csv", tmp_path, unit_bytes, max_document_bytes=2000)
    # What an open quote swallows is lost up to where it cannot be right.
    lost = {7, 9, 20, 21, 22, 23, 30}
    assert documents(items) == {str(n): [text] for n, text in enumerate(good) if n not in lost}
    at = [data.index(row.encode()) for row in (rows[7], rows[9], rows[12][:12], rows[20], rows[30])]
    places = sorted(int(p.place.split(",")[0].split()[1]) for p in problems(items))
    assert places == at
    (tmp_path / "a.csv").write_bytes(b'id,text\n1,Words.\n2,"' + b"never\n" * 600)
    items, _ = read("csv", tmp_path, max_document_bytes=1000)
    assert documents(items) == {"1": ["Words."]}
    assert "is a quote left open" in problems(items)[0].what
    (tmp_path / "a.csv").write_bytes(b'id,text\n1,Words.\n2,"open\n')
    assert (
        problems(read("csv", tmp_path)[0])[0].what == "not a row (a quotation mark is not closed)"
    )


@pytest.mark.parametrize("before", ["", "\ufeff", "\ufeff\ufeff", "\n", "\ufeff\n \n", "{0}{0}\n"])
@pytest.mark.parametrize(
    "names",
    [
        *(["id", "text"], [" id", "text "], ["id", "\ufefftext"], ["id", "text", "", ""]),
        *(["a\nb", "id", "text"], ["id", "text", "a, b\nc; d\n\t\t"], ["a,,;;\t\t", "id", "text"]),
        *(['a "b", c', "id", "text"], ["a b", "a b", "id", "text"], ["\x1b[1m\x01", "id", "text"]),
    ],
)
@pytest.mark.parametrize(("delimiter", "ending"), [(",", "\n"), (";", "\r\n"), ("\t", "\r")])
@pytest.mark.parametrize("quoting", [csv.QUOTE_MINIMAL, csv.QUOTE_ALL])
def test_a_header_is_read_whole_whatever_stands_in_it(
    tmp_path, before, names, delimiter, ending, quoting
):
    file = io.StringIO()
    writer = csv.writer(file, delimiter=delimiter, quoting=quoting, lineterminator="\n")
    writer.writerow(names)
    for n in range(40):
        known = {"id": n, "text": f"Words of {n}."}
        writer.writerow([known.get(name.strip(" \ufeff"), "x") for name in names])
    data = before.format(delimiter) + file.getvalue()
    (tmp_path / "a.csv").write_bytes(data.replace("\n", ending).encode())
    expected = [Document(str(n), [f"Words of {n}."]) for n in range(40)]
    for unit_bytes in (10**9, 400):
        assert read("csv", tmp_path, unit_bytes)[0] == expected


def test_a_table_without_a_header_is_named(tmp_path):
    for data in (b"\n\n", b"\xef\xbb\xbf", b" \n,,\n", b"\xef\xbb\xbf\n"):
        (tmp_path / "a.csv").write_bytes(data)
        (problem,) = problems(read("csv", tmp_path)[0])
        assert problem.what.startswith("no header")


def test_blank_lines_before_a_header_are_not_held(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"\n" * 100_000 + b"id,text\n1,Words.\n")
    (items, _), peak = with_peak(read, "csv", tmp_path)
    assert documents(items) == {"1": ["Words."]} and peak < 5_000_000


def test_what_is_wrong_with_a_header_is_counted_once(tmp_path):
    rows = "".join(f"{n},Words of {n}.\n" for n in range(300)).encode()
    for head, count in ((b"id,text,\xe9\n", 300), (b'"id,text"x\n', 0)):
        rows = rows.replace(b".\n", b".,x\n") if count else rows
        (tmp_path / "a.csv").write_bytes(head + rows)
        items, units = read("csv", tmp_path, 500)
        assert units > 1 and len(problems(items)) == 1 and len(documents(items)) == count


@pytest.mark.parametrize(
    ("kind", "data"),
    [("csv", b"id,text\n,Words.\n,More.\n"), ("jsonl", b'{"id": "", "text": "Words."}\n' * 2)]
    + [("csv", b"id,text\n ,Words.\n ,More.\n")],
)
def test_rows_of_an_empty_id_are_named_by_their_place(tmp_path, kind, data):
    (tmp_path / f"a.{kind}").write_bytes(data)
    assert len(documents(read(kind, tmp_path)[0])) == 2


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("---\ntitle: x\n---\nWords.\n", ["Words."]),
        ("---\n\nWords.\n\n---\n\nMore.\n", ["Words.", "More."]),
        ("---\ntags:\n- a\n\n# of it\nb: |\n  Two\n  lines.\n---\nWords.\n", ["Words."]),
        ("---\ntitle: x\n\n# Head\n\nWords.\n\n---\n\nMore.\n",
         ["title: x", "Head", "Words.", "More."]),
        ("---\ntitle: x\n\nHead\n---\n\nMore.\n", ["title: x", "Head", "More."]),
        ("---\ntitle: x\n\n## Head\n\n- Words\n  of it\n\n---\n\nMore.\n",
         ["title: x", "Head", "Words of it", "More."]),
        ("---\nog:title: x\ntags: [a,\nb]\nc: \"d\ne\"\n...\nWords.\n", ["Words."]),
        ("---\ntitle: Of: two\ntags:\n- a\n  b: {{ c }}\nd: @e\n---\nWords.\n", ["Words."]),
        ("---\ntags:\n- a\n\n# Head\n\n- Words\n\n---\n\nMore.\n",
         ["tags:", "a", "Head", "Words", "More."]),
        ("---\na: b\n\nHe: Words.\n\nShe: Words.\n\nHe: Words.\n\n---\n\nMore.\n",
         ["a: b", "He: Words.", "She: Words.", "He: Words.", "More."]),
        ("---\na: b\n\n# Head\n\nMill: Words.\n\n---\n\nMore.\n",
         ["a: b", "Head", "Mill: Words.", "More."]),
        ("---\na: b\n\n**Mill**: Words.\n\n---\n\nMore.\n", ["a: b", "Mill: Words.", "More."]),
        ("---\na: b\n\n2020-01-10: Words.\n---\nMore.\n", ["a: b", "2020-01-10: Words.", "More."]),
        ("---\na: b\n\n\"It\": Words.\n---\nMore.\n", ["a: b", "\"It\": Words.", "More."]),
        ("---\na: b\n\n# Head\n\n  Words.\n\n---\nMore.\n", ["a: b", "Head", "Words.", "More."]),
        ("---\na: b\n\n  Words.\n\n---\nMore.\n", ["a: b", "Words.", "More."]),
        ("---\na: |\n  b\n\n  c\nD:\n- e\nf: >-\n\n  g\n---\nWords.\n", ["Words."]),
        ("---\na: b\n\nc-d.e:\n- f\n\n---\nWords.\n", ["Words."]),
        ("+++\na = 1\n[b]\nc = \"\"\"\nd\n\"\"\"\n+++\nWords.\n", ["Words."]),
        ("+++\na = {{ b }}\n[c]\n+++\nWords.\n", ["Words."]),
        ("+++\na = 1\n\nWords.\n\n+++\n\nMore.\n", ["+++ a = 1", "Words.", "More."]),
        ("---\n# Of it\ntitle: x\nold:\n" + "- /a\n" * 2000 + "---\nWords.\n", ["Words."]),
        ("+++\n" + "".join(f"a{n} = 'bcd'\n" for n in range(2000)) + "+++\nWords.\n", ["Words."]),
        ("---\n# Head\n\nNote: this.\n\n---\nMore.\n", ["Head", "Note: this.", "More."]),
        ("---\na b: \"\\UFFFFFFFF\"\n---\nWords.\n", None),
        ("---\na: " + "[" * 99_999 + "\nb\n---\nWords.\n", None),
    ],
)  # fmt: skip
def test_front_matter_is_told_by_its_keys(tmp_path, text, found):
    (tmp_path / "a.md").write_text(text)
    shown = documents(read("text", tmp_path, suffixes=[".md"])[0])["a.md"]
    assert shown == found if found else shown[-1] == "Words."


def test_an_example_of_rst_ends_with_what_it_stands_in():
    page = "One.\n\n.. note::\n\n   >>> f(1)\n   2\n%sTwo, for >>> and more."
    for end in ("", "\n"):
        assert rst_paragraphs(page % end) == ["One.", "Two, for >>> and more."]


def test_a_table_that_nothing_closes_is_text():
    closed = "Before.\n\n== ==\na  b\n\nc  d\n== ==\n\nAfter.\n"
    assert rst_paragraphs(closed) == ["Before.", "After."]
    for end in ("\n", "\n\n"):
        unclosed = f"Before.\n\n== =={end}Prose.\n\nMore.\n"
        assert rst_paragraphs(unclosed) == ["Before.", "Prose.", "More."]


@pytest.mark.parametrize(
    "table",
    [
        "+-----+-----+\n| a   | b   |\n+=====+=====+\n| one | two |\n+-----+-----+\n",
        "+-----+-----+\n| one | two |\n|     +-----+\n|     | b   |\n+-----+-----+\n",
        "=====  =====\none    two\nthree  four\n=====  =====\n",
        "=====  =====\none    two\n\nthree  four\n=====  =====\n",
        "=====  =====\na      b\n=====  =====\none    two\n=====  =====\n",
    ],
)
@pytest.mark.parametrize(
    "below", ["Some prose that\nstands directly below.", "- A list, of which there is\n- more."]
)
@pytest.mark.parametrize("indent", ["", "  "])
def test_a_table_ends_at_its_last_border(table, below, indent):
    page = re.sub("^(?=.)", indent, table + below, flags=re.MULTILINE)
    prose = [" ".join(below.split("\n"))] if below[0] != "-" else below[2:].split("\n- ")
    assert rst_paragraphs(f"Before.\n\n{page}\n\nLast.\n") == ["Before.", *prose, "Last."]


@pytest.mark.parametrize(
    ("bottom", "below"),
    [
        ("=====  =====\n", ""),  # no empty line behind it
        ("\n", ""),
        ("============\n\n", ""),
        ("=====  =====.\n\n", ""),
        ("\n", "=====  =====\nname   words\n=====  =====\nwidth  wide\n=====  =====\n\nLast.\n"),
    ],
)
@pytest.mark.parametrize("indent", ["", "  "])
def test_a_table_whose_bottom_is_lost_takes_nothing_that_follows(bottom, below, indent):
    table = f"=====  =====\nname   words\n=====  =====\nwidth  wide\n{bottom}"
    table = re.sub("^(?=.)", indent, table, flags=re.MULTILINE)
    after = "Some prose that stands below.\n\nHead\n====\n\nMore of the prose.\n\n"
    found = rst_paragraphs(f"Before.\n\n{table}{after}{below}")
    prose = [line for line in after.split("\n") if line.strip("=")] + ["Last."] * bool(below)
    assert found == ["Before.", *prose]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("- One:\n  + two of\n    them\n  + three\n", ["One:", "two of them", "three"]),
        ("| A verse,\n| and a verse.\n|\n| More.\n", ["A verse, and a verse.", "More."]),
        ("+---+----+\n| a | b  |\n+===+====+\n| c | d  |\n+---+----+\n\nWords.\n", ["Words."]),
        ("|x| is x. |1| is 1.\n", ["x is x. 1 is 1."]),
        (".. _a:\n\n   A b.\n\n.. _c:\n   http://d\n\n.. e\n\n   f\n\nG.\n", ["A b.", "G."]),
        (
            ".. note::\n   :class: big\n\n   :class:`A` is.\n\n.. seealso::\n   :func:`b` and c.\n",
            ["A is.", "b and c."],
        ),
        (
            "Do start|stop|wait, (|a|), (b|c|d), |v|\\ 2.\n",
            ["Do start|stop|wait, (a), (b|c|d), v2."],
        ),
        (".. [#a]\n   Words.\n.. [B84]\n   More\n   yet.\n", ["Words.", "More yet."]),
        (".. Note:: Words.\n   More.\n\n   Yet.\n", ["Words. More.", "Yet."]),
        (".. [1] Of a book,\n   1999.\n.. [#a] B.\n.. [#] C.\n", ["Of a book, 1999.", "B.", "C."]),
        (".. [cit2002] Words.\n.. _a: b\n.. comment\n   of two\n", ["Words."]),
        ("..\n\n    Words.\n\n..\n    Not these.\n", ["Words."]),
        ("- Like so::\n\n      code\n\n  Words.\n", ["Like so:", "Words."]),
        ("Of ``__init__`` and __all__, a_ b__ `c d`_.\n", ["Of __init__ and __all__, a b c d."]),
        (":x:`a $<B:c>` and `d <e>`_ of **f** *g*\n", ["a $<B:c> and d of f g"]),
        (":a b: Like so::\n\n      f\n\n   Words.\n", ["a b: Like so:", "Words."]),
        (":Author: A\n:Date: B\n", ["Author: A", "Date: B"]),
        ("x**2 and 2*3 and **b c** *d*, :v:`X <A_<L>_Y>`\n", ["x**2 and 2*3 and b c d, X"]),
        ("Born in\n1984. Then in\n(b) of it.\n", ["Born in 1984. Then in (b) of it."]),
        ("1. One in\n   1984. So\n2. Two\n", ["One in 1984. So", "Two"]),
        ("H\\ :sub:`2`\\ O is \\*wet\\*.\n", ["H2O is *wet*."]),
    ],
)
def test_prose_of_rest(text, found):
    assert rst_paragraphs(text) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (
            "[Ann]: Good day to you.\n\n[b]: c\n[d]: <e f> 'g'\n[h]: i (j)\n",
            "[Ann]: Good day to you.",
        ),
        ('[Alice]: "I was born," she said.', '[Alice]: "I was born," she said.'),
        ("[1]: Knuth (1997). The Art.", "[1]: Knuth (1997). The Art."),
        ("One.\n\n[a]: <b c> 'T'\n[d]:\n[e]: f (T\\)) \n[g]: h \"T\"", "One."),
        ("(the) x, it is.\n", "(the) x, it is."),
        ("Words.[^1]\n\n[^1]: Of a book.\n", "Of a book."),
        ("|x| is the value of x.\n", "|x| is the value of x."),
        ("| a | b |\n|---|:-:|\n| c | d |\n\nWords.\n", "Words."),
        ("Words.\n\na | c\n--- | :-:\nc | d\n", "Words."),
        ("Words.\n\n> | c | d |\n> |---|---|\n> | e | f\n", "Words."),
        ("One | two.\n---\n", "One | two."),
        ("Words.\n\n<script a='b'>\n\nvar c\n</script><style>\nc\n</style>", "Words."),
        ("Words.\n> <pre><code>\n> x\n>\n> c\n> </code></pre>\n", "Words."),
        ("<svg>\n\nOne\n\n<svg>\nc\n</svg> of it.\n", "of it."),
        ("Words.\n\n<style\n  media='c'>\nc\n</style>\n", "Words."),
        ("<style>\n\nWords.\n", "Words."),
        ("<pre>\nA verse,\nand a verse.\n</pre>\n", "A verse, and a verse."),
        ("Born in\n1984. Then in\n(b) of it.\n", "Born in 1984. Then in (b) of it."),
        ("1. One\n2. Two\n", "Two"),
        ("1. One\n   > a\n2. Two\n\n    Words.\n", "Words."),
        ("- a\n\n    > One\n\n    Two\n", "Two"),
        ("> a\n2. Two\n", "Two"),
        ("- a\nand b\n\n    Words.\n", "Words."),
        ("- Words.\n# b\n\n    code\n", "b"),
        ("> 1. a\n> 2. b\n>    c\n> 3. Three\n", "Three"),
        ("> a\nb and\n", "a b and"),
        ("1. a\n\n    > Words.\n", "Words."),
        (
            "`<div>` of `a_b*` &lt;\\<c\\>, <stdio.h> <i.e. d>\n",
            "<div> of a_b* <<c>, <stdio.h> <i.e. d>",
        ),
        ("<a href='x' b>A</a> *b **c** d* C*-algebra, p* 5*\n", "A b c d C*-algebra, p* 5*"),
        ("## Learning C# ##\n", "Learning C#"),
        ("Words.\n\n!!! note\n\n    Words of a note.\n", "Words of a note."),
        ("`` ` `` and ``a`b``, `c\n", "` and a`b, `c"),
    ],
)
def test_prose_of_markdown(text, found):
    assert markdown_paragraphs(text)[-1] == found and "c" not in markdown_paragraphs(text)


def test_what_nothing_closes_in_markdown_costs_its_length():
    # Hours where each mark looks at the rest of the page, or each blank of a row at the row.
    assert len(markdown_paragraphs(f"One.\n\na | b\n{' ' * 1_000_000}|-x\n")) == 2
    assert not any(map(str.isdigit, "".join(markdown_paragraphs("<script></script>> " * 200_000))))
    for quoted in ("> <script>\n", "> <svg>\n>\n", "<pre><code>\n", "<style>\n</svg>\n"):
        assert not any(map(str.isalpha, "".join(markdown_paragraphs(quoted * 30_000))))


def test_of_markdown_a_script_that_nothing_closes_hides_nothing():
    page = "One.\n\n<script>\na\n\nTwo.\n\n<script>\nb\n</script>\n\nThree.\n"
    assert markdown_paragraphs(page) == ["One.", "a", "Two.", "Three."]
    for name, after in (("svg", "Press <svg>a</svg>."), ("pre", "<pre>\na\n</pre>")):
        begin = "<pre><code>" if name == "pre" else "<svg>"
        for end, kept in (("", ["a"]), (f"</{name}", []), (f"</{name}>", [])):
            found = markdown_paragraphs(f"{begin}\na\n{end}\n\nTwo.\n\n{after}\n")
            assert found[:-1] == [*kept, "Two."]
    code = "One.\n\n\t<script>\n\nTwo.\n\n\t</script>\n"
    assert markdown_paragraphs(code) == ["One.", "Two."]
    quoted = "> <script>\n> a\n\nTwo.\n\n> </script>\n"
    assert markdown_paragraphs(quoted) == ["a", "Two."]


def test_quotes_in_a_tsv_are_text(tmp_path):
    (tmp_path / "a.tsv").write_text('text\tlabel\n"Open, he said\t1\n5" nails.\t0\n"x"\t1\n')
    items, _ = read("tsv", tmp_path)
    assert list(documents(items).values()) == [['"Open, he said'], ['5" nails.'], ['"x"']]


@pytest.mark.parametrize(
    "data",
    [
        b"\0\1\2" * 5000,
        b"x" * 3_000_000,
        b'"' + b"x," * 20_000,
        "id,text\n1,A.\n".encode("utf-16-le"),
    ],
    ids=["binary", "line", "quote", "utf-16"],
)
def test_a_table_that_is_none_is_one_problem(tmp_path, data):
    (tmp_path / "a.csv").write_bytes(data)
    items, _ = read("csv", tmp_path, max_document_bytes=1_000_000)
    assert documents(items) == {} and 1 <= len(problems(items)) <= 2
    assert problems(items)[-1].place == "byte 0" and "no header" in problems(items)[-1].what


# --- marked-up text


@pytest.mark.parametrize("shape", ["folder", "tar", "packed", "glob"])
def test_markup_is_taken_off_by_the_ending_of_the_name(tmp_path, shape):
    folder = tmp_path / "in"
    folder.mkdir()
    texts = {
        "a.HTML": "<html><nav>Menu</nav><p>Some <b>bold</b>\nwords.<p>More.<script>x</script>",
        "b.md": "# Head\n\nSome **bold**\nwords.\n\n```\ncode\n```\n- [More](http://x).\n",
        "c.rst": "Head\n====\n\nSome **bold**\nwords::\n\n    code\n\n* `More <http://x>`_.\n",
        "d.txt": "# Some **bold** words.\n",
        "e.md.txt": "# Some **bold** words.\n",
        "f.html.txt": "Where a < b, not <p> but words.\n",
    }
    for name, text in texts.items():
        data = text.encode()
        packed = shape == "packed"
        (folder / (name + ".gz" * packed)).write_bytes(gzip.compress(data) if packed else data)
    path = folder
    if shape == "tar":
        path = tmp_path / "all.tar"
        with tarfile.open(path, "w") as tar:
            tar.add(folder, arcname=".")
    suffixes = {} if shape == "glob" else {"suffixes": [".html", ".md", ".rst", ".txt"]}
    items, _ = read("text", folder / "*" if shape == "glob" else path, **suffixes)
    found = {name.split("/")[-1].removesuffix(".gz"): p for name, p in documents(items).items()}
    assert found == {
        "a.HTML": ["Some bold words.", "More."],
        "b.md": ["Head", "Some bold words.", "More."],
        "c.rst": ["Head", "Some bold words:", "More."],
        "d": ["# Some **bold** words."],
        "e.md": ["# Some **bold** words."],
        "f.html": ["Where a < b, not <p> but words."],
    }
    for bad in ("md", ".pdf", ".gz", ".", ""):
        with pytest.raises(UserError, match="suffixes"):
            check({"name": "s", "kind": "text", "path": "x", "suffixes": [bad]}, SourceConfig, "c")


@pytest.mark.parametrize("path", ["", [], [""], ["x", ""]])
def test_a_source_without_a_path_is_one_line(path) -> None:
    with pytest.raises(UserError, match="c: path: a path is expected"):
        check({"name": "s", "kind": "text", "path": path}, SourceConfig, "c")


GERMAN = "Größe und Maß."


@pytest.mark.parametrize(
    ("named", "data", "text"),
    [
        ("windows-1252", GERMAN.encode("cp1252"), GERMAN),
        ("iso-8859-1", GERMAN.encode(), GERMAN),
        ("iso-8859-1", b"\xef\xbb\xbf" + GERMAN.encode() + b" \xff", GERMAN),
        ("iso-8859-1", GERMAN.encode() + "é".encode()[:1], GERMAN),  # cut
        (
            "iso-8859-1",
            " ".join([GERMAN] * 10).encode()[:-2] + b").",
            " ".join([GERMAN] * 10)[:-2] + ").",
        ),
        ("iso-8859-1", "It’s his, isn’t it’s".encode() + b"\x62\x80\x99", "It’s his, isn’t it’sb"),
        ("iso-8859-1", "Au café".encode("latin-1"), "Au café"),
        ("iso-8859-1", "Au café, Ã© et Â° là".encode("latin-1"), "Au café, Ã© et Â° là"),
        ("windows-874", "ขนาด".encode("cp874"), "ขนาด"),
        ("iso-8859-9", "“ığ”".encode("cp1254"), "“ığ”"),
        ("iso-2022-jp", "水車".encode("iso2022_jp"), "水車"),
        ("cp99999", GERMAN.encode(), GERMAN),
        ("iso-8859-12", b"\xff " + GERMAN.encode(), GERMAN),
    ],
)
def test_a_page_is_of_the_encoding_that_its_bytes_are_of(tmp_path, named, data, text):
    mark = data[:3] if data.startswith(b"\xef\xbb\xbf") else b""
    page = mark + f'<meta charset="{named}"><p>'.encode() + data[len(mark) :]
    (tmp_path / "a.html").write_bytes(page)
    assert documents(read("text", tmp_path / "a.html")[0]) == {"a.html": [text]}


@pytest.mark.parametrize("named", ["cp037", "cp500", "cp875"])
def test_a_page_whose_named_encoding_holds_no_tags_is_named(tmp_path, named):
    (tmp_path / "a.html").write_bytes(f'<meta charset="{named}"><p>Au café'.encode("latin-1"))
    (problem,) = problems(read("text", tmp_path / "a.html")[0])
    assert problem.what == "bad UTF-8"


@pytest.mark.parametrize(
    "head",
    [
        '<!-- <meta charset="iso-8859-1"> --><meta charset="windows-1251">',
        '<meta name="d" content="charset=iso-8859-5"><meta charset=windows-1251>',
        '<?xml version="1.0" encoding="iso-8859-1"?>'
        '<meta content="text/html; charset = windows-1251" http-equiv="Content-Type">',
        '<?xml version="1.0" encoding="windows-1251"?>',
    ],
)
def test_an_encoding_is_named_where_a_browser_looks(tmp_path, head):
    text = "Все счастливые семьи похожи друг на друга."
    (tmp_path / "a.html").write_bytes(f"{head}<p>{text}".encode("cp1251"))
    assert documents(read("text", tmp_path / "a.html")[0]) == {"a.html": [text]}


def test_memory_does_not_grow_with_the_units_of_a_table(tmp_path):
    columns = {f"c{n}": ["x"] * 300 for n in range(20)} | {"text": ["Words."] * 300}
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=1)
    unit_bytes = path.stat().st_size // 20
    read("parquet", path, unit_bytes)

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    grown = []
    for _ in range(3):  # of a large process the allocator may keep some, once
        before = resident()
        items, units = read("parquet", path, unit_bytes)
        assert units >= 10 and len(items) == 300
        grown.append(resident() - before)
    assert min(grown) < 150_000_000


def test_a_text_of_7_bits_is_named(tmp_path):
    (tmp_path / "a.txt").write_bytes("水車".encode("iso2022_jp"))
    (problem,) = problems(read("text", tmp_path)[0])
    assert problem.what.startswith("not text: of 7 bits")
    (tmp_path / "a.html").write_bytes(bytes(range(128, 256)) * 70 + b"\x1b$")
    (problem,) = problems(read("text", tmp_path / "a.html")[0])
    assert "NUL or bad UTF-8" in problem.what


@pytest.mark.parametrize("head", ["", "<meta charset=utf-8>", "<script>x</script><link rel=y>"])
def test_a_page_without_a_head_and_a_body_is_kept(tmp_path, head):
    page = f"<!doctype html>{head}<title>t</title><main><p>One.</main><section>Two.</section>Three."
    (tmp_path / "a.html").write_text(page)
    assert documents(read("text", tmp_path, suffixes=[".html"])[0]) == {
        "a.html": ["One.", "Two.", "Three."]
    }


@pytest.mark.parametrize("kind", ["text", "books"])
@pytest.mark.parametrize("layout", ["<pre>{}</pre>", "<section><div>{}</div></section>"])
def test_of_a_gutenberg_book_in_html_the_header_and_licence_are_cut(tmp_path, kind, layout):
    begin = "*** START OF THE PROJECT GUTENBERG EBOOK X ***"
    header = ["The Project Gutenberg eBook of X", "Terms of use.", begin, "Produced by A Reader"]
    licence = ["*** END OF THE PROJECT GUTENBERG EBOOK X ***", "Of use.", "Project Gutenberg-tm."]
    between = "\n\n" if "pre" in layout else "</div>\n<div>"
    around = [layout.format(between.join(lines)) for lines in (header, licence)]
    body = "".join(f"<p>{words}</p>\n" for words in document(3, 20))
    (tmp_path / "a.html").write_text(f"{around[0]}<h1>X</h1>{body}{around[1]}")
    items, _ = read(kind, tmp_path, suffixes=[".html"])
    assert documents(items) == {"a.html": ["X", *document(3, 20)]}


# --- what a file looks like


@pytest.mark.parametrize(
    ("kind", "name", "data", "looks"),
    [
        ("jsonl", "a.jsonl", b"id,text\n1,words\n2,more\n", r"CSV \(kind csv\)"),
        ("jsonl", "a.jsonl", b"id\ttext\n1\twords\n", r"TSV \(kind tsv\)"),
        ("jsonl", "a.json", b'[{"text": "x"},\n{"text": "y"}]', r"a JSON array \(write one object"),
        ("csv", "a.csv", b'{"text": "a, b"}\n{"text": "c"}\n', r"JSON lines \(kind jsonl\)"),
        ("text", "a.csv", b"id,text\n1,words\n2,more\n", r"CSV \(kind csv\)"),
        ("text", "a.txt", b'{"text": "x"}\n', r"JSON lines \(kind jsonl\)"),
        ("text", "a.txt", b"<!DOCTYPE html>\n<p>x", r"HTML \(kind text reads .html\)"),
        ("text", "a.txt", b"%PDF-1.7\n\xff", "PDF"),
        ("text", "a.txt", rb"{\rtf1\ansi Words.\par}", r"RTF \(save it as text\)"),
        ("text", "a.txt", b"%!PS-Adobe-3.0\n(Words.) show\n", "PostScript"),
        (
            "sentences",
            "a.txt",
            "Words.\n".encode("utf-16") * 9,
            r"UTF-16 text \(save it as UTF-8\)",
        ),
        ("text", "a.txt", b'<?xml version="1.0"?><a>Words.</a>', "XML"),
        ("text", "a.txt", b'<feed lang="en" xmlns="http://x">Words.</feed>', "XML"),
        ("text", "a.txt", b'["Words.", "More."]', "a JSON array"),
        ("wikipedia", "a.xml", b"PAR1...", r"parquet \(kind parquet\)"),
        (
            "parquet",
            "a.parquet.gz",
            gzip.compress(b"<mediawiki>", mtime=0),
            r"a Wikipedia dump \(kind wiki",
        ),
    ],
)
def test_a_source_of_another_kind_is_told_before_the_work(tmp_path, kind, name, data, looks):
    for n in range(3):
        (tmp_path / f"{n}{name}").write_bytes(data)
    with pytest.raises(
        UserError, match=f"0{name}: kind {kind} does not read it; it looks like {looks}"
    ):
        list_files(SourceConfig(name="s", kind=kind, path=f"{tmp_path}/*"))
    # One file among others is broken input, and no reason to stop.
    (tmp_path / f"0{name}").write_bytes(b"Words.")
    assert len(list_files(SourceConfig(name="s", kind=kind, path=f"{tmp_path}/*"))) == 3


@pytest.mark.parametrize(
    "text", ["<s> hello", "<unk>", "<|endoftext|> x", "[[Note]] x", '["Yes," he said]', "< 3 words"]
)
def test_a_text_that_begins_with_a_mark_is_a_text(tmp_path, text):
    (tmp_path / "a.txt").write_text(text)
    assert documents(read("text", tmp_path)[0]) == {"a": [text]}


# --- paths


def test_missing_paths_are_named(tmp_path):
    with pytest.raises(UserError, match="nowhere"):
        read("text", tmp_path / "nowhere")
    for name in ("a.md", "b.md", "c.rst.gz"):
        (tmp_path / name).touch()
    with pytest.raises(
        UserError, match=r"no such files as kind parquet reads \(.parquet\); there are 2 .md, 1 .gz"
    ):
        read("parquet", tmp_path)


def test_paths_inside_packages_need_no_import(tmp_path, monkeypatch):
    (tmp_path / "odd_package" / "in").mkdir(parents=True)
    for folder in (tmp_path / "odd_package", tmp_path / "odd_package" / "in"):
        (folder / "__init__.py").write_text("raise SystemExit(0)")
    monkeypatch.syspath_prepend(tmp_path)
    assert resolve("package:sqlite3/dump.py").endswith("sqlite3/dump.py")
    assert resolve("package:odd_package.in/a.txt") == str(tmp_path / "odd_package" / "in" / "a.txt")
    for path in ("nosuchpackage", "odd_package.no", "odd_package..in", "odd_package.", "a." * 5000):
        with pytest.raises(UserError, match="is not installed"):
            resolve(f"package:{path}/x")


def test_the_index_of_a_multistream_dump_is_not_taken_for_text(tmp_path):
    write_dump(tmp_path / "multi.xml.bz2")
    (tmp_path / "enwiki-multistream-index.txt.bz2").write_bytes(bz2.compress(b"0:1:Page"))
    source = SourceConfig(name="s", kind="wikipedia", path=str(tmp_path / "*.bz2"))
    assert [p.rsplit("/", 1)[1] for p in list_files(source)] == ["multi.xml.bz2"]


@pytest.mark.parametrize("pattern", ["", "/*.txt"])
def test_text_about_a_multistream_index_is_text(tmp_path, pattern):
    for name in ("a.txt", "the multistream-index.txt"):
        (tmp_path / name).write_text("Some text.")
    source = SourceConfig(name="s", kind="text", path=f"{tmp_path}{pattern}")
    assert len(list_files(source)) == 2


# --- odd files


@pytest.mark.parametrize("as_json", [False, True])
def test_a_byte_order_mark_costs_no_document(tmp_path, as_json):
    folder = tmp_path / "wiki"
    folder.mkdir()
    text = wikiextractor(PAGES).encode()
    if as_json:
        rows = [{"id": n, "title": "T", "text": "\n".join(p)} for n, p in ARTICLES.items()]
        text = "\n".join(map(json.dumps, rows)).encode()
    (folder / "wiki_00").write_bytes(b"\xef\xbb\xbf" + text)
    (folder / "wiki_01.gz").write_bytes(gzip.compress(b"\xef\xbb\xbf" + text))
    items, _ = read("wikiextractor", folder)
    assert len(items) == 2 * len(PAGES)
    assert set(documents(items)) == set(ARTICLES)


@pytest.mark.parametrize("unit_bytes", [2_000, 10**9])
def test_what_is_no_document_in_a_wikiextractor_folder_is_named_once_a_file(tmp_path, unit_bytes):
    folder = tmp_path / "wiki"
    folder.mkdir()
    (folder / "wiki_00").write_text(wikiextractor(PAGES))
    (folder / "wiki_01").write_text("Text of another kind.\nAnd more.\n")
    items, _ = read("wikiextractor", folder, unit_bytes)
    assert documents(items).keys() == ARTICLES.keys()
    problems = [item for item in items if isinstance(item, Problem)]
    assert [(p.file[-2:], p.place) for p in problems] == [("01", "byte 0")]


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("unit_bytes", [300, 1000, 10**9])
def test_no_flipped_bit_costs_a_wikiextractor_document_unsaid(tmp_path, as_json, unit_bytes):
    data = wikiextractor(range(1, 6)).encode()
    marks = rb"</doc>\n|<doc id=|>\n"
    if as_json:
        rows = [{"id": n, "title": "T", "text": "\n".join(document(n))} for n in range(1, 6)]
        data, marks = "".join(json.dumps(row) + "\n" for row in rows).encode(), rb'\{"id|\}\n'
    path = tmp_path / "wiki_00"
    for at in sorted({at for mark in re.finditer(marks, data) for at in range(*mark.span())}):
        for bit in (0, 3, 6):
            path.write_bytes(data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :])
            items, _ = read("wikiextractor", path, unit_bytes)
            found = [item for item in items if isinstance(item, Document)]
            assert len(found) == 5 or (len(found) < 5 and len(items) > len(found)), (at, bit)


@pytest.mark.parametrize("first", ["", "\ufeff", "article"])
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("unit_bytes", [300, 1000, 10**9])
def test_a_brace_in_a_wikiextractor_document_is_text_wherever_a_part_begins(
    tmp_path, unit_bytes, mixed, first
):
    article = json.dumps({"id": 99, "title": "J", "text": "\n".join(document(99))})
    pages = wikiextractor(range(1, 41)).split("</doc>\n")
    pages = [page + f"\n{article}\n{{ a set }}\n" * (n % 3 < 2) for n, page in enumerate(pages)]
    text = "</doc>\n".join(pages[:-1]) + "</doc>\n"
    if mixed:  # an article between two documents, and text that is none
        at = text.index("<doc", len(text) // 2)
        lines = [article.replace("99", str(n)) for n in range(50, 53)]
        text = text[:at] + "\n".join([*lines, "of nothing", ""]) + text[at:]
    text = (first if first != "article" else f"{article}\n") + text
    (tmp_path / "wiki_00").write_text(text, encoding="utf-8")
    items, units = read("wikiextractor", tmp_path, unit_bytes)
    ids = [item.id for item in items if isinstance(item, Document)]
    more = [*(range(50, 53) if mixed else ()), *([99] if first == "article" else ())]
    assert sorted(map(int, ids)) == [*range(1, 41), *more]
    told = [(p.place, p.what) for p in items if isinstance(p, Problem)]
    byte = text.encode().find(b"of nothing")
    assert told == [(f"byte {byte}", "text outside of any document")] * mixed
    assert units > 1 or unit_bytes == 10**9


@pytest.mark.parametrize("unit_bytes", [300, 10**9])
def test_each_wikiextractor_document_without_a_beginning_is_named(tmp_path, unit_bytes):
    path = tmp_path / "wiki_00"
    text = wikiextractor(range(1, 8))
    path.write_text(
        text.replace('<doc id="3"', '<dog id="3"').replace('<doc id="6"', '<doc if="6"')
    )
    items, _ = read("wikiextractor", path, unit_bytes)
    assert documents(items).keys() == set("12457")
    assert [p.what for p in items if isinstance(p, Problem)] == [
        "text outside of any document",
        "a <doc> line that cannot be read",
    ]


@pytest.mark.parametrize("unit_bytes", [300, 10**9])
def test_text_in_the_lines_of_a_wikiextractor_documents_marks_is_not_passed_over(
    tmp_path, unit_bytes
):
    path = tmp_path / "wiki_00"
    text = wikiextractor(range(1, 8))
    first = "Words that stand in one line with a mark of it."
    text = text.replace('Page 3">\nPage 3\n', f'Page 3">{first}\n')
    text = text.replace("</doc>\n", f"</doc> {first}\n", 2).replace("</doc>\n", "</doc> \n", 2)
    path.write_text(text)
    items, _ = read("wikiextractor", path, unit_bytes)
    assert documents(items) == {str(n): [first] * (n == 3) + document(n) for n in range(1, 8)}
    told = [p.what for p in items if isinstance(p, Problem)]
    assert told == ["text outside of any document"] * 2


@pytest.mark.parametrize("again", ["text", r"te\u0078t", r"\u0074\u0065\u0078\u0074"])
@pytest.mark.parametrize("kind", ["jsonl", "wikiextractor"])
def test_a_text_that_stands_twice_in_a_row_is_named(tmp_path, kind, again):
    good = {"id": 1, "title": "", "text": "\n".join(document(1)), "of": {"text": '"text"'}}
    twice = f'{{"id": 2, "title": "", "text": "The one.", "{again}": "The other."}}'
    (tmp_path / "a.jsonl").write_text(f"{json.dumps(good)}\n{twice}\n")
    items, _ = read(kind, tmp_path / "a.jsonl")
    assert documents(items).keys() == {"1"}
    assert ["stands there twice" in p.what for p in items if isinstance(p, Problem)] == [True]


@pytest.mark.parametrize(
    "key", ["text", "text/en", 'a "b"', "\\", "слово", "\U0001f600", "a.b", ""]
)
def test_a_key_is_known_however_json_spells_it(key):
    units = key.encode("utf-16-be").hex()
    every = "".join("\\u" + units[n : n + 4] for n in range(0, len(units), 4))
    spelled = [f'"{every}"', f'"{every.upper().replace("U", "u")}"', json.dumps(key)]
    spelled += [json.dumps(key, ensure_ascii=False), json.dumps(key).replace("/", "\\/")]
    for one in spelled:
        for other in spelled:
            line = f'{{{one}: {json.dumps(key * 9)}, "other": {{{other}: [{one}]}}, "x": "text"}}'
            assert not parts.stands_twice(line.encode(), key)
            assert parts.stands_twice(f"{line[:-1]}, {other}: 1}}".encode(), key)


@pytest.mark.parametrize("kind", ["jsonl", "wikiextractor"])
@pytest.mark.parametrize("data, count", [(b"\\ud83d", 1), (b"\xed\xa0\xbd\xed\xb8\x80", 2)])
def test_halves_of_surrogate_pairs_are_named(tmp_path, kind, data, count):
    row = json.dumps({"id": 1, "text": "\n".join(document(1)) + " \U0001f600 @"}).encode()
    (tmp_path / "a.jsonl").write_bytes(row.replace(b"@", data))
    items, _ = read(kind, tmp_path / "a.jsonl")
    assert documents(items).keys() == {"1"}
    (told,) = [item.what for item in items if isinstance(item, Problem)]
    assert told == f"{count} halves of surrogate pairs in the text"


def test_rows_of_jsonl_that_are_bad_are_named_and_the_rest_is_read(tmp_path):
    good = {"id": None, "text": "One \ud800lone surrogate."}
    rows = [json.dumps(good), '{"id": 1}', "[" * 100_000, '"text"', json.dumps(good)]
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    items, _ = read("jsonl", tmp_path / "a.jsonl")
    assert list(documents(items).values()) == [["One lone surrogate."]] * 2
    told = [item.what for item in items if isinstance(item, Problem)]
    assert len(told) == 5
    assert [what for what in told if "halves" in what] == [
        "1 halves of surrogate pairs in the text"
    ] * 2
    (tmp_path / "b.jsonl").write_text('{"body": "The key is wrong."}\n')
    with pytest.raises(UserError, match="byte 0: no field 'text'; there are: body"):
        read("jsonl", tmp_path / "b.jsonl")


@pytest.mark.parametrize("name", ["books.tar.xz", "books.zip", "a.txt.7z"])
def test_unknown_packings_are_refused_and_not_read_as_text(tmp_path, name):
    (tmp_path / name).write_bytes(b"\xfd7zXZ" * 100)
    with pytest.raises(UserError, match=f"{name}: packed in a way that is not read"):
        read("books", tmp_path / name)


def test_a_tar_packed_by_zstd_is_a_tar(tmp_path):
    (tmp_path / "a.txt").write_text("The text of a book.")
    with tarfile.open(tmp_path / "books.tar", "w") as archive:
        archive.add(tmp_path / "a.txt", "a.txt")
    packed = zstandard.compress((tmp_path / "books.tar").read_bytes())
    (tmp_path / "books.tar.zst").write_bytes(packed)
    items, _ = read("books", tmp_path / "books.tar.zst")
    assert documents(items) == {"a": ["The text of a book."]}
    (tmp_path / "books.tar.zst").write_bytes(packed[:-5])
    items, _ = read("books", tmp_path / "books.tar.zst")
    assert [type(item) for item in items][-1:] == [Problem]


def test_names_stay_when_a_source_grows(tmp_path):
    def names(path):
        return set(list_files(SourceConfig(name="s", kind="books", path=path)).values())

    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.epub.txt").write_text("One book.")
    (tmp_path / "a" / "y.txt").write_text("Another.")
    for path, expected in (
        (str(tmp_path), {"a/x", "a/y"}),
        (f"{tmp_path}/*/*.txt", {"a/x", "a/y"}),
        ((f"{tmp_path}/a", f"{tmp_path}/b/"), None),
    ):
        before = names(path) if expected else names(f"{tmp_path}/a")
        assert before == (expected or {"x", "y"})
        (tmp_path / "b").mkdir(exist_ok=True)
        (tmp_path / "b" / "x.txt").write_text("A third.")
        after = names(path)
        assert before < after and len(after) == 3
        (tmp_path / "b" / "x.txt").unlink()


def test_links_to_folders_above_are_not_followed(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.txt").write_text("One book.")
    (tmp_path / "a" / "up").symlink_to("..")
    (tmp_path / "b").symlink_to("a")
    files = list_files(SourceConfig(name="s", kind="books", path=str(tmp_path)))
    assert set(files.values()) == {"a/x"}


def test_tags_that_part_lines_part_words() -> None:
    text = "Jane Doe<br>of <b>some</b>where<br/>or <i>other</i>"
    parted = "Jane Doe of somewhere or other"
    assert markdown_paragraphs(text) == [parted]
    assert clean_line(text) == parted
    assert passages(text) == [parted]
    for name in ("p", "div", "center", "blockquote"):
        assert passages(f"one<{name}>two") == ["one", "two"]
        assert passages(f"one</{name}>two") == ["one", "two"]
    assert markdown_paragraphs("<p>One</p><p>Two</p><ul><li>a</li><li>b</li></ul>") == [
        "One Two a b"
    ]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("As shown before [1][2] and by arr[0][1].", "As shown before [1][2] and by arr[0][1]."),
        ("See [a b][c], [d][] and [e](x.md).", "See a b, d and e."),
        ("[a](<x y> 'T'), [b](x \"T (u)\"), [c](w/F_(g)).", "a, b, c."),
        ("A [[paper]](http://a.b/c), [one [of 2] of](d.pdf).", "A [paper], one [of 2] of."),
        ("He wrote [sic](as he often did) that.", "He wrote [sic](as he often did) that."),
        ('=== "Linux"\n\n    Words of it.\n', "Words of it."),
    ],
)
def test_links_of_markdown_lose_no_words(text: str, shown: str) -> None:
    assert markdown_paragraphs(text)[-1] == shown


@pytest.mark.parametrize(
    ("text", "paragraphs"),
    [
        ("Write `<!--` before it and `-->` behind.", ["Write <!-- before it and --> behind."]),
        ("```\n<!-- a\n```\n\nOne.\n\n~~~\nb -->\n~~~\n\nTwo.", ["One.", "Two."]),
        ("One \\<!-- and --> two.", ["One <!-- and --> two."]),
        # A line of a comment is not blank: what is indented behind it is no code.
        ("<div>\n    <!-- a -->\n    <p>One</p>\n</div>", ["One"]),
        ("One\n> <!-- a\n> b --> <!-- c -->\n    two", ["One", "two"]),
        ("- One\n<!-- a -->\n\n    Two\n", ["One", "Two"]),
        ("One\n\n<!-- a -->\n    code\n\nTwo <!-- a -->\n<!-- b -->three", ["One", "Two three"]),
        ("One <!-- ` --> two ` <!-- three --> four.", ["One two ` four."]),
        ("One `a\n\nTwo <!-- b` --> three.", ["One `a", "Two three."]),
    ],
)
def test_code_of_markdown_begins_no_comment(text: str, paragraphs: list[str]) -> None:
    assert markdown_paragraphs(text) == paragraphs


@pytest.mark.parametrize(
    ("before", "shown"),
    [
        ("Put three backticks (```) around it.", ["Put three backticks () around it."]),
        ("Put ```a around it.", ["Put a around it."]),
        ('```python\nprint("```")\n```', []),
        ("```sh\na\n\nThen use it:\n\n```python\nb\n```", []),  # a line is lost
        ("````\na\n```\n\n~~~\n````", []),
        ("- ```\n  a\n  ```", []),
        ("> ```\n> a", []),
        ("Zero <!-- x -> is shown.", ["Zero <!-- x -> is shown."]),
        ("- It`s <!-- x ->\n- Don`t <!-- y -->", ["It`s <!-- x ->", "Don`t"]),
        ("## A <!-- x\nB\n## C <!-- y -->", ["A <!-- x", "B", "C"]),
        ("A <!-- x\n***\nB <!-- y\n\n> C -->", ["A <!-- x", "B <!-- y", "C -->"]),
        ("> A <!-- x\n> y -->", ["A"]),
        ("- <!-- x -> A\n- B <!-- y -->", ["<!-- x -> A", "B"]),
        ("- A\n\n  <!-- x ->\n  B\n- C\n\n  <!-- y -->", ["A", "<!-- x -> B", "C"]),
        ("A\n\n  <!-- x\ny -->", ["A"]),
        ("- A\n  <!--\n  - x\n    - y\n  -->\n- B", ["A", "B"]),
        ("- <!-- x\n  - y -->\n  B\n- C", ["B", "C"]),
        ("- A\n  - B\n    <!-- x ->\n  - C\n    <!-- y\n    1. z -->", ["A", "B <!-- x ->", "C"]),
        ("> <!-- x ->\n> A\n\nB <!-- y -->", ["<!-- x -> A", "B"]),
        ("*   ```\n    a\n    ```\n\n    A\n\n    -   B", ["A", "B"]),
        ("- <!-- x\n  y --> A\n> <!-- x\n> y -->", ["A"]),
    ],
)
def test_code_and_comments_begin_and_end_in_step(before: str, shown: list[str]) -> None:
    page = f"{before}\n\n<!-- a -->\n\nOne.\n\n```html\n<!-- b\n```\n\nTwo.\n\n<!-- c -->\n\nThree."
    assert markdown_paragraphs(page) == [*shown, "One.", "Two.", "Three."]


@pytest.mark.parametrize("unit", ["  <!-- a\n", "  <!-- a -->\n", "- a <!-- b\n", "> <!-- a\n"])
def test_comments_of_one_item_or_quotation_cost_no_square(unit: str) -> None:
    assert len("".join(markdown_paragraphs("- Words.\n" + unit * 50_000))) <= 50_010 * len(unit)


def test_what_entities_stand_for_is_cleaned_as_all_else() -> None:
    line = "Donau&shy;dampf in a cafe&#769; is&#8203; not far, by the river&#8232;and the hill."
    clean = "Donaudampf in a caf\u00e9 is not far, by the river and the hill."
    for reader in (html_paragraphs, markdown_paragraphs, rst_paragraphs):
        assert reader(line) == [clean], reader
    assert html_paragraphs(f"<pre>{line}</pre>") == [clean]
    assert clean_line(line) == clean


@pytest.mark.parametrize("unit_bytes", [60, 1_000_000])
def test_a_row_without_its_column_is_named_wherever_parts_begin(tmp_path, unit_bytes):
    rows = [json.dumps({"id": n, "text": f"Words of row {n} here."}) for n in range(100)]
    rows[40:45] = [json.dumps({"id": n}) for n in range(40, 45)]
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    items, units = read("jsonl", tmp_path / "a.jsonl", unit_bytes=unit_bytes)
    assert (units > 10) == (unit_bytes == 60) and len(documents(items)) == 95
    assert [problem.what for problem in problems(items)] == ["no field 'text'"] * 5


def test_what_nobody_has_foreseen_names_file_and_place(tmp_path, monkeypatch):
    """So that a user can take the page out, and tell it."""

    def reader(given, records):
        yield Document("first", ["Words."])
        raise IndexError("a fault of ours")

    kind = dataclasses.replace(KINDS["text"], read=reader)
    monkeypatch.setitem(KINDS, "text", kind)
    (tmp_path / "a.txt").write_text("Words.")
    with pytest.raises(IndexError) as caught:
        read("text", tmp_path)
    assert caught.value.__notes__ == [f"{tmp_path}/a.txt: while it was read behind 'first'"]
