"""Writing in the background, for real: agreement, full disks, read-only folders, kill -9."""

from __future__ import annotations

import functools
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from core.errors import TryAgain, UserError
from pretrain import checkpoint, distributed
from pretrain.checkpoint import Checkpoints
from pretrain.config import CheckpointConfig
from pretrain.train import Trainer
from pretrain.writer import Failed, Writer
from tests import gloo
from tests.pretrain import test_train
from tests.pretrain.test_checkpoint import ALONE, VOCABULARY, make, names, state, write
from tests.pretrain.test_train import configure

data = test_train.data  # the fixture


# ------------------------------------------------------------------------------------ agreement


def without_a_thread(rank: int, size: int) -> list[Any]:
    """By each rank alone that gets no thread: (what each wait and poll gives, what is left)."""
    writer, found = Writer(distributed.start("cpu")), []
    start = threading.Thread.start
    for alone in range(size):

        def refused(thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        threading.Thread.start = refused if rank == alone else start
        try:
            writer.start(lambda: rank + 1, sum, lambda: None)
        finally:
            threading.Thread.start = start
        found.append((writer.wait(), writer.poll(), writer.busy))
        writer.join(1.0)
    return found


def test_work_is_done_at_once_where_no_thread_can_be_begun() -> None:
    assert gloo.run(2, without_a_thread) == [[(3, None, False)] * 2] * 2


def agreement(rank: int, size: int) -> dict[str, Any]:
    """Steps with a collective each, while slow work goes on: (step of the end, what ended)."""
    world = distributed.start("cpu")
    writer = Writer(world)

    def part(fails: bool) -> int:
        time.sleep(0.3 * rank)
        if fails and rank == 1:
            raise OSError(28, "No space left on device", "shard")
        return rank * 10

    result: dict[str, Any] = {}
    for name in ("first", "fails", "third"):
        discarded: list[int] = []
        fails = functools.partial(part, name == "fails")
        writer.start(fails, sum, functools.partial(discarded.append, 1))
        ended, step, during = None, 0, 0
        while ended is None:
            step += 1
            dist.all_reduce(torch.ones(1000))
            time.sleep(0.01)
            ended = writer.poll()
            during += ended is None
        result[name] = (step, ended, during > 1, len(discarded))
    writer.start(lambda: part(False), sum, lambda: None)
    result["waited"] = writer.wait()
    result["idle"] = (writer.wait(), writer.poll(), writer.busy)
    return result


def test_all_ranks_learn_of_the_end_at_the_same_step_and_none_waits_for_it() -> None:
    first, second = gloo.run(2, agreement)
    for name, outcome in (
        ("first", 10),
        ("fails", Failed("shard: No space left on device")),
        ("third", 10),
    ):
        assert first[name][:3] == second[name][:3] == (first[name][0], outcome, True)
    assert (first["fails"][3], second["fails"][3]) == (1, 0)  # rank 0 clears away
    assert first["waited"] == second["waited"] == 10
    assert first["idle"] == second["idle"] == (None, None, False)


def save_with_and_without_store(run_dir: Path, pipe: Connection) -> None:
    world = distributed.start("cpu")
    said: list[str] = []
    keeper = Checkpoints(run_dir, world, CheckpointConfig(), said.append)

    def save(step: int) -> None:
        keeper.save(state(step), VOCABULARY, lambda: lambda to: write(to) if world.is_main else [])
        keeper.wait()
        pipe.send((keeper.saved_step, said))

    save(5)
    pipe.recv()
    save(10)


def test_a_checkpoint_is_written_though_the_launcher_and_its_store_are_gone(tmp_path: Path) -> None:
    ends = [gloo.CONTEXT.Pipe() for _ in range(2)]
    store, env = gloo.agent()
    ranks = [
        gloo.Process(
            save_with_and_without_store, tmp_path, far, env=env | {"RANK": r, "LOCAL_RANK": r}
        )
        for r, (_, far) in zip("01", ends, strict=True)
    ]
    assert [near.recv() for near, _ in ends] == [(5, [])] * 2
    store.kill()
    for near, _ in ends:
        near.send("go on")
    for rank, (near, _) in zip(ranks, ends, strict=True):
        code, _, err = rank.end()
        assert code == 0 and near.recv() == (10, []) and "Traceback" not in err, err
    assert checkpoint.resolve(tmp_path).name == "step-00000010"


# ----------------------------------------------------------------------------- the whole trainer


def run(
    data: Path,
    out: Path,
    *overrides: str,
    stop: int | None = None,
    when_begun: Callable[[], None] = lambda: None,
) -> tuple[Any, list[str]]:
    """(exit code or the line the run ends with, what it said)."""
    world = distributed.start("cpu")
    trainer = Trainer(configure(data, out, "checkpoint.every_steps=2", *overrides), world)
    said: list[str] = []
    trainer.monitor.say = trainer.checkpoints.say = said.append
    when_begun()
    try:
        return trainer.run(stop_at_step=stop), said
    except UserError as error:
        return f"{error.code}: {error}", said


def both_ways(rank: int, size: int, data: Path, out: Path) -> bool:
    for name in ("true", "false"):
        run(data, out / name, f"checkpoint.asynchronous={name}")
    files = sorted((out / "true/checkpoints").glob("step-*/engine/*"))
    assert len(files) == 5 * (size + 1), files
    return all(
        path.read_bytes() == (out / "false" / path.relative_to(out / "true")).read_bytes()
        for path in files
    )


def test_a_checkpoint_written_in_the_background_has_the_same_bytes(
    data: Path, tmp_path: Path
) -> None:
    assert gloo.run(2, both_ways, data, tmp_path) == [True, True]
    for name in ("true", "false"):
        lines = (tmp_path / name / "metrics.jsonl").read_text()
        for key in ("stall_seconds", "write_seconds", "bytes", "stall_share"):
            assert lines.count(f'"checkpoint/{key}"') == 5


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """What a full disk does to a write, for this process alone: it ends short, with an error."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def one_full_rank(rank: int, size: int, data: Path, out: Path) -> dict[str, Any]:
    """Only the last rank's disk is full, from step 3 on; then it has room again."""
    run(data, out, stop=3)
    limit = "checkpoint.max_failed_writes=2"
    with files_of_at_most(20_000 if rank == size - 1 else 1 << 30):
        stopped, _ = run(data, out, limit, stop=4)
        full = run(data, out, limit)
    left = names(out)
    dist.barrier()
    return {
        "stopped": stopped,
        "full": full,
        "left": left,
        "after": run(data, out)[0],
        "newest": names(out)[-1],
    }


def test_a_full_disk_on_one_rank_is_said_survived_and_limited(data: Path, tmp_path: Path) -> None:
    for result in gloo.run(2, one_full_rank, data, tmp_path):
        assert "stopped at step 4 of 10 as asked, without a checkpoint" in result["stopped"]
        line, said = result["full"]
        assert line[:4] == result["stopped"][:4] == "85: "
        refused = [text for text in said if "checkpoint not written, older ones stand" in text]
        assert len(refused) == 2  # of steps 4 and 6; that of step 8 is one too many
        for text in (*refused, line):
            assert "rank-00001" in text and "File too large" in text and "\n" not in text
        assert "3 checkpoints in a row failed" in line
        assert result["left"] == ["latest", "step-00000002", "step-00000003"]
        assert (result["after"], result["newest"]) == (0, "step-00000010")


def lose_each_other(rank: int, size: int) -> str:
    """Rank 1 writes for longer than the other's group waits for it."""
    world = distributed.start("cpu")
    writer = Writer(world, distributed.apart(world, timedelta(seconds=1)))
    writer.start(lambda: time.sleep(3 * rank), len, lambda: None)
    with pytest.raises(TryAgain) as lost:
        writer.wait()
    return str(lost.value)


def test_ranks_that_lose_each_other_while_writing_start_again() -> None:
    for line in gloo.run(2, lose_each_other):
        assert line.startswith("the ranks lost each other while writing a checkpoint: ")
        assert "\n" not in line


def die_after_a_good_one(rank: int, size: int) -> tuple[object, object]:
    """The results of a write, and of the next, whose threads end without a word."""
    writer = Writer(distributed.start("cpu"))
    writer.start(lambda: 1, sum, lambda: None)
    good = writer.wait()
    distributed.to_main = lambda *_: sys.exit()
    writer.start(lambda: 1, sum, lambda: None)
    return good, writer.wait()


def test_the_result_of_a_write_is_never_that_of_the_one_before() -> None:
    seen = (2, Failed("the end of the writing was not seen"))
    assert gloo.run(2, die_after_a_good_one) == [seen] * 2


# --------------------------------------------------------------------------------- real disks


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of its own at RUN/checkpoints, 8 MB; the run folder."""
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    with mounted(folder, "size=8m"):
        yield folder.parent


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[None]:
    """A disk of its own at the folder; the test is skipped where none may be mounted."""
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True
    )
    if done.returncode:
        pytest.skip(f"no mounting here: {done.stderr.decode().strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_disk_goes_with_a_test_that_fails(tmp_path: Path) -> None:
    with pytest.raises(AssertionError), mounted(tmp_path, "size=4k"):
        assert tmp_path.is_mount()
        raise AssertionError
    assert not tmp_path.is_mount()


def fill_the_disk(rank: int, size: int, data: Path, out: Path) -> dict[str, Any]:
    """The disk fills up after step 3, then has room again."""
    run(data, out, stop=3)
    stone = out / "checkpoints" / "stone"

    def fill() -> None:
        if rank == 0:
            with pytest.raises(OSError), stone.open("wb") as file:
                while True:
                    file.write(bytes(10_000))
        dist.barrier()

    full = run(data, out, "checkpoint.max_failed_writes=9", when_begun=fill)
    left = names(out)
    dist.barrier()
    if rank == 0:
        stone.unlink()
    dist.barrier()
    return {"full": full, "left": left, "after": run(data, out)[0], "newest": names(out)[-1]}


@pytest.mark.slow
def test_a_full_disk_keeps_the_older_ones(data: Path, disk: Path) -> None:
    for result in gloo.run(2, fill_the_disk, data, disk):
        line, said = result["full"]
        refused = [text for text in said if "No space left on device" in text]
        assert len(refused) == 5  # steps 4, 6, 8, 10 and the last try
        assert line == "85: all steps are done, but the last checkpoint is not written"
        assert result["left"] == ["latest", "step-00000002", "step-00000003", "stone"]
        assert (result["after"], result["newest"]) == (0, "step-00000010")


def make_read_only(rank: int, size: int, data: Path, out: Path) -> dict[str, Any]:
    folder = out / "checkpoints"
    run(data, out, stop=3)
    remount(folder, "ro", rank)
    closed = run(data, out, "checkpoint.max_failed_writes=1")
    left = names(out)
    remount(folder, "rw", rank)
    return {"closed": closed, "left": left, "after": run(data, out)[0], "newest": names(out)[-1]}


def remount(folder: Path, mode: str, rank: int) -> None:
    dist.barrier()
    if rank == 0:
        subprocess.run(["mount", "-o", f"remount,{mode}", str(folder)], check=True)
    dist.barrier()


@pytest.mark.slow
def test_a_read_only_folder_keeps_the_older_ones(data: Path, disk: Path) -> None:
    for result in gloo.run(2, make_read_only, data, disk):
        line, said = result["closed"]
        refused = [text for text in said if "Read-only file system" in text]
        assert len(refused) == 1 and "older ones stand" in refused[0]
        assert "Read-only file system; 2 checkpoints in a row failed" in line
        assert result["left"] == ["latest", "step-00000002", "step-00000003"]
        assert (result["after"], result["newest"]) == (0, "step-00000010")


# ------------------------------------------------------------------------------------- kill -9


def write_for_ever(run_dir: Path) -> None:
    def slow(folder: Path) -> list[str]:
        write(folder)
        time.sleep(600)
        return []

    config = CheckpointConfig(keep_last=5)
    keeper = Checkpoints(run_dir, ALONE, config)
    keeper.save(state(10), VOCABULARY, lambda: slow)
    keeper.wait()


def test_kill_9_while_writing_leaves_the_older_ones_and_nothing_else(tmp_path: Path) -> None:
    out = tmp_path / "run"
    keeper = make(out, [5])
    process = gloo.Process(write_for_ever, out, env={})
    half = out / "checkpoints/writing-step-00000010"
    deadline = time.monotonic() + 120
    while not (half / "engine/weights.pt").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.kill()
    assert names(out) == ["latest", "step-00000005", half.name]
    assert keeper.newest().name == "step-00000005"
    assert names(out) == ["latest", "step-00000005"]
