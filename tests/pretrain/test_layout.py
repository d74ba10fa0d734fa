"""The shipped recipes divide by the GPUs that people have; what cannot is known before step 1."""

from __future__ import annotations

import json
import math
import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from configs.load import check, load
from core.errors import UserError
from data_pipeline.corpus.manifest import Manifest, ShardInfo
from data_pipeline.corpus.shards import ShardIndex
from data_pipeline.stream.plan import PhaseSpec, Planner, Shape
from data_pipeline.stream.steps import divide
from pretrain.config import PhaseConfig, PretrainConfig
from pretrain.layout import PhaseLayout, Traffic, batch_warnings, evaluated_lengths, lay_out
from pretrain.plan import main as plan_main

ROOT = Path(__file__).resolve().parents[2]
GPUS = [2**n for n in range(9)]
THREES = [3, 6, 12, 24]


@cache
def full_size() -> tuple[Manifest, dict[str, ShardIndex]]:
    """4.8 billion tokens like Wikipedia and books, lengths only: sequences fill rows as the real
    text does (`records/2026-11-21-stream`), within a hundredth."""
    rng = np.random.default_rng(0)
    infos, indexes, made = [], {}, []
    for _ in range(2):
        counts = np.clip(rng.lognormal(4.8, 1.0, 4000), 1, 20000).astype(np.uint32)
        counts = counts[: np.searchsorted(np.cumsum(counts), 281_250)]
        lengths = np.clip(rng.lognormal(3.23, 0.4, int(counts.sum())), 1, 500).astype(np.uint16)
        zeros = np.zeros(len(counts), np.uint64)
        made.append(ShardIndex(zeros, zeros, zeros, counts, lengths))
    for number in range(640):
        index, name = made[number % 2], f"shard-{number:06d}"
        tokens = int(index.sentence_lengths.sum(dtype=np.int64))
        sizes = len(index.sentence_counts), len(index.sentence_lengths), tokens
        infos.append(ShardInfo(name, "train", 1, "", 1, "", *sizes))
        indexes[name] = index
    return Manifest(30522, "", True, tuple(infos), ()), indexes


@cache
def sequences_a_row(max_seq_len: int, row_len: int, max_predictions: int) -> float:
    """Of the first window of the full size."""
    manifest, indexes = full_size()
    config = load(ROOT / "configs/pretrain_large.yaml", PretrainConfig)
    spec = PhaseSpec(max_seq_len=max_seq_len, row_len=row_len, max_predictions=max_predictions)
    index = int(max_seq_len == 512)
    window = Planner(
        manifest, lambda shard: indexes[shard.name], config.data, spec,
        phase_index=index, seed=config.seed,
    ).plan(0, 0)  # fmt: skip
    return window.sequences / window.rows


def layouts(name: str, gpus: int) -> list[PhaseLayout]:
    config = load(ROOT / f"configs/pretrain_{name}.yaml", PretrainConfig)
    traffic = []
    for phase in config.phases:
        share = sequences_a_row(phase.max_seq_len, phase.row_len, phase.max_predictions)
        rows = phase.step_rows(share)
        traffic.append(Traffic(rows, 0, 0, rows * share, 0))
    return lay_out(config, gpus, traffic)


@pytest.mark.parametrize("gpus", GPUS)
@pytest.mark.parametrize("name", ["base", "large"])
def test_the_recipes_start_on_any_power_of_two(name: str, gpus: int) -> None:
    assert load(ROOT / f"configs/pretrain_{name}.yaml", PretrainConfig).model.compile
    for layout in layouts(name, gpus):
        division, phase = layout.division, layout.phase
        dealt = gpus * division.micro_steps * division.micro_batch_rows
        assert dealt == division.rows_per_step == {128: 15_360, 512: 6_400}[phase.max_seq_len]
        assert division.micro_batch_rows <= phase.micro_batch_rows
        # Kernels are full: as many tokens at once as below a node's memory, or nearly so.
        assert division.micro_batch_rows * layout.row_len >= 30_000
        assert layout.traffic.sequences == pytest.approx(phase.sequences_per_step, rel=0.02)


@pytest.mark.parametrize("gpus", THREES)
def test_three_nodes_are_told_what_would_do(gpus: int) -> None:
    with pytest.raises(UserError) as caught:
        layouts("large", gpus)
    line = str(caught.value)
    near = {3: "2 or 4", 6: "4 or 8", 12: "8 or 16", 24: "16 or 32"}[gpus]
    assert f"phases.1: 6400 rows a step do not divide by {gpus} ranks; {near} ranks would" in line
    assert "\n" not in line
    multiple = int(line.rsplit("phases.1.rows_multiple: ", 1)[1])
    config = load(
        ROOT / "configs/pretrain_large.yaml", PretrainConfig, [f"phases.1.rows_multiple={multiple}"]
    )
    phase = config.phases[1]
    rows = phase.step_rows(sequences_a_row(512, 2048, 80))
    division = divide(rows, gpus, phase.micro_batch_rows, phase, 1)
    assert rows * sequences_a_row(512, 2048, 80) == pytest.approx(32_768, rel=0.02)
    assert division.micro_batch_rows * 2048 >= 20_000


@pytest.mark.parametrize("gpus", [1, 3, 24, 64, 1536])
@pytest.mark.parametrize("fill", [0.05, 0.7, 1])
def test_assumed_rows_are_rows_that_training_could_have(
    gpus: int, fill: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, none = ROOT / "configs/pretrain_large.yaml", f"data.dir={tmp_path}/none"
    command = ["--config", str(recipe), "--gpus", str(gpus), "--mean-fill", str(fill)]
    assert plan_main([*command, "--set", none]) == 0
    page = re.sub(r"\n {2,}", " ", capsys.readouterr().out)  # a line of its own again
    assert plan_main([*command, "--json", "--set", none]) == 0
    found = json.loads(capsys.readouterr().out)["phases"]
    every = math.gcd(*(x["rows_per_step"] for x in found))
    config = load(recipe, PretrainConfig)
    for i, (phase, x) in enumerate(zip(config.phases, found, strict=True)):
        rows = x["rows_per_step"]
        most = Shape.of(phase, config.data, config.objective).sequences
        assert rows == phase.step_rows(min(phase.row_len / phase.max_seq_len / fill, most))
        line = next(y for y in page.splitlines() if y.startswith(f"phase {i + 1}: "))
        assert f" {rows:,} rows x " in line
        if rows % gpus == 0:
            assert gpus * x["micro_steps"] * x["micro_batch_rows"] == rows
            assert "micro-step(s)" in line
            continue
        assert x["micro_steps"] is x["micro_batch_rows"] is None
        assert "micro-step" not in line
        near = re.search(rf"do not divide by {gpus} ranks, ([\d or]+) ranks? would do", line)[1]
        assert all(every % int(number) == 0 for number in near.split(" or "))


def test_ranks_that_no_data_set_can_serve_are_refused_beforehand(tmp_path: Path) -> None:
    def plan(gpus: int, *overrides: str) -> int:
        sets = [f"data.dir={tmp_path}/none", *overrides]
        recipe = str(ROOT / "configs/pretrain_large.yaml")
        return plan_main(["--config", recipe, "--gpus", str(gpus), "--json", "--set", *sets])

    wide = "phases.1.rows_multiple=1"
    assert plan(32_768, wide) == 0  # at one sequence a row
    with pytest.raises(
        UserError, match=r"phases\.1: 32769 ranks divide .* of no data set: .* 32768"
    ):
        plan(32_769, wide, "phases.0.rows_per_step=32769")
    # Without packing a row is a sequence, so the rows are known.
    alone = "phases.1.packing=false", "phases.1.row_len=512"
    assert plan(32, *alone) == 0
    with pytest.raises(UserError, match=r"phases\.1: .* between 32768 and 32768"):
        plan(24, *alone)


@pytest.mark.parametrize("gpus", [1, 2, 4])
def test_the_original_recipe_starts_on_the_gpus_its_header_names(gpus: int) -> None:
    for layout in layouts("base_adamw", gpus):
        assert layout.division.micro_steps <= 2
        assert layout.traffic.sequences == pytest.approx(256, rel=0.03)


def test_a_division_is_whole_and_the_largest_and_advice_holds() -> None:
    rng, refused = np.random.default_rng(0), 0
    for _ in range(300):
        rows, world, most = (int(rng.integers(1, high)) for high in (3000, 80, 60))
        phase, other = PhaseSpec(rows_per_step=rows), int(rng.choice([0, 840]))
        try:
            found = divide(rows, world, most, phase, 0, all_rows=other)
        except UserError as error:
            refused += 1
            assert rows % world
            ranks, cure = re.fullmatch(
                r".*; ([\d or]+) ranks? would do, or (.*)", str(error)
            ).groups()
            for number in map(int, ranks.split(" or ")):
                assert rows % number == 0 == other % number
            divide(int(cure.removeprefix("phases.0.rows_per_step: ")), world, most, phase, 0)
            continue
        assert world * found.micro_steps * found.micro_batch_rows == rows
        assert found.micro_batch_rows <= most
        larger = range(found.micro_batch_rows + 1, min(most, rows // world) + 1)
        assert not any(rows % (world * b) == 0 for b in larger)
    assert 50 < refused < 295


def test_a_batch_that_is_not_the_one_asked_for_is_said() -> None:
    def phase(**keys: object) -> PhaseConfig:
        rate = {"learning_rate": 1e-4, "tuned_for_sequences": 34}
        return check({"steps": 5, "micro_batch_rows": 2} | rate | keys, PhaseConfig, "test")

    asked = phase(sequences_per_step=16)
    (line,) = batch_warnings(0, asked, "adamw", 33.8)
    assert line.startswith("phases.0.sequences_per_step: 16, but a step takes about 33.8: its rows")
    assert "rows_multiple: 8; sequences_per_step: 34 fits, a smaller one" in line
    least = phase(sequences_per_step=16, rows_multiple=1)
    assert batch_warnings(0, least, "adamw", 33.8)[0].endswith("sequences_per_step: 34 fits")
    given = phase(sequences_per_step=16, rows_per_step=4)
    assert "rows_per_step: 4 decides; say 34" in batch_warnings(0, given, "adamw", 33.8)[0]
    for quiet in (phase(sequences_per_step=33), phase(rows_per_step=4)):
        assert batch_warnings(0, quiet, "adamw", 33.8) == []
    # The rate is compared with what a step takes.
    assert "this run takes 340" in batch_warnings(1, phase(rows_per_step=4), "adamw", 340.0)[0]


def test_every_length_is_evaluated_in_every_phase_and_its_own_last() -> None:
    file = ROOT / "configs/pretrain_demo.yaml"
    config = load(file, PretrainConfig)
    assert [evaluated_lengths(config, i) for i in range(3)] == [
        [128, 512, 16], [16, 512, 128], [16, 128, 512]
    ]  # fmt: skip
    own = load(file, PretrainConfig, ["evaluation.every_length=false"])
    assert [evaluated_lengths(own, i) for i in range(3)] == [[16], [128], [512]]
