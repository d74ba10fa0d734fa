"""Reads engine folders of the format bert-engine-1: DeepSpeed's own files, torch pickles.

`mp_rank_00_model_states.pt` holds the module, and at stage 0 the optimiser;
`zero_pp_rank_R_mp_rank_00_optim_states.pt` (in bf16 `bf16_zero_...`) rank R's flat slices and where
in them the pieces of parameters lie. Only these names are opened, for tensors and plain values.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from core.errors import UserError
from pretrain import torch_files

FORMAT = "bert-engine-1"
_MOMENTS = ("exp_avg", "exp_avg_sq")


def read(
    folder: Path, about: dict[str, Any], path_of: Callable[[str], Path]
) -> tuple[dict[str, Any], list[tuple[str, int, int, Callable[..., Tensor]]], dict[str, Tensor]]:
    """(fields of fragments.Meta, (name, start, elements, read) of each piece, other tensors).

    `about`: engine.json; `path_of` a file's name: its path, UserError if it must not be read.
    """
    try:
        model = _load(path_of("mp_rank_00_model_states.pt"))
        shapes = {n: list(shape) for group in model["param_shapes"] for n, shape in group.items()}
        if {*map(type, [*shapes, *model["module"]])} != {str} or not {
            type(size) for shape in shapes.values() for size in shape
        } <= {int}:
            raise ValueError("names that are no text, or sizes that are no numbers")
        if model["optimizer"] is not None:
            pieces, updates = _whole(model, list(shapes))
        else:
            prefix = "bf16_" if about["precision"] == "bf16" else ""
            shards = [
                _load(path_of(f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"))
                for rank in range(about["world_size"])
            ]
            shards = [shard["optimizer_state_dict"] for shard in shards]
            pieces, updates = list(_sliced(shards)), {}
            for group, names in enumerate(model["param_shapes"]):
                step = shards[0]["base_optimizer_state"]["state"][group]["step"]
                updates |= dict.fromkeys(names, float(step))
        meta = {key: about[key] for key in ("world_size", "zero_stage", "precision")}
        meta |= {"steps": model["engine"]["steps"], "loss_scaler": model["loss_scaler"]}
        rest = {name: t for name, t in model["module"].items() if name not in shapes}
        if not all(isinstance(t, Tensor) for t in rest.values()):
            raise ValueError("not tensors whose every number is held")
        meta |= {"shapes": shapes, "updates": updates}
        return json.loads(json.dumps(meta)), pieces, rest  # plain data alone
    except UserError:
        raise
    except Exception:  # what is missing, or of another type, shows anywhere above
        raise UserError(f"{folder}: damaged, or not written by this program") from None


def _whole(model: dict[str, Any], names: list[str]) -> tuple[list[Any], dict[str, float]]:
    saved, states = model["optimizer"]["fp32"], model["optimizer"]["state"]["state"]
    pieces, updates = [], {}
    for number, name in enumerate(names):
        state = states[number]
        tensors = {"fp32": saved[name]} | {key: state[key] for key in _MOMENTS}
        updates[name] = float(state["step"])
        if not all(isinstance(t, Tensor) for t in tensors.values()):
            raise ValueError(name)
        pieces.append(_piece(name, 0, {key: t.detach().flatten() for key, t in tensors.items()}))
    return pieces, updates


def _sliced(shards: list[dict[str, Any]]) -> Iterator[tuple[str, int, int, Callable[..., Tensor]]]:
    done: dict[str, int] = {}  # elements of each parameter that earlier ranks hold
    for shard in shards:
        states = shard["base_optimizer_state"]["state"]
        for group, flat in enumerate(shard["single_partition_of_fp32_groups"]):
            tensors = {"fp32": flat.detach()} | {key: states[group][key] for key in _MOMENTS}
            for name, at in shard["param_slice_mappings"][group].items():
                here = slice(int(at.start), int(at.start) + int(at.numel))
                start = done.get(name, 0)
                yield _piece(name, start, {key: t[here] for key, t in tensors.items()})
                done[name] = start + int(at.numel)


def _piece(name: str, start: int, tensors: dict[str, Tensor]) -> tuple[Any, ...]:
    numel = len(tensors["fp32"])
    for t in tensors.values():
        if t.dtype != torch.float32 or t.shape != (numel,):
            raise ValueError(name)
    return name, start, numel, lambda key, first, end: tensors[key][first:end]


def _load(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            return torch_files.load(file, path)
    except Exception:  # what is missing or damaged
        raise UserError(f"{path}: damaged, or not written by this program") from None
