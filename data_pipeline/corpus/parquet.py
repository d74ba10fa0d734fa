"""Parquet files from anyone: what the library would end the process over, or fill the memory with,
is found before it is read."""

from __future__ import annotations

import errno
import io
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, BinaryIO, Self

from core.errors import disk_error
from core.files import open_regular

if TYPE_CHECKING:
    import pyarrow.parquet

# Bytes that the rows of a batch may unpack to: a text that a page holds once may stand in many.
# What reads them needs some times as much.
AT_ONCE = 1 << 26
_MOST_ASKED = 1 << 32  # bytes; a column chunk of sound parquet takes no more at once


class Parquet:
    """An open file. table: pyarrow's, which compares pages with their checksums, if there are any.

    All methods raise pyarrow.ArrowException, OSError or ValueError where the file is damaged.
    """

    def __init__(self, file: str) -> None:
        import pyarrow.parquet

        open_regular(file).close()
        self._file = file
        self.table = pyarrow.parquet.ParquetFile(file, page_checksum_verification=True)
        self._bare = _FooterAlone(file)
        self._footer = pyarrow.parquet.ParquetFile(self._bare)
        self._bare.pages = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for file in (self._footer, self._bare, self.table):
            file.close()

    def rows_lost(self) -> str:
        """What is to be said where the footer tells of other rows than its row groups; else ""."""
        told = self.table.metadata.num_rows
        held = sum(map(self.rows_of, range(self.table.num_row_groups)))
        return "" if held == told else f"row groups of {held:,} rows, {told:,} by its footer"

    def rows_of(self, group: int) -> int:
        """By the footer."""
        return self.table.metadata.row_group(group).num_rows

    def texts(self, names: Iterable[str]) -> list[int]:
        """The leaves of text or bytes that the library reads where it is asked for these columns;
        over some forged ones of numbers it ends the process where their sizes are asked for."""
        return [
            leaf for leaf, column in self._leaves(names) if column.physical_type == "BYTE_ARRAY"
        ]

    def _leaves(self, names: Iterable[str]) -> Iterator[tuple[int, pyarrow.parquet.ColumnSchema]]:
        schema, starts = self.table.schema, tuple(f"{name}." for name in names)
        for leaf, column in enumerate(map(schema.column, range(len(schema)))):
            if f"{column.path}.".startswith(starts):
                yield leaf, column

    def check(self, group: int, leaves: Sequence[int]) -> None:
        """An error where the footer tells of a leaf (of `texts`) what cannot be: asked for its
        sizes the library would end the process, and not where it reads it, here up to its first
        page."""
        import pyarrow

        for leaf in leaves:
            self._bare.asked = False
            try:
                self._footer.reader.read_row_group(group, column_indices=[leaf], use_threads=False)
            except (pyarrow.ArrowException, OSError):
                if not self._bare.asked:
                    raise
        if leaves and group == self.table.num_row_groups - 1:
            self._check_end([self.table.metadata.row_group(group).column(leaf) for leaf in leaves])

    def _check_end(self, last: Sequence[pyarrow.parquet.ColumnChunkMetaData]) -> None:
        """ValueError where a whole other file ends behind these: the places that this one's footer
        tells of are then in that one, where pages may stand too."""
        at = max(0, *(_place(column)[1] for column in last))
        with open_regular(self._file) as file:
            end = os.fstat(file.fileno()).st_size - 8 - self.table.metadata.serialized_size
            while at + 8 <= end:
                file.seek(at)
                block = file.read(min(end - at, 1 << 20))
                for mark in re.finditer(b"(?s)(....)PAR1", block):
                    footer = at + mark.start() - int.from_bytes(mark[1], "little")
                    # It begins with its version, a number that is the first of its fields.
                    if footer > 0 and file.seek(footer) and file.read(1) == b"\x15":
                        raise ValueError("another file stands before this one, whose rows are lost")
                at += max(1, len(block) - 7)

    def rows_at_once(self, group: int, names: Sequence[str], most: int, limit: int) -> int:
        """How many rows of a group may be unpacked together, up to `most`: no value is larger than
        a page of its leaf (of `texts`, checked), or than is said of all. 0 where one is made to
        fill the memory, since a page is unpacked at once: to over `limit` bytes and a hundred times
        its size."""
        chunk = self.table.metadata.row_group(group)
        fixed = [c for _, c in self._leaves(names) if c.physical_type == "FIXED_LEN_BYTE_ARRAY"]
        largest = max([1, *(column.length for column in fixed)])
        for leaf in self.texts(names):
            packed = unpacked = 0
            for length, size in _page_bytes(chunk.column(leaf), self._file):
                packed, unpacked = packed + length, unpacked + size
                largest = max(largest, size)
            if unpacked > max(100 * packed, limit):
                return 0
        return max(1, min(most, AT_ONCE // largest))


def raise_if_no_damage(error: Exception, file: str) -> None:
    """MemoryError or the one line of `disk_error` where an error of these methods, or of the
    library's, is not of the file's bytes but of this machine's memory or its disk."""
    asked = re.search(r"size (\d+)", str(error))
    damaged = asked is not None and int(asked[1]) > _MOST_ASKED
    if "bad_alloc" in str(error) or (isinstance(error, MemoryError) and not damaged):
        raise MemoryError(f"of {file}: {error}") from None
    # The library's own errors have no number; a place that damage made up is EINVAL to the system.
    if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
        raise disk_error(OSError(error.errno, os.strerror(error.errno)), file) from None


class _FooterAlone(io.FileIO):
    """A file whose `pages` may be closed to the library once it has read the footer: it finds the
    end there. (An exception would keep the library's reader in memory for ever.)"""

    pages, asked = True, False

    def read(self, size: int | None = -1) -> bytes | None:
        self.asked = True
        return super().read(size) if self.pages else b""


def _place(column: pyarrow.parquet.ColumnChunkMetaData) -> tuple[int, int]:
    """Where its pages begin and end, by the footer."""
    at = column.data_page_offset
    if column.has_dictionary_page and column.dictionary_page_offset:
        at = min(at, column.dictionary_page_offset)
    return at, at + column.total_compressed_size


def _page_bytes(
    column: pyarrow.parquet.ColumnChunkMetaData, file: str
) -> Iterator[tuple[int, int]]:
    """The bytes of each of a column's pages, packed and unpacked, by their own headers, which the
    library obeys whatever the footer says. ValueError where one cannot be read."""
    at, end = _place(column)
    with open_regular(file) as handle:
        end = min(end, handle.seek(0, os.SEEK_END))
        while at < end:
            handle.seek(at)
            numbers = dict(_thrift_numbers(handle))
            size, length = numbers.get(2, -1), numbers.get(3, -1)
            if min(size, length) < 0:
                raise ValueError("a page without its size")
            at = handle.tell() + length
            if at > end:
                raise ValueError("a page goes beyond its column")
            yield length, size


def _thrift_numbers(handle: BinaryIO) -> Iterator[tuple[int, int]]:
    """(field, value) of the numbers of 32 bits of a struct in Thrift's compact protocol; reads to
    its end. ValueError where it is none, or where the library might find other fields: in order,
    within their bits, none is there twice."""

    def byte() -> int:
        if not (data := handle.read(1)):
            raise ValueError("a page's header ends early")
        return data[0]

    def number() -> int:
        value = shift = 0
        while shift < 70:
            more = byte()
            value |= (more & 127) << shift
            shift += 7
            if more < 128:
                return value
        raise ValueError("bad number in a page's header")

    def signed() -> int:
        value = number()
        return (value >> 1) ^ -(value & 1)

    fields = [0]  # the last one of each struct that is open
    while fields:
        mark = byte()
        kind = mark & 15
        if not mark:
            fields.pop()
            continue
        field = fields[-1] + (mark >> 4) if mark >> 4 else signed()
        if not fields[-1] < field < 1 << 15 or len(fields) > 16:
            raise ValueError("a page's header cannot be read")
        fields[-1] = field
        if kind in (4, 5, 6):
            value = signed()
            if len(fields) == 1 and kind == 5:
                yield field, value
        elif kind == 8 and (length := number()) < 1 << 31:
            handle.seek(length, os.SEEK_CUR)
        elif kind == 12:
            fields.append(0)
        elif kind not in (1, 2):
            raise ValueError("a page's header cannot be read")
