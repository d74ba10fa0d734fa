"""What a run would trip over, before it starts: `python -m pretrain doctor [--config FILE]`.

Alone it looks at this machine; under srun, torchrun or mpiexec at every process of the allocation,
and at the way between them. With a config also at its data set, the weights of init_from, run
folder, trackers, the engine's start, disk, checkpoints and hours.
Each line is `ok`, or `mend` with what to do. Exit codes: 0 all is well, 3 there is something to
mend, 2 a mistake in the config.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib.metadata
import math
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from configs.load import add_overrides
from core.console import printable, quantity, show, wrap
from core.errors import UserError, short
from core.files import Lock, disk_errors, is_there, nearest_folder, open_regular
from data_pipeline.stream.dataset import Dataset
from pretrain import deepspeed_door, distributed, planner, preflight, trackers
from pretrain.build import build_engine
from pretrain.checkpoint import begun, check_files, disk_room, newest_step
from pretrain.config import PretrainConfig, load_run
from pretrain.distributed import World
from pretrain.engine_config import MONITORS
from pretrain.flops import known_as
from pretrain.layout import look_ahead, vocabulary_size
from pretrain.measured import measured
from pretrain.memory import checkpoint_bytes
from pretrain.model import BertForPreTraining
from pretrain.pretrained import initial_weights
from pretrain.rollback import Rollbacks
from pretrain.run_state import FINISHED, ROLLBACKS

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
        "--time-limit", type=_duration, metavar="HOURS", help="of a job (default: of the Slurm job)"
    )
    p.add_argument(
        "--signal-lead", type=_duration, default=_LEAD, metavar="SECONDS",
        help="from the signal to the end of a job, as in #SBATCH --signal "
        f"(default {_LEAD:g})",
    )  # fmt: skip
    a = p.parse_args(argv)
    config = load_run(a.config, a.overrides) if a.config else None
    if a.overrides and not a.config:
        raise UserError("--set: there is no --config whose keys it could override")
    # Without its GPU all else is looked at; `_device` says what is missing.
    wanted = config.device if config and torch.cuda.is_available() else "auto"
    world = distributed.start(wanted)
    limit = None if a.time_limit is None else Job(3600 * a.time_limit)
    lines = examine(config, world, a.signal_lead, limit)
    if world.is_main:
        show("\n".join(report(lines)))
    code = _ILL if any(line.mend for line in lines) else 0
    code = distributed.from_main(world, code)
    if world.size > 1:
        distributed.meet(world)
        distributed.finish(code)
    return code


def _duration(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: is no number of 0 or more")
    return value


@dataclass(frozen=True)
class Job:
    """seconds: that it may still run, inf without a limit. requeues: None, not known."""

    seconds: float
    requeues: bool | None = None


def examine(
    config: PretrainConfig | None,
    world: World,
    signal_lead: float = _LEAD,
    job: Job | None = None,
) -> list[Finding]:
    """(all ranks) Every check in turn. job: None, the Slurm job there may be."""
    mine = socket.gethostname(), on_machine(world, config)
    lines = merged(distributed.gather(world, mine))
    lines.append(Finding("ranks", world.told))
    bandwidth = preflight.all_reduce_bandwidth(world)
    if bandwidth is not None:
        backend = torch.distributed.get_backend()
        lines.append(Finding("all-reduce", f"{bandwidth:.2f} GB/s by {backend}"))
    else:
        lines.append(_port())
    return lines + (_of_run(config, world, signal_lead, job) if config is not None else [])


def on_machine(world: World, config: PretrainConfig | None) -> list[Finding]:
    """What this process sees of its own host."""
    mine = [look() for look in (_python, _packages, _compiler, _mpi, _shared_memory)]
    precision = config.engine.precision if config is not None else "auto"
    mine += [_open_files(world.size), _locked_memory(), _device(world.device, precision)]
    if config is not None and config.device == "cuda" != world.device.type:
        mend = mine[-1].mend or "start it where the GPUs are (srun, torchrun), or --set device=cpu"
        mine[-1] = Finding("device", f"{mine[-1].found}; the config asks for cuda", mend)
    return mine + _tried("DeepSpeed", _deepspeed)


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
        start = f"{'mend' if line.mend else 'ok  '}  {line.name:<{wide}}  "
        under = " " * len(start)
        result += wrap(line.found, start, under)
        if line.mend:
            result.append(f"{under}-> {line.mend}")  # a command is copied as one line
    ill = sum(bool(line.mend) for line in lines)
    return [*map(printable, result), f"{ill} to mend" if ill else "all well"]


def _of_run(config: PretrainConfig, world: World, lead: float, job: Job | None) -> list[Finding]:
    """(all ranks) What needs a config: data, folder, disk, time."""
    run_dir = Path(config.run_dir)
    lines = _tried("data", lambda: _data(config, world))
    path = config.init_from
    if path is not None and not lines[0].mend:
        lines += _tried(
            "init_from", lambda: distributed.by_main(world, lambda: _weights(config, path))
        )
    lines += _tried("run folder", lambda: _shared_folder(run_dir, world))
    if config.logging.trackers:
        lines += _tried("trackers", lambda: _trackers(config, world))
    lines += _tried("engine", lambda: _engine(config, world))
    if not any(line.mend for line in lines if line.name in ("data", "run folder")):
        lines += _tried(
            "disk", lambda: distributed.by_main(world, lambda: _disk(config, world.size))
        )
        lines += _tried(
            "checkpoint", lambda: distributed.by_main(world, lambda: _checkpoint(config, lead))
        )
        lines += _tried(
            "hours", lambda: distributed.by_main(world, lambda: _hours(config, world, lead, job))
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


def _locked_memory() -> Finding:
    """InfiniBand's drivers lock the memory that they send from."""
    _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    text = "unlimited" if hard == resource.RLIM_INFINITY else quantity(hard, "B")
    short = hard != resource.RLIM_INFINITY and Path("/dev/infiniband").exists()
    return Finding("locked memory", text, "ulimit -l unlimited, for InfiniBand" if short else "")


def _deepspeed() -> Finding:
    """UserError where its version is not the one that the program changes."""
    try:
        found = deepspeed_door.deepspeed().__version__
    except UserError:
        raise
    except Exception as error:  # a broken installation ends its import in many ways
        why = short(f"{type(error).__name__}: {error}", 200)
        return Finding("DeepSpeed", f"cannot be imported: {why}", "pip install -r requirements.txt")
    return Finding("DeepSpeed", f"{found}, {len(deepspeed_door.PATCHES)} places changed in it")


def _port() -> Finding:
    """By which the ranks of a run on this machine would meet."""
    said = os.environ.get("MASTER_PORT", "29500")
    if not distributed.is_port(said):
        return Finding("port", f"MASTER_PORT={short(said)}", "a number from 1 to 65535")
    port = int(said)
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


def _device(device: torch.device, precision: str) -> Finding:
    if device.type == "cuda":
        about = torch.cuda.get_device_properties(device)
        text = f"{about.name}, {about.total_memory / 1e9:.0f} GB, CUDA {torch.version.cuda}"
        lacks = not torch.cuda.is_bf16_supported(including_emulation=False)
        text += ", no bf16" if lacks else ""
        mend = "--set engine.precision=auto" if lacks and precision == "bf16" else ""
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
        manifest, _ = dataset.manifest, dataset.tokenizer
        preflight.read_shards(dataset)
        if world.is_main:
            done, rows = begun(config, dataset)
            look_ahead(config, dataset, world.size, done=done, rows=rows)
    shards = f"{len(manifest.shards):,} shards, {manifest.vocab_size:,} pieces"
    return Finding("data", f"{config.data.dir}: {shards}, rows divide by {world.size} process(es)")


def _weights(config: PretrainConfig, path: str) -> Finding:
    """Whether a start would take the weights of `init_from`, where it begins with them."""
    if newest_step(Path(config.run_dir) / "checkpoints"):
        return Finding("init_from", f"{path}: the run has begun")
    dataset = Dataset(config.data, config.objective)
    shape = config.model.with_vocab_size(vocabulary_size(config, dataset))
    model = BertForPreTraining(shape, generator=torch.Generator().manual_seed(0))
    accepted, extends = config.data.accept_changed, dataset.manifest.extends
    _, origin = initial_weights(path, model, dataset.tokenizer, accepted, extends)
    return Finding("init_from", f"{path}: {origin}")


def _check_begun(run_dir: Path) -> None:
    """UserError where a start would refuse what stands in its folder beside checkpoints."""
    preflight.check_folder(run_dir)
    with disk_errors(run_dir, "run_dir"):
        if is_there(run_dir) and not run_dir.is_dir():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(run_dir))
    lock, metrics = run_dir / "lock", run_dir / "metrics.jsonl"
    with disk_errors(run_dir):
        if is_there(lock):
            Lock(lock).close()
        if metrics.exists():
            open_regular(metrics).close()
        for path in (run_dir / name for name in ("config.yaml", ROLLBACKS, FINISHED)):
            if path.is_dir() and not path.is_symlink():  # a link is replaced
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if newest_step(run_dir / "checkpoints"):
        Rollbacks(run_dir / ROLLBACKS, 1, 1).read(())


def _shared_folder(run_dir: Path, world: World) -> Finding:
    """Whether all ranks see, near run_dir, what rank 0 writes there."""
    name = distributed.from_main(world, f".doctor-{uuid.uuid4().hex}")
    above = probe = run_dir.absolute()
    try:
        with distributed.errors_shared(world), disk_errors(run_dir, "run_dir"):
            above = nearest_folder(run_dir)
            probe = above / name
            if world.is_main:
                _check_begun(run_dir)
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


def _trackers(config: PretrainConfig, world: World) -> Finding:
    distributed.by_main(world, lambda: trackers.check(config.logging.trackers))
    return Finding("trackers", ", ".join(config.logging.trackers))


def _engine(config: PretrainConfig, world: World) -> Finding:
    """DeepSpeed by the config's keys, around one layer of the model; its monitors, which write
    where they are told to, stay off."""
    if config.device == "cuda" != world.device.type:
        return Finding("engine", "not known without a GPU")
    given = config.engine.deepspeed
    keys = given | {k: {**given[k], "enabled": False} for k in given.keys() & set(MONITORS)}
    model = config.model.model_copy(update={"num_hidden_layers": 1, "compile": False})
    engine = config.engine.model_copy(update={"deepspeed": keys})
    said: list[str] = []
    update = {"model": model, "engine": engine}
    build_engine(config.model_copy(update=update), 128, world, said.append).close()
    return Finding("engine", f"ZeRO {engine.zero_stage}, {', '.join(said)}")


def _disk(config: PretrainConfig, ranks: int) -> Finding:
    folder = Path(config.run_dir) / "checkpoints"
    size = _checkpoint_bytes(config)
    room = disk_room(folder, config.checkpoint, size, newest_step(folder), config.total_steps)
    if room.needed:
        check_files(folder, size, ranks)
    needed = quantity(max(room.needed, 0), "B")
    text = f"{quantity(room.free, 'B')} free, checkpoints need {needed} more"
    try:
        said = room.check(config.checkpoint)
    except UserError as error:
        said = str(error)
    fits = room.free // size - 1  # one is being written
    cure = "another disk by --set run_dir=FOLDER"
    if 0 < fits < config.checkpoint.keep_last and not config.checkpoint.keep_every:
        cure = f"--set checkpoint.keep_last={fits}, or {cure}"
    return Finding("disk", text, f"{cure}: {said}" if said else "")


def _checkpoint(config: PretrainConfig, lead: float) -> Finding:
    """Whether one is written between Slurm's signal and the end of the job."""
    above = nearest_folder(Path(config.run_dir) / "checkpoints")
    size = _checkpoint_bytes(config)
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
    rate = quantity(sample / seconds, "B/s")
    text = f"{quantity(size, 'B')} in {planner.duration(needed / 3600)} at {rate}"
    late = 2 * needed > lead  # another may be on its way when the signal comes
    mend = f"#SBATCH --signal=B:USR1@{round(3 * needed)}: two are to fit into it" if late else ""
    return Finding("checkpoint", f"{text}, signal {lead:g} s before the end", mend)


def _hours(config: PretrainConfig, world: World, lead: float, job: Job | None) -> Finding:
    """What is left of the run against the time of the job: at the rates that the run has had, else
    at the assumed share of the device's peak."""
    if config.device == "cuda" != world.device.type:
        return Finding("hours", "not known without a GPU; `python -m pretrain plan` assumes one")
    folder = Path(config.run_dir)
    device = known_as(world.device)
    run = None
    with contextlib.suppress(UserError):  # there is none, or none that has trained
        run = measured(folder)
    if run is None and device is None and config.logging.peak_tflops is None:
        return Finding("hours", "not known: this device's peak is not; --set logging.peak_tflops=X")
    assumed = planner.assume(config, world.size, device, run)
    plan = planner.plan(config, Dataset(config.data, config.objective), assumed)
    left = 3600 * plan.hours_from(newest_step(folder / "checkpoints"))
    how = "as measured" if run else f"at {assumed.mfu:.0%} of the peak (assumed)"
    text = f"{planner.duration(left / 3600)} planned on {world.size} device(s) {how}"
    job = job or slurm_job()
    if job is None:
        return Finding("hours", f"{text}; no Slurm job here and no --time-limit")
    text += f", the job has {planner.duration(job.seconds / 3600)}"
    if job.seconds <= lead:
        return Finding("hours", text, f"sbatch --time: more than the signal's {lead:g} s")
    if left <= job.seconds - lead:
        return Finding("hours", text)
    text += f": {math.ceil(left / (job.seconds - lead))} starts"
    if job.requeues is not False:
        return Finding("hours", f"{text}, if it is requeued as by slurm/pretrain_large.sh")
    hours = math.ceil((left + lead) / 3600)
    return Finding("hours", text, f"sbatch --requeue, or --time={hours}:00:00 or more")


def slurm_job(patience: float = 60.0) -> Job | None:
    """This process's; None outside of one, or where Slurm does not say within so many seconds."""
    number = distributed.slurm_job()
    scontrol = shutil.which("scontrol")
    if number == "-" or scontrol is None:
        return None
    ask = [scontrol, "show", "job", number, "--oneliner"]
    try:
        done = subprocess.run(
            ask, capture_output=True, text=True, errors="replace", timeout=patience
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return read_job(done.stdout)


def read_job(text: str) -> Job | None:
    """Of what `scontrol show job` prints."""
    said = dict(re.findall(r"\b(TimeLimit|RunTime|Requeue)=(\S+)", text))
    if not {"TimeLimit", "RunTime"} <= said.keys():
        return None
    limit = _seconds(said["TimeLimit"])
    if limit is None:
        return Job(math.inf, said.get("Requeue") == "1")
    return Job(max(limit - (_seconds(said["RunTime"]) or 0), 0), said.get("Requeue") == "1")


def _seconds(text: str) -> float | None:
    """Of Slurm's [D-]HH:MM:SS; None for UNLIMITED and the like."""
    said = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)", text)
    if said is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in said.groups())
    return ((24 * days + hours) * 60 + minutes) * 60 + seconds


def _checkpoint_bytes(config: PretrainConfig) -> int:
    size = vocabulary_size(config, Dataset(config.data, config.objective))
    return checkpoint_bytes(config.model.with_vocab_size(size))
