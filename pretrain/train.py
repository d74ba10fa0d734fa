"""The training loop: phases in order, each a stream of batches and a schedule, in one job."""

from __future__ import annotations

import dataclasses
import functools
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from core.console import Console, clock_text
from core.errors import UserError
from core.files import write_atomically
from core.urls import join, read
from data_pipeline.corpus.shards import VOCAB, load_manifest
from data_pipeline.corpus.tokenizer import Tokenizer
from data_pipeline.stream.batch import Batch
from data_pipeline.stream.dataset import open_dataset
from data_pipeline.stream.plan import Shape
from data_pipeline.stream.state import StreamState
from data_pipeline.stream.stream import Stream, held_out
from pretrain import checkpoint, distributed
from pretrain.attention import choose
from pretrain.checkpoint import Checkpoints, Position, State
from pretrain.config import PretrainConfig, changed_keys
from pretrain.distributed import StopRequest, World
from pretrain.engine import Engine, StepOutcome
from pretrain.flops import device_peak_tflops
from pretrain.layout import (
    check_held_out,
    lay_out,
    phase_line,
    planned_traffic,
    vocabulary_size,
)
from pretrain.metrics import (
    Recorder,
    Throughput,
    memory_gb,
    shares_text,
)
from pretrain.model import BertForPreTraining
from pretrain.model_config import SHAPE_KEYS
from pretrain.numerics import DTYPES, resolve_precision
from pretrain.optim import layer_and_kind
from pretrain.planner import training_flops
from pretrain.pretrained import initial_weights
from pretrain.rollback import Rollbacks
from pretrain.schedule import batch_changed_without_rate, learning_rate, rate_advice
from pretrain.watchdog import SLOW, Progress

FINISHED, ROLLBACKS = "FINISHED", "rollbacks.json"  # in the run folder


class Trainer:
    """One run on this rank. `run()` is the whole of it; every method is collective."""

    def __init__(
        self, config: PretrainConfig, world: World, progress: Progress | None = None
    ) -> None:
        self.config = config
        self.progress = progress or Progress()
        self.world = world
        self.run_dir = Path(config.run_dir)
        self.console = Console(active=world.is_main)
        self.manifest = load_manifest(config.data.dir)
        self.vocabulary = read(join(config.data.dir, VOCAB))
        self.checkpoints = Checkpoints(self.run_dir, world, config.checkpoint, self.console.say)
        self.save_due = self.stop_due = False
        self.rollbacks = Rollbacks(config.engine.max_skipped_steps, config.checkpoint.max_rollbacks)
        self.position, self.stream_state, self.history = Position(), None, []
        self.engine = self._build_engine()
        self._resume()
        self._look_ahead()
        self.recorder = Recorder(self.run_dir, self.position.step, active=world.is_main)
        self.stop = StopRequest(world)
        self._peak_tflops = device_peak_tflops(world.device, config.logging.peak_tflops)

    def run(self, stop_at_step: int | None = None) -> int:
        """Train to the end, to a signal, or to `stop_at_step`; returns the exit code."""
        code, steps_before = None, self.position.step
        phases = self.config.phases
        if stop_at_step is not None and self.position.step >= stop_at_step:
            self.console.say(f"already at step {steps_before}: nothing to train to {stop_at_step}")
            code = 0
        place, last = self.position, phases[-1].steps
        if (place.phase, min(place.phase_step, last)) != (len(phases) - 1, last):
            self._mark_finished(False)
        try:
            # The place in the last phase is kept: more steps of it may be asked for later.
            while code is None:
                if self.position.phase_step < phases[self.position.phase].steps:
                    code = self._run_phase(stop_at_step)
                elif self.position.phase + 1 < len(phases):
                    self.position, self.stream_state = self.position.next_phase(), None
                elif not self._ended():
                    self._roll_back()
                else:
                    break
            if code is None:
                self._mark_finished(True)
                trained = "done" if self.position.step > steps_before else "nothing left to train"
                self.console.say(f"{trained}: {self.position.step} steps, see {self.run_dir}")
        finally:
            self.checkpoints.close()
        self.stop.close()
        self.recorder.close()
        return code or 0

    def _run_phase(self, stop_at_step: int | None) -> int | None:
        """One phase from where it stands, to its end or to batches that are left out; an exit
        code if the run is to stop inside it."""
        config, world = self.config, self.world
        phase = config.phases[self.position.phase]
        self.progress.now(self.position.step, "the start of a phase", SLOW)
        # Data workers forked now would hold on to the memory of a copy that is being written.
        self._record_write(self.checkpoints.wait())
        stream = self._open_stream()
        self.engine.start_phase(
            stream.micro_steps, stream.micro_batch_rows, restart=self.position.phase_step == 0
        )
        self._announce(stream)
        self._note("phase", phase=self.position.phase)
        batches = iter(stream)
        meter = Throughput()
        shown_at = 0.0
        try:
            first = True
            while self.position.phase_step < phase.steps and self._at_good_data(stream):
                what, factor = ("its first step", SLOW) if first else ("a step", 1.0)
                self.progress.now(self.position.step + 1, what, factor)
                first = False
                _seed_dropout(config.seed, world.rank, self.position)
                rate = learning_rate(self.position.phase_step, phase.steps, phase.schedule)
                outcome = self.engine.train_step(batches, rate)
                before = stream.state
                stream.commit_step()
                self.stream_state = stream.state
                self.position = self.position.after_step(outcome.skipped)
                self.rollbacks.note(outcome.bad, before, stream.state)
                self._measure(meter, before, stream, outcome)

                step = self.position.step
                last = self.position.phase_step == phase.steps
                if step % config.logging.every_steps == 0 or last:
                    self._record(meter, outcome, rate)
                self._record_trust(outcome)
                if time.monotonic() - shown_at > 0.2 or last:
                    shown_at = time.monotonic()
                    self._show_progress(meter, outcome, last)
                if _due(step, config.evaluation.every_steps) or (
                    last and config.evaluation.every_steps
                ):
                    with meter.aside():
                        self._evaluate(stream.micro_batch_rows)
                self._record_write(self.checkpoints.poll())
                # Neither is done between bad steps: what they leave is not to be gone on from.
                self.stop_due |= step == stop_at_step
                self.save_due |= _due(step, config.checkpoint.every_steps)
                signal, good = self.stop.agreed(), self.rollbacks.bad_steps == 0
                if signal is not None or (self.stop_due and good):
                    return self._stop(signal, stream)
                if self.save_due and good:
                    with meter.aside():
                        self._save(stream)
                if self.rollbacks.due:
                    self._roll_back()
                    return None
                if step % config.logging.every_steps == 0:
                    meter.restart()
        finally:
            stream.close()
        return None

    # -------------------------------------------------------------------------------- start

    def _build_engine(self) -> Engine:
        config = self.config
        shape = config.model.with_vocab_size(vocabulary_size(config, self.manifest))
        precision = resolve_precision(config.engine, self.world.device)
        path = choose(shape.attention, self.world.device, DTYPES[precision], shape.head_size)
        self.console.say(f"attention: {path} ({self.world.device}, {precision})")
        generator = torch.Generator().manual_seed(config.seed)
        model = BertForPreTraining(shape, generator=generator)
        self.parameters = sum(p.numel() for p in model.parameters())
        return Engine(
            model.to(self.world.device),
            config.optimizer,
            config.engine,
            micro_steps=1,
            micro_batch_rows=1,
        )

    def _look_ahead(self) -> None:
        """What would end a later phase ends the run here: hours are not trained on a mistake."""
        steps = self.config.total_steps
        self.checkpoints.check_disk(self.parameters, self.position.step, steps)
        with distributed.errors_shared(self.world):
            if not self.world.is_main:
                return
            dataset = open_dataset(self.config.data)
            check_held_out(self.config, dataset)
            # The batch of a phase that has begun is its checkpoint's; the stream looks at it.
            first = self.position.phase + (self.stream_state is not None)
            traffic = [
                planned_traffic(self.config, dataset, i)
                for i in range(first, len(self.config.phases))
            ]
            for phase in lay_out(self.config, self.world.size, traffic, first=first):
                if phase.index > self.position.phase:
                    self.console.say(f"then {phase.line()}")

    def _resume(self) -> None:
        """The run's newest good checkpoint, else `init_from`, else from scratch."""
        found = self.checkpoints.newest()
        if found is not None:
            state = checkpoint.read_state(found)
            self._check_resumable(state, found)
            self.engine.load(found / "engine")
            self.position, self.stream_state = state.position, state.stream
            self.history = list(state.history)
            changes = changed_keys(state.config, self.config.model_dump(mode="json"))
            self.checkpoints.saved_step = state.position.step
            with distributed.errors_shared(self.world):
                self.rollbacks.read(self.run_dir / ROLLBACKS, state.rollbacks)
            self._note("resume", world_size=self.world.size, changed=changes)
            self.console.say(f"resumed from {found} (step {state.position.step})")
            for key, (old, new) in changes.items():
                self.console.say(f"  changed since: {key}: {old} -> {new}")
            for i, phase in enumerate(self.config.phases):
                before, now = changes.get(f"phases.{i}.sequences_per_step", (0, 0))
                rate, _ = changes.get(f"phases.{i}.learning_rate", (phase.learning_rate, 0))
                warning = batch_changed_without_rate(before, rate, now, phase.learning_rate)
                if warning is not None:
                    self.console.say(f"warning: phases.{i}: {warning}")
        elif self.config.init_from is not None:
            data = self.config.data
            tokenizer = Tokenizer.from_dataset(data.dir)
            weights, origin = initial_weights(
                self.config.init_from, self.engine.module, tokenizer, data.accept_changed
            )
            self.engine.load_weights(weights)
            self._note("init_from", path=self.config.init_from, origin=origin)
            self.console.say(f"weights from {self.config.init_from}: {origin}")
        else:
            self._note("start", world_size=self.world.size)
        if found is None and self.world.is_main:
            (self.run_dir / ROLLBACKS).unlink(missing_ok=True)  # of checkpoints that are gone

    def _check_resumable(self, state: State, found: Path) -> None:
        if state.position.phase >= len(self.config.phases):
            raise UserError(
                f"{found}/state.json: position.phase: {state.position.phase} (from 0), but the "
                f"config has {len(self.config.phases)} phase(s)"
            )
        dataset = self._dataset()
        for key, old in state.dataset.items():
            if dataset[key] != old and key not in self.config.data.accept_changed:
                raise UserError(
                    f"{found}: trained on {key} {old}, but {self.config.data.dir} has "
                    f"{dataset[key]}; to go on all the same: data.accept_changed: [{key}]"
                )
        model = self.config.model_dump(mode="json")["model"]
        changes = changed_keys(state.config["model"], model, "model.")
        shapes = {k: v for k, v in changes.items() if k.split(".")[1] in SHAPE_KEYS}
        if shapes:
            key, (old, new) = next(iter(shapes.items()))
            raise UserError(
                f"{found}: holds a model with {key}: {old}, the config says {new}; "
                "use another run_dir"
            )

    def _dataset(self) -> dict[str, Any]:
        m = self.manifest
        return {
            "dataset_id": m.dataset_id,
            "vocab_sha256": m.vocab_sha256,
            "lowercase": m.lowercase,
        }

    def _open_stream(self) -> Stream:
        phase_index = self.position.phase
        phase = self.config.phases[phase_index]
        open_at = functools.partial(
            Stream,
            self.config.data,
            phase.spec,
            phase_index=phase_index,
            seed=self.config.seed,
            rank=self.world.rank,
            world=self.world.size,
            micro_batch_rows=phase.micro_batch_rows,
            gather=functools.partial(distributed.gather, self.world),
            pin_memory=self.world.device.type == "cuda",
        )
        stream = open_at(state=self.stream_state)
        if not self._at_good_data(stream):
            stream.close()
            stream = open_at(state=self.rollbacks.past(stream.state))
        distributed.require_same(self.world, "the data plan", stream.plan_digest())
        return stream

    # ------------------------------------------------------------------------------ in step

    def _evaluate(self, micro_batch_rows: int) -> None:
        self.progress.now(self.position.step, "an evaluation", SLOW)
        started = time.perf_counter()
        scores = self.engine.evaluate(self._held_out(micro_batch_rows))
        self.recorder.write(
            self.position.step,
            {
                "heldout/mlm_loss": scores.mlm_loss,
                "heldout/nsp_loss": scores.nsp_loss,
                "heldout/mlm_accuracy": scores.mlm_accuracy,
                "heldout/nsp_accuracy": scores.nsp_accuracy,
                "heldout/seconds": time.perf_counter() - started,
            },
        )
        self.console.say(
            f"step {self.position.step}: held-out masked LM {scores.mlm_loss:.3f} nats, "
            f"{scores.mlm_accuracy:.1%} right; next sentence {scores.nsp_accuracy:.1%} right"
        )

    def _held_out(self, micro_batch_rows: int) -> Iterator[Batch]:
        return held_out(
            self.config.data,
            self.config.phases[self.position.phase].spec,
            seed=self.config.seed,
            rank=self.world.rank,
            world=self.world.size,
            micro_batch_rows=micro_batch_rows,
            rows=self.config.evaluation.rows,
        )

    def _measure(
        self, meter: Throughput, before: StreamState, stream: Stream, outcome: StepOutcome
    ) -> None:
        after, phase = stream.state, self.config.phases[self.position.phase]
        row_len = Shape.of(phase, self.config.data.masked_lm_prob).row_len
        tokens = after.tokens - before.tokens
        sequences = after.sequences - before.sequences
        meter.add(
            tokens=tokens,
            sequences=sequences,
            positions=stream.rows_per_step * row_len,
            flops=training_flops(
                self.engine.module.config,
                tokens=tokens,
                predictions=after.predictions - before.predictions,
                sequences=sequences,
            ),
            wait=stream.wait_seconds,
            parts=outcome.seconds,
        )

    def _record(self, meter: Throughput, outcome: StepOutcome, rate: float) -> None:
        self.recorder.write(
            self.position.step,
            {
                "train/loss": outcome.loss,
                "train/mlm_loss": outcome.mlm_loss,
                "train/nsp_loss": outcome.nsp_loss,
                "train/mlm_accuracy": outcome.mlm_accuracy,
                "train/nsp_accuracy": outcome.nsp_accuracy,
                "train/grad_norm": outcome.grad_norm,
                "rate/learning_rate": rate,
                "rate/phase": self.position.phase + 1,
                "train/loss_scale": outcome.loss_scale if outcome.loss_scale != 1 else None,
                "train/skipped_steps": self.position.skipped,
                **meter.rates(self.world.size, self._peak_tflops),
                **memory_gb(self.world.device),
            },
        )

    def _record_trust(self, outcome: StepOutcome) -> None:
        if outcome.trust is None:
            return
        values = {}
        for name, trust in outcome.trust.items():
            layer, kind = layer_and_kind(name)
            values[f"trust_ratio_{kind}/{layer}"] = trust.ratio
            values[f"weight_norm_{kind}/{layer}"] = trust.weight_norm
            values[f"update_norm_{kind}/{layer}"] = trust.update_norm
        self.recorder.write(self.position.step, values)

    def _show_progress(self, meter: Throughput, outcome: StepOutcome, last: bool) -> None:
        position, phases = self.position, self.config.phases
        phase = phases[position.phase]
        rates = meter.rates(self.world.size, self._peak_tflops)
        mfu = rates["throughput/mfu"]
        # Later phases are priced by this one's tokens a second, their sequences taken as full.
        tokens_left = (phase.steps - position.phase_step) * meter.tokens / max(meter.steps, 1)
        for later in phases[position.phase + 1 :]:
            tokens_left += later.steps * later.sequences_per_step * later.max_seq_len
        left = tokens_left / max(rates["throughput/tokens_per_second"], 1e-9)
        self.console.progress(
            f"phase {position.phase + 1}/{len(phases)} ({phase.max_seq_len})"
            f"  step {position.phase_step}/{phase.steps}"
            f"  loss {outcome.loss:.3f}"
            f"  {rates['throughput/tokens_per_second']:,.0f} tok/s"
            f"  left {clock_text(left)}",
            (
                f"{rates['throughput/sequences_per_second']:,.0f} seq/s",
                f"padding {rates['throughput/padding_share']:.1%}",
                *([f"MFU {mfu:.1%}"] if mfu is not None else []),
                f"{max(memory_gb(self.world.device).values()):.1f} GB",
                shares_text(rates),
            ),
            last=last,
        )

    # ---------------------------------------------------------------------------- stop, save

    @property
    def _saved(self) -> bool:
        return self.checkpoints.saved_step == self.position.step

    def _save(self, stream: Stream | None = None) -> None:
        """Begin a checkpoint of this step, if there is none yet. A failed write is survived;
        weights or moments that are not finite are no checkpoint, and lead back to one."""
        self.save_due = False
        if self._saved:
            return
        self.progress.now(self.position.step, "a checkpoint", SLOW)
        spoiled = filter(None, distributed.gather(self.world, self.engine.not_finite()))
        self.rollbacks.spoiled = next(spoiled, "")
        if self.rollbacks.spoiled:
            return
        if stream is not None:
            stream.agree()  # a position that the ranks dispute must not be written down
        state = State(
            position=self.position,
            stream=self.stream_state,
            config=self.config.model_dump(mode="json"),
            dataset=self._dataset(),
            world_size=self.world.size,
            history=tuple(self.history),
            code_version=code_version(),
            rollbacks=self.rollbacks.done,
        )
        self._record_write(self.checkpoints.save(state, self.vocabulary, self.engine.snapshot))

    def _save_last(self, stream: Stream | None = None) -> None:
        """A checkpoint of this step on disk, by a second try if the first one failed."""
        self.progress.now(self.position.step, "a checkpoint", SLOW)
        self._record_write(self.checkpoints.wait())
        self._save(stream)
        self._record_write(self.checkpoints.wait())

    def _ended(self) -> bool:
        """All steps are done and on disk. False after steps that did not train, or that left
        weights that are not finite: they are no end."""
        if self.rollbacks.bad_steps == 0:
            self._save_last()
        if self.rollbacks.bad_steps or self.rollbacks.spoiled:
            return False
        if not self._saved:
            raise UserError("all steps are done, but the last checkpoint is not written")
        return True

    def _mark_finished(self, finished: bool) -> None:
        """RUN/FINISHED, the number of steps, is there when all steps are done and on disk:
        launchers' exit codes are not proof of it."""
        mark = self.run_dir / FINISHED
        with distributed.errors_shared(self.world):
            if self.world.is_main and finished:
                write_atomically(mark, f"{self.position.step}\n")
            elif self.world.is_main:
                mark.unlink(missing_ok=True)

    def _record_write(self, values: dict[str, float]) -> None:
        if values:
            self.recorder.write(self.position.step, values)

    def _stop(self, signal: Any, stream: Stream) -> int | None:
        """Leave between two steps, with the exit code that says why; None after a rollback, when a
        stop was asked for at a step whose weights are not finite."""
        bad = self.rollbacks.bad_steps
        if bad:
            self._record_write(self.checkpoints.wait())
        else:
            self._save_last(stream)
        where = f"step {self.position.step} of {self.config.total_steps}"
        left = "after a checkpoint; the same command goes on from here"
        if not self._saved:
            why = f"the last {bad} step(s) were bad" if bad else "none could be written"
            if self.rollbacks.spoiled:
                why = f"{self.rollbacks.spoiled} is not finite"
            left = f"without a checkpoint ({why}); the same command goes on from the last one"
        if signal is None:
            if self.rollbacks.spoiled:
                self._roll_back()
                return None
            if not self._saved:
                raise UserError(f"stopped at {where} as asked, {left}")
            self.console.say(f"stopped at {where} as asked, {left}")
            return 0
        self.console.say(f"{signal.name}: stopped at {where} {left}")
        return 130 if signal.name == "SIGINT" else distributed.REQUEUE_EXIT_CODE

    def _at_good_data(self, stream: Stream) -> bool:
        return self.rollbacks.past(stream.state) == stream.state

    def _roll_back(self) -> None:
        """To the last checkpoint; from there the batches of the bad steps are left out."""
        self._record_write(self.checkpoints.wait())
        self.progress.now(self.position.step, "a rollback", SLOW)
        found = self.checkpoints.newest()
        state = checkpoint.read_state(found) if found else None
        before = self.rollbacks.done[-1].back_to if self.rollbacks.done else None
        if state is not None and state.position.step == before:
            # It has been gone back to, and it came to this again: perhaps the fault is in it.
            found = self.checkpoints.newest(before) or found
            state = checkpoint.read_state(found)
        rollback = self.rollbacks.take(
            self.position.step, state.position.step if state is not None else None
        )
        with distributed.errors_shared(self.world):
            if self.world.is_main:
                self.checkpoints.forget_after(found)
                self.rollbacks.write(self.run_dir / ROLLBACKS)
        self.engine.load(found / "engine")
        self.position, self.stream_state = state.position, state.stream
        self.checkpoints.saved_step = state.position.step
        self.save_due = self.stop_due = False
        self._note("rollback", rollback=dataclasses.asdict(rollback))
        self.recorder.close()
        self.recorder = Recorder(self.run_dir, self.position.step, active=self.world.is_main)
        self.console.say(
            f"step {rollback.step}: {rollback.why}: back to step {rollback.back_to}"
            f"{', without ' if rollback.skips else ''}{'; '.join(map(str, rollback.skips))} "
            f"(rollback {len(self.rollbacks.done)} of {self.config.checkpoint.max_rollbacks})"
        )

    def _announce(self, stream: Stream) -> None:
        phase, position = self.config.phases[self.position.phase], self.position
        row_len = Shape.of(phase, self.config.data.masked_lm_prob).row_len
        sequences = stream.expected_sequences_per_step
        self.console.say(phase_line(position.phase, phase, row_len, sequences, stream.division))
        name = self.config.optimizer.name
        advice = rate_advice(phase.schedule, phase.sequences_per_step, name)
        if advice is not None:
            self.console.say(f"warning: {advice}")

    def _note(self, event: str, **facts: Any) -> None:
        """A line of the run's history, kept in every later checkpoint."""
        self.history.append(
            {"event": event, "step": self.position.step, "code": code_version()} | facts
        )


def _seed_dropout(seed: int, rank: int, position: Position) -> None:
    """Dropout's masks depend on the step and rank alone, so checkpoints hold no generator state."""
    torch.manual_seed(((seed * 1_000_003 + position.step) * 65_537 + rank) % 2**63)


def _due(step: int, every: int) -> bool:
    return every > 0 and step > 0 and step % every == 0


@functools.cache
def code_version() -> str:
    """The commit of the checkout, with a mark when files were changed; else `unknown`."""
    root = Path(__file__).resolve().parent.parent
    try:
        return subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
