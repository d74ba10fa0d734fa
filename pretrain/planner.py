"""The arithmetic of `python -m pretrain plan`: seconds of a step by cause, hours of a run, and the
number of devices beyond which more do not help."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from core.errors import UserError
from data_pipeline.stream.dataset import Dataset
from data_pipeline.stream.plan import Shape
from pretrain.checkpoint import begun
from pretrain.config import PhaseConfig, PretrainConfig
from pretrain.flops import CPU, PEAK_TFLOPS, training_flops
from pretrain.layout import (
    PhaseLayout,
    Traffic,
    assumed_traffic,
    evaluated_lengths,
    lay_out,
    look_ahead,
    vocabulary_size,
)
from pretrain.measured import Measured
from pretrain.memory import (
    checkpoint_bytes,
    gradient_buckets,
    memory_bytes,
    parameter_count,
    snapshot_bytes,
)
from pretrain.model import ModelConfig

# bert-base-uncased's, for plans made before there is a data set.
_ASSUMED_VOCABULARY = 30522
_LAUNCH_SECONDS = 1.5e-3  # of the host, a layer and micro-step; not measured on a GPU
_LOOP_SECONDS = 4e-3  # between two steps on the host: losses, records, the next rate; assumed
_HOP_SECONDS = 15e-6  # latency of a doubling of the ranks in a collective; assumed
_BACKWARD = 2 / 3  # of a micro-step
_GOOD = 0.8  # share of the time that the devices compute, below which scaling is said to end


def _flag_name(device: str) -> str:
    return device.lower().replace(" ", "-")


DEVICES = {_flag_name(name): peak for name, peak in PEAK_TFLOPS.items()}


@dataclass(frozen=True)
class Assumed:
    """What a plan is told or takes; `run`: then its rates stand for the device's."""

    gpus: int
    device: str
    peak_tflops: float
    mfu: float = 0.4  # on one H100 0.41 at 128 and 0.39 at 512: records/2026-11-26-gpu
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
    bucket, overlaps, width = gradient_buckets(config, P)
    per_byte, hops = 1 / (assumed.network_gb_per_second * 1e9), _HOP_SECONDS * math.log2(ranks)
    share, buckets = (ranks - 1) / ranks, -(-P // bucket)
    rounds = micro_steps if stage == 2 else 1
    weights = 0 if stage == 0 else 4 if precision_of(config, assumed) == "fp32" else 2
    reduced = 2 * width * P * share
    one = reduced * per_byte + buckets * hops
    shown = one
    if overlaps and assumed.computes_by_itself:
        shown = max(one - _BACKWARD * micro_step, one / buckets)
    gathered = weights * P * share
    last = gathered * per_byte + hops * (stage > 0)
    return rounds * reduced + gathered, rounds * one + last, rounds * shown + last


def precision_of(config: PretrainConfig, assumed: Assumed) -> str:
    auto = "bf16" if assumed.computes_by_itself else "fp32"
    return auto if config.engine.precision == "auto" else config.engine.precision


def step_terms(
    config: PretrainConfig, model: ModelConfig, layout: PhaseLayout, assumed: Assumed
) -> tuple[Terms, float, float]:
    """(seconds of a step, bytes that a device sends for it, share of their time that is hidden).

    A run's own rate holds what it lost to launching, network and loop on as many devices as it
    had: only what more of them lose on top is added.
    """
    n, step, run = layout.world, layout.traffic, assumed.run
    # A run's rate is of FLOPs counted as for equal lengths, as the step's record counts them.
    flops = _flops(config, model, step, equal_lengths=run is not None)
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


def _flops(
    config: PretrainConfig, model: ModelConfig, step: Traffic, *, equal_lengths: bool = False
) -> float:
    return training_flops(
        model,
        step.tokens,
        step.predictions,
        step.sequences,
        None if equal_lengths else step.squares,
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
            precision=precision_of(config, assumed),
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
    up_to: int, done: int = 0,
) -> tuple[list[Scale], str]:  # fmt: skip
    """On 1, 2, 4 ... `up_to` devices; and what ends it, in a line. done: phases that are over."""
    counts = sorted({2**i for i in range(up_to.bit_length()) if 2**i <= up_to} | {assumed.gpus})
    lines = []
    for gpus in counts:
        try:
            layouts = lay_out(config, gpus, traffic, done=done)
        except UserError as error:
            lines.append(Scale(gpus, refused=str(error)))
            continue
        undivided = [x.doubt() for x in layouts[done:] if x.division is None]
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


@dataclass(frozen=True)
class Plan:
    config: PretrainConfig
    model: ModelConfig
    assumed: Assumed
    layouts: list[PhaseLayout]
    phases: list[PhasePlan]
    done: int = 0  # phases that are over, by the newest checkpoint of run_dir

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
    """All phases. UserError for what training would refuse: vocabulary, held-out text and the rows
    of the phases that are left after the newest checkpoint of run_dir."""
    done = 0
    if dataset.at_hand:
        size = vocabulary_size(config, dataset)
        done, rows = begun(config)
        layouts = look_ahead(config, dataset, assumed.gpus, done=done, rows=rows)
    else:
        size = config.model.vocab_size or _ASSUMED_VOCABULARY
        fill = assumed.mean_fill
        traffic = [assumed_traffic(config, i, fill) for i in range(len(config.phases))]
        layouts = lay_out(config, assumed.gpus, traffic)
    model = config.model.with_vocab_size(size)
    phases = [plan_phase(config, model, layout, assumed) for layout in layouts]
    return Plan(config, model, assumed, layouts, phases, done)


def assume(
    config: PretrainConfig, gpus: int | None = None, device: str | None = None,
    run: Measured | None = None, **told: float,
) -> Assumed:  # fmt: skip
    """What is not told is a run's, else the default of the device, a name of `PEAK_TFLOPS`."""
    on_cpus = config.device == "cpu" or (run is not None and run.on_cpus)
    device = _flag_name(device or (CPU if on_cpus else "h100"))
    cpu = device == CPU
    peak = config.logging.peak_tflops or DEVICES[device] * (max(config.threads, 1) if cpu else 1)
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


def duration(hours: float) -> str:
    """Three digits in the unit that suits."""
    seconds = 3600 * hours
    for size, unit in ((86400 * 3, "days"), (3600, "h"), (60, "min"), (1, "s")):
        if seconds >= size:
            return f"{seconds / (86400 if unit == 'days' else size):.3g} {unit}"
    return f"{1e3 * seconds:.3g} ms"
