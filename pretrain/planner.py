"""GPUs in; rows, micro-steps, hours, memory, EFLOP and checkpoint bytes out, before any is rented.
With a data set, what training would refuse of vocabulary, held-out text, rows and free disk is
refused here in the same line, where the disk is that of run_dir, or of the nearest folder above
it, on this machine. Without one, lengths are assumed and only rows that no data set could mend are
refused; the disk is shown and not judged."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, field, fields
from pathlib import Path

import torch

from configs.load import dump, load, parser
from core.console import show, table
from core.errors import UserError
from data_pipeline.stream.dataset import Dataset
from data_pipeline.stream.plan import Shape
from pretrain import deepspeed_door
from pretrain.checkpoint import DiskRoom, disk_room, newest_step
from pretrain.config import PhaseConfig, PretrainConfig
from pretrain.flops import PEAK_TFLOPS, training_flops
from pretrain.layout import (
    PhaseLayout,
    assumed_traffic,
    lay_out,
    look_ahead,
    vocabulary_size,
)
from pretrain.model import BertForPreTraining, ModelConfig

# bert-base-uncased's, for plans made before there is a data set.
_ASSUMED_VOCABULARY = 30522

_PEAKS = ", ".join(f"{name} {peak:g}" for name, peak in PEAK_TFLOPS.items())


def _flag(flag: str, default: float, text: str) -> float:
    metadata = {"flag": flag, "help": f"{text} (default {default:g})"}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Assumed:
    """What a plan is told; each is a flag of the command."""

    gpus: int = _flag("--gpus", 8, "devices in all")
    peak_tflops: float = _flag(
        "--peak-tflops", PEAK_TFLOPS["H100"], f"dense bf16 peak of one device: {_PEAKS}"
    )
    mfu: float = _flag("--mfu", 0.45, "share of the peak that is reached; measure yours")
    mean_fill: float = _flag(
        "--mean-fill", 1.0, "mean length over max_seq_len, used while there is no data set"
    )
    write_gb_per_second: float = _flag("--write-gb-per-second", 1.0, "speed of the checkpoint disk")
    copy_gb_per_second: float = _flag("--copy-gb-per-second", 2.0, "from a device to host memory")

    @classmethod
    def read(cls, arguments: argparse.Namespace) -> Assumed:
        """UserError where one is not above 0."""
        for x in fields(cls):
            value = getattr(arguments, x.name)
            if value <= 0:
                raise UserError(f"{x.metadata['flag']}: {value} is not above 0")
        return cls(**{x.name: getattr(arguments, x.name) for x in fields(cls)})


def parameter_count(config: ModelConfig) -> int:
    """Parameters with the vocabulary's padding, as they lie in memory."""
    with torch.device("meta"):
        model = BertForPreTraining(config, generator=None)
    return sum(p.numel() for p in model.parameters())


@dataclass(frozen=True)
class PhasePlan:
    steps: int
    rows_per_step: int
    micro_steps: int | None  # None: assumed rows do not divide by the ranks
    micro_batch_rows: int | None  # at once, on a device
    sequences_per_step: float
    tokens_per_step: float
    flops: float  # of the whole phase
    hours: float
    step_seconds: float
    memory_bytes: float  # of one device
    checkpoint_share: float  # of the time, if training waited for the writing
    stall_seconds: float  # that a checkpoint holds training up, as configured
    stall_share: float  # of the time


def state_bytes(config: PretrainConfig, model: ModelConfig, world: int) -> float:
    """One device's weights, gradients and optimiser states, at most: bf16 weights; its slice of
    gradients, masters and moments in fp32; at stage 1 the fp32 sums of all gradients; and fp32
    buckets of them, one that is filled while one is sent. Stage 0 is fp32: weights, gradients and
    moments."""
    P, stage = parameter_count(model), config.engine.zero_stage
    if stage == 0:
        return 16 * P
    settings = deepspeed_door.settings(
        config.engine, "bf16", micro_steps=1, micro_batch_rows=1, parameters=P
    )["zero_optimization"]
    bucket = min(settings["reduce_bucket_size"], P)
    buckets = 2 if settings["overlap_comm"] and bucket < P else 1
    sums = 4 * P if stage == 1 else 0
    return 2 * P + 16 * P / world + sums + 4 * bucket * buckets


def activation_bytes(model: ModelConfig, tokens: int) -> float:
    """What a layer keeps for backward, in bf16, of each token: its input, q k v, attention's
    output, the two residual sums with the outputs of their LayerNorms, the input and output of
    GELU; and a byte for each dropout mask."""
    D, F = model.hidden_size, model.intermediate_size
    return tokens * (2 * (D + 3 * D + D + 4 * D + 2 * F) + 2 * D)


def attention_scratch_bytes(model: ModelConfig, tokens: float, runs: float) -> float:
    """The flash kernel's fp32 sums of dQ in backward; each of the runs is padded by up to 128."""
    return 4 * model.hidden_size * (tokens + 128 * runs)


def head_bytes(model: ModelConfig, predictions: float) -> float:
    """What the language-model head keeps for backward, in bf16, of each predicted position: its
    input, the input and output of GELU, LayerNorm's output, and the logits, in whose place their
    gradient comes."""
    return 2 * predictions * (4 * model.hidden_size + model.padded_vocab_size)


def memory_bytes(
    config: PretrainConfig,
    model: ModelConfig,
    phase: PhaseConfig,
    *,
    rows: int,
    sequences_a_row: float,
    world: int,
) -> float:
    """Estimate of one device's memory in bf16 with `rows` at once: states, activations, attention's
    scratch, the head.

    With activation checkpointing a layer keeps its input, and one layer works at a time.
    """
    shape = Shape.of(phase, config.data, config.objective)
    tokens, layers = rows * shape.row_len, model.num_hidden_layers
    layer = activation_bytes(model, tokens)
    if model.activation_checkpointing:
        activations = layers * tokens * 2 * model.hidden_size + layer
    else:
        activations = layers * layer
    head = head_bytes(model, rows * shape.predictions)
    states = state_bytes(config, model, world)
    scratch = attention_scratch_bytes(model, tokens, rows * (sequences_a_row + 1))  # 1: the tail
    return states + activations + scratch + head


def checkpoint_bytes(model: ModelConfig) -> float:
    """fp32 weights and two moments."""
    return 12 * parameter_count(model)


def snapshot_bytes(config: PretrainConfig, model: ModelConfig, world: int) -> float:
    """What a rank copies to host memory, which it keeps for it: its slice."""
    return checkpoint_bytes(model) / (world if config.engine.zero_stage >= 1 else 1)


def plan_phase(
    config: PretrainConfig, model: ModelConfig, layout: PhaseLayout, assumed: Assumed
) -> PhasePlan:
    phase, step, division = layout.phase, layout.traffic, layout.division
    gpus, rows = layout.world, phase.micro_batch_rows  # the most that a data set may make it
    if division is not None and not layout.assumed:
        rows = division.micro_batch_rows
    flops = training_flops(
        model,
        step.tokens,
        step.predictions,
        step.sequences,
        step.squares,
        next_sentence=config.data.paired,
    )
    seconds = flops / (gpus * assumed.peak_tflops * 1e12 * assumed.mfu)
    writing = checkpoint_bytes(model) / (assumed.write_gb_per_second * 1e9)
    between = config.checkpoint.every_steps * seconds
    stall = snapshot_bytes(config, model, gpus) / (assumed.copy_gb_per_second * 1e9)
    # A checkpoint that falls due while the one before is being written waits for it.
    stall += max(writing - between, 0) if config.checkpoint.asynchronous else writing
    return PhasePlan(
        steps=phase.steps,
        rows_per_step=step.rows,
        micro_steps=division and division.micro_steps,
        micro_batch_rows=division and division.micro_batch_rows,
        sequences_per_step=step.sequences,
        tokens_per_step=step.tokens,
        flops=flops * phase.steps,
        hours=seconds * phase.steps / 3600,
        step_seconds=seconds,
        memory_bytes=memory_bytes(
            config,
            model,
            phase,
            rows=rows,
            sequences_a_row=step.sequences / step.rows,
            world=gpus,
        ),
        checkpoint_share=writing / (between + writing),
        stall_seconds=stall,
        stall_share=stall / (between + stall),
    )


def _room(config: PretrainConfig, model: ModelConfig) -> DiskRoom:
    """What training asks of the disk of run_dir, from the newest checkpoint there on."""
    folder = Path(config.run_dir) / "checkpoints"
    begin = newest_step(folder)
    return disk_room(folder, config.checkpoint, parameter_count(model), begin, config.total_steps)


def main(argv: list[str]) -> int:
    p = parser(PretrainConfig, __doc__, prog="python -m pretrain plan")
    for x in fields(Assumed):
        kind, about = type(x.default), x.metadata
        p.add_argument(about["flag"], type=kind, default=x.default, help=about["help"])
    p.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    arguments = p.parse_args(argv)
    a = Assumed.read(arguments)
    config = load(arguments.config, PretrainConfig, arguments.overrides)
    if arguments.print_config:
        print(dump(config), end="")
        return 0
    dataset = Dataset(config.data, config.objective)
    if dataset.at_hand:
        size = vocabulary_size(config, dataset.manifest)
    else:
        size = config.model.vocab_size or _ASSUMED_VOCABULARY
    model = config.model.with_vocab_size(size)
    room = _room(config, model)
    warning = ""
    if dataset.at_hand:
        warning = room.check(config.checkpoint)
        layouts = look_ahead(config, dataset, a.gpus)
    else:  # another machine may be meant, so its disk is not judged by this one's
        assumed = [assumed_traffic(config, i, a.mean_fill) for i in range(len(config.phases))]
        layouts = lay_out(config, a.gpus, assumed)
    phases = [plan_phase(config, model, layout, a) for layout in layouts]
    hours = sum(x.hours for x in phases)
    found = {
        "gpus": a.gpus,
        "parameters": parameter_count(model),
        "hours": hours,
        "gpu_hours": hours * a.gpus,
        "eflop": sum(x.flops for x in phases) / 1e18,
        "memory_bytes": max(x.memory_bytes for x in phases),
        "checkpoint_bytes": checkpoint_bytes(model),
        "snapshot_bytes": snapshot_bytes(config, model, a.gpus),
        "disk_needed_bytes": max(room.needed, 0),
        "disk_free_bytes": room.free,
    }
    if arguments.json:
        print(json.dumps(found | {"phases": [vars(x) for x in phases]}))
        return 0
    lengths = f"{a.mean_fill:g} x max_seq_len assumed ({config.data.dir} is not there yet)"
    if dataset.at_hand:
        lengths = f"the first window of {config.data.dir}"
    _print(config, a, found, phases, layouts, lengths)
    if not dataset.at_hand:
        print(
            f"disk: needs {found['disk_needed_bytes'] / 1e9:.1f} GB at run_dir, "
            f"{room.free / 1e9:.1f} GB free on this machine"
        )
    if warning:
        print(f"warning: {warning}")
    return 0


def _print(
    config: PretrainConfig,
    a: Assumed,
    found: dict[str, float],
    phases: list[PhasePlan],
    layouts: list[PhaseLayout],
    lengths: str,
) -> None:
    """The page of a plan; `lengths`: where those of the sequences are from."""
    print(
        f"{found['parameters'] / 1e6:.1f} M parameters, {a.gpus} devices of "
        f"{a.peak_tflops:g} TFLOP/s at {100 * a.mfu:g} % (assumed), lengths: {lengths}\n"
    )
    head = "phase,length,steps,tokens/step,step s,EFLOP,hours,GB a device,ckpt stall".split(",")
    rows = [
        (
            f"{i + 1}",
            f"{phase.max_seq_len}",
            f"{x.steps:,}",
            f"{x.tokens_per_step / 1e6:.3f} M",
            f"{x.step_seconds:.2f}",
            f"{x.flops / 1e18:.3f}",
            f"{x.hours:.2f}",
            f"{x.memory_bytes / 1e9:.1f}",
            f"{100 * x.stall_share:.3f} %",
        )
        for i, (phase, x) in enumerate(zip(config.phases, phases, strict=True))
    ]
    show("\n".join([*table([head, *rows]), ""]))
    for layout in layouts:
        print(layout.line() + layout.doubt())
    size, copied = found["checkpoint_bytes"], found["snapshot_bytes"]
    kept = config.checkpoint.keep_last
    how = "" if config.checkpoint.asynchronous else " and waits until all is written"
    print(
        f"\nin all {found['hours']:.2f} hours, {found['gpu_hours']:.1f} device hours, "
        f"{found['eflop']:.3g} EFLOP\n"
        f"a checkpoint is {size / 1e9:.2f} GB ({kept} kept: {kept * size / 1e9:.1f} GB), every "
        f"{config.checkpoint.every_steps} steps\n"
        f"`ckpt stall` is the most of the time that training waits for them: a rank copies "
        f"{copied / 1e9:.2f} GB\nto host memory at {a.copy_gb_per_second:g} GB/s (assumed)"
        f"{how}: {max(x.stall_seconds for x in phases):.2f} s a checkpoint, where writing takes "
        f"{size / a.write_gb_per_second / 1e9:.1f} s at {a.write_gb_per_second:g} GB/s\n"
        f"and would cost {100 * max(x.checkpoint_share for x in phases):.2f} % of the time if "
        "training waited for it\n"
        "memory is an estimate for bf16"
    )
