"""A model whose gradients are given, and an engine that feeds them: the update rule on its own."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pretrain.engine import Engine
from pretrain.engine_config import EngineConfig
from pretrain.loss import LossSums
from pretrain.optim import OptimizerConfig

# Sizes that no world size divides: slices cut through tensors, the smallest lie on one rank only,
# and 3 + 5 + 1 + 2 elements of vectors need padding at every world size above 1.
SHAPES = {
    "word.weight": (37, 29),
    "tiny.weight": (1, 3),
    "dense.weight": (64, 33),
    "square.weight": (7, 11),
    "word.bias": (3,),
    "norm.weight": (5,),
    "norm.bias": (1,),
    "last.bias": (2,),
}


class Given(nn.Module):
    """loss = sum over parameters of <p, g>, so that each gradient is g."""

    def __init__(self, seed: int = 0, shapes: dict[str, tuple[int, ...]] | None = None) -> None:
        super().__init__()
        rng = np.random.default_rng(seed)
        for name, shape in (shapes or SHAPES).items():
            owner, _, leaf = name.rpartition(".")
            if owner and not hasattr(self, owner):
                self.add_module(owner, nn.Module())
            scale = 10 ** rng.uniform(-2, 0)
            value = torch.tensor(rng.normal(0, scale, shape), dtype=torch.float32)
            (getattr(self, owner) if owner else self).register_parameter(leaf, nn.Parameter(value))

    def forward(self, gradients: dict[str, Tensor]) -> Tensor:
        parts = [(p.float() * gradients[name]).sum() for name, p in self.named_parameters()]
        return torch.stack(parts).sum()


FINE = 2.0**-9  # of a part but the first, where a sum has more digits than bf16


@functools.cache
def gradients(step: int, part: int, fine: bool = False) -> dict[str, np.ndarray]:
    """Of one part of a step, in float32; the global gradient is the sum over the parts.

    Small multiples of a power of two: their sums are exact in bf16 too, so that every precision
    sees the same gradients and only the update rule is compared.
    """
    rng = np.random.default_rng((1, step, part))
    unit = 2.0 ** (step % 5 - 8) * (FINE if fine and part > 0 else 1.0)
    return {
        name: (unit * rng.integers(-5, 6, shape)).astype(np.float32)
        for name, shape in SHAPES.items()
    }


class GivenBatch:
    """The part of a Batch that `train_step` touches."""

    step_predictions = 1
    step_sequences = 1
    predictions = next_sentences = 1
    next_sentence_labels = (0,)

    def __init__(self, values: dict[str, np.ndarray]) -> None:
        self.values = {name: torch.from_numpy(value) for name, value in values.items()}

    def to(self, device: torch.device, **_: Any) -> GivenBatch:
        self.values = {name: value.to(device) for name, value in self.values.items()}
        return self


class GivenEngine(Engine):
    def _forward(self, batch: Any, predictions: int, sequences: int) -> LossSums:
        loss = self._ds(batch.values)
        zero = torch.zeros((), dtype=torch.float64, device=self.device)
        return LossSums(loss, loss.detach(), zero, zero, zero)


def engine(
    *,
    stage: int,
    precision: str = "fp32",
    micro_steps: int = 1,
    optimizer: OptimizerConfig | None = None,
    **config: Any,
) -> GivenEngine:
    on_gpu = torch.distributed.get_backend() == "nccl"
    return GivenEngine(
        Given().to("cuda" if on_gpu else "cpu"),
        optimizer or OptimizerConfig(),
        EngineConfig(zero_stage=stage, precision=precision, **config),
        micro_steps=micro_steps,
        micro_batch_rows=1,
    )


def batches(
    rank: int, world: int, micro_steps: int, first: int = 0, parts: int = 12, fine: bool = False
) -> Iterator[GivenBatch]:
    """A step's gradient is the sum of `parts` global parts, dealt to micro-steps and ranks."""
    assert parts % (world * micro_steps) == 0, "every part must be dealt"
    step = first
    while True:
        share = parts // (world * micro_steps)
        for micro in range(micro_steps):
            at = (micro * world + rank) * share
            dealt = [gradients(step, i, fine) for i in range(at, at + share)]
            total = {
                name: np.sum([d[name].astype(np.float64) for d in dealt], axis=0).astype(np.float32)
                for name in SHAPES
            }
            yield GivenBatch(total)
        step += 1


@functools.cache
def full_gradient(step: int, parts: int = 12, fine: bool = False) -> dict[str, np.ndarray]:
    dealt = [gradients(step, i, fine) for i in range(parts)]
    return {name: np.sum([d[name].astype(np.float64) for d in dealt], axis=0) for name in SHAPES}


def masters(engine_: Engine) -> dict[str, np.ndarray]:
    """The fp32 weights of every parameter, whole, gathered from all ranks. Collective."""
    shapes = {name: p.shape for name, p in engine_.module.named_parameters()}
    device = engine_.device
    result = {name: torch.zeros(shape.numel(), device=device) for name, shape in shapes.items()}
    for slice_ in engine_.slices():
        for x in slice_.pieces:
            values = slice_.tensors["fp32"][x.here : x.here + x.numel]
            result[x.name][x.start : x.start + x.numel] = values
    for whole in result.values():
        if engine_.config.zero_stage > 0:
            torch.distributed.all_reduce(whole)
    return {name: whole.view(shapes[name]).cpu().numpy().copy() for name, whole in result.items()}
