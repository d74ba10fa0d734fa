"""Real gloo process groups for tests: `run(world, target, *args)` starts fresh processes."""

from __future__ import annotations

import multiprocessing as mp
import os
import queue
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run(world: int, target: Callable[..., Any], *args: Any, timeout: float = 120) -> list[Any]:
    """Call `target(rank, world, *args)` in `world` spawned processes that form one gloo group.

    Returns the (picklable) results in rank order; a failing rank's traceback fails the caller.
    `target` must be importable (a module-level function).
    """
    context = mp.get_context("spawn")
    results: Any = context.Queue()
    port = free_port()
    processes = [
        context.Process(target=_child, args=(results, rank, world, port, target, args), daemon=True)
        for rank in range(world)
    ]
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


def _child(results: Any, rank: int, world: int, port: int, target: Any, args: Any) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_SIZE=str(world),
        LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
    )
    warnings.simplefilter("ignore")
    import torch

    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    try:
        value = target(rank, world, *args)
        results.put((rank, False, value))
        code = 0
    except BaseException:
        results.put((rank, True, traceback.format_exc()))
        code = 1
    results.close()
    results.join_thread()
    if code == 0:
        torch.distributed.barrier()
    sys.stdout.flush()
    # Interpreter teardown with live gloo threads aborts now and then; the result is already out.
    os._exit(code)
