"""How the rows of an optimiser step are dealt: over the ranks, and to each in micro-steps."""

from __future__ import annotations

import math
from dataclasses import dataclass

from core.errors import UserError
from data_pipeline.stream.plan import PhaseSpec


@dataclass(frozen=True)
class Division:
    """`rows_per_step` rows = `world` ranks x `micro_steps` x `micro_batch_rows`."""

    rows_per_step: int
    world: int
    micro_steps: int
    micro_batch_rows: int


def divide(
    rows_per_step: int,
    world: int,
    most_rows: int,
    phase: PhaseSpec,
    phase_index: int,
    *,
    all_rows: int = 0,
    begun: bool = False,
) -> Division:
    """The division with the most rows at once that are not above `most_rows`.

    UserError where the rows do not divide by the ranks; it names the nearest numbers of ranks that
    divide them. all_rows: what those numbers must divide too, where other phases count as well.
    begun: the phase's batch is that of its checkpoint, no key changes it.
    """
    if rows_per_step % world:
        other = _other_batch(rows_per_step, world, most_rows, phase)
        cure = "" if begun else f", or phases.{phase_index}.{other}"
        near = near_ranks(math.gcd(rows_per_step, all_rows), world)
        raise UserError(
            f"phases.{phase_index}: {rows_per_step} rows a step do not divide by {world} ranks; "
            f"{near} would do{cure}"
        )
    mine = rows_per_step // world
    at_once = largest_divisor(mine, most_rows)
    return Division(rows_per_step, world, mine // at_once, at_once)


def largest_divisor(number: int, most: int) -> int:
    """The largest divisor of `number` that is not above `most`."""
    return next(d for d in range(min(number, most), 0, -1) if number % d == 0)


def near_ranks(rows: int, world: int) -> str:
    """The numbers of ranks below and above `world` that divide the rows: "16 or 32 ranks"."""
    divisors = [d for d in range(1, rows + 1) if rows % d == 0]
    # Whole nodes: of 24 ranks, three nodes of 8, the neighbours are 16 and 32.
    node = math.gcd(world, 8)
    divisors = [d for d in divisors if d % node == 0] or divisors
    below = max((d for d in divisors if d < world), default=None)
    above = min((d for d in divisors if d > world), default=None)
    near = " or ".join(str(d) for d in (below, above) if d is not None)
    return f"{near} rank{'s' if near != '1' else ''}"


def _other_batch(rows: int, world: int, most_rows: int, phase: PhaseSpec) -> str:
    """The key that makes a batch near this one that divides: with as many rows at once as may be,
    while the batch cannot move by more than a fiftieth."""
    multiple = world * max(1, min(most_rows, rows // (25 * world)))
    if phase.rows_per_step is None:
        return f"rows_multiple: {multiple}"
    return f"rows_per_step: {max(1, round(rows / multiple)) * multiple}"
