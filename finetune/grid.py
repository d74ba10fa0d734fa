"""Many jobs: every combination of the grid for every task, over processes, GPUs and machines.

A job is a folder, and done when result.json stands in it. Whoever works on a job holds a lock on
its folder, so the same command may run any number of times at once, as in a Slurm array, and an
interrupted sweep goes on where it stopped.
"""

from __future__ import annotations

import itertools
import multiprocessing as mp
import os
import shutil
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

import configs.load
from configs.load import differences, dump
from core.console import Console, notice
from core.errors import Killed, TryAgain, UserError, disk_error, main_guard, may_pass
from core.files import (
    TRAINED,
    TUNED,
    Lock,
    check_run_dir,
    disk_errors,
    holds,
    is_there,
    look,
    make_folder,
    part_of,
    remove_folder,
    replacing,
    sha256,
    unfinished,
    unmake,
    write_atomically,
    write_sealed,
)
from core.processes import end_with, hand_on, started
from finetune import loading, results
from finetune.config import FinetuneConfig, TaskConfig
from finetune.results import RESULT
from finetune.tasks import Context, Stopped, Task, open_task
from finetune.train import LAST, Job, Trainer, made_of
from pretrain import checkpoint, distributed, numerics
from pretrain.distributed import REQUEUE_EXIT_CODE, StopRequest, World
from pretrain.hugging_face import Pretrained

REPORT_PATIENCE = 120.0  # seconds
FOLDER_PATIENCE = 120.0  # seconds; its config is compared and written
_MAX_UNKNOWN_SHARE = 0.2
_SUBMITTED = "submission-"  # of a file on its way to that folder
_REPLACED = "run_dir: {} was removed or replaced under the run"


def jobs(config: FinetuneConfig) -> list[Job]:
    """Restarts vary slowest, so that a sweep cut short has every setting once."""
    g = config.grid
    return [
        Job(name, batch_size, rate, epochs, seed)
        for seed, name, batch_size, rate, epochs in itertools.product(
            g.seeds, config.task.names, g.batch_size, g.learning_rate, g.epochs
        )
    ]


def prepare(config: FinetuneConfig, shared: bool = False) -> Path:
    """Make run_dir and keep the config there; UserError if results of another config stand in it,
    or are being made there (`shared`).
    """
    folder = Path(config.run_dir)
    path = folder / "config.yaml"
    if (holds(folder, TUNED) or shared) and path.exists():
        for key, (old, new) in _changes(path, config).items():
            raise UserError(
                f"run_dir: {folder} holds results made with {key}: {old}, the config says {new}; "
                "use another run_dir, or remove this one"
            )
    with disk_errors(folder, "run_dir"):
        folder.mkdir(parents=True, exist_ok=True)
        for half, name in () if shared else unfinished(folder):
            if name == path.name:
                remove_folder(half)  # of a start that was killed
        write_atomically(path, dump(config))
    return folder


def _changes(path: Path, config: FinetuneConfig) -> dict[str, list[Any]]:
    """Keys of a job that are others in the config at `path`."""
    before = configs.load.load(path, FinetuneConfig)
    return differences(before.of_a_job, config.of_a_job)


def _of_one_checkpoint(config: FinetuneConfig) -> FinetuneConfig:
    """With the newest checkpoint in place of a run, which may have a newer one at the next job."""
    path, damaged = Path(config.encoder.path), list[str]()
    if not path.is_dir() or any(is_there(path / n) for n in ("config.json", "state.json")):
        return config
    try:
        found = checkpoint.resolve(path, damaged)
    except UserError as error:
        raise type(error)(f"encoder.path: {error}") from None
    for line in damaged:
        notice(line)
    encoder = config.encoder.model_copy(update={"path": str(found)})
    return config.model_copy(update={"encoder": encoder})


def _look_for_inputs(config: FinetuneConfig) -> None:
    """UserError where encoder or data are not there: no folder for a sweep that cannot start; and
    where run_dir is a pretraining run's, whose config.yaml would be replaced."""
    check_run_dir(Path(config.run_dir))
    if holds(Path(config.run_dir), TRAINED):
        raise UserError(f"run_dir: {config.run_dir} holds a pretraining run; use another run_dir")
    if not Path(config.encoder.path).exists():
        loading.read(config.encoder, config.task.max_seq_len)
    for section, settings in config:
        if isinstance(settings, TaskConfig):
            for key, path in settings.inputs.items():
                if not Path(path).exists():
                    raise UserError(f"{section}.{key}: {path}: no such file or folder")


@contextmanager
def shared_folder(config: FinetuneConfig) -> Iterator[None]:
    """run_dir with this config in it, which no sweep of another config may use meanwhile. A folder
    made here goes again if no job was begun in it."""
    _look_for_inputs(config)
    folder = Path(config.run_dir)
    with disk_errors(folder, "run_dir"):
        made = make_folder(folder)
        lock = Lock(folder / "lock")
    with lock:
        others, begun = False, True
        try:
            others = not lock.take(wait=False)
            begun = not others or lock.take_within(FOLDER_PATIENCE, shared=True)
        except FileNotFoundError:
            said = "was taken away by another start, which failed"
            raise TryAgain(f"run_dir: {folder} {said}") from None
        except OSError:
            pass  # a file system without locks: `claim` says what to do
        if not begun:
            said = "another process begins in this folder, and held its lock for"
            raise TryAgain(f"{lock.path}: {said} {FOLDER_PATIENCE:g} s")
        try:
            prepare(config, others)
            with suppress(OSError):
                lock.take(shared=True)
            yield
        finally:
            with suppress(OSError):
                if made and lock.is_in_place() and lock.take(wait=False) and _unused(folder):
                    unmake(made)


def _unused(folder: Path) -> bool:
    """Whether a run_dir holds nothing but what a start leaves there before a job."""
    own = (folder / "config.yaml", folder / "lock", *folder.glob("*/*/lock"))
    return all(path.is_dir() or path in own for path in folder.rglob("*"))


def sweep(config: FinetuneConfig, part: tuple[int, int] = (0, 1)) -> int:
    """Run the jobs that are not done; `part` (i, n) takes every n-th. Returns an exit code."""
    config = _of_one_checkpoint(config)
    with shared_folder(config):
        _check_place(config)  # jobs that are done there may be another's
        code = _sweep(config, part)
        if code == 0:
            _check_place(config)
        todo = jobs(config)[part[0] :: part[1]] if code == 0 else ()
        held = (folder_of(config, job) / "lock" for job in todo if not done(config, job))
        for lock in distributed.left_behind(held):
            raise TryAgain(f"an ended start of a Slurm job holds {lock}")
        return code


def _sweep(config: FinetuneConfig, part: tuple[int, int]) -> int:
    todo = jobs(config)[part[0] :: part[1]]
    gpus = 0 if config.device == "cpu" else torch.cuda.device_count()
    if config.device == "cuda" and not gpus:
        raise UserError("device: cuda is asked for but torch sees no GPU")
    _check_ended(config, todo)
    open_jobs = sum(not done(config, job) for job in todo)
    workers = max(1, min(config.workers or max(gpus, 1), open_jobs))
    if workers == 1:
        return _work(config, todo, 0, 1, gpus)
    context = mp.get_context("spawn")
    processes: list[Any] = []
    asked: list[int] = []

    def stop(number: int, _frame: Any) -> None:
        asked.append(number)
        for process in processes:
            if process.is_alive():
                hand_on(signal.SIGTERM, process.pid)

    started()
    heard = [signal.SIGTERM, signal.SIGUSR1]
    heard += [signal.SIGHUP] * (signal.getsignal(signal.SIGHUP) != signal.SIG_IGN)
    before = {n: signal.signal(n, stop) for n in heard}
    # Ctrl-C reaches the workers too; while they import they would answer with a traceback.
    before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        for w in range(workers):
            process = context.Process(target=_worker, args=(config, todo, w, workers, gpus))
            process.start()
            processes.append(process)
    except BaseException:
        for process in processes:
            process.kill()
            process.join()
        raise
    signal.signal(signal.SIGINT, stop)
    if asked:
        stop(asked[0], None)  # those that were started since
    for process in processes:
        process.join()
    for number, handler in before.items():
        signal.signal(number, handler)
    codes = [process.exitcode for process in processes]
    left = sum(not done(config, job) for job in todo)
    if left and asked:
        return 130 if signal.SIGINT in asked else REQUEUE_EXIT_CODE
    return outcome(codes, left)


def _check_ended(config: FinetuneConfig, todo: list[Job]) -> None:
    """UserError where a task without jobs that are left, whose files nobody reads now, was scored
    on other content than is there. A task with such jobs is looked at by whoever reads it."""
    ended = {job.task for job in todo} - {job.task for job in todo if not done(config, job)}
    folders = (Path(config.run_dir) / name for name in sorted(ended))
    found = [one for folder in folders for one in results.of_task(folder)]
    if not found:
        return
    encoder = loading.read(config.encoder, config.task.max_seq_len)
    now = {str(encoder.path): encoder.digest}
    for path in sorted({Path(name) for _, result in found for name in result.made_of}):
        if path.is_file():
            with disk_errors(path):
                now[str(path)] = sha256(path)
    for job, result in found:
        results.check_same(job / RESULT, result.made_of, now)


def outcome(codes: list[int], left: int) -> int:
    """Exit code of a sweep by those of its workers, below 0 the signal that ended one; `left`: jobs
    without a result. Killed or TryAgain where workers were killed, UserError where one crashed."""
    if 2 in codes:
        return 2  # a mistake comes again, whatever ended the others
    if left and min(codes) < 0:
        ends = f"(exit codes {codes}); {left} jobs are left to do"
        if set(codes) <= {0, REQUEUE_EXIT_CODE, -signal.SIGKILL, -signal.SIGTERM}:
            raise (Killed if -signal.SIGKILL in codes else TryAgain)(f"a worker was killed {ends}")
        raise UserError(f"a worker crashed {ends}")
    return max(0, *codes)


def _worker(config: FinetuneConfig, todo: list[Job], w: int, workers: int, gpus: int) -> None:
    end_with(mp.parent_process().pid, signal.SIGTERM)
    raise SystemExit(main_guard(lambda: _work(config, todo, w, workers, gpus)))


def _work(config: FinetuneConfig, todo: list[Job], w: int, workers: int, gpus: int) -> int:
    device = torch.device("cuda", w % gpus) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(config.threads or max(1, cores // workers))
    numerics.set_switches(deterministic=False)
    console = Console(active=True)
    stop = StopRequest(World(0, 1, 0, 1, "alone", device, None))
    encoder = loading.read(config.encoder, config.task.max_seq_len)
    context = Context(config, encoder, device, console, stop)
    task: Task | None = None
    try:
        # Begin at different places, so that workers load different tasks.
        open_jobs, taken = deque(todo), list[Job]()
        open_jobs.rotate(-(w * len(todo) // workers))
        while open_jobs:
            job = open_jobs.popleft()
            if done(config, job):
                continue
            folder = folder_of(config, job)
            _check_place(config)
            with claim(folder) as mine:
                if mine is None:
                    taken.append(job)
                    continue
                if done(config, job):
                    continue
                if task is None or task.name != job.task:
                    task = open_task(config, job.task, encoder.tokenizer)
                    _check_vocabulary(task, encoder)
                    for other, result in results.of_task(folder.parent):
                        results.check_same(other / RESULT, result.made_of, made_of(task, encoder))
                    console.say(f"{task.name}: {_sizes(task)}")
                    for line in task.notes + [s for p in task.problems for s in p.lines()]:
                        console.say(f"{task.name}: {line}")
                in_place = partial(_check_lock, mine, config.run_dir)
                result = run(task, job, folder, context, in_place)
                in_place()
                with disk_errors(folder / RESULT):
                    write_sealed(folder / RESULT, result)
                (folder / LAST).unlink(missing_ok=True)
                _prune(config, folder.parent)
                console.say(_summary(job, result))
            open_jobs += taken  # whoever had them may have been stopped meanwhile
            taken.clear()
            if stop.agreed() is not None:
                raise Stopped(stop.agreed())
    except Stopped as stopped:
        console.say("stopped by a signal; the same command goes on from here")
        return 130 if stopped.args[0] == signal.SIGINT else REQUEUE_EXIT_CODE
    finally:
        stop.close()
    return 0


def _check_vocabulary(task: Task, encoder: Pretrained) -> None:
    """UserError where the vocabulary was plainly made for other text."""
    share = float((task.training_ids() == task.tokenizer.unk_id).mean())
    if share > _MAX_UNKNOWN_SHARE:
        raise UserError(
            f"{encoder.path}: {100 * share:.0f} % of the tokens of {task.name} are [UNK]; the "
            "vocabulary does not fit this text"
        )
    if encoder.left_out:
        task.notes.append(encoder.left_out)
    if share > 0.01:
        task.notes.append(f"{100 * share:.1f} % of the training tokens are [UNK]")


def _check_place(config: FinetuneConfig) -> None:
    """UserError where run_dir is no longer the one of the beginning; another may stand there."""
    path = Path(config.run_dir) / "config.yaml"
    if look(path) is None or _changes(path, config):
        raise UserError(_REPLACED.format(config.run_dir))


def _check_lock(lock: Lock, run_dir: str) -> None:
    with disk_errors(lock.path):
        if not lock.is_in_place():
            raise UserError(_REPLACED.format(run_dir))


def run(
    task: Task, job: Job, folder: Path, context: Context, in_place: Callable[[], None]
) -> dict[str, Any]:
    """Train and score one job in `folder`; the content of its result.json. in_place: of Trainer."""
    config, device = context.config, context.device
    model, notes = task.model(context, job.seed)
    for note in notes:
        context.console.say(f"{task.name} {job.name}: {note}")

    def wants_test(score: float) -> bool:
        # Whichever job ends up the best was the best of all before it, too.
        others = (result.value for _, result in results.of_task(folder.parent))
        return config.train.predict_test and score >= max(others, default=score)

    measured = Trainer(task, model, job, folder, context, in_place).run(wants_test)
    return {
        **identity(config, context.encoder, job),
        "trained": model.trained,
        **measured,
        "examples": {name: len(items) for name, items in task.sets.items()},
        "records": task.records,
        "paper": results.papers_score(task.name, measured["main"], task.records),
        "left_out": {str(p.path): dict(p.kinds) for p in task.problems if p.bad},
        "notes": notes + task.notes,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
    }


@contextmanager
def one_after_another(config: FinetuneConfig) -> Iterator[None]:
    """For the report: who ends last has seen all results and writes last. After REPORT_PATIENCE it
    says so and goes on beside a lock that a file server may hold for a host that is gone."""
    folder = Path(config.run_dir)
    if not folder.is_dir():
        yield
        return
    with disk_errors(folder, "run_dir"):
        lock = Lock(folder / "report.lock")
    with lock:
        with suppress(OSError):  # a file system without locks: `--collect` at the end has all
            if not (alone := lock.take(wait=False)):
                said = f"another process reports; waiting up to {REPORT_PATIENCE:g} s"
                notice(f"{lock.path}: {said}", sys.stderr)
                if not (alone := lock.take_within(REPORT_PATIENCE)):
                    said = "it still does: `--collect` after its end makes the report of all"
                    notice(f"{lock.path}: {said}", sys.stderr)
            for half, name in unfinished(folder, of_the_dead=True) if alone else ():
                if name in results.REPORT or name.startswith(_SUBMITTED):
                    remove_folder(half)  # of a report that was killed
        yield


def collect(config: FinetuneConfig) -> list[str]:
    """Copy the prediction files of the best job of each task (on dev) to run_dir/submission."""
    lines = []
    for name in dict.fromkeys(job.task for job in jobs(config)):
        found = results.of_task(Path(config.run_dir) / name)
        if not found:
            continue
        best, result = results.best(found)
        target, placed = Path(config.run_dir) / "submission", set()
        with disk_errors(best / "predictions"):
            files = {file.name for file in (best / "predictions").iterdir()}
        for file in (best / "predictions" / n for n in sorted(files | result.predictions.keys())):
            if (place := config.task.submitted(name, file.name)) is not None:
                with disk_errors(file):
                    changed = result.predictions.get(file.name) not in (None, sha256(file))
                if changed:
                    raise UserError(
                        f"{file}: is not what its job wrote; remove {best / RESULT} to run it again"
                    )
                placed.add(place)
                with disk_errors(target / place):
                    (target / place).parent.mkdir(parents=True, exist_ok=True)
                    # Beside the folder: what a kill leaves is not submitted.
                    half = part_of(target.with_name(_SUBMITTED + file.name))
                    with replacing(target / place, part=half, durable=False) as part:
                        shutil.copyfile(file, part)
        value = f"{result.main} {result.value:.2f}"
        lines.append(f"{name}: best on dev {best.name} ({value}) -> {target}")
        files = (path for path in target.rglob("*.*") if not path.is_dir())
        there = {path.relative_to(target).as_posix() for path in files}
        for place in sorted(p for p in there - placed if config.task.is_of(name, p)):
            with disk_errors(target / place):
                (target / place).unlink()
            lines.append(
                f"{name}: {target / place}, of another job, is taken away: {best.name} has none; "
                f"remove {best / RESULT} to run it again"
            )
    return lines


def _prune(config: FinetuneConfig, folder: Path) -> None:
    """Keep the weights that train.keep_weights names."""
    if config.train.keep_weights == "all":
        return
    found = results.of_task(folder)
    best = results.best(found)[0] if found else None  # the folder was taken away
    for job, _ in found:
        # Behind a link is an archive of the user's.
        if (job != best or config.train.keep_weights == "none") and not job.is_symlink():
            shutil.rmtree(job / "model", ignore_errors=True)


@contextmanager
def claim(folder: Path) -> Iterator[Lock | None]:
    """The lock of the job of the folder, where that is this process's to work on; held until the
    end."""
    with disk_errors(folder, "run_dir"):
        folder.mkdir(parents=True, exist_ok=True)
        lock = Lock(folder / "lock")
    with lock:
        try:
            free = distributed.claim(lock)
        except OSError as error:
            if may_pass(error):
                raise disk_error(error, folder, "run_dir") from None
            raise UserError(
                f"run_dir: {folder} cannot be locked ({error}); on such a file system "
                "give each process its own --part I/N and set workers=1"
            ) from None
        yield lock if free else None


def identity(config: FinetuneConfig, encoder: Pretrained, job: Job) -> dict[str, Any]:
    """What a result.json says of the job before its scores; the report groups by it."""
    return {
        "task": job.task,
        "batch_size": job.batch_size,
        "learning_rate": job.learning_rate,
        "epochs": job.epochs,
        "seed": job.seed,
        "encoder": str(encoder.path),
        "init": config.encoder.init,
    }


def folder_of(config: FinetuneConfig, job: Job) -> Path:
    return Path(config.run_dir) / job.task / job.name


def done(config: FinetuneConfig, job: Job) -> bool:
    """Whether the job has a result."""
    return (folder_of(config, job) / RESULT).exists()


def _sizes(task: Task) -> str:
    return ", ".join(f"{name} {len(items):,}" for name, items in task.sets.items())


def _summary(job: Job, result: dict[str, Any]) -> str:
    scores = "  ".join(f"{k} {v:.2f}" for k, v in result["scores"].items())
    failed = "  FAILED: ended at a constant guess" if result["failed"] else ""
    if result["diverged"]:
        failed = "  FAILED: loss, gradient or weights were not finite"
    speed = f"{result['examples_per_second']:.1f} examples/s"
    return f"{job.task} {job.name}: {scores}  ({speed}){failed}"
