"""Shards that are not on a disk here: whole files fetched into a bounded node-local cache.

One transfer at a time on a node, whoever asks first makes it and the others find the file: training
needs about 5 MB/s a node, so more at once would only fill the cache with what is not needed yet.
All locks are the kernel's (flock): nothing is left behind by a process that dies.
"""

from __future__ import annotations

import fcntl
import hashlib
import http.client
import os
import re
import selectors
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from core.console import Progress
from core.errors import UserError
from data_pipeline.corpus.shards import MANIFEST, VOCAB, Manifest, join_url, load_manifest
from data_pipeline.stream.plan import StreamConfig
from data_pipeline.stream.reader import LocalStore, Store, Window

_CHUNK = 1 << 20


class TransferError(Exception):
    """A transfer that may succeed when tried again."""


def open_store(data: StreamConfig) -> tuple[Store, Path]:
    """(the files of `data.dir` on this node, a local folder with manifest.json and vocab.txt)."""
    if not re.match(r"pipe:|[a-z][a-z0-9+.-]*://", data.dir):
        return LocalStore(data.dir), Path(data.dir)
    root = Path(data.cache_dir).expanduser()
    folder = root / ("tables-" + hashlib.sha256(data.dir.encode()).hexdigest()[:16])
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"data.cache_dir: {root}: {error.strerror}") from None
    for name in (MANIFEST, VOCAB):
        _fetch_table(join_url(data.dir, name), folder / name, data)
    return CachedStore(data, load_manifest(folder)), folder


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
        self._held: dict[str, int] = {}
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
                os.close(self._held.pop(name))
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
                os.close(self._held.popitem()[1])

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
                        self._held[name] = _lock(self.folder / f"{name}.use", fcntl.LOCK_SH)
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
        with _locked(self.root / "transfer.lock"):
            if not self._here(name):
                size, digest = self._facts[name]
                if not self._make_room(size, keep=name):
                    return False
                url = join_url(self._data.dir, name)
                _fetch(url, self.folder / name, size, digest, self._data, progress)
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
            lock = _lock(use, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if lock < 0:
                continue
            path.unlink(missing_ok=True)
            os.close(lock)
            total -= bytes_
        return total + size <= self._data.cache_bytes


def _names(window: Window) -> list[str]:
    return [f"{shard.name}{suffix}" for shard in window for suffix in (".idx", ".tar")]


# ---------------------------------------------------------------------------------------- transfers


def _fetch(
    url: str, path: Path, size: int, digest: str, data: StreamConfig, progress: Progress
) -> None:
    """The file at `path`, whole and checked, or nothing. UserError after the last try."""
    part = path.with_name(path.name + ".part")

    def attempt() -> None:
        have = part.stat().st_size if part.exists() else 0
        if have > size:
            part.unlink()
            have = 0
        if have < size:
            with open(part, "ab") as file:
                transfer(
                    url, have, size, file.truncate, file.write, progress.add, data.fetch_timeout
                )
                file.flush()
                os.fsync(file.fileno())
        got = part.stat().st_size
        if got < size:
            raise TransferError(f"ended after {got} of {size} bytes")
        with open(part, "rb") as file:
            actual = hashlib.file_digest(file, "sha256").hexdigest()
        if got != size or actual != digest:
            part.unlink()
            raise TransferError(
                f"wrong content: {got} bytes, sha256 {actual[:12]}; the manifest says {size}, "
                f"{digest[:12]}"
            )

    _with_retries(url, attempt, data)
    os.replace(part, path)


def _fetch_table(url: str, path: Path, data: StreamConfig) -> None:
    """A small file of unknown size, anew each start: it may have changed at its origin."""
    chunks: list[bytes] = []

    def attempt() -> None:
        chunks.clear()

        def restart(_: int) -> None:
            chunks.clear()

        transfer(url, 0, None, restart, chunks.append, lambda _: None, data.fetch_timeout)

    _with_retries(url, attempt, data)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_bytes(b"".join(chunks))
    os.replace(part, path)


def _with_retries(url: str, attempt: Callable[[], None], data: StreamConfig) -> None:
    for tried in range(data.fetch_retries + 1):
        if tried:
            pause = min(data.fetch_pause * 2 ** (tried - 1), 60.0)
            # Jitter, so that a thousand nodes do not come back at the same moment.
            time.sleep(pause * (0.5 + int.from_bytes(os.urandom(2), "big") / 65536))
        try:
            return attempt()
        except TransferError as error:
            trouble = error
        except OSError as error:
            trouble = TransferError(str(error) or type(error).__name__)
    raise UserError(f"{url}: {trouble} (given up after {data.fetch_retries + 1} tries)")


def transfer(
    url: str,
    have: int,
    size: int | None,
    restart: Callable[[int], object],
    write: Callable[[bytes], object],
    count: Callable[[int], None],
    timeout: float,
) -> None:
    """Passes the bytes of `url` from `have` on to `write`; `restart(0)` first where the origin can
    only begin at the beginning. TransferError or OSError where another try may help."""
    if url.startswith("pipe:"):
        if have:
            restart(0)
        return _from_pipe(url.removeprefix("pipe:"), write, count, timeout)
    if re.match("https?://", url):
        return _from_http(url, have, restart, write, count, timeout)
    return _from_cloud(url, have, size, write, count, timeout)


def _from_http(
    url: str,
    have: int,
    restart: Callable[[int], object],
    write: Callable[[bytes], object],
    count: Callable[[int], None],
    timeout: float,
) -> None:
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:
            if have and response.status != 206:
                restart(0)
            while chunk := response.read(_CHUNK):
                write(chunk)
                count(len(chunk))
            # Reads in pieces end in silence where the connection does.
            if response.length:
                raise TransferError(f"ended {response.length} bytes early")
    except urllib.error.HTTPError as error:
        error.close()
        if error.code in (401, 403, 404, 410):
            raise UserError(f"{url}: HTTP {error.code} {error.reason}") from None
        if error.code == 416:
            restart(0)
        raise TransferError(f"HTTP {error.code} {error.reason}") from None
    except http.client.HTTPException as error:
        raise TransferError(f"{type(error).__name__}: {error}") from None


def _from_pipe(
    command: str, write: Callable[[bytes], object], count: Callable[[int], None], timeout: float
) -> None:
    process = subprocess.Popen(
        command, shell=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, bufsize=0
    )
    assert process.stdout is not None
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while True:
                if not selector.select(timeout):
                    raise TransferError(f"no byte in {timeout:g} s")
                chunk = process.stdout.read(_CHUNK)
                if not chunk:
                    break
                write(chunk)
                count(len(chunk))
        code = process.wait(timeout)
    except subprocess.TimeoutExpired:
        raise TransferError(f"did not end in {timeout:g} s") from None
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    if code:
        raise TransferError(f"exit code {code}")


def _from_cloud(
    url: str,
    have: int,
    size: int | None,
    write: Callable[[bytes], object],
    count: Callable[[int], None],
    timeout: float,
) -> None:
    try:
        import fsspec

        options = {}
        if url.startswith("s3://"):
            limits = {"connect_timeout": timeout, "read_timeout": timeout}
            options = {"config_kwargs": {**limits, "retries": {"max_attempts": 0}}}
        system, path = fsspec.core.url_to_fs(url, **options)
    except ImportError as error:
        raise UserError(
            f"data.dir: {url}: {error}; `pip install s3fs` reads s3://, `pip install gcsfs` gs://"
        ) from None
    except ValueError as error:
        raise UserError(f"data.dir: {url}: {error}") from None
    step = 8 * _CHUNK
    try:
        end = size if size is not None else system.size(path)
        while have < end:
            chunk = system.cat_file(path, start=have, end=min(have + step, end))
            if not chunk:
                raise TransferError("ended early")
            write(chunk)
            count(len(chunk))
            have += len(chunk)
    except FileNotFoundError:
        raise UserError(f"{url}: no such object") from None
    except (TransferError, OSError):
        raise
    except Exception as error:
        # Each cloud library has errors of its own; all are worth another try.
        raise TransferError(f"{type(error).__name__}: {error}") from None


# -------------------------------------------------------------------------------------------- locks


def _lock(path: Path, how: int) -> int:
    """A descriptor that holds the lock until it is closed; -1 if LOCK_NB found it taken."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(handle, how)
    except BlockingIOError:
        os.close(handle)
        return -1
    return handle


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    handle = _lock(path, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(handle)
