"""What a run shows of itself: the console's lines, TensorBoard and metrics.jsonl."""

from __future__ import annotations

import dataclasses
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from configs.load import dump
from core.console import Console, clock_text, markdown_table, printable, short_number
from data_pipeline.corpus.manifest import Manifest
from data_pipeline.stream.plan import Shape
from data_pipeline.stream.state import StreamState
from data_pipeline.stream.stream import Stream
from pretrain import board
from pretrain.config import PretrainConfig
from pretrain.distributed import World
from pretrain.engine import StepOutcome
from pretrain.evaluate import Guessing, Scores
from pretrain.fill_in import KEY, Filled
from pretrain.flops import device_peak_tflops, training_flops
from pretrain.layout import batch_warnings, phase_line, tokens_left
from pretrain.metrics import Recorder, Throughput, memory_gb, shares_text
from pretrain.model_config import ModelConfig
from pretrain.optim import layer_and_kind
from pretrain.run_state import Position
from pretrain.trackers import Sink, open_sinks
from pretrain.version import code_version

Rates = dict[str, float | None]

_SHOW_SECONDS = 0.2  # between two looks of the live line
_SHOWN_STEPS = 10  # whose mean the live line shows
# Of StepOutcome: recorded as the mean of the steps since the last record.
_MEANS = ("loss", "mlm_loss", "nsp_loss", "mlm_accuracy", "nsp_accuracy", "grad_norm")


class Monitor:
    """Measures the steps, records them and shows them; silent on ranks other than 0."""

    def __init__(self, config: PretrainConfig, world: World) -> None:
        self._config, self._world = config, world
        self._console = Console(active=world.is_main, dated=True)
        self.say = self._console.say
        self._peak_tflops = device_peak_tflops(world.device, config.logging.peak_tflops)
        self._recorder: Recorder | None = None
        self._sinks: list[Sink] = []

    def start(self, step: int, manifest: Manifest) -> None:
        """Record from `step` on; what was written past it by an attempt given up is dropped."""
        folder = Path(self._config.run_dir)
        earlier, self._recorder = self._recorder, None  # which another that fails leaves closed
        if earlier is not None:
            earlier.close()
        elif self._world.is_main:
            tree = self._config.model_dump(mode="json")
            self._sinks = open_sinks(self._config.logging.trackers, folder, tree)
        self._recorder = Recorder(folder, step, self._world.is_main, sinks=self._sinks)
        self._since: list[StepOutcome] = []  # the last record
        self._latest: deque[StepOutcome] = deque(maxlen=_SHOWN_STEPS)
        self._recorder.show(
            step,
            texts={
                "run/config": f"    {dump(self._config)}".replace("\n", "\n    "),
                "run/data": "\n".join(markdown_table(manifest.card())),
                "run/starts": f"{self._world.told}, code {code_version() or 'not known'}",
            },
            charts=board.CHARTS,
            settings=board.settings(self._config),
        )

    def close(self) -> None:
        if self._recorder is not None:
            self._recorder.close()
        for sink in self._sinks:
            sink.close()

    def begin_phase(self, index: int, stream: Stream, model: ModelConfig) -> None:
        config, phase = self._config, self._config.phases[index]
        self._model, self._rows_per_step = model, stream.rows_per_step
        self._row_len = Shape.of(phase, config.data, config.objective).row_len
        self._meter, self._shown_at = Throughput(), 0.0
        sequences = stream.expected_sequences_per_step
        self.say(phase_line(index, phase, self._row_len, sequences, stream.division))
        for line in batch_warnings(index, phase, config.optimizer.name, sequences):
            self.say(f"warning: {line}")

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
        self._since.append(outcome)
        self._latest.append(outcome)
        rates = self._meter.rates(self._world.size, self._peak_tflops, ended)
        every = self._config.logging.every_steps
        last = position.phase_step == self._config.phases[position.phase].steps
        if position.step % every == 0 or last:
            self._record(position, after, outcome, rate, rates)
        self._record_trust(position, outcome)
        if time.monotonic() - self._shown_at > _SHOW_SECONDS or last:
            self._shown_at = time.monotonic()
            self._show(position, outcome, rates, last)
        if position.step % every == 0:
            self._meter.restart(ended)

    def evaluation(
        self, step: int, length: int, scores: Scores, guesses: Guessing, seconds: float
    ) -> None:
        """Of held-out sequences of up to `length` tokens."""
        values = {
            "heldout/mlm_loss": scores.mlm_loss,
            "heldout/nsp_loss": scores.nsp_loss,
            "heldout/mlm_accuracy": scores.mlm_accuracy,
            "heldout/nsp_accuracy": scores.nsp_accuracy,
            "heldout/frequencies_loss": guesses.entropy,
            "heldout/commonest_accuracy": guesses.commonest,
            "heldout/max_seq_len": length,
            "heldout/seconds": seconds,
        }
        for source, means in scores.by_source.items():
            values |= {f"heldout/{source}/{name}": value for name, value in means.items()}
        self.write(step, values, board.scalars(values, length))
        line = f"step {step:,}: held-out {length}: {scores.mlm_loss:.3f} nats, "
        line += f"{scores.mlm_accuracy:.1%} right"
        if scores.nsp_accuracy is not None:
            line += f"; NSP {scores.nsp_accuracy:.1%}"
        self.say(line)

    def filled_in(self, step: int, filled: Sequence[Filled]) -> None:
        if self._recorder is not None:
            self._recorder.note(step, {KEY: [dataclasses.asdict(x) for x in filled]})
            rows = [("sentence", "word", "guesses")]
            rows += [(printable(x.sentence), x.word, x.listed()) for x in filled]
            self._recorder.show(step, texts={"samples/fill_in": "\n".join(markdown_table(rows))})

    def write(
        self,
        step: int,
        values: Mapping[str, float | None],
        shown: Mapping[str, float | None] | None = None,
    ) -> None:
        """`values` by tag; nothing for no values. shown: on the board, by default `board.TAGS`."""
        if values and self._recorder is not None:
            shown = board.scalars(values) if shown is None else shown
            self._recorder.write(step, values, shown)

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
                next_sentence=self._config.data.paired,
            ),
            wait=wait,
            parts=outcome.seconds,
        )

    def _record(
        self,
        position: Position,
        after: StreamState,
        outcome: StepOutcome,
        rate: float,
        rates: Rates,
    ) -> None:
        there = (name for name in _MEANS if getattr(outcome, name) is not None)
        means = {f"train/{name}": _mean(self._since, name) for name in there}
        self._since = []
        tokens = None if position.tokens is None else position.tokens + after.tokens
        self.write(
            position.step,
            {
                **means,
                "rate/learning_rate": rate,
                "rate/phase": position.phase + 1,
                "progress/tokens": tokens,
                "progress/epoch": after.epoch,
                "train/loss_scale": outcome.loss_scale if outcome.loss_scale != 1 else None,
                "train/skipped_steps": position.skipped,
                **rates,
                **memory_gb(self._world.device),
            },
        )

    def _record_trust(self, position: Position, outcome: StepOutcome) -> None:
        values, matrices = {}, {}
        for name, trust in (outcome.trust or {}).items():
            layer, kind = layer_and_kind(name)
            values[f"trust_ratio_{kind}/{layer}"] = trust.ratio
            values[f"weight_norm_{kind}/{layer}"] = trust.weight_norm
            values[f"update_norm_{kind}/{layer}"] = trust.update_norm
            if board.is_matrix(kind) and math.isfinite(trust.ratio):
                matrices[layer, kind] = trust.ratio
        self.write(position.step, values, board.trust_scalars(matrices) if matrices else {})
        if matrices and self._world.is_main and self._recorder is not None:
            picture = "3_health/trust_ratios", board.heat_map(matrices)
            self._recorder.show(position.step, picture=picture)

    def _show(self, position: Position, outcome: StepOutcome, rates: Rates, last: bool) -> None:
        phases, meter = self._config.phases, self._meter
        phase, mfu = phases[position.phase], rates["throughput/mfu"]
        tokens = tokens_left(
            phases, position.phase, position.phase_step, meter.tokens / max(meter.steps, 1)
        )
        left = tokens / max(rates["throughput/tokens_per_second"], 1e-9)
        speed = rates["throughput/tokens_per_second"]
        self._console.progress(
            f"{position.phase + 1}/{len(phases)} ({phase.max_seq_len})"
            f"  {position.step:,}/{self._config.total_steps:,}"
            f"  loss {_mean(self._latest, 'mlm_loss'):.3f}"
            f"  right {_mean(self._latest, 'mlm_accuracy'):.1%}"
            f"  {short_number(speed)} tok/s"
            f"  left {clock_text(left)}",
            (
                *([f"MFU {mfu:.1%}"] if mfu is not None else []),
                f"{max(memory_gb(self._world.device).values()):.1f} GB",
                f"{rates['throughput/sequences_per_second']:,.0f} seq/s",
                f"padding {rates['throughput/padding_share']:.1%}",
                shares_text(rates),
            ),
            last=last,
        )


def _mean(outcomes: Sequence[StepOutcome], name: str) -> float:
    """Of the steps that trained; nan where none did."""
    values = [v for v in (getattr(o, name) for o in outcomes) if math.isfinite(v)]
    return sum(values) / len(values) if values else math.nan
