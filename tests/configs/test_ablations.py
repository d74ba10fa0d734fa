"""Each shipped ablation differs from the mini preset in what its name says, and in nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from configs.load import differences, load
from finetune.ablations import TABLES
from pretrain.config import PretrainConfig

ROOT = Path("configs/ablations")
MINI = load("configs/pretrain_mini.yaml", PretrainConfig).model_dump()


def said(name: str) -> dict[str, Any]:
    """Keys and values that the name of a run stands for."""
    table, *rest = name.split("_")
    if table == "table6":
        layers, width, heads = map(int, rest)
        return {
            "model.num_hidden_layers": layers,
            "model.hidden_size": width,
            "model.intermediate_size": 4 * width,
            "model.num_attention_heads": heads,
        }
    if table == "table8":
        keys = ("mask", "same", "random")
        return {f"data.mask.{key}": int(v) / 100 for key, v in zip(keys, rest, strict=True)}
    return {
        "no_nsp": {"data.next_sentence": "none"},
        "left_to_right": {
            "data.next_sentence": "none",
            "objective": "left_to_right",
            "model.is_decoder": True,  # follows from the objective
        },
    }["_".join(rest)]


@pytest.mark.parametrize("name", sorted(path.stem for path in ROOT.glob("*.yaml")))
def test_an_ablation_is_its_name(name: str) -> None:
    config = load(ROOT / f"{name}.yaml", PretrainConfig)
    assert config.run_dir == f"runs/ablations/{name}"
    found = differences(MINI, config.model_dump())
    assert found.keys() <= said(name).keys() | {"run_dir", "data.ledger"}
    tree = config.model_dump()
    for key, value in said(name).items():
        node = tree
        for part in key.split("."):
            node = node[part]
        assert node == value, key


def test_the_rows_of_the_paper_s_tables_are_the_runs() -> None:
    rows = {line.run for table in TABLES for line in table.lines}
    assert rows == {"mini"} | {path.stem for path in ROOT.glob("*.yaml")}
