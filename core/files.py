"""Files that are there whole or not at all, locks, checksums, and the line of a failed disk."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import io
import json
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from core.console import OutputFailed
from core.errors import UserError, disk_error, short


@contextlib.contextmanager
def disk_errors(place: str | Path, key: str = "") -> Iterator[None]:
    """An OSError inside becomes the one line of `disk_error`, but what is stdout's."""
    try:
        yield
    except OutputFailed:
        raise
    except OSError as error:
        raise disk_error(error, place, key) from None


@contextlib.contextmanager
def named(path: str | Path) -> Iterator[None]:
    """An OSError inside that names no file, as of read, write and fsync, names this one."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def look(path: str | Path, key: str = "") -> os.stat_result | None:
    """None where there is nothing; one line where it cannot be known, which `Path.is_file` and its
    like take for nothing from Python 3.14."""
    with disk_errors(path, key):
        try:
            return os.stat(path)
        except (FileNotFoundError, NotADirectoryError, ValueError):  # no name has a zero byte
            return None


def nearest_folder(path: Path) -> Path:
    """The path itself, or the first above it that is there and may be looked at."""
    path = path.absolute()
    while not os.path.exists(path):  # Path.exists would raise where it may not
        path = path.parent
    return path


def sync(path: str | Path) -> None:
    """What was written to the file, or renamed inside the folder, survives a loss of power."""
    handle = os.open(path, os.O_RDONLY)
    try:
        with named(path):
            os.fsync(handle)
    finally:
        os.close(handle)


def part_of(path: Path) -> Path:
    """The name under which this process writes `path` until it is whole; `unfinished` finds it."""
    return path.with_name(f".{path.name}.{os.getpid()}.part")


def unfinished(folder: Path, of_the_dead: bool = False) -> list[tuple[Path, str]]:
    """What processes were writing in the folder, each with the name that it was to have;
    of_the_dead: no process of this machine may be writing it still."""
    name = re.compile(r"\.(.+)\.([0-9]{1,9})\.part")
    found = ((path, name.fullmatch(path.name)) for path in folder.glob(".*"))
    parts = ((path, *part.groups()) for path, part in found if part)
    return [(path, of) for path, of, pid in parts if not (of_the_dead and is_alive(int(pid)))]


def is_alive(pid: int) -> bool:
    """Whether a process of this machine has the number."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return True


def put_in_place(part: Path, path: Path, *, durable: bool = True) -> None:
    """Renames a whole file; durable: its bytes reach the disk before the name, and the name too.
    OSError where a device has the name: root would replace /dev/null."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_IFMT(os.lstat(path).st_mode) in (stat.S_IFCHR, stat.S_IFBLK):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
    if durable:
        sync(part)
    os.replace(part, path)
    if durable:
        sync(path.parent)


@contextlib.contextmanager
def replacing(path: Path, *, part: Path | None = None, durable: bool = True) -> Iterator[Path]:
    """A path to write to; it becomes `path` at the end, or is removed when the block fails."""
    part = part or part_of(path)
    try:
        yield part
        put_in_place(part, path, durable=durable)
    except BaseException as error:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename == str(part):
            error.filename = str(path)  # the name that the user knows
        raise


def write_atomically(path: Path, data: bytes | str, *, durable: bool = True) -> None:
    """After a kill at any moment the file is either the old one or this one, whole; durable: after
    a loss of power too."""
    with replacing(path, durable=durable) as part, named(path):
        part.write_bytes(data.encode("utf-8") if isinstance(data, str) else data)


def check_own(path: Path, is_earlier: Callable[[bytes], bool], key: str = "") -> None:
    """UserError where a file is there that is not an earlier one of what is to replace it, by its
    first line."""
    if look(path, key) is not None:
        with disk_errors(path, key), open_regular(path) as file:
            line = file.readline(1 << 24)
        if line and not is_earlier(line):
            name = f"{key}: {path}" if key else path
            raise UserError(f"{name}: is there, and is no earlier one: move it away")


CHECKPOINT = "step-" + 8 * "[0-9]"  # the pattern of a checkpoint's name
# What pretraining leaves in its run_dir, and what fine-tuning does: a job that is done, or begun.
TRAINED = ("metrics.jsonl", "checkpoints/latest", "checkpoints/step-*")
TUNED = ("*/*/result.json", "*/*/last.pt")


def holds(folder: Path, names: Iterable[str]) -> bool:
    """Whether there is a file of one of the names, which may be patterns."""
    return any(any(folder.glob(name)) for name in names)


def check_run_dir(folder: Path) -> None:
    """UserError where no run may be kept: in /, under a name that is no UTF-8, which TensorBoard
    cannot write, or beside a config.yaml of the user's own, which it would replace. A run has its
    lock, or what it has done, beside its own."""
    try:
        str(folder).encode()
    except UnicodeEncodeError:
        raise UserError(f"run_dir: {folder}: a name in UTF-8 is expected") from None
    if str(folder).endswith("\n"):  # which the shell of a job's script takes away
        raise UserError(f"run_dir: {folder} ends in a line end; in YAML `|-` keeps it out")
    if not Path(os.path.realpath(folder)).name:
        raise UserError(f"run_dir: {folder} is /, which is no run's own")
    path = folder / "config.yaml"
    there = look(path, "run_dir") or path.is_symlink()
    if there and not holds(folder, ("lock", *TRAINED, *TUNED)):
        said = "was written by no run and would be replaced: use another run_dir, or rename it"
        raise UserError(f"run_dir: {path} {said}")


def remove_folder(path: Path) -> None:
    """As far as it can be removed; of a link the link alone, not what it leads to. What is no
    folder goes too."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


def make_folder(folder: Path) -> list[Path]:
    """Makes it and what is missing above it; returns what was made, itself first."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    return made


def unmake(made: list[Path]) -> None:
    """Of what `make_folder` made the folder goes with all in it, and those above it where nothing
    else is in them, else OSError."""
    # First what `check_run_dir` would take for a user's own, if a kill comes between.
    (made[0] / "config.yaml").unlink(missing_ok=True)
    remove_folder(made[0])
    for parent in made[1:]:
        parent.rmdir()


def replace_folder(new: Path, path: Path) -> None:
    """The whole folder `new` takes the name `path`; what had it is removed first."""
    remove_folder(path)
    try:
        os.rename(new, path)
    except OSError as error:
        error.filename = str(path)  # the name that the user knows
        raise
    sync(path.parent)


def is_in_place(handle: int, path: Path) -> bool:
    """Whether an open file is still the one of that path."""
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except (FileNotFoundError, NotADirectoryError):
        return False


class Lock:
    """A lock of the kernel (flock) on a file. It goes with the process, however that ends, and is
    shared with processes forked while it is held; OSError where the file system has no locks."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle = self._open()

    def _open(self) -> int:
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        if not stat.S_ISREG(os.fstat(handle).st_mode):  # who reads its note waits for ever
            os.close(handle)
            raise OSError(errno.EINVAL, "not a regular file", str(self.path))
        return handle

    def take(self, *, shared: bool = False, wait: bool = True) -> bool:
        """True when held, also in place of the other kind; False: in use, and `wait` is off."""
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        while True:
            try:
                fcntl.flock(self._handle, kind if wait else kind | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            if self.is_in_place():
                return True
            # Its holder removed the file meanwhile: whoever comes next locks a new one.
            self.close()
            self._handle = self._open()

    def alone(self) -> bool:
        """Held, without waiting; False: in use. True too on a file system without locks, which
        keeps nobody out."""
        try:
            return self.take(wait=False)
        except OSError:
            return True

    def take_within(
        self, patience: float, ends: Callable[[], bool] = lambda: False, *, shared: bool = False
    ) -> bool:
        """True when held; False: in use for `patience` s, or until `ends`, which is asked before
        each pause."""
        end = time.monotonic() + patience
        while not self.take(shared=shared, wait=False):
            if ends() or time.monotonic() >= end:
                return False
            time.sleep(min(0.5, patience / 10))
        return True

    @property
    def identity(self) -> tuple[int, int]:
        """What the file system knows its file by, wherever that is now."""
        found = os.fstat(self._handle)
        return found.st_dev, found.st_ino

    def empty(self) -> None:
        """Takes away what its file says."""
        with contextlib.suppress(OSError):
            os.ftruncate(self._handle, 0)

    def is_in_place(self) -> bool:
        """Whether its file is still the one of that path; not in a folder that was taken away."""
        return is_in_place(self._handle, self.path)

    def remove(self) -> None:
        """Its file, where it can be removed; by its holder, at the end of what it guards."""
        with contextlib.suppress(OSError):
            if self.is_in_place():
                self.path.unlink()

    def close(self) -> None:
        """Lets go; processes forked meanwhile hold it until they close it too."""
        if self._handle >= 0:
            with contextlib.suppress(OSError):  # a file server may fail; it is closed all the same
                os.close(self._handle)
            self._handle = -1

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


SHOWN_WITHIN = 90.0  # seconds; NFS looks anew at a folder after a minute at most (acdirmax)


def is_shown(path: Path, seen: Callable[[bytes], bool]) -> bool:
    """Whether the file's bytes become those that another host has written, as `seen` tells."""
    end = time.monotonic() + SHOWN_WITHIN
    while True:
        with contextlib.suppress(OSError):
            if seen(read_regular(path)):
                return True
        if time.monotonic() >= end:
            return False
        time.sleep(0.5)


class _Named(io.FileIO):
    """Whose reads fail with its name. That a file server has nothing yet, which would be taken for
    its end, is a failure."""

    def readinto(self, buffer: Any) -> int:
        with named(self.name):
            read = super().readinto(buffer)
            if read is None:
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return read

    def readall(self) -> bytes:
        found, block = bytearray(), bytearray(1 << 20)
        while read := self.readinto(block):
            found += memoryview(block)[:read]
        return bytes(found)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # what was read is read; it is closed all the same
            super().close()


def open_regular(path: str | Path, ahead: int = 1 << 16) -> io.BufferedReader:
    """For reading, `ahead` bytes at a time. OSError for what is no regular file: a pipe may never
    be written to, and a device never ends."""
    raw = _Named(os.fspath(path), opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
    file = io.BufferedReader(raw, ahead)
    try:
        with named(path):
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OSError(errno.EINVAL, "not a regular file", str(path))
    except OSError:
        file.close()
        raise
    return file


def is_there(path: Path) -> bool:
    """Whether a folder has the name, be it a link that leads nowhere: half a copy is not whole."""
    return path.exists() or path.is_symlink()


MOST_IN_MEMORY = 1 << 30  # bytes of a file that is read at once


def read_regular(path: str | Path, limit: int = MOST_IN_MEMORY) -> bytes:
    """Its bytes; errors as of `open_regular`, and for a file of more than `limit` bytes."""
    with open_regular(path) as file, named(path):
        if os.fstat(file.fileno()).st_size > limit:
            raise OSError(errno.EFBIG, f"more than {limit:,} bytes", str(path))
        return file.read()


def sha256(path: str | Path) -> str:
    """Of the file's bytes, in hexadecimal; errors as of `open_regular`."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


_MOST_JSON = 1 << 28


def read_json(path: Path) -> dict[str, Any]:
    """A file that holds an object; UserError when it does not, or when it cannot be read."""
    try:
        with disk_errors(path):
            plain = json.loads(read_regular(path, _MOST_JSON).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON: {error}") from None
    if not isinstance(plain, dict):
        raise UserError(f"{path}: not a JSON object")
    return plain


def json_value(file: Path, plain: dict[str, Any], key: str, kind: type) -> Any:
    """`plain[key]` of an object that `file` holds, None where it is absent; UserError when it is of
    another kind."""
    value = plain.get(key)
    if value is not None and not isinstance(value, kind):
        wanted = {dict: "an object", bool: "true or false", list: "a list"}[kind]
        raise UserError(f"{file}: {key}: {wanted} is expected, not {short(json.dumps(value))}")
    return value


def write_json(path: Path, plain: Any, *, durable: bool = True) -> None:
    """`plain` as JSON, whole or not at all."""
    write_atomically(path, json.dumps(plain, indent=1) + "\n", durable=durable)


def _seal(plain: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(plain).encode()).hexdigest()


def write_sealed(path: Path, plain: dict[str, Any]) -> None:
    """As `write_json`, with a sha256 of the rest under `sha256`."""
    write_json(path, plain | {"sha256": _seal(plain)})


def read_sealed(path: Path) -> dict[str, Any]:
    """As `read_json`; UserError too where the file says of itself that it is another, by its
    sha256. What has none is taken as it is."""
    plain = read_json(path)
    said = plain.pop("sha256", None)
    if said not in (None, _seal(plain)):
        raise UserError(f"{path}: damaged: it is not what was written (sha256)")
    return plain
