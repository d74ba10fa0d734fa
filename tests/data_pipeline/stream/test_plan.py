import json
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from configs.load import check
from core.errors import UserError
from data_pipeline.corpus.manifest import Manifest, ShardInfo, load_manifest
from data_pipeline.corpus.shards import ShardIndex, read_index
from data_pipeline.stream.plan import PhaseSpec, Planner, StreamConfig, WindowPlan

ROOT = Path(__file__).resolve().parents[3]
PHASE = PhaseSpec(max_seq_len=64, row_len=256, max_predictions=10)


def planner(folder: Path, phase: PhaseSpec = PHASE, seed: int = 1, **data: object) -> Planner:
    settings = {"window_tokens": 60_000, **data}
    return Planner(
        load_manifest(folder),
        lambda shard: read_index(folder / f"{shard.name}.idx"),
        StreamConfig(dir=str(folder), **settings),
        phase,
        phase_index=0,
        seed=seed,
    )


def test_every_shard_is_in_one_window_of_an_epoch(toy: Path) -> None:
    p = planner(toy)
    assert p.windows > 2
    orders = []
    for epoch in range(3):
        names = [s.name for w in range(p.windows) for s in p.window_shards(epoch, w)]
        assert sorted(names) == sorted(s.name for s in p.shards)
        orders.append(tuple(names))
    assert len(set(orders)) == 3


def test_a_plan_is_a_pure_function(toy: Path) -> None:
    one, two = planner(toy), planner(toy)
    two.plan(0, 0)
    assert one.plan(3, 1).digest() == two.plan(3, 1).digest()
    others = [
        planner(toy, seed=2).plan(3, 1),
        one.plan(3, 0),
        one.plan(4, 1),
        planner(toy, next_sentence="balanced").plan(3, 1),
        planner(toy, next_sentence="none").plan(3, 1),
    ]
    assert len({plan.digest() for plan in [one.plan(3, 1), *others]}) == 6


def test_a_digest_sees_every_field(toy: Path) -> None:
    plan = planner(toy).plan(0, 0)
    plan = replace(plan, document_source=np.zeros(len(plan.document_shard), np.uint16))
    seen = {plan.digest()}
    for field in fields(WindowPlan):
        values = {f.name: getattr(plan, f.name) for f in fields(WindowPlan)}
        value = values[field.name]
        if isinstance(value, np.ndarray):
            value = value.copy()
            value[0] = not value[0] if value.dtype == bool else value[0] + 1
        else:
            value = value + (value[0],) if isinstance(value, tuple) else value + 1
        seen.add(WindowPlan(**{**values, field.name: value}).digest())
    assert len(seen) == 1 + len(fields(WindowPlan))


def test_rows_of_an_epoch_hold_every_pair_once(toy: Path) -> None:
    p = planner(toy)
    for window in range(p.windows):
        w = p.trace(0, window)
        assert sorted(w.order.tolist()) == list(range(len(w.pairs)))
        lengths = w.plan.a_length.astype(int) + w.plan.b_length + 3
        sums = np.add.reduceat(lengths, w.plan.row_starts[:-1])
        assert (sums <= p.shape.row_len).all()
        assert np.array_equal(np.diff(w.plan.row_tokens), sums)
        assert np.diff(w.plan.row_starts).max() <= p.shape.sequences
        assert np.diff(w.plan.row_predictions).max() <= p.shape.predictions
        assert len(np.unique(w.plan.mask_keys)) == len(w.pairs)


def test_plans_of_released_settings_stay_what_they_are() -> None:
    """Else positions in checkpoints mean nothing; raise PLAN_VERSION when it is meant."""
    counts = 1 + np.arange(50, dtype=np.uint32) * 7 % 30
    lengths = (1 + np.arange(int(counts.sum())) * 7919 % 61).astype(np.uint16)
    zeros = np.zeros(50, np.uint64)
    index = ShardIndex(zeros, zeros, zeros, counts, lengths)
    info = ShardInfo("shard-000000", "train", 1, "", 1, "", 50, len(lengths), int(lengths.sum()))
    manifest = Manifest(30522, "", True, (info,), ())
    for way, digest in (("original", "9e6f1d5c85481d02"), ("balanced", "3f900c3c42aa08e3")):
        data = StreamConfig(next_sentence=way)
        p = Planner(manifest, lambda _: index, data, PHASE, phase_index=0, seed=1)
        assert p.plan(3, 0).digest().startswith(digest)


def test_masks_are_new_each_epoch_and_phase(toy: Path) -> None:
    keys = [set(planner(toy).plan(e, 0).mask_keys.tolist()) for e in range(3)]
    assert not keys[0] & keys[1] and not keys[1] & keys[2]


def test_without_packing_a_row_is_a_sequence(toy: Path) -> None:
    p = planner(toy, PhaseSpec(max_seq_len=64, packing=False, sequences_per_step=32))
    plan = p.plan(0, 0)
    assert plan.rows == plan.sequences and p.shape.row_len == 64
    assert p.rows_per_step(plan) == 32


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(UserError, match="row_len: 32 is shorter than max_seq_len 64"):
        check({"max_seq_len": 64, "row_len": 32}, PhaseSpec, "x.yaml")
    with pytest.raises(UserError, match="row_len: without packing it is max_seq_len 64, not 256"):
        check({"max_seq_len": 64, "row_len": 256, "packing": False}, PhaseSpec, "x.yaml")


def synthetic(documents: int, shards: int) -> tuple[Manifest, dict[str, ShardIndex]]:
    """A dataset of lengths only: skewed documents, sentences of 1..200 tokens."""
    rng = np.random.default_rng(0)
    infos, indexes = [], {}
    for number in range(shards):
        counts = np.clip(rng.lognormal(2.7, 1.0, documents), 1, 2000).astype(np.uint32)
        lengths = np.clip(rng.lognormal(3.0, 0.6, int(counts.sum())), 1, 200).astype(np.uint16)
        name = f"shard-{number:06d}"
        zeros = np.zeros(documents, np.uint64)
        indexes[name] = ShardIndex(zeros, zeros, zeros, counts, lengths)
        infos.append(
            ShardInfo(name, "train", 1, "", 1, "", documents, len(lengths), int(lengths.sum()))
        )
    return Manifest(30522, "", True, tuple(infos), ()), indexes


@pytest.mark.parametrize(("max_seq_len", "predictions"), [(128, 20), (512, 80)])
def test_fill_and_batch_of_the_two_phases(max_seq_len: int, predictions: int) -> None:
    manifest, indexes = synthetic(2500, 4)
    phase = PhaseSpec(
        max_seq_len=max_seq_len, max_predictions=predictions,
        sequences_per_step=65536 if max_seq_len == 128 else 32768, rows_multiple=64,
    )  # fmt: skip
    p = Planner(manifest, lambda s: indexes[s.name], StreamConfig(), phase, phase_index=0, seed=0)
    plan = p.plan(0, 0)
    assert plan.row_tokens[-1] / (plan.rows * p.shape.row_len) >= 0.99
    rows = p.rows_per_step(plan)
    assert rows % 64 == 0
    assert abs(rows * plan.sequences / plan.rows / phase.sequences_per_step - 1) < 0.01


@pytest.mark.slow
def test_a_full_size_plan_fits_in_memory_and_fills_its_rows() -> None:
    """benchmarks/stream.py --full-size, a few windows of it, in a process of its own."""
    result = subprocess.run(
        [sys.executable, "benchmarks/stream.py", "--full-size", "--windows", "3"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    detail = json.loads(result.stdout.splitlines()[-1])["detail"]
    for phase in ("128", "512"):
        assert detail[phase]["fill"] > 0.99
    assert detail["peak_memory_gb"] < 1.5
