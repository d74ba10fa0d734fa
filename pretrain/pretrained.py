"""What a run or fine-tuning starts from: our checkpoint or a Hugging Face folder, read alike."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import torch
from torch import Tensor

from core.errors import UserError
from core.files import is_there
from data_pipeline.corpus.manifest import VOCAB
from data_pipeline.corpus.tokenizer import Tokenizer
from pretrain import hugging_face
from pretrain.checkpoint import load_model_state
from pretrain.config import PretrainConfig
from pretrain.fragments import check_shapes
from pretrain.hugging_face import OUTPUT_BIAS, WORD_EMBEDDINGS, Pretrained, listed
from pretrain.model import BertForPreTraining
from pretrain.origin import FUNCTION_KEYS, another_function, check_vocabulary, existing_folder
from pretrain.run_state import State

_PADDED = (WORD_EMBEDDINGS, OUTPUT_BIAS)


def read(path: str, lowercase: bool | None = None) -> Pretrained:
    """A run (its newest whole checkpoint), one of its checkpoints, or a Hugging Face folder.

    `lowercase`: what the casing must be, None for any. UserError when it is none of these.
    """
    folder = existing_folder(path)
    if is_there(folder / "config.json"):
        return hugging_face.read(folder, lowercase)
    return of_checkpoint(folder, lowercase)[0]


def of_checkpoint(
    path: str | Path, lowercase: bool | None = None, average: int = 1
) -> tuple[Pretrained, PretrainConfig, State]:
    """A checkpoint without the padding of its vocabulary, and the run's configuration and state.
    average: of so many checkpoints the mean."""
    passed_over: list[str] = []
    weights, config, state, folder = load_model_state(path, passed_over, average)
    vocab, trained = folder / VOCAB, bool(state.dataset["lowercase"])
    if lowercase not in (None, trained):
        raise UserError(f"lowercase: {lowercase}, but {folder} was trained with {trained}".lower())
    tokenizer = Tokenizer.from_file(vocab, trained)
    shape = config.model.with_vocab_size(len(tokenizer))
    hugging_face.check_names_and_shapes(weights, shape, str(folder))
    hugging_face.check_finite(weights, str(folder))
    weights, shape = hugging_face.without_padding(weights, shape)
    origin = f"{folder}, step {state.position.step}"
    if average > 1:
        origin += f", mean of the last {average} whole checkpoints"
    notes = (f"encoder: {origin}", *passed_over)
    source = Pretrained(
        folder, weights, shape, tokenizer,
        origin="; ".join([origin, *passed_over]), notes=notes,
    )  # fmt: skip
    return source, config, state


def initial_weights(
    path: str,
    model: BertForPreTraining,
    tokenizer: Tokenizer,
    accepted: Collection[str] = (),
    extends: str | None = None,
) -> tuple[dict[str, Tensor], str]:
    """(weights by name, where they come from) for `init_from`.

    Heads that the folder does not have keep `model`'s own values, and heads of other tasks are
    left behind; both are said. The vocabulary is padded as `model`'s. UserError unless the folder
    holds the same function and shapes, and the vocabulary of `tokenizer`, the data set's;
    `accepted` (`vocab_sha256`, `lowercase`): names of what may differ all the same. `extends`:
    sha256 of the vocabulary that the data set's is, but for words in place of [unusedN]; where that
    is the folder's, their embeddings and biases begin as the means of those of their old pieces.
    """
    source = read(path)
    _check_function(source, model)
    new_words = check_vocabulary(source.path, source.tokenizer, tokenizer, accepted, extends)
    own, left = model.state_dict(), source.other_heads
    others = set(left)
    new = [name for name in own if name.startswith(tuple(source.absent_parts) or "-")]
    origin = source.origin
    if left:
        origin += f"; left behind, of another task: {listed(left)}"
    if new:
        origin += f"; new, because it has none: {listed(new)}"
    if new_words:
        origin += f"; {len(new_words)} words of the data set begin as the mean of their old pieces"
    elif source.tokenizer is None or source.tokenizer.pieces != tokenizer.pieces:
        origin += "; its vocabulary is not the data set's, as data.accept_changed allows"
    if source.left_out:
        origin += f"; {source.left_out}"
    weights = {name: own[name] for name in new}
    weights |= {name: t for name, t in source.weights.items() if name not in others}
    for name in set(_PADDED) - set(new):
        there = weights[name]
        rows = min(len(there), model.config.vocab_size)
        weights[name] = torch.cat([there[:rows], own[name][rows:].cpu()])
        for number, old in new_words.items():
            weights[name][number] = there[old].mean(0)
    given, wanted = ({name: t.shape for name, t in of.items()} for of in (weights, own))
    check_shapes(given, wanted, "the weights to start from")
    return weights, origin


def _check_function(source: Pretrained, model: BertForPreTraining) -> None:
    for key in FUNCTION_KEYS:
        there, here = getattr(source.shape, key), getattr(model.config, key)
        if there != here:
            raise another_function(source.path, key, there, here)
