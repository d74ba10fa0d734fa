"""Files of an engine folder: DeepSpeed's own, by name and content, read without it.

`mp_rank_00_model_states.pt` holds the module, `zero_pp_rank_R_mp_rank_00_optim_states.pt` the
slices of rank R, `engine.json` who wrote them.
"""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from core.errors import UserError

FORMAT = "bert-engine-1"
META = "engine.json"
MODEL_FILE = "mp_rank_00_model_states.pt"


def shard_name(precision: str, rank: int) -> str:
    prefix = "bf16_" if precision == "bf16" else ""
    return f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def read_meta(folder: Path) -> dict[str, Any]:
    """World size, ZeRO stage and precision of an engine folder."""
    path = Path(folder) / META
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except ValueError:
        raise UserError(f"{path}: not JSON") from None
    if meta.get("format") != FORMAT:
        raise UserError(f"{path}: written by another version of this program")
    return meta


def read_weights(folder: Path) -> dict[str, Tensor]:
    """fp32 weights by name (tied names too) from an engine folder, without a process group."""
    folder = Path(folder)
    meta = read_meta(folder)
    model = read_tree(folder / MODEL_FILE)
    if model["optimizer"] is not None:
        masters = dict(model["optimizer"]["fp32"])
    else:
        pieces: dict[str, list[Tensor]] = {}
        for rank in range(meta["world_size"]):
            path = folder / shard_name(meta["precision"], rank)
            shard = read_tree(path)["optimizer_state_dict"]
            flats = shard["single_partition_of_fp32_groups"]
            for flat, mapping in zip(flats, shard["param_slice_mappings"], strict=True):
                for name, address in mapping.items():
                    piece = flat.detach()[address.start : address.start + address.numel]
                    pieces.setdefault(name, []).append(piece)
        shapes = {name: shape for group in model["param_shapes"] for name, shape in group.items()}
        masters = {name: torch.cat(pieces[name]).view(shape) for name, shape in shapes.items()}
    module = model["module"]
    by_storage = {module[name].data_ptr(): value for name, value in masters.items()}
    return {
        name: masters.get(name, by_storage.get(value.data_ptr(), value)).float()
        if value.is_floating_point()
        else value
        for name, value in module.items()
    }


def stage_0_reader(model: dict[str, Any]) -> Any:
    saved = model["optimizer"]
    names = [name for group in model["param_shapes"] for name in group]
    index = {name: i for i, name in enumerate(names)}

    def read(name: str, key: str) -> Any:
        if key == "fp32":
            return saved["fp32"][name].detach()
        return saved["state"]["state"][index[name]][key]

    return read


def universal_reader(folder: Path) -> Any:
    def read(name: str, key: str) -> Any:
        value = read_tree(folder / "universal" / "zero" / name / f"{key}.pt")
        return value if key == "step" else value["param"]

    return read


def write_tree(tree: Any, path: Path) -> None:
    """torch.save that fails with the system's own error, which torch hides behind one of its."""
    try:
        with path.open("wb") as file:
            torch.save(tree, file)
    except RuntimeError as error:
        if isinstance(cause := error.__context__, OSError):
            raise OSError(cause.errno, cause.strerror, str(path)) from None
        raise


class _Address:
    """Stands for DeepSpeed's class of the same fields when a checkpoint is read."""

    start: int
    numel: int


def read_tree(path: Path) -> Any:
    """torch.load of tensors and plain containers only: no code of a stranger runs."""
    address = (_Address, "deepspeed.utils.tensor_fragment.fragment_address")
    try:
        with torch.serialization.safe_globals([address]):
            return torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError):
        raise UserError(f"{path}: damaged, or not written by this program") from None


def on_host(tree: Any, copies: dict[int, Any]) -> Any:
    """A copy of nested dicts, lists and tuples with its tensors in host memory.

    Tensors that share memory share it in the copy, and what is one object stays one, so that
    torch.save writes the same bytes. `copies`: what has been copied, with its original, by id.
    """
    if isinstance(tree, torch.Size) or not isinstance(tree, Tensor | dict | list | tuple):
        return tree
    if id(tree) not in copies:
        if isinstance(tree, Tensor):
            twin = _tensor_copy(tree, copies)
        elif isinstance(tree, dict):
            twin = copy.copy(tree)  # its class, and the attributes of a module's state
            twin.update({key: on_host(value, copies) for key, value in tree.items()})
        else:
            twin = type(tree)(on_host(value, copies) for value in tree)
        copies[id(tree)] = (tree, twin)
    return copies[id(tree)][1]


def _tensor_copy(tensor: Tensor, copies: dict[int, Any]) -> Tensor:
    storage = tensor.untyped_storage()
    if storage._cdata not in copies:
        on_host = storage.clone() if storage.device.type == "cpu" else storage.cpu()
        copies[storage._cdata] = (storage, on_host)
    twin = torch.empty(0, dtype=tensor.dtype)
    twin.set_(copies[storage._cdata][1], tensor.storage_offset(), tensor.size(), tensor.stride())
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(twin, tensor.requires_grad)
    return twin.requires_grad_(tensor.requires_grad)
