"""A run trains, evaluates, is planned and reported on remote data as on a folder's."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from core.errors import UserError
from data_pipeline.corpus.manifest import load_manifest
from data_pipeline.stream.dataset import Dataset
from pretrain import checkpoint, report
from pretrain.layout import look_ahead
from pretrain.plan import main as plan_main
from tests import gloo
from tests.data_pipeline.stream.servers import http_server, s3_server
from tests.pretrain.test_train import configure, data, losses, train  # noqa: F401


@pytest.fixture(scope="module")
def local(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    run = tmp_path_factory.mktemp("local") / "run"
    assert gloo.run(1, train_alone, data, run) == [0]
    return run


def train_alone(rank: int, size: int, data: Path, run: Path, *overrides: str) -> Any:  # noqa: F811
    # No program is called, such as curl.
    os.environ["PATH"] = "/nowhere"
    return train(data, run, *overrides)


@pytest.fixture(params=["http", pytest.param("s3", marks=pytest.mark.slow)])
def url(request: pytest.FixtureRequest, data: Path) -> Iterator[str]:  # noqa: F811
    if request.param == "http":
        with http_server(data) as (address, _):
            yield address
    else:
        with s3_server(data) as address:
            yield address


def metrics(run: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {x["step"]: x["heldout/mlm_loss"] for x in lines if "heldout/mlm_loss" in x}


def test_training_planning_and_report_on_remote_data(
    url: str,
    data: Path,  # noqa: F811
    local: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run, sets = tmp_path / "run", [f"data.dir={url}", f"data.cache_dir={tmp_path}/cache"]
    most = 4 * sum(shard.bytes for shard in load_manifest(data).shards)
    sets.append(f"data.cache_bytes={most}")
    assert gloo.run(1, train_alone, data, run, *sets) == [0]
    assert losses(run) == losses(local) and metrics(run) == metrics(local)

    def said(main: Any, *arguments: str) -> dict[str, Any]:
        assert main(list(arguments)) == 0
        # Of the disk others use a part meanwhile.
        return json.loads(capsys.readouterr().out) | {"disk_free_bytes": None}

    score = "--score", "--json", "--cache-dir", f"{tmp_path}/own"
    shutil.rmtree(tmp_path / "cache")
    other = tmp_path / "own" / (32 * "0") / "train-00000.tar"
    other.parent.mkdir(mode=0o700, parents=True)
    other.write_bytes(bytes(most))  # with the shards more than the checkpoint's bound
    assert said(report.main, str(run), *score) == said(report.main, str(local), *score)
    assert other.exists() and (tmp_path / "own" / load_manifest(data).dataset_id).is_dir()
    assert not (tmp_path / "cache").exists()  # which a stranger's checkpoint could place anywhere
    assert report.main([str(run)]) == 0
    page = capsys.readouterr().out
    assert report.main([str(local)]) == 0
    assert page.replace(str(tmp_path), "") == capsys.readouterr().out.replace(str(local.parent), "")
    plan = ["--config", str(data / "run.yaml"), "--json", "--gpus", "1", "--set", f"run_dir={run}"]
    near = said(plan_main, *plan, f"data.dir={data}")
    assert near == said(plan_main, *plan, *sets)
    assert near != said(plan_main, *plan, "data.dir=nowhere")


def test_the_least_cache_that_a_start_takes_lasts_to_the_end(
    data: Path,  # noqa: F811
    local: Path,
    tmp_path: Path,
) -> None:
    run, room = tmp_path / "run", 1
    with http_server(data) as (url, _):
        sets = [f"data.dir={url}", f"data.cache_dir={tmp_path}/cache", "data.prefetch_bytes=0",
                "data.window_tokens=1", "data.fetch_timeout=1", "data.fetch_retries=1"]  # fmt: skip
        while True:
            config = configure(data, run, *sets, f"data.cache_bytes={room}")
            try:
                look_ahead(config, Dataset(config.data), 1)
                break
            except UserError as error:
                room = int(re.findall(r"in use at a time .(\d+) bytes", str(error))[0])
        assert gloo.run(1, train_alone, data, run, *sets, f"data.cache_bytes={room}") == [0]
    assert len(metrics(run)) == len(metrics(local))
    assert room < sum(shard.bytes for shard in load_manifest(data).shards)


def train_and_be_told(
    rank: int, size: int, wait: Callable[[Path], None], folder: Path, run: Path, *sets: str
) -> Any:
    """As `train`, but TERM comes when `wait` returns."""

    def tell() -> None:
        wait(run)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=tell, daemon=True).start()
    return train(folder, run, *sets)


def until_it_stands_still(run: Path) -> None:
    """For two seconds, behind a step."""
    done, since = 0, time.monotonic()
    while not done or time.monotonic() - since < 2.0:
        time.sleep(0.05)
        found = len(losses(run)) if (run / "metrics.jsonl").exists() else 0
        if found > done:
            done, since = found, time.monotonic()


def until_it_waits_for_a_first_window(_: Path) -> None:
    while not any(thread.name == "first-window" for thread in threading.enumerate()):
        time.sleep(0.05)


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_phase_that_waits_for_its_first_window_hears_a_signal(
    data: Path,  # noqa: F811
    tmp_path: Path,
    size: int,
) -> None:
    run, whole = tmp_path / "run", tmp_path / "whole"
    sets = ["phases.0.steps=3", "evaluation.every_steps=0"]
    assert gloo.run(size, train_alone, data, whole, *sets) == [0] * size
    with http_server(data) as (url, behaviour):
        sets += [f"data.dir={url}", f"data.cache_dir={tmp_path}/cache", "data.fetch_timeout=50"]
        behaviour.stall = 100.0
        names = [f"{shard.name}.tar" for shard in load_manifest(data).shards]
        behaviour.faults = {name: ["stall"] * 9 for name in names}
        told = gloo.run(
            size, train_and_be_told, until_it_waits_for_a_first_window, data, run, *sets
        )
        assert told == [85] * size and not list(run.glob("checkpoints/step-*"))
        behaviour.faults.clear()
        assert gloo.run(size, train_alone, data, run, *sets) == [0] * size
    assert losses(run) == losses(whole)


@pytest.mark.parametrize("workers", [2, pytest.param(0, marks=pytest.mark.slow)])
def test_a_run_that_waits_for_its_data_hears_a_signal(
    data: Path,  # noqa: F811
    tmp_path: Path,
    workers: int,
) -> None:
    run, whole = tmp_path / "run", tmp_path / "whole"
    sets = [f"data.workers={workers}", "data.window_tokens=1", "phases.0.steps=30",
            "evaluation.every_steps=0"]  # fmt: skip
    assert gloo.run(1, train_alone, data, whole, *sets) == [0]
    with http_server(data) as (url, behaviour):
        sets += [f"data.dir={url}", f"data.cache_dir={tmp_path}/cache", "data.prefetch_bytes=0",
                 "data.fetch_timeout=9"]  # fmt: skip
        behaviour.stall = 100.0
        behaviour.faults = {f"{load_manifest(data).shards[1].name}.tar": ["stall"] * 9}
        assert gloo.run(1, train_and_be_told, until_it_stands_still, data, run, *sets) == [85]
        saved = checkpoint.read_state(checkpoint.resolve(run))
        assert 0 < saved.position.step == len(losses(run)) < 30
        behaviour.faults.clear()
        assert gloo.run(1, train_alone, data, run, *sets) == [0]
    assert losses(run) == losses(whole)
