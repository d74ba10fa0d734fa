"""All that one GPU can tell of the pretraining, in one command of at most eleven minutes.

    make gpu
    python benchmarks/gpu.py [--out DIR] [--data DIR] [--only step,run]

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

from benchmarks.gpu_kernels import Row, Rows, ceilings, measured, message  # noqa: E402
from benchmarks.step_vs_hf import counts_of, first_step, wait_for  # noqa: E402
from configs.load import load  # noqa: E402
from core.console import markdown_table, table  # noqa: E402
from core.files import remove_folder, write_atomically, write_json  # noqa: E402
from data_pipeline.stream.batch import Batch  # noqa: E402
from data_pipeline.stream.dataset import Dataset  # noqa: E402
from pretrain import distributed, memory, numerics  # noqa: E402
from pretrain.build import build_engine  # noqa: E402
from pretrain.config import PretrainConfig  # noqa: E402
from pretrain.engine import Engine  # noqa: E402
from pretrain.flops import device_peak_tflops  # noqa: E402
from pretrain.layout import vocabulary_size  # noqa: E402
from pretrain.version import code_version  # noqa: E402
from tests.datasets import write_dataset  # noqa: E402

SECONDS = 660
RECIPE = ROOT / "configs/pretrain_large.yaml"
MICRO_STEPS = 3
TINY = (
    "model.hidden_size=64 model.num_hidden_layers=2 model.num_attention_heads=2 "
    "model.intermediate_size=128 phases.0.micro_batch_rows=1 phases.1.micro_batch_rows=1 "
    "phases.0.row_len=256 phases.1.row_len=512 evaluation.rows=2"
).split()


# --------------------------------------------------------------------------------------- shared


def overrides(a: argparse.Namespace, *more: str) -> list[str]:
    """Of the shipped LARGE recipe: the data set at hand, a step of three micro-batches."""
    chosen = [f"data.dir={a.data}", f"run_dir={a.out / 'run'}", f"device={a.device}"]
    chosen += ["evaluation.rows=64", *(TINY if a.tiny else ()), *a.set]
    for i, phase in enumerate(load(str(RECIPE), PretrainConfig, chosen).phases):
        chosen.append(f"phases.{i}.rows_per_step={MICRO_STEPS * phase.micro_batch_rows}")
    return [*chosen, *more]


def prepared(a: argparse.Namespace, *more: str) -> tuple[PretrainConfig, int, list[list[Batch]]]:
    """(config, size of the vocabulary, micro-batches of the first step of each phase)"""
    config = load(str(RECIPE), PretrainConfig, overrides(a, *more))
    dataset = Dataset(config.data, config.objective)
    pinned = a.device == "cuda"
    batches = [
        first_step(dataset, phase, i, rows=phase.micro_batch_rows, pin_memory=pinned)
        for i, phase in enumerate(config.phases)
    ]
    return config, vocabulary_size(config, dataset), batches


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


def last_line(text: str) -> str:
    return ([line for line in text.splitlines() if line.strip()] or ["no output"])[-1].strip()


# --------------------------------------------------------------------------------------- stages


def env(a: argparse.Namespace) -> Rows:
    found: Row = {"commit": code_version(), "python": platform.python_version()}
    for name in ("torch", "triton", "deepspeed", "transformers", "numpy"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "found" if importlib.util.find_spec(name) else "not here"
    if a.device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found |= {"device": properties.name, "memory, GB": properties.total_memory / 1e9}
        found["CUDA"] = torch.version.cuda
    bytes_per_second, flops = ceilings(torch.device(a.device))
    found |= {"copy, TB/s": bytes_per_second / 1e12, "product, TFLOP/s": flops / 1e12}
    yield from ({"what": what, "value": value} for what, value in found.items())


def tests(a: argparse.Namespace) -> Rows:
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-v", "-rfEs", "-W", "ignore"]
    command += ["-p", "no:cacheprovider", "--show-capture=no", "tests/pretrain/test_gpu_step.py"]
    path, here = a.out / "pytest.txt", os.environ | {"GPU_TESTS_ON": a.device}
    with path.open("w") as file:  # which has what ended in time
        done = subprocess.run(command, cwd=ROOT, env=here, stdout=file, stderr=subprocess.STDOUT)
    said = path.read_text()
    for line in said.splitlines():
        if line.startswith(("FAILED", "ERROR ", "SKIPPED")):
            yield {"what": line.split()[0], "value": line.split(maxsplit=1)[1]}
    yield {"what": "pytest -m gpu", "value": last_line(said)}
    if done.returncode:
        raise SystemExit("pytest: not all passed")


def step(a: argparse.Namespace) -> Rows:
    world = distributed.start(a.device)
    numerics.set_switches(deterministic=False)
    for way, compiled in (("compiled", "true"), ("eager", "false")):
        config, vocab_size, batches = prepared(a, f"model.compile={compiled}")
        try:
            engine = build_engine(config, vocab_size, world, print)
        except Exception as error:
            yield {"case": way, "note": message(error)}
            continue
        for index, phase in enumerate(config.phases):
            name = f"{phase.max_seq_len} {way}"
            try:
                yield {"case": name} | _step(a, engine, config, batches[index], index, name)
            except Exception as error:  # out of memory, above all
                yield {"case": name, "note": message(error)}
        engine.close()
        del engine
        gc.collect()
        if a.device == "cuda":
            torch.cuda.empty_cache()


def _step(
    a: argparse.Namespace, engine: Engine, config: PretrainConfig, batches: list[Batch],
    index: int, name: str,
) -> Row:  # fmt: skip
    device, model, on_gpu = engine.device, engine.module.config, engine.device.type == "cuda"
    rows = len(batches[0].input_ids)
    engine.start_phase(len(batches), rows)
    for _ in range(2):  # compile, allocate
        engine.train_step(iter(batches), 1e-4)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    walls, parts = [], []
    for _ in range(2 if a.tiny else 5):
        wait_for(device)
        started = time.perf_counter()
        parts.append(engine.train_step(iter(batches), 1e-4).seconds)
        wait_for(device)
        walls.append(time.perf_counter() - started)
    wall, counts = statistics.median(walls), counts_of(batches, model)
    rate, peak = counts["flops"] / wall / 1e12, device_peak_tflops(device, None)
    a_row = counts["sequences"] / rows / len(batches)
    planned = memory.memory_bytes(
        config, model, config.phases[index], rows=rows, sequences_a_row=a_row, world=1
    )
    return {
        "rows": rows,
        "step ms": 1e3 * wall,
        **{part: 1e3 * statistics.median(p[part] for p in parts) for part in parts[0]},
        "tokens/s": counts["tokens"] / wall,
        "TFLOP/s": rate,
        "MFU": rate / peak if peak else None,
        "GB": torch.cuda.max_memory_allocated() / 1e9 if on_gpu else None,
        "GB planned": planned / 1e9,
        "busy under the profiler": _profile(a, engine, batches, name),
    }


def _profile(
    a: argparse.Namespace, engine: Engine, batches: list[Batch], name: str
) -> float | None:
    """Writes the kernels of a step to a file; the share of the step that the GPU is busy."""
    with torch.profiler.profile() as profile:  # of the devices that are there
        started = time.perf_counter()
        engine.train_step(iter(batches), 1e-4)
        wait_for(engine.device)
        wall = time.perf_counter() - started
    means = profile.key_averages()
    order = f"self_{'device' if a.device == 'cuda' else 'cpu'}_time_total"
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

    def points() -> list[dict[str, Any]]:
        path = folder / "metrics.jsonl"
        whole = path.read_text().split("\n")[:-1] if path.exists() else []
        return [json.loads(line) for line in whole]

    for attempt, wanted in (("first", 85), ("resumed", 0)):
        started = time.perf_counter()
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        while wanted and process.poll() is None:
            time.sleep(0.02)
            if any(point["step"] > first for point in points()):
                process.send_signal(signal.SIGUSR1)
                break
        said = process.communicate()[0]
        print(said, flush=True)
        told = [x for x in said.splitlines() if "resumed from" in x or "SIGUSR1:" in x]
        yield {"what": f"{attempt}: exit code", "value": process.returncode}
        yield {"what": f"{attempt}: seconds", "value": time.perf_counter() - started}
        yield {"what": f"{attempt}: said", "value": "; ".join(told)}
        if process.returncode != wanted:
            raise SystemExit(f"{attempt}: exit code {process.returncode}: {last_line(said)}")
    found = points()
    losses = [point["train/loss"] for point in found if "train/loss" in point]
    yield {"what": "loss, first and last step", "value": f"{losses[0]:.3f} {losses[-1]:.3f}"}
    for phase in (1, 2):
        inside = [x for x in found if x.get("rate/phase") == phase]
        inside = inside[2:] or inside  # the first steps compile
        for tag in sorted({tag for point in inside for tag in point}):
            if tag.startswith(("throughput/", "time/", "memory/")):
                value = statistics.median(x[tag] for x in inside if tag in x)
                yield {"what": f"phase {phase}: {tag}", "value": value}
    for tag in sorted({tag for point in found for tag in point if tag.startswith("checkpoint/")}):
        values = [point[tag] for point in found if tag in point]
        yield {"what": f"{tag}, largest of {len(values)}", "value": max(values)}


def kernels(a: argparse.Namespace) -> Rows:
    config, vocab_size, batches = prepared(a)
    return measured(config, vocab_size, batches, torch.device(a.device))


def lamb(a: argparse.Namespace) -> Rows:
    bandwidth, _ = ceilings(torch.device(a.device))
    arguments = ["--rounds", "1", "--turns", "1", "--layers", "1"] if a.tiny else ["--rounds", "5"]
    found = _benchmark("lamb", *arguments)
    seconds, n = found["seconds"], found["parameters"]
    # Read: weight, gradient, moments; written: weight, moments. LAMB's norms part it in two.
    for name, width in (("adamw", 28), ("lamb", 40)):
        mine, peer = seconds[name], seconds["adamw"]
        yield {
            "optimiser": name,
            "step ms": 1e3 * mine["step"],
            "update ms": 1e3 * mine["update"],
            "floor of the update ms": 1e3 * width * n / bandwidth,
            "step / AdamW's": mine["step"] / peer["step"],
            "update / AdamW's": mine["update"] / peer["update"],
        }


def hf(a: argparse.Namespace) -> Rows:
    how = ["--data", str(a.data), "--device", a.device, "--no-turns"]
    how += ["--threads", str(torch.get_num_threads())]
    how += ["--precision", "fp32" if a.device == "cpu" else "bf16"]
    how += ["--rounds", "1"] if a.tiny else ["--rounds", "2", "--compile", "--hf-compile"]
    for case in ("tiny_128",) if a.tiny else ("large_128", "large_512"):
        (found,) = _benchmark("step_vs_hf", *how, "--cases", case)[case].values()
        for side in (name for name, figures in found.items() if isinstance(figures, dict)):
            rate = found[side]["tokens_per_second"]
            yield {
                "case": f"{case} {side}",
                "tokens/s": rate,
                "MFU": found[side]["mfu"],
                "GB": found[side]["peak_memory_gb"],
                "ours over it": found["ours"]["tokens_per_second"] / rate,
            }


def _benchmark(script: str, *arguments: str) -> dict[str, Any]:
    """`detail` of the last line of another benchmark."""
    command = [sys.executable, f"benchmarks/{script}.py", *arguments]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    print(done.stdout, flush=True)
    if done.returncode:
        raise SystemExit(f"benchmarks/{script}.py ended with {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])["detail"]


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
    "tests": Stage(tests, 150, ("pytest", "pytest_timeout", "transformers", "deepspeed")),
    "step": Stage(step, 200, ("deepspeed",)),
    "run": Stage(run, 180, ("deepspeed", "tensorboard")),
    "kernels": Stage(kernels, 70),
    "lamb": Stage(lamb, 60, ("deepspeed",)),
    "hf": Stage(hf, 300, ("transformers", "deepspeed")),
}


def perform(a: argparse.Namespace) -> None:
    """The stage in this process: its rows to STAGE.json, each as soon as it is there. The last
    line of the output is the error, if there is one."""
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    if a.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    rows: list[Row] = []
    code = 0
    try:
        for row in STAGES[a.stage].rows(a):
            rows.append(row)
            write_json(a.out / f"{a.stage}.json", rows, durable=False)
    except (Exception, SystemExit) as error:
        traceback.print_exc(file=sys.stdout)
        print(message(error))
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # gloo's and NCCL's threads may end, or hold, the teardown


def start(name: str, a: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """The stage in a process of its own, for so many seconds at most: state, seconds, rows."""
    stage, path, log = STAGES[name], a.out / f"{name}.json", a.out / f"{name}.log"
    missing = [package for package in stage.needs if importlib.util.find_spec(package) is None]
    if missing or seconds < 5:
        why = f"{', '.join(missing)} not installed" if missing else "no time left"
        return {"state": f"not run: {why}", "seconds": 0.0, "rows": []}
    path.unlink(missing_ok=True)
    command = [sys.executable, __file__, "--stage", name, "--out", str(a.out)]
    command += ["--data", str(a.data), "--device", a.device, *(["--tiny"] if a.tiny else [])]
    limit, started = min(4 * stage.limit if a.tiny else stage.limit, seconds), time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(
            [*command, "--set", *a.set], cwd=ROOT, stdout=file, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
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
    state = "ok" if code == 0 else f"failed: {last_line(log.read_text())}"
    return {
        "state": f"late: ended after {limit:.0f} s" if code is None else state,
        "seconds": time.monotonic() - started,
        "rows": json.loads(path.read_text()) if path.exists() else [],
    }


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
