"""What a step of each phase holds and how it is dealt: known before the first step of the first.

One function for training and for `python -m pretrain plan`, so that what the one refuses the other
refuses in the same line.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from core.errors import UserError
from data_pipeline.stream.dataset import Dataset
from data_pipeline.stream.heldout import HeldOut
from data_pipeline.stream.plan import Shape
from data_pipeline.stream.steps import Division, divide, near_ranks
from pretrain.config import PhaseConfig, PretrainConfig
from pretrain.origin import check_vocabulary, newest_state, tokenizer_of
from pretrain.schedule import near, rate_advice


@dataclass(frozen=True)
class Traffic:
    """What one optimiser step reads, over all ranks: counts of real tokens, means over the phase's
    first window."""

    rows: int
    tokens: float
    predictions: float
    sequences: float
    squares: float  # of the lengths, summed
    assumed: bool = False  # not from a data set
    begun: bool = False  # the rows are a checkpoint's, no key changes them

    def of_rows(self, rows: int) -> Traffic:
        """A step of such rows, as the checkpoint of a phase that has begun has them."""
        share = rows / self.rows
        names = "tokens", "predictions", "sequences", "squares"
        return replace(
            self, rows=rows, begun=True, **{name: share * getattr(self, name) for name in names}
        )


@dataclass(frozen=True)
class PhaseLayout:
    """A phase's step: what it reads and how its rows are dealt."""

    index: int
    phase: PhaseConfig
    row_len: int
    traffic: Traffic
    world: int
    division: Division | None  # None: assumed rows, which do not divide by the ranks
    near: str = ""  # then the nearest numbers of ranks that divide those of all phases

    @property
    def assumed(self) -> bool:
        """Whether a data set may still make it other rows."""
        return _may_change(self.phase, self.traffic)

    def line(self) -> str:
        """As training prints it; without a division, only what a step holds."""
        sequences = self.traffic.sequences
        if self.division is None:
            return _step_line(self.index, self.phase, self.row_len, sequences, self.traffic.rows)
        return phase_line(self.index, self.phase, self.row_len, sequences, self.division)

    def doubt(self) -> str:
        """What cannot be said before there is a data set, to stand behind the line."""
        if not self.assumed:
            return ""
        world, multiple = self.world, self.phase.rows_multiple
        if self.division is None:
            return (
                f" (assumed lengths; the assumed rows do not divide by {world} ranks, {self.near} "
                "would do; the rows themselves only the data set says)"
            )
        if multiple % world == 0:
            return " (assumed lengths)"
        return (
            f" (assumed lengths; whether {world} ranks divide the rows only the data set says: "
            f"they do not divide phases.{self.index}.rows_multiple {multiple})"
        )


def phase_line(
    index: int, phase: PhaseConfig, row_len: int, sequences: float, division: Division
) -> str:
    return (
        _step_line(index, phase, row_len, sequences, division.rows_per_step)
        + f"; {division.world} process(es) x {division.micro_steps} "
        f"micro-step(s) x {division.micro_batch_rows} row(s)"
    )


def _step_line(index: int, phase: PhaseConfig, row_len: int, sequences: float, rows: int) -> str:
    return (
        f"phase {index + 1}: {phase.steps:,} steps of {rows:,} rows x {row_len} tokens, about "
        f"{sequences:,.1f} sequences of up to {phase.max_seq_len}"
    )


def batch_warnings(index: int, phase: PhaseConfig, optimizer: str, sequences: float) -> list[str]:
    """What is odd about a phase's batch and rate, a line each; `sequences`: what a step holds."""
    found, asked = [], phase.sequences_per_step
    if not near(sequences, asked) and "sequences_per_step" in phase.model_fields_set:
        why = (
            f"its rows are a multiple of rows_multiple: {phase.rows_multiple}; "
            f"sequences_per_step: {sequences:.0f} fits"
        )
        if phase.rows_multiple > 1:
            why += ", a smaller one, or a shorter row_len, comes nearer"
        if phase.rows_per_step is not None:
            why = f"rows_per_step: {phase.rows_per_step} decides; say {sequences:.0f}"
        found.append(f"sequences_per_step: {asked}, but a step takes about {sequences:.1f}: {why}")
    advice = rate_advice(phase, sequences, optimizer)
    return [f"phases.{index}.{line}" for line in [*found, advice] if line is not None]


def tokens_left(
    phases: Sequence[PhaseConfig], index: int, phase_step: int, tokens_a_step: float
) -> float:
    """Real tokens from a step of phase `index` to the end of the run: this phase as its steps have
    been, the sequences of later ones taken as full."""
    later = (p.steps * p.sequences_per_step * p.max_seq_len for p in phases[index + 1 :])
    return (phases[index].steps - phase_step) * tokens_a_step + sum(later)


def look_ahead(
    config: PretrainConfig,
    dataset: Dataset,
    world: int,
    first: int = 0,
    *,
    done: int = 0,
    rows: int | None = None,
) -> list[PhaseLayout]:
    """The phases from `first` on by the data set; UserError for what would end one of them, where
    the first `done` phases are over. rows: a step's of the phase after those, if it has begun."""
    vocabulary_size(config, dataset)
    if config.init_from is not None and newest_state(Path(config.run_dir)) is None:
        check_vocabulary(
            config.init_from,
            tokenizer_of(config.init_from),
            dataset.tokenizer,
            config.data.accept_changed,
            dataset.manifest.extends,
        )
    check_held_out(config, dataset)
    phases = range(first, len(config.phases))
    traffic = [planned_traffic(config, dataset, i) for i in phases]
    if rows is not None:
        traffic[done - first] = traffic[done - first].of_rows(rows)
    return lay_out(config, world, traffic, first=first, done=done)


def lay_out(
    config: PretrainConfig,
    world: int,
    traffic: Sequence[Traffic],
    *,
    first: int = 0,
    done: int = 0,
) -> list[PhaseLayout]:
    """The phases from `first` on; `traffic` has one entry for each of them. Of the first `done`
    phases, which are over, nothing is refused: rows that do not divide have no division.

    UserError where the rows of one do not divide by the ranks; it names the nearest numbers of
    ranks that divide those of all. Of assumed rows only where no data set could make them divide;
    else such a phase has no division.
    """
    phases = config.phases[first:]
    pairs = list(zip(phases, traffic, strict=True))
    ahead = pairs[max(done - first, 0) :]
    every = math.gcd(*(step.rows for _, step in ahead))
    certain = math.gcd(*(step.rows for phase, step in ahead if not _may_change(phase, step)))
    result = []
    for index, (phase, step) in enumerate(pairs, first):
        shape = Shape.of(phase, config.data, config.objective)
        most, division, near = phase.micro_batch_rows, None, ""
        if index >= done and not _may_change(phase, step):
            division = divide(
                step.rows, world, most, phase, index, all_rows=certain, begun=step.begun
            )
        elif step.rows % world == 0:
            division = divide(step.rows, world, most, phase, index)
        elif index >= done:
            _check_possible(phase, index, shape, world)
            near = near_ranks(every, world)
        result.append(PhaseLayout(index, phase, shape.row_len, step, world, division, near))
    return result


def _may_change(phase: PhaseConfig, step: Traffic) -> bool:
    """Whether a data set may still make the step other rows."""
    return step.assumed and phase.rows_per_step is None


def _check_possible(phase: PhaseConfig, index: int, shape: Shape, world: int) -> None:
    """UserError where no data set makes rows that divide by the ranks: a row holds between one
    and `shape.sequences` sequences."""
    least, most = phase.step_rows(shape.sequences), phase.step_rows(1)
    both = math.lcm(phase.rows_multiple, world)
    if most // both == (least - 1) // both:
        raise UserError(
            f"phases.{index}: {world} ranks divide the rows a step of no data set: they are "
            f"between {least} and {most} and divide by phases.{index}.rows_multiple "
            f"{phase.rows_multiple}"
        )


def planned_traffic(config: PretrainConfig, dataset: Dataset, index: int) -> Traffic:
    """A step of a phase by the plan of its first window."""
    planner = dataset.planner(
        config.phases[index], phase_index=index, seed=config.seed, split="train"
    )
    window = planner.plan(0, 0)
    rows = planner.rows_per_step(window)
    lengths = window.lengths.astype(float)
    share = rows / window.rows
    return Traffic(
        rows=rows,
        tokens=share * float(lengths.sum()),
        predictions=share * float(window.predictions.sum()),
        sequences=share * len(lengths),
        squares=share * float((lengths**2).sum()),
    )


def assumed_traffic(config: PretrainConfig, index: int, mean_fill: float) -> Traffic:
    """A step of a phase without a data set: sequences of `mean_fill` x max_seq_len tokens, in rows
    that are as full as may be, and as many rows as training would take of such."""
    phase = config.phases[index]
    shape = Shape.of(phase, config.data, config.objective)
    specials = 3 if config.data.paired else 2
    length = max(mean_fill * phase.max_seq_len, specials + 1)
    counts = config.data.objective(config.objective).counts(
        np.array([length]), np.array([length - specials]), phase.max_predictions
    )
    sequences_a_row = min(shape.row_len / length, shape.sequences)
    rows = phase.step_rows(sequences_a_row)
    sequences = rows * sequences_a_row
    return Traffic(
        rows=rows,
        tokens=sequences * length,
        predictions=sequences * float(counts[0]),
        sequences=sequences,
        squares=sequences * length**2,
        assumed=True,
    )


def vocabulary_size(config: PretrainConfig, dataset: Dataset) -> int:
    """The data set's; UserError where the model asks for another."""
    found = len(dataset.tokenizer)
    if config.model.vocab_size not in (0, found):
        raise UserError(
            f"model.vocab_size: {config.model.vocab_size}, but the shards of {config.data.dir} "
            f"were made with a vocabulary of {found}; 0 takes the dataset's"
        )
    return found


def held_out(
    config: PretrainConfig,
    dataset: Dataset,
    rank: int = 0,
    world: int = 1,
    most_rows: int | None = None,
) -> dict[int, HeldOut]:
    """What a rank evaluates on, by the length of sequences: in the rows of the first phase of that
    length, dealt evenly to the ranks. most_rows: of a batch, where less than the phase's."""
    rows = config.evaluation.rows
    most_rows = most_rows or rows
    first = {phase.max_seq_len: phase for phase in reversed(config.phases)}
    return {
        length: HeldOut(
            dataset,
            phase,
            seed=config.seed,
            rank=rank,
            world=world,
            micro_batch_rows=min(phase.micro_batch_rows, most_rows, -(-rows // world)),
            rows=rows,
        )
        for length, phase in first.items()
    }


def evaluated_lengths(config: PretrainConfig, index: int) -> list[int]:
    """Of sequences at an evaluation in phase `index`, whose own comes last."""
    own = config.phases[index].max_seq_len
    lengths = {phase.max_seq_len for phase in config.phases if config.evaluation.every_length}
    return [*sorted(lengths - {own}), own]


def check_held_out(config: PretrainConfig, dataset: Dataset) -> None:
    """UserError where a run is to be evaluated and its data set holds nothing back."""
    if config.evaluation.every_steps:
        dataset.planner(config.phases[0], phase_index=0, seed=config.seed, split="heldout")
