"""Kernels of a step, each beside its floor, the larger of bytes / bandwidth and FLOPs / fastest
product: a stage of `benchmarks/gpu.py` (`--only kernels`)."""

from __future__ import annotations

import functools
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.step_vs_hf import lengths_of, matmul_rate
from data_pipeline.stream.batch import Batch
from data_pipeline.stream.plan import Shape
from pretrain import attention, numerics
from pretrain.config import PretrainConfig
from pretrain.dropout import dropout
from pretrain.linear import linear
from pretrain.loss import pretraining_loss
from pretrain.stopwatch import Stopwatch

Row = dict[str, Any]
Rows = Iterator[Row]


def timed(run: Callable[[], Any], device: torch.device, rounds: int = 12) -> float:
    """Seconds of a call, median; a GPU's second-level cache is emptied before each."""
    watch, on_gpu, seconds = Stopwatch(device), device.type == "cuda", []
    cache = torch.empty(1 << 28 if on_gpu else 0, dtype=torch.uint8, device=device)
    for _ in range(2 + (rounds if on_gpu else 1)):
        cache.zero_()
        if on_gpu:
            torch.cuda._sleep(2_000_000)  # cycles, in which the host runs ahead
        watch.switch("forward")
        run()
        watch.switch("")
        seconds.append(watch.lap()()["forward"])
    return statistics.median(seconds[2:])


def ceilings(device: torch.device) -> tuple[float, float]:
    """(bytes/s of a copy on the device, read and written; FLOP/s of the fastest bf16 product)."""
    on_gpu = device.type == "cuda"
    source = torch.empty(1 << (31 if on_gpu else 26), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copied = 2 * source.nbytes / timed(lambda: target.copy_(source), device)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    rows = 8192 if on_gpu else 256
    return copied, matmul_rate(device.type, dtype, torch.get_num_threads(), rows)


def measured(
    config: PretrainConfig, vocab_size: int, batches: list[list[Batch]], device: torch.device
) -> Rows:
    """Of the model of `config`; `batches`: the micro-batches of a step of each phase."""
    on_gpu = device.type == "cuda"
    model = config.model.with_vocab_size(vocab_size)
    D, inner, V = model.hidden_size, model.intermediate_size, model.padded_vocab_size
    N, K = model.num_attention_heads, model.head_size
    dtype = torch.bfloat16 if on_gpu else torch.float32
    ceiling = ceilings(device)
    beside = functools.partial(kernel, ceiling)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device).to(dtype).requires_grad_()

    def sublayer(y: torch.Tensor, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor):
        return F.layer_norm(dropout(y, 0.1, True) + x, (D,), w, b)

    # Elements that have to be read or written, forward and backward; products of forward.
    for phase, (first, *_) in zip(config.phases, batches, strict=True):
        batch = first.to(device)
        T = batch.input_ids.numel()
        squares = float(lengths_of(batch).double().square().sum())
        most = Shape.of(phase, config.data, config.objective).sequences + 4
        capacity = len(batch.input_ids) * most + 1 - len(batch.cu_seqlens)
        runs = batch.cu_seqlens
        wide = torch.cat([runs, runs.new_full((max(0, capacity),), T)])
        for name, bounds, p, deterministic in (
            ("", runs, 0.1, False),
            (", empty runs", wide, 0.1, False),
            (", no dropout", runs, 0.0, False),
            (", deterministic", runs, 0.1, True),
        ):
            rows = attention.layout(
                model.attention, batch.sequence_ids, bounds, phase.max_seq_len, dtype, K
            )
            numerics.set_switches(deterministic=deterministic)
            yield from beside(
                f"attention {phase.max_seq_len}{name}",
                functools.partial(attention.attend, layout=rows, dropout_p=p),
                [drawn(T, 3, N, K)], (4 * T * D, 8 * T * D), 4 * squares * D,
            )  # fmt: skip
        numerics.set_switches(deterministic=False)
    for I, O in ((D, 3 * D), (D, D), (D, inner), (inner, D)):  # noqa: E741
        n, given = T * I + T * O + I * O, [drawn(T, I), drawn(O, I), drawn(O)]
        yield from beside(f"product {I} x {O}", linear, given, (n, 2 * n), 2.0 * T * I * O)
    # A CPU's compiled code is seen in the stage `step`.
    backend = "inductor" if on_gpu else "aot_eager"
    for name, wrap in (
        ("eager", lambda f: f),
        ("compiled", functools.partial(torch.compile, backend=backend)),
    ):
        # Inductor's backward gives away the memory of what it was given: `again`.
        n, given = T * inner, [drawn(T, inner)]
        yield from beside(f"GELU {name}", wrap(F.gelu), given, (2 * n, 3 * n), again=True)
        n, given = T * D, [drawn(T, D), drawn(T, D), drawn(D), drawn(D)]
        name = f"dropout, add, LayerNorm {name}"
        yield from beside(name, wrap(sublayer), given, (3 * n, 4 * n), again=True)
    ids, labels = batch.input_ids.flatten(), batch.masked_lm_labels
    nsp = drawn(len(batch.cls_positions), 2).detach(), batch.next_sentence_labels
    n = len(labels) * V
    for name, compiled in (("in chunks", False), ("compiled", True))[: 1 + on_gpu]:
        yield from beside(
            f"cross entropy {name}",
            lambda x, way=compiled: pretraining_loss(x, labels, *nsp, 1, 1, compiled=way).loss,
            [drawn(len(labels), V)], (n, 2 * n), again=True,
        )  # fmt: skip
    moved = (2 * T * D, (T + V) * D)
    yield from beside("word embedding", lambda w: F.embedding(ids, w), [drawn(V, D)], moved)
    n = 1 << (26 if on_gpu else 20)
    sums, part = torch.zeros(n, device=device), torch.zeros(n, device=device, dtype=torch.bfloat16)
    seconds = timed(lambda: sums.add_(part), device)
    yield beside_floor("gradient sum, bf16 into fp32", seconds, 10 * n / ceiling[0])
    for kind, pinned in (("pageable", False), ("pinned", True))[: 1 + on_gpu]:
        host = torch.empty(n, pin_memory=pinned)
        seconds = timed(lambda host=host: host.copy_(sums), device)
        yield {"kernel": f"copy to {kind} memory", "ms": 1e3 * seconds, "GB/s": 4e-9 * n / seconds}


def kernel(
    ceiling: tuple[float, float],
    name: str,
    call: Callable[..., torch.Tensor],
    given: list[torch.Tensor],
    elements: tuple[float, float],
    flops: float = 0.0,
    again: bool = False,
) -> Rows:
    """Forward, and the gradients of all that is given, of twice the FLOPs, beside their floors.

    again: backward can run once, so it is timed with a forward before it, and beside both floors.
    """
    device, width = given[0].device, given[0].element_size()
    floor, floor_back = (
        max(n * width / ceiling[0], times * flops / ceiling[1])
        for n, times in zip(elements, (1, 2), strict=True)
    )
    try:
        yield beside_floor(f"{name}, forward", timed(lambda: call(*given), device), floor)
        out = call(*given)
        at = torch.ones_like(out)
        if again:
            seconds = timed(lambda: torch.autograd.grad(call(*given), given, at), device)
            yield beside_floor(f"{name}, both", seconds, floor + floor_back)
            return
        back = functools.partial(torch.autograd.grad, out, given, at, retain_graph=True)
        yield beside_floor(f"{name}, backward", timed(back, device), floor_back)
    except RuntimeError as error:  # a kernel that is not there, or memory
        yield {"kernel": name, "note": message(error)}


def beside_floor(name: str, seconds: float, floor: float) -> Row:
    return {"kernel": name, "ms": 1e3 * seconds, "floor ms": 1e3 * floor, "ratio": seconds / floor}


def message(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


if __name__ == "__main__":
    sys.exit("a stage of another script: python benchmarks/gpu.py --only kernels")
