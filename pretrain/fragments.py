"""Files of an engine: what each rank holds of the parameters, by name and place.

    engine.json              step, loss scaler, world size, ZeRO stage, precision, shapes
    rank-00000.safetensors   of each piece of a parameter that rank 0's slice holds, three flat fp32
                             tensors: fp32|NAME|START, exp_avg|NAME|START, exp_avg_sq|NAME|START;
                             from rank 0 also buffers and frozen parameters, as value|NAME|0

START is the first element of the piece in the flattened parameter. That is 12 bytes a parameter in
all. Because a place has a name, there is one way to read, at any world size, ZeRO stage and
precision: each rank opens what overlaps its own slice.

Content is data: nothing is unpickled, no path is made from it, names and places are compared with
the shapes, and the pieces must cover each parameter exactly once. Whatever else is there ends in
one line (UserError). Folders of older versions are read by `old_checkpoints.py`.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import json
import math
import mmap
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch
from pydantic import ConfigDict, NonNegativeFloat, NonNegativeInt, PositiveInt, model_validator
from safetensors import SafetensorError, safe_open
from torch import Tensor

from configs.load import Config, check
from core.errors import UserError, short
from core.files import disk_errors, named, read_json, sha256
from pretrain import old_checkpoints
from pretrain.optim import Piece

FORMAT = "bert-engine-2"
META = "engine.json"
MOMENTS = ("exp_avg", "exp_avg_sq")
KEYS = ("fp32", *MOMENTS)
_VALUE = "value"
_DTYPES = {
    torch.float64: "F64", torch.int64: "I64", torch.float32: "F32", torch.int32: "I32",
    torch.bfloat16: "BF16", torch.float16: "F16", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


@dataclass(frozen=True)
class Slice:
    """Flat fp32 tensors of one length, by KEYS, and the pieces of parameters that they hold."""

    tensors: dict[str, Tensor]
    pieces: list[Piece]

    def fill(
        self, read: Callable[[str, str, int, int], Tensor], keys: Sequence[str] = KEYS
    ) -> None:
        """Every piece from `read(name, key, start, end)`, elements of the flattened parameter."""
        for x in self.pieces:
            for key in keys:
                target = self.tensors[key][x.here : x.here + x.numel]
                target.copy_(read(x.name, key, x.start, x.start + x.numel))


class Meta(Config):
    """steps: optimiser steps of the run, skipped ones too; updates: those that count in each
    parameter's bias correction; shapes: of the parameters that are trained; loss_scaler: fp16's.
    """

    model_config = ConfigDict(strict=True)

    world_size: PositiveInt
    zero_stage: Literal[0, 1, 2]
    precision: str
    steps: NonNegativeInt
    updates: dict[str, NonNegativeFloat]
    shapes: dict[str, list[PositiveInt]]
    loss_scaler: dict[str, int | float] = {}

    @model_validator(mode="after")
    def _fit_together(self) -> Meta:
        if self.updates.keys() != self.shapes.keys():
            raise ValueError("updates: are not of the parameters in shapes")
        if self.loss_scaler.get("cur_scale", 1) <= 0:
            raise ValueError("loss_scaler: a scale above 0 is expected")
        return self

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT} | self.model_dump())

    @property
    def files(self) -> Iterator[str]:
        """Without ZeRO every rank holds everything, and rank 0 writes it."""
        return map(rank_file, range(self.world_size if self.zero_stage else 1))


def rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def not_finite(slices: Iterable[Slice], rest: Mapping[str, Tensor]) -> str | None:
    """The first weight or moment with a NaN or an infinity in it; None if all are finite. `rest`:
    buffers and frozen parameters."""
    names, largest = [], []
    for name, tensor in rest.items():
        if tensor.is_floating_point() and tensor.numel() > 0:
            names.append(f"{name} (weights)")
            largest.append(torch.linalg.vector_norm(tensor, math.inf).float())
    for slice_ in slices:
        for x in slice_.pieces:
            for key, tensor in slice_.tensors.items():
                if x.numel > 0:
                    names.append(f"{x.name} ({'weights' if key == 'fp32' else key})")
                    piece = tensor[x.here : x.here + x.numel]
                    largest.append(torch.linalg.vector_norm(piece, math.inf))
    found = torch.stack(largest).isfinite().tolist() if largest else []
    return next((name for name, good in zip(names, found, strict=True) if not good), None)


# ------------------------------------------------------------------------------------------ write


class HostCopies:
    """Copies of an engine's tensors in host memory that is taken once and kept.

    On a GPU the memory is pinned and the copying has a stream of its own: `join` lets the device
    change the tensors when it is done, `wait` lets the host read the copies. Elsewhere it is done
    when `begin` returns.
    """

    def __init__(self) -> None:
        self.begun = 0
        self._kept: dict[tuple[int, str], Tensor] = {}
        self._stream: torch.cuda.Stream | None = None
        self._done: torch.cuda.Event | None = None

    def begin(self, tensors: Mapping[tuple[int, str], Tensor]) -> dict[tuple[int, str], Tensor]:
        """Their copies, in the place of the ones before; not yet to be read."""
        self.begun += 1
        for key, t in tensors.items():
            if key not in self._kept:
                self._kept[key] = _host_memory(t)
        self.copy([(self._kept[key], t.detach()) for key, t in tensors.items()])
        return {key: self._kept[key] for key in tensors}

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        if not any(t.is_cuda for _, t in pairs):
            for host, t in pairs:
                host.copy_(t)
            return
        self._stream = self._stream or torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for host, t in pairs:
                host.copy_(t, non_blocking=True)
            self._done = self._stream.record_event()

    def join(self) -> None:
        """What the device is given from here on comes after the copying; the host goes on."""
        if self._done is not None:
            torch.cuda.current_stream().wait_event(self._done)

    def wait(self) -> None:
        """(any thread) Until the copies are whole."""
        if self._done is not None:
            torch.cuda.set_device(self._stream.device)  # a new thread's is GPU 0
            self._done.synchronize()


def _host_memory(like: Tensor) -> Tensor:
    """Without contents. Beside a GPU it is page-locked, where there is enough of such memory: else
    a checkpoint is slower. Forked processes share it: of private memory, data workers would keep
    the copies that they were forked with."""
    if like.is_cuda:
        with contextlib.suppress(RuntimeError):
            return torch.empty_like(like, device="cpu", pin_memory=True)
    shared = torch.frombuffer(mmap.mmap(-1, max(like.nbytes, 1)), dtype=torch.uint8)
    return shared[: like.nbytes].view(like.dtype).view(like.shape)


def snapshot(
    copies: HostCopies,
    rank: int,
    slices: Sequence[Slice],
    rest: Mapping[str, Tensor] | None = None,
    meta: Meta | None = None,
) -> Callable[[Path], list[str]]:
    """Begin to copy to host memory; what is returned writes the copies into a folder, from any
    thread and before the next snapshot, and gives the names of the files."""
    tensors = {(i, key): t for i, slice_ in enumerate(slices) for key, t in slice_.tensors.items()}
    hosts = copies.begin(tensors | {(-1, name): t for name, t in (rest or {}).items()})
    number = copies.begun

    def write_copies(folder: Path) -> list[str]:
        assert copies.begun == number, "a later snapshot has taken its place"
        copies.wait()
        copied = [
            Slice({key: hosts[i, key] for key in slice_.tensors}, slice_.pieces)
            for i, slice_ in enumerate(slices)
        ]
        write(folder / rank_file(rank), copied, {name: hosts[-1, name] for name in rest or {}})
        if meta is None:
            return [rank_file(rank)]
        with named(folder / META):
            (folder / META).write_text(meta.to_json(), encoding="utf-8")
        return [rank_file(rank), META]

    return write_copies


def write(path: Path, slices: Iterable[Slice], rest: Mapping[str, Tensor]) -> None:
    """One rank's file from tensors in host memory. OSError names the file."""
    named = {
        f"{key}|{piece.name}|{piece.start}": tensor[piece.here : piece.here + piece.numel]
        for slice_ in slices
        for piece in slice_.pieces
        for key, tensor in slice_.tensors.items()
    }
    named |= {f"{_VALUE}|{name}|0": tensor for name, tensor in rest.items()}
    write_safetensors(path, named)


def write_safetensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """A file of tensors in host memory. The package's own writer first makes bytes of every one,
    which is twice the memory, and takes none that share theirs. OSError names the file."""
    order = sorted(tensors, key=lambda name: -tensors[name].element_size())
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name in order:
        tensor, start = tensors[name], end
        end += tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with named(path), path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            flat = tensors[name].contiguous().view(-1)
            file.write(memoryview(flat.view(torch.uint8).numpy()))


# ------------------------------------------------------------------------------------------- read

Read = Callable[[str, int, int], Tensor]  # (key, first, end) of a piece -> flat fp32


class Fragments:
    """An engine folder that is open for reading."""

    def __init__(
        self,
        where: str,
        meta: Meta,
        pieces: Iterable[tuple[str, int, int, Read]],
        rest: dict[str, Tensor],
    ) -> None:
        self.meta, self.rest = meta, rest
        if twice := rest.keys() & meta.shapes.keys():
            raise UserError(f"{where}: holds {min(twice)} twice")
        self._pieces: dict[str, list[tuple[int, int, Read]]] = {name: [] for name in meta.shapes}
        for name, start, numel, read in pieces:
            if name not in self._pieces:
                raise UserError(f"{where}: holds {name!r:.200}, which is not among its shapes")
            self._pieces[name].append((start, start + numel, read))
        for name, found in self._pieces.items():
            found.sort(key=lambda piece: piece[:2])
            at = 0
            for start, end, _ in found:
                if start != at or end <= start:
                    break
                at = end
            else:
                if found and at == math.prod(meta.shapes[name]):
                    continue
            raise UserError(f"{where}: the pieces of {name} do not cover it exactly once")

    def read(self, name: str, key: str, start: int, end: int) -> Tensor:
        """Elements [start, end) of a flattened parameter's weight or moment, fp32."""
        pieces, parts = self._pieces[name], []
        first = bisect.bisect_right(pieces, start, key=lambda piece: piece[0]) - 1
        for low, high, read in pieces[first:]:
            if low >= end:
                break
            parts.append(read(key, max(start, low) - low, min(end, high) - low))
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def weight(self, name: str) -> Tensor:
        shape = self.meta.shapes[name]
        return self.read(name, "fp32", 0, math.prod(shape)).view(shape)


@dataclass(frozen=True)
class Contents:
    """What the headers of an engine folder say: plain data, which one rank reads for all of them.

    listed: sha256 of the files that may be read, by name; None: all. meta: None for a folder of an
    older format. pieces: (parameter, start, elements, file); values: the file of each buffer and
    frozen parameter. looked_at: whether these sums were compared by who reads.
    """

    folder: Path
    listed: Mapping[str, str] | None
    meta: Meta | None = None
    pieces: list[tuple[str, int, int, str]] = field(default_factory=list)
    values: dict[str, str] = field(default_factory=dict)
    looked_at: bool = True

    def path(self, name: str) -> Path:
        """Of a file that may be read; UserError for any other, and where it is missing."""
        path = self.folder / name
        if self.listed is not None and name not in self.listed:
            raise UserError(f"{path}: not among the files of this checkpoint")
        if not path.is_file():
            raise UserError(f"{path}: no such file")
        if not self.looked_at and self.listed is not None and sha256(path) != self.listed[name]:
            raise UserError(
                f"{path}: its bytes, as {socket.gethostname()} sees them, are not those that were "
                "written"
            )
        return path


def contents(folder: Path, listed: Mapping[str, str] | None = None) -> Contents:
    """Of what a snapshot has written. UserError, one line, for a folder that is not one, damaged
    or hostile."""
    found = Contents(folder, listed)
    path = found.path(META)
    plain = read_json(path)
    if plain.get("format") == old_checkpoints.FORMAT:
        return found
    if plain.pop("format", None) != FORMAT:
        raise UserError(f"{path}: written by another version of this program")
    found = replace(found, meta=check(plain, Meta, str(path)))
    for name in found.meta.files:
        _look_into(found.path(name), found)
    return found


def open_folder(found: Contents) -> Fragments:
    """Opens files when something of them is read. UserError as `contents`."""
    where, path_of = str(found.folder), functools.cache(found.path)
    if found.meta is None:
        about, pieces, rest = old_checkpoints.read(found.folder, read_json(path_of(META)), path_of)
        return Fragments(where, check(about, Meta, where), pieces, rest)
    opened = functools.cache(lambda path: safe_open(path, "pt"))

    def read(file: str, place: str, key: str, *ends: int) -> Tensor:
        path = path_of(file)
        with _readable(path):
            if not ends:
                return opened(path).get_tensor(key + place)
            return opened(path).get_slice(key + place)[slice(*ends)]

    pieces = [
        (name, start, numel, functools.partial(read, file, f"|{name}|{start}"))
        for name, start, numel, file in found.pieces
    ]
    rest = {name: read(file, f"|{name}|0", _VALUE) for name, file in found.values.items()}
    return Fragments(where, found.meta, pieces, rest)


def read_weights(folder: Path, listed: Mapping[str, str] | None = None) -> dict[str, Tensor]:
    """fp32 weights by name from an engine folder, without a process group."""
    saved = open_folder(contents(folder, listed))
    rest = {n: t.float() if t.is_floating_point() else t for n, t in saved.rest.items()}
    return {name: saved.weight(name) for name in saved.meta.shapes} | rest


def check_shapes(
    given: Mapping[str, Sequence[int]], wanted: Mapping[str, Sequence[int]], where: str
) -> None:
    """UserError unless both have the same names with the same shapes."""
    missing, unknown = wanted.keys() - given.keys(), given.keys() - wanted.keys()
    for problem, names in (("missing", missing), ("unknown", unknown)):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise UserError(f"{where}: {problem} key {short(min(names), 120)}{more}")
    for name, shape in wanted.items():
        if list(given[name]) != list(shape):
            raise UserError(f"{where}: {name} is {list(given[name])}, config says {list(shape)}")


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    """What safetensors raises becomes one line; TryAgain where the file cannot be read for a reason
    that may pass, which safetensors does not tell."""
    try:
        yield
    except (SafetensorError, OSError, ValueError, TypeError, RuntimeError):
        with disk_errors(path), path.open("rb") as file:
            file.read(8)
        raise UserError(f"{path}: damaged, or not written by this program") from None


def _look_into(path: Path, found: Contents) -> None:
    """Adds what is in one rank's file."""
    lengths: dict[tuple[str, int], dict[str, int]] = {}
    with _readable(path):
        opened = safe_open(path, "pt")
        for label in opened.keys():
            key, _, place = label.partition("|")
            name, _, start = place.rpartition("|")
            tensor = opened.get_slice(label)
            if key == _VALUE and tensor.get_dtype() in _DTYPES.values():
                found.values[name] = path.name
                continue
            if found.meta is not None and name not in found.meta.shapes:
                raise UserError(f"{path}: holds {name!r:.200}, which is not among its shapes")
            (numel,) = tensor.get_shape()
            good = len(start) <= 18 and start.isdecimal() and start == str(int(start))
            if key not in KEYS or tensor.get_dtype() != "F32" or not good:
                raise ValueError(label)
            lengths.setdefault((name, int(start)), {})[key] = numel
        for (name, start), by_key in lengths.items():
            if len(by_key) != len(KEYS) or len(set(by_key.values())) != 1:
                raise ValueError(name)
            found.pieces.append((name, start, by_key["fp32"], path.name))
