"""Every configuration that is shipped says what it is for, and is one."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.load import load
from data_pipeline.corpus.settings import PrepareConfig
from finetune.config import FinetuneConfig
from pretrain.config import PretrainConfig
from pretrain.layout import batch_warnings, lay_out
from pretrain.model_config import ModelConfig
from pretrain.planner import assume, assumed_traffic, plan_phase

ROOT = Path(__file__).resolve().parents[2]
TREES = {"pretrain": PretrainConfig, "data": PrepareConfig, "finetune": FinetuneConfig}
SHIPPED = sorted(path.name for path in (ROOT / "configs").glob("*.yaml"))


@pytest.mark.parametrize("name", SHIPPED)
def test_a_header_says_what_it_is_for_and_how_it_is_started(name: str) -> None:
    load(ROOT / "configs" / name, TREES[name.partition("_")[0]])
    header = [x for x in (ROOT / "configs" / name).read_text().splitlines() if x[:1] == "#"]
    assert header[0].startswith("# ")
    assert any(f"--config configs/{name}" in line for line in header)
    assert any("hardware" in line.lower() for line in header)


@pytest.mark.parametrize("fill", [0.5, 1])
@pytest.mark.parametrize("name", [name for name in SHIPPED if name.startswith("pretrain_")])
def test_shipped_rates_are_those_of_their_batches(name: str, fill: float) -> None:
    config = load(ROOT / "configs" / name, PretrainConfig)
    for index, phase in enumerate(config.phases):
        held = phase.sequences_per_step  # of rows that are given, as their data fills them
        if phase.rows_per_step is None:
            held = assumed_traffic(config, index, fill).sequences
        assert batch_warnings(index, phase, config.optimizer.name, held) == []


@pytest.mark.parametrize("fill", [0.5, 1])
@pytest.mark.parametrize("name", ["small", "continue"])
def test_what_is_meant_for_24_gb_fits_and_keeps_its_batch(name: str, fill: float) -> None:
    config = load(ROOT / f"configs/pretrain_{name}.yaml", PretrainConfig)
    traffic = [assumed_traffic(config, i, fill) for i in range(len(config.phases))]
    for gpus in (1, 2, 4):
        for layout in lay_out(config, gpus, traffic):
            assumed = assume(config, gpus, "rtx-3090")
            plan = plan_phase(config, ModelConfig(vocab_size=30522), layout, assumed)
            assert plan.memory_bytes < 16e9
            assert batch_warnings(0, layout.phase, "adamw", plan.sequences_per_step) == []
