"""GPUs in; rows, micro-steps, hours, memory, FLOPs and checkpoint bytes out, before any is rented.
With a data set, what training would refuse of vocabulary, held-out text, rows and free disk is
refused here in the same line, where the disk is that of run_dir, or of the nearest folder above
it, on this machine. Without one, lengths are assumed and only rows that no data set could mend are
refused; the disk is shown and not judged.

A step is the device's arithmetic, what the host's launching exceeds it by (small micro-batches),
what of the network backward does not hide, and the loop. The second table has these on 1 to
--up-to devices. --from RUN takes a run's own rates for the device's, --hours makes steps of them.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from configs.load import dump, load, parser
from core.console import show, table
from core.errors import UserError
from data_pipeline.stream.dataset import Dataset
from data_pipeline.stream.plan import Shape
from pretrain import deepspeed_door
from pretrain.checkpoint import DiskRoom, disk_room, newest_step
from pretrain.config import PhaseConfig, PretrainConfig, load_run
from pretrain.flops import CPU, PEAK_TFLOPS, training_flops
from pretrain.layout import (
    PhaseLayout,
    Traffic,
    assumed_traffic,
    batch_warnings,
    evaluated_lengths,
    lay_out,
    look_ahead,
    vocabulary_size,
)
from pretrain.measured import Measured, measured
from pretrain.model import BertForPreTraining, ModelConfig

# bert-base-uncased's, for plans made before there is a data set.
_ASSUMED_VOCABULARY = 30522
_LAUNCH_SECONDS = 1.5e-3  # of the host, a layer and micro-step; not measured on a GPU
_LOOP_SECONDS = 4e-3  # between two steps on the host: losses, records, the next rate; assumed
_HOP_SECONDS = 15e-6  # latency of a doubling of the ranks in a collective; assumed
_BACKWARD = 2 / 3  # of a micro-step
_GOOD = 0.8  # share of the time that the devices compute, below which scaling is said to end


def _flag_name(device: str) -> str:
    return device.lower().replace(" ", "-")


_DEVICES = {_flag_name(name): peak for name, peak in PEAK_TFLOPS.items()}


@dataclass(frozen=True)
class Assumed:
    """What a plan is told or takes; `run`: then its rates stand for the device's."""

    gpus: int
    device: str
    peak_tflops: float
    mfu: float = 0.45
    mean_fill: float = 1.0
    network_gb_per_second: float = 340.0
    write_gb_per_second: float = 1.0
    copy_gb_per_second: float = 2.0
    run: Measured | None = field(default=None, repr=False)

    @property
    def computes_by_itself(self) -> bool:
        """Whether the host launches ahead of the device and sends beside it."""
        return self.device != CPU

    def tflops(self, phase: PhaseConfig) -> float:
        """That a device reaches while it computes."""
        if self.run is not None:
            return self.run.tflops_at(phase.max_seq_len)
        return self.peak_tflops * self.mfu


@functools.cache
def parameter_count(config: ModelConfig) -> int:
    """Parameters with the vocabulary's padding, as they lie in memory."""
    with torch.device("meta"):
        model = BertForPreTraining(config, generator=None)
    return sum(p.numel() for p in model.parameters())


@dataclass(frozen=True)
class Terms:
    """Seconds of a step, which add up to it."""

    device: float  # arithmetic
    batch: float  # that the host's launching takes longer, as with small micro-batches
    network: float  # that backward does not hide
    loop: float

    @property
    def step(self) -> float:
        return self.device + self.batch + self.network + self.loop

    @property
    def lost_to(self) -> str:
        """The longest of those that are not the device's."""
        return max(("batch", "network", "loop"), key=lambda name: getattr(self, name))


@dataclass(frozen=True)
class PhasePlan:
    steps: int
    max_seq_len: int
    mean_fill: float  # mean length of the sequences over max_seq_len
    rows_per_step: int
    micro_steps: int | None  # None: assumed rows do not divide by the ranks
    micro_batch_rows: int | None  # at once, on a device
    sequences_per_step: float
    tokens_per_step: float
    flops: float  # of the whole phase
    hours: float  # with checkpoints and evaluations
    step_seconds: float
    seconds: Terms
    tokens_per_second: float  # of all devices
    network_bytes: float  # that a device sends a step
    network_hidden_share: float  # of their time, behind backward
    memory_bytes: float  # of one device
    checkpoint_share: float  # of the time, if training waited for the writing
    stall_seconds: float  # that a checkpoint holds training up, as configured
    stall_share: float  # of the time


def _deepspeed(config: PretrainConfig, parameters: int) -> tuple[int, bool, int]:
    """(elements of a bucket of gradients, whether it is sent beside backward, bytes an element)"""
    settings = deepspeed_door.settings(
        config.engine, "bf16", micro_steps=1, micro_batch_rows=1, parameters=parameters
    )
    zero = settings.get("zero_optimization", {})
    bucket = min(zero.get("reduce_bucket_size", parameters), parameters)
    width = 4 if settings["communication_data_type"] == "fp32" else 2
    return bucket, zero.get("overlap_comm", False), width if config.engine.zero_stage else 4


def network(
    config: PretrainConfig, model: ModelConfig, ranks: int, micro_steps: int, micro_step: float,
    assumed: Assumed,
) -> tuple[float, float, float]:  # fmt: skip
    """(bytes that a device sends a step, seconds of them, seconds that backward does not hide).

    Gradients are all-reduced, in a ring 2 (n-1)/n of them: at stages 0 and 1 once a step, at stage
    2 once a micro-step; from stage 1 on the weights are gathered behind the update, which nothing
    hides. All but the last bucket may hide behind a backward, which takes two thirds of the
    `micro_step` seconds. On CPUs nothing does: the same cores send."""
    P, stage = parameter_count(model), config.engine.zero_stage
    bucket, overlaps, width = _deepspeed(config, P)
    per_byte, hops = 1 / (assumed.network_gb_per_second * 1e9), _HOP_SECONDS * math.log2(ranks)
    share, buckets = (ranks - 1) / ranks, -(-P // bucket)
    rounds = micro_steps if stage == 2 else 1
    weights = 0 if stage == 0 else 4 if _precision(config, assumed) == "fp32" else 2
    reduced = 2 * width * P * share
    one = reduced * per_byte + buckets * hops
    shown = one
    if overlaps and assumed.computes_by_itself:
        shown = max(one - _BACKWARD * micro_step, one / buckets)
    gathered = weights * P * share
    last = gathered * per_byte + hops * (stage > 0)
    return rounds * reduced + gathered, rounds * one + last, rounds * shown + last


def _precision(config: PretrainConfig, assumed: Assumed) -> str:
    auto = "bf16" if assumed.computes_by_itself else "fp32"
    return auto if config.engine.precision == "auto" else config.engine.precision


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
    bucket, overlaps, _ = _deepspeed(config, P)
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


def checkpoint_bytes(model: ModelConfig) -> float:
    """fp32 weights and two moments."""
    return 12 * parameter_count(model)


def snapshot_bytes(config: PretrainConfig, model: ModelConfig, world: int) -> float:
    """What a rank copies to host memory, which it keeps for it: its slice."""
    return checkpoint_bytes(model) / (world if config.engine.zero_stage >= 1 else 1)


def step_terms(
    config: PretrainConfig, model: ModelConfig, layout: PhaseLayout, assumed: Assumed
) -> tuple[Terms, float, float]:
    """(seconds of a step, bytes that a device sends for it, share of their time that is hidden).

    A run's own rate holds what it lost to launching, network and loop on as many devices as it
    had: only what more of them lose on top is added.
    """
    n, step, run = layout.world, layout.traffic, assumed.run
    flops = _flops(config, model, step)
    device = flops / (n * assumed.tflops(layout.phase) * 1e12)
    micro_steps = _micro_steps(layout, n)
    launch = _LAUNCH_SECONDS * model.num_hidden_layers * micro_steps
    batch = max(launch - device, 0) if assumed.computes_by_itself else launch
    loop = _LOOP_SECONDS
    micro_step = (device + batch) / micro_steps
    sent, seconds, shown = network(config, model, n, micro_steps, micro_step, assumed)
    hidden = 1 - shown / seconds if seconds else 0.0
    if run is not None:
        ranks = run.world or 1
        own = network(config, model, ranks, _micro_steps(layout, ranks), micro_step, assumed)
        shown, loop = max(shown - own[2], 0.0), 0.0
        batch = batch if assumed.computes_by_itself else 0.0
    return Terms(device, batch, shown, loop), sent, hidden


def _micro_steps(layout: PhaseLayout, ranks: int) -> int:
    """On so many ranks, whether they divide the rows or not."""
    if layout.division is not None and layout.world == ranks:
        return layout.division.micro_steps
    return max(-(-layout.traffic.rows // (ranks * layout.phase.micro_batch_rows)), 1)


def _flops(config: PretrainConfig, model: ModelConfig, step: Traffic) -> float:
    return training_flops(
        model,
        step.tokens,
        step.predictions,
        step.sequences,
        step.squares,
        next_sentence=config.data.paired,
    )


def plan_phase(
    config: PretrainConfig, model: ModelConfig, layout: PhaseLayout, assumed: Assumed
) -> PhasePlan:
    phase, step, division = layout.phase, layout.traffic, layout.division
    gpus, rows = layout.world, phase.micro_batch_rows  # the most that a data set may make it
    if division is not None and not layout.assumed:
        rows = division.micro_batch_rows
    terms, sent, hidden = step_terms(config, model, layout, assumed)
    seconds, flops = terms.step, _flops(config, model, step)
    writing = checkpoint_bytes(model) / (assumed.write_gb_per_second * 1e9)
    between = config.checkpoint.every_steps * seconds
    stall = snapshot_bytes(config, model, gpus) / (assumed.copy_gb_per_second * 1e9)
    # A checkpoint that falls due while the one before is being written waits for it.
    stall += max(writing - between, 0) if config.checkpoint.asynchronous else writing
    # Forward alone, a third of training's arithmetic, on rows of each length that is evaluated.
    row_lens = {
        p.max_seq_len: Shape.of(p, config.data, config.objective).row_len for p in config.phases
    }
    tokens = sum(row_lens[length] for length in evaluated_lengths(config, layout.index))
    share = config.evaluation.rows * tokens / (step.rows * layout.row_len)
    evaluation = share * terms.device / 3
    each = evaluation / config.evaluation.every_steps if config.evaluation.every_steps else 0.0
    each += seconds + stall / config.checkpoint.every_steps
    return PhasePlan(
        steps=phase.steps,
        max_seq_len=phase.max_seq_len,
        mean_fill=step.tokens / (step.sequences * phase.max_seq_len),
        rows_per_step=step.rows,
        micro_steps=division and division.micro_steps,
        micro_batch_rows=division and division.micro_batch_rows,
        sequences_per_step=step.sequences,
        tokens_per_step=step.tokens,
        flops=flops * phase.steps,
        hours=each * phase.steps / 3600,
        step_seconds=seconds,
        seconds=terms,
        tokens_per_second=step.tokens / seconds,
        network_bytes=sent,
        network_hidden_share=hidden,
        memory_bytes=memory_bytes(
            config,
            model,
            phase,
            rows=rows,
            sequences_a_row=step.sequences / step.rows,
            world=gpus,
            precision=_precision(config, assumed),
        ),
        checkpoint_share=writing / (between + writing),
        stall_seconds=stall,
        stall_share=stall / (between + stall),
    )


@dataclass(frozen=True)
class Scale:
    """The same run on so many devices. refused: why it cannot be; then the rest is 0."""

    gpus: int
    hours: float = 0.0
    gpu_hours: float = 0.0
    busy: float = 0.0  # share of the time that the devices compute
    network: float = 0.0  # share of the time
    tokens_at_once: float = 0.0  # of a device, the least of the phases
    lost_to: str = ""
    refused: str = ""


def scaling(
    config: PretrainConfig, model: ModelConfig, traffic: Sequence[Traffic], assumed: Assumed,
    up_to: int,
) -> tuple[list[Scale], str]:  # fmt: skip
    """On 1, 2, 4 ... `up_to` devices; and what ends it, in a line."""
    counts = sorted({2**i for i in range(up_to.bit_length()) if 2**i <= up_to} | {assumed.gpus})
    lines = []
    for gpus in counts:
        try:
            layouts = lay_out(config, gpus, traffic)
        except UserError as error:
            lines.append(Scale(gpus, refused=str(error)))
            continue
        undivided = [x.doubt() for x in layouts if x.division is None]
        if undivided:
            lines.append(Scale(gpus, refused=undivided[0].strip(" ()")))
            continue
        plans = [plan_phase(config, model, layout, assumed) for layout in layouts]
        hours = sum(p.hours for p in plans)
        spent = {
            name: sum(p.steps * getattr(p.seconds, name) for p in plans) / 3600
            for name in ("device", "batch", "network", "loop")
        }
        lines.append(
            Scale(
                gpus=gpus,
                hours=hours,
                gpu_hours=hours * gpus,
                busy=spent["device"] / hours,
                network=spent["network"] / hours,
                tokens_at_once=min(
                    p.tokens_per_step / gpus / p.micro_steps for p in plans if p.micro_steps
                ),
                lost_to=Terms(**spent).lost_to,
            )
        )
    return lines, _scaling_end(lines)


def _scaling_end(lines: Sequence[Scale]) -> str:
    """Up to how many devices at least `_GOOD` of the time is arithmetic, and what ends it."""
    good = [x for x in lines if not x.refused and x.busy >= _GOOD]
    if not good:
        first = next((x for x in lines if not x.refused), None)
        if first is None:
            return "scaling: no number of devices up to these divides the rows a step"
        return f"scaling: of {first.gpus} device(s) {first.busy:.0%} is busy; {_why(first)}"
    last = good[-1]
    beyond = [x for x in lines if x.gpus > last.gpus]
    if not beyond:
        return f"scaling: {last.gpus} devices compute {last.busy:.0%} of the time"
    return f"scaling: well up to {last.gpus} device(s) ({last.busy:.0%} busy); {_why(beyond[0])}"


def _why(line: Scale) -> str:
    if line.refused:
        return f"the batch ends it: its rows do not divide by {line.gpus}"
    causes = {
        "batch": f"the batch ends it: {line.tokens_at_once:,.0f} tokens at once keep no device "
        "busy while the host launches",
        "network": "the network ends it",
        "loop": "the batch ends it: beside so short a step the loop between two shows",
    }
    return f"{causes[line.lost_to]} ({line.busy:.0%} busy at {line.gpus})"


def within_hours(config: PretrainConfig, plans: Sequence[PhasePlan], hours: float) -> list[int]:
    """Steps of each phase, in the same proportion, that take no more than `hours`."""
    share = hours / sum(p.hours for p in plans)
    steps = [math.floor(phase.steps * share) for phase in config.phases]
    if min(steps) == 0:
        raise UserError(
            f"--hours {hours:g}: less than a step of phase {steps.index(0) + 1}; all phases take "
            f"{duration(sum(p.hours for p in plans))}"
        )
    return steps


def _room(config: PretrainConfig, model: ModelConfig) -> DiskRoom:
    """What training asks of the disk of run_dir, from the newest checkpoint there on."""
    folder = Path(config.run_dir) / "checkpoints"
    begin = newest_step(folder)
    return disk_room(folder, config.checkpoint, parameter_count(model), begin, config.total_steps)


@dataclass(frozen=True)
class Plan:
    config: PretrainConfig
    model: ModelConfig
    assumed: Assumed
    layouts: list[PhaseLayout]
    phases: list[PhasePlan]

    @property
    def hours(self) -> float:
        return sum(p.hours for p in self.phases)

    def hours_from(self, step: int) -> float:
        """What is left of them at a step of the run."""
        left = 0.0
        for p in self.phases:
            left += p.hours * max(1 - max(step, 0) / p.steps, 0)
            step -= p.steps
        return left


def plan(config: PretrainConfig, dataset: Dataset, assumed: Assumed) -> Plan:
    """UserError for what training would refuse of rows, vocabulary and held-out text."""
    if dataset.at_hand:
        size = vocabulary_size(config, dataset.manifest)
        layouts = look_ahead(config, dataset, assumed.gpus)
    else:
        size = config.model.vocab_size or _ASSUMED_VOCABULARY
        fill = assumed.mean_fill
        traffic = [assumed_traffic(config, i, fill) for i in range(len(config.phases))]
        layouts = lay_out(config, assumed.gpus, traffic)
    model = config.model.with_vocab_size(size)
    phases = [plan_phase(config, model, layout, assumed) for layout in layouts]
    return Plan(config, model, assumed, layouts, phases)


def assume(
    config: PretrainConfig, gpus: int | None = None, device: str | None = None,
    run: Measured | None = None, **told: float,
) -> Assumed:  # fmt: skip
    """What is not told is a run's, else the default of the device, a name of `PEAK_TFLOPS`."""
    on_cpus = config.device == "cpu" or (run is not None and run.on_cpus)
    device = _flag_name(device or (CPU if on_cpus else "h100"))
    cpu = device == CPU
    peak = config.logging.peak_tflops or _DEVICES[device] * (max(config.threads, 1) if cpu else 1)
    if run is not None:
        found = {
            "network_gb_per_second": run.all_reduce_gb_per_second,
            "write_gb_per_second": run.write_gb_per_second,
            "copy_gb_per_second": run.copy_gb_per_second,
        }
        told = {name: value for name, value in found.items() if value} | told
        gpus = gpus or run.world
    if cpu:
        told = {"network_gb_per_second": 1.0} | told
    return Assumed(gpus=gpus or (1 if cpu else 8), device=device, peak_tflops=peak, run=run, **told)


def main(argv: list[str]) -> int:
    p = parser(PretrainConfig, __doc__, prog="python -m pretrain plan", config_required=False)
    p.add_argument(
        "--from", dest="run", metavar="RUN", help="a run folder: its rates, and without --config "
        "its config",
    )  # fmt: skip
    p.add_argument("--hours", type=float, help="make steps of so many hours, in proportion")
    p.add_argument("--gpus", type=int, help="devices in all (default: RUN's, else 8, of CPUs 1)")
    peaks = ", ".join(f"{name} {peak:g}" for name, peak in _DEVICES.items())
    p.add_argument(
        "--device", choices=_DEVICES, metavar="NAME",
        help=f"dense bf16 peaks in TFLOP/s: {peaks} a core; another peak: "
        "--set logging.peak_tflops=X (default: cpu where the config says so, else h100)",
    )  # fmt: skip
    defaults = {x.name: x.default for x in dataclasses.fields(Assumed)}
    told = {
        "--mfu": "share of the peak that is reached; measure yours by --from",
        "--mean-fill": "mean length over max_seq_len, used while there is no data set",
        "--network-gb-per-second": "bus bandwidth of an all-reduce (of CPUs 1)",
        "--write-gb-per-second": "speed of the checkpoint disk",
        "--copy-gb-per-second": "from a device to host memory",
    }
    for flag, text in told.items():
        default = defaults[flag.strip("-").replace("-", "_")]
        p.add_argument(flag, type=float, metavar="X", help=f"{text} (default {default:g})")
    p.add_argument("--up-to", type=int, default=512, help="most devices of the second table")
    p.add_argument("--json", action="store_true", help="one JSON object instead of the tables")
    arguments = p.parse_args(argv)
    if arguments.run and (arguments.device or arguments.mfu):
        p.error("--from: a run's rates take no --device and no --mfu")
    if not arguments.config and not arguments.run:
        p.error("the following arguments are required: --config, or --from")
    for flag in ("--gpus", "--hours", "--up-to", *told):
        value = getattr(arguments, flag.strip("-").replace("-", "_"))
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"{flag}: {value} is not above 0")
    path = arguments.config or Path(arguments.run, "config.yaml")

    def configuration(*more: str) -> PretrainConfig:
        overrides = [*arguments.overrides, *more]
        if arguments.config:
            return load_run(path, overrides)
        return load(path, PretrainConfig, overrides)

    config = configuration()
    if arguments.print_config:
        print(dump(config), end="")
        return 0
    named = {flag.strip("-").replace("-", "_") for flag in told}
    assumed = assume(
        config, arguments.gpus, arguments.device,
        measured(Path(arguments.run)) if arguments.run else None,
        **{name: getattr(arguments, name) for name in named if getattr(arguments, name)},
    )  # fmt: skip
    dataset = Dataset(config.data, config.objective)
    found = plan(config, dataset, assumed)
    set_ = ""
    if arguments.hours:
        steps = within_hours(config, found.phases, arguments.hours)
        keys = [f"phases.{i}.steps={n}" for i, n in enumerate(steps)]
        set_ = f"--set {' '.join(keys)}"
        config = configuration(*keys)
        found = plan(config, dataset, assumed)
    room = _room(config, found.model)
    # Without a data set another machine may be meant, so its disk is not judged by this one's.
    warning = room.check(config.checkpoint) if dataset.at_hand else ""
    traffic = [x.traffic for x in found.layouts]
    lines, end = scaling(config, found.model, traffic, assumed, arguments.up_to)
    if arguments.json:
        print(json.dumps(_plain(found, room) | {"set": set_ or None, "scaling_end": end}
                         | {"scaling": [vars(x) for x in lines]}))  # fmt: skip
        return 0
    _print(found, dataset.at_hand)
    _print_scaling(lines, end)
    if set_:
        print(f"\n{arguments.hours:g} hours on {assumed.gpus} device(s):\n    {set_}")
    if not dataset.at_hand:
        print(
            f"disk: needs {max(room.needed, 0) / 1e9:.1f} GB at run_dir, "
            f"{room.free / 1e9:.1f} GB free on this machine"
        )
    if warning:
        print(f"warning: {warning}")
    return 0


def _plain(found: Plan, room: DiskRoom) -> dict[str, object]:
    a, model, hours = found.assumed, found.model, found.hours
    return dataclasses.asdict(a) | {
        "parameters": parameter_count(model),
        "hours": hours,
        "gpu_hours": hours * a.gpus,
        "eflop": sum(x.flops for x in found.phases) / 1e18,
        "memory_bytes": max(x.memory_bytes for x in found.phases),
        "checkpoint_bytes": checkpoint_bytes(model),
        "snapshot_bytes": snapshot_bytes(found.config, model, a.gpus),
        "disk_needed_bytes": max(room.needed, 0),
        "disk_free_bytes": room.free,
        "phases": [dataclasses.asdict(x) for x in found.phases],
    }


def _print(found: Plan, at_hand: bool) -> None:
    config, model, a, phases = found.config, found.model, found.assumed, found.phases
    print(f"{parameter_count(model) / 1e6:.1f} M parameters, ", end="")
    if a.run is None:
        reached = f"{100 * a.mfu:g} % of it reached (assumed)"
        print(f"{a.gpus} x {a.device}: {a.peak_tflops:g} TFLOP/s each, {reached}")
    else:
        print(f"{a.gpus} device(s) at the rates of {a.run.run}:")
        for length, rate in sorted(a.run.tokens_per_second.items()):
            share = f", MFU {a.run.mfu[length]:.1%}" if length in a.run.mfu else ""
            print(
                f"  at {length}: {rate:,.0f} tokens/s of {a.run.world or 'all'} device(s), "
                f"{a.run.tflops[length]:.3g} TFLOP/s each{share}"
            )
        if a.run.stall_share is not None:
            print(f"  checkpoints held it up for {a.run.stall_share:.3%} of the time")
    fills = ", ".join(f"{x.mean_fill:.2g}" for x in phases)
    whence = "the first window of" if at_hand else "--mean-fill; not there yet:"
    print(f"mean length over max_seq_len: {fills} ({whence} {config.data.dir})\n")
    head = "phase,length,steps,tokens/step,step,FLOP,time,memory,ckpt stall".split(",")
    rows = [
        (
            f"{i + 1}",
            f"{x.max_seq_len}",
            f"{x.steps:,}",
            _unit(x.tokens_per_step, ""),
            duration(x.step_seconds / 3600),
            _unit(x.flops, ""),
            duration(x.hours),
            _unit(x.memory_bytes, "B"),
            f"{100 * x.stall_share:.3f} %",
        )
        for i, x in enumerate(phases)
    ]
    show("\n".join([*table([head, *rows]), ""]))
    for layout in found.layouts:
        print(layout.line() + layout.doubt())
        phase, step = layout.phase, layout.traffic
        known = not step.assumed or phase.rows_per_step is None
        sequences = step.sequences if known else phase.sequences_per_step
        for line in batch_warnings(layout.index, phase, config.optimizer.name, sequences):
            _say(f"warning: {line}")
    size, copied = checkpoint_bytes(model), snapshot_bytes(config, model, a.gpus)
    kept, waits = config.checkpoint.keep_last, not config.checkpoint.asynchronous
    word = "measured" if a.run is not None else "assumed"
    print()
    _say(
        f"in all {duration(found.hours)}, {duration(found.hours * a.gpus)} of device time, "
        f"{_unit(sum(x.flops for x in phases), 'FLOP')}"
    )
    if a.gpus > 1:
        sent = max(phases, key=lambda x: x.network_bytes)
        _say(
            f"network: a device sends {_unit(sent.network_bytes, 'B')} a step at "
            f"{a.network_gb_per_second:g} GB/s ({word}), {sent.network_hidden_share:.0%} of the "
            "time for it behind backward"
        )
    _say(
        f"a checkpoint is {_unit(size, 'B')} ({kept} kept: {_unit(kept * size, 'B')}), every "
        f"{config.checkpoint.every_steps} steps: a rank copies {_unit(copied, 'B')} "
        f"at {a.copy_gb_per_second:.3g} GB/s{', waits until all is written' if waits else ''} "
        f"and stands still for {duration(max(x.stall_seconds for x in phases) / 3600)}; writing "
        f"takes {duration(size / a.write_gb_per_second / 3.6e12)} "
        f"at {a.write_gb_per_second:.3g} GB/s ({word}), "
        f"{100 * max(x.checkpoint_share for x in phases):.2f} % of the time if training waited"
    )
    _say(f"memory is an estimate for {_precision(config, a)}")


def _print_scaling(lines: Sequence[Scale], end: str) -> None:
    head = "devices,time,device time,busy,network,tokens at once,lost to".split(",")
    rows = [
        (
            f"{x.gpus}",
            duration(x.hours),
            duration(x.gpu_hours),
            f"{x.busy:.0%}",
            f"{x.network:.1%}",
            f"{x.tokens_at_once:,.0f}",
            x.lost_to,
        )
        for x in lines
        if not x.refused
    ]
    print()
    show("\n".join(table([head, *rows])))
    _say(end)


def _say(text: str) -> None:
    """A paragraph of 80 columns."""
    show("\n".join(textwrap.wrap(text, 80, subsequent_indent="  ")))


def duration(hours: float) -> str:
    """Three digits in the unit that suits."""
    seconds = 3600 * hours
    for size, unit in ((86400 * 3, "days"), (3600, "h"), (60, "min"), (1, "s")):
        if seconds >= size:
            return f"{seconds / (86400 if unit == 'days' else size):.3g} {unit}"
    return f"{1e3 * seconds:.3g} ms"


def _unit(value: float, what: str) -> str:
    """Three digits with k, M, G, T, P or E."""
    power = min(max(int(math.log10(max(value, 1)) // 3), 0), 6)
    return f"{value / 1000**power:.3g} {('', 'k', 'M', 'G', 'T', 'P', 'E')[power]}{what}".rstrip()
