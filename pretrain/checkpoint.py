"""Checkpoints: written whole or not at all, found again by themselves, checked before use.

    RUN/checkpoints/step-00000500/   engine/   DeepSpeed's files
                                     state.json  position, history, resolved config, versions
                                     vocab.txt   the dataset's vocabulary
                                     COMPLETE.json  written last: size and sha256 of every file
    RUN/checkpoints/latest           the name of the newest one

A folder is written as `writing-NAME`, flushed to disk and renamed; COMPLETE.json follows; `latest`
moves after it. What has no valid COMPLETE.json is not a checkpoint. Training waits only until its
tensors are copied to host memory; threads write the copies (`pretrain/writer.py`).
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from configs.load import check
from core.errors import UserError
from core.files import replace_folder, sha256, sync, write_atomically
from data_pipeline.stream.state import StreamState
from pretrain import distributed
from pretrain.config import CheckpointConfig, PretrainConfig
from pretrain.distributed import World
from pretrain.engine_files import read_weights
from pretrain.rollback import Rollback
from pretrain.writer import Writer

FORMAT = "bert-checkpoint-1"
_MARKER = "COMPLETE.json"
_NAME = re.compile(r"step-(\d{8})")
_LAST_WRITE_SECONDS = 120  # that a run which ends by an error gives the write on its way


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
    rollbacks: tuple[Rollback, ...] = field(default=())

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
            found = plain.get("rollbacks", ())  # checkpoints of older versions have none
            plain["rollbacks"] = tuple(Rollback.from_dict(r) for r in found)
            if plain["stream"] is not None:
                plain["stream"] = StreamState.from_dict(plain["stream"])
            return cls(**plain)
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{where}: not a checkpoint's state: {error}") from None


class Checkpoints:
    """The checkpoints of one run folder. Methods marked (all ranks) are collective."""

    def __init__(
        self,
        run_dir: Path,
        world: World,
        config: CheckpointConfig,
        say: Callable[[str], None] = print,
    ) -> None:
        self.folder = run_dir / "checkpoints"
        self.saved_step = -1  # of the newest that is written, or on its way
        self.failed_in_a_row = 0
        self._world = world
        self._config = config
        self._say = say
        self._writer = Writer(world)
        self._began = time.perf_counter()
        self._stalls = 0.0
        self._stall = 0.0  # of the one on its way

    def check_disk(self, parameters: int) -> None:
        """(all ranks) Refuse a run whose checkpoints would not fit (16 bytes a parameter)."""
        keep_last, limit = self._config.keep_last, self._config.max_total_gb * 1e9
        with distributed.errors_shared(self._world):
            if self._world.is_main:
                self.folder.mkdir(parents=True, exist_ok=True)
                one = 16 * parameters
                kept = min(keep_last * one, limit) if limit else keep_last * one
                there = sum(p.stat().st_size for p in self.folder.rglob("*") if p.is_file())
                needed = max(kept, one) + one - there
                free = shutil.disk_usage(self.folder).free
                if free < needed:
                    raise UserError(
                        f"not enough disk: {self.folder} has {free / 1e9:.1f} GB free and the "
                        f"checkpoints need {needed / 1e9:.1f} GB more (checkpoint.keep_last: "
                        f"{keep_last}, plus one being written)"
                    )

    def save(
        self, state: State, vocabulary: bytes, snapshot: Callable[[], Callable[[Path], list[str]]]
    ) -> dict[str, float]:
        """(all ranks) Take a checkpoint: copied at once, written in the background.

        `snapshot()` copies this rank's tensors to host memory; what it returns writes them into a
        folder and gives the names of the files. One is written at a time: an earlier one that is
        still on its way is waited for. Returns what there is to record, as `poll`.
        """
        measured = self.wait()
        began = time.perf_counter()
        name = f"step-{state.position.step:08d}"
        temporary, final = self.folder / f"writing-{name}", self.folder / name
        try:
            with distributed.errors_shared(self._world):
                if self._world.is_main:
                    shutil.rmtree(temporary, ignore_errors=True)
                    (temporary / "engine").mkdir(parents=True)
        except UserError as error:
            self._failed(str(error))
            return measured
        plain = {"state.json": state.to_json().encode(), "vocab.txt": vocabulary}
        write = snapshot()
        self._writer.start(
            lambda: _write(temporary, write, plain if self._world.is_main else {}),
            lambda parts: self._publish(temporary, final, parts),
            lambda: _discard(temporary, final),
        )
        self.saved_step = state.position.step
        self._stall = time.perf_counter() - began
        return measured if self._config.asynchronous else self.wait()

    def poll(self) -> dict[str, float]:
        """(all ranks) Once a step. What there is to record of a write that has ended: seconds
        that training stood still, seconds of the writing, bytes, share of the time so far.

        UserError when more than `checkpoint.max_failed_writes` in a row have failed.
        """
        return self._ended(self._writer.poll())

    def wait(self) -> dict[str, float]:
        """(all ranks) The same, when the write on its way has ended."""
        began, busy = time.perf_counter(), self._writer.busy
        ended = self._writer.wait()
        if busy:
            self._stall += time.perf_counter() - began
        return self._ended(ended)

    def close(self) -> None:
        """After an error: what is being written may still become a checkpoint."""
        self._writer.join(_LAST_WRITE_SECONDS)

    def newest(self) -> Path | None:
        """(all ranks) The newest checkpoint that passes its checksums; damaged ones are said.

        What a killed run was still writing is removed.
        """
        found: Path | None = None
        if self._world.is_main:
            for left in self.folder.glob("writing-*"):
                shutil.rmtree(left, ignore_errors=True)
            for candidate in reversed(self._all()):
                problem = verify(candidate)
                if problem is None:
                    found = candidate
                    break
                self._say(f"damaged checkpoint passed over: {problem}")
        return distributed.from_main(self._world, found)

    def _ended(self, ended: tuple[Any, str | None] | None) -> dict[str, float]:
        if ended is None:
            return {}
        self._stalls += self._stall
        done, failure = ended
        if failure is not None:
            self.saved_step = -1
            self._failed(failure)
            return {}
        self.failed_in_a_row = 0
        for note in done["notes"]:
            self._say(note)
        return {
            "checkpoint/stall_seconds": self._stall,
            "checkpoint/write_seconds": done["seconds"],
            "checkpoint/bytes": done["bytes"],
            "checkpoint/stall_share": self._stalls / (time.perf_counter() - self._began),
        }

    def _failed(self, why: str) -> None:
        self.failed_in_a_row += 1
        if self.failed_in_a_row > self._config.max_failed_writes:
            raise UserError(f"{why}; {self.failed_in_a_row} checkpoints in a row failed")
        self._say(f"checkpoint not written, older ones stand: {why}")

    def _publish(self, temporary: Path, final: Path, parts: list[dict[str, Any]]) -> Any:
        """On rank 0's thread: the folder becomes a checkpoint."""
        files = {name: facts for part in parts for name, facts in part["files"].items()}
        for name, (size, _) in files.items():
            path = temporary / name
            if not path.is_file() or path.stat().st_size != size:
                raise UserError(f"{path}: another rank's file is not seen here: run_dir must be "
                                "one folder for all nodes")  # fmt: skip
        for folder in {(temporary / name).parent for name in files} | {temporary}:
            sync(folder)
        # The same step again: left by a run that stopped between rename and marker, or damaged.
        replace_folder(temporary, final)
        marker = json.dumps({"format": FORMAT, "files": dict(sorted(files.items()))})
        write_atomically(final / _MARKER, marker)
        write_atomically(self.folder / "latest", f"{final.name}\n")
        return {
            "notes": self._prune(),
            "seconds": max(part["seconds"] for part in parts),
            "bytes": sum(size for size, _ in files.values()),
        }

    def _prune(self) -> list[str]:
        """Remove what the config does not keep; what is to be said of it."""
        try:
            return self._removed()
        except OSError as error:
            return [f"old checkpoints stay: {error.filename}: {error.strerror}"]

    def _removed(self) -> list[str]:
        complete = [p for p in self._all() if (p / _MARKER).exists()]
        kept = [p for p in complete[:-1] if self._keeps(p, complete)]
        limit, notes = self._config.max_total_gb * 1e9, []
        total = sum(_bytes(p) for p in [*kept, complete[-1]])
        while limit and total > limit and kept:
            oldest = kept.pop(0)
            total -= _bytes(oldest)
            notes.append(
                f"{oldest.name} is dropped before its time: the checkpoints would be over "
                f"checkpoint.max_total_gb: {self._config.max_total_gb:g}"
            )
        for old in set(complete[:-1]) - set(kept):
            # Without its marker it is no checkpoint, so a kill in here leaves no half of one.
            (old / _MARKER).unlink()
        for old in set(self._all()) - set(kept) - {complete[-1]}:
            if old < complete[-1]:
                shutil.rmtree(old, ignore_errors=True)
        return notes

    def _keeps(self, checkpoint: Path, complete: list[Path]) -> bool:
        every, step = self._config.keep_every, int(_NAME.fullmatch(checkpoint.name)[1])
        return checkpoint in complete[-self._config.keep_last :] or (every and step % every == 0)

    def _all(self) -> list[Path]:
        if not self.folder.is_dir():
            return []
        return sorted(p for p in self.folder.iterdir() if _NAME.fullmatch(p.name))


def verify(folder: Path) -> str | None:
    """What is wrong with a checkpoint folder, in one line; None if every byte is as written."""
    marker = folder / _MARKER
    try:
        files = json.loads(marker.read_text(encoding="utf-8"))["files"]
        listed = {name: (size, digest) for name, (size, digest) in files.items()}
        listed["state.json"]
    except FileNotFoundError:
        return f"{folder}: never finished ({_MARKER} is missing)"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{marker}: unreadable"
    for name, (size, digest) in listed.items():
        path = folder / name
        if not path.is_file():
            return f"{path}: missing"
        if path.stat().st_size != size:
            return f"{path}: {path.stat().st_size} bytes where {size} were written"
        if sha256(path) != digest:
            return f"{path}: its bytes have changed since it was written"
    return None


def resolve(path: str | Path, passed_over: list[str] | None = None) -> Path:
    """A checkpoint folder from what a user names: itself, a run folder, or `.../checkpoints`.

    Of a run the newest whole one; what is wrong with newer ones is added to `passed_over`, a line
    each. UserError if there is none or it is damaged.
    """
    damaged = [] if passed_over is None else passed_over
    path = Path(path)
    if not path.is_dir():
        raise UserError(f"{path}: no such folder")
    if any((path / name).exists() for name in ("state.json", _MARKER)):
        problem = verify(path)
        if problem:
            raise UserError(problem)
        return path
    folder = path if path.name == "checkpoints" else path / "checkpoints"
    candidates = [p for p in folder.glob("step-*") if _NAME.fullmatch(p.name)]
    for candidate in sorted(candidates, reverse=True):
        problem = verify(candidate)
        if problem is None:
            return candidate
        damaged.append(f"damaged checkpoint passed over: {problem}")
    if damaged:
        raise UserError(f"{path}: no whole checkpoint; {'; '.join(damaged)}")
    raise UserError(f"{path}: no checkpoint found (no {_MARKER} in it or below checkpoints/)")


def read_state(folder: Path) -> State:
    path = folder / "state.json"
    try:
        return State.from_json(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None


def load_model_state(
    path: str | Path, passed_over: list[str] | None = None
) -> tuple[dict[str, torch.Tensor], PretrainConfig, State, Path]:
    """(fp32 weights by name, resolved config, state, folder) of a checkpoint, without a GPU.

    `passed_over`: as in `resolve`.
    """
    folder = resolve(path, passed_over)
    state = read_state(folder)
    config = check(state.config, PretrainConfig, str(folder / "state.json"))
    return read_weights(folder / "engine"), config, state, folder


def _write(
    folder: Path, write_engine: Callable[[Path], list[str]], plain: dict[str, bytes]
) -> dict[str, Any]:
    """On every rank's thread: this rank's files, on disk, with their sizes and checksums."""
    began = time.perf_counter()
    names = [f"engine/{name}" for name in write_engine(folder / "engine")]
    for name, data in plain.items():
        (folder / name).write_bytes(data)
    files = {}
    for name in [*names, *plain]:
        path = folder / name
        sync(path)
        files[name] = [path.stat().st_size, sha256(path)]
    return {"files": files, "seconds": time.perf_counter() - began}


def _discard(temporary: Path, final: Path) -> None:
    shutil.rmtree(temporary, ignore_errors=True)
    if not (final / _MARKER).exists():
        shutil.rmtree(final, ignore_errors=True)


def _bytes(folder: Path) -> int:
    return sum(size for size, _ in json.loads((folder / _MARKER).read_bytes())["files"].values())
