"""All that one GPU can tell of the pretraining, in one command of at most nine minutes.

    make gpu        or        python benchmarks/gpu.py [--out DIR] [--data DIR] [--only step,run]

    env      versions, copy bandwidth, the fastest product: the ceilings of what follows
    tests    `pytest -m gpu`
    step     the shipped LARGE recipe through `Engine`, compiled and eager, three micro-batches of
             128 and of 512: ms by part, MFU, memory beside the planner's, kernels in profile-*.txt
    run      `pretrain/run.py` with both phases: checkpoints, SIGUSR1, resume
    kernels  each beside its floor, the larger of bytes / bandwidth and FLOPs / fastest product
    lamb     `benchmarks/lamb.py`
    hf       `benchmarks/step_vs_hf.py`, both sides compiled

Each stage is a process with a time limit. Its figures are in DIR/STAGE.json as soon as they are
measured; a stage that fails, is late or cannot run here is a line, and the next one runs. DIR
(runs/gpu-DATE) gets gpu.md; the last line of the output is one JSON object. It runs from a plain
checkout, without network, on torch 2.11 or newer: deepspeed may lie on PYTHONPATH; pytest,
tensorboard and transformers may be missing. Without --data a data set is drawn from a seed: its
text means nothing, its lengths are like a book's.

Without a GPU it says so and ends with 0. `--device cpu --tiny` runs every stage's code on a tiny
model, to show that it runs.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import importlib.metadata
import importlib.util
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STARTED = time.monotonic()  # cold imports take their time
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a plain checkout is not installed

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

from benchmarks.step_vs_hf import counts_of, lengths_of, matmul_rate, wait_for  # noqa: E402
from configs.load import load  # noqa: E402
from core.console import markdown_table, table  # noqa: E402
from core.files import remove_folder, write_atomically, write_json  # noqa: E402
from data_pipeline.stream.batch import Batch  # noqa: E402
from data_pipeline.stream.dataset import Dataset  # noqa: E402
from data_pipeline.stream.plan import Shape  # noqa: E402
from data_pipeline.stream.stream import Stream  # noqa: E402
from pretrain import attention, distributed, numerics, planner  # noqa: E402
from pretrain.build import build_engine  # noqa: E402
from pretrain.config import PretrainConfig  # noqa: E402
from pretrain.dropout import dropout  # noqa: E402
from pretrain.engine import Engine  # noqa: E402
from pretrain.flops import device_peak_tflops  # noqa: E402
from pretrain.layout import vocabulary_size  # noqa: E402
from pretrain.linear import linear  # noqa: E402
from pretrain.loss import pretraining_loss  # noqa: E402
from pretrain.stopwatch import Stopwatch  # noqa: E402
from pretrain.version import code_version  # noqa: E402
from tests.datasets import write_dataset  # noqa: E402

SECONDS = 540
RECIPE = ROOT / "configs/pretrain_large.yaml"
MICRO_STEPS = 3
TINY = (
    "model.hidden_size=64 model.num_hidden_layers=2 model.num_attention_heads=2 "
    "model.intermediate_size=128 phases.0.micro_batch_rows=1 phases.1.micro_batch_rows=1 "
    "phases.0.row_len=256 phases.1.row_len=512 evaluation.rows=2"
).split()
Row = dict[str, Any]
Rows = Iterator[Row]


# --------------------------------------------------------------------------------------- shared


def recipe(a: argparse.Namespace, *more: str) -> PretrainConfig:
    """The shipped LARGE recipe on the data set at hand, with a step of three micro-batches."""
    return load(str(RECIPE), PretrainConfig, overrides(a, *more))


def overrides(a: argparse.Namespace, *more: str) -> list[str]:
    chosen = [f"data.dir={a.data}", f"run_dir={a.out / 'run'}", f"device={a.device}"]
    chosen += ["evaluation.rows=64", *(TINY if a.tiny else ()), *a.set]
    for i, phase in enumerate(load(str(RECIPE), PretrainConfig, chosen).phases):
        chosen.append(f"phases.{i}.rows_per_step={MICRO_STEPS * phase.micro_batch_rows}")
    return [*chosen, *more]


def write_data(folder: Path, tiny: bool) -> None:
    """Documents of tokens drawn by Zipf's law: 40 sentences of 26 tokens each, in the mean."""
    rng = np.random.default_rng(0)
    size, documents = (200, 60) if tiny else (30522, 4000)
    shares = 1 / np.arange(3, size - 2)
    edges = np.cumsum(shares / shares.sum())

    def drawn(count: int) -> Iterator[list[list[int]]]:
        for _ in range(count):
            lengths = 1 + rng.geometric(0.04, 1 + rng.poisson(39))
            ids = 5 + np.searchsorted(edges[:-1], rng.random(lengths.sum()))
            yield [part.tolist() for part in np.split(ids, np.cumsum(lengths)[:-1])]

    write_dataset(folder, drawn(documents), heldout=drawn(max(20, documents // 20)), vocab=size)


def stream_batches(
    config: PretrainConfig, dataset: Dataset, index: int, device: torch.device
) -> list[Batch]:
    """The micro-batches of the first step of a phase."""
    phase = config.phases[index]
    stream = Stream(
        dataset,
        phase,
        phase_index=index,
        seed=config.seed,
        rank=0,
        world=1,
        micro_batch_rows=phase.micro_batch_rows,
        pin_memory=device.type == "cuda",
    )
    batches = iter(stream)
    taken = [next(batches) for _ in range(stream.micro_steps)]
    stream.close()
    return taken


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


def ceilings(a: argparse.Namespace) -> tuple[float, float]:
    """(bytes/s of a copy on the device, read and written; FLOP/s of the fastest bf16 product)."""
    device = torch.device(a.device)
    size = 1 << 31 if device.type == "cuda" else 1 << 26
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copied = 2 * size / timed(lambda: target.copy_(source), device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return copied, matmul_rate(a.device, dtype, torch.get_num_threads())


def message(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


# --------------------------------------------------------------------------------------- stages


def env(a: argparse.Namespace) -> Rows:
    device = torch.device(a.device)
    yield {"what": "commit", "value": code_version()}
    yield {"what": "python", "value": platform.python_version()}
    for name in ("torch", "triton", "deepspeed", "transformers", "numpy"):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            version = "found" if importlib.util.find_spec(name) else "not here"
        yield {"what": name, "value": version}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        yield {"what": "device", "value": properties.name}
        yield {"what": "memory, GB", "value": properties.total_memory / 1e9}
        yield {"what": "CUDA", "value": torch.version.cuda}
    bytes_per_second, flops = ceilings(a)
    yield {"what": "copy, TB/s", "value": bytes_per_second / 1e12}
    yield {"what": "product, TFLOP/s", "value": flops / 1e12}


def tests(a: argparse.Namespace) -> Rows:
    path = a.out / "pytest.txt"  # which has what ended in time
    with path.open("w") as file:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-m", "gpu", "-v", "-rfEs", "-W", "ignore"]
            + ["-p", "no:cacheprovider", "--show-capture=no", "tests/pretrain/test_gpu_step.py"],
            env=os.environ | {"GPU_TESTS_ON": a.device},
            cwd=ROOT,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    said = path.read_text().splitlines()
    for line in said:
        if line.startswith(("FAILED", "ERROR ", "SKIPPED")):
            yield {"what": line.split()[0], "value": line.split(maxsplit=1)[1]}
    yield {"what": "pytest -m gpu", "value": (said or ["no output"])[-1]}
    if done.returncode:
        raise SystemExit("pytest: not all passed")


def step(a: argparse.Namespace) -> Rows:
    world = distributed.start(a.device)
    numerics.set_switches(deterministic=False)
    for compiled in (True, False):
        config = recipe(a, f"model.compile={str(compiled).lower()}")
        dataset = Dataset(config.data, config.objective)
        vocab_size = vocabulary_size(config, dataset.manifest)
        way = "compiled" if compiled else "eager"
        try:
            engine = build_engine(config, vocab_size, world.device, print)
        except Exception as error:
            yield {"case": way, "note": message(error)}
            continue
        for index, phase in enumerate(config.phases):
            name = f"{phase.max_seq_len} {way}"
            try:
                yield {"case": name} | _step(a, engine, config, dataset, index, name)
            except Exception as error:  # out of memory, above all
                yield {"case": name, "note": message(error)}
        engine.close()
        del engine
        gc.collect()
        if a.device == "cuda":
            torch.cuda.empty_cache()


def _step(
    a: argparse.Namespace, engine: Engine, config: PretrainConfig, dataset: Dataset, index: int,
    name: str,
) -> Row:  # fmt: skip
    device, phase = engine.device, config.phases[index]
    batches = stream_batches(config, dataset, index, device)
    rows = len(batches[0].input_ids)
    engine.start_phase(len(batches), rows)
    for _ in range(2):  # compile, allocate
        engine.train_step(iter(batches), 1e-4)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    walls, parts = [], []
    for _ in range(2 if a.tiny else 5):
        wait_for(device)
        started = time.perf_counter()
        parts.append(engine.train_step(iter(batches), 1e-4).seconds)
        wait_for(device)
        walls.append(time.perf_counter() - started)
    wall = statistics.median(walls)
    model = engine.module.config
    counts = counts_of(batches, model)
    peak = device_peak_tflops(device, None)
    a_row = counts["sequences"] / rows / len(batches)
    planned = planner.memory_bytes(config, model, phase, rows=rows, sequences_a_row=a_row, world=1)
    return {
        "rows": rows,
        "step ms": 1e3 * wall,
        **{part: 1e3 * statistics.median(p[part] for p in parts) for part in parts[0]},
        "tokens/s": counts["tokens"] / wall,
        "TFLOP/s": counts["flops"] / wall / 1e12,
        "MFU": counts["flops"] / wall / peak / 1e12 if peak else None,
        "GB": torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else None,
        "GB planned": planned / 1e9,
        "busy under the profiler": _profile(a, engine, batches, name),
    }


def _profile(
    a: argparse.Namespace, engine: Engine, batches: list[Batch], name: str
) -> float | None:
    """Writes the kernels of a step to a file; the share of the step that the GPU is busy."""
    on_gpu = engine.device.type == "cuda"
    with torch.profiler.profile() as profile:  # of the devices that are there
        started = time.perf_counter()
        engine.train_step(iter(batches), 1e-4)
        wait_for(engine.device)
        wall = time.perf_counter() - started
    means = profile.key_averages()
    order = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    text = means.table(sort_by=order, row_limit=30, max_name_column_width=90)
    write_atomically(a.out / f"profile-{name.replace(' ', '-')}.txt", text)
    on_device = [m for m in means if m.device_type == torch.autograd.DeviceType.CUDA]
    kernels = [m for m in on_device if not m.is_user_annotation]  # these span kernels
    return sum(m.self_device_time_total for m in kernels) / 1e6 / wall if kernels else None


def run(a: argparse.Namespace) -> Rows:
    first, second = (2, 16) if a.tiny else (6, 8)
    settings = f"phases.0.steps={first} phases.1.steps={second} checkpoint.every_steps={first}"
    settings += " checkpoint.keep_last=1 evaluation.every_steps=0 logging.every_steps=1"
    command = [sys.executable, "pretrain/run.py", "--config", str(RECIPE)]
    command += ["--set", *overrides(a, *settings.split())]
    folder = a.out / "run"
    remove_folder(folder)
    for attempt in ("first", "resumed"):
        started = time.perf_counter()
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        sent = False
        while attempt == "first" and not sent and process.poll() is None:
            time.sleep(0.02)
            if any(line["step"] > first for line in _lines(folder)):
                process.send_signal(signal.SIGUSR1)
                sent = True
        said = process.communicate()[0]
        print(said, flush=True)
        wanted = 85 if attempt == "first" else 0
        yield {"what": f"{attempt}: exit code", "value": process.returncode}
        yield {"what": f"{attempt}: seconds", "value": time.perf_counter() - started}
        if process.returncode != wanted:
            raise SystemExit(
                f"{attempt}: exit code {process.returncode}, not {wanted}: {_last(said)}"
            )
        told = [x for x in said.splitlines() if x.startswith(("resumed", "SIGUSR1"))]
        yield {"what": f"{attempt}: said", "value": "; ".join(told)}
    lines = _lines(folder)
    losses = [line["train/loss"] for line in lines if "train/loss" in line]
    yield {"what": "loss, first and last step", "value": f"{losses[0]:.3f} {losses[-1]:.3f}"}
    for i, phase in enumerate((1, 2)):
        inside = [x for x in lines if x.get("rate/phase") == phase and "throughput/mfu" in x]
        inside = inside or [x for x in lines if x.get("rate/phase") == phase]
        for tag in sorted(inside[-1]):  # the first steps compile
            if tag.startswith(("throughput/", "time/", "memory/")):
                value = statistics.median(x[tag] for x in inside[2:] or inside if tag in x)
                yield {"what": f"phase {i + 1}: {tag}", "value": value}
    for tag in sorted({tag for line in lines for tag in line if tag.startswith("checkpoint/")}):
        found = [line[tag] for line in lines if tag in line]
        yield {"what": f"{tag}, largest of {len(found)}", "value": max(found)}


def _lines(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    whole = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in whole]


def _last(text: str) -> str:
    return ([line for line in text.splitlines() if line.strip()] or ["no output"])[-1].strip()


def kernels(a: argparse.Namespace) -> Rows:
    ceiling = ceilings(a)
    config, device = recipe(a), torch.device(a.device)
    dataset = Dataset(config.data, config.objective)
    model = config.model.with_vocab_size(vocabulary_size(config, dataset.manifest))
    D, inner, V = model.hidden_size, model.intermediate_size, model.padded_vocab_size
    N, K = model.num_attention_heads, model.head_size
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device).to(dtype).requires_grad_()

    def sublayer(y: torch.Tensor, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor):
        return F.layer_norm(dropout(y, 0.1, True) + x, (D,), w, b)

    # Elements that have to be read or written, forward and backward; products of forward.
    for index, phase in enumerate(config.phases):
        batch = stream_batches(config, dataset, index, device)[0].to(device)
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
            yield from kernel(
                f"attention {phase.max_seq_len}{name}",
                lambda qkv, rows=rows, p=p: attention.attend(qkv, rows, p),
                [drawn(T, 3, N, K)], (4 * T * D, 8 * T * D), ceiling, 4 * squares * D,
            )  # fmt: skip
        numerics.set_switches(deterministic=False)
    for I, O in ((D, 3 * D), (D, D), (D, inner), (inner, D)):  # noqa: E741
        n = T * I + T * O + I * O
        given = [drawn(T, I), drawn(O, I), drawn(O)]
        yield from kernel(f"product {I} x {O}", linear, given, (n, 2 * n), ceiling, 2.0 * T * I * O)
    # A CPU's compiled code is seen in the stage `step`.
    backend = "inductor" if device.type == "cuda" else "aot_eager"
    compiled = functools.partial(torch.compile, backend=backend)
    for name, wrap in (("eager", lambda f: f), ("compiled", compiled)):
        n, given = T * inner, [drawn(T, inner)]
        # Inductor's backward gives away the memory of what it was given.
        yield from kernel(f"GELU {name}", wrap(F.gelu), given, (2 * n, 3 * n), ceiling, again=True)
        n, given = T * D, [drawn(T, D), drawn(T, D), drawn(D), drawn(D)]
        name = f"dropout, add, LayerNorm {name}"
        yield from kernel(name, wrap(sublayer), given, (3 * n, 4 * n), ceiling, again=True)
    ids, labels = batch.input_ids.flatten(), batch.masked_lm_labels
    nsp = drawn(len(batch.cls_positions), 2).detach(), batch.next_sentence_labels
    for way in (False, True) if device.type == "cuda" else (False,):
        yield from kernel(
            f"cross entropy {'compiled' if way else 'in chunks'}",
            lambda logits, way=way: pretraining_loss(logits, labels, *nsp, 1, 1, compiled=way).loss,
            [drawn(len(labels), V)], (len(labels) * V, 2 * len(labels) * V), ceiling, again=True,
        )  # fmt: skip
    moved = (2 * T * D, (T + V) * D)
    yield from kernel(
        "word embedding", lambda w: F.embedding(ids, w), [drawn(V, D)], moved, ceiling
    )
    n = 1 << (26 if device.type == "cuda" else 20)
    sums, part = torch.zeros(n, device=device), torch.zeros(n, device=device, dtype=torch.bfloat16)
    seconds = timed(lambda: sums.add_(part), device)
    yield beside_floor("gradient sum, bf16 into fp32", seconds, 10 * n / ceiling[0])
    for pinned in (False, True) if device.type == "cuda" else (False,):
        host = torch.empty(n, pin_memory=pinned)
        seconds = timed(lambda host=host: host.copy_(sums), device)
        kind = "pinned" if pinned else "pageable"
        yield {"kernel": f"copy to {kind} memory", "ms": 1e3 * seconds, "GB/s": 4e-9 * n / seconds}


def kernel(
    name: str,
    call: Callable[..., torch.Tensor],
    given: list[torch.Tensor],
    elements: tuple[float, float],
    ceiling: tuple[float, float],
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


def hf(a: argparse.Namespace) -> Rows:
    how = ["--data", str(a.data), "--device", a.device, "--no-turns"]
    how += ["--threads", str(torch.get_num_threads())]
    how += ["--precision", "fp32" if a.device == "cpu" else "bf16"]
    how += ["--rounds", "1"] if a.tiny else ["--rounds", "2", "--compile", "--hf-compile"]
    for case in ("tiny_128",) if a.tiny else ("large_128", "large_512"):
        (found,) = _benchmark("step_vs_hf", *how, "--cases", case)["detail"][case].values()
        for side in (name for name, figures in found.items() if isinstance(figures, dict)):
            rate = found[side]["tokens_per_second"]
            yield {
                "case": f"{case} {side}",
                "tokens/s": rate,
                "MFU": found[side]["mfu"],
                "GB": found[side]["peak_memory_gb"],
                "ours over it": found["ours"]["tokens_per_second"] / rate,
            }


def lamb(a: argparse.Namespace) -> Rows:
    bandwidth, _ = ceilings(a)
    arguments = ["--rounds", "1", "--turns", "1", "--layers", "1"] if a.tiny else ["--rounds", "5"]
    found = _benchmark("lamb", *arguments)
    seconds, n = found["detail"]["seconds"], found["detail"]["parameters"]
    # Read: weight, gradient, moments; written: weight, moments. LAMB's norms part it in two.
    floors = {"adamw": 28 * n / bandwidth, "lamb": 40 * n / bandwidth}
    for name, parts in seconds.items():
        yield {
            "optimiser": name,
            "step ms": 1e3 * parts["step"],
            "update ms": 1e3 * parts["update"],
            "floor of the update ms": 1e3 * floors[name],
            "step / AdamW's": parts["step"] / seconds["adamw"]["step"],
            "update / AdamW's": parts["update"] / seconds["adamw"]["update"],
        }


def _benchmark(script: str, *arguments: str) -> dict[str, Any]:
    """The last line of another benchmark."""
    done = subprocess.run(
        [sys.executable, f"benchmarks/{script}.py", *arguments],
        cwd=ROOT, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    print(done.stdout, flush=True)
    if done.returncode:
        raise SystemExit(f"benchmarks/{script}.py ended with {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


# --------------------------------------------------------------------------------------- command


@dataclass(frozen=True)
class Stage:
    """`limit`: seconds; `needs`: packages without which it is left out."""

    rows: Callable[[argparse.Namespace], Rows]
    limit: float
    needs: tuple[str, ...] = ()


# By worth for its time: what the time does not reach are the last ones.
STAGES = {
    "env": Stage(env, 40),
    "tests": Stage(tests, 150, ("pytest", "transformers", "deepspeed")),
    "step": Stage(step, 200, ("deepspeed",)),
    "run": Stage(run, 180, ("deepspeed", "tensorboard")),
    "kernels": Stage(kernels, 70),
    "lamb": Stage(lamb, 60, ("deepspeed",)),
    "hf": Stage(hf, 300, ("transformers", "deepspeed")),
}


def perform(a: argparse.Namespace) -> None:
    """The stage in this process: its rows to STAGE.json, each as soon as it is there."""
    rows: list[Row] = []
    state = "cut short"
    try:
        for row in STAGES[a.stage].rows(a):
            rows.append(row)
            write_json(a.out / f"{a.stage}.json", {"state": state, "rows": rows})
        state = "ok"
    except (Exception, SystemExit) as error:
        state = f"failed: {message(error)}"
        traceback.print_exc()
    finally:
        write_json(a.out / f"{a.stage}.json", {"state": state, "rows": rows}, durable=False)
        sys.stdout.flush()
        sys.stderr.flush()
        if state != "cut short":  # gloo's and NCCL's threads may end, or hold, the teardown
            os._exit(int(state != "ok"))


def start(name: str, a: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """The stage in a process of its own, for so many seconds at most: state, seconds, rows."""
    stage, path = STAGES[name], a.out / f"{name}.json"
    missing = [package for package in stage.needs if importlib.util.find_spec(package) is None]
    if missing or seconds < 5:
        why = f"{', '.join(missing)} not installed" if missing else "no time left"
        return {"state": f"not run: {why}", "seconds": 0.0, "rows": []}
    path.unlink(missing_ok=True)
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    if a.device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    command = [
        sys.executable,
        __file__,
        "--stage",
        name,
        "--out",
        str(a.out),
        "--data",
        str(a.data),
    ]
    command += ["--device", a.device, *(["--tiny"] if a.tiny else []), "--set", *a.set]
    limit, started = min(4 * stage.limit if a.tiny else stage.limit, seconds), time.monotonic()
    with (a.out / f"{name}.log").open("w") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=environment,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and all that the stage has started
            process.wait()
            if name == "run":
                remove_folder(a.out / "run" / "checkpoints")  # 4 GB each
    found = json.loads(path.read_text()) if path.exists() else {"state": "", "rows": []}
    if code is None and not found["state"].startswith("failed"):
        found["state"] = f"late: ended after {limit:.0f} s"
    elif code and not found["state"].startswith("failed"):
        last = _last((a.out / f"{name}.log").read_text())
        found["state"] = f"failed: exit code {code}: {last}"
    return found | {"seconds": time.monotonic() - started}


def cells(rows: list[Row]) -> list[list[str]]:
    """Head and rows of text; what a row does not have, or what was not measured, is a dash."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    return [columns, *([shown(row.get(key)) for key in columns] for row in rows)]


def shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return "-" if value is None else str(value)


def page(a: argparse.Namespace, found: dict[str, dict[str, Any]]) -> str:
    """gpu.md."""
    device = "a CPU" if a.device == "cpu" else torch.cuda.get_device_name()
    text = [f"# On {device}, commit {code_version()}, {time.strftime('%Y-%m-%d %H:%M')}\n"]
    if a.tiny:
        text.append("A tiny model: this shows that the code runs, and no speed.\n")
    for name, stage in found.items():
        text.append(f"## {name}: {stage['state']}, {stage['seconds']:.0f} s\n")
        if stage["rows"]:
            text.append("\n".join(markdown_table(cells(stage["rows"]))) + "\n")
    return "\n".join(text)


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--out", type=Path, help="folder of all that is written (runs/gpu-DATE)")
    p.add_argument("--data", type=Path, help="a folder of shards (default: drawn from a seed)")
    p.add_argument("--only", help=f"these stages, with commas between: {','.join(STAGES)}")
    p.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    p.add_argument("--tiny", action="store_true", help="a tiny model: does the code run?")
    p.add_argument(
        "--set", nargs="*", default=[], metavar="KEY=VALUE", help="over the recipe of step and run"
    )
    p.add_argument("--stage", choices=list(STAGES), help=argparse.SUPPRESS)
    a = p.parse_args(argv)
    wanted = a.only.split(",") if a.only else list(STAGES)
    if unknown := set(wanted) - set(STAGES):
        p.error(f"--only: no stage {', '.join(sorted(unknown))}; there are {', '.join(STAGES)}")
    if a.device == "cuda" and not torch.cuda.is_available():
        print("no GPU here: nothing to measure (--device cpu --tiny shows that the code runs)")
        return 0
    if a.device == "cpu" and not a.tiny:
        p.error("--device cpu goes with --tiny")
    a.out = (a.out or ROOT / time.strftime("runs/gpu-%Y-%m-%d-%H%M%S")).resolve()
    if a.stage:
        perform(a)
        return 0
    deadline = STARTED + SECONDS
    a.out.mkdir(parents=True, exist_ok=True)
    if a.data is None:
        a.data = a.out / "data"
        write_data(a.data, a.tiny)
    a.data = a.data.resolve()
    found: dict[str, dict[str, Any]] = {}
    names = [name for name in STAGES if name in wanted]
    # Where no time is measured two stages may share the machine.
    with ThreadPoolExecutor(2) as pool:
        done = (pool.map if a.tiny else map)(
            lambda name: start(name, a, deadline - time.monotonic()), names
        )
        for name, stage in zip(names, done, strict=True):
            found[name] = stage
            print(f"\n== {name}: {stage['state']}, {stage['seconds']:.0f} s")
            if stage["rows"]:
                print("\n".join(table(cells(stage["rows"]))), flush=True)
            write_atomically(a.out / "gpu.md", page(a, found))
    print(f"\n{a.out / 'gpu.md'}")
    print(json.dumps({"benchmark": "gpu", "device": a.device, "tiny": a.tiny, "detail": found}))
    return int(any(stage["state"].startswith(("failed", "late")) for stage in found.values()))


if __name__ == "__main__":
    sys.exit(main())
