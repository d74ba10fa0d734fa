"""What torch has saved, from anyone, read without torch: tensors and plain values alone.

A file holds a pickle and the numbers of storages: since torch 1.6 as entries of a zip, before as
what follows the pickle. torch's own restricted reader gives memory that nothing has filled, grows
storages and calls what a pickle names; here the pickle is followed step by step and makes plain
values, and tensors lie within numbers that are in the file.
"""

from __future__ import annotations

import errno
import math
import os
import pickle
import pickletools
import re
import struct
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

_SLICE = "deepspeed.utils.tensor_fragment fragment_address"
_REBUILT = ("torch._utils _rebuild_tensor", "torch._utils _rebuild_tensor_v2")
_PARAMETERS = (
    "torch._utils _rebuild_parameter",
    "torch._utils _rebuild_parameter_with_state",
    "torch.nn.parameter Parameter",
)
_NAMES = re.compile(
    r"collections OrderedDict|torch (?:Size|device|b?float\w+|u?int\d+|bool|complex\d+)"
    r"|torch(?:\.cuda)? (\w+)Storage|torch\._utils _rebuild_(?:\w+)|torch\.nn\.parameter Parameter"
    rf"|torch\.serialization _get_layout|{re.escape(_SLICE)}"
)
_DTYPES = {
    "Float": torch.float32,
    "Half": torch.float16,
    "BFloat16": torch.bfloat16,
    "Double": torch.float64,
    "Long": torch.int64,
    "Int": torch.int32,
    "Short": torch.int16,
    "Char": torch.int8,
    "Byte": torch.uint8,
    "Bool": torch.bool,
    "ComplexFloat": torch.complex64,
    "ComplexDouble": torch.complex128,
}
_PLAIN = frozenset("BININT BININT1 BININT2 LONG1 BINFLOAT BINUNICODE SHORT_BINSTRING".split())
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_MOST_VALUES = 1_000_000  # what is named twice counts twice: some go through all of them
_MOST_STEPS = 5_000_000
_MOST_PICKLE = 1 << 28  # bytes
_LONGEST = 5000  # letters of a key, which may be a path, or of a name; they are compared
_MOST_SHARED = 16  # bytes of tensors for one of storages, which a caller may copy
_MAGIC = 0x1950A86A20F9469CFC6C, 1001  # of files of before torch 1.6
_TWICE = "{} is in it twice"
_NOT_TORCH = "not what torch.save writes"


@dataclass
class Slice:
    """DeepSpeed's, of a parameter in a flat tensor."""

    numel: int = 0
    start: int = 0


@dataclass(frozen=True)
class _Name:
    text: str


class _Odd:
    """In place of what is no plain tensor: sparse, negated, without numbers of its own."""


class _Storage(NamedTuple):
    key: str
    dtype: torch.dtype | None  # None: of no kind that is read
    numel: int

    @property
    def nbytes(self) -> int:
        if self.dtype is None:
            raise ValueError("its storages are of no kind that is read")
        return self.numel * self.dtype.itemsize


_Numbers = Callable[[_Storage], Tensor]


def load(file: BinaryIO, mapped: Path | None = None) -> Any:
    """On the CPU. mapped: the file's path, of which the numbers are not read before they are used,
    nor looked at. UnpicklingError where it holds more, which is not executed; OSError; ValueError
    where it is damaged."""
    try:
        file.seek(0)
        begin = file.read(4)
        if begin == b"PK\3\4":
            return _of_zip(file, mapped)
        if begin[:1] != pickle.PROTO:
            raise ValueError(_NOT_TORCH)
        return _of_stream(file)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a place before the file's beginning
            raise
        raise ValueError("the archive's directory is damaged") from None
    except (pickle.UnpicklingError, MemoryError):
        raise
    except Exception as error:  # damaged files raise anything
        raise ValueError(str(error)) from None


def _of_zip(file: BinaryIO, mapped: Path | None) -> Any:
    with zipfile.ZipFile(file) as archive:
        entries: dict[str, zipfile.ZipInfo] = {}
        for entry in archive.infolist():
            if entry.filename in entries:
                raise ValueError(_TWICE.format(entry.filename))
            entries[entry.filename] = entry
        pickles = [name for name in entries if re.fullmatch("[^/]+/data[.]pkl", name)]
        if len(pickles) != 1:
            raise ValueError(_NOT_TORCH)
        (pickled,) = pickles
        folder = pickled.removesuffix("data.pkl")

        left = file.seek(0, os.SEEK_END)  # bytes, of which each is an entry's once

        def taken(name: str, most: int) -> zipfile.ZipInfo:
            nonlocal left
            entry = entries[name]
            left -= entry.compress_size
            if left < 0:
                raise ValueError(f"{name} in it lies within another")
            if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
                raise ValueError(f"{name} in it is packed, as torch.save packs nothing")
            if entry.file_size > most:
                raise ValueError(f"{name} in it has {entry.file_size:,} bytes")
            return entry

        def content(entry: zipfile.ZipInfo) -> bytes:
            with archive.open(entry) as stored:
                data = stored.read(entry.file_size + 1)  # behind the last its sum is looked at
            if len(data) != entry.file_size:
                raise ValueError(f"{entry.filename} in it is damaged")
            return data

        whole = None if mapped is None else _mapped(mapped)
        known: dict[str, Tensor] = {}

        def numbers(storage: _Storage) -> Tensor:
            if storage.key not in known:
                entry = taken(f"{folder}data/{storage.key}", storage.nbytes)
                if entry.file_size != storage.nbytes:
                    raise ValueError(f"{entry.filename} in it is damaged")
                found = None
                if whole is not None:
                    archive.open(entry).close()  # by the name before its bytes it is this one
                    found = _within(file, whole, entry, storage)
                if found is None:
                    found = _tensor_of(bytearray(content(entry)), storage)
                known[storage.key] = found
            return known[storage.key]

        order = f"{folder}byteorder"
        if order in entries and content(taken(order, 100)) != b"little":
            raise ValueError("its numbers are big-endian")
        return _value(content(taken(pickled, _MOST_PICKLE)), numbers)


def _mapped(path: Path) -> Tensor:
    size = path.stat().st_size
    return torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)


def _within(
    file: BinaryIO, whole: Tensor, entry: zipfile.ZipInfo, storage: _Storage
) -> Tensor | None:
    """The storage's numbers in the mapped file; None where they do not lie in it as they must."""
    file.seek(entry.header_offset + 26)
    names, extra = struct.unpack("<HH", file.read(4))
    begin = entry.header_offset + 30 + names + extra
    assert storage.dtype is not None
    if begin % storage.dtype.itemsize or begin + storage.nbytes > len(whole) or not storage.numel:
        return None
    return whole[begin : begin + storage.nbytes].view(storage.dtype)


def _tensor_of(data: bytearray, storage: _Storage) -> Tensor:
    assert storage.dtype is not None
    if not data:
        return torch.empty(0, dtype=storage.dtype)
    return torch.frombuffer(data, dtype=storage.dtype)


def _of_stream(file: BinaryIO) -> Any:
    """A file of before torch 1.6, which has no sums: three marks, the values, the names of their
    storages, and of each the count of its numbers and these."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    magic, version, system = (_value(file) for _ in range(3))
    if (magic, version) != _MAGIC or system.get("little_endian") is not True:
        raise ValueError(_NOT_TORCH)
    begin = file.tell()
    spoken_of: dict[str, _Storage] = {}
    _value(file, None, spoken_of)
    held: dict[str, Tensor] = {}
    for key in _value(file):
        storage = spoken_of[_of(str, key)]
        (count,) = struct.unpack("<q", file.read(8))
        if key in held or count != storage.numel or storage.nbytes > size - file.tell():
            raise ValueError(f"storage {key} in it is damaged")
        held[key] = _tensor_of(bytearray(file.read(storage.nbytes)), storage)
    if missing := spoken_of.keys() - held.keys():
        raise ValueError(f"the numbers of storage {missing.pop()} are not in it")
    file.seek(begin)
    return _value(file, lambda storage: held[storage.key])


def _value(
    source: bytes | BinaryIO,
    numbers: _Numbers | None = None,
    spoken_of: dict[str, _Storage] | None = None,
) -> Any:
    """What a pickle holds. `numbers` of a storage; without them tensors are None. spoken_of: gets
    each storage."""
    spoken_of = {} if spoken_of is None else spoken_of
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    copied = held = made = 0  # values, bytes of storages, bytes of tensors

    def pop(count: int | None = None) -> list[Any]:
        """The last values, or those since the last mark."""
        at = marks.pop() if count is None else len(stack) - count
        if at < (marks[-1] if marks else 0):
            raise ValueError("its pickle is damaged")
        taken = stack[at:]
        del stack[at:]
        return taken

    try:
        for step, said, _ in _steps(source):
            name = step.name
            if name == "MARK":
                marks.append(len(stack))
            elif name in _PLAIN:
                stack.append(said)
            elif name in _CONSTANTS:
                stack.append(_CONSTANTS[name])
            elif name in ("EMPTY_LIST", "EMPTY_DICT"):
                stack.append([] if name == "EMPTY_LIST" else {})
            elif name in ("BINPUT", "LONG_BINPUT"):
                memo[said] = stack[-1]
            elif name in ("BINGET", "LONG_BINGET"):
                stack.append(memo[said])
            elif name.startswith("TUPLE"):
                stack.append(tuple(pop(int(name[5:]) if name[5:] else None)))
            elif name in ("APPEND", "APPENDS"):
                items = pop(1 if name == "APPEND" else None)
                _of(list, stack[-1]).extend(items)
            elif name in ("SETITEM", "SETITEMS"):
                items = pop(2 if name == "SETITEM" else None)
                _set(_of(dict, stack[-1]), zip(items[::2], items[1::2], strict=True))
            elif name == "GLOBAL":
                if len(said) > _LONGEST or not _NAMES.fullmatch(said):
                    raise pickle.UnpicklingError(f"{said} is named")
                stack.append(_Name(said))
            elif name == "BINPERSID":
                storage = _storage(*pop(1))
                if storage.key not in spoken_of and storage.dtype is not None:
                    held += storage.nbytes
                if spoken_of.setdefault(storage.key, storage) != storage:
                    raise ValueError(_TWICE.format(f"storage {storage.key}"))
                stack.append(storage)
            elif name in ("REDUCE", "NEWOBJ"):
                called, given = pop(2)
                if len(_of(tuple, given)) > 64:
                    raise pickle.UnpicklingError("a call of too many values")
                copied += sum(len(g) for g in given if isinstance(g, list | tuple))
                if copied > _MOST_VALUES:
                    raise ValueError("its pickle copies a list again and again")
                value = _call(_of(_Name, called).text, given, numbers)
                if isinstance(value, Tensor) and value is not given[0]:
                    made += value.nbytes
                if made > max(_MOST_VALUES, _MOST_SHARED * held):
                    raise ValueError("its tensors share their numbers again and again")
                stack.append(value)
            elif name == "BUILD":
                (state,) = pop(1)
                if isinstance(stack[-1], Slice):
                    fields = _of(dict, state)
                    stack[-1].numel, stack[-1].start = int(fields["numel"]), int(fields["start"])
                elif not isinstance(stack[-1], dict):  # whose attributes are left out
                    raise pickle.UnpicklingError("a value gets a state")
            elif name == "STOP":
                (value,) = stack
                return _counted(value)
            elif name != "PROTO":
                raise pickle.UnpicklingError(f"{name} is none of its steps")
    except (LookupError, TypeError):
        raise ValueError("its pickle is damaged") from None
    raise ValueError("its pickle has no end")


def _steps(source: bytes | BinaryIO) -> Iterator[tuple[pickletools.OpcodeInfo, Any, int | None]]:
    try:
        yield from islice(pickletools.genops(source), _MOST_STEPS)
    except MemoryError:  # what a pickle itself holds is small
        raise ValueError("its pickle is damaged") from None


def _of(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise pickle.UnpicklingError(f"a {type(value).__name__} in the place of a {kind.__name__}")
    return value


def _set(table: dict[Any, Any], items: Any) -> None:
    for key, value in items:
        # Others may be slow to tell apart.
        number = type(key) is int and abs(key) < 1 << 31
        if not number and not (type(key) is str and len(key) <= _LONGEST):
            raise pickle.UnpicklingError("a key that is neither text nor a number")
        if not number:
            key.encode()  # ValueError of half of a surrogate pair, which a pickle can hold
        table[key] = value


def _counted(value: Any) -> Any:
    """The same. ValueError where it has more values than a file is worth, or holds itself."""
    left, count = [value], 0
    while left:
        inner = left.pop()
        if isinstance(inner, Slice):
            inner = (inner.numel, inner.start)
        elif isinstance(inner, dict):
            inner = inner.values()
        elif type(inner) not in (list, tuple):
            continue
        count += len(inner)
        if count > _MOST_VALUES:
            raise ValueError(f"its pickle has over {_MOST_VALUES:,} values")
        left.extend(inner)
    return value


def _storage(said: Any) -> _Storage:
    """By what torch says of it: the word, its kind, key, device, count of numbers, and of a part of
    another what part it is, which is not read."""
    word, kind, key, _, numel, *part = _of(tuple, said)
    named = _NAMES.fullmatch(_of(_Name, kind).text)
    if word != "storage" or named is None or named[1] is None or part not in ([], [None]):
        raise pickle.UnpicklingError("no storage")
    if _of(int, numel) < 0 or len(_of(str, key)) > _LONGEST:
        raise ValueError("its pickle is damaged")
    return _Storage(key, _DTYPES.get(named[1]), numel)


def _call(name: str, given: tuple[Any, ...], numbers: _Numbers | None) -> Any:
    if name == "collections OrderedDict":
        table: dict[Any, Any] = {}
        (pairs,) = given or ([],)
        _set(table, _of(list, pairs))
        return table
    if name == "torch Size":
        return tuple(_sizes(*given))
    if name == _SLICE:
        return Slice(*given)
    if name in _PARAMETERS:
        return given[0]
    if name in _REBUILT and not given[6:]:  # else negated or conjugated
        return _tensor(*given[:4], numbers)
    if name in ("torch device", "torch.serialization _get_layout"):
        return None
    if name.startswith("torch._utils _rebuild_"):
        return _Odd()
    raise pickle.UnpicklingError(f"{name} is called")


def _sizes(said: Any) -> list[int]:
    if type(said) not in (list, tuple) or len(said) > 64:
        raise ValueError("its pickle is damaged")
    if any(type(n) is not int or not 0 <= n < 1 << 62 for n in said):
        raise ValueError("its pickle is damaged")
    return list(said)


def _tensor(
    storage: _Storage, offset: int, size: Any, stride: Any, numbers: _Numbers | None
) -> Tensor | _Odd | None:
    size, stride, (begin,) = _sizes(size), _sizes(stride), _sizes((offset,))
    numel = math.prod(size)
    reach = sum((n - 1) * step for n, step in zip(size, stride, strict=True)) + 1 if numel else 0
    if numel and begin + reach > _of(_Storage, storage).numel:
        raise ValueError("a tensor reaches beyond its numbers")
    if numel > storage.numel or storage.dtype is None:
        return _Odd()
    if numbers is None:
        return None
    held = numbers(storage)
    return held.as_strided(size, stride, held.storage_offset() + (begin if numel else 0))
