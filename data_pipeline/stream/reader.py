"""Reads what a window's plan asks for, and believes no byte it has not checked.

The first touch of a record reads it and checks its tar header (name and size as the writer makes
them) and the crc32 of its payload; the index files are checked whole against the manifest, because
the plan of every rank hangs on them.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from core.errors import TryAgain, UserError, disk_error, may_pass
from core.files import open_regular
from core.urls import read_open
from data_pipeline.corpus.manifest import ShardInfo
from data_pipeline.corpus.shards import (
    BLOCK,
    SOURCE_AT,
    ShardIndex,
    TokenDocument,
    checked_index,
    read_documents,
    tar_header,
)
from data_pipeline.stream.plan import WindowPlan

WHOLE_SHARD = -1

Window = tuple[ShardInfo, ...]


@dataclass(frozen=True, order=True)
class Damage:
    """A record that is not what its writer wrote; record -1: the shard's file as a whole."""

    shard: str
    record: int
    reason: str

    def __str__(self) -> str:
        place = "" if self.record == WHOLE_SHARD else f" record {self.record}"
        return f"{self.shard}.tar{place}: {self.reason}"


class Store:
    """One reader's hold on the files of a dataset; here in a folder that every rank of the node
    sees, on a local or a shared disk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, name: str) -> Path:
        """A local path of the file NAME.tar or NAME.idx; it need not exist."""
        return self.folder / name

    def open(self, name: str) -> BinaryIO:
        """The file for reading. OSError where it is missing, or no file."""
        return open_regular(self.path(name))

    def renew(self, name: str) -> bool:
        """Brings a file again if it is not the manifest's; False: what is here is all there is."""
        return False

    def index(self, shard: ShardInfo) -> ShardIndex:
        """The shard's index. UserError where it is not the manifest's, whatever the policy on
        damage."""
        try:
            return self._index(shard)
        except TryAgain:
            raise
        except UserError:
            if not self.renew(f"{shard.name}.idx"):
                raise
            return self._index(shard)

    def _index(self, shard: ShardInfo) -> ShardIndex:
        path = self.folder / f"{shard.name}.idx"
        try:
            with self.open(path.name) as file:
                data = read_open(file, path)
        except OSError as error:
            kind = TryAgain if may_pass(error) else UserError
            raise kind(f"{path}: cannot read the index: {error.strerror}") from None
        return checked_index(data, str(path), shard)

    def documents(
        self, shard: ShardInfo, vocab_size: int, stride: int = 1, *, skip_damage: bool = False
    ) -> Iterator[TokenDocument]:
        """`read_documents` of a shard; also UserError where a file is missing or the index is not
        the manifest's. `skip_damage` takes a tar that is missing for an empty one."""
        given = 0
        try:
            for document in self._documents(shard, vocab_size, stride):
                yield document
                given += 1
            return
        except TryAgain:
            raise
        except UserError:
            if not (self.renew(f"{shard.name}.tar") or skip_damage):
                raise
        again = self._documents(shard, vocab_size, stride, skip_damage=skip_damage)
        yield from itertools.islice(again, given, None)

    def _documents(
        self, shard: ShardInfo, vocab_size: int, stride: int, *, skip_damage: bool = False
    ) -> Iterator[TokenDocument]:
        """Of the files as they are here now."""
        index, path = self.index(shard), self.folder / f"{shard.name}.tar"
        try:
            tar = self.open(path.name)
        except OSError as error:
            if skip_damage and not may_pass(error):
                return
            raise disk_error(error, path) from None
        with tar:
            yield from read_documents(
                tar, str(path), index, vocab_size, stride, skip_damage=skip_damage
            )

    def hold(self, windows: Sequence[Window]) -> None:
        """Brings the files of these windows here and keeps them; those of others may go."""

    def prefetch(self, windows: Iterator[Window]) -> None:
        """Starts to bring the files of the windows that come next, in order, as room allows."""

    def close(self) -> None:
        """This reader reads no more: others may have the room of what it held."""

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class OpenWindow:
    """A planned window with its shards open.

    shards: uint16 views of the whole tars, of which the records that were checked are there;
    damaged: bool [D], grows as records are checked.
    """

    def __init__(
        self,
        plan: WindowPlan,
        store: Store,
        infos: tuple[ShardInfo, ...],
        vocab_size: int,
        *,
        stop: bool,
    ) -> None:
        self.plan, self._vocab_size = plan, vocab_size
        self.shards: list[np.ndarray] = []
        self.found: list[Damage] = []
        self.damaged = np.zeros(len(plan.document_shard), bool)
        self._checked = np.zeros(len(plan.document_shard), bool)
        self._files: list[tuple[Path, int, memoryview]] = []
        self._store, self._infos = store, infos
        self._asked = set[int]()  # shards that were asked for again
        self._opened = opened = contextlib.ExitStack()
        self._stop, self._held_out = stop, any(info.split == "heldout" for info in infos)
        weakref.finalize(self, opened.close)
        for info in infos:
            path = store.folder / f"{info.name}.tar"
            handle, trouble = _open(store, path, info.bytes, opened)
            if trouble:
                self._report(Damage(info.name, WHOLE_SHARD, trouble))
            try:  # zeros take no memory until they are written to
                buffer = np.zeros(info.bytes + info.bytes % 2, np.uint8)
            except MemoryError:
                what = f"{info.bytes:,} bytes by the manifest, more than there is memory for"
                raise UserError(f"{info.name}.tar: {what}") from None
            self._files.append((path, handle, memoryview(buffer)))
            self.shards.append(buffer.view("<u2"))

    def check(self, first: int, last: int, progress: Callable[[str], None]) -> None:
        """Checks every record that rows [first, last) touch and no call checked before; `progress`
        is told the shard before it is touched. UserError names the damage if the policy is stop;
        TryAgain while the disk does not answer, which is no damage."""
        plan = self.plan
        some = slice(int(plan.row_starts[first]), int(plan.row_starts[last]))
        documents = np.concatenate((plan.a_document[some], plan.b_document[some]))
        new = np.unique(documents[~self._checked[documents]])
        if not new.size:
            return
        shard = -1
        for document, at, record, offset, size, crc in zip(
            new.tolist(),
            plan.document_shard[new].tolist(),
            plan.document_record[new].tolist(),
            plan.payload_offset[new].tolist(),
            plan.payload_size[new].tolist(),
            plan.payload_crc[new].tolist(),
            strict=True,
        ):
            if at != shard:
                shard = at
                progress(plan.shards[at])
            header = tar_header(plan.first_ordinal[at] + record, size)
            reason = _read(*self._files[at], offset, size, header, crc)
            if reason and self._renewed(at):
                reason = _read(*self._files[at], offset, size, header, crc)
            ids = self.shards[at][plan.ids_at[document] : (offset + size) // 2]
            if not reason and ids.max(initial=0) >= self._vocab_size:
                reason = f"has a token {ids.max()}, of a vocabulary of {self._vocab_size}"
            if reason:
                self.damaged[document] = True
                self._report(Damage(plan.shards[at], record, reason))
        self._check_sources(new)
        self._checked[new] = True

    def sources(self, documents: np.ndarray) -> np.ndarray:
        """int64: of each of `documents`, which have been checked, the place in
        `manifest.sources`."""
        shard, offset = self.plan.document_shard[documents], self.plan.payload_offset[documents]
        at = (offset + SOURCE_AT) // 2
        found = [self.shards[s][i] for s, i in zip(shard.tolist(), at.tolist(), strict=True)]
        return np.array(found, np.int64)

    def taken(self) -> list[Damage]:
        """What was found since the last call."""
        found, self.found = self.found, []
        return found

    def _renewed(self, at: int) -> bool:
        """Whether a shard in which damage was found is there anew."""
        path, _, buffer = self._files[at]
        if at in self._asked:
            return False
        self._asked.add(at)
        if not self._store.renew(path.name):
            return False
        handle, trouble = _open(self._store, path, self._infos[at].bytes, self._opened)
        self._files[at] = path, handle, buffer
        return not trouble

    def _check_sources(self, documents: np.ndarray) -> None:
        """The plan drew by the sources that `sources.json` names."""
        if self.plan.document_source is None:
            return
        whole = documents[~self.damaged[documents]]
        wrong = whole[self.sources(whole) != self.plan.document_source[whole]]
        if len(wrong):
            shard = self.plan.shards[self.plan.document_shard[wrong[0]]]
            raise UserError(
                f"{shard}.tar record {self.plan.document_record[wrong[0]]}: is of another source "
                "than sources.json says; `python -m data_pipeline sources DIR` writes it anew"
            )

    def _report(self, damage: Damage) -> None:
        if self._stop:
            way = "data.on_damage: empty trains on without such records"
            if self._held_out:
                way = (
                    "bring it back: scores without it do not compare; or evaluation.every_steps: 0"
                )
            raise UserError(
                f"{damage} (`python -m data_pipeline verify` looks at every byte; {way})"
            )
        self.found.append(damage)


def _not_of_the_file(error: OSError) -> bool:
    """Of its disk, of this process or its user: no reason to drop a document."""
    own = errno.EMFILE, errno.ENOMEM, errno.ENOBUFS, errno.EACCES, errno.EPERM
    return may_pass(error) or error.errno in own


def _open(store: Store, path: Path, size: int, opened: contextlib.ExitStack) -> tuple[int, str]:
    """(a descriptor that `opened` closes, or -1; what is wrong with the file or "")."""
    try:
        handle = opened.enter_context(store.open(path.name)).fileno()
    except OSError as error:
        if _not_of_the_file(error):
            raise disk_error(error, path) from None
        return -1, f"cannot be opened: {error.strerror}"
    actual = os.fstat(handle).st_size
    os.posix_fadvise(handle, 0, actual, os.POSIX_FADV_WILLNEED)
    return handle, "" if actual == size else f"{actual} bytes, the manifest says {size}"


def _read(
    path: Path, handle: int, buffer: memoryview, offset: int, size: int, header: bytes, crc: int
) -> str:
    """Brings a record with its header to its place in `buffer`; what is wrong with it or "".

    Not mapped: a file cut under a mapping ends the process by a signal.
    """
    begin, end = offset - BLOCK, offset + size
    record = buffer[begin:end]
    count = 0
    try:
        # A file server may give less than it was asked for.
        while handle >= 0 and count < len(record):
            got = os.preadv(handle, [record[count:]], begin + count)
            if not got:
                break
            count += got
    except OSError as error:
        if _not_of_the_file(error):
            raise disk_error(error, path) from None
        return f"cannot be read: {error.strerror}"
    if count < len(record):
        actual = os.fstat(handle).st_size if handle >= 0 else 0
        return f"ends at byte {end}, the file at {actual}"
    if record[:BLOCK] != header:
        return "its tar header is not the one written"
    if zlib.crc32(record[BLOCK:]) != crc:
        return "its bytes do not match their crc32"
    return ""
