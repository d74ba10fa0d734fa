"""Compressed and plain files as streams of bytes that can be read in independent parts.

Broken input is raised as `Broken` with its place, after everything readable before it was given.
A bzip2 file (one stream or many) is cut at its blocks: every block is independent, but begins at
any bit, so the 48-bit block mark is looked for at all eight shifts.
"""

from __future__ import annotations

import bz2
import io
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

CHUNK = 1 << 20
# A packing's first bytes. A zstd file may begin with a frame to be skipped.
_MAGIC = {
    "gzip": re.compile(rb"\x1f\x8b\x08"),
    "bzip2": re.compile(rb"BZh[1-9](?:1AY&SY|\x17rE8P\x90)"),
    "zstd": re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"),
}
_NAMED = {".gz": "gzip", ".tgz": "gzip", ".bz2": "bzip2", ".zst": "zstd"}


class Broken(Exception):
    """Input that cannot be read: `place` in the file, and what is wrong with it."""

    def __init__(self, place: str, what: str) -> None:
        super().__init__(f"{place}: {what}")
        self.place, self.what = place, what


class Trailing(Broken):
    """Bytes that belong to nothing, after data that was whole."""


def packing(path: str | Path) -> str:
    """How a file is packed, by its first bytes, else by its name; "" if it is not."""
    with open(path, "rb") as file:
        head = file.read(16)
    found = (kind for kind, magic in _MAGIC.items() if magic.match(head))
    return next(found, _NAMED.get(Path(path).suffix.lower(), ""))


def chunks(path: str | Path) -> Iterator[bytes]:
    """The bytes of a file, unpacked, in pieces of a bounded size. Broken if they are cut or
    corrupt; OSError as usual."""
    kind = packing(path)
    with open(path, "rb") as file:
        if kind:
            yield from _gathered(_unpacked(file, kind))
        while not kind and (chunk := file.read(CHUNK)):
            yield chunk


def _unpacked(file: io.BufferedReader, kind: str) -> Iterator[bytes]:
    """Unpacks one member after another, as `cat a.gz b.gz` makes them."""
    member, fed, whole = None, 0, 0
    # zstd gives all that its input holds, up to 32,768 times as much.
    while chunk := file.read(256 if kind == "zstd" else CHUNK // 4):
        fed += len(chunk)
        while chunk:
            if member is None:
                if not chunk.strip(b"\0"):
                    break  # padding after the last member
                if not _MAGIC[kind].match(chunk + file.peek(16) if len(chunk) < 16 else chunk):
                    if whole:
                        what = f"bytes after the end of the {kind} data"
                        raise Trailing(f"near byte {fed}", what)
                    raise Broken("byte 0", f"not {kind} data, though its name says so")
                member = _new_member(kind)
            try:
                yield from _outputs(kind, member, chunk)
            except (zlib.error, OSError, ValueError, zstandard.ZstdError) as error:
                raise Broken(f"near byte {fed}", f"corrupt {kind} data ({error})") from None
            chunk = b""
            if member.eof:
                chunk, member, whole = member.unused_data, None, whole + 1
    if member is not None:
        raise Broken(f"byte {fed}", f"{kind} data ends early")


def _new_member(kind: str) -> Any:
    if kind == "bzip2":
        return bz2.BZ2Decompressor()
    return (
        zlib.decompressobj(31) if kind == "gzip" else zstandard.ZstdDecompressor().decompressobj()
    )


def _outputs(kind: str, member: Any, data: bytes) -> Iterator[bytes]:
    """What a member makes of more input, in pieces."""
    if kind == "zstd":
        yield member.decompress(data)
    elif kind == "bzip2":
        yield member.decompress(data, CHUNK)
        while not member.eof and not member.needs_input:
            yield member.decompress(b"", CHUNK)
    else:
        piece = b""
        while not member.eof and (data or len(piece) == CHUNK):
            piece = member.decompress(data, CHUNK)
            data = member.unconsumed_tail
            yield piece


def _gathered(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """The same in fewer pieces."""
    held: list[bytes] = []
    size = 0
    try:
        for piece in pieces:
            held.append(piece)
            size += len(piece)
            if size >= CHUNK // 4:
                yield b"".join(held)
                held, size = [], 0
    except Broken:
        if size:
            yield b"".join(held)
        raise
    if size:
        yield b"".join(held)


def numbered_lines(
    pieces: Iterator[bytes], at: int = 0, limit: int = 1 << 30, ending: bytes = b"\n"
) -> Iterator[tuple[int, bytes | Broken]]:
    """(offset, line without its end); the first byte has offset `at`. A line of more than `limit`
    bytes is Broken, and never held. A line in which the pieces break off is not given."""
    rest: list[bytes] = []  # of the line that is not yet ended; none when it is too long
    size = 0

    def too_long(length: int) -> Broken:
        return Broken(f"byte {at}", f"a line of {length:,} bytes, over max_document_bytes")

    for piece in pieces:
        first, *more = piece.split(ending)
        size += len(first)
        rest.append(first)
        if size > limit:
            rest = []
        if not more:
            continue
        yield at, b"".join(rest) if size <= limit else too_long(size)
        at += size + 1
        last = more.pop()
        for line in more:
            length = len(line)
            yield at, line if length <= limit else too_long(length)
            at += length + 1
        rest, size = [last], len(last)
    if size:
        yield at, b"".join(rest) if size <= limit else too_long(size)


_BLOCK_MARK = (0x314159265359).to_bytes(6, "big")
_END_MARK = (0x177245385090).to_bytes(6, "big")


def bzip2_blocks(path: str | Path, start: int, end: int) -> Iterator[tuple[int, bytes | Broken]]:
    """(byte offset in the file, decompressed bytes) of each bzip2 block from byte `start` on.

    The caller stops when it has what it needs; blocks at or past `end` belong to the next part.
    A block that cannot be read is given as a `Broken` and the next one follows.
    """
    size = Path(path).stat().st_size
    with open(path, "rb") as file:
        base = start
        file.seek(base)
        window = b""
        marks: list[tuple[int, bool]] = []
        scanned = 0
        while True:
            more = file.read(CHUNK)
            window += more
            at_end = not more or base + len(window) >= size
            marks += _marks(window, max(0, scanned - 7))
            marks = sorted(set(marks))
            scanned = len(window)
            while marks:
                here, is_block = marks[0]
                if not is_block:
                    marks.pop(0)
                    continue
                if len(marks) < 2 and not at_end:
                    break
                stop = marks[1][0] if len(marks) > 1 else len(window) * 8
                offset = base + here // 8
                data = _decode_block(window, here, stop)
                if data is None and len(marks) > 2:
                    # The mark at `stop` may be chance data inside the block.
                    data = _decode_block(window, here, marks[2][0])
                    if data is not None:
                        marks.pop(1)
                if data is None:
                    ends = len(marks) < 2
                    what = "bzip2 data ends early" if ends else "corrupt bzip2 block"
                    yield offset, Broken(f"byte {offset}", what)
                else:
                    yield offset, data
                marks.pop(0)
            if at_end:
                return
            # Keep only what the unfinished block needs.
            keep = marks[0][0] // 8 if marks else max(0, len(window) - 8)
            window = window[keep:]
            base += keep
            scanned -= keep
            marks = [(bit - 8 * keep, kind) for bit, kind in marks]


def _marks(window: bytes, start: int) -> list[tuple[int, bool]]:
    """Bit positions of block marks (True) and end-of-stream marks (False) at or after byte
    `start`."""
    data = np.frombuffer(window, np.uint8, offset=start)
    if len(data) < 7:
        return []
    wide = (data[:-1].astype(np.uint16) << 8) | data[1:]
    found = []
    for shift in range(8):
        shifted = (wide >> (8 - shift)).astype(np.uint8).tobytes()
        for mark, is_block in ((_BLOCK_MARK, True), (_END_MARK, False)):
            at = shifted.find(mark)
            while at >= 0:
                found.append((8 * (start + at) + shift, is_block))
                at = shifted.find(mark, at + 1)
    return found


def _decode_block(window: bytes, start: int, stop: int) -> bytes | None:
    """Decompresses the block at bits [start, stop) by giving it a stream of its own."""
    first, last = start // 8, (stop + 7) // 8
    bits = int.from_bytes(window[first:last], "big") >> (8 * last - stop)
    length = stop - start
    bits &= (1 << length) - 1
    if length < 80:
        return None
    crc = (bits >> (length - 80)) & 0xFFFFFFFF
    bits = (((bits << 48) | int.from_bytes(_END_MARK, "big")) << 32) | crc
    length += 80
    padding = -length % 8
    stream = b"BZh9" + (bits << padding).to_bytes((length + padding) // 8, "big")
    decompressor = bz2.BZ2Decompressor()
    try:
        data = decompressor.decompress(stream)
    except (OSError, ValueError):
        return None
    return data if decompressor.eof else None
