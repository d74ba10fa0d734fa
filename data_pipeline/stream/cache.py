"""Shards that are not on a disk here: whole files fetched into a bounded node-local cache.

One transfer at a time on a node, whoever asks first makes it and the others find the file: training
needs about 5 MB/s a node, so more at once would only fill the cache with what is not needed yet.
All locks are the kernel's (flock): nothing is left behind by a process that dies.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from core.console import Progress
from core.errors import UserError
from core.files import Lock, disk_errors, put_in_place, sha256, write_atomically
from core.urls import Patience, TransferError, is_url, join, local_path, persist, read, transfer
from data_pipeline.corpus.shards import MANIFEST, VOCAB, Manifest, load_manifest
from data_pipeline.stream.plan import StreamConfig
from data_pipeline.stream.reader import LocalStore, Store, Window


def open_store(data: StreamConfig) -> tuple[Store, Path]:
    """(the files of `data.dir` on this node, a local folder with manifest.json and vocab.txt)."""
    if not is_url(data.dir):
        directory = local_path(data.dir)
        return LocalStore(directory), directory
    root = Path(data.cache_dir).expanduser()
    folder = root / ("tables-" + hashlib.sha256(data.dir.encode()).hexdigest()[:16])
    with disk_errors(root, "data.cache_dir"):
        folder.mkdir(parents=True, exist_ok=True)
    for name in (MANIFEST, VOCAB):
        # Anew at each start: it may have changed at its origin.
        table = read(join(data.dir, name), _patience(data))
        write_atomically(folder / name, table, durable=False)
    return CachedStore(data, load_manifest(folder)), folder


def _patience(data: StreamConfig) -> Patience:
    return Patience(data.fetch_timeout, data.fetch_retries, data.fetch_pause)


class CachedStore:
    """The dataset's files, fetched when asked for, below `cache_dir/dataset_id`."""

    def __init__(self, data: StreamConfig, manifest: Manifest) -> None:
        self._data = data
        self.root = Path(data.cache_dir).expanduser()
        self.folder = self.root / manifest.dataset_id
        self.folder.mkdir(parents=True, exist_ok=True)
        self._facts: dict[str, tuple[int, str]] = {}
        for shard in manifest.shards:
            self._facts[f"{shard.name}.tar"] = (shard.bytes, shard.sha256)
            self._facts[f"{shard.name}.idx"] = (shard.idx_bytes, shard.idx_sha256)
        self._held: dict[str, Lock] = {}
        self._guard = threading.RLock()
        self._prefetcher: threading.Thread | None = None
        self._upcoming: Iterator[Window] | None = None

    def path(self, name: str) -> Path:
        self._bring([name], required=True)
        return self.folder / name

    def hold(self, windows: Sequence[Window]) -> None:
        names = [name for window in windows for name in _names(window)]
        needed = sum(self._facts[name][0] for name in names)
        if needed > self._data.cache_bytes:
            raise UserError(
                f"data.cache_bytes: {self._data.cache_bytes} is too small for the windows in use "
                f"({needed} bytes); raise it or lower data.window_tokens"
            )
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

    def release(self) -> None:
        with self._guard:
            while self._held:
                # Closing, not unlocking: forked workers share the lock through their copies.
                self._held.popitem()[1].close()

    def _run_ahead(self, windows: Iterator[Window]) -> None:
        ahead = 0
        for window in windows:
            for name in _names(window):
                ahead += self._facts[name][0]
                if ahead > self._data.prefetch_bytes or windows is not self._upcoming:
                    return
                try:
                    if not self._bring([name], required=False):
                        return
                except UserError:
                    # The reader will ask for it in its turn and tell what is wrong.
                    return

    def _bring(self, names: Sequence[str], *, required: bool) -> bool:
        """Fetches what is not here; required files are held. False: there was no room."""
        if required:
            with self._guard:
                for name in names:
                    if name not in self._held:
                        self._held[name] = lock = Lock(self.folder / f"{name}.use")
                        lock.take(shared=True)
        missing = [name for name in names if not self._here(name)]
        total = sum(self._facts[name][0] for name in missing)
        progress = Progress("fetching shards", total, active=required)
        patience = time.monotonic() + self._data.fetch_timeout * (self._data.fetch_retries + 1)
        for name in missing:
            while not self._bring_one(name, progress):
                # A rank that is a little behind still holds the window before: it lets go soon.
                if not required:
                    return False
                if time.monotonic() > patience:
                    raise UserError(
                        f"data.cache_bytes: {self._data.cache_bytes} in {self.root} leave no room "
                        f"for {name} ({self._facts[name][0]} bytes) beside what the ranks of this "
                        "node are using"
                    )
                time.sleep(0.05)
        return True

    def _bring_one(self, name: str, progress: Progress) -> bool:
        """False: there is no room now."""
        with Lock(self.root / "transfer.lock") as lock:
            lock.take()
            if not self._here(name):
                size, digest = self._facts[name]
                if not self._make_room(size, keep=name):
                    return False
                url = join(self._data.dir, name)
                _fetch(url, self.folder / name, size, digest, _patience(self._data), progress)
        return True

    def _here(self, name: str) -> bool:
        path = self.folder / name
        try:
            if path.stat().st_size != self._facts[name][0]:
                return False
            os.utime(path)
        except FileNotFoundError:
            return False
        return True

    def _make_room(self, size: int, keep: str) -> bool:
        """Removes least recently used files that no process holds until `size` bytes fit."""
        files = []
        for path in self.root.glob("*/*"):
            if path.suffix in (".tar", ".idx", ".part"):
                try:
                    facts = path.stat()
                except FileNotFoundError:
                    continue
                files.append((facts.st_mtime, facts.st_size, path))
        own_part = self.folder / f"{keep}.part"
        total = sum(bytes_ for _, bytes_, path in files if path != own_part)
        for _, bytes_, path in sorted(files):
            if total + size <= self._data.cache_bytes:
                break
            if path == own_part:
                continue
            use = path.with_name(path.name.removesuffix(".part") + ".use")
            with Lock(use) as lock:
                if lock.take(wait=False):
                    path.unlink(missing_ok=True)
                    total -= bytes_
        return total + size <= self._data.cache_bytes


def _names(window: Window) -> list[str]:
    return [f"{shard.name}{suffix}" for shard in window for suffix in (".idx", ".tar")]


# ---------------------------------------------------------------------------------------- transfers


def _fetch(
    url: str, path: Path, size: int, digest: str, patience: Patience, progress: Progress
) -> None:
    """The file at `path`, whole and checked, or nothing."""
    part = path.with_name(path.name + ".part")

    def attempt() -> None:
        with open(part, "ab") as file:
            if file.tell() > size:
                file.truncate(0)
            if file.tell() < size:
                transfer(url, file, size, patience.timeout, progress.add)
                file.flush()
                os.fsync(file.fileno())
        got, actual = part.stat().st_size, sha256(part)
        if got < size:
            raise TransferError(f"ended after {got} of {size} bytes")
        if actual != digest:
            part.unlink()
            raise TransferError(
                f"wrong content: {got} bytes, sha256 {actual[:12]}; the manifest says {size}, "
                f"{digest[:12]}",
                lasting=True,
            )

    persist(url, attempt, patience)
    put_in_place(part, path, durable=False)
