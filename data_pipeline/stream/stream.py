"""The stream: planned rows dealt to ranks as batches, without end, exact, for any world size."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, replace
from pathlib import Path

from core.errors import UserError
from core.files import disk_errors
from core.processes import in_background
from data_pipeline.stream.batch import Batch
from data_pipeline.stream.builder import BatchBuilder, PrefetchedBatch
from data_pipeline.stream.dataset import Dataset
from data_pipeline.stream.plan import PhaseSpec
from data_pipeline.stream.prefetch import BatchPrefetcher, NotWaitedFor
from data_pipeline.stream.reader import Damage
from data_pipeline.stream.sharing import Gather, PlanSlots, SharedPlans
from data_pipeline.stream.state import StreamState, resume
from data_pipeline.stream.steps import divide
from data_pipeline.stream.windows import WindowIterator

logger = logging.getLogger(__name__)


class Stream:
    """Micro-batches of one rank, for ever; `micro_steps` of them make an optimiser step, each of as
    many rows as divide it and are not above the `micro_batch_rows` asked for.

    With `gather` the ranks of a node share their plans, and all compare them at the start, every
    `data.agree_every` steps and whenever the trainer calls `agree()`; without it, as where one
    process plays several ranks, a stream judges by itself. `pin_memory`: batches lie in page-locked
    memory, for a GPU. Workers are forked by the thread that takes the first batch, and end with it.
    `gives_up` is asked now and then in a wait for data, which it may end with NotWaitedFor: of all
    ranks in the start, of this one for a batch.
    UserError for a dataset that is not there or not whole, a state that does not fit, rows that do
    not divide, damage beyond what the config allows, a worker that died.
    """

    def __init__(
        self,
        dataset: Dataset,
        phase: PhaseSpec,
        *,
        phase_index: int,
        seed: int,
        rank: int,
        world: int,
        micro_batch_rows: int,
        state: StreamState | None = None,
        gather: Gather | None = None,
        pin_memory: bool = False,
        gives_up: Callable[[], bool] = lambda: False,
    ) -> None:
        self._dataset, self._data = dataset, dataset.data
        self._gives_up = gives_up
        self._rank, self._world = rank, world
        self._pin_memory = pin_memory
        self._gather = gather if world > 1 else None
        self._step_ends: deque[PrefetchedBatch] = deque()
        self._taken = 0
        self._waited = 0.0
        self._damage = dataset.damaged
        self._prefetcher: BatchPrefetcher | None = None
        failure: UserError | None = None
        alone = self._gather is None and dataset.data.workers < 2
        slots = None if alone else PlanSlots(self._gather)
        prepare = functools.partial(
            self._prepare, slots, phase, phase_index, seed, micro_batch_rows, state
        )
        try:
            _wait_for(prepare, gives_up)  # it fetches
        except UserError as error:
            failure = error
        self._compare(failure)

    def _prepare(
        self,
        slots: PlanSlots | None,
        phase: PhaseSpec,
        phase_index: int,
        seed: int,
        micro_batch_rows: int,
        saved: StreamState | None,
    ) -> None:
        data, dataset = self._data, self._dataset
        planner = dataset.planner(phase, phase_index=phase_index, seed=seed, split="train")
        vocabulary = dataset.vocabulary
        state = StreamState.start(dataset.manifest, planner.settings, seed=seed, phase=phase_index)
        if saved is not None:
            state = resume(saved, state, data.accept_changed)
            for note in state.history[len(saved.history) :]:
                logger.warning("data position accepted with a change: %s", note)
        position = (state.epoch, state.window, state.row)
        stop = data.on_damage == "stop"
        shared = SharedPlans(planner, state.plan_hash, slots) if slots else None
        windows = WindowIterator(planner, dataset.open_store(), position, stop=stop, shared=shared)
        plan = windows.first_plan()
        begun = state.rows_per_step > 0
        if not begun:
            # The same at every start of the phase: the first window, whatever the position is.
            first = plan if (state.epoch, state.window) == (0, 0) else planner.plan(0, 0)
            state = replace(state, rows_per_step=planner.rows_per_step(first))
        self._state = state
        self.rows_per_step = state.rows_per_step
        self.division = divide(
            self.rows_per_step, self._world, micro_batch_rows, phase, phase_index, begun=begun
        )
        self.micro_steps = self.division.micro_steps
        self.micro_batch_rows = self.division.micro_batch_rows
        self.expected_sequences_per_step = self.rows_per_step * plan.sequences / plan.rows
        self._first_digest = plan.digest()
        self._shard_names = [shard.name for shard in planner.shards]
        self._builder = BatchBuilder(
            windows,
            planner.shape,
            vocabulary,
            division=self.division,
            rank=self._rank,
            objective=dataset.objective,
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

    @property
    def workers(self) -> list[tuple[int, str]]:
        """(pid, the shard it read from last) of each worker process that runs."""
        return self._prefetcher.workers if self._prefetcher is not None else []

    def plan_digest(self) -> str:
        """sha256 (hex) of position, settings and the planned arrays; equal on all ranks."""
        text = json.dumps(self._state.to_dict(), sort_keys=True) + self._first_digest
        return hashlib.sha256(text.encode()).hexdigest()

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Batch:
        began = time.perf_counter()
        if self._prefetcher is None:
            self._prefetcher = BatchPrefetcher(
                self._builder, self._shard_names, self._data, pin_memory=self._pin_memory
            )
        try:
            made = self._prefetcher.take(self._gives_up)
        except (UserError, RuntimeError) as error:
            raise type(error)(f"rank {self._rank}: {error}") from None
        self._waited += time.perf_counter() - began
        self._taken += 1
        if self._taken % self.micro_steps == 0:
            self._step_ends.append(made)
        if made.damage:
            self._note(made.damage)
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
            rows=old.rows + self.rows_per_step,
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
        self._compare(None)

    def close(self) -> None:
        """Ends workers and threads, and lets the shards go. The state stays readable."""
        if self._prefetcher is not None:
            self._prefetcher.close()
        self._builder.release()

    def _note(self, found: tuple[Damage, ...]) -> None:
        new = [damage for damage in found if damage not in self._damage]
        if not new:
            return
        self._damage.update(new)
        if self._data.ledger is not None:
            self._write_down(new, Path(self._data.ledger))
        for damage in new:
            logger.warning("damaged, left empty: %s", damage)

    def _write_down(self, new: list[Damage], path: Path) -> None:
        here = {"rank": self._rank, "step": self._state.steps}
        lines = [json.dumps(asdict(damage) | here) + "\n" for damage in new]
        with disk_errors(path, "data.ledger"):
            path.parent.mkdir(parents=True, exist_ok=True)
            # One write in append mode: ranks that share the file do not mix their lines.
            with open(path, "ab") as file:
                file.write("".join(lines).encode())

    def _compare(self, failure: UserError | None) -> None:
        if self._gather is None:
            if failure is not None:
                raise failure
            self._judge_damage(self._damage)
            return
        digest = "" if failure is not None else self.plan_digest()
        found = sorted(self._damage)[: self._data.max_damaged + 1]
        trouble = None if failure is None else (type(failure), str(failure))
        gathered = self._gather((trouble, digest, found))
        for rank, (trouble, _, _) in enumerate(gathered):
            if trouble is not None:
                kind, text = trouble
                error = kind(text if rank == self._rank else f"rank {rank}: {text}")
                error.quiet = self._rank > 0
                raise error
        for rank, (_, other, _) in enumerate(gathered):
            if other != gathered[0][1]:
                raise UserError(
                    f"the ranks disagree on the data plan: digest {gathered[0][1][:16]} on rank 0, "
                    f"{other[:16]} on rank {rank}; do all nodes see the same dataset and versions?"
                )
        self._judge_damage({damage for _, _, some in gathered for damage in some})

    def _judge_damage(self, found: set[Damage]) -> None:
        if len(found) > self._data.max_damaged:
            listed = f" (all in {self._data.ledger})" if self._data.ledger else ""
            raise UserError(
                f"{len(found)} damaged documents, data.max_damaged is {self._data.max_damaged}; "
                f"first: {min(found)}{listed}"
            )


def _wait_for(work: Callable[[], None], gives_up: Callable[[], bool]) -> None:
    """Returns with `work`, or raises what it does; NotWaitedFor, and it is left to itself, where
    `gives_up` says so."""
    done: Future[None] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    thread = in_background(run, "first-window")
    while thread is not None and thread.is_alive():
        thread.join(0.5)
        if not done.done() and gives_up():
            raise NotWaitedFor("the first window of the phase is not there")
    done.result()
