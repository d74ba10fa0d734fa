"""Wikitext to passages of prose: no templates, tables, lists, headings, references, captions.

References, comments, tables and most templates are cut by regular expressions; what is left is read
mark by mark, once, so that a page costs its length whatever stands in it. Parsers that take an
opening for a construct try it to the end of the page before they take it for text.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Container, Iterator

from data_pipeline.corpus.documents import cleaned, squeeze, unescape
from data_pipeline.corpus.templates import (
    APART,
    APOSTROPHE,
    GONE,
    LANGUAGES,
    WORDS,
    as_text,
    expanded,
    settled,
    unless_item,
)

_LIST_ITEM = "\x01"

# To the end of a tag, which is in its paragraph: not the ">" of another one's "x > y".
_TO_END = r"[^<>\n]*+(?:\n(?![ \t]*\n)[^<>\n]*+)*+>"
# What is no prose, and <nowiki>: in each of them the marks of the others begin nothing.
_NO_PROSE = re.compile(
    r"<(!)--|<(nowiki|ref|references|math|gallery|timeline|syntaxhighlight|source|score|imagemap|"
    r"hiero|chem|ce|graph|mapframe|maplink|templatedata|pre|inputbox|section)\b"
    rf"{_TO_END}",
    re.IGNORECASE,
)
# They show what they hold as it is written, which may be such a tag.
_AS_WRITTEN = frozenset("nowiki pre source syntaxhighlight templatedata".split())
_COMMENT_END = re.compile("-->")
_PARAGRAPH_END = re.compile(r"(?=\n[ \t]*\n)|\Z")
_MARKS_AS_TEXT = re.compile(r"[<>{}\[\]|=']|^[*#:;!-]", re.MULTILINE)
_INNER_TABLE = re.compile(
    r"^[ \t:]*\{\|.*+(?:\n(?![ \t:]*\{\||[ \t]*\|\}).*+)*+\n[ \t]*\|\}", re.MULTILINE
)
_OPEN_TABLE = re.compile(
    r"^[ \t:]*\{\|.*?(?=^==|\n\n(?:['\[]|[^\W\d_a-z])|\Z)", re.DOTALL | re.MULTILINE
)
_HEADING = re.compile(r"^(?:={2,}+[^\n]+?={2,}+|=[^\n]+=[ \t]*$)", re.MULTILINE)
# MediaWiki's own, and what stands alone in its line; not the __FILE__ of a sentence.
_MAGIC = re.compile(
    r"__(?:(?:NO|FORCE)?TOC|NOEDITSECTION|(?:NO)?NEWSECTIONLINK|NOGALLERY|HIDDENCAT|(?:NO)?INDEX|"
    r"STATICREDIRECT|NO(?:TITLE|CONTENT)CONVERT|NOTC|NOCC|DISAMBIG|NOGLOBAL|START|END)__"
    r"|^[ \t]*__[A-Z]{3,60}__[ \t]*$",
    re.MULTILINE,
)
# The page as a whole is one: not {{disambiguation needed}}, {{disambiguation page link}} or
# {{no disambig}}, which stand in articles.
_DISAMBIGUATION = re.compile(
    r"\{\{\s{0,9}(?:"
    r"(?:(?:airport|biology|call ?sign|case ?law|chinese title|church|genus|geo|hn|hospital|"
    r"human name|incomplete|(?:letter[-– ]number|letter[-– ]numeral)(?: ?comb(?:ination)?)?|"
    r"math(?:s|ematics|ematical)?|military unit|mil-?unit|molecular formula|music|number|opus|"
    r"person|personal name|phonetics|place|place ?name|political party|road|school|ship|"
    r"species latin name(?: abbreviation)?|station|surname|synagogue|taxonom(?:y|ic authority)|"
    r"tla|woo number)[ -]?)?"
    r"(?:disambig(?:ua(?:tion|si|zione)?)?|disamb|dab)(?:[ -](?:page|clean ?up))?"
    r"|(?:airport|geo|hn|math|mil-unit-|number|road|school|station)dis(?:-clean ?up)?|splitdab|"
    r"surname|given name|set index)\s{0,9}[|}]"
    r"|__DISAMBIG__",
    re.IGNORECASE,
)
NOT_SHOWN = frozenset(("file", "image", "category"))
_WIKTIONARY = re.compile(r"wikt(?:ionary)? ?: ?([^#]+)", re.IGNORECASE)
_DROPPED_TAGS = frozenset(
    "ref references gallery math timeline syntaxhighlight source score imagemap hiero chem ce "
    "graph mapframe maplink table tr td th ul ol pre templatedata style script includeonly "
    "inputbox indicator".split()
)

# Of which the line end before it is lost.
_HEADING_BEHIND = re.compile(r"(?<![=\s])\s*+={2,}+(?:[^=]++|=(?!=))++={2,}+$")
_HEADING_WORDS = 10  # of one, at most
_LEFT_LINK = re.compile(r"\[\[(?:[^|\[\]\n]*\|)?([^\[\]\n]*)\]\]")
# Not the <y and z> of "x<y and z>w".
_LEFT_TAG = re.compile(
    r"</?(?:(br|hr|div|table|t[dhr]|[ou]l|li|p)\b[^<>]{0,300}|"
    r"(?:ref|span|su[bp]|small|big|font)\b[^<>]{0,300}|"
    r"[a-z][a-z0-9]{0,30}(?:\s{0,9}/?|\s{1,9}[\w:-]{1,30}\s{0,9}=[^<>]{0,300}))>",
    re.IGNORECASE,
)
# As a tag begins, however long its attributes are.
_HAS_ATTRIBUTE = re.compile(r"<[a-z][a-z0-9]*\s+[\w:-]{1,30}\s{0,9}=", re.IGNORECASE)
_LEFT_BRACES = re.compile(r"\[\[|\]\]|\{\{+|\}\}+|\{\||\|\}")
_QUOTES = re.compile(r"('{2,})")
_LEFT_ENTITY = re.compile(r"&(?:[A-Za-z]+[0-9]*|#[0-9]+|#x[0-9a-fA-F]+);")
_BARE_URL = re.compile(r"\b(?:https?|ftp)://[^\s\])|]+")
_MARKUP_START = re.compile(
    r"[*:;|\x01]|#(?!\d)|!(?!(?:!!|[\w'’-]+)(?:\s[^\s|!]+){6})|\{\||={2,}|-{4,}"
    r"|[\[\s]*(?:category\s*:|(?:file|image)\s*:(?=[^|]{0,300}(?:\||\.(?:jpe?g|png|svg|gif|tiff?|"
    r"webp|og[gvx]|web[mp]|pdf|djvu|mp[34]|wav|midi?|xcf|bmp|flac|stl)\b)))"
    r"|(?:class|style|align|colspan|rowspan|width|border|bgcolor)\s{0,9}=\s{0,9}"
    r"(?:[\"']|wikitable|[^\s|]{0,80}\s{0,9}(?:\||$|\w{1,20}\s{0,9}=))",
    re.IGNORECASE,
)
_PICTURE = re.compile(r"\|\s*(?:thumb|(?:left|right|center|upright|\d+px)\s*\|)", re.IGNORECASE)
# Not the words of a link, as [[Finger|thumb]].
_OF_A_PICTURE = re.compile(
    r"\|\s*(?:thumb|thumbnail|frame|left|right|center|upright|\d+px)\s*\|", re.IGNORECASE
)
# One that has lost a part of the mark before its name.
_HALF_PICTURE = re.compile(
    r"(?<![\[{])[\[{]++[^\[\]{}|]{1,300}\|[^\[\]{]*+(?:\[[^\[\]{]*+\][^\[\]{]*+)*+\]\]"
)
# What a dropped template or link leaves between brackets and punctuation. It begins with a set of
# characters, for which the engine looks much faster than for alternatives.
_GAP = re.compile(
    r"[,.;:!?)\](\[\"“](?:(?<=[ (\[,;:][,.;:!?)\]])|(?<=[(\[])(?=[ ,;:–—])|(?<=\")(?= +\")"
    r"|(?<=“)(?= *”))"
)
_EMPTY_BRACKETS = re.compile(r"\(\s*(?:[,;:/–—-]\s*)*+\)|\[\s*\]|“\s*”|\"\s+\"(?=[\s.,])")
_BRACKET_START = re.compile(r"([(\[])[\s,;:]+(?=[^\s)\]])")
_BRACKET_END = re.compile(r"(?<![\s,;:])[\s,;:]+([)\]])")
_SPACE_BEFORE = re.compile(r" +([,.;:!?)\]])(?=[\s\"')]|$)")
_DOUBLE_COMMA = re.compile(r"([,;])(?:\s*[,;])++")


def is_disambiguation(title: str, text: str) -> bool:
    """A page that only lists what its title may mean."""
    return title.endswith("(disambiguation)") or (
        _DISAMBIGUATION.search(text) is not None
        and _DISAMBIGUATION.search(_cut_elements(text)) is not None
    )


def passages(text: str, hidden: Container[str] = NOT_SHOWN) -> list[str]:
    """The paragraphs of prose of an article, in order, as plain text. hidden: the names in lower
    case of the namespaces, as of pictures, to which links show no words."""
    text = _cut_elements(text)
    text = _MAGIC.sub("", text)
    text = expanded(text)
    for _ in range(10):
        text, count = _INNER_TABLE.subn("\n", text)
        if not count:
            break
    text = _OPEN_TABLE.sub("\n", text)
    lines = _shown_text(_HEADING.sub(f"\n{GONE}", text), hidden).replace(GONE, "").split("\n")
    return [line for raw in lines if (line := clean_line(raw))]


def _elements(text: str) -> Iterator[tuple[re.Match[str], re.Match[str] | None]]:
    """Comments and the elements that are no prose, by their two ends: up to the next end of that
    name, or the same tag where it is one that needs none; None where nothing ends it, or another
    of that name begins before, since none holds one. A comment that nothing ends goes to the end of
    its paragraph."""
    endless: set[str] = set()  # names that no end follows any more
    at = 0
    while (tag := _NO_PROSE.search(text, at)) is not None:
        at = tag.end()
        name = (tag[1] or tag[2]).lower()
        end = None
        if tag[0].endswith("/>"):
            end = tag
        elif name not in endless:
            end = _end_of(name, text, at)
            if end is None:
                endless.add(name)
            elif not end[0].startswith(("-", "</")):
                end = None
        if end is None and tag[1]:
            end = _PARAGRAPH_END.search(text, at)
        if end is not None:
            at = end.end()
        yield tag, end


def _end_of(name: str, text: str, at: int) -> re.Match[str] | None:
    """Where a comment or an element ends that is open at `at`, or where another one begins."""
    if name == "!":
        return _COMMENT_END.search(text, at)
    ends = rf"</{name}\s*+>"
    if name not in _AS_WRITTEN:
        ends += rf"|<{name}\b{_TO_END}(?<!/>)"
    return re.compile(ends, re.IGNORECASE).search(text, at)


def _cut_elements(text: str) -> str:
    """The text without comments and the elements that are no prose, and with the marks that
    <nowiki> shows as entities. Elements that nothing ends stay."""
    kept: list[str] = []
    done, cut = 0, False  # an element before what is kept next

    def keep(piece: str) -> None:
        nonlocal cut
        if piece:
            before = kept[-1][-1] if kept else "\n"
            if cut and before == piece[0] == "'":
                kept.append(APART)
            elif cut and before == "\n":  # a sign behind it is no list's
                piece = as_text(piece.lstrip(" "))
        if piece:
            kept.append(piece)
            cut = False

    for begin, end in _elements(text):
        keep(text[done : begin.start()])
        done = (end or begin).end()
        if end is None:
            keep(begin[0])
        else:
            if (begin[2] or "").lower() == "nowiki":
                shown = text[begin.end() : end.start()]
                keep(_MARKS_AS_TEXT.sub(lambda mark: f"&#{ord(mark[0])};", shown))
            cut = cut or not begin[1]
    keep(text[done:])
    return "".join(kept)


_SCHEMES = (
    r"(?:(?:ftps?|git|gopher|https?|ircs?|mms|nntp|redis|sftp|ssh|svn|telnet|worldwind):)?//"
    r"|(?:bitcoin|geo|magnet|mailto|news|sips?|sms|tel|urn|xmpp):"
)
_MARK = re.compile(
    r"\n(?:(?P<item>[*#:;])|-{4,})?"
    rf"|(?P<begin>\[+)(?P<url>(?:{_SCHEMES})(?:(?!\{{\{{|\}}\}})[^\s\[\]<>\"])*+)?"
    r"|\]+|\{\{+|\}\}+"
    rf"|<(?P<end>/?)(?P<tag>[a-z][a-z0-9]*)(?=[\s/>]){_TO_END}"
    r"|&(?:[a-z]+[0-9]*|#[0-9]+|#x[0-9a-f]+);"
    r"|(?:https?|ftp)://[^\s\[\]<>\"{|}]*(?<![,;.:!?])",
    re.IGNORECASE,
)
_BRACKETS = frozenset(("{{", "[[", "["))
_NEVER_CLOSED = frozenset("br hr img link meta wbr".split())
_PARAGRAPHS = frozenset("blockquote center div p poem".split())
# What the beginning of an element shows that has no end.
_BEGINS = {"[": "[", "li": f"\n{_LIST_ITEM}", **dict.fromkeys(_PARAGRAPHS, "\n")}
# What such a tag ends where it has no end of its own, as in HTML.
_ENDS = {
    "li": frozenset(["li"]),
    **dict.fromkeys(("dd", "dt"), frozenset(["dd", "dt"])),
    **dict.fromkeys(("td", "th"), frozenset(["td", "th"])),
    "tr": frozenset(["td", "th", "tr"]),
}


class _Shown:
    """What the marks read so far show, and what they have left open.

    An end closes the last opening of its kind; what was opened since has none, and shows what
    stands behind it as if it were not there.
    """

    # An element is joined when it ends, so each letter is copied this often at most; of more that
    # are open, the first has no end.
    _DEEPEST = 32

    def __init__(self, hidden: Container[str]) -> None:
        self.pieces: list[str] = []
        self._hidden = hidden
        self._open: list[tuple[str, int]] = []  # a bracket or a tag's name, and its piece
        # Pieces, in order, that are links with a lone `]` in them, within one that is open.
        self._doubtful: dict[int, None] = {}

    def last_open(self, names: Container[str], within: Container[str] = ()) -> str | None:
        """The last of these that is open, in the last of `within` if one is."""
        for name, _ in reversed(self._open):
            if name in names:
                return name
            if name in within:
                break
        return None

    def begin(self, name: str) -> None:
        while self._open and self._open[-1][0] in _ENDS.get(name, ()):
            self.leave()
        if len(self._open) == self._DEEPEST:
            self.leave(0)
        self._open.append((name, len(self.pieces)))
        self.pieces.append("")

    def end(self, name: str) -> None:
        while self._open[-1][0] != name:
            self.leave()
        _, at = self._open.pop()
        apart = "" if name in _BRACKETS else APART
        while self._doubtful and next(reversed(self._doubtful)) >= at:
            self._doubtful.popitem()
        if name == "[[" and self.last_open((name,)) and self._half_an_end(at + 1) is not None:
            self._doubtful[at] = None
        shown = _element(name, "".join(self.pieces[at:]), self._hidden)
        self.pieces[at:] = [f"{apart}{shown}{apart}"]

    def leave(self, which: int = -1) -> None:
        """What is open there has no end."""
        name, at = self._open.pop(which)
        if name == "[[":
            prefix, colon, _ = "".join(self.pieces[at + 1 : at + 2]).partition(":")
            # What stands before a picture or category is no part of its line.
            hides = bool(colon) and prefix.strip().lower() in self._hidden
            if hides and (last := self._half_an_end(at + 1)) is not None:  # it lost the other half
                self.pieces[at : last + 1] = [""] * (last + 1 - at)
            self.pieces[at] = "\n" * hides
        else:
            self.pieces[at] = _BEGINS.get(name, "" if name in _BRACKETS else APART)

    def _half_an_end(self, at: int) -> int | None:
        """The piece of the first `]` of the line from `at` on that is of nothing else, or of the
        link that has it."""
        open_signs = 0
        for place in range(at, len(self.pieces)):
            piece = self.pieces[place]
            if piece.startswith("\n"):
                break
            if piece.strip("[") == "":
                open_signs += len(piece)
            elif piece.strip("]") == "":
                open_signs -= len(piece)
            if open_signs < 0 or place in self._doubtful:
                return place
        return None

    def text(self) -> str:
        while self._open:
            self.leave()
        return "".join(self.pieces)


def _shown_text(text: str, hidden: Container[str]) -> str:
    """What is shown of text without headings, tables and references."""
    shown = _Shown(hidden)
    at = 0
    text = f"\n{text}"
    for mark in _MARK.finditer(text):
        shown.pieces.append(text[at : mark.start()])
        at = mark.end()
        match mark[0][0]:
            case "\n":
                # Links to addresses end with their line, and all brackets where a heading stood.
                ending = _BRACKETS if text.startswith(GONE, at) else ("[",)
                while shown.last_open(ending):
                    shown.leave()
                shown.pieces.append(f"\n{_LIST_ITEM}" if mark["item"] else "\n")
            case "[":
                links, one = divmod(len(mark["begin"]) - (mark["url"] is not None), 2)
                shown.pieces.append("[" * one)
                for name in ["[["] * links + ["["] * (mark["url"] is not None):
                    shown.begin(name)
            case "]":
                left = len(mark[0])
                while (name := shown.last_open(("[[", "["))) and len(name) <= left:
                    shown.end(name)
                    left -= len(name)
                shown.pieces.append("]" * left)
            case "{":
                for _ in range(len(mark[0]) // 2):
                    shown.begin("{{")
                shown.pieces.append("{" * (len(mark[0]) % 2))
            case "}":
                left = len(mark[0])
                while left > 1 and shown.last_open(("{{",)):
                    shown.end("{{")
                    left -= 2
                shown.pieces.append("}" * left)
            case "&":
                # One object for all that are alike: a page may hold millions.
                shown.pieces.append(sys.intern(as_text(_character(mark))))
            case "<":
                _read_tag(mark, shown)
            case _:
                pass  # a bare address
    shown.pieces.append(text[at:])
    return settled(shown.text())


def _read_tag(tag: re.Match[str], shown: _Shown) -> None:
    name = tag["tag"].lower()
    if _HAS_ATTRIBUTE.match(tag[0]) is None and _LEFT_TAG.match(tag[0]) is None:
        shown.pieces.append(tag[0])
    elif name in _NEVER_CLOSED or tag[0].endswith("/>"):
        shown.pieces.append(_element(name, "") or APART)
    elif not tag["end"]:
        shown.begin(name)
    elif shown.last_open((name,), within=_BRACKETS):
        shown.end(name)
    elif name in _PARAGRAPHS and not shown.last_open(_BRACKETS):
        shown.pieces.append("\n")


def _element(name: str, inner: str, hidden: Container[str] = ()) -> str:
    """What a template, link or tag shows, of which `inner` is what stands in it."""
    if name == "[[":
        title, bar, words = inner.partition("|")
        if "\n" in title:
            return inner
        if bar and _OF_A_PICTURE.search(bar + words):
            return WORDS  # whatever its name was
        title = title.replace(WORDS, "").replace(APART, "")
        return _shown(title, words if bar else None, hidden)
    if name == "[":
        return as_text(inner.strip()) or WORDS
    if name == "br":
        return " "
    if name in ("hr", "table"):
        return "\n"
    if name == "li":
        return f"\n{_LIST_ITEM}"
    if name == "{{" or name in _DROPPED_TAGS:
        return ""
    return f"\n{inner}\n" if name in _PARAGRAPHS else unless_item(inner)


def _is_prose(title: str, named: bool, hidden: Container[str]) -> bool:
    """Whether a link to this title, with a text of its own (`named`) or without, shows words: no
    picture, category or other language."""
    prefix, colon, rest = title.partition(":")
    if not colon:
        return True
    prefix = prefix.replace("_", " ").strip().lower()
    if prefix in LANGUAGES:
        return rest[:1] in (" ", "_")  # a title, as "It: Chapter Two"
    return prefix not in hidden and (named or prefix != "media")


def _shown(title: str, text: str | None, hidden: Container[str]) -> str:
    """What a link shows."""
    if not _is_prose(title, text is not None, hidden):
        return WORDS  # a sign behind it is no list's
    if text is None:
        text = title.strip().lstrip(":").replace("_", " ")
        if word := _WIKTIONARY.match(text):
            text = word[1]
    return as_text(_without_quotes(text))


def _character(entity: re.Match[str]) -> str:
    return unescape(entity[0]).replace("'", APOSTROPHE)


def _without_quotes(line: str) -> str:
    """The line without the marks of italics and bold, with the apostrophes among them, by the rules
    of MediaWiki: of four the first is one, of more than five all but five; and of bold that nothing
    ends, in a line whose italics are not ended either, the first is an apostrophe and italics, best
    behind a letter that stands alone, then behind a longer word, then behind a space."""
    if "''" not in line:
        return line
    parts = _QUOTES.split(line)  # text, marks, text, ...
    places = range(1, len(parts), 2)
    lengths = {at: len(parts[at]) for at in places}
    for at, length in lengths.items():
        spare = 1 if length == 4 else max(0, length - 5)
        parts[at], lengths[at] = "'" * spare, length - spare
    italic, bold = (sum(n in (k, 5) for n in lengths.values()) for k in (2, 3))
    if italic % 2 and bold % 2:
        best: dict[str, int] = {}
        for at in (at for at in places if lengths[at] == 3):
            before = parts[at - 1] + parts[at]
            kind = "space" if before[-1:] == " " else "letter" if before[-2:-1] == " " else "word"
            best.setdefault(kind, at)
        chosen = next((best[kind] for kind in ("letter", "word", "space") if kind in best), None)
        if chosen is not None:
            parts[chosen] += "'"
    return "".join(parts)


def _in_place_of_tag(tag: re.Match[str]) -> str:
    return " " if tag[1] else ""


def _is_markup(line: str) -> bool:
    return _MARKUP_START.match(line) is not None or (
        "|" in line and _PICTURE.search(line) is not None
    )


def _unless_picture(mark: re.Match[str]) -> str:
    return "" if _PICTURE.search(mark[0]) else mark[0]


def _without_heading(line: str) -> str:
    """A line without the heading behind it. One that begins or ends as a heading does, and not
    both, is one that has lost a mark, or prose that was joined to it."""
    if line.endswith("=="):
        line, found = _HEADING_BEHIND.subn("", line)
        if found:
            return line
    elif not line.startswith("=="):
        return line
    line = line.strip("= ")
    return line if line.count(" ") >= _HEADING_WORDS else ""


def clean_line(line: str) -> str:
    """One line of prose without what markup left behind; empty when nothing or no prose is left."""
    line = _without_heading(line.strip())
    if "|" in line and _PICTURE.search(line):
        line = _HALF_PICTURE.sub(_unless_picture, line).strip()
    if not line or _LIST_ITEM in line or _is_markup(line):
        return ""
    is_text = line[0] == WORDS
    line = line.replace(WORDS, "")
    if "&" in line:
        line = _LEFT_ENTITY.sub(lambda m: unescape(unescape(m[0])), line)
        line = _LEFT_ENTITY.sub(_character, line)
    marked = line
    if "[[" in line:
        line = _LEFT_LINK.sub(r"\1", line)
    if "<" in line:
        line = _LEFT_TAG.sub(_in_place_of_tag, line)
    if "[[" in line or "]]" in line or "{" in line or "}" in line:
        line = _LEFT_BRACES.sub("", line)
    # What was hidden behind a tag or brace may be a list item or a table row after all. What quotes
    # hide, as of '''!!!''', is words.
    if line != marked and not is_text and _is_markup(line.strip()):
        return ""
    if "//" in line:
        line = _BARE_URL.sub("", line)
    line = cleaned(_without_quotes(line).replace(APOSTROPHE, "'"))
    if _GAP.search(line):
        line = _close_gaps(line)
    return line if any(map(str.isalnum, line)) else ""


def _close_gaps(line: str) -> str:
    for _ in range(3):
        before = line
        line = _EMPTY_BRACKETS.sub("", line)
        line = _BRACKET_START.sub(r"\1", line)
        line = _BRACKET_END.sub(r"\1", line)
        if line == before:
            break
    line = _SPACE_BEFORE.sub(r"\1", squeeze(line))
    return _DOUBLE_COMMA.sub(r"\1", line)
