import hashlib
import json
import os
import re
import resource
import tempfile

import numpy as np
import pytest

from core.errors import NoRoom, TryAgain, UserError
from core.urls import NotThere, Patience, Refused
from data_pipeline.corpus.manifest import load_manifest, load_source_map
from data_pipeline.corpus.shards import iterate_documents, read_index
from data_pipeline.corpus.verify import main, verify
from tests.data_pipeline.corpus.text import with_peak
from tests.data_pipeline.stream.servers import http_server
from tests.datasets import write_dataset

DOCUMENTS = [[[5 + i % 7] * (3 + i), [6] * 30] for i in range(60)]


@pytest.fixture
def dataset(tmp_path):
    folder = tmp_path / "data"
    write_dataset(folder, DOCUMENTS, heldout=[[[9, 9]]], vocab=50, documents_per_shard=20)
    return folder


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def test_a_good_dataset(dataset, capsys):
    assert verify(dataset) == []
    assert main([str(dataset)]) == 0
    assert "all as the manifest says" in capsys.readouterr().out


def test_every_flipped_byte_of_every_file_is_found(dataset):
    """Each byte of a small file would take long: every 13th, and every 211th of the larger."""
    for path in sorted(dataset.iterdir()):
        data = path.read_bytes()
        step = 13 if len(data) < 500 else 211
        for at in range(0, len(data), step):
            flip(path, at)
            assert verify(dataset), (path.name, at)
            path.write_bytes(data)
    assert verify(dataset) == []


@pytest.mark.parametrize(
    ("where", "what"), [(0, "bytes have changed"), (-512, "header has changed"), (150, "padding")]
)
def test_a_flipped_byte_names_record_and_document(dataset, where, what):
    # Payload 7 of shard 1 is document 27 of the split; its 3 + 27 + 30 ids end before byte 150.
    index = read_index(dataset / "shard-000001.idx")
    flip(dataset / "shard-000001.tar", int(index.offsets[7]) + (40 if where == 0 else where))
    (head, finding) = verify(dataset)
    assert head.startswith("shard-000001.tar: sha256 differs")
    assert finding.startswith("shard-000001.tar: record 7 ") and "'train-27'" in finding
    assert what in finding


def test_a_flipped_byte_is_named_when_the_index_is_wrong_too(dataset):
    index = read_index(dataset / "shard-000001.idx")
    flip(dataset / "shard-000001.tar", int(index.offsets[7]) + 40)
    flip(dataset / "shard-000001.idx", 24)
    found = verify(dataset)
    assert len(found) == 3
    assert "record 7 " in found[2] and "'train-27'" in found[2]


def test_truncated_missing_extra_and_swapped_shards(dataset):
    def shard(number, ending="tar"):
        return dataset / f"shard-{number:06d}.{ending}"

    with open(shard(0), "r+b") as file:
        file.truncate(8000)
    findings = verify(dataset)
    assert "shard-000000.tar: 8000 bytes, the manifest says" in findings[0]
    assert "the file ends here" in findings[1] and "'train-" in findings[1]
    shard(0).unlink()
    assert verify(dataset) == ["shard-000000.tar: missing"]
    os.replace(shard(1), shard(0))
    os.replace(shard(2), shard(1))
    os.replace(shard(0), shard(2))
    shard(7).write_bytes(b"")
    assert verify(dataset) == [
        "shard-000007.tar: extra file, not in the manifest",
        "shard-000000.tar: missing",
        "shard-000001.tar: holds the content of shard-000002.tar (swapped)",
        "shard-000002.tar: holds the content of shard-000001.tar (swapped)",
    ]


def test_a_file_that_is_far_too_long_is_not_held(dataset, monkeypatch):
    monkeypatch.setattr("core.urls.SMALL", 30_000_000)
    for name in ("shard-000000.idx", "shard-000001.tar", "shard-000002.tar"):
        os.truncate(dataset / name, 100_000_000)
    with open(dataset / "shard-000002.tar", "r+b") as file:
        file.seek(124)  # the size in the first header
        file.write(b"-0000000001")
    (dataset / "shard-000002.idx").unlink()
    findings, peak = with_peak(verify, dataset)
    assert peak < 50_000_000
    assert "shard-000000.idx: 100000000 bytes, the manifest says" in findings[0]
    assert findings[1] == "shard-000000.idx: more than 30,000,000 bytes"
    assert re.search("after the last record .*: 99979520 bytes, 1024 zeros expected", findings[3])
    assert findings[-1].endswith("record 0: its tar header has changed")


@pytest.mark.parametrize("column", range(5))
def test_a_wrong_index_names_the_document(dataset, column):
    starts = np.cumsum([20, 160, 80, 80, 80])  # head, offsets, sizes, checksums, counts
    row = [8, 4, 4, 4, 2 * 2][column] * 11
    flip(dataset / "shard-000002.idx", int(starts[column]) + row)
    (head, finding) = verify(dataset)
    assert head == "shard-000002.idx: sha256 differs from the manifest's"
    assert "'train-51'" in finding
    words = ["wrong offset", "wrong size", "wrong checksum", "number of sentences", "lengths"]
    assert words[column] in finding


def test_wrong_counts_even_when_the_manifest_was_signed_again(dataset):
    path = dataset / "manifest.json"
    body = json.loads(path.read_text())
    body["shards"][0]["documents"] += 1
    path.write_text(json.dumps(body))
    assert "was changed" in verify(dataset)[0]
    body["shards"][1]["bytes"] += 512
    body["shards"][1]["idx_bytes"] -= 1
    del body["dataset_id"]
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    body["dataset_id"] = hashlib.sha256(text.encode()).hexdigest()[:32]
    path.write_text(json.dumps(body))
    found = verify(dataset)
    assert "shard-000000.idx: 20 documents, the manifest says 21" in found
    for ending in ("tar", "idx"):
        assert any(f"shard-000001.{ending}: " in x and "bytes, the manifest" in x for x in found)


def test_a_header_that_training_refuses_even_when_all_was_signed_again(dataset):
    index = read_index(dataset / "shard-000001.idx")
    tar = dataset / "shard-000001.tar"
    flip(tar, int(index.offsets[7]) - 512 + 265)  # the owner's name
    path = dataset / "manifest.json"
    body = json.loads(path.read_text())
    body["shards"][1]["sha256"] = hashlib.sha256(tar.read_bytes()).hexdigest()
    del body["dataset_id"]
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    body["dataset_id"] = hashlib.sha256(text.encode()).hexdigest()[:32]
    path.write_text(json.dumps(body))
    (dataset / "sources.json").unlink(missing_ok=True)
    assert verify(dataset) == ["shard-000001.tar record 7: its tar header is not the one written"]


def test_sources_that_are_not_the_records(tmp_path):
    write_dataset(
        tmp_path,
        DOCUMENTS[:20],
        vocab=50,
        documents_per_shard=10,
        sources=("a", "b"),
        source_of=lambda name: int(name in ("train-3", "train-4", "train-17")),
    )
    path = tmp_path / "sources.json"
    plain = json.loads(path.read_text())
    for runs, same in [
        ([[0, 3], [1, 2], [0, 5]], True),
        ([[0, 3], [1, 1], [1, 1], [0, 5], [1, 0]], True),
        ([[0, 2], [1, 2], [0, 6]], False),
    ]:
        plain["shards"]["shard-000000"] = runs
        path.write_text(json.dumps(plain))
        told = "sources.json: names other sources than the records of shard-000000"
        assert verify(tmp_path) == ([] if same else [told])
    plain["shards"]["shard-000000"] = [[0, 3], [1, 2], [0, 5]]
    for shard, run in (("shard-000000", [2, 0]), ("shard-000000", [2**40, 0]), ("../x", [0, 0])):
        strange = {**plain["shards"], shard: [*plain["shards"].get(shard, []), run]}
        path.write_text(json.dumps({**plain, "shards": strange}))
        (problem,) = verify(tmp_path)
        assert "its documents are not the manifest's" in problem
        with pytest.raises(UserError, match="its documents are not the manifest's"):
            load_source_map(tmp_path, load_manifest(tmp_path))


def test_a_foreign_vocabulary(dataset, capsys):
    (dataset / "vocab.txt").write_text("[PAD]\n")
    assert main([str(dataset)]) == 1
    printed = capsys.readouterr()
    assert "vocab.txt: not the vocabulary" in printed.out and ": 1 findings (" in printed.err
    with pytest.raises(UserError, match="no such folder"):
        verify(dataset / "none")
    plain = json.loads((dataset / "manifest.json").read_text())
    (dataset / "manifest.json").write_text(json.dumps(plain | {"dataset_id": "x" * 10**6}))
    assert main([str(dataset)]) == 1
    assert len(capsys.readouterr().out) < 5000


def test_a_remote_dataset_is_verified_as_a_folder_is(dataset, monkeypatch, capsys):
    small = max((dataset / name).stat().st_size for name in ("manifest.json", "vocab.txt"))
    assert small < (dataset / "shard-000000.tar").stat().st_size
    monkeypatch.setattr("core.urls.SMALL", small)  # the manifest says how large a shard is
    with http_server(dataset) as (url, behaviour):
        behaviour.faults["shard-000000.idx"] = ["cut"]
        assert len(list(iterate_documents(url))) == len(list(iterate_documents(dataset)))
        assert main([url]) == 0
        assert "all as the manifest says" in capsys.readouterr().out
        for ending in ("tar", "idx"):  # the connection's fault is not the file's
            for fault in ("cut", "short", "wrong"):
                behaviour.faults[f"shard-000000.{ending}"] = [fault]
                assert verify(url) == []
                behaviour.faults[f"shard-000000.{ending}"] = [fault]
                assert len(list(iterate_documents(url))) == 60
                assert behaviour.faults[f"shard-000000.{ending}"] == []
            behaviour.faults[f"shard-000000.{ending}"] = ["cut", "wrong"]
            with pytest.raises(TryAgain, match=f"^shard-000000.{ending}: .* other bytes each time"):
                verify(url)
        behaviour.faults["manifest.json"] = ["digit 1"]
        assert load_manifest(url, Patience(retries=0)) == load_manifest(dataset)
        for name in ("manifest.json", "sources.json"):
            for times in (1, 3):
                behaviour.faults[name] = [f"digit {n}" for n in range(1, times + 1)]
                assert verify(url) == []
                assert behaviour.faults[name] == []
            behaviour.faults[name] = [f"digit {n}" for n in range(1, 10)]
            with pytest.raises(TryAgain, match=f"{name}: its origin gives other bytes each time"):
                verify(url)
            behaviour.faults[name] = []
        index = read_index(dataset / "shard-000001.idx")
        flip(dataset / "shard-000001.tar", int(index.offsets[7]) + 40)
        (dataset / "shard-000002.tar").unlink()
        os.truncate(dataset / "heldout-000000.idx", 20)
        local = verify(dataset)
        assert len(local) == 5 and verify(url) == local
        with pytest.raises(UserError, match="shard-000001.tar record 7: its bytes do not match"):
            list(iterate_documents(url))
        assert main([url]) == 1
        with pytest.raises(NotThere, match=f"{url}/none/manifest.json"):
            verify(f"{url}/none")
        behaviour.faults["shard-000000.tar"] = ["503"]
        with pytest.raises(TryAgain, match="503"):
            verify(url, patience=Patience(retries=0))
        for name in ("manifest.json", "vocab.txt"):
            behaviour.faults[name] = ["403"]
            with pytest.raises(Refused, match=f"^{url}/{name}: HTTP 403"):  # it is no damage
                verify(url)
        name = "shard-000000.idx"
        refused = f"{name}: not given, not checked ({url}/{name}: HTTP 403 Forbidden)"
        for file, more in (("sources.json", []), (name, [refused])):
            behaviour.faults[file] = ["403"]
            assert sorted(verify(url)) == sorted([*local, *more])


def test_of_a_remote_dataset_each_file_that_is_damaged_is_found(dataset):
    few = Patience(retries=1, pause=0.001)
    (dataset / "sources.json").write_text("[")
    vocabulary = (dataset / "vocab.txt").read_bytes()
    (dataset / "vocab.txt").write_bytes(vocabulary.replace(b"[MASK]", b"[MOSK]"))
    flip(dataset / "shard-000001.tar", 700)
    with http_server(dataset) as (url, behaviour):
        found = verify(url, patience=few)
        names = ("vocab.txt", "sources.json", "shard-000001.tar", "shard-000001.tar: record")
        assert len(found) == 4 and all(
            name in line for name, line in zip(names, found, strict=True)
        )
        (dataset / "manifest.json").write_text("{")
        (found,) = verify(url, patience=few)
        assert "manifest.json: not JSON" in found
        behaviour.faults["manifest.json"] = ["503"]
        with pytest.raises(TryAgain, match="503"):
            verify(url, patience=Patience(retries=0))


def test_what_was_found_before_an_origin_falls_silent_is_told(dataset, monkeypatch, capsys):
    monkeypatch.setattr("core.urls.Patience", lambda: Patience(retries=1, pause=0.001))
    flip(dataset / "shard-000000.tar", 700)
    with http_server(dataset) as (url, behaviour):
        behaviour.faults["shard-000002.idx"] = ["503"] * 2
        with pytest.raises(TryAgain, match="shard-000002.idx: .*503"):
            main([url])
    assert "shard-000000.tar: sha256 differs" in capsys.readouterr().out


def test_a_machine_without_room_for_what_is_fetched_finds_nothing_wrong(dataset):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with http_server(dataset) as (url, _):
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limits[1]))
        try:
            with pytest.raises(NoRoom, match=f"^{tempfile.gettempdir()}: File too large$"):
                verify(url)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert verify(url) == []


def test_a_url_that_gives_nothing_is_no_finding():
    """The user has to mend it, or the way to it; the data set may be sound."""
    for url in ("pipe:/etc/passwd", "pipe:no-such-command", "none://bucket/data", "http://h:x/d"):
        with pytest.raises(UserError, match=f"^{url}/manifest.json: ") as caught:
            verify(url, patience=Patience(retries=1, pause=0.001))
        assert caught.value.code == 2
