import itertools
import json
import multiprocessing as mp
import os
import random
import re
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from core.errors import UserError
from data_pipeline.corpus.shards import write_dataset_from_token_documents
from data_pipeline.stream.audit import AuditConfig, AuditPhase, step_digests
from data_pipeline.stream.plan import Planner, StreamConfig
from data_pipeline.stream.reader import OpenWindow
from data_pipeline.stream.state import StreamState
from data_pipeline.stream.stream import Stream
from tests.data_pipeline.stream.conftest import VOCAB, random_documents

PHASES = (
    AuditPhase(max_seq_len=64, row_len=256, max_predictions=10, rows_per_step=48, steps=11),
    AuditPhase(max_seq_len=128, row_len=512, max_predictions=20, rows_per_step=24, steps=9),
)


def config(toy: Path, workers: int = 0, **data: Any) -> AuditConfig:
    settings = {"window_tokens": 60_000, "prefetch_batches": 2, **data}
    return AuditConfig(
        seed=5, data=StreamConfig(dir=str(toy), workers=workers, **settings), phases=PHASES
    )


def stream(tree: AuditConfig, phase: int = 0, **more: Any) -> Stream:
    settings = {"rank": 0, "world": 1, "micro_batch_rows": 12, "seed": tree.seed, **more}
    return Stream(tree.data, tree.phases[phase].spec, phase_index=phase, **settings)


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
        for step in range(done, PHASES[phase].steps):
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
    assert len(expected) == sum(p.steps for p in PHASES)

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
    plain = Planner.workings
    monkeypatch.setattr(
        Planner, "workings", lambda self, *at: planned.append(at) or plain(self, *at)
    )
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
    write_dataset_from_token_documents(other, random_documents(60, 9), vocab=VOCAB + 1)
    cases = {
        "seed": (5, 6, config(toy), {"seed": 6}),
        "masked_lm_prob": (0.15, 0.2, config(toy, masked_lm_prob=0.2), {}),
        "next_sentence": ("original", "balanced", config(toy, next_sentence="balanced"), {}),
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
    phase = PHASES[0].spec.model_copy(update={"rows_per_step": 24})
    settings = {"phase_index": 0, "seed": 5, "rank": 0, "world": 1, "micro_batch_rows": 12}
    with pytest.raises(UserError, match="rows_per_step is 48 in the checkpoint and 24 now"):
        Stream(config(toy).data, phase, state=s.state, **settings)
    data = config(toy, accept_changed=["rows_per_step"]).data
    half = Stream(data, phase, state=s.state, **settings)
    assert half.rows_per_step == half.state.rows_per_step == 24
    assert (half.state.epoch, half.state.window, half.state.row) == (
        s.state.epoch, s.state.window, s.state.row,
    )  # fmt: skip
    half.close()


def test_a_batch_that_does_not_divide_names_keys_and_cures(toy: Path) -> None:
    with pytest.raises(UserError) as caught:
        stream(config(toy), world=5, micro_batch_rows=4)
    assert str(caught.value) == (
        "phases.0: 48 rows a step do not divide by 5 ranks; 4 or 6 ranks would do, or "
        "phases.0.rows_per_step: 50"
    )
    derived = PHASES[0].spec.model_copy(
        update={"rows_per_step": None, "sequences_per_step": 200, "rows_multiple": 10}
    )
    with pytest.raises(UserError, match=r"phases\.0\.rows_multiple: 3$"):
        Stream(
            config(toy).data, derived, phase_index=0, seed=1, rank=0, world=3, micro_batch_rows=20
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
    phase = PHASES[0].spec.model_copy(
        update={"rows_per_step": None, "sequences_per_step": wanted, "rows_multiple": 1}
    )
    s = Stream(config(toy).data, phase, phase_index=0, seed=1, rank=0, world=1, micro_batch_rows=1)
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
    write_dataset_from_token_documents(tmp_path / "empty", [])
    with pytest.raises(UserError, match="split 'train' holds no documents"):
        stream(config(tmp_path / "empty"))


def test_a_killed_worker_is_named_with_shard_and_rank(toy: Path) -> None:
    s = stream(config(toy, workers=2), rank=1, world=2)
    next(s)
    while not s._maker.shard_in_hand(1).startswith("shard-"):
        time.sleep(0.01)  # its first batch is not the one that came
    os.kill(s._batches._workers[1].pid, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(UserError) as caught:
        for _ in range(100):
            next(s)
    assert time.monotonic() - began < 20
    assert re.search(r"rank 1: data worker 1 died \(SIGKILL\) at shard-0000\d\d", str(caught.value))
    s.close()


def test_a_worker_killed_inside_a_message_is_named_too(toy: Path) -> None:
    # Batches larger than a pipe holds: with nobody reading, the worker waits half-way through one.
    tree = config(toy, workers=1, prefetch_batches=1)
    spec = tree.phases[0].spec.model_copy(update={"rows_per_step": 256})
    s = Stream(tree.data, spec, phase_index=0, seed=5, rank=0, world=1, micro_batch_rows=256)
    assert next(s).input_ids.nbytes > 2 * 65_536
    (worker,) = s._batches._workers
    time.sleep(1)
    os.kill(worker.pid, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(UserError, match=r"rank 0: data worker 0 died \(SIGKILL\) at shard-"):
        for _ in range(100):
            next(s)
    assert time.monotonic() - began < 20
    s.close()


def test_workers_outlive_the_warnings_of_a_scheduler(toy: Path) -> None:
    s = stream(config(toy, workers=1))
    next(s)
    (worker,) = s._batches._workers
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        os.kill(worker.pid, number)
        time.sleep(0.05)
    advance(s, 5)
    assert worker.is_alive()
    s.close()
    worker.join(10)
    assert not worker.is_alive()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_failing_worker_is_named_with_shard_and_rank(
    toy: Path, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise MemoryError("no room for it")

    s = stream(config(toy, workers), rank=3, world=4)
    s._maker._in_hand[0] = 2
    monkeypatch.setattr("data_pipeline.stream.reader.OpenWindow.check", broken)
    with pytest.raises(RuntimeError) as caught:
        next(s)
    text = str(caught.value)
    assert re.search(r"rank 3: unexpected error:\ndata worker 0 at shard-0000\d\d", text)
    assert "no room for it" in text
    s.close()


def test_a_stuck_worker_is_given_up(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stuck(self: OpenWindow, first: int, last: int, progress: Any) -> None:
        progress(self.plan.shards[0])
        time.sleep(60)

    s = stream(config(toy, workers=1, worker_timeout=1.0), rank=2, world=4)
    monkeypatch.setattr("data_pipeline.stream.reader.OpenWindow.check", stuck)
    with pytest.raises(
        UserError, match=r"rank 2: data worker 0 gave no batch in 1 s at shard-0000\d\d"
    ):
        next(s)
    s.close()


def test_waiting_is_counted(toy: Path) -> None:
    s = stream(config(toy))
    next(s)
    assert s.wait_seconds > 0
    assert s.wait_seconds == 0
    s.close()
    s.close()
