"""Compressed and plain files as streams of bytes that can be read in independent parts.

Broken input is raised as `Broken` with its place, after what is readable before it was given.
A bzip2 file (one stream or many) is cut at its blocks: every block is independent and has a sum of
its own, but begins at any bit, so the 48-bit block mark is looked for at all eight shifts.
"""

from __future__ import annotations

import bz2
import io
import os
import re
import zlib
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from core.files import open_regular

CHUNK = 1 << 20
# A packing's first bytes. A zstd file may begin with a frame to be skipped.
_MAGIC = {
    "gzip": re.compile(rb"\x1f\x8b\x08"),
    "bzip2": re.compile(rb"BZh[1-9](?:1AY&SY|\x17rE8P\x90)"),
    "zstd": re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"),
}
_MOST_PADDING = 10240  # bytes of zeros behind packed data: of a tape's record
_NAMED = {".gz": "gzip", ".tgz": "gzip", ".bz2": "bzip2", ".zst": "zstd"}


class Broken(Exception):
    """Input that cannot be read: `place` in the file, and what is wrong with it."""

    def __init__(self, place: str, what: str) -> None:
        super().__init__(f"{place}: {what}")
        self.place, self.what = place, what


class Trailing(Broken):
    """Bytes that belong to nothing, after data that was whole."""


class Unsound(Broken):
    """A gzip member or zstd frame that is cut, or not what its sum says: the bytes that it gave may
    be altered. `sound`: how many bytes were given before it."""

    def __init__(self, place: str, what: str, sound: int) -> None:
        super().__init__(place, what)
        self.sound = sound


def packing(path: str | Path) -> str:
    """How a file is packed, by its first bytes, else by its name; "" if it is not."""
    with open_regular(path) as file:
        head = file.read(16)
    found = (kind for kind, magic in _MAGIC.items() if magic.match(head))
    return next(found, _NAMED.get(Path(path).suffix.lower(), ""))


def chunks(path: str | Path, checked: bool = False) -> Iterator[bytes]:
    """The bytes of a file, unpacked, in pieces of a bounded size. Broken if they are cut or
    corrupt; OSError as usual.

    checked: of gzip and zstd too no byte is given that no sum vouches for; unpacks twice.
    """
    kind = packing(path)
    if kind == "bzip2":
        yield from _gathered(_sound_blocks(path))
        return
    left = _sound_bytes(path, kind) if checked and kind else 1 << 62
    with open_regular(path) as file:
        plain = iter(lambda: file.read(CHUNK), b"")
        for piece in _gathered(_unpacked(file, kind)) if kind else plain:
            if left:
                yield piece[:left]
            left -= min(left, len(piece))


def _sound_blocks(path: str | Path) -> Iterator[bytes]:
    """Those before the first that is Broken, which is raised."""
    for _, data in bzip2_blocks(path):
        if isinstance(data, Trailing):
            raise data
        if isinstance(data, Broken):  # a reader cannot tell where its next document begins
            raise Broken(data.place, f"{data.what}; all from there on is left out")
        yield data


def _sound_bytes(path: str | Path, kind: str) -> int:
    """How many unpacked bytes there are before the first member that is cut or corrupt."""
    with open_regular(path) as file:
        try:
            return sum(map(len, _unpacked(file, kind)))
        except Unsound as broken:
            return broken.sound
        except Trailing:
            return 1 << 62


def _unpacked(file: io.BufferedReader, kind: str) -> Iterator[bytes]:
    """Unpacks one member after another, as `cat a.gz b.gz` makes them."""
    member, fed, given, sound = None, 0, 0, None  # sound: given before the last member's end
    zeros = 0
    # zstd gives all that its input holds, up to 32,768 times as much.
    while chunk := file.read(256 if kind == "zstd" else CHUNK // 4):
        fed += len(chunk)
        while chunk:
            if member is None:
                if not chunk.strip(b"\0"):
                    zeros += len(chunk)
                    break  # padding after the last member
                if not _MAGIC[kind].match(chunk + file.peek(16) if len(chunk) < 16 else chunk):
                    if sound is not None:
                        what = f"bytes after the end of the {kind} data"
                        raise Trailing(f"near byte {fed}", what)
                    raise Broken("byte 0", f"not {kind} data, though its name says so")
                zstd = zstandard.ZstdDecompressor().decompressobj
                member = zstd() if kind == "zstd" else zlib.decompressobj(31)
            try:
                for piece in _outputs(kind, member, chunk):
                    given += len(piece)
                    yield piece
            except (zlib.error, zstandard.ZstdError) as error:
                if "not enough memory" in str(error):  # of this machine: the window is bounded
                    raise MemoryError(f"of {kind} data") from None
                what = f"corrupt {kind} data ({error})"
                if "too much memory" in str(error):
                    what = "packed with a window of over 128 MB (zstd --long): unpack it first"
                raise Unsound(f"near byte {fed}", what, sound or 0) from None
            chunk = b""
            if member.eof:
                chunk, member, sound = member.unused_data, None, given
    if member is not None:
        raise Unsound(f"byte {fed}", f"{kind} data ends early", sound or 0)
    if sound is None:
        raise Broken("byte 0", f"not {kind} data, though its name says so")
    if zeros > _MOST_PADDING:
        raise Trailing(f"near byte {fed}", _of_zeros(zeros, kind))


def _of_zeros(count: int, kind: str) -> str:
    return f"{count:,} bytes of zeros behind the {kind} data: padding, or members are lost"


def _outputs(kind: str, member: Any, data: bytes) -> Iterator[bytes]:
    """What a member makes of more input, in pieces."""
    if kind == "zstd":
        yield member.decompress(data)
    else:
        piece = b""
        while not member.eof and (data or len(piece) == CHUNK):
            piece = member.decompress(data, CHUNK)
            data = member.unconsumed_tail
            yield piece


def _gathered(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """The same in fewer pieces."""
    held: list[bytes] = []
    size, ended = 0, None
    while ended is None:
        try:
            held.append(next(pieces))
            size += len(held[-1])
        except (StopIteration, Broken) as error:
            ended = error
        if size >= CHUNK // 4 or (size and ended):
            yield b"".join(held)
            held, size = [], 0
    if isinstance(ended, Broken):
        raise ended


def numbered_lines(
    pieces: Iterator[bytes], at: int = 0, limit: int = 1 << 30, ending: bytes = b"\n"
) -> Iterator[tuple[int, bytes | Broken]]:
    """(offset, line without its end); the first byte has offset `at`. A line of more than `limit`
    bytes is Broken, and never held. A line in which the pieces break off is not given, but where
    all that was packed is there."""
    held: list[bytes] = []  # of the line that is not yet ended; none when it is too long
    size = 0

    def line() -> bytes | Broken:
        if size > limit:
            return Broken(f"byte {at}", f"a line of {size:,} bytes, over max_document_bytes")
        return b"".join(held)

    behind: Trailing | None = None
    try:
        for piece in pieces:
            for number, part in enumerate(piece.split(ending)):
                if number:  # after an ending
                    yield at, line()
                    at, held, size = at + size + 1, [], 0
                size += len(part)
                held.append(part)
                if size > limit:
                    held.clear()
    except Trailing as error:
        behind = error
    if size:
        yield at, line()
    if behind is not None:
        raise behind


_BLOCK_MARK = (0x314159265359).to_bytes(6, "big")
_END_MARK = (0x177245385090).to_bytes(6, "big")


def bzip2_blocks(
    path: str | Path, start: int = 0, end: int = 1 << 62
) -> Iterator[tuple[int, bytes | Broken]]:
    """(byte offset in the file, unpacked bytes) of each bzip2 block that begins at byte `start` or
    later; of one that unpacks to more than a MB in pieces. What cannot be read, or is not what its
    sum says, is given as a `Broken`, and the next block follows. Nothing where none begins before
    byte `end`; from there on an empty piece for each end of a stream, since many may stand there
    without a block."""
    marks = _marks(path, start, end)
    ahead = list(islice(marks, 3))
    # Where a stream begins: its first mark stands four bytes later.
    stream, owner = (0, 0) if start == 0 else (None, 0)
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        while ahead:
            (here, is_block), *later = ahead
            if stream is not None and here != 8 * (stream + 4):
                yield owner, Broken(f"byte {stream}", "corrupt bzip2 data before the next block")
            offset, taken, stream = here // 8, 1, None
            if is_block:
                stop = later[0][0] if later else 8 * size
                data = _decode_block(file, here, stop)
                if data is None and len(later) == 2:
                    # The mark at `stop` may be chance data inside the block.
                    data = _decode_block(file, here, later[1][0])
                    taken = 1 if data is None else 2
                what = "corrupt bzip2 block" if later else "bzip2 data ends early"
                for piece in [Broken(f"byte {offset}", what)] if data is None else data:
                    yield offset, piece
            else:
                stream, owner = (here + 80 + 7) // 8, offset  # after a sum of 32 bits
                if offset >= end:
                    yield offset, b""
            ahead = [*ahead[taken:], *islice(marks, taken)]
        if stream is not None:
            file.seek(stream)
            if not stream:
                yield 0, Broken("byte 0", "not bzip2 data, though its name says so")
            elif any(piece.strip(b"\0") for piece in iter(lambda: file.read(CHUNK), b"")):
                yield owner, Trailing(f"byte {stream}", "bytes after the end of the bzip2 data")
            elif size < stream:  # in the stream's own sum, behind which others may have stood
                yield owner, Trailing(f"byte {size}", "bzip2 data ends early")
            elif size - stream > _MOST_PADDING:
                yield owner, Trailing(f"byte {stream}", _of_zeros(size - stream, "bzip2"))


def _marks(path: str | Path, start: int, end: int) -> Iterator[tuple[int, bool]]:
    """The bits at which block marks (True) and end-of-stream marks (False) stand, from byte
    `start` on. Where none stands before `end`, what comes after is not looked through."""
    window, base, some = b"", start, False
    with open_regular(path) as file:
        file.seek(start)
        while more := file.read(CHUNK):
            # A mark takes 7 bytes where it does not begin with one.
            base += max(0, len(window) - 6)
            window = window[-6:] + more
            data = np.frombuffer(window, np.uint8)
            wide = (data[:-1].astype(np.uint16) << 8) | data[1:]
            found = []
            for shift in range(8):
                shifted = (wide >> (8 - shift)).astype(np.uint8).tobytes()
                for mark, is_block in ((_BLOCK_MARK, True), (_END_MARK, False)):
                    at = shifted.find(mark)
                    while at >= 0:
                        found.append((8 * (base + at) + shift, is_block))
                        at = shifted.find(mark, at + 1)
            yield from sorted(found)
            some = some or bool(found)
            if not some and base + len(window) > end + 6:
                return


_MOST_BLOCK_BITS = 8 << 20  # 900 kB of noise become 1 % longer


def _decode_block(file: io.BufferedReader, start: int, stop: int) -> Iterable[bytes] | None:
    """Unpacks the block at bits [start, stop) by giving it a stream of its own."""
    length = stop - start
    if not 80 <= length <= _MOST_BLOCK_BITS:
        return None
    first, last = start // 8, (stop + 7) // 8
    file.seek(first)
    bits = int.from_bytes(file.read(last - first), "big") >> (8 * last - stop)
    bits &= (1 << length) - 1
    crc = (bits >> (length - 80)) & 0xFFFFFFFF
    bits = (((bits << 48) | int.from_bytes(_END_MARK, "big")) << 32) | crc
    length += 80
    padding = -length % 8
    stream = b"BZh9" + (bits << padding).to_bytes((length + padding) // 8, "big")
    pieces = _pieces_of_block(stream)
    try:
        first = next(pieces)
        more = sum(map(len, pieces))  # its sum is looked at after its last byte
    except (OSError, EOFError):
        return None
    return _pieces_of_block(stream) if more else [first]


def _pieces_of_block(stream: bytes) -> Iterator[bytes]:
    decompressor = bz2.BZ2Decompressor()
    while not decompressor.eof:
        yield decompressor.decompress(stream, CHUNK)
        if decompressor.needs_input:
            raise EOFError
        stream = b""
