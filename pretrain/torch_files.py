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


def load(file: BinaryIO) -> Any:
    """On the CPU. UnpicklingError where it holds more, which is not executed; OSError; ValueError
    where it is damaged."""
    try:
        if file.read(4) == b"PK\3\4":  # files of before torch 1.6 have no sums
            _check_sums(file)
        refuse_empty_tensors(file)
        file.seek(0)
        loaded = torch.load(file, map_location="cpu", weights_only=True)
        # Without the attributes of a dictionary's subclass, which go before methods.
        return dict(dict.items(loaded)) if isinstance(loaded, dict) else loaded
    except (pickle.UnpicklingError, OSError, MemoryError):
        raise
    except Exception as error:  # damaged pickles raise anything
        raise ValueError(str(error)) from None


def refuse_empty_tensors(file: BinaryIO) -> None:
    """UnpicklingError where a pickle calls a class of tensors, for which torch gives memory that it
    has not filled. What `torch.save` writes builds them of storages alone."""
    file.seek(0)
    if file.read(4) == b"PK\3\4":
        with zipfile.ZipFile(file) as archive:
            for entry in archive.infolist():
                if entry.filename.lower().endswith(".pkl"):
                    with archive.open(entry) as pickled:
                        _refuse_classes(pickletools.genops(pickled))
    else:
        file.seek(0)
        for _ in range(5):  # the marks and the system, the tensors, the names of their storages
            _refuse_classes(pickletools.genops(file))


def _refuse_classes(steps: Iterable[tuple[pickletools.OpcodeInfo, Any, int | None]]) -> None:
    try:
        for step, name, _ in steps:
            if "GLOBAL" in step.name and str(name).endswith("Tensor"):
                raise pickle.UnpicklingError(f"{name} is called")
    except MemoryError:  # what a pickle itself holds is small
        raise ValueError("a length in its pickle is damaged") from None


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
