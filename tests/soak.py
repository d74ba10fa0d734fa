"""Faults thrown at real runs: `python -m tests.soak --tries 100 --seed 1`.

Each try trains a tiny model on two gloo processes, throws one fault at a random moment, starts the
same command again until the run is done, and compares the final weights with an uninterrupted
run's, bit for bit. The last line is a JSON object: tries, equal, failures by kind. A try also
fails when a process hangs, aborts at exit, answers a fault with a traceback, or is left behind.

The ranks are forked from this process, which has imported torch and deepspeed once, and then run
`pretrain.run.main` with a launcher's variables, so this process is their launcher; the faults of
a launcher use deepspeed, torchrun, mpiexec and, where Slurm is installed and root runs this, srun
on a cluster of its own. One batch of a data worker fills a pipe.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}

import numpy as np  # noqa: E402
import torch  # noqa: E402

import pretrain.preflight  # noqa: E402, F401
import pretrain.run  # noqa: E402
import pretrain.train  # noqa: E402
from core.errors import UserError  # noqa: E402
from pretrain import checkpoint, engine  # noqa: E402
from pretrain.fragments import read_weights  # noqa: E402
from tests.datasets import write_dataset  # noqa: E402
from tests.ports import free_port  # noqa: E402
from tests.slurm.cluster import Cluster, why_not  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
STEPS, EVERY, VOCAB = 50, 10, 60
CONFIG = """
seed: 5
device: cpu
threads: 1
watchdog_seconds: 60
model: {hidden_size: 8, num_hidden_layers: 1, num_attention_heads: 2, intermediate_size: 16,
        max_position_embeddings: 512}
engine: {precision: fp32}
data: {workers: 1}
phases:
  - {max_seq_len: 512, row_len: 512, rows_per_step: 8, sequences_per_step: 8, max_predictions: 80,
     micro_batch_rows: 4, steps: 50, learning_rate: 1.0e-2}
checkpoint: {every_steps: 10, keep_last: 2}
evaluation: {every_steps: 0}
logging: {every_steps: 1}
"""
HANG = 300.0  # seconds after which a try has hung


class Failed(Exception):
    """A try did not keep its promise; the text says which."""


@dataclass
class Start:
    """One start of a run: its processes (by rank, or the launcher alone) and their log."""

    log: Path
    pids: list[int]
    codes: dict[int, int]

    def poll(self) -> bool:
        """Whether all have ended."""
        for pid in self.pids:
            if pid not in self.codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    self.codes[pid] = os.waitstatus_to_exitcode(status)
        return len(self.codes) == len(self.pids)

    def wait(self) -> list[int]:
        until(self.poll, "the end of the processes")
        return [self.codes[pid] for pid in self.pids]

    def kill(self, number: int, *ranks: int) -> None:
        for pid in [self.pids[r] for r in ranks] or self.pids:
            if pid not in self.codes:
                os.kill(pid, number)

    def text(self) -> str:
        return self.log.read_text(errors="replace")


class Try:
    """A run folder, and the starts of the run in it."""

    def __init__(self, folder: Path, data: Path, rng: random.Random) -> None:
        self.folder, self.data, self.rng = folder, data, rng
        self.run = folder / "run"
        self.starts: list[Start] = []
        self.mounts: list[Path] = []
        self.reference: dict[str, torch.Tensor] | None = None  # instead of the common one
        self.overrides: tuple[str, ...] = ()  # of every start
        self.patch: Callable[[int], None] | None = None  # called in every rank before it starts
        self.launchers: dict[str, dict[str, str]] = {}  # with the environment that each needs

    def start(self, *overrides: str, patch: Callable[[int], None] | None = None) -> Start:
        """Two ranks, forked; the overrides and the patch are for this start alone."""
        overrides, patch = (*self.overrides, *overrides), patch or self.patch
        log = self.folder / f"log-{len(self.starts)}"
        port = free_port()
        pids = [self._fork(rank, port, log, overrides, patch) for rank in range(2)]
        self.starts.append(Start(log, pids, {}))
        return self.starts[-1]

    def launch(self, *launchers: str) -> Start:
        """By one of these real launchers (of all); the only pid is the launcher's."""
        log, bin_ = self.folder / f"log-{len(self.starts)}", Path(sys.executable).parent
        port = str(free_port())
        launcher = self.rng.choice(sorted(self.launchers.keys() & (launchers or self.launchers)))
        command = {
            "deepspeed": [
                str(bin_ / "deepspeed"), "--num_gpus=2", f"--master_port={port}",
                "--log_level=error",
            ],
            "torchrun": [
                str(bin_ / "torchrun"), "--nproc_per_node=2", f"--master_port={port}",
            ],
            "mpiexec": [str(bin_ / "mpiexec"), "-n", "2", sys.executable],
            "srun": ["srun", "--ntasks=2", "--nodes=1", "--mem=4G", sys.executable],
        }[launcher]  # fmt: skip
        with log.open("wb") as out:
            pid = subprocess.Popen(
                [*command, *self._arguments()], stdout=out, stderr=out, cwd=ROOT,
                env=os.environ | self.launchers[launcher] | {"MASTER_PORT": port},
            ).pid  # fmt: skip
        self.starts.append(Start(log, [pid], {}))
        return self.starts[-1]

    def _arguments(self, *overrides: str) -> list[str]:
        sets = [f"data.dir={self.data}", f"run_dir={self.run}", *overrides]
        return [
            str(ROOT / "pretrain/run.py"), "--config", str(self.data / "run.yaml"), "--set", *sets
        ]  # fmt: skip

    def _fork(self, rank: int, port: int, log: Path, overrides: tuple, patch: object) -> int:
        pid = os.fork()
        if pid:
            return pid
        try:
            out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(out, 1)
            os.dup2(out, 2)
            os.environ |= {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            }  # fmt: skip
            signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored under nohup
            pretrain.run.BEGAN_UNDER = [os.getppid()]  # as of a rank that begins here
            sys.argv = self._arguments(*overrides)
            if patch is not None:
                patch(rank)
            pretrain.run.main()
        except SystemExit as end:
            os._exit(end.code if isinstance(end.code, int) else 1)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)

    def step(self) -> int:
        """Steps recorded so far."""
        path = self.run / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def moment(self, start: Start) -> None:
        """Wait for a random moment of the run (or its end)."""
        step = self.rng.randrange(1, STEPS - 5)
        until(lambda: self.step() >= step or start.poll(), f"step {step}")
        time.sleep(self.rng.random() * 0.05)

    def in_checkpoint(self, start: Start) -> None:
        """Wait until a checkpoint, not the first, is being written, and a little longer."""
        first = self.run / f"checkpoints/step-{EVERY:08d}"
        until(lambda: first.exists() or start.poll(), "the first checkpoint")
        folder = self.run / "checkpoints"
        until(lambda: any(folder.glob("writing-*")) or start.poll(), "a checkpoint's writing", 0)
        time.sleep(self.rng.random() * 0.02)

    def finish(self) -> dict[str, torch.Tensor]:
        """Start again until the run is done; its final weights."""
        for _ in range(6):
            start = self.start()
            codes = start.wait()
            if codes == [0, 0]:
                break
            if "is in use by another run" in start.text():
                time.sleep(1)  # what a killed launcher left behind is still stopping
        else:
            raise Failed(f"not done after 6 starts: {start.text()[-500:]}")
        return self.weights()

    def weights(self) -> dict[str, torch.Tensor]:
        try:
            folder = checkpoint.resolve(self.run)
        except UserError as error:
            raise Failed(f"done, but {error}") from None
        step = checkpoint.read_state(folder).position.step
        if step != STEPS:
            raise Failed(f"done, but the newest checkpoint is of step {step}")
        return read_weights(folder / "engine")

    def expect(self, start: Start, codes: set[int], *lines: str) -> None:
        """Every process of `start` ends with one of `codes`, and the log has these lines."""
        ended = start.wait()
        if not set(ended) <= codes:
            raise Failed(f"exit codes {ended}: {start.text()[-800:]}")
        for line in lines:
            if line not in start.text():
                raise Failed(f"the log does not say {line!r}: {start.text()[-800:]}")

    def mount(self, *arguments: str, on: Path) -> None:
        on.mkdir(parents=True, exist_ok=True)
        subprocess.run(["mount", *arguments, str(on)], check=True)
        if on not in self.mounts:
            self.mounts.append(on)

    def unmount(self) -> None:
        for path in self.mounts:
            subprocess.run(["umount", "-l", str(path)], check=True)
        self.mounts = []

    def processes(self) -> dict[int, str]:
        """Those that write to this try's logs or have its folder in their command, by pid."""
        found = {}
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                command = (
                    (process / "cmdline")
                    .read_bytes()
                    .replace(b"\0", b" ")
                    .decode(errors="replace")
                    .strip()
                )
                opened = [os.readlink(process / "fd" / number) for number in "12"]
                alive = (process / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
                mine = str(self.folder) in command or any(str(self.folder) in f for f in opened)
                if mine and alive and int(process.name) != os.getpid():
                    found[int(process.name)] = command
        return found

    def end(self) -> None:
        """Leave nothing behind, whatever happened."""
        for start in self.starts:
            start.poll()
            start.kill(signal.SIGKILL)
            for pid in start.pids:
                if pid not in start.codes:
                    os.waitpid(pid, 0)
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.unmount()


# ---------------------------------------------------------------------------------------- faults

KILLED, REQUEUE = -signal.SIGKILL, 85


def kill_rank(t: Try) -> None:
    start = t.start()
    t.moment(start)
    _kill_one(t, start)


def kill_rank_in_checkpoint(t: Try) -> None:
    start = t.start()
    t.in_checkpoint(start)
    _kill_one(t, start)


def _kill_one(t: Try, start: Start) -> None:
    rank = t.rng.randrange(2)
    if start.poll():
        return
    start.kill(signal.SIGKILL, rank)
    t.expect(start, {KILLED, REQUEUE}, f"watchdog: rank {rank} on ", "died at step")


def kill_all(t: Try) -> None:
    start = t.start()
    t.moment(start)
    start.kill(signal.SIGKILL)
    t.expect(start, {KILLED, 0})


def kill_all_in_checkpoint(t: Try) -> None:
    start = t.start()
    t.in_checkpoint(start)
    start.kill(signal.SIGKILL)
    t.expect(start, {KILLED, 0})


def signal_rank(t: Try) -> None:
    _signal(t, [t.rng.randrange(2)], times=1)


def signal_all(t: Try) -> None:
    _signal(t, [0, 1], times=1)


def signal_twice(t: Try) -> None:
    _signal(t, [0, 1], times=2)


def _signal(t: Try, ranks: list[int], times: int) -> None:
    start = t.start()
    t.moment(start)
    number = t.rng.choice([signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
    for _ in range(times):
        start.poll()
        start.kill(number, *ranks)
        time.sleep(t.rng.random() * 0.02)
    t.expect(start, {REQUEUE}, f"{number.name}: stopped at step")


def worker_killed(t: Try) -> None:
    start = t.start()
    _signal_a_worker(t, start, signal.SIGKILL)
    t.expect(start, {0, REQUEUE})


def rank_stopped(t: Try) -> None:
    start, rank = t.start("watchdog_seconds=10"), t.rng.randrange(2)
    t.moment(start)
    if start.poll():
        return
    start.kill(signal.SIGSTOP, rank)
    t.expect(start, {KILLED, REQUEUE}, f"watchdog: rank {rank} on ", "is silent for")


def suspended(t: Try) -> None:
    """All at once, for longer than the watchdog waits for one."""
    start = t.start("watchdog_seconds=5")
    t.moment(start)
    everyone = t.processes()
    for number, seconds in ((signal.SIGSTOP, 8), (signal.SIGCONT, 0)):
        for pid in everyone:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        time.sleep(seconds)
    t.expect(start, {0})


def worker_stopped(t: Try) -> None:
    """Its rank gives it up; SIGKILL, which also ends a stopped process, must reach it."""
    t.overrides = ("data.worker_timeout=5",)
    start = t.start()
    _signal_a_worker(t, start, signal.SIGSTOP)
    t.expect(start, {0, REQUEUE})


def _signal_a_worker(t: Try, start: Start, number: signal.Signals) -> None:
    t.moment(start)
    workers = _children(start.pids[t.rng.randrange(2)])
    if workers and not start.poll():
        os.kill(t.rng.choice(workers), number)


def launcher_killed(t: Try) -> None:
    start = t.launch()
    t.moment(start)
    below = _below(t, start)
    start.kill(signal.SIGKILL)
    start.wait()
    _until_gone(below)
    claim = re.search(r"stopped at step ([\d,]+) of [\d,]+ after a checkpoint", start.text())
    step = int(claim[1].replace(",", "")) if claim else 0
    folder = f"checkpoints/step-{step:08d}" if claim else "checkpoints"
    if claim and checkpoint.verify(t.run / folder) is not None:
        raise Failed(f"no such checkpoint: {claim[0]}")


def launcher_killed_in_start(t: Try) -> None:
    """Or what stands below it, before the ranks have met: none goes on alone."""
    start = t.launch("deepspeed", "torchrun", "mpiexec")

    def importing(pid: int) -> bool:  # so it has looked who started it
        with contextlib.suppress(OSError):
            return _is_rank(pid) and "libtorch" in Path(f"/proc/{pid}/maps").read_text()
        return False

    until(lambda: sum(map(importing, _below(t, start))) >= 2 or start.poll(), "the ranks")
    time.sleep(t.rng.random() * 3)
    below = _below(t, start)
    middle = [pid for pid in below if not _is_rank(pid)]
    with contextlib.suppress(ProcessLookupError):
        os.kill(t.rng.choice([*start.pids, *middle]), signal.SIGKILL)
    start.wait()
    _until_gone(below)
    if (t.run / "FINISHED").exists():
        raise Failed("the ranks went on alone")


def middle_launcher_killed(t: Try) -> None:
    """Of what stands between the launcher and the ranks: deepspeed's launch.py, mpiexec's proxy.
    (An srun whose slurmstepd was killed waits for ever, in Slurm itself.)"""
    _signal_the_middle(t, t.launch("deepspeed", "mpiexec"), signal.SIGKILL)


def middle_launcher_stopped(t: Try) -> None:
    """For a while."""
    _signal_the_middle(t, t.launch("deepspeed", "mpiexec", "srun"), signal.SIGSTOP)


def _signal_the_middle(t: Try, start: Start, number: signal.Signals) -> None:
    t.moment(start)
    below = _below(t, start)
    middle = [pid for pid in below if not _is_rank(pid)]
    if middle:
        chosen = t.rng.choice(middle)
        with contextlib.suppress(ProcessLookupError):
            os.kill(chosen, number)
            if number == signal.SIGSTOP:
                _pause(t)
                os.kill(chosen, signal.SIGCONT)
    start.wait()
    _until_gone(below)


def launcher_stopped(t: Try) -> None:
    """For a while, and then let go on or killed."""
    start = t.launch()
    t.moment(start)
    below = _below(t, start)
    if not start.poll():
        start.kill(signal.SIGSTOP)
        _pause(t)
        start.kill(t.rng.choice([signal.SIGCONT, signal.SIGKILL]))
    start.wait()
    _until_gone(below)


def _pause(t: Try) -> None:
    time.sleep(t.rng.random() * 5)


def launcher_signalled(t: Try) -> None:
    start = t.launch()
    t.moment(start)
    below = _below(t, start)
    for _ in range(t.rng.choice([1, 2])):
        if not start.poll():
            start.kill(signal.SIGTERM)
            time.sleep(t.rng.random() * 0.02)
    start.wait()
    _until_gone(below)


def _below(t: Try, start: Start) -> list[int]:
    """The processes that the launcher started, with the ranks' parents where Slurm started them."""
    ranks = [pid for pid in t.processes() if _is_rank(pid) and pid not in start.pids]
    parents = {_parent(pid) for pid in ranks} - {None, 0, 1, os.getpid(), *start.pids}
    return sorted({*_descendants(start.pids[0]), *ranks, *parents})


def _until_gone(pids: list[int]) -> None:
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "the ranks' end")


def disk_full(t: Try) -> None:
    t.mount("-t", "tmpfs", "-o", "size=4m", "tmpfs", on=t.run)
    start = t.start("checkpoint.max_failed_writes=1")
    t.moment(start)
    with contextlib.suppress(OSError), (t.run / "filler").open("wb", buffering=0) as filler:
        while filler.write(b"x" * 4096):
            pass
    t.expect(start, {0, REQUEUE})
    if set(start.wait()) == {REQUEUE} and "No space left" not in start.text():
        raise Failed(f"no word of the full disk: {start.text()[-800:]}")
    (t.run / "filler").unlink()


def read_only(t: Try) -> None:
    folder = t.run / "checkpoints"
    folder.mkdir(parents=True)
    start = t.start("checkpoint.max_failed_writes=1")
    t.moment(start)
    t.mount("--bind", str(folder), on=folder)
    t.mount("-o", "remount,ro,bind", on=folder)
    t.expect(start, {0, REQUEUE})
    t.unmount()


def clock_jumps(t: Try) -> None:
    jump, after = t.rng.choice([-1e8, -3600.0, 3600.0, 1e8]), t.rng.randrange(1, 50)
    real, calls = time.time, iter(range(1 << 60))

    def patch(rank: int) -> None:  # the wall clock of one rank, as Python sees it
        if rank == 0:
            time.time = lambda: real() + (jump if next(calls) > after else 0.0)

    start = t.start(patch=patch)
    t.moment(start)
    t.expect(start, {0})


def two_runs(t: Try) -> None:
    first = t.start()
    t.moment(first)
    if first.poll():
        return
    second = t.start()
    t.expect(second, {0, 2})
    if 2 in second.wait() and "is in use by another run" not in second.text():
        raise Failed(f"the second run was refused for another reason: {second.text()[-500:]}")
    t.expect(first, {0})


def nan(t: Try) -> None:
    """Two steps of NaN in one rank's gradient are rolled back over, and a kill comes on top; the
    weights are those of the same run without the kill."""
    bad, first = t.rng.randrange(2), t.rng.randrange(EVERY + 1, STEPS - 8)
    build = pretrain.train.Trainer.build_engine

    def poisoned(trainer: pretrain.train.Trainer) -> engine.Engine:
        made = build(trainer)

        def poison(gradient: torch.Tensor) -> torch.Tensor:
            hit = (
                first <= trainer.state.position.step <= first + 1
                and not trainer.state.rollbacks.done
            )
            return gradient * (torch.nan if hit else 1.0)

        made.module.bert.pooler.dense.bias.register_hook(poison)
        return made

    def patch(rank: int) -> None:
        if rank == bad:
            pretrain.train.Trainer.build_engine = poisoned

    other = Try(t.folder / "other", t.data, t.rng)
    other.folder.mkdir()
    for each in (t, other):
        each.overrides, each.patch = ("engine.max_skipped_steps=2",), patch
    t.reference = other.finish()
    t.starts += other.starts
    if "steps in a row were not finite" not in other.starts[0].text():
        raise Failed(f"no rollback: {other.starts[0].text()[-500:]}")
    start = t.start()
    t.moment(start)
    start.kill(signal.SIGKILL)
    t.expect(start, {KILLED, 0})


FAULTS: dict[str, Callable[[Try], None]] = {
    f.__name__: f
    for f in (
        kill_rank, kill_all, kill_rank_in_checkpoint, kill_all_in_checkpoint, signal_rank,
        signal_all, signal_twice, worker_killed, worker_stopped, rank_stopped, suspended,
        launcher_killed, launcher_killed_in_start, launcher_stopped, launcher_signalled,
        middle_launcher_killed, middle_launcher_stopped, disk_full, read_only, clock_jumps,
        two_runs, nan,
    )
}  # fmt: skip
NEEDS_ROOT = {"disk_full", "read_only"}


def _children(pid: int) -> list[int]:
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(x) for x in path.read_text().split()]
    return found


def _parent(pid: int) -> int | None:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return None


def _is_rank(pid: int) -> bool:
    """A rank of a launcher, or a data worker of one."""
    with contextlib.suppress(OSError):
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        return any(v.startswith((b"RANK=", b"PMI_RANK=", b"SLURM_PROCID=")) for v in variables)
    return True


def _descendants(pid: int) -> list[int]:
    found = _children(pid)
    return found + [grandchild for child in found for grandchild in _descendants(child)]


def until(true: Callable[[], bool], what: str, pause: float = 0.01) -> None:
    deadline = time.monotonic() + HANG
    while not true():
        if time.monotonic() > deadline:
            raise Failed(f"hang: waited {HANG:.0f} s for {what}")
        time.sleep(pause)


# ------------------------------------------------------------------------------------------ soak


def make_data(folder: Path) -> None:
    rng = np.random.default_rng(0)
    documents = [
        [rng.integers(5, VOCAB, rng.integers(3, 12)).tolist() for _ in range(120)]
        for _ in range(200)
    ]
    write_dataset(folder, documents, heldout=documents[:5], vocab=VOCAB, documents_per_shard=20)
    (folder / "run.yaml").write_text(CONFIG)


def one(t: Try, fault: Callable[[Try], None], reference: dict[str, torch.Tensor]) -> str | None:
    """Why the try failed; None if it did not."""
    problem = None
    try:
        fault(t)
        ours = t.finish()
        reference = reference if t.reference is None else t.reference
        if ours.keys() != reference.keys() or not all(
            torch.equal(ours[n], reference[n]) for n in ours
        ):
            problem = "the final weights differ"
        until(lambda: not t.processes(), "the end of every process of the run", 0.1)
    except Failed as error:
        problem = f"{error} {t.processes() or ''}".strip()
    finally:
        t.end()
    text = "".join(start.text() for start in t.starts)
    codes = [code for start in t.starts for code in start.codes.values()]
    if "terminate called" in text or {-signal.SIGABRT, -signal.SIGSEGV} & set(codes):
        problem = f"aborted at exit: {codes}"
    elif "Traceback" in text and problem is None and fault.__name__ not in _LAUNCHERS:
        problem = "a traceback in the log"
    return problem


# torchrun answers a signal with a traceback of its own.
_LAUNCHERS = {"launcher_killed_in_start", "middle_launcher_killed", "launcher_signalled"}


@contextlib.contextmanager
def launchers(folder: Path, needed: bool) -> Iterator[dict[str, dict[str, str]]]:
    """The launchers that work here, each with the environment it needs."""
    found: dict[str, dict[str, str]] = {"deepspeed": {}, "torchrun": {}, "mpiexec": {}}
    if not needed or (reason := why_not()):
        if needed:
            print(f"without srun: {reason}", flush=True)
        yield found
        return
    with Cluster(folder, nodes=1) as cluster:
        yield found | {"srun": {"SLURM_CONF": cluster.environment["SLURM_CONF"]}}


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    p.add_argument("--tries", type=int, default=100)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--kinds", help="comma-separated; by default all, one after the other")
    p.add_argument("--keep", action="store_true", help="keep the folders of failed tries")
    arguments = p.parse_args(argv)
    kinds = arguments.kinds.split(",") if arguments.kinds else list(FAULTS)
    if os.geteuid() != 0:
        skipped = sorted(NEEDS_ROOT & set(kinds))
        print(f"not root: without {', '.join(skipped)}" if skipped else "", flush=True)
        kinds = [kind for kind in kinds if kind not in NEEDS_ROOT]

    importlib.import_module("tests.preloaded")
    tries, equal, failures = Counter[str](), Counter[str](), Counter[str]()
    top = Path(tempfile.mkdtemp(prefix="soak-"))
    data = top / "data"
    make_data(data)
    straight = Try(top / "straight", data, random.Random(0))
    straight.folder.mkdir()
    reference = straight.finish()
    with launchers(top / "slurm", any("launcher" in kind for kind in kinds)) as found:
        for i in range(arguments.tries):
            kind = kinds[i % len(kinds)]
            folder = top / f"try-{i:03d}"
            folder.mkdir()
            t = Try(folder, data, random.Random(f"{arguments.seed} {i}"))
            t.launchers = found
            began = time.monotonic()
            problem = one(t, FAULTS[kind], reference)
            tries[kind] += 1
            (equal if problem is None else failures)[kind] += 1
            seconds = time.monotonic() - began
            codes = [list(s.codes.values()) for s in t.starts]
            print(f"{i:3d} {kind:24s} {seconds:5.1f} s  {codes}  {problem or 'equal'}", flush=True)
            if problem is None or not arguments.keep:
                shutil.rmtree(folder)
    if not (arguments.keep and failures):
        shutil.rmtree(top)
    else:
        print(f"kept: {top}")
    print("kind                      tries  equal")
    for kind in kinds:
        print(f"{kind:24s} {tries[kind]:6d} {equal[kind]:6d}")
    result = {
        "tries": sum(tries.values()), "equal": sum(equal.values()), "failures": dict(failures)
    }  # fmt: skip
    print(json.dumps(result))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
