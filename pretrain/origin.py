"""Shape and vocabulary of what a run starts from, known before its weights. Imports no torch."""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from configs.load import check
from core.errors import NotAllowed, TryAgain, UserError, short
from core.files import CHECKPOINT, disk_errors, is_there, look, read_json
from data_pipeline.corpus import tokenizer_files
from data_pipeline.corpus.manifest import VOCAB
from data_pipeline.corpus.tokenizer import Tokenizer
from pretrain.model_config import SHAPE_KEYS, SHARED_KEYS, ModelConfig

P = TypeVar("P")
T = TypeVar("T")

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
_INSIST = "to go on all the same: data.accept_changed: "
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def existing_folder(path: str) -> Path:
    """UserError where there is none; a name of the hub is told from a folder that is missing."""
    folder = Path(path)
    found = look(path)
    if found is None or not stat.S_ISDIR(found.st_mode):
        hub = f"; `hf download NAME --local-dir {path}` fetches a folder of the Hugging Face hub"
        named = _HUB_NAME.fullmatch(path) and ("/" not in path or not folder.parent.is_dir())
        if named:
            hub = f"; of the Hugging Face hub: `python -m pretrain import hf:{path} DIR` fetches it"
        raise UserError(f"{path}: no such folder{hub}")
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
    with disk_errors(str(tree.get("run_dir")), "run_dir"):
        own = newest_state(Path(str(tree.get("run_dir"))))
    if own is not None:
        shape = own[1]
        if shape is None:
            return tree  # the resume says what is wrong with every one
    else:
        try:
            with disk_errors(path):
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
    if is_there(folder / "config.json"):
        return folder_config(folder)[0]
    found = newest_state(folder)
    if found is None:
        raise UserError(f"{path}: holds neither a config.json nor a checkpoint")
    state, shape = found
    return shape or _checkpoint_shape(state)


def another_function(path: str | Path, key: str, there: Any, here: Any) -> UserError:
    """`init_from` has `key` `there`, the configuration says `here`."""
    cure = f"model.{key}: {there}"
    if key == "is_decoder":
        cure = f"objective: {'left_to_right' if there else 'masked'}"
    return UserError(
        f"init_from: {path} has {key} {there}, the config says {here}; to start from it: {cure}"
    )


def newest_state(folder: Path) -> tuple[Path, ModelConfig | None] | None:
    """state.json and shape of a checkpoint, or of the newest of a run that says its shape; None for
    the shape where none does. No checksum is read: damage to other files is found later. TryAgain
    where one cannot be read now, UserError where this user may not read the newest."""
    if (folder / "state.json").exists():
        states = [folder / "state.json"]
    else:
        place = folder if folder.name == "checkpoints" else folder / "checkpoints"
        states = sorted(place.glob(f"{CHECKPOINT}/state.json"), reverse=True)
    found = next(readable(states, _checkpoint_shape), None)
    return found or ((states[0], None) if states else None)


def readable(newest_first: Sequence[P], read: Callable[[P], T]) -> Iterator[tuple[P, T]]:
    """Of checkpoints those that can be read, with what `read` returns. One with a UserError is
    passed over; TryAgain where one cannot be read now, NotAllowed where this user may not read the
    newest."""
    for checkpoint in newest_first:
        try:
            yield checkpoint, read(checkpoint)
        except TryAgain:
            raise
        except UserError as error:
            if isinstance(error, NotAllowed) and checkpoint == newest_first[0]:
                raise


def tokenizer_of(path: str) -> Tokenizer | None:
    """Of what `shape_of` takes; None for a Hugging Face folder without one."""
    folder = existing_folder(path)
    newest = None if is_there(folder / "config.json") else newest_state(folder)
    if newest is None:
        found = tokenizer_files.read(folder)
        return found.tokenizer if found is not None else None
    state, _ = newest
    dataset = read_json(state).get("dataset")
    lowercase = isinstance(dataset, dict) and dataset.get("lowercase") is True
    return Tokenizer.from_file(state.parent / VOCAB, lowercase)


def check_vocabulary(
    path: str | Path,
    there: Tokenizer | None,
    here: Tokenizer,
    accepted: Collection[str] = (),
    extends: str | None = None,
) -> dict[int, list[int]]:
    """By the id of a word that stands `here`, in the data set, in place of an [unusedN], its pieces
    `there`, in `path`; nothing where `here` does not extend `there` (see `initial_weights`).

    UserError where they differ otherwise, unless `accepted` names what may.
    """
    words: dict[int, list[int]] = {}
    if there is not None and there.sha256 == extends and len(there) == len(here):
        changed = [n for n, piece in enumerate(here.pieces) if piece != there.pieces[n]]
        if set(changed) <= set(there.unused_ids):
            words = {n: there.encode(here.pieces[n]) for n in changed}
    for n in (n for n, old in words.items() if not old):
        raise UserError(
            f"init_from: piece {n} of the data set, {short(here.pieces[n])!r} in place of "
            f"{there.pieces[n]}, is no piece at all to the tokenizer of {path}, so it has no "
            "weights to begin with; prepare the data set without it"
        )
    if there is None and "vocab_sha256" not in accepted:
        raise UserError(
            f"init_from: {path} has no vocab.txt or tokenizer.json to compare with the data set's; "
            f"put there what it was trained with, or {_INSIST}[vocab_sha256]"
        )
    if there is None:
        return words
    if there.pieces != here.pieces and not words and "vocab_sha256" not in accepted:
        if extends not in (None, there.sha256):
            raise UserError(
                f"init_from: {path} is not the folder whose vocabulary the data set extends; name "
                "the one that its vocabulary.extend.from named, or prepare the data set with "
                f"vocabulary.extend.from: {path}, or {_INSIST}[vocab_sha256]"
            )
        raise UserError(
            f"init_from: {path} has another vocabulary than the data set: "
            f"{_first_difference(there.pieces, here.pieces)}; prepare the data set with "
            f"vocabulary.path: {path}, or {_INSIST}[vocab_sha256]"
        )
    if there.lowercase != here.lowercase and "lowercase" not in accepted:
        said = str(there.lowercase).lower()
        raise UserError(
            f"init_from: {path} was trained with lowercase: {said}, the data set was not; prepare "
            f"it with vocabulary.lowercase: {said}, or {_INSIST}[lowercase]"
        )
    return words


def _first_difference(there: list[str], here: list[str]) -> str:
    at = next((n for n, (a, b) in enumerate(zip(there, here)) if a != b), None)  # noqa: B905
    if at is None:
        return f"{len(there):,} pieces there, {len(here):,} here"
    return f"piece {at} is {short(there[at])!r} there, {short(here[at])!r} here"


def _checkpoint_shape(state: Path) -> ModelConfig:
    config = read_json(state).get("config")
    model = config.get("model") if isinstance(config, dict) else None
    if not isinstance(model, dict):
        raise UserError(f"{state}: not a checkpoint's state: config.model is missing")
    return check(model, ModelConfig, f"{state}: config.model")


def _equal(said: Any, there: float) -> bool:
    """A value that is no number is left to the check of the tree. YAML reads 1e-12 as text."""
    try:
        return float(said) == float(there)
    except (OverflowError, TypeError, ValueError):
        return True
