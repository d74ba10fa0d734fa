"""All damage to a shard is noticed, and touches no sequence but those of the damaged record."""

import errno
import gc
import io
import json
import os
import resource
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core.errors import TryAgain, UserError
from core.files import open_regular
from data_pipeline.corpus import show
from data_pipeline.corpus.manifest import load_manifest
from data_pipeline.corpus.shards import DamagedRecord, read_index
from data_pipeline.corpus.verify import verify
from data_pipeline.stream import reader
from data_pipeline.stream.dataset import Dataset
from data_pipeline.stream.heldout import HeldOut
from data_pipeline.stream.plan import PhaseSpec, StreamConfig, WindowPlan
from data_pipeline.stream.stream import Stream
from tests.datasets import write_dataset

PHASE = PhaseSpec(max_seq_len=64, row_len=256, max_predictions=10, rows_per_step=48)
SHARD = "shard-000003"
RECORD = 7  # of the shard, in the middle


def epoch(folder: Path, **settings: Any) -> tuple[list[bytes], Stream, WindowPlan]:
    """Digests of all rows of whole steps of the first epoch, which is one window; its plan."""
    data = StreamConfig(dir=str(folder), workers=0, ledger=str(folder / "ledger"), **settings)
    planner = Dataset(data).planner(PHASE, phase_index=0, seed=1, split="train")
    rows, plan = [], planner.plan(0, 0)
    # The last, since its thread opens files at once.
    s = Stream(Dataset(data), PHASE, phase_index=0, seed=1, rank=0, world=1, micro_batch_rows=48)
    try:
        for _ in range(plan.rows // 48):
            rows += next(s).row_digests()
            s.commit_step()
    finally:
        s.close()
    return rows, s, plan


@pytest.fixture(scope="module")
def whole(toy: Path) -> list[bytes]:
    return epoch(toy)[0]


@pytest.fixture
def copy(toy: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(toy, tmp_path / "copy"))


def edit(folder: Path, change: Callable[[bytearray, int, int], Any], record: int = RECORD) -> None:
    """Applies `change(bytes, offset of the payload, its size)` to the record of the shard."""
    index = read_index(folder / f"{SHARD}.idx")
    path = folder / f"{SHARD}.tar"
    data = bytearray(path.read_bytes())
    result = change(data, int(index.offsets[record]), int(index.sizes[record]))
    path.write_bytes(data if result is None else result)


def flip(at: Callable[[int, int], int]) -> Callable[[bytearray, int, int], None]:
    def change(data: bytearray, offset: int, size: int) -> None:
        data[at(offset, size)] ^= 0x10

    return change


def zero(begin: int, end: int) -> Callable[[bytearray, int, int], None]:
    def change(data: bytearray, offset: int, size: int) -> None:
        data[offset + begin : offset + end] = bytes(end - begin)

    return change


ONE_RECORD = {
    "payload flipped at its head": flip(lambda offset, size: offset),
    "payload flipped in the ids": flip(lambda offset, size: offset + size // 2),
    "payload flipped at its end": flip(lambda offset, size: offset + size - 1),
    "header flipped in the name": flip(lambda offset, size: offset - 512),
    "header flipped in the size": flip(lambda offset, size: offset - 512 + 130),
    "header flipped in the checksum": flip(lambda offset, size: offset - 512 + 150),
    "header flipped in the padding": flip(lambda offset, size: offset - 1),
    "payload block zeroed": zero(0, 512),
    "header zeroed": zero(-512, 0),
}
REST_OF_SHARD = {
    "cut inside a payload": lambda data, offset, size: data[: offset + size // 2],
    "cut inside a header": lambda data, offset, size: data[: offset - 300],
    "cut between header and payload": lambda data, offset, size: data[:offset],
    "cut before a header": lambda data, offset, size: data[: offset - 512],
}


@pytest.mark.parametrize("kind", [*ONE_RECORD, *REST_OF_SHARD])
def test_damage_is_noticed_and_stays_where_it_is(copy: Path, whole: list[bytes], kind: str) -> None:
    edit(copy, {**ONE_RECORD, **REST_OF_SHARD}[kind])
    with pytest.raises(UserError, match=rf"rank 0: data worker 0: {SHARD}|^{SHARD}.tar: \d+ bytes"):
        epoch(copy)
    rows, s, plan = epoch(copy, on_damage="empty")
    lines = [json.loads(line) for line in (copy / "ledger").read_text().splitlines()]
    assert {line["shard"] for line in lines} == {SHARD}
    records = sorted(line["record"] for line in lines)
    if kind in ONE_RECORD:
        assert records == [RECORD]
    else:
        # Records are named when a row first needs them; -1 is the file as a whole.
        assert records[0] == -1 and records[1:] and set(records[1:]) <= set(range(RECORD, 25))
    assert s.damaged == len(records) == len(set(records))
    assert {line["rank"] for line in lines} == {0} and lines[0]["reason"]

    lost = np.isin(plan.document_record, records) & (
        plan.document_shard == plan.shards.index(SHARD)
    )
    hit = lost[plan.a_document] | lost[plan.b_document]
    row_is_hit = np.add.reduceat(hit, plan.row_starts[:-1]) > 0
    differs = [a != b for a, b in zip(rows, whole, strict=True)]
    assert differs == row_is_hit[: len(rows)].tolist()
    assert 0 < sum(differs) < len(rows)


def test_a_cut_that_takes_no_record_is_named_and_changes_nothing(
    copy: Path, whole: list[bytes]
) -> None:
    path = copy / f"{SHARD}.tar"
    path.write_bytes(path.read_bytes()[:-512])
    with pytest.raises(UserError, match=rf"{SHARD}.tar: \d+ bytes, the manifest says \d+"):
        epoch(copy)
    rows, _, _ = epoch(copy, on_damage="empty")
    assert rows == whole
    assert json.loads((copy / "ledger").read_text())["record"] == -1


@pytest.mark.parametrize("kind", ["missing", "empty", "unreadable"])
def test_a_shard_that_is_not_there(copy: Path, whole: list[bytes], kind: str) -> None:
    path = copy / f"{SHARD}.tar"
    path.unlink()
    if kind == "empty":
        path.touch()
    elif kind == "unreadable":
        path.mkdir()
    with pytest.raises(UserError, match=f"{SHARD}.tar: "):
        epoch(copy)
    rows, s, _ = epoch(copy, on_damage="empty")
    assert s.damaged > 10
    assert any(a == b for a, b in zip(rows, whole, strict=True))


@pytest.mark.parametrize("policy", ["stop", "empty"])
def test_held_out_text_that_is_lost_is_named_with_what_helps(copy: Path, policy: str) -> None:
    (copy / "heldout-000000.tar").unlink()
    dataset = Dataset(StreamConfig(dir=str(copy), on_damage=policy))
    with pytest.raises(
        UserError, match="heldout-000000.tar: .*evaluation.every_steps: 0"
    ) as caught:
        iter(HeldOut(dataset, PHASE, seed=1, rank=0, world=1, micro_batch_rows=4, rows=8))
    assert "on_damage" not in str(caught.value)


def test_a_shard_that_is_said_to_be_larger_than_memory_is_one_line(copy: Path) -> None:
    manifest, size = load_manifest(copy), 1 << 50
    shards = (replace(manifest.shards[0], bytes=size), *manifest.shards[1:])
    (copy / "manifest.json").write_text(replace(manifest, shards=shards).to_json())
    with pytest.raises(UserError, match=f"{shards[0].name}.tar: {size:,} bytes by the manifest"):
        epoch(copy, on_damage="empty")


def test_swapped_shards_are_noticed(copy: Path, whole: list[bytes]) -> None:
    paths = copy / f"{SHARD}.tar", copy / "shard-000005.tar"
    os.rename(paths[0], copy / "x")
    os.rename(paths[1], paths[0])
    os.rename(copy / "x", paths[1])
    with pytest.raises(UserError, match="shard-00000[35].tar"):
        epoch(copy)
    rows, s, plan = epoch(copy, on_damage="empty")
    lines = [json.loads(line) for line in (copy / "ledger").read_text().splitlines()]
    assert {line["shard"] for line in lines} == {SHARD, "shard-000005"}
    assert len(rows) == len(whole)


def test_a_swapped_shard_of_equal_size_is_noticed_by_its_names(tmp_path: Path) -> None:
    from tests.datasets import write_dataset

    documents = [[[5, 6, 7] * 5] * 4] * 40
    write_dataset(tmp_path, documents, documents_per_shard=10)
    sizes = {shard.bytes for shard in load_manifest(tmp_path).shards}
    assert len(sizes) == 1
    shutil.copy(tmp_path / "shard-000001.tar", tmp_path / "shard-000002.tar")
    phase = PhaseSpec(max_seq_len=16, rows_per_step=1)
    data = StreamConfig(dir=str(tmp_path), workers=0)
    s = Stream(Dataset(data), phase, phase_index=0, seed=1, rank=0, world=1, micro_batch_rows=1)
    with pytest.raises(UserError, match="shard-000002.tar record .*: its tar header is not"):
        for _ in range(100):
            next(s)
    s.close()


@pytest.mark.parametrize("policy", ["stop", "empty"])
@pytest.mark.parametrize("kind", ["stale", "flipped", "cut", "missing"])
def test_a_wrong_index_always_stops(copy: Path, policy: str, kind: str) -> None:
    """Every rank's plan hangs on it: going on would mean other batches, not fewer."""
    path = copy / f"{SHARD}.idx"
    data = bytearray(path.read_bytes())
    if kind == "stale":
        data = bytearray((copy / "shard-000004.idx").read_bytes())
    elif kind == "flipped":
        data[-1] ^= 1
    elif kind == "cut":
        data = data[:-2]
    path.write_bytes(data)
    if kind == "missing":
        path.unlink()
    with pytest.raises(UserError, match=f"{SHARD}.idx: (stale or damaged|cannot read the) index"):
        epoch(copy, on_damage=policy)


def test_a_token_of_no_vocabulary_is_damage(tmp_path: Path) -> None:
    """The model would have no row for it."""
    texts = [[[60_000 if 30 <= n < 40 else 7] * 30] * 16 for n in range(60)]
    write_dataset(tmp_path, texts, vocab=50)
    with pytest.raises(UserError, match=r"record 3\d: has a token 60000, of a vocabulary of 50"):
        epoch(tmp_path)
    rows, stream, _ = epoch(tmp_path, on_damage="empty")
    assert rows and 0 < stream.damaged <= 10
    for read in (
        lambda: show.main([str(tmp_path), "--document", "train-30"]),
        lambda: list(Dataset(StreamConfig(dir=str(tmp_path))).documents("train")),
    ):
        with pytest.raises(DamagedRecord, match="record 30: has a token 60000, of a vocabulary of"):
            read()
    assert verify(tmp_path) == [
        "shard-000000.tar record 30: has a token 60000, of a vocabulary of 50"
    ]


def test_documents_and_samples_go_on_without_what_is_damaged(copy: Path) -> None:
    def ids(**settings: Any) -> list[str]:
        data = Dataset(StreamConfig(dir=str(copy), **settings))
        assert [d.id for d in data.sample("train", 10**9)] == (
            found := [d.id for d in data.documents("train")]
        )
        return found

    assert len(ids()) == 300
    edit(copy, flip(lambda offset, size: offset))
    (copy / "shard-000005.tar").unlink()
    os.truncate(copy / "shard-000011.tar", 512)
    with pytest.raises(DamagedRecord, match=f"{SHARD}.tar record {RECORD}: its bytes do not match"):
        ids()
    lost = {25 * 3 + RECORD, *range(125, 150), *range(275, 300)}
    assert ids(on_damage="empty") == [f"train-{n}" for n in range(300) if n not in lost]


def test_too_much_damage_stops(copy: Path) -> None:
    (copy / f"{SHARD}.tar").unlink()
    os.mkfifo(copy / f"{SHARD}.tar")  # of which no byte would ever come
    with pytest.raises(UserError, match=f"^{SHARD}.tar: cannot be opened: not a regular file"):
        epoch(copy)
    with pytest.raises(UserError, match=r"\d+ damaged documents, data.max_damaged is 3; first: "):
        epoch(copy, on_damage="empty", max_damaged=3)


@pytest.mark.parametrize("most", [1, 2])
def test_damage_of_all_phases_is_counted_together_and_named_once(
    toy: Path, tmp_path: Path, most: int
) -> None:
    """Two records, of which each phase meets one."""
    folder, ledger = tmp_path / "copy", tmp_path / "ledger"
    settings = {"on_damage": "empty", "max_damaged": most, "ledger": str(ledger), "workers": 0}
    dataset = Dataset(StreamConfig(dir=str(folder), **settings))

    def phase(index: int, record: int) -> None:
        shutil.copytree(toy, folder, dirs_exist_ok=True)
        edit(folder, ONE_RECORD["payload flipped at its end"], record)
        where = {"phase_index": index, "seed": 1}
        s = Stream(dataset, PHASE, **where, rank=0, world=1, micro_batch_rows=48)
        try:
            for _ in range(dataset.planner(PHASE, **where, split="train").plan(0, 0).rows // 48):
                next(s)
                s.commit_step()
            s.agree()
        finally:
            s.close()

    phase(0, RECORD)
    phase(1, RECORD)
    if most == 1:
        with pytest.raises(UserError, match="^2 damaged documents, data.max_damaged is 1; "):
            phase(2, RECORD + 1)
    else:
        phase(2, RECORD + 1)
    records = [json.loads(line)["record"] for line in ledger.read_text().splitlines()]
    assert records == [RECORD, RECORD + 1]


@pytest.mark.parametrize(("policy", "workers"), [("empty", 0), ("empty", 1), ("stop", 0)])
def test_a_disk_that_does_not_answer_is_no_damage(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str, workers: int
) -> None:
    def lost(handle: int, buffers: list, offset: int) -> int:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    ledger = tmp_path / "ledger"
    data = StreamConfig(dir=str(toy), workers=workers, on_damage=policy, ledger=str(ledger))
    s = Stream(Dataset(data), PHASE, phase_index=0, seed=1, rank=0, world=1, micro_batch_rows=48)
    monkeypatch.setattr(os, "preadv", lost)
    with pytest.raises(TryAgain, match=r"worker 0: .*/shard-0000\d\d.tar: Stale file handle"):
        next(s)
    assert s.damaged == 0 and not ledger.exists()
    s.close()


def test_a_file_whose_reads_fail_is_no_damage(copy: Path) -> None:
    """The kernel's own EIO: a process has no memory near address 0."""
    (copy / f"{SHARD}.tar").unlink()
    (copy / f"{SHARD}.tar").symlink_to("/proc/self/mem")
    with pytest.raises(TryAgain, match=f"{SHARD}.tar: Input/output error"):
        epoch(copy, on_damage="empty")


@pytest.mark.parametrize("policy", ["stop", "empty"])
def test_a_shard_that_this_user_may_not_read_is_no_damage(
    copy: Path, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    """Of one node's user, perhaps: all others would train on it."""

    def refuse(path: Path) -> io.BufferedReader:
        if path.name == f"{SHARD}.tar":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return open_regular(path)

    monkeypatch.setattr(reader, "open_regular", refuse)
    with pytest.raises(UserError, match=f"^{copy}/{SHARD}.tar: Permission denied$"):
        epoch(copy, on_damage=policy)
    assert not (copy / "ledger").exists()


def test_too_few_descriptors_are_no_damage(copy: Path) -> None:
    """12 shards of a window do not fit; the limit is that of this process alone."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    gc.collect()
    used = set(map(int, os.listdir("/proc/self/fd")))
    sixth = [number for number in range(max(used) + 7) if number not in used][5]
    resource.setrlimit(resource.RLIMIT_NOFILE, (sixth + 1, before[1]))
    try:
        with pytest.raises(UserError, match=r"shard-0000\d\d\.(tar|idx): .*Too many open files"):
            epoch(copy, on_damage="empty")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert not (copy / "ledger").exists()


def test_short_reads_are_gone_on_with(
    toy: Path, whole: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = os.preadv
    monkeypatch.setattr(os, "preadv", lambda h, b, at: plain(h, [memoryview(b[0])[:700]], at))
    assert epoch(toy)[0] == whole


@pytest.mark.parametrize("workers", [0, 1])
def test_a_shard_cut_while_it_is_read_is_named(copy: Path, workers: int) -> None:
    data = StreamConfig(dir=str(copy), workers=workers, prefetch_batches=1)
    s = Stream(Dataset(data), PHASE, phase_index=0, seed=1, rank=0, world=1, micro_batch_rows=1)
    next(s)
    for path in copy.glob("shard-*.tar"):
        os.truncate(path, 4096)
    with pytest.raises(UserError, match=r"record \d+: ends at byte \d+, the file at 4096"):
        for _ in range(10_000):
            next(s)
    s.close()
