"""A fine-tuned model from a folder's encoder and back; what is new or left behind is said."""

from __future__ import annotations

from dataclasses import replace

import torch

from core.errors import UserError, short
from finetune.config import EncoderConfig
from finetune.heads import FineTuned, HeadSpec, initialise_head
from pretrain import pretrained
from pretrain.hugging_face import Pretrained, listed
from pretrain.model import initialise


def read(config: EncoderConfig, max_seq_len: int) -> Pretrained:
    """Read and check `encoder.path`. UserError when vocabulary, casing or length do not fit."""
    try:
        source = pretrained.read(config.path, config.lowercase)
    except UserError as error:
        raise type(error)(f"encoder.path: {error}") from None
    if source.tokenizer is None:
        raise UserError(f"encoder.path: {source.path / 'vocab.txt'}: no such vocabulary file")
    if source.shape.type_vocab_size < 2:
        raise UserError(f"{source.path}: type_vocab_size is 1; pairs of texts need two")
    check_length(source, max_seq_len)
    # Rows have many lengths, which compiled code would be made anew for.
    update: dict[str, float | str] = {"compile": False, "activation_checkpointing": False}
    update["attention"] = "auto"  # what is fine-tuned may be on another device, or in fp32
    if config.dropout is not None:
        update |= dict.fromkeys(
            ("hidden_dropout_prob", "attention_probs_dropout_prob"), config.dropout
        )
    return replace(source, shape=source.shape.model_copy(update=update))


def check_length(source: Pretrained, max_seq_len: int) -> None:
    """UserError where a sequence may have more tokens than the encoder has positions."""
    positions = source.shape.max_position_embeddings
    if max_seq_len > positions:
        raise UserError(
            f"max_seq_len: {max_seq_len} is more than the {positions} positions of {source.path}"
        )


def build(
    source: Pretrained, head: HeadSpec, config: EncoderConfig, seed: int
) -> tuple[FineTuned, list[str]]:
    """The model with its weights in place, and what was new or left behind, a line each.

    New layers depend on `seed` alone. UserError when the encoder or half a head is missing.
    """
    generator = torch.Generator().manual_seed(seed)
    model = FineTuned(
        source.shape,
        head,
        source.tokenizer,
        frozen=config.trained == "head",
        bilstm=config.bilstm,
    )
    if config.init == "random":
        initialise(model.bert, source.shape, generator)
        initialise_head(model, source.shape, generator)
        return model, ["encoder: random weights, as asked (encoder.init)"]
    wanted, found = model.state_dict(), source.weights
    own = {name for name in wanted if name.split(".")[0] in model.new_layers}
    unused = set() if model.pooled else {n for n in wanted if n.startswith("bert.pooler.")}
    fresh = own if config.new_head or not own & found.keys() else set()
    zero = unused - found.keys()
    missing = wanted.keys() - found.keys() - fresh - zero
    if missing:
        raise UserError(f"{source.path}: missing {', '.join(sorted(missing))}")
    if not fresh:
        _check_head(source, head, {name: wanted[name].shape for name in sorted(own)})
    layers = ", ".join(model.new_layers)
    new = f"new layer: {layers} ({head.width} outputs)"
    notes = [new if fresh else f"{layers} goes on from {source.path}"]
    if zero:
        notes.append("bert.pooler is not in the folder; this task does not use it")
    if left := found.keys() - wanted.keys():
        notes.append(f"left behind: {listed(left)}")
    initialise_head(model, source.shape, generator)
    with torch.no_grad():
        for name, tensor in wanted.items():
            if name in zero:
                tensor.zero_()
            elif name not in fresh:
                tensor.copy_(found[name])
    return model, [*notes, *source.notes]


def _check_head(source: Pretrained, head: HeadSpec, shapes: dict[str, torch.Size]) -> None:
    afresh = "encoder.new_head: true starts it afresh"
    for name, shape in shapes.items():
        if source.weights[name].shape != shape:
            raise UserError(
                f"{source.path}: {name} is {list(source.weights[name].shape)}, {list(shape)} is "
                f"needed; {afresh}"
            )
        if (
            not source.weights[name].is_floating_point()
            or not source.weights[name].isfinite().all()
        ):
            raise UserError(
                f"{source.path}: {name} holds values that are not finite real numbers; {afresh}"
            )
    if head.labels and source.labels and source.labels != head.labels:
        raise UserError(
            f"{source.path}: its head tells {short(', '.join(source.labels), 200)} apart, the task "
            f"has {short(', '.join(head.labels), 200)}; {afresh}"
        )
