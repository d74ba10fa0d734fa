"""The text files in a tar, of which every header, the end, and the packing's checksum count."""

from __future__ import annotations

import posixpath
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field

from core.errors import short
from data_pipeline.corpus.compressed import CHUNK, Broken, packing
from data_pipeline.corpus.documents import Dropped
from data_pipeline.corpus.parts import Input, Record, name_text, without_endings

TAR_ENDINGS = (".tar", ".tgz", ".tbz", ".tbz2", ".tzst")  # the first also before .gz, .bz2, .zst

OTHER_ENDING = "other ending"  # why a file in a tar is dropped that is no text


def is_tar(file: str) -> bool:
    plain = re.sub(r"\.(?:gz|bz2|zst)$", "", file.lower())
    return plain.endswith(".tar") or file.lower().endswith(TAR_ENDINGS)


class _Bytes:
    """Pieces read by count."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._rest = memoryview(b"")
        self.at = 0

    def read(self, count: int, keep: bool = True) -> bytes:
        """The next `count` bytes, fewer at the end; without `keep` they are passed over."""
        found: list[memoryview] = []
        while count and (piece := self._rest or memoryview(next(self._pieces, b""))):
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


@dataclass
class _Ahead:
    """What headers before its own say of a member, and where each kind of them stands."""

    name: str | None = None
    link: str | None = None
    size: int | None = None
    sparse: bool = False
    places: dict[bytes, int] = field(default_factory=dict)


# That are held to tell links to nothing: 60 MB of a tar that is made to fill the memory.
MOST_NAMES, MOST_LINKS = 500_000, 10_000


def tar_members(source: Input) -> Iterator[Record | Dropped]:
    """The text files in a tar, of which every header, the end, and the packing's checksum count.
    Files of other endings are dropped."""
    stream = _Bytes(source.chunks())
    ordinal = -1
    names: set[int] = set()  # of texts and links to them
    links: list[tuple[int, str, str]] = []  # to what has not come yet

    def name_links() -> None:
        for place, member, unread in links:
            if place not in names:
                source.report(f"member {member}", f"{unread}, which is not read")
        links.clear()

    def tell_lost() -> None:
        if ahead.places and source.part.holds(ordinal + 1, run=1):
            said = "a member's long name or attributes, and no member behind them: it is lost"
            source.report(f"byte {min(ahead.places.values())}", said)

    ahead = _Ahead()
    while True:
        at = stream.at
        block = stream.read(tarfile.BLOCKSIZE)
        try:
            header = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
            if header.size < 0:
                raise tarfile.HeaderError("a size below 0")
            if block[257:265] == b"ustar  \0":  # GNU's: times, where others have a name's prefix
                header.name = name_text(block[:100].split(b"\0")[0])
        except tarfile.EOFHeaderError:
            tell_lost()
            break
        except (tarfile.HeaderError, ValueError) as error:
            what = f"bad header ({error})" if block else "no end blocks"
            raise Broken(f"byte {at}", f"broken archive: {what}; what follows is lost") from None
        length = header.size if ahead.size is None else ahead.size
        if header.type in _ABOUT_THE_NEXT:
            if header.type in ahead.places:
                tell_lost()
                ahead = _Ahead()
            if header.type != tarfile.XGLTYPE:
                ahead.places[header.type] = at
            data = _member_bytes(stream, header.name, length, 1 << 20)
            if data is None:
                raise Broken(f"byte {at}", "broken archive: an endless name; what follows is lost")
            if header.type == tarfile.GNUTYPE_LONGNAME:
                ahead.name = name_text(data.rstrip(b"\0"))
            elif header.type == tarfile.GNUTYPE_LONGLINK:
                ahead.link = name_text(data.rstrip(b"\0"))
            elif header.type in (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE):
                said = _pax_records(data, f"byte {at}")
                if b"path" in said:
                    ahead.name = name_text(said[b"path"])
                if b"linkpath" in said:
                    ahead.link = name_text(said[b"linkpath"])
                if b"size" in said:
                    ahead.size = int(said[b"size"])
                ahead.sparse = any(key.startswith(b"GNU.sparse.") for key in said)
            continue
        more = header.type == tarfile.GNUTYPE_SPARSE and block[482]
        while more:
            more = stream.read(tarfile.BLOCKSIZE)[504:505].strip(b"\0")
        member = ahead.name or header.name
        unread = "a sparse file" if ahead.sparse or header.type == tarfile.GNUTYPE_SPARSE else ""
        text = _ends(member, source.suffixes) and not header.isdir()
        if text and len(names) < MOST_NAMES:
            names.add(_place(member))
        if header.islnk() or header.issym():
            target = ahead.link or header.linkname
            unread = f"a link to {target}"
            if text and _ends(target, source.suffixes):
                # Of a link to a text within the tar the text itself is there.
                text = False
                folder = posixpath.dirname(member) if header.issym() else ""
                place = _place(target, folder)
                if source.part.holds(ordinal, run=1) and place not in names:
                    links.append((place, short(member, 1000), short(unread, 1000)))
                if len(links) >= MOST_LINKS:
                    name_links()
        elif not header.isreg():
            unread = f"of type {header.type.decode('latin-1')!r}"
        ahead = _Ahead()
        other = header.isreg() and not text
        ordinal += text or other
        mine = source.part.holds(ordinal, run=1)
        wanted = text and mine
        if not header.isreg() and header.type in tarfile.SUPPORTED_TYPES:
            length = 0
        limit = source.max_document_bytes if wanted and not unread else 0
        data = _member_bytes(stream, member, length, limit)
        if wanted and unread:
            source.report(f"member {member}", f"{unread}, which is not read")
        elif wanted and data is None:
            source.too_large(f"member {member}", length)
        elif wanted:
            yield Record(without_endings(member), data, member)
        elif other and mine:
            yield Dropped(OTHER_ENDING, member)
    name_links()
    rest, at = stream.read(tarfile.BLOCKSIZE), stream.at
    whole = len(rest) == tarfile.BLOCKSIZE
    while rest and not rest.strip(b"\0"):
        rest = stream.read(CHUNK)
    # Zeros fill the last record, of whatever size: nothing tells those of a large one.
    if not rest and stream.at - at > tarfile.RECORDSIZE and not packing(source.file):
        what = f"{stream.at - at:,} bytes of zeros at the end: large records (tar -b), or members"
        raise Broken(f"byte {at}", f"{what} are lost")
    if rest or not whole or stream.at % tarfile.BLOCKSIZE:
        what = "bytes after the end of the archive" if rest else "its end blocks are cut"
        raise Broken(f"byte {stream.at}", what)


# Names of anybody's own have a dot in them.
_PAX_RECORD = re.compile(
    rb"(\d{1,9}) ([^=\n]{0,999}\.[^=\n]{0,999}|atime|charset|comment|ctime|[gu]id|[gu]name|"
    rb"hdrcharset|linkpath|mtime|path|size)="
)


def _ends(member: str, suffixes: tuple[str, ...]) -> bool:
    return member.lower().endswith(suffixes)


def _place(name: str, folder: str = "") -> int:
    """A name's path in the tar, as a hash: a name may be of a MB."""
    return hash(posixpath.normpath(posixpath.join(folder, name)).lstrip("/"))


def _pax_records(data: bytes, place: str) -> dict[bytes, bytes]:
    """The records `LENGTH KEY=VALUE` of a pax header; a value may hold line ends. No sum is kept of
    them, but where a length or key is damaged the next is not found."""
    found: dict[bytes, bytes] = {}
    at = 0
    while at < len(data):
        head = _PAX_RECORD.match(data, at)
        end = at + int(head[1]) if head else 0
        value = data[head.end() : end - 1] if head else b""
        if head is None or end <= head.end() or data[end - 1 : end] != b"\n":
            raise Broken(place, "broken archive: bad pax header; what follows is lost")
        if head[2] == b"size" and not re.fullmatch(rb"\d{1,18}", value):
            raise Broken(place, "broken archive: bad size in a pax header; what follows is lost")
        found[head[2]], at = value, end
    return found


def _member_bytes(stream: _Bytes, name: str, size: int, limit: int) -> bytes | None:
    """The bytes of a member, None where they are more than `limit`; Broken where they end early."""
    padded = size + -size % tarfile.BLOCKSIZE
    start = stream.at
    data = stream.read(padded, keep=size <= limit)
    if stream.at < start + padded:
        raise Broken(f"member {name}", "the archive ends early")
    return data[:size] if size <= limit else None
