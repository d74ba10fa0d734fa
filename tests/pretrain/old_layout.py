"""Writes engine folders of the format bert-engine-1: DeepSpeed's own files, by name and content."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pretrain import deepspeed_door
from pretrain.engine import Engine


@contextmanager
def bf16_optimizer() -> Iterator[None]:
    """Engines made inside get the class that DeepSpeed itself takes for bf16 at stage 1."""
    deepspeed_door.deepspeed()
    from deepspeed.runtime.engine import DeepSpeedEngine

    patched = DeepSpeedEngine._do_optimizer_sanity_check
    DeepSpeedEngine._do_optimizer_sanity_check = patched.__wrapped__
    try:
        yield
    finally:
        DeepSpeedEngine._do_optimizer_sanity_check = patched


def write(e: Engine, folder: Path) -> None:
    """(all ranks) What `Engine.save` of that format wrote, into an existing folder."""
    zero = e.config.zero_stage > 0
    if zero:
        state = e._ds.optimizer.state_dict()
        state.pop("loss_scaler", None)
        state["zero_stage"] = e.config.zero_stage
        prefix = "bf16_" if e.precision == "bf16" else ""
        torch.save(
            {"optimizer_state_dict": state, "ds_version": "0.19.8"},
            folder / f"{prefix}zero_pp_rank_{e.rank}_mp_rank_00_optim_states.pt",
        )
    if e.rank == 0:
        torch.save(
            {
                "module": e.module.state_dict(),
                "optimizer": None if zero else _stage_0_state(e),
                "param_shapes": [{name: p.shape for name, p in group} for group in e._named],
                "dp_world_size": e.world,
                "mp_world_size": 1,
                "ds_version": "0.19.8",
                "iteration": 3,
                "universal_checkpoint_info": {"universal_checkpoint_version": 0.2},
                "engine": {"steps": 3},
                "loss_scaler": {"cur_scale": 1.0} if zero else {},
            },
            folder / "mp_rank_00_model_states.pt",
        )
        meta = {
            "format": "bert-engine-1",
            "world_size": e.world,
            "zero_stage": e.config.zero_stage,
            "precision": e.precision,
            "wrapper": type(e._ds.optimizer).__name__,
        }
        (folder / "engine.json").write_text(json.dumps(meta), encoding="utf-8")
    dist.barrier()


def _stage_0_state(e: Engine) -> dict[str, Any]:
    masters = {name: p.detach() for group in e._named for name, p in group}
    return {"fp32": masters, "state": e.optimizer.state_dict()}
