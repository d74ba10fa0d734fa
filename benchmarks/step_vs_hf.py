"""A pretraining step: ours beside Hugging Face's BertForPreTraining, on the same real sequences.

    python benchmarks/step_vs_hf.py [--data DIR] [--cases base_512 ...] [--precision bf16 fp32]

Both sides do one optimiser step (forward, backward, accumulation over micro-batches, clipping, LAMB
on fp32 master weights) on the same sequences of the same shards, dropout 0.1, the same number of
threads. Ours is `Engine.train_step`, which training calls: DeepSpeed's ZeRO-1 with fp32 sums of
gradients, on packed rows. Theirs is the library's model in a plain loop: padded to the longest
allowed length, sdpa, their own loss, sums of gradients in the model's precision. The best of
`--rounds` steps counts.

Each side has a process of its own. On a CPU they take turns, so that a busy neighbour meets both;
on a GPU each has the whole memory: one has ended before the next starts (`--turns`, `--no-turns`).
Peak memory is that of each process. The cases large_* are there for a GPU of 80 GB.

MFU counts real tokens and predicted positions only, against the data sheet's peak as the trainer's
`throughput/mfu` does; there is none of a CPU. `of matmul` is the same against the fastest plain
product of the same run.

On a CPU without bf16 units PyTorch's bf16 product is a scalar loop, tens of times slower than its
fp32 product, and our `pretrain/linear.py` computes such products in fp32. Against that a stock
Hugging Face step looks absurdly slow, so in bf16 there are two peers:
    stock   as the library comes
    lent    with our products (and fp32 attention) lent to it: what the step alone is worth
`ratio` is against lent, the sober figure; stock, minutes a step, is measured on demand (`--stock`,
best with `--step-rows 1`) and stands in `detail.CASE.bf16.stock_ratio`. Where the CPU or GPU has
bf16 units there is one peer, `hf`. `work_ratio` is arithmetic: matmul FLOPs of their step over the
model FLOPs of the real tokens.

`--hf-compile` and `--compile` add torch.compile to their side and ours. The last line is one JSON
object.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # a busy neighbour must not double our time

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from core.errors import main_guard
from data_pipeline.stream.batch import IGNORE_INDEX, Batch
from data_pipeline.stream.dataset import Dataset
from data_pipeline.stream.plan import PhaseSpec, StreamConfig
from data_pipeline.stream.stream import Stream
from pretrain import distributed, numerics
from pretrain.engine import Engine
from pretrain.engine_config import EngineConfig
from pretrain.flops import device_peak_tflops, training_flops
from pretrain.linear import cpu_has_bf16_products, linear
from pretrain.model import BertForPreTraining, ModelConfig
from pretrain.numerics import DTYPES
from pretrain.optim import OptimizerConfig, build_optimizer

SHAPES = {
    "tiny": (64, 2, 2, 128),
    "mini": (256, 4, 4, 1024),
    "base": (768, 12, 12, 3072),
    "large": (1024, 24, 16, 4096),
}
# Case: packed rows a step, rows a micro-batch (ours), sequences a micro-batch (theirs).
CASES = {
    "tiny_128": (8, 4, 8),
    "mini_128": (64, 8, 32),
    "mini_512": (4, 4, 20),
    "base_128": (32, 4, 32),
    "base_512": (4, 1, 8),
    "large_128": (192, 96, 128),
    "large_512": (48, 24, 32),
}
PRECISIONS = ("bf16", "fp32")
# One step of a side: (loss, seconds of clipping and update, which end it).
Step = Callable[[], tuple[float, float]]


def shape_of(case: str, vocab_size: int) -> dict[str, int]:
    """By the keys that both libraries have."""
    hidden, layers, heads, inner = SHAPES[case.split("_")[0]]
    return {
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": inner,
    }


def config_of(case: str, vocab_size: int, **more: Any) -> ModelConfig:
    return ModelConfig(**shape_of(case, vocab_size), **more)


def first_step(
    dataset: Dataset, phase: PhaseSpec, index: int = 0, *, rows: int, pin_memory: bool = False
) -> list[Batch]:
    """The micro-batches of the first step of a phase, of at most so many rows each."""
    stream = Stream(
        dataset,
        phase,
        phase_index=index,
        seed=1,
        rank=0,
        world=1,
        micro_batch_rows=rows,
        pin_memory=pin_memory,
    )
    batches = [next(stream) for _ in range(stream.micro_steps)]
    stream.close()
    return batches


def batches_of(data: str, case: str, step_rows: int) -> tuple[list[Batch], int]:
    """The first step's packed micro-batches of the phase, and the vocabulary's size."""
    length = int(case.split("_")[1])
    rows = min(CASES[case][1], step_rows)
    drawn = -(-max(step_rows, 256) // rows) * rows
    phase = PhaseSpec(
        max_seq_len=length, max_predictions={128: 20, 512: 80}[length], rows_per_step=drawn
    )
    dataset = Dataset(StreamConfig(dir=data, workers=0))
    result = first_step(dataset, phase, rows=rows)
    # A few rows can be all long or all short sequences: take those whose count of sequences and
    # squares of lengths (what padding and attention cost) come closest to the mean.
    wanted = sum(_costs(b) for b in result) / len(result)
    taken: list[Batch] = []
    so_far = torch.zeros(2, dtype=torch.float64)
    for count in range(1, step_rows // rows + 1):
        best = min(result, key=lambda b: float(((so_far + _costs(b)) / count / wanted - 1).norm()))
        so_far = so_far + _costs(best)
        taken.append(best)
        result = [b for b in result if b is not best]
    return taken, dataset.manifest.vocab_size


def _costs(batch: Batch) -> torch.Tensor:
    lengths = lengths_of(batch).double()
    return torch.stack([torch.tensor(len(lengths), dtype=torch.float64), lengths.square().sum()])


def counts_of(batches: list[Batch], config: ModelConfig) -> dict[str, float]:
    lengths = torch.cat([lengths_of(b) for b in batches]).double()
    tokens = sum(b.tokens for b in batches)
    predictions = sum(b.predictions for b in batches)
    return {
        "tokens": tokens,
        "sequences": len(lengths),
        "predictions": predictions,
        "vocab_size": config.vocab_size,
        "flops": training_flops(
            config, tokens, predictions, len(lengths), float((lengths**2).sum())
        ),
    }


def lengths_of(batch: Batch) -> torch.Tensor:
    """Lengths of the real sequences, in order of their [CLS]."""
    real = batch.next_sentence_labels != IGNORE_INDEX
    starts = batch.cls_positions[real].to(torch.int32)
    bounds = batch.cu_seqlens.unique()
    return bounds[torch.searchsorted(bounds, starts, right=True)] - starts


def padded(batches: list[Batch], max_len: int, size: int) -> list[dict[str, torch.Tensor]]:
    """The same sequences one a row, padded to `max_len`, in micro-batches of `size` or a little
    less, all of one shape: the last ones are filled up with rows that predict nothing."""
    rows = []
    for batch in batches:
        ids, types = batch.input_ids.flatten(), batch.token_type_ids.flatten()
        labels = torch.full_like(ids, IGNORE_INDEX)
        real = batch.masked_lm_labels != IGNORE_INDEX
        labels[batch.masked_lm_positions[real]] = batch.masked_lm_labels[real]
        kept = batch.next_sentence_labels != IGNORE_INDEX
        starts, nexts = batch.cls_positions[kept], batch.next_sentence_labels[kept]
        for start, length, nsp in zip(starts, lengths_of(batch), nexts, strict=True):
            here, pad = slice(start, start + int(length)), (0, max_len - int(length))
            rows.append(
                {
                    "input_ids": F.pad(ids[here], pad),
                    "token_type_ids": F.pad(types[here], pad),
                    "attention_mask": F.pad(torch.ones(int(length), dtype=torch.int64), pad),
                    "labels": F.pad(labels[here], pad, value=IGNORE_INDEX),
                    "next_sentence_label": nsp,
                }
            )
    size = -(-len(rows) // -(-len(rows) // size))
    nothing = {
        "labels": torch.full_like(rows[0]["labels"], IGNORE_INDEX),
        "next_sentence_label": torch.full_like(rows[0]["next_sentence_label"], IGNORE_INDEX),
    }
    rows += [rows[0] | nothing] * (-len(rows) % size)
    parts = [rows[i : i + size] for i in range(0, len(rows), size)]
    return [{key: torch.stack([r[key] for r in part]) for key in part[0]} for part in parts]


# ------------------------------------------------------------------------------------- the sides


def ours(spec: dict[str, Any]) -> tuple[Step, dict[str, float]]:
    case, device = spec["case"], torch.device(spec["device"])
    batches, vocab_size = batches_of(spec["data"], case, spec["rows"])
    counts = counts_of(batches, config_of(case, vocab_size))
    whole = {
        "step_predictions": sum(b.predictions for b in batches),
        "step_sequences": sum(b.sequences for b in batches),
    }
    batches = [replace(b, **whole) for b in batches]
    if device.type == "cuda":
        batches = [b.pin_memory() for b in batches]
    numerics.set_switches(deterministic=spec["deterministic"])
    distributed.start(device.type)
    torch.manual_seed(0)
    model = our_model(case, vocab_size, compile=spec["compile"])
    engine = Engine(
        model.to(device),
        OptimizerConfig(name="lamb"),
        EngineConfig(zero_stage=1, precision=spec["precision"]),
        micro_steps=len(batches),
        micro_batch_rows=len(batches[0].input_ids),
    )

    def step() -> tuple[float, float]:
        outcome = engine.train_step(iter(batches), 1e-4)
        return outcome.loss, outcome.seconds["update"]

    return step, counts


def theirs(spec: dict[str, Any]) -> tuple[Step, dict[str, float]]:
    case, device = spec["case"], torch.device(spec["device"])
    batches, vocab_size = batches_of(spec["data"], case, spec["rows"])
    counts = counts_of(batches, config_of(case, vocab_size))
    if spec["lend"]:
        lend_products()
    torch.manual_seed(0)
    model = their_model(case, vocab_size)
    model = model.to(device, DTYPES[spec["precision"]]).train()
    if spec["compile"]:
        model.compile(dynamic=False)
    parts = padded(batches, int(case.split("_")[1]), CASES[case][2])
    if device.type == "cuda":
        parts = [{key: t.pin_memory() for key, t in part.items()} for part in parts]
    narrow = spec["precision"] != "fp32"
    masters = copy.deepcopy(model).float() if narrow else model
    optimizer = build_optimizer(masters, OptimizerConfig(name="lamb"))
    for group in optimizer.param_groups:
        group["lr"] = 1e-4

    def step() -> tuple[float, float]:
        total = torch.zeros((), device=device)
        for part in parts:
            moved = {key: t.to(device, non_blocking=True) for key, t in part.items()}
            loss = model(**moved).loss / len(parts)
            loss.backward()
            total += loss.detach().float()
        wait_for(device)
        computed = time.perf_counter()
        if narrow:
            for p, master in zip(model.parameters(), masters.parameters(), strict=True):
                master.grad, p.grad = p.grad.float(), None
        torch.nn.utils.clip_grad_norm_(masters.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if narrow:
            with torch.no_grad():
                for p, master in zip(model.parameters(), masters.parameters(), strict=True):
                    p.copy_(master)
        wait_for(device)
        return float(total), time.perf_counter() - computed

    return step, counts


def our_model(case: str, vocab_size: int, **more: Any) -> BertForPreTraining:
    generator = torch.Generator().manual_seed(0)
    return BertForPreTraining(config_of(case, vocab_size, **more), generator=generator)


def their_model(case: str, vocab_size: int) -> torch.nn.Module:
    import transformers

    config = transformers.BertConfig(**shape_of(case, vocab_size), attn_implementation="sdpa")
    return transformers.BertForPreTraining(config)


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def lend_products() -> None:
    """Give Hugging Face our way around the CPU's missing bf16 units."""
    sdpa = F.scaled_dot_product_attention

    def lent_linear(module, x):
        return linear(x.flatten(0, -2), module.weight, module.bias).view(*x.shape[:-1], -1)

    def wide_sdpa(q, k, v, attn_mask=None, **more):
        if attn_mask is not None and attn_mask.is_floating_point():
            attn_mask = attn_mask.float()
        return sdpa(q.float(), k.float(), v.float(), attn_mask=attn_mask, **more).to(q.dtype)

    F.scaled_dot_product_attention = wide_sdpa
    torch.nn.Linear.forward = lent_linear


def worker(spec: dict[str, Any]) -> None:
    """Build one side, then do a step for each line on stdin and answer with its figures."""
    torch.set_num_threads(spec["threads"])
    step, counts = (ours if spec["side"] == "ours" else theirs)(spec)
    device = torch.device(spec["device"])
    peak = device_peak_tflops(device, None)
    print(json.dumps(counts | {"peak": peak and peak * 1e12}), flush=True)
    for _ in sys.stdin:
        wait_for(device)
        started, cpu = time.perf_counter(), time.process_time()
        loss, update = step()
        wait_for(device)
        wall = time.perf_counter() - started
        if device.type == "cuda":
            memory = torch.cuda.max_memory_allocated()
        else:
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        answer = {
            "wall": wall,
            "without_update": wall - update,
            "cpu": time.process_time() - cpu,
            "loss": loss,
            "memory": memory,
        }
        print(json.dumps(answer), flush=True)
    os._exit(0)  # gloo's threads may abort the interpreter's teardown


class Side:
    """A worker process `pid` and its best step."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.name, self.kind = spec["name"], spec["side"]
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--worker", json.dumps(spec)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(spec["threads"])},
        )
        self.pid = self._process.pid
        self.counts = self._read()
        self.steps: list[dict[str, float]] = []

    def _read(self) -> dict[str, float]:
        while line := self._process.stdout.readline():
            if line.startswith("{"):
                return json.loads(line)
        raise SystemExit(f"the side {self.name} ended with code {self._process.wait()}")

    def step(self) -> None:
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        self.steps.append(self._read())

    def close(self) -> None:
        """End the process, and with it all that it holds of memory."""
        self._process.communicate()

    def best(self, key: str = "wall") -> float:
        # The first step allocates and compiles.
        return min(s[key] for s in self.steps[1:] or self.steps)

    def figures(self, matmul: float) -> dict[str, float | None]:
        """`matmul`: FLOP/s of the fastest plain product."""
        wall = self.best()
        rate, peak = self.counts["flops"] / wall, self.counts["peak"]
        return {
            "tokens_per_second": round(self.counts["tokens"] / wall, 1),
            "step_seconds": round(wall, 3),
            "seconds_without_update": round(self.best("without_update"), 3),
            "cpu_seconds": round(self.best("cpu"), 3),
            "mfu": round(rate / peak, 4) if peak else None,
            "of_matmul": round(rate / matmul, 4),
            "peak_memory_gb": round(max(s["memory"] for s in self.steps) / 1e9, 2),
            "loss": round(self.steps[0]["loss"], 3),
        }


def matmul_rate(device: str, dtype: torch.dtype, threads: int, n: int) -> float:
    """FLOP/s of the fastest plain product of a few of `n` rows, 2 a multiply-add."""
    torch.set_num_threads(threads)
    best = 0.0
    for m, k, o in ((n, n, n), (n, 3072, 768), (n, 768, 3072)):
        a = torch.randn(m, k, device=device).to(dtype)
        b = torch.randn(k, o, device=device).to(dtype)
        for _ in range(4):
            started = time.perf_counter()
            a @ b
            if device != "cpu":
                torch.cuda.synchronize()
            best = max(best, 2 * m * k * o / (time.perf_counter() - started))
        del a, b
    if device != "cpu":
        torch.cuda.empty_cache()
    return best


def measure(case: str, precision: str, a: argparse.Namespace) -> dict[str, Any]:
    spec = {
        "case": case,
        "precision": precision,
        "data": a.data,
        "device": a.device,
        "threads": a.threads,
        "rows": a.step_rows or CASES[case][0],
        "deterministic": False,
    }
    rows = 8192 if a.device == "cuda" else 256 if case.startswith("tiny") else 2048
    widened = precision == "bf16" and a.device == "cpu" and not cpu_has_bf16_products()
    product_dtype = torch.float32 if widened else DTYPES[precision]
    own = {"side": "ours", "compile": a.compile, "lend": False}
    wanted = [own | {"name": "ours"}]
    if a.deterministic:
        wanted.append(own | {"name": "ours_determ.", "deterministic": True})
    variants = [(f"{'lent' if widened else 'hf'}", False)]
    if a.hf_compile:
        variants.append((variants[0][0] + "_compiled", True))
    for name, compiled in variants:
        wanted.append({"name": name, "side": "hf", "compile": compiled, "lend": widened})
    sides: list[Side] = []
    fastest = 0.0
    if a.turns:
        sides = [Side(spec | one) for one in wanted]
        for number in range(a.rounds + 1):
            for side in sides:
                side.step()
                told = f"round {number} of {a.rounds}, {side.name} {side.steps[-1]['wall']:.1f} s"
                print(f"  {case} {precision}: {told}", file=sys.stderr, flush=True)
                fastest = max(fastest, matmul_rate(a.device, product_dtype, a.threads, rows))
        for side in sides:
            side.close()
    else:
        for one in wanted:
            sides.append(Side(spec | one))
            for _ in range(a.rounds + 1):
                sides[-1].step()
            sides[-1].close()
            fastest = max(fastest, matmul_rate(a.device, product_dtype, a.threads, rows))
    stock = None
    if widened and case in a.stock:
        # Minutes a step: one step each, and without the first as a warm-up.
        stock = Side(spec | {"name": "stock", "side": "hf", "compile": False, "lend": False})
        stock.step()
        stock.close()
        sides.append(stock)
    mine, peers = sides[0], [side for side in sides if side.kind == "hf"]
    sober = [p for p in peers if p is not stock]
    result: dict[str, Any] = {side.name: side.figures(fastest) for side in sides}
    result["ratio"] = round(min(p.best() for p in sober) / mine.best(), 3)
    result["cpu_ratio"] = round(min(p.best("cpu") for p in sober) / mine.best("cpu"), 3)
    # The recipe's steps are thousands of times larger, so its updates weigh next to nothing.
    key = "without_update"
    result["ratio_without_update"] = round(min(p.best(key) for p in sober) / mine.best(key), 3)
    if a.deterministic:
        result["deterministic_price"] = round(sides[1].best() / mine.best(), 3)
    if stock is not None:
        result["stock_ratio"] = round(stock.best() / mine.best(), 3)
        result["stock_cpu_ratio"] = round(stock.best("cpu") / mine.best("cpu"), 3)
    c = mine.counts
    length = int(case.split("_")[1])
    positions = c["sequences"] * length
    # What their step computes: every position through the layers and through the head.
    computed = training_flops(
        config_of(case, c["vocab_size"]), positions, positions, c["sequences"], positions * length
    )
    result |= {
        "work_ratio": round(computed / c["flops"], 3),
        "matmul_gflops": round(fastest / 1e9, 1),
        "sequences": c["sequences"],
        "tokens": c["tokens"],
        "padding_share_of_theirs": round(1 - c["tokens"] / positions, 3),
        "widened": widened,
    }
    return result


def main(argv: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--worker", help=argparse.SUPPRESS)
    p.add_argument("--data", default="data/demo", help="a folder of shards (default: the demo's)")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument(
        "--cases", nargs="+", choices=list(CASES), help="default: mini_*; on a GPU base_*, large_*"
    )
    p.add_argument("--precision", nargs="+", choices=PRECISIONS, default=["bf16"])
    p.add_argument(
        "--turns",
        action=argparse.BooleanOptionalAction,
        help="all sides stay in memory and take turns; default: on a CPU",
    )
    p.add_argument("--rounds", type=int, default=2, help="counted steps a side, after a first one")
    p.add_argument("--step-rows", type=int, help="packed rows a step, else as the case has it")
    p.add_argument("--compile", action="store_true", help="torch.compile our layers")
    p.add_argument("--hf-compile", action="store_true", help="their side eager and compiled")
    p.add_argument(
        "--deterministic",
        action="store_true",
        help="ours once more with engine.deterministic: what the key costs, `deterministic_price`",
    )
    p.add_argument(
        "--stock",
        nargs="*",
        choices=list(CASES),
        default=[],
        help="cases whose bf16 also runs against the untouched library, one step of minutes",
    )
    a = p.parse_args(argv)
    if a.worker:
        worker(json.loads(a.worker))
        return
    if not (Path(a.data) / "manifest.json").exists():
        p.error(f"--data {a.data}: no manifest.json there; `make demo` makes data/demo")
    cpu = a.device == "cpu"
    if not (cpu or torch.cuda.is_available()):
        p.error(f"--device {a.device}: there is no GPU here; --device cpu")
    a.turns = cpu if a.turns is None else a.turns
    left_out = ("tiny", "base", "large") if cpu else ("tiny", "mini")
    cases = a.cases or [c for c in CASES if not c.startswith(left_out)]
    detail: dict[str, Any] = {}
    ratio: dict[str, float] = {}
    head = f"{'case':<11}{'in':<6}{'side':<14}{'tokens/s':>10}{'step s':>8}"
    print(head + f"{'MFU':>7}{'of matmul':>10}{'GB':>7}{'ratio':>7}", flush=True)
    for case in cases:
        detail[case] = {}
        for precision in a.precision:
            r = detail[case][precision] = measure(case, precision, a)
            for side in (k for k, v in r.items() if isinstance(v, dict)):
                f = r[side]
                shown = f["step_seconds"] / r["ours"]["step_seconds"]
                print(
                    f"{case:<11}{precision:<6}{side:<14}{f['tokens_per_second']:>10.1f}"
                    f"{f['step_seconds']:>8.2f}{f['mfu'] or math.nan:>7.3f}"
                    f"{f['of_matmul']:>10.3f}{f['peak_memory_gb']:>7.2f}"
                    f"{shown:>7.2f}",
                    flush=True,
                )
        ratio[case] = detail[case][a.precision[0]]["ratio"]
    print(json.dumps({"benchmark": "step_vs_hf", "ratio": ratio, "detail": detail}))


if __name__ == "__main__":
    sys.exit(main_guard(main))
