"""Shards over http, pipes and S3 give the batches that local ones give, or one clear error."""

import errno
import fcntl
import gc
import math
import multiprocessing as mp
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from core.errors import TryAgain, UserError
from core.files import Lock
from data_pipeline.corpus.manifest import load_manifest
from data_pipeline.stream import cache as cache_module
from data_pipeline.stream.audit import AuditConfig, AuditPhase, step_digests
from data_pipeline.stream.cache import CachedStore
from data_pipeline.stream.dataset import Dataset
from data_pipeline.stream.heldout import HeldOut
from data_pipeline.stream.plan import Planner, StreamConfig
from data_pipeline.stream.stream import Stream
from tests.data_pipeline.stream.conftest import VOCAB, random_documents
from tests.data_pipeline.stream.servers import Behaviour, http_server, s3_server
from tests.datasets import write_dataset
from tests.pretrain.test_writer import mounted

PHASE = AuditPhase(max_seq_len=64, row_len=256, max_predictions=10, rows_per_step=24)
STEPS = 40


def config(url: str, cache: Path, workers: int = 0, **data: Any) -> AuditConfig:
    settings: dict[str, Any] = {
        "window_tokens": 60_000, "cache_dir": str(cache), "fetch_pause": 0.001,
        "fetch_timeout": 0.5, "fetch_retries": 3, **data,
    }  # fmt: skip
    return AuditConfig(
        seed=5, data=StreamConfig(dir=url, workers=workers, **settings), phases=(PHASE,)
    )


def digests(tree: AuditConfig, steps: int = STEPS) -> list[str]:
    return list(step_digests(tree, 0, 1, 24, steps))


@pytest.fixture(scope="module")
def local(toy: Path) -> list[str]:
    """More than an epoch."""
    return digests(config(str(toy), toy / "unused"))


@pytest.fixture
def server(toy: Path) -> Iterator[tuple[str, Behaviour]]:
    with http_server(toy) as pair:
        yield pair


@pytest.mark.parametrize("workers", [0, 2])
def test_http_gives_the_local_batches(
    server: tuple[str, Behaviour], local: list[str], tmp_path: Path, workers: int
) -> None:
    url, behaviour = server
    assert digests(config(url, tmp_path, workers)) == local
    # Every file once, whoever asked: two epochs, several processes.
    counts = behaviour.counts
    assert all(n == 1 for name, n in counts.items() if name.startswith("shard")), counts
    assert digests(config(url, tmp_path, workers), 3) == local[:3]
    assert all(n == 1 for name, n in behaviour.counts.items() if name.startswith("shard"))
    assert not list(tmp_path.glob("*/*.part"))


@pytest.mark.parametrize("ranges", [True, False])
def test_a_server_that_stalls_drops_and_refuses_is_outlasted(
    server: tuple[str, Behaviour], local: list[str], tmp_path: Path, ranges: bool
) -> None:
    url, behaviour = server
    behaviour.ranges = ranges
    names = [f"shard-{n:06d}.tar" for n in range(12)]
    faults = (["drop"], ["503", "503"], ["stall"], ["wrong"], ["drop", "503", "drop"])
    behaviour.faults = {name: list(faults[i % 5]) for i, name in enumerate(names)}
    behaviour.faults["manifest.json"] = ["503", "drop"]
    behaviour.faults["vocab.txt"] = ["drop", "drop"]
    assert digests(config(url, tmp_path)) == local
    assert not any(behaviour.faults.values())
    # One more request than faults: none was wasted, whether the server knows ranges or not.
    for i, name in enumerate(names):
        assert behaviour.counts[name] == len(faults[i % 5]) + 1
    # A broken transfer went on where it broke.
    assert sum(start > 0 for _, start in behaviour.requests) >= 4


@pytest.mark.parametrize(
    ("fault", "message", "code"),
    [
        ("503", r"HTTP 503 .*\(given up after 4 tries\)", 85),
        ("wrong", r"wrong content: .* the manifest says .*\(given up after 4 tries\)", 2),
        ("wrong|wrong 1", r"wrong content: .* the manifest says .*\(given up after 4 tries\)", 85),
        ("short", r"ended after \d+ of \d+ bytes \(given up after 4 tries\)", 2),
        ("short|page", r"ended after \d+ of \d+ bytes \(given up after 4 tries\)", 85),
        ("cut", r"ended after \d+ of \d+ bytes \(given up after 4 tries\)", 85),
        ("404", "HTTP 404", 2),
        ("403", "HTTP 403", 2),
    ],
)
def test_a_server_that_never_gives_it_is_one_clear_error(
    server: tuple[str, Behaviour], tmp_path: Path, fault: str, message: str, code: int
) -> None:
    url, behaviour = server
    behaviour.faults = {f"shard-{n:06d}.tar": fault.split("|") * 50 for n in range(12)}
    with pytest.raises(UserError, match=rf"^{url}/shard-0000\d\d.tar: {message}") as caught:
        digests(config(url, tmp_path), 1)
    assert caught.value.code == code
    # What is left is what another try can go on with.
    assert [part.stat().st_size > 0 for part in tmp_path.glob("*/*.part")] == [True] * (
        fault == "cut"
    )


def test_a_server_that_always_stalls_is_given_up_in_bounded_time(
    server: tuple[str, Behaviour], tmp_path: Path
) -> None:
    url, behaviour = server
    behaviour.stall = 3.0
    behaviour.faults = {f"shard-{n:06d}.tar": ["stall"] * 99 for n in range(12)}
    began = time.monotonic()
    with pytest.raises(UserError, match="timed out .*given up after 2 tries"):
        digests(config(url, tmp_path, fetch_retries=1, fetch_timeout=0.2), 1)
    assert time.monotonic() - began < 10


def test_a_failure_in_a_later_window_names_the_worker(
    server: tuple[str, Behaviour], local: list[str], tmp_path: Path
) -> None:
    url, behaviour = server
    tree = config(url, tmp_path, workers=1, prefetch_bytes=0)
    s = Stream(
        Dataset(tree.data), PHASE, phase_index=0, seed=5, rank=0, world=1, micro_batch_rows=24
    )
    behaviour.faults = {f"shard-{n:06d}.tar": ["503"] * 99 for n in range(12)}
    with pytest.raises(UserError, match=rf"rank 0: data worker 0: {url}/shard-0000\d\d.tar: HTTP"):
        for _ in range(STEPS):
            next(s)
    s.close()


def test_pipes_give_the_local_batches(toy: Path, local: list[str], tmp_path: Path) -> None:
    assert digests(config(f"pipe:cat {toy}", tmp_path / "a"), 12) == local[:12]
    # One that breaks off the first time, and one that never succeeds.
    flaky = tmp_path / "flaky.sh"
    flaky.write_text(
        f"f=$(basename $1); if [ ! -e {tmp_path}/$f.seen ]; then touch {tmp_path}/$f.seen; "
        f"head -c 100 {toy}/$f; exit 1; fi; cat {toy}/$f\n"
    )
    assert digests(config(f"pipe:sh {flaky} x", tmp_path / "b"), 12) == local[:12]
    with pytest.raises(UserError, match=r"manifest.json: exit code 3 \(given up after 4 tries\)"):
        digests(config("pipe:exit 3;", tmp_path / "c"), 1)
    with pytest.raises(UserError, match="no byte in 0.2 s"):
        digests(config("pipe:sleep 9;", tmp_path / "d", fetch_retries=0, fetch_timeout=0.2), 1)


def _rank(tree: AuditConfig, rank: int, results: Any) -> None:
    s = Stream(
        Dataset(tree.data),
        PHASE,
        phase_index=0,
        seed=5,
        rank=rank,
        world=4,
        micro_batch_rows=6,
    )
    results.put([next(s).digest() for _ in range(STEPS)])
    s.close()


def test_one_fetch_a_node_and_a_bounded_cache(
    server: tuple[str, Behaviour], toy: Path, tmp_path: Path
) -> None:
    """Four ranks that share a cache too small for the dataset."""
    url, behaviour = server
    manifest = load_manifest(toy)
    two_windows = 2 * 4 * max(s.bytes + s.idx_bytes for s in manifest.shards)
    whole = sum(s.bytes + s.idx_bytes for s in manifest.split("train"))
    limit = max(two_windows, int(0.8 * whole))
    assert limit < whole
    tree = config(url, tmp_path, cache_bytes=limit, prefetch_bytes=limit // 4, fetch_timeout=5.0)
    context = mp.get_context("fork")
    results = context.Queue()
    processes = [context.Process(target=_rank, args=(tree, rank, results)) for rank in range(4)]
    for process in processes:
        process.start()
    largest, got = 0, 0
    while got < 4:
        files = [p for p in tmp_path.glob("*/shard*") if p.suffix in (".tar", ".idx", ".part")]
        sizes = 0
        for path in files:
            try:
                sizes += path.stat().st_size
            except FileNotFoundError:
                pass
        largest = max(largest, sizes)
        try:
            results.get(timeout=0.01)
            got += 1
        except Exception:
            assert all(p.exitcode in (None, 0) for p in processes)
    for process in processes:
        process.join()
    assert largest <= limit
    # Two epochs: a file evicted is fetched again, but not once a rank.
    assert max(n for name, n in behaviour.counts.items() if name.endswith(".tar")) <= 4


def test_eviction_takes_the_oldest_and_never_what_is_held(
    server: tuple[str, Behaviour], toy: Path, tmp_path: Path
) -> None:
    url, _ = server
    shards = load_manifest(toy).split("train")
    size = max(s.bytes + s.idx_bytes for s in shards)
    data = config(url, tmp_path, cache_bytes=4 * size, fetch_timeout=0.1).data
    store = Dataset(data).open_store()
    assert isinstance(store, CachedStore)

    def here() -> set[str]:
        return {p.stem for p in store.folder.glob("*.tar")}

    store.hold([shards[0:1], shards[1:2]])
    for i in (2, 3):
        store.hold([shards[0:1], shards[i : i + 1]])
    assert here() == {s.name for s in shards[:4]}
    old = time.time() - 1000
    os.utime(store.folder / f"{shards[0].name}.tar", (old, old))  # held, so its age is no reason
    os.utime(store.folder / f"{shards[2].name}.tar", (old + 9, old + 9))
    store.hold([shards[0:1], shards[4:5]])
    assert shards[0].name in here() and shards[4].name in here()
    assert shards[2].name not in here() and shards[3].name in here()
    with pytest.raises(UserError, match="cache_bytes: .* too small for the windows in use"):
        store.hold([shards[0:5]])
    # Held by another process of the node: no room, and said so.
    locks = []
    for shard in shards[:5]:
        for suffix in (".tar", ".idx"):
            handle = os.open(store.folder / f"{shard.name}{suffix}.use", os.O_RDWR | os.O_CREAT)
            fcntl.flock(handle, fcntl.LOCK_SH)
            locks.append(handle)
    with pytest.raises(TryAgain, match="leave no room for shard-000005"):
        store.hold([shards[5:6]])
    for handle in locks:
        os.close(handle)
    store.hold([shards[5:6]])
    store.close()


@pytest.mark.parametrize("window_tokens", [1, 60_000, 1 << 30])
def test_room_for_the_largest_windows_is_enough_and_less_is_refused_at_the_start(
    server: tuple[str, Behaviour], toy: Path, tmp_path: Path, window_tokens: int
) -> None:
    sets = {"window_tokens": window_tokens, "prefetch_bytes": 0, "fetch_timeout": 5.0}

    def planner(split: str, room: int) -> Planner:
        data = config(server[0], tmp_path, cache_bytes=room, **sets).data
        return Dataset(data).planner(PHASE, phase_index=0, seed=5, split=split)

    enough = {}
    for split, together in ("train", 2), ("heldout", 1):
        shards, windows = load_manifest(toy).split(split), planner(split, 1 << 30).windows
        sizes = sorted(s.bytes + s.idx_bytes for s in shards)
        room = sum(sizes[-math.ceil(together * len(shards) / windows) :])
        if split == "train":  # and one that an evaluation reads
            room += max(s.bytes + s.idx_bytes for s in load_manifest(toy).shards)
        enough[split] = room
        planner(split, room)
        with pytest.raises(UserError, match=rf"^data.cache_bytes: {room - 1} is too .*\({room} "):
            planner(split, room - 1)
    here = digests(config(str(toy), tmp_path, **sets))
    assert digests(config(server[0], tmp_path, cache_bytes=enough["train"], **sets)) == here


def test_a_half_fetched_file_of_a_dead_process_is_taken_up(
    server: tuple[str, Behaviour], toy: Path, tmp_path: Path
) -> None:
    url, behaviour = server
    shard = load_manifest(toy).split("train")[0]
    store = Dataset(config(url, tmp_path).data).open_store()
    assert isinstance(store, CachedStore)
    data = (toy / f"{shard.name}.tar").read_bytes()
    (store.folder / f"{shard.name}.tar.part").write_bytes(data[:5000])
    assert store.path(f"{shard.name}.tar").read_bytes() == data
    assert (f"{shard.name}.tar", 5000) in behaviour.requests
    # And one that was not of this file.
    other = load_manifest(toy).split("train")[1]
    (store.folder / f"{other.name}.tar.part").write_bytes(b"x" * 5000)
    store.path(f"{other.name}.tar")
    assert (store.folder / f"{other.name}.tar").read_bytes() == (
        toy / f"{other.name}.tar"
    ).read_bytes()
    store.close()


@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize("kind", ["beginning", "other", "longer"])
def test_what_was_there_of_a_file_is_counted_and_costs_no_try(
    server: tuple[str, Behaviour],
    toy: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    ranges: bool,
    kind: str,
) -> None:
    monkeypatch.setattr("core.console.PLAIN_EVERY", 0.0)
    url, behaviour = server
    behaviour.ranges = ranges
    name = load_manifest(toy).split("train")[0].files[0].name
    data = (toy / name).read_bytes()
    there = {"beginning": data[:5000], "other": bytes(len(data)), "longer": data + b"more"}[kind]
    settings = config(url, tmp_path, fetch_retries=int(kind == "other")).data
    with Dataset(settings).open_store() as store:
        (store.folder / f"{name}.part").write_bytes(there)
        assert store.path(name).read_bytes() == data
    shares = [float(x) for x in re.findall(r"shards (\S+) %", capsys.readouterr().err)]
    assert min(shares) >= 0 and max(shares) <= 100 and shares[-1] == 100


def test_progress_is_shown_while_the_first_window_loads(
    server: tuple[str, Behaviour],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("core.console.PLAIN_EVERY", 0.0)
    digests(config(server[0], tmp_path), 1)
    assert "fetching shards " in capsys.readouterr().err


def test_an_unknown_place_is_one_clear_error(server: tuple[str, Behaviour], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="^nowhere://x/manifest.json"):
        digests(config("nowhere://x", tmp_path), 1)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="data.cache_dir: .*file"):
        digests(config(server[0], tmp_path / "file"), 1)


@pytest.mark.slow
def test_s3_gives_the_local_batches(toy: Path, local: list[str], tmp_path: Path) -> None:
    """Against moto's server, over HTTP on the loopback."""
    with s3_server(toy) as url:
        tree = config(url, tmp_path / "cache", fetch_timeout=10.0)
        assert digests(tree) == local
        tree = config(url, tmp_path / "other", workers=1, fetch_timeout=10.0)
        assert digests(tree, 5) == local[:5]
        import fsspec

        fsspec.filesystem("s3").rm(f"{url}/shard-000003.tar")
        with pytest.raises(UserError, match=f"{url}/shard-000003.tar: no such object"):
            digests(config(url, tmp_path / "third", fetch_timeout=10.0))
        fsspec.filesystem("s3").pipe_file(f"{url}/shard-000003.tar", b"cut")
        with pytest.raises(UserError, match="shard-000003.tar: has 3 bytes, not ") as caught:
            digests(config(url, tmp_path / "third", fetch_timeout=10.0))
        assert caught.value.code == 2


def test_documents_of_another_dataset_never_come_from_the_cache(
    server: tuple[str, Behaviour], tmp_path: Path
) -> None:
    """Two datasets with equal file names share a cache folder."""
    other = tmp_path / "other"
    write_dataset(other, random_documents(100, 7), vocab=VOCAB, documents_per_shard=25)
    digests(config(server[0], tmp_path / "cache"), 2)
    with http_server(other) as (url, _):
        assert digests(config(url, tmp_path / "cache"), 2) == digests(
            config(str(other), tmp_path / "x"), 2
        )


def descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def evaluate(dataset: Dataset) -> list[bytes]:
    batches = HeldOut(dataset, PHASE, seed=5, rank=0, world=1, micro_batch_rows=2, rows=1000)
    return [digest for batch in batches for digest in batch.row_digests()]


def test_evaluations_ask_the_origin_once_and_leave_no_descriptor(
    server: tuple[str, Behaviour], toy: Path, tmp_path: Path
) -> None:
    url, behaviour = server
    wanted = evaluate(Dataset(config(str(toy), tmp_path).data))
    dataset = Dataset(config(url, tmp_path).data)
    assert evaluate(dataset) == wanted
    asked, before = len(behaviour.requests), descriptors()
    behaviour.faults = {name: ["503"] * 99 for name in ("manifest.json", "vocab.txt")}
    for _ in range(5):
        assert evaluate(dataset) == wanted
    assert len(behaviour.requests) == asked
    assert descriptors() == before


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_that_was_closed_leaves_its_room_to_the_next(
    server: tuple[str, Behaviour], toy: Path, tmp_path: Path, workers: int
) -> None:
    """As at a change of phase or a rollback, in a cache that holds one stream's windows alone."""
    shards = load_manifest(toy).split("train")
    size = max(s.bytes + s.idx_bytes for s in shards)
    tree = config(server[0], tmp_path, workers, cache_bytes=3 * size, window_tokens=1,
                  prefetch_bytes=0, fetch_timeout=0.5, fetch_retries=1)  # fmt: skip
    dataset, before = Dataset(tree.data), 0
    for seed in range(6):
        s = Stream(dataset, PHASE, phase_index=0, seed=seed, rank=0, world=1,
                   micro_batch_rows=24)  # fmt: skip
        next(s)
        s.close()
        before = before or descriptors()
    while descriptors() > before:  # a transfer for a later window may be under way
        time.sleep(0.05)


def test_an_outage_is_no_mistake_of_the_users(
    server: tuple[str, Behaviour], tmp_path: Path
) -> None:
    url, behaviour = server
    for workers in (0, 1):
        behaviour.faults = {f"shard-{n:06d}.tar": ["503"] * 99 for n in range(12)}
        with pytest.raises(TryAgain, match="HTTP 503"):
            digests(config(url, tmp_path / str(workers), workers, fetch_retries=1), 1)
    behaviour.faults = {"manifest.json": ["503"] * 99}
    with pytest.raises(TryAgain, match="manifest.json: HTTP 503"):
        digests(config(url, tmp_path / "x", fetch_retries=1), 1)


def test_an_answer_that_is_no_manifest_or_vocabulary_is_asked_for_again(
    server: tuple[str, Behaviour], local: list[str], tmp_path: Path
) -> None:
    """Such as a proxy's page while the origin is away, or a body that broke off."""
    url, behaviour = server
    behaviour.faults = {"manifest.json": ["wrong"] * 2, "vocab.txt": ["wrong"]}
    assert digests(config(url, tmp_path), 1) == local[:1]
    behaviour.faults = {"manifest.json": ["digit 1"]}
    assert digests(config(url, tmp_path), 1) == local[:1]
    behaviour.faults = {"manifest.json": ["digit 1"] * 2}
    with pytest.raises(UserError, match="not the hash of its content") as caught:
        digests(config(url, tmp_path), 1)
    assert not isinstance(caught.value, TryAgain)
    behaviour.faults = {"vocab.txt": ["wrong"] * 99}
    with pytest.raises(UserError, match="not the vocabulary these shards") as caught:
        digests(config(url, tmp_path), 1)
    assert not isinstance(caught.value, TryAgain)
    behaviour.faults = {"vocab.txt": ["page"] * 99}
    with pytest.raises(TryAgain, match="vocab.txt: no vocabulary"):
        digests(config(url, tmp_path), 1)
    behaviour.faults = {"manifest.json": ["wrong"] * 99}
    with pytest.raises(TryAgain, match="manifest.json: not JSON .* .given up after 4 tries"):
        digests(config(url, tmp_path), 1)


@pytest.mark.parametrize("ending", ["", ".part"])
def test_what_is_no_file_in_the_cache_is_fetched(
    server: tuple[str, Behaviour], local: list[str], tmp_path: Path, ending: str
) -> None:
    tree = config(server[0], tmp_path)
    assert digests(tree, 3) == local[:3]
    for n, path in enumerate(sorted(tmp_path.glob("*/shard-*.tar"))):
        path.unlink()
        place = path.with_name(path.name + ending)
        (place.mkdir, partial(os.mkfifo, place))[n % 2]()
    assert digests(tree, 3) == local[:3]


def test_a_cache_that_is_taken_away_is_made_again(
    server: tuple[str, Behaviour], toy: Path, tmp_path: Path
) -> None:
    """As cleaners of /tmp do with what is old."""
    shards = load_manifest(toy).split("train")
    with Dataset(config(server[0], tmp_path / "cache").data).open_store() as store:
        for number, shard in enumerate(shards[:3]):
            store.hold([(shard,)])
            for file in shard.files:
                assert store.path(file.name).read_bytes() == (toy / file.name).read_bytes()
            away = (tmp_path / "cache", store.folder)[number % 2]
            away.rename(tmp_path / f"away{number}")


def test_a_stopped_process_is_not_waited_for_in_vain(
    server: tuple[str, Behaviour], toy: Path, tmp_path: Path
) -> None:
    """Which may have been fetching; one that goes on is waited for as long as it does."""
    name = load_manifest(toy).shards[0].files[0].name
    data = config(server[0], tmp_path, fetch_timeout=0.2, fetch_retries=1).data
    with Dataset(data).open_store() as store, Lock(tmp_path / "transfer.lock") as other:
        assert other.take(wait=False)
        with pytest.raises(TryAgain, match=f"{tmp_path}/transfer.lock is held .* 1.604 s: it may"):
            store.path(name)

        def goes_on() -> None:
            for _ in range(2):
                time.sleep(1.2)  # for 8 MB of a slow store
                os.utime(other.path)
            other.close()

        threading.Thread(target=goes_on, daemon=True).start()
        assert store.path(name).read_bytes() == (toy / name).read_bytes()


@pytest.mark.parametrize("moment", ["_make_private", "transfer", "put_in_place", "sha256", "Lock"])
def test_a_cache_that_is_taken_away_meanwhile_is_made_again(
    server: tuple[str, Behaviour],
    toy: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    moment: str,
) -> None:
    """As by another job of this user that cleans up at its end."""
    plain, calls = getattr(cache_module, moment), []

    def after_its_removal(*arguments: Any, **more: Any) -> Any:
        calls.append(arguments)
        if len(calls) < 3:
            shutil.rmtree(tmp_path / "cache", ignore_errors=True)
        return plain(*arguments, **more)

    monkeypatch.setattr(cache_module, moment, after_its_removal)
    with Dataset(config(server[0], tmp_path / "cache").data).open_store() as store:
        for file in load_manifest(toy).split("train")[0].files:
            assert store.path(file.name).read_bytes() == (toy / file.name).read_bytes()
    assert len(calls) > 3
    root = tmp_path / "cache"
    assert {p.stat().st_mode & 0o777 for p in (root, *root.glob("*/"))} == {0o700}


@pytest.mark.parametrize("name", ["shard-000000.tar", "shard-000001.idx"])
def test_what_is_taken_away_once_it_is_here_is_brought_again(
    server: tuple[str, Behaviour],
    toy: Path,
    local: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    """A damaged data set may be read on without a shard, but none is lost by that."""
    plain = cache_module.Cache.bring

    def taken_away_after_it(cache: cache_module.Cache, asked: str, *more: Any) -> bool:
        done = plain(cache, asked, *more)
        number = len([*tmp_path.glob(f"{cache.root.name}-*")])
        if asked == name and number < 3:
            cache.root.rename(tmp_path / f"{cache.root.name}-{number}")
        return done

    monkeypatch.setattr(cache_module.Cache, "bring", taken_away_after_it)
    batches, documents = (
        config(server[0], tmp_path / cache, on_damage="empty") for cache in ("a", "b")
    )
    assert digests(batches) == local
    here = Dataset(StreamConfig(dir=str(toy))).documents("train")
    assert [x.id for x in Dataset(documents.data).documents("train")] == [x.id for x in here]
    assert (tmp_path / "a-0").exists() and (tmp_path / "b-2").exists()


@pytest.mark.parametrize("room", ["8k", "60k"])
def test_a_full_disk_is_named_and_not_the_origin(
    server: tuple[str, Behaviour], toy: Path, local: list[str], tmp_path: Path, room: str
) -> None:
    url, behaviour = server
    (tmp_path / "cache").mkdir()
    with mounted(tmp_path / "cache", f"mode=700,size={room}"):
        with pytest.raises(UserError, match=r"/cache/\w+/shard-\S+: the disk is full") as said:
            digests(config(url, tmp_path / "cache"), 5)
        assert said.value.code == 2 and url not in str(said.value)
        assert max(behaviour.counts.values()) == 1  # there is no use in another try
        options = "remount,size=64m"
        subprocess.run(["mount", "-o", options, str(tmp_path / "cache")], check=True)
        assert digests(config(url, tmp_path / "cache"), 5) == local[:5]


def test_bytes_that_did_not_reach_the_disk_are_fetched_again(
    server: tuple[str, Behaviour], toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a file server says at the last of a quota that is used up."""

    def full(_: int) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    url, behaviour = server
    name = load_manifest(toy).split("train")[0].files[0].name
    with Dataset(config(url, tmp_path).data).open_store() as store:
        with monkeypatch.context() as patch, pytest.raises(UserError) as said:
            patch.setattr(os, "fsync", full)
            store.path(name)
        assert str(said.value).startswith(f"{store.folder / name}.part: the disk is full")
        assert store.path(name).read_bytes() == (toy / name).read_bytes()
    assert [start for asked, start in behaviour.requests if asked == name] == [0, 0]


@pytest.mark.parametrize("ending", [".tar", ".idx"])
def test_a_damaged_cached_file_is_fetched_again(
    server: tuple[str, Behaviour], local: list[str], tmp_path: Path, ending: str
) -> None:
    """Planted or damaged, of the right size: what lies in the cache is hashed before it is used."""
    url, behaviour = server
    tree = config(url, tmp_path)
    assert digests(tree, 3) == local[:3]
    for path in tmp_path.glob(f"*/shard-*{ending}"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    before = behaviour.counts
    assert digests(tree, 3) == local[:3]
    again = behaviour.counts - before
    assert any(name.endswith(ending) for name in again) and max(again.values()) == 1


@pytest.mark.parametrize("ending", [".tar", ".idx"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_cached_file_that_is_damaged_once_it_was_hashed_is_brought_again(
    server: tuple[str, Behaviour], local: list[str], tmp_path: Path, ending: str, workers: int
) -> None:
    steps = step_digests(config(server[0], tmp_path, workers), 0, 1, 24, STEPS)
    found = [next(steps) for _ in range(3)]
    for path in tmp_path.glob(f"*/shard-*{ending}"):
        size = path.stat().st_size
        with path.open("r+b") as file:  # as a bad disk does: those who have it open see it
            file.write(b"\xff" * size)
    assert [*found, *steps] == local


@pytest.mark.parametrize("on_damage", ["stop", "empty"])
def test_so_is_one_that_is_read_through(
    server: tuple[str, Behaviour], tmp_path: Path, on_damage: str
) -> None:
    dataset = Dataset(config(server[0], tmp_path, on_damage=on_damage).data)
    wanted = list(dataset.documents("train"))
    for path in tmp_path.glob("*/shard-*.tar"):
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2] + b"\xff" * (len(data) - len(data) // 2))
    found = list(dataset.documents("train"))
    assert [d.id for d in found] == [d.id for d in wanted] and len(found) == 300
    assert all((a.ids == b.ids).all() for a, b in zip(found, wanted, strict=True))


def test_the_cache_is_of_this_user_alone(
    server: tuple[str, Behaviour], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, _ = server
    root = tmp_path / "cache"
    digests(config(url, root), 1)
    assert {p.stat().st_mode & 0o777 for p in (root, *root.glob("*/"))} == {0o700}
    root.chmod(0o777)
    with pytest.raises(UserError, match="cache can be written to by others .mode 777"):
        digests(config(url, root), 1)
    root.chmod(0o700)
    if os.geteuid() == 0:  # who else could make a link of another user's
        link = tmp_path / "link"
        link.symlink_to(root)
        os.lchown(link, 12345, -1)
        with pytest.raises(UserError, match="link belongs to user 12345, not to you"):
            digests(config(url, link), 1)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(UserError, match=r"cache belongs to user \d+, not to you \(12345\)"):
        digests(config(url, root), 1)
    assert StreamConfig(dir="x").cache_dir == "/tmp/bert-shard-cache-12345"


def test_what_is_not_the_caches_own_stays(
    server: tuple[str, Behaviour], toy: Path, tmp_path: Path
) -> None:
    url, _ = server
    root, victim = tmp_path / "cache", tmp_path / "victim"
    for folder in (victim, root / "mine"):
        folder.mkdir(mode=0o700, parents=True)
        for name in ("precious.tar", "precious.idx"):
            (folder / name).write_bytes(b"x" * 100_000)
    root.chmod(0o700)
    shards = load_manifest(toy).split("train")
    data = config(url, root, cache_bytes=2 * max(s.bytes + s.idx_bytes for s in shards)).data
    with Dataset(data).open_store() as store:
        (root / ("0" * 32)).symlink_to(victim)
        (store.folder / "linked.tar").symlink_to(victim / "precious.tar")
        for shard in shards[:4]:
            store.hold([(shard,)])
        part = store.folder / f"{shards[4].name}.tar.part"
        part.symlink_to(victim / "new.tar")
        store.hold([(shards[4],)])
        assert not store.path(f"{shards[4].name}.tar").is_symlink()
    for folder in (victim, root / "mine"):
        assert sorted(p.name for p in folder.iterdir()) == ["precious.idx", "precious.tar"]
    link = tmp_path / "link"
    link.symlink_to(root)
    assert Dataset(config(url, link).data).open_store().path(f"{shards[0].name}.idx").exists()
