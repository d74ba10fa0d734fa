"""The stream: planned rows dealt to ranks as batches, without end, exact, for any world size.

Step s of the phase is rows [s R, (s + 1) R) of the plan; micro-step a, rank r, slot j is row
s R + a W B + r B + j, with R rows a step, W ranks, B rows a micro-batch.  Which process makes a
batch never matters.
"""

from __future__ import annotations

import hashlib
import json
import logging
import pickle
import queue
import signal
import threading
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from core.errors import TryAgain, UserError
from data_pipeline.corpus.shards import Manifest, load_manifest
from data_pipeline.corpus.tokenizer import Tokenizer
from data_pipeline.stream.batch import TENSORS, Batch
from data_pipeline.stream.cache import open_store
from data_pipeline.stream.plan import PLAN_VERSION, PhaseSpec, Planner, StreamConfig, plan_hash
from data_pipeline.stream.reader import Damage, OpenWindow, Store, Window, checked_index
from data_pipeline.stream.rows import Piece, Vocabulary, fill
from data_pipeline.stream.state import StreamState, resume

logger = logging.getLogger(__name__)

Position = tuple[int, int, int]  # epoch, window, row in it
# (all ranks) A small picklable value of every rank, in rank order, on every rank.
Gather = Callable[[Any], list[Any]]

_LIVENESS_SECONDS = 3.0  # between looks at workers that owe a batch


@dataclass(frozen=True)
class Made:
    """A micro-batch with what its optimiser step does to the state."""

    batch: Batch
    after: Position
    rows: int
    tokens: int
    found: tuple[Damage, ...]


@dataclass(frozen=True)
class Failed:
    """What went wrong in a worker; `known`: a line for the user, else a traceback; `lost`: the
    worker died or hangs, which another start may not meet."""

    text: str
    known: bool
    lost: bool = False


class Stream:
    """Micro-batches of one rank, for ever; `micro_steps` of them make an optimiser step.

    Every process plans alone. With `gather` the ranks compare their plans at the start, every
    `data.agree_every` steps and whenever the trainer calls `agree()`; without it, as where one
    process plays several ranks, a stream judges by itself.
    UserError for a dataset that is not there or not whole, a state that does not fit, rows that do
    not divide, damage beyond what the config allows, a worker that died.
    """

    def __init__(
        self,
        data: StreamConfig,
        phase: PhaseSpec,
        *,
        phase_index: int,
        seed: int,
        rank: int,
        world: int,
        micro_batch_rows: int,
        state: StreamState | None = None,
        split: str = "train",
        gather: Gather | None = None,
    ) -> None:
        self._data, self._rank, self._world = data, rank, world
        self._gather = gather if world > 1 else None
        self._step_ends: deque[Made] = deque()
        self._made = 0
        self._waited = 0.0
        self._damage: set[Damage] = set()
        self._batches: Any = None
        self._thread: _Thread | None = None
        failure = ""
        try:
            self._prepare(phase, phase_index, seed, micro_batch_rows, state, split)
        except UserError as error:
            failure = str(error)
        self._compare(failure)

    def _prepare(
        self,
        phase: PhaseSpec,
        phase_index: int,
        seed: int,
        micro_batch_rows: int,
        saved: StreamState | None,
        split: str,
    ) -> None:
        data = self._data
        dataset = open_dataset(data)
        planner = dataset.planner(phase, phase_index=phase_index, seed=seed, split=split)
        manifest = dataset.manifest
        state = StreamState(
            dataset_id=manifest.dataset_id,
            vocab_sha256=manifest.vocab_sha256,
            plan_version=PLAN_VERSION,
            plan_hash=plan_hash(
                planner.settings,
                dataset_id=manifest.dataset_id,
                vocab_sha256=manifest.vocab_sha256,
                seed=seed,
                phase=phase_index,
            ),
            settings=planner.settings,
            seed=seed,
            phase=phase_index,
            rows_per_step=0,
        )
        if saved is not None:
            state = resume(saved, state, data.accept_changed)
            for note in state.history[len(saved.history) :]:
                logger.warning("data position accepted with a change: %s", note)
        position = (state.epoch, state.window, state.row)
        stop = data.on_damage == "stop"
        self._course = Course(planner, dataset.store, position, stop=stop)
        plan = self._course.first_plan()
        if not state.rows_per_step:
            # The same at every start of the phase: the first window, whatever the position is.
            first = plan if (state.epoch, state.window) == (0, 0) else planner.plan(0, 0)
            state = replace(state, rows_per_step=planner.rows_per_step(first))
        self._state = state
        self.rows_per_step = state.rows_per_step
        self.micro_steps = _micro_steps(
            self.rows_per_step, self._world, micro_batch_rows, phase_index, phase
        )
        self.expected_sequences_per_step = self.rows_per_step * plan.sequences / plan.rows
        self._first_digest = plan.digest()
        self._maker = _Maker(
            self._course,
            dataset.vocabulary,
            rows_per_step=self.rows_per_step,
            micro_steps=self.micro_steps,
            micro_batch_rows=micro_batch_rows,
            rank=self._rank,
            world=self._world,
            whole_word_mask=data.whole_word_mask,
            shard_names=[shard.name for shard in planner.shards],
            workers=data.workers,
        )

    @property
    def state(self) -> StreamState:
        """After the last committed step."""
        return self._state

    @property
    def wait_seconds(self) -> float:
        """Seconds the trainer has waited for batches since this was last read."""
        waited, self._waited = self._waited, 0.0
        return waited

    @property
    def damaged(self) -> int:
        """Damaged records this rank has met."""
        return len(self._damage)

    def plan_digest(self) -> str:
        """sha256 (hex) of position, settings and the planned arrays; equal on all ranks."""
        text = json.dumps(self._state.to_dict(), sort_keys=True) + self._first_digest
        return hashlib.sha256(text.encode()).hexdigest()

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Batch:
        began = time.perf_counter()
        if self._thread is None:
            self._thread = self._start()
        made = self._next_made()
        self._waited += time.perf_counter() - began
        self._made += 1
        if self._made % self.micro_steps == 0:
            self._step_ends.append(made)
        if made.found:
            self._note(made.found)
        return made.batch

    def commit_step(self) -> None:
        """The step whose micro-batches came first, of those not yet committed, is trained on."""
        assert self._step_ends, "commit_step before the step's last micro-batch"
        made = self._step_ends.popleft()
        epoch, window, row = made.after
        old = self._state
        self._state = replace(
            old,
            epoch=epoch,
            window=window,
            row=row,
            steps=old.steps + 1,
            rows=old.rows + made.rows,
            sequences=old.sequences + made.batch.step_sequences,
            predictions=old.predictions + made.batch.step_predictions,
            tokens=old.tokens + made.tokens,
        )
        if self._state.steps % self._data.agree_every == 0:
            self.agree()
        elif self._gather is None:
            self._judge_damage(self._damage)

    def agree(self) -> None:
        """All ranks call it at the same step: compares positions and plans, and counts damage over
        all of them. UserError on every rank alike when they differ or too much is damaged."""
        self._compare("")

    def close(self) -> None:
        """Ends workers and threads. The state stays readable."""
        if self._thread is not None:
            self._thread.stop()
        batches, self._batches = self._batches, None
        if batches is not None:
            batches._shutdown_workers()

    def _start(self) -> _Thread:
        data = self._data
        if data.workers == 0:
            return _Thread(lambda number: self._maker.attempt(number, 0), data.prefetch_batches)
        before = signal.getsignal(signal.SIGCHLD)
        with warnings.catch_warnings():
            # torch warns where workers outnumber cores; they mostly wait.
            warnings.simplefilter("ignore", UserWarning)
            self._batches = iter(self._loader())
        # torch has a worker's death raise an error in the middle of whatever the trainer does; here
        # the thread that waits for the worker finds it dead within seconds and names it.
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGCHLD, before)
        # The workers have their own hold on the first window now.
        self._course.release()
        return _Thread(self._receive, data.prefetch_batches)

    def _receive(self, number: int) -> Made | Failed:
        try:
            made = next(self._batches)
        except RuntimeError as error:
            return Failed(self._receive_failure(error), True, lost=True)
        return made if isinstance(made, Failed) else _unpacked(made)

    def _loader(self) -> DataLoader:
        data = self._data
        return DataLoader(
            self._maker,
            batch_size=None,
            sampler=_Count(),  # type: ignore[arg-type]
            num_workers=data.workers,
            prefetch_factor=data.prefetch_batches,
            collate_fn=_same,
            # Forked workers start at once and own the first window's plan already.
            multiprocessing_context="fork",
            worker_init_fn=_init_worker,
            # Its own generator: the default one belongs to the model's dropout.
            generator=torch.Generator(),
        )

    def _next_made(self) -> Made:
        assert self._thread is not None
        made = self._thread_made()
        if made is None:
            # Workers take turns, so the one whose turn it is is late.
            worker = self._made % max(self._data.workers, 1)
            made = Failed(
                f"data worker {worker} gave no batch in {self._data.worker_timeout:g} s at "
                f"{self._maker.shard_in_hand(worker)}",
                True,
                lost=True,
            )
        if isinstance(made, Failed):
            if made.known:
                kind = TryAgain if made.lost else UserError
                raise kind(f"rank {self._rank}: {made.text}")
            raise RuntimeError(f"rank {self._rank}: unexpected error:\n{made.text}")
        return made

    def _thread_made(self) -> Made | Failed | None:
        """What the thread has next; None after `data.worker_timeout` seconds without.

        A worker killed half-way through a message leaves the thread in a read without end, so
        its death is looked for here too.
        """
        assert self._thread is not None
        deadline = time.monotonic() + self._data.worker_timeout
        dead = ""
        while (left := deadline - time.monotonic()) > 0:
            made = self._thread.take(min(left, _LIVENESS_SECONDS))
            if made is not None:
                return made
            if dead:
                return Failed(f"data {dead}", True, lost=True)
            dead = self._dead_workers()
        return None

    def _receive_failure(self, error: RuntimeError) -> str:
        return f"data {self._dead_workers() or 'loader'}: {str(error).splitlines()[0]}"

    def _dead_workers(self) -> str:
        clauses = []
        workers = [] if self._batches is None else self._batches._workers
        for number, worker in enumerate(workers):
            code = worker.exitcode
            if code not in (None, 0):
                how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
                clauses.append(
                    f"worker {number} died ({how}) at {self._maker.shard_in_hand(number)}"
                )
        return ", ".join(clauses)

    def _note(self, found: tuple[Damage, ...]) -> None:
        new = [damage for damage in found if damage not in self._damage]
        if not new:
            return
        self._damage.update(new)
        path = Path(self._data.ledger)
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [
            json.dumps(
                {
                    "shard": damage.shard,
                    "record": damage.record,
                    "reason": damage.reason,
                    "rank": self._rank,
                    "step": self._state.steps,
                }
            )
            for damage in new
        ]
        # One write in append mode: ranks that share the file do not mix their lines.
        with open(path, "ab") as file:
            file.write("".join(line + "\n" for line in lines).encode())
        for damage in new:
            logger.warning("damaged, left empty: %s", damage)

    def _compare(self, failure: str) -> None:
        if self._gather is None:
            if failure:
                raise UserError(failure)
            self._judge_damage(self._damage)
            return
        digest = "" if failure else self.plan_digest()
        found = sorted(self._damage)[: self._data.max_damaged + 1]
        gathered = self._gather((failure, digest, found))
        for rank, (trouble, _, _) in enumerate(gathered):
            if trouble:
                raise UserError(trouble if rank == self._rank else f"rank {rank}: {trouble}")
        for rank, (_, other, _) in enumerate(gathered):
            if other != gathered[0][1]:
                raise UserError(
                    f"the ranks disagree on the data plan: digest {gathered[0][1][:16]} on rank 0, "
                    f"{other[:16]} on rank {rank}; do all nodes see the same dataset and versions?"
                )
        self._judge_damage({damage for _, _, some in gathered for damage in some})

    def _judge_damage(self, found: set[Damage]) -> None:
        if len(found) > self._data.max_damaged:
            raise UserError(
                f"{len(found)} damaged documents, data.max_damaged is {self._data.max_damaged}; "
                f"first: {min(found)} (all in {self._data.ledger})"
            )


def held_out(
    data: StreamConfig,
    phase: PhaseSpec,
    *,
    seed: int,
    rank: int,
    world: int,
    micro_batch_rows: int,
    rows: int,
) -> Iterator[Batch]:
    """The first `rows` rows (or all, if fewer) of the held-out split in a fixed random order, the
    same for any world size; every rank gets equally many batches, the last padded with empty rows.

    step_sequences and step_predictions of its batches are those of all rows together.
    """
    dataset = open_dataset(data)
    planner = dataset.planner(phase, phase_index=0, seed=seed, split="heldout")
    course = Course(planner, dataset.store, (0, 0, 0), stop=True)
    plan = course.first_plan()
    rows = min(rows, plan.rows)
    (window,) = course.window_range(0, rows)
    at_once = world * micro_batch_rows
    for number in range(-(-rows // at_once)):
        start = min(number * at_once + rank * micro_batch_rows, rows)
        yield _held_out_batch(
            window, start, rows, micro_batch_rows, planner, dataset.vocabulary, data, rank
        )


def _held_out_batch(
    window: OpenWindow,
    start: int,
    rows: int,
    micro_batch_rows: int,
    planner: Planner,
    vocabulary: Vocabulary,
    data: StreamConfig,
    rank: int,
) -> Batch:
    plan, last = window.plan, min(start + micro_batch_rows, rows)
    try:
        window.check(start, last, lambda _: None)
    except UserError as error:
        raise UserError(f"rank {rank}: held-out data: {error}") from None
    return fill(
        [Piece(plan, start, last, window.shards, window.damaged)],
        micro_batch_rows,
        planner.shape,
        vocabulary,
        whole_word_mask=data.whole_word_mask,
        step_sequences=int(plan.row_starts[rows]),
        step_predictions=int(plan.row_predictions[rows]),
    )


def _micro_steps(
    rows_per_step: int, world: int, micro_batch_rows: int, phase_index: int, phase: PhaseSpec
) -> int:
    at_once = world * micro_batch_rows
    if rows_per_step % at_once == 0:
        return rows_per_step // at_once
    where = f"phases.{phase_index}"
    nearest = max(1, round(rows_per_step / at_once)) * at_once
    if phase.rows_per_step is None:
        cure = f"{where}.rows_multiple: {at_once} makes it {nearest}"
    else:
        cure = f"{where}.rows_per_step: {nearest} would do"
    fits = [b for b in range(micro_batch_rows, 0, -1) if rows_per_step % (world * b) == 0]
    if fits:
        cure += f", or {where}.micro_batch_rows: {fits[0]}"
    raise UserError(
        f"{where}.rows_per_step: {rows_per_step} rows a step do not divide by {world} ranks x "
        f"{where}.micro_batch_rows {micro_batch_rows}; {cure}"
    )


# ------------------------------------------------------------------------------ dataset, windows


@dataclass(frozen=True)
class OpenDataset:
    """An opened dataset: its manifest, files and vocabulary."""

    data: StreamConfig
    manifest: Manifest
    store: Store
    vocabulary: Vocabulary

    def planner(self, phase: PhaseSpec, *, phase_index: int, seed: int, split: str) -> Planner:
        return Planner(
            self.manifest,
            lambda shard: checked_index(self.store, shard),
            self.data,
            phase,
            phase_index=phase_index,
            seed=seed,
            split=split,
        )


def open_dataset(data: StreamConfig) -> OpenDataset:
    """UserError if the folder, its manifest or its vocabulary is missing or not what it says."""
    store, directory = open_store(data)
    manifest = load_manifest(directory)
    tokenizer = Tokenizer.from_dataset(directory)
    vocabulary = Vocabulary(
        tokenizer.pad_id,
        tokenizer.cls_id,
        tokenizer.sep_id,
        tokenizer.mask_id,
        tokenizer.word_start,
        tokenizer.ordinary_ids,
    )
    return OpenDataset(data, manifest, store, vocabulary)


class Course:
    """Rows by their number from the start position on, window after window, epoch after epoch.

    Rows may be asked for in ascending order only; a thread plans and fetches the next window while
    the current one is in use.
    """

    def __init__(self, planner: Planner, store: Store, start: Position, *, stop: bool) -> None:
        self._planner, self._store, self._start, self._stop = planner, store, start, stop
        self._windows: deque[tuple[int, OpenWindow]] = deque()  # number of its first row
        self._ahead: _Ahead | None = None
        self.shape = planner.shape

    def first_plan(self) -> Any:
        """The plan of the window the course starts in."""
        if not self._windows:
            epoch, window, row = self._start
            opened = self._open(epoch, window)
            if row > opened.plan.rows:
                raise UserError(
                    f"data position: row {row} of a window of {opened.plan.rows} rows; "
                    "the checkpoint's record is damaged"
                )
            self._windows.append((-row, opened))
        return self._windows[0][1].plan

    def window_range(self, first: int, last: int) -> list[OpenWindow]:
        """The windows that rows [first, last) lie in; windows before `first` are let go."""
        self.first_plan()
        while self._windows[0][0] + self._windows[0][1].plan.rows <= first:
            if len(self._windows) == 1:
                self._append_next()
            self._windows.popleft()
        while self._windows[-1][0] + self._windows[-1][1].plan.rows < last:
            self._append_next()
        return [w for at, w in self._windows if at < last]

    def pieces(self, first: int, last: int) -> list[tuple[OpenWindow, int, int]]:
        """(window, rows [from, to) of it) that make up rows [first, last)."""
        self.window_range(first, last)
        found = []
        for at, window in self._windows:
            begin, end = max(first - at, 0), min(last - at, window.plan.rows)
            if begin < end:
                found.append((window, begin, end))
        return found

    def look_ahead(self) -> None:
        """Starts to plan and fetch the next window, if nobody does yet."""
        if self._ahead is None:
            last = self._windows[-1][1].plan
            following = self._planner.after(last.epoch, last.window)
            self._ahead = _Ahead(self._open, following)
            self._store.prefetch(self._upcoming(*following))

    def release(self) -> None:
        """Lets everything go; rows can be asked for no more."""
        self._windows.clear()
        self._store.release()

    def _upcoming(self, epoch: int, window: int) -> Iterator[Window]:
        while True:
            yield self._planner.window_shards(epoch, window)
            epoch, window = self._planner.after(epoch, window)

    def position(self, row: int) -> Position:
        """Of the row number `row`, which must be in an open window or just after the last."""
        for at, window in self._windows:
            if row - at < window.plan.rows:
                return window.plan.epoch, window.plan.window, row - at
        last = self._windows[-1][1].plan
        return *self._planner.after(last.epoch, last.window), 0

    def _append_next(self) -> None:
        self.look_ahead()
        assert self._ahead is not None
        at, last = self._windows[-1]
        ahead, self._ahead = self._ahead, None
        opened = ahead.result()
        if not opened.plan.rows:
            raise UserError(f"shards {', '.join(opened.plan.shards)}: no sentence to train on")
        self._windows.append((at + last.plan.rows, opened))

    def _open(self, epoch: int, window: int) -> OpenWindow:
        planner = self._planner
        infos = planner.window_shards(epoch, window)
        in_use = [planner.window_shards(w.plan.epoch, w.plan.window) for _, w in self._windows]
        self._store.hold([*in_use, infos])
        plan = planner.plan(epoch, window)
        return OpenWindow(plan, self._store, infos, stop=self._stop)


class _Ahead:
    """One call in a daemon thread: it must not keep a finished run from ending."""

    def __init__(self, call: Callable[..., OpenWindow], arguments: tuple[int, int]) -> None:
        self._value: OpenWindow | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(
            target=self._run, args=(call, arguments), daemon=True, name="plan-ahead"
        )
        self._thread.start()

    def _run(self, call: Callable[..., OpenWindow], arguments: tuple[int, int]) -> None:
        try:
            self._value = call(*arguments)
        except BaseException as error:
            self._error = error

    def result(self) -> OpenWindow:
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._value is not None
        return self._value


# ------------------------------------------------------------------------------------------ workers


class _Maker(Dataset):
    """Makes the micro-batch of any number, in ascending order within a process."""

    def __init__(
        self,
        course: Course,
        vocabulary: Vocabulary,
        *,
        rows_per_step: int,
        micro_steps: int,
        micro_batch_rows: int,
        rank: int,
        world: int,
        whole_word_mask: bool,
        shard_names: list[str],
        workers: int,
    ) -> None:
        self._course, self._vocabulary = course, vocabulary
        self._rows_per_step, self._micro_steps = rows_per_step, micro_steps
        self._micro_batch_rows, self._rank, self._world = micro_batch_rows, rank, world
        self._whole_word_mask = whole_word_mask
        self._numbers = {name: number for number, name in enumerate(shard_names)}
        self._names = shard_names
        self._in_hand = get_context("fork").RawArray("i", [-1] * max(workers, 1))

    def shard_in_hand(self, worker: int) -> str:
        """The shard the worker read from last."""
        number = self._in_hand[worker]
        return self._names[number] if number >= 0 else "its first shard"

    def make(self, number: int, worker: int = 0) -> Made:
        step, micro = divmod(number, self._micro_steps)
        first = step * self._rows_per_step
        last = first + self._rows_per_step
        whole = self._course.pieces(first, last)
        after = self._course.position(last)
        if len({id(window) for window, _, _ in whole}) == 1:
            # While a step lies across two windows a third would not fit a cache made for two.
            self._course.look_ahead()
        begin = first + (micro * self._world + self._rank) * self._micro_batch_rows
        mine = self._course_pieces(begin, whole, first)
        for window, a, b in mine:
            window.check(a, b, lambda name: self._touch(worker, name))
        batch = fill(
            [Piece(w.plan, a, b, w.shards, w.damaged) for w, a, b in mine],
            self._micro_batch_rows,
            self._course.shape,
            self._vocabulary,
            whole_word_mask=self._whole_word_mask,
            step_sequences=_sum("row_starts", whole),
            step_predictions=_sum("row_predictions", whole),
        )
        found = tuple(damage for window, _, _ in mine for damage in window.taken())
        return Made(batch, after, self._rows_per_step, _sum("row_tokens", whole), found)

    def _course_pieces(
        self, begin: int, whole: list[tuple[OpenWindow, int, int]], first: int
    ) -> list[tuple[OpenWindow, int, int]]:
        skip, left, mine = begin - first, self._micro_batch_rows, []
        for window, a, b in whole:
            a, skip = a + min(skip, b - a), max(skip - (b - a), 0)
            take = min(b - a, left)
            if take:
                mine.append((window, a, a + take))
                left -= take
        return mine

    def _touch(self, worker: int, name: str) -> None:
        self._in_hand[worker] = self._numbers[name]

    def __getitem__(self, number: int) -> bytes | Failed:
        info = get_worker_info()
        worker = info.id if info is not None else 0
        result = self.attempt(number, worker)
        return result if isinstance(result, Failed) else _packed(result)

    def attempt(self, number: int, worker: int) -> Made | Failed:
        """`make`, or what went wrong with shard and worker named."""
        try:
            return self.make(number, worker)
        except UserError as error:
            return Failed(f"data worker {worker}: {error}", True)
        except Exception:
            where = f"data worker {worker} at {self.shard_in_hand(worker)}"
            return Failed(f"{where}: {traceback.format_exc()}", False)


def _sum(name: str, pieces: list[tuple[OpenWindow, int, int]]) -> int:
    sums = [getattr(w.plan, name) for w, _, _ in pieces]
    return int(sum(s[b] - s[a] for s, (_, a, b) in zip(sums, pieces, strict=True)))


def _packed(made: Made) -> bytes:
    # Plain bytes through the pipe: tensors would travel as a file descriptor each, and /dev/shm is
    # small in many containers.
    arrays = {name: getattr(made.batch, name).numpy() for name in TENSORS}
    rest = replace(made, batch=replace(made.batch, **dict.fromkeys(TENSORS)))
    return pickle.dumps((rest, arrays), protocol=5)


def _unpacked(data: bytes) -> Made:
    made, arrays = pickle.loads(data)
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return replace(made, batch=replace(made.batch, **tensors))


class _Count:
    """0, 1, 2, ... without end, as a sampler."""

    def __iter__(self) -> Iterator[int]:
        number = 0
        while True:
            yield number
            number += 1


def _same(made: Any) -> Any:
    return made


def _init_worker(worker: int) -> None:
    # Ctrl-C and the scheduler's warnings reach every process of a job, but are the trainer's to
    # answer: it still needs batches for the step in hand. A second SIGTERM is meant.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: signal.signal(signal.SIGTERM, signal.SIG_DFL))


class _Thread:
    """Keeps `depth` batches ready in this process, so that to take one is no wait."""

    def __init__(self, make: Callable[[int], Made | Failed], depth: int) -> None:
        self._make = make
        self._queue: queue.Queue[Made | Failed] = queue.Queue(depth)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="stream")
        self._thread.start()

    def _run(self) -> None:
        number = 0
        while not self._stopped.is_set():
            made = self._make(number)
            number += 1
            while not self._stopped.is_set():
                try:
                    self._queue.put(made, timeout=0.2)
                    break
                except queue.Full:
                    continue
            if isinstance(made, Failed):
                return

    def take(self, timeout: float) -> Made | Failed | None:
        """The next; None if there is none in `timeout` seconds."""
        try:
            return self._queue.get(timeout=timeout)
        except queue.Empty:
            return None

    def stop(self) -> None:
        self._stopped.set()
        # One that waits for a stuck worker is left to end with it.
        self._thread.join(1.0)
