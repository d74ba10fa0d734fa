"""GPUs in; rows, micro-steps, hours, memory, FLOPs and checkpoint bytes out, before any is rented.
With a data set, what training would refuse at once of its first and last shard, vocabulary,
held-out text, rows and free disk is refused here in the same line, where the disk is that of
run_dir, or of the nearest folder above it, on this machine. Without one, lengths are assumed and
only rows that no data set could mend are refused; the disk is shown and not judged.

A step is the device's arithmetic, what the host's launching exceeds it by (small micro-batches),
what of the network backward does not hide, and the loop. The second table has these on 1 to
--up-to devices. --from RUN takes a run's own rates for the device's, --hours makes steps of them.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from configs.load import differences, dump, load, parser
from core.console import notice, printable, quantity, show, table, wrap
from core.errors import UserError
from data_pipeline.stream.dataset import Dataset
from pretrain import preflight
from pretrain.checkpoint import DiskRoom, disk_room, newest_step
from pretrain.config import PretrainConfig, load_run
from pretrain.layout import batch_warnings
from pretrain.measured import measured
from pretrain.memory import checkpoint_bytes, parameter_count, snapshot_bytes
from pretrain.model import ModelConfig
from pretrain.planner import (
    DEVICES,
    Assumed,
    Plan,
    Scale,
    assume,
    duration,
    plan,
    precision_of,
    scaling,
    within_hours,
)


def main(argv: list[str]) -> int:
    p = parser(PretrainConfig, __doc__, prog="python -m pretrain plan", config_required=False)
    p.add_argument(
        "--from", dest="run", metavar="RUN", help="a run folder: its rates, and without --config "
        "its config",
    )  # fmt: skip
    p.add_argument("--hours", type=float, help="make steps of so many hours, in proportion")
    p.add_argument("--gpus", type=int, help="devices in all (default: RUN's, else 8, of CPUs 1)")
    peaks = ", ".join(f"{name} {peak:g}" for name, peak in DEVICES.items())
    p.add_argument(
        "--device", choices=DEVICES, metavar="NAME",
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
        if flag in ("--mfu", "--mean-fill") and value is not None and value > 1:
            raise UserError(f"{flag}: {value:g} is above 1, and it is a share")
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
    if arguments.run:
        own = load(Path(arguments.run, "config.yaml"), PretrainConfig)
        if other := differences(_rate_keys(own), _rate_keys(config)):
            keys = ", ".join(f"{key} {a} there, {b} here" for key, (a, b) in other.items())
            warning = f"warning: the rates of {arguments.run} are of another: {keys}"
            notice(warning, sys.stderr, lines=False)
    named = {flag.strip("-").replace("-", "_") for flag in told}
    assumed = assume(
        config, arguments.gpus, arguments.device,
        measured(Path(arguments.run)) if arguments.run else None,
        **{name: getattr(arguments, name) for name in named if getattr(arguments, name)},
    )  # fmt: skip
    dataset = Dataset(config.data, config.objective)
    if dataset.at_hand:
        preflight.read_shards(dataset)
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
    lines, end = scaling(config, found.model, traffic, assumed, arguments.up_to, found.done)
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
            f"disk: needs {quantity(max(room.needed, 0), 'B')} at run_dir, "
            f"{quantity(room.free, 'B')} free on this machine"
        )
    if warning:
        show(f"warning: {printable(warning)}")
    return 0


def _rate_keys(config: PretrainConfig) -> dict[str, object]:
    """What a device's rate depends on, of the configuration."""
    phases = {
        str(i): {"micro_batch_rows": phase.micro_batch_rows, "row_len": phase.row_len}
        for i, phase in enumerate(config.phases)
    }
    return {"model": config.model.model_dump(), "phases": phases}


def _room(config: PretrainConfig, model: ModelConfig) -> DiskRoom:
    """What training asks of the disk of run_dir, from the newest checkpoint there on."""
    folder = Path(config.run_dir) / "checkpoints"
    begin = newest_step(folder)
    return disk_room(folder, config.checkpoint, checkpoint_bytes(model), begin, config.total_steps)


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
        print(f"{a.gpus} device(s) at the rates of {printable(str(a.run.run))}:")
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
    _say(f"mean length over max_seq_len: {fills} ({whence} {config.data.dir})")
    print()
    head = "phase,length,steps,tokens/step,step,FLOP,time,memory,stall".split(",")
    rows = [
        (
            f"{i + 1}",
            f"{x.max_seq_len}",
            f"{x.steps:,}",
            quantity(x.tokens_per_step, ""),
            duration(x.step_seconds / 3600),
            quantity(x.flops, ""),
            duration(x.hours),
            quantity(x.memory_bytes, "B"),
            f"{100 * x.stall_share:.3f} %",
        )
        for i, x in enumerate(phases)
    ]
    show("\n".join([*table([head, *rows]), ""]))
    for layout in found.layouts:
        _say(layout.line() + layout.doubt())
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
        f"{quantity(sum(x.flops for x in phases), 'FLOP')}"
    )
    if a.gpus > 1:
        sent = max(phases, key=lambda x: x.network_bytes)
        _say(
            f"network: a device sends {quantity(sent.network_bytes, 'B')} a step at "
            f"{a.network_gb_per_second:g} GB/s ({word}), {sent.network_hidden_share:.0%} of the "
            "time for it behind backward"
        )
    _say(
        f"a checkpoint is {quantity(size, 'B')} ({kept} kept: {quantity(kept * size, 'B')}), every "
        f"{config.checkpoint.every_steps} steps: a rank copies {quantity(copied, 'B')} "
        f"at {a.copy_gb_per_second:.3g} GB/s{', waits until all is written' if waits else ''} "
        f"and stands still for {duration(max(x.stall_seconds for x in phases) / 3600)}; writing "
        f"takes {duration(size / a.write_gb_per_second / 3.6e12)} "
        f"at {a.write_gb_per_second:.3g} GB/s ({word}), "
        f"{100 * max(x.checkpoint_share for x in phases):.2f} % of the time if training waited"
    )
    _say(f"memory is an estimate for {precision_of(config, a)}")


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
    show("\n".join(wrap(text)))
