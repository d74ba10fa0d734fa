"""Trackers get TensorBoard's numbers, one run over all starts, and never end a run."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from configs.load import check as checked
from configs.load import leaves
from core.errors import UserError
from pretrain.config import LoggingConfig
from pretrain.metrics import Recorder
from pretrain.trackers import check, open_sinks

CONFIG = {"seed": 3, "phases": [{"steps": 2}, {"steps": 4}], "none": None}


class Kept:
    def __init__(self) -> None:
        self.seen: list[tuple[int, dict[str, float]]] = []

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.seen.append((step, dict(values)))

    def close(self) -> None:
        self.seen.append((-1, {}))


def test_a_sink_gets_what_the_board_shows(tmp_path: Path) -> None:
    sink = Kept()
    for active in (True, False):
        recorder = Recorder(tmp_path, 0, active, sinks=[sink])
        recorder.write(1, {"train/loss": 2, "trust_ratio_x/y": 1.0}, {"1_loss/all": 2, "b": None})
        recorder.write(2, {"trust_ratio_x/y": 1.0}, {})
        recorder.close()
    assert sink.seen == [(1, {"1_loss/all": 2.0})]  # open still: a rollback has a new recorder


def test_leaves_are_the_values_by_key() -> None:
    assert leaves(CONFIG) == {"seed": 3, "phases.0.steps": 2, "phases.1.steps": 4, "none": None}


def test_a_missing_package_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="^logging.trackers: mlflow .*: pip install mlflow-skinny$"):
        check(["mlflow"])
    check([])
    with pytest.raises(UserError, match="trackers"):
        checked({"trackers": ["neptune"]}, LoggingConfig, "c")


def test_an_error_of_a_tracker_is_one_line_and_its_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**settings: object) -> None:
        raise OSError("no\nroute")

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=fail, Settings=dict))
    (sink,) = open_sinks(["wandb"], tmp_path, CONFIG)
    sink.log(1, {"a": 1.0})
    sink.close()
    assert capsys.readouterr().err == "wandb: no route; training goes on without it\n"
    assert json.loads((tmp_path / "trackers.json").read_text()) == {}
    assert open_sinks([], tmp_path / "none", CONFIG) == []


def test_a_silent_tracker_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers, failed = threading.Event(), []

    class Silent(Kept):
        id = "of wandb"

        def __init__(self, **settings: object) -> None:
            super().__init__()
            if settings["name"] == "never":
                answers.wait(5)

        def define_metric(self, *names: str, **settings: str) -> None: ...

        def log(self, values: Mapping[str, float]) -> None:
            failed.extend([] if answers.wait(5) else ["a step waited"])

    module = types.SimpleNamespace(init=Silent, Settings=dict)
    monkeypatch.setitem(sys.modules, "wandb", module)
    for name, said in (
        ("runs", "does not keep up: numbers are left out there\nwandb: did not end in 0.05 s"),
        ("never", "no answer in 0.05 s"),
    ):
        run = tmp_path / name
        run.mkdir()
        (sink,) = open_sinks(["wandb"], run, CONFIG, patience=0.05)
        for step in range(2000):
            sink.log(step, {"a": 1.0})
        sink.close()
        assert capsys.readouterr().err == f"wandb: {said}; training goes on without it\n"
    answers.set()
    assert not failed


@pytest.mark.parametrize("damaged", ["{", "[]", '{"wandb": 3}', '{"wandb": {}}'])
def test_damaged_ids_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damaged: str
) -> None:
    (tmp_path / "trackers.json").write_text(damaged)
    seen = []
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(
        init=lambda **settings: seen.append(settings["id"]), Settings=dict))  # fmt: skip
    open_sinks(["wandb"], tmp_path, CONFIG)
    assert re.fullmatch("[0-9a-f]{12}", seen[0])


@pytest.fixture
def two_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[[str], Path]]:
    """Of a run under a tracker that no environment talks to: steps 1 and 2, then 2 and 3 under
    another setting."""

    def start(name: str) -> Path:
        run = tmp_path / "base"
        run.mkdir()
        for first, config in ((1, CONFIG), (2, CONFIG | {"seed": 4})):
            (sink,) = open_sinks([name], run, config)
            for step in (first, first + 1):
                sink.log(step, {"1_loss/all": step / 2})
            sink.close()
        return run

    for name in ("MLFLOW_TRACKING_URI", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    yield start
    assert "without it" not in capsys.readouterr().err


@pytest.mark.slow
def test_mlflow_has_one_run_over_two_starts(two_starts: Callable[[str], Path]) -> None:
    mlflow = pytest.importorskip("mlflow", reason="pip install mlflow-skinny")
    run = two_starts("mlflow")
    client = mlflow.MlflowClient(tracking_uri=(run / "mlruns").as_uri())
    (experiment,) = client.search_experiments(filter_string="name = 'bert-pretraining'")
    (found,) = client.search_runs([experiment.experiment_id])
    assert (found.info.run_name, found.info.status) == ("base", "FINISHED")
    assert json.loads((run / "trackers.json").read_text()) == {"mlflow": found.info.run_id}
    assert found.data.params["phases.1.steps"] == "4" and found.data.params["seed"] == "3"
    history = client.get_metric_history(found.info.run_id, "1_loss/all")
    assert [(m.step, m.value) for m in history] == [(1, 0.5), (2, 1.0), (2, 1.0), (3, 1.5)]


def wandb_records(data: bytes) -> Iterator[bytes]:
    """Of a .wandb file: LevelDB's log in blocks of 32 KiB behind 7 bytes that name the format."""
    at, parts = 7, b""
    while at + 7 <= len(data):
        if (left := -at % 32768) < 7 and left:
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, last
            yield parts
            parts = b""


@pytest.mark.slow
def test_wandb_has_one_run_over_two_starts_and_asks_no_server(
    two_starts: Callable[[str], Path],
) -> None:
    wandb = pytest.importorskip("wandb", reason="pip install wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    run = two_starts("wandb")
    wandb.teardown()
    files = sorted((run / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2
    ids, points = set(), []
    for file in files:
        for data in wandb_records(file.read_bytes()):
            record = Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "run":
                ids.add((record.run.run_id, record.run.display_name, record.run.project))
            if record.WhichOneof("record_type") == "history":
                items = {
                    i.key or ".".join(i.nested_key): json.loads(i.value_json)
                    for i in record.history.item
                }
                points.append((items["step"], items["1_loss/all"]))
    assert points == [(1, 0.5), (2, 1.0), (2, 1.0), (3, 1.5)]
    ((run_id, *named),) = ids
    assert named == ["base", "bert-pretraining"]
    assert json.loads((run / "trackers.json").read_text()) == {"wandb": run_id}
