"""Checkpoints: written whole or not at all, found again by themselves, checked before use.

    RUN/checkpoints/step-00000500/   engine/   weights and moments (`pretrain/fragments.py`)
                                     state.json  position, history, resolved config, versions
                                     vocab.txt   the dataset's vocabulary
                                     COMPLETE.json  written last: size and sha256 of every file
    RUN/checkpoints/latest           the name of the newest one

A folder is written as `writing-NAME`, flushed to disk and renamed when it is whole; `latest` moves
after it; one that goes takes such a name first. So a folder `step-N` is a whole checkpoint, or was
damaged. Training waits only for the copy to host memory, beside a GPU only its next update does;
threads write the copies (`pretrain/writer.py`).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import resource
import shutil
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from configs.load import check
from core.console import quantity
from core.errors import TryAgain, UserError, disk_error, may_pass
from core.files import (
    Lock,
    disk_errors,
    named,
    nearest_folder,
    read_regular,
    remove_folder,
    replace_folder,
    sha256,
    sync,
    unfinished,
    write_atomically,
)
from data_pipeline.stream.dataset import Dataset
from data_pipeline.stream.state import StreamState, resume
from pretrain import distributed
from pretrain.config import CheckpointConfig, PretrainConfig
from pretrain.distributed import World
from pretrain.fragments import check_shapes, read_weights
from pretrain.origin import readable
from pretrain.run_state import (
    FORMAT,
    Position,
    State,
    check_facts,
    check_phase,
    check_resumable,
    check_same_function,
)
from pretrain.writer import Failed, Writer

_MARKER = "COMPLETE.json"
_NAME = re.compile(r"step-([0-9]{8})")
_WRITING = re.compile(f"writing-{_NAME.pattern}")
_PASSED_OVER = "damaged checkpoint passed over: {}"
_LISTED = re.compile(r"(?:engine/)?\w[\w.-]{0,200}", re.ASCII)  # names of a checkpoint's files
_OTHER_FILES = 7  # of a checkpoint, its two folders counted, beside one a rank
_LAST_WRITE_SECONDS = 120  # that a run which ends by an error gives the write on its way


@dataclass(frozen=True)
class Written:
    """What one rank has written: size and sha256 of each file, by its name in the checkpoint."""

    files: dict[str, tuple[int, str]]
    seconds: float


@dataclass(frozen=True)
class Published:
    """A checkpoint that is whole; notes: what is to be said of it."""

    notes: list[str]
    seconds: float
    bytes: int


class Checkpoints:
    """The checkpoints of one run folder. Methods marked (all ranks) are collective.

    `record` gets numbers by tag when a write has ended: seconds that training stood still, seconds
    of the writing, bytes, share of the time so far. lock: the folder's, on the rank that holds it.
    """

    def __init__(
        self,
        run_dir: Path,
        world: World,
        config: CheckpointConfig,
        say: Callable[[str], None] = print,
        record: Callable[[dict[str, float]], None] = lambda values: None,
        lock: Lock | None = None,
    ) -> None:
        self.folder = run_dir / "checkpoints"
        self.saved_step = -1  # of the newest that is written, or on its way
        self.failed_in_a_row = 0
        self._world = world
        self._config = config
        self.say, self._record = say, record
        self._writer: Writer[Written, Published] = Writer(world)
        self._begun = False
        self._held, self._lock = lock, run_dir / "lock"
        self._locked_by: tuple[int, int] | None = None
        self._place: tuple[int, int] | None = None
        with contextlib.suppress(OSError):
            self._locked_by = lock.identity if lock is not None else _identity(self._lock)
            self._place = _identity(run_dir)
            # As long as it is open, no folder that is made anew has its number.
            held = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY)
            weakref.finalize(self, os.close, held)
        self._began = time.perf_counter()
        self._stalls = 0.0
        self._stall = 0.0  # of the one on its way

    def check_disk(self, size: int, step: int, total_steps: int) -> None:
        """(all ranks) Refuse, or warn of, a run from `step` on whose checkpoints, of
        `size` bytes each, would not fit, or might not be written."""

        def look() -> str:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._begun = True
            room = disk_room(self.folder, self._config, size, step, total_steps)
            if room.needed:
                check_files(self.folder, size, self._world.size)
            return room.check(self._config)

        if warning := distributed.by_main(self._world, look):
            self.say(f"warning: {warning}")

    def save(
        self, state: State, vocabulary: bytes, snapshot: Callable[[], Callable[[Path], list[str]]]
    ) -> None:
        """(all ranks) Take a checkpoint: copied at once, written in the background.

        `snapshot()` copies this rank's tensors to host memory; what it returns writes them into a
        folder and gives the names of the files. One is written at a time: an earlier one that is
        still on its way is waited for.
        """
        self.wait()
        began = time.perf_counter()
        self.check_place()
        final = step_folder(self.folder, state.position.step)
        temporary = final.with_name(f"writing-{final.name}")

        def make() -> None:
            remove_folder(temporary)
            temporary.mkdir()
            (temporary / "engine").mkdir()

        try:
            distributed.by_main(self._world, make)
        except UserError as error:
            self._failed(str(error))
            return
        plain = {"state.json": state.to_json().encode(), "vocab.txt": vocabulary}
        write = snapshot()
        self._writer.start(
            lambda: _write(temporary, write, plain if self._world.is_main else {}),
            lambda parts: self._publish(temporary, final, parts),
            lambda: remove_folder(temporary),
        )
        self.saved_step = state.position.step
        self._stall = time.perf_counter() - began
        if not self._config.asynchronous:
            self.wait()

    def poll(self) -> None:
        """(all ranks) Once a step: takes note of a write that has ended.

        TryAgain when more than `checkpoint.max_failed_writes` in a row have failed.
        """
        self._ended(self._writer.poll())

    def wait(self) -> None:
        """(all ranks) The same, when the write on its way has ended."""
        began, busy = time.perf_counter(), self._writer.busy
        ended = self._writer.wait()
        if busy:
            self._stall += time.perf_counter() - began
        self._ended(ended)

    def close(self) -> None:
        """After an error: what is being written may still become a checkpoint."""
        self._writer.join(_LAST_WRITE_SECONDS)

    def newest(self, before: int | None = None) -> Path | None:
        """(all ranks) The newest checkpoint that passes its checksums, of steps below `before` if
        that is given; damaged ones are said. UserError where there are no others: a run does not
        begin anew beside them, or where one cannot be seen now (TryAgain) or by this user.

        What a killed run was still writing is removed.
        """

        def look() -> tuple[Path | None, list[str]]:
            half = [p for p in self.folder.glob("writing-*") if _WRITING.fullmatch(p.name)]
            half += [path for path, name in unfinished(self.folder) if name == "latest"]
            for left in half:
                remove_folder(left)
            found, damaged = _newest_whole(self.folder, before)
            if damaged and found is None and before is None:
                raise _none_whole(self.folder, damaged)
            return found, damaged

        found, damaged = distributed.by_main(self._world, look)
        for problem in damaged:
            self.say(_PASSED_OVER.format(problem))
        return found

    def oldest(self) -> Path | None:
        """(all ranks) The oldest checkpoint that passes its checksums."""

        def look() -> Path | None:
            with disk_errors(self.folder, "run_dir"):
                return next((p for p in _all(self.folder) if verify(p) is None), None)

        return distributed.by_main(self._world, look)

    def check_place(self) -> None:
        """(all ranks) UserError when the run's folder is gone, or its lock is not the one of the
        beginning: there may be another run in it."""
        distributed.by_main(self._world, self._find_place)

    def _find_place(self) -> None:
        replaced = UserError(f"run_dir: {self._lock.parent} was removed or replaced under the run")
        if not self._begun:
            with contextlib.suppress(OSError):
                if self._held is not None and not self._held.is_in_place():
                    raise replaced  # since it was locked
            self.folder.mkdir(parents=True, exist_ok=True)
            self._begun = True
        try:
            folder, lock = _identity(self.folder), _identity(self._lock)
            place = _identity(self._lock.parent)
        except OSError:
            return  # the writing says what is wrong, and may be tried again
        pairs = (self._place, place), (self._locked_by, lock)
        if folder is None or any(None not in pair and pair[0] != pair[1] for pair in pairs):
            raise replaced

    def forget_after(self, checkpoint: Path) -> None:
        """Remove the newer ones, which the run has turned back from; what is no whole checkpoint
        stays for whoever can mend it. UserError, and all stay, where one cannot be seen."""
        for newer in [p for p in _all(self.folder) if p > checkpoint and _bytes(p) is not None]:
            _remove(newer)
        for note in self._point_to(checkpoint):
            self.say(note)

    def _ended(self, ended: Published | Failed | None) -> None:
        if ended is None:
            return
        self._stalls += self._stall
        if isinstance(ended, Failed):
            self.saved_step = -1
            self._failed(ended.why)
            return
        self.failed_in_a_row = 0
        for note in ended.notes:
            self.say(note)
        self._record(
            {
                "checkpoint/stall_seconds": self._stall,
                "checkpoint/write_seconds": ended.seconds,
                "checkpoint/bytes": ended.bytes,
                "checkpoint/stall_share": self._stalls / (time.perf_counter() - self._began),
            }
        )

    def _failed(self, why: str) -> None:
        self.failed_in_a_row += 1
        if self.failed_in_a_row > self._config.max_failed_writes:
            # If the cause lasts, as a full disk does, the next start says so and ends with 2.
            raise TryAgain(f"{why}; {self.failed_in_a_row} checkpoints in a row failed")
        self.say(f"checkpoint not written, older ones stand: {why}")

    def _publish(self, temporary: Path, final: Path, parts: list[Written]) -> Published:
        """On rank 0's thread: the folder becomes a checkpoint."""
        files = {name: facts for part in parts for name, facts in part.files.items()}
        for name, (size, _) in files.items():
            path = temporary / name
            if not path.is_file() or path.stat().st_size != size:
                raise UserError(f"{path}: another rank's file is not seen here: run_dir must be "
                                "one folder for all nodes")  # fmt: skip
        for folder in {(temporary / name).parent for name in files} | {temporary}:
            sync(folder)
        marker = json.dumps({"format": FORMAT, "files": dict(sorted(files.items()))})
        write_atomically(temporary / _MARKER, marker)
        replace_folder(temporary, final)  # of the same step there may be a damaged one
        return Published(
            notes=[*self._point_to(final), *self._prune(final)],
            seconds=max(part.seconds for part in parts),
            bytes=sum(size for size, _ in files.values()),
        )

    def _point_to(self, newest: Path) -> list[str]:
        """`latest` leads to it; what is to be said where it cannot."""
        try:
            write_atomically(self.folder / "latest", f"{newest.name}\n")
        except OSError as error:
            return [f"{self.folder / 'latest'} does not lead to {newest.name}: {error.strerror}"]
        return []

    def _prune(self, newest: Path) -> list[str]:
        """Remove what the config does not keep; what is to be said of it."""
        try:
            with disk_errors(self.folder):
                return self._removed(newest)
        except UserError as error:
            return [f"old checkpoints stay: {error}"]

    def _removed(self, newest: Path) -> list[str]:
        sizes = _sizes([p for p in _all(self.folder) if p <= newest])
        if newest not in sizes:
            return [f"old checkpoints stay: {newest / _MARKER} cannot be read again"]
        complete = list(sizes)
        kept = [p for p in complete[:-1] if self._keeps(p, complete)]
        limit, notes = self._config.max_total_gb * 1e9, []
        total = sum(sizes[p] for p in [*kept, newest])
        while limit and total > limit and kept:
            oldest = kept.pop(0)
            total -= sizes[oldest]
            notes.append(
                f"{oldest.name} is dropped before its time: the checkpoints would be over "
                f"checkpoint.max_total_gb: {self._config.max_total_gb:g}"
            )
        for old in sorted(set(complete) - {*kept, newest}):
            try:
                left = _remove(old)
            except OSError as error:  # the others go all the same
                notes.append(f"{old} stays: {error.strerror}")
            else:
                notes += [f"{left} stays: it could not be removed whole"] if left else []
        return notes

    def _keeps(self, checkpoint: Path, complete: list[Path]) -> bool:
        every, step = self._config.keep_every, _step(checkpoint)
        return checkpoint in complete[-self._config.keep_last :] or (every and step % every == 0)


@dataclass(frozen=True)
class DiskRoom:
    """Bytes that a run's checkpoints will take beyond those that are there, and what is free; with
    less than `least` the run is refused."""

    folder: Path
    needed: int
    free: int
    least: int

    def check(self, config: CheckpointConfig) -> str:
        """What is to be said where they do not fit, else "". UserError with less than `least`."""
        if self.free >= self.needed:
            return ""
        also = f", checkpoint.keep_every: {config.keep_every}" if config.keep_every else ""
        line = (
            f"not enough disk: {self.folder} has {quantity(self.free, 'B')} free and the "
            f"checkpoints need {quantity(self.needed, 'B')} more (checkpoint.keep_last: "
            f"{config.keep_last}{also}, plus one being written)"
        )
        if self.free < self.least:
            raise UserError(line)
        return line


def disk_room(
    folder: Path, config: CheckpointConfig, size: int, step: int, total_steps: int
) -> DiskRoom:
    """Of a run's `checkpoints` folder, from `step` on, with checkpoints of `size` bytes: what it
    has still to write, but no more than the newest, those that `keep_every` keeps to its end, and
    one being written. A run that goes on is refused only where there is no room for one.

    Nothing is made: free is the disk of the nearest folder above that is there."""
    limit = config.max_total_gb * 1e9 or math.inf
    left = -(-(total_steps - step) // config.every_steps)
    with disk_errors(folder, "run_dir"):
        there = [_step(p) for p in _all(folder) if not p.is_symlink()]
        free = shutil.disk_usage(nearest_folder(folder)).free
    count = min(config.keep_last, len(there) + left)
    if config.keep_every:
        every = math.lcm(config.every_steps, config.keep_every)
        count += sum(s % config.keep_every == 0 for s in there)
        count += total_steps // every - step // every
    kept = max(int(min(count * size, limit)), size)
    needed = max(kept + size - len(there) * size, size) if left > 0 else 0
    return DiskRoom(folder, needed, free, least=min(needed, size) if step else needed)


def check_files(folder: Path, size: int, ranks: int) -> None:
    """UserError where the disk of a run's `checkpoints` folder takes no more files, or this process
    may write none there, or none as large as a rank's share of `size` bytes."""
    limit, share = resource.getrlimit(resource.RLIMIT_FSIZE)[0], size // ranks
    if limit != resource.RLIM_INFINITY and limit < share:
        raise UserError(
            f"this process may write files of {quantity(limit, 'B')} (ulimit -f), and a "
            f"checkpoint has one of {quantity(share, 'B')} or more"
        )
    with disk_errors(folder, "run_dir"):
        above = nearest_folder(folder)
        disk, needed = os.statvfs(above), ranks + _OTHER_FILES
    # One that is read-only may be mounted anew before the first checkpoint.
    if not (os.access(above, os.W_OK | os.X_OK) or disk.f_flag & os.ST_RDONLY):
        raise UserError(
            f"run_dir: {above}: checkpoints cannot be written there (Permission denied)"
        )
    if disk.f_files and disk.f_favail < needed:  # 0: of a disk that does not count them
        raise UserError(
            f"{folder}: its disk has room for {disk.f_favail} more files (df -i), and a "
            f"checkpoint has {needed}"
        )


def newest_checkpoint(folder: Path) -> tuple[int, State] | None:
    """In a run's `checkpoints` folder: step and state of the newest whole checkpoint by sizes, as
    checksums are not read; None where there is none. TryAgain where one cannot be read now,
    NotAllowed where this user may not read the newest."""

    def state_of(checkpoint: Path) -> State:
        state = read_state(checkpoint)
        if problem := verify(checkpoint, checksums=False):
            raise UserError(problem)
        return state

    with disk_errors(folder, "run_dir"):
        checkpoints = _all(folder)[::-1]
    found = next(readable(checkpoints, state_of), None)
    return None if found is None else (_step(found[0]), found[1])


def newest_step(folder: Path) -> int:
    """Of `newest_checkpoint`; 0 where there is none."""
    found = newest_checkpoint(folder)
    return 0 if found is None else found[0]


def begun(config: PretrainConfig, dataset: Dataset | None = None) -> tuple[int, int | None]:
    """By `newest_checkpoint` of the run: how many phases are over, and the rows a step of the next
    one, None where it has not begun. UserError where the config has not so many; with the data set
    for all for which training would not go on from there, as where no checkpoint is whole."""
    folder = Path(config.run_dir) / "checkpoints"
    found = newest_checkpoint(folder)
    if found is None:
        if dataset is not None and (there := _all(folder)):
            damaged = (verify(p, checksums=False) or f"{p}: cannot be read" for p in there[::-1])
            raise _none_whole(folder, damaged)
        return 0, None
    step, state = found
    at, stream = step_folder(folder, step), state.stream
    if dataset is None:
        check_phase(state, at, config)
    else:
        check_resumable(state, at, config, dataset.manifest)
        if stream is not None:
            _check_data_position(stream, state.position, config, dataset)
    rows = stream.rows_per_step if stream is not None else 0
    return state.position.phase, rows or None


def _none_whole(folder: Path, damaged: Iterable[str]) -> UserError:
    return UserError(
        f"run_dir: no checkpoint of this run is whole: {'; '.join(damaged)}; mend one, or to begin "
        f"anew take another run_dir or remove {folder}"
    )


def _check_data_position(
    stream: StreamState, at: Position, config: PretrainConfig, dataset: Dataset
) -> None:
    """UserError where the data of the phase cannot go on from there, if steps of it are left."""
    phase, seed = config.phases[at.phase], config.seed
    if at.phase_step < phase.steps:
        planner = dataset.planner(phase, phase_index=at.phase, seed=seed, split="train")
        fresh = StreamState.start(dataset.manifest, planner.settings, seed=seed, phase=at.phase)
        resume(stream, fresh, config.data.accept_changed)


def complete_steps(folder: Path) -> list[int]:
    """Of all complete checkpoints in a run's `checkpoints` folder, by their markers alone. An older
    one that this user may not read is left out; of the newest that is a UserError."""
    with disk_errors(folder, "run_dir"):
        return [_step(p) for p in _sizes(_all(folder))]


def step_folder(folder: Path, step: int) -> Path:
    """Of a step's checkpoint in a run's `checkpoints` folder."""
    return folder / f"step-{step:08d}"


def digest(checkpoint: Path) -> str | None:
    """Of all that a whole checkpoint holds: sha256 of its marker, which lists that of every file;
    None where it is gone."""
    with disk_errors(checkpoint, "run_dir"):
        marker = checkpoint / _MARKER
        return sha256(marker) if marker.exists() else None


def _all(folder: Path) -> list[Path]:
    try:
        return sorted(p for p in folder.iterdir() if _NAME.fullmatch(p.name))
    except FileNotFoundError:
        return []


def _identity(path: Path) -> tuple[int, int] | None:
    """What the file system knows it by; None where it is not there."""
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino


def _step(checkpoint: Path) -> int:
    return int(_NAME.fullmatch(checkpoint.name)[1])


def verify(folder: Path, *, checksums: bool = True) -> str | None:
    """What is wrong with a checkpoint folder, in one line; None if every byte is as written, or
    without `checksums` every file's size. UserError where that cannot be seen (`_damage`)."""
    listed = _listed(folder)
    if listed is None:
        return f"{folder / _MARKER}: missing, or does not list a checkpoint's files"
    for path, (size, digest) in ((folder / name, facts) for name, facts in listed.items()):
        try:
            if path.stat().st_size != size:
                return f"{path}: {path.stat().st_size} bytes where {size} were written"
            if checksums and sha256(path) != digest:
                return f"{path}: its bytes have changed since it was written"
        except OSError as error:
            return _damage(error, path)
    return None


def _damage(error: OSError, path: Path) -> str:
    """What it is of a checkpoint's file. UserError where the file may be good all the same: this
    user may not read it, or it cannot be read now (TryAgain)."""
    if may_pass(error) or isinstance(error, PermissionError):
        raise disk_error(error, path) from None
    return f"{path}: {error.strerror}"


def _newest_whole(folder: Path, before: int | None = None) -> tuple[Path | None, list[str]]:
    """The newest whole checkpoint of a `checkpoints` folder, of steps below `before` if that is
    given, and what is wrong with newer ones."""
    damaged: list[str] = []
    with disk_errors(folder, "run_dir"):
        candidates = [p for p in _all(folder) if before is None or _step(p) < before]
    for candidate in reversed(candidates):
        problem = verify(candidate)
        if problem is None:
            return candidate, damaged
        damaged.append(problem)
    return None, damaged


def resolve(path: str | Path, passed_over: list[str] | None = None) -> Path:
    """A checkpoint folder from what a user names: itself, a run folder, or `.../checkpoints`.

    Of a run the newest whole one; what is wrong with newer ones is added to `passed_over`, a line
    each. UserError if there is none or it is damaged.
    """
    path = Path(path)
    with disk_errors(path):
        if not path.is_dir():
            raise UserError(f"{path}: no such folder")
        itself = any((path / name).exists() for name in ("state.json", _MARKER))
    if itself:
        problem = verify(path)
        if problem:
            raise UserError(problem)
        return path
    folder = path if path.name == "checkpoints" else path / "checkpoints"
    found, damaged = _newest_whole(folder)
    if found is None:
        what = f"no checkpoint found (no {_MARKER} in it or below checkpoints/)"
        if damaged:
            what = f"no whole checkpoint: {'; '.join(damaged)}"
        raise UserError(f"{path}: {what}")
    if passed_over is not None:
        passed_over += map(_PASSED_OVER.format, damaged)
    return found


def read_state(folder: Path) -> State:
    path = folder / "state.json"
    with disk_errors(path):
        data = read_regular(path)
    return State.from_json(data, str(path))


def engine_files(folder: Path) -> dict[str, str]:
    """What the marker of a checkpoint lists below engine/, and no more may be read of it: sha256
    by name."""
    listed = {name: digest for name, (_, digest) in (_listed(folder) or {}).items()}
    return {n.removeprefix("engine/"): d for n, d in listed.items() if n.startswith("engine/")}


def load_model_state(
    path: str | Path, passed_over: list[str] | None = None, average: int = 1
) -> tuple[dict[str, torch.Tensor], PretrainConfig, State, Path]:
    """(fp32 weights by name, resolved config, state, folder) of a checkpoint, without a GPU.

    `passed_over`: as in `resolve`. average: the weights are the mean of so many of the run's whole
    checkpoints, up to this one; UserError where it has fewer.
    """
    folder = resolve(path, passed_over)
    state = read_state(folder)
    check_facts(state, folder)
    config = check(state.config, PretrainConfig, str(folder / "state.json"))
    check_phase(state, folder, config)
    weights = read_weights(folder / "engine", engine_files(folder))
    if average > 1:
        earlier = _last_whole(folder, state.position.step, average, passed_over)[1:]
        for other in earlier:
            check_same_function(read_state(other), other, state, folder)
        weights = _mean(weights, earlier)
    return weights, config, state, folder


def _last_whole(folder: Path, step: int, count: int, passed_over: list[str] | None) -> list[Path]:
    """This whole checkpoint, of `step`, whatever its name is, and the run's whole ones before it,
    the newest first; `passed_over`: as in `resolve`."""
    found, problems = [folder], []
    for earlier in reversed([p for p in _all(folder.parent) if _step(p) < step]):
        if len(found) == count:
            break
        if problem := verify(earlier):
            problems.append(problem)
        else:
            found.append(earlier)
    if len(found) < count:
        raise UserError(
            f"{folder.parent}: {len(found)} whole checkpoint(s) up to {folder.name}, not {count}"
            + "".join(f"; {problem}" for problem in problems)
        )
    if passed_over is not None:
        passed_over += map(_PASSED_OVER.format, problems)
    return found


def _mean(newest: dict[str, torch.Tensor], earlier: Sequence[Path]) -> dict[str, torch.Tensor]:
    """fp32, summed in fp64."""
    total = {name: t.double() for name, t in newest.items() if t.is_floating_point()}
    shapes = {name: t.shape for name, t in newest.items()}
    for folder in earlier:
        found = read_weights(folder / "engine", engine_files(folder))
        check_shapes({name: t.shape for name, t in found.items()}, shapes, str(folder))
        for name, sum_ in total.items():
            sum_ += found[name]
    return newest | {name: (t / (1 + len(earlier))).float() for name, t in total.items()}


def _write(
    folder: Path, write_engine: Callable[[Path], list[str]], plain: dict[str, bytes]
) -> Written:
    """On every rank's thread: this rank's files, on disk, with their sizes and checksums."""
    began = time.perf_counter()
    names = [f"engine/{name}" for name in write_engine(folder / "engine")]
    for name, data in plain.items():
        with named(folder / name):
            (folder / name).write_bytes(data)
    files = {}
    for name in [*names, *plain]:
        path = folder / name
        sync(path)
        files[name] = path.stat().st_size, sha256(path)
    return Written(files, time.perf_counter() - began)


def _remove(checkpoint: Path) -> Path | None:
    """What is left of it, which is no checkpoint. A kill in here leaves no half of it."""
    away = checkpoint.with_name(f"writing-{checkpoint.name}")
    try:
        replace_folder(checkpoint, away)
    except OSError as error:
        error.filename = str(checkpoint)
        raise
    remove_folder(away)
    return away if away.exists() else None


def _listed(checkpoint: Path) -> dict[str, tuple[int, str]] | None:
    """The marker's files with bytes and sha256; None where there is none, or it does not list a
    checkpoint's. UserError where that cannot be seen (`_damage`)."""
    path = checkpoint / _MARKER
    try:
        files = json.loads(read_regular(path).decode("utf-8"))["files"]
        listed = {name: (int(size), str(digest)) for name, (size, digest) in files.items()}
    except OSError as error:
        _damage(error, path)
        return None
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError):
        return None
    within = all(map(_LISTED.fullmatch, listed))
    engine = any(name.startswith("engine/") for name in listed)
    return listed if {"state.json", "vocab.txt"} <= listed.keys() and engine and within else None


def _bytes(checkpoint: Path) -> int | None:
    listed = _listed(checkpoint)
    return None if listed is None else sum(size for size, _ in listed.values())


def _sizes(checkpoints: Sequence[Path]) -> dict[Path, int]:
    """`_bytes` of those of them, oldest first, that are whole by their marker and `readable`."""
    found = dict(readable(checkpoints[::-1], _bytes))
    return {path: size for path in checkpoints if (size := found.get(path)) is not None}
