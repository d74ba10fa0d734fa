"""A vocabulary of a few words and a two-layer encoder folder over it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from data_pipeline.corpus.tokenizer import Tokenizer
from finetune.heads import FineTuned, HeadSpec, initialise_head
from pretrain import hugging_face
from pretrain.model import BertForPreTraining, ModelConfig, initialise

WORDS = (
    "the a cat dog sat ran on in mat sun was is red blue big small old man saw he she it not "
    "paris france rome king of who where when what born 1854 1855 cafe ##s ##ed ##ing ##ly un "
    ". , ? ! - ' ( ) \" u s b c d e f g h i j k l m n o p q r t v w x y z"
).split()
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]


def tokenizer() -> Tokenizer:
    return Tokenizer(PIECES, lowercase=True)


def shape(**changes) -> ModelConfig:
    return ModelConfig(
        **{
            "vocab_size": len(PIECES),
            "vocab_multiple": 1,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 64,
            "max_position_embeddings": 64,
            **changes,
        }
    )


def encoder(folder: Path, pieces: Sequence[str] = PIECES, **changes) -> Path:
    """A Hugging Face folder of a pretrained model with both heads."""
    config = shape(vocab_size=len(pieces), **changes)
    model = BertForPreTraining(config, generator=torch.Generator().manual_seed(3))
    return hugging_face.write(
        folder, model.state_dict(), config, Tokenizer(pieces, lowercase=True), by="test"
    )


def finetuned(folder: Path, head: HeadSpec) -> Path:
    """A fine-tuned folder, as `FineTuned.save` writes it."""
    config = shape()
    model = FineTuned(config, head, tokenizer())
    initialise(model.bert, config, torch.Generator().manual_seed(4))
    initialise_head(model, config, torch.Generator().manual_seed(5))
    model.save(folder)
    return folder


def edit_json(path: Path, **changes) -> None:
    plain = json.loads(path.read_text())
    path.write_text(json.dumps(plain | changes))
