"""A checkpoint is whole or it is not one; the newest good one is found; old ones go."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import math
import os
import resource
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from configs.load import load
from core.errors import TryAgain, UserError
from core.files import Lock
from data_pipeline.stream.state import StreamState
from pretrain import checkpoint
from pretrain.card import training_results
from pretrain.checkpoint import Checkpoints
from pretrain.config import CheckpointConfig, PretrainConfig
from pretrain.distributed import World
from pretrain.origin import newest_state
from pretrain.run_state import (
    FINISHED,
    ROLLBACKS,
    Position,
    RunState,
    State,
    check_facts,
    finished_steps,
)
from tests.damage import damaged

VOCABULARY = b"[PAD]\n[UNK]\n"
ALONE = World(0, 1, 0, 1, "alone", torch.device("cpu"), None)


def state(step: int) -> State:
    return State(
        Position(step=step), None, {"seed": 1}, {"dataset_id": "d"}, 1, ({"event": "start"},)
    )


def write(folder: Path) -> list[str]:
    (folder / "weights.pt").write_bytes(bytes(range(256)) * 10)
    return ["weights.pt"]


def make(run: Path, steps: list[int], said: list[str] | None = None, **keep: Any) -> Checkpoints:
    config = CheckpointConfig(**({"keep_last": 10, "asynchronous": False} | keep))
    keeper = Checkpoints(run, ALONE, config, [].append if said is None else said.append)
    for step in steps:
        keeper.save(state(step), VOCABULARY, lambda: write)
        keeper.wait()
    return keeper


def names(run: Path) -> list[str]:
    return sorted(p.name for p in (run / "checkpoints").iterdir())


def test_state_survives_the_file() -> None:
    assert State.from_json(state(7).to_json(), "x") == state(7)


def test_what_is_saved_is_found_and_whole(tmp_path: Path) -> None:
    keeper = make(tmp_path / "run", [5, 10])
    newest = keeper.newest()
    assert newest is not None and newest.name == "step-00000010"
    assert checkpoint.verify(newest) is None
    assert checkpoint.read_state(newest) == state(10)
    assert (tmp_path / "run/checkpoints/latest").read_text() == "step-00000010\n"
    for named in (tmp_path / "run", tmp_path / "run/checkpoints", newest):
        assert checkpoint.resolve(named) == newest


@pytest.mark.parametrize("file", ["engine/weights.pt", "state.json", "vocab.txt", "COMPLETE.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_any_damage_is_named_and_the_one_before_is_taken(
    tmp_path: Path, file: str, damage: str
) -> None:
    said: list[str] = []
    keeper = make(tmp_path / "run", [5, 10], said)
    path = tmp_path / "run/checkpoints/step-00000010" / file
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    elif damage == "cut":
        path.write_bytes(data[:-1])
    else:
        path.unlink()
    newest = keeper.newest()
    assert newest is not None and newest.name == "step-00000005"
    assert len(said) == 1 and "step-00000010" in said[0]
    passed_over: list[str] = []
    assert checkpoint.resolve(tmp_path / "run", passed_over) == newest
    assert passed_over == said
    with pytest.raises(UserError, match=r"step-00000010.*(changed|bytes|No such file|missing)"):
        checkpoint.resolve(path.parent if path.parent.name != "engine" else path.parents[1])
    shutil.rmtree(newest)
    with pytest.raises(UserError, match="run: no whole checkpoint.*step-00000010"):
        checkpoint.resolve(tmp_path / "run")
    # Steps are not begun anew beside it without a word.
    with pytest.raises(UserError, match="run_dir: .*step-00000010.*to begin anew take another run"):
        keeper.newest()


@pytest.mark.parametrize(
    "marker",
    ["", "[]", "{}", '{"files": []}', '{"files": {"a": 1}}', '{"files": {}}',
     '{"files": {"state.json": [1, "x"]}}', "[" * 9999,
     *(json.dumps({"files": dict.fromkeys(["state.json", "vocab.txt", "engine/a", name], [n, "x"])})
       for name, n in (("engine/../../x", 1), ("engine/a\0b", 1), ("engine/\ud800", 1),
                       ("engine/x", math.inf)))],
)  # fmt: skip
def test_a_marker_that_lists_no_files_is_damage(tmp_path: Path, marker: str) -> None:
    said: list[str] = []
    keeper = make(tmp_path, [5, 10], said)
    (tmp_path / "checkpoints/step-00000010/COMPLETE.json").write_text(marker)
    newest = keeper.newest()
    assert newest is not None and newest.name == "step-00000005"
    assert len(said) == 1 and "COMPLETE.json: missing, or does not list" in said[0]
    (tmp_path / "checkpoints/step-00000010/COMPLETE.json").unlink()
    keeper.forget_after(newest)  # it may be mended
    assert (tmp_path / "checkpoints/step-00000010/state.json").exists()


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_failed_write_leaves_the_older_ones_and_no_rest(
    tmp_path: Path, asynchronous: bool
) -> None:
    said: list[str] = []
    keeper = make(tmp_path / "run", [5], said, asynchronous=asynchronous, max_failed_writes=2)

    def full(folder: Path) -> list[str]:
        write(folder)
        raise OSError(errno.ENOSPC, "No space left on device", str(folder / "weights.pt"))

    for step in (10, 15):
        keeper.save(state(step), VOCABULARY, lambda: full)
        keeper.wait()
        assert names(tmp_path / "run") == ["latest", "step-00000005"]
        assert keeper.saved_step != step
    assert len(said) == 2 and all("weights.pt: No space left on device" in line for line in said)
    keeper.save(state(20), VOCABULARY, lambda: write)
    keeper.wait()
    assert (keeper.saved_step, keeper.failed_in_a_row) == (20, 0)
    with pytest.raises(UserError, match="3 checkpoints in a row failed"):
        for step in (25, 30, 35):
            keeper.save(state(step), VOCABULARY, lambda: full)
            keeper.wait()
    assert len(said) == 4 and names(tmp_path / "run")[-1] == "step-00000020"


@pytest.mark.parametrize("name", ["state.json", "vocab.txt"])
def test_a_failed_write_names_the_file(tmp_path: Path, name: str) -> None:
    said: list[str] = []
    keeper = make(tmp_path / "run", [], said, max_failed_writes=2)

    def full(engine: Path) -> list[str]:
        (engine.parent / name).symlink_to("/dev/full")
        return write(engine)

    keeper.save(state(10), VOCABULARY, lambda: full)
    keeper.wait()
    (line,) = said
    assert f"/{name}: No space left on device" in line


def test_an_unreadable_marker_of_an_older_one_is_left_alone(tmp_path: Path) -> None:
    said: list[str] = []
    keeper = make(tmp_path, [5, 10, 15], said, keep_last=2, keep_every=5, max_total_gb=1)
    for step, text in ((5, ""), (10, '{"files": []}')):
        (tmp_path / f"checkpoints/step-{step:08d}/COMPLETE.json").write_text(text)
    keeper.save(state(20), VOCABULARY, lambda: write)
    keeper.wait()
    assert (keeper.saved_step, said) == (20, [])
    assert names(tmp_path) == ["latest", *(f"step-{s:08d}" for s in (5, 10, 15, 20))]
    assert keeper.newest().name == "step-00000020"


def test_one_that_this_user_may_not_read_counts_where_it_is_the_newest(tmp_path: Path) -> None:
    said: list[str] = []
    keeper = make(tmp_path, [5, 10], said, keep_last=2)
    folder = tmp_path / "checkpoints"

    def hide(path: Path) -> None:
        path.unlink()
        path.symlink_to("/proc/sys/net/ipv4/route/flush")  # which root may not read either

    hide(folder / "step-00000005/COMPLETE.json")
    for step in (15, 20):
        keeper.save(state(step), VOCABULARY, lambda: write)
    assert names(tmp_path) == ["latest", *(f"step-{s:08d}" for s in (5, 15, 20))]
    assert said == [] and checkpoint.complete_steps(folder) == [15, 20]
    config = PretrainConfig.model_construct(run_dir=str(tmp_path), phases=[None])
    assert checkpoint.begun(config) == (0, None)
    for name, *readers in (
        ("state.json", lambda: checkpoint.begun(config), lambda: newest_state(tmp_path)),
        ("COMPLETE.json", lambda: checkpoint.complete_steps(folder)),
    ):
        hide(folder / "step-00000020" / name)
        for read in readers:
            with pytest.raises(UserError, match=f"00000020/{name}: Permission denied"):
                read()


def test_a_copy_beside_the_checkpoints_is_not_the_newest_of_them(tmp_path: Path) -> None:
    make(tmp_path, [5, 10], keep_last=2)
    folder = tmp_path / "checkpoints"
    for name in ("step-original", "step-best", "step-99"):
        shutil.copytree(folder / "step-00000005", folder / name)
    assert newest_state(tmp_path)[0].parent.name == "step-00000010"
    assert checkpoint.complete_steps(folder) == [5, 10]
    assert checkpoint.newest_checkpoint(folder)[0] == 10


@pytest.mark.parametrize("file", ["COMPLETE.json", "state.json", "engine/weights.pt"])
@pytest.mark.parametrize(
    ("like", "error", "why"),
    [
        ("/proc/self/mem", TryAgain, "Input/output error"),
        ("/proc/sys/net/ipv4/route/flush", UserError, "Permission denied"),  # for root, too
    ],
)
def test_what_cannot_be_read_is_not_taken_for_damaged(
    tmp_path: Path, file: str, like: str, error: type[UserError], why: str
) -> None:
    """An I/O error (here: of a process's memory at 0) ends a start with 85, what this user may not
    read with 2; nothing is removed."""
    keeper = make(tmp_path, [5, 10, 15])
    before = names(tmp_path)
    path = tmp_path / "checkpoints/step-00000015" / file
    size = path.stat().st_size
    path.rename(tmp_path / "kept")
    path.symlink_to(like)
    # Its size as stat tells it is 0, so that of a listed file must be so too.
    if file != "COMPLETE.json":
        marker = path.parents[file.count("/")] / "COMPLETE.json"
        marker.write_text(marker.read_text().replace(f"[{size}, ", "[0, "))
    for act in (keeper.newest, lambda: checkpoint.resolve(tmp_path)):
        with pytest.raises(error, match=f"{path}: {why}") as found:
            act()
        assert found.value.code == error.code
    if file == "COMPLETE.json":
        with pytest.raises(error):
            keeper.forget_after(tmp_path / "checkpoints/step-00000005")
        assert names(tmp_path) == before
        path.unlink()
        (tmp_path / "kept").rename(path)
        keeper.forget_after(tmp_path / "checkpoints/step-00000005")
        assert names(tmp_path) == ["latest", "step-00000005"]


@pytest.mark.parametrize("file", ["COMPLETE.json", "state.json", "engine/weights.pt"])
def test_a_pipe_in_a_checkpoint_is_damage_that_nobody_waits_for(tmp_path: Path, file: str) -> None:
    said: list[str] = []
    keeper = make(tmp_path, [5, 10], said)
    folder = tmp_path / "checkpoints/step-00000010"
    size = (folder / file).stat().st_size
    marker = (folder / "COMPLETE.json").read_text().replace(f"[{size}, ", "[0, ")
    (folder / "COMPLETE.json").write_text(marker)
    (folder / file).unlink()
    os.mkfifo(folder / file)
    assert keeper.newest().name == "step-00000005" and len(said) == 1


def test_a_latest_that_cannot_be_replaced_fails_no_checkpoint(tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "checkpoints/latest").mkdir(parents=True)
    keeper = make(tmp_path, [5], said)
    assert (keeper.saved_step, keeper.newest().name) == (5, "step-00000005")
    assert len(said) == 1 and "latest does not lead to step-00000005: Is a directory" in said[0]


def test_links_to_an_archive_are_cut_and_the_archive_stays(tmp_path: Path) -> None:
    archive, run = tmp_path / "archive", tmp_path / "run/checkpoints"
    make(archive, [5, 15])
    whole = sorted(p.name for p in archive.rglob("*"))
    make(tmp_path / "run", [10])
    (run / "step-00000005").symlink_to(archive / "checkpoints/step-00000005")
    (run / "step-00000015").symlink_to(archive / "checkpoints/step-00000015")
    (run / "writing-step-00000015").symlink_to(archive / "checkpoints")
    make(tmp_path / "run", [15], keep_last=1)
    assert names(tmp_path / "run") == ["latest", "step-00000015"]
    assert not (run / "step-00000015").is_symlink()
    assert sorted(p.name for p in archive.rglob("*")) == whole
    for folder in (run, archive / "checkpoints"):
        assert checkpoint.verify(folder / "step-00000015") is None


def test_a_run_folder_that_is_removed_before_its_first_checkpoint_ends_the_run(tmp_path: Path):
    run = tmp_path / "run"
    run.mkdir()
    with Lock(run / "lock"):
        keeper = make(run, [])
        keeper.check_disk(1, 0, 10)
        run.rename(tmp_path / "elsewhere")
        with pytest.raises(UserError, match="run_dir: .*run was removed or replaced"):
            keeper.save(state(5), VOCABULARY, lambda: write)
    assert not run.exists()


@pytest.mark.parametrize(
    ("what", "again"),
    [("run", ""), ("run/lock", ""), ("run", "lock"), ("run/lock", "lock"), ("run", "folder")],
)
def test_a_run_folder_that_is_removed_ends_the_run(tmp_path: Path, what: str, again: str) -> None:
    """Of the lock alone, if another run has made it anew."""
    run = tmp_path / "run"
    run.mkdir()
    with contextlib.ExitStack() as held:
        held.enter_context(Lock(run / "lock"))
        keeper = make(run, [5])
        (tmp_path / what).rename(tmp_path / "elsewhere")
        if again:
            (run / "checkpoints").mkdir(parents=True, exist_ok=True)
            if again == "lock":
                assert held.enter_context(Lock(run / "lock")).take(wait=False)
        ends = bool(again) or what == "run"
        removed = pytest.raises(UserError, match="run_dir: .*run was removed or replaced")
        with removed if ends else contextlib.nullcontext():
            keeper.save(state(10), VOCABULARY, lambda: write)
    assert (run / "checkpoints/step-00000010").exists() != ends


def test_a_state_of_the_wrong_kind_is_one_line_that_names_the_key() -> None:
    stream = StreamState("d", "v", 1, "h", {}, 1, 0, 4)
    whole = json.loads(replace(state(7), stream=stream).to_json())

    def garbled(at: Any, key: str | int, path: str) -> Iterator[tuple[str, str]]:
        for value in ("seven", -1.5, None, [[]], {"a": {}}):
            kept, at[key] = at[key], value
            yield path, json.dumps(whole)
            at[key] = kept
        if isinstance(at[key], dict):
            for inner in at[key]:
                yield from garbled(at[key], inner, f"{path}.{inner}")

    refused = set()
    for field in whole["stream"]:
        lacks = {key: value for key, value in whole["stream"].items() if key != field}
        with pytest.raises(UserError, match=f"^state.json: .*{field}"):
            State.from_json(json.dumps(whole | {"stream": lacks}), "state.json")
    for key in whole:
        for path, text in garbled(whole, key, key):
            try:
                State.from_json(text, "state.json")
            except UserError as error:
                assert str(error).startswith("state.json: ") and "\n" not in str(error)
                refused.add(path)
    assert {"position.step", "position.phase", "stream.row", "stream.seed", "history"} <= refused
    for text in ("null", "3", '"x"', "[]"):
        with pytest.raises(UserError, match="^state.json: not a checkpoint's state"):
            State.from_json(text, "state.json")
    with pytest.raises(UserError, match="position.phase: .*greater than or equal to 0"):
        State.from_json(json.dumps(whole | {"position": {"phase": -1}}), "state.json")
    for key in ("epoch", "window", "row", "rows_per_step", "tokens"):
        text = json.dumps(whole | {"stream": whole["stream"] | {key: -1}})
        with pytest.raises(UserError, match=f"stream.{key}: .*greater than or equal to 0"):
            State.from_json(text, "state.json")
    event = {"event": "phase", "step": 7, "phase": 1}
    values = "seven", -1, 1.5, None, {"seed": 3}, {"seed": [1]}
    for key, value in itertools.product(("step", "phase", "changed"), values):
        text = json.dumps(whole | {"history": [event, event | {key: value}]})
        with pytest.raises(UserError, match=f"^state.json: .*: history.1.{key}[:.]"):
            State.from_json(text, "state.json")


@pytest.mark.parametrize("key", ["dataset", "config", "position"])
def test_what_a_state_lacks_is_one_line(tmp_path: Path, key: str) -> None:
    config = load("configs/pretrain_demo.yaml", PretrainConfig)
    odd = {"dataset": {"lowercase": 1}, "config": {"model": "x"}, "position": {"step": 10**30}}
    facts = {"dataset_id": "d", "vocab_sha256": "v", "lowercase": True}
    good = replace(state(7), dataset=facts, config=config.model_dump(mode="json"))
    text = json.dumps(json.loads(good.to_json()) | {key: odd[key]})
    with pytest.raises(UserError, match=f"state.json: not a checkpoint's state: {key}"):
        check_facts(State.from_json(text, "x/state.json"), Path("x"))
    check_facts(State.from_json(good.to_json(), "x"), Path("x"))


def test_a_programming_error_is_not_hidden(tmp_path: Path) -> None:
    keeper = make(tmp_path / "run", [])

    def broken(folder: Path) -> list[str]:
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes"):
        keeper.save(state(10), VOCABULARY, lambda: broken)
    assert names(tmp_path / "run") == []


def test_the_step_goes_on_while_the_copy_is_written(tmp_path: Path) -> None:
    make(tmp_path / "run", [5])
    recorded: list[dict[str, float]] = []
    keeper = Checkpoints(tmp_path / "run", ALONE, CheckpointConfig(), print, recorded.append)
    go_on, weights = threading.Event(), bytearray(b"before")

    def snapshot() -> Any:
        copied = bytes(weights)

        def slow(folder: Path) -> list[str]:
            assert go_on.wait(60)
            (folder / "weights.pt").write_bytes(copied)
            return ["weights.pt"]

        return slow

    keeper.save(state(10), VOCABULARY, snapshot)
    weights[:] = b"after!"  # the next step
    keeper.poll()
    assert not recorded
    assert names(tmp_path / "run") == ["latest", "step-00000005", "writing-step-00000010"]
    assert checkpoint.resolve(tmp_path / "run").name == "step-00000005"
    go_on.set()
    keeper.wait()
    (measured,) = recorded
    written = tmp_path / "run/checkpoints/step-00000010"
    assert checkpoint.verify(written) is None
    assert (written / "engine/weights.pt").read_bytes() == b"before"
    sizes = [p.stat().st_size for p in written.rglob("*") if p.is_file()]
    marker = (written / "COMPLETE.json").stat().st_size
    assert measured["checkpoint/bytes"] == sum(sizes) - marker
    assert 0 < measured["checkpoint/stall_share"] < 1
    assert measured.keys() >= {"checkpoint/stall_seconds", "checkpoint/write_seconds"}


def test_one_is_written_at_a_time(tmp_path: Path) -> None:
    keeper = make(tmp_path / "run", [], asynchronous=True)
    order: list[str] = []

    def slow(name: str) -> Any:
        def call(folder: Path) -> list[str]:
            order.append(f"{name} begins")
            time.sleep(0.2)
            order.append(f"{name} ends")
            return write(folder)

        return call

    keeper.save(state(5), VOCABULARY, lambda: slow("first"))
    keeper.save(state(10), VOCABULARY, lambda: slow("second"))
    assert order[:2] == ["first begins", "first ends"]
    keeper.wait()
    assert names(tmp_path / "run") == ["latest", "step-00000005", "step-00000010"]


def test_keeps_the_last_and_every_multiple(tmp_path: Path) -> None:
    make(tmp_path / "run", [10, 20, 30, 40, 50], keep_last=2, keep_every=20)
    assert names(tmp_path / "run") == [
        "latest", "step-00000020", "step-00000040", "step-00000050"
    ]  # fmt: skip


def test_one_that_cannot_be_removed_is_named_and_keeps_no_other(tmp_path: Path) -> None:
    said: list[str] = []
    make(tmp_path, [10, 20, 30, 40])
    half, whole = (tmp_path / f"checkpoints/step-000000{step}" for step in (20, 30))
    stuck = [half / "state.json", whole]
    tool = shutil.which("chattr") or "false"
    if subprocess.run([tool, "+i", *stuck], capture_output=True).returncode:
        pytest.skip("needs root, and a file system whose files can be made immutable")
    try:
        keeper = make(tmp_path, [50], said, keep_last=1)
        with pytest.raises(OSError) as caught:
            keeper.forget_after(half)
        assert caught.value.filename == str(whole)
    finally:
        left = half.with_name("writing-step-00000020")
        for path in (whole, half / "state.json", left / "state.json"):
            subprocess.run(["chattr", "-i", path], capture_output=True)
    kept = ["latest", "step-00000030", "step-00000050", left.name]
    assert names(tmp_path) == kept
    assert said == [
        f"{left} stays: it could not be removed whole",
        f"{whole} stays: Operation not permitted",
    ]
    assert checkpoint.verify(whole) is None
    make(tmp_path, [60], keep_last=1)
    assert "step-00000030" not in names(tmp_path)


def test_the_total_size_is_bounded_and_the_newest_always_stands(tmp_path: Path) -> None:
    make(tmp_path / "size", [10])
    one = sum(p.stat().st_size for p in (tmp_path / "size").rglob("*") if p.is_file()) * 1e-9
    steps, said = [10, 20, 30, 40, 50], []
    make(tmp_path / "two", steps, said, keep_every=10, max_total_gb=2.5 * one)
    assert names(tmp_path / "two") == ["latest", "step-00000040", "step-00000050"]
    assert [line.split()[0] for line in said] == ["step-00000010", "step-00000020", "step-00000030"]
    assert all("checkpoint.max_total_gb" in line for line in said)
    make(tmp_path / "none", steps, max_total_gb=one / 10)
    assert names(tmp_path / "none") == ["latest", "step-00000050"]
    assert checkpoint.verify(tmp_path / "none/checkpoints/step-00000050") is None


def test_a_run_that_will_not_fit_on_the_disk_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = shutil.disk_usage(tmp_path).free // 8  # 8 checkpoints would fill it
    said: list[str] = []

    def check(steps: int, step: int = 0, size: int = size, **keep: Any) -> None:
        make(tmp_path / "run", [], said, every_steps=5, **keep).check_disk(size, step, steps)

    check(100, keep_last=5)
    with pytest.raises(UserError, match="not enough disk.*checkpoint.keep_last: 9"):
        check(100, keep_last=9)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=300_000))
        with pytest.raises(UserError, match=r"has 300 kB free .* need 600 kB more"):
            check(100, size=100_000, keep_last=5)
    check(30, keep_last=9)  # there are only six to write
    check(100, keep_last=9, max_total_gb=1e-9 * size * 5)
    assert said == []
    # What is there need not come again, and what goes on is refused only without room for one.
    make(tmp_path / "run", [5, 10])
    check(35, 10, keep_last=9)
    check(100, 10, keep_last=9, keep_every=5)
    assert len(said) == 1 and said[0].startswith("warning: not enough disk: ")
    check(100, 100, size * 100)  # nothing left to write
    with pytest.raises(UserError, match="not enough disk"):
        check(100, 95, size * 100)
    assert len(said) == 1


def test_files_that_could_not_be_written_are_refused_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, disk, size = make(tmp_path / "run", []), os.statvfs(tmp_path), 40_000
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size - 1, limits[1]))
        with pytest.raises(UserError, match=r"files of 40 kB \(ulimit -f\)"):
            run.check_disk(size, 0, 100)
        run.check_disk(size, 100, 100)  # nothing to write
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    for counted, free, fits in ((10**6, 7, False), (10**6, 8, True), (0, 0, True)):
        there = os.statvfs_result((*disk[:5], counted, free, free, *disk[8:]))
        with monkeypatch.context() as patch:
            patch.setattr(os, "statvfs", lambda _, there=there: there)
            with contextlib.nullcontext() if fits else pytest.raises(UserError, match="7 more fil"):
                run.check_disk(size, 0, 100)


def test_what_a_run_keeps_for_good_must_fit_from_its_start_to_its_end(tmp_path: Path) -> None:
    size = shutil.disk_usage(tmp_path).free // 8
    run = make(tmp_path / "run", [], every_steps=4, keep_last=2, keep_every=10)
    run.check_disk(size, 0, 99)  # 20, 40, 60, 80, two more and one on its way
    with pytest.raises(UserError, match="not enough disk.*checkpoint.keep_every: 10"):
        run.check_disk(size, 0, 120)


def test_half_written_folders_are_never_taken(tmp_path: Path) -> None:
    keeper = make(tmp_path / "run", [5])
    half = tmp_path / "run/checkpoints/writing-step-00000010"
    half.mkdir()
    (half / "state.json").write_text(state(10).to_json())
    (half.parent / ".latest.9999999.part").touch()
    mine = [".latest.a.part", "writing-notes.txt"]
    for name in mine:
        (half.parent / name).touch()
    newest = keeper.newest()
    assert newest is not None and newest.name == "step-00000005"
    assert names(tmp_path / "run") == sorted([*mine, "latest", "step-00000005"])


def test_a_folder_without_checkpoints_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        checkpoint.resolve(tmp_path / "none")
    with pytest.raises(UserError, match="no checkpoint found"):
        checkpoint.resolve(tmp_path)


def test_damaged_files_of_a_run_are_one_line_and_never_a_new_beginning(tmp_path: Path) -> None:
    keeper, random = make(tmp_path, [5, 10]), np.random.Generator(np.random.Philox(12))
    newest = tmp_path / "checkpoints/step-00000010"
    settings = [f"run_dir={tmp_path}"]
    config = load("configs/pretrain_demo.yaml", PretrainConfig, settings)
    (tmp_path / FINISHED).write_text("10\n")
    rollbacks = {"rollbacks": [{"step": 9, "back_to": 5, "skips": [], "spoiled": "w"}] * 2}
    (tmp_path / ROLLBACKS).write_text(json.dumps(rollbacks))
    points = b"".join(b'{"step": %d, "time": 1, "train/loss": 2.5}\n' % step for step in range(20))
    (tmp_path / "metrics.jsonl").write_bytes(points)

    def whole_or_before() -> None:
        found = keeper.newest()
        assert found in (newest, newest.with_name("step-00000005"))
        assert checkpoint.resolve(tmp_path) == found
        assert checkpoint.read_state(found).position.step == int(found.name[5:])

    readers = {
        newest / "COMPLETE.json": whole_or_before,
        newest / "state.json": whole_or_before,
        tmp_path / "checkpoints/latest": whole_or_before,
        tmp_path / FINISHED: lambda: finished_steps(tmp_path),
        tmp_path / ROLLBACKS: lambda: RunState(config).rollbacks.read(()),
        tmp_path / "metrics.jsonl": lambda: training_results(tmp_path, 10),
    }
    for path, read in readers.items():
        good = path.read_bytes()
        for _ in range(40):
            path.write_bytes(damaged(good, random))
            try:
                read()
            except UserError as error:
                assert str(path) in str(error) and "\n" not in str(error)
            if path.name == "state.json":  # and as a stranger would list it
                try:
                    State.from_json(path.read_bytes(), str(path))
                except UserError as error:
                    assert str(path) in str(error) and "\n" not in str(error)
        path.write_bytes(good)
        read()
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "time": 1, "loss": 1' + 400 * "0" + "}\n")
    assert training_results(tmp_path, 10) == ["No metrics.jsonl was at hand at the export."]


@pytest.mark.parametrize("name", ["metrics.jsonl", ROLLBACKS, "COMPLETE.json", "state.json"])
def test_files_of_another_kind_or_type_are_one_line(tmp_path: Path, name: str) -> None:
    keeper = make(tmp_path, [5, 10])
    newest = tmp_path / "checkpoints/step-00000010"
    config = load("configs/pretrain_demo.yaml", PretrainConfig, [f"run_dir={tmp_path}"])
    skip = {"phase": 0, "start": ["a", 0, 0], "end": [0, 0, 9], "steps": 1}
    values = [
        b'{"step": 5, "time": 1.0, "train/loss": %s}\n' % (b"9" * 400),
        json.dumps({"rollbacks": [{"step": 9, "back_to": 5, "skips": [skip]}]}).encode(),
    ]
    path = newest / name if name.endswith(".json") and name != ROLLBACKS else tmp_path / name
    for value in [None, "pipe", *values]:
        if path.is_dir():
            path.rmdir()
        else:
            path.unlink(missing_ok=True)
        if value is None:
            path.mkdir()
        elif value == "pipe":
            os.mkfifo(path)
        else:
            path.write_bytes(value)
        with contextlib.suppress(UserError):  # one line, too
            assert "at hand" in str(training_results(tmp_path, 10))
        found = keeper.newest()
        assert found == (newest.with_name("step-00000005") if newest in path.parents else newest)
        if name == ROLLBACKS:
            with pytest.raises(UserError, match="not a list of rollbacks|directory|regular file"):
                RunState(config).rollbacks.read(())
