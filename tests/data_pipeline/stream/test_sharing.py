"""Plans that processes share: whatever befalls one, the others have the right plan."""

import contextlib
import fcntl
import gc
import multiprocessing as mp
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data_pipeline.corpus.manifest import ShardInfo, load_manifest
from data_pipeline.corpus.shards import ShardIndex, read_index
from data_pipeline.stream import sharing
from data_pipeline.stream.dataset import Dataset
from data_pipeline.stream.plan import PhaseSpec, Planner, StreamConfig
from data_pipeline.stream.sharing import AHEAD, PlanSlots, SharedPlans

PHASE = PhaseSpec(max_seq_len=64, row_len=256, max_predictions=10)
HASH = "a" * 32


@pytest.fixture
def planner(toy: Path) -> Planner:
    data = StreamConfig(dir=str(toy), window_tokens=60_000)
    return Dataset(data).planner(PHASE, phase_index=0, seed=1, split="train")


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The windows planned in this process."""
    found: list[tuple[int, int]] = []
    plain = Planner.trace
    monkeypatch.setattr(Planner, "trace", lambda self, *at: found.append(at) or plain(self, *at))
    return found


def test_indexes_are_brought_before_the_lock_is_taken(toy: Path) -> None:
    locked: list[bool] = []
    slots, manifest = PlanSlots(None), load_manifest(toy)

    def read(shard: ShardInfo) -> ShardIndex:
        with slots.open(1) as slot, contextlib.suppress(BlockingIOError):
            locked.append(True)
            fcntl.flock(slot, fcntl.LOCK_EX | fcntl.LOCK_NB)
            locked[-1] = False
        return read_index(toy / f"{shard.name}.idx")

    data = StreamConfig(dir=str(toy), window_tokens=60_000)
    planner = Planner(manifest, read, data, PHASE, phase_index=0, seed=1)
    SharedPlans(planner, HASH, slots).plan_ahead(0, 1)
    shards = len(planner.window_shards(0, 1))
    assert locked == [False] * shards + [True] * shards  # brought, then planned


def test_what_one_has_planned_the_other_reads(planner: Planner, planned: list) -> None:
    wanted = [planner.plan(0, window).digest() for window in range(2)]
    planned.clear()
    slots = PlanSlots(None)
    one, two = SharedPlans(planner, HASH, slots), SharedPlans(planner, HASH, slots)
    for window in range(2):
        assert one.plan(0, window).digest() == two.plan(0, window).digest() == wanted[window]
    assert planned == [(0, 0), (0, 1)]
    SharedPlans(planner, "b" * 32, slots).plan(0, 1)  # of another data set, seed or phase
    assert planned[2:] == [(0, 1)]


def test_windows_are_planned_ahead_one_by_each(planner: Planner, planned: list) -> None:
    shared = SharedPlans(planner, HASH, PlanSlots(None))
    for _ in range(AHEAD + 2):
        shared.plan_ahead(0, 1)
    numbers = [epoch * planner.windows + window for epoch, window in planned]
    assert numbers == list(range(1, 1 + AHEAD))
    # Who is far behind plans alone, and takes nothing from those who are not.
    shared.plan_ahead(3, 0)
    before = len(planned)
    shared.plan(3, 0)
    assert len(planned) == before
    late = 3 * planner.windows - AHEAD - 2
    shared.plan(*divmod(late, planner.windows))
    shared.plan(3, 0)
    assert planned[before:] == [divmod(late, planner.windows)]


def _handles(token: str = "plans-") -> list[str]:
    links = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
    return [link for link in links if os.path.exists(link) and token in os.readlink(link)]


@pytest.mark.parametrize("at", [0, 20, 50, 100, -1])
def test_a_torn_or_damaged_plan_is_planned_again(planner: Planner, planned: list, at: int) -> None:
    slots = PlanSlots(None)
    shared = SharedPlans(planner, HASH, slots)
    wanted = shared.plan(0, 0).digest()
    with slots.open(0) as slot:
        assert slot is not None
        data = bytearray(slot.readall())
        data[at] ^= 1
        os.pwrite(slot.fileno(), data, 0)
    assert shared.plan(0, 0).digest() == wanted
    with slots.open(0) as slot:
        assert slot is not None
        slot.truncate(len(data) // 2)
    assert shared.plan(0, 0).digest() == wanted
    assert 2 <= len(planned) <= 3


def test_a_planner_that_is_killed_or_stopped_holds_nobody_up(
    planner: Planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = mp.get_context("fork")
    here, there = context.Pipe()
    slots, wanted, plain = PlanSlots(None), planner.plan(0, 0).digest(), Planner.trace

    def stuck(self: Planner, epoch: int, window: int) -> Any:
        there.send("planning")
        time.sleep(600)

    def ask(trace: Callable[..., Any]) -> None:
        monkeypatch.setattr(Planner, "trace", trace)
        there.send(SharedPlans(planner, HASH, slots).plan(0, 0).digest())

    first = context.Process(target=ask, args=(stuck,))
    first.start()
    assert here.recv() == "planning"
    second = context.Process(target=ask, args=(plain,))
    second.start()
    assert not here.poll(0.3)  # it waits
    first.kill()
    assert here.recv() == wanted
    second.join()
    third = context.Process(target=ask, args=(plain,))
    with slots.open(0) as slot:
        assert slot is not None
        fcntl.flock(slot, fcntl.LOCK_EX)  # as one that is stopped would
        monkeypatch.setattr(sharing, "PATIENCE", 0.1)
        third.start()
        assert here.recv() == wanted
    for process in (first, third):
        process.join()


def test_a_lock_does_not_stay_with_a_process_forked_meanwhile(planner: Planner) -> None:
    slots = PlanSlots(None)
    with slots.open(0) as slot:
        assert slot is not None
        fcntl.flock(slot, fcntl.LOCK_EX)
        sleeper = mp.get_context("fork").Process(target=time.sleep, args=(60,))
        sleeper.start()
    with slots.open(0) as slot:
        assert slot is not None
        fcntl.flock(slot, fcntl.LOCK_EX | fcntl.LOCK_NB)
    sleeper.kill()
    sleeper.join()


def test_ranks_of_a_node_meet_and_others_are_not_touched(planner: Planner, planned: list) -> None:
    gc.collect()  # what other tests have left open is closed now, not in between
    before = sorted(os.listdir("/proc/self/fd"))
    first: list[Any] = []
    here = PlanSlots(lambda offer: first.append(offer) or [offer])
    pid, token, handles = first[0]
    # Of another node: no such process here, another one, other files, no permission.
    elsewhere = [(2**22 + 5, "x" * 32, [3]), (os.getpid(), "y" * 32, handles), (1, token, [0])]
    second = PlanSlots(lambda offer: [*elsewhere, first[0], offer])
    SharedPlans(planner, HASH, here).plan(0, 0)
    SharedPlans(planner, HASH, second).plan(0, 0)
    assert planned == [(0, 0)] and len(_handles(token)) == 2 * len(handles)
    alone = PlanSlots(lambda offer: [*elsewhere, offer])
    SharedPlans(planner, HASH, alone).plan(0, 0)
    assert len(planned) == 2
    del here, second, alone
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_without_memory_to_share_each_plans_alone(
    planner: Planner, planned: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(name: str) -> int:
        raise OSError

    wanted = planner.plan(0, 0).digest()
    with monkeypatch.context() as m:
        m.setattr(os, "memfd_create", none)
        shared = SharedPlans(planner, HASH, PlanSlots(lambda offer: [offer]))
    shared.plan_ahead(0, 1)
    assert shared.plan(0, 0).digest() == wanted and planned == [(0, 0)] * 2
