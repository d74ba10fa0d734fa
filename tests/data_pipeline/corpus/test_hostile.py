"""A data set of a stranger: it is read or refused in one line; nothing is executed, no file is
written or read outside, no terminal obeys it."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from core.commands import dispatch
from core.errors import UserError
from data_pipeline.__main__ import COMMANDS
from data_pipeline.corpus import show, source_map, verify
from data_pipeline.corpus.manifest import SOURCES, Manifest, load_manifest
from data_pipeline.corpus.shards import SOURCE_AT, iterate_documents, parse_index
from data_pipeline.corpus.tokenizer import SPECIAL_TOKENS, Tokenizer
from data_pipeline.stream.dataset import Dataset
from data_pipeline.stream.plan import StreamConfig
from tests.data_pipeline.stream.servers import http_server
from tests.datasets import write_dataset

ESCAPE = "\x1b]0;owned\x07"


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    write_dataset(folder, [[[7, 8], [9]]] * 3, heldout=[[[10]]], vocab=30)
    return folder


def rename(folder: Path, change: Callable[[Manifest], Manifest]) -> None:
    """The manifest changed by one who knows how to compute its id."""
    (folder / "manifest.json").write_text(change(load_manifest(folder)).to_json())


def first_shard(**values: Any) -> Callable[[Manifest], Manifest]:
    return lambda m: replace(m, shards=(replace(m.shards[0], **values), *m.shards[1:]))


@pytest.mark.parametrize(
    ("column", "at", "value"),
    [
        ("offsets", 1, 2**64 - 1024),
        ("offsets", 1, 2**40),
        ("offsets", 1, 1025),
        ("offsets", 1, 512),
        ("sizes", 0, 33),
        ("sizes", 0, 2**32 - 1),
        ("sizes", 2, 0),
        ("sentence_lengths", 3, 65535),
        ("sentence_lengths", slice(2), [3, 0]),
        ("sentence_counts", slice(3), [6, 0, 0]),
    ],
)
def test_an_index_of_what_cannot_be_is_one_line(
    dataset: Path, column: str, at: Any, value: Any
) -> None:
    path = dataset / "shard-000000.idx"
    data = bytearray(path.read_bytes())
    view = getattr(parse_index(data, ""), column)  # of the bytes themselves
    view[at] = value
    path.write_bytes(data)
    rename(dataset, first_shard(idx_sha256=hashlib.sha256(data).hexdigest()))
    line = f"{path}: (row [0-3] is that of no document|[0-9,]+ tokens, the|a sentence of no tokens)"
    for read in (
        lambda: list(iterate_documents(dataset)),
        lambda: show.main([str(dataset), "--document", "train-0"]),
        lambda: source_map.main([str(dataset)]),
        lambda: Dataset(StreamConfig(dir=str(dataset))).index(load_manifest(dataset).shards[0]),
    ):
        with pytest.raises(UserError, match=line):
            read()
    assert any(found.startswith("shard-000000") for found in verify.verify(dataset))


@pytest.mark.parametrize(("lengths", "tokens"), [([1, 2], 0), ([1, 1], 1)])
def test_an_index_of_other_lengths_than_its_records_is_named_by_verify(
    dataset: Path, lengths: list[int], tokens: int
) -> None:
    path = dataset / "shard-000000.idx"
    data = bytearray(path.read_bytes())
    parse_index(data, "").sentence_lengths[2:4] = lengths
    path.write_bytes(data)
    shard = load_manifest(dataset).shards[0]
    digest = hashlib.sha256(data).hexdigest()
    rename(dataset, first_shard(idx_sha256=digest, tokens=shard.tokens - tokens))
    told = "shard-000000.idx row 1: its sentence lengths are not those of its record"
    assert any(told in found for found in verify.verify(dataset))


def test_sources_of_a_damaged_record_are_not_written(dataset: Path) -> None:
    index = parse_index((dataset / "shard-000000.idx").read_bytes(), "")
    with open(dataset / "shard-000000.tar", "r+b") as tar:
        tar.seek(int(index.offsets[2]) + SOURCE_AT)
        tar.write(b"\x01")
    (dataset / SOURCES).unlink()
    with pytest.raises(UserError, match=r"shard-000000.tar record 2: .*crc32"):
        source_map.main([str(dataset)])
    assert not (dataset / SOURCES).exists()


NAMES = [
    "x; touch FOUND #", "$(touch FOUND)", "../../written/evil", "../outside/evil", "shard-000000\n",
    "/etc/passwd", "shard-٣", "heldout-000000", "shard-", "",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_shard_name_never_reaches_a_shell_or_a_path(
    dataset: Path, tmp_path: Path, name: str
) -> None:
    found = tmp_path / "found"
    rename(dataset, first_shard(name=name.replace("FOUND", str(found))))
    before = sorted(tmp_path.rglob("*"))
    line = r"manifest.json: shards.0: name .* is not that of a shard of split 'train'"
    with http_server(dataset) as (url, _):
        for place in (f"pipe:cat {dataset}", str(dataset), url):
            data = StreamConfig(dir=place, cache_dir=str(tmp_path / "cache"))
            with pytest.raises(UserError, match=line):
                list(Dataset(data).documents("train"))
            with pytest.raises(UserError, match=line):
                show.main([place])
    (finding,) = verify.verify(dataset)
    assert re.search(line, finding)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("damage", ["flip", "pipe"])
@pytest.mark.parametrize("ending", ["tar", "idx"])
def test_show_names_a_damaged_shard(dataset: Path, ending: str, damage: str) -> None:
    path = dataset / f"shard-000000.{ending}"
    data = bytearray(path.read_bytes())
    path.unlink()
    if damage == "pipe":
        os.mkfifo(path)
    else:
        data[515 if ending == "tar" else 13] ^= 64
        path.write_bytes(data)
    with pytest.raises(UserError, match=f"shard-000000.{ending}.*(index|checksum|crc32|regular)"):
        show.main([str(dataset), "--document", "heldout-0"])
    with pytest.raises(UserError, match="shard-000000"):
        list(Dataset(StreamConfig(dir=str(dataset))).documents("train"))


def test_a_pipe_of_good_names_is_read(dataset: Path, tmp_path: Path) -> None:
    data = StreamConfig(dir=f"pipe:cat {dataset}", cache_dir=str(tmp_path / "cache"))
    assert [d.id for d in Dataset(data).documents("heldout")] == ["heldout-0"]


CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "shards: names none": lambda m: m.update(shards=[]),
    "shards: .* valid array; it is null": lambda m: m.update(shards=None),
    "shards.0: .* object.*; it is 3": lambda m: m.update(shards=[3]),
    "shards.0.tokens: .* equal to 0; it is -1": lambda m: m["shards"][0].update(tokens=-1),
    "shards.0.bytes: .* integer; it is true": lambda m: m["shards"][0].update(bytes=True),
    "shards.0.bytes: .* less than 4.*; it is 1000": lambda m: m["shards"][0].update(bytes=10**30),
    "shards.0.sha256: .* string; it is": lambda m: m["shards"][0].update(sha256=[1]),
    "shards.0.split: .* 'heldout'; it is ": lambda m: m["shards"][0].update(split=[1]),
    "shards.0.split: .* 'heldout'; it is .all": lambda m: m["shards"][0].update(split="all"),
    "shards.0.name: .* required": lambda m: m["shards"][0].pop("name"),
    "shards: a name stands there twice": lambda m: m["shards"].append(m["shards"][0]),
    "sources: a name stands there twice": lambda m: m["sources"].append(m["sources"][0]),
    "sources.0.notes.a: .* integer": lambda m: m["sources"][0].update(notes={"a": "b"}),
    "vocab_size: .* integer; it is 1.5": lambda m: m.update(vocab_size=1.5),
    "lowercase: .* boolean; it is 1": lambda m: m.update(lowercase=1),
    "lowercase: .* required": lambda m: m.pop("lowercase"),
    "more: ": lambda m: m.update(more=1),
    "the text: Invalid JSON.*hex escape": lambda m: m["sources"][0].update(licence="\ud800"),
}


@pytest.mark.parametrize("line", CHANGES)
def test_a_manifest_of_wrong_types_is_one_line(dataset: Path, line: str) -> None:
    path = dataset / "manifest.json"
    body = json.loads(path.read_text())
    CHANGES[line](body)
    path.write_text(json.dumps(body))
    with pytest.raises(UserError, match=f"^{path}: {line}") as caught:
        load_manifest(dataset)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["[" * 100_000, "1" * 5000, '"\ud800"', "NaN", "[]"])
def test_a_manifest_that_is_no_object_is_one_line(dataset: Path, text: str) -> None:
    path = dataset / "manifest.json"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(UserError, match=f"^{path}: "):
        load_manifest(dataset)


@pytest.mark.parametrize(
    "name", ["manifest.json", "vocab.txt", "shard-000000.tar", "shard-000000.idx"]
)
def test_a_pipe_in_a_data_set_is_not_waited_for(dataset: Path, name: str) -> None:
    (dataset / name).unlink()
    os.mkfifo(dataset / name)
    opened = Dataset(StreamConfig(dir=str(dataset)))
    with pytest.raises(UserError, match=f"{name}: .*not a regular file"):
        assert opened.tokenizer and list(opened.documents("train"))
    assert any("not a regular file" in line for line in verify.verify(dataset))


def test_no_control_character_reaches_the_terminal(
    dataset: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pieces = [*SPECIAL_TOKENS, *(f"p{n}{ESCAPE}" for n in range(25))]
    write_dataset(
        dataset, [[[7, 8], [9]]] * 3, heldout=[[[10]]], vocab=pieces, sources=[f"source{ESCAPE}"]
    )
    dataset = dataset.rename(dataset.with_name(f"data{ESCAPE}"))

    def said(*arguments: str) -> str:
        dispatch("data_pipeline", COMMANDS, arguments)
        out, err = capsys.readouterr()
        assert out + err
        return out + err

    pages = [
        said("verify", str(dataset)),
        said("show", str(dataset)),
        said("show", str(dataset), "--document", "train-0"),
        said("show", str(dataset), "--grep", "p3"),
        said("show", str(dataset), "--document", f"no{ESCAPE}"),
    ]
    assert "source\\x1b" in pages[1] and "p2\\x1b" in pages[2]
    rename(dataset, first_shard(sha256=ESCAPE))
    (dataset / f"shard-1{ESCAPE}.tar").touch()
    pages.append(said("verify", str(dataset)))
    rename(dataset, first_shard(name=f"shard-1{ESCAPE}"))
    pages += [said("verify", str(dataset)), said("show", str(dataset))]
    for page in pages:
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f]", page), page


@pytest.mark.parametrize("size", [4, 10**9])
def test_a_vocabulary_of_another_size_than_stated_is_one_line(dataset: Path, size: int) -> None:
    rename(dataset, lambda m: replace(m, vocab_size=size))
    line = f"^{dataset}/vocab.txt: 30 pieces, the manifest says {size:,}$"
    with pytest.raises(UserError, match=line):
        Dataset(StreamConfig(dir=str(dataset))).vocabulary  # noqa: B018
    with pytest.raises(UserError, match=line):
        Tokenizer.from_dataset(dataset)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda b: b"\xef\xbb\xbf" + b, "begins with a byte order mark"),
        (lambda b: b.replace(b"p1\n", b"\n"), "line 7 is empty"),
        (lambda b: b.replace(b"p1\n", b"p 1\n"), "line 7 holds a blank"),
    ],
)
def test_a_vocabulary_that_cannot_be_is_one_line(
    dataset: Path, change: Callable[[bytes], bytes], line: str
) -> None:
    path = dataset / "vocab.txt"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(UserError, match=f"^{path}: {line}"):
        Tokenizer.from_file(path, lowercase=True)
