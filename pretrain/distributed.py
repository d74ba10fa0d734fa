"""Ranks, world size, agreement and signals. The only reader of RANK, SLURM_* and MPI variables.

One process may be started by `deepspeed`, `torchrun`, `srun`, `mpiexec` or alone; `start` finds out
which, joins the process group and gives back a `World`. A second, small gloo group carries control
messages, so that stop signals and checks never wait for the accelerator.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist

from core.console import last_words
from core.errors import TryAgain, UserError, disk_error, short
from core.files import Lock, disk_errors, look, open_regular
from core.processes import started, stated
from pretrain.machine import Launchers, interface_of, launchers, left_by_deepspeed

# Start the same job again: a signal after a checkpoint, a lost process, a disk or network whose
# error may pass.
REQUEUE_EXIT_CODE = TryAgain.code
TIMEOUT = timedelta(minutes=30)  # of a collective; the watchdog is sooner
AGENT_TIMEOUT = timedelta(minutes=2)  # to reach torchrun's store, which is there before its ranks
_MEETS_ANYWHERE = 256  # ranks that meet under any limit of open files
_HEAD = 256  # bytes of a value that go with its length, in one message

Value = TypeVar("Value")


@dataclass(frozen=True)
class World:
    """Who this process is. `control` is a gloo group over all ranks."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    launcher: str
    device: torch.device
    control: dist.ProcessGroup | None = field(repr=False, compare=False)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def told(self) -> str:
        by = "" if self.launcher == "alone" else f" by {self.launcher}"
        return f"{self.size} process(es){by}"


def start(device: str = "auto", began_under: list[int] | None = None) -> World:
    """Join the process group that the launcher describes.

    `device`: auto (a GPU where there is one), cuda or cpu. `began_under`: the launchers that this
    process had when it began (`machine.py`), by default those of now; it ends with them as long as
    it waits for the others, whose store may be a launcher's. UserError when the launcher's
    variables contradict each other, the rendezvous port is taken, the device is not there or
    another kind than other ranks', or two ranks share a GPU.
    """
    # DeepSpeed calls torch functions by names that newer torch would rather see changed.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    launcher, rank, size, local_rank, local_size = identify()
    refusal, chosen = "", torch.device("cpu")
    try:
        _allow_connections(rank, size)
        chosen = _choose_device(device, local_rank)
    except UserError as error:
        if not 1 < size <= _MEETS_ANYWHERE:
            raise
        refusal = str(error)  # of this rank alone, perhaps: all leave with it
    # Connections are made when they are first used. A full mesh is as many a rank as there are
    # ranks, each looked up in the store: 27 s for 256 ranks on two cores.
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    if chosen.type == "cpu":
        # DeepSpeed picks its accelerator by itself; it must pick the one chosen here.
        os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_RANK=str(local_rank),
        LOCAL_SIZE=str(local_size),
    )
    on_gpu = chosen.type == "cuda"
    if on_gpu:
        # DeepSpeed takes LOCAL_RANK for the device's index, which it is not where each process
        # sees one GPU, and wants Open MPI's to be the same.
        for name in {"LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"} & os.environ.keys():
            os.environ[name] = str(chosen.index)
    if began_under is None:
        began_under = launchers()
    met = threading.Event()
    if left_by_deepspeed():
        _end_without_launcher()
    if launcher != "alone":
        threading.Thread(target=_end_with, args=(began_under, met), daemon=True).start()
    try:
        if not dist.is_initialized():
            with _ends_by_ctrl_c():
                dist.init_process_group(
                    "nccl" if on_gpu else "gloo",
                    store=_meet(rank, size, local_size, chosen, refusal),
                    rank=rank,
                    world_size=size,
                    timeout=TIMEOUT,
                    device_id=chosen if on_gpu else None,
                )
        control = dist.new_group(backend="gloo", timeout=TIMEOUT) if on_gpu else dist.group.WORLD
    except (dist.DistNetworkError, dist.DistStoreError, RuntimeError) as error:
        raise _rendezvous_error(error) from None
    finally:
        met.set()
    return World(rank, size, local_rank, local_size, launcher, chosen, control)


@contextlib.contextmanager
def _ends_by_ctrl_c() -> Iterator[None]:
    """The signal itself ends the process: Python's handler would wait for torch, which waits for
    the other ranks."""
    heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not heard or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def ends_with_another() -> Iterator[None]:
    """TryAgain where another rank ends inside, before there is a watchdog that names it."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        raise _rendezvous_error(error) from None


def _end_with(began_under: list[int], met: threading.Event) -> None:
    mine = Launchers(began_under)
    while not met.is_set():
        if mine.gone():
            _end_without_launcher()
        met.wait(1)


def _end_without_launcher() -> NoReturn:
    last_words("the launcher is gone before the ranks have met")
    os._exit(REQUEUE_EXIT_CODE)


def meet(world: World) -> None:
    """(all ranks) Returns when all have come here, or one has died."""
    if world.size > 1:
        with contextlib.suppress(RuntimeError):
            gather(world, None)  # dist.barrier would ask for memory of a GPU


def finish(code: int) -> NoReturn:
    """Leave with `code`.

    gloo's threads abort the interpreter's teardown about once in six runs (`terminate called
    without an active exception`), so the process ends without one.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)


def main_address() -> str:
    """Where rank 0 is reached by the other ranks."""
    return os.environ.get("MASTER_ADDR", "127.0.0.1")


def slurm_job() -> str:
    """The number of this process's job, "-" outside of one."""
    return os.environ.get("SLURM_JOB_ID", "-")


def _slurm_start() -> list[str]:
    cluster = os.environ.get("SLURM_CLUSTER_NAME", "-")
    return [slurm_job(), os.environ.get("SLURM_RESTART_COUNT", "0"), cluster]


def claim(lock: Lock) -> bool:
    """Whether nobody held the lock of a piece of work; it is this process's from here on, and the
    file says which start of which Slurm job that is of."""
    if not lock.take(wait=False):
        return False
    with disk_errors(lock.path):
        lock.path.write_text(" ".join(_slurm_start()) + "\n")
    return True


def left_behind(locks: Iterable[Path]) -> Iterator[Path]:
    """Those whose last to `claim` them was an earlier start of this Slurm job (of an array: of
    this task), or a Slurm job that has ended. If the lock is held, that start runs on, on a node
    that Slurm takes for dead, or a file server has not noticed its end: no other will do the
    work."""
    ended = functools.cache(_has_ended)  # where Slurm is slow, each question takes a minute
    job, start, cluster = _slurm_start()
    for path in locks:
        if look(path) is None:
            continue
        with disk_errors(path), open_regular(path) as file:
            said = file.read(1 << 10).decode("utf-8", errors="replace").split()
        if len(said) != 3:
            continue
        if said[0] == job:
            left = said[1] != start
        else:  # squeue knows no job of another cluster
            left = said[0].isdecimal() and (job == "-" or said[2] == cluster) and ended(said[0])
        if left:
            yield path


def _has_ended(job: str) -> bool:
    """Whether Slurm says so of a job; False where it says nothing."""
    # Of an array's id it shows all tasks: %A is each one's own.
    ask = ["squeue", "--noheader", "--jobs", job, "--format", "%A %T"]
    # A user's own choice of what it shows would hide a job that runs.
    env = {name: value for name, value in os.environ.items() if not name.startswith("SQUEUE_")}
    try:
        said = subprocess.run(ask, capture_output=True, text=True, timeout=60, env=env)
        states = dict(line.split() for line in said.stdout.splitlines())
    except (OSError, subprocess.TimeoutExpired, ValueError):
        return False
    if said.returncode != 0:
        return "Invalid job id" in said.stderr
    # A node that is down keeps the jobs of its time "completing".
    return states.get(job, "COMPLETING") == "COMPLETING"


def require_same(world: World, name: str, value: str) -> None:
    """UserError on every rank when `value` is not the same on all ranks."""
    require_equal(name, gather(world, value))


def require_equal(name: str, values: list[str | None]) -> None:
    """The same of the values of all ranks; None: of a rank that says nothing."""
    if any(v not in (None, values[0]) for v in values):
        others = [f"rank {r}: {v}" for r, v in enumerate(values) if v not in (None, values[0])]
        raise UserError(f"the ranks disagree on {name}: rank 0: {values[0]}, {', '.join(others)}")


def apart(world: World, timeout: timedelta = TIMEOUT) -> World:
    """(all ranks) The same with a control group of its own, for a thread beside the main one: what
    they agree on cannot meet. The ways of `to_main` are open: it does not need the rendezvous
    store, which a launcher holds."""
    if world.size == 1:
        return world
    world = replace(world, control=dist.new_group(backend="gloo", timeout=timeout))
    to_main(world, None)
    return world


def gather(world: World, value: Value) -> list[Value]:
    """Small picklable values of all ranks, in rank order, on every rank.

    By way of rank 0: an all-gather goes round a ring, as many messages one after the other as there
    are ranks, which all of them handle: 16 s for 256 ranks on two cores, this 0.3 s.
    """
    return from_main(world, to_main(world, value))


def to_main(world: World, value: Value) -> list[Value]:
    """Small picklable values of all ranks, in rank order, on rank 0; nothing on the others, which
    do not wait for each other."""
    if world.size == 1:
        return [value]
    data = pickle.dumps(value)
    length = len(data).to_bytes(8, "little")
    head = _tensor(length + data[:_HEAD].ljust(_HEAD))
    if not world.is_main:
        dist.gather(head, dst=0, group=world.control)
        if len(data) > _HEAD:
            dist.send(_tensor(data[_HEAD:]), 0, group=world.control)
        return []
    heads = [torch.empty_like(head) for _ in range(world.size)]
    dist.gather(head, heads, dst=0, group=world.control)
    values = [value]
    for rank, found in enumerate(heads[1:], 1):
        raw = found.numpy().tobytes()
        numel = int.from_bytes(raw[:8], "little")
        more = torch.empty(max(numel - _HEAD, 0), dtype=torch.uint8)
        if len(more):
            dist.recv(more, rank, group=world.control)
        values.append(pickle.loads(raw[8:] + more.numpy().tobytes()))
    return values


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def from_main(world: World, value: Value) -> Value:
    """Rank 0's small picklable value, on every rank."""
    if world.size == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, group=world.control)
    return box[0]


def by_main(world: World, call: Callable[[], Value]) -> Value:
    """(all ranks) What `call()`, picklable, gives on rank 0; its UserError or OSError too."""
    value = None
    with errors_shared(world):
        if world.is_main:
            value = call()
    return from_main(world, value)


@contextlib.contextmanager
def errors_shared(world: World) -> Iterator[None]:
    """A UserError or OSError inside (`disk_error`), on any rank, becomes the same on every rank."""
    found: UserError | None = None
    try:
        yield
    except UserError as error:
        found = type(error)(str(error))
    except OSError as error:
        found = disk_error(error, error.filename or "I/O")
    raised = [e for e in gather(world, found) if e is not None]
    if raised:
        raised[0].quiet = not world.is_main
        raise raised[0]


def calls_a_round(size: int) -> int:
    """A round goes about a ring, 2 (ranks - 1) messages one after the other, behind a step; the
    more ranks, the shorter a step."""
    return max(1, size // 256)


class Vote:
    """The largest of the numbers that all ranks cast, known to all at the next round: no waiting.

    Of many ranks a call is not always a round (`calls_a_round`). Rounds of several votes must come
    in the same order on every rank.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._round: tuple[dist.Work, torch.Tensor] | None = None
        self._calls = 0

    def cast(self, value: int) -> int | None:
        """(all ranks) What the round before agreed on; None at the first, and where there is no
        round. Alone: `value`."""
        if self._world.size == 1:
            return value
        self._calls += 1
        if self._calls % calls_a_round(self._world.size):
            return None
        agreed = self.collect()
        cast = torch.tensor(value, dtype=torch.int32)
        work = dist.all_reduce(cast, op=dist.ReduceOp.MAX, group=self._world.control, async_op=True)
        self._round = (work, cast)
        return agreed

    def collect(self) -> int | None:
        """(all ranks) End the round under way, if there is one."""
        if self._round is None:
            return None
        (work, cast), self._round = self._round, None
        work.wait()
        return int(cast)


class StopRequest:
    """SIGTERM, SIGUSR1, SIGINT, or SIGHUP where it is not ignored (nohup), on any rank becomes one
    decision of all ranks at the same step.

    `agreed()` is called by every rank once a step. A vote is collected in the
    background and read at the next round, so nobody waits for it.
    """

    _CODES = {signal.SIGINT: 1, signal.SIGTERM: 2, signal.SIGUSR1: 3, signal.SIGHUP: 4}
    # Seconds that the step may take to its end: one process alone loses nothing if it does not wait
    # for it; several lose the steps since the last checkpoint. Torchrun and Slurm kill after 30.
    _PATIENCE, _PATIENCE_OF_MANY = 2.0, 20.0

    def __init__(self, world: World) -> None:
        self._world = world
        self._seen, self._seen_at = 0, 0.0
        self._vote = Vote(world)
        started()
        self._before = {
            number: signal.signal(number, self._on_signal)
            for number in self._CODES
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN
        }

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        code = self._CODES[signal.Signals(number)]
        if code == 1 and self._seen == 1 and self._world.size == 1:
            raise KeyboardInterrupt
        # The first counts: launchers send SIGTERM after the terminal's SIGINT.
        if not self._seen:
            self._seen, self._seen_at = code, time.monotonic()

    def out_of_patience(self) -> bool:
        """Whether this rank was told to stop, and has waited for the step's end long enough."""
        patience = self._PATIENCE if self._world.size == 1 else self._PATIENCE_OF_MANY
        return bool(self._seen) and time.monotonic() - self._seen_at > patience

    def agreed(self) -> signal.Signals | None:
        """The signal that all ranks now act upon, or None."""
        return self._of(self._vote.cast(self._seen) or 0)

    @property
    def own(self) -> signal.Signals | None:
        """The one that this rank was told."""
        return self._of(self._seen)

    def _of(self, code: int) -> signal.Signals | None:
        return next((s for s, c in self._CODES.items() if c == code), None)

    def collect(self) -> None:
        """(all ranks) End the vote under way."""
        self._vote.collect()

    def close(self) -> None:
        """Give the signals back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)


def identify() -> tuple[str, int, int, int, int]:
    """(launcher, rank, size, local rank, local size) from the environment."""
    env = os.environ
    step_tasks = stated("SLURM_STEP_NUM_TASKS") or 1
    mpi_size = stated("OMPI_COMM_WORLD_SIZE") or stated("PMI_SIZE") or 1
    if "RANK" in env and "WORLD_SIZE" in env:
        size = _needed("WORLD_SIZE", "number of processes")
        local_size = stated("LOCAL_WORLD_SIZE") or stated("LOCAL_SIZE") or size
        found = (
            "torchrun" if "TORCHELASTIC_RUN_ID" in env else "deepspeed",
            _needed("RANK"),
            size,
            stated("LOCAL_RANK", "rank") or 0,
            local_size,
        )
    elif step_tasks > 1:
        found = (
            "srun",
            _needed("SLURM_PROCID"),
            step_tasks,
            _needed("SLURM_LOCALID"),
            _slurm_tasks_on_node(),
        )
        if not env.get("MASTER_ADDR"):
            env["MASTER_ADDR"] = _first_slurm_host()
        # A port of the job's own, so that two jobs on a node do not meet; below 32768, from where
        # on the kernel gives ports to connections.
        job = slurm_job()
        number = int(job) if re.fullmatch("[0-9]{1,20}", job) else 0
        env["MASTER_PORT"] = env.get("MASTER_PORT") or str(10000 + number % 20000)
    elif mpi_size > 1:
        rank = stated("OMPI_COMM_WORLD_RANK", "rank")
        local_rank = stated("OMPI_COMM_WORLD_LOCAL_RANK", "rank")
        found = (
            "mpiexec",
            _needed("PMI_RANK") if rank is None else rank,
            mpi_size,
            (stated("MPI_LOCALRANKID", "rank") or 0) if local_rank is None else local_rank,
            stated("OMPI_COMM_WORLD_LOCAL_SIZE") or stated("MPI_LOCALNRANKS") or 1,
        )
        if not env.get("MASTER_ADDR"):
            if found[4] < mpi_size:
                raise UserError(
                    "mpiexec over several nodes: set MASTER_ADDR to the first node's address"
                )
            env["MASTER_ADDR"] = "127.0.0.1"
        env["MASTER_PORT"] = env.get("MASTER_PORT") or "29500"
    else:
        found = ("alone", 0, 1, 0, 1)
    _, rank, size, _, _ = found
    if size == 1 and max(step_tasks, mpi_size) > 1:
        raise UserError(
            f"{max(step_tasks, mpi_size)} tasks were started and each thinks it is alone "
            f"(WORLD_SIZE=1): start one launcher a node, or unset RANK and WORLD_SIZE"
        )
    if not 0 <= rank < size:
        raise UserError(f"RANK={rank} does not fit WORLD_SIZE={size}")
    return found


def _needed(name: str, what: str = "rank") -> int:
    """What a launcher's variable has to state."""
    found = stated(name, what)
    if found is None:
        raise UserError(f"{name}: is not set; deepspeed, torchrun, srun and mpiexec set theirs")
    return found


def _slurm_tasks_on_node() -> int:
    """SLURM_STEP_TASKS_PER_NODE is like `8(x3),4`; this node's entry."""
    name = "SLURM_STEP_TASKS_PER_NODE"
    counts: list[int] = []
    for part in os.environ.get(name, "").split(","):
        if (told := re.fullmatch(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", part)) is None:
            raise UserError(f"{name}={short(os.environ.get(name, ''))}: is not as 8(x3),4")
        counts += [int(told[1])] * int(told[2] or 1)
    node = _needed("SLURM_NODEID", "node")
    if node >= len(counts):
        raise UserError(f"SLURM_NODEID={node} does not fit {name} of {len(counts)} nodes")
    return counts[node]


def _first_slurm_host() -> str:
    nodes = os.environ.get("SLURM_STEP_NODELIST", "")
    try:
        hosts = subprocess.run(
            ["scontrol", "show", "hostnames", nodes],
            capture_output=True,
            text=True,
            errors="replace",
            check=True,
        ).stdout.split()
    except (OSError, subprocess.CalledProcessError):
        hosts = []
    if not hosts:
        raise UserError(f"cannot expand the node list {nodes} by scontrol: set MASTER_ADDR")
    return hosts[0]


def open_files(size: int) -> int:
    """What rank 0 of so many wants: store, two gloo groups, watchdog, and files."""
    return 4 * size + 512


def _allow_connections(rank: int, size: int) -> None:
    """All ranks are connected with rank 0: in the store, by two gloo groups and the watchdog. The
    usual limit of 1,024 open files a process is too small for 256 of them."""
    wanted = open_files(size)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = hard == resource.RLIM_INFINITY or hard >= wanted
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted if enough else hard, hard))
        if rank == 0 and not enough:
            raise UserError(
                f"open files: rank 0 of {size} ranks wants {wanted} on {socket.gethostname()}, the "
                f"hard limit is {hard} (ulimit -Hn)"
            )


def _choose_device(device: str, local_rank: int) -> torch.device:
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError(
            "device: cuda is asked for but torch sees no GPU on "
            f"{socket.gethostname()}; `--set device=cpu` runs on the CPU (for a small model: "
            "configs/pretrain_demo.yaml)"
        )
    count = torch.cuda.device_count()
    # Under srun --gpus-per-task each process sees its own GPU as number 0.
    index = local_rank if count > 1 else 0
    if index >= count:
        raise UserError(f"local rank {local_rank} has no GPU: only {count} on this node")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _meet(rank: int, size: int, local_size: int, device: torch.device, refusal: str) -> dist.Store:
    """The store over which all ranks have met and found that none has a `refusal`, that all or none
    have a GPU, and that no two share one.

    gloo binds to what the host's name resolves to, which on many systems is 127.0.1.1: of several
    nodes each takes the interface of its route to the others. Not every launcher tells how many
    processes a node has, so hosts are told apart by their names too.
    """
    if size == 1:
        return dist.HashStore()
    _check_meeting_place()
    store = _store(rank, size)
    meeting = dist.PrefixStore("meeting", store)
    host = socket.gethostname()
    me = f"rank {rank} on {host}"
    if refusal:
        meeting.set("wrong", refusal)
    elif wrong := _wrong_device(meeting, device, me):
        meeting.set("wrong", wrong)
    if meeting.compare_set("host", "", host).decode() != host:
        meeting.set("hosts differ", "")
    chosen = "GLOO_SOCKET_IFNAME" in os.environ
    own = None if chosen else _route_to(main_address())
    if own is not None:
        meeting.compare_set("address", "", own)
    if meeting.add("here", 1) == size:
        meeting.set("complete", "")
    meeting.wait(["complete"])
    if meeting.check(["wrong"]):
        wrong = meeting.get("wrong").decode()
        with contextlib.suppress(dist.DistError):
            if meeting.add("told", 1) == size:
                meeting.set("all told", "")
            if rank == 0:  # the store may end with this process, so it leaves last
                meeting.wait(["all told"], timedelta(seconds=30))
        raise UserError(wrong)
    across = size > local_size or meeting.check(["hosts differ"])
    if across and not chosen:
        if own is None and meeting.check(["address"]):
            own = _route_to(meeting.get("address").decode())
        interface = interface_of(own)
        if interface is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = interface
    return store


def _store(rank: int, size: int) -> dist.Store:
    """Of this start's ranks alone. That of torchrun's agent is there before its ranks, and stays
    with all that they left in it when they are started again (`--max-restarts`): there rank 0 has
    a store of its own, and leaves its port for the others."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        store, *_ = next(dist.rendezvous("env://", rank, size, timeout=TIMEOUT))
        store.set_timeout(TIMEOUT)
        return store
    agents, *_ = next(dist.rendezvous("env://", rank, size, timeout=AGENT_TIMEOUT))
    agents.set_timeout(TIMEOUT)
    host, deadline = main_address(), time.monotonic() + TIMEOUT.total_seconds()
    if rank == 0:
        store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
        agents.set("port of rank 0", str(store.port))
        return store
    while time.monotonic() < deadline:
        port = int(agents.get("port of rank 0"))
        with contextlib.suppress(OSError):  # of one that is gone
            socket.create_connection((host, port), 10).close()
            store = dist.TCPStore(host, port, is_master=False, timeout=AGENT_TIMEOUT)
            store.set_timeout(TIMEOUT)
            return store
        time.sleep(0.2)
    raise dist.DistStoreError("rank 0 did not come")


def _wrong_device(meeting: dist.Store, device: torch.device, me: str) -> str:
    """What is wrong with the device of the rank that is called `me`, by the words of the others."""
    first = meeting.compare_set("device", "", f"{me} takes {device.type}").decode()
    if not first.endswith(f" {device.type}"):
        mend = "mend the host where torch sees no GPU (nvidia-smi), or take device=cpu on all"
        return f"{first}, {me} {device.type}: {mend}"
    if device.type == "cuda":
        uuid = torch.cuda.get_device_properties(device).uuid
        other = meeting.compare_set(f"{socket.gethostname()} {uuid}", "", me).decode()
        if other != me:
            mend = "start one process a GPU, and let each see its own"
            return f"{other} and {me} share one GPU ({uuid}): {mend}"
    return ""


def is_port(text: str) -> bool:
    return bool(re.fullmatch("[0-9]{1,5}", text)) and 0 < int(text) < 1 << 16


def _check_meeting_place() -> None:
    """UserError where the environment says not where rank 0 is."""
    way = "deepspeed, torchrun, srun and mpiexec set it"
    if not os.environ.get("MASTER_ADDR"):
        raise UserError(f"MASTER_ADDR: is not set: set it to the address of rank 0's host; {way}")
    port = os.environ.get("MASTER_PORT", "")
    if not is_port(port):
        said = f"={short(port)}: is no port" if port else ": is not set"
        raise UserError(f"MASTER_PORT{said}: set it to a number from 1 to 65535; {way}")


def _route_to(host: str) -> str | None:
    """The address that packets from here to `host` carry; None if there is none or it stays in
    this machine, as on the main node where its name leads to 127.0.1.1."""
    with contextlib.suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(address)  # sends nothing
                own = probe.getsockname()[0]
                if not own.startswith("127.") and own != "::1":
                    return own
    return None


def _rendezvous_error(error: Exception) -> UserError:
    address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    text = str(error)
    if "EADDRINUSE" in text or "address already in use" in text.lower():
        return UserError(
            f"port in use: {address} is taken by another program or run; choose another by "
            "`deepspeed --master_port N` (or MASTER_PORT=N)"
        )
    way = ""
    if "gloo" in text.lower():
        name = os.environ.get("GLOO_SOCKET_IFNAME", "not set")
        way = f" (GLOO_SOCKET_IFNAME, the interface by which nodes reach each other: {name})"
    return TryAgain(f"the ranks cannot meet at {address}: {' '.join(text.split())[:800]}{way}")
