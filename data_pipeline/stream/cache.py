"""Shards that are not on a disk here: whole files fetched into a bounded node-local cache.

One transfer at a time on a node, whoever asks first makes it and the others find the file: training
needs about 5 MB/s a node, so more at once would only fill the cache with what is not needed yet.
All locks are the kernel's (flock): nothing is left behind by a process that dies. The folder is the
user's own, and no link in it is followed: what lies there is trained on.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, TypeVar

from core.console import Progress
from core.errors import TryAgain, UserError, disk_error
from core.files import Lock, disk_errors, put_in_place, remove_folder, sha256
from core.urls import Patience, TransferError, join, persist, transfer
from data_pipeline.corpus.manifest import Manifest
from data_pipeline.stream.plan import StreamConfig
from data_pipeline.stream.reader import Store, Window

T = TypeVar("T")

_KINDS = (".tar", ".idx", ".part")
_POLL = 0.05  # seconds between two looks at what another process holds
_TRIES = 5  # where the cache is taken away
_DATASET = re.compile("[0-9a-f]{32}")  # other folders of `cache_dir` are not the cache's


class Cache:
    """The files of a data set below `cache_dir/dataset_id`, for all readers of this process and of
    those it forks."""

    def __init__(self, data: StreamConfig, manifest: Manifest, patience: Patience) -> None:
        self.data, self.patience = data, patience
        self.root = Path(data.cache_dir)
        self.folder = self.root / manifest.dataset_id
        self._turn = self.root / "transfer.lock"
        self._there(lambda: None)
        self.sizes: dict[str, int] = {}
        self._digests: dict[str, str] = {}
        for shard in manifest.shards:
            for name, size, digest in shard.files:
                self.sizes[name], self._digests[name] = size, digest
        # Files that some process of this rank has found whole: the bytes of a run are hashed once.
        self._numbers = {name: number for number, name in enumerate(self.sizes)}
        self._whole = mmap.mmap(-1, max(1, len(self.sizes)))  # shared with those forked later

    def _make_folders(self) -> None:
        _make_private(self.root, parents=True)
        _make_private(self.folder)

    def _there(self, work: Callable[[], T]) -> T:
        """What `work` returns, in folders that are there: it is begun anew where they are taken
        away meanwhile, as old things in /tmp are, and all of a job's where another job ends."""
        with disk_errors(self.root, "data.cache_dir"):
            for _ in range(_TRIES - 1):
                with contextlib.suppress(FileNotFoundError):
                    self._make_folders()
                    return work()
            self._make_folders()
            return work()

    def has(self, name: str) -> bool:
        """Whether the file is here and whole; a damaged one is as good as none."""
        path, number = self.folder / name, self._numbers[name]
        try:
            facts = path.lstat()
            if not stat.S_ISREG(facts.st_mode) or facts.st_size != self.sizes[name]:
                return False
            if not self._whole[number]:
                if sha256(path) != self._digests[name]:
                    return False
                self._whole[number] = 1
            os.utime(path, follow_symlinks=False)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise disk_error(error, path, "data.cache_dir") from None
        return True

    def doubt(self, name: str) -> None:
        """The file is hashed anew before anyone here takes it for whole."""
        self._whole[self._numbers[name]] = 0

    def begun(self, name: str) -> int:
        """Bytes that an earlier transfer of the file has left."""
        try:
            return (self.folder / f"{name}.part").lstat().st_size
        except OSError:
            return 0

    def bring(self, name: str, progress: Progress) -> bool:
        """Fetches the file if it is not here. False: there is no room now."""

        def fetched() -> bool:
            with Lock(self._turn) as lock:
                self._take_turn(lock)
                if not self.has(name):
                    if not self._make_room(self.sizes[name], keep=name):
                        return False
                    self._fetch(name, progress)
            return True

        return self._there(fetched)

    def _take_turn(self, lock: Lock) -> None:
        """Waits as long as who holds it goes on, which its time tells; TryAgain, for that may be a
        process that was stopped. Counted, not by a clock: the job may be suspended meanwhile."""
        pause = min(60.0, self.patience.pause * 2**self.patience.retries)
        limit = 8 * self.patience.timeout + 2 * pause  # a cloud store's 8 MB come at once
        seen, idle = 0, 0.0
        while not lock.take_within(10 * _POLL):
            at = os.stat(self._turn).st_mtime_ns
            seen, idle = at, idle + 10 * _POLL if at == seen else 0.0
            if idle > limit:
                raise TryAgain(
                    f"data.cache_dir: {self._turn} is held by another process, which has brought "
                    f"nothing for {limit:g} s: it may be stopped (`fuser` names it)"
                )
        self._go_on()

    def _go_on(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.utime(self._turn)

    def use(self, name: str) -> Lock:
        """A share in the file: while anyone has one, it is not removed."""

        def share() -> Lock:
            lock = Lock(self.folder / f"{name}.use")
            lock.take(shared=True)
            return lock

        return self._there(share)

    def _make_room(self, size: int, keep: str) -> bool:
        """Removes least recently used files that no process holds until `size` bytes fit."""
        own = {self.folder / keep, self.folder / f"{keep}.part"}
        files = [(at, bytes_, path) for at, bytes_, path in self._files() if path not in own]
        total = sum(bytes_ for _, bytes_, _ in files)
        for _, bytes_, path in sorted(files):
            if total + size <= self.data.cache_bytes:
                break
            with Lock(path.with_name(path.name.removesuffix(".part") + ".use")) as lock:
                if lock.take(wait=False):
                    path.unlink(missing_ok=True)
                    total -= bytes_
        return total + size <= self.data.cache_bytes

    def _files(self) -> Iterator[tuple[float, int, Path]]:
        """(last use, bytes, path) of every data set's files in the cache."""
        with os.scandir(self.root) as folders:
            own = [f for f in folders if _DATASET.fullmatch(f.name)]
        for folder in own:
            if not folder.is_dir(follow_symlinks=False):
                continue
            with os.scandir(folder.path) as entries:
                files = [e for e in entries if e.name.endswith(_KINDS)]
            for entry in files:
                with contextlib.suppress(FileNotFoundError):
                    if entry.is_file(follow_symlinks=False):
                        facts = entry.stat(follow_symlinks=False)
                        yield facts.st_mtime, facts.st_size, Path(entry.path)

    def _fetch(self, name: str, progress: Progress) -> None:
        """The file, whole and checked, or nothing."""
        path, size, digest = self.folder / name, self.sizes[name], self._digests[name]
        part, url = path.with_name(f"{name}.part"), join(self.data.dir, name)
        for file in (part, path):
            if os.path.lexists(file) and not stat.S_ISREG(file.lstat().st_mode):
                remove_folder(file)  # a pipe or a folder, say, in which nothing can be kept

        def bring() -> None:
            with open(part, "ab", opener=_open_private) as file:
                if file.tell() != size:
                    transfer(url, file, size, self.patience.timeout, came)
                    try:
                        os.fsync(file.fileno())
                    except OSError as error:  # what is read here need not be on the disk
                        part.unlink()
                        raise disk_error(error, part) from None
            if (actual := sha256(part)) != digest:
                part.unlink()
                progress.add(-size)
                raise TransferError(
                    f"wrong content: sha256 {actual[:12]}; the manifest says {digest[:12]}",
                    lasting=True,
                    sha256=bytes.fromhex(actual),
                )
            put_in_place(part, path, durable=False)

        def came(count: int) -> None:
            progress.add(count)
            self._go_on()

        def attempt() -> None:
            try:
                self._make_folders()
                self._go_on()
                bring()
            except FileNotFoundError as error:
                name = str(error.filename)
                if name not in map(str, (part, self.folder, self.root)):
                    raise  # of a cloud store's settings, say
                raise TransferError(f"{name} was taken away meanwhile") from None

        try:
            persist(url, attempt, self.patience)
        except UserError:
            with contextlib.suppress(OSError):
                if not part.stat().st_size:  # nothing to go on with
                    part.unlink()
            raise
        self._whole[self._numbers[name]] = 1


def _make_private(folder: Path, *, parents: bool = False) -> None:
    """A folder of this user that no other can write to; one that is there already may be a link
    of this user's own."""
    try:
        folder.mkdir(mode=0o700, parents=parents)
    except FileExistsError as error:
        if not folder.is_dir():
            os.lstat(error.filename)  # it may be gone meanwhile
            raise
    me = os.geteuid()
    for facts in (folder.lstat(), folder.stat()):
        if facts.st_uid != me:
            raise UserError(
                f"data.cache_dir: {folder} belongs to user {facts.st_uid}, not to you ({me}): set "
                "another data.cache_dir"
            )
    if facts.st_mode & 0o022:
        raise UserError(
            f"data.cache_dir: {folder} can be written to by others (mode "
            f"{stat.S_IMODE(facts.st_mode):o}): `chmod 700` it, or set another data.cache_dir"
        )


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


class CachedStore(Store):
    """One reader's hold on the files of a cache; they are fetched when it asks for them."""

    def __init__(self, cache: Cache) -> None:
        super().__init__(cache.folder)
        self._cache = cache
        self._held: dict[str, Lock] = {}
        self._guard = threading.RLock()
        self._closed = False
        self._prefetcher: threading.Thread | None = None
        self._upcoming: Iterator[Window] | None = None

    def path(self, name: str) -> Path:
        self._bring([name], required=True)
        return self.folder / name

    def open(self, name: str) -> BinaryIO:
        for _ in range(_TRIES):
            with contextlib.suppress(FileNotFoundError):
                return super().open(name)
        raise TryAgain(f"data.cache_dir: {self.folder / name} is taken away time and again")

    def renew(self, name: str) -> bool:
        self._cache.doubt(name)
        self._bring([name], required=True)
        return True  # also where another reader has brought it: the one that is open is the old

    def hold(self, windows: Sequence[Window]) -> None:
        # Two windows of two epochs may have shards in common.
        names = list(dict.fromkeys(name for window in windows for name in _names(window)))
        with self._guard:
            for name in set(self._held) - set(names):
                self._held.pop(name).close()
        self._bring(names, required=True)

    def prefetch(self, windows: Iterator[Window]) -> None:
        self._upcoming = windows
        if self._prefetcher is None or not self._prefetcher.is_alive():
            self._prefetcher = threading.Thread(
                target=self._run_ahead, args=(windows,), daemon=True, name="prefetch"
            )
            self._prefetcher.start()

    def close(self) -> None:
        with self._guard:
            self._closed, self._upcoming = True, None
            while self._held:
                # Closing, not unlocking: forked workers share the lock through their copies.
                self._held.popitem()[1].close()

    def _run_ahead(self, windows: Iterator[Window]) -> None:
        ahead = 0
        for window in windows:
            for name in _names(window):
                ahead += self._cache.sizes[name]
                if ahead > self._cache.data.prefetch_bytes or windows is not self._upcoming:
                    return
                try:
                    if not self._bring([name], required=False):
                        return
                except UserError:
                    # The reader will ask for it in its turn and tell what is wrong.
                    return
                time.sleep(2 * _POLL)  # those that wait for a file now go first

    def _bring(self, names: Sequence[str], *, required: bool) -> bool:
        """Fetches what is not here; required files are held. False: there was no room."""
        cache = self._cache
        if required:
            require_room(cache.data, sum(cache.sizes[name] for name in names))
            with self._guard:
                if self._closed:
                    raise UserError("the reader of the shards was closed")
                for name in names:
                    if name not in self._held:
                        self._held[name] = cache.use(name)
        missing = [name for name in names if not cache.has(name)]
        total = sum(cache.sizes[name] for name in missing)
        begun = sum(map(cache.begun, missing))
        progress = Progress("fetching shards", total, begun, active=required)
        waits = math.ceil(cache.patience.timeout * (cache.patience.retries + 1) / _POLL)
        for name in missing:
            while not cache.bring(name, progress):
                # A rank that is a little behind still holds the window before: it lets go soon; and
                # what another job holds is its own until its end.
                if not required:
                    return False
                waits -= 1
                if waits < 0:
                    raise TryAgain(
                        f"data.cache_bytes: {cache.data.cache_bytes} in {cache.root} leave no room "
                        f"for {name} ({cache.sizes[name]} bytes) beside what the processes of "
                        "this node are using"
                    )
                time.sleep(_POLL)
        return True


def require_room(data: StreamConfig, needed: int) -> None:
    """UserError where the cache can never hold so many bytes."""
    if needed > data.cache_bytes:
        raise UserError(
            f"data.cache_bytes: {data.cache_bytes} is too small for the windows in use at "
            f"a time ({needed} bytes); raise it or, of training, lower data.window_tokens"
        )


def _names(window: Window) -> list[str]:
    return [file.name for shard in window for file in reversed(shard.files)]  # indexes first
