"""From a configuration to an engine that stands before its first step, and to a phase's data."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from data_pipeline.stream.dataset import Dataset
from data_pipeline.stream.stream import Stream
from pretrain import deepspeed_door, distributed
from pretrain.attention import choose
from pretrain.config import PretrainConfig
from pretrain.distributed import World
from pretrain.engine import Engine
from pretrain.model import BertForPreTraining, check_compiler
from pretrain.numerics import DTYPES, resolve_precision
from pretrain.run_state import RunState


def build_engine(
    config: PretrainConfig, vocab_size: int, world: World, say: Callable[[str], None]
) -> Engine:
    """Model, optimiser and engine with weights drawn from the seed. Collective."""
    shape, device = config.model.with_vocab_size(vocab_size), world.device
    with distributed.errors_shared(world):
        precision = resolve_precision(config.engine, device)
        deepspeed_door.check_precision(precision)
        path = choose(shape.attention, device, DTYPES[precision], shape.head_size)
        if shape.compile:
            check_compiler(device)
    if shape.compile:
        # A piece of code has a graph for training and one for evaluation in each phase.
        torch._dynamo.config.recompile_limit = max(8, 2 * len(config.phases) + 2)
    say(f"attention: {path} ({device}, {precision})" + (", compiled" if shape.compile else ""))
    generator = torch.Generator().manual_seed(config.seed)
    model = BertForPreTraining(shape, generator=generator).to(device)
    if not config.data.paired:
        model.freeze_next_sentence()
    # Each phase brings its own accumulation.
    return Engine(model, config.optimizer, config.engine, micro_steps=1, micro_batch_rows=1)


def open_stream(
    config: PretrainConfig,
    dataset: Dataset,
    state: RunState,
    world: World,
    gives_up: Callable[[], bool],
) -> Stream:
    """(all ranks) The data of the run's phase, from where it stands and past rows left out. A wait
    for them ends, with NotWaitedFor, where `gives_up` says so."""
    index = state.position.phase
    phase = config.phases[index]
    open_at = functools.partial(
        Stream,
        dataset,
        phase,
        phase_index=index,
        seed=config.seed,
        rank=world.rank,
        world=world.size,
        micro_batch_rows=phase.micro_batch_rows,
        gather=functools.partial(distributed.gather, world),
        pin_memory=world.device.type == "cuda",
        gives_up=gives_up,
    )
    stream = open_at(state=state.stream)
    behind = state.rollbacks.past(stream.state)
    if behind != stream.state:
        stream.close()
        stream = open_at(state=behind)
    state.stream = stream.state
    distributed.require_same(world, "the data plan", stream.plan_digest())
    return stream
