import io
import pickle
import pickletools
import random
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from pretrain import torch_files

STATE = {"weights": {name: torch.arange(8.0) + n for n, name in enumerate("abc")}, "step": 81}


def saved(**how: Any) -> bytes:
    file = io.BytesIO()
    torch.save(STATE, file, **how)
    return file.getvalue()


def plain(state: Any) -> Any:
    return {name: w.tolist() for name, w in state["weights"].items()}, state["step"]


def test_a_turned_bit_is_told_or_changes_nothing() -> None:
    """All of the archive's directory, and some of the rest."""
    data = bytearray(saved())
    begin = data.index(b"PK\1\2")
    rng = random.Random(0)
    bits = [*range(8 * begin, 8 * len(data)), *(rng.randrange(8 * begin) for _ in range(1500))]
    told = 0
    for bit in bits:
        data[bit // 8] ^= 1 << bit % 8
        try:
            assert plain(torch_files.load(io.BytesIO(data))) == plain(STATE), bit
        except (ValueError, pickle.UnpicklingError):
            told += 1
        data[bit // 8] ^= 1 << bit % 8
    assert told > 1500


@pytest.mark.parametrize("new", [True, False])
def test_files_of_any_age_are_read(new: bool) -> None:
    found = torch_files.load(io.BytesIO(saved(_use_new_zipfile_serialization=new)))
    assert plain(found) == plain(STATE)


def test_a_length_beyond_all_memory_is_damage(tmp_path: Path) -> None:
    """Of a string in the pickle of a file without sums."""
    data = saved(_use_new_zipfile_serialization=False)
    at = data.index(b"X\x07\x00\x00\x00weights")
    damaged = data[:at] + b"\x8d" + b"\xff" * 6 + b"\x7f\x00" + data[at + 5 :]
    (tmp_path / "a.pt").write_bytes(damaged)
    with (tmp_path / "a.pt").open("rb") as file, pytest.raises(ValueError, match="damaged"):
        torch_files.load(file)


class Unfilled:
    """Pickled as a call that gives memory as it lies there."""

    def __init__(self, kind: type) -> None:
        self.kind = kind

    def __reduce__(self) -> tuple[type, tuple[int, ...]]:
        return self.kind, (32, 32) if self.kind.__name__.endswith("Tensor") else (1024,)


@pytest.mark.parametrize("new", [True, False])
@pytest.mark.parametrize(
    "kind",
    [
        *(torch.FloatTensor, torch.HalfTensor, torch.Tensor),
        *(torch.storage.TypedStorage, torch.UntypedStorage),
    ],
)
def test_memory_that_no_file_fills_is_no_tensor(kind: type, new: bool) -> None:
    file = io.BytesIO()
    torch.save({"a": Unfilled(kind)}, file, _use_new_zipfile_serialization=new)
    with pytest.raises(pickle.UnpicklingError, match=f"{kind.__name__} is named"):
        torch_files.load(io.BytesIO(file.getvalue()))


@pytest.mark.parametrize("left", [0, 1, 2])
def test_a_storage_whose_numbers_are_not_in_the_file_is_no_tensor(left: int) -> None:
    """Of a file of before torch 1.6, which names the storages that follow."""
    file = io.BytesIO(saved(_use_new_zipfile_serialization=False))
    for _ in range(4):
        list(pickletools.genops(file))
    begin, names, numbers = file.tell(), pickle.load(file), file.read()
    file.seek(begin)
    pickle.dump(names[:left], file, protocol=2)
    file.write(numbers[: len(numbers) // len(names) * left])
    file.truncate()
    with pytest.raises(pickle.UnpicklingError, match="are not in it"):
        torch_files.load(file)


def holding(value: bytes, new: bool) -> io.BytesIO:
    """A file of torch's in which a pickle of `value` alone stands."""
    file = io.BytesIO()
    torch.save({}, file, _use_new_zipfile_serialization=new)
    empty = b"}q\0."
    if not new:
        return io.BytesIO(file.getvalue().replace(empty, value + b"."))
    with zipfile.ZipFile(file) as archive:
        entries = {entry: archive.read(entry) for entry in archive.infolist()}
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for entry, data in entries.items():
            archive.writestr(entry, data.replace(empty, value + b"."))
    return file


VIEW = b"K\0J\0\4\0\0\x85K\1\x85"  # offset, sizes, strides
REBUILD = b"ctorch._utils\n_rebuild_tensor\n("
NO_STORAGE = {
    # A tensor of nothing, of which the state is a view of itself that is larger.
    "grown": b"ctorch.nn.parameter\nParameter\nN\x89\x86Rq\x01(h\x01" + VIEW + b"tb",
    # For torch the word that is made so is that of a storage.
    "coded": REBUILD
    + b"(c_codecs\nencode\nX\7\0\0\0storageX\5\0\0\0ascii\x86Rctorch\nFloatStorage\nX\1\0\0\0y"
    + b"X\3\0\0\0cpuJ\0\4\0\0NtQ"
    + VIEW
    + b"tR",
    # What is saved as that is handed on as it is, and may have any attributes.
    "module": REBUILD + b"(X\6\0\0\0moduleNNNtQ" + VIEW + b"tR",
    "none": REBUILD + b"N" + VIEW + b"tR",
}


@pytest.mark.parametrize("new", [True, False])
@pytest.mark.parametrize("name", NO_STORAGE)
def test_a_tensor_is_made_of_a_storage_alone(name: str, new: bool) -> None:
    with pytest.raises(pickle.UnpicklingError, match="a state|named|no storage"):
        torch_files.load(holding(b"}X\1\0\0\0a" + NO_STORAGE[name] + b"s", new))


def test_a_file_of_two_directories_is_refused() -> None:
    """Python finds the one that lies at the end, torch the one of which the end says the place."""
    calls = b"c__builtin__\nset\n(]tR"
    plain = b"X" + (len(calls) - 5).to_bytes(4, "little") + b"a" * (len(calls) - 5)
    one, other = (holding(value, True).getvalue() for value in (calls, plain))
    assert torch_files.load(io.BytesIO(other)) == "a" * (len(calls) - 5)
    both = io.BytesIO(one[:-22] + other)
    assert torch.load(both, weights_only=True) == set()
    with zipfile.ZipFile(both) as archive:
        assert plain in archive.read("archive/data.pkl")
    with pytest.raises(ValueError, match="directory is damaged"):
        torch_files.load(both)


HOSTILE = {  # what makes a key of the one dictionary
    "deep": b")" + 2_000_000 * b"\x85",  # (), then ((),) ...
    "again and again": b")" + 90 * b"q\x01h\x01h\x01\x87",  # (t, t, t) of the one before
    "a place of gigabytes": b")r\xff\xff\xff\x1f",
    "a number of bytes": b"c__builtin__\nbytearray\nJ\xff\xff\xff\x7f\x85R",
    "twice as long each time": b"c_codecs\nencode\nX\1\0\0\0aX\3\0\0\0hex\x86R",
    "a step of none": b"N0)",
}


@pytest.mark.parametrize("new", [True, False])
@pytest.mark.parametrize("name", HOSTILE)
def test_what_a_pickle_costs_is_what_it_holds(name: str, new: bool) -> None:
    """Time, memory and the interpreter's stack."""
    with pytest.raises((ValueError, pickle.UnpicklingError), match="damaged|named|none of its"):
        torch_files.load(holding(b"}" + HOSTILE[name] + b"K\1s", new))
