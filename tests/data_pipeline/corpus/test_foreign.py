"""Files that are damaged, hostile or not what they seem: nothing is lost or altered without a word,
nothing takes more memory than the largest document, nothing hangs."""

import bz2
import errno
import gzip
import inspect
import io
import json
import lzma
import os
import re
import signal
import subprocess
import sys
import tarfile
import tracemalloc
import zipfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from configs.load import load, override
from core.errors import UserError
from data_pipeline.corpus import archives, compressed, parts, wikitext
from data_pipeline.corpus.documents import Document, Dropped
from data_pipeline.corpus.job import plan_job
from data_pipeline.corpus.markup import markdown_paragraphs, rst_paragraphs
from data_pipeline.corpus.parquet import Parquet
from data_pipeline.corpus.prepare import PrepareConfig, Ranks, prepare
from data_pipeline.corpus.shards import iterate_documents
from data_pipeline.corpus.sources import SourceConfig, list_files, plan_units, read_unit, resolve
from data_pipeline.corpus.tokenizer import Tokenizer
from data_pipeline.corpus.units import SegmentedDocument, Tally, documents_of, encode_unit
from tests.data_pipeline.corpus.text import (
    document,
    documents,
    dump,
    multistream,
    problems,
    read,
    wikiextractor,
    with_peak,
    write_config,
    write_vocabulary,
)

BOOKS = {f"x/book{n}": document(n, 3) for n in range(8)}


@pytest.fixture(autouse=True)
def no_hang():
    """What is quadratic takes minutes here, what is linear less than a second."""

    def stop(*_):
        raise AssertionError("still at work after a minute")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def tar_of(books, **more):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", **more) as tar:
        for name, paragraphs in books.items():
            data = "\n".join(paragraphs).encode()
            member = tarfile.TarInfo(f"{name}.txt")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def table_of(name, stands):
    """A table of one column whose `name` stands otherwise in its file."""
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({name.decode(): ["Some words."]}), buffer)
    return buffer.getvalue().replace(name, stands)


def flipped(data, at, bit):
    data = bytearray(data)
    data[at] ^= 1 << bit
    return bytes(data)


def prepared(tmp_path, source, **more):
    write_vocabulary(tmp_path / "vocab.txt")
    more = {"heldout_fraction": 0, **more}
    config = write_config(tmp_path / "c.yaml", tmp_path / "vocab.txt", [source], **more)
    return prepare(load(config, PrepareConfig), Ranks(), fresh=(tmp_path / "out").exists())


# --- archives


def test_a_flipped_bit_in_the_header_of_a_tar_is_named(tmp_path):
    data = tar_of(BOOKS)
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        headers = [member.offset for member in tar]
    random = np.random.Generator(np.random.Philox(1))
    path = tmp_path / "b.tar"
    for header in headers:
        at, bit = header + int(random.integers(512)), int(random.integers(8))
        path.write_bytes(flipped(data, at, bit))
        items, _ = read("books", path)
        (problem,) = problems(items)
        assert problem.place == f"byte {header}" and "bad header" in problem.what
        assert documents(items) == dict(list(BOOKS.items())[: headers.index(header)])


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress])
def test_a_flipped_bit_in_a_packed_tar_is_never_passed_over(tmp_path, pack):
    data = pack(tar_of(BOOKS))
    random = np.random.Generator(np.random.Philox(2))
    path = tmp_path / ("b.tar.gz" if pack is gzip.compress else "b.tar.bz2")
    for _ in range(60):
        at, bit = int(random.integers(10, len(data))), int(random.integers(8))
        path.write_bytes(flipped(data, at, bit))
        items, _ = read("books", path)
        assert documents(items) == BOOKS or problems(items)


@pytest.mark.parametrize(
    ("name", "pack", "trained"),
    [
        ("b.tar.gz", gzip.compress, False),
        ("b.tar.bz2", bz2.compress, False),
        ("b.tar.zst", zstandard.ZstdCompressor(write_checksum=True).compress, False),
        ("b.jsonl.gz", gzip.compress, True),
    ],
)
def test_no_altered_text_of_a_packed_file_gets_into_a_shard(
    tmp_path, monkeypatch, name, pack, trained
):
    """The texts are noise, of which a flip makes other noise: the sum at the end alone tells."""
    monkeypatch.setattr(compressed, "CHUNK", 2048)  # as if the file were large
    random = np.random.Generator(np.random.Philox(5))
    books = {f"{n}": [" ".join(random.bytes(600).hex())] for n in range(8)}
    rows = "".join(json.dumps({"id": n, "text": p[0]}) + "\n" for n, p in books.items())
    kind = "books" if "tar" in name else "jsonl"
    data = pack(tar_of(books) if kind == "books" else rows.encode())
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / name.replace("b.", "c.")).write_bytes(data)
    source = {"name": "s", "kind": kind, "path": str(tmp_path / "whole"), "sentences": "lines"}
    more = {"vocabulary": {"size": 400, "unused": 0}} if trained else {}
    prepared(tmp_path, source, **more)
    right = {d.ids.tobytes() for d in iterate_documents(tmp_path / "out")}
    (tmp_path / "whole" / name).write_bytes(flipped(data, len(data) * 2 // 3, 1))
    if trained:
        more["vocabulary"] = {"path": str(tmp_path / "kept.txt")}
        (tmp_path / "out" / "vocab.txt").rename(tmp_path / "kept.txt")
    manifest = prepared(tmp_path, source, duplicates={"exact": False}, **more)
    found = [d.ids.tobytes() for d in iterate_documents(tmp_path / "out")]
    assert set(found) == right
    assert manifest.sources[0].notes["broken inputs"] == 1


@pytest.mark.parametrize(("kind", "key"), [("jsonl", b'"text"'), ("tsv", b"\ttext")])
def test_a_damaged_name_of_a_column_of_a_packed_file_costs_that_file_alone(
    tmp_path, monkeypatch, kind, key
):
    monkeypatch.setattr(compressed, "CHUNK", 2048)  # as if the file were large
    rows = [{"id": n, "text": " ".join(document(n))} for n in range(8)]
    lines = [json.dumps(row) if kind == "jsonl" else f"{row['id']}\t{row['text']}" for row in rows]
    data = gzip.compress("\n".join(["id\ttext", *lines][kind == "jsonl" :]).encode(), 0)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / f"b.{kind}.gz").write_bytes(data)
    (tmp_path / "in" / f"a.{kind}.gz").write_bytes(flipped(data, data.index(key) + 2, 1))
    manifest = prepared(tmp_path, {"name": "s", "kind": kind, "path": str(tmp_path / "in")})
    (source,) = manifest.sources
    assert source.documents_out == 8 and source.notes["broken inputs"] == 1


def test_a_tar_that_is_cut_or_goes_on_is_named(tmp_path):
    data = tar_of(BOOKS, format=tarfile.USTAR_FORMAT)
    end = max(at for at in range(0, len(data), 512) if data[at : at + 512].strip(b"\0")) + 512
    path = tmp_path / "b.tar"
    for cut in range(512, end + 1024, 512):
        path.write_bytes(data[:cut])
        items, _ = read("books", path)
        assert problems(items), cut
        assert documents(items).items() <= BOOKS.items()
    path.write_bytes(data[: end + 1024])
    assert problems(read("books", path)[0]) == []
    path.write_bytes(data + tar_of({"second": document(99)}))
    items, _ = read("books", path)
    assert "after the end of the archive" in problems(items)[0].what
    path.write_bytes(data[:end] + bytes(tarfile.RECORDSIZE))  # as tar itself ends a file
    assert problems(read("books", path)[0]) == []
    path.write_bytes(data[:end] + bytes(2 * tarfile.RECORDSIZE + 512))
    items, _ = read("books", path)
    assert "zeros at the end" in problems(items)[0].what and documents(items) == BOOKS
    for size in (100 * 512, 1 << 20):  # as `tar -b` does, or as if members were overwritten
        path.write_bytes(data[:end].ljust(size, b"\0"))
        items, _ = read("books", path)
        assert "large records (tar -b), or members are lost" in problems(items)[0].what
        assert documents(items) == BOOKS
    path.write_bytes(data[: end + 1500])
    assert "its end blocks are cut" in problems(read("books", path)[0])[0].what
    path = tmp_path / "packed.tar.gz"
    path.write_bytes(gzip.compress(data[:end] + bytes(2 * tarfile.RECORDSIZE + 512)))
    assert problems(read("books", path)[0]) == []


def test_files_of_other_endings_in_a_tar_are_counted(tmp_path):
    (tmp_path / "b.tar").write_bytes(tar_of({"x/a.md": ["Words."], **BOOKS}))
    for unit_bytes in (10**9, 1000):
        items, _ = read("books", tmp_path, unit_bytes, suffixes=[".md.txt", ".tar"])
        found = {item.id for item in items if isinstance(item, Document)}
        dropped = {item.id: item.reason for item in items if isinstance(item, Dropped)}
        assert found == {"x/a.md"} and len(items) == 1 + len(BOOKS)
        assert dropped == {f"{name}.txt": "other ending" for name in BOOKS}


def test_members_overwritten_with_zeros_are_named_whatever_the_size_of_the_tar(tmp_path):
    """Where the zeros begin within a text; tars of the usual records and of a round size."""
    books = {f"{n}": document(n, 40) for n in range(8)}
    data = tar_of(books).ljust(1 << 17, b"\0")
    for size in (data.rindex(b".") // 512 * 512, data.index(b"\0", 9 << 10) - 2000):
        (tmp_path / "b.tar").write_bytes(data[:size].ljust(len(data), b"\0"))
        items, _ = read("books", tmp_path)
        assert "NUL" in problems(items)[0].what


def test_a_hole_of_zeros_in_a_text_is_named(tmp_path):
    words = " ".join(p for n in range(9) for p in document(n)).encode()
    text = words[:2000] + bytes(100) + words[2100:]
    row = {"id": 1, "title": "T", "text": text.decode()}
    for kind, data in (
        ("text", text),
        ("sentences", text),
        ("wikiextractor", b'<doc id="1" title="T">\n' + text + b"\n</doc>\n"),
        ("wikiextractor", json.dumps(row).encode()),
        ("jsonl", json.dumps(row).encode()),
        ("csv", b"id,text\n1," + text.replace(b",", b"")),
        ("parquet", b""),
    ):
        path = tmp_path / f"a.{kind}"
        path.write_bytes(data)
        if kind == "parquet":
            pyarrow.parquet.write_table(pyarrow.table({"text": [row["text"]]}), path)
        (problem,) = problems(read(kind, path)[0])
        assert problem.what == "100 NUL characters in the text"


@pytest.mark.parametrize("kind", ["text", "jsonl", "wikipedia"])
@pytest.mark.parametrize("ending", [".gz", ".bz2", ".zst"])
@pytest.mark.parametrize("size", [0, 5000])
def test_a_packed_file_without_data_is_named(tmp_path, kind, ending, size):
    """As a download leaves it that was not begun, or whose room was taken before."""
    path = tmp_path / f"a{ending}"
    path.write_bytes(bytes(size))
    (problem,) = problems(read(kind, path)[0])
    assert problem.what.startswith("not ") and "though its name says so" in problem.what


@pytest.mark.parametrize("kind", ["jsonl", "csv", "tsv", "wikiextractor", "sentences"])
@pytest.mark.parametrize("pack", [bytes, gzip.compress, bz2.compress])
def test_a_file_of_documents_without_a_byte_is_named(tmp_path, kind, pack):
    path = tmp_path / "a"
    path.write_bytes(pack(b""))
    (problem,) = read(kind, path)[0]
    assert (problem.place, problem.what) == ("byte 0", "an empty file")


@pytest.mark.parametrize("unit_bytes", [2000, 10**9])
def test_a_dump_cut_between_two_pages_is_named(tmp_path, unit_bytes):
    data = dump(range(1, 40)).encode()
    streams = multistream(range(1, 40), 5)
    last = streams.rindex(b"BZh9")
    for name, whole, cut in (
        ("d.xml", data, data[: data.rindex(b"  <page>")]),
        ("d.xml.gz", gzip.compress(data), gzip.compress(data[: data.rindex(b"  <page>")])),
        ("d.xml.bz2", streams, streams[:last]),
    ):
        path = tmp_path / name
        path.write_bytes(whole)
        assert problems(read("wikipedia", path, unit_bytes)[0]) == []
        path.write_bytes(cut)
        items, _ = read("wikipedia", path, unit_bytes)
        assert [p.what for p in problems(items)] == ["no </mediawiki>: pages may be lost"], name
        assert len(documents(items)) > 20
        for behind in (b"\n" * 4000, b"mediawiki>\n", b"</aediawiki>"):
            if name != "d.xml.gz":
                path.write_bytes(cut + (bz2.compress(behind) if name == "d.xml.bz2" else behind))
            items, _ = read("wikipedia", path, unit_bytes)
            assert [p.what for p in problems(items)] == ["no </mediawiki>: pages may be lost"], (
                behind
            )


def test_the_end_of_a_dump_is_found_behind_blanks_and_where_a_part_begins(tmp_path):
    data = dump(range(1, 4)).encode()
    path = tmp_path / "d.xml"
    for last in range(14):  # bytes of "</mediawiki>\n" in the second of two parts
        path.write_bytes(data.ljust(2 * (len(data) - last)))
        for unit_bytes in (10**9, len(data) - last):
            items, units = read("wikipedia", path, unit_bytes)
            assert len(documents(items)) == 3 and problems(items) == []
            assert units == 1 + (unit_bytes < 10**9)


@pytest.mark.parametrize("data", [b"", bytes(5000), b"<html><body>404 Not Found</body></html>"])
@pytest.mark.parametrize("pack", [bytes, gzip.compress, bz2.compress])
def test_a_file_among_dumps_that_is_none_is_named(tmp_path, data, pack):
    (tmp_path / "a.xml").write_text(dump(range(1, 9)))
    (tmp_path / "b.xml").write_bytes(pack(data))
    for unit_bytes in (500, 10**9):
        items, _ = read("wikipedia", tmp_path, unit_bytes)
        (problem,) = problems(items)
        assert problem.what.startswith("no dump") and len(documents(items)) == 8


def test_elements_within_the_text_of_a_page_cost_no_text(tmp_path):
    text = "Words <b>of</b> <![CDATA[the <i>prose</i>]]> <!-- gone -->here."
    body = f"<id>1</id><ns>0</ns><revision><text>{text}</text></revision>"
    (tmp_path / "d.xml").write_text(f"<page><title>T</title>{body}</page>")
    assert documents(read("wikipedia", tmp_path / "d.xml")[0]) == {
        "1": ["Words of the prose here."]
    }


def test_a_line_in_pieces_without_number_takes_no_more_than_its_length():
    line = compressed.numbered_lines(iter([b"x"] * 400_000))
    assert list(line) == [(0, b"x" * 400_000)]


def test_long_names_and_other_members_of_a_tar(tmp_path):
    long = "y/" * 80 + "näme"
    for number, form in enumerate((tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)):
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w", format=form) as tar:
            for name, kind in ((long, b"0"), ("f", tarfile.DIRTYPE), ("l.txt", tarfile.SYMTYPE)):
                member = tarfile.TarInfo(f"{name}.txt" if kind == b"0" else name)
                member.type, member.linkname, member.mtime = kind, "z" * 300 + ".txt", 0.5
                member.size = 5 if kind == b"0" else 0
                tar.addfile(member, io.BytesIO(b"Text."))
            member = tarfile.TarInfo("last.txt")
            member.size = 4
            tar.addfile(member, io.BytesIO(b"End."))
        path = tmp_path / f"{number}.tar"
        path.write_bytes(buffer.getvalue())
        items, _ = read("books", path)
        assert documents(items) == {long: ["Text."], "last": ["End."]} and len(items) == 3
        (problem,) = problems(items)
        assert problem.what == f"a link to {'z' * 300}.txt, which is not read"


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("unit_bytes", [10**9, 1000])
def test_a_long_name_without_its_member_is_named(tmp_path, form, unit_bytes):
    """The member overwritten with zeros at the end, and cut out there and before another."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as tar:
        for n in range(4):
            member = tarfile.TarInfo("y/" * 80 + f"{n}.txt")
            member.size = 300
            tar.addfile(member, io.BytesIO(f"Text {n}.".encode().ljust(300, b".")))
    data = buffer.getvalue()
    path = tmp_path / "a.tar"
    for lost, filled in ((3, 1024), (3, 0), (1, 0)):
        at = data.index(b"Text %d." % lost) - 512
        path.write_bytes(data[:at] + bytes(filled) + data[at + 1024 :])
        items, _ = read("books", path, unit_bytes)
        left = [n for n in range(4) if n != lost]
        assert [d.id for d in items if isinstance(d, Document)] == [
            "y/" * 80 + str(n) for n in left
        ]
        (problem,) = problems(items)
        assert "no member behind" in problem.what


def test_texts_of_a_tar_that_are_not_read_are_named(tmp_path):
    buffer = io.BytesIO()
    others = {"a": (b"M", ""), "b": (tarfile.LNKTYPE, "whole"), "c": (tarfile.SYMTYPE, "x" * 200)}
    others |= {"d": (tarfile.LNKTYPE, "last.txt"), "e": (tarfile.FIFOTYPE, ""), "last": (b"0", "")}
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, (kind, target) in others.items():
            member = tarfile.TarInfo(f"{name}.txt")
            member.type, member.linkname, member.size = kind, target, 5 * (kind in b"M0")
            tar.addfile(member, io.BytesIO(b"Text."))
    path = tmp_path / "b.tbz2"
    path.write_bytes(bz2.compress(buffer.getvalue()))
    for unit_bytes in (10**9, 1000):
        items, _ = read("books", tmp_path, unit_bytes)
        assert documents(items) == {"last": ["Text."]}
        named = {problem.place: problem.what for problem in problems(items)}
        assert named.keys() == {f"member {name}.txt" for name in "abce"}
        assert named["member c.txt"] == f"a link to {'x' * 200}, which is not read"


@pytest.mark.parametrize("form", ["gnu", "pax"])
def test_a_sparse_member_of_a_tar_is_named_and_never_filled(tmp_path, form):
    with open(tmp_path / "holes.txt", "wb") as file:
        for gigabyte in range(1, 41):  # more stretches than a header lists
            file.seek(gigabyte << 30)
            file.write(b"Text.")
    (tmp_path / "last.txt").write_text("End.")
    path = tmp_path / "b.tar"
    command = ["tar", f"--format={form}", "-S", "-C", tmp_path, "-cf", path]
    subprocess.run([*command, "holes.txt", "last.txt"], check=True)
    assert path.stat().st_size < 1_000_000
    (items, _), peak = with_peak(read, "books", path)
    assert documents(items) == {"last": ["End."]} and peak < 10_000_000
    (problem,) = problems(items)
    assert problem.what == "a sparse file, which is not read"


def test_members_of_an_incremental_tar_have_their_own_names(tmp_path):
    (tmp_path / "a.txt").write_text("\n".join(document(1)))
    (tmp_path / "b.txt").hardlink_to(tmp_path / "a.txt")
    made = ["tar", "-C", tmp_path, "--format=gnu", "-g", tmp_path / "snapshot"]
    subprocess.run([*made, "-cf", tmp_path / "c.tar", "./a.txt", "./b.txt"], check=True)
    items, _ = read("books", tmp_path / "c.tar")
    assert documents(items) == {"./a": document(1)} and not problems(items)


@pytest.mark.parametrize("unit_bytes", [10**9, 2000])
def test_links_to_what_is_not_in_the_tar_are_named(tmp_path, unit_bytes):
    """Of folders of links, packed without what they lead to."""
    links = {"a/b": "../c.txt", "a/d": "../../c.txt", "e": "/data/c.txt", "./f": "./c.txt"}
    links |= {"g": "a/b.txt", "h": "a/c.txt", "i": "a/../z.txt"}
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, target in links.items():
            for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE)[: 1 + (name in "gh")]:
                member = tarfile.TarInfo(
                    f"{name}{kind.decode()}.txt" if name != "a/b" else "a/b.txt"
                )
                member.type, member.linkname = kind, target
                tar.addfile(member)
        data = "\n".join(document(1)).encode()
        member = tarfile.TarInfo("c.txt")
        member.size = len(data)
        tar.addfile(member, io.BytesIO(data))
    (tmp_path / "b.tar").write_bytes(buffer.getvalue())
    items, units = read("books", tmp_path, unit_bytes)
    assert documents(items) == {"c": document(1)} and (units > 1) == (unit_bytes < 10**9)
    named = {p.place.removeprefix("member ") for p in problems(items)}
    assert named == {"a/d2.txt", "e2.txt", "h1.txt", "h2.txt", "i2.txt"}
    assert len(problems(items)) == 5


def test_a_tar_of_links_without_number_takes_no_more_than_a_document(tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "MOST_NAMES", 100)
    monkeypatch.setattr(archives, "MOST_LINKS", 100)
    with tarfile.open(tmp_path / "b.tar.gz", "w:gz") as tar:
        for number in range(15_000):
            member = tarfile.TarInfo(f"{number}.txt")
            member.type, member.linkname = tarfile.SYMTYPE, f"x{'y' * 90}.txt"
            tar.addfile(member)
    source = SourceConfig(name="s", kind="books", path=str(tmp_path))
    (unit,) = plan_units(source, names := list_files(source), 0, 10**9)
    told = Counter()
    found = read_unit(source, unit, names, lambda problem: told.update([problem.what]))
    items, peak = with_peak(list, found)
    assert not items and told.total() == 15_000 and len(told) == 1 and peak < 5_000_000


def test_a_frame_of_a_window_too_large_is_not_called_corrupt(tmp_path):
    parameters = zstandard.ZstdCompressionParameters.from_level(3, window_log=31, enable_ldm=True)
    packer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    (tmp_path / "a.jsonl.zst").write_bytes(packer.compress(b'{"text": "a"}\n') + packer.flush())
    (problem,) = problems(read("jsonl", tmp_path)[0])
    assert "zstd --long" in problem.what and "corrupt" not in problem.what


def test_pax_headers_are_read_by_their_lengths(tmp_path):
    path = tmp_path / "b.tar"
    names = {"line\nend ä": ["One."], "12 path=z\n": ["Two."], "x" * 200: ["Three."]}
    data = tar_of(names, format=tarfile.PAX_FORMAT)
    path.write_bytes(data)
    assert documents(read("books", path)[0]) == names
    random = np.random.Generator(np.random.Philox(3))
    records = [m.start() for m in re.finditer(rb"\d+ path=", data)]
    path.write_bytes(data[: records[0]] + bytes(512) + data[records[0] + 512 :])
    assert "bad pax header" in problems(read("books", path)[0])[0].what
    for start in records:
        for at in (start, start + int(random.integers(3, 9))):
            path.write_bytes(flipped(data, at, 6))
            items, _ = read("books", path)
            texts = [*documents(items).values()]  # a name may be altered, which no sum guards
            assert texts == [*names.values()] or problems(items)
    member = tarfile.TarInfo("./PaxHeaders/x")
    member.type, member.size = tarfile.XHDTYPE, 1_000_000
    path.write_bytes(member.tobuf() + b"5 .=\n" * 200_000 + bytes(448) + data)
    assert len(documents(read("books", path)[0])) == 3


def test_an_endless_member_of_a_tar_is_named(tmp_path):
    member = tarfile.TarInfo("huge.txt")
    member.size = 2**70
    path = tmp_path / "b.tar"
    path.write_bytes(member.tobuf(tarfile.GNU_FORMAT) + b"text")
    (problem,) = read("books", path)[0]
    assert problem.place == "member huge.txt" and "ends early" in problem.what


def test_bytes_after_a_packed_book_cost_no_book(tmp_path):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"A book.") + b"trailing bytes")
    items, _ = read("books", tmp_path)
    assert documents(items) == {"a": ["A book."]}
    assert "after the end of the gzip data" in problems(items)[0].what


@pytest.mark.parametrize("kind", ["sentences", "tsv"])
@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress])
def test_rows_before_a_damaged_member_of_a_packed_file_are_kept(tmp_path, kind, pack):
    rows = document(1, 60)
    head = "text\n" if kind == "tsv" else ""
    whole, later = pack("\n".join([head + rows[0], *rows[1:]]).encode()), pack(b" and more.\n")
    path = tmp_path / "a"
    path.write_bytes(whole + b"\0\1" + later[2:])
    items, _ = read(kind, path)
    found = [p for item in items if isinstance(item, Document) for p in item.paragraphs]
    assert found == rows
    (problem,) = problems(items)
    assert problem.what.startswith("bytes after the end of the ")


@pytest.mark.parametrize(
    ("ending", "pack"),
    [
        (".gz", gzip.compress),
        (".bz2", bz2.compress),
        (".zst", zstandard.ZstdCompressor(write_checksum=True).compress),
    ],
)
@pytest.mark.parametrize("unit_bytes", [10**9, 1000])
@pytest.mark.parametrize("last", [b"\n", b""])
def test_zeros_in_place_of_later_members_are_named(tmp_path, ending, pack, unit_bytes, last):
    """As of a download whose room was taken before it came; those of a tape's record are none. A
    last line without an end is as good as one with it."""
    lines = [json.dumps({"id": n, "text": document(n)[0]}).encode() for n in range(40)]
    first, second = pack(b"\n".join(lines[:30]) + last), pack(b"\n".join(lines[30:]))
    path = tmp_path / f"a.jsonl{ending}"
    for size, said in ((10_000, 0), (len(second) + 20_000, 1)):
        path.write_bytes(first + bytes(size))
        items, _ = read("jsonl", path, unit_bytes)
        assert len(documents(items)) == 30 and len({p.what for p in problems(items)}) == said
        assert all("bytes of zeros behind the" in p.what for p in problems(items))


@pytest.mark.parametrize("unit_bytes", [10**9, 1000])
def test_a_bzip2_file_cut_in_the_sum_of_a_stream_is_named(tmp_path, unit_bytes):
    rows = [json.dumps({"id": n, "text": document(n)[0]}).encode() + b"\n" for n in range(9)]
    streams = [bz2.compress(row) for row in rows]
    path = tmp_path / "a.jsonl.bz2"
    for cut in (1, 2, 3):
        path.write_bytes(b"".join(streams[:5])[:-cut])
        items, _ = read("jsonl", path, unit_bytes)
        assert len(documents(items)) == 5
        assert {p.what for p in problems(items)} == {"bzip2 data ends early"}


def test_what_stands_behind_a_damaged_block_of_rows_is_told_as_left_out(tmp_path):
    rows = [json.dumps({"id": n, "text": document(n)[0]}).encode() + b"\n" for n in range(9)]
    streams = [bytearray(bz2.compress(row)) for row in rows]
    path = tmp_path / "a.jsonl.bz2"
    streams[2][40] ^= 1
    path.write_bytes(b"".join(streams))
    for unit_bytes in (10**9, 1000):
        items, _ = read("jsonl", path, unit_bytes)
        assert len(documents(items)) == 2
        (said,) = {p.what for p in problems(items)}
        assert said == "corrupt bzip2 block; all from there on is left out"


def test_what_is_broken_in_a_file_read_in_parts_is_counted_once(tmp_path):
    page = "<page><title>{0}</title><ns>0</ns><id>{0}</id><text>Words of prose.</text>{1}\n"
    dump = "".join(page.format(n, "" if n % 40 == 7 else "</page>") for n in range(300))
    docs = "".join(
        f'<doc id="{n}" title="T">\nSome words of prose.\n{"" if n % 40 == 7 else "</doc>"}\n'
        for n in range(300)
    )
    rows = "".join(json.dumps({"text": f"Words {n}."}) + "\n" for n in range(300))
    cut = tar_of({f"{n}": ["Words."] for n in range(90)})[:-12000]
    for name, kind, data in (
        ("d.xml.gz", "wikipedia", gzip.compress(dump.encode())),
        ("d.xml", "wikipedia", dump.encode()),
        ("wiki_00.gz", "wikiextractor", gzip.compress(docs.encode())),
        ("a.jsonl.gz", "jsonl", gzip.compress(rows.encode())[:-9]),
        ("b.tar.gz", "books", gzip.compress(cut)),
    ):
        path = tmp_path / name
        path.write_bytes(data)
        (whole, one), (parts, count) = (read(kind, path, size) for size in (10**9, 1000))
        assert one == 1 < count and 0 < len(problems(whole)) < 10
        assert sorted(p.what for p in problems(parts)) == sorted(p.what for p in problems(whole))
        assert documents(parts).keys() == documents(whole).keys()


# --- memory


BOMB = 60_000_000


@pytest.mark.parametrize(
    ("name", "kind", "pack"),
    [
        ("b.jsonl.bz2", "jsonl", bz2.compress),
        ("b.jsonl.zst", "jsonl", zstandard.compress),
        ("b.txt.gz", "books", gzip.compress),
        ("b.txt.zst", "books", zstandard.compress),
        ("b.xml.gz", "wikipedia", lambda zeros: gzip.compress(b"<page><title>T</title>" + zeros)),
        ("wiki_00.gz", "wikiextractor", gzip.compress),
        (
            "b.tar.gz",
            "books",
            lambda z: gzip.compress(tar_of({"x": ["y"]}) + z),
        ),
    ],
)
def test_what_unpacks_to_more_than_the_limit_is_named_and_never_held(tmp_path, name, kind, pack):
    (tmp_path / name).write_bytes(pack(bytes(BOMB)))
    (items, _), peak = with_peak(read, kind, tmp_path, max_document_bytes=1_000_000)
    assert peak < BOMB / 2
    if name != "b.tar.gz":
        assert documents(items) == {}
        assert any("over max_document_bytes" in problem.what for problem in problems(items))


def test_a_member_over_the_limit_is_named_and_the_next_is_read(tmp_path):
    path = tmp_path / "b.tar"
    books = {"a": ["Short."], "b": ["long " * 1000], "c": ["Short too."]}
    path.write_bytes(tar_of(books))
    items, _ = read("books", path, max_document_bytes=2000)
    assert documents(items) == {"a": ["Short."], "c": ["Short too."]}
    (problem,) = problems(items)
    assert problem.place == "member b.txt" and "over max_document_bytes (2,000)" in problem.what


@pytest.mark.parametrize("kind", ["jsonl", "sentences", "wikiextractor", "wikipedia", "parquet"])
def test_a_document_over_the_limit_is_named_and_the_next_is_read(tmp_path, kind):
    texts = ["Some short words of text.", "long words " * 1000, "And a short one again."]
    if kind == "jsonl":
        path = tmp_path / "a.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    elif kind == "sentences":
        path = tmp_path / "a.txt"
        path.write_text("\n".join(texts))
    elif kind == "wikiextractor":
        path = tmp_path / "wiki_00"
        docs = (f'<doc id="{n}" title="T">\n{t}\n</doc>\n' for n, t in enumerate(texts))
        path.write_text("".join(docs))
    elif kind == "wikipedia":
        path = tmp_path / "a.xml"
        page = "<page><title>T</title><id>{}</id><revision><text>{}</text></revision></page>\n"
        path.write_text("".join(page.format(n, text) for n, text in enumerate(texts)))
    else:
        path = tmp_path / "a.parquet"
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path)
    items, _ = read(kind, path, max_document_bytes=2000, min_paragraph_words=0)
    found = [p for paragraphs in documents(items).values() for p in paragraphs]
    assert found == [texts[0], texts[2]]
    assert ["over max_document_bytes" in problem.what for problem in problems(items)] == [True]


def test_a_text_that_a_dictionary_repeats_is_not_unpacked_for_all_rows_at_once(
    tmp_path, monkeypatch
):
    text = ("word " * 800_000).strip()
    rows = pyarrow.DictionaryArray.from_arrays([0] * 60, [text])
    table = pyarrow.table({"text": rows})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", store_schema=False)
    monkeypatch.setattr("data_pipeline.corpus.parquet.AT_ONCE", 3 * len(text))
    pool = pyarrow.default_memory_pool()
    before = pool.max_memory()
    items, _ = read("parquet", tmp_path / "a.parquet", max_document_bytes=len(text) - 1)
    assert len(problems(items)) == 60 and not documents(items)
    assert pool.max_memory() < before + 20 * len(text)
    ids = pyarrow.array([text[:1_000_000].encode()] * 20, pyarrow.binary(1_000_000))
    table = pyarrow.table({"id": ids, "text": ["Some words."] * 20})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", compression="zstd")
    with Parquet(str(tmp_path / "a.parquet")) as file:
        assert file.rows_at_once(0, ["id", "text"], 100, 10**9) == 3 * len(text) // 1_000_000
        assert file.rows_at_once(0, ["text"], 100, 10**9) == 100


def test_a_sentence_too_long_to_encode_at_once_has_the_ids_of_its_words(tmp_path):
    tokenizer = Tokenizer.from_file(write_vocabulary(tmp_path / "vocab.txt"), True)
    long = " ".join(p for n in range(300) for p in document(n)).replace(".", " ")
    (tmp_path / "a.txt").write_text(f"First.\n{long}.\nLast.")
    source = {"name": "s", "kind": "text", "path": str(tmp_path / "a.txt"), "sentences": "lines"}
    prepared(tmp_path, source, max_sentence_tokens=65535, unit_bytes=10**7)
    (record,) = iterate_documents(tmp_path / "out")
    assert len(long) > 300_000
    assert record.ids.tolist() == tokenizer.encode(f"First. {long}. Last.")


# --- what a file is, and why nothing came of it


def test_packings_are_told_by_their_bytes_and_endings_in_any_case(tmp_path):
    (tmp_path / "a.txt.GZ").write_bytes(gzip.compress(b"One."))
    (tmp_path / "b.txt").write_bytes(bz2.compress(b"Two."))
    (tmp_path / "C.TXT").write_bytes(b"Three.")
    items, _ = read("books", tmp_path)
    assert documents(items) == {"a": ["One."], "b": ["Two."], "C": ["Three."]}


@pytest.mark.parametrize(
    ("name", "kind", "data", "reason"),
    [
        ("a.txt.gz", "text", b"Plain text.", "a.txt.gz: byte 0: not gzip data"),
        ("a.txt.gz", "text", gzip.compress(b"Cut." * 99, mtime=0)[:-9], "gzip data ends early"),
        ("a.jsonl", "jsonl", b'{\n  "text": "x"\n}\n', "a.jsonl: byte 0: not a JSON object"),
        ("a.parquet", "parquet", b"PAR1 not at all", "corrupt parquet"),
        ("a.parquet", "parquet", table_of(b"text", b"t\xe9xt"), "corrupt parquet .'utf-8' codec"),
        ("a.jsonl", "jsonl", b'{"text": ["some words"]}', "byte 0: 'text' is a list, not text"),
        ("a", "wikiextractor", b'{"id": 1, "text": ["a b c d e f g h i"]}', "text is no string"),
        ("a.txt", "text", lzma.compress(b"Words. " * 99), "not text: .* NUL or bad UTF-8"),
        ("a.txt.gz", "books", gzip.compress(tar_of(BOOKS), mtime=0), "not text: it is a tar"),
    ],
)
def test_where_all_input_is_broken_the_first_stands_in_the_error(
    tmp_path, name, kind, data, reason
):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError, match=f"broken inputs, the first .*{reason}"):
        prepared(tmp_path, {"name": "s", "kind": kind, "path": str(tmp_path / name)})


def test_short_lines_of_another_encoding_keep_their_places(tmp_path):
    """Lost from the middle of a book they would make neighbours of what are none."""
    lines = ["A plain one.", "naïve", "¿Qué?", "Él salió.", "Noël é.", "A last one."]
    (tmp_path / "a.txt").write_bytes("\n".join(lines).encode("latin-1"))
    (found,) = documents(read("sentences", tmp_path / "a.txt")[0]).values()
    assert len(found) == len(lines)
    assert (found[0], found[-1]) == (lines[0], lines[-1])


def test_lines_that_are_broken_are_counted_and_the_first_are_named(tmp_path, capsys):
    """Each of the lines of a file of another kind: their names would fill the memory."""
    good = json.dumps({"text": " ".join(document(1))})
    (tmp_path / "a.jsonl").write_text(f"{good}\n" + "no JSON\n" * 1234)
    source = {"name": "s", "kind": "jsonl", "path": str(tmp_path / "a.jsonl"), "min_yield": 0}
    manifest = prepared(tmp_path, source, unit_bytes=10**9)
    assert manifest.sources[0].notes["broken inputs"] == 1234
    assert "broken input: and 1214 more" in capsys.readouterr().out


def test_what_is_named_of_broken_input_is_bounded(tmp_path, monkeypatch):
    """Names may be as long as documents, and units without number; rank 0 holds what all name."""
    name = "n" * 100_000
    lines = [f'<doc id="{n} {name}" title="">\nnever closed\n' for n in range(40)]
    (tmp_path / "a.txt").write_text("".join(lines))
    (tmp_path / "b.jsonl").write_text(json.dumps({"id": name, "text": ""}) + "\n")
    write_vocabulary(tmp_path / "vocab.txt")

    def tally_of(kind, file, units):
        source = {"name": "s", "kind": kind, "path": str(tmp_path / file)}
        out = {"out": str(tmp_path / kind), "unit_bytes": 10**9}
        config = write_config(tmp_path / "c.yaml", tmp_path / "vocab.txt", [source], **out)
        job = plan_job(load(config, PrepareConfig), True, False)
        tally = Tally()
        list(documents_of(replace(job, units=job.units * units), job.units[0], tally, True))
        return tally

    found = tally_of("wikiextractor", "a.txt", 1)
    assert len(found.problems) == 40 and found.more_problems == 0
    assert max(len(problem.place) for problem in found.problems) == 1000
    found = tally_of("wikiextractor", "a.txt", 10_000)
    assert (len(found.problems), found.more_problems) == (10, 30)
    (sample,) = tally_of("jsonl", "b.jsonl", 1).samples["empty"]
    assert len(sample.id) == 1000


def test_the_newest_revision_of_a_page_counts(tmp_path):
    revision = "<revision><timestamp>{}</timestamp><text>{} words of prose.</text></revision>"
    revisions = (("2003-01-01T00:00:00Z", "Old"), ("2020-05-05T00:00:00Z", "New"))
    for order in (revisions, revisions[::-1]):
        body = "".join(revision.format(*r) for r in order)
        path = tmp_path / "d.xml"
        path.write_text(f"<page><title>T</title><ns>0</ns><id>1</id>{body}</page>")
        assert documents(read("wikipedia", path)[0]) == {"1": ["New words of prose."]}


@pytest.mark.parametrize("limit", [20_000_000, 1000])
@pytest.mark.parametrize("which", [0, 7, 8])
@pytest.mark.parametrize(
    "damage",
    [
        "",
        "<timestamp></timestamp>",
        "<timestamp>r0{}-01-01T00:00:00Z",
        "<timestamp>209{}-41-01T00:00:00Z",
        "<timestamp>209{}-02-30",
        "<timestamp>209{}-01-01T31:00:00Z",
        "<timestamp>209{}-01-01T0:00:00Z",
        "<timestamp>209{}-01-01T00::0:00Z",
    ],
)
def test_a_damaged_timestamp_is_named_and_the_newest_of_the_others_counts(
    tmp_path, damage, which, limit
):
    stamps = [f"<timestamp>20{year}-01-01T00:00:00Z</timestamp>" for year in range(10, 19)]
    stamps[8] = stamps[8].replace("p>2", "p >\n2", 1)
    stamps[which] = damage.format(which)
    stamps[which] += "</timestamp>" * (bool(damage) and not damage.endswith("</timestamp>"))
    words = [f"Words of revision {n}, " + "as they stood then. " * 9 for n in range(9)]
    body = "".join(
        f"<revision>{stamp}<text>{text}</text></revision>\n"
        for stamp, text in zip(stamps, words, strict=True)
    )
    path = tmp_path / "d.xml"
    path.write_text(f"<page><title>T</title><ns>0</ns><id>1</id>{body}</page>")
    items, _ = read("wikipedia", path, max_document_bytes=limit)
    assert documents(items) == {"1": [words[7 if which == 8 else 8].strip()]}
    assert [p.what for p in problems(items)] == ["a damaged timestamp: the newest of the others"]


@pytest.mark.parametrize("limit", [20_000_000, 1000])
@pytest.mark.parametrize(
    "damage", ["", "20{}/01-01T00:00:00Z", "r0{}-01-01T00:00:00Z", "99{:02}-01-41T00:00:00Z"]
)
@pytest.mark.parametrize(
    "years",
    [(15, 18, 20, 3, 4, 5), (20, 19, 18, 17, 16, 15), (3, 20, 4, 18, 19, 5), (1, 20, 2, 3, 4, 0)],
)
def test_a_damaged_timestamp_of_an_older_revision_hides_no_newer_one(
    tmp_path, years, damage, limit
):
    """Which do not stand in the order of their times, as after an import."""
    for which in (3, 4, 5):
        revisions = []
        for at, year in enumerate(years):
            stamp = damage.format(year) if at == which else f"20{year:02}-01-01T00:00:00Z"
            text = f"Words of year {year}, " + "as they stood then. " * 9
            revisions.append(
                f"<revision><timestamp>{stamp}</timestamp><text>{text}</text></revision>\n"
            )
        path = tmp_path / "d.xml"
        page = f"<page><title>T</title><ns>0</ns><id>1</id>{''.join(revisions)}</page>"
        path.write_text(page)
        items, _ = read("wikipedia", path, max_document_bytes=limit)
        ((paragraph,),) = documents(items).values()
        assert paragraph.startswith("Words of year 20, ")


def test_a_long_timestamp_costs_its_length(tmp_path):
    form = "<revision><timestamp>{}</timestamp><text>{} words of prose.</text></revision>"
    # Days where each revision is compared with the whole of it.
    body = (
        form.format(f"2020-01-01T{'0' * 4_000_000}", "Long")
        + form.format("2019-01-01", "Older") * 40_000
    )
    path = tmp_path / "d.xml"
    path.write_text(f"<page><title>T</title><ns>0</ns><id>1</id>{body}</page>")
    assert documents(read("wikipedia", path)[0]) == {"1": ["Older words of prose."]}


def test_a_page_of_two_texts_in_a_revision_is_named(tmp_path):
    text = "<text>Words of {}.</text>"
    page = "<page><title>T</title><ns>0</ns><id>{}</id><revision>{}</revision></page>"
    twice = text.format("one") + text.format("another")
    path = tmp_path / "d.xml"
    path.write_text(page.format(1, twice) + page.format(2, text.format("prose")))
    items, _ = read("wikipedia", path)
    assert documents(items) == {"2": ["Words of prose."]}
    assert [(p.place, p.what) for p in problems(items)] == [('page "T"', "2 texts in a revision")]


def test_small_pieces_of_a_page_over_the_limit_take_no_more_than_their_length(tmp_path):
    # A minute and more where each costs a look through what is held.
    form = "<revision><timestamp>{}</timestamp><text>{}</text></revision>"
    page = "<page><title>T</title><id>1</id>" + form.format(2024, "a word. " * 499_980)
    old = bz2.compress(form.format(2010, "a" * 300).encode())
    path = tmp_path / "d.xml.bz2"
    path.write_bytes(bz2.compress(page.encode()) + old * 20_000 + bz2.compress(b"</page>"))
    (problem,) = read("wikipedia", path, max_document_bytes=2_000_000)[0]
    assert "over max_document_bytes" in problem.what


@pytest.mark.parametrize("name", ["d.xml", "d.xml.gz", "d.xml.bz2"])
@pytest.mark.parametrize("place", [0, 150, 299])
def test_only_the_revision_that_is_kept_counts_against_the_limit(tmp_path, name, place):
    text = "Words of prose. " * 60
    form = "<revision><timestamp>{:04}-01-01</timestamp><text>{}</text></revision>\n"
    numbers = [*range(1, 300)]
    numbers.insert(place, 300)
    small = "<page><title>S</title><ns>0</ns><id>2</id>" + form.format(1, "A few more words.")

    def pages(newest):
        body = "".join(form.format(n, newest if n == 300 else f"Old {n}. {text}") for n in numbers)
        return f"<page><title>H</title><ns>0</ns><id>1</id>{body}</page>\n{small}</page>".encode()

    pack = {".gz": gzip.compress, "bz2": lambda data: bz2.compress(data, 1)}.get(name[-3:], bytes)
    path = tmp_path / name
    path.write_bytes(pack(pages(f"New. {text}")))
    (items, _), peak = with_peak(read, "wikipedia", path, max_document_bytes=2000)
    assert peak < 10_000_000
    assert documents(items) == {"1": [f"New. {text}".strip()], "2": ["A few more words."]}
    assert len(items) == 2
    path.write_bytes(pack(pages(text * 3)))
    items, _ = read("wikipedia", path, max_document_bytes=2000)
    assert documents(items) == {"2": ["A few more words."]}
    assert "over max_document_bytes" in problems(items)[0].what and len(items) == 2


@pytest.mark.parametrize("names", [("Talk", "File"), ("Diskussion", "Datei"), None])
@pytest.mark.parametrize("form", ['key="{}"', "key='{}'", "case='first-letter'\nkey = '{}' "])
def test_a_dump_without_namespaces_admits_no_talk(tmp_path, names, form):
    named = enumerate(names or (), 1)
    head = "".join(f"<namespace {form.format(k)}>{n}</namespace>\n" for k, n in named)
    head = f"<namespaces>\n<namespace {form.format(0)}/>\n{head}</namespaces>" if names else ""
    titles = [f"{n}:A" for n in names or ("User talk", "Template")] + ["Star Trek: The Motion"]
    text = "<revision><text>Words of prose.</text></revision>"
    page = f"<page><title>{{}}</title><id>{{}}</id>{text}</page>"
    dump = (head + "".join(page.format(t, n) for n, t in enumerate(titles))).encode()
    streams = (bz2.compress(dump[i : i + 20]) for i in range(0, len(dump), 20))
    for name, data in (("a.xml", dump), ("b.xml.bz2", b"".join(streams))):
        (tmp_path / name).write_bytes(data)
        items, _ = read("wikipedia", tmp_path / name)
        assert set(documents(items)) == {"2"} and not problems(items)
        assert [item.reason for item in items if item.id != "2"] == ["other namespace"] * 2


def test_links_to_pictures_in_the_language_of_the_dump_show_nothing(tmp_path):
    named = {6: "Datei", 14: "Ka\u200dtegorie", 4: "Wikipedia"}
    head = "".join(
        f'<namespace key="{key}" case="a">{name}</namespace>' for key, name in named.items()
    )
    text = (
        "[[Datei:R.jpg|mini|Ein Bild]]Heute [[datei:W.svg|20px|rand]] steht [[Wikipedia:B|es]] da."
    )
    text += "\n\n[[Kategorie:Ort in einem Land mit vielen anderen Orten]]"
    page = (
        f"<page><title>A</title><ns>0</ns><id>1</id><revision><text>{text}</text></revision></page>"
    )
    (tmp_path / "a.xml").write_text(f"<siteinfo><namespaces>{head}</namespaces></siteinfo>{page}")
    items, _ = read("wikipedia", tmp_path / "a.xml")
    assert documents(items) == {"1": ["Heute steht es da."]}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("mark", "damage"),
    [
        ("", ""),
        ('key="6"', 'kez="6"'),
        ('key="6"', 'key="4"'),
        ("Datei</namespace>", "Datei</namespade>"),
        ("<namespace key='14'", "namespace key='14'"),
        ("<namespaces>", "<namespace>"),
        ("</namespaces>", "</namespades>"),
        ('key="6"', 'key="66"'),
        ("key='14'", "key='144'"),
        ('key="-1"', 'key="-11"'),
    ],
)
def test_a_damaged_name_of_a_namespace_is_told(tmp_path, mark, damage, packed):
    others = "\n".join(
        f'<namespace key="{key}" case="first-letter">Name {key}</namespace>'
        for key in (-2, -1, 1, 2, 3, 5, *range(7, 14), 15, 100)
    )
    names = f"""<namespaces>
      {others}
      <namespace key="0" case="first-letter" />
      <namespace key="4" case="first-letter">Wikipedia</namespace>
      <namespace key="6" case="first-letter">Datei</namespace>
      <namespace key='14' case="first-letter">Kategorie</namespace>
    </namespaces>""".replace(mark, damage, 1)
    page = (
        "<page><title>A</title><ns>0</ns><id>{}</id>"
        "<revision><text>Words of prose.</text></revision></page>"
    )
    dump = f"<mediawiki><siteinfo>{names}</siteinfo>{''.join(map(page.format, range(9)))}"
    path = tmp_path / ("a.xml.bz2" if packed else "a.xml")
    head, rest = f"{dump}</mediawiki>".encode().split(b"<page>", 1)
    rest = b"<page>" + rest  # a multistream dump has its head in a stream of its own
    path.write_bytes(bz2.compress(head) + bz2.compress(rest) if packed else head + rest)
    items, _ = read("wikipedia", path, unit_bytes=300)
    assert len(documents(items)) == 9
    assert ["namespace is damaged" in p.what for p in problems(items)] == [True] * bool(mark)
    if not mark:  # of two dumps in one file nothing is said
        path.write_bytes(path.read_bytes() * 2)
        assert not problems(read("wikipedia", path, unit_bytes=10**9)[0])


@pytest.mark.parametrize("unit_bytes", [1000, 10**9])
def test_line_ends_of_old_macs(tmp_path, unit_bytes):
    rows = [s for n in range(20) for s in document(n)]
    found = []
    for name, ending in (("a", "\n"), ("b", "\r\n"), ("c", "\r")):
        path = tmp_path / f"{name}.txt"
        path.write_bytes(ending.join(rows).encode())
        items, _ = read("sentences", path, unit_bytes)
        found.append([row for paragraphs in documents(items).values() for row in paragraphs])
    assert found == [rows] * 3


@pytest.mark.parametrize("unit_bytes", [1000, 10**9])
def test_a_file_of_an_old_mac_and_one_of_unix_keep_their_books_together(tmp_path, unit_bytes):
    books = [document(n) for n in range(20)]
    ends = ["\r", "\n", "\r\n"]
    path = tmp_path / "a.txt"
    whole = "".join(s + ends[n % 3] for n, book in enumerate(books) for s in [*book, ""])
    path.write_bytes(whole.encode())
    found = documents(read("sentences", path, unit_bytes)[0]).values()
    # The ends of parts are boundaries too.
    assert [row for book in found for row in book] == [row for book in books for row in book]
    assert unit_bytes == 1000 or list(found) == books
    path.write_bytes("\r".join(s for book in books for s in [*book, ""]).encode() + b"\n")
    assert unit_bytes == 1000 or list(documents(read("sentences", path)[0]).values()) == books


@pytest.mark.parametrize("seed", range(8))
def test_rows_of_sentences_are_the_same_wherever_a_part_ends(tmp_path, monkeypatch, seed):
    random = np.random.Generator(np.random.Philox(seed))
    few = np.array([8, 1, 1][: 2 + seed % 2] if seed % 4 < 2 else [1, 4, 2])
    letters = np.array([b"a", b"\r", b"\n"])[: len(few)]
    data = b"".join(random.choice(letters, 4000, p=few / few.sum()))
    data += [b"", b"\n", b"\r", b"\r\r"][seed % 4]
    rows, at = [], 0
    for end in re.finditer(rb"\r?\r?\n|\r|\Z", data):
        if at < len(data):
            rows.append((at, data[at : end.start()].decode()))
        at = end.end()

    def found(path, counted):
        source = SourceConfig(name="s", kind="sentences", path=str(path))
        for part in counted:
            given = source.input(str(path), "a", part, checked=False, told=pytest.fail)
            yield from ((row.at, row.text.rstrip("\r")) for row in parts.text_rows(given))

    plain = tmp_path / "a.txt"
    plain.write_bytes(data)
    for chunk in (1 << 20, int(random.integers(32, 2000))):
        monkeypatch.setattr(parts, "CHUNK", chunk)
        monkeypatch.setattr(compressed, "CHUNK", chunk)
        for count in (1, 2, 7, 397):
            cuts = [len(data) * i // count for i in range(count + 1)]
            dealt = [parts.Part(*cuts[i : i + 2], i, count) for i in range(count)]
            assert list(found(plain, dealt)) == rows
        for pack in (gzip.compress, bz2.compress, zstandard.compress):
            packed = tmp_path / f"a.txt.{pack.__module__[:2]}"
            packed.write_bytes(pack(data))
            assert list(found(packed, [parts.Part()])) == rows
            dealt = [parts.Part(0, 0, i, 3) for i in range(3)]
            assert sorted(found(packed, dealt)) == rows


@pytest.mark.parametrize(
    "column",
    [[["x"]], [1], [True], [{"a": 1}], [b"bytes"]],
    ids=["list", "int", "bool", "struct", "binary"],
)
@pytest.mark.parametrize("kind", ["parquet", "sentences"])
def test_a_parquet_column_that_is_no_text_is_one_line(tmp_path, kind, column):
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match="column 'text' holds .*, not text"):
        read(kind, tmp_path)


@pytest.mark.parametrize("kind", ["parquet", "sentences"])
def test_a_parquet_file_whose_texts_are_all_null_is_told(tmp_path, kind):
    nulls = pyarrow.table({"text": pyarrow.nulls(3)})
    pyarrow.parquet.write_table(nulls, tmp_path / "a.parquet", row_group_size=1)
    pyarrow.parquet.write_table(nulls.slice(0, 0), tmp_path / "b.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"text": ["Some words."]}), tmp_path / "c.parquet")
    items, _ = read(kind, tmp_path)
    assert [(p.file[-9:], p.what) for p in problems(items)] == [
        ("a.parquet", "3 rows, none with text")
    ]
    assert len(documents(items)) == 1


@pytest.mark.parametrize("kind", ["parquet", "sentences"])
def test_a_parquet_file_of_no_rows_is_whole(tmp_path, kind):
    table = pyarrow.table({"id": pyarrow.array([], "int64"), "text": pyarrow.array([], "string")})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"text": ["Some words."]}), tmp_path / "b.parquet")
    items, _ = read(kind, tmp_path)
    assert len(items) == len(documents(items)) == 1


@pytest.mark.parametrize("of", ["string", "large_string", "string_view", "dictionary"])
@pytest.mark.parametrize("kind", ["parquet", "sentences"])
def test_a_parquet_text_of_another_encoding_takes_no_other_with_it(tmp_path, kind, of):
    data = [f"The {word} house of a long street.".encode() for word in ("old", "new", "red")]
    data[1] = data[1].replace(b"new", "caf\xe9".encode("latin-1"))
    ends = np.cumsum([0, *map(len, data)], dtype=np.int32)
    texts = pyarrow.StringArray.from_buffers(
        3, pyarrow.py_buffer(ends), pyarrow.py_buffer(b"".join(data))
    )
    kept = pyarrow.dictionary(pyarrow.int32(), pyarrow.string()) if of == "dictionary" else of
    if of == "dictionary":
        texts = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0, 1, 2], "int32"), texts)
    else:
        texts = texts.cast(of)
    assert texts.type == kept
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "a.parquet")
    items, _ = read(kind, tmp_path)
    found = [line for lines in documents(items).values() for line in lines]
    assert found == [line.decode("utf-8", "ignore") for line in data]
    (problem,) = problems(items)
    assert (problem.place, problem.what) == ("row 1, byte 7 of it", "bad UTF-8")


def test_rows_of_null_are_counted(tmp_path):
    table = pyarrow.table({"text": ["One.", None, "Two.", "Three.", None, None]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    items, _ = read("sentences", tmp_path)
    assert list(documents(items).values()) == [["One."], ["Two.", "Three."]]
    (problem,) = problems(items)
    assert (problem.place, problem.what) == ("row 1", "3 rows without text (null), as blank ones")


def test_a_parquet_footer_that_lies_loses_no_text_unsaid(tmp_path):
    """Of the rows of its groups, and of the type of a column, over which the library would end the
    process."""
    texts = [f"Some words of row {n}." for n in range(30)]
    table = pyarrow.table({"id": [str(n) for n in range(30)], "text": texts})
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(table, path, row_group_size=10, store_schema=False)
    data = path.read_bytes()
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    rows, lied = b"\x16\x14", (b"\x16\x0c", b"\x16\x00")  # a number of 64 bits: 10; 6, 0
    binary, integer = b"\x15\x0c%\x02\x18\x02id", b"\x15\x02%\x02\x18\x02id"
    found = [at for at in range(footer, len(data)) if data.startswith(rows, at)]
    lies = [(at, lie) for at in found for lie in lied]
    lies.append((data.index(binary, footer), integer))
    said = []
    for at, lie in lies:
        path.write_bytes(data[:at] + lie + data[at + len(lie) :])
        items, _ = read("parquet", path)
        assert len(documents(items)) == 30 or problems(items), at - footer
        places = [problem.place for problem in problems(items)]
        assert len(places) == len(set(places)), at - footer
        said += [problem.what for problem in problems(items)]
    assert "not the 6 rows that its footer tells of" in said
    whole, lied = b"\x16\x3c", b"\x16\x50"  # 30; 40, of which a row group is lost
    (at,) = (at for at in range(footer, len(data)) if data.startswith(whole, at))
    path.write_bytes(data[:at] + lied + data[at + 2 :])
    items, _ = read("parquet", path)
    (problem,) = problems(items)
    assert len(documents(items)) == 30
    assert problem.what == "corrupt parquet (row groups of 30 rows, 40 by its footer)"


def test_parquet_files_of_one_layout_that_are_joined_are_named(tmp_path):
    parts = []
    for name, count in (("Alice", 60), ("Bobby", 40)):
        table = pyarrow.table(
            {"text": [f"{name} tells number {n:03d}.\n" * 9 for n in range(count)]}
        )
        pyarrow.parquet.write_table(
            table, tmp_path / name, row_group_size=10, compression="none", use_dictionary=False
        )
        parts.append((tmp_path / name).read_bytes())
    for between in (b"", b"\n", bytes(512)):
        (tmp_path / "ab.parquet").write_bytes(between.join(parts))
        (problem,) = problems(read("parquet", tmp_path / "ab.parquet")[0])
        assert problem.what.startswith("corrupt parquet (another file stands before this one")


def test_marks_of_parquet_are_text_of_another_column(tmp_path):
    marks = {"text": ["Some words."] * 9, "more": ["PAR1PAR1", "PAR1"] * 4 + ["a"]}
    pyarrow.parquet.write_table(pyarrow.table(marks), tmp_path / "a.parquet", compression="none")
    items, _ = read("parquet", tmp_path / "a.parquet")
    assert len(documents(items)) == 9 and not problems(items)


def test_the_rows_of_a_parquet_column_are_its_own(tmp_path):
    """Behind another whose name begins with the same word and a point."""
    texts = [f"Some words of row {n}." for n in range(30)]
    table = pyarrow.table({"text.tags": [["a", "b"]] * 30, "text": texts})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    items, _ = read("parquet", tmp_path)
    assert not problems(items) and list(documents(items).values()) == [[text] for text in texts]


@pytest.mark.parametrize("unit_bytes", [500, 10**9])
def test_a_parquet_column_whose_name_is_no_utf_8_is_named(tmp_path, unit_bytes):
    table = pyarrow.table({"text": ["Some words."] * 3, "url": ["u"] * 3})
    for name in "ab":
        pyarrow.parquet.write_table(table, tmp_path / f"{name}.parquet", store_schema=False)
    data = (tmp_path / "a.parquet").read_bytes()
    before, name, after = data.partition(b"\x03url")
    (tmp_path / "a.parquet").write_bytes(before + b"\x03\xf5rl" + after)
    items, units = read("parquet", tmp_path, unit_bytes)
    (problem,) = problems(items)
    assert name and problem.file.endswith("a.parquet") and "utf-8" in problem.what
    assert len(documents(items)) == 3 and units == (2 if unit_bytes == 500 else 1)


def test_ids_of_a_vandal_are_held_for_few_documents(tmp_path):
    tokenizer = Tokenizer.from_file(write_vocabulary(tmp_path / "vocab.txt"), True)
    found = (
        SegmentedDocument(f"{n}" * 100_000, ["Some words."], b"0" * 16, 2, 0.5) for n in range(200)
    )
    with open(os.devnull, "wb") as nowhere:
        (table, _), peak = with_peak(encode_unit, found, 0, tokenizer, 512, Tally(), nowhere)
    assert len(table) == 200
    assert peak < 10e6, peak  # all ids take 49


def test_a_parquet_file_that_is_made_to_fill_the_memory_is_left_out(tmp_path):
    table = pyarrow.table({"text": ["x" * 3_000_000, "Some words."]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", compression="zstd")
    items, _ = read("parquet", tmp_path, max_document_bytes=1_000_000)
    (problem,) = problems(items)
    assert not documents(items)
    assert (problem.place, problem.what) == (
        "row group 0",
        "unpacks to over a hundred times its size",
    )


def number(value):
    """As Thrift writes one that is not below 0."""
    value *= 2
    found = b""
    while value > 127:
        found, value = found + bytes([value & 127 | 128]), value >> 7
    return found + bytes([value])


@pytest.mark.parametrize(
    ("forged", "behind", "said"),
    [
        # A field begins with 16 times what its number is above the last one's, and its kind; or
        # with its kind and twice its number (-2 as 03). The library takes 2 and 3 of kind 5.
        ("05 04 SIZE 05 06 LENGTH 05 02 00 05 03 LENGTH 0c 0a", "", "cannot be read"),
        ("15 00 16 02 15 LENGTH 05 04 SIZE 0c 0a", "", "cannot be read"),
        (f"15 00 15 SIZE 15 LENGTH {'1c' * 17} {'00' * 17} 1c", "", "cannot be read"),
        ("15 00 15 SIZE 15 LENGTH 2c", "15 00 15 00 15 80 DA C4 09 00", "goes beyond its column"),
    ],
)
def test_a_page_of_which_its_header_lies_is_left_out(tmp_path, forged, behind, said):
    path = tmp_path / "a.parquet"
    texts = pyarrow.table({"text": ["x" * 3_000_000, "Some words."]})
    pyarrow.parquet.write_table(texts, path, compression="zstd", use_dictionary=False)
    data = path.read_bytes()
    size = pyarrow.parquet.ParquetFile(path).metadata.row_group(0).column(0).total_compressed_size
    page, footer = data[4 : 4 + size], data[4 + size :]
    head = re.match(rb"\x15\0\x15([\x80-\xff]*[\0-\x7f])\x15([\x80-\xff]*[\0-\x7f])\x2c", page)
    numbers = forged.replace("SIZE", head[1].hex()).replace("LENGTH", head[2].hex())
    page = bytes.fromhex(numbers) + page[head.end() :] + bytes.fromhex(behind)
    assert number(size) in footer and len(number(size)) == len(number(len(page)))
    path.write_bytes(b"PAR1" + page + footer.replace(number(size), number(len(page))))
    items, _ = read("parquet", path, max_document_bytes=1_000_000)
    (problem,) = problems(items)
    assert "corrupt parquet (a page" in problem.what and said in problem.what
    assert not documents(items)


@pytest.mark.parametrize("unit_bytes", [10**9, 1000])
def test_of_many_row_groups_the_footer_is_read_by_few_parts_and_twice_by_each(
    tmp_path, monkeypatch, unit_bytes
):
    texts = [f"Words of row {n}." for n in range(300)]
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path, row_group_size=1)
    opened = []

    class Counted(pyarrow.parquet.ParquetFile):
        def __init__(self, *given, **more):
            opened.append(given)
            super().__init__(*given, **more)

    monkeypatch.setattr(pyarrow.parquet, "ParquetFile", Counted)
    items, units = read("parquet", path, unit_bytes)
    assert [text for (text,) in documents(items).values()] == texts
    assert (units == 1 or unit_bytes == 1000) and units <= 32
    assert len(opened) <= 2 * units + 1


def test_a_footer_over_which_the_library_ends_the_process_is_named(tmp_path):
    """Its counts of levels are not of the column's kind: a text that may be null, or may not."""
    path = tmp_path / "a.parquet"
    rows = {"text": ["Some words.", "More words."]}
    pyarrow.parquet.write_table(pyarrow.table(rows), path, store_schema=False)
    data = path.read_bytes()
    before, optional, required = b"\x15\x0c\x25", b"\x02\x18\x04text", b"\x00\x18\x04text"
    assert data.count(before + optional) == 1
    path.write_bytes(data.replace(before + optional, before + required))
    items, _ = read("parquet", path)
    (problem,) = problems(items)
    assert "corrupt parquet (Definition level" in problem.what and not documents(items)


@pytest.mark.parametrize("column", ["id", "text"])
def test_what_a_page_unpacks_to_is_told_by_itself(tmp_path, column):
    """And not by the footer, which the library does not look at."""
    rows = {"id": ["a", "b"], "text": ["Some words.", "More words."]}
    rows[column][0] = "x" * 3_000_000
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table(rows), path, compression="zstd", store_schema=False)
    group = pyarrow.parquet.ParquetFile(path).metadata.row_group(0)
    data = path.read_bytes()
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    sizes = (group.column(list(rows).index(column)).total_uncompressed_size, group.total_byte_size)
    for size in sizes:
        assert number(size) in data[footer:]
        data = data[:footer] + data[footer:].replace(number(size), number(1_500_000))
    path.write_bytes(data)
    items, _ = read("parquet", path, max_document_bytes=1_000_000)
    (problem,) = problems(items)
    assert problem.what == "unpacks to over a hundred times its size" and not documents(items)


def test_columns_of_one_name_are_one_line(tmp_path):
    table = pyarrow.table([["a"], ["b"]], names=["text", "text"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(UserError, match="column 'text' stands there twice"):
        read("parquet", tmp_path)


def test_ids_of_every_type_name_documents(tmp_path):
    far = pyarrow.array([2**60], pyarrow.timestamp("us"))
    day = pyarrow.array([2**31 - 1], pyarrow.int32()).cast(pyarrow.date32())
    lists = pyarrow.ListArray.from_arrays([0, 1], day)
    cases = (far, pyarrow.array([7]), pyarrow.array([["a"]]), day, lists)
    for number, ids in enumerate(cases):
        path = tmp_path / f"{number}.parquet"
        pyarrow.parquet.write_table(pyarrow.table({"id": ids, "text": ["Some words."]}), path)
        (name,) = documents(read("parquet", path)[0])
        assert name == [str(2**60), "7", "['a']", str(2**31 - 1), "4.parquet:0"][number]


# --- paths


def test_folders_that_link_into_each_other_are_walked_once(tmp_path):
    for here, there in ("ab", "ba"):
        (tmp_path / here).mkdir()
        (tmp_path / here / "x.txt").write_text(f"Book {here}.")
        for link in range(4):
            (tmp_path / here / f"link{link}").symlink_to(f"../{there}")
    files = list_files(SourceConfig(name="s", kind="books", path=str(tmp_path)))
    assert len(files) == 2


@pytest.mark.parametrize("own_numbers", [True, False])
def test_a_pattern_goes_through_no_folder_twice(tmp_path, monkeypatch, own_numbers):
    """Into no hidden one, which may be unreadable, and past none where folders have no inode
    numbers of their own."""
    stat, listdir = os.stat, os.listdir

    def without_numbers(path, **more):
        facts = stat(path, **more)
        return facts if own_numbers else os.stat_result((facts.st_mode, 0, *facts[2:]))

    def unreadable(folder):
        assert "/." not in folder
        return listdir(folder)

    for here, there in ("ab", "ba"):
        (tmp_path / here / ".hidden").mkdir(parents=True)
        for folder in (here, f"{here}/.hidden"):
            (tmp_path / folder / "x.txt").write_text(f"Book {here}.")
        for link in range(4):
            (tmp_path / here / f"link{link}").symlink_to(f"../{there}")
    (tmp_path / "y.txt").write_text("Book.")
    monkeypatch.setattr(os, "stat", without_numbers)
    monkeypatch.setattr(os, "listdir", unreadable)
    for pattern, names in (
        ("**/*.txt", ["a/link0/x", "a/x", "y"]),
        ("*/*.txt", ["a/x", "b/x"]),
        ("**", ["a/link0/x", "a/x", "y"]),
        ("a/**", ["link0/x", "x"]),
        ("?**/**/*.txt", ["a/link0/x", "a/x", "b/link0/x", "b/x"]),
        ("**/a/**", ["a/link0/x", "a/x"]),
    ):
        source = SourceConfig(name="s", kind="books", path=f"{tmp_path}/{pattern}")
        assert sorted(list_files(source).values()) == names
    with pytest.raises(UserError, match="no such file"):
        list_files(SourceConfig(name="s", kind="books", path=f"{tmp_path}/**/"))  # folders alone


def test_folders_deeper_than_the_stack_are_read(tmp_path):
    names = ["a"] * 150
    tmp_path.joinpath(*names).mkdir(parents=True)
    tmp_path.joinpath(*names, "x.txt").write_text("Words.")
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack()) + 100)
    try:
        files = list_files(SourceConfig(name="s", kind="books", path=str(tmp_path)))
    finally:
        sys.setrecursionlimit(before)
    assert list(files.values()) == ["/".join([*names, "x"])]


def test_a_sparse_file_of_any_size_is_cut_into_a_bounded_number_of_units(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "Words."}\n')
    os.truncate(path, 1 << 42)
    source = SourceConfig(name="s", kind="jsonl", path=str(path))
    assert len(plan_units(source, list_files(source), 0, unit_bytes=1000)) <= 1 << 17


@pytest.mark.parametrize(("name", "kind"), [("a.tar", "text"), ("a.csv", "csv")])
def test_what_each_part_reads_whole_is_cut_into_a_bounded_number_of_units(tmp_path, name, kind):
    """Else their work is the square of the file's length."""
    path = tmp_path / name
    path.write_bytes(b"id,text\n1,Words.\n")
    os.truncate(path, 1 << 30)
    source = SourceConfig(name="s", kind=kind, path=str(path))
    assert len(plan_units(source, list_files(source), 0, unit_bytes=1000)) == 32


@pytest.mark.parametrize("kind", ["sentences", "jsonl", "wikiextractor"])
def test_a_line_of_many_parts_is_read_once(tmp_path, monkeypatch, kind):
    size = 0

    class Counting(io.FileIO):
        def read(self, count=-1):
            nonlocal size
            data = super().read(count)
            size += len(data)
            return data

    monkeypatch.setattr(parts, "open_regular", Counting)
    path = tmp_path / ("a" if kind == "wikiextractor" else f"a.{kind.replace('sentences', 'txt')}")
    words = "Some words of a row that is read for itself alone."
    first, last = (
        words if kind == "sentences" else json.dumps({"id": n, "text": words}) for n in range(2)
    )
    path.write_text(f"{first}\n{'word ' * 600_000}\n{last}\n")
    items, units = read(kind, path, 20_000, max_document_bytes=1_000_000)
    assert units > 100 and size < 5 * path.stat().st_size
    assert list(documents(items).values()) == [[words], [words]]
    (problem,) = problems(items)
    assert "over max_document_bytes" in problem.what


def test_files_of_other_endings_are_told(tmp_path, capsys, monkeypatch):
    for name in ("a.txt", "b.zip", "c.epub", "d.zip", ".hidden.zip"):
        (tmp_path / name).write_text("Words.")
    list_files(SourceConfig(name="s", kind="text", path=str(tmp_path)))
    told = f"sources: s: {tmp_path}: passed over by ending: 2 .zip, 1 .epub"
    assert capsys.readouterr().out == f"{told}\n"
    for n in range(10):
        (tmp_path / f"a.odd{n}").write_text("Words.")
    list_files(SourceConfig(name="s", kind="text", path=str(tmp_path)))
    said = capsys.readouterr().out
    assert said.startswith(told) and said.endswith(", 3 others\n") and said.count("odd") == 7
    with open("/dev/full", "w") as full, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", full)  # it ends nothing that the line is lost
        assert len(list_files(SourceConfig(name="s", kind="text", path=str(tmp_path)))) == 1


def test_folders_that_a_glob_names_are_told(tmp_path, capsys):
    (tmp_path / "a/b.parquet").mkdir(parents=True)
    (tmp_path / "a/a.parquet").write_text("")
    for pattern, told in (("*", 1), ("*.parquet", 1), ("a*", 0), ("**/*", 0)):
        list_files(SourceConfig(name="s", kind="text", path=f"{tmp_path}/a/{pattern}"))
        assert capsys.readouterr().out.count("passed over 1 folder(s)") == told
    with pytest.raises(UserError, match="b.*: no such file, but 1 folder.s. of that name"):
        list_files(SourceConfig(name="s", kind="text", path=f"{tmp_path}/a/b*"))


@pytest.mark.parametrize(
    ("name", "kind"),
    [("a.txt", "text"), ("a.jsonl.gz", "jsonl"), ("d.xml.bz2", "wikipedia"), ("d.xml", "wikipedia")]
    + [("a.txt", "sentences"), ("b.tar", "books"), ("a.parquet", "parquet"), ("a.csv", "csv")],
)
def test_a_source_that_changes_while_it_is_read_is_one_line(tmp_path, name, kind):
    path = tmp_path / name
    begins = {"jsonl": b'{"text": "words"}\n', "wikipedia": b"<page></page>\n", "parquet": b"PAR1",
              "csv": b"id,text\n"}  # fmt: skip
    path.write_bytes(begins.get(kind, b"Words.\n") * 2000)
    write_vocabulary(tmp_path / "vocab.txt")
    source = {"name": "s", "kind": kind, "path": str(path)}
    config = write_config(tmp_path / "c.yaml", tmp_path / "vocab.txt", [source])
    job = plan_job(load(config, PrepareConfig), False, False)

    def read_now():
        for unit in job.units:
            list(documents_of(job, unit, Tally(), True))

    read_now()
    other_column = begins.get(kind, b"Other.\n").replace(b"text", b"body")
    path.write_bytes(other_column * 2001)
    with pytest.raises(UserError, match=f"{name}: has changed since this run began"):
        read_now()
    path.unlink()
    with pytest.raises((UserError, OSError), match=f"{name}: the file is gone|No such file"):
        read_now()
    os.mkfifo(path)
    with pytest.raises((UserError, OSError), match="not a regular file|has changed"):
        read_now()


def test_what_is_no_regular_file_is_one_line(tmp_path):
    os.mkfifo(tmp_path / "p.txt")
    for path in (tmp_path, tmp_path / "p.txt", "/dev/zero"):
        with pytest.raises(UserError, match="not a regular file"):
            read("books", path)
    for path in ("package:numpy.nosuch.deep/x", "package:/x", "package:.a/x"):
        with pytest.raises(UserError, match="is not installed"):
            resolve(path)


@pytest.mark.parametrize("pattern", ["*", "**/*", "*/a.txt", "shut/*", "s*/in/*.txt", "**/a.txt"])
def test_a_pattern_passes_over_nothing_that_cannot_be_read(tmp_path, monkeypatch, pattern):
    shut = tmp_path / "shut"
    for folder in (tmp_path, tmp_path / "open", shut, shut / "in"):
        folder.mkdir(exist_ok=True)
        (folder / "a.txt").write_text("Some words.")

    def refusing(how, inner):
        def asked(path=".", *more, **options):
            if f"{os.fspath(path)}/".startswith(f"{shut}/{inner}"):
                raise PermissionError(errno.EACCES, "Permission denied", path)
            return how(path, *more, **options)

        return asked

    # Root may read all.
    for name, inner in (("listdir", ""), ("scandir", ""), ("stat", "a"), ("stat", "i")):
        monkeypatch.setattr(os, name, refusing(getattr(os, name), inner))
    path = tmp_path / pattern
    if pattern == "*":  # for which nothing in `shut` is looked at
        assert documents(read("text", path)[0])
        return
    with pytest.raises(UserError, match="shut.*Permission denied"):
        read("text", path)


def test_a_pattern_passes_over_no_pipe_and_no_link_to_nothing(tmp_path):
    (tmp_path / "a.txt").write_text("Some words.")
    (tmp_path / "b.txt").symlink_to(tmp_path / "nothing")
    with pytest.raises(UserError, match="b.txt: a link to nothing"):
        read("text", tmp_path / "*.txt")
    (tmp_path / "b.txt").unlink()
    os.mkfifo(tmp_path / "b.txt")
    with pytest.raises(UserError, match="b.txt: not a regular file"):
        read("text", tmp_path / "*.txt")


@pytest.mark.parametrize("name", ["a.txt.xz", "B.TXT.7Z", "c.TAR.XZ"])
def test_a_packing_that_is_not_read_is_refused_in_a_folder_too(tmp_path, name):
    (tmp_path / "good.txt").write_text("Some words.")
    (tmp_path / name).write_bytes(lzma.compress(b"Other words."))
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(UserError, match=f"{name}: packed in a way that is not read"):
            read("text", path)


def zip_of(texts, packed=zipfile.ZIP_STORED):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", packed) as archive:
        for number, text in enumerate(texts):
            archive.writestr(f"{number}.txt", text)
    return buffer.getvalue()


@pytest.mark.parametrize("packed", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, None])
@pytest.mark.parametrize(
    "kind",
    ["text", "books", "tar", "crawl", "sentences", "jsonl", "csv", "tsv", "wikiextractor"]
    + ["wikipedia", "parquet"],
)
@pytest.mark.parametrize("unit_bytes", [1000, 10**9])
def test_a_zip_among_texts_is_named_and_gives_none(tmp_path, kind, packed, unit_bytes):
    texts = ["\n".join(document(seed, 20)) for seed in range(3)]
    data = zip_of([]) if packed is None else zip_of(texts, packed)
    good = {"jsonl": '{"text": "Some words."}\n', "csv": 'id,text\n1,"Some words."\n'}
    good |= {"tsv": "id\ttext\n1\tSome words.\n", "wikiextractor": wikiextractor([1])}
    table = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": ["Some words."]}), table)
    good |= {"wikipedia": dump([1]), "parquet": table.getvalue()}
    folder = tmp_path / "in"
    folder.mkdir()
    if kind == "tar":
        kind = "text"
        with tarfile.open(folder / "a.tar", "w") as tar:
            for name, content in (("a.txt", b"Some words."), ("z.txt", data)):
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    else:
        ending = {"jsonl": ".jsonl", "csv": ".csv", "tsv": ".tsv", "wikiextractor": ""}
        ending |= {"wikipedia": ".xml", "parquet": ".parquet"}
        first = good.get(kind, "Some words.\n")
        first = first.encode() if isinstance(first, str) else first
        for name, content in (("a", first), ("z", data)):
            (folder / f"{name}{ending.get(kind, '.txt')}").write_bytes(content)
    items, _ = read(kind, folder, unit_bytes)
    assert len(documents(items)) == 1
    found = {(problem.place, problem.what) for problem in problems(items)}
    said = {"wikipedia": "no dump: ", "parquet": "corrupt parquet "}
    (what,) = (what for _, what in found)
    assert what.startswith(said.get(kind, "not text: it is a zip or Office file"))


@pytest.mark.parametrize("kind", ["text", "books", "crawl", "sentences", "jsonl", "csv"])
@pytest.mark.parametrize(
    ("begin", "said"),
    [(rb"{\rtf1\ansi ", "RTF"), (b"\xef\xbb\xbf\n{\\rtf1 ", "RTF"), (b"%PDF-1.4\n", "PDF")]
    + [(b"\xef\xbb\xbf" * 2 + b" " * 200 + b"{\\urtf1 ", "RTF")]
    + [(b"%!PS-Adobe-3.0\n", "PostScript"), (b"\x04%!PS-Adobe-3.0\n", "PostScript")]
    + [(b"%!\n", "PostScript"), (b"\x1b%-12345X@PJL JOB\n%!PS-Adobe-3.0\n", "PostScript")],
)
def test_a_file_of_marks_that_are_text_is_named_and_gives_none(tmp_path, kind, begin, said):
    good = {"jsonl": '{"text": "Some words."}\n', "csv": 'id,text\n1,"Some words."\n'}
    ending = f".{kind}" if kind in good else ".txt"
    (tmp_path / f"a{ending}").write_text(good.get(kind, "Some words.\n"))
    (tmp_path / f"z{ending}").write_bytes(begin + "\n".join(document(0, 20)).encode())
    items, _ = read(kind, tmp_path)
    assert len(documents(items)) == 1
    assert {problem.what for problem in problems(items)} == {f"not text: it is {said}"}


def noise_of(kind):
    text = "\n".join(p for seed in range(300) for p in document(seed)).encode()
    numbers = np.random.Generator(np.random.Philox(5))
    return {
        "gzip": lambda: gzip.compress(text)[20:],
        "bzip2": lambda: bz2.compress(text)[20:],
        "zstd": lambda: zstandard.compress(text)[20:],
        "xz": lambda: lzma.compress(text),
        "lz4": lambda: bytes(pyarrow.Codec("lz4").compress(text)),
        "zip": lambda: zip_of([text], zipfile.ZIP_DEFLATED)[60:],
        "random": lambda: numbers.bytes(100_000),
        "some": lambda: numbers.bytes(600),
        "sound": lambda: numbers.normal(0, 2000, 30_000).astype("<i2").tobytes(),
        "numbers": lambda: numbers.normal(0, 1, 20_000).astype("<f4").tobytes(),
    }[kind]()


@pytest.mark.parametrize(
    "noise",
    ["gzip", "bzip2", "zstd", "xz", "lz4", "zip", "random", "some", "sound", "numbers"],
)
@pytest.mark.parametrize("kind", ["sentences", "jsonl", "csv", "tsv", "wikiextractor"])
def test_binary_data_among_lines_is_named_and_gives_no_text(tmp_path, kind, noise):
    texts = [f"Words of row {n} that are the text of a line of their own here." for n in range(99)]
    form = {"sentences": "{}\n", "jsonl": '{{"text": "{}"}}\n', "csv": '"{}"\n', "tsv": "{}\n"}
    form["wikiextractor"] = '<doc id="1" title="T">\n\n{}\n</doc>\n'
    rows = [form[kind].format(text) for text in texts]
    head = "text\n" if kind in ("csv", "tsv") else ""
    before, behind = ("".join(part).encode() for part in ([head, *rows[:50]], rows[50:]))
    path, binary = tmp_path / "a", noise_of(noise)
    for data in (before + binary + b"\n" + behind, before + behind + binary):
        path.write_bytes(data)
        for unit_bytes in (10**9, 3000):
            items, _ = read(kind, path, unit_bytes, min_paragraph_words=0)
            # In a column of two bytes a quote may open, and swallow what follows.
            found = [p for item in items if isinstance(item, Document) for p in item.paragraphs]
            assert set(found) <= set(texts) and len(found) >= 49
            assert len(found) >= 97 or kind in ("csv", "wikiextractor")
            assert any("not text: binary data" in p.what for p in problems(items))


def test_short_lines_within_binary_data_are_the_same_wherever_a_part_begins(tmp_path):
    random = np.random.Generator(np.random.Philox(11))
    kinds = [
        lambda: b"Words of a line that is long enough, number %d" % random.integers(10**6),
        lambda: b"word %d" % random.integers(10**4),
        lambda: random.permutation(np.arange(1, 8, dtype=np.uint8)).tobytes() * 2 + b"\x10",
        lambda: "é".encode("latin-1"),
    ]
    path = tmp_path / "a.txt"
    for _ in range(20):
        lines = [kinds[random.choice(4, p=[0.4, 0.4, 0.1, 0.1])]() for _ in range(99)]
        path.write_bytes(b"\n".join(lines))
        whole, *cut = (
            [p for d in documents(read("sentences", path, size)[0]).values() for p in d]
            for size in (10**9, 1000, 1024, 1500)
        )
        assert cut == [whole] * 3


def test_binary_data_without_line_ends_takes_no_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "CHUNK", 4096)  # as if the file were large
    monkeypatch.setattr(compressed, "CHUNK", 4096)
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(bytes([*range(1, 8), *range(16, 25)]) * 500_000))
    ((problem,), _), peak = with_peak(read, "sentences", path, max_document_bytes=1000)
    assert "over max_document_bytes" in problem.what
    assert peak < 200_000


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "cp1251", "iso2022_jp", "iso2022_kr"])
@pytest.mark.parametrize(
    "between", [" ", "\f", "\x1b[1;31m", "\b", "\x01", "\x02\x03", "\x1c\x1e", "\0"]
)
def test_lines_of_odd_texts_are_not_called_binary(tmp_path, encoding, between):
    scripts = "Wörter Ωμέγα слова 言葉 단어 שלום كلمة शब्द คำ ցանկ სიტყვა ቃል"
    line = scripts.replace(" ", between).encode(encoding, "ignore")
    path = tmp_path / "a.txt"
    for ending in (b"\n", b"\r\n", b"\r"):
        path.write_bytes((line + ending) * 300)
        for unit_bytes in (10**9, 3000):
            items, _ = read("sentences", path, unit_bytes)
            assert not any("binary data" in problem.what for problem in problems(items))


@pytest.mark.parametrize("pattern", ["", "/**/*.txt", "/**"])
def test_an_output_folder_within_a_source_is_none_of_it(tmp_path, capsys, pattern):
    folder = tmp_path / "in"
    folder.mkdir()
    for seed in range(4):
        (folder / f"{seed}.txt").write_text("\n".join(document(seed)))
    source = {"name": "s", "kind": "text", "path": f"{folder}{pattern}"}
    vocab = write_vocabulary(tmp_path / "vocab.txt")
    more = {"out": str(folder / "out"), "heldout_fraction": 0}
    config = load(write_config(tmp_path / "c.yaml", vocab, [source], **more), PrepareConfig)
    first = prepare(config, Ranks())
    assert prepare(config, Ranks()) == first
    assert prepare(config, Ranks(), fresh=True) == first
    assert first.sources[0].documents_in == 4
    assert "all is done already" in capsys.readouterr().out


@pytest.mark.parametrize("exact", [True, False])
def test_a_file_that_is_read_twice_is_told(tmp_path, capsys, exact):
    folder = tmp_path / "in"
    folder.mkdir()
    for seed in range(2):
        (folder / f"{seed}.txt").write_text("\n".join(document(seed)))
    config = write_config(tmp_path / "c.yaml", write_vocabulary(tmp_path / "vocab.txt"), [])

    def told(*paths):
        source = {"name": "s", "kind": "text", "path": [str(path) for path in paths]}
        more = {"sources": [source], "duplicates": {"exact": exact}}
        plan_job(
            load(config, PrepareConfig, [override(k, v) for k, v in more.items()]), True, False
        )
        return [line for line in capsys.readouterr().out.splitlines() if "more than once" in line]

    assert told(folder, folder / "1.txt") == told(folder / "*.txt", folder) == []
    (tmp_path / "link").symlink_to(folder)
    (told_of,) = told(folder, tmp_path / "link")
    assert f": 2, the first: {tmp_path}/link/0.txt is {folder}/0.txt;" in told_of
    assert told_of.endswith("dropped as duplicates" if exact else "counted each time")
    os.link(folder / "1.txt", folder / "hard.txt")
    (told_of,) = told(folder)
    assert f": 1, the first: {folder}/hard.txt is {folder}/1.txt;" in told_of


# --- vocabulary


def test_the_share_of_unknown_pieces_is_told(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("\n".join(document(3)))
    source = {"name": "own", "kind": "text", "path": str(tmp_path / "a.txt")}
    prepared(tmp_path, source)
    printed = capsys.readouterr().out
    assert "[UNK] among the tokens: own 0.00 %" in printed and "warning" not in printed
    (tmp_path / "a.txt").write_text("\n".join([*document(3), "Слова другого языка. " * 40]))
    prepared(tmp_path, source)
    assert "warning: source own: over 1 % of its tokens are [UNK]" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: "\ufeff" + text, "byte order mark"),
        (lambda text: text.replace("\nthe\n", "\n\n"), r"line \d+ is empty"),
        (lambda text: text.replace("\nthe\n", "\nthe of\n"), r"line \d+ holds a blank"),
        (lambda text: text.replace("\nthe\n", "\nthe\u3000\n"), r"line \d+ holds a blank"),
    ],
)
def test_a_vocabulary_that_is_none_is_one_line(tmp_path, change, message):
    path = write_vocabulary(tmp_path / "vocab.txt")
    path.write_text(change(path.read_text()), encoding="utf-8")
    with pytest.raises(UserError, match=f"vocab.txt: .*{message}"):
        Tokenizer.from_file(path, True)


# --- no page holds a rank


@pytest.mark.parametrize(
    "unit",
    ["<ref>", "<math>", "{{a|", "{{{a|", "[[a|", "<b>", "<span a=", "<b a='", "[http://x ", ", ,"]
    + [
        ':<source lang="/>',
        "<br a='>",
        "</b><li>",
        "<li><dd></td>",
        "<tbody>a",
        "<colgroup><thead>",
        "</ref><ref>",
        "\n:",
        "<br>",
        "{{ ",
        "[[a\n",
        "\n{|",
        "<!--",
        "<!--<nowiki>",
        "<nowiki>[</nowiki>'",
        "<pre><!-- -->",
        "|",
        "( ,",
        "`a <",
        "=a",
        "=<b>",
        "<p>\n=</p>a",
        "<b>\n=b=</b>",
        "<br.>",
        "<br{{>",
        "<wbr. a=b>",
    ],
)
def test_wikitext_of_a_vandal_takes_no_more_than_its_length(unit):
    text = unit * (60_000 // len(unit))
    wikitext.is_disambiguation("Title", text)
    assert len("".join(wikitext.passages(text))) <= len(text)


@pytest.mark.parametrize("unit", ["[[x]y]]", "[[File:x|[[a]b]] "])
def test_links_with_a_lone_sign_in_a_picture_take_no_more_than_their_length(unit):
    text = "[[File:a|" + unit * (400_000 // len(unit))
    assert len("".join(wikitext.passages(text))) <= len(text)


@pytest.mark.parametrize(
    "kind",
    ["stray lines", "an open document", "JSON behind a document", "bz2", "bz2 of empty streams"],
)
def test_what_holds_no_record_is_read_through_by_one_part(tmp_path, kind):
    path, size = tmp_path / "wiki_00", 24_000_000 if kind == "bz2" else 8_000_000
    line = "words of a line outside of any document\n"
    document = (
        '<doc id="1" url="u" title="T">\nT\n\nSome words of prose, as many as a paragraph has.\n'
    )
    if kind.startswith("bz2"):
        path, line = tmp_path / "d.xml.bz2", "\0"
        rest = bytes(size) if kind == "bz2" else bz2.compress(b"") * 400_000
        size = len(rest)
        path.write_bytes(bz2.compress(dump([1]).encode()) + rest)
    else:
        line = f'{{"id": "2", "text": "{line.strip()}"}}\n' if kind.startswith("JSON") else line
        first = document if kind == "an open document" else f"{document}</doc>\n"
        path.write_text(first + line * (size // len(line)))
    unit_bytes = size // 8 if kind.startswith("bz2") else size // 24

    def bytes_read() -> int:
        return int(re.search("rchar: ([0-9]+)", Path("/proc/self/io").read_text())[1])

    before = bytes_read()
    items, units = read(
        "wikipedia" if kind.startswith("bz2") else "wikiextractor", path, unit_bytes
    )
    assert units > 20 and bytes_read() - before < 10 * size
    if kind == "an open document":
        assert [problem.what[:20] for problem in problems(items)] == ["the file ends inside"]
    elif kind.startswith("JSON"):
        assert len(documents(items)) == 2
    else:
        assert len(documents(items)) == 1
        assert len(problems(items)) == (kind != "bz2 of empty streams")


def test_a_page_of_comments_takes_no_more_than_its_length(tmp_path):
    face, path, times = "\N{GRINNING FACE}", tmp_path / "d.xml", 3_000_000
    page = "<page><title>T</title><ns>0</ns><id>1</id><revision><text>Words of prose. {}</text>"
    text = f"{face}<!---->" * times
    path.write_text(dump([2], f"{page.format(text)}</revision></page>\n"))
    found = documents(read("wikipedia", path, max_document_bytes=40_000_000)[0])
    assert found["1"] == [f"Words of prose. {face * times}"] and "2" in found


def test_the_names_in_a_page_take_no_more_than_its_length(tmp_path):
    path, name = tmp_path / "d.xml", "u" * 50_000
    page = "<page><title>T</title><ns>0</ns><id>1</id><revision><text>Words of prose.</text>"
    odd = "".join(f"<a{n} p:a{n}=''/>" for n in range(2000))
    odd = f"<odd xmlns='{name}' xmlns:p='{name}'>{odd}</odd>"
    path.write_text(dump([2], f"{page}</revision>{odd}</page>\n"))
    tracemalloc.start()
    found = documents(read("wikipedia", path)[0])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found["1"] == ["Words of prose."] and "2" in found and peak < 20_000_000


@pytest.mark.parametrize(
    "unit",
    ["\n[[{|", "\n</b>{|", "\n{{{|", "\n\u00a0{|", "{{{</i>{{{{{{{a|", "[http://x )[[", "[urn:x "],
)
def test_marks_that_come_to_stand_beside_each_other_take_no_more_than_their_length(unit):
    """Where what stood between them, or before them in their line, is taken out."""
    text = unit * (400_000 // len(unit))
    assert len("".join(wikitext.passages(text))) <= len(text)


@pytest.mark.parametrize("deep", [8, 9, 20])
@pytest.mark.parametrize(
    ("begin", "end"),
    [
        ("<b>[[a|", "]]</b>"),
        ("{{a|<b>[[a|", "]]</b>}}"),
        ("<b>[[a|", "</b>]]"),
        ("[[a|{{b|", "]]}}"),
        ("[http://a <ul>", "</ul>]"),
    ],
)
def test_what_is_nested_deep_or_crosswise_takes_no_more_than_its_length(deep, begin, end):
    unit = begin * deep + "x{" + end * deep + "a"
    text = f"<div>{unit * (100_000 // len(unit))}</div>"
    assert len("".join(wikitext.passages(text))) <= len(text)


@pytest.mark.parametrize(
    ("name", "unit"),
    [("table", "<tr><td>a<th>b"), ("ul", "<li>a"), ("dl", "<dt>a<dd>b"), ("div", "<td>")],
)
def test_cells_and_items_without_an_end_take_no_more_than_their_length(name, unit):
    text = f"Some words.\n<{name}>{unit * (200_000 // len(unit))}</{name}>\nMore words."
    found = wikitext.passages(text)
    assert (found[0], found[-1]) == ("Some words.", "More words.")


def test_a_line_of_too_many_equal_signs_is_text():
    text = "=a" * 200_000
    assert wikitext.passages(f"== Head ==\nSome words.\n{text}\nMore.") == [
        "Some words.",
        text,
        "More.",
    ]


def test_a_mark_that_is_taken_out_parts_no_word():
    assert wikitext.passages("A wo[[rd of [[<b>File:x.jpg|thumb|a picture]] pro</i>se.") == [
        "A word of prose."
    ]


def test_tags_that_only_html_leaves_open_take_no_more_than_their_length():
    text = "<b>&nbsp;<source lang=a>" * 16_000
    assert wikitext.passages(f"Words {text} of prose.") == ["Words of prose."]


def test_a_doc_line_of_a_vandal_takes_no_more_than_its_length(tmp_path):
    (tmp_path / "w").write_bytes(b'<doc id="1"' + b' title="' * 200_000 + b"\n")
    (problem,) = read("wikiextractor", tmp_path)[0]
    assert problem.what == "a <doc> line that cannot be read"


@pytest.mark.parametrize("suffix", [".html", ".md", ".rst"])
@pytest.mark.parametrize(
    "unit",
    ["<p a=", "<b>", "<p>x", "<!--", "](", "![", "[a](", "[[a]", "`a <", "_a", ":a:`", "::\n", "> "]
    + ["`" + " " * 20_000, "\n[a]:" + " " * 40_000 + "x y"],
)
def test_markup_of_a_vandal_takes_no_more_than_its_length(tmp_path, suffix, unit):
    # Most of these cost hours where a mark is looked for from every opening on.
    (tmp_path / f"a{suffix}").write_text("x " + unit * (100_000 // len(unit)))
    items, _ = read("text", tmp_path, suffixes=[suffix])
    assert len(items) <= 2 and sum(map(len, sum(documents(items).values(), []))) <= 100_002


@pytest.mark.parametrize(
    ("shown", "begin", "unit", "end"),
    [(markdown_paragraphs, "", unit, " a") for unit in ("> ", "- ", ">", "`", "~")]
    + [(rst_paragraphs, "", unit, " a") for unit in ("+-", "== ")]
    + [(wikitext.passages, *text) for text in (("", ",", " a"), ("x (", ",", ") a"))]
    + [(wikitext.passages, *text) for text in (("[http://", "a", " b]"), ("{|\n", "a", "\n|}"))],
)
def test_a_line_of_a_vandal_takes_some_times_its_memory(shown, begin, unit, end):
    """The engine of regular expressions notes some 100 bytes for each way back that it has."""
    text = begin + unit * (100_000 // len(unit)) + end
    tracemalloc.start()
    try:
        list(shown(text))
        assert tracemalloc.get_traced_memory()[1] < 50 * len(text)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "unit",
    ["`" * 30 + " ", "\\``` a ", "> ~~~\n"] + ["````\n```\n", "````a\n", "````\n```b\n", "~~~a\n"],
)
def test_code_of_a_vandal_takes_no_more_than_its_length(unit):
    assert len(" ".join(markdown_paragraphs(unit * (1_000_000 // len(unit))))) < 1_000_000


def test_text_behind_a_fence_that_is_none_or_not_closed_is_kept(tmp_path):
    (tmp_path / "a.md").write_text(
        "One.\n\n```pip install tool```\n\nTwo.\n\n1.  ```bash\n    run()\n    ```\n\nThree.\n\n"
        "````\n```\nrun()\n```\n````\n\nFour.\n\n"
        "~~~ `a`\nrun()\n~~~\nFive.\n\n```\nSix.\n\nSeven.\n"
    )
    (found,) = documents(read("text", tmp_path, suffixes=[".md"])[0]).values()
    assert found == ["One.", "pip install tool", *"Two. Three. Four. Five. Six. Seven.".split()]


@pytest.mark.parametrize("first", ["```py", "````py", "````"])
def test_a_fence_with_a_mark_doubled_is_closed_and_the_next_ones_are_fences(first):
    text = (
        f"One.\n\n{first}\nrun()\n```\n\nTwo.\n\n```py\nrun() <!--\n```\n\n"
        "Three.\n\n```\nx\n```\n\nFour.\n\n<!-- c -->\n\nFive."
    )
    assert markdown_paragraphs(text) == [*"One. Two. Three. Four. Five.".split()]


def test_a_nested_fence_with_a_mark_doubled_is_closed_by_its_own_marks():
    text = "One.\n\n`````md\n```py\nrun()\n```\n````\n\nTwo.\n\n```py\nrun()\n```\n\nThree."
    assert markdown_paragraphs(text) == ["One.", "Two.", "Three."]


def test_a_fence_of_tildes_with_a_mark_doubled_is_closed():
    for first in ("~~~~py", "~~~~"):
        text = f"One.\n\n{first}\nrun()\n~~~\n\nTwo.\n\n~~~py\nrun()\n~~~\n\nThree."
        assert markdown_paragraphs(text) == ["One.", "Two.", "Three."]


@pytest.mark.parametrize("damaged", [1, 3])
def test_where_a_fence_has_lost_its_quotation_those_of_others_are_fences(damaged):
    block = [">", "> ```py", "> run()", "> ```", ">", ""]
    lost = [line.removeprefix("> ") if n == damaged else line for n, line in enumerate(block)]
    lines = ["> One.", *lost, *(["> Two.", *block] * 2), "> Three. <!-- -->"]
    shown = " ".join(markdown_paragraphs("\n".join(lines)))
    assert [shown.count(text) for text in ("One.", "Two.", "Three.")] == [1, 2, 1]
    assert shown.count("run()") <= 1


def test_of_a_title_underlined_with_tildes_no_later_code_is_text():
    text = (
        "Title\n~~~~~\n\nOne.\n\n```\nrun() <!--\n```\n\nTwo.\n\n"
        "Title\n~~~\n\nThree. -->\n\nTitle\n~~~~\n"
    )
    shown = [part for part in markdown_paragraphs(text) if "Title" not in part]
    assert shown == ["One.", "Two.", "Three. -->"]


def test_a_fence_that_nothing_closes_is_none_and_shorter_ones_are():
    text = "One.\n\n````md\nTwo.\n\n```py\nrun()\n```\n\n~~~\nrun()\n~~~\n\nThree."
    shown = markdown_paragraphs(text)
    assert shown[0] == "One." and "Two." in " ".join(shown) and shown[-1] == "Three."
    assert "run()" not in " ".join(shown)


@pytest.mark.parametrize("rest", ["```py", "```", "~~~py", "~~~"])
@pytest.mark.parametrize("marks", ["````", "`````", "~~~~"])
@pytest.mark.parametrize("damage", ["begin lost", "begin doubled", "end lost", "end doubled"])
def test_a_damaged_fence_that_shows_another_one_takes_no_more_than_one_paragraph(
    marks, damage, rest
):
    inner = marks[:3]
    text = f"Sample.\n\n{inner}py\nrun()\n{inner}\n"
    begin, end = f"{marks}markdown\n", f"{marks}\n"
    lost = {"begin": begin, "end": end}[damage.split()[0]]
    damaged = lost[1:] if "lost" in damage else lost[0] + lost
    begin, end = (damaged if side is lost else side for side in (begin, end))
    prose = [f"Paragraph {n}." for n in range(9)]
    code = f"\n\n{rest}\nrun()\n{rest[:3]}\n\n"
    shown = " ".join(markdown_paragraphs(f"One.\n\n{begin}{text}{end}\n" + code.join(prose)))
    # Bare tildes that nothing closes underline titles, and so may all that follow.
    underlined = marks[0] == rest[0] == "~" and damage == "begin lost"
    assert shown.startswith("One.") and (shown.count("run()") <= 1 or underlined)
    assert sum(line in shown for line in prose) >= 8


def test_a_longer_fence_of_tildes_with_a_name_and_a_mark_doubled_is_closed():
    text = "One.\n\n~~~~~md\n~~~py\nrun()\n~~~\n~~~~\n\nTwo.\n\n~~~py\nrun()\n~~~\n\nThree."
    assert markdown_paragraphs(text) == ["One.", "Two.", "Three."]


def test_a_fence_is_closed_as_deep_as_its_item_and_ends_with_its_quotation(tmp_path):
    (tmp_path / "a.md").write_text(
        "1. One:\n   ```\n   run()\n    ```\n2. Two:\n\n    ~~~\n    run()\n     ~~~\n\n"
        "Three.\n\n> Four.\n> ```\n> run()\n> ```\n> Five.\n\n> ```\n> run()\n\nSix.\n\n"
        "> > ```\n> > run()\n> Seven.\n\n```\n> ```\nrun()\n```\n"
    )
    (found,) = documents(read("text", tmp_path, suffixes=[".md"])[0]).values()
    assert found == ["One:", "Two:", *"Three. Four. Five. Six. Seven.".split()]


def test_text_behind_the_end_of_a_page_is_kept(tmp_path):
    page = "<html><head><title>t</title></head><body><p>{}</p></body></html>"
    joined = page.format("One.") + "Two.<nav>n</nav>\n<!doctype html>" + page.format("Three.")
    (tmp_path / "a.html").write_text(joined)
    (found,) = documents(read("text", tmp_path, suffixes=[".html"])[0]).values()
    assert found == ["One.", "Two.", "Three."]


def test_an_entity_of_many_digits_is_no_character(tmp_path):
    number = "&#" + 5000 * "9" + ";"
    assert wikitext.passages(f"A word {number} and {number.replace('&', '&amp;')} more.") == [
        "A word and more."
    ]
    path, prose = tmp_path / "wiki_00", "Words " * 20 + "end."
    path.write_text(f'<doc id="1" url="u" title="{number}">\n{prose}\n</doc>\n')
    assert documents(read("wikiextractor", path)[0]) == {"1": [prose]}


def test_a_large_page_is_searched_once(tmp_path, monkeypatch):
    monkeypatch.setattr(compressed, "CHUNK", 1024)  # as if the page were larger still
    path = tmp_path / "d.xml"
    path.write_text("<page>" * 60_000)
    assert len(problems(read("wikipedia", path)[0])) == 60_000
    path.write_text("<page><title>T</title><id>1</id><revision><text>" + "a word. " * 8_000_000)
    (problem,) = problems(read("wikipedia", path, max_document_bytes=10**9)[0])
    assert problem.what == "the file ends inside a page"
