"""The text files in a tar, of which every header, the end, and the packing's checksum count."""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterator

from data_pipeline.corpus.compressed import CHUNK, Broken
from data_pipeline.corpus.parts import BYTE_ORDER_MARK, Input, Record, without_endings


def is_tar(file: str) -> bool:
    return re.search(r"\.(?:tar|tgz|tar\.gz|tar\.bz2|tar\.zst)$", file, re.I) is not None


class _Bytes:
    """Pieces read by count."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._rest = b""
        self.at = 0

    def read(self, count: int, keep: bool = True) -> bytes:
        """The next `count` bytes, fewer at the end; without `keep` they are passed over."""
        found: list[bytes] = []
        while count and (piece := self._rest or next(self._pieces, b"")):
            taken, self._rest = piece[:count], piece[count:]
            self.at += len(taken)
            count -= len(taken)
            if keep:
                found.append(taken)
        return b"".join(found)


_ABOUT_THE_NEXT = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)


def tar_members(source: Input) -> Iterator[Record]:
    """The text files in a tar, of which every header, the end, and the packing's checksum count."""
    stream = _Bytes(source.chunks())
    ordinal = -1
    name, size, sparse = None, None, False  # of the next member, where they stand before its header
    while True:
        at = stream.at
        block = stream.read(tarfile.BLOCKSIZE)
        try:
            header = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
            if header.size < 0:
                raise tarfile.HeaderError("a size below 0")
        except tarfile.EOFHeaderError:
            break
        except (tarfile.HeaderError, ValueError) as error:
            what = f"bad header ({error})" if block else "no end blocks"
            raise Broken(f"byte {at}", f"broken archive: {what}; what follows is lost") from None
        length = header.size if size is None else size
        if header.type in _ABOUT_THE_NEXT:
            data = _member_bytes(stream, header.name, length, 1 << 20)
            if data is None:
                raise Broken(f"byte {at}", "broken archive: an endless name; what follows is lost")
            if header.type == tarfile.GNUTYPE_LONGNAME:
                name = data.rstrip(b"\0").decode("utf-8", "surrogateescape")
            elif header.type == tarfile.XHDTYPE:
                if found := re.search(rb"\d+ path=([^\n]*)\n", data):
                    name = found[1].decode("utf-8", "surrogateescape")
                if found := re.search(rb"\d+ size=(\d{1,18})\n", data):
                    size = int(found[1])
                sparse = b" GNU.sparse." in data
            continue
        more = header.type == tarfile.GNUTYPE_SPARSE and block[482]
        while more:
            more = stream.read(tarfile.BLOCKSIZE)[504:505].strip(b"\0")
        member = name or header.name
        holes = sparse or header.type == tarfile.GNUTYPE_SPARSE
        name, size, sparse = None, None, False
        text = header.isreg() and member.lower().endswith((".txt", ".text"))
        ordinal += text
        wanted = text and source.part.holds(ordinal, run=1)
        if not header.isreg() and header.type in tarfile.SUPPORTED_TYPES:
            length = 0
        limit = source.max_document_bytes if wanted and not holes else 0
        data = _member_bytes(stream, member, length, limit)
        if wanted and holes:
            source.report(f"member {member}", "a sparse file")
        elif wanted and data is None:
            source.too_large(f"member {member}", length)
        elif wanted:
            yield Record(without_endings(member), data.removeprefix(BYTE_ORDER_MARK))
    rest = stream.read(tarfile.BLOCKSIZE)
    whole = len(rest) == tarfile.BLOCKSIZE
    while rest and not rest.strip(b"\0"):
        rest = stream.read(CHUNK)
    if rest or not whole:
        what = "bytes after the end of the archive" if rest else "one of two end blocks is missing"
        raise Broken(f"byte {stream.at}", what)


def _member_bytes(stream: _Bytes, name: str, size: int, limit: int) -> bytes | None:
    """The bytes of a member, None where they are more than `limit`; Broken where they end early."""
    padded = size + -size % tarfile.BLOCKSIZE
    start = stream.at
    data = stream.read(padded, keep=size <= limit)
    if stream.at < start + padded:
        raise Broken(f"member {name}", "the archive ends early")
    return data[:size] if size <= limit else None
