"""The training loop: phases in order, each a stream of batches and a schedule, in one job."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from signal import Signals

import torch

from core.errors import TryAgain, UserError, tell
from core.files import Lock
from data_pipeline.stream.dataset import Dataset
from data_pipeline.stream.heldout import HeldOut
from data_pipeline.stream.prefetch import NotWaitedFor
from data_pipeline.stream.state import StreamState
from data_pipeline.stream.stream import Stream
from pretrain import distributed, trackers
from pretrain.build import build_engine, open_stream
from pretrain.checkpoint import Checkpoints, engine_files, read_state
from pretrain.config import PretrainConfig
from pretrain.distributed import StopRequest, World
from pretrain.engine import Engine, LateOutcome
from pretrain.evaluate import Guessing, guessing, guessing_sums, token_counts
from pretrain.fill_in import Blank, choose, fill
from pretrain.fragments import contents
from pretrain.hugging_face import add_weights
from pretrain.layout import evaluated_lengths, held_out, look_ahead, vocabulary_size
from pretrain.memory import checkpoint_bytes
from pretrain.monitor import Monitor
from pretrain.pretrained import initial_weights
from pretrain.run_state import (
    Position,
    RunState,
    State,
    changes_since,
    check_resumable,
    mark_finished,
)
from pretrain.schedule import learning_rate
from pretrain.watchdog import SLOW, Progress


class Trainer:
    """One run on this rank. `run()` is the whole of it; every method is collective."""

    def __init__(
        self,
        config: PretrainConfig,
        world: World,
        progress: Progress | None = None,
        dataset: Dataset | None = None,
        lock: Lock | None = None,
    ) -> None:
        self.config = config
        self.progress = progress or Progress()
        self.world = world
        self.run_dir = Path(config.run_dir)
        self.monitor = Monitor(config, world)
        self.dataset = dataset or Dataset(config.data, config.objective)
        self._evaluates = config.evaluation.every_steps > 0
        distributed.by_main(world, lambda: trackers.check(config.logging.trackers))
        self.state = RunState(config)
        self.checkpoints = Checkpoints(
            self.run_dir, world, config.checkpoint, self.monitor.say, self._record, lock
        )
        self.save_due = self.stop_due = False
        self._guessing: dict[int, Guessing] = {}
        self._goes_on_alike = False  # a resume on as many ranks, with the same configuration
        self.engine = self.build_engine()
        self._resume()
        self._look_ahead()
        if world.device.type == "cuda":  # the host memory of checkpoints: now, not hours later
            self.engine.snapshot()
        self.checkpoints.check_place()
        self.monitor.start(self.state.position.step, self.dataset.manifest)
        self.stop = StopRequest(world)

    def run(self, stop_at_step: int | None = None) -> int:
        """Train to the end, to a signal, or to `stop_at_step`; returns the exit code.

        Signals stay caught: one that comes when the run has ended is not to end this process before
        it has told the others, with a code that is not its own.
        """
        state, phases = self.state, self.config.phases
        code, trained = None, False
        if stop_at_step is not None and stop_at_step >= self.config.total_steps:
            stop_at_step = None  # the end of the run, which leaves its mark
        try:
            if stop_at_step is not None and state.position.step >= stop_at_step:
                step = state.position.step
                self.monitor.say(f"already at step {step:,}: nothing to train to {stop_at_step:,}")
                code = 0
            place, last = state.position, phases[-1].steps
            if (place.phase, min(place.phase_step, last)) != (len(phases) - 1, last):
                self._mark_finished(None)
            # The place in the last phase is kept: more steps of it may be asked for later.
            while code is None:
                if state.position.phase_step < phases[state.position.phase].steps:
                    trained, code = True, self._run_phase(stop_at_step)
                elif state.position.phase + 1 < len(phases):
                    state.next_phase()
                elif not self._ended():
                    self._roll_back()
                else:
                    break
            if code is None:
                self._mark_finished(self.config.total_steps)
                end = "done" if trained else "nothing left to train"
                self.monitor.say(f"{end}: {state.position.step:,} steps, see {self.run_dir}")
            self.stop.collect()
        except UserError as error:
            tell(error)  # what follows may take its seconds
            raise
        finally:
            self.progress.now(state.position.step, "a checkpoint on its way", SLOW)
            self.checkpoints.close()
            self.progress.now(state.position.step, "closing the trackers", SLOW)
            self.monitor.close()  # after an error, too: numbers wait for the trackers
        return code or 0

    def _run_phase(self, stop_at_step: int | None) -> int | None:
        """One phase from where it stands, to its end or to batches that are left out; an exit
        code if the run is to stop inside it."""
        config, state, monitor = self.config, self.state, self.monitor
        phase = config.phases[state.position.phase]
        self.progress.now(state.position.step, "the start of a phase", SLOW)
        # Data workers forked now would hold open the files that are being written.
        self.checkpoints.wait()
        try:
            stream = open_stream(config, self.dataset, state, self.world, self.stop.out_of_patience)
        except NotWaitedFor:  # of all ranks
            told = filter(None, distributed.gather(self.world, self.stop.own))
            return self._stop(next(told), None)
        begins = state.position.phase_step == 0 and not phase.only_cools
        self.engine.start_phase(stream.micro_steps, stream.micro_batch_rows, restart=begins)
        monitor.begin_phase(state.position.phase, stream, self.engine.module.config)
        sequences = round(stream.expected_sequences_per_step, 1)
        state.note("phase", phase=state.position.phase, sequences_per_step=sequences)
        batches = iter(stream)
        unread: deque[Callable[[], None]] = deque()
        try:
            what, factor = "its first step", SLOW
            while state.position.phase_step < phase.steps and not state.leaves_out_next:
                self.progress.now(state.position.step + 1, what, factor)
                what, factor = "a step", 1.0
                _seed_dropout(config.seed, self.world.rank, state.position.step)
                rate = learning_rate(state.position.phase_step, phase.steps, phase)
                try:
                    outcome = self.engine.train_step(batches, rate)
                except NotWaitedFor as wait:
                    self._read(unread)
                    return self._stop_within_a_step(wait, stream)
                before = stream.state
                stream.commit_step()
                state.after_step(stream.state, skipped=outcome.skipped)
                unread.append(
                    functools.partial(
                        self._after_step, state.position, before, stream.state, outcome,
                        rate=rate, wait=stream.wait_seconds, ended=time.perf_counter(),
                    )
                )  # fmt: skip

                step, last = state.position.step, state.position.phase_step == phase.steps
                if self._evaluates and (last or _due(step, config.evaluation.every_steps)):
                    self._read(unread)
                    with monitor.aside():
                        self._evaluate()
                self.checkpoints.poll()
                # Neither is done between bad steps: what they leave is not to be gone on from.
                self.stop_due |= step == stop_at_step
                self.save_due |= _due(step, config.checkpoint.every_steps)
                signal = self.stop.agreed()
                decides = last or self.stop_due or self.save_due or signal is not None
                decides |= outcome.skipped or state.leaves_out_next
                self._read(unread, leave=0 if decides else 1)
                good = state.rollbacks.bad_steps == 0
                if signal is not None or (self.stop_due and good):
                    return self._stop(signal, stream)
                if self.save_due and good:
                    with monitor.aside():
                        self._save(stream)
                if state.rollbacks.due:
                    self._roll_back()
                    return None
        finally:
            stream.close()
        return None

    def _read(self, unread: deque[Callable[[], None]], leave: int = 0) -> None:
        """Learn what came of the steps but the last `leave`: nobody waits for one that the device
        is at. After too many bad ones in a row, the one behind them is as if it had not been."""
        while len(unread) > leave and not self.state.rollbacks.due:
            unread.popleft()()

    def _after_step(
        self,
        position: Position,
        before: StreamState,
        after: StreamState,
        outcome: LateOutcome,
        **times: float,
    ) -> None:
        """What came of the step that led to `position`; waits until the device has done it."""
        self.state.rollbacks.note(outcome.now.bad, before, after)
        self.monitor.step(position, before, after, outcome.now, **times)

    def _evaluate(self) -> None:
        place = self.state.position
        for length in evaluated_lengths(self.config, place.phase):
            self.progress.now(place.step, "an evaluation", SLOW)
            started = time.perf_counter()
            held_out = self._held_out[length]
            scores = self.engine.evaluate(held_out, held_out.sources)
            seconds = time.perf_counter() - started
            if length not in self._guessing:
                self._guessing[length] = self._guess(length)
            self.monitor.evaluation(place.step, length, scores, self._guessing[length], seconds)
        if self._blanks and self.world.is_main:
            filled = fill(self.engine.module, self._blanks, self.dataset.tokenizer)
            self.monitor.filled_in(place.step, filled)

    @functools.cached_property
    def _held_out(self) -> dict[int, HeldOut]:
        return held_out(self.config, self.dataset, self.world.rank, self.world.size)

    def _guess(self, length: int) -> Guessing:
        """What stands beside the scores."""
        sep_id = self.dataset.vocabulary.sep_id
        own = guessing_sums(self._held_out[length], self._token_counts, sep_id)
        return guessing(*distributed.gather(self.world, own))

    @functools.cached_property
    def _token_counts(self) -> torch.Tensor:
        return distributed.by_main(self.world, lambda: token_counts(self.dataset))

    @functools.cached_property
    def _blanks(self) -> list[Blank]:
        count, seed = self.config.evaluation.sentences, self.config.seed
        positions = self.config.model.max_position_embeddings
        return distributed.by_main(
            self.world, lambda: choose(self.dataset, count, seed, positions) if count else []
        )

    # -------------------------------------------------------------------------------- start

    def build_engine(self) -> Engine:
        with distributed.errors_shared(self.world):
            vocab_size = vocabulary_size(self.config, self.dataset)
        return build_engine(self.config, vocab_size, self.world, self.monitor.say)

    def _resume(self) -> None:
        """The run's newest good checkpoint, else `init_from`, else from scratch."""
        config, state, say = self.config, self.state, self.monitor.say
        self.checkpoints.check_place()
        found = self.checkpoints.newest()
        if found is None:
            self._begin()
            return
        saved = self._state_of(found)
        # Read once: on a shared folder a host may see the file of some seconds ago.
        done = distributed.by_main(self.world, lambda: state.rollbacks.read(saved.rollbacks))
        step = saved.position.step
        back_to = min((r.back_to for r in done[len(saved.rollbacks) :]), default=step)
        if back_to < step and (good := self.checkpoints.newest(back_to + 1)) is not None:
            # Killed after it had turned back, and before it had removed what it turned back from.
            distributed.by_main(self.world, lambda: self.checkpoints.forget_after(good))
            found, saved = good, self._state_of(good)
        with distributed.errors_shared(self.world):
            check_resumable(saved, found, config, self.dataset.manifest)
        state.history = list(saved.history)
        state.rollbacks.done = done
        self._load(found, saved)
        changes, lines = changes_since(saved, config)
        self._goes_on_alike = saved.world_size == self.world.size and not changes
        state.note("resume", world_size=self.world.size, changed=changes)
        say(f"resumed from {found} (step {saved.position.step:,})")
        for line in lines:
            say(line)

    def _begin(self) -> None:
        config, state, engine = self.config, self.state, self.engine
        distributed.by_main(self.world, state.rollbacks.forget)
        if config.init_from is None:
            state.note("start", world_size=self.world.size)
            return
        data = self.dataset
        with distributed.errors_shared(self.world):
            weights, origin = initial_weights(
                config.init_from,
                engine.module,
                data.tokenizer,
                config.data.accept_changed,
                data.manifest.extends,
            )
        if self.world.size > 1:  # hashing takes its seconds
            digest = hashlib.sha256()
            add_weights(digest, weights)
            given = f"init_from ({config.init_from}, sha256 of its weights)"
            distributed.require_same(self.world, given, digest.hexdigest()[:16])
        engine.load_weights(weights)
        state.note("init_from", path=config.init_from, origin=origin)
        self.monitor.say(f"weights from {config.init_from}: {origin}")

    def _state_of(self, found: Path) -> State:
        """As rank 0 reads it; its error is that of all."""
        return distributed.by_main(self.world, lambda: read_state(found))

    def _load(self, found: Path, saved: State) -> None:
        """Stand where the checkpoint stands."""
        engine = distributed.by_main(
            self.world, lambda: contents(found / "engine", engine_files(found))
        )
        if not self.world.is_main:  # another host may see other files than rank 0 has looked at
            engine = dataclasses.replace(engine, looked_at=False)
        self.engine.load(engine, functools.partial(distributed.errors_shared, self.world))
        self.state.place_at(saved)
        self.checkpoints.saved_step = saved.position.step

    def _look_ahead(self) -> None:
        """What would end a later phase ends the run here: hours are not trained on a mistake."""
        position = self.state.position
        size = checkpoint_bytes(self.engine.module.config)
        self.checkpoints.check_disk(size, position.step, self.config.total_steps)
        # The batch of a phase that has begun is its checkpoint's; the stream looks at it.
        first = position.phase + (self.state.stream is not None)
        phases = range(position.phase, len(self.config.phases)) if self._evaluates else ()
        with distributed.errors_shared(self.world):
            for length in {n for i in phases for n in evaluated_lengths(self.config, i)}:
                iter(self._held_out[length])  # makes what an evaluation needs, which is kept
        layouts = distributed.by_main(
            self.world, lambda: look_ahead(self.config, self.dataset, self.world.size, first)
        )
        for layout in layouts:
            if layout.index > position.phase and not self._goes_on_alike:
                self.monitor.say(f"ahead: {layout.line()}")

    # ---------------------------------------------------------------------------- save, stop

    @property
    def _saved(self) -> bool:
        return self.checkpoints.saved_step == self.state.position.step

    def _save(self, stream: Stream | None = None) -> None:
        """Begin a checkpoint of this step, if there is none yet. A failed write is survived;
        weights or moments that are not finite are no checkpoint, and lead back to one."""
        self.save_due = False
        state = self.state
        self.progress.now(state.position.step, "a checkpoint", SLOW)
        spoiled = filter(None, distributed.gather(self.world, self.engine.not_finite()))
        state.rollbacks.spoiled = next(spoiled, "")
        if state.rollbacks.spoiled or self._saved:
            return
        if stream is not None:
            stream.agree()  # a position that the ranks dispute must not be written down
        saved = state.to_save(self.dataset.manifest, self.world.size)
        self.checkpoints.save(saved, self.dataset.vocab_bytes, self.engine.snapshot)

    def _save_last(self, stream: Stream | None = None) -> None:
        """A checkpoint of this step on disk, by a second try if the first one failed."""
        self.progress.now(self.state.position.step, "a checkpoint", SLOW)
        self.checkpoints.wait()
        self._save(stream)
        self.checkpoints.wait()

    def _record(self, values: dict[str, float]) -> None:
        self.monitor.write(self.state.position.step, values)

    def _ended(self) -> bool:
        """All steps are done and on disk. False after steps that did not train, or that left
        weights that are not finite: they are no end."""
        rollbacks = self.state.rollbacks
        if rollbacks.bad_steps == 0:
            self._save_last()
        if rollbacks.bad_steps or rollbacks.spoiled:
            return False
        if not self._saved:
            raise TryAgain("all steps are done, but the last checkpoint is not written")
        return True

    def _mark_finished(self, steps: int | None) -> None:
        self.checkpoints.check_place()
        distributed.by_main(self.world, lambda: mark_finished(self.run_dir, steps))

    def _stop(self, signal: Signals | None, stream: Stream | None) -> int | None:
        """Leave between two steps, with the exit code that says why; None after a rollback, when a
        stop was asked for at a step whose weights are not finite."""
        if signal is not None and self.state.position.step == 0:
            self.monitor.say(f"{signal.name}: stopped in the start")
            return _exit_code(signal)
        rollbacks = self.state.rollbacks
        bad = rollbacks.bad_steps
        if bad:
            self.checkpoints.wait()
        else:
            self._save_last(stream)
        where = f"step {self.state.position.step:,} of {self.config.total_steps:,}"
        left = "after a checkpoint; the same command goes on from here"
        if not self._saved:
            why = f"the last {bad} step(s) were bad" if bad else "none could be written"
            if rollbacks.spoiled:
                why = f"{rollbacks.spoiled} is not finite"
            left = f"without a checkpoint ({why}); the same command goes on from the last one"
        if signal is None:
            if rollbacks.spoiled:
                self._roll_back()
                return None
            if not self._saved:
                raise TryAgain(f"stopped at {where} as asked, {left}")
            self.monitor.say(f"stopped at {where} as asked, {left}")
            return 0
        self.monitor.say(f"{signal.name}: stopped at {where} {left}")
        return _exit_code(signal)

    def _stop_within_a_step(self, wait: NotWaitedFor, stream: Stream) -> int | None:
        """Leave a step whose data do not come. Weights and moments are those before it, but other
        ranks may be further within it, where nothing reaches them: they make no checkpoint."""
        signal = self.stop.own
        assert signal is not None, "who was not told to stop waits on"
        if self.world.size == 1:
            return self._stop(signal, stream)
        where = f"step {self.state.position.step + 1:,}, whose data do not come ({wait})"
        left = "without a checkpoint; the same command goes on from the last one"
        error = TryAgain(f"{signal.name}: stopped in {where}, {left}")
        error.code = _exit_code(signal)
        raise error

    def _roll_back(self) -> None:
        """To the last checkpoint; from there the batches of the bad steps are left out."""
        state = self.state
        self.checkpoints.wait()
        self.progress.now(state.position.step, "a rollback", SLOW)
        self._mark_finished(None)
        found = self.checkpoints.newest()
        saved = self._state_of(found) if found else None
        before = saved and state.rollbacks.suspect(saved.position.step)
        if before is not None:
            # Gone back to already, or made from one that was: perhaps the fault is in it.
            found = self.checkpoints.newest(before) or self.checkpoints.oldest()
            saved = self._state_of(found) if found else None
        with distributed.errors_shared(self.world):
            rollback = state.rollbacks.take(state.position.step, saved and saved.position.step)
        distributed.by_main(self.world, state.rollbacks.write)
        distributed.by_main(self.world, lambda: self.checkpoints.forget_after(found))
        self._load(found, saved)
        self.save_due = self.stop_due = False
        state.note("rollback", rollback=dataclasses.asdict(rollback))
        self.monitor.start(state.position.step, self.dataset.manifest)
        self.monitor.say(
            f"step {rollback.step:,}: {rollback.why}: back to step {rollback.back_to:,}"
            f"{', without ' if rollback.skips else ''}{'; '.join(map(str, rollback.skips))} "
            f"(rollback {len(state.rollbacks.done)} of {self.config.checkpoint.max_rollbacks})"
        )


def _exit_code(signal: Signals) -> int:
    return 130 if signal.name == "SIGINT" else distributed.REQUEUE_EXIT_CODE


def _seed_dropout(seed: int, rank: int, step: int) -> None:
    """Dropout's masks depend on the step and rank alone, so checkpoints hold no generator state."""
    torch.manual_seed(((seed * 1_000_003 + step) * 65_537 + rank) % 2**63)


def _due(step: int, every: int) -> bool:
    return every > 0 and step > 0 and step % every == 0
