"""Bytes: what a device holds while it trains, what a checkpoint is. Estimates for a GPU; `make gpu`
puts them beside what the allocator counted (docs/step.md)."""

from __future__ import annotations

import functools

import torch

from data_pipeline.stream.plan import Shape
from pretrain import deepspeed_door
from pretrain.config import PhaseConfig, PretrainConfig
from pretrain.model import BertForPreTraining, ModelConfig


@functools.cache
def parameter_count(config: ModelConfig) -> int:
    """Parameters with the vocabulary's padding, as they lie in memory."""
    with torch.device("meta"):
        model = BertForPreTraining(config, generator=None)
    return sum(p.numel() for p in model.parameters())


def gradient_buckets(config: PretrainConfig, parameters: int) -> tuple[int, bool, int]:
    """(elements of a bucket of gradients, whether it is sent beside backward, bytes an element)"""
    settings = deepspeed_door.settings(
        config.engine, "bf16", micro_steps=1, micro_batch_rows=1, parameters=parameters
    )
    zero = settings.get("zero_optimization", {})
    bucket = min(zero.get("reduce_bucket_size", parameters), parameters)
    width = 4 if settings["communication_data_type"] == "fp32" else 2
    return bucket, zero.get("overlap_comm", False), width if config.engine.zero_stage else 4


def state_bytes(
    config: PretrainConfig, model: ModelConfig, world: int, precision: str = "bf16"
) -> float:
    """One device's weights, gradients and optimiser states, at most: weights; its slice of
    gradients, masters and moments in fp32; at stage 1 the fp32 sums of all gradients; and fp32
    buckets of them, one that is filled while one is sent. Stage 0 is fp32: weights, gradients and
    moments."""
    P, stage = parameter_count(model), config.engine.zero_stage
    if stage == 0:
        return 16 * P
    bucket, overlaps, _ = gradient_buckets(config, P)
    buckets = 2 if overlaps and bucket < P else 1
    sums = 4 * P if stage == 1 else 0
    weights = 4 if precision == "fp32" else 2
    return weights * P + 16 * P / world + sums + 4 * bucket * buckets


def activation_bytes(model: ModelConfig, tokens: int, width: int = 2) -> float:
    """What a layer keeps for backward of each token, in numbers of `width` bytes: its input, q k v,
    attention's output, the two residual sums with the outputs of their LayerNorms, the input and
    output of GELU; and a byte for each dropout mask."""
    D, F = model.hidden_size, model.intermediate_size
    return tokens * (width * (D + 3 * D + D + 4 * D + 2 * F) + 2 * D)


def attention_scratch_bytes(model: ModelConfig, tokens: float, runs: float) -> float:
    """The flash kernel's fp32 sums of dQ in backward; each of the runs is padded by up to 128."""
    return 4 * model.hidden_size * (tokens + 128 * runs)


def head_bytes(model: ModelConfig, predictions: float, width: int = 2) -> float:
    """What the language-model head keeps for backward of each predicted position: its input, the
    input and output of GELU, LayerNorm's output, and the logits, in whose place their gradient
    comes."""
    return width * predictions * (4 * model.hidden_size + model.padded_vocab_size)


def memory_bytes(
    config: PretrainConfig,
    model: ModelConfig,
    phase: PhaseConfig,
    *,
    rows: int,
    sequences_a_row: float,
    world: int,
    precision: str = "bf16",
) -> float:
    """Estimate of one device's memory with `rows` at once: states, activations, attention's
    scratch, the head.

    With activation checkpointing a layer keeps its input, and one layer works at a time.
    """
    shape = Shape.of(phase, config.data, config.objective)
    width = 4 if precision == "fp32" else 2
    tokens, layers = rows * shape.row_len, model.num_hidden_layers
    layer = activation_bytes(model, tokens, width)
    if model.activation_checkpointing:
        activations = layers * tokens * width * model.hidden_size + layer
    else:
        activations = layers * layer
    head = head_bytes(model, rows * shape.predictions, width)
    states = state_bytes(config, model, world, precision)
    scratch = attention_scratch_bytes(model, tokens, rows * (sequences_a_row + 1))  # 1: the tail
    return states + activations + scratch + head


def checkpoint_bytes(model: ModelConfig) -> int:
    """fp32 weights and two moments (`pretrain/fragments.py`)."""
    return 12 * parameter_count(model)


def snapshot_bytes(config: PretrainConfig, model: ModelConfig, world: int) -> float:
    """What a rank copies to host memory, which it keeps for it: its slice."""
    return checkpoint_bytes(model) / (world if config.engine.zero_stage >= 1 else 1)
