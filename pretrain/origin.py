"""The shape of the model that a run starts from, for its configuration. Imports no torch."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from configs.load import check
from core.errors import UserError, short
from core.files import read_json
from pretrain.model_config import SHAPE_KEYS, SHARED_KEYS, ModelConfig

# Keys without which weights of the same shapes are another function.
FUNCTION_KEYS = (*SHAPE_KEYS, "layer_norm_eps")
# The vocabulary follows from the data set, the mask from the objective.
_FILLED = tuple(key for key in SHARED_KEYS if key not in ("vocab_size", "is_decoder"))
# What BERT's mathematics asks of keys beside SHARED_KEYS: allowed values, the first the default.
_FIXED = {
    "model_type": ("bert", None),
    "hidden_act": ("gelu",),
    "position_embedding_type": ("absolute", None),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
}
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def existing_folder(path: str) -> Path:
    """UserError where there is none; a name of the hub is told from a folder that is missing."""
    folder = Path(path)
    if not folder.is_dir():
        hub = "; names of the Hugging Face hub are not fetched: `hf download NAME --local-dir DIR`"
        named = _HUB_NAME.fullmatch(path) and ("/" not in path or not folder.parent.is_dir())
        raise UserError(f"{path}: no such folder{hub if named else ''}")
    return folder


def folder_config(folder: Path) -> tuple[ModelConfig, dict[str, Any]]:
    """Shape and plain config.json of a Hugging Face folder. UserError where it is not BERT's."""
    path = folder / "config.json"
    plain = read_json(path)
    for key, allowed in _FIXED.items():
        if plain.get(key, allowed[0]) not in allowed:
            found = short(json.dumps(plain[key]))
            raise UserError(f"{path}: {key}: {found} is not BERT's, which is {allowed[0]!r}")
    # A key that is absent has Hugging Face's default, which is BERT-BASE's as ours is.
    shape = {key: plain[key] for key in SHARED_KEYS if key in plain}
    if shape.setdefault("vocab_size", 30522) == 0:
        raise UserError(f"{path}: vocab_size: 0 is no vocabulary")
    return check(shape | {"vocab_multiple": 1}, ModelConfig, str(path)), plain


def with_shape_of_origin(tree: Any) -> Any:
    """The plain tree of a run with `init_from`, whose `model:` is filled in from that folder.

    Once the run has a checkpoint of its own, that is where it goes on from. UserError where a key
    says other than the folder; dropout and the scale of new weights may.
    """
    match tree:
        case {"init_from": str(path)} if isinstance(tree.get("model") or {}, dict):
            asked = tree.get("model") or {}
        case _:
            return tree
    own = _newest_state(Path(str(tree.get("run_dir"))))
    if own is not None:
        shape = _checkpoint_shape(own)
    else:
        try:
            shape = shape_of(path)
        except UserError as error:
            raise type(error)(f"init_from: {error}") from None
        said = {"is_decoder": tree.get("objective") == "left_to_right"} | asked
        for key in FUNCTION_KEYS:
            there = getattr(shape, key)
            if key in said and not _equal(said[key], there):
                raise another_function(path, key, there, said[key])
    return tree | {"model": {key: getattr(shape, key) for key in _FILLED} | asked}


def shape_of(path: str) -> ModelConfig:
    """Of a run (its newest checkpoint), a checkpoint or a Hugging Face folder."""
    folder = existing_folder(path)
    if (folder / "config.json").exists():
        return folder_config(folder)[0]
    state = _newest_state(folder)
    if state is None:
        raise UserError(f"{path}: holds neither a config.json nor a checkpoint")
    return _checkpoint_shape(state)


def another_function(path: str | Path, key: str, there: Any, here: Any) -> UserError:
    """`init_from` has `key` `there`, the configuration says `here`."""
    cure = f"model.{key}: {there}"
    if key == "is_decoder":
        cure = f"objective: {'left_to_right' if there else 'masked'}"
    return UserError(
        f"init_from: {path} has {key} {there}, the config says {here}; to start from it: {cure}"
    )


def _newest_state(folder: Path) -> Path | None:
    """state.json of a checkpoint, or of the newest of a run. What is damaged is found later."""
    if (folder / "state.json").exists():
        return folder / "state.json"
    place = folder if folder.name == "checkpoints" else folder / "checkpoints"
    return max(place.glob("step-????????/state.json"), default=None)


def _checkpoint_shape(state: Path) -> ModelConfig:
    config = read_json(state).get("config")
    model = config.get("model") if isinstance(config, dict) else None
    return check(model or {}, ModelConfig, f"{state}: config.model")


def _equal(said: Any, there: float) -> bool:
    """A value that is no number is left to the check of the tree. YAML reads 1e-12 as text."""
    try:
        return float(said) == float(there)
    except (TypeError, ValueError):
        return True
