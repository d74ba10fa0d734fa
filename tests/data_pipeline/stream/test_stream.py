import gc
import itertools
import json
import multiprocessing as mp
import os
import random
import re
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from core.errors import TryAgain, UserError
from data_pipeline.stream.audit import AuditConfig, AuditPhase, step_digests
from data_pipeline.stream.dataset import Dataset
from data_pipeline.stream.objective import ObjectiveName
from data_pipeline.stream.plan import Planner, StreamConfig
from data_pipeline.stream.reader import OpenWindow
from data_pipeline.stream.sharing import AHEAD
from data_pipeline.stream.state import StreamState
from data_pipeline.stream.stream import Stream
from tests.data_pipeline.stream.conftest import VOCAB, random_documents
from tests.datasets import write_dataset

PHASES = (
    AuditPhase(max_seq_len=64, row_len=256, max_predictions=10, rows_per_step=48),
    AuditPhase(max_seq_len=128, row_len=512, max_predictions=20, rows_per_step=24),
)
STEPS = (11, 9)  # of each phase


def config(toy: Path, workers: int = 0, **data: Any) -> AuditConfig:
    settings = {"window_tokens": 60_000, "prefetch_batches": 2, **data}
    return AuditConfig(
        seed=5, data=StreamConfig(dir=str(toy), workers=workers, **settings), phases=PHASES
    )


def stream(tree: AuditConfig, phase: int = 0, **more: Any) -> Stream:
    settings = {"rank": 0, "world": 1, "micro_batch_rows": 12, "seed": tree.seed, **more}
    dataset = Dataset(tree.data, tree.objective)
    return Stream(dataset, tree.phases[phase], phase_index=phase, **settings)


def advance(s: Stream, steps: int) -> Stream:
    for _ in range(steps):
        for _ in range(s.micro_steps):
            next(s)
        s.commit_step()
    return s


@pytest.fixture(scope="module")
def reference(toy: Path) -> list[str]:
    """25 steps of phase 0, which cross two ends of an epoch and many of windows."""
    return list(step_digests(config(toy), 0, 1, 48, 25))


def test_the_reference_crosses_windows_and_epochs(toy: Path, reference: list[str]) -> None:
    assert len(set(reference)) == 25
    with_state = advance(stream(config(toy)), 25)
    assert with_state.state.epoch >= 1
    with_state.close()


@pytest.mark.parametrize(
    ("world", "workers", "rows"),
    [(2, 0, 3), (3, 1, 4), (4, 0, 12), (6, 0, 1), (8, 0, 6), (1, 2, 16), (1, 5, 2), (2, 2, 24)],
)
def test_batches_do_not_depend_on_world_workers_or_micro_batch(
    toy: Path, reference: list[str], world: int, workers: int, rows: int
) -> None:
    steps = 25 if world == 2 else 8
    got = list(step_digests(config(toy, workers), 0, world, rows, steps))
    assert got == reference[:steps]


@pytest.mark.parametrize("workers", [2, 5])
def test_workers_plan_each_window_once_between_them(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    """So what one of them plans falls as 1 / N."""
    plain = Planner.trace

    def noted(self: Planner, epoch: int, window: int) -> Any:
        with open(tmp_path / "planned", "ab", buffering=0) as file:
            file.write(f"{epoch} {window} {os.getpid()}\n".encode())
        return plain(self, epoch, window)

    monkeypatch.setattr(Planner, "trace", noted)
    s = advance(stream(config(toy, workers)), 30)
    s.close()
    lines = [tuple(map(int, x.split())) for x in (tmp_path / "planned").read_text().splitlines()]
    per_epoch = Dataset(config(toy).data).planner(
        PHASES[0], phase_index=0, seed=5, split="train"
    ).windows  # fmt: skip
    numbers = [epoch * per_epoch + window for epoch, window, _ in lines]
    opened = s.state.epoch * per_epoch + s.state.window + 1
    assert sorted(numbers) == list(range(len(numbers)))
    assert opened < len(numbers) <= opened + 2 + AHEAD
    assert len({pid for _, _, pid in lines}) > 2  # one of them the rank itself


def _trainer(folder: Path, data: dict[str, Any], world: int, pause: float) -> None:
    """Both phases; after each step the digest is logged and the state written, then a nap to be
    killed in. As a trainer does, the state of step s is on disk before step s + 1 begins."""
    tree = AuditConfig(seed=5, data=StreamConfig(**data), phases=PHASES)
    place = folder / "state.json"
    saved = json.loads(place.read_text()) if place.exists() else None
    first_phase = saved["phase"] if saved else 0
    for phase in range(first_phase, len(PHASES)):
        state = StreamState.from_dict(saved) if saved and saved["phase"] == phase else None
        done = state.steps if state else 0
        streams = [
            stream(tree, phase, rank=r, world=world, micro_batch_rows=2, state=state)
            for r in range(world)
        ]
        for step in range(done, STEPS[phase]):
            rows = []
            for _ in range(streams[0].micro_steps):
                for s in streams:
                    rows += next(s).row_digests()
            for s in streams:
                s.commit_step()
            with open(folder / "log", "a") as file:
                file.write(f"{phase} {step} {b''.join(rows).hex()}\n")
            (folder / "part").write_text(json.dumps(streams[0].state.to_dict()))
            os.replace(folder / "part", place)
            time.sleep(pause)
        for s in streams:
            s.close()


def test_killed_at_random_steps_and_resumed_at_other_world_sizes(toy: Path, tmp_path: Path) -> None:
    data = config(toy).data.model_dump()
    context = mp.get_context("fork")
    straight = tmp_path / "straight"
    straight.mkdir()
    _trainer(straight, data, 1, 0.0)
    expected = (straight / "log").read_text().splitlines()
    assert len(expected) == sum(STEPS)

    broken, rng = tmp_path / "broken", random.Random(3)
    broken.mkdir()
    kills = 0
    for world in itertools.cycle((2, 3, 1, 4, 6)):
        before = _lines(broken)
        process = context.Process(target=_trainer, args=(broken, data, world, 0.05))
        process.start()
        steps = rng.randint(2, 6)
        while process.is_alive() and _lines(broken) < before + steps:
            time.sleep(0.005)
        if process.is_alive():
            os.kill(process.pid, signal.SIGKILL)
            kills += 1
        process.join()
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
    assert kills >= 3
    # A step killed between log and state is made again, and must be the same again.
    by_step: dict[str, set[str]] = {}
    for line in (broken / "log").read_text().splitlines():
        phase, step, rest = line.split()
        by_step.setdefault(f"{phase} {step}", set()).add(rest)
    assert [f"{k} {next(iter(v))}" for k, v in by_step.items()] == expected
    assert all(len(v) == 1 for v in by_step.values())


def _lines(folder: Path) -> int:
    log = folder / "log"
    return log.read_text().count("\n") if log.exists() else 0


def test_the_state_is_small_and_resuming_plans_one_window(
    toy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s = advance(stream(config(toy)), 3)
    s.close()
    far = replace(
        s.state, epoch=10**5, window=1, steps=10**9, rows=10**12, sequences=10**13, tokens=10**15,
        predictions=10**14,
        history=("step 1000000000: max_sequences_per_row 12345678 -> 12345678",) * 4,
    )  # fmt: skip
    assert len(json.dumps(far.to_dict())) < 1024
    assert StreamState.from_dict(json.loads(json.dumps(far.to_dict()))) == far
    planned = []
    plain = Planner.trace
    monkeypatch.setattr(Planner, "trace", lambda self, *at: planned.append(at) or plain(self, *at))
    resumed = stream(config(toy), state=far)
    assert planned == [(10**5, 1)]
    assert advance(resumed, 1).state.steps == 10**9 + 1
    resumed.close()


def test_totals_are_those_of_the_batches(toy: Path) -> None:
    s = stream(config(toy))
    totals = np.zeros(3, np.int64)
    for _ in range(4):
        step = [next(s) for _ in range(s.micro_steps)]
        assert sum(b.sequences for b in step) == step[0].step_sequences
        assert sum(b.predictions for b in step) == step[0].step_predictions
        totals += (
            sum(b.sequences for b in step),
            sum(b.predictions for b in step),
            sum(b.tokens for b in step),
        )
        s.commit_step()
    state = s.state
    assert (state.sequences, state.predictions, state.tokens) == tuple(totals)
    assert (state.steps, state.rows) == (4, 4 * 48)
    s.close()


@pytest.mark.parametrize("objective", ["masked", "left_to_right"])
def test_steps_of_two_ranks_are_the_step_of_one(toy: Path, objective: ObjectiveName) -> None:
    """Denominators are those of both, and the state goes on at another number of ranks."""
    tree = config(toy, next_sentence="none", whole_word_mask=True)
    tree = tree.model_copy(update={"objective": objective})
    one, pair = stream(tree), [stream(tree, rank=r, world=2) for r in range(2)]
    for step in range(12):
        if step == 5:
            saved = StreamState.from_dict(json.loads(json.dumps(pair[1].state.to_dict())))
            one = _instead(one, stream(tree, state=saved))
        whole = [next(one) for _ in range(one.micro_steps)]
        parts = [next(s) for _ in range(pair[0].micro_steps) for s in pair]
        for batches in (whole, parts):
            assert sum(b.predictions for b in batches) == batches[0].step_predictions
            assert sum(b.sequences for b in batches) == batches[0].step_sequences
        rows = [[d for b in batches for d in b.row_digests()] for batches in (whole, parts)]
        assert rows[0] == rows[1]
        for s in (one, *pair):
            s.commit_step()
    assert one.state == pair[0].state
    for s in (one, *pair):
        s.close()


def _instead(old: Stream, new: Stream) -> Stream:
    old.close()
    return new


def test_reading_ahead_does_not_move_the_state(toy: Path) -> None:
    s, plain = stream(config(toy)), stream(config(toy))
    for _ in range(3 * s.micro_steps + 1):
        next(s)
    assert s.state.steps == 0
    s.commit_step()
    assert s.state == advance(plain, 1).state
    s.commit_step()
    assert s.state == advance(plain, 1).state
    s.close()
    plain.close()


def test_other_data_than_the_checkpoint_is_refused_naming_both(toy: Path, tmp_path: Path) -> None:
    s = advance(stream(config(toy)), 3)
    s.close()
    state = s.state
    other = tmp_path / "other"
    write_dataset(other, random_documents(60, 9), vocab=VOCAB + 1)
    cases = {
        "seed": (5, 6, config(toy), {"seed": 6}),
        "masked_lm_prob": (0.15, 0.2, config(toy, masked_lm_prob=0.2), {}),
        "next_sentence": ("original", "none", config(toy, next_sentence="none"), {}),
        "dataset_id": (state.dataset_id, None, config(other), {}),
        "vocab_sha256": (state.vocab_sha256, None, config(other), {}),
    }
    for name, (old, new, tree, more) in cases.items():
        with pytest.raises(UserError) as caught:
            stream(tree, state=state, **more)
        text = str(caught.value)
        assert f"{name} is {old} in the checkpoint and {'' if new is None else new}" in text
    for field, value in (("plan_version", 0), ("plan_hash", "x"), ("phase", 1)):
        with pytest.raises(UserError, match=f"{field} is {value} in the checkpoint and "):
            stream(config(toy), state=replace(state, **{field: value}))
    # Accepted by name: the next epoch begins, and the history says why.
    tree = config(toy, accept_changed=["seed"])
    s = stream(tree, state=state, seed=6)
    assert (s.state.epoch, s.state.window, s.state.row) == (state.epoch + 1, 0, 0)
    assert s.state.history == ("step 3: seed 5 -> 6",)
    assert s.state.steps == 3
    advance(s, 1)
    s.close()
    again = stream(config(toy), state=s.state, seed=6)
    assert again.state == s.state
    again.close()
    accepted = ["dataset_id", "vocab_sha256"]
    s = stream(config(other, accept_changed=accepted), state=state)
    assert len(s.state.history) == 2 and s.state.epoch == state.epoch + 1
    s.close()


def test_another_batch_size_keeps_the_place_in_the_rows(toy: Path) -> None:
    s = advance(stream(config(toy)), 3)
    s.close()
    phase = PHASES[0].model_copy(update={"rows_per_step": 24})
    settings = {"phase_index": 0, "seed": 5, "rank": 0, "world": 1, "micro_batch_rows": 12}
    with pytest.raises(UserError, match="rows_per_step is 48 in the checkpoint and 24 now"):
        Stream(Dataset(config(toy).data), phase, state=s.state, **settings)
    data = config(toy, accept_changed=["rows_per_step"]).data
    half = Stream(Dataset(data), phase, state=s.state, **settings)
    assert half.rows_per_step == half.state.rows_per_step == 24
    assert (half.state.epoch, half.state.window, half.state.row) == (
        s.state.epoch, s.state.window, s.state.row,
    )  # fmt: skip
    half.close()


@pytest.mark.parametrize("place", [{"window": 1 << 20}, {"row": 1 << 20}])
def test_a_place_that_is_not_in_the_data_is_one_line(toy: Path, place: dict[str, int]) -> None:
    begun = stream(config(toy))
    begun.close()
    with pytest.raises(UserError, match=f"^data position: {next(iter(place))} 1048576 of "):
        stream(config(toy), state=replace(begun.state, **place))


def test_a_batch_that_does_not_divide_names_keys_and_cures(toy: Path) -> None:
    with pytest.raises(UserError) as caught:
        stream(config(toy), world=5, micro_batch_rows=4)
    assert str(caught.value) == (
        "phases.0: 48 rows a step do not divide by 5 ranks; 4 or 6 ranks would do, or "
        "phases.0.rows_per_step: 50"
    )
    derived = PHASES[0].model_copy(
        update={"rows_per_step": None, "sequences_per_step": 200, "rows_multiple": 10}
    )
    with pytest.raises(UserError, match=r"phases\.0\.rows_multiple: 3$"):
        Stream(
            Dataset(config(toy).data),
            derived,
            phase_index=0,
            seed=1,
            rank=0,
            world=3,
            micro_batch_rows=20,
        )
    # The batch of a phase that has begun is its checkpoint's, whatever the keys are.
    begun = stream(config(toy))
    begun.close()
    with pytest.raises(UserError, match="by 5 ranks; 4 or 6 ranks would do$"):
        stream(config(toy), world=5, state=begun.state)


def test_rows_at_once_are_the_most_that_divide(toy: Path) -> None:
    wide, bound = (stream(config(toy), micro_batch_rows=rows) for rows in (24, 47))
    assert (bound.micro_batch_rows, bound.micro_steps) == (24, 2)
    for _ in range(4):
        assert next(bound).row_digests() == next(wide).row_digests()
    wide.close()
    bound.close()


def test_derived_rows_reach_the_recipes_batch(toy: Path) -> None:
    wanted = 200
    phase = PHASES[0].model_copy(
        update={"rows_per_step": None, "sequences_per_step": wanted, "rows_multiple": 1}
    )
    s = Stream(
        Dataset(config(toy).data), phase, phase_index=0, seed=1, rank=0, world=1, micro_batch_rows=1
    )
    assert abs(s.expected_sequences_per_step / wanted - 1) < 0.02
    realised = advance(s, 15).state.sequences / 15
    assert abs(realised / wanted - 1) < 0.05
    s.close()


def test_no_global_generator_is_touched(toy: Path) -> None:
    for workers in (0, 1):
        torch.manual_seed(1)
        before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
        s = advance(stream(config(toy, workers)), 1)
        s.close()
        assert torch.equal(before[0], torch.get_rng_state())
        assert (before[1] == np.random.get_state()[1]).all()
        assert before[2] == random.getstate()


def test_missing_things_are_one_line_each(toy: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="manifest.json: no such file"):
        stream(config(tmp_path / "nowhere"))
    for name in ("manifest.json", "vocab.txt"):
        (tmp_path / name).write_bytes((toy / name).read_bytes())
    with pytest.raises(UserError, match=r"shard-0000\d\d.idx: cannot read the index: No such file"):
        stream(config(tmp_path))
    (tmp_path / "vocab.txt").write_text("x\n")
    with pytest.raises(UserError, match="vocab.txt: not the vocabulary"):
        stream(config(tmp_path))
    write_dataset(tmp_path / "empty", [])
    with pytest.raises(UserError, match="manifest.json: shards: names none"):
        stream(config(tmp_path / "empty"))


def until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.01)


def wait_for_shards(s: Stream) -> None:
    """Until every worker has read something; its first batch is not the one that came."""
    until(lambda: all(shard.startswith("shard-") for _, shard in s.workers), "a shard in hand")


@pytest.mark.parametrize("worker", [0, 1, 2])
def test_a_killed_worker_is_named_with_shard_and_rank(toy: Path, worker: int) -> None:
    """Those forked after it, by this stream and another, hold no end of its pipe."""
    s = stream(config(toy, workers=3), rank=1, world=2)
    next(s)
    other = stream(config(toy, workers=1), rank=0, world=2)
    next(other)
    wait_for_shards(s)
    os.kill(s.workers[worker][0], signal.SIGKILL)
    with pytest.raises(TryAgain) as caught:
        for _ in range(100):
            next(s)
    expected = rf"rank 1: data worker {worker} died \(SIGKILL\) at shard-0000\d\d"
    assert re.search(expected, str(caught.value))
    s.close()
    next(other)
    other.close()


def test_where_no_worker_can_be_made_it_is_one_line(
    toy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    s = stream(config(toy, workers=1))
    monkeypatch.setattr(os, "fork", refuse)
    with pytest.raises(TryAgain, match=r"data\.workers: no process can be made: Resource temp"):
        next(s)


def large(toy: Path, **more: Any) -> Stream:
    """Batches larger than a pipe holds: with nobody reading, a worker waits inside one."""
    tree = config(toy, prefetch_batches=1, **{"workers": 1, **more})
    spec = tree.phases[0].model_copy(update={"rows_per_step": 256})
    return Stream(
        Dataset(tree.data), spec, phase_index=0, seed=5, rank=0, world=1, micro_batch_rows=256
    )


def test_a_worker_killed_inside_a_message_is_named_too(toy: Path) -> None:
    s = large(toy)
    assert next(s).input_ids.nbytes > 2 * 65_536
    pid = s.workers[0][0]
    until_in_a_write(pid)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(TryAgain, match=r"rank 0: data worker 0 died \(SIGKILL\) at shard-"):
        for _ in range(100):
            next(s)
    s.close()


def until_in_a_write(pid: int) -> None:
    """The kernel's word for where a process waits."""
    wchan = Path(f"/proc/{pid}/wchan")
    until(lambda: wchan.read_text() in ("pipe_write", "anon_pipe_write"), "a full pipe")


def _rank_with_full_pipes(toy: Path, pids: Any) -> None:
    s = large(toy, workers=2)
    next(s)
    for pid, _ in s.workers:
        until_in_a_write(pid)
    os.kill(s.workers[1][0], signal.SIGSTOP)
    pids.send([pid for pid, _ in s.workers])
    time.sleep(600)


def test_workers_end_with_a_killed_rank(toy: Path) -> None:
    """One waits for room in its pipe, one is stopped."""
    context = mp.get_context("fork")
    here, there = context.Pipe()
    rank = context.Process(target=_rank_with_full_pipes, args=(toy, there))
    rank.start()
    pids = here.recv()
    assert all(Path(f"/proc/{pid}").exists() for pid in pids)
    rank.kill()
    rank.join()
    until(lambda: not any(alive(pid) for pid in pids), "the end of the workers")


def alive(pid: int) -> bool:
    """An orphan that has ended may wait to be collected by whoever is its parent then."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_workers_end_with_the_stream(toy: Path) -> None:
    """Busy, waiting for room and stopped ones; nothing is left, not even a descriptor."""
    gc.collect()  # what other tests have left open is closed now, not in between
    before = sorted(os.listdir("/proc/self/fd"))
    s = large(toy, workers=2)
    next(s)
    pids = [pid for pid, _ in s.workers]
    os.kill(pids[0], signal.SIGSTOP)
    s.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_workers_outlive_the_warnings_of_a_scheduler(toy: Path) -> None:
    s = stream(config(toy, workers=1))
    next(s)
    ((pid, _),) = s.workers
    for name in ("TERM", "INT", "HUP", "USR1", "USR2", "TERM"):  # deepspeed repeats itself
        os.kill(pid, getattr(signal, f"SIG{name}"))
        time.sleep(0.05)
    advance(s, 5)
    assert alive(pid)
    s.close()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_failing_worker_is_named_with_shard_and_rank(
    toy: Path, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: OpenWindow, first: int, last: int, on_shard: Any) -> None:
        on_shard(self.plan.shards[0])
        raise MemoryError("no room for it")

    s = stream(config(toy, workers), rank=3, world=4)
    monkeypatch.setattr(OpenWindow, "check", broken)
    with pytest.raises(RuntimeError) as caught:
        next(s)
    text = str(caught.value)
    assert re.search(r"rank 3: unexpected error:\ndata worker 0 at shard-0000\d\d", text)
    assert "no room for it" in text
    s.close()


def test_a_stopped_or_stuck_worker_is_given_up(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stuck(self: OpenWindow, first: int, last: int, on_shard: Any) -> None:
        on_shard(self.plan.shards[0])
        time.sleep(60)

    late = r"rank 2: data worker {} gave no batch in 1 s at shard-0000\d\d"
    s = stream(config(toy, workers=2, worker_timeout=1.0), rank=2, world=4)
    next(s)
    wait_for_shards(s)
    os.kill(s.workers[1][0], signal.SIGSTOP)
    with pytest.raises(TryAgain, match=late.format(1)):
        for _ in range(100):
            next(s)
    s.close()
    s = stream(config(toy, workers=1, worker_timeout=1.0), rank=2, world=4)
    monkeypatch.setattr(OpenWindow, "check", stuck)
    with pytest.raises(TryAgain, match=late.format(0)):
        next(s)
    s.close()


def _suspended_rank(toy: Path, said: Any) -> None:
    """Its worker, which makes the first batch, stops it for longer than it would wait."""
    rank, plain = os.getpid(), OpenWindow.check

    def late(self: OpenWindow, *args: Any) -> None:
        OpenWindow.check = plain
        os.kill(rank, signal.SIGSTOP)
        time.sleep(1.5)
        os.kill(rank, signal.SIGCONT)
        time.sleep(0.2)
        plain(self, *args)

    OpenWindow.check = late
    s = stream(config(toy, workers=1, worker_timeout=1.0))
    try:
        next(s)
        said.send("goes on")
    except TryAgain as error:
        said.send(str(error))
    s.close()


def test_time_in_which_a_job_was_suspended_is_not_waited(toy: Path) -> None:
    context = mp.get_context("fork")
    here, there = context.Pipe()
    rank = context.Process(target=_suspended_rank, args=(toy, there))
    rank.start()
    assert here.recv() == "goes on"
    rank.join()


def test_waiting_is_counted(toy: Path) -> None:
    s = stream(config(toy))
    next(s)
    assert s.wait_seconds > 0
    assert s.wait_seconds == 0
    s.close()
    s.close()
