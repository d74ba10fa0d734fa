"""Before the first step: threads, the run folder, and what all ranks must agree on."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from configs.load import UserError, dump
from pretrain import distributed
from pretrain.config import PretrainConfig
from pretrain.distributed import World
from pretrain.train import code_version


def set_threads(threads: int, world: World) -> None:
    """CPU threads of this process; by default the node's usable cores shared by its ranks."""
    torch.set_num_threads(threads or max(len(os.sched_getaffinity(0)) // world.local_size, 1))


@contextlib.contextmanager
def run_folder(config: PretrainConfig, world: World) -> Iterator[None]:
    """Make the run folder, lock it against a second run and keep the resolved config in it."""
    folder = Path(config.run_dir)
    lock = None
    with distributed.errors_shared(world):
        if world.is_main:
            folder.mkdir(parents=True, exist_ok=True)
            lock = (folder / "lock").open("w")
            # Data workers outlive a killed parent by seconds; they must not hold its lock.
            os.register_at_fork(after_in_child=lock.close)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(
                    f"run_dir: {folder} is in use by another run that is still going"
                ) from None
            (folder / "config.yaml").write_text(dump(config), encoding="utf-8")
    try:
        yield
    finally:
        if lock is not None:
            lock.close()


def check(config: PretrainConfig, world: World) -> None:
    """UserError on every rank when the ranks run different code or configs."""
    distributed.require_same(world, "the code version", code_version())
    digest = hashlib.sha256(dump(config).encode()).hexdigest()[:16]
    distributed.require_same(world, "the config", digest)
