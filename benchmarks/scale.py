"""What grows with the number of ranks: 8, 64, 512 of them played on one machine, 4,096 on paper.

    python benchmarks/scale.py [--ranks 8,64,512]     real processes, a table
    python benchmarks/scale.py --paper                arithmetic for LARGE on 1 to 4,096 GPUs

The ranks are forked from this process, which has imported everything, so 512 of them share its
memory; each then runs the trainer's own code beside the device: rendezvous and gloo groups,
watchdog, preflight, votes, a checkpoint and the way back from it. The model is tiny and there is no
engine: nothing here computes. All ranks share the few cores of this machine, so seconds by the
clock grow with the work of all ranks together; where each has a core of its own, the CPU seconds
of rank 0 and of a middle rank are what counts. A number of ranks that does not fit, or is not
done in `--limit` seconds, is named as not reached. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import multiprocessing
import os
import resource
import signal
import socket
import statistics
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ |= {
    "OMP_NUM_THREADS": "1",
    "DS_ACCELERATOR": "cpu",
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # not a line for each name that is not found
}
# c10d looks up the names of those who connect; where no name server answers it waits for each.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch

from configs.load import check as checked
from configs.load import load
from core.console import notice, wrap
from core.errors import main_guard
from data_pipeline.stream.sharing import AHEAD
from data_pipeline.stream.stream import Stream
from pretrain import distributed, fragments, preflight
from pretrain.checkpoint import Checkpoints, engine_files, read_state
from pretrain.config import PretrainConfig
from pretrain.distributed import StopRequest
from pretrain.fragments import KEYS, HostCopies, Meta, Piece, Slice
from pretrain.layout import assumed_traffic, lay_out
from pretrain.memory import parameter_count
from pretrain.model import BertForPreTraining, ModelConfig
from pretrain.planner import assume, step_terms
from pretrain.run_state import RunState
from pretrain.watchdog import Progress, Watchdog
from tests.datasets import write_dataset

NODE = 8  # ranks of a played node
VOTES = 5
IDLE = 2.0  # seconds in which the watchdog alone works
VOCABULARY = 500
MODEL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 256,
}
PHASE = {"steps": 1, "learning_rate": 1e-3, "rows_per_step": 64, "micro_batch_rows": 32}
# A rank's own memory, and what the kernel keeps for its connections.
MB_A_RANK = 25
ALL_REDUCED = 1 << 16  # bytes in preflight: of its 8 MB each byte would pass the same few cores


# What the table on paper assumes beside the planner's figures.
ASSUMED = {
    "ring_us": (30.0, "a message from host to host; a vote is 2 (ranks - 1) of them in a row"),
    "plan_mtokens": (113.0, "M tokens a second that a process plans (records/, measured)"),
    "make_mtokens": (12.2, "M tokens a second that a core makes into batches (records/, measured)"),
}
GPUS = (1, 8, 64, 256, 512, 1024, 2048, 4096)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", default="8,64", help="numbers of ranks (default 8,64)")
    parser.add_argument("--limit", type=float, default=300, help="seconds for each of them")
    parser.add_argument("--paper", action="store_true", help="arithmetic alone, no process")
    parser.add_argument("--config", default="configs/pretrain_large.yaml", help="for --paper")
    for name, (value, text) in ASSUMED.items():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=float, default=value, help=f"{text} (default {value:g})")
    args = parser.parse_args(argv)
    if args.paper:
        table = paper(load(args.config, PretrainConfig, []), args)
        print(json.dumps({"benchmark": "scale", "ratio": {}, "detail": table}))
        return
    torch.set_num_threads(1)
    _shapes()  # torch imports more for it
    # A collection in a forked process would write to every object and so copy what is shared.
    gc.freeze()
    gc.disable()
    detail: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        make_data(Path(scratch) / "data")
        for ranks in map(int, args.ranks.split(",")):
            why = too_small(ranks)
            detail[str(ranks)] = (
                {"not_reached": why} if why else play(ranks, Path(scratch), args.limit)
            )
            show(ranks, detail[str(ranks)])
    print(json.dumps({"benchmark": "scale", "ratio": {}, "detail": detail}))


def make_data(folder: Path) -> None:
    rng = np.random.default_rng(0)
    documents = [
        [rng.integers(5, VOCABULARY, rng.integers(3, 30)).tolist() for _ in range(60)]
        for _ in range(600)
    ]
    write_dataset(folder, documents, heldout=documents[:5], vocab=VOCABULARY)


def too_small(ranks: int) -> str:
    """What of this machine is too small for so many ranks; nothing where it is not."""
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    _, processes = resource.getrlimit(resource.RLIMIT_NPROC)
    meminfo = Path("/proc/meminfo").read_text()
    free = int(meminfo.split("MemAvailable:")[1].split()[0]) / 1e3
    for name, there, wanted in (
        ("open files (ulimit -Hn)", files, 4 * ranks + 100),
        ("processes (ulimit -Hu)", processes, 6 * ranks),
        ("free memory in MB", free, MB_A_RANK * ranks),
    ):
        if there != resource.RLIM_INFINITY and there < wanted:
            return f"{name}: {there:.0f}, {wanted} wanted"
    return ""


# ------------------------------------------------------------------------------------------ paper


def paper(config: PretrainConfig, assumed: argparse.Namespace) -> list[dict[str, Any]]:
    """Prints what a step of each phase is on 1 to 4,096 GPUs and which term is the longest."""
    model = config.model.with_vocab_size(config.model.vocab_size or 30522)
    found = [
        on_paper(config, model, index, gpus, assumed)
        for index in range(len(config.phases))
        for gpus in GPUS
    ]
    columns = {
        "phase": "d", "gpus": "d", "rows": "d", "micro_steps": "d", "micro_batch_rows": "d",
        "micro_batch_tokens": ",.0f", "device": ".1f", "batch": ".1f", "network": ".1f",
        "loop": ".1f", "votes": ".1f", "planning": ".1f", "step": ".1f", "busy": ".0%",
        "planner_cores": ".2f", "loader_cores": ".2f", "files": "d",
        "slice_mb": ".1f", "longest": "",
    }  # fmt: skip
    print("| " + " | ".join(columns).replace("_", " ") + " |\n" + "|---" * len(columns) + "|")
    for line in found:
        print("| " + " | ".join(f"{line[key]:{form}}" for key, form in columns.items()) + " |")
    return found


def on_paper(
    config: PretrainConfig, model: ModelConfig, index: int, gpus: int, a: argparse.Namespace
) -> dict[str, Any]:
    """One line; times in ms. Rows are rounded to a multiple that the GPUs divide."""
    phase = config.phases[index]
    phase = phase.model_copy(update={"rows_multiple": max(phase.rows_multiple, gpus)})
    changed = config.model_copy(update={"phases": (phase,)})
    [layout] = lay_out(changed, gpus, [assumed_traffic(changed, 0, 1.0)])
    step, dealt = layout.traffic, layout.division
    seconds, _, _ = step_terms(changed, model, layout, assume(changed, gpus))
    terms = {name: 1e3 * value for name, value in vars(seconds).items()}
    before = sum(terms.values())
    votes = 2 * (gpus - 1) * a.ring_us / 1e3 / distributed.calls_a_round(gpus)
    votes = max(votes - before, 0)
    # The processes of a node plan in turn, up to AHEAD windows at a time (`sharing.py`).
    planning = max(step.tokens / (a.plan_mtokens * 1e3 * AHEAD) - before - votes, 0)
    terms |= {"votes": votes, "planning": planning}
    total = sum(terms.values())
    tokens = step.tokens / total * 1e3
    return {
        "phase": index + 1,
        "gpus": gpus,
        "rows": step.rows,
        "micro_steps": dealt.micro_steps,
        "micro_batch_rows": dealt.micro_batch_rows,
        "micro_batch_tokens": dealt.micro_batch_rows * step.tokens / step.rows,
        **terms,
        "step": total,
        "busy": terms["device"] / total,
        "planner_cores": tokens / (a.plan_mtokens * 1e6),
        "loader_cores": tokens / gpus * min(NODE, gpus) / (a.make_mtokens * 1e6),
        "files": gpus + 4,
        "slice_mb": 12 * parameter_count(model) / gpus / 1e6,
        "longest": max(terms, key=lambda name: terms[name]),
    }


# ------------------------------------------------------------------------------------------- play


def play(ranks: int, scratch: Path, limit: float) -> dict[str, Any]:
    """Fork the ranks, wait for them, put their figures together."""
    folder = scratch / f"of-{ranks}"
    folder.mkdir()
    barrier = multiprocessing.get_context("fork").Barrier(ranks)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pids = {}
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            _child(rank, ranks, port, folder, barrier)
        pids[pid] = rank
    failed = _wait(set(pids), time.monotonic() + limit)
    found = [json.loads(p.read_text()) for p in sorted(folder.glob("rank-*.json"))]
    if failed or len(found) < ranks:
        said = next(iter(sorted(folder.glob("error-*"))), None)
        why = said.read_text().strip().splitlines()[-1] if said else f"not done in {limit:g} s"
        return {"not_reached": f"{why} ({len(found)} ranks were done)"}
    return together(found) | {"files": _files(folder / "run")}


def _wait(pids: set[int], deadline: float) -> bool:
    """Whether one of the processes failed or was late; then none is left."""
    failed = False
    while pids and not failed:
        pid, status = os.waitpid(-1, os.WNOHANG)
        pids.discard(pid)
        failed = status != 0 or time.monotonic() > deadline
        if pid == 0:
            time.sleep(0.05)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for pid in pids:
        os.waitpid(pid, 0)
    return failed


def together(found: list[dict[str, Any]]) -> dict[str, Any]:
    """By part: seconds from the first rank's begin to the last one's end, CPU seconds of rank 0, of
    the middle rank, and files opened by all; then what a rank holds at the end."""
    result: dict[str, Any] = {"parts": {}}
    for part in found[0]["parts"]:
        mine = [rank["parts"][part] for rank in found]
        result["parts"][part] = {
            "seconds": max(p["end"] for p in mine) - min(p["begin"] for p in mine),
            "cpu_rank_0": mine[0]["cpu"],
            "cpu_middle": statistics.median(p["cpu"] for p in mine),
            "files_opened": sum(p["opened"] for p in mine),
            "commands": sum(p["commands"] for p in mine),
        }
    for key in ("descriptors", "private_mb"):
        result[key] = {
            "rank_0": found[0][key],
            "middle": statistics.median(rank[key] for rank in found),
        }
    result |= {key: found[0][key] for key in ("stream", "looks_a_second")}
    return result


def _files(run: Path) -> dict[str, int]:
    """Of the newest checkpoint."""
    newest = max((run / "checkpoints").glob("step-*"))
    sizes = [p.stat().st_size for p in newest.rglob("*") if p.is_file()]
    return {"files": len(sizes), "bytes": sum(sizes)}


def show(ranks: int, found: dict[str, Any]) -> None:
    if "not_reached" in found:
        print(f"{ranks} ranks: not reached: {found['not_reached']}\n", flush=True)
        return
    print(f"{ranks} ranks{'seconds':>22}{'CPU s rank 0':>14}{'middle':>8}{'files opened':>14}")
    for part, p in found["parts"].items():
        print(
            f"  {part:<20}{p['seconds']:>8.2f}{p['cpu_rank_0']:>14.2f}{p['cpu_middle']:>8.2f}"
            f"{p['files_opened']:>14,}"
        )
    stream = found["stream"]
    told = (
        f"  a checkpoint: {found['files']['files']} files; open descriptors: rank 0 "
        f"{found['descriptors']['rank_0']}, middle {found['descriptors']['middle']:.0f}; own MB: "
        f"{found['private_mb']['rank_0']:.0f}, {found['private_mb']['middle']:.0f}; git asked "
        f"{sum(p['commands'] for p in found['parts'].values())} times",
        f"  planning of a first window: {stream['cpu']:.2f} CPU s and {stream['mb']:.0f} MB for "
        f"{stream['tokens'] / 1e6:.1f} M tokens",
    )
    notice("\n".join(line for text in told for line in wrap(text, rest="    ")) + "\n")


# ------------------------------------------------------------------------------------- of one rank


class CountedWatchdog(Watchdog):
    """Counts its looks at all ranks."""

    looks = 0

    def judge(self) -> None:
        self.looks += 1
        super().judge()


class Parts:
    """Times the parts of a rank's life; all ranks begin each of them together."""

    def __init__(self, barrier: Any) -> None:
        self.found: dict[str, dict[str, float]] = {}
        self._barrier = barrier
        self._counts: Counter[str] = Counter()
        self._opened: Any = None
        sys.addaudithook(self._audit)
        opened = fragments.safe_open

        def safe_open(*args: Any) -> Any:  # opens without Python's knowledge
            self._counts["open"] += 1
            return opened(*args)

        fragments.safe_open = safe_open

    def _audit(self, event: str, about: tuple[Any, ...]) -> None:
        if event == "open":
            name, mode, _ = about
            again = mode is None and name == self._opened  # by the opener of an open()
            self._opened = name
            if again or str(name).startswith("/proc"):
                return
        if event in ("open", "subprocess.Popen"):
            self._counts[event] += 1

    def run(self, name: str, call: Callable[[], Any]) -> Any:
        self._barrier.wait()
        before, begin, cpu = self._counts.copy(), time.monotonic(), time.process_time()
        result = call()
        counts = self._counts - before
        self.found[name] = {
            "begin": begin,
            "end": time.monotonic(),
            "cpu": time.process_time() - cpu,
            "opened": counts["open"],
            "commands": counts["subprocess.Popen"],
        }
        return result


def _child(rank: int, ranks: int, port: int, folder: Path, barrier: Any) -> None:
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank % NODE),
        "LOCAL_SIZE": str(min(NODE, ranks)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    code = 1
    try:
        found = one_rank(folder, Parts(barrier))
        (folder / f"rank-{rank:05d}.json").write_text(json.dumps(found))
        code = 0
    except BaseException:
        (folder / f"error-{rank:05d}").write_text(traceback.format_exc())
    finally:
        os._exit(code)


def configured(folder: Path) -> PretrainConfig:
    return checked(
        {
            "run_dir": str(folder / "run"),
            "device": "cpu",
            "data": {"dir": str(folder.parent / "data"), "workers": 0},
            "model": MODEL,
            "phases": [PHASE],
        },
        PretrainConfig,
        "benchmarks/scale.py",
    )  # fmt: skip


def one_rank(folder: Path, parts: Parts) -> dict[str, Any]:
    """What a rank does beside the device, in the trainer's order, without data to compute on."""
    config = configured(folder)
    preflight.ALL_REDUCED["cpu"] = ALL_REDUCED
    with open(os.devnull, "w") as nowhere:
        sys.stdout = nowhere  # rank 0's lines, which are the trainer's
        world = parts.run("rendezvous", lambda: distributed.start("cpu"))
        preflight.set_threads(1, world)
        watchdog = parts.run(
            "watchdog meets", lambda: CountedWatchdog(world, 60, folder, Progress())
        )
        with preflight.run_folder(config, world):
            dataset = parts.run("preflight", lambda: preflight.check(config, world))
            checkpoints = parts.run(
                "writer's group",
                lambda: Checkpoints(folder / "run", world, config.checkpoint, lambda _: None),
            )
            planned = _plan(config, dataset) if world.rank < 2 else {}
            stop = StopRequest(world)
            parts.run(f"{VOTES} votes", lambda: [stop.agreed() for _ in range(VOTES)])
            stop.close()
            looks = watchdog.looks
            parts.run(f"watchdog, {IDLE:g} s", lambda: time.sleep(IDLE))
            looks = watchdog.looks - looks
            own = slice_of(world.rank, world.size)
            state = RunState(config).to_save(dataset.manifest, world.size)
            meta = _meta(world.size) if world.is_main else None
            snapshot = lambda: fragments.snapshot(HostCopies(), world.rank, [own], meta=meta)  # noqa: E731
            parts.run("checkpoint", lambda: _save(checkpoints, state, dataset, snapshot))
            again = slice_of(world.rank, world.size, zeros=True)
            parts.run("resume", lambda: _resume(checkpoints, world, again))
            assert all(torch.equal(own.tensors[key], again.tensors[key]) for key in KEYS)
        found = {
            "parts": parts.found,
            "descriptors": len(os.listdir("/proc/self/fd")),
            "private_mb": _private_mb(),
            "stream": planned,
            "looks_a_second": looks / IDLE,
        }
        parts.run("end", lambda: distributed.gather(world, None))
        watchdog.close(0)
    return found


def _plan(config: PretrainConfig, dataset: Any) -> dict[str, float]:
    """CPU seconds and memory that a rank gives for its first window and micro-batch."""
    cpu, mb = time.process_time(), _private_mb()
    phase = config.phases[0]
    stream = Stream(
        dataset, phase, phase_index=0, seed=0, rank=0, world=1,
        micro_batch_rows=phase.micro_batch_rows,
    )  # fmt: skip
    next(stream)
    tokens = sum(shard.tokens for shard in dataset.manifest.split("train"))
    found = {"cpu": time.process_time() - cpu, "mb": _private_mb() - mb, "tokens": tokens}
    stream.close()
    return found


def _save(checkpoints: Checkpoints, state: Any, dataset: Any, snapshot: Any) -> None:
    checkpoints.save(state, dataset.vocab_bytes, snapshot)
    checkpoints.wait()


def _resume(checkpoints: Checkpoints, world: Any, own: Slice) -> None:
    found = checkpoints.newest()
    read_state(found)
    engine = distributed.by_main(
        world, lambda: fragments.contents(found / "engine", engine_files(found))
    )
    own.fill(fragments.open_folder(engine).read)
    distributed.gather(world, None)


@functools.cache
def _shapes() -> dict[str, list[int]]:
    with torch.device("meta"):
        model = BertForPreTraining(ModelConfig(**MODEL), generator=None)
    return {name: list(p.shape) for name, p in model.named_parameters()}


def _meta(ranks: int) -> Meta:
    shapes = _shapes()
    return Meta(
        world_size=ranks, zero_stage=1, precision="fp32", steps=0,
        updates=dict.fromkeys(shapes, 0.0), shapes=shapes,
    )  # fmt: skip


def slice_of(rank: int, ranks: int, *, zeros: bool = False) -> Slice:
    """The rank's share of all parameters end to end, as ZeRO deals them."""
    shapes = {name: int(np.prod(shape)) for name, shape in _shapes().items()}
    share = -(-sum(shapes.values()) // ranks)
    low, high, at, pieces = rank * share, (rank + 1) * share, 0, []
    for name, numel in shapes.items():
        first, last = max(at, low), min(at + numel, high)
        if last > first:
            pieces.append(Piece(name, first - at, last - first, first - low))
        at += numel
    tensors = {key: torch.zeros(share) for key in KEYS}
    if not zeros:  # the last rank's share is longer than what is left for it
        rng = torch.Generator().manual_seed(rank)
        for tensor in tensors.values():
            tensor[: max(at - low, 0)].normal_(generator=rng)
    return Slice(tensors, pieces)


def _private_mb() -> float:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private")) / 1e3


if __name__ == "__main__":
    sys.exit(main_guard(main))
