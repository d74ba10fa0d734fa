"""What a run shows of itself: the console's lines, TensorBoard and metrics.jsonl."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from core.console import Console, clock_text
from data_pipeline.stream.plan import Shape
from data_pipeline.stream.state import StreamState
from data_pipeline.stream.stream import Stream
from pretrain.config import PretrainConfig
from pretrain.distributed import World
from pretrain.engine import StepOutcome
from pretrain.evaluate import Scores
from pretrain.flops import device_peak_tflops, training_flops
from pretrain.layout import phase_line, tokens_left
from pretrain.metrics import Recorder, Throughput, memory_gb, shares_text
from pretrain.model_config import ModelConfig
from pretrain.optim import layer_and_kind
from pretrain.run_state import Position
from pretrain.schedule import rate_advice

Rates = dict[str, float | None]

_SHOW_SECONDS = 0.2  # between two looks of the live line


class Monitor:
    """Measures the steps, records them and shows them; silent on ranks other than 0."""

    def __init__(self, config: PretrainConfig, world: World) -> None:
        self._config, self._world = config, world
        self._console = Console(active=world.is_main)
        self.say = self._console.say
        self._peak_tflops = device_peak_tflops(world.device, config.logging.peak_tflops)
        self._recorder: Recorder | None = None

    def start(self, step: int) -> None:
        """Record from `step` on; what was written past it by an attempt given up is dropped."""
        self.close()
        self._recorder = Recorder(Path(self._config.run_dir), step, active=self._world.is_main)

    def close(self) -> None:
        if self._recorder is not None:
            self._recorder.close()

    def begin_phase(self, index: int, stream: Stream, model: ModelConfig) -> None:
        phase = self._config.phases[index]
        self._model, self._rows_per_step = model, stream.rows_per_step
        self._row_len = Shape.of(phase, self._config.data.masked_lm_prob).row_len
        self._meter, self._shown_at = Throughput(), 0.0
        sequences = stream.expected_sequences_per_step
        self.say(phase_line(index, phase, self._row_len, sequences, stream.division))
        advice = rate_advice(phase, phase.sequences_per_step, self._config.optimizer.name)
        if advice is not None:
            self.say(f"warning: {advice}")

    def aside(self) -> AbstractContextManager[None]:
        """What happens inside is no part of a step: an evaluation, a checkpoint."""
        return self._meter.aside()

    def step(
        self,
        position: Position,
        before: StreamState,
        after: StreamState,
        outcome: StepOutcome,
        *,
        rate: float,
        wait: float,
        ended: float,
    ) -> None:
        """The step that led to `position` and took the data from `before` to `after`.

        wait: seconds for batches. ended: when, by time.perf_counter.
        """
        self._measure(before, after, outcome, wait)
        rates = self._meter.rates(self._world.size, self._peak_tflops, ended)
        every = self._config.logging.every_steps
        last = position.phase_step == self._config.phases[position.phase].steps
        if position.step % every == 0 or last:
            self._record(position, outcome, rate, rates)
        self._record_trust(position, outcome)
        if time.monotonic() - self._shown_at > _SHOW_SECONDS or last:
            self._shown_at = time.monotonic()
            self._show(position, outcome, rates, last)
        if position.step % every == 0:
            self._meter.restart(ended)

    def evaluation(self, step: int, scores: Scores, seconds: float) -> None:
        self.write(
            step,
            {
                "heldout/mlm_loss": scores.mlm_loss,
                "heldout/nsp_loss": scores.nsp_loss,
                "heldout/mlm_accuracy": scores.mlm_accuracy,
                "heldout/nsp_accuracy": scores.nsp_accuracy,
                "heldout/seconds": seconds,
            },
        )
        self.say(
            f"step {step}: held-out masked LM {scores.mlm_loss:.3f} nats, "
            f"{scores.mlm_accuracy:.1%} right; next sentence {scores.nsp_accuracy:.1%} right"
        )

    def write(self, step: int, values: Mapping[str, float | None]) -> None:
        """`values` by tag; nothing for no values."""
        if values and self._recorder is not None:
            self._recorder.write(step, values)

    def _measure(
        self, before: StreamState, after: StreamState, outcome: StepOutcome, wait: float
    ) -> None:
        tokens = after.tokens - before.tokens
        sequences = after.sequences - before.sequences
        self._meter.add(
            tokens=tokens,
            sequences=sequences,
            positions=self._rows_per_step * self._row_len,
            flops=training_flops(
                self._model,
                tokens=tokens,
                predictions=after.predictions - before.predictions,
                sequences=sequences,
            ),
            wait=wait,
            parts=outcome.seconds,
        )

    def _record(self, position: Position, outcome: StepOutcome, rate: float, rates: Rates) -> None:
        self.write(
            position.step,
            {
                "train/loss": outcome.loss,
                "train/mlm_loss": outcome.mlm_loss,
                "train/nsp_loss": outcome.nsp_loss,
                "train/mlm_accuracy": outcome.mlm_accuracy,
                "train/nsp_accuracy": outcome.nsp_accuracy,
                "train/grad_norm": outcome.grad_norm,
                "rate/learning_rate": rate,
                "rate/phase": position.phase + 1,
                "train/loss_scale": outcome.loss_scale if outcome.loss_scale != 1 else None,
                "train/skipped_steps": position.skipped,
                **rates,
                **memory_gb(self._world.device),
            },
        )

    def _record_trust(self, position: Position, outcome: StepOutcome) -> None:
        values = {}
        for name, trust in (outcome.trust or {}).items():
            layer, kind = layer_and_kind(name)
            values[f"trust_ratio_{kind}/{layer}"] = trust.ratio
            values[f"weight_norm_{kind}/{layer}"] = trust.weight_norm
            values[f"update_norm_{kind}/{layer}"] = trust.update_norm
        self.write(position.step, values)

    def _show(self, position: Position, outcome: StepOutcome, rates: Rates, last: bool) -> None:
        phases, meter = self._config.phases, self._meter
        phase, mfu = phases[position.phase], rates["throughput/mfu"]
        tokens = tokens_left(
            phases, position.phase, position.phase_step, meter.tokens / max(meter.steps, 1)
        )
        left = tokens / max(rates["throughput/tokens_per_second"], 1e-9)
        self._console.progress(
            f"phase {position.phase + 1}/{len(phases)} ({phase.max_seq_len})"
            f"  step {position.phase_step}/{phase.steps}"
            f"  loss {outcome.loss:.3f}"
            f"  {rates['throughput/tokens_per_second']:,.0f} tok/s"
            f"  left {clock_text(left)}",
            (
                f"{rates['throughput/sequences_per_second']:,.0f} seq/s",
                f"padding {rates['throughput/padding_share']:.1%}",
                *([f"MFU {mfu:.1%}"] if mfu is not None else []),
                f"{max(memory_gb(self._world.device).values()):.1f} GB",
                shares_text(rates),
            ),
            last=last,
        )
