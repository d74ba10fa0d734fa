"""Checkpoints: written whole or not at all, found again by themselves, checked before use.

    RUN/checkpoints/step-00000500/   engine/   DeepSpeed's files
                                     state.json  position, history, resolved config, versions
                                     vocab.txt   the dataset's vocabulary
                                     COMPLETE.json  written last: size and sha256 of every file
    RUN/checkpoints/latest           the name of the newest one

A folder is written as `writing-NAME`, flushed to disk and renamed; COMPLETE.json follows; `latest`
moves after it. What has no valid COMPLETE.json is not a checkpoint.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from configs.load import UserError, check
from data_pipeline.stream.state import StreamState
from pretrain import distributed
from pretrain.config import PretrainConfig
from pretrain.distributed import World

FORMAT = "bert-checkpoint-1"
_MARKER = "COMPLETE.json"
_NAME = re.compile(r"step-(\d{8})")


@dataclass(frozen=True)
class Position:
    """Where a run stands.

    step: of the run; phase: index; phase_step: of the phase; skipped: how many of the steps left
    the weights as they were, because of an overflow.
    """

    step: int = 0
    phase: int = 0
    phase_step: int = 0
    skipped: int = 0

    def after_step(self, skipped: bool) -> Position:
        return dataclasses.replace(
            self,
            step=self.step + 1,
            phase_step=self.phase_step + 1,
            skipped=self.skipped + int(skipped),
        )

    def next_phase(self) -> Position:
        return dataclasses.replace(self, phase=self.phase + 1, phase_step=0)


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

    def to_json(self) -> str:
        plain = dataclasses.asdict(self) | {"format": FORMAT}
        plain["stream"] = self.stream.to_dict() if self.stream else None
        return json.dumps(plain, indent=1)

    @classmethod
    def from_json(cls, text: str, where: str) -> State:
        try:
            plain = json.loads(text)
            if plain.pop("format") != FORMAT:
                raise UserError(f"{where}: written by another version of this program")
            plain["position"] = Position(**plain["position"])
            plain["history"] = tuple(plain["history"])
            if plain["stream"] is not None:
                plain["stream"] = StreamState.from_dict(plain["stream"])
            return cls(**plain)
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{where}: not a checkpoint's state: {error}") from None


class Checkpoints:
    """The checkpoints of one run folder. Methods marked (all ranks) are collective."""

    def __init__(self, run_dir: Path, world: World, *, keep_last: int, keep_every: int) -> None:
        self.folder = run_dir / "checkpoints"
        self._world = world
        self._keep_last = keep_last
        self._keep_every = keep_every

    def save(self, state: State, vocabulary: bytes, write_engine: Callable[[Path], None]) -> Path:
        """(all ranks) Write a checkpoint. UserError on every rank if any rank could not.

        `write_engine(folder)` is called on every rank. After an error older checkpoints stand as
        they were and what was half-written is gone.
        """
        name = f"step-{state.position.step:08d}"
        temporary, final = self.folder / f"writing-{name}", self.folder / name
        try:
            with distributed.errors_shared(self._world):
                if self._world.is_main:
                    shutil.rmtree(temporary, ignore_errors=True)
                    (temporary / "engine").mkdir(parents=True)
            with distributed.errors_shared(self._world), _write_errors(temporary):
                write_engine(temporary / "engine")
            with distributed.errors_shared(self._world):
                if self._world.is_main:
                    (temporary / "state.json").write_text(state.to_json(), encoding="utf-8")
                    (temporary / "vocab.txt").write_bytes(vocabulary)
                    self._publish(temporary, final)
        except UserError:
            if self._world.is_main:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        return final

    def newest(self, say: Callable[[str], None]) -> Path | None:
        """(all ranks) The newest checkpoint that passes its checksums; damaged ones are said."""
        found: Path | None = None
        if self._world.is_main:
            for candidate in reversed(self._all()):
                problem = verify(candidate)
                if problem is None:
                    found = candidate
                    break
                say(f"damaged checkpoint passed over: {problem}")
        return distributed.from_main(self._world, found)

    def _publish(self, temporary: Path, final: Path) -> None:
        files = sorted(p for p in temporary.rglob("*") if p.is_file())
        listed = {}
        for path in files:
            listed[str(path.relative_to(temporary))] = [path.stat().st_size, _sha256(path)]
            _fsync(path)
        for folder in {p.parent for p in files} | {temporary}:
            _fsync(folder)
        # The same step again: left by a run that stopped between rename and marker, or damaged.
        shutil.rmtree(final, ignore_errors=True)
        os.rename(temporary, final)
        _fsync(self.folder)
        _write_atomically(final / _MARKER, json.dumps({"format": FORMAT, "files": listed}))
        _write_atomically(self.folder / "latest", final.name + "\n")
        self._prune()

    def _prune(self) -> None:
        complete = [p for p in self._all() if (p / _MARKER).exists()]
        for old in complete[: -self._keep_last]:
            step = int(_NAME.fullmatch(old.name)[1])
            if self._keep_every and step % self._keep_every == 0:
                continue
            # Without its marker it is no checkpoint, so a kill in here leaves no half of one.
            (old / _MARKER).unlink()
            shutil.rmtree(old, ignore_errors=True)

    def _all(self) -> list[Path]:
        if not self.folder.is_dir():
            return []
        return sorted(p for p in self.folder.iterdir() if _NAME.fullmatch(p.name))


def verify(folder: Path) -> str | None:
    """What is wrong with a checkpoint folder, in one line; None if every byte is as written."""
    marker = folder / _MARKER
    try:
        listed = json.loads(marker.read_text(encoding="utf-8"))["files"]
    except FileNotFoundError:
        return f"{folder}: never finished ({_MARKER} is missing)"
    except (OSError, ValueError, KeyError):
        return f"{marker}: unreadable"
    for name, (size, digest) in listed.items():
        path = folder / name
        if not path.is_file():
            return f"{path}: missing"
        if path.stat().st_size != size:
            return f"{path}: {path.stat().st_size} bytes where {size} were written"
        if _sha256(path) != digest:
            return f"{path}: its bytes have changed since it was written"
    return None


def resolve(path: str | Path) -> Path:
    """A checkpoint folder from what a user names: itself, a run folder, or `.../checkpoints`.

    UserError if there is none or it is damaged.
    """
    path = Path(path)
    if not path.is_dir():
        raise UserError(f"{path}: no such folder")
    if (path / "state.json").exists():
        problem = verify(path)
        if problem:
            raise UserError(problem)
        return path
    folder = path if path.name == "checkpoints" else path / "checkpoints"
    candidates = [p for p in folder.glob("step-*") if _NAME.fullmatch(p.name)]
    for candidate in sorted(candidates, reverse=True):
        if verify(candidate) is None:
            return candidate
    raise UserError(f"{path}: no checkpoint found (no {_MARKER} in it or below checkpoints/)")


def read_state(folder: Path) -> State:
    path = folder / "state.json"
    try:
        return State.from_json(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None


def load_model_state(
    path: str | Path,
) -> tuple[dict[str, torch.Tensor], PretrainConfig, State, Path]:
    """(fp32 weights by name, resolved config, state, folder) of a checkpoint, without a GPU."""
    # DeepSpeed is slow to import, and reading the state alone does not need it.
    from pretrain.engine import read_weights

    folder = resolve(path)
    state = read_state(folder)
    config = check(state.config, PretrainConfig, str(folder / "state.json"))
    return read_weights(folder / "engine"), config, state, folder


class _write_errors:
    """torch.save reports a full disk as RuntimeError; here it is an OSError with the folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, _trace: Any) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, UserError):
            text = str(error)
            if "PytorchStreamWriter" in text or "write" in text.lower():
                raise OSError(None, f"writing failed ({text.splitlines()[0]})", str(self._folder))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write_atomically(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    _fsync(temporary)
    os.replace(temporary, path)
    _fsync(path.parent)
