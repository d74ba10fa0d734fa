"""Wikitext to passages of prose: no templates, tables, lists, headings, references, captions.

mwparserfromhell parses what is left after references, comments and most templates are cut by
regular expressions (they are a third to a half of an article, and the parser is the slowest part
of reading a dump).
"""

from __future__ import annotations

import html
import re

import mwparserfromhell
from mwparserfromhell.nodes import (
    ExternalLink,
    Heading,
    HTMLEntity,
    Tag,
    Template,
    Text,
    Wikilink,
)
from mwparserfromhell.wikicode import Wikicode

from data_pipeline.corpus.documents import squeeze

_LIST_ITEM = "\x01"

_COMMENT = re.compile(r"<!--.*?(?:-->|\Z)", re.DOTALL)
_REFERENCE = re.compile(
    r"<ref\b[^<>]*/>|<ref\b[^<>]*>.*?</ref\s*>|<references\b[^<>]*/?>", re.DOTALL | re.IGNORECASE
)
_BLOCKS = re.compile(
    r"<(math|gallery|timeline|syntaxhighlight|source|score|imagemap|hiero|chem|ce|graph|mapframe|"
    r"templatedata|pre|references|inputbox|section)\b[^<>]*(?<!/)>.*?</\1\s*>",
    re.DOTALL | re.IGNORECASE,
)
_INNER_TEMPLATE = re.compile(r"\{\{[^{}]*\}\}")
_INNER_TABLE = re.compile(
    r"^[ \t:]*\{\|(?:(?!^[ \t:]*\{\|).)*?^[ \t]*\|\}", re.DOTALL | re.MULTILINE
)
_OPEN_TABLE = re.compile(r"^[ \t:]*\{\|.*?(?=^==|\n\n[A-Z'\[]|\Z)", re.DOTALL | re.MULTILINE)
_MAGIC = re.compile(r"__[A-Z]{3,}__")
_DISAMBIGUATION = re.compile(
    r"\{\{\s*(?:[a-z ]*disambig(?:uation)?[a-z ]*|disamb|dab|hndis|geodis|surname|given name|"
    r"mathdab|numberdis|roaddis|schooldis|letter-numbercombdisambig|set index)\s*[|}]"
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
_BRACKET_END = re.compile(r"[\s,;:]+([)\]])")
_SPACE_BEFORE = re.compile(r" +([,.;:!?)\]])(?=[\s\"')]|$)")
_DOUBLE_COMMA = re.compile(r"([,;])(?:\s*[,;])+")


def is_disambiguation(title: str, text: str) -> bool:
    """A page that only lists what its title may mean."""
    return title.endswith("(disambiguation)") or _DISAMBIGUATION.search(text) is not None


def passages(text: str) -> list[str]:
    """The paragraphs of prose of an article, in order, as plain text."""
    text = _COMMENT.sub("", text)
    text = _REFERENCE.sub("", text)
    text = _BLOCKS.sub("", text)
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
    parsed = mwparserfromhell.parse(text, skip_style_tags=True)
    out: list[str] = []
    _render(parsed, out)
    lines = "".join(out).split("\n")
    return [line for raw in lines if (line := clean_line(raw))]


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
            out.append(_entity(str(node)))
        elif isinstance(node, Heading):
            out.append("\n")
        elif isinstance(node, Tag):
            _render_tag(node, out)
        elif isinstance(node, Template):
            # Only templates too tangled for the loop above come here.
            out.append("")


def _render_link(node: Wikilink, out: list[str]) -> None:
    title = str(node.title)
    if _NOT_PROSE.match(title) and not title.lstrip().startswith(":"):
        return
    if node.text is not None:
        _render(node.text, out)
    else:
        out.append(title.strip().lstrip(":").replace("_", " "))


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


def _entity(text: str) -> str:
    return html.unescape(text)


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
        line = _LEFT_ENTITY.sub(lambda m: html.unescape(html.unescape(m[0])), line)
        line = _LEFT_ENTITY.sub(lambda m: html.unescape(m[0]), line)
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
