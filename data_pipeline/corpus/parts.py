"""Files cut into parts, and the records of a part: here is all that knows of parts.

A part is a range of bytes where a file can be entered in the middle (lines, pages, bzip2 blocks), a
range of row groups, or else every n-th run of records, for which each part reads the whole file.
Each function here yields the records that begin in the part, in order, and reports what cannot be
read; nothing is kept in memory beyond one record. (archives.py has the members of a tar, tables.py
the rows of JSON and parquet; the readers make documents of records.)
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import NamedTuple

from core.files import open_regular
from data_pipeline.corpus.compressed import (
    CHUNK,
    Broken,
    Trailing,
    bzip2_blocks,
    chunks,
    numbered_lines,
    packing,
)
from data_pipeline.corpus.documents import Problem, unescape

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_MARKS = re.compile(rb"\A(?:\xef\xbb\xbf)++")  # one more by each program that writes it anew
# What files of other kinds begin with, whose bytes may be text for the most part: a zip, with
# members and without, and marks before which white space may stand, or an end of file that a
# printer's driver writes.
_NO_TEXT = re.compile(
    rb"(PK(?:\x03\x04|\x05\x06))|(?:\xef\xbb\xbf)*+[\s\x04]*+(?:(\{\\u?rtf\d)|(%PDF-\d)|"
    rb"(%!(?:PS-|FontType|[ \t]{0,9}[\r\n])|\x1b%-12345X))"
)
NO_TEXTS = ("a zip or Office file", "RTF", "PDF", "PostScript")
_HALVES = re.compile("[\ud800-\udfff]")
# Bytes by which binary data is told: control characters but white space, NUL, and what texts and
# their old encodings hold (backspace, escape, shifts, end of file, separators). One kind or another
# may stand in a text, many within a block do not. A line of some length has none by chance.
_USUAL = bytes(byte for byte in range(256) if not (0 < byte < 8 or 15 < byte < 26))
_ODD, _BLOCK, _CHANCE = 8, 1024, 32
_RUN = 64  # records dealt to one part at a time
ISO_2022 = b"\x1b$"  # as Japanese, Korean or Chinese of 7 bits begin
_MOST_STRANGE = 0.1  # of a text's characters
_JUDGED = 200  # characters, and more, are told by that share


@dataclass(frozen=True)
class Part:
    """Bytes [start, end) of a file; with an end of 0 the part `index` of `count` that are dealt."""

    start: int = 0
    end: int = 0
    index: int = 0
    count: int = 1

    def holds(self, ordinal: int, run: int = _RUN) -> bool:
        """Whether record `ordinal` of those that were read belongs to the part."""
        return self.end > 0 or (ordinal // run) % self.count == self.index


@dataclass(frozen=True)
class Input:
    """A part of a file, and what its reader needs to know. `name`: the file's, for document ids.
    checked: of a packed file only what its sums vouch for (`compressed.chunks`). told: is called
    with each problem. suffixes: of the texts in an archive."""

    file: str
    name: str
    part: Part
    text_column: str
    id_column: str
    min_paragraph_words: int
    max_document_bytes: int
    checked: bool
    told: Callable[[Problem], None]
    suffixes: tuple[str, ...] = (".txt", ".text")

    def chunks(self) -> Iterator[bytes]:
        """The file's bytes, unpacked."""
        return chunks(self.file, self.checked)

    def report(self, place: str, what: str) -> None:
        """Something in the file cannot be read; reading goes on behind it."""
        self.told(Problem(self.file, place, what))

    def over_limit(self, size: int) -> str:
        return f"{size:,} bytes, over max_document_bytes ({self.max_document_bytes:,})"

    def too_large(self, place: str, size: int) -> None:
        self.report(place, self.over_limit(size))

    def decode(self, data: bytes, place: str, encoding: str = "UTF-8") -> str:
        """The text; what is not of the encoding is reported, and replaced. Of data that is no text,
        or of another encoding, nothing."""
        wrong: UnicodeDecodeError | None = None
        try:
            text = data.decode(encoding)
        except UnicodeDecodeError as error:
            text, wrong = data.decode(encoding, "replace"), error
        strange = text.count("\ufffd") + text.count("\0")
        if data[257:262] == b"ustar" and b"\0" in data[:257]:
            self.report(place, "not text: it is a tar")
            return ""
        if kind := kind_of_no_text(data):
            self.report(place, f"not text: it is {kind}")
            return ""
        # Of a short line a letter or two of Latin-1 are more than that; it is text all the same.
        most = _MOST_STRANGE if len(text) >= _JUDGED or "\0" in text else 0.5
        if strange > most * len(text):
            share = f"{100 * strange / len(text):.0f} % of its characters are NUL or bad {encoding}"
            self.report(place, f"not text: {share}")
            return ""
        if ISO_2022 in data and encoding == "UTF-8":
            self.report(place, "not text: of 7 bits (ISO-2022); save it as UTF-8")
            return ""
        self.tell_left_out(text, place)
        if wrong is not None:
            self.report(f"{place}, byte {wrong.start} of it", f"bad {encoding}")
        return text

    def tell_left_out(self, text: object, place: str) -> None:
        """Reports the NUL characters of a text, and of JSON halves of surrogate pairs, which are
        left out."""
        if isinstance(text, str) and "\0" in text:
            self.report(place, f"{text.count(chr(0)):,} NUL characters in the text")
        if isinstance(text, str) and not text.isascii() and (halves := _HALVES.findall(text)):
            self.report(place, f"{len(halves):,} halves of surrogate pairs in the text")


class Record(NamedTuple):
    """`at`: where it stands in the file: a byte, or the name of a text in document ids. file: the
    name of a text, with its endings."""

    at: int | str
    data: bytes
    file: str = ""


class Row(NamedTuple):
    """One row of a table, whose fields may be of any type. `at`: its byte or number in the file."""

    at: int
    id: object
    text: object


class _Noise:
    """Which blocks of the bytes of a file are binary, for readers who go forward."""

    def __init__(self, at: int, limit: int) -> None:
        self._at = at  # of the first byte, where a block begins
        # Of a line over the limit, which is not given, the last ones.
        self._found: deque[int] = deque(maxlen=(limit + 2 * CHUNK) // _BLOCK + 4)

    def watch(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        """The pieces, cut where blocks end and given when the block behind them is judged."""
        held, ended = b"", None
        # A piece of zstd may be large, and is copied here.
        pieces = (piece[at : at + CHUNK] for piece in pieces for at in range(0, len(piece), CHUNK))
        while ended is None:
            try:
                held += next(pieces)
            except (StopIteration, Broken) as error:
                ended = error
            whole = len(held) if ended else len(held) // _BLOCK * _BLOCK
            if len(held[:whole].translate(None, _USUAL)) >= _ODD:
                for at in range(0, whole, _BLOCK):
                    first = min(at, max(0, whole - _BLOCK))  # of the last, which may be short
                    if len(set(held[first : at + _BLOCK].translate(None, _USUAL))) >= _ODD:
                        self._add((self._at + at) // _BLOCK)
            given = whole if ended else max(0, whole - _BLOCK)
            self._at += given
            if given:
                yield held[:given]
            held = held[given:]
        if isinstance(ended, Broken):
            raise ended

    def _add(self, block: int) -> None:
        if not self._found or self._found[-1] < block:  # the last is judged twice
            self._found.append(block)

    def holds(self, at: int, line: bytes, before: bytes) -> bool:
        """Whether a line is noise: in a binary block or beside one and no text itself; in one, if
        the few bytes before it are none, also a line that is too short to be known as text."""
        first, last = at // _BLOCK, (at + max(0, len(line) - 1)) // _BLOCK
        while self._found and self._found[0] < first - 1:
            self._found.popleft()
        if not self._found or self._found[0] > last + 1:
            return False
        if line.translate(None, _USUAL) or "\ufffd" in line.decode("utf-8", "replace"):
            return True
        if len(line) >= _CHANCE or not any(first <= block <= last for block in self._found):
            return False
        # A letter may be cut by their beginning.
        cut = before.decode("utf-8", "replace").lstrip("\ufffd")
        return not at or bool(before.translate(None, _USUAL)) or "\ufffd" in cut


# CR CR LF is one end: what CRLF becomes where a CR is put before each LF once more.
_LONE = re.compile(rb"\r(?!\r?\n)")


def _ends_in_lf(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """The pieces with LF for each CR that ends a line without one. What becomes of a byte is told
    by the two behind it, so that a file has the same lines wherever its reading begins."""
    held, ended = b"", None
    while ended is None:
        try:
            held += next(pieces)
        except (StopIteration, Broken) as error:
            ended = error
        unknown = 0 if ended else min(2, len(held) - len(held.rstrip(b"\r")))
        if given := len(held) - unknown:
            alone = held.count(b"\r") > held.count(b"\r\n")
            yield (_LONE.sub(b"\n", held) if alone else held)[:given]
        held = held[given:]
    if isinstance(ended, Broken):
        raise ended


def kind_of_no_text(head: bytes) -> str:
    """One of NO_TEXTS, by the first bytes of a file; "" of any other."""
    found = _NO_TEXT.match(head)
    return NO_TEXTS[found.lastindex - 1] if found else ""


def lines_of(source: Input, any_end: bool = False) -> Iterator[tuple[int, bytes | Broken]]:
    """(byte, line) from the part's beginning to the end of the file. Of a stretch of binary data
    the first line is Broken, the others are not given. any_end: lines end at LF, CRLF or CR, mixed
    too; else at CR alone where the file begins without an LF."""
    file, start, end = source.file, source.part.start, source.part.end
    with contextlib.closing(chunks(file)) as pieces:
        try:
            head = next(pieces)
        except StopIteration:
            raise Broken("byte 0", "an empty file") from None
        except Broken:
            head = b""
    if kind := kind_of_no_text(head):
        raise Broken("byte 0", f"not text: it is {kind}")
    # Lines of old Macs end in CR alone.
    ending = b"\r" if not any_end and b"\r" in head and b"\n" not in head else b"\n"
    at = max(0, (start - 1) // _BLOCK - 1) * _BLOCK
    noise = _Noise(at, source.max_document_bytes)
    pieces = (data for _, data in _range(file, at, end)) if start else source.chunks()
    pieces = noise.watch(pieces)
    if any_end:
        pieces = _ends_in_lf(pieces)
    before = b""
    if start:
        # What begins before the part is another's, but a line that ends there is not.
        found, rest = b"", b""
        while not found and at < end and (data := next(pieces, b"")):
            _, found, rest = data[max(0, start - 1 - at) :].partition(ending)
            before = (before + data[: len(data) - len(rest)])[-_CHANCE:]
            at += len(data)
        if not found:
            return  # all of the part lies within one line
        start, pieces = at - len(rest), chain([rest], pieces)
    told = False
    for at, line in numbered_lines(pieces, start, source.max_document_bytes, ending):
        if isinstance(line, Broken):
            yield at, line
            continue
        is_noise = noise.holds(at, line, before)
        before = (before + line[-_CHANCE:] + ending)[-_CHANCE:]
        if not is_noise:
            told = False
            yield at, line if at else _MARKS.sub(b"", line)
        elif not told:
            told = True
            yield at, Broken(f"byte {at}", "not text: binary data")


def line_records(source: Input, run: int = _RUN, any_end: bool = False) -> Iterator[Record]:
    """One record a line; any_end: as `lines_of` has it."""
    for ordinal, (at, line) in enumerate(lines_of(source, any_end)):
        if source.part.end and at >= source.part.end:
            return
        if not source.part.holds(ordinal, run):
            continue
        if isinstance(line, Broken):
            source.report(line.place, line.what)
        else:
            yield Record(at, line)


@cache
def _spelled(key: str) -> re.Pattern[bytes]:
    """What may be the key in JSON, each letter as it is or as an escape."""
    escape = rb"\\u\w{4}(?:\\u\w{4})?|\\."
    letters = (b"(?:%b|%b)" % (re.escape(letter.encode()), escape) for letter in key)
    return re.compile(b'"%b"' % b"".join(letters))


def stands_twice(line: bytes, key: str) -> bool:
    """Whether a JSON object has a key more than once, of which Python keeps the last alone."""
    if len(_spelled(key).findall(line)) < 2:
        return False
    pairs = json.loads(line, object_pairs_hook=list)
    return [name for name, _ in pairs].count(key) > 1


def text_rows(source: Input) -> Iterator[Row]:
    """One row a line, in long runs: a part's ends cut books."""
    for at, line, _ in line_records(source, run=65536, any_end=True):
        text = source.decode(line, f"byte {at}")
        if text or not line:
            yield Row(int(at), None, text)


_PAGE, _PAGE_END = b"<page>", b"</page>"
# As a page may begin or end that is none.
_PAGE_LIKE = re.compile(rb"(?i)<(/?)(?:\w{1,99}:)?page[\s/>]")
_DUMP, _DUMP_END = b"<mediawiki", b"</mediawiki>"
_TAIL = 256  # bytes, in which a dump's end is looked for
_REVISION, _REVISION_END = b"<revision>", b"</revision>"
_TIMESTAMP = re.compile(rb"<timestamp(?:\s[^<>]*)?>([^<]*)")
_STAMP = re.compile(
    r"\d{4}(?:-\d\d-\d\d(?:T\d\d:\d\d(?::\d\d(?:\.\d{1,9})?)?(?:Z|[+-]\d\d:?\d\d)?)?)?"
)
_NAMESPACES, _NAMESPACES_END = b"<namespaces>", b"</namespaces>"
_NAMESPACE = re.compile(rb"<namespace\b([^<>]*)(?:/>|>([^<]*)</namespace>)")
_OF_EVERY_WIKI = {b"%d" % key for key in range(-2, 16)}
_KEY = re.compile(rb"\bkey\s*=\s*[\"'](-?\d+)[\"']")
_Pieces = Iterator[tuple[bool, bytes | Broken]]  # whether a record may begin there


def pages(source: Input) -> Iterator[Record]:
    """The <page> elements of a MediaWiki dump."""
    file, part = source.file, source.part
    head = head_of(file) if part.index == 0 else None
    if head is not None and _DUMP not in head and _PAGE not in head:
        source.report("byte 0", "no dump: it begins with neither <mediawiki> nor <page>")
    if head is not None and not namespaces(head)[1]:
        source.report("its head", "a namespace is damaged: its pages and links may stay")
    if packing(file) == "bzip2":
        end = part.end or 1 << 62
        pieces: _Pieces = ((at < end, data) for at, data in bzip2_blocks(file, part.start, end))
    elif part.end:
        pieces = _range(file, part.start, part.end)
    else:
        pieces = ((True, data) for data in source.chunks())
    for ordinal, page in enumerate(_pages(pieces, source)):
        if not part.holds(ordinal):
            continue
        if isinstance(page, Broken):
            source.report(page.place, page.what)
        else:
            yield Record(ordinal, page)


def _range(file: str, start: int, end: int = 1 << 62) -> Iterator[tuple[bool, bytes]]:
    """Pieces of a plain file from byte `start` to its end, and whether they begin before `end`."""
    with open_regular(file) as handle:
        handle.seek(start)
        while data := handle.read(min(CHUNK, end - start) if start < end else CHUNK // 16):
            yield start < end, data
            start += len(data)


def _pages(pieces: _Pieces, source: Input) -> Iterator[bytes | Broken]:
    """The <page> elements that begin in pieces marked True, or why one cannot be read; later
    pieces complete the last, or show that what comes next in the file is the beginning of a page.
    Of a page over the limit all revisions but the newest are taken out."""
    buffer = bytearray()
    own = 0  # bytes of the buffer in which a page may begin
    seen = 0  # bytes of the buffer in which the next mark does not begin
    looking = True  # for <page>; else for its end
    may_end = source.part.start > 0  # a page that began elsewhere, or is already told of
    beyond = False  # what follows the last own page was seen
    mine = False
    kept = 0  # bytes of the page when revisions were last taken out of it

    def forget(count: int) -> None:
        nonlocal own, seen
        del buffer[:count]
        own, seen = own - count, max(0, seen - count)

    for mine, data in pieces:
        if isinstance(data, Broken):
            if not mine:
                return  # named by the part the block belongs to
            yield data
            forget(len(buffer))
            own, looking, may_end = 0, True, True
            continue
        buffer += data
        if mine:
            own = len(buffer)
        while not (looking and beyond):
            if looking:
                at = buffer.find(_PAGE, seen)
                stop = len(buffer) if at < 0 else at
                while not beyond and (found := _PAGE_LIKE.search(buffer, seen, stop)) is not None:
                    beyond, seen = found.start() >= own, found.end()
                    ends = bool(found[1])
                    if not (may_end if ends else beyond):
                        place = page_title(buffer[found.start() : min(stop, seen + 4096)])
                        yield Broken(place, "bad XML: the page has no beginning")
                    may_end = not ends
                if at < 0 or at >= own:
                    beyond |= at >= 0
                    # Of blanks, behind which the dump's end is looked for, one is kept.
                    del buffer[len(buffer.rstrip()) + 1 :]
                    own = min(own, len(buffer))
                    forget(max(0, len(buffer) - _TAIL))
                    break
                forget(at)
                looking, seen, may_end, kept = False, len(_PAGE), False, 0
            again = buffer.find(_PAGE, seen)
            at = buffer.find(_PAGE_END, seen, len(buffer) if again < 0 else again)
            again = again if at < 0 else -1
            end = at + len(_PAGE_END) if at >= 0 else len(buffer)
            most = source.max_document_bytes
            if at < 0:
                # Beside the newest revision so far the one that has not yet ended is held, and as
                # much that no small piece costs a look through the page.
                most = max(2 * most, kept + most // 8)
            if again < 0 and end > most and (cut := _cut_revisions(buffer, end)):
                end, own, seen = end - cut, own - cut, max(len(_PAGE), seen - cut)
                kept = end
            if again >= 0:
                yield Broken(page_title(buffer), "bad XML: the page has no end")
                forget(again)
                looking = True
            elif end > most:
                yield Broken(page_title(buffer), source.over_limit(end))
                forget(end if at >= 0 else max(0, end - len(_PAGE_END) + 1))
                looking, may_end = True, at < 0
            elif at >= 0:
                yield bytes(buffer[:end])
                forget(end)
                looking = True
            else:
                # A mark cut in two by the piece's end is found with the next piece.
                seen = max(seen, end - len(_PAGE_END) + 1)
                break
            beyond |= own <= -len(_PAGE_END)  # else the next part does not see where it ended
        if not mine and looking and (beyond or may_end) and not _ends_in_a_mark(buffer, own):
            return
    if not looking:
        yield Broken(page_title(buffer), "the file ends inside a page")
    elif not beyond and not may_end and _DUMP_END not in buffer:
        # This is the part of the last page, which has read all that follows.
        if _DUMP in (head_of(source.file) or b""):
            yield Broken("end of file", "no </mediawiki>: pages may be lost")


def _ends_in_a_mark(buffer: bytearray, own: int) -> bool:
    """Whether a mark may begin in buffer[:own], of which later pieces tell: they may be short."""
    begun = (mark[:n] for mark in (_PAGE, _PAGE_END) for n in range(1, len(mark)))
    return any(buffer.endswith(part) and len(buffer) - len(part) < own for part in begun)


def head_of(file: str) -> bytes | None:
    """The first bytes of a file; None where they cannot be read."""
    with contextlib.suppress(Broken), contextlib.closing(chunks(file)) as pieces:
        return next(pieces, b"")
    return None


def namespaces(head: bytes) -> tuple[dict[str, str], bool]:
    """The names of namespaces and their keys, as the head of a dump has them, and whether all of
    it can be read, and none is missing that every wiki has."""
    head, ends, _ = head.partition(b"</siteinfo>")
    head, page, _ = head.partition(_PAGE)
    begin, end = head.find(_NAMESPACES), head.find(_NAMESPACES_END)
    found = list(_NAMESPACE.finditer(head))
    names, keys = dict[str, str](), list[bytes]()
    for element in found:
        key = _KEY.search(element[1])
        keys += [key[1]] if key else []
        if element[2]:
            names[unescape(element[2].decode("utf-8", "replace"))] = key[1].decode() if key else ""
    if not (ends or page) or (begin < 0 and end < 0 and not found):
        return names, True
    rest = _NAMESPACE.sub(b"", head[begin + len(_NAMESPACES) : end]) if 0 <= begin < end else b"?"
    lacks = len(found) >= len(_OF_EVERY_WIKI) and not _OF_EVERY_WIKI <= set(keys)
    return names, not (rest.strip() or lacks) and len(set(keys)) == len(found)


def is_stamp(text: str) -> bool:
    """Whether a revision's timestamp is a year, a day or a moment that there is."""
    if _STAMP.fullmatch(text) is None:
        return False
    try:
        datetime.datetime.fromisoformat(text if "-" in text else f"{text}-01-01")
    except ValueError:
        return False
    return True


def newest_revision(stamps: Sequence[str]) -> int:
    """Of a page's revisions, by their timestamps: of equals the last, and of those that cannot be
    read none, unless none can."""
    readable = (i for i, stamp in enumerate(stamps) if is_stamp(stamp))
    return max(readable, key=lambda i: (stamps[i], i), default=len(stamps) - 1)


def _cut_revisions(page: bytearray, end: int) -> int:
    """Takes the revisions that have ended out of page[:end], but for the newest and the mark of one
    whose timestamp cannot be read, and says how many bytes they were: 0 where what is damaged in
    them, or stands between them, may be the end of a page and the beginning of the next."""
    first = at = page.find(_REVISION, 0, end)
    places: list[slice] = []
    stamps: list[str] = []
    last = 0
    while at >= 0 and (stop := page.find(_REVISION_END, at, end)) >= 0:
        if (last and page[last:at].strip()) or page.find(_REVISION, at + 1, stop) >= 0:
            return 0
        last = stop + len(_REVISION_END)
        found = _TIMESTAMP.search(page, at, min(at + 4096, last))
        stamps.append(found[1].decode("utf-8", "replace").strip() if found else "")
        places.append(slice(at, last))
        at = page.find(_REVISION, last, end)
    before = len(page)
    if last:
        try:
            if "\0" in page[first:last].decode():
                return 0
        except UnicodeDecodeError:
            return 0
        mark = b"" if all(map(is_stamp, stamps)) else _REVISION + _REVISION_END
        page[first:last] = mark + page[places[newest_revision(stamps)]]
    return before - len(page)


def page_title(page: bytes | bytearray) -> str:
    """How a page is named that cannot be parsed."""
    match = re.search(rb"<(title|id)>([^<]*)<", page[:4096])
    title = match[2].decode("utf-8", "replace") if match else "?"
    return f'page "{title}"'


_DOC_BEGINS = re.compile(rb"(?:^|[\r\n]|" + BYTE_ORDER_MARK + rb")<doc ")
# Of many titles the first alone is tried: all would cost the square of the line's length. Zeros and
# ones of a hole are none of it.
DOC_LINE = re.compile(
    rb'<doc id="([^"\n\0\xff]*)"(?>(?:[^>\n\0\xff]*? title="([^"\n\0\xff]*)")?)[^>\n\0\xff]*>'
)

_UNREADABLE = "a <doc> line that cannot be read"
_DOC_LIKE = re.compile(rb'<doc \w+="')


def extracted_pages(source: Input) -> Iterator[Record]:
    """WikiExtractor's documents: the lines from <doc> to before </doc>, or one of JSON."""
    part = source.part
    ordinal, stray = -1, False
    body: list[bytes] = []  # of the document that is open; its first line names it
    size = 0
    # A line that begins with a brace may stand in a <doc>, where a later part begins: in a file
    # with those, parts begin at <doc> lines alone.
    of_docs = part.end > 0 and _DOC_BEGINS.search(head_of(source.file) or b"") is not None

    def place() -> str:
        head = DOC_LINE.match(body[0])
        assert head is not None
        return f"document {head[1].decode('utf-8', 'replace')}"

    def report(place: str, what: str) -> None:
        if part.holds(max(0, ordinal)):
            source.report(place, what)

    for at, line in lines_of(source):
        if isinstance(line, Broken):
            if not part.end or at < part.end:
                report(line.place, line.what)
            continue
        opens = line.startswith(b"<doc ") and DOC_LINE.match(line) is not None
        another = b"<doc " in line and _DOC_LIKE.search(line, int(opens)) is not None
        past = 0 < part.end <= at and (opens or not of_docs)
        if part.start and ordinal < 0 and at >= part.end:
            return  # nothing begins in it
        if body:
            if line.startswith(b"</doc>"):
                if stray := bool(line[len(b"</doc>") :].strip()):
                    report(f"byte {at}", "text outside of any document")
                if part.holds(ordinal):
                    if size > source.max_document_bytes:
                        source.too_large(place(), size)
                    else:
                        yield Record(at, b"\n".join(body))
                body = []
            elif opens:
                report(place(), "no </doc>")
                if past:
                    return
                body, size = [line], len(line)
                if another:
                    report(f"byte {at}", _UNREADABLE)
            else:
                if another:
                    report(f"byte {at}", _UNREADABLE)
                size += len(line) + 1
                if size <= source.max_document_bytes:
                    body.append(line)
        elif opens or (line.startswith(b"{") and not (of_docs and part.start and ordinal < 0)):
            if past:
                return
            ordinal, stray = ordinal + 1, False
            if opens:
                body, size = [line], len(line)
                if another:
                    report(f"byte {at}", _UNREADABLE)
            elif part.holds(ordinal):
                yield Record(at, line)
        elif line.strip():
            # Before the first document of a later part stands the end of an earlier part's, which
            # looks at what follows it.
            if not stray and (ordinal >= 0 or not part.start):
                known = another or line.startswith(b"<doc ")
                report(f"byte {at}", _UNREADABLE if known else "text outside of any document")
                stray = True
            if past:
                return
    if body:
        report(place(), "the file ends inside the document")


def whole_file(source: Input) -> Iterator[Record]:
    """The file as one record."""
    pieces: list[bytes] = []
    size = 0
    try:
        for piece in source.chunks():
            pieces.append(piece)
            size += len(piece)
            if size > source.max_document_bytes:
                source.too_large("file", os.path.getsize(source.file))
                return
    except Trailing as broken:
        source.report(broken.place, broken.what)
    yield Record(source.name, b"".join(pieces), source.file)


PACKINGS = (".gz", ".bz2", ".zst")


def suffix_of(name: str) -> str:
    """The ending of a file's name in small letters, before that of a packing: ".md" of a.MD.gz."""
    plain, suffix = os.path.splitext(name.lower())
    return os.path.splitext(plain)[1] if suffix in PACKINGS else suffix


def name_text(name: bytes | str) -> str:
    """A file's name, the same in every locale."""
    return os.fsencode(name).decode("utf-8", "surrogateescape")


def without_endings(name: str) -> str:
    """A text file's name in document ids."""
    return re.sub(r"(?:\.epub)?\.(?:txt|text)(?:\.(?:gz|bz2|zst))?$", "", name, flags=re.I)
