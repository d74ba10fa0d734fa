"""Wikitext to passages of prose: no templates, tables, lists, headings, references, captions.

mwparserfromhell parses what is left after references, comments and most templates are cut by
regular expressions (they are a third to a half of an article, and the parser is the slowest part
of reading a dump).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping

import mwparserfromhell
from mwparserfromhell.definitions import URI_SCHEMES
from mwparserfromhell.nodes import (
    ExternalLink,
    Heading,
    HTMLEntity,
    Tag,
    Text,
    Wikilink,
)
from mwparserfromhell.wikicode import Wikicode

from data_pipeline.corpus.documents import squeeze, unescape

_LIST_ITEM = "\x01"
_GONE = "\x02"  # in place of a mark, so that what stands on its two sides makes no other

_COMMENT = re.compile(r"<!--.*?(?:-->|\Z)", re.DOTALL)
_REFERENCE = re.compile(r"<(ref)\b[^<>]*>|<references\b[^<>]*/?>", re.IGNORECASE)
_BLOCKS = re.compile(
    r"<(math|gallery|timeline|syntaxhighlight|source|score|imagemap|hiero|chem|ce|graph|mapframe|"
    r"templatedata|pre|references|inputbox|section)\b[^<>]*(?<!/)>",
    re.IGNORECASE,
)
_INNER_TEMPLATE = re.compile(r"\{\{[^{}]*\}\}")
_INNER_TABLE = re.compile(
    r"^[ \t:]*\{\|(?:(?!^[ \t:]*\{\|).)*?^[ \t]*\|\}", re.DOTALL | re.MULTILINE
)
_OPEN_TABLE = re.compile(r"^[ \t:]*\{\|.*?(?=^==|\n\n[A-Z'\[]|\Z)", re.DOTALL | re.MULTILINE)
# A list's line without tags, in which something else might begin that is kept.
_LIST_LINE = re.compile(r"^[*#:;][^<\n]*$", re.MULTILINE)
_PLAIN_LINK = re.compile(r"\[\[([^\[\]{}<>|\n]+)(?:\|([^\[\]{}<>|\n]*))?\]\]")
_MAGIC = re.compile(r"__[A-Z]{3,}__")
_DISAMBIGUATION = re.compile(
    r"\{\{\s{0,9}(?:[a-z ]{0,60}disambig(?:uation)?[a-z ]{0,60}|disamb|dab|hndis|geodis|surname|"
    r"given name|mathdab|numberdis|roaddis|schooldis|letter-numbercombdisambig|set index)"
    r"\s{0,9}[|}]"
    r"|__DISAMBIG__",
    re.IGNORECASE,
)
_NOT_PROSE = re.compile(
    r"\s*:?\s*(?:file|image|category|media|wikt|[a-z]{2,3}(?:-[a-z]+)?)\s*:", re.I
)
_DROPPED_TAGS = frozenset(
    "ref references gallery math timeline syntaxhighlight source score imagemap hiero chem ce "
    "graph mapframe table tr td th ul ol pre templatedata style script noinclude includeonly "
    "inputbox indicator".split()
)

# Templates that stand for words of the running text; the rest is dropped. value: which arguments
# are shown, joined by a space.
_SHOWN_TEMPLATES: dict[str, tuple[int, ...]] = {
    "lang": (2,), "transl": (-1,), "transliteration": (-1,), "nowrap": (1,), "nobr": (1,),
    "convert": (1, 2), "cvt": (1, 2), "abbr": (1,), "visible anchor": (1,), "vanchor": (1,),
    "small": (1,), "smaller": (1,), "big": (1,), "sc": (1,), "smallcaps": (1,), "em": (1,),
    "strong": (1,), "var": (1,), "mvar": (1,), "math": (1,), "quote": (1,), "quotation": (1,),
    "cquote": (1,), "blockquote": (1,), "quote box": (), "nihongo": (1,), "ill": (1,),
    "interlanguage link": (1,), "formatnum": (1,), "val": (1,), "frac": (1,), "sup": (1,),
    "sub": (1,), "nom": (1,), "lang-en": (1,), "wikt-lang": (2,), "wiktlang": (2,), "sic": (1,),
    "not a typo": (1,), "as of": (1,), "tooltip": (1,), "script": (2,), "ship": (1, 2),
    "hms": (1,), "uss": (1,), "ss": (1,), "uni": (2,), "nts": (1,), "linktext": (1,),
    "okina": (), "gloss": (1,), "angbr": (1,), "color": (2,), "font color": (2,), "flag": (1,),
    "flagcountry": (1,), "langx": (2,), "bibleverse": (1, 2),
}  # fmt: skip
_SYMBOL_TEMPLATES = {
    "ndash": "–", "snd": " – ", "spnd": " – ", "spaced ndash": " – ", "mdash": "—",
    "spaced mdash": " — ",
    "nbsp": " ", "space": " ", "spaces": " ", "'": "'", '"': '"', "'s": "'s", "·": "·", "dot": " ·",
    "bull": "•", "pi": "π", "!": "|", "=": "=", "ae": "AE", "bc": "BC", "bce": "BCE", "ce": "CE",
    "ad": "AD", "circa": "c.", "c.": "c.", "floruit": "fl.", "number sign": "#",
    "-'": "'", "'-": "'",
    "c": "c.", "en dash": "–", "em dash": "—", "thinsp": " ", "hair space": " ", "-": "-",
    "gbp": "£", "eur": "€", "euro": "€", "£": "£", "ft": "ft", "zwsp": "", "clear": "", "br": "\n",
}  # fmt: skip

_LEFT_LINK = re.compile(r"\[\[(?:[^|\[\]\n]*\|)?([^\[\]\n]*)\]\]")
_LEFT_TAG = re.compile(r"</?[A-Za-z][^<>]{0,300}>")
_LEFT_BRACES = re.compile(r"\[\[|\]\]|\{\{+|\}\}+|\{\||\|\}")
_LEFT_QUOTES = re.compile(r"'{2,}")
_LEFT_ENTITY = re.compile(r"&(?:[A-Za-z]+[0-9]*|#[0-9]+|#x[0-9a-fA-F]+);")
_BARE_URL = re.compile(r"\b(?:https?|ftp)://[^\s\])|]+")
_MARKUP_START = re.compile(
    r"[*#:;|!\x01]|\{\||={2,}|-{4,}|\s*(?:file|image|category)\s*:"
    r"|(?:class|style|align|colspan|rowspan|width|border|bgcolor)\s*=",
    re.IGNORECASE,
)
_PICTURE = re.compile(r"\|\s*(?:thumb|(?:left|right|center|upright|\d+px)\s*\|)", re.IGNORECASE)
# What a dropped template or link leaves between brackets and punctuation. It begins with a set of
# characters, for which the engine looks much faster than for alternatives.
_GAP = re.compile(
    r"[,.;:!?)\](\[\"“](?:(?<=[ (\[,;:][,.;:!?)\]])|(?<=[(\[])(?=[ ,;:–—])|(?<=\")(?= +\")"
    r"|(?<=“)(?= *”))"
)
_EMPTY_BRACKETS = re.compile(r"\(\s*(?:[,;:/–—-]\s*)*\)|\[\s*\]|“\s*”|\"\s+\"(?=[\s.,])")
_BRACKET_START = re.compile(r"([(\[])[\s,;:]+(?=[^\s)\]])")
_BRACKET_END = re.compile(r"(?<![\s,;:])[\s,;:]+([)\]])")
_SPACE_BEFORE = re.compile(r" +([,.;:!?)\]])(?=[\s\"')]|$)")
_DOUBLE_COMMA = re.compile(r"([,;])(?:\s*[,;])+")


def is_disambiguation(title: str, text: str) -> bool:
    """A page that only lists what its title may mean."""
    return title.endswith("(disambiguation)") or _DISAMBIGUATION.search(text) is not None


def passages(text: str) -> list[str]:
    """The paragraphs of prose of an article, in order, as plain text."""
    text = _COMMENT.sub("", text)
    text = _cut_elements(_REFERENCE, text)
    text = _cut_elements(_BLOCKS, text)
    text = _MAGIC.sub("", text)
    for _ in range(30):
        text, count = _INNER_TEMPLATE.subn(_template_text, text)
        if not count:
            break
    for _ in range(10):
        text, count = _INNER_TABLE.subn("\n", text)
        if not count:
            break
    text = _OPEN_TABLE.sub("\n", text)
    text = _LIST_LINE.sub(_unless_open, text)
    text = _PLAIN_LINK.sub(lambda link: _shown(link[1], link[2]), text)
    text = _balanced_links(_balanced_tags(_balanced_braces(text)))
    text = _LONE_TABLE.sub("&#123;|", text)
    parsed = mwparserfromhell.parse(text, skip_style_tags=True)
    out: list[str] = []
    _render(parsed, out)
    lines = "".join(out).replace(_GONE, "").split("\n")
    return [line for raw in lines if (line := clean_line(raw))]


def _cut_elements(opening: re.Pattern[str], text: str) -> str:
    """The text without the elements that `opening` begins: up to the next end tag of that name, or
    themselves where they have none of their own. Those that nothing ends stay."""
    kept: list[str] = []
    endless: set[str] = set()  # names that no end tag follows any more
    at = 0
    while (tag := opening.search(text, at)) is not None:
        kept.append(text[at : tag.start()])
        at = tag.end()
        name = (tag[1] or "").lower()
        if not name or tag[0].endswith("/>"):
            continue
        end = None
        if name not in endless:
            end = re.compile(rf"</{name}\s*>", re.IGNORECASE).search(text, at)
        if end is None:
            endless.add(name)
            kept.append(tag[0])
        else:
            at = end.end()
    return "".join([*kept, text[at:]])


def _unless_open(line: re.Match[str]) -> str:
    """Nothing, but for a line in which a link begins that goes on in the next."""
    return "" if line[0].count("[[") == line[0].count("]]") else line[0]


# The parser tries an opening to the end of the text before it takes it for text, and so do all that
# stand inside: what is never closed, or nested deeper than prose is, is taken out before it.
_DEEPEST = 20
_BRACES = re.compile(r"\{\{+|\}\}+")
_BARE_SCHEMES = "|".join(name for name, slashes in URI_SCHEMES.items() if not slashes)
_BRACKETS = re.compile(
    rf"(?:\[\[)+|\[(?=(?:[a-z]{{2,9}}:)?//|(?:{_BARE_SCHEMES}):)|\]+|\n", re.IGNORECASE
)
_LONE_TABLE = re.compile(r"(?<!\{)\{\|")
# The parser takes "<5" for a tag, too, as MediaWiki does not.
_TAG = re.compile(r"<(?:(/?)([A-Za-z][A-Za-z0-9]*)(?![A-Za-z0-9])[^<>]*(>?))?")
_QUOTED = re.compile(r"\"[^\"]*\"|'[^']*'")
# Of the tags without an end only those that the parser knows as such.
_NEVER_CLOSED = frozenset("br hr img link meta wbr dd dt li td th tr".split())


def _balanced_braces(text: str) -> str:
    """The text without the {{ that no }} closes."""
    if "{{" not in text:
        return text
    open_at: list[int] = []
    lone: list[int] = []
    for run in _BRACES.finditer(text):
        pairs = len(run[0]) // 2
        if run[0][0] == "{":
            open_at += range(run.start(), run.start() + 2 * pairs, 2)
            lone += open_at[_DEEPEST:]
            del open_at[_DEEPEST:]
        else:
            del open_at[max(0, len(open_at) - pairs) :]
    return _without(text, [(at, at + 2) for at in [*lone, *open_at]], {})


def _balanced_links(text: str) -> str:
    """The text without the [[ that no ]] closes; "[" of an outer link that its line does not
    close is written &#91;."""
    open_at: list[tuple[int, int]] = []
    lone: list[tuple[int, int]] = []
    for token in _BRACKETS.finditer(text):
        mark, at, count = token[0][0], token.start(), len(token[0])
        if mark == "\n":
            lone += [span for span in open_at if span[1] - span[0] == 1]
            open_at = [span for span in open_at if span[1] - span[0] == 2]
        elif mark == "[":
            width = min(2, count)
            open_at += [(start, start + width) for start in range(at, at + count, 2)]
            lone += open_at[_DEEPEST:]
            del open_at[_DEEPEST:]
        else:
            while open_at and (width := open_at[-1][1] - open_at[-1][0]) <= count:
                open_at.pop()
                count -= width
    lone += open_at
    outer = {span: "&#91;" for span in lone if span[1] - span[0] == 1}
    return _without(text, [span for span in lone if span not in outer], outer)


def _balanced_tags(text: str) -> str:
    """The text without the tags that nothing closes; "<" before what is no tag is written &lt;."""
    if "<" not in text:
        return text
    open_tags: list[tuple[str, tuple[int, int]]] = []
    names: Counter[str] = Counter()  # of the open tags, and of those that need no end
    lone: list[tuple[int, int]] = []
    no_tags: list[tuple[int, int]] = []
    for tag in _TAG.finditer(text):
        name = (tag[2] or "").lower()
        if not tag[3]:
            no_tags.append((tag.start(), tag.start() + 1))
        elif tag[1]:
            if not names[name]:
                lone.append(tag.span())
            if name in _NEVER_CLOSED:
                names[name] -= names[name] > 0
                continue
            while names[name]:
                opened, span = open_tags.pop()
                names[opened] -= 1
                if opened == name:
                    break
                lone.append(span)
        elif re.search("[\"']", _QUOTED.sub("", tag[0])):
            lone.append(tag.span())  # the end of its value is looked for to the end of the text
        elif name in _NEVER_CLOSED:
            names[name] += 1
        elif not tag[0].endswith("/>"):
            if len(open_tags) < _DEEPEST:
                open_tags.append((name, tag.span()))
                names[name] += 1
            else:
                lone.append(tag.span())
    lone += [span for _, span in open_tags]
    return _without(text, lone, dict.fromkeys(no_tags, "&lt;"))


def _without(
    text: str, spans: Iterable[tuple[int, int]], instead: Mapping[tuple[int, int], str]
) -> str:
    pieces: list[str] = []
    at = 0
    for start, end in sorted([*spans, *instead]):
        pieces += [text[at:start], instead.get((start, end), _GONE)]
        at = end
    return "".join([*pieces, text[at:]])


def _template_text(match: re.Match[str]) -> str:
    parts = match[0][2:-2].split("|")
    name = parts[0].strip().lower().replace("_", " ")
    symbol = _SYMBOL_TEMPLATES.get(name)
    if symbol is not None:
        return symbol + (
            parts[1].strip() if name in ("circa", "c.", "floruit") and parts[1:] else ""
        )
    if name.startswith("lang-"):
        shown: tuple[int, ...] = (1,)
    elif name in _SHOWN_TEMPLATES:
        shown = _SHOWN_TEMPLATES[name]
    else:
        return ""
    named = {"text", "quote"}
    values = [p for p in parts[1:] if "=" not in p.split("[[")[0]]
    for part in parts[1:]:
        key, equals, value = part.partition("=")
        if equals and (
            key.strip().lower() in named or key.strip() == str(shown[0] if shown else 0)
        ):
            values.insert(0, value)
    if name == "as of":
        return "As of " + " ".join(values[:1])
    picked = [values[i - 1 if i > 0 else i] for i in shown if values and i <= len(values)]
    result = " ".join(value.strip() for value in picked)
    return f"\n{result}\n" if name in ("quote", "quotation", "cquote", "blockquote") else result


def _render(code: Wikicode, out: list[str]) -> None:
    for node in code.nodes:
        if isinstance(node, Text):
            out.append(node.value)
        elif isinstance(node, Wikilink):
            _render_link(node, out)
        elif isinstance(node, ExternalLink):
            if node.brackets and node.title is not None:
                _render(node.title, out)
        elif isinstance(node, HTMLEntity):
            out.append(unescape(str(node)))
        elif isinstance(node, Heading):
            out.append("\n")
        elif isinstance(node, Tag):
            _render_tag(node, out)
        # Templates that are too tangled for the loop above show nothing.


def _render_link(node: Wikilink, out: list[str]) -> None:
    title = str(node.title).replace(_GONE, "")
    if node.text is None:
        out.append(_shown(title, None))
    elif _is_prose(title):
        _render(node.text, out)


def _is_prose(title: str) -> bool:
    """Whether a link to this title shows words: no picture, category or other language."""
    return _NOT_PROSE.match(title) is None or title.lstrip().startswith(":")


def _shown(title: str, text: str | None) -> str:
    """What a link shows."""
    if not _is_prose(title):
        return ""
    return title.strip().lstrip(":").replace("_", " ") if text is None else text


def _render_tag(node: Tag, out: list[str]) -> None:
    name = str(node.tag).strip().lower()
    if node.wiki_markup and name in ("li", "dt", "dd"):
        out.append(_LIST_ITEM)
    elif name in ("br", "hr"):
        out.append("\n" if name == "hr" else " ")
    elif name in _DROPPED_TAGS:
        out.append("\n" if name == "table" else "")
    elif name == "nowiki":
        out.append(str(node.contents or ""))
    elif name == "li":
        out.append("\n" + _LIST_ITEM)
    elif node.contents is not None:
        block = name in ("blockquote", "div", "p", "center", "poem")
        out.append("\n" if block else "")
        _render(node.contents, out)
        out.append("\n" if block else "")


def _is_markup(line: str) -> bool:
    return (
        _MARKUP_START.match(line) is not None
        or ("|" in line and _PICTURE.search(line) is not None)
        or "Category:" in line
        or line.endswith("==")
    )


def clean_line(line: str) -> str:
    """One line of prose without what markup left behind; empty when nothing or no prose is left."""
    line = line.strip()
    if not line or _LIST_ITEM in line or _is_markup(line):
        return ""
    if "&" in line:
        line = _LEFT_ENTITY.sub(lambda m: unescape(unescape(m[0])), line)
        line = _LEFT_ENTITY.sub(lambda m: unescape(m[0]), line)
        line = _LEFT_ENTITY.sub("", line)
    if "[[" in line:
        line = _LEFT_LINK.sub(r"\1", line)
    if "<" in line:
        line = _LEFT_TAG.sub("", line)
    if "//" in line:
        line = _BARE_URL.sub("", line)
    if "[[" in line or "]]" in line or "{" in line or "}" in line:
        line = _LEFT_BRACES.sub("", line)
    if "''" in line:
        line = _LEFT_QUOTES.sub("", line)
    line = squeeze(line)
    if _GAP.search(line):
        line = _close_gaps(line)
    # What was hidden behind a tag or brace may be a list item or a table row after all.
    if _is_markup(line) or not any(map(str.isalnum, line)):
        return ""
    return line


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
