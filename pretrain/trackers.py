"""wandb and mlflow as sinks of the recorder, beside TensorBoard: `logging.trackers`.

A package is imported where the configuration names it. Both write into the run folder and ask no
server unless the environment says so: WANDB_MODE=online, MLFLOW_TRACKING_URI. The id of a run there
is kept in RUN/trackers.json, so a resume goes on with it; steps that are done again stand twice.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import queue
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from configs.load import leaves
from core.console import notice
from core.errors import UserError, short
from core.files import disk_errors, read_json, write_json

_IDS = "trackers.json"  # in the run folder
_PROJECT = "bert-pretraining"  # where the environment names none
_PIP = {"wandb": "wandb", "mlflow": "mlflow-skinny"}
_LONGEST = 500  # characters of a setting, as mlflow takes it
_WAITING = 1000  # steps' numbers that a slow server is given time for
PATIENCE = 30.0  # seconds for a tracker's start, and for its end


class Sink(Protocol):
    """What gets the numbers that TensorBoard gets, by the same names."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def check(names: Sequence[str]) -> None:
    """UserError where a package is missing."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise UserError(f"logging.trackers: {name} is not installed: pip install {_PIP[name]}")


def open_sinks(
    names: Sequence[str], run_dir: Path, config: Mapping[str, Any], patience: float = PATIENCE
) -> list[Sink]:
    """Of the run in `run_dir`; config: its tree, of plain values. patience: seconds that a start or
    an end may take."""
    file, sinks = run_dir / _IDS, []
    ids = _known(file) if names else {}
    kinds = {"wandb": _Wandb, "mlflow": _Mlflow}
    for name in names:
        start = functools.partial(kinds[name], run_dir, ids.get(name), config)
        sink = _Guarded(name, start, patience)
        sinks.append(sink)
        ids |= {name: sink.id} if sink.id else {}
    if names:
        with disk_errors(file):
            write_json(file, ids)
    return sinks


def _known(file: Path) -> dict[str, str]:
    """The ids of an earlier start; none where the file is damaged."""
    try:
        ids = read_json(file) if file.exists() else {}
    except UserError:
        return {}
    return ids if all(isinstance(run_id, str) for run_id in ids.values()) else {}


class _Guarded:
    """A sink that has a thread to itself: training waits for none of its servers. Its first error
    is said, and its last: training does not end for it."""

    def __init__(self, name: str, start: Callable[[], Any], patience: float) -> None:
        self._name, self._patience, self.id = name, patience, ""
        self._waiting: queue.Queue[tuple[int, Mapping[str, float]] | None] = queue.Queue(_WAITING)
        self._begun, self._over, self._full = threading.Event(), threading.Event(), False
        self._thread = threading.Thread(target=self._serve, args=(start,), daemon=True)
        self._thread.start()
        if not self._begun.wait(patience):
            self._give_up(f"no answer in {patience:g} s")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if self._over.is_set():
            return
        try:
            self._waiting.put_nowait((step, values))
        except queue.Full:
            if not self._full:
                self._full = True
                self._say("does not keep up: numbers are left out there")

    def close(self) -> None:
        end = time.monotonic() + self._patience
        if not self._over.is_set():
            try:
                self._waiting.put(None, timeout=self._patience)
                self._thread.join(max(end - time.monotonic(), 0.0))
            except queue.Full:
                pass
            if self._thread.is_alive() and not self._over.is_set():
                self._give_up(f"did not end in {self._patience:g} s")

    def _serve(self, start: Callable[[], Any]) -> None:
        try:
            sink = start()
            self.id = sink.id
            self._begun.set()
            while not self._over.is_set() and (item := self._waiting.get()) is not None:
                sink.log(*item)
            sink.close()
        except Exception as error:  # of a foreign library, its network or its server
            if not self._over.is_set():
                self._give_up(short(" ".join(str(error).split()) or type(error).__name__, 200))
        self._begun.set()

    def _give_up(self, why: str) -> None:
        self._over.set()
        self._say(f"{why}; training goes on without it")

    def _say(self, what: str) -> None:
        notice(f"{self._name}: {what}", sys.stderr)


class _Wandb:
    def __init__(self, run_dir: Path, known: str | None, config: Mapping[str, Any]) -> None:
        import wandb

        self.id = known or uuid.uuid4().hex[:12]
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", _PROJECT),
            name=run_dir.resolve().name,
            id=self.id,
            resume="allow",
            dir=str(run_dir),
            mode=os.environ.get("WANDB_MODE", "offline"),
            config=dict(config),
            save_code=False,
            # The console and the output stay ours.
            settings=wandb.Settings(silent=True, console="off"),
        )
        # wandb drops a step that is not above the last one, as after a rollback.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def close(self) -> None:
        self._run.finish()


class _Mlflow:
    def __init__(self, run_dir: Path, known: str | None, config: Mapping[str, Any]) -> None:
        # mlflow 3 wants to be told that a folder is meant; a database takes more packages.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        uri = os.environ.get("MLFLOW_TRACKING_URI", (run_dir / "mlruns").resolve().as_uri())
        self._client, self._metric = MlflowClient(tracking_uri=uri), Metric
        if known is not None:
            self.id = known
            self._client.update_run(known, status="RUNNING")
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
        experiment = self._client.get_experiment_by_name(name)
        place = experiment.experiment_id if experiment else self._client.create_experiment(name)
        self.id = self._client.create_run(place, run_name=run_dir.resolve().name).info.run_id
        params = [Param(key, short(str(value), _LONGEST)) for key, value in leaves(config).items()]
        for first in range(0, len(params), 100):  # as many as one call takes
            self._client.log_batch(self.id, params=params[first : first + 100])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now = int(1000 * time.time())
        metrics = [self._metric(name, value, now, step) for name, value in values.items()]
        self._client.log_batch(self.id, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self.id)
