"""What torch has saved, from anyone: tensors and plain values, and nothing that is damaged."""

from __future__ import annotations

import errno
import pickle
import pickletools
import zipfile
from collections.abc import Iterable
from typing import Any, BinaryIO

import torch
from torch import Tensor

_FOLDER = 0x10  # the attribute of an entry for which torch gives memory that it has not filled
_METHODS = frozenset(dir(Tensor))
# About a million in each other, as the key of a dictionary, overflow the interpreter's stack; a
# tensor takes six.
_NESTING = frozenset("TUPLE TUPLE1 TUPLE2 TUPLE3 FROZENSET REDUCE NEWOBJ".split())
_MOST_NESTED = 60_000
_UNFILLED = ("Tensor", " TypedStorage", " UntypedStorage")


def load(file: BinaryIO) -> Any:
    """On the CPU. UnpicklingError where it holds more, which is not executed; OSError; ValueError
    where it is damaged."""
    try:
        if file.read(4) == b"PK\3\4":  # files of before torch 1.6 have no sums
            _check_sums(file)
        refuse_unfilled(file)
        file.seek(0)
        loaded = torch.load(file, map_location="cpu", weights_only=True)
        # Without the attributes of a dictionary's subclass, which go before methods.
        return dict(dict.items(loaded)) if isinstance(loaded, dict) else loaded
    except (pickle.UnpicklingError, OSError, MemoryError):
        raise
    except Exception as error:  # damaged pickles raise anything
        raise ValueError(str(error)) from None


def refuse_unfilled(file: BinaryIO) -> None:
    """UnpicklingError where torch would give memory that nothing has filled: for a class of tensors
    or storages that is called, or a storage whose numbers are not in the file. What `torch.save`
    writes builds tensors of storages that are. ValueError where the pickle would end the
    process."""
    file.seek(0)
    if file.read(4) == b"PK\3\4":
        with zipfile.ZipFile(file) as archive:
            for entry in archive.infolist():
                if entry.filename.lower().endswith(".pkl"):
                    with archive.open(entry) as pickled:
                        _look_through(pickletools.genops(pickled))
        return
    file.seek(0)
    places = []
    for _ in range(5):  # the marks and the system, the tensors, the names of their storages
        places.append(file.tell())
        _look_through(pickletools.genops(file))
    file.seek(places[3])
    tensors = _Storages(file)
    tensors.load()
    if missing := tensors.names.difference(_Storages(file).load()):
        raise pickle.UnpicklingError(f"the numbers of storage {missing.pop()!r} are not in it")


def _look_through(steps: Iterable[tuple[pickletools.OpcodeInfo, Any, int | None]]) -> None:
    nested = 0
    try:
        for step, name, _ in steps:
            if "GLOBAL" in step.name and str(name).endswith(_UNFILLED):
                raise pickle.UnpicklingError(f"{name} is called")
            nested += step.name in _NESTING
    except MemoryError:  # what a pickle itself holds is small
        raise ValueError("a length in its pickle is damaged") from None
    if nested > _MOST_NESTED:
        raise ValueError(f"its pickle holds over {_MOST_NESTED:,} tuples and calls")


class _Storages(pickle.Unpickler):
    """The `names` of the storages that a pickle of before torch 1.6 speaks of. It makes nothing of
    any class."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file)
        self.names: set[Any] = set()

    def find_class(self, module: str, name: str) -> type:
        return _Nothing

    def persistent_load(self, said: Any) -> Any:
        if said[0] in ("storage", b"storage"):
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
