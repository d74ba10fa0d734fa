"""From a configuration to an engine that stands before its first step."""

from __future__ import annotations

from collections.abc import Callable

import torch

from data_pipeline.corpus.tokenizer import Tokenizer
from pretrain.attention import choose
from pretrain.config import PretrainConfig
from pretrain.engine import Engine
from pretrain.model import BertForPreTraining, check_compiler
from pretrain.numerics import DTYPES, resolve_precision
from pretrain.pretrained import initial_weights


def build_engine(
    config: PretrainConfig, vocab_size: int, device: torch.device, say: Callable[[str], None]
) -> Engine:
    """Model, optimiser and engine with weights drawn from the seed. Collective."""
    shape = config.model.with_vocab_size(vocab_size)
    precision = resolve_precision(config.engine, device)
    path = choose(shape.attention, device, DTYPES[precision], shape.head_size)
    if shape.compile:
        check_compiler(device)
        # A piece of code has a graph for training and one for evaluation in each phase.
        torch._dynamo.config.recompile_limit = max(8, 2 * len(config.phases) + 2)
    say(f"attention: {path} ({device}, {precision})" + (", compiled" if shape.compile else ""))
    generator = torch.Generator().manual_seed(config.seed)
    model = BertForPreTraining(shape, generator=generator).to(device)
    if not config.data.paired:
        model.freeze_next_sentence()
    # Each phase brings its own accumulation.
    return Engine(model, config.optimizer, config.engine, micro_steps=1, micro_batch_rows=1)


def start_from(folder: str, engine: Engine, config: PretrainConfig, tokenizer: Tokenizer) -> str:
    """Take the weights of `init_from`; says where they are from."""
    accepted = config.data.accept_changed
    weights, origin = initial_weights(folder, engine.module, tokenizer, accepted)
    engine.load_weights(weights)
    return origin
