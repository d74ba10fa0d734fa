"""Real processes for tests: `run(world, target, *args)` makes a gloo group, `Process` is one alone.

They are forked from one that has imported torch and deepspeed (`tests/preloaded.py`) and done
nothing else: each fresh process would take seconds to import them.
"""

from __future__ import annotations

import multiprocessing as mp
import multiprocessing.reduction  # noqa: F401
import os
import queue
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

from tests.ports import free_port

CONTEXT = mp.get_context("forkserver")
CONTEXT.set_forkserver_preload(["pytest", "tests.preloaded"])


class Descriptor:
    """The caller's file descriptor of that number, as it is when a process is started."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _detached, (mp.reduction.DupFd(self.number),)


def _detached(copy: Any) -> int:
    return copy.detach()


def run(
    world: int,
    target: Callable[..., Any],
    *args: Any,
    timeout: float = 120,
    context: Any = CONTEXT,
    backend: str = "gloo",
) -> list[Any]:
    """Call `target(rank, world, *args)` in `world` processes that form one group.

    Returns the (picklable) results in rank order; a failing rank's traceback fails the caller.
    `target` must be importable (a module-level function). `context`: "spawn" of multiprocessing
    where a process must be fresh, as for a GPU (backend nccl).
    """
    results: Any = context.Queue()
    places = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    places |= dict.fromkeys(("WORLD_SIZE", "LOCAL_SIZE", "LOCAL_WORLD_SIZE"), str(world))
    processes = []
    for rank in range(world):
        own = os.environ | places | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        given = (
            own,
            Descriptor(1),
            Descriptor(2),
            _rank,
            results,
            rank,
            world,
            backend,
            target,
            args,
        )
        processes.append(context.Process(target=_begin, args=given, daemon=True))
    for process in processes:
        process.start()
    got: dict[int, Any] = {}
    deadline = time.monotonic() + timeout
    try:
        while len(got) < world:
            try:
                rank, failed, value = results.get(timeout=0.5)
            except queue.Empty:
                dead = [p.exitcode for i, p in enumerate(processes) if i not in got and p.exitcode]
                if dead:
                    raise AssertionError(f"a rank died with exit code {dead[0]}") from None
                if time.monotonic() > deadline:
                    missing = sorted(set(range(world)) - set(got))
                    raise AssertionError(f"ranks {missing} gave no result in {timeout} s") from None
                continue
            if failed:
                raise AssertionError(f"rank {rank} of {world} failed:\n{value}")
            got[rank] = value
    finally:
        for process in processes:
            process.join(5 if len(got) == world else 0.1)
            if process.is_alive():
                process.kill()
                process.join()
    return [got[rank] for rank in range(world)]


def gather(value: Any) -> list[Any]:
    """`value` of every rank of the group."""
    import torch.distributed as dist

    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


class Process:
    """One process more: `target(*args)` is its exit code; `env` is beside the caller's."""

    def __init__(self, target: Callable[..., int | None], *args: Any, env: Mapping[str, str]):
        self._out, self._err = (tempfile.TemporaryFile("w+") for _ in range(2))
        descriptors = (Descriptor(self._out.fileno()), Descriptor(self._err.fileno()))
        given = (os.environ | dict(env), *descriptors, _alone, target, args)
        self._process = CONTEXT.Process(target=_begin, args=given, daemon=True)
        self._process.start()

    def signal(self, number: int) -> None:
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        self._process.kill()
        self.end()

    def end(self, timeout: float = 60) -> tuple[int, str, str]:
        """(exit code, what it printed, what it said to stderr)"""
        self._process.join(timeout)
        code, said = self._process.exitcode, []
        if code is None:
            self._process.kill()  # pytest would wait for one that is stopped
        for file in (self._out, self._err):
            file.seek(0)
            said.append(file.read())
            file.close()
        assert code is not None, f"still running: {said}"
        return code, *said


def agent() -> tuple[Process, dict[str, str]]:
    """The store of torchrun's agent, and what two ranks find in their environment."""
    port, (near, far) = free_port(), CONTEXT.Pipe()
    store = Process(_hold_store, port, far, env={})
    assert near.recv() == "listens"
    return store, {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_SIZE": "2",
        "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "1",
    }  # fmt: skip


def _hold_store(port: int, pipe: Connection) -> None:
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    pipe.send("listens")
    time.sleep(1000)
    del store


def _begin(environment: dict[str, str], out: int, err: int, run: Any, *args: Any) -> None:
    for number, descriptor in enumerate((out, err), 1):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(environment)
    warnings.simplefilter("ignore")
    try:
        code = run(*args) or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # Interpreter teardown with live gloo threads aborts now and then; the result is already out.
    os._exit(code)


def _alone(target: Callable[..., int | None], args: Any) -> int | None:
    return target(*args)


def _rank(results: Any, rank: int, world: int, backend: str, target: Any, args: Any) -> int:
    import torch

    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        backend, rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    try:
        results.put((rank, False, target(rank, world, *args)))
        code = 0
    except BaseException:
        results.put((rank, True, traceback.format_exc()))
        code = 1
    results.close()
    results.join_thread()
    if code == 0:
        torch.distributed.barrier()
    return code
