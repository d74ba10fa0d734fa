"""Before the first step: threads, the run folder, what all ranks must agree on, their health."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import socket
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from configs.load import dump
from core.console import Console, notice, table
from core.errors import TryAgain, UserError, stops_as_such
from core.files import (
    TUNED,
    Lock,
    check_run_dir,
    disk_errors,
    holds,
    is_shown,
    make_folder,
    named,
    open_regular,
    remove_folder,
    unfinished,
    unmake,
    write_atomically,
)
from core.urls import is_url, join, local_path
from data_pipeline.stream.dataset import Dataset
from pretrain import distributed, version
from pretrain.config import PretrainConfig
from pretrain.distributed import World

LOCK_PATIENCE = 120.0  # seconds
ALL_REDUCED = {"cuda": 1 << 28, "cpu": 1 << 23}  # bytes; on GPUs 8 MB would measure the latency
# Written whole by the lock's holder alone.
_OWN = "config.yaml preflight.txt trackers.json metrics.jsonl rollbacks.json FINISHED".split()
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # another after a loss of power
_NO_BOOT = "-"  # in a container that hides it
_PF_EXITING = 4  # of the flags in /proc/PID/stat, linux/sched.h


def require_same_orders(watchdog_seconds: float, stop_at_step: int | None, world: World) -> None:
    """(all ranks) UserError when they were started with different ones, as by hand on each node:
    they would wait for each other in different collectives."""
    distributed.require_same(world, "watchdog_seconds", str(watchdog_seconds))
    distributed.require_same(world, "--stop-at-step", str(stop_at_step))


def set_threads(threads: int, world: World) -> None:
    """(all ranks) CPU threads of this process; by default its usable cores, shared by the ranks of
    its host that may use the same."""
    cores = socket.gethostname(), frozenset(os.sched_getaffinity(0))
    sharing = distributed.gather(world, cores).count(cores)
    torch.set_num_threads(threads or max(len(cores[1]) // sharing, 1))


@contextlib.contextmanager
def run_folder(
    config: PretrainConfig, world: World, patience: float = LOCK_PATIENCE
) -> Iterator[Lock | None]:
    """Make the run folder, lock it against a second run (`_take`) and keep the resolved config in
    it; gives the lock, on rank 0. A folder made here goes again with a UserError or Ctrl-C that
    comes before anything is recorded. The lock's note goes with an end in order or by Ctrl-C, and
    stays with an error."""
    folder = Path(config.run_dir)
    if config.watchdog_seconds:  # which ends a start after `SLOW` times that
        patience = min(patience, 2 * config.watchdog_seconds)
    lock, made, held = None, [], False
    try:
        with distributed.errors_shared(world):
            if world.is_main:
                with disk_errors(folder, "run_dir"):
                    check_folder(folder)
                    made = make_folder(folder)
                    lock = Lock(folder / "lock")
                    # Data workers outlive a killed parent by seconds; they must not hold its lock.
                    os.register_at_fork(after_in_child=lock.close)
                    _take(lock, folder, patience)
                    held = True
                    _sign(lock)
                    for left in (p for p, name in unfinished(folder) if name in _OWN):
                        remove_folder(left)  # of a start that was killed
                    write_atomically(folder / "config.yaml", dump(config))
        with stops_as_such():
            yield lock
    except (UserError, KeyboardInterrupt) as end:
        if held and isinstance(end, KeyboardInterrupt):
            lock.empty()
        with contextlib.suppress(OSError):
            if held and made and lock.is_in_place() and _unused(folder):
                unmake(made)
        raise
    else:
        if lock is not None:
            lock.empty()
    finally:
        if lock is not None:
            lock.close()


def check_folder(folder: Path) -> None:
    """UserError where no run of pretraining may be kept: as `check_run_dir`, and in a folder of
    fine-tuning."""
    check_run_dir(folder)
    if holds(folder, TUNED) and not (folder / "checkpoints").exists():
        raise UserError(f"run_dir: {folder} holds jobs of fine-tuning; use another run_dir")


def _unused(folder: Path) -> bool:
    """Whether there is nothing in a run folder but what a start leaves there before a step."""
    empty = {"lock", "config.yaml", "preflight.txt", "trackers.json", "wandb", "mlruns"}
    for path in folder.iterdir():
        if path.name == "checkpoints" and not any(path.iterdir()):
            continue
        if path.name == "metrics.jsonl" and path.stat().st_size == 0:
            continue
        if path.name not in empty and not path.name.startswith("events.out.tfevents."):
            return False
    return True


def _take(lock: Lock, folder: Path, patience: float) -> None:
    """UserError when the lock's holder is a process of this host; TryAgain when it is another's,
    or ends (a killed one gives back its memory first), or is gone (a file server may hold the lock
    of a host that lost its power), for `patience` s."""
    in_use = ""

    def look_at_holder() -> bool:
        nonlocal in_use
        boot, pid, host = _note(lock.path)
        first = not in_use
        in_use = f"run_dir: {folder} is in use by another run: process {pid} on {host}"
        if _is_here(boot) and _is_alive(pid):
            raise UserError(in_use)
        if first:
            wait = f"waiting up to {patience:g} s for it to let go of {lock.path}"
            notice(f"{in_use}; {wait}", sys.stderr)  # which it also does where nobody reads
        return False

    if not lock.take_within(patience, look_at_holder):
        raise TryAgain(f"{in_use}, which did not let go of its lock in {patience:g} s")


def _sign(lock: Lock) -> None:
    """Its holder's name, for the next. OSError."""
    # The job is for slurm/pretrain_large.sh, which is not to be requeued beside it.
    note = _boot(), str(os.getpid()), socket.gethostname(), distributed.slurm_job()
    with named(lock.path):
        lock.path.write_text(" ".join(note) + "\n")


def is_let_go(path: Path) -> bool:
    """Whether nobody trains in the folder of a run's lock: its last start ended in order, or was
    one of this machine's processes, and is gone."""
    boot, pid, _ = _note(path)
    return path.stat().st_size == 0 or (_is_here(boot) and not _is_alive(pid))


def _note(path: Path) -> tuple[str, str, str]:
    """Of a lock: where the process is known by its number, the number, its host."""
    with open_regular(path) as file:
        words = file.read(1 << 12).decode("utf-8", errors="replace").split()
    return (words[0], words[1], words[2]) if len(words) >= 3 else ("", "?", "a host not known")


def _boot() -> str:
    try:
        return f"{BOOT_ID.read_text().strip()}/{os.readlink('/proc/self/ns/pid')}"  # a container's
    except OSError:
        return _NO_BOOT


def _is_here(boot: str) -> bool:
    return boot == _boot() != _NO_BOOT


def _is_alive(pid: str) -> bool:
    """Whether there is such a process here that has not begun to end."""
    try:
        fields = Path("/proc", pid, "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return _is_others(pid)
    return not int(fields[6]) & _PF_EXITING


def _is_others(pid: str) -> bool:
    """Whether it is a process of another user, which /proc may hide (hidepid)."""
    try:
        os.kill(int(pid), 0)
    except (OSError, OverflowError, ValueError) as error:
        return isinstance(error, PermissionError)
    return False


def check(config: PretrainConfig, world: World) -> Dataset:
    """The data set, opened. UserError on every rank when the ranks differ in code, config or data,
    a rank cannot read shards or run folder, or a device computes wrongly. Rank 0 prints one line,
    and the ranks that are slow; all of them are in RUN/preflight.txt."""
    # git looks at every file of a checkout, which the ranks of a host, or all, share.
    versions = distributed.gather(world, None if world.local_rank else version.code_version())
    distributed.require_equal("the code version", versions)
    version.tell(versions[0])
    digest = hashlib.sha256(dump(config).encode()).hexdigest()[:16]
    distributed.require_same(world, "the config", digest)
    with distributed.errors_shared(world):
        dataset = Dataset(config.data, config.objective)
        manifest, _ = dataset.manifest, dataset.tokenizer
    distributed.require_same(world, "the dataset (manifest.json)", manifest.dataset_id)
    run_dir = Path(config.run_dir)
    note = distributed.by_main(world, (run_dir / "lock").read_bytes)
    with distributed.errors_shared(world):
        _require_shared(run_dir / "lock", note)
        read = read_shards(dataset)
        matmul = multiply(world.device)
    mine = Health(world.rank, socket.gethostname(), 1000 * matmul, 1000 * read)
    everyone = distributed.gather(world, mine)
    bandwidth = all_reduce_bandwidth(world)
    if world.is_main:
        lines = health_table(everyone)
        free = shutil.disk_usage(run_dir).free / 1e9
        hosts = len({h.host for h in everyone})
        first = f"preflight: {world.size} process(es) on {hosts} host(s), {free:.0f} GB free" + (
            f", all-reduce {bandwidth:.2f} GB/s" if bandwidth else ""
        )
        # A notice only: a full disk is found, and said, where checkpoints are written.
        with contextlib.suppress(OSError):
            write_atomically(
                run_dir / "preflight.txt", "\n".join([first, *lines]) + "\n", durable=False
            )
        console = Console(True, dated=True)
        for line in [first, *(line for line in lines if "slow" in line)]:
            console.say(line)
    return dataset


def _require_shared(lock: Path, note: bytes) -> None:
    """UserError where this host has not the lock with rank 0's note, but none or one of its own."""
    if not is_shown(lock, note.__eq__):
        what = "another folder than rank 0's" if lock.exists() else "missing"
        raise UserError(
            f"run_dir: {lock.parent} is {what} on {socket.gethostname()}; all hosts must share it"
        )


@dataclass(frozen=True)
class Health:
    """What a rank measured of itself; times in milliseconds."""

    rank: int
    host: str
    matmul: float
    read: float


# Times below these (milliseconds) are noise and mark nobody.
_FLOORS = {"matmul": 5.0, "read": 200.0}


def health_table(everyone: list[Health]) -> list[str]:
    """A line a rank, slow hosts first; `slow` where it takes over twice the median."""
    limits = {
        name: max(2 * statistics.median_low(getattr(h, name) for h in everyone), floor)
        for name, floor in _FLOORS.items()
    }
    rows = []
    for h in everyone:
        slow = [name for name, limit in limits.items() if getattr(h, name) > limit]
        cells = f"rank {h.rank}", f"matmul {h.matmul:.2f} ms", f"read {h.read:.1f} ms"
        mark = f"slow: {', '.join(slow)}" if slow else ""
        rows.append((not slow, h.host, h.rank, (f"  {h.host}", *cells, mark)))
    return table([row for *_, row in sorted(rows)])


def read_shards(dataset: Dataset) -> float:
    """Seconds to read the first and the last shard's index. UserError if their sizes are wrong."""
    began = time.perf_counter()
    shards = dataset.manifest.shards
    for shard in (shards[0], shards[-1]):
        dataset.index(shard)
        path = join(dataset.data.dir, f"{shard.name}.tar")
        if not is_url(path):  # of remote shards, only the index is read
            with disk_errors(path):
                size = local_path(path).stat().st_size
            if size != shard.bytes:
                raise UserError(
                    f"{path}: {size} bytes on {socket.gethostname()}, {shard.bytes} in the manifest"
                )
    return time.perf_counter() - began


def multiply(device: torch.device) -> float:
    """Seconds of a small matrix product, the best of five. UserError if the product is wrong.

    The factors are -1, 0 and 1, so it is exact in fp32 and TF32 in any order of summation, and
    C x = A (B x) holds bit for bit (Freivalds' check).
    """
    size = 4096 if device.type == "cuda" else 256
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-1, 2, (size, size), generator=generator).float() for _ in range(2))
    x = torch.randint(-9, 10, (size,), generator=generator).double().to(device)
    a, b = a.to(device), b.to(device)
    times = []
    for _ in range(5):
        began = time.perf_counter()
        c = a @ b
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
        if not torch.equal(c.double() @ x, a.double() @ (b.double() @ x)):
            raise UserError(
                f"{device} on {socket.gethostname()} computes a wrong matrix product: leave this "
                "host out (sbatch --exclude)"
            )
    return min(times)


def all_reduce_bandwidth(world: World) -> float | None:
    """Bus bandwidth in GB/s of an all-reduce: 2 (n-1)/n of the bytes over the time."""
    if world.size == 1:
        return None
    data = torch.zeros(ALL_REDUCED[world.device.type] // 4, device=world.device)
    times = []
    for _ in range(3):
        began = time.perf_counter()
        dist.all_reduce(data)
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)
        times.append(time.perf_counter() - began)
    return 2 * (world.size - 1) / world.size * data.nbytes / min(times) / 1e9
