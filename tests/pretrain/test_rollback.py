"""Batches that give NaN are rolled back over: the run ends as one that never saw them."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

import pretrain.build
import pretrain.monitor
from core.errors import UserError
from data_pipeline.stream.batch import Batch
from data_pipeline.stream.dataset import Dataset
from data_pipeline.stream.state import StreamState
from data_pipeline.stream.stream import Stream
from pretrain import checkpoint, distributed, run_state
from pretrain.engine import Engine
from pretrain.rollback import Rollback, Rollbacks, Skip, place
from pretrain.train import Trainer
from tests import gloo
from tests.damage import flipped
from tests.pretrain import test_train
from tests.pretrain.test_trackers import Kept
from tests.pretrain.test_train import configure, losses, weights

data = test_train.data  # the fixture

Bad = frozenset[tuple[int, int]]  # phase, step of it whose rows are bad in a straight run


class Placed(Stream):
    """A stream that says which step's rows come next; `bad` are given as such steps."""

    now: tuple[int, int] = (-1, -1)
    steps: dict[tuple[int, tuple[int, int, int]], int] = {}

    @property
    def step(self) -> tuple[int, int]:
        return self.state.phase, Placed.steps.get((self.state.phase, place(self.state)), -1)

    def __next__(self) -> Batch:
        Placed.now = self.step
        return super().__next__()


class Dropping(Placed):
    """Never gives the rows of the steps in `bad`."""

    bad: Bad = frozenset()
    given = 0

    def __next__(self) -> Batch:
        while self.given % self.micro_steps == 0 and self.step in Dropping.bad:
            for _ in range(self.micro_steps):
                Stream.__next__(self)
            self.commit_step()
        self.given += 1
        return super().__next__()


class Poisoned(Trainer):
    """The last rank's gradient of one tensor is NaN on the rows of the steps in `bad`."""

    bad: Bad = frozenset()

    def build_engine(self) -> Any:
        engine = super().build_engine()
        if self.world.rank == self.world.size - 1:
            bias = engine.module.bert.pooler.dense.bias
            bias.register_hook(lambda g: g * torch.nan if Placed.now in Poisoned.bad else g)
        return engine


def places(config: Any, rank: int, size: int) -> None:
    """Where the rows of each step lie, for enough steps."""
    for index, phase in enumerate(config.phases):
        stream = Stream(
            Dataset(config.data), phase, phase_index=index, seed=config.seed, rank=rank,
            world=size, micro_batch_rows=phase.micro_batch_rows,
        )  # fmt: skip
        for step in range(12):
            Placed.steps[index, place(stream.state)] = step
            for _ in range(stream.micro_steps):
                next(stream)
            stream.commit_step()
        stream.close()


def run(
    data: Path, out: Path, bad: set, *overrides: str, drop: bool = False, stop: int | None = None
) -> str | int:
    """The exit code, or the line the run ends with."""
    world = distributed.start("cpu")
    config = configure(
        data, out, "checkpoint.every_steps=2", "engine.max_skipped_steps=2", *overrides
    )
    if not Placed.steps:
        places(config, world.rank, world.size)
    Dropping.bad = frozenset(bad) if drop else frozenset()
    Poisoned.bad = frozenset() if drop else frozenset(bad)
    pretrain.build.Stream = Dropping
    try:
        return Poisoned(config, world).run(stop_at_step=stop)
    except UserError as error:
        return str(error)


# Bad steps (phase, step of it) and the step that is gone back to; phase 0 has 6 steps.
CASES = {
    "inside a phase": ({(0, 3), (0, 4)}, [2]),
    "over the phases' border": ({(0, 5), (1, 0)}, [4]),
    "the data after is bad too": ({(0, 3), (0, 4), (0, 5), (0, 6)}, [2, 2]),
    "twice": ({(0, 2), (0, 3), (1, 1), (1, 2)}, [2, 6]),
    "one bad step is passed over": ({(0, 3)}, []),
    "the last step is bad": ({(1, 3)}, [8]),
}


QUICK = ["inside a phase", "the last step is bad"]


def cases(
    rank: int, size: int, data: Path, out: Path, stage: int, names: list[str]
) -> dict[str, Any]:
    result = {}
    for number, name in enumerate(names):
        bad, _ = CASES[name]
        here = out / f"{size}-{stage}-{number}"
        stages = f"engine.zero_stage={stage}"
        codes = [run(data, here / "poisoned", bad, stages)]
        if name != "one bad step is passed over":
            codes.append(run(data, here / "never", bad, stages, drop=True))
            for stop in (4, 7, None) if names != QUICK else ():
                codes.append(run(data, here / "resumed", bad, stages, stop=stop))
        folders = sorted(p for p in here.iterdir())
        state = checkpoint.read_state(checkpoint.resolve(here / "poisoned"))
        result[name] = {
            "codes": codes,
            "weights": [{n: w.numpy() for n, w in weights(p).items()} for p in folders],
            "losses": [losses(p) for p in folders],
            "back_to": [r.back_to for r in state.rollbacks],
            "history": [h for h in state.history if h["event"] == "rollback"],
            "step": state.position.step,
        }
    return result


@pytest.mark.parametrize(
    ("size", "stage", "names"),
    [
        (2, 1, QUICK),
        *(
            pytest.param(size, stage, list(CASES), marks=pytest.mark.slow)
            for size in (1, 2)
            for stage in (0, 1)
        ),
    ],
)
def test_the_run_ends_as_one_that_never_saw_the_bad_batches(
    data: Path, tmp_path: Path, size: int, stage: int, names: list[str]
) -> None:
    for result in gloo.run(size, cases, data, tmp_path, stage, names, timeout=500):
        for name in names:
            bad, back_to = CASES[name]
            found = result[name]
            assert set(found["codes"]) == {0}, name
            assert found["step"] == 10 and found["back_to"] == back_to, name
            assert all(np.isfinite(w).all() for w in found["weights"][0].values())
            for other in found["weights"][1:]:
                assert all(np.array_equal(w, found["weights"][0][n]) for n, w in other.items()), (
                    name
                )
            for other in found["losses"][1:]:
                assert list(other) == list(range(1, 11))
                assert other == found["losses"][0], name
            left_out = [s for h in found["history"] for s in h["rollback"]["skips"]]
            assert sum(s["steps"] for s in left_out) == (len(bad) if back_to else 0)


class Flipped(Trainer):
    """After the update of step `at`, the first time, one number of a moment becomes `value`."""

    at, key, value = 0, "", 0.0
    said: list[str] = []

    def build_engine(self) -> Any:
        engine = super().build_engine()
        self.monitor.say = Flipped.said.append
        step = engine.train_step

        def train_step(*arguments: Any) -> Any:
            outcome = step(*arguments)
            if self.state.position.step + 1 == Flipped.at and not self.state.rollbacks.done:
                if self.world.rank == self.world.size - 1:
                    (*_, moments) = engine.optimizer.state.values()
                    frozen = {"frozen": engine.module.bert.pooler.dense.bias.data}
                    (moments | frozen)[Flipped.key].view(-1)[0] = Flipped.value
            return outcome

        engine.train_step = train_step
        return engine


def flips(rank: int, size: int, data: Path, out: Path) -> dict[str, Any]:
    world, result = distributed.start("cpu"), {}
    pretrain.build.Stream = Stream
    for name, at, key, value in (
        ("straight", 0, "exp_avg", 0.0),
        ("in the middle", 4, "exp_avg", math.nan),
        ("at the end", 10, "exp_avg_sq", math.inf),
        ("a counter", 4, "step", math.nan),
        # The square root of the next update is NaN: this one looks well, and is not.
        ("finite", 4, "exp_avg_sq", -1.0),
        ("what is not trained", 4, "frozen", math.nan),
    ):
        Flipped.at, Flipped.key, Flipped.value, Flipped.said = at, key, value, []
        more = ["data.next_sentence=none"] if key == "frozen" else []
        config = configure(
            data, out / name, "checkpoint.every_steps=2", "engine.max_skipped_steps=2", *more
        )
        code = Flipped(config, world).run()
        state = checkpoint.read_state(checkpoint.resolve(out / name))
        result[name] = {
            "code": code,
            "said": [line for line in Flipped.said if "not finite" in line],
            "weights": {n: w.numpy() for n, w in weights(out / name).items()},
            "back_to": [r.back_to for r in state.rollbacks],
            "finished": (out / name / "FINISHED").read_text(),
        }
    return result


def test_weights_that_are_not_finite_are_no_checkpoint_and_no_end(
    data: Path, tmp_path: Path
) -> None:
    for found in gloo.run(2, flips, data, tmp_path):
        straight = found["straight"]
        assert all(run["code"] == 0 and run["finished"] == "10\n" for run in found.values())
        for name, back_to in (("in the middle", 2), ("a counter", 2), ("at the end", 8)):
            run = found[name]
            # No row is at fault: all are trained on, as in the run without the flip.
            assert all(np.array_equal(w, straight["weights"][n]) for n, w in run["weights"].items())
            assert run["back_to"] == [back_to]
            for line in run["said"]:
                assert ("(its updates)" if name == "a counter" else "(exp_avg") in line
                assert f"is not finite: back to step {back_to} " in line
        frozen = found["what is not trained"]
        (line,) = frozen["said"]
        assert frozen["back_to"] == [2] and "bert.pooler.dense.bias (weights) is not" in line
        assert all(np.isfinite(w).all() for w in frozen["weights"].values())
        # The second time, the checkpoint of step 4 itself is taken to be at fault.
        assert found["finite"]["back_to"] == [4, 2]
        assert all(np.isfinite(w).all() for w in found["finite"]["weights"].values())


def spoiled_ends(rank: int, size: int, data: Path, out: Path) -> dict[str, Any]:
    pretrain.build.Stream = Stream
    world, every = distributed.start("cpu"), "checkpoint.every_steps=2"
    for name, Flipped.at in (("straight", 0), ("spoiled", 10)):
        Flipped.key, Flipped.value = "exp_avg_sq", math.inf
        with mock.patch.object(Engine, "not_finite", return_value=""):
            assert Flipped(configure(data, out / name, every), world).run() == 0
    trainer, said = Trainer(configure(data, out / "spoiled", every), world), []
    marked = (out / "spoiled/FINISHED").exists
    trainer.monitor.say = lambda line: said.append((line, marked()))
    assert marked() and trainer.run() == 0 and marked()
    marks = [there for line, there in said if "back to step" in line]
    state = checkpoint.read_state(checkpoint.resolve(out / "spoiled"))
    both = [weights(out / name) for name in ("straight", "spoiled")]
    equal = all(torch.equal(w, both[1][n]) for n, w in both[0].items())
    return {"back_to": [r.back_to for r in state.rollbacks], "equal": equal, "marks": marks,
            "end": said[-1][0].partition(":")[0]}  # fmt: skip


def test_a_last_checkpoint_that_is_not_finite_is_no_end(data: Path, tmp_path: Path) -> None:
    """Of code that did not look at it before it was published."""
    for found in gloo.run(2, spoiled_ends, data, tmp_path):
        marks = [False, False]
        assert found == {"back_to": [10, 8], "equal": True, "marks": marks, "end": "done"}


class Tainted(Trainer):
    """After step 5, once, a moment is far too large, which a checkpoint holds; from step 7 on it
    makes the gradient NaN."""

    at = {0: 5}  # by the rollbacks so far
    shown_by = 7

    def build_engine(self) -> Any:
        engine = super().build_engine()
        if self.world.rank < self.world.size - 1:
            return engine
        step = engine.train_step

        def moment() -> torch.Tensor:
            (*_, moments) = engine.optimizer.state.values()
            return moments["exp_avg_sq"].view(-1)[:1]

        def train_step(*arguments: Any) -> Any:
            outcome = step(*arguments)
            if self.state.position.step + 1 == self.at.get(len(self.state.rollbacks.done)):
                moment().fill_(1e20)
            return outcome

        def spoil(gradient: torch.Tensor) -> torch.Tensor:
            shown = self.state.position.step + 1 >= self.shown_by
            bad = shown and float(moment()) > 1e18
            return gradient * torch.nan if bad else gradient

        engine.train_step = train_step
        engine.module.bert.pooler.dense.bias.register_hook(spoil)
        return engine


class Unready(Tainted):
    """Ends, as by a kill, in the third rollback, before it has removed a checkpoint."""

    def _roll_back(self) -> None:
        third = len(self.state.rollbacks.done) == 2
        if third:
            self.checkpoints.forget_after = lambda _: None
        super()._roll_back()
        if third:
            raise InterruptedError


def taints(rank: int, size: int, data: Path, out: Path) -> dict[str, Any]:
    pretrain.build.Stream = Stream
    world, every = distributed.start("cpu"), "checkpoint.every_steps=1"
    for name in ("straight", "killed"):
        config = configure(data, out / name, every, "engine.max_skipped_steps=2")
        if name == "killed":
            with contextlib.suppress(InterruptedError):
                Unready(config, world).run()
        assert Tainted(config, world).run() == 0
    return {
        path.name: (
            [r.back_to for r in checkpoint.read_state(checkpoint.resolve(path)).rollbacks],
            {n: w.numpy() for n, w in weights(path).items()},
        )
        for path in out.iterdir()
    }


def test_a_fault_that_several_checkpoints_hold_is_left_behind(data: Path, tmp_path: Path) -> None:
    """Also where the run is killed as it leaves them behind."""
    for found in gloo.run(2, taints, data, tmp_path / "run"):
        (back_to, straight), (killed_to, killed) = found["straight"], found["killed"]
        assert back_to == killed_to == [6, 5, 4]
        assert all(np.array_equal(w, straight[n]) for n, w in killed.items())


class TaintedAgain(Tainted):
    """After step 6, and again when the run has gone back twice."""

    at = {0: 6, 2: 6}


class TaintedLater(Tainted):
    """The second time after step 7, where the checkpoint of step 5 is gone."""

    at = {0: 6, 2: 7}


def taints_again(rank: int, size: int, data: Path, out: Path) -> list[list[int]]:
    pretrain.build.Stream = Stream
    world = distributed.start("cpu")
    sets = "checkpoint.every_steps=1", "checkpoint.keep_last=2", "engine.max_skipped_steps=2"
    result = []
    for kind in (TaintedAgain, TaintedLater):
        assert kind(configure(data, out / kind.__name__, *sets), world).run() == 0
        state = checkpoint.read_state(checkpoint.resolve(out / kind.__name__))
        result.append([r.back_to for r in state.rollbacks])
    return result


def test_where_nothing_is_older_than_what_is_suspect_the_oldest_is_gone_back_to(
    data: Path, tmp_path: Path
) -> None:
    for found in gloo.run(2, taints_again, data, tmp_path / "run"):
        assert found == [[6, 5, 5], [6, 5, 6]]


def test_what_is_suspect_ends_where_the_run_got_past_it() -> None:
    rollbacks = Rollbacks(Path("rollbacks.json"), bad_in_a_row=2, limit=9)
    assert rollbacks.suspect(30) is None
    for step, back_to, same, past in (
        (32, 30, (30, 30), 35), (33, 25, (30, 25), 35), (34, 20, (30, 20), 35),
        (62, 60, (60, 60), 65), (63, 55, (60, 55), 65),
    ):  # fmt: skip
        rollbacks.take(step, back_to)
        assert rollbacks.suspect(same[0]) == same[1] and rollbacks.suspect(past) is None


class Killed(Poisoned):
    """Ends, as by a kill, in the first step after a rollback."""

    noted: list[bool] = []  # before a checkpoint is removed

    def _roll_back(self) -> None:
        forget = self.checkpoints.forget_after

        def forget_after(found: Any) -> None:
            Killed.noted.append((self.run_dir / run_state.ROLLBACKS).exists())
            forget(found)

        self.checkpoints.forget_after = forget_after
        super()._roll_back()
        raise InterruptedError


def forgets(rank: int, size: int, data: Path, out: Path) -> dict[str, Any]:
    bad = {(0, 3), (0, 4)}
    never = run(data, out / "never", bad, drop=True)
    Poisoned.bad, pretrain.build.Stream = frozenset(bad), Placed
    config = configure(
        data, out / "killed", "checkpoint.every_steps=2", "engine.max_skipped_steps=2"
    )
    with contextlib.suppress(InterruptedError):
        Killed(config, distributed.start("cpu")).run()
    codes = never, run(data, out / "killed", set())  # the fault is gone, the decision stands
    state = checkpoint.read_state(checkpoint.resolve(out / "killed"))
    return {
        "codes": codes,
        "weights": [
            {n: w.numpy() for n, w in weights(out / name).items()} for name in ("never", "killed")
        ],
        "back_to": [r.back_to for r in state.rollbacks],
        "noted": Killed.noted,
    }


def test_a_kill_after_a_rollback_does_not_forget_it(data: Path, tmp_path: Path) -> None:
    by_rank = gloo.run(2, forgets, data, tmp_path)
    assert by_rank[0]["noted"] == [True]
    for found in by_rank:
        assert found["codes"] == (0, 0) and found["back_to"] == [2]
        never, killed = found["weights"]
        assert all(np.array_equal(w, never[n]) for n, w in killed.items())


def replaced(rank: int, size: int, data: Path, out: Path) -> tuple[str | int, bool]:
    """What a run says that goes back where another's folder stands now; whether that is whole."""
    run(data, out / "other", set(), "seed=11")
    plain = Poisoned.build_engine

    def build_engine(self: Poisoned) -> Any:
        def move(_: torch.Tensor) -> None:
            if Placed.now in Poisoned.bad and not (out / "moved").exists():
                (out / "run").rename(out / "moved")
                shutil.copytree(out / "other", out / "run")

        engine = plain(self)
        if rank == 0:
            engine.module.bert.pooler.dense.bias.register_hook(move)
        return engine

    (out / "run").mkdir(exist_ok=True)
    Poisoned.build_engine = build_engine  # type: ignore[method-assign]
    said = run(data, out / "run", {(0, 3), (0, 4)})
    folders = (out / "run", out / "other")
    first, second = (
        {str(p.relative_to(f)): p.read_bytes() for p in f.rglob("*.*") if "events" not in p.name}
        for f in folders
    )
    return said, first == second


def test_a_run_does_not_go_back_to_anothers_checkpoint(data: Path, tmp_path: Path) -> None:
    for said, whole in gloo.run(2, replaced, data, tmp_path):
        assert whole and said == f"run_dir: {tmp_path}/run was removed or replaced under the run"


def limits(rank: int, size: int, data: Path, out: Path) -> dict[str, Any]:
    once = ["checkpoint.max_rollbacks=1"]
    twice = {(0, 2), (0, 3), (1, 1), (1, 2)}
    run(data, out / "resumed", twice, *once, stop=6)
    return {
        "in one run": run(data, out / "straight", twice, *once),
        "resumed": run(data, out / "resumed", twice, *once),
        "at the start": run(data, out / "start", {(0, 0), (0, 1)}),
        "newest": checkpoint.resolve(out / "straight").name,
    }


@pytest.mark.slow
def test_the_limit_counts_over_resumes_and_ends_in_one_line(data: Path, tmp_path: Path) -> None:
    for said in gloo.run(2, limits, data, tmp_path):
        for name in ("in one run", "resumed"):
            assert "after 1 rollbacks (checkpoint.max_rollbacks: 1)" in said[name]
            assert "2 steps in a row, seen at step 9," in said[name]
            assert "phase 2, epoch 0, window 0, row" in said[name] and "\n" not in said[name]
        assert "there is no checkpoint to go back to" in said["at the start"]
        assert said["newest"] == "step-00000006"


def without_a_way_back(rank: int, size: int, data: Path, out: Path) -> tuple[Any, Kept]:
    sink = Kept()
    pretrain.monitor.open_sinks = lambda *_: [sink]
    return run(data, out, {(0, 0), (0, 1)}), sink


def test_trackers_get_what_waits_for_them_when_a_run_ends_by_an_error(
    data: Path, tmp_path: Path
) -> None:
    ((said, sink),) = gloo.run(1, without_a_way_back, data, tmp_path / "run")
    assert "there is no checkpoint to go back to" in said
    *numbers, closed = sink.seen
    assert [step for step, _ in numbers][-1] == 2 and closed == (-1, {})


def at(row: int, epoch: int = 0) -> StreamState:
    return StreamState("d", "v", 1, "h", {}, 1, 0, 4, epoch=epoch, row=row)


def test_places_left_out_are_passed_in_any_order_and_survive_the_file() -> None:
    rollbacks = Rollbacks(Path("rollbacks.json"), bad_in_a_row=2, limit=9)
    for first, last in ((8, 0), (12, 0)), ((4, 0), (8, 0)), ((16, 0), (0, 1)):
        middle = (first[0] + 2, first[1])
        rollbacks.note(True, at(*first), at(*middle))
        rollbacks.note(True, at(*middle), at(*last))
        assert rollbacks.due
        rollbacks.take(9, 2)
        assert rollbacks.bad_steps == 0
    assert [place(rollbacks.past(at(row)))[2] for row in (0, 4, 8, 10, 12)] == [0, 12, 12, 12, 12]
    assert rollbacks.past(at(16)) == at(0, epoch=1)
    rows = range(20, 20020, 4)
    skips = tuple(
        Skip(at(0).phase, (1, at(0).window, row), (1, at(0).window, row + 4), 1)
        for row in reversed(rows)
    )
    rollbacks.done += (Rollback(9, 2, skips),)
    assert rollbacks.past(at(20, epoch=1)) == at(20020, epoch=1)
    state = run_state.State(
        run_state.Position(), None, {}, {}, 1, rollbacks=rollbacks.done
    )  # fmt: skip
    assert run_state.State.from_json(state.to_json(), "x") == state
    older = json.loads(state.to_json())
    del older["rollbacks"]
    assert run_state.State.from_json(json.dumps(older), "x").rollbacks == ()


def test_a_bit_that_turns_in_the_file_is_told_or_changes_nothing(tmp_path: Path) -> None:
    """No checkpoint knows yet of the rows that it leaves out."""
    rollbacks = Rollbacks(tmp_path / "rollbacks.json", bad_in_a_row=2, limit=9)
    rollbacks.note(True, at(8), at(10))
    rollbacks.note(True, at(10), at(0, epoch=1))
    rollbacks.take(9, 2)
    rollbacks.write()
    path, told = tmp_path / "rollbacks.json", 0
    assert rollbacks.read(()) == rollbacks.done
    whole = path.read_bytes()
    for bit in range(8 * len(whole)):
        path.write_bytes(flipped(whole, bit // 8, bit % 8))
        try:
            assert rollbacks.read(()) == rollbacks.done
        except UserError as error:
            told += str(error).startswith(f"{path}: ")
    assert told > 6 * len(whole)
