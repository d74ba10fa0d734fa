"""Who hangs, died or failed is named by every rank that still runs, which then asks for a requeue.

The real training under these faults is in tests/soak.py; here the processes only step.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from core.errors import UserError
from pretrain import distributed, preflight, run, trackers, train
from pretrain.config import PretrainConfig
from pretrain.machine import launchers
from pretrain.watchdog import Progress, Watchdog
from tests import gloo
from tests.ports import free_port

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import os, signal, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from pretrain import distributed
from pretrain.watchdog import Progress, Watchdog
fault, culprit = sys.argv[1], int(sys.argv[2])
world = distributed.start("cpu")
progress = Progress()
watchdog = Watchdog(world, 5, Path(sys.argv[3]), progress)
try:
    for step in range(1, 10_000):
        progress.now(step, "a step")
        if step == 20 and world.rank == culprit:
            print("fault", flush=True)
            if fault == "hangs":
                time.sleep(1000)
            if fault == "raises":
                raise RuntimeError("out of memory")
        if fault in ("ends", "stopped last") and step == 30:
            break
        dist.all_reduce(torch.ones(2))
        time.sleep(0.02)
except Exception as error:
    watchdog.failed(error)
    print(f"Traceback: {error}", file=sys.stderr, flush=True)
    watchdog.close(1, str(error))
    distributed.finish(1)
if fault == "stopped last" and world.rank == culprit:
    os.kill(os.getpid(), signal.SIGSTOP)
distributed.meet(world)
watchdog.close(0)
distributed.finish(0)
"""


def begin(fault: str, culprit: int, folder: Path) -> list[subprocess.Popen[str]]:
    """Three ranks of PROGRAM."""
    env = os.environ | {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "3",
        "LOCAL_SIZE": "3", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    return [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, fault, str(culprit), str(folder)], cwd=ROOT,
            env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in range(3)
    ]  # fmt: skip


@pytest.mark.parametrize("culprit", [0, 2])
@pytest.mark.parametrize("fault", ["hangs", "stopped", "killed", "raises", "ends", "stopped last"])
def test_the_culprit_is_named(tmp_path: Path, fault: str, culprit: int) -> None:
    processes = begin(fault, culprit, tmp_path)
    guilty = processes[culprit]
    assert guilty.stdout.readline() == "fault\n"
    if fault in ("stopped", "killed"):
        guilty.send_signal(signal.SIGSTOP if fault == "stopped" else signal.SIGKILL)
    said = [p.communicate(timeout=120)[1] for p in processes]
    codes = [p.returncode for p in processes]
    own = {"hangs": 85, "raises": 1, "ends": 0}.get(fault, -9)
    others = [code for rank, code in enumerate(codes) if rank != culprit]
    assert codes[culprit] == own and others == [0 if fault == "ends" else 85] * 2, said
    words = {
        "hangs": "made no progress for", "stopped": "is silent for", "killed": "died at step",
        "raises": "failed at step 20, in a step: RuntimeError: out of memory",
        "stopped last": "is silent for",
    }  # fmt: skip
    for rank, text in enumerate(said):
        assert ("Traceback" in text) == (fault == "raises" and rank == culprit), text
        if rank != culprit and fault != "ends":
            assert text.count("watchdog: ") == 1 and f"watchdog: rank {culprit} on " in text
            assert re.search(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d watchdog: ", text, re.M)
            assert words[fault] in text and f"pid {guilty.pid}" in text
    if fault == "hangs":
        stack = (tmp_path / f"stack-rank-{culprit}.txt").read_text()
        line = PROGRAM[: PROGRAM.index("time.sleep(1000)")].count("\n") + 1
        assert f'"<string>", line {line} in <module>' in stack, stack


def test_ranks_that_are_suspended_together_go_on(tmp_path: Path) -> None:
    processes = begin("ends", 0, tmp_path)
    assert processes[0].stdout.readline() == "fault\n"
    for number, seconds in ((signal.SIGSTOP, 8), (signal.SIGCONT, 0)):
        for process in processes:
            process.send_signal(number)
        time.sleep(seconds)
    said = [p.communicate(timeout=120)[1] for p in processes]
    assert [p.returncode for p in processes] == [0] * 3, said


@pytest.mark.parametrize("reader", ["is gone", "does not read"])
def test_a_rank_ends_though_nobody_reads_why(tmp_path: Path, reader: str) -> None:
    read_end, write_end = os.pipe()
    if reader == "is gone":
        os.close(read_end)
    else:
        os.set_blocking(write_end, False)
        for size in (4096, 1):
            with contextlib.suppress(BlockingIOError):
                while True:
                    os.write(write_end, b"x" * size)
        os.set_blocking(write_end, True)
    env = os.environ | {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2",
        "LOCAL_SIZE": "2", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, "killed", "1", str(tmp_path)], cwd=ROOT,
            env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, text=True,
            stdout=subprocess.PIPE, stderr=write_end,
        )
        for rank in range(2)
    ]  # fmt: skip
    assert processes[1].stdout.readline() == "fault\n"
    processes[1].kill()
    try:
        assert processes[0].wait(60) == 85
    finally:
        processes[0].kill()
        [p.communicate() for p in processes]
        os.close(write_end)


@pytest.mark.parametrize("there", ["a FIFO", "a link"])
def test_stacks_take_the_place_of_what_stands_there(tmp_path: Path, there: str) -> None:
    run_dir, other, stacks = tmp_path / "run", tmp_path / "other", tmp_path / "run/stack-rank-0.txt"
    run_dir.mkdir()
    other.write_text("precious")
    os.mkfifo(stacks) if there == "a FIFO" else stacks.symlink_to(other)
    processes = begin("killed", 2, run_dir)
    assert processes[2].stdout.readline() == "fault\n"
    processes[2].kill()
    try:
        assert [p.wait(60) for p in processes] == [85, 85, -9]
    finally:
        [p.kill() for p in processes]
        [p.communicate() for p in processes]
    assert "died at step" in stacks.read_text() and not stacks.is_symlink()
    assert other.read_text() == "precious"


def test_a_launcher_that_dies_takes_its_ranks_with_it(tmp_path: Path) -> None:
    launcher = (
        "import os, subprocess, sys\n"
        "ranks = [subprocess.Popen([sys.executable, '-c', sys.argv[1], 'no', '0', sys.argv[2]],\n"
        "    env=os.environ | {'RANK': str(r), 'LOCAL_RANK': str(r)}) for r in range(2)]\n"
        "print(*[p.pid for p in ranks], flush=True)\n"
        "[p.wait() for p in ranks]\n"
    )
    env = os.environ | {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2",
        "LOCAL_SIZE": "2", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-c", launcher, PROGRAM, str(tmp_path)], cwd=ROOT, env=env, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert process.stdout.readline() == "fault\n"  # rank 0 steps
    process.kill()
    said = process.communicate(timeout=120)[1]  # the pipes end with the last rank
    assert "the launcher of rank" in said
    gone(pids)


def orphan() -> None:
    world = distributed.World(0, 1, 0, 1, "deepspeed", torch.device("cpu"), None)
    Watchdog(world, 5, Path("/nowhere"), Progress(), began_under=[os.getpid()])
    time.sleep(30)


def test_a_launcher_that_died_before_the_ranks_met_is_missed() -> None:
    code, _, said = gloo.Process(orphan, env={}).end()
    assert code == -signal.SIGTERM and "the launcher of rank 0" in said


def shares_an_error(folder: str) -> None:
    """Training in which all ranks meet a mistake, after which rank 0 closes its trackers."""

    class Trainer:
        def __init__(self, config: object, world: distributed.World, *rest: object) -> None:
            self.world = world

        def run(self, stop_at_step: int | None) -> int:
            try:
                with distributed.errors_shared(self.world):
                    raise UserError("shard 3 is damaged")
            finally:
                time.sleep(7 if self.world.is_main else 0)

    trackers.PATIENCE = 3.0
    train.Trainer, preflight.check = Trainer, lambda *_: None
    run.BEGAN_UNDER = launchers()
    sys.argv[1:] = ["--config", str(ROOT / "configs/pretrain_demo.yaml")]
    for key in ("device=cpu", f"run_dir={folder}", "logging.trackers=[mlflow]"):
        sys.argv += ["--set", key]
    run.main()


def test_a_shared_error_waits_for_the_trackers_of_rank_0(tmp_path: Path) -> None:
    env = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        gloo.Process(shares_an_error, str(tmp_path / "run"), env=env | {"RANK": rank})
        for rank in "01"
    ]
    code, _, said = ranks[0].end()
    assert code == 2 and said == "error: shard 3 is damaged\n"
    code, _, said = ranks[1].end()  # no launcher ends it sooner
    assert code == 2 and said == ""


def trains_nothing(folder: str, words: list[str]) -> None:
    class Trainer:
        def __init__(self, *_: object) -> None:
            pass

        def run(self, stop_at_step: int | None) -> int:
            return 0

    train.Trainer, preflight.check = Trainer, lambda *_: None
    trains(folder, *words)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("watchdog_seconds", ["--set", "watchdog_seconds=0"]),
        ("--stop-at-step", ["--stop-at-step", "7"]),
    ],
)
@pytest.mark.parametrize("other", [0, 1])
def test_ranks_that_were_started_differently_do_not_wait_for_each_other(
    tmp_path: Path, name: str, words: list[str], other: int
) -> None:
    env = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        gloo.Process(
            trains_nothing, str(tmp_path / "run"), words if rank == other else [],
            env=env | {"RANK": str(rank)},
        )
        for rank in range(2)
    ]  # fmt: skip
    for rank in ranks:
        code, _, said = rank.end(30)
        assert code == 2 and f"error: the ranks disagree on {name}: rank 0: " in said


def signals_itself(folder: str, rank: int, where: str, number: int) -> None:
    """Of two ranks one gets a signal at a place of the start, at which the other waits for it."""

    def place(_: object, world: distributed.World) -> None:
        if world.rank == rank:
            os.kill(os.getpid(), number)
        distributed.gather(world, None)

    setattr(preflight, where, place)
    trains(folder)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_rank_that_ends_before_there_is_a_watchdog_is_waited_for_by_none(
    tmp_path: Path, number: int, rank: int
) -> None:
    arguments = str(tmp_path / "run"), rank, "set_threads", number
    env = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [gloo.Process(signals_itself, *arguments, env=env | {"RANK": r}) for r in "01"]
    assert ranks[rank].end()[0] == -number
    code, _, said = ranks[1 - rank].end()
    assert code == 85 and said.startswith("error: the ranks cannot meet at "), said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_ctrl_c_of_one_rank_before_training_is_no_error_of_the_others(
    tmp_path: Path, rank: int
) -> None:
    arguments = str(tmp_path / "run"), rank, "check", signal.SIGINT
    env = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [gloo.Process(signals_itself, *arguments, env=env | {"RANK": r}) for r in "01"]
    code, _, said = ranks[rank].end()
    assert (code, said) == (130, "stopped by Ctrl-C\n")
    code, _, said = ranks[1 - rank].end()
    assert code == 130 and re.fullmatch(f"error: rank {rank} on .*: stopped by Ctrl-C\n", said)


def is_stopped_while_it_asks(folder: str) -> None:
    """Ctrl-C, in the moment in which the watchdog is asked whose error it was."""
    failed = Watchdog.failed

    def asked(self: Watchdog, error: BaseException) -> None:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        failed(self, error)

    Watchdog.failed = asked
    signals_itself(folder, 1, "check", signal.SIGKILL)


def test_ctrl_c_where_another_rank_has_died_in_the_start_is_no_error_of_the_program(
    tmp_path: Path,
) -> None:
    env = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        gloo.Process(is_stopped_while_it_asks, str(tmp_path / "run"), env=env | {"RANK": r})
        for r in "01"
    ]
    assert ranks[1].end()[0] == -signal.SIGKILL
    code, _, said = ranks[0].end()
    assert code in (85, 130) and "stopped by Ctrl-C\n" in said and "Traceback" not in said, said


def stops_itself(folder: str, culprit: str, last: str) -> None:
    """Of two ranks one is stopped after what it did `last`, when the other may have gone."""
    owner = Watchdog if last == "close" else distributed
    does = getattr(owner, last)

    def then_stops(*arguments: object) -> None:
        does(*arguments)
        if os.environ["RANK"] == culprit:
            os.kill(os.getpid(), signal.SIGSTOP)

    class Trainer:
        def __init__(self, *_: object) -> None:
            setattr(owner, last, then_stops)
            if last == "meet":
                distributed.TIMEOUT = timedelta(seconds=1)

        def run(self, stop_at_step: int | None) -> int:
            return 0

    train.Trainer, preflight.check = Trainer, lambda *_: None
    trains(folder, "--set", "watchdog_seconds=1")


@pytest.mark.parametrize("culprit", "01")
@pytest.mark.parametrize("last", ["meet", "close"])
def test_a_rank_that_is_stopped_when_the_others_leave_ends_as_they_do(
    tmp_path: Path, last: str, culprit: str
) -> None:
    env = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    arguments = str(tmp_path / "run"), culprit, last
    ranks = [gloo.Process(stops_itself, *arguments, env=env | {"RANK": r}) for r in "01"]
    assert [rank.end(20) for rank in ranks] == [(0, "", "")] * 2


def fails_alone(folder: str, kind: type[Exception]) -> None:
    """Training in which a rank alone meets an error, and then closes its trackers."""

    class Trainer(train.Trainer):
        def __init__(self, config: PretrainConfig, *rest: object) -> None:
            self.config, self.progress, self.run_dir = config, Progress(), Path(folder)
            self.state = SimpleNamespace(position=SimpleNamespace(step=0, phase=0, phase_step=0))
            said = functools.partial(print, file=sys.stderr)
            self.checkpoints = SimpleNamespace(close=lambda: said("checkpoints closed"))
            self.monitor = SimpleNamespace(close=lambda: said("trackers closed"))

        def _mark_finished(self, steps: int | None) -> None:
            pass

        def _run_phase(self, stop_at_step: int | None) -> None:
            raise kind("shard 3 is damaged")

    train.Trainer, preflight.check = Trainer, lambda *_: None
    trains(folder)


def trains(folder: str, *words: str) -> None:
    run.BEGAN_UNDER = launchers()
    sys.argv[1:] = ["--config", str(ROOT / "configs/pretrain_demo.yaml")]
    sys.argv += ["--set", "device=cpu", "--set", f"run_dir={folder}", *words]
    run.main()


@pytest.mark.parametrize(
    ("kind", "code", "told"), [(UserError, 2, 0), (MemoryError, 2, -1), (ValueError, 1, -1)]
)
def test_an_error_of_the_program_is_told_last_and_another_first(
    tmp_path: Path, kind: type[Exception], code: int, told: int
) -> None:
    """Whose error it was is known only when the other ranks were asked, and these end at once."""
    ended, _, said = gloo.Process(fails_alone, str(tmp_path / "run"), kind, env={}).end()
    lines = said.splitlines()
    assert ended == code and "rror: " in lines[told] and "shard 3 is damaged" in lines[told]
    assert said.count(": shard 3 is damaged") == 1
    closed = ["checkpoints closed", "trackers closed"]
    assert [line for line in lines if line in closed] == closed


def gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("deepspeed", []),
        (
            "ds",
            [
                "--no_python",
                "--no_local_rank",
                "bash",
                "-c",
                f'export MASTER_PORT=$((MASTER_PORT + 1)); {sys.executable} "$@"; exit',
                "-",
            ],
        ),
    ],
)
def test_a_runner_of_deepspeed_that_is_ended_takes_its_ranks_with_it(
    tmp_path: Path, name: str, command: list[str]
) -> None:
    script = tmp_path / "program.py"
    arguments = f'import os, sys\nsys.argv[1:] = ["no", "0", {str(tmp_path)!r}]\n'
    told = 'world = distributed.start("cpu")\nos.write(1, b"%d\\n" % os.getpid())\n'
    script.write_text(arguments + PROGRAM.replace('world = distributed.start("cpu")\n', told))
    bin_ = Path(sys.executable).parent
    runner = subprocess.Popen(
        [str(bin_ / name), "--log_level", "error", "--num_gpus", "2", "--master_port",
         str(free_port()), *command, str(script)],
        cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT),
                          "PATH": f"{bin_}:{os.environ['PATH']}"},
    )  # fmt: skip
    lines = iter(runner.stdout.readline, "")
    pids: list[int] = []
    for line in lines:
        if line.strip().isdigit():
            pids.append(int(line))
        if line == "fault\n":
            break
    assert len(pids) == 2
    runner.terminate()
    said = runner.communicate(timeout=120)[1]
    assert "the launcher of rank" in said
    gone(pids)


def test_strangers_at_the_port_are_dropped() -> None:
    assert gloo.run(2, strangers) == ["met"] * 2


WORDS = [b"5\n", b"null\n", b'"x"\n', b"[]\n", b"{}\n", b'{"secret": 1}\n', b"\xff\n",
         b"[" * 9999 + b"\n", b"GET / HTTP/1.1\r\n\r\n",
         b'{"rank": 1, "host": "h", "pid": 1, "space": "", "secret": "guessed"}\n',
         b'{"rank": 1, "host": "h", "pid": 1, "space": ""}\n']  # fmt: skip


def strangers(rank: int, size: int) -> str:
    """The ranks meet, though strangers speak to the port before them, and others keep silent."""
    world = distributed.start("cpu")
    agree, silent = distributed.from_main, []

    def after_strangers(world: distributed.World, value: object) -> object:
        found = agree(world, value)
        if rank == 1 and isinstance(found, tuple):
            for word in [b"", b'{"sec'] * 20:
                silent.append(socket.create_connection(("127.0.0.1", found[0])))
                silent[-1].sendall(word)
            for word in WORDS:
                with socket.create_connection(("127.0.0.1", found[0])) as stranger:
                    stranger.sendall(word)
        return found

    distributed.from_main = after_strangers
    watchdog = Watchdog(world, 30, Path("/nowhere"), Progress())
    watchdog.close(0)
    return "met"


NODES = ("bertA", "bertB")


def ip(*arguments: str) -> bool:
    return subprocess.run(["ip", *arguments], capture_output=True).returncode == 0


@pytest.fixture
def two_nodes() -> Iterator[dict[str, str]]:
    """Two network namespaces, each with an address of its own: {name: address}."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and iproute2")
    addresses = {node: f"10.231.77.{i + 1}" for i, node in enumerate(NODES)}
    try:
        for node in NODES:
            if not ip("netns", "add", node):
                pytest.skip("network namespaces cannot be made here")
            assert ip("-n", node, "link", "set", "lo", "up")
        assert ip("link", "add", "eth0", "netns", NODES[0], "type", "veth",
                  "peer", "name", "eth0", "netns", NODES[1])  # fmt: skip
        for node, address in addresses.items():
            assert ip("-n", node, "addr", "add", f"{address}/24", "dev", "eth0")
            assert ip("-n", node, "link", "set", "eth0", "up")
        yield addresses
    finally:
        for node in NODES:
            ip("netns", "del", node)


def test_ranks_meet_across_addresses_and_a_cut_link_ends_in_a_requeue(
    two_nodes: dict[str, str], tmp_path: Path
) -> None:
    env = os.environ | {
        "MASTER_ADDR": NODES[0], "MASTER_PORT": "29611", "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    # Nobody tells how many processes a node has, as where each is a container of its own.
    for name in ("GLOO_SOCKET_IFNAME", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_RANK"):
        env.pop(name, None)
    for node in NODES:  # as Debian has it: a host's own name leads to 127.0.1.1
        names = {**two_nodes, node: "127.0.1.1", "localhost": "127.0.0.1"}
        lines = [f"{address} {name}\n" for name, address in names.items()]
        (tmp_path / f"hosts-{node}").write_text("".join(lines))
    inside = f'mount --bind {tmp_path}/hosts-"$0" /etc/hosts; hostname "$0"; exec "$@"'
    enter = f"exec ip netns exec $0 unshare --uts --mount sh -c '{inside}' $0 \"$@\""
    processes = [
        subprocess.Popen(
            ["sh", "-c", enter, node, sys.executable, "-c", PROGRAM, "no", "0", str(tmp_path)],
            cwd=ROOT, env=env | {"RANK": str(rank)}, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank, node in enumerate(NODES)
    ]  # fmt: skip
    assert processes[0].stdout.readline() == "fault\n"  # twenty steps were taken together
    assert ip("-n", NODES[1], "link", "set", "eth0", "down")
    said = [p.communicate(timeout=120)[1] for p in processes]
    assert [p.returncode for p in processes] == [85, 85], said
    assert "watchdog: rank 1 on bertB" in said[0] and "is silent for" in said[0]
    assert "watchdog: rank 0 on bertA" in said[1] and "Traceback" not in said[0] + said[1]
