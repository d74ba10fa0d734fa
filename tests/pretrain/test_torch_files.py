import io
import pickle
import pickletools
import random
import re
import struct
import zipfile
import zlib
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from pretrain import torch_files

EIGHT = torch.arange(8.0)
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


def test_a_name_of_a_storage_is_a_word() -> None:
    """One that lies deep in itself would end the process where it is looked up."""
    file = io.BytesIO(saved(_use_new_zipfile_serialization=False))
    for _ in range(4):
        list(pickletools.genops(file))
    file.write(b"\x80\2])" + 300_000 * b"\x85" + b"a.")
    with pytest.raises(pickle.UnpicklingError, match="a tuple in the place of a str"):
        torch_files.load(file)


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
    with pytest.raises(ValueError, match="are not in it"):
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


def text(said: str) -> bytes:
    return b"X" + len(said).to_bytes(4, "little") + said.encode()


VIEW = b"K\0J\0\4\0\0\x85K\1\x85"  # offset, sizes, strides: of 1,024 numbers
REBUILD = b"ctorch._utils\n_rebuild_tensor\n("
STORAGE = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + b"K\x08"
NO_STORAGE = {
    # A tensor of nothing, of which the state is a view of itself that is larger.
    "grown": b"ctorch.nn.parameter\nParameter\nN\x89\x86Rq\x01(h\x01" + VIEW + b"tb",
    # For torch the word that is made so is that of a storage.
    "coded": REBUILD + b"(c_codecs\nencode\n" + text("storage") + text("ascii") + b"\x86R"
    b"ctorch\nFloatStorage\n" + text("y") + text("cpu") + b"J\0\4\0\0NtQ" + VIEW + b"tR",
    # What is saved as that is handed on as it is, and may have any attributes.
    "module": REBUILD + b"(" + text("module") + b"NNNtQ" + VIEW + b"tR",
    "none": REBUILD + b"N" + VIEW + b"tR",
    "beyond": REBUILD + STORAGE + b"NtQ" + VIEW + b"tR",
    # torch would grow the first and leave the second where it was.
    "a part": REBUILD + STORAGE + b"(" + text("part") + b"K\0K\4ttQK\0K\4\x85K\1\x85tR",
    "a name for a key": REBUILD + STORAGE.replace(text("0"), b"ctorch\nfloat32\n") + b"NtQ"
    b"K\0K\x08\x85K\1\x85tR",
}  # fmt: skip


@pytest.mark.parametrize("new", [True, False])
@pytest.mark.parametrize("name", NO_STORAGE)
def test_a_tensor_is_made_of_a_storage_alone(name: str, new: bool) -> None:
    with pytest.raises((pickle.UnpicklingError, ValueError)):
        torch_files.load(holding(b"}X\1\0\0\0a" + NO_STORAGE[name] + b"s", new))


def test_of_two_directories_one_alone_is_read() -> None:
    """torch finds the one of which the file's end says the place, others that at the end."""
    calls = b"c__builtin__\nset\n(]tR"
    plain = text("a" * (len(calls) - 5))
    one, other = (holding(value, True).getvalue() for value in (calls, plain))
    both = io.BytesIO(one[:-22] + other)
    assert torch.load(both, weights_only=True) == set()
    assert torch_files.load(both) == "a" * (len(calls) - 5)


def zipped(state: Any = EIGHT, **entries: tuple[bytes, int]) -> io.BytesIO:
    """A file of torch's of the state in which entries are others: their bytes and how they are
    packed."""
    file = io.BytesIO()
    torch.save(state, file)
    with zipfile.ZipFile(file) as archive:
        found = {name: archive.read(name) for name in archive.namelist()}
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in found.items():
            data, packing = entries.get(name.rpartition("/")[2], (data, zipfile.ZIP_STORED))
            archive.writestr(name, data, packing)
    return file


def test_numbers_are_those_of_the_archive() -> None:
    numbers = EIGHT.numpy().tobytes()
    good = zipped(**{"0": (numbers, zipfile.ZIP_STORED)})
    assert torch_files.load(good).tolist() == EIGHT.tolist()
    for odd in (
        zipped(**{"0": (numbers[:-4], zipfile.ZIP_STORED)}),
        zipped(**{"0": (bytes(1 << 20), zipfile.ZIP_STORED)}),
        zipped(**{"0": (numbers, zipfile.ZIP_DEFLATED)}),
        zipped(**{"0": (numbers, zipfile.ZIP_BZIP2)}),
        zipped(byteorder=(b"big", zipfile.ZIP_STORED)),
    ):
        with pytest.raises(ValueError, match="in it|big-endian"):
            torch_files.load(odd)


@pytest.mark.parametrize("as_mapped", [False, True])
@pytest.mark.parametrize("to", ["another", "within", "damaged"])
def test_every_entry_has_bytes_of_its_own(tmp_path: Path, to: str, as_mapped: bool) -> None:
    data = zipped([EIGHT, EIGHT + 1, EIGHT + 2]).getvalue()
    marks = [m.start() for m in re.finditer(b"PK\1\2", data)]
    first, second = (
        next(at for at in marks if data[at + 46 :].startswith(b"archive/data/%d" % n))
        for n in (0, 1)
    )
    header = int.from_bytes(data[second + 42 : second + 46], "little")
    damaged = bytearray(data)
    if to == "another":  # the local header of its neighbour, whose sum it takes too
        damaged[second + 42 : second + 46] = data[first + 42 : first + 46]
        damaged[second + 16 : second + 20] = data[first + 16 : first + 20]
    elif to == "within":
        damaged[second + 42 : second + 46] = (header + 8).to_bytes(4, "little")
    else:
        damaged[header : header + 4] = b"none"
    path = tmp_path / "a.pt"
    for content, is_good in ((data, True), (damaged, False)):
        path.write_bytes(content)
        with path.open("rb") as file:
            if is_good:
                found = torch_files.load(file, path if as_mapped else None)
                assert [x.tolist() for x in found] == [(EIGHT + n).tolist() for n in range(3)]
            else:
                with pytest.raises(ValueError):
                    torch_files.load(file, path if as_mapped else None)


def overlapping(state: Any, shared: bool) -> bytes:
    """A file of torch's in which the headers of all storages come first, each saying that what lies
    up to its numbers is its own; the numbers lie in one place for all, or each in its own."""
    with zipfile.ZipFile(zipped(state)) as archive:
        found = {name: archive.read(name) for name in archive.namelist()}
    numbers = {name: data for name, data in found.items() if "/data/" in name}
    file, directory = bytearray(), bytearray()

    def add(name: str, data: bytes, between: int = 0) -> None:
        facts = 0, 0, 0, 0x21, zlib.crc32(data), len(data), len(data), len(name)
        directory.extend(
            struct.pack("<4s6H3I5H2I", b"PK\1\2", 20, 20, *facts, 0, 0, 0, 0, 0, len(file))
        )
        directory.extend(name.encode())
        file.extend(struct.pack("<4s5H3I2H", b"PK\3\4", 20, *facts, between) + name.encode())

    first = -(-sum(30 + len(name) for name in numbers) // 64) * 64
    place = first
    for name, data in numbers.items():
        add(name, data, place - len(file) - 30 - len(name))
        place += 0 if shared else len(data)
    file.extend(bytes(first - len(file)))
    file.extend(data if shared else b"".join(numbers.values()))
    for name in found.keys() - numbers.keys():
        add(name, found[name])
        file.extend(found[name])
    end = b"PK\5\6", 0, 0, len(found), len(found), len(directory), len(file), 0
    return bytes(file + directory) + struct.pack("<4s4H2IH", *end)


def test_entries_whose_numbers_lie_in_one_place_are_refused(tmp_path: Path) -> None:
    state, path = [torch.arange(64.0) for _ in range(40)], tmp_path / "a.pt"
    for shared in (False, True):
        path.write_bytes(overlapping(state, shared))
        for mapped in (None, path):
            with path.open("rb") as file:
                if shared:
                    with pytest.raises(ValueError, match="within another|[Oo]verlap"):
                        torch_files.load(file, mapped)
                else:
                    assert torch.equal(
                        torch.stack(torch_files.load(file, mapped)), torch.stack(state)
                    )


def test_an_entry_that_is_there_twice_is_refused() -> None:
    file = zipped()
    with zipfile.ZipFile(file, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("archive/data/0", bytes(32))
    with pytest.raises(ValueError, match="data/0 is in it twice"):
        torch_files.load(file)


def test_tensors_of_every_kind_are_those_of_torch(tmp_path: Path) -> None:
    base = torch.arange(24.0).view(4, 6)
    state = OrderedDict(
        whole=base, turned=base.t(), part=base[1:3, 2:5], none=torch.zeros(0, 3), edge=base[4:, 1:],
        one=torch.tensor(3.0), half=base.half(), brain=base.bfloat16(), long=base.long(),
        bool=base > 3, twice=base.double(), parameter=torch.nn.Parameter(base.clone()),
    )  # fmt: skip
    state._metadata = OrderedDict(version=1)
    plain = {"state": {0: {"step": 1, "betas": (0.9, 0.98)}}, "names": ["a", None, True, -1, 2.5]}
    for new in (True, False):
        path = tmp_path / f"{new}.pt"
        torch.save({"weights": state, **plain}, path, _use_new_zipfile_serialization=new)
        for mapped in (None, path) if new else (None,):
            with path.open("rb") as file:
                found = torch_files.load(file, mapped)
            weights = found.pop("weights")
            assert found == plain and weights.keys() == state.keys()
            for name, tensor in weights.items():
                assert tensor.dtype == state[name].dtype and tensor.shape == state[name].shape
                assert torch.equal(tensor, state[name])


HASH = b"\x8a\x08" + ((1 << 61) - 1).to_bytes(8, "little")
AGAIN = b")" + 90 * b"q\x01h\x01h\x01\x87"  # (t, t, t) of the one before
HOSTILE = {
    "deep": (b"}" + b")" + 300_000 * b"\x85" + b"K\1s", "a key"),  # (), then ((),) ...
    "again and again as a key": (b"}" + AGAIN + b"K\1s", "a key"),
    "again and again": (AGAIN, "over 1,000,000 values"),
    "itself": (b"]q\x01h\x01a", "over 1,000,000 values"),
    "a number of bytes": (b"c__builtin__\nbytearray\nJ\xff\xff\xff\x7f\x85R", "is named"),
    "twice as long": (b"c_codecs\nencode\n" + text("a") + text("hex") + b"\x86R", "is named"),
    "a step of none": (b"N0)", "none of its steps"),
    "keys of one hash": (b"}" + HASH + b"Ns", "a key"),
    "a long call": (b"ccollections\nOrderedDict\n(" + 99 * b"N" + b"tR", "too many values"),
    "a table for pairs": (b"ccollections\nOrderedDict\n}\x85R", "in the place of a list"),
    "a long key": (b"}" + text("a" * 6000) + b"Ns", "a key"),
    "half of a surrogate pair": (b"}X\3\0\0\0\xed\xa0\x80Ns", "surrogates not allowed"),
    "copies": (
        b"](" + 2000 * b"]K\1aK\2a" + b"eq\1" + 2000 * b"ccollections\nOrderedDict\nh\1\x85R",
        "copies a list",
    ),
}


@pytest.mark.parametrize("new", [True, False])
@pytest.mark.parametrize("name", HOSTILE)
def test_what_a_pickle_costs_is_what_it_holds(name: str, new: bool) -> None:
    """Time, memory and the interpreter's stack."""
    value, said = HOSTILE[name]
    with pytest.raises((ValueError, pickle.UnpicklingError), match=said):
        torch_files.load(holding(value, new))
