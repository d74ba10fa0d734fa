"""Files of every format with seeded damage: no traceback, an end, and where a checksum can tell no
loss without a word and nothing altered."""

import bz2
import gzip
import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from core.errors import UserError
from data_pipeline.corpus import wikitext
from data_pipeline.corpus.manifest import load_manifest
from data_pipeline.corpus.shards import iterate_documents, parse_index
from data_pipeline.corpus.verify import verify
from tests.damage import damaged
from tests.data_pipeline.corpus import test_foreign
from tests.data_pipeline.corpus.text import document, documents, dump, problems, read, wikiextractor
from tests.datasets import write_dataset

no_hang = test_foreign.no_hang  # the fixture


def megabytes(key):
    status = Path("/proc/self/status").read_text()
    return int(status.split(key)[1].split()[0]) / 1000


@pytest.fixture(autouse=True)
def no_memory():
    """Of files of some 100 kB, whatever sizes they state."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak is measured from here on
    before = megabytes("VmRSS:")
    yield
    assert megabytes("VmHWM:") - before < 150


PAGES = range(1, 40)
DUMP = dump(PAGES).encode()
JSONL = "".join(
    json.dumps({"id": n, "text": "\n".join(document(n))}) + "\n" for n in PAGES
).encode()
CSV = "".join(
    '{},"{}"\r\n'.format(n, "\n".join(document(n)).replace("the", '""the""')) for n in PAGES
)
CSV = b"id,text\r\n" + CSV.encode()
TSV = b"id\ttext\n" + "".join(f"{n}\t{' '.join(document(n))}\n" for n in PAGES).encode()


def tar() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for n in PAGES:
            data = "\n".join(document(n)).encode()
            member = tarfile.TarInfo(f"{n}.txt")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def parquet() -> bytes:
    buffer = io.BytesIO()
    table = pyarrow.table({"id": list(PAGES), "text": ["\n".join(document(n)) for n in PAGES]})
    more = {"write_page_checksum": True, "compression": "zstd", "use_dictionary": False}
    pyarrow.parquet.write_table(table, buffer, row_group_size=10, **more)
    return buffer.getvalue()


def zstd(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_checksum=True).compress(data)


# kind, bytes, and whether a change of any byte of a document can be told
FILES = {
    "d.xml": ("wikipedia", DUMP, False),
    "d.xml.bz2": ("wikipedia", bz2.compress(DUMP, 1), True),
    "d.xml.gz": ("wikipedia", gzip.compress(DUMP, mtime=0), True),
    "wiki_00": ("wikiextractor", wikiextractor(PAGES).encode(), False),
    "b.tar": ("books", tar(), False),
    "b.tar.gz": ("books", gzip.compress(tar(), mtime=0), True),
    "b.tar.bz2": ("books", bz2.compress(tar(), 1), True),
    "b.tar.zst": ("books", zstd(tar()), True),
    "a.txt": ("text", "\n".join(document(1, 60)).encode(), False),
    "a.txt.gz": ("text", gzip.compress("\n".join(document(1, 60)).encode(), mtime=0), True),
    "s.txt": ("sentences", "\n".join(document(1, 60)).encode(), False),
    "a.jsonl": ("jsonl", JSONL, False),
    "a.jsonl.zst": ("jsonl", zstd(JSONL), True),
    "a.csv": ("csv", CSV, False),
    "a.csv.gz": ("csv", gzip.compress(CSV, mtime=0), True),
    "a.tsv": ("tsv", TSV, False),
    "a.parquet": ("parquet", parquet(), True),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("unit_bytes", [5_000, 10**9])
def test_damaged_input(tmp_path, name, unit_bytes):
    kind, data, is_checked = FILES[name]
    path = tmp_path / name
    path.write_bytes(data)
    whole = documents(read(kind, path, unit_bytes)[0])
    assert len(whole) > 30 or kind in ("text", "sentences")
    random = np.random.Generator(np.random.Philox(len(name)))
    for attempt in range(25):
        path.write_bytes(damaged(data, random))
        try:
            items, _ = read(kind, path, unit_bytes)
        except UserError as error:
            assert str(path) in str(error) and "\n" not in str(error)
            continue
        if is_checked:
            assert documents(items) == whole or problems(items), attempt
            assert documents(items).items() <= whole.items(), attempt
        assert all(problem.file == str(path) for problem in problems(items))


def test_damaged_wikitext():
    text = (
        "'''A''' [[b|c]] {{lang|el|d}} <ref name=x>y {{cite|z}}</ref> (born {{IPA|q}}; 5 May)\n"
        "{| class=a\n! h\n|-\n| cell\n|}\n* [[File:x.jpg|thumb|A [[caption]]]]\n"
        "<b>bold<i>both</i></b> [http://x.org outer] &nbsp; <math>x^2</math> "
        "<!-- gone --> {{convert|5|km}}\n"
        "== H ==\n"
    ) * 8  # fmt: skip
    random = np.random.Generator(np.random.Philox(7))
    for _ in range(150):
        data = text.encode()
        for _ in range(int(random.integers(1, 30))):
            data = damaged(data + b" ", random)
        found = wikitext.passages(data.decode("utf-8", "replace"))
        assert all(line and "\n" not in line for line in found)


def test_damaged_datasets(tmp_path):
    texts = [[[5 + i % 7] * (3 + i), [6] * 30] for i in range(40)]
    write_dataset(tmp_path, texts, vocab=50, documents_per_shard=20)
    whole = [document.ids.tolist() for document in iterate_documents(tmp_path)]
    random = np.random.Generator(np.random.Philox(9))
    for name in ("manifest.json", "shard-000000.idx", "shard-000000.tar", "vocab.txt"):
        data = (tmp_path / name).read_bytes()
        for _ in range(40):
            bad = damaged(data, random)
            (tmp_path / name).write_bytes(bad)
            assert verify(tmp_path) or bad == data
            if name == "manifest.json" and bad != data:
                with pytest.raises(UserError, match="manifest.json"):
                    load_manifest(tmp_path)
            elif name.endswith(".idx"):
                try:
                    parse_index(bad, name)
                except UserError as error:
                    assert name in str(error)
        (tmp_path / name).write_bytes(data)
    assert [document.ids.tolist() for document in iterate_documents(tmp_path)] == whole
