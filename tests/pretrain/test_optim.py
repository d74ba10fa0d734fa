from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._inductor import config as inductor
from torch._inductor import metrics
from torch.utils._python_dispatch import TorchDispatchMode

from configs.load import check
from core.errors import UserError
from pretrain.model import BertForPreTraining
from pretrain.optim import (
    Lamb,
    OptimizerConfig,
    Piece,
    SliceIndex,
    build_optimizer,
    layer_and_kind,
    parameter_groups,
    restart_bias_correction,
    segment_sum,
)
from tests import gloo
from tests.pretrain import engine_cases
from tests.pretrain.engine_cases import relative_error
from tests.pretrain.given_gradients import Given, full_gradient
from tests.pretrain.lamb_reference import ReferenceLamb
from tests.pretrain.packing import TINY

BOUND = 1e-6
OFFLOAD = (("offload_optimizer", (("device", "cpu"),)),)
OVERLAP = (("overlap_comm", True),)
# (stage, precision, micro-steps, more keys of zero_optimization)
GRID = [(0, "fp32", 1, ())]
GRID += [(stage, precision, 1, ()) for stage in (1, 2) for precision in ("fp32", "bf16")]


def more(micro_steps: int) -> list[tuple]:
    return [
        (0, "fp32", micro_steps, ()),
        (1, "fp32", micro_steps, ()),
        (1, "bf16", micro_steps, ()),
        (2, "bf16", micro_steps, ()),
        (1, "fp32", 1, OFFLOAD),
        (2, "bf16", micro_steps, OFFLOAD),
        (1, "bf16", 1, OFFLOAD),
        (1, "fp32", 1, OVERLAP),
        (1, "bf16", micro_steps, OVERLAP),
        (2, "fp32", micro_steps, OVERLAP),
    ]


MORE = more(3)


@pytest.fixture(scope="module")
def alone() -> dict[tuple, Any]:
    return gloo.run(1, engine_cases.parity, GRID, timeout=300)[0]


@pytest.fixture(scope="module")
def pair() -> list[dict[str, Any]]:
    return gloo.run(2, engine_cases.optimizer_suite, GRID + MORE, timeout=300)


def _check_case(result: dict[str, Any]) -> None:
    assert result["error"] < BOUND, result
    assert result["clipped"] == 50
    assert result["trust_error"] < BOUND


@pytest.mark.parametrize("case", GRID, ids=str)
def test_parity_world_1(alone: dict[tuple, Any], case: tuple) -> None:
    _check_case(alone[case])


@pytest.mark.parametrize("case", GRID + MORE, ids=str)
def test_parity_world_2(pair: list[dict[str, Any]], case: tuple) -> None:
    ranks = [rank["parity"][case] for rank in pair]
    _check_case(ranks[0])
    assert ranks[0] | {"pieces": []} == ranks[1] | {"pieces": []}  # equal on every rank
    if case[0] > 0:
        pieces = np.array([rank["pieces"] for rank in ranks])
        assert (pieces.sum(0) == 2).any() and (pieces.sum(0) == 1).any()


@pytest.mark.slow
@pytest.mark.parametrize("world", [3, 4])
def test_parity_larger_worlds(world: int) -> None:
    cases = GRID + more({3: 2, 4: 3}[world])  # a step's 12 parts divide evenly
    ranks = gloo.run(world, engine_cases.parity, cases, timeout=600)
    for case in cases:
        _check_case(ranks[0][case])
    pieces = np.array([rank[GRID[2]]["pieces"] for rank in ranks])
    assert (pieces == 0).any(), "no rank lacks a tensor: the case is too easy"


def test_naive_lamb_is_wrong_on_slices_and_right_on_tensors(pair: list[dict[str, Any]]) -> None:
    errors = pair[0]["naive"]
    assert errors[0] < BOUND, "the naive LAMB itself is right"
    assert errors[1] > 1e-3


def test_one_small_all_reduce_a_step_on_every_rank(pair: list[dict[str, Any]]) -> None:
    ranks = [rank["collectives"] for rank in pair]
    assert ranks[0] == ranks[1]
    # Two groups of four tensors: one [2, 4] vector each, three steps.
    assert ranks[0] == [[8]] * 6


# ------------------------------------------------------------------------------- one process


def _train(optimizer: torch.optim.Optimizer, model: Given, steps: range, lr: float = 6e-3) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr
    for k in steps:
        gradient = full_gradient(k)
        for name, p in model.named_parameters():
            p.grad = torch.tensor(gradient[name], dtype=torch.float32)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def _weights(model: nn.Module) -> dict[str, np.ndarray]:
    return {name: p.detach().numpy().copy() for name, p in model.named_parameters()}


@pytest.mark.parametrize("low, high", [(None, None), (0.5, 0.9), (None, 0.2), (1.5, None)])
def test_plain_tensors_and_clamp(low: float | None, high: float | None) -> None:
    model = Given()
    with torch.no_grad():
        model.square.weight.zero_()  # a zero norm has ratio 1
    reference = ReferenceLamb(_weights(model), ratio_min=low or 0, ratio_max=high or np.inf)
    config = OptimizerConfig(trust_ratio_min=low, trust_ratio_max=high)
    optimizer = build_optimizer(model, config)
    for k in range(50):
        rate = 6e-3 * (1 - k / 60)
        _train(optimizer, model, range(k, k + 1), rate)
        reference.step(full_gradient(k), rate)
    assert relative_error(_weights(model), reference.w) < BOUND
    ratios = {name: t.ratio for name, t in optimizer.trust_ratios().items()}
    assert ratios == pytest.approx(reference.ratios, rel=BOUND)


def test_restart_of_bias_correction_keeps_the_moments() -> None:
    model = Given()
    reference = ReferenceLamb(_weights(model))
    optimizer = build_optimizer(model, OptimizerConfig())
    for k in range(10):
        if k == 5:
            restart_bias_correction(optimizer)
            reference.t = 0
        _train(optimizer, model, range(k, k + 1))
        reference.step(full_gradient(k), 6e-3)
    assert relative_error(_weights(model), reference.w) < BOUND


def test_adamw_is_torch_adamw() -> None:
    ours, theirs = Given(), Given()
    config = OptimizerConfig(name="adamw")
    _train(build_optimizer(ours, config), ours, range(5))
    decayed = [p for p in theirs.parameters() if p.ndim > 1]
    others = [p for p in theirs.parameters() if p.ndim < 2]
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    _train(torch.optim.AdamW(groups, eps=1e-6, foreach=False), theirs, range(5))
    assert relative_error(_weights(ours), _weights(theirs)) < BOUND


def test_groups_hold_every_trainable_parameter_once() -> None:
    model = BertForPreTraining(TINY, generator=torch.Generator().manual_seed(0))
    model.tied = model.bert.embeddings.word_embeddings
    model.bert.pooler.dense.weight.requires_grad_(False)
    decay, no_decay = parameter_groups(model, OptimizerConfig(weight_decay=0.1))
    names = [name for group in (decay, no_decay) for name, _ in group["params"]]
    ids = [id(p) for group in (decay, no_decay) for _, p in group["params"]]
    assert len(set(ids)) == len(ids)
    assert set(ids) == {id(p) for p in model.parameters() if p.requires_grad}
    assert "bert.pooler.dense.weight" not in names
    assert decay["weight_decay"] == 0.1 and no_decay["weight_decay"] == 0.0
    without = {name for name, _ in no_decay["params"]}
    assert without == {n for n in names if n.endswith("bias") or "LayerNorm" in n}


def test_layers_and_kinds_name_every_parameter_of_bert_once() -> None:
    model = BertForPreTraining(TINY, generator=torch.Generator().manual_seed(0))
    names = [layer_and_kind(name) for name, _ in model.named_parameters()]
    assert len(set(names)) == len(names)
    assert {layer for layer, _ in names} == {
        "layer_00", "layer_01", "embeddings", "pooler", "heads"
    }  # fmt: skip
    kinds = [{kind for layer, kind in names if layer == f"layer_{i:02d}"} for i in (0, 1)]
    assert kinds[0] == kinds[1] and "attention.self.query.weight" in kinds[0]


def test_replaced_parameters_are_not_taken_for_tensors() -> None:
    model = Given()
    optimizer = build_optimizer(model, OptimizerConfig())
    for group in optimizer.param_groups:
        flat = torch.cat([p.detach().flatten() for p in group["params"]]).requires_grad_()
        flat.grad = torch.ones_like(flat)
        group["params"] = [flat]
    with pytest.raises(AssertionError, match="attach"):
        optimizer.step()


@pytest.mark.parametrize("row", [1, 4, 7, 1000])
def test_slice_sums_and_scales_by_tensor(row: int) -> None:
    rng = np.random.default_rng(row)
    for _ in range(20):
        sizes = rng.integers(0, 40, 9)
        gaps = rng.integers(0, 2, 9) * (sizes > 0)
        starts = np.cumsum(sizes + gaps) - sizes
        total = int(starts[-1] + sizes[-1] + rng.integers(0, 9))
        names = list("abcdefghi")
        pieces = [
            Piece(name, 0, int(n), int(a))
            for name, a, n in zip(names, starts, sizes, strict=True)
            if n > 0
        ]
        p, u = torch.randn(2, total, dtype=torch.float32)
        slice_ = SliceIndex(p, names, pieces, row)
        for start in range(0, total, 3 * row):
            slice_.sum_rows(p, u, start, min(start + 3 * row, total))
        sums = slice_.sums(p, u)
        ratio = torch.rand(9, dtype=torch.float64)
        expected = p.clone()
        for t, (start, numel) in enumerate(zip(starts, sizes, strict=True)):
            here = slice(start, start + numel)
            squares = torch.stack([p[here], u[here]]).double().square().sum(1)
            torch.testing.assert_close(sums[:, t], squares, rtol=1e-6, atol=0)
            expected[here] -= 0.1 * ratio[t].float() * u[here]
        slice_.apply(p, u, ratio, 0.1)
        torch.testing.assert_close(p, expected, rtol=1e-6, atol=1e-7)


class _Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append(str(func))
        return func(*args, **(kwargs or {}))


def _flattened(optimizer: Lamb) -> torch.Tensor:
    """The one group's tensors become one slice, as ZeRO makes it on one rank."""
    parameters, pieces, start = optimizer.param_groups[0]["params"], [], 0
    for number, p in enumerate(parameters):
        pieces.append(Piece(f"0.{number}", 0, p.numel(), start))
        start += p.numel()
    flat = torch.cat([p.detach().flatten() for p in parameters])
    optimizer.param_groups[0]["params"] = [flat]
    optimizer.attach([pieces])
    return flat


class Short(Lamb):
    """Rows so short that tiny tensors span several of them, and worth compiling."""

    ROW, BLOCK, COMPILE_FROM = 16, {"cpu": 256}, {"cpu": 1}


class Eager(Short):
    """What would be compiled, uncompiled."""

    compiler = staticmethod(lambda function, **_: function)


def _operations(tensors: int, kind: type[Lamb]) -> list[str]:
    """Operations of one step on a slice that holds `tensors` tensors of 40 elements."""
    optimizer = kind([nn.Parameter(torch.randn(4, 10)) for _ in range(tensors)])
    flat = _flattened(optimizer)
    for _ in range(2):
        flat.grad = torch.randn_like(flat)
        with _Count() as count:
            optimizer.step()
    return count.calls


@pytest.mark.parametrize("kind", [Lamb, Eager])
def test_a_step_has_no_loop_over_tensors_and_no_host_sync(kind: type[Lamb]) -> None:
    few, many = _operations(3, kind), _operations(61, kind)  # each ends within a row
    assert few == many
    assert not [name for name in many if "local_scalar" in name or "nonzero" in name]


@pytest.mark.filterwarnings("ignore")  # inductor's own
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler for inductor")
@pytest.mark.parametrize("kind", [Eager, pytest.param(Short, marks=pytest.mark.slow)])
def test_the_compiled_pass_is_lamb_and_moves_28_bytes_an_element(kind: type[Lamb]) -> None:
    weights = {n: w for n, w in _weights(Given()).items() if w.ndim > 1}
    n = sum(w.size for w in weights.values()) // 16 * 16
    reference = ReferenceLamb(weights, clip=0)
    results = []
    for compile in (True, False):
        tensors = [nn.Parameter(torch.tensor(w)) for w in weights.values()]
        optimizer = kind(tensors, compile=compile)
        flat = _flattened(optimizer)
        for k in range(50):
            gradient, rate = full_gradient(k), 6e-3 * (1 - k / 60)
            optimizer.param_groups[0]["lr"] = rate
            flat.grad = torch.cat([torch.tensor(gradient[n]).float().flatten() for n in weights])
            if kind is Short and compile and k == 0:
                assert _bytes_of(optimizer.step) == 28 * n + 12 * n // 16 + 16
            else:
                optimizer.step()
            if compile:
                reference.step(gradient, rate)
        pieces = zip(flat.split([w.size for w in weights.values()]), weights.items(), strict=True)
        results.append({name: x.view(w.shape).numpy() for x, (name, w) in pieces})
        ratios = [t.ratio for t in optimizer.trust_ratios().values()]
        assert ratios == pytest.approx(list(reference.ratios.values()), rel=BOUND)
        assert relative_error(results[-1], reference.w) < BOUND
    assert relative_error(*results) < BOUND


def _bytes_of(call: Callable[[], None]) -> int:
    """Bytes that what is compiled meanwhile reads and writes: the compiler counts them for its
    log alone, and not of what it has compiled before."""
    torch._dynamo.reset()
    torch._logging.set_logs(inductor_metrics=True)
    metrics.reset()
    with inductor.patch(fx_graph_cache=False):
        call()
    torch._logging.set_logs()
    return metrics.num_bytes_accessed


def test_runs_are_summed_row_by_row_as_both_rows_at_once() -> None:
    """A GPU sums a run of the [n, 2] form by one thread; bit for bit the same numbers."""
    lengths = torch.tensor([0, 3, 2000, 0, 7, 30])
    data = torch.randn(2, 2040, dtype=torch.float64)
    both = torch.segment_reduce(data.T.contiguous(), "sum", lengths=lengths, unsafe=True).T
    assert torch.equal(segment_sum(data, lengths), both)
    assert segment_sum(data[:, :0], 0 * lengths).tolist() == [[0.0] * 6] * 2


def test_norms_do_not_drift_with_size() -> None:
    # One fp32 accumulator over 30 M equal squares is off by 1e-3 on a CPU.
    n = 30_000_000
    p = torch.full((n,), 1.1)
    slice_ = SliceIndex(p, ["w"], [Piece("w", 0, n, 0)], Lamb.ROW)
    slice_.sum_rows(p, p, 0, n)
    norm = slice_.sums(p, p)[0, 0].sqrt().item()
    exact = float(p[0]) * n**0.5
    assert norm == pytest.approx(exact, rel=5e-7)
    assert float(p.norm()) != pytest.approx(exact, rel=1e-4)


@pytest.mark.parametrize(
    "tree, message",
    [
        ({"trust_ratio_min": 2, "trust_ratio_max": 1}, "above"),
        ({"name": "adamw", "trust_ratio_max": 1}, "LAMB's"),
        ({"name": "sgd"}, "lamb"),
        ({"beta1": 1.0}, "beta1"),
    ],
)
def test_config_refuses(tree: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check(tree, OptimizerConfig, "x.yaml")
