"""LAMB that is exact under ZeRO, AdamW, and the parameter groups of both.

LAMB scales the update of every parameter *tensor* by ‖weight‖ / ‖update‖. ZeRO (stages 1 and 2)
flattens all tensors of a group into one vector and shows each rank one slice of it, which cuts
through tensors; a LAMB that takes what it is shown for a tensor computes one ratio for half the
network. `Lamb` learns which piece of which tensor lies where in its slice, sums the squares by
tensor, and adds them up over the ranks with one all-reduce of a [2, T] vector a `step()`.
The derivation and the measured parity are in docs/lamb.md.

T  tensors of a group        N  elements of this rank's slice        C  ROW, elements of a row
"""

from __future__ import annotations

import functools
import math
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.adam import adam

from pretrain.optim_config import OptimizerConfig


@dataclass(frozen=True)
class Piece:
    """Elements [start, start + numel) of a flattened parameter, at `here` in a slice."""

    name: str
    start: int
    numel: int
    here: int


@dataclass(frozen=True)
class TrustRatio:
    """What LAMB did to one parameter tensor in its last step."""

    weight_norm: float
    update_norm: float
    ratio: float


def parameter_groups(model: nn.Module, config: OptimizerConfig) -> list[dict[str, Any]]:
    """Two groups, with and without weight decay, that hold each trainable parameter once.

    Tied weights count once, frozen ones are left out, and whatever has fewer than two dimensions
    (biases, LayerNorms) goes without decay. `params` holds (name, parameter) pairs.
    """
    decay: list[tuple[str, nn.Parameter]] = []
    no_decay: list[tuple[str, nn.Parameter]] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            (decay if parameter.ndim >= 2 else no_decay).append((name, parameter))
    assert decay or no_decay, "the model has no trainable parameter"
    groups = [
        {"params": decay, "weight_decay": config.weight_decay},
        {"params": no_decay, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimiser of the config over `parameter_groups`; its rate is 0 until one is set."""
    groups = parameter_groups(model, config)
    betas = (config.beta1, config.beta2)
    if config.name == "adamw":
        return torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=config.eps, fused=True)
    return Lamb(
        groups,
        lr=0.0,
        betas=betas,
        eps=config.eps,
        clamp=(config.trust_ratio_min, config.trust_ratio_max),
        compile=config.compile,
    )


def layer_and_kind(name: str) -> tuple[str, str]:
    """`bert.encoder.layer.3.output.dense.weight` -> (`layer_03`, `output.dense.weight`).

    Parameters outside the layers belong to `embeddings`, `pooler` or `heads`.
    """
    parts = name.split(".")
    if "layer" in parts[:-2]:
        at = parts.index("layer")
        return f"layer_{int(parts[at + 1]):02d}", ".".join(parts[at + 2 :])
    known = {"embeddings": "embeddings", "pooler": "pooler", "cls": "heads"}
    at = next((i for i, part in enumerate(parts) if part in known), None)
    if at is None:
        return "other", name
    return known[parts[at]], ".".join(parts[at + 1 :])


def first_state(p: Tensor) -> dict[str, Tensor]:
    """Of LAMB and AdamW alike, before the first step."""
    return {
        "step": torch.zeros((), dtype=torch.float32, device=p.device),
        "exp_avg": torch.zeros_like(p),
        "exp_avg_sq": torch.zeros_like(p),
    }


def restart_bias_correction(optimizer: torch.optim.Optimizer) -> None:
    """Count steps from 0 again and keep the moments: NVIDIA's recipe at the switch to phase 2."""
    for state in optimizer.state.values():
        if "step" in state:
            state["step"].zero_()


class Lamb(torch.optim.Optimizer):
    """LAMB (You et al. 2020, arXiv 1904.00962) with the semantics of apex FusedLAMB.

    That is `grad_averaging=True`, `use_nvlamb=False`, `adam_w_mode=True`: bias correction inside
    the update, decay inside the ratio, ratio 1 without decay and where a norm is 0. Clipping by
    the global norm is the caller's, before `step()`. Differs from apex in one way: a tensor is a
    tensor however ZeRO cuts it, once `attach()` was called after the parameters were flattened.

    Gradients are overwritten by the update: `p.grad` is scratch after `step()`.
    `compile`: the first pass over a long slice is one compiled loop, where there is a compiler.
    """

    ROW = 1024  # squares are summed in rows of this many elements in fp32, rows in fp64
    BLOCK = {"cpu": 1 << 20, "cuda": 1 << 26}  # elements a pass; on a CPU, what its caches hold
    COMPILE_FROM = {"cpu": 1 << 24, "cuda": 1 << 20}  # elements that are worth ten seconds once
    compiler = staticmethod(torch.compile)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        clamp: tuple[float | None, float | None] = (None, None),
        compile: bool = True,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)
        self._clamp = clamp
        self._compile = compile
        self._names: list[list[str]] = []
        for index, group in enumerate(self.param_groups):
            numbered = [f"{index}.{i}" for i in range(len(group["params"]))]
            self._names.append(group.get("param_names", numbered))
        self._slices: dict[Tensor, SliceIndex] = {}
        self._known = {p for group in self.param_groups for p in group["params"]}
        self._last: dict[Tensor, Tensor] = {}
        self._comm_device: torch.device | None = None

    def attach(
        self, pieces: Sequence[Sequence[Piece]], comm_device: torch.device | None = None
    ) -> None:
        """Learn the layout after ZeRO has replaced the tensors of each group by one flat vector.

        `pieces`: of each group, what lies in this rank's vector, in the order of its tensors.
        `comm_device`: where the collectives want tensors, when the optimiser's own are elsewhere
        (offloaded to the host).
        """
        self._comm_device = comm_device
        for group, names, own in zip(self.param_groups, self._names, pieces, strict=True):
            (flat,) = group["params"]
            self._slices[flat] = SliceIndex(flat, names, own, self.ROW)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One update of every group. No host synchronisation; one all-reduce a flat slice."""
        assert closure is None, "LAMB takes no closure"
        for group in self.param_groups:
            params = group["params"]
            if len(params) == 1 and params[0] in self._slices:
                if params[0].grad is not None:
                    self._step_slice(params[0], group)
                continue
            unknown = [p for p in params if p not in self._known]
            assert not unknown, "the parameters were replaced: call Lamb.attach() after wrapping"
            self._step_tensors([p for p in params if p.grad is not None], group)

    def trust_ratios(self) -> dict[str, TrustRatio]:
        """Of the last step, by parameter name, equal on all ranks. Copies to the host."""
        result: dict[str, TrustRatio] = {}
        for group, names in zip(self.param_groups, self._names, strict=True):
            params = group["params"]
            if params[0] in self._slices:
                last = self._slices[params[0]].last
            else:
                columns = [self._last[p] for p in params if p in self._last]
                names = [n for n, p in zip(names, params, strict=True) if p in self._last]
                last = torch.stack(columns, 1) if columns else None
            if last is not None:
                for name, *values in zip(names, *last.tolist(), strict=True):
                    result[name] = TrustRatio(*values)
        return result

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for p, state in self.state.items():
            # torch leaves `step` where it was saved; the fused kernel wants it beside p.
            state["step"] = torch.as_tensor(state["step"], dtype=torch.float32).to(p.device)

    def _state_of(self, p: Tensor) -> dict[str, Tensor]:
        if not self.state[p]:
            self.state[p] = first_state(p)
        return self.state[p]

    def _ratio(self, sums: Tensor, weight_decay: float) -> tuple[Tensor, Tensor]:
        """[2, T] sums of squares of weight and update -> norms [2, T] and ratio [T]."""
        norms = sums.sqrt()
        weight, update = norms
        if weight_decay == 0:
            return norms, torch.ones_like(weight)
        ratio = torch.where((weight > 0) & (update > 0), weight / update, 1.0)
        low, high = self._clamp
        if low is not None or high is not None:
            ratio = ratio.clamp(low, high)
        return norms, ratio

    def _step_slice(self, p: Tensor, group: dict[str, Any]) -> None:
        slice_ = self._slices[p]
        state = self._state_of(p)
        step, m, v, u = state["step"], state["exp_avg"], state["exp_avg_sq"], p.grad
        done = 0
        if self._compiles(p):
            done = slice_.rows * self.ROW
            rows = [x[:done].view(-1, self.ROW) for x in (p, u, m, v)]
            decay = p.new_full((slice_.rows, 1), group["weight_decay"])
            (beta1, beta2), t = group["betas"], step.double() + 1
            corrections = 1 / (1 - beta1**t), 1 / (1 - beta2**t)
            slice_.row_squares.copy_(
                self._first_pass(*rows, decay, *corrections, beta1, beta2, group["eps"])
            )
        block = self.BLOCK["cpu" if p.is_cpu else "cuda"] // self.ROW * self.ROW
        direction = torch.empty(min(block, p.numel() - done), dtype=p.dtype, device=p.device)
        count = torch.empty_like(step)
        for start in range(done, p.numel(), block):
            end = min(start + block, p.numel())
            d = direction[: end - start]
            u_block = u[start:end]
            count.copy_(step)
            _adam_direction([d], [u_block], [m[start:end]], [v[start:end]], [count], group)
            torch.add(d, p[start:end], alpha=group["weight_decay"], out=u_block)
            slice_.sum_rows(p, u, start, end)
        step.add_(1)

        sums = slice_.sums(p, u)
        if dist.is_initialized() and dist.get_world_size() > 1:
            if self._comm_device is not None and self._comm_device != sums.device:
                there = sums.to(self._comm_device)
                dist.all_reduce(there)
                sums = there.to(sums.device)
            else:
                dist.all_reduce(sums)
        norms, ratio = self._ratio(sums, group["weight_decay"])
        slice_.last = torch.cat([norms, ratio[None]])
        if group["weight_decay"] == 0:
            p.add_(u, alpha=-group["lr"])
        else:
            slice_.apply(p, u, ratio, group["lr"])

    @functools.cached_property
    def _first_pass(self) -> Callable[..., Tensor]:
        return self.compiler(update_rows, dynamic=False, fullgraph=True)

    def _compiles(self, p: Tensor) -> bool:
        least = self.COMPILE_FROM.get(p.device.type, math.inf)
        return self._compile and p.numel() >= least and _has_compiler(p.device.type)

    def _step_tensors(self, params: list[Tensor], group: dict[str, Any]) -> None:
        if not params:
            return
        states = [self._state_of(p) for p in params]
        grads = [p.grad for p in params]
        us = [torch.empty_like(p) for p in params]
        m, v, steps = ([s[key] for s in states] for key in ("exp_avg", "exp_avg_sq", "step"))
        _adam_direction(us, grads, m, v, steps, group)
        torch._foreach_add_(us, params, alpha=group["weight_decay"])
        squares = [
            torch.stack(torch._foreach_norm(xs, 2, dtype=torch.float64)).square()
            for xs in (params, us)
        ]
        norms, ratio = self._ratio(torch.stack(squares), group["weight_decay"])
        torch._foreach_mul_(us, list(ratio.to(us[0].dtype).unbind()))
        torch._foreach_add_(params, us, alpha=-group["lr"])
        last = torch.cat([norms, ratio[None]])
        self._last.update(zip(params, last.unbind(1), strict=True))


def _adam_direction(
    out: list[Tensor],
    grads: list[Tensor],
    m: list[Tensor],
    v: list[Tensor],
    steps: list[Tensor],
    group: dict[str, Any],
) -> None:
    """Update moments and step counts in place and write m̂ / (√v̂ + eps) to `out`.

    torch's fused Adam kernel does it in one pass over memory: from 0, at the rate -1.
    """
    torch._foreach_zero_(out)
    beta1, beta2 = group["betas"]
    adam(
        out, grads, m, v, [], steps, fused=True, amsgrad=False, beta1=beta1, beta2=beta2,
        lr=-1.0, weight_decay=0.0, eps=group["eps"], maximize=False,
    )  # fmt: skip


def update_rows(
    p: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    decay: Tensor,
    m_correction: Tensor,
    v_correction: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
) -> Tensor:
    """LAMB's first pass over [R, C] rows: moments in place, g becomes the update u = m̂ / (√v̂ +
    eps) + decay * p; returns the sums of squares of p and u by row, [2, R].

    `decay` is [R, 1] where a number would do: so the sums and the rest have the same loops, and
    the compiler makes one of them. It reads p, g, m, v and writes g, m, v: 28 bytes an element.
    """
    m.lerp_(g, 1 - beta1)
    v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    root = (v * v_correction).sqrt()
    g.copy_(m * m_correction / (root + eps) + decay * p)
    return torch.stack([(p * p).sum(1), (g * g).sum(1)])


@functools.cache
def _has_compiler(device: str) -> bool:
    """Whether torch.compile finds what it needs: C++ for a CPU, Triton and C for a GPU."""
    if device == "cpu":
        return shutil.which(os.environ.get("CXX", "g++")) is not None
    compilers = (os.environ.get("CC", "gcc"), "clang")
    if find_spec("triton") is None or not any(map(shutil.which, compilers)):
        return False
    try:  # Triton wants Python's headers, too, and a folder to run what it makes
        torch.compile(torch.neg, dynamic=False)(torch.ones(8, device=device))
    except Exception:
        return False
    return True


class SliceIndex:
    """Which of T tensors each of the N elements of a rank's flat vector belongs to.

    Whole rows of C elements inside one tensor are summed and scaled as rows; the other elements
    (at most about two rows a tensor) go through an index of their own. Everything here is fixed
    at the start, so a step has no loop over tensors.
    """

    def __init__(
        self, flat: Tensor, names: Sequence[str], pieces: Sequence[Piece], row: int
    ) -> None:
        device, n, by_name = flat.device, flat.numel(), {piece.name: piece for piece in pieces}
        self.row = row
        self.rows = n // row
        self.last: Tensor | None = None
        owner = torch.full((self.rows,), len(names), dtype=torch.int64)  # T: no single tensor
        whole: list[int] = []
        loose: list[Tensor] = []
        end = 0
        for t, name in enumerate(names):
            piece = by_name.get(name, Piece(name, 0, 0, end))
            assert piece.here >= end, "the pieces of a slice must lie in the order of its tensors"
            start, end = piece.here, piece.here + piece.numel
            first, last = math.ceil(start / row), end // row
            outside = [(start, end)]
            if last > first:
                owner[first:last] = t
                outside = [(start, first * row), (last * row, end)]
            whole.append(max(last - first, 0))
            loose.append(torch.cat([torch.arange(*ends) for ends in outside]))
        assert end <= n
        sizes = [len(x) for x in loose]
        self.owner = owner.to(device)
        self.whole = torch.nonzero(owner < len(names)).flatten().to(device)
        self.whole_lengths = torch.tensor(whole, device=device)
        self.loose = torch.cat(loose).to(device)
        self.loose_owner = torch.repeat_interleave(
            torch.arange(len(names)), torch.tensor(sizes)
        ).to(device)
        self.loose_lengths = torch.tensor(sizes, device=device)
        self.row_squares = torch.empty(2, self.rows, dtype=torch.float32, device=device)

    def sum_rows(self, p: Tensor, u: Tensor, start: int, end: int) -> None:
        """Sums of squares of the rows in [start, end); `start` is a multiple of C."""
        first, last = start // self.row, end // self.row
        for x, squares in zip((p, u), self.row_squares, strict=True):
            rows = x[first * self.row : last * self.row].view(last - first, self.row)
            torch.square(torch.linalg.vector_norm(rows, dim=1), out=squares[first:last])

    def sums(self, p: Tensor, u: Tensor) -> Tensor:
        """Sums of squares [2, T] (weight, update) of this rank's pieces, in float64."""
        rows = self.row_squares.index_select(1, self.whole).double()
        loose = torch.stack([p[self.loose], u[self.loose]]).double().square_()
        return segment_sum(rows, self.whole_lengths) + segment_sum(loose, self.loose_lengths)

    def apply(self, p: Tensor, u: Tensor, ratio: Tensor, lr: float) -> None:
        """p -= lr * ratio * u with each tensor's own ratio [T]."""
        ratio = ratio.to(p.dtype)
        by_row = torch.cat([ratio, ratio.new_zeros(1)])[self.owner][:, None]
        length = self.rows * self.row
        p[:length].view(self.rows, self.row).addcmul_(
            u[:length].view(self.rows, self.row), by_row, value=-lr
        )
        at = self.loose
        p[at] = p[at].addcmul_(u[at], ratio[self.loose_owner], value=-lr)


def segment_sum(data: Tensor, lengths: Tensor) -> Tensor:
    """Sum [2, n] over consecutive runs of `lengths` [T] -> [2, T], always in the same order.

    One row at a time: of [n, 2] a GPU sums each run by one thread.
    """
    if data.shape[1] == 0:
        return data.new_zeros(data.shape[0], len(lengths))
    sums = [torch.segment_reduce(row, "sum", lengths=lengths, unsafe=True) for row in data]
    return torch.stack(sums)
