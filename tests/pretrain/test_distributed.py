"""Who am I, what do we all agree on, and when do we stop: in real gloo groups and environments."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from core.errors import TryAgain, UserError, main_guard
from pretrain import distributed, run
from pretrain.distributed import StopRequest, World, errors_shared, require_same
from pretrain.machine import Launchers, launchers
from tests import gloo
from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[2]


def world_of(rank: int, size: int) -> World:
    return World(rank, size, rank, size, "test", torch.device("cpu"), dist.group.WORLD)


def agreement(rank: int, size: int) -> dict[str, str]:
    world, said = world_of(rank, size), {}
    require_same(world, "x", "equal")
    for length in (0, 200, 256, 5000):  # with the length in one message, or in two
        assert distributed.gather(world, f"{rank}" * length) == ["0" * length, "1" * length]
    for name, act in {
        "differs": lambda: require_same(world, "the plan", f"digest-{rank}"),
        "one rank": lambda: fails_on(world, 1, UserError("shard 3 is damaged")),
        "killed": lambda: fails_on(world, 1, TryAgain("rank 0 is gone")),
        "full disk": lambda: fails_on(world, 0, OSError(28, "No space left on device", "/x/y")),
    }.items():
        try:
            act()
            said[name] = "nothing"
        except UserError as error:
            said[name] = str(error) if error.code == UserError.code else (error.code, str(error))
    return said


def fails_on(world: World, rank: int, error: Exception) -> None:
    with errors_shared(world):
        if world.rank == rank:
            raise error


def test_an_error_of_one_rank_is_the_error_of_all() -> None:
    first, second = gloo.run(2, agreement)
    assert first == second
    assert first["differs"] == "the ranks disagree on the plan: rank 0: digest-0, rank 1: digest-1"
    assert first["one rank"] == "shard 3 is damaged"
    assert first["killed"] == (TryAgain.code, "rank 0 is gone")
    assert first["full disk"].startswith("/x/y: the disk is full; ")


def stop_steps(rank: int, size: int, number: int, at_rank: int) -> tuple[int, str]:
    signal.signal(number, signal.SIG_DFL)  # nohup, where these tests run under it, ignores SIGHUP
    stop = StopRequest(world_of(rank, size))
    for step in range(200):
        if step == 5 and rank == at_rank:
            os.kill(os.getpid(), number)
        time.sleep(0.002 * (rank + 1))  # ranks do not arrive together
        agreed = stop.agreed()
        if agreed is not None:
            stop.collect()
            stop.close()
            return step, agreed.name
    raise AssertionError("nobody stopped")


def left_alone() -> None:
    distributed.start("cpu", began_under=[os.getpid()])  # in place of one that has died


def left_while_it_imported(*began_under: int) -> None:
    run.BEGAN_UNDER = list(began_under)
    sys.argv[1:] = ["--config", str(ROOT / "configs/pretrain_demo.yaml"), "--set", "device=cpu"]
    run.main()


def left_by_a_parent() -> None:
    left_while_it_imported(os.getpid())


def left_by_a_runner() -> None:
    left_while_it_imported(os.getppid(), os.getpid())


def meet_and_say_who(number: int) -> int:
    world = distributed.start("cpu")
    assert distributed.gather(world, str(number)) == [str(number)] * 2
    os._exit(85)


def test_ranks_that_torchrun_starts_again_meet_over_the_store_of_those_before() -> None:
    store, env = gloo.agent()
    for number in range(3):
        ranks = [gloo.Process(meet_and_say_who, number, env=env | {"RANK": rank}) for rank in "10"]
        assert [rank.end()[0] for rank in ranks] == [85, 85]
    store.kill()


def left_before_it_began() -> int:
    """Its parent is what took it over; the store of torchrun went with that."""
    distributed.AGENT_TIMEOUT = timedelta(seconds=1)
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "1"}
    return main_guard(lambda: distributed.start("cpu") and 0)


@pytest.mark.parametrize(
    ("rank", "why"),
    [
        (left_alone, "the launcher is gone"),
        (left_by_a_parent, "the launcher is gone"),
        (left_by_a_runner, "the launcher is gone"),
        (left_before_it_began, "the ranks cannot meet at 127.0.0.1"),
    ],
)
def test_a_rank_waits_for_no_others_when_its_launcher_is_gone(rank: Any, why: str) -> None:
    port = str(free_port())  # where no store is
    env = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    code, _, said = gloo.Process(rank, env=env).end()
    assert code == TryAgain.code and why in said


STARTED = """
import sys, time, psutil
from pretrain.machine import left_by_deepspeed
above = int(sys.argv[1])
while above and psutil.Process(above).status() != psutil.STATUS_ZOMBIE:
    time.sleep(0.01)
print(left_by_deepspeed())
"""


@pytest.mark.parametrize(
    ("tree", "left"),
    [
        ('{run} 0', False),
        ('sh -c "{run} 0; :"; :', False),
        ('{run} $$ & exit', True),
        ('sh -c "{run} $$; :" & exit', True),
        ('setsid {run} $$ & exit', False),
        ('timeout 50 {run} $$ & exit', True),
        ('timeout 50 {run} 0; :', False),
        ('sh -c "sh -c \\"{run} $$; :\\"; :" & exit', True),
        ('sh -c "sh -c \\"{run} 0; :\\"; :"; :', False),
    ],
)  # fmt: skip
def test_a_runner_that_ended_before_its_ranks_began_is_missed(
    tmp_path: Path, tree: str, left: bool
) -> None:
    script = tmp_path / "started.py"
    script.write_text(STARTED)
    run = f"{sys.executable} {script}"
    env = os.environ | {"CROSS_RANK": "0", "PYTHONPATH": str(ROOT)}
    said = subprocess.run(
        ["sh", "-c", tree.format(run=run)], env=env, start_new_session=True, text=True,
        stdout=subprocess.PIPE, timeout=60,
    ).stdout  # fmt: skip
    assert said.strip() == str(left)


TREE = """
import json, os, subprocess, sys
from pretrain.machine import launchers
below, above = json.loads(os.environ["BELOW"]), json.loads(os.environ["ABOVE"])
if below:
    words = below.pop(0)
    env = {"BELOW": json.dumps(below), "ABOVE": json.dumps([os.getpid(), *above])}
    command = [sys.executable, *words.split(" ")]
    if words == "mpiexec":
        command = [os.path.dirname(sys.executable) + "/mpiexec", "-n", "1", sys.executable, "x"]
    if words.startswith("bash"):
        command = [*words.split(" "), sys.executable]
    sys.exit(subprocess.run(command, env=os.environ | env, stdin=subprocess.DEVNULL).returncode)
found = launchers()
of_another = found == [os.getppid()] and found[0] not in above
print("parent" if of_another else [above.index(pid) for pid in found])
"""
SCRIPT = 'export ABOVE="[$$, ${ABOVE#[}"; $1 x; exit $?'
LAUNCH = "-u -m deepspeed.launcher.launch run.py"


@pytest.mark.parametrize(
    ("tree", "found"),
    [
        (["torchrun x", "x", "mpiexec"], "parent"),
        (["start /deepspeed", "start deepspeed", "run.py"], [0]),
        (["bin/deepspeed run.py", LAUNCH, "run.py"], [0, 1]),
        (["ds run.py", LAUNCH, "script", "another", "run.py"], [0, 1, 2, 3]),
        (["sh cd;\tpython\t-m\tdeepspeed.launcher.launch\trun.py", LAUNCH, "run.py"], [0, 1]),
        (["starter.py", LAUNCH, "run.py"], [0]),
        (["ds run.py", "bin/torchrun run.py", "run.py"], [0]),
        (["ds x", "-m torch.distributed.run x", "script", "x"], [0, 1]),
        (["ds x", "-u -X dev torch/distributed/run.py x", "script", "x"], [0, 1]),
        (["-mtorch.distributed.run x", "script", "x"], [0, 1]),
        (["-um torch.distributed.run x", "script", "x"], [0, 1]),
        (["torchrun x", "x", "torchrun x", "x"], [0]),
        (["ds x", LAUNCH, "x", "ds run.py", LAUNCH, "run.py"], [0, 1]),
        (["torchrun x", "script run_dir=/torchrun", "run.py run_dir=/torchrun"], [0, 1]),
        (["ds run.py", LAUNCH, "script torchrun", "run.py torchrun"], [0, 1, 2]),
        (["ds run.py", LAUNCH, "bash bin/torchrun"], [0, 1, 2]),
        (["torchrun x", "bash accelerate"], [0, 1]),
    ],
)
def test_a_launcher_is_known_among_the_processes_above(
    tmp_path: Path, tree: list[str], found: list[int] | str
) -> None:
    """Below a process that is not looked at, each a Python with these words, or a script."""
    files = [words.split()[0] for words in tree if words[0] != "-" and words[:4] != "bash"]
    for file in ("x", "deepspeed/launcher/launch.py", "torch/distributed/run.py", *files):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(TREE)
    for words in tree:
        if words.startswith("bash"):
            (tmp_path / words[5:]).parent.mkdir(exist_ok=True)
            (tmp_path / words[5:]).write_text(SCRIPT)
    for package in ("deepspeed", "deepspeed/launcher", "torch", "torch/distributed"):
        (tmp_path / package / "__init__.py").touch()
    paths = f"{tmp_path}:{ROOT}"
    said = subprocess.run(
        [sys.executable, "x"], text=True, stdout=subprocess.PIPE, timeout=60, cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": paths, "BELOW": json.dumps(tree), "ABOVE": "[]"},
    ).stdout  # fmt: skip
    assert said.strip() == str(found)


def test_where_proc_tells_of_others_the_parent_is_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in a container that sees the /proc of its host."""
    monkeypatch.setattr(os, "getppid", lambda: 99999999)
    began_under = Launchers(launchers())
    assert not any(began_under.gone() for _ in range(3))
    monkeypatch.setattr(os, "getppid", lambda: 99999998)
    assert [began_under.gone() for _ in range(2)] == [False, True]


def told_to_stop_at_its_end(number: int, folder: str) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a `&` ignores it
    distributed.finish = lambda code: signal.raise_signal(number)
    sys.argv[1:] = ["--config", str(ROOT / "configs/pretrain_demo.yaml"), "--set", "device=cpu"]
    sys.argv += ["data.dir=/nowhere", f"run_dir={folder}"]
    run.main()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_at_the_end_changes_no_exit_code(number: int, tmp_path: Path) -> None:
    process = gloo.Process(told_to_stop_at_its_end, number, str(tmp_path / "run"), env={})
    code, _, said = process.end()
    assert (code, said.count("\n")) == (2, 1), said


def waits_for_the_other() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a `&` ignores it
    distributed.start("cpu")


@pytest.mark.parametrize("rank", [0, 1])
def test_ctrl_c_ends_a_rank_that_waits_for_another(rank: int) -> None:
    port = free_port()
    meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    process = gloo.Process(waits_for_the_other, env=meeting | {"RANK": str(rank)})
    if rank == 0:
        while True:
            with contextlib.suppress(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port)).close()
                break
            time.sleep(0.1)
    else:
        with socket.create_server(("127.0.0.1", port)) as store:
            store.accept()[0].close()
            store.accept()[0].close()
    process.signal(signal.SIGINT)
    assert process.end(30)[0] == -signal.SIGINT


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_on_one_rank_stops_all_at_the_same_step(number: signal.Signals) -> None:
    results = gloo.run(3, stop_steps, number, 1)
    assert len(set(results)) == 1
    assert results[0] == (6, number.name)


def identify(monkeypatch: pytest.MonkeyPatch, env: dict[str, str]) -> str:
    for name in [
        n
        for n in os.environ
        if n.startswith(("RANK", "LOCAL_", "WORLD", "SLURM", "PMI", "OMPI_", "MPI_LOCAL"))
    ]:
        monkeypatch.delenv(name)
    meeting = {"MASTER_ADDR": "", "MASTER_PORT": ""}  # as if not set, and taken back at the end
    for name, value in (meeting | env).items():
        monkeypatch.setenv(name, value)
    try:
        return " ".join(map(str, distributed.identify()))
    except UserError as error:
        return f"error: {error}"


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({}, "alone 0 1 0 1"),
        (
            {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"},
            "deepspeed 3 4 1 2",
        ),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
             "TORCHELASTIC_RUN_ID": "x"},
            "torchrun 1 2 1 2",
        ),
        (
            {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1",
             "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "4(x2)", "MASTER_ADDR": "node0"},
            "srun 5 8 1 4",
        ),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
         "mpiexec 1 2 1 2"),
        # A batch script's own variables are not a step's: one process alone.
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "16"}, "alone 0 1 0 1"),
    ],
)  # fmt: skip
def test_each_launcher_is_understood(
    monkeypatch: pytest.MonkeyPatch, env: dict[str, str], said: str
) -> None:
    assert identify(monkeypatch, env) == said


def test_a_job_has_a_port_that_no_connection_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    step = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "MASTER_ADDR": "node0"}
    step |= {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"}
    for job in (0, 15_000, 39_999):
        identify(monkeypatch, step | {"SLURM_JOB_ID": str(job)})
        assert 10_000 <= int(os.environ["MASTER_PORT"]) < 32_768


def test_tasks_that_think_they_are_alone_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    task = {"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "3", "SLURM_LOCALID": "3"}
    said = identify(monkeypatch, alone | task)
    assert said.startswith("error: 8 tasks were started and each thinks it is alone")
    said = identify(monkeypatch, {"RANK": "4", "WORLD_SIZE": "4"})
    assert said == "error: RANK=4 does not fit WORLD_SIZE=4"


TWO = {"RANK": "0", "WORLD_SIZE": "2"}
TASK = {
    "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0", "SLURM_NODEID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "2", "MASTER_ADDR": "node0",
}  # fmt: skip
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}
HYDRA = {"PMI_SIZE": "2", "PMI_RANK": "0"}


@pytest.mark.parametrize(
    ("env", "name"),
    [
        (TWO, "RANK"), (TWO, "WORLD_SIZE"), (TWO, "LOCAL_RANK"), (TWO, "LOCAL_WORLD_SIZE"),
        (TWO, "LOCAL_SIZE"), (TASK, "SLURM_PROCID"), (TASK, "SLURM_LOCALID"),
        (TASK, "SLURM_NODEID"), (TASK, "SLURM_STEP_NUM_TASKS"),
        (TASK, "SLURM_STEP_TASKS_PER_NODE"), (OPEN_MPI, "OMPI_COMM_WORLD_RANK"),
        (OPEN_MPI, "OMPI_COMM_WORLD_SIZE"), (OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK"),
        (OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE"), (HYDRA, "PMI_RANK"), (HYDRA, "PMI_SIZE"),
        (HYDRA, "MPI_LOCALRANKID"), (HYDRA, "MPI_LOCALNRANKS"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("value", ["x", "1.5", "-1", "²", "9" * 5000])
def test_a_launcher_s_number_that_is_none_is_one_line(
    monkeypatch: pytest.MonkeyPatch, env: dict[str, str], name: str, value: str
) -> None:
    said = identify(monkeypatch, env | {name: value})
    assert said.startswith(f"error: {name}={value[:57]}") and len(said) < 200
    assert ": is n" in said


@pytest.mark.parametrize(
    ("env", "name"),
    [
        (TWO, "RANK"), (TWO, "WORLD_SIZE"), (TASK, "SLURM_PROCID"), (TASK, "SLURM_LOCALID"),
        (TASK, "SLURM_NODEID"), (TASK, "SLURM_STEP_TASKS_PER_NODE"),
        (OPEN_MPI, "OMPI_COMM_WORLD_RANK"), (HYDRA, "PMI_RANK"),
    ],
)  # fmt: skip
def test_a_launcher_s_number_that_is_not_there_is_one_line(
    monkeypatch: pytest.MonkeyPatch, env: dict[str, str], name: str
) -> None:
    told = "PMI_RANK" if name.startswith("OMPI") else name
    assert identify(monkeypatch, env | {name: ""}).startswith(f"error: {told}")
    if env is not TWO:  # without one of these the process is alone
        monkeypatch.delenv(name)
        without = {key: value for key, value in env.items() if key != name}
        assert identify(monkeypatch, without).startswith(f"error: {told}")


@pytest.mark.parametrize("env", [TWO, TASK, OPEN_MPI, HYDRA])
def test_a_rank_has_to_fit_the_size(monkeypatch: pytest.MonkeyPatch, env: dict[str, str]) -> None:
    name = next(n for n in env if n.endswith(("RANK", "PROCID")))
    env = env | {name: "2", "MASTER_ADDR": "node0"}
    assert identify(monkeypatch, env) == "error: RANK=2 does not fit WORLD_SIZE=2"


def test_a_step_s_nodes_have_to_be_as_many_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "SLURM_NODEID=1 does not fit" in identify(monkeypatch, TASK | {"SLURM_NODEID": "1"})


def start_alone() -> int:
    return main_guard(lambda: distributed.start("cpu") and 0)


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"MASTER_PORT": "29500"}, "MASTER_ADDR: is not set: set it to the address of rank 0's"),
        ({"MASTER_ADDR": "", "MASTER_PORT": "29500"}, "MASTER_ADDR: is not set: "),
        ({"MASTER_ADDR": "127.0.0.1"}, "MASTER_PORT: is not set: set it to a number from 1 to"),
        *(
            ({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}, f"MASTER_PORT{told}: set it to")
            for port, told in [("", ": is not set"), ("9" * 5000, f"={'9' * 57}...: is no port")]
            + [(port, f"={port}: is no port") for port in ("x", "0", "70000", "-1", "1.5", "²")]
        ),
    ],
)
def test_a_meeting_place_that_is_none_is_one_line(
    monkeypatch: pytest.MonkeyPatch, env: dict[str, str], said: str
) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (TWO | env).items():
        monkeypatch.setenv(name, value)
    for name in ("LOCAL_RANK", "LOCAL_SIZE", "TORCH_GLOO_LAZY_INIT", "DS_ACCELERATOR"):
        monkeypatch.setenv(name, "")  # `start` writes them; taken back at the end
    with pytest.raises(UserError) as caught:
        distributed.start("cpu")
    assert str(caught.value).startswith(said) and "torchrun" in str(caught.value)


def test_a_port_in_use_is_one_clear_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        env = {
            "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1]),
        }  # fmt: skip
        code, _, err = gloo.Process(start_alone, env=env).end()
    assert code == 2
    lines = [line for line in err.splitlines() if line.startswith("error:")]
    assert len(lines) == 1 and "port in use: 127.0.0.1:" in lines[0]
    assert "Traceback" not in err


def start_on_gpus(uuids: list[str], device: str) -> int:
    """`start` where the GPUs with these uuids are seen; gloo in NCCL's place."""
    torch.cuda.is_available = lambda: bool(uuids)
    torch.cuda.device_count = lambda: len(uuids)
    torch.cuda.set_device = lambda index: None
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(uuid=uuids[device.index])
    group = dist.init_process_group

    def init(backend: str, device_id: torch.device, **rest: Any) -> None:
        print(json.dumps([backend, str(device_id)]), flush=True)
        group("gloo", **rest)

    def run() -> None:
        world = distributed.start(device)
        names = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")
        found = [os.environ.get(n) for n in names]
        print(json.dumps([world.local_rank, str(world.device), found]))
        dist.barrier()  # the store ends with rank 0

    dist.init_process_group = init
    return main_guard(run)


def on_gpus(gpus: list[list[str]], device: str = "auto", **more: str) -> list[tuple[int, str, str]]:
    """(exit code, stdout, stderr) of each rank of a host, where rank r sees the GPUs `gpus[r]`."""
    env = more | {
        "WORLD_SIZE": "2", "LOCAL_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }  # fmt: skip
    ranks = [
        gloo.Process(
            start_on_gpus, seen, device, env=env | dict.fromkeys(("RANK", "LOCAL_RANK", *more), r)
        )
        for r, seen in zip("01", gpus, strict=True)
    ]
    return [rank.end() for rank in ranks]


def test_a_rank_that_sees_one_gpu_tells_deepspeed_its_index() -> None:
    # srun --gpus-per-task=1: each rank's GPU is its number 0.
    done = on_gpus([["GPU-a"], ["GPU-b"]], OMPI_COMM_WORLD_LOCAL_RANK="")
    for rank, (code, out, err) in enumerate(done):
        assert code == 0, err
        group, found = map(json.loads, out.splitlines())
        assert group == ["nccl", "cuda:0"]
        assert found == [rank, "cuda:0", ["0", "0"]]
    done = on_gpus([["GPU-a", "GPU-b"]] * 2)
    for rank, (_, out, _) in enumerate(done):
        group, found = map(json.loads, out.splitlines())
        assert group == ["nccl", f"cuda:{rank}"]
        assert found == [rank, f"cuda:{rank}", [str(rank), None]]


@pytest.mark.parametrize(
    ("other", "device", "why"),
    [
        ([], "cuda", r"device: cuda is asked for but torch sees no GPU on \S+; "),
        (["GPU-a"], "auto", r"rank (0|1) on \S+ and rank (0|1) on \S+ share one GPU \(GPU-a\)"),
        ([], "auto", r"rank (0|1) on \S+ takes (cuda|cpu), rank (0|1) on \S+ (cuda|cpu)"),
    ],
)
def test_ranks_that_share_a_gpu_or_lack_one_are_named(
    other: list[str], device: str, why: str
) -> None:
    said = set()
    for code, out, err in on_gpus([["GPU-a"], other], device):
        assert code == 2 and out == "", err
        (line,) = [line for line in err.splitlines() if line.startswith("error:")]
        assert re.search(why, line) and "Traceback" not in err
        said.add(line)
    assert len(said) == 1


def test_too_few_open_files_are_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    ranks = limits[1]  # each is connected with rank 0 more than once
    for name, value in {"RANK": 0, "WORLD_SIZE": ranks, "LOCAL_RANK": 0, "LOCAL_SIZE": 8}.items():
        monkeypatch.setenv(name, str(value))
    try:
        line = f"open files: rank 0 of {ranks} ranks wants .* the hard limit is {ranks}"
        with pytest.raises(UserError, match=line):
            distributed.start("cpu")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_gpu_that_is_not_there_is_one_clear_line() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(UserError, match="device: cuda is asked for but torch sees no GPU"):
        distributed.start("cuda")
