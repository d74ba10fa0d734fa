from __future__ import annotations

import errno
import json
import math
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from core.errors import UserError
from core.files import sha256
from pretrain import fragments
from pretrain.fragments import KEYS, Meta, Slice, contents, open_folder, rank_file, read_weights
from pretrain.optim import Piece

SHAPES = {"dense.weight": [6, 7], "dense.bias": [5], "norm.weight": [3]}
# Of the 50 elements end to end the first rank holds 20, the second 17, the third 13.
CUTS = [0, 20, 37, 50]


def whole(key: str) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(KEYS.index(key))
    return {name: torch.randn(shape, generator=rng) for name, shape in SHAPES.items()}


def meta_of(ranks: int, shapes: dict[str, list[int]]) -> Meta:
    return Meta(
        world_size=ranks, zero_stage=1, precision="bf16", steps=12,
        updates=dict.fromkeys(shapes, 4.0), shapes=shapes,
    )  # fmt: skip


def make(folder: Path) -> Path:
    """A folder of three ranks, as an engine writes it."""
    folder.mkdir(parents=True, exist_ok=True)
    flat = {key: torch.cat([t.flatten() for t in whole(key).values()]) for key in KEYS}
    for rank in range(3):
        low, high = CUTS[rank], CUTS[rank + 1]
        pieces, at = [], 0
        for name, shape in SHAPES.items():
            numel = int(np.prod(shape))
            first, last = max(at, low), min(at + numel, high)
            if last > first:
                pieces.append(Piece(name, first - at, last - first, first - low))
            at += numel
        slice_ = Slice({key: t[low:high] for key, t in flat.items()}, pieces)
        rest = {"table": torch.arange(7), "scale": torch.tensor(0.5).bfloat16()}
        fragments.write(folder / rank_file(rank), [slice_], rest if rank == 0 else {})
    (folder / fragments.META).write_text(meta_of(3, SHAPES).to_json())
    return folder


def test_what_is_written_is_read_at_any_place(tmp_path: Path) -> None:
    saved = open_folder(contents(make(tmp_path)))
    for key in KEYS:
        for name, expected in whole(key).items():
            flat = expected.flatten()
            for start in range(len(flat)):
                for end in range(start + 1, len(flat) + 1):
                    assert torch.equal(saved.read(name, key, start, end), flat[start:end])
    weights = read_weights(tmp_path)
    assert all(torch.equal(weights[name], w) for name, w in whole("fp32").items())
    assert torch.equal(weights["table"], torch.arange(7)) and weights["scale"] == 0.5


def test_what_is_empty_is_finite() -> None:
    rest = {"none": torch.empty(0), "scale": torch.tensor(0.5)}
    assert fragments.not_finite([], rest) is None
    assert fragments.not_finite([], rest | {"table": torch.tensor([1, math.inf])}) == (
        "table (weights)"
    )


def test_a_second_snapshot_takes_the_memory_of_the_first_and_ends_it(tmp_path: Path) -> None:
    slice_ = Slice({key: torch.randn(50) for key in KEYS}, [Piece("w", 0, 50, 0)])
    rest, meta = {"table": torch.arange(7)}, meta_of(1, {"w": [50]})
    copies = fragments.HostCopies()
    first = fragments.snapshot(copies, 0, [slice_], rest, meta)
    expected = slice_.tensors["fp32"].add_(1).clone()
    second = fragments.snapshot(copies, 0, [slice_], rest, meta)
    slice_.tensors["fp32"].add_(1)  # the run goes on
    second(tmp_path)
    assert torch.equal(read_weights(tmp_path)["w"], expected)
    with pytest.raises(AssertionError, match="later snapshot"):
        first(tmp_path)
    places = [copies.begin({(0, "w"): expected})[0, "w"].data_ptr() for _ in range(2)]
    assert places[0] == places[1]


def test_a_forked_process_keeps_no_copy_of_its_own() -> None:
    copies = fragments.HostCopies()
    host = copies.begin({(0, "fp32"): torch.zeros(3)})[0, "fp32"]
    hear, tell = os.pipe()
    if not (child := os.fork()):
        os.read(hear, 1)
        os._exit(int(host[1]))
    copies.begin({(0, "fp32"): torch.full((3,), 7.0)})
    os.write(tell, b"x")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_the_files_are_safetensors_of_12_bytes_a_parameter(tmp_path: Path) -> None:
    make(tmp_path)
    found = {n: t for rank in range(3) for n, t in load_file(tmp_path / rank_file(rank)).items()}
    values = [t for name, t in found.items() if not name.startswith("value|")]
    assert sum(t.numel() * t.element_size() for t in values) == 12 * CUTS[-1]
    moment = whole("exp_avg")["dense.weight"].flatten()
    assert torch.equal(found["exp_avg|dense.weight|20"], moment[20:37])


def test_a_full_disk_is_an_error_that_names_the_file() -> None:
    slice_ = Slice({key: torch.zeros(1 << 20) for key in KEYS}, [Piece("w", 0, 1 << 20, 0)])
    with pytest.raises(OSError) as caught:
        fragments.write(Path("/dev/full"), [slice_], {})
    assert caught.value.errno == errno.ENOSPC and caught.value.filename == "/dev/full"


def test_a_full_disk_is_named_with_the_file_of_shapes(tmp_path: Path) -> None:
    (tmp_path / fragments.META).symlink_to("/dev/full")
    write = fragments.snapshot(fragments.HostCopies(), 0, [], {}, meta_of(1, {}))
    with pytest.raises(OSError, match="No space") as caught:
        write(tmp_path)
    assert caught.value.filename == str(tmp_path / fragments.META)


# ---------------------------------------------------------------------------------------- hostile


def edited(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """The header of the second rank's file, changed."""

    def edit(folder: Path) -> None:
        path = folder / rank_file(1)
        raw = path.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + length])
        change(header)
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])

    return edit


def renamed(old: str, new: str) -> Callable[[Path], None]:
    return edited(lambda h: h.update({n.replace(old, new): h.pop(n) for n in list(h)}))


def meta(**changes: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / fragments.META
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return edit


WRONG: dict[str, Callable[[Path], None]] = {
    "a piece is missing": edited(lambda h: [h.pop(n) for n in list(h) if n.endswith("|20")]),
    "a moment is missing": edited(lambda h: h.pop("exp_avg|dense.weight|20")),
    "pieces overlap": renamed("|20", "|19"),
    "a gap": renamed("|20", "|21"),
    "beyond the end": renamed("|20", "|123456789012345678"),
    "a negative place": renamed("|20", "|-20"),
    "a place with a zero before it": renamed("|20", "|020"),
    "no place": renamed("|20", ""),
    "a place of many digits": renamed("|20", "|" + "9" * 5000),
    "a place in other digits": renamed("|20", "|²0"),
    "an absolute name": renamed("dense.weight", "/tmp/drop"),
    "a name that climbs": renamed("dense.weight", "../../drop"),
    "another dtype": edited(lambda h: h["fp32|dense.weight|20"].update(dtype="I32")),
    "another shape": edited(lambda h: h["fp32|dense.weight|20"].update(shape=[17, 1])),
    "another length": edited(lambda h: h["fp32|dense.weight|20"].update(shape=[16])),
    "a strange key": renamed("exp_avg_sq", "exp_avg_cubed"),
    "a parameter as a buffer": edited(
        lambda h: h.update({"value|dense.bias|0": h.pop("fp32|dense.weight|20")})
    ),
    "a missing file": lambda folder: (folder / rank_file(2)).unlink(),
    "a folder for a file": lambda f: ((f / rank_file(2)).unlink(), (f / rank_file(2)).mkdir())[1],
    "no such world": meta(world_size=10**15),
    "a world of text": meta(world_size="3"),
    "a world of nobody": meta(world_size=0),
    "a world of lists": meta(world_size=json.loads("[" * 400 + "]" * 400)),
    "another stage": meta(zero_stage=0),
    "shapes of text": meta(shapes={"dense.weight": "67"}, updates={"dense.weight": 1}),
    "shapes too large": meta(shapes=SHAPES | {"norm.weight": [10**30]}),
    "negative shapes": meta(shapes=SHAPES | {"norm.weight": [-3, -1]}),
    "shapes are a list": meta(shapes=[1, 2]),
    "a parameter of nothing": meta(
        shapes=SHAPES | {"x": [0]}, updates=dict.fromkeys([*SHAPES, "x"], 1.0)
    ),
    "a shape of text": meta(
        shapes=SHAPES | {"x": ""}, updates=dict.fromkeys([*SHAPES, "x"], 1.0)
    ),
    "a buffer of halves of bytes": edited(
        lambda h: h.update({"value|x|0": h["fp32|dense.weight|20"] | dict(dtype="F4", shape=[136])})
    ),
    "updates of others": meta(updates={"x": 1.0}),
    "updates that no fp32 holds": meta(updates=dict.fromkeys(SHAPES, 1e300)),
    "updates that were taken back": meta(updates=dict.fromkeys(SHAPES, -1.0)),
    "a loss scale of no machine": meta(loss_scaler={"cur_scale": 10**400}),
    "a loss scale of 0": meta(loss_scaler={"cur_scale": 0}),
    "a strange field": meta(code="import os"),
    "no steps": meta(steps=None),
    "a parameter without elements": meta(
        shapes=SHAPES | {"x": [0]}, updates=dict.fromkeys([*SHAPES, "x"], 1.0)
    ),
    "another format": meta(format="bert-engine-9"),
    "not JSON": lambda folder: (folder / fragments.META).write_text("[" * 100_000),
    "not an object": lambda folder: (folder / fragments.META).write_text("[1]"),
}  # fmt: skip


def read_all(folder: Path) -> None:
    saved = open_folder(contents(folder))
    for name, shape in saved.meta.shapes.items():
        for key in KEYS:
            saved.read(name, key, 0, int(np.prod(shape)))
    read_weights(folder)


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_folder_is_one_line(tmp_path: Path, what: str) -> None:
    WRONG[what](make(tmp_path))
    with pytest.raises(UserError) as caught:
        read_all(tmp_path)
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_a_name_that_is_no_parameter_s_ends_the_reading_of_a_header(tmp_path: Path) -> None:
    """There may be millions; here what comes later would be damage of another kind."""
    one = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    strange = {f"{key}|a{n}|0": one for n in range(9) for key in KEYS} | {"zzz": one}
    edited(lambda header: header.update(strange))(make(tmp_path))
    with pytest.raises(UserError, match="holds 'a0', which is not among its shapes"):
        contents(tmp_path)


def test_300_damaged_files_end_in_one_line_or_in_numbers(tmp_path: Path) -> None:
    """Bits turned, bytes cut off or put in, in headers more often than in numbers (which only the
    marker's checksums can tell)."""
    rng = np.random.default_rng(7)
    good = {p.name: p.read_bytes() for p in make(tmp_path).iterdir()}
    refused = 0
    for _ in range(300):
        name = str(rng.choice(sorted(good)))
        raw = bytearray(good[name])
        at = int(rng.integers(len(raw) if rng.random() < 0.2 else min(len(raw), 600)))
        match rng.integers(5):
            case 0 | 1:
                raw[at] ^= 1 << int(rng.integers(8))
            case 2:
                del raw[at:]
            case 3:
                del raw[at : at + int(rng.integers(1, 40))]
            case 4:
                raw[at:at] = bytes(rng.integers(256, size=int(rng.integers(1, 40)), dtype=np.uint8))
        (tmp_path / name).write_bytes(raw)
        try:
            read_all(tmp_path)
        except UserError as error:
            assert "\n" not in str(error)
            refused += 1
        (tmp_path / name).write_bytes(good[name])
    assert 200 < refused < 300
    read_all(tmp_path)


def test_only_listed_files_are_read(tmp_path: Path) -> None:
    make(tmp_path)
    sums = {path.name: sha256(path) for path in tmp_path.iterdir()}
    assert open_folder(contents(tmp_path, sums)).meta.steps == 12
    for left_out in sums:
        with pytest.raises(UserError, match=f"{left_out}: not among the files"):
            contents(tmp_path, {name: sums[name] for name in sums.keys() - {left_out}})


def test_with_the_contents_a_rank_opens_only_what_it_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []

    def noted(path: Path, framework: str) -> Any:
        opened.append(Path(path).name)
        return safe_open(path, framework)

    monkeypatch.setattr(fragments, "safe_open", noted)
    found = contents(make(tmp_path))
    assert opened == [rank_file(rank) for rank in range(3)]
    opened.clear()
    saved = open_folder(pickle.loads(pickle.dumps(found)))
    last = whole("fp32")["norm.weight"]
    for key in KEYS:  # the third rank's slice
        assert torch.equal(saved.read("norm.weight", key, 0, 3), whole(key)["norm.weight"])
    assert sorted(opened) == [rank_file(0), rank_file(2)]  # buffers are in the first
    assert torch.equal(read_weights(tmp_path)["norm.weight"], last)
    (tmp_path / rank_file(1)).write_bytes(b"cut")
    with pytest.raises(UserError, match="rank-00001.*damaged"):
        saved.read("dense.weight", "fp32", 20, 37)
