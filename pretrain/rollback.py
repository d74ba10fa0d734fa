"""Bad steps in a row, and the way back: to a checkpoint, past the batches that made them.

Each rollback is written down at once, in `rollbacks.json` of the run folder, and again in every
later checkpoint, so that a run which is killed before its next one does not forget it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter

from core.errors import UserError
from core.files import read_sealed, write_sealed
from data_pipeline.stream.state import StreamState

Place = tuple[int, int, int]  # epoch, window, row in it


@dataclass(frozen=True)
class Skip:
    """Rows from `start` to `end` of a phase, `steps` steps of them, that are not trained on."""

    phase: int
    start: Place
    end: Place
    steps: int

    def __str__(self) -> str:
        (epoch, window, row), (last_epoch, last_window, last_row) = self.start, self.end
        return (
            f"phase {self.phase + 1}, epoch {epoch}, window {window}, row {row} to "
            f"epoch {last_epoch}, window {last_window}, row {last_row}"
        )


@dataclass(frozen=True)
class Rollback:
    """From `step` back to the checkpoint of step `back_to`, leaving `skips` out from there on.

    spoiled: the weight or moment that was not finite after steps that were."""

    step: int
    back_to: int
    skips: tuple[Skip, ...]
    spoiled: str = ""

    @property
    def why(self) -> str:
        if self.spoiled:
            return f"{self.spoiled} is not finite"
        return f"{sum(s.steps for s in self.skips)} steps in a row were not finite"


class Rollbacks:
    """The rollbacks of a run and the bad steps since the last good one; the same on all ranks."""

    def __init__(self, path: Path, bad_in_a_row: int, limit: int) -> None:
        """`path`: the file of the run folder."""
        self._path = path
        self.done: tuple[Rollback, ...] = ()
        self._bad_in_a_row = bad_in_a_row
        self._limit = limit
        self._streak: list[Skip] = []
        self.spoiled = ""  # the weight or moment that is not finite

    @property
    def bad_steps(self) -> int:
        """In a row, up to here. No checkpoint is taken while there are any."""
        return sum(skip.steps for skip in self._streak)

    @property
    def due(self) -> bool:
        return self.bad_steps >= self._bad_in_a_row or bool(self.spoiled)

    def read(self, known: tuple[Rollback, ...]) -> tuple[Rollback, ...]:
        """Those that the checkpoint knows, which the run resumes from, and those after it."""
        if not self._path.exists():
            return known
        plain = read_sealed(self._path)
        try:
            written = TypeAdapter(tuple[Rollback, ...]).validate_python(plain["rollbacks"])
        except (KeyError, ValueError):
            raise UserError(f"{self._path}: not a list of rollbacks") from None
        return written if written[: len(known)] == known else known

    def write(self) -> None:
        write_sealed(self._path, {"rollbacks": [asdict(r) for r in self.done]})

    def forget(self) -> None:
        """Those of checkpoints that are gone."""
        self._path.unlink(missing_ok=True)

    def note(self, bad: bool, before: StreamState, after: StreamState) -> None:
        """A step took the data from `before` to `after`."""
        if not bad:
            self._streak = []
            return
        step = Skip(before.phase, place(before), place(after), 1)
        last = self._streak[-1] if self._streak else None
        if last is not None and (last.phase, last.end) == (step.phase, step.start):
            self._streak[-1] = replace(last, end=step.end, steps=last.steps + 1)
        else:
            self._streak.append(step)

    def suspect(self, newest: int) -> int | None:
        """The oldest step that was gone back to since the run last got past where it had gone
        wrong: the fault may be in all checkpoints from there on. None where `newest`, the step of
        the newest of them, lies past that."""
        oldest = newest
        for rollback in reversed(self.done):
            if oldest > rollback.step:
                break
            oldest = min(oldest, rollback.back_to)
        return oldest if self.done and newest <= self.done[-1].step else None

    def take(self, step: int, back_to: int | None) -> Rollback:
        """The run goes back from `step` to `back_to`. UserError when it may not, or there is no
        checkpoint (None)."""
        if self.spoiled:
            what = f"{self.spoiled} is not finite after step {step:,}"
        else:
            what = (
                f"{self.bad_steps} steps in a row, seen at step {step:,}, had gradients or a loss "
                f"that are not finite (engine.max_skipped_steps: {self._bad_in_a_row}; "
                f"{'; '.join(map(str, self._streak))})"
            )
        if back_to is None:
            raise UserError(f"{what}, and there is no checkpoint to go back to")
        if len(self.done) >= self._limit:
            raise UserError(
                f"{what}, after {len(self.done)} rollbacks (checkpoint.max_rollbacks: "
                f"{self._limit})"
            )
        rollback = Rollback(step, back_to, tuple(self._streak), self.spoiled)
        self.done, self._streak, self.spoiled = (*self.done, rollback), [], ""
        return rollback

    def past(self, state: StreamState) -> StreamState:
        """`state`, or the place behind the rows left out that it stands in."""
        skips = (s for rollback in self.done for s in rollback.skips if s.phase == state.phase)
        for skip in sorted(skips, key=lambda s: s.start):
            if skip.start <= place(state) < skip.end:
                epoch, window, row = skip.end
                state = replace(state, epoch=epoch, window=window, row=row)
        return state


def place(state: StreamState) -> Place:
    return state.epoch, state.window, state.row
