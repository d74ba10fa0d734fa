"""Compressed and plain files as streams of bytes that can be read in independent parts.

Broken input is raised as `Broken` with its place, after everything readable before it was given.
A bzip2 file (one stream or many) is cut at its blocks: every block is independent, but begins at
any bit, so the 48-bit block mark is looked for at all eight shifts.
"""

from __future__ import annotations

import bz2
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

CHUNK = 1 << 20


class Broken(Exception):
    """Input that cannot be read: `place` in the file, and what is wrong with it."""

    def __init__(self, place: str, what: str) -> None:
        super().__init__(f"{place}: {what}")
        self.place, self.what = place, what


def is_compressed(path: str | Path) -> bool:
    """By the name's end: .bz2, .gz, .tgz, .zst."""
    return str(path).endswith((".bz2", ".gz", ".tgz", ".zst"))


def chunks(path: str | Path) -> Iterator[bytes]:
    """The decompressed bytes of a file, in pieces. Broken if it is cut or corrupt; OSError as
    usual."""
    name = str(path)
    with open(path, "rb") as file:
        if name.endswith(".bz2"):
            yield from _members(file, bz2.BZ2Decompressor, (OSError, ValueError), "bzip2")
        elif name.endswith((".gz", ".tgz")):
            yield from _members(file, lambda: zlib.decompressobj(31), (zlib.error,), "gzip")
        elif name.endswith(".zst"):
            import zstandard

            def new():  # noqa: ANN202
                return zstandard.ZstdDecompressor().decompressobj()

            yield from _members(file, new, (zstandard.ZstdError,), "zstd")
        else:
            while chunk := file.read(CHUNK):
                yield chunk


def _members(file, new, errors, kind: str) -> Iterator[bytes]:  # noqa: ANN001
    """Decompresses one compressed member after another, as `cat a.gz b.gz` makes them."""
    member, fed, started = new(), 0, False
    while chunk := file.read(CHUNK // 4):
        fed += len(chunk)
        while chunk:
            if not started and not chunk.strip(b"\0"):
                break  # zero padding after the last member
            started = True
            try:
                data = member.decompress(chunk)
            except errors as error:
                raise Broken(f"near byte {fed}", f"corrupt {kind} data ({error})") from None
            if data:
                yield data
            chunk = b""
            if member.eof:
                chunk = member.unused_data
                member, started = new(), False
    if started:
        raise Broken(f"byte {fed}", f"{kind} data ends early")


def lines(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Lines without their line ends; memory is bounded by the longest line."""
    rest: list[bytes] = []
    for piece in pieces:
        if b"\n" not in piece:
            rest.append(piece)
            continue
        first, *middle, last = piece.split(b"\n")
        yield b"".join([*rest, first])
        yield from middle
        rest = [last] if last else []
    if rest:
        yield b"".join(rest)


def lines_from(path: str | Path, start: int) -> Iterator[tuple[int, bytes]]:
    """(offset, line) for every line of a plain file that begins at byte `start` or later."""
    with open(path, "rb", buffering=CHUNK) as file:
        at = start
        if start:
            file.seek(start - 1)
            at = start - 1 + len(file.readline())
        for line in file:
            yield at, line.rstrip(b"\n")
            at += len(line)


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
