"""Pieces of work that are done once: dealt to ranks, kept on disk with checksums, found again.

A finished piece is `KEY.json` (written last), with a CRC of its own, beside the files it names with
their sizes and CRCs.
"""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO, Generic, Protocol, TypeVar

from pydantic import TypeAdapter

from core.console import Progress, notice
from core.errors import UserError
from core.files import disk_errors, open_regular, read_regular, replacing, write_atomically
from data_pipeline.corpus.ranks import Ranks


class Task(Protocol):
    """A piece of work; `bytes` for the progress line."""

    @property
    def key(self) -> str: ...
    @property
    def bytes(self) -> int: ...


R = TypeVar("R")  # the result of a piece: a dataclass that JSON can hold
T = TypeVar("T", bound=Task)


def changed(path: str | Path) -> UserError:
    """Of a file between two steps of one start: the next start makes its piece again."""
    return UserError(f"{path}: is not what was written; run the same command again")


class Store(Generic[R]):
    """A folder of the finished pieces of one job. Nothing half-written is ever seen as finished.

    check: asked before anything is made there, for an error where the folder is not the job's."""

    def __init__(
        self, folder: Path, job: str, result: type[R], check: Callable[[], None] = lambda: None
    ) -> None:
        self.folder, self.job, self.check = folder, job, check
        self._result = TypeAdapter(result)

    def path(self, key: str, name: str) -> Path:
        return self.folder / f"{key}.{name}"

    def result(self, key: str) -> R:
        """Of a finished piece, whose files are not read."""
        return self._result.validate_python(self._finished(key)["result"], strict=False)

    def has(self, key: str, name: str) -> bool:
        """Whether a finished piece was written with such a file."""
        return name in self._finished(key)["files"]

    def open(self, key: str, name: str) -> BinaryIO:
        """A file of a finished piece; UserError where it is not byte for byte what was written."""
        file = open_regular(path := self.path(key, name))
        try:
            if list(_sums(file)) != self._finished(key)["files"][name]:
                raise changed(path)
            file.seek(0)
        except BaseException:
            file.close()
            raise
        return file

    def load(self, key: str) -> R | None:
        """As `result`, the files checked byte for byte; None if it is not finished by this job."""
        try:
            facts = self._facts(key)
            checks = {name: list(_check(self.path(key, name))) for name in facts["files"]}
            if facts["job"] != self.job or facts["files"] != checks:
                return None
            return self._result.validate_python(facts["result"], strict=False)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None

    def forget(self, key: str) -> None:
        """The piece is to be done again."""
        self.path(key, "json").unlink(missing_ok=True)

    def _finished(self, key: str) -> dict:
        """`_facts` of a piece that was finished; UserError where they have changed."""
        try:
            return self._facts(key)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise changed(self.path(key, "json")) from None

    def _facts(self, key: str) -> dict:
        facts = json.loads(read_regular(self.path(key, "json")))
        if facts.pop("crc") != _crc(key, facts):
            raise ValueError(f"{self.path(key, 'json')}: damaged")
        return facts


class Writer(Generic[R]):
    """The files of one piece while it is worked on, under names that no one reads. A context
    manager; `finish` inside it."""

    def __init__(self, store: Store[R], key: str) -> None:
        self._store, self._key = store, key
        self._files: dict[str, BinaryIO] = {}
        self._parts = contextlib.ExitStack()
        store.check()
        store.folder.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Writer[R]:
        return self

    def __exit__(self, *failure: Any) -> None:
        self._parts.__exit__(*failure)

    def file(self, name: str) -> BinaryIO:
        part = self._parts.enter_context(replacing(self._store.path(self._key, name)))
        self._files[name] = self._parts.enter_context(open(part, "wb", buffering=1 << 18))
        return self._files[name]

    def finish(self, result: R) -> R:
        """Puts the files in place, then the result: from here on the piece is finished."""
        for file in self._files.values():
            file.close()
        checks = {name: _check(file.name) for name, file in self._files.items()}
        self._store.check()
        self._parts.close()
        facts = {"job": self._store.job, "files": checks, "result": asdict(result)}  # type: ignore[call-overload]
        facts["crc"] = _crc(self._key, facts)
        write_atomically(self._store.path(self._key, "json"), json.dumps(facts))
        return result


def _crc(key: str, facts: dict) -> int:
    return zlib.crc32(json.dumps([key, facts]).encode())


def _check(path: str | Path) -> tuple[int, int]:
    """Size and CRC of a file."""
    with open_regular(path) as file:
        return _sums(file)


def _sums(file: BinaryIO) -> tuple[int, int]:
    size, crc = 0, 0
    while data := file.read(1 << 20):
        size += len(data)
        crc = zlib.crc32(data, crc)
    return size, crc


def run_tasks(
    ranks: Ranks,
    label: str,
    tasks: Sequence[T],
    store: Store[R],
    work: Callable[[T], R],
    counts: Callable[[R], dict[str, int]],
) -> dict[str, R]:
    """Deals the tasks (which count on rank 0 only) that are not finished; on rank 0 all results.
    `counts`: what the progress line tells of a result."""
    results: dict[str, R] = {}
    progress: Progress | None = None
    if ranks.rank == 0:
        results = {task.key: found for task in tasks if (found := store.load(task.key)) is not None}
        left = [task for task in tasks if task.key not in results]
        if results:
            notice(f"{label}: {len(results)} of {len(tasks)} were done before")
        total = sum(task.bytes for task in tasks)
        progress = Progress(label, total, total - sum(task.bytes for task in left))
        # Big ones first: the last to finish is then a small one.
        tasks = sorted(left, key=lambda task: -task.bytes)

    def one(task: T) -> tuple[str, int, R]:
        with disk_errors(store.folder):
            store.check()
            return task.key, task.bytes, work(task)

    def done(outcome: tuple[str, int, R]) -> None:
        key, size, results[key] = outcome
        assert progress is not None
        progress.add(size, counts(results[key]))

    ranks.deal(tasks, one, done)
    if progress is not None and tasks:
        progress.close()
    return results
