"""What a run would trip over, before it starts: `python -m pretrain doctor [--config FILE]`.

Alone it looks at this machine; under srun, torchrun or mpiexec at every process of the allocation,
and at the way between them. With a config also at its data set, run folder, disk and checkpoints.
Each line is `ok`, or `mend` with what to do. Exit codes: 0 all is well, 3 there is something to
mend, 2 a mistake in the config.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import os
import re
import resource
import shutil
import socket
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from configs.load import add_overrides, load
from core.console import printable, show
from core.errors import UserError
from core.files import disk_errors, nearest_folder
from data_pipeline.stream.dataset import Dataset
from pretrain import distributed, preflight
from pretrain.checkpoint import disk_room, newest_step
from pretrain.config import PretrainConfig
from pretrain.distributed import World
from pretrain.layout import look_ahead, vocabulary_size
from pretrain.planner import parameter_count

_ILL = 3  # exit code
_REQUIREMENTS = Path(__file__).resolve().parent.parent / "requirements.txt"
_LEAD = 300.0  # seconds, of `#SBATCH --signal` in slurm/pretrain_large.sh
_SAMPLE = 256 << 20  # bytes written to see the disk's rate


@dataclass(frozen=True)
class Finding:
    """Of one check on one host. mend: what to do; empty where all is well."""

    name: str
    found: str
    mend: str = ""


def main(argv: list[str]) -> int:
    p = argparse.ArgumentParser(
        prog="python -m pretrain doctor",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("--config", metavar="FILE", help="the run that is meant")
    add_overrides(p, "override keys of the config")
    p.add_argument(
        "--signal-lead", type=float, default=_LEAD, metavar="SECONDS",
        help="from the signal to the end of a job, as in #SBATCH --signal "
        f"(default {_LEAD:g})",
    )  # fmt: skip
    a = p.parse_args(argv)
    config = load(a.config, PretrainConfig, a.overrides) if a.config else None
    if a.overrides and not a.config:
        raise UserError("--set: there is no --config whose keys it could override")
    world = distributed.start(config.device if config else "auto")
    lines = examine(config, world, a.signal_lead)
    if world.is_main:
        show("\n".join(report(lines)))
    code = _ILL if any(line.mend for line in lines) else 0
    code = distributed.from_main(world, code)
    if world.size > 1:
        distributed.finish(world, code)
    return code


def examine(
    config: PretrainConfig | None, world: World, signal_lead: float = _LEAD
) -> list[Finding]:
    """(all ranks) Every check in turn."""
    mine = [look() for look in (_python, _packages, _compiler, _mpi, _shared_memory)]
    mine += [_open_files(world.size), _device(world.device)]
    lines = merged(distributed.gather(world, (socket.gethostname(), mine)))
    lines.append(Finding("ranks", f"{world.size} process(es) by {world.launcher}"))
    bandwidth = preflight.all_reduce_bandwidth(world)
    if bandwidth is not None:
        lines.append(Finding("all-reduce", f"{bandwidth:.2f} GB/s"))
    else:
        lines.append(_port())
    return lines + (_of_run(config, world, signal_lead) if config is not None else [])


def merged(everyone: Sequence[tuple[str, Sequence[Finding]]]) -> list[Finding]:
    """Of (host, findings) of every process, the same checks in the same order: one line where all
    found the same or all is well, else one for each host that has something to mend."""
    lines = []
    for at in range(len(everyone[0][1])):
        found = {(host, findings[at]) for host, findings in everyone}
        ill = sorted({(host, one) for host, one in found if one.mend}, key=lambda pair: pair[0])
        if not ill or len({one for _, one in found}) == 1:
            lines.append(everyone[0][1][at])
        else:
            lines += [Finding(one.name, f"{host}: {one.found}", one.mend) for host, one in ill]
    return lines


def report(lines: Sequence[Finding]) -> list[str]:
    wide = max(len(line.name) for line in lines)
    result = []
    for line in lines:
        result.append(f"{'mend' if line.mend else 'ok  '}  {line.name:<{wide}}  {line.found}")
        if line.mend:
            result.append(f"      {'':<{wide}}  -> {line.mend}")
    ill = sum(bool(line.mend) for line in lines)
    return [*map(printable, result), f"{ill} to mend" if ill else "all well"]


def _of_run(config: PretrainConfig, world: World, lead: float) -> list[Finding]:
    """(all ranks) What needs a config: data, folder, disk."""
    run_dir = Path(config.run_dir)
    lines = _tried("data", lambda: _data(config, world))
    lines += _tried("run folder", lambda: _shared_folder(run_dir, world))
    if not lines[0].mend and not lines[1].mend:
        lines += _tried("disk", lambda: distributed.by_main(world, lambda: _disk(config)))
        lines += _tried(
            "checkpoint", lambda: distributed.by_main(world, lambda: _checkpoint(config, lead))
        )
    return lines


def _tried(name: str, look: Callable[[], Finding]) -> list[Finding]:
    """What training would refuse is something to mend; its line says what."""
    try:
        return [look()]
    except UserError as error:
        return [Finding(name, "training would refuse to start", str(error))]


def _python() -> Finding:
    found = ".".join(map(str, sys.version_info[:3]))
    old = sys.version_info < (3, 11)
    return Finding("python", found, "use Python 3.11 or newer" if old else "")


def _packages() -> Finding:
    """The versions that requirements.txt pins."""
    pinned = re.findall(r"^([A-Za-z0-9_.-]+)==(\S+)$", _REQUIREMENTS.read_text(), re.M)
    missing, other, torch_version = [], [], ""
    for name, wanted in pinned:
        try:
            found = importlib.metadata.version(name).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
            continue
        if name == "torch":
            torch_version = found
        if found != wanted:
            other.append(f"{name} {found} (pinned: {wanted})")
    text = f"{len(pinned) - len(missing)} of {len(pinned)}, torch {torch_version}"
    text += f"; not as pinned: {', '.join(other)}" if other else ""
    mend = f"pip install -r requirements.txt (missing: {', '.join(missing)})" if missing else ""
    return Finding("packages", text, mend)


def _compiler() -> Finding:
    """torch.compile and DeepSpeed build with it."""
    found = os.environ.get("CXX") or next(filter(shutil.which, ("c++", "g++", "clang++")), None)
    if found and shutil.which(found):
        return Finding("compiler", shutil.which(found) or found)
    return Finding("compiler", "none", "apt-get install g++, or name one by CXX")


def _mpi() -> Finding:
    beside = str(Path(sys.executable).parent)  # in an environment that is not activated
    found = shutil.which("mpiexec") or shutil.which("mpiexec", path=beside)
    if found or (found := shutil.which("srun")):
        return Finding("MPI", found)
    return Finding("MPI", "no mpiexec", "pip install mpich (one process prepares data without)")


def _open_files(size: int) -> Finding:
    """As rank 0 of so many ranks wants them."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = distributed.open_files(size)
    enough = hard == resource.RLIM_INFINITY or hard >= wanted
    text = "unlimited" if hard == resource.RLIM_INFINITY else f"{hard:,}"
    return Finding("open files", text, "" if enough else f"raise ulimit -Hn to {wanted}")


def _port() -> Finding:
    """By which the ranks of a run on this machine would meet."""
    port = int(os.environ.get("MASTER_PORT", "29500"))
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            mend = "another by `deepspeed --master_port N` or MASTER_PORT=N"
            return Finding("port", f"{port}: {error.strerror}", mend)
    return Finding("port", f"{port} is free")


def _shared_memory() -> Finding:
    """NCCL and gloo pass data between processes of a host by it."""
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError:
        return Finding("/dev/shm", "missing", "mount a tmpfs there (docker run --shm-size=8g)")
    small = free < 1 << 30
    mend = "give it 1 GB or more (docker run --shm-size=8g)" if small else ""
    return Finding("/dev/shm", f"{free / 1e9:.1f} GB free", mend)


def _device(device: torch.device) -> Finding:
    if device.type == "cuda":
        about = torch.cuda.get_device_properties(device)
        text = f"{about.name}, {about.total_memory / 1e9:.0f} GB, CUDA {torch.version.cuda}"
        old = not torch.cuda.is_bf16_supported()
        mend = "it has no bf16: --set engine.precision=fp16" if old else ""
        return Finding("device", text, mend)
    driver = Path("/proc/driver/nvidia/version")
    if not driver.exists():
        cores = len(os.sched_getaffinity(0))
        return Finding("device", f"CPU, {cores} cores; no NVIDIA driver here")
    if torch.version.cuda is None:
        return Finding("device", "CPU", "this torch is built for CPUs: install the CUDA build")
    first = driver.read_text(errors="replace").splitlines()[0]
    return Finding(
        "device", f"CPU; driver: {first}",
        f"torch {torch.__version__} sees no GPU: a newer driver, or a torch for an older CUDA",
    )  # fmt: skip


def _data(config: PretrainConfig, world: World) -> Finding:
    """Shards, vocabulary, held-out text and rows, as training looks at them first."""
    with distributed.errors_shared(world):
        dataset = Dataset(config.data, config.objective)
        manifest = dataset.manifest
        preflight.read_shards(dataset)
        if world.is_main:
            look_ahead(config, dataset, world.size)
    shards = f"{len(manifest.shards):,} shards, {manifest.vocab_size:,} pieces"
    return Finding("data", f"{config.data.dir}: {shards}, rows divide by {world.size} process(es)")


def _shared_folder(run_dir: Path, world: World) -> Finding:
    """Whether all ranks see, near run_dir, what rank 0 writes there."""
    name = distributed.from_main(world, f".doctor-{uuid.uuid4().hex}")
    above = probe = run_dir.absolute()
    try:
        with distributed.errors_shared(world), disk_errors(run_dir, "run_dir"):
            above = nearest_folder(run_dir)
            probe = above / name
            if world.is_main:
                probe.write_bytes(b"seen")
        with distributed.errors_shared(world):
            if not probe.exists():
                raise UserError(
                    f"run_dir: {above} on {socket.gethostname()} is not the folder that rank 0 "
                    "has: all hosts must share it"
                )
    finally:
        distributed.gather(world, None)
        if world.is_main and probe.name == name:
            with contextlib.suppress(OSError):
                probe.unlink(missing_ok=True)
    return Finding("run folder", f"{above}: all of them see it")


def _disk(config: PretrainConfig) -> Finding:
    folder = Path(config.run_dir) / "checkpoints"
    room = disk_room(
        folder, config.checkpoint, _parameters(config), newest_step(folder), config.total_steps
    )
    text = f"{room.free / 1e9:.1f} GB free, {max(room.needed, 0) / 1e9:.1f} GB needed"
    return Finding("disk", text, room.check(config.checkpoint))


def _checkpoint(config: PretrainConfig, lead: float) -> Finding:
    """Whether one is written between Slurm's signal and the end of the job."""
    above = nearest_folder(Path(config.run_dir))
    size = 12 * _parameters(config)
    sample, block = min(size, _SAMPLE), bytes(1 << 20)
    probe = above / f".doctor-{uuid.uuid4().hex}"
    try:
        with disk_errors(above, "run_dir"), probe.open("wb") as file:
            began = time.perf_counter()
            for _ in range(-(-sample // len(block))):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            seconds = time.perf_counter() - began
    finally:
        probe.unlink(missing_ok=True)
    needed = size * seconds / sample
    text = f"{size / 1e9:.2f} GB in {needed:.1f} s at {sample / seconds / 1e9:.2f} GB/s"
    late = 2 * needed > lead  # another may be on its way when the signal comes
    mend = f"#SBATCH --signal=B:USR1@{round(3 * needed)}: two are to fit into it" if late else ""
    return Finding("checkpoint", f"{text}, signal {lead:g} s before the end", mend)


def _parameters(config: PretrainConfig) -> int:
    size = vocabulary_size(config, Dataset(config.data, config.objective).manifest)
    return parameter_count(config.model.with_vocab_size(size))
