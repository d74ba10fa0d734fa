"""One optimiser step over its micro-batches, on DeepSpeed.

The loss of each micro-batch is its sums over the counts of the whole step, so the parts add up to
the global mean over all ranks and micro-steps. DeepSpeed averages gradients over the ranks, hence
the factor `world` on the loss, and it is told not to divide by the accumulation.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from data_pipeline.stream.batch import Batch
from pretrain import deepspeed_door, fragments
from pretrain.engine_config import EngineConfig
from pretrain.evaluate import Scores, batch_losses, scores_of, sums
from pretrain.fragments import MOMENTS, Contents, Meta, Slice
from pretrain.loss import LossSums
from pretrain.numerics import resolve_precision
from pretrain.optim import (
    Lamb,
    OptimizerConfig,
    Piece,
    TrustRatio,
    build_optimizer,
    first_state,
    restart_bias_correction,
)
from pretrain.stopwatch import Stopwatch

# What moves in DeepSpeed's dynamic loss scaler.
_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


@dataclass(frozen=True)
class StepOutcome:
    """One optimiser step, the same on every rank: losses are global means in nats over what was
    there to predict, None of next sentence where that is no task.

    skipped: the gradients were not finite, the weights and moments stand as they were. empty: all
    of it was damaged; losses and accuracies are nan.
    grad_norm: global norm before clipping; inf when skipped. trust: LAMB's trust ratios by
    parameter, every `engine.trust_ratios_every` steps, else None. seconds: this rank's, by part
    (`stopwatch.PARTS`); `reduce` is what backward's own work does not hide.
    """

    loss: float
    mlm_loss: float
    nsp_loss: float | None
    mlm_accuracy: float
    nsp_accuracy: float | None
    grad_norm: float
    skipped: bool
    empty: bool
    loss_scale: float
    trust: dict[str, TrustRatio] | None = None
    seconds: dict[str, float] = field(default_factory=dict, compare=False)

    @property
    def bad(self) -> bool:
        """A step that taught nothing; some are normal while fp16 finds its loss scale."""
        return self.skipped or not (self.empty or math.isfinite(self.loss))


class LateOutcome:
    """A StepOutcome whose numbers are waited for when the first is asked for; `skipped` is known.

    Asked for when the next step is queued, nobody waits for them.
    """

    def __init__(self, skipped: bool, read: Callable[[], StepOutcome]) -> None:
        self.skipped = skipped
        self._read = read

    @functools.cached_property
    def now(self) -> StepOutcome:
        return self._read()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.now, name)


class Engine:
    """Model, optimiser and DeepSpeed of one rank. All public methods are collective.

    `torch.distributed` must be initialised, and the model on its device, in fp32.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer_config: OptimizerConfig,
        engine_config: EngineConfig,
        *,
        micro_steps: int,
        micro_batch_rows: int,
    ) -> None:
        self.config = engine_config
        self.device = next(model.parameters()).device
        self.precision = resolve_precision(engine_config, self.device)
        self.world = dist.get_world_size()
        self.rank = dist.get_rank()
        self.micro_steps = micro_steps
        self._restarts = optimizer_config.restart_bias_correction
        self.optimizer = build_optimizer(model, optimizer_config)
        # Of each group: the model's own, which stages 1 and 2 take out of the optimiser.
        self._named = [
            list(zip(g["param_names"], g["params"], strict=True))
            for g in self.optimizer.param_groups
        ]
        self._trained = {name: p for group in self._named for name, p in group}
        settings = deepspeed_door.settings(
            engine_config,
            self.precision,
            micro_steps=micro_steps,
            micro_batch_rows=micro_batch_rows,
            parameters=sum(p.numel() for p in self._trained.values()),
        )
        self.copies = fragments.HostCopies()
        initial = {}
        if self.precision != "fp32":
            initial = {name: t.detach().clone() for name, t in model.state_dict().items()}
        self._ds = deepspeed_door.initialize(
            model, self.optimizer, settings, engine_config.deepspeed
        )
        self._held = self._layout()
        if isinstance(self.optimizer, Lamb) and engine_config.zero_stage > 0:
            self.optimizer.attach([pieces for _, _, pieces in self._held], self.device)
        for p, *_ in self._held:  # now, so that memory runs out now and not at the first step
            self.optimizer.state[p] = first_state(p)
        if initial:
            # DeepSpeed makes the fp32 masters from weights it has already rounded.
            self.load_weights(initial)
        self._steps = 0
        self._watch = Stopwatch(self.device)
        deepspeed_door.time_reductions(self._ds, functools.partial(self._watch.timed, "reduce"))

    def close(self) -> None:
        """Let go of what DeepSpeed holds, so that another engine may follow in this process."""
        self._ds.destroy()

    @property
    def module(self) -> nn.Module:
        return self._ds.module

    @property
    def loss_scale(self) -> float:
        return float(getattr(self._ds.optimizer, "loss_scale", 1.0))

    def start_phase(
        self, micro_steps: int, micro_batch_rows: int, *, restart: bool = False
    ) -> None:
        """Another accumulation from here on. `restart`: a phase begins, so bias correction counts
        from 0 if `optimizer.restart_bias_correction` says so. Moments and loss scale are kept.
        """
        self.micro_steps = micro_steps
        self._ds.set_train_micro_batch_size(micro_batch_rows)
        self._ds.set_train_batch_size(micro_batch_rows * micro_steps * self.world)
        if self.config.zero_stage > 0:
            self._ds.optimizer.gradient_accumulation_steps = micro_steps
        if restart and self._restarts:
            restart_bias_correction(self.optimizer)

    def train_step(self, batches: Iterator[Batch], lr: float) -> LateOutcome:
        """Take `micro_steps` batches and make one update at the rate `lr`.

        The host waits for the device once, to see whether the gradients are finite.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self._ds.train()
        total = torch.zeros(6, dtype=torch.float64, device=self.device)
        predictions = sequences = 0  # fewer than planned where damage left some empty
        for micro_step in range(self.micro_steps):
            self._watch.switch("data")
            batch = next(batches).to(self.device, non_blocking=True)
            self._watch.switch("forward")
            self._ds.set_gradient_accumulation_boundary(micro_step == self.micro_steps - 1)
            found = self._forward(batch, batch.step_predictions, batch.step_sequences)
            total[:4] += torch.stack([x.double() for x in found[1:]])
            predictions += batch.predictions
            sequences += batch.next_sentences
            self._watch.switch("backward")
            self._ds.backward(found.loss * self.world, scale_wrt_gas=False)
        self._watch.switch("update")
        self.copies.join()
        judged = len(batch.next_sentence_labels) > 0
        loss_scale = self.loss_scale
        grad_norm, skipped = self._update()
        self._watch.switch("")
        total[4].fill_(predictions)
        total[5].fill_(sequences)
        if self.world > 1:
            dist.all_reduce(total)
        self._steps += 1
        every = self.config.trust_ratios_every
        due = isinstance(self.optimizer, Lamb) and every > 0 and self._steps % every == 0
        trust = self.optimizer.trust_ratios() if due and not skipped else None
        numbers = _late(torch.cat([total, grad_norm.double().reshape(1)]))
        seconds = self._watch.lap()

        def read() -> StepOutcome:
            *sums, predictions, sequences, norm = numbers()
            counts = predictions, sequences, predictions, sequences
            mlm_loss, nsp_loss, mlm_accuracy, nsp_accuracy = (
                x / count if count else math.nan for x, count in zip(sums, counts, strict=True)
            )
            return StepOutcome(
                loss=mlm_loss + nsp_loss if judged else mlm_loss,
                mlm_loss=mlm_loss,
                nsp_loss=nsp_loss if judged else None,
                mlm_accuracy=mlm_accuracy,
                nsp_accuracy=nsp_accuracy if judged else None,
                grad_norm=norm,
                skipped=skipped,
                empty=predictions == 0,
                loss_scale=loss_scale,
                trust=trust,
                seconds=seconds(),
            )

        return LateOutcome(skipped, read)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch], sources: Sequence[str] = ()) -> Scores:
        """Means over the batches of all ranks, without dropout; `sources` of a HeldOut's."""
        was_training = self.module.training
        self._ds.eval()
        total = sums(self._ds, batches, self.device, sources)
        if self.world > 1:
            dist.all_reduce(total)
        self._ds.train(was_training)
        return scores_of(total, sources)

    # ------------------------------------------------------------------------------ one step

    def _forward(self, batch: Batch, predictions: int, sequences: int) -> LossSums:
        return batch_losses(self._ds, batch, predictions, sequences)

    def _update(self) -> tuple[Tensor, bool]:
        """Clip and step: (global gradient norm, skipped)."""
        if self.config.zero_stage == 0:
            # Without ZeRO DeepSpeed neither reports the norm nor checks for overflow.
            parameters = [p for p in self._trained.values() if p.grad is not None]
            norm = nn.utils.get_total_norm([p.grad for p in parameters])
            if not torch.isfinite(norm):
                self._ds.zero_grad()
                return torch.full_like(norm, math.inf), True
            if self.config.gradient_clipping > 0:
                nn.utils.clip_grads_with_norm_(parameters, self.config.gradient_clipping, norm)
            self._ds.step()
            return norm, False
        self._ds.step()
        skipped = not self._ds.was_step_applied()
        norm = None if skipped else self._ds.get_global_grad_norm()
        return torch.as_tensor(math.inf if norm is None else norm, device=self.device), skipped

    # -------------------------------------------------------------------------- save and load

    def _layout(self) -> list[tuple[Tensor, list[str], list[Piece]]]:
        """(what the optimiser updates, whose it is, the pieces in it): a slice of each group, and
        without ZeRO each parameter."""
        if self.config.zero_stage == 0:
            return [
                (p, [name], [Piece(name, 0, p.numel(), 0)]) for name, p in self._trained.items()
            ]
        return [
            (group["params"][0], [name for name, _ in named], deepspeed_door.pieces_of(named))
            for group, named in zip(self.optimizer.param_groups, self._named, strict=True)
        ]

    def slices(self) -> list[Slice]:
        """The fp32 weights and moments that this rank holds, as flat views, and what of which
        parameter lies where in them."""
        result = []
        for p, _, pieces in self._held:
            tensors = {"fp32": p} | {key: self.optimizer.state[p][key] for key in MOMENTS}
            flat = {key: t.detach().view(-1) for key, t in tensors.items()}
            result.append(Slice(flat, pieces))
        return result

    def not_finite(self) -> str | None:
        """The first of this rank's fp32 weights, moments, buffers, frozen parameters and counts of
        updates with a NaN or an infinity in it; None if all are finite. No collective."""
        if (found := fragments.not_finite(self.slices(), self._rest())) is not None:
            return found
        counts = self._update_counts()
        good = torch.stack(list(counts.values())).isfinite().tolist()
        return next(
            (f"{n} (its updates)" for n, g in zip(counts, good, strict=True) if not g), None
        )

    def snapshot(self) -> Callable[[Path], list[str]]:
        """Copy this rank's state to host memory. What is returned writes it into a folder, from
        any thread and whatever has become of the engine, until the next snapshot, and gives the
        names of the files. The next update waits for the copying, the next forward does not.

        Costs as much host memory as the files are long, from the first one on.
        """
        if self.rank > 0 and self.config.zero_stage == 0:
            return lambda folder: []
        more = () if self.rank > 0 else (self._rest(), self._meta())
        return fragments.snapshot(self.copies, self.rank, self.slices(), *more)

    def load(
        self, found: Contents, agreed: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        """Restore what a snapshot has written: bitwise at the same world size, stage and precision,
        and the same numbers at any other.

        What this run's config says of the optimiser stands. UserError if a rank cannot read its
        part; `agreed` makes an error inside it, on any rank, that of all.
        """
        self.copies.join()
        with agreed():
            saved = fragments.open_folder(found)
            own = self._shapes()
            trained = {name: own.pop(name) for name in self._trained}
            given = {name: t.shape for name, t in saved.rest.items()}
            fragments.check_shapes(saved.meta.shapes, trained, str(found.folder))
            fragments.check_shapes(given, own, str(found.folder))
            for slice_ in self.slices():
                slice_.fill(saved.read)
        for name, steps in self._update_counts().items():
            steps.fill_(saved.meta.updates[name])
        self._show_weights(saved.rest)
        scaler = getattr(self._ds.optimizer, "loss_scaler", None)
        if self.precision == "fp16" and saved.meta.loss_scaler.keys() == set(_SCALER):
            for key in _SCALER:
                setattr(scaler, key, saved.meta.loss_scaler[key])
        self._steps = saved.meta.steps

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Start from these weights (fp32, by name); moments and counters stay as they are.

        UserError unless names and shapes are exactly the model's.
        """
        shapes = {name: w.shape for name, w in weights.items()}
        fragments.check_shapes(shapes, self._shapes(), "the weights to start from")
        self.copies.join()
        for slice_ in self.slices():
            slice_.fill(lambda name, _, a, b: weights[name].flatten()[a:b], keys=("fp32",))
        self._show_weights(weights)

    def _show_weights(self, others: Mapping[str, Tensor]) -> None:
        """The model's own weights follow the fp32 ones, of all ranks; buffers and frozen
        parameters follow `others`."""
        if self.config.zero_stage > 0:
            self._ds.optimizer.update_lp_params()
        with torch.no_grad():
            for name, own in self._rest().items():
                if name in others:
                    own.copy_(others[name])

    def _shapes(self) -> dict[str, torch.Size]:
        return {name: t.shape for name, t in self.module.state_dict().items()}

    def _rest(self) -> dict[str, Tensor]:
        """Buffers and frozen parameters, which no optimiser state covers."""
        everything = self.module.state_dict(keep_vars=True)
        return {name: t for name, t in everything.items() if name not in self._trained}

    def _meta(self) -> Meta:
        counts = self._update_counts()
        on_host = torch.stack(list(counts.values())).tolist()
        scaler = getattr(self._ds.optimizer, "loss_scaler", None)
        return Meta(
            world_size=self.world,
            zero_stage=self.config.zero_stage,
            precision=self.precision,
            steps=self._steps,
            updates=dict(zip(counts, on_host, strict=True)),
            shapes={name: list(p.shape) for name, p in self._trained.items()},
            loss_scaler={key: getattr(scaler, key) for key in _SCALER if hasattr(scaler, key)},
        )

    def _update_counts(self) -> dict[str, Tensor]:
        """The optimiser's count of updates of each parameter, the live tensors."""
        return {
            name: self.optimizer.state[p]["step"] for p, names, _ in self._held for name in names
        }


def _late(numbers: Tensor) -> Callable[[], list[float]]:
    """Copy to the host, behind what the device has to do; what is returned waits for it."""
    host = numbers.to("cpu", non_blocking=True)
    done = torch.cuda.current_stream().record_event() if numbers.is_cuda else None

    def read() -> list[float]:
        if done is not None:
            done.synchronize()
        return host.tolist()

    return read
