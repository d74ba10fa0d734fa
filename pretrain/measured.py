"""The rates that a run has had, from its files alone."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from configs.load import load
from core.errors import UserError
from core.files import disk_errors, read_json, read_regular
from pretrain.config import PretrainConfig
from pretrain.metrics import records_from_the_end
from pretrain.origin import newest_state


@dataclass(frozen=True)
class Measured:
    """What a run recorded: medians by max_seq_len, and of its checkpoints; None: it did not."""

    run: str
    world: int | None
    on_cpus: bool
    tflops: Mapping[int, float]  # that a device reached
    tokens_per_second: Mapping[int, float]  # of all devices
    mfu: Mapping[int, float]
    all_reduce_gb_per_second: float | None
    write_gb_per_second: float | None
    copy_gb_per_second: float | None  # of a rank to host memory, all of the stall counted
    stall_share: float | None

    def tflops_at(self, max_seq_len: int) -> float:
        """Of the length that is nearest."""
        return self.tflops[min(self.tflops, key=lambda length: abs(length - max_seq_len))]


def measured(run: Path) -> Measured:
    """From the files of a run folder. UserError where it has recorded no step."""
    config = load(run / "config.yaml", PretrainConfig)
    world, bandwidth = _preflight(run)
    first, last, saved_by = _newest_start(run)
    if saved_by not in (None, world):
        # A newer start, on another number of devices, has no checkpoint yet.
        world, bandwidth = saved_by, None
    else:
        last = math.inf
    found: dict[str, dict[int, list[float]]] = {}
    checkpoints: list[tuple[float, float, float, float]] = []
    lengths = {i: phase.max_seq_len for i, phase in enumerate(config.phases, 1)}
    on_cpus = False
    for record in records_from_the_end(run / "metrics.jsonl"):
        on_cpus |= "memory/process_gb" in record
        if record["step"] <= first:
            break
        length = lengths.get(record.get("rate/phase", 0))
        if length is not None and record["step"] <= last:
            for name in ("tflops_per_device", "tokens_per_second", "mfu"):
                value = record.get(f"throughput/{name}", 0.0)
                if _is_a_rate(value):
                    found.setdefault(name, {}).setdefault(length, []).append(value)
        elif "checkpoint/bytes" in record:
            names = "bytes", "write_seconds", "stall_seconds", "stall_share"
            checkpoints.append(tuple(record.get(f"checkpoint/{name}", 0.0) for name in names))
    if not found.get("tflops_per_device"):
        raise UserError(f"{run}: no step is recorded in its metrics.jsonl")
    medians = {
        name: {length: statistics.median(values) for length, values in by_length.items()}
        for name, by_length in found.items()
    }
    rates: list[float | None] = [None, None]
    if checkpoints:
        size, write, stall, _ = map(statistics.median, zip(*checkpoints, strict=True))
        slice_ = size / (world or 1 if config.engine.zero_stage else 1)
        pairs = (size, write), (slice_, stall)
        told = [part / seconds / 1e9 if _is_a_rate(seconds) else 0.0 for part, seconds in pairs]
        rates = [rate if _is_a_rate(rate) else None for rate in told]
    return Measured(
        run=str(run),
        world=world,
        on_cpus=on_cpus,
        tflops=medians["tflops_per_device"],
        tokens_per_second=medians.get("tokens_per_second", {}),
        mfu=medians.get("mfu", {}),
        all_reduce_gb_per_second=bandwidth,
        write_gb_per_second=rates[0],
        copy_gb_per_second=rates[1],
        stall_share=checkpoints[0][-1] if checkpoints else None,
    )


def _is_a_rate(value: float) -> bool:
    """Or a time; what a run cannot have measured is not to be divided by."""
    return 1e-12 < value < 1e12


def _newest_start(run: Path) -> tuple[float, float, int | None]:
    """(step that it began at, step of the newest checkpoint, its ranks), of the start that wrote
    that; all records of a run without a checkpoint are of one start."""
    found = newest_state(run)
    plain = read_json(found[0]) if found is not None and found[1] is not None else {}
    match plain:
        case {"history": [*events], "position": {"step": int(last)}, "world_size": int(world)} if (
            0 < world < 1 << 31
        ):
            begun = [
                event["step"]
                for event in events
                if isinstance(event, dict)
                and event.get("event") in ("start", "init_from", "resume")
                and isinstance(event.get("step"), int)
            ]
            return (begun[-1] if begun and begun[-1] < last else 0), last, world
    return 0, math.inf, None


def _preflight(run: Path) -> tuple[int | None, float | None]:
    """Ranks and GB/s of the newest start; None where it does not say."""
    path = run / "preflight.txt"
    with disk_errors(path):
        text = read_regular(path).decode(errors="replace") if path.exists() else ""
    said = re.match(
        r"preflight: (\d{1,9}) process.*?(?:all-reduce (\d{1,9}(?:\.\d+)?) GB/s)?$", text, re.M
    )
    if said is None:
        return None, None
    return int(said[1]), float(said[2]) or None if said[2] else None
