"""A checkpoint is whole or it is not one; the newest good one is found; old ones go."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch

from configs.load import UserError
from pretrain import checkpoint
from pretrain.checkpoint import Checkpoints, Position, State
from pretrain.distributed import World

VOCABULARY = b"[PAD]\n[UNK]\n"
ALONE = World(0, 1, 0, 1, "alone", torch.device("cpu"), None)


def state(step: int) -> State:
    return State(
        Position(step=step), None, {"seed": 1}, {"dataset_id": "d"}, 1, ({"event": "start"},)
    )


def write(folder: Path) -> None:
    (folder / "weights.pt").write_bytes(bytes(range(256)) * 10)


def make(run: Path, steps: list[int], **keep: int) -> Checkpoints:
    keeper = Checkpoints(run, ALONE, **({"keep_last": 10, "keep_every": 0} | keep))
    for step in steps:
        keeper.save(state(step), VOCABULARY, write)
    return keeper


def names(run: Path) -> list[str]:
    return sorted(p.name for p in (run / "checkpoints").iterdir())


def test_state_survives_the_file() -> None:
    assert State.from_json(state(7).to_json(), "x") == state(7)


def test_what_is_saved_is_found_and_whole(tmp_path: Path) -> None:
    keeper = make(tmp_path / "run", [5, 10])
    newest = keeper.newest(print)
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
    keeper = make(tmp_path / "run", [5, 10])
    path = tmp_path / "run/checkpoints/step-00000010" / file
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    elif damage == "cut":
        path.write_bytes(data[:-1])
    else:
        path.unlink()
    said: list[str] = []
    newest = keeper.newest(said.append)
    assert newest is not None and newest.name == "step-00000005"
    assert len(said) == 1 and "step-00000010" in said[0]


def test_a_failed_write_leaves_the_older_ones_and_no_rest(tmp_path: Path) -> None:
    keeper = make(tmp_path / "run", [5])

    def full(folder: Path) -> None:
        write(folder)
        raise OSError(errno.ENOSPC, "No space left on device", str(folder / "weights.pt"))

    with pytest.raises(UserError, match="No space left on device"):
        keeper.save(state(10), VOCABULARY, full)
    assert names(tmp_path / "run") == ["latest", "step-00000005"]


def test_torch_reports_a_full_disk_as_one_line(tmp_path: Path) -> None:
    keeper = make(tmp_path / "run", [])

    def full(folder: Path) -> None:
        raise RuntimeError("[enforce fail at inline_container.cc] PytorchStreamWriter failed\nat x")

    with pytest.raises(UserError, match="writing failed") as caught:
        keeper.save(state(10), VOCABULARY, full)
    assert "\n" not in str(caught.value)


def test_a_programming_error_is_not_hidden(tmp_path: Path) -> None:
    keeper = make(tmp_path / "run", [])

    def broken(folder: Path) -> None:
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes"):
        keeper.save(state(10), VOCABULARY, broken)


def test_keeps_the_last_and_every_multiple(tmp_path: Path) -> None:
    make(tmp_path / "run", [10, 20, 30, 40, 50], keep_last=2, keep_every=20)
    assert names(tmp_path / "run") == [
        "latest", "step-00000020", "step-00000040", "step-00000050"
    ]  # fmt: skip


def test_half_written_folders_are_never_taken(tmp_path: Path) -> None:
    keeper = make(tmp_path / "run", [5])
    half = tmp_path / "run/checkpoints/writing-step-00000010"
    half.mkdir()
    (half / "state.json").write_text(state(10).to_json())
    newest = keeper.newest(print)
    assert newest is not None and newest.name == "step-00000005"
    keeper.save(state(10), VOCABULARY, write)
    assert checkpoint.verify(tmp_path / "run/checkpoints/step-00000010") is None
    assert not half.exists()


def test_a_folder_without_checkpoints_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        checkpoint.resolve(tmp_path / "none")
    with pytest.raises(UserError, match="no checkpoint found"):
        checkpoint.resolve(tmp_path)
