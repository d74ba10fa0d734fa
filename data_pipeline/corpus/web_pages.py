"""Prose out of HTML, read tag by tag, once, as the HTML standard has browsers read it (sections
13.2.5 and 13.2.6 of https://html.spec.whatwg.org), without a tree.

A parser that makes a tree mends what authors leave open by copies of it, and costs the square of a
hostile page. Of the tree only this is needed: which tags part paragraphs, and where what holds no
prose ends.
"""

from __future__ import annotations

import codecs
import contextlib
import re
from collections import Counter
from collections.abc import Collection

from data_pipeline.corpus.documents import cleaned, unescape
from data_pipeline.corpus.parts import BYTE_ORDER_MARK, ISO_2022

# What holds no prose; what stands within a line; what has no end tag.
_NO_PROSE = frozenset(
    "title script style noscript template iframe noembed object svg math canvas nav footer aside "
    "button select textarea audio video".split()
)
_INLINE = frozenset(
    "a abbr acronym b bdi bdo big cite code data del dfn em font i img ins kbd label mark nobr q "
    "rp rt ruby s samp small span strike strong sub sup time tt u var wbr".split()
)
_VOID = frozenset(
    "area base basefont bgsound br col embed frame hr img input keygen link meta param source "
    "track wbr".split()
)
_RAW = frozenset("title script style noscript iframe noembed textarea".split())  # no tags in them
# Their end tags may be left out.
_ENDS_BY_ITSELF = frozenset("body dd dt html li option p tbody td tfoot th thead tr".split())
# The end of what they stand in ends them, if it is a part of a line even.
_OF_A_LINE = frozenset("audio canvas math svg video".split())
# In a picture or formula these end it, unless they stand in what may hold text.
_FOREIGN = frozenset(("svg", "math"))
_BREAK_OUT = frozenset(
    "b big blockquote body br center code dd div dl dt em embed h1 h2 h3 h4 h5 h6 head hr i img "
    "li listing menu meta nobr ol p pre ruby s small span strong strike sub sup table tt u ul "
    "var".split()
)
_BLOCKS = (_BREAK_OUT | _ENDS_BY_ITSELF | _NO_PROSE) - _INLINE | frozenset(
    "address article caption details dir fieldset figcaption figure form header hgroup legend link "
    "main section summary".split()
)
_MAY_HOLD_TEXT = frozenset("foreignobject desc mi mn mo ms mtext annotation-xml".split())

_VALUE = r"""(?:"[^"]*+"|'[^']*+'|(?!["'])[^\s>]++)"""
_NAME = r"(?:=[^\s/>=]*+|[^\s/>=]++)"
# An end tag with a "<" before its ">" has lost that; a browser would take the next tag with it.
_MARK = re.compile(
    rf"<(?P<end>/)?(?P<name>[A-Za-z](?(end)[^\s/<>]*+|[^\s/>]*+))(?:(?(end)(?=[^<>]*+<)|(?!))"
    rf"|(?P<rest>(?:[\s/]++|{_NAME}(?:\s*+=\s*+{_VALUE}?+)?+)*+)>)"
    r"|(?P<cut></?[A-Za-z])|<!--|<!\[CDATA\[|<[!?/]"
)
_ATTRIBUTE = re.compile(rf"({_NAME})(?:\s*+=\s*+({_VALUE})?+)?+")
_COMMENT_ENDS = re.compile(r"-->|(?<!<!)--!>")
_CDATA_ENDS = re.compile(r"\]\]>")
_TAG_OF_CODE = re.compile(
    r"(?:\s++|<(?!/pre\b|code\b)[^<>]{0,200}>){0,9}+<code[\s/>]", re.IGNORECASE
)
_SCRIPT = re.compile(r"<!--|-->|<(/?)script(?=[\s/>])", re.IGNORECASE)
# Where a script or style without an end tag ends: at a damaged one of its own, or a block's tag.
_LOST_END = re.compile(
    rf"</(?!(?:{'|'.join(sorted(_INLINE))})[\s>])[a-z]|<(?:{'|'.join(sorted(_BLOCKS))})(?=[\s/>])"
    r"|/(?:script|style)>",
    re.IGNORECASE,
)
_LOOKS_LIKE_CODE = re.compile("[{;]")
_XHTML = re.compile(
    r"[\ufeff\s]{0,100}(?:<\?xml\b|(?:<![^<>]{0,1000}>\s{0,100}){0,9}"
    r"<html\s[^<>]{0,1000}?\bxmlns\s?=\s?[\"']http://www\.w3\.org/1999/xhtml)",
    re.IGNORECASE,
)
_BY_ROLE = "role"  # in place of the name of an element that it leaves out
_MENUS = 200  # characters that are no link, at most
_LINK = 200  # of one link: what follows it has lost its end
_NAMED_BY = 1000  # characters of what holds a listing, in which its class stands

_META = re.compile(rb"<meta\s[^>]{0,1000}>", re.I)
_CHARSET = re.compile(rb"charset\s{0,9}=[\"' ]*([\w-]+)", re.I)
_XML = re.compile(rb"\s*<\?xml[^>]{1,200}?encoding\s{0,9}=[\"' ]*([\w-]+)", re.I)
# As the HTML standard has it, a page that says Latin-1 means Windows' superset of it.
_ENCODINGS = {
    **dict.fromkeys(("iso-8859-1", "latin1", "us-ascii"), "cp1252"),
    "iso-8859-9": "cp1254",
    "gb2312": "gb18030",
    **dict.fromkeys(("windows-874", "iso-8859-11"), "cp874"),
}
_KNOWN = re.compile(
    r"iso-8859-\d+|iso-2022-(?:jp|kr)|windows-\d+|cp\d+|gbk|gb18030|big5|shift_jis|euc-(?:jp|kr)|koi8-[ru]"
)
_NOT_WHOLE = re.compile(r"[\0-\x7f\ufffd]+")  # a letter of more bytes than one


def html_encoding(data: bytes) -> str:
    """UTF-8 where the bytes are, or a byte order mark says so, else what the page names in its
    first bytes: a page that was converted often keeps the old name."""
    if data.startswith(BYTE_ORDER_MARK) or (_is_utf8(data) and ISO_2022 not in data):
        return "UTF-8"
    name = _named_encoding(data[:4096])
    name = _ENCODINGS.get(name, name)
    with contextlib.suppress(LookupError):
        # The name was read as ASCII, so that a code page of EBCDIC cannot be meant.
        if _KNOWN.fullmatch(name) and "<meta>".encode(name) == b"<meta>":
            return codecs.lookup(name).name
    return "UTF-8"


def _named_encoding(begin: bytes) -> str:
    """By the first meta element that names one, else as XML."""
    begin = re.sub(rb"<!--.*?-->", b"", begin, flags=re.DOTALL)
    for tag in map(bytes.lower, _META.findall(begin)):
        described = b"content" in tag and b"http-equiv" not in tag
        if not described and (found := _CHARSET.search(tag)):
            return found[1].decode("ascii", "replace")
    found = _XML.match(begin)
    return found[1].decode("ascii", "replace").lower() if found else ""


def _is_utf8(data: bytes) -> bool:
    """Also where it was cut within a letter, with others before, or a few of many are damaged."""
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.reason == "unexpected end of data":
            return not data[: error.start].isascii()
        text = data.decode("utf-8", "replace")
        # Of another encoding hardly a letter is one of UTF-8 by chance: of 1,000 bytes and more in
        # any of 26, at most 1.3 bytes of such to a damaged one, but for Polish in capitals.
        letters = _NOT_WHOLE.sub("", text)
        return len(letters.encode()) > 4 * text.count("\ufffd")
    return True


def html_paragraphs(text: str) -> list[str]:
    """The blocks of a page, without navigation, scripts, forms' controls and listings of code.

    What only seems to begin such a thing, since nothing ends it, takes nothing with it."""
    page = _Page(text)
    lines = page.paragraphs()
    return _Page(text, {_BY_ROLE}).paragraphs() if page.may_have_lost_prose() else lines


class _Page:
    def __init__(self, text: str, endless: Collection[str] = ()) -> None:
        self._text = text
        self._is_xml = _XHTML.match(text) is not None
        self._lines: list[str] = []
        self._held: list[str] = []  # of the block that is open
        self._open: list[tuple[str, str]] = []  # elements that are no part of a line: name, rest
        self._count: Counter[str] = Counter()  # what is open by name, parts of a line too
        self._listing = False  # in a <pre>: a blank line ends a block, and <br> a line
        self._scripts_nest = True  # in comments of scripts
        self._left_out = ""  # the element without prose that is open
        self._inside: Counter[str] = Counter()  # what is open in it
        self._link = 0  # characters, at most, that are still of the last link in it
        self._began = 0  # where it did
        self._to_read_again = 4 * len(text)  # characters, at most
        self._endless = set(endless)  # names of elements that nothing ends
        self._of_no_link: Counter[str] = Counter()  # characters left out by role, of each name
        self._unended: set[str] = set()  # names of what something else has ended
        # What was looked for: from where, and the next of it there.
        self._next: dict[str, tuple[int, re.Match[str] | None]] = {}

    def paragraphs(self) -> list[str]:
        at = 0
        while True:
            while (mark := _MARK.search(self._text, at)) is not None:
                if mark.start() > at:
                    words = self._text[at : mark.start()]
                    if not self._left_out:
                        self._held.append(unescape(words) if "&" in words else words)
                    elif self._key(self._left_out) == _BY_ROLE:
                        length = len(words.strip())
                        of_link = min(length, self._link)
                        self._link -= of_link
                        self._of_no_link[self._left_out] += length - of_link
                at = self._behind(mark)
            if not self._left_out:
                break
            # At most once for each name.
            self._endless.add(self._key(self._left_out))
            self._left_out, at = "", self._began
        self._held.append(unescape(self._text[at:]))
        self._end_block()
        self._unended.update(name for name, _ in self._open)
        return self._lines

    def may_have_lost_prose(self) -> bool:
        """Whether what was left out by its role may be more than that: elements of its name have
        lost an end tag, and so much in it is no link."""
        return any(self._of_no_link[name] > _MENUS for name in self._unended)

    def _behind(self, mark: re.Match[str]) -> int:
        """Takes in a mark, and gives the place from which to read on."""
        if name := (mark["name"] or "").lower():
            if not mark["end"] or name in ("br", "p"):
                self._break_out(name)
            foreign = name in _FOREIGN or self._left_out in _FOREIGN
            if mark["end"]:
                return self._end(name, mark.end())
            if mark["rest"][-1:] == "/" and (self._is_xml or foreign):
                self._void(name)
            else:
                return self._begin(name, mark["rest"], mark.end())
            return mark.end()
        if mark["cut"]:  # all that follows stands in the tag
            return len(self._text)
        if mark[0] == "<!--" and (found := self._find(_COMMENT_ENDS, mark.start() + 2)):
            return found.end()
        if mark[0] == "<![CDATA[" and self._is_xml:
            if found := self._find(_CDATA_ENDS, mark.end()):
                if not self._left_out:
                    self._held.append(self._text[mark.end() : found.start()])
                return found.end()
        return self._text.find(">", mark.start()) + 1 or len(self._text)

    def _find(self, pattern: re.Pattern[str], at: int) -> re.Match[str] | None:
        """The next of it, for which the same text is looked through once."""
        begin, found = self._next.get(pattern.pattern, (len(self._text) + 1, None))
        if begin > at or (found is not None and found.start() < at):
            found = pattern.search(self._text, at)
            self._next[pattern.pattern] = at, found
        return found

    def _begin(self, name: str, rest: str, at: int) -> int:
        if name in _VOID:
            self._void(name)
            return at
        if name in _RAW and self._left_out not in _FOREIGN:
            self._part(name)
            close = self._end_of_raw(name, at)
            return at if close is None else close
        if self._left_out:
            if name == self._left_out and name in ("button", "select"):  # which hold none of them
                self._inside.clear()
                return self._again(at)
            self._inside[name] += 1
            if name == "a":
                self._link = _LINK
            return at
        self._part(name)
        if self._is_no_prose(name, rest, at) and self._key(name) not in self._endless:
            self._left_out, self._began = name, at
            self._inside.clear()
            self._link = 0
        elif name != "p":  # which ends by itself where a block begins
            self._count[name] += 1
            if not is_inline(name):
                self._open.append((name, rest[:_NAMED_BY]))
            self._listing = self._listing or name == "pre"
        return at

    def _break_out(self, name: str) -> None:
        if self._left_out in _FOREIGN and name in _BREAK_OUT:
            if not any(self._inside[holder] for holder in _MAY_HOLD_TEXT):
                self._left_out = ""

    def _void(self, name: str) -> None:
        if self._listing and name == "br" and not self._left_out:
            self._held.append("\n")
        else:
            self._part(name)

    def _end(self, name: str, at: int) -> int:
        """Takes in an end tag up to `at`, and gives the place from which to read on."""
        if name == "br":
            self._void(name)
        elif self._left_out:
            if name == "a":
                self._link = 0
            if self._inside[name]:
                self._inside[name] -= 1
            elif name == self._left_out:
                self._left_out = ""
            elif self._ends_what_is_left_out(name):
                return self._again(at)
        else:
            self._part(name)
            if self._count[name]:
                self._close(name)
        return at

    def _again(self, at: int) -> int:
        """The place from which to read again, since the end tag of what was left out up to `at` is
        lost. Where that has cost too much none of its name is left out from here on."""
        self._to_read_again -= at - self._began
        if self._to_read_again < 0:
            self._endless.add(self._key(self._left_out))
        self._left_out = ""
        return self._began

    def _ends_what_is_left_out(self, name: str) -> bool:
        """With the element in which it stands."""
        of_a_line = is_inline(name) and self._left_out not in _OF_A_LINE
        return self._count[name] > 0 and not of_a_line and name not in ("body", "html")

    def _close(self, name: str) -> None:
        """The last that is open of it, and what was left open in it."""
        if is_inline(name):
            self._count[name] -= 1
            return
        last = ""
        while last != name:
            last, _ = self._open.pop()
            self._count[last] -= 1
            if last != name:
                self._unended.add(last)
            self._listing = self._listing and last != "pre"

    def _part(self, name: str) -> None:
        if not self._left_out and not is_inline(name):
            self._end_block()

    def _end_block(self) -> None:
        text = "".join(self._held)
        self._held.clear()
        for part in re.split(r"\n[ \t]*\n", text) if self._listing else (text,):
            if line := cleaned(part.replace("\n", " ")):
                self._lines.append(line)

    def _end_of_raw(self, name: str, at: int) -> int | None:
        """The end tag of what holds no tags; None where another of its name begins before, but one
        in the text of a script or style. A script in a comment of a script may hold one. What of a
        script or style looks like code goes, without an end tag, up to a block's next tag."""
        ends = re.compile(f"</{name}(?=[\\s/>])", re.IGNORECASE)
        found = self._find(ends, at)
        if name not in ("script", "style") and found is not None:
            other = self._find(re.compile(f"<{name}(?=[\\s/>])", re.IGNORECASE), at)
            if other is not None and other.start() < found.start():
                return None
        if name == "script" and found is not None and self._scripts_nest:
            outer = self._find(ends, self._behind_inner_scripts(at))
            # Where that would take the rest of the page, no script of it is taken for an inner one.
            self._scripts_nest, found = outer is not None, outer or found
        if found is not None or name not in ("script", "style"):
            return None if found is None else found.start()
        lost = self._find(_LOST_END, at)
        if lost is None or not _LOOKS_LIKE_CODE.search(self._text, at, lost.start()):
            return None
        return lost.end() if lost[0][0] == "/" else lost.start()

    def _behind_inner_scripts(self, at: int) -> int:
        in_comment = inner = False
        behind = at
        while (mark := _SCRIPT.search(self._text, at)) is not None:
            at = mark.end()
            if mark[0] == "<!--":
                if not in_comment and self._find(_COMMENT_ENDS, at) is None:
                    break
                in_comment = True
            elif mark[0] == "-->":
                in_comment = inner = False
            elif not mark[1]:
                inner = in_comment
            elif inner:
                inner, behind = False, at
            else:
                break
        return behind

    def _key(self, name: str) -> str:
        return name if name in _NO_PROSE or name == "pre" else _BY_ROLE

    def _is_no_prose(self, name: str, rest: str, at: int) -> bool:
        """By its name or role, or as a listing of code, by the element within it or the names that
        tools give."""
        if name in _NO_PROSE:
            return True
        if name not in _ENDS_BY_ITSELF and _attribute(rest, "role") in ("navigation", "search"):
            return True
        if name != "pre" or self._listing:
            return False
        above = self._open[-1][1] if self._open else ""
        named = f"{_attribute(rest, 'class')} {_attribute(above, 'class')}".lower()
        within = _TAG_OF_CODE.match(self._text, at)
        return within is not None or "highlight" in named or "code" in named


def is_inline(name: str) -> bool:
    """Whether a tag of this name, in small letters, stands within a line."""
    return name in _INLINE or name.startswith(("o:", "st1:"))  # Word's


def _attribute(rest: str, name: str) -> str:
    """Of what stands in a tag behind its name."""
    if name in rest.lower():
        for found in _ATTRIBUTE.finditer(rest):
            if found[1].lower() == name:
                return unescape((found[2] or "").strip("\"'"))
    return ""
