"""What torch has saved, from anyone: tensors and plain values, and nothing that is damaged."""

from __future__ import annotations

import errno
import os
import pickle
import pickletools
import re
import struct
import zipfile
from collections.abc import Iterable
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

# Of a zip's end: mark, length and place of the directory, length of a comment; of the record before
# it, in large archives, the place of one with longer numbers.
_END, _PLACE64, _END64 = (struct.Struct(f"<{form}") for form in ("4s8xLLH", "4s4xQ4x", "4s36xQQ"))
_FOLDER = 0x10  # the attribute of an entry for which torch gives memory that it has not filled
_METHODS = frozenset(dir(Tensor))
# What `torch.save` names for tensors and plain values, and DeepSpeed for its slices of them. Others
# that torch allows give memory that nothing has filled, or as much as a number says.
_SLICE = "deepspeed.utils.tensor_fragment fragment_address"
_NAMES = re.compile(
    r"collections OrderedDict|torch Size|torch device|torch(\.cuda)? \w+Storage"
    r"|torch (b?float\d+|u?int\d+|bool)|torch\.serialization _get_layout"
    r"|torch\._utils _rebuild_(tensor(_v2)?|sparse_tensor|meta_tensor_no_storage)"
    r"|torch\._utils _rebuild_parameter(_with_state)?|torch\.nn\.parameter Parameter"
    rf"|{re.escape(_SLICE)}"
)
_BUILT = ("collections OrderedDict()", f"{_SLICE}()")  # what may get a state: of a tensor it grows
_STEPS = frozenset(
    "APPEND APPENDS BINFLOAT BINGET BININT BININT1 BININT2 BINPERSID BINPUT BINUNICODE BUILD "
    "EMPTY_DICT EMPTY_LIST EMPTY_TUPLE GLOBAL LONG1 LONG_BINGET LONG_BINPUT MARK NEWFALSE NEWOBJ "
    "NEWTRUE NONE PROTO REDUCE SETITEM SETITEMS SHORT_BINSTRING STOP TUPLE TUPLE1 TUPLE2 "
    "TUPLE3".split()
)
_TUPLES = frozenset("TUPLE TUPLE1 TUPLE2 TUPLE3".split())
_CALLS = frozenset("REDUCE NEWOBJ".split())
_CHANGES = frozenset("APPEND APPENDS SETITEM SETITEMS BUILD".split())
_MOST_HASHED = 10_000  # values within a key, each in another or the same again and again


def load(file: BinaryIO) -> Any:
    """On the CPU. UnpicklingError where it holds more, which is not executed; OSError; ValueError
    where it is damaged."""
    try:
        if file.read(4) == b"PK\3\4":  # files of before torch 1.6 have no sums
            _check_sums(file)
        look_through(file)
        file.seek(0)
        loaded = torch.load(file, map_location="cpu", weights_only=True)
        # Without the attributes of a dictionary's subclass, which go before methods.
        return dict(dict.items(loaded)) if isinstance(loaded, dict) else loaded
    except (pickle.UnpicklingError, OSError, MemoryError):
        raise
    except Exception as error:  # damaged pickles raise anything
        raise ValueError(str(error)) from None


def look_through(file: BinaryIO) -> None:
    """UnpicklingError where it holds more than tensors and plain values, or torch would give memory
    that nothing has filled: of storages whose numbers are not in the file, too. ValueError where it
    is damaged, or its reading would not end or end the process."""
    file.seek(0)
    if file.read(4) == b"PK\3\4":
        _check_directory(file)
        file.seek(0)
        _follow(pickletools.genops(torch._C.PyTorchFileReader(file).get_record("data.pkl")))
        return
    file.seek(0)
    places = []
    for _ in range(5):  # the marks and the system, the tensors, the names of their storages
        places.append(file.tell())
        _follow(pickletools.genops(file))
    file.seek(places[3])
    tensors = _Storages(file)
    tensors.load()
    if missing := tensors.names.difference(_Storages(file).load()):
        raise pickle.UnpicklingError(f"the numbers of storage {missing.pop()!r} are not in it")


def _check_directory(file: BinaryIO) -> None:
    """ValueError unless the archive's directory ends where its end record begins: in a file that
    has two, torch and Python find one each."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _END64.size - _PLACE64.size - _END.size))
    tail = file.read()
    mark, length, begin, comment = _END.unpack(tail[-_END.size :])
    end = size - _END.size
    mark64, place = _PLACE64.unpack(tail[_END64.size : -_END.size] or bytes(_PLACE64.size))
    if mark64 == b"PK\6\7":
        end -= _END64.size + _PLACE64.size
        mark64, length, begin = _END64.unpack(tail[: _END64.size])
        if mark64 != b"PK\6\6" or place != end:
            raise ValueError("the archive's directory is damaged")
    if mark != b"PK\5\6" or comment or begin + length != end:
        raise ValueError("the archive's directory is damaged")


class _Value(NamedTuple):
    """What is known of a value on a pickle's stack. `size`: of how many values a hash of it would
    be made. made: by what. first: `made` of a tuple's first item."""

    size: int = 1
    made: str = ""
    first: str = ""


def _follow(steps: Iterable[tuple[pickletools.OpcodeInfo, Any, int | None]]) -> None:
    """Go through a pickle and make nothing of it. UnpicklingError at a name or a step that tensors
    do not need, ValueError where it is damaged."""
    stack: list[_Value] = []
    marks: list[int] = []
    kept: dict[int, _Value] = {}
    try:
        for number, (step, said, _) in enumerate(steps):
            if step.name not in _STEPS:
                raise pickle.UnpicklingError(f"{step.name} is none of its steps")
            if step.name == "MARK":
                marks.append(len(stack))
                continue
            takes = len(step.stack_before)
            if pickletools.markobject in step.stack_before:
                before = step.stack_before.index(pickletools.markobject)
                takes = len(stack) - marks.pop() + before
            taken = [stack.pop() for _ in range(takes)][::-1]
            value = _Value()
            if "PUT" in step.name:
                if said > number:  # the interpreter makes room for as many
                    raise ValueError
                kept[said] = stack[-1]
            elif "GET" in step.name:
                value = kept[said]
            elif step.name == "GLOBAL":
                if not _NAMES.fullmatch(said):
                    raise pickle.UnpicklingError(f"{said} is named")
                value = _Value(1, said)
            elif said == "storage":
                value = _Value(1, said)
            elif step.name == "BINPERSID":
                if taken[0].first != "storage":
                    raise pickle.UnpicklingError("no storage")
                value = _Value(1, "a storage")
            elif step.name in _CHANGES:
                value = taken[0]
                if step.name == "BUILD" and value.made not in _BUILT:
                    raise pickle.UnpicklingError(f"{value.made or 'a value'} gets a state")
            elif step.name in _TUPLES and taken:
                value = _Value(1 + sum(v.size for v in taken), "", taken[0].made)
            elif step.name in _CALLS:
                called, given = taken
                tensor = called.made.startswith("torch._utils _rebuild_tensor")
                if tensor and given.first != "a storage":
                    raise pickle.UnpicklingError("a tensor of no storage")
                value = _Value(1 + called.size + given.size, f"{called.made}()")
            if value.size > _MOST_HASHED:
                raise ValueError
            stack += [value] * len(step.stack_after)
    except (MemoryError, LookupError, ValueError):  # what a pickle itself holds is small
        raise ValueError("its pickle is damaged") from None


class _Storages(pickle.Unpickler):
    """The `names` of the storages that a pickle of before torch 1.6 speaks of. It makes nothing of
    any class."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file)
        self.names: set[Any] = set()

    def find_class(self, module: str, name: str) -> type:
        return _Nothing

    def persistent_load(self, said: Any) -> Any:
        self.names.add(said[2])
        return _Nothing()


class _Nothing(dict[Any, Any]):
    """In place of what a pickle would make of a class."""

    def __init__(self, *_: Any) -> None:
        super().__init__()

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass

    def append(self, item: Any) -> None:
        pass

    def extend(self, items: Any) -> None:
        pass


def is_plain(tensor: object) -> bool:
    """A tensor whose every number is held as it is; a pickle may say that one number is a million,
    that all are negated, or that its `float` is another."""
    return (
        isinstance(tensor, Tensor)
        and _METHODS.isdisjoint(vars(tensor))
        and tensor.layout == torch.strided
        and not (tensor.is_quantized or tensor.is_meta or tensor.is_nested)
        and not (tensor.is_neg() or tensor.is_conj())
        and tensor.numel() * tensor.element_size() <= tensor.untyped_storage().nbytes()
    )


def _check_sums(file: BinaryIO) -> None:
    """An error unless the archive holds what was written: torch does not look."""
    try:
        with zipfile.ZipFile(file) as archive:
            damaged = archive.testzip()
            folders = [
                entry.filename
                for entry in archive.infolist()
                if entry.external_attr & _FOLDER and not entry.is_dir()
            ]
    except OSError as error:
        if error.errno != errno.EINVAL:  # a place before the file's beginning
            raise
        raise ValueError("the archive's directory is damaged") from None
    if damaged is not None or folders:
        raise ValueError(f"{damaged or folders[0]} in it is damaged")
