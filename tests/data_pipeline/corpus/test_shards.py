import resource
import tarfile

import numpy as np
import pytest

from core.errors import TryAgain, UserError
from core.urls import read
from data_pipeline.corpus.manifest import load_manifest
from data_pipeline.corpus.shards import (
    DamagedRecord,
    ShardWriter,
    as_webdataset,
    iterate_documents,
    pack_document,
    parse_document,
    read_documents,
    read_index,
    tar_header,
)
from tests.datasets import write_dataset

DOCUMENTS = [[[5 + i % 7, 6], [8] * (1 + i)] for i in range(25)]


@pytest.fixture
def dataset(tmp_path):
    write_dataset(tmp_path, DOCUMENTS, heldout=[[[9, 9]]], vocab=50, documents_per_shard=10)
    return tmp_path


def plain(document):
    return [ids.tolist() for ids in document.sentences()]


def test_documents_come_back_through_the_index(dataset):
    found = list(iterate_documents(dataset))
    assert [plain(d) for d in found] == DOCUMENTS
    assert [d.id for d in found] == [f"train-{i}" for i in range(25)]
    assert [plain(d) for d in iterate_documents(dataset, "heldout")] == [[[9, 9]]]


# webdataset leaves its files to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_webdataset_and_tar_read_the_same(dataset):
    paths = [dataset / f"{shard.name}.tar" for shard in load_manifest(dataset).split("train")]
    assert [plain(document) for document in as_webdataset(dataset)] == DOCUMENTS
    members = []
    for path in paths:
        with tarfile.open(path) as tar:
            for member in tar:
                assert (member.mtime, member.uid, member.gid, member.mode) == (0, 0, 0, 0o644)
                members.append((member.name, plain(parse_document(tar.extractfile(member).read()))))
    assert members == [(f"{i:08d}.doc", d) for i, d in enumerate(DOCUMENTS)]


@pytest.mark.parametrize("ordinal", [0, 12345678, 10**8])
@pytest.mark.parametrize("size", [0, 99999, 1 << 31])
def test_a_header_is_what_tar_writes(ordinal, size):
    theirs = tarfile.TarInfo(f"{ordinal:08d}.doc")
    theirs.size = size
    block = bytearray(theirs.tobuf(tarfile.USTAR_FORMAT))
    block[329:345] = bytes(16)  # the device numbers, which tar writes as zeros in octal
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    assert tar_header(ordinal, size) == block


def test_a_disk_that_does_not_answer_is_no_damage(dataset):
    """The kernel's own EIO: a process has no memory near address 0."""
    index = read_index(dataset / "shard-000000.idx")
    with open("/proc/self/mem", "rb") as tar, pytest.raises(TryAgain, match="x.tar: Input/output"):
        list(read_documents(tar, "x.tar", index, 50, skip_damage=True))


def test_index_matches_the_tar(dataset):
    for shard in load_manifest(dataset).shards:
        index = read_index(dataset / f"{shard.name}.idx")
        data = (dataset / f"{shard.name}.tar").read_bytes()
        at = 0
        for number in range(len(index)):
            offset, size = int(index.offsets[number]), int(index.sizes[number])
            document = parse_document(data[offset : offset + size])
            count = int(index.sentence_counts[number])
            lengths = index.sentence_lengths[at : at + count]
            np.testing.assert_array_equal(document.lengths, lengths)
            at += count
        assert (shard.documents, shard.sentences) == (len(index), len(index.sentence_lengths))


def test_the_same_documents_give_the_same_bytes(tmp_path):
    ids = [write_dataset(tmp_path / name, DOCUMENTS, vocab=50).dataset_id for name in "ab"]
    assert ids[0] == ids[1]
    a, b = ((tmp_path / name / "shard-000000.tar").read_bytes() for name in "ab")
    assert a == b
    other = write_dataset(tmp_path / "c", DOCUMENTS[:-1], vocab=50)
    assert other.dataset_id != ids[0]


@pytest.mark.parametrize("name", ["x", "Ünïcode/ñame", "odd", ""])
def test_document_round_trip(name):
    ids, lengths = np.arange(7, dtype=np.uint16), np.array([3, 4])
    document = parse_document(pack_document(ids, lengths, name, 3))
    assert (document.id, document.source) == (name, 3)
    assert plain(document) == [[0, 1, 2], [3, 4, 5, 6]]


def test_damaged_records_are_noticed():
    payload = pack_document(np.arange(7, dtype=np.uint16), np.array([3, 4]), "x", 0)
    flipped = bytearray(payload)
    flipped[14] ^= 1
    for damaged in (payload[:-1], payload + b"\0\0", payload[:5], bytes(flipped)):
        with pytest.raises(DamagedRecord):
            parse_document(damaged)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: b"XXXX" + d[4:], "bad magic"),
        (lambda d: d[:-1], "do not fit"),
        (lambda d: d[:20] + d[22:] + b"\0\0", "do not sum"),
    ],
)
def test_a_bad_index_is_refused_by_name(dataset, change, message):
    path = dataset / "shard-000000.idx"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(UserError, match=f"shard-000000.idx.*{message}"):
        read_index(path)


def test_a_manifest_that_was_edited_is_refused(dataset):
    path = dataset / "manifest.json"
    path.write_text(path.read_text().replace('"documents": 10', '"documents": 11', 1))
    with pytest.raises(UserError, match="was changed"):
        load_manifest(dataset)


def test_a_missing_manifest_names_the_command(tmp_path):
    with pytest.raises(UserError, match="data_pipeline prepare"):
        load_manifest(tmp_path)


def test_pipes_open_like_files(dataset):
    url = f"pipe:cat {dataset}"
    assert load_manifest(url) == load_manifest(dataset)
    assert read(f"{url}/vocab.txt") == (dataset / "vocab.txt").read_bytes()


def test_an_abandoned_shard_leaves_nothing(tmp_path):
    writer = ShardWriter(tmp_path, "train", 0)
    writer.write(pack_document(np.array([1], np.uint16), np.array([1]), "x", 0))
    assert not (tmp_path / "shard-000000.tar").exists()
    writer.abandon()
    assert list(tmp_path.iterdir()) == []


def test_what_a_full_disk_refuses_is_given_up_in_silence(tmp_path):
    writer = ShardWriter(tmp_path, "train", 0)
    writer.write(pack_document(np.arange(5, dtype=np.uint16), np.array([5]), "\ud800", 0))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        writer.abandon()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []
