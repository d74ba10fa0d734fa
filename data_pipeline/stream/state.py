"""StreamState: where in the data a run stands; one small record, the same on every rank."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from configs.load import differences
from core.errors import UserError
from data_pipeline.corpus.manifest import Count, Manifest
from data_pipeline.stream.plan import PLAN_VERSION, plan_hash

# The whole record stays under 1 KB: the run's own log has the full story of what was accepted.
_KEPT_HISTORY = 4
# What the plan hangs on beside the settings.
_FACTS = ("dataset_id", "vocab_sha256", "plan_version", "seed", "phase")


@dataclass(frozen=True)
class StreamState:
    """Everything before row `row` of window `window` of epoch `epoch` has been trained on.

    settings: the keys of the config that the plan depends on; history: differences accepted by
    `data.accept_changed`, oldest first; steps, rows, sequences, predictions, tokens: totals of the
    phase.
    """

    dataset_id: str
    vocab_sha256: str
    plan_version: int
    plan_hash: str
    settings: dict[str, Any]
    seed: int
    phase: int
    rows_per_step: Count
    epoch: Count = 0
    window: Count = 0
    row: Count = 0
    steps: Count = 0
    rows: Count = 0
    sequences: Count = 0
    predictions: Count = 0
    tokens: Count = 0
    history: tuple[str, ...] = ()

    @classmethod
    def start(
        cls, manifest: Manifest, settings: dict[str, Any], *, seed: int, phase: int
    ) -> StreamState:
        """Of a phase whose rows a step are still to be found."""
        facts = {"dataset_id": manifest.dataset_id, "vocab_sha256": manifest.vocab_sha256}
        facts |= {"seed": seed, "phase": phase}
        digest = plan_hash(settings, **facts)
        return cls(
            plan_version=PLAN_VERSION, plan_hash=digest, settings=settings, rows_per_step=0, **facts
        )

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "history": list(self.history)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> StreamState:
        """The inverse of `to_dict`; UserError if a field is missing or unknown."""
        names = {field.name for field in fields(cls)}
        if not isinstance(data, dict) or set(data) != names:
            odd = sorted(names ^ set(data)) if isinstance(data, dict) else type(data).__name__
            raise UserError(f"data position: not a stream state (fields that differ: {odd})")
        return cls(**{**data, "history": tuple(data["history"])})

    def differences(self, other: StreamState) -> dict[str, list[Any]]:
        """What makes the positions of `self` meaningless under `other`: name -> both values."""
        mine, theirs = (
            {name: getattr(state, name) for name in _FACTS} | state.settings
            for state in (self, other)
        )
        found = differences(mine, theirs)
        if not found and self.plan_hash != other.plan_hash:
            found["plan_hash"] = [self.plan_hash, other.plan_hash]
        return found


# A change of these alone leaves the order of the rows as it was.
KEEPS_ROWS = {"sequences_per_step", "rows_per_step"}


def resume(saved: StreamState, fresh: StreamState, accepted: tuple[str, ...]) -> StreamState:
    """The state to go on from: `saved`'s position under `fresh`'s settings.

    UserError names every difference with both values, unless its name is in `accepted`; then the
    history says so, and the data goes on at the start of the next epoch if the rows changed.
    """
    differences = saved.differences(fresh)
    refused = {name: pair for name, pair in differences.items() if name not in accepted}
    if refused:
        clauses = ", ".join(
            f"{name} is {old} in the checkpoint and {new} now"
            for name, (old, new) in refused.items()
        )
        raise UserError(
            f"the checkpoint's data position does not fit this run: {clauses}; "
            f"to go on with other data all the same set data.accept_changed: [{', '.join(refused)}]"
        )
    if not differences:
        return saved
    notes = tuple(
        f"step {saved.steps}: {name} {str(old)[:8]} -> {str(new)[:8]}"
        for name, (old, new) in differences.items()
    )
    result = replace(
        saved,
        history=(saved.history + notes)[-_KEPT_HISTORY:],
        **{name: getattr(fresh, name) for name in (*_FACTS, "plan_hash", "settings")},
    )
    if set(differences) & KEEPS_ROWS:
        result = replace(result, rows_per_step=0)
    if set(differences) - KEEPS_ROWS:
        result = replace(result, epoch=saved.epoch + 1, window=0, row=0)
    return result
