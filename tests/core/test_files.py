"""Files whole or not at all, under kills and refusals; locks; one line for a failed disk."""

from __future__ import annotations

import errno
import multiprocessing as mp
import os
import resource
import signal
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from core.errors import TryAgain, UserError, disk_error
from core.files import (
    Lock,
    disk_errors,
    open_regular,
    read_json,
    read_regular,
    read_sealed,
    replace_folder,
    replacing,
    sha256,
    write_atomically,
    write_json,
    write_sealed,
)
from tests.damage import flipped


def _rewrite_for_ever(path: Path, size: int) -> None:
    while True:
        for letter in b"ab":
            write_atomically(path, bytes([letter]) * size, durable=False)


def test_a_writer_that_is_killed_leaves_one_whole_file(tmp_path: Path) -> None:
    path, size = tmp_path / "file", 1 << 20
    for _ in range(5):
        writer = mp.get_context("fork").Process(target=_rewrite_for_ever, args=(path, size))
        writer.start()
        while not path.exists():
            time.sleep(0.001)
        time.sleep(0.02)
        assert writer.pid is not None
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
        assert path.read_bytes() in (b"a" * size, b"b" * size)


@pytest.mark.parametrize("durable", [True, False])
def test_a_write_that_fails_keeps_the_old_file_and_leaves_nothing(
    tmp_path: Path, durable: bool
) -> None:
    path = tmp_path / "file"
    write_atomically(path, "old", durable=durable)
    with pytest.raises(KeyboardInterrupt), replacing(path, durable=durable) as part:
        part.write_text("half")
        raise KeyboardInterrupt
    assert [p.name for p in tmp_path.iterdir()] == ["file"] and path.read_text() == "old"
    write_json(path, {"a": 1}, durable=durable)
    assert read_json(path) == {"a": 1}


def test_the_line_names_the_file_that_the_user_knows(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught, disk_errors(tmp_path, "run_dir"):
        write_atomically(tmp_path / "gone" / "file", "x")
    assert str(caught.value) == f"run_dir: {tmp_path}/gone/file: No such file or directory"
    with pytest.raises(UserError, match=f"^{tmp_path}: the disk is full; make room"):
        with disk_errors(tmp_path):
            raise OSError(errno.ENOSPC, "No space left on device")
    (tmp_path / "link").symlink_to("gone")
    (tmp_path / "file").touch()
    link = "link: a link to gone, which is no folder"
    for name, why in (("link", link), ("link/below", link), ("file", "file: no folder")):
        with pytest.raises(UserError, match=f"^run_dir: {tmp_path}/{why}$"):
            with disk_errors(tmp_path, "run_dir"):
                (tmp_path / name).mkdir(parents=True, exist_ok=True)
    with pytest.raises(UserError, match=f"^{tmp_path}: File exists$"), disk_errors(tmp_path):
        tmp_path.mkdir()


@pytest.mark.parametrize(
    "name", ["EIO", "ESTALE", "ETIMEDOUT", "ENOTCONN", "EREMOTEIO", "ENETDOWN"]
)
def test_what_a_file_server_says_of_itself_may_pass(name: str, tmp_path: Path) -> None:
    with pytest.raises(TryAgain, match=f"^{tmp_path}: "), disk_errors(tmp_path):
        raise OSError(getattr(errno, name), os.strerror(getattr(errno, name)))


def test_what_a_file_or_its_owner_says_does_not(tmp_path: Path) -> None:
    for name in ("ENOENT", "EACCES", "EISDIR", "EPERM", "EROFS", "ENOSPC", "ENOTDIR", "ELOOP"):
        said = disk_error(OSError(getattr(errno, name), "x"), tmp_path)
        assert isinstance(said, UserError) and not isinstance(said, TryAgain), name
    # A real one: of a process's memory at 0.
    with pytest.raises(TryAgain, match="^/proc/self/mem: Input/output error"):
        read_json(Path("/proc/self/mem"))


def test_what_is_no_regular_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, why in ((tmp_path / "pipe", "not a regular file"), (tmp_path, "Is a directory"),
                      (Path("/dev/zero"), "not a regular file")):  # fmt: skip
        for act in (sha256, read_regular, read_json):
            with pytest.raises(UserError, match=f"^{path}: {why}"), disk_errors(path):
                act(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes devices")
def test_no_file_takes_the_place_of_a_device(tmp_path: Path) -> None:
    null = tmp_path / "null"
    os.mknod(null, stat.S_IFCHR | 0o666, os.stat(os.devnull).st_rdev)
    with pytest.raises(OSError, match="not a regular file") as caught:
        write_atomically(null, "new")
    assert caught.value.filename == str(null)
    assert null.is_char_device() and list(tmp_path.iterdir()) == [null]


def test_a_folder_takes_the_place_of_another(tmp_path: Path) -> None:
    new, old = tmp_path / "new", tmp_path / "old"
    for folder, name in ((new, "a"), (old, "b")):
        folder.mkdir()
        (folder / name).write_text(name)
    replace_folder(new, old)
    assert [p.name for p in old.iterdir()] == ["a"] and not new.exists()
    with pytest.raises(FileNotFoundError) as caught:
        replace_folder(old, tmp_path / "none/x")
    assert caught.value.filename == str(tmp_path / "none/x") and old.exists()


def test_a_lock_is_exclusive_or_shared_and_goes_with_its_holder(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with Lock(path) as one, Lock(path) as two:
        assert one.take(wait=False) and not two.take(wait=False)
        assert one.take(shared=True) and two.take(shared=True, wait=False)
        assert not two.take(wait=False)
    with Lock(path) as three:
        assert three.take(wait=False)


def test_a_lock_file_that_was_removed_locks_nobody_out_and_nobody_in(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    first, late = Lock(path), Lock(path)
    assert first.take(wait=False)
    path.unlink()
    first.close()
    assert late.take(wait=False)
    with Lock(path) as other:
        assert not other.take(wait=False)
    late.close()


def test_a_lock_is_waited_for_as_long_as_it_is_said(tmp_path: Path) -> None:
    path, asked = tmp_path / "lock", []
    with Lock(path) as one, Lock(path) as two:
        assert one.take() and not two.take_within(0.0) and not two.take_within(0.05)
        assert not two.take_within(60.0, lambda: bool(asked) or asked.append(1))
        assert two.take_within(60.0, one.close)
        assert asked == [1] and not Lock(path).take(wait=False)


def test_who_is_alone_is_known_but_where_there_are_no_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    with Lock(tmp_path / "lock") as one, Lock(tmp_path / "lock") as two:
        assert one.alone() and not two.alone()
        monkeypatch.setattr("core.files.fcntl.flock", none)
        assert two.alone()
        one.remove()
        one.remove()
        (tmp_path / "lock").mkdir()
        two.remove()  # what is there cannot be
    assert os.listdir(tmp_path) == ["lock"]


def test_a_lock_is_never_taken_through_a_link_or_of_a_pipe(tmp_path: Path) -> None:
    (tmp_path / "lock").symlink_to(tmp_path / "elsewhere")
    os.mkfifo(tmp_path / "pipe")
    for name in ("lock", "pipe"):
        with pytest.raises(OSError):
            Lock(tmp_path / name)
    assert not (tmp_path / "elsewhere").exists()


def test_sha256_and_json_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"abc")
    assert sha256(path) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    for content, line in (
        (b"[1]", "not a JSON object"),
        (b"{", "not JSON: "),
        (b"\xff", "not JSO"),
    ):
        path.write_bytes(content)
        with pytest.raises(UserError, match=f"^{path}: {line}"):
            read_json(path)
    with pytest.raises(UserError, match=f"^{tmp_path}/gone: No such file"):
        read_json(tmp_path / "gone")


def test_a_library_s_name_of_bytes_is_a_name() -> None:
    error = OSError(errno.ESTALE, "Stale file handle", b"/x")
    assert str(disk_error(error, "run")) == "/x: Stale file handle"


@pytest.mark.parametrize("read", [read_regular, sha256])
def test_a_read_that_fails_names_its_file(read: Callable[[str], object]) -> None:
    with pytest.raises(OSError) as caught:
        read("/proc/self/mem")  # nothing is at its beginning
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, "/proc/self/mem")


def test_a_file_whose_kind_cannot_be_told_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abc")

    def fail(number: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch, pytest.raises(OSError) as caught:
        patch.setattr(os, "fstat", fail)
        open_regular(path)
    assert caught.value.filename == str(path)


def test_nothing_yet_is_no_end_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe in place of what FUSE answers with EAGAIN."""
    os.mkfifo(tmp_path / "pipe")
    regular = os.stat(__file__)
    with open(tmp_path / "pipe", "r+b", buffering=0) as pipe, monkeypatch.context() as patch:
        patch.setattr(os, "fstat", lambda _: regular)
        file = open_regular(tmp_path / "pipe")
        pipe.write(b"abc")
        assert file.read(3) == b"abc"
        for read in (file.read, lambda: file.read(3), lambda: list(file)):
            with pytest.raises(BlockingIOError) as caught:
                read()
            assert caught.value.filename == str(tmp_path / "pipe")
        file.close()


@pytest.mark.parametrize("opened", [open_regular, Lock])
def test_a_file_server_that_fails_as_a_file_is_closed_is_no_error(
    tmp_path: Path, opened: Callable[[Path], Any]
) -> None:
    path = tmp_path / "file"
    path.touch()
    file, numbers = opened(path), Path("/proc/self/fd")
    (number,) = [int(f.name) for f in numbers.iterdir() if f.exists() and f.samefile(path)]
    os.close(number)  # the second time it fails
    file.close()
    file.close()


def test_a_write_that_fails_names_its_file(tmp_path: Path) -> None:
    path, limits = tmp_path / "file", resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8, limits[1]))
    try:
        with pytest.raises(OSError) as caught:
            write_atomically(path, "x" * 99)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(path))


def test_a_bit_that_turns_in_a_sealed_file_is_told_or_changes_nothing(tmp_path: Path) -> None:
    path, plain = tmp_path / "result.json", {"main": "f1", "scores": {"f1": 61.25}, "seeds": [1, 2]}
    write_sealed(path, plain)
    whole, told = path.read_bytes(), 0
    for bit in range(8 * len(whole)):
        path.write_bytes(flipped(whole, bit // 8, bit % 8))
        try:
            found = read_sealed(path)
        except UserError as error:
            told += str(error).startswith(f"{path}: ")
        else:  # the name of the seal, which is then one key more, or white space
            assert plain.items() <= found.items()
    assert told > 7 * len(whole)
    write_json(path, plain)
    assert read_sealed(path) == plain
