"""Where a run stands: place, data, rollbacks, history. All of a checkpoint but the tensors."""

from __future__ import annotations

import dataclasses
import functools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import pydantic

from configs.load import differences, leaves
from core.errors import UserError, disk_error, short
from core.files import open_regular, write_atomically
from data_pipeline.corpus.manifest import Count, Manifest
from data_pipeline.stream.state import StreamState
from pretrain.config import PretrainConfig
from pretrain.model_config import SHAPE_KEYS
from pretrain.rollback import Rollback, Rollbacks
from pretrain.schedule import batch_changed_without_rate
from pretrain.version import code_version

FORMAT = "bert-checkpoint-1"
ROLLBACKS = "rollbacks.json"  # in the run folder
PROBES = "probes.jsonl"  # of finetune/follow.py, with scores as probe/TASK/MEASURE
PROBE = "probe/"
FINISHED = "FINISHED"  # in the run folder


def mark_finished(run_dir: Path, steps: int | None) -> None:
    """RUN/FINISHED, the number of steps that were asked for, is there when all are done and on disk
    (else None): launchers' exit codes are not proof of it. A run that was asked for more before
    may stand further on."""
    if steps is not None:
        write_atomically(run_dir / FINISHED, f"{steps}\n")
    else:
        (run_dir / FINISHED).unlink(missing_ok=True)


def finished_steps(run_dir: Path) -> int | None:
    """What RUN/FINISHED says; None for a run that has not ended."""
    try:
        with open_regular(run_dir / FINISHED) as file:
            return int(file.read(32))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    except OSError as error:
        raise disk_error(error, run_dir / FINISHED) from None


@dataclass(frozen=True)
class Position:
    """Where a run stands.

    step: of the run; phase: index; phase_step: of the phase; skipped: how many of the steps left
    the weights as they were, because of an overflow; tokens: real ones, of the phases before;
    None where the checkpoint that they came from did not count them.
    """

    step: Count = 0
    phase: Count = 0
    phase_step: Count = 0
    skipped: Count = 0
    tokens: Count | None = 0

    def after_step(self, skipped: bool) -> Position:
        return dataclasses.replace(
            self,
            step=self.step + 1,
            phase_step=self.phase_step + 1,
            skipped=self.skipped + int(skipped),
        )

    def next_phase(self, tokens: int) -> Position:
        """tokens: of the phase that ends here."""
        total = None if self.tokens is None else self.tokens + tokens
        return dataclasses.replace(self, phase=self.phase + 1, phase_step=0, tokens=total)


@dataclass(frozen=True)
class State:
    """Everything of a checkpoint but the engine's tensors.

    stream is None between phases. Dropout needs no generator state: it is seeded by
    (seed, rank, step), and the data by the plan.
    """

    position: Position
    stream: StreamState | None
    config: dict[str, Any]
    dataset: dict[str, Any]
    world_size: int
    history: tuple[dict[str, Any], ...] = field(default=())
    code_version: str = ""
    rollbacks: tuple[Rollback, ...] = field(default=())

    def to_json(self) -> str:
        plain = dataclasses.asdict(self) | {"format": FORMAT}
        plain["stream"] = self.stream.to_dict() if self.stream else None
        return json.dumps(plain, indent=1)

    @classmethod
    def from_json(cls, text: str | bytes, where: str) -> State:
        try:
            plain = json.loads(text)
            if plain["format"] != FORMAT:
                raise UserError("written by another version of this program")
            # A path in it may be no UTF-8: half of a surrogate pair, which JSON keeps.
            sound = json.dumps(plain, ensure_ascii=False).encode("utf-8", "replace")
            state = _from_json(cls).validate_json(sound, strict=True)
            config, dataset, history = plain["config"], plain["dataset"], plain.get("history", ())
            state = dataclasses.replace(
                state, config=config, dataset=dataset, history=tuple(history)
            )
            _Events.model_validate(plain)
            if state.stream is not None:
                StreamState.from_dict(plain["stream"])  # no field of it has a default here
            if state.position.phase and "tokens" not in plain["position"]:
                position = dataclasses.replace(state.position, tokens=None)
                state = dataclasses.replace(state, position=position)
            return state
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
        except pydantic.ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"]))
            raise UserError(f"{where}: not a checkpoint's state: {key}: {first['msg']}") from None
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            raise UserError(f"{where}: not a checkpoint's state: {error}") from None


@functools.cache
def _from_json(cls: type[State]) -> pydantic.TypeAdapter[State]:
    return pydantic.TypeAdapter(cls)


class _Event(pydantic.BaseModel, strict=True):
    """What is read of a line of the history, which may hold more."""

    step: Count = 0
    phase: Count = 0
    changed: dict[str, Annotated[list[Any], pydantic.Field(min_length=2, max_length=2)]] = {}


class _Events(pydantic.BaseModel):
    history: list[_Event] = []


class RunState:
    """The state of a run that goes on; the same on every rank."""

    def __init__(self, config: PretrainConfig) -> None:
        self.position = Position()
        self.stream: StreamState | None = None
        self.rollbacks = Rollbacks(
            Path(config.run_dir) / ROLLBACKS,
            config.engine.max_skipped_steps,
            config.checkpoint.max_rollbacks,
        )
        self.history: list[dict[str, Any]] = []
        self._config = config

    @property
    def leaves_out_next(self) -> bool:
        """Whether the rows that come next are not to be trained on."""
        return self.stream is not None and self.rollbacks.past(self.stream) != self.stream

    def after_step(self, after: StreamState, *, skipped: bool) -> None:
        """A step took the data to `after`; what came of it goes to `rollbacks`."""
        self.position, self.stream = self.position.after_step(skipped), after

    def next_phase(self) -> None:
        tokens = self.stream.tokens if self.stream is not None else 0
        self.position, self.stream = self.position.next_phase(tokens), None

    def place_at(self, saved: State) -> None:
        """The place of a checkpoint; what has happened since stays in rollbacks and history."""
        self.position, self.stream = saved.position, saved.stream

    def note(self, event: str, **facts: Any) -> None:
        """A line of the run's history, kept in every later checkpoint."""
        self.history.append(
            {"event": event, "step": self.position.step, "code": code_version()} | facts
        )

    def to_save(self, manifest: Manifest, world_size: int) -> State:
        return State(
            position=self.position,
            stream=self.stream,
            config=self._config.model_dump(mode="json"),
            dataset=dataset_facts(manifest),
            world_size=world_size,
            history=tuple(self.history),
            code_version=code_version(),
            rollbacks=self.rollbacks.done,
        )


def dataset_facts(manifest: Manifest) -> dict[str, Any]:
    """What a checkpoint says of the data it was trained on."""
    return {
        "dataset_id": manifest.dataset_id,
        "vocab_sha256": manifest.vocab_sha256,
        "lowercase": manifest.lowercase,
    }


def sequences_per_step(state: State, config: PretrainConfig) -> list[float]:
    """Of each phase: as its rows were dealt, or, where it has not begun, as configured."""
    found: list[float] = [phase.sequences_per_step for phase in config.phases]
    for event in state.history:
        index, sequences = event.get("phase"), event.get("sequences_per_step")
        if type(index) is int and 0 <= index < len(found) and type(sequences) in (int, float):
            found[index] = sequences
    return found


def check_facts(saved: State, where: Path) -> None:
    """UserError where a checkpoint does not say what it was trained on, or what its model is."""
    kinds = {"dataset_id": str, "vocab_sha256": str, "lowercase": bool}
    missing = [
        f"dataset.{key}" for key, kind in kinds.items() if type(saved.dataset.get(key)) is not kind
    ]
    if not isinstance(saved.config.get("model"), dict):
        missing.append("config.model")
    if missing:
        raise UserError(f"{where}/state.json: not a checkpoint's state: {missing[0]} is missing")


def _model_of(saved: State) -> dict[str, Any]:
    """Keys of the model; checkpoints of older versions do not name the mask."""
    return {"is_decoder": False} | saved.config["model"]


def check_same_function(one: State, one_at: Path, other: State, other_at: Path) -> None:
    """UserError where the weights of two checkpoints mean another thing, by the vocabulary or the
    model that each was trained with."""
    check_facts(one, one_at)

    def means(state: State) -> dict[str, Any]:
        model = _model_of(state)
        return {
            **{key: state.dataset[key] for key in ("vocab_sha256", "lowercase")},
            **{f"model.{key}": model.get(key) for key in (*SHAPE_KEYS, "layer_norm_eps")},
        }

    for key, values in differences(means(one), means(other)).items():
        its, of_other = (short(str(value)) for value in values)
        raise UserError(
            f"{one_at}: was trained with {key} {its}, {other_at} with {of_other}: there is no mean "
            "of the two"
        )


def check_phase(saved: State, where: Path, config: PretrainConfig) -> None:
    """UserError where the checkpoint stands in a phase that the config has not."""
    if saved.position.phase >= len(config.phases):
        raise UserError(
            f"{where}/state.json: position.phase: {saved.position.phase} (from 0), but the "
            f"config has {len(config.phases)} phase(s)"
        )


def check_resumable(saved: State, found: Path, config: PretrainConfig, manifest: Manifest) -> None:
    """UserError where the checkpoint `found` cannot go on under this config and data."""
    check_facts(saved, found)
    check_phase(saved, found, config)
    dataset = dataset_facts(manifest)
    for key, old in saved.dataset.items():
        if dataset.get(key) != old and key not in config.data.accept_changed:
            raise UserError(
                f"{found}: trained on {key} {old}, but {config.data.dir} has "
                f"{dataset.get(key)}; to go on all the same: data.accept_changed: [{key}]"
            )
    before = saved.config | {"model": _model_of(saved)}
    for key, (old, new) in differences(before, config.model_dump(mode="json")).items():
        # Without next sentence pooler and head are not trained, so they have no moments.
        trains = key == "data.next_sentence" and "none" in (old, new)
        if trains or (key.startswith("model.") and key.removeprefix("model.") in SHAPE_KEYS):
            raise UserError(
                f"{found}: holds a model with {key}: {old}, the config says {new}; "
                "use another run_dir"
            )
    told = leaves(saved.config)
    for i, phase in enumerate(config.phases[: saved.position.phase]):
        old = told.get(f"phases.{i}.steps", phase.steps)
        if old != phase.steps:  # nobody would train them, and the run would be said done
            raise UserError(
                f"{found}: phases.{i}.steps: this phase is over after {short(str(old))}, the "
                f"config says {phase.steps}; say what it was to go on, or use another run_dir"
            )


def changes_since(saved: State, config: PretrainConfig) -> tuple[dict[str, list[Any]], list[str]]:
    """Keys that differ from the checkpoint's config, and lines that say what to think of them."""
    changes = differences(saved.config, config.model_dump(mode="json"))
    lines = [
        f"  changed since: {short(key)}: {short(str(old), 200)} -> {short(str(new), 200)}"
        for key, (old, new) in changes.items()
    ]
    for i, phase in enumerate(config.phases):
        before, now = changes.get(f"phases.{i}.sequences_per_step", (0, 0))
        rate, _ = changes.get(f"phases.{i}.learning_rate", (phase.learning_rate, 0))
        warning = batch_changed_without_rate(before, rate, now, phase.learning_rate)
        if warning is not None:
            lines.append(f"warning: phases.{i}: {warning}")
    return changes, lines
