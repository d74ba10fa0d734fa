"""One job: train a task's model with one batch size, rate, number of epochs and seed, score it on
dev, keep the best, predict the test sets. The data order and the dropout of a step are functions
of (seed, step), so a stopped job goes on exactly.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import pickle
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call

from core.console import clock_text
from core.errors import UserError, disk_error, short
from core.files import disk_errors, open_regular, remove_folder, replacing, sha256, unfinished
from finetune import results
from finetune.batches import by_tokens, labelled, step_items, steps_of
from finetune.card import model_card
from finetune.config import TrainConfig
from finetune.examples import Example
from finetune.heads import TaskModel
from finetune.results import job_name
from finetune.tasks import Context, Score, Stopped, Task
from pretrain import torch_files
from pretrain.hugging_face import Pretrained
from pretrain.metrics import Recorder
from pretrain.optim import OptimizerConfig, build_optimizer
from pretrain.schedule import ScheduleConfig, learning_rate

LAST = "last.pt"  # of a job's folder: where it goes on from, until it has a result
_HALF = f"{LAST}.new"
_HALF_MODEL = re.compile(r"\.model\.[a-z0-9_]{8}")  # as tempfile names it
_CPU_EVALUATION_TOKENS = 1024  # stays in the caches


@dataclass(frozen=True)
class Job:
    """One point of the grid. `name` is its folder below run_dir/task."""

    task: str
    batch_size: int
    learning_rate: float
    epochs: float
    seed: int

    @property
    def name(self) -> str:
        return job_name(self.batch_size, self.learning_rate, self.epochs, self.seed)


@torch.no_grad()
def predict(
    model: TaskModel,
    items: Sequence[Example],
    tokens: int,
    device: torch.device,
    heed: Callable[[], None] = lambda: None,
) -> list[np.ndarray]:
    """The head's outputs for each item, in order; dropout off. `tokens`: computed at a time, on a
    CPU no more than stays in its caches. `heed` is called before each part."""
    model.eval()
    outputs = []
    if device.type == "cpu":
        tokens = min(tokens, _CPU_EVALUATION_TOKENS)
    for part in by_tokens(items, tokens):
        heed()
        batch = model.collate(part, device)
        outputs += model.split(forward(model, batch), batch)
    return outputs


class Trainer:
    """One job in its folder. `run()` is the whole of it.

    in_place: asked before anything is made in the folder, for an error where it is another's."""

    def __init__(
        self,
        task: Task,
        model: TaskModel,
        job: Job,
        folder: Path,
        context: Context,
        in_place: Callable[[], None],
    ) -> None:
        self.task, self.model, self.job, self.folder = task, model, job, folder
        self._in_place = in_place
        self.context, self.config = context, context.config.train
        device = context.device
        model.to(device)
        model.prepare(compute_dtype(self.config, device), device, task.config.max_seq_len)
        c = self.config
        self.optimizer = build_optimizer(
            model,
            OptimizerConfig(
                name="adamw", beta1=c.beta1, beta2=c.beta2, eps=c.eps, weight_decay=c.weight_decay
            ),
        )
        self.schedule = ScheduleConfig(
            learning_rate=job.learning_rate,
            warmup=c.warmup,
            decay="linear",
            convention="continuous",
        )
        self.items = task.sets["train"]
        self.steps = steps_of(len(self.items), job.batch_size, job.epochs)
        self.is_scored = functools.partial(
            is_scored,
            steps=self.steps,
            per_epoch=math.ceil(len(self.items) / job.batch_size),
            times=c.evaluations_per_epoch,
        )
        labels = f" with the labels {', '.join(task.head.labels)}" if task.head.labels else ""
        self.data = f"{len(self.items)} examples{labels}"
        self.made_of = made_of(task, context.encoder)
        self.step, self.seconds, self.examples = 0, 0.0, 0
        self.diverged = False  # loss, gradient or weights ceased to be finite
        self.best: Score | None = None
        self.weights = folder / "model" / "model.safetensors"  # of the best
        self.kept: str | None = None  # their digest
        self.history: list[dict[str, Any]] = []

    def run(self, wants_test: Callable[[float], bool]) -> dict[str, Any]:
        """Train to the end and write predictions; returns the measured part of result.json.

        `wants_test`: whether a job with this dev score predicts the test sets too.
        """
        with disk_errors(self.folder):
            halves = [path for path, name in unfinished(self.folder) if name == results.RESULT]
            halves += [p for p in self.folder.glob(".model.*") if _HALF_MODEL.fullmatch(p.name)]
            for half in (*halves, self.folder / _HALF):
                remove_folder(half)  # of a start that was killed here
        self._resume()
        recorder = Recorder(self.folder, self.step, active=True)
        try:
            self._train(recorder)
            return self._finish(wants_test)
        except Stopped:
            self._save()
            raise
        finally:
            recorder.close()

    def _train(self, recorder: Recorder) -> None:
        """All steps that are left, up to one after which it has diverged."""
        saved_at, shown_at = time.monotonic(), 0.0
        scored = self.history[-1]["step"] if self.history else 0
        if self.is_scored(self.step) and scored < self.step and not self.diverged:
            self._score(recorder)  # stopped while it was scored
        while self.step < self.steps and not self.diverged:
            started = time.perf_counter()
            loss, norm = self.train_step()
            self.step += 1
            self.seconds += time.perf_counter() - started
            self.diverged = not (math.isfinite(loss) and math.isfinite(norm))
            if self.is_scored(self.step):  # one weight may be of a word that is seldom seen
                finite = all(bool(p.isfinite().all()) for p in self.model.parameters())
                self.diverged |= not finite
            if time.monotonic() - shown_at > 1 or self.step == self.steps:
                shown_at = time.monotonic()
                self._show(loss)
            if self.step % 10 == 0 or self.is_scored(self.step):
                rate = learning_rate(self.step - 1, self.steps, self.schedule)
                recorder.write(
                    self.step,
                    {
                        "train/loss": loss,
                        "train/gradient_norm": norm,
                        "train/learning_rate": rate,
                        "train/examples_per_second": self.examples / self.seconds,
                    },
                )
            if self.is_scored(self.step) and not self.diverged:
                self._score(recorder)
                if self.config.save_minutes == 0 or self.step < self.steps:
                    self._save()
                    saved_at = time.monotonic()
            elif time.monotonic() - saved_at > 60 * self.config.save_minutes > 0:
                self._save()
                saved_at = time.monotonic()
            if self.step < self.steps:
                self.context.heed()

    def _score(self, recorder: Recorder) -> None:
        score = self._evaluate()
        recorder.write(self.step, {f"dev/{k}": v for k, v in score.values.items()})

    def train_step(self) -> tuple[float, float]:
        """One optimiser step: (loss, norm of the gradient before clipping)."""
        seed_dropout(self.job.seed, self.step)
        self.model.train()
        chosen = [
            self.items[i]
            for i in step_items(len(self.items), self.job.batch_size, self.job.seed, self.step)
        ]
        weight = labelled(chosen)
        total = 0.0
        for part in by_tokens(chosen, self.config.micro_batch_tokens):
            batch = self.model.collate(part, self.context.device)
            loss = self.model.loss_sum(forward(self.model, batch), batch) / weight
            loss.backward()
            total += float(loss.detach())
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        norm = torch.nn.utils.clip_grad_norm_(parameters, self.config.clip or math.inf)
        rate = learning_rate(self.step, self.steps, self.schedule)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.examples += len(chosen)
        return total, float(norm)

    def _outputs(self, names: list[str]) -> dict[str, list[np.ndarray]]:
        sets, tokens = self.task.sets, self.config.micro_batch_tokens
        device, heed = self.context.device, self.context.heed
        found = {name: predict(self.model, sets[name], tokens, device, heed) for name in names}
        # A run that diverged still gets a score: that of a constant guess.
        return {name: [np.nan_to_num(item) for item in items] for name, items in found.items()}

    def _evaluate(self) -> Score:
        score = self.task.score(self._outputs(self.task.dev_sets))
        entry = {"step": self.step, "epoch": self.step / self.steps * self.job.epochs}
        self.history.append(entry | score.values | {"failed": score.failed})
        better = self.best is None or score.value > self.best.value
        if self.config.select == "last" or better:
            self.best = score
            self._in_place()
            card = model_card(self.task, self.context, self.job.name, self.job.seed, score)
            self.model.save(self.folder / "model", self.task.reading | score.state, card)
            self.kept = self._digest()
        return score

    def _finish(self, wants_test: Callable[[float], bool]) -> dict[str, Any]:
        if self.best is None:  # it diverged before the first score
            with torch.no_grad():
                for p in self.model.parameters():
                    p.fill_(math.nan)
            self._evaluate()
        assert self.best is not None
        chosen = self.history[-1]
        if self.config.select == "best":
            chosen = max(self.history, key=lambda entry: entry[self.best.main])  # first of equals
        if self.kept not in (None, self._digest()):
            raise UserError(
                f"{self.weights}: is not what was scored; remove {self.folder / LAST} to begin its "
                "job anew"
            )
        if chosen["step"] != self.step:
            self.model.load_saved(self.folder / "model")
        score = self.best
        self._in_place()
        predictions = self.folder / "predictions"
        with disk_errors(predictions):
            remove_folder(predictions)  # half files of a start that was killed here
            predictions.mkdir()
        sets = self.task.dev_sets
        if wants_test(score.value):
            sets = sets + self.task.test_sets
        outputs = self._outputs(sets)
        self.task.write(outputs, score, predictions)
        with disk_errors(predictions):
            written = {path.name: sha256(path) for path in sorted(predictions.iterdir())}
        return {
            "made_of": self.made_of,
            "predictions": written,
            "main": score.main,
            "scores": score.values,
            "state": score.state,
            "test": self.task.test_scores(outputs),
            "last": {k: self.history[-1][k] for k in score.values},
            "failed": bool(score.failed or self.diverged),
            "diverged": self.diverged,
            "history": self.history,
            "steps": self.step,
            "train_seconds": round(self.seconds, 3),
            "examples_per_second": round(self.examples / max(self.seconds, 1e-9), 2),
        }

    def _digest(self) -> str:
        with disk_errors(self.weights):
            return sha256(self.weights)

    def _show(self, loss: float) -> None:
        left = self.seconds / self.step * (self.steps - self.step)
        self.context.console.progress(
            f"{self.task.name} {self.job.name}  step {self.step:,}/{self.steps:,}  "
            f"loss {loss:.4f}  left {clock_text(left)}",
            (
                *([f"best {self.best.main} {self.best.value:.2f}"] if self.best else []),
                f"{self.examples / self.seconds:.1f} examples/s",
            ),
        )

    def _save(self) -> None:
        self._in_place()
        facts = {
            "job": f"{self.task.name} {self.job.name}",
            "data": self.data,
            "made_of": self.made_of,
            "step": self.step,
            "seconds": self.seconds,
            "examples": self.examples,
            "history": self.history,
            "best": dataclasses.asdict(self.best) if self.best else None,
            "diverged": self.diverged,
            "kept": self.kept,
        }
        state = {
            "facts": json.dumps(facts),  # of any length, where a pickle's values have a bound
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        path, new = self.folder / LAST, self.folder / _HALF
        try:
            with (
                disk_errors(path),
                replacing(path, part=new, durable=False),
                new.open("wb") as file,
            ):
                torch.save(state, file)
        except RuntimeError as error:  # torch's own, of a place in the file, after the disk's
            if not isinstance(error.__context__, OSError):
                raise
            raise disk_error(error.__context__, path) from None

    def _resume(self) -> None:
        path, name = self.folder / LAST, f"{self.task.name} {self.job.name}"
        try:
            with open_regular(path) as file:
                state = torch_files.load(file)
            state = json.loads(state.pop("facts", "{}")) | state
            for key, kind in (("model", dict), ("optimizer", dict), ("history", list)):
                if type(state.get(key)) is not kind:
                    raise ValueError(key)
        except FileNotFoundError:
            return
        except OSError as error:
            raise disk_error(error, path) from None
        except (pickle.UnpicklingError, ValueError, TypeError, AttributeError, RecursionError):
            self.context.console.say(f"{name}: {path} is damaged: the job begins anew")
            return
        if (whose := state.get("job", name)) != name:
            said = f"is of the job {short(str(whose), 200)}; remove it to begin this one anew"
            raise UserError(f"{path}: {said}")
        if (before := state.get("data", self.data)) != self.data:
            raise UserError(
                f"{path}: was made of {short(before, 200)}, and there are now "
                f"{short(self.data, 200)}; use another run_dir, or remove it to begin its job anew"
            )
        results.check_same(path, state.get("made_of", {}), self.made_of)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.seconds = state["step"], state["seconds"]
        self.examples, self.history = state["examples"], state["history"]
        self.best = Score(**state["best"]) if state["best"] else None
        self.diverged, self.kept = state.get("diverged", False), state.get("kept")
        self.context.console.say(f"{name}: goes on from step {self.step}")


def made_of(task: Task, encoder: Pretrained) -> dict[str, str]:
    """Digests of what a job's scores depend on beside its config, by name."""
    return task.digests | {str(encoder.path): encoder.digest}


def compute_dtype(config: TrainConfig, device: torch.device) -> torch.dtype | None:
    """bf16, or None for that of the weights (fp32)."""
    narrow = config.precision == "bf16"
    if config.precision == "auto" and device.type == "cuda":
        narrow = torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if narrow else None


def forward(model: TaskModel, batch: Any) -> Tensor:
    """In bf16 the products see rounded copies; the gradient reaches the fp32 weights."""
    if model.compute_dtype is None:
        return model(batch)
    narrow = {n: p.to(model.compute_dtype) for n, p in model.named_parameters()}
    return functional_call(model, narrow, (batch,))


def is_scored(step: int, steps: int, per_epoch: int, times: int) -> bool:
    """Whether dev is scored after `step` of `steps`: `times` an epoch, evenly, and at the end."""
    points = step * times // per_epoch  # that lie up to here, not rounded up to whole steps
    return step == steps or (points > 0 and -(-per_epoch * points // times) == step)


def seed_dropout(seed: int, step: int) -> None:
    """Dropout draws from torch's default generators, which depend on (seed, step) alone."""
    torch.manual_seed((seed * 1_000_003 + step) % 2**63)
