"""Prose out of Markdown and reStructuredText, by light rules, line by line.

Each function gives paragraphs. Time grows with the length of the text, whatever it holds.
"""

from __future__ import annotations

import bisect
import contextlib
import re
import tomllib
from collections.abc import Callable, Iterator
from functools import partial

from configs.load import is_mapping
from data_pipeline.corpus.documents import cleaned, squeeze, unescape
from data_pipeline.corpus.web_pages import html_paragraphs, is_inline

_VALUE = r"""(?:"[^"]*"|'[^']*'|[^\s"'=<>`]{1,500})"""
_TAG = re.compile(
    r"</?([A-Za-z][A-Za-z0-9-]{0,50})"
    rf"(?:\s+[A-Za-z_:][\w.:-]{{0,100}}(?:\s*=\s*{_VALUE})?){{0,50}}\s*/?>"
)
_BULLET = re.compile(
    r"\s*(?:[-*+•]|(\d{1,9}[.)]|#\.|\((?:[a-z]|[ivx]{2,4}|\d{1,3})\)))\s+(?:\[[ xX]\]\s+)?"
)
# Each pass takes the inner marks of a pair.
_EMPHASIS = [
    (re.compile(r"(?<!\w)(\*{1,3})(?![\s*])([^*]{1,2000})(?<!\s)\1(?!\w)"), r"\2"),
    (re.compile(r"(?<!\w)(_{1,3})(?![\s_])([^_]{1,2000})(?<!\s)\1(?!\w)"), r"\2"),
] * 3
# Behind the marks of backticks stands none; in a list item a fence is closed as deep as its text.
_FENCE = re.compile(r"(\s*)((?:(?:[-*+]|\d+[.)])\s+)?)(`{3,}(?![^`]*`)|~{3,})")
_NAMED = re.compile(r"[ \t]*\S")  # behind its marks
_FENCE_ENDS = re.compile(r"(\s*)(`{3,}|~{3,})\s*$")
_QUOTES = re.compile(r"(\s*)>\s?(?:\s{0,3}>\s?)*+")
# Of a definition of a link no words follow the address, but a title in quotation marks.
_ADDRESS = re.compile(
    r"""\s{0,3}\[(?!\^)[^\]]{1,200}\]:(?:\s*(?:<[^<>]*>|\S+)"""
    r"""(?:\s+(?:"(?:[^"\\]|\\.)*+"|'(?:[^'\\]|\\.)*+'|\((?:[^()\\]|\\.)*+\)))?)?\s*$"""
)
_FOOTNOTE = re.compile(r"\s{0,3}\[\^[^\]]{1,200}\]:\s+")
_UNDER_HEAD = re.compile(r"(?=[^-]*-)(?=[^|]*\|)[-:| \t]++$")  # the second line of a table
# Of HTML, at the beginning of a line: up to its end tag it holds no prose.
_HIDES = re.compile(
    r" {0,3}<(script|style|svg|pre(?=[^<>]{0,200}>\s{0,9}<code\b))(?=[\s>]|$)", re.IGNORECASE
)
_HIDES_TO = re.compile(r"<(/?)(script|style|svg|pre)\b(?:\s{0,9}>)?", re.IGNORECASE)
_HEADING = re.compile(r"\s{0,3}#{1,6}(?:\s+|$)")
_RULE = re.compile(r"\s{0,3}([-=*_])(?:[ \t]*\1)*+[ \t]*$")
_KEY = re.compile(r"""["']?[\w.-]+["']?\s*[:=]""")  # as front matter begins
_KEY_OF_YAML = re.compile(
    r"""(?P<key>[^\s#"'-](?:[^:]|:(?=\S)){0,200}):(?:[ \t]+(?P<value>\S.*)|[ \t]*$)"""
)
_SMALL = re.compile(r"[a-z][\w.-]*")
_OF_TOML = re.compile(r"""\s|[\w."'-]+\s*=|\[|#|[\]}"']""")  # where it stands at the margin
_MAPPING_CHARACTERS, _MAPPING_BRACKETS = 10_000, 200  # more cost a parser too much
_Rule = tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]
# An address, which has no spaces, and a title in quotation marks.
_TARGET = (
    r"\(\s?(?:<[^<>]{0,1000}>|(?:[^()\s]|\([^()\s]{0,200}\)){0,1000})"
    r"(?:\s(?:\"[^\"]{0,1000}\"|'[^']{0,1000}'|\([^()]{0,1000}\)))?\s?\)"
)
_FILE = r"\([^()]{0,500}\.\w{2,5}\s?\)"  # whose name may have spaces
_PICTURE = rf"!\[[^\[\]]{{0,500}}\](?:{_TARGET}|{_FILE}|\[[^\[\]]{{0,200}}\])?"
_MARKDOWN: list[_Rule] = [
    (re.compile(_PICTURE), ""),
    (re.compile(rf"\[((?:[^\[\]]|\[[^\[\]]{{0,200}}\]){{0,500}}+)\]{_TARGET}"), r"\1"),  # links
    # A number and a number are two citations, or an element of a table in a program.
    (re.compile(r"\[(?!\d{1,9}\]\[\d)([^\[\]]{0,500})\]\[[^\[\]]{0,200}\]"), r"\1"),
    (re.compile(r"\[\^[^\[\]]{1,50}\]"), ""),  # footnotes
    (re.compile(r"<(?:(?:https?|mailto):[^<>\s]{1,1000}|[\w.+-]{1,100}@[\w.-]{1,200})>"), ""),
    (_TAG, lambda tag: "" if is_inline(tag[1].lower()) else " "),
    (re.compile("~~|`{3,}"), ""),
    *_EMPHASIS,
]
# What stays as it is: of a code span its content, an escaped mark.
_MARKDOWN_AS_IS = re.compile(
    r"\\(?P<mark>[!-/:-@\[-`{-~])|(?<!`)(`{1,3})(?!`) ?(?P<code>.{1,1000}?) ?(?<!`)\2(?!`)"
)
# Prose that is indented under it is no code: notes of MkDocs, footnotes, definitions.
_HOLDS_PROSE = re.compile(r"\s{0,3}(?:(?:!!!|\?\?\?\+?|===[+!]?|:)\s|\[\^)")


def markdown_paragraphs(text: str) -> list[str]:
    """Paragraphs, list items and headings, without front matter, code, tables and pictures."""
    lines = _without_comments(text).split("\n")
    del lines[: _behind_front_matter(lines)]
    return _joined(_markdown_blocks(lines), _MARKDOWN, _MARKDOWN_AS_IS)


def _behind_front_matter(lines: list[str]) -> int:
    """The place behind it; 0 where there is none, or its end is lost: what stands before the next
    rule of the page is then no mapping."""
    opens = lines[0].rstrip()
    if opens not in ("---", "+++"):
        return 0
    first = next((line for line in lines[1:] if not line.startswith("#")), "")
    if not _KEY.match(first):
        return 0
    ends = (n for n, line in enumerate(lines[1:], 1) if line.rstrip() in (opens, "..."))
    end = next(ends, -1)
    return end + 1 if (_is_toml if opens == "+++" else _is_yaml)(lines[1:end]) else 0


def _is_cheap(text: str) -> bool:
    """Whether a parser may look at it: its time is that of the length by the depth of brackets."""
    brackets = text.count("[") + text.count("{")
    return len(text) <= _MAPPING_CHARACTERS and brackets <= _MAPPING_BRACKETS


def _is_yaml(lines: list[str]) -> bool:
    """Whether lines are a mapping, or look like one, since values are often no YAML. A key that
    comes again, items that stand by themselves, and behind an empty line keys that are not in
    small letters, or what no key holds, are of the page."""
    keys, others, apart = set[str](), False, False
    items, block, blank = False, False, False  # whether the last key holds these; an empty line
    for line in lines:
        if not line.strip():
            items, blank = False, True
            continue
        if line[0] == "#":
            items = block = False
            continue
        if line[0].isspace():
            if blank and not block:
                return False
            blank = False
            continue
        apart, blank = apart or blank, False
        if (key := _KEY_OF_YAML.match(line)) is not None:
            others = others or " " in key["key"]  # as a sentence has
            items = key["value"] is None
            block = items or key["value"][0] in "|>"
            if key["key"] in keys or (apart and not _SMALL.fullmatch(key["key"])):
                return False
            keys.add(key["key"])
        elif line[0] == "-":
            if not items:
                return False
        else:
            if apart:
                return False
            others = True
    text = "\n".join(lines)
    return not others or (_is_cheap(text) and is_mapping(text))


def _is_toml(lines: list[str]) -> bool:
    text = "\n".join(lines)
    with contextlib.suppress(ValueError):
        if _is_cheap(text):
            return bool(tomllib.loads(text))
    return all(not line.strip() or _OF_TOML.match(line) for line in lines)


_COMMENT = "\x01"  # in place of those that stand alone in their line, which is not blank
_ALONE = re.compile(r"^([ \t>]*)\0[\0 \t]*$", re.MULTILINE)
_CODE_OR_COMMENT = re.compile(
    r"(?m:^([ \t>]*(?:(?:[-*+]|\d+[.)])[ \t]+)?)(?:(`{3,}(?![^`\n]*`)|~{3,})|(<!--)))"
    r"|\\[<`\\]|(`+)|<!--"
)
_CLOSING_FENCE = re.compile(r"^([ \t>]*)(`{3,}|~{3,})[ \t]*$", re.MULTILINE)
_QUOTATIONS_END = re.compile(r"\n(?![ \t]*>)|\Z")
_BLOCK = r"`{3}|~{3}|#{1,6}[ \t]|(?:[-*+]|\d{1,9}[.)])[ \t]|(?:[-=]+|\*{3,}|_{3,})[ \t]*$"
_PARAGRAPHS_END = re.compile(rf"\n[ \t]*(?:$|>|{_BLOCK})|\Z", re.MULTILINE)
_QUOTED_PARAGRAPHS_END = re.compile(rf"\n[ \t>]*(?:$|{_BLOCK})|\Z", re.MULTILINE)
_AT_MARGIN = re.compile(r"^\S", re.MULTILINE)
# By the column of what it holds: there and further in the marks are of that.
_ITEMS_END = [
    re.compile(rf"\n(?:\S|[ \t]{{0,{column - 1}}}(?:[-*+]|\d{{1,9}}[.)])[ \t])|\Z")
    for column in range(1, 41)
]
# How many fences that nothing closes are looked at: each costs a look at all that follows.
_UNCLOSED = dict.fromkeys("`~", 8)
_SPANS_END = {"`" * n: re.compile(rf"(?<!`)`{{{n}}}(?!`)") for n in range(1, 21)}


def _without_comments(text: str) -> str:
    """Without what stands in HTML's comments, but for marks in code and behind a backslash."""
    parts, done, at, text = [], 0, 0, text.replace("\0", "")
    unclosed = dict(_UNCLOSED)
    quotation, closes = 0, -1  # where these end: it, and the next comment
    items = [0] * len(_ITEMS_END)
    paragraph, ends = 0, dict(_SPANS_END)  # where it ends, and what may end a span in its rest
    margin = looked_at = 0  # the last line that begins there, up to where it was looked for
    while (mark := _CODE_OR_COMMENT.search(text, at)) is not None:
        at = mark.end()
        quoted = ">" in (mark[1] or "")
        if quoted and at > quotation:
            quotation = _QUOTATIONS_END.search(text, at).end()
        inline = mark[4] or (mark[0] == "<!--" and not mark[3])
        if inline and at > paragraph:
            begin = text.rfind("\n", 0, at) + 1
            of_quotation = text[begin:at].lstrip().startswith(">")
            closes_it = _QUOTED_PARAGRAPHS_END if of_quotation else _PARAGRAPHS_END
            paragraph, ends = closes_it.search(text, at).start(), dict(_SPANS_END)
        if mark[2] and (quoted or unclosed[mark[2][0]]):
            within = quotation if quoted else len(text)
            end = _end_as_begun(
                mark[2],
                at,
                _NAMED.match(text, at) is not None,
                unclosed if not quoted else {},
                partial(_behind_fence, text, len(mark[1]) + 3, within),
                lambda at, end: text[at:end].split("\n"),
            )
            at = end or (quotation if quoted else at)
        elif mark[4]:
            if mark[4] in ends and (span := ends[mark[4]].search(text, at, paragraph)) is not None:
                at = span.end()
            else:
                ends.pop(mark[4], None)
        elif mark[0].endswith("<!--"):  # which ends with what begins its line, or holds it
            within = paragraph if inline else quotation if quoted else len(text)
            if mark[1] and not quoted:
                for line in _AT_MARGIN.finditer(text, looked_at, at):
                    margin = line.start()
                looked_at = at
                if mark[1].strip() or _BULLET.match(text, margin):
                    column = min(len(mark[1]), len(items)) - 1
                    if at > items[column]:
                        items[column] = _ITEMS_END[column].search(text, at).start()
                    within = items[column]
            if closes < at:
                closes = text.find("-->", at)
                closes = closes if closes >= 0 else len(text)
            if closes + 3 <= within:
                parts += (text[done : mark.end() - 4], "\0")
                done = at = closes + 3
    text = "".join([*parts, text[done:]])
    return _ALONE.sub(rf"\1{_COMMENT}", text).replace("\0", "") if parts else text


def _end_as_begun(
    marks: str,
    at: int,
    named: bool,
    unclosed: dict[str, int],
    find: Callable[[str, int], int | None],
    between: Callable[[int, int | None], list[str]],
) -> int | None:
    """The place behind the fence that begins with `marks`, and a name where it is `named`, before
    `at`: what `find` tells from a place on. Of one that nothing closes a mark was doubled, or its
    end lost one, if one fewer closes it before such a fence with a name begins, or behind the one
    that it shows; but not where the fences behind it go on in step only without it. Else all that
    follows would be code: it is no fence. Bare tildes then underline titles, and from here on, but
    in quotations, tildes begin no fence. between: the lines from a place to a place."""
    letter, fewer = marks[0], marks[1:]
    end = find(marks, at)
    if end is None and letter in unclosed:
        unclosed[letter] -= 1
        opens = re.compile(rf"[ \t>]*{letter}{{{len(fewer)},}}[ \t]*[^{letter}\s]")
        if len(fewer) == 3 or (len(fewer) > 3 and (letter == "`" or named)):
            end, shows = find(fewer, at), False
            if end is not None and any(map(opens.match, between(at, end))):
                shown, shows, end = end, True, find(fewer, end)
                if end is not None and any(map(opens.match, between(shown, end))):
                    end = None
            if end is not None:
                gain = _in_step(between(end, None), letter) - _in_step(between(at, None), letter)
                end = end if gain > 0 or (gain == 0 and (named or not shows)) else None
        if end is None and letter == "~" and not named:
            unclosed[letter] = 0
    return end


def _in_step(lines: list[str], letter: str) -> bool:
    """Whether each fence of `letter` that begins there, but in quotations, is closed."""
    marks = ""
    for line in lines:
        if (fence := _FENCE.match(line)) is None or fence[3][0] != letter:
            continue
        if not marks:
            marks = fence[3]
        elif fence[3].startswith(marks) and not (fence[2] or _NAMED.match(line, fence.end())):
            marks = ""
    return not marks


def _behind_fence(text: str, deepest: int, within: int, marks: str, at: int) -> int | None:
    """The place behind the line, from `at` up to `within`, that closes a fence of `marks`, indented
    by `deepest` at most."""
    for end in _CLOSING_FENCE.finditer(text, at, within):
        if end[2].startswith(marks) and len(end[1]) <= deepest:
            return end.end()
    return None


def _end_of_fence(lines: list[str], deepest: int, quotes: int, marks: str, at: int) -> int | None:
    """The place behind the line from `at` on that closes a fence of `marks`, indented by `deepest`
    at most, or behind the quotation, `quotes` deep, that it stands in."""
    for place in range(at, len(lines)):
        line = lines[place]
        if quotes:
            quoted = _QUOTES.match(line)
            if quoted is None or quoted[0].count(">") < quotes:
                return place
            line = line[quoted.end() :]
        ends = _FENCE_ENDS.match(line)
        if ends is not None and ends[2].startswith(marks) and len(ends[1]) <= deepest:
            return place + 1
    return len(lines) if quotes else None


def _behind_hidden(lines: list[str], place: int, at: int) -> tuple[int, int]:
    """The line, and the place in it, behind what hides its text and begins in lines[place] at `at`,
    and behind the next that begins there: this place where nothing hides. It does not where its
    quotation ends, or the next one of its name begins, before its end tag."""
    depth = lines[place][:at].count(">")
    while (hides := _HIDES.match(lines[place], at)) is not None:
        name, end = hides[1].lower(), None
        for line in range(place, len(lines)):
            quoted = _QUOTES.match(lines[line]) if depth else None
            if line > place and depth > (quoted[0].count(">") if quoted else 0):
                break
            marks = _HIDES_TO.finditer(lines[line], hides.end() if line == place else 0)
            if (end := next((m for m in marks if m[2].lower() == name), None)) is not None:
                break
        if end is None or not end[1]:
            break
        place, at = line, end.end()
    return place, at


def _is_under_head(line: str) -> bool:
    quoted = _QUOTES.match(line)
    return _UNDER_HEAD.match(line, quoted.end() if quoted else 0) is not None


def _markdown_blocks(lines: list[str]) -> Iterator[str]:
    """Lines of prose; an empty one ends a paragraph."""
    blank, listed, code, place, table = True, False, False, -1, False
    unclosed = dict(_UNCLOSED)
    inside, item = False, -1  # a paragraph; the indent of the item that it is of
    depth, rest = 0, -1  # of the quotations; the line of which hidden text has been taken
    while (place := place + 1) < len(lines):
        line, quotes, outside = lines[place], "", depth
        if (quoted := _QUOTES.match(line)) is not None and (listed or len(quoted[1]) < 4):
            quotes = quoted[0]
        line, depth = line[len(quotes) :], quotes.count(">")
        inside = inside and depth == outside
        if line.strip() == _COMMENT:
            inside = False
            yield ""
            continue
        if (opens := _FENCE.match(line)) is not None and not (depth or unclosed[opens[3][0]]):
            opens = None
        if opens is not None and (listed or opens[2] or len(opens[1]) < 4):
            deepest = 3 + (len(opens[1] + opens[2]) if listed or opens[2] else 0)
            end = _end_as_begun(
                opens[3],
                place + 1,
                _NAMED.match(line, opens.end()) is not None,
                unclosed,
                partial(_end_of_fence, lines, deepest, depth),
                lambda at, end: lines[at:end],
            )
            if end is not None:
                if opens[2]:
                    listed, item = True, len(opens[1])
                place = end - 1
                yield ""
                continue
        if place != rest:
            rest, at = _behind_hidden(lines, place, len(quotes))
            if at > len(quotes) or rest > place:  # what stands behind it there is the next line
                place, lines[rest] = rest - 1, lines[rest][at:]
                continue
        code = bool(line.strip()) and line.startswith(("    ", "\t")) and (blank or code)
        if code and not listed:
            continue
        blank, indent = not line.strip(), len(line) - len(line.lstrip())
        if (bullet := _BULLET.match(line)) is not None and (
            bullet[1] in (None, "1.", "1)") or not inside or indent <= item
        ):
            line, listed, item = line[bullet.end() :], True, indent
            yield ""
        elif not (blank or quotes[:1].isspace() or line[0].isspace()):
            holds_prose = _HOLDS_PROSE.match(line) is not None
            if holds_prose or not inside or _HEADING.match(line) or _RULE.match(line):
                listed, item = holds_prose, -1  # else the item's paragraph goes on
        inside = False
        heading = _HEADING.match(line)
        table = "|" in line and (table or any(map(_is_under_head, lines[place : place + 2])))
        if (footnote := _FOOTNOTE.match(line)) is not None:
            inside = True
            yield from ("", line[footnote.end() :])
        elif blank or table or _RULE.match(line) or _ADDRESS.match(line):
            yield ""
        elif heading:
            yield from ("", re.sub(r"(?:^|\s)#+\s*$", "", line[heading.end() :]), "")
        else:
            inside = True
            yield line


_PROSE_DIRECTIVES = (
    "note warning tip important hint caution danger error attention admonition seealso topic "
    "sidebar epigraph highlights pull-quote compound line-block centered glossary "
    "versionadded versionchanged deprecated rubric container"
).split()
_DIRECTIVE = re.compile(r"(\s*)\.\.(?:\s+([\w:-]+)::\s*(.*)|\s.*|)$")
_OPTION = re.compile(r"\s*:[\w-]+:(?=\s|$)")  # of a directive; no role, as :func:`open`
_REST_NOTE = re.compile(
    r"\s*\.\.\s+\[(?:\d+|[#*]|#?\w[\w.:+-]*)\](?:\s+|$)"
)  # footnotes, citations
_FIELD = re.compile(r"\s*:[^:`]{1,50}:(?=\s|$)")
_GRID = re.compile(r"\s*\+(?:[-=]+\+)++\s*$")
_ADORNED = re.compile(r"\s*([!-/:-@\[-`{-~])\1{2,}+\s*$")
_BORDER = re.compile(r"\s*={2,}(?:\s+={2,})++\s*$")
_SPANS = re.compile(r"\s*-{2,}(?:\s+-{2,})*+\s*$")  # of a simple table's columns, below their text
_REST: list[_Rule] = [
    (re.compile(r"\[[^\[\]]{1,50}\]_"), ""),  # footnotes
    (re.compile(r"(?::[\w+.:-]{1,50}:)?`([^`]{1,500}?)(?: <[^`]{0,500}>)?`_{0,2}"), r"\1"),
    (re.compile(r"(?<![\w|])\|([^|\s][^|]{0,50})\|_{0,2}(?![\w|])"), r"\1"),  # no min|max|sum
    (re.compile(r"(?<!\w)([^\W_]{1,50}(?:[-_.:+][^\W_]{1,50}){0,9})__?(?!\w)"), r"\1"),  # links
    (re.compile(r"^:([^:`]{1,50}):(?=\s|$)"), r"\1:"),
    (re.compile("`+"), ""),
    _EMPHASIS[0],
]
_REST_AS_IS = re.compile(r"\\(?:\s|(?P<mark>.))|``(?P<code>[^`]{1,500})``")


def rst_paragraphs(text: str) -> list[str]:
    """Paragraphs, list items, headings and notes, without other directives, comments, code and
    tables."""
    return _joined(_rst_blocks(text.expandtabs().split("\n")), _REST, _REST_AS_IS)


def _rst_blocks(lines: list[str]) -> Iterator[str]:
    """As `_markdown_blocks`."""
    skipped = -1  # what is indented by more is left out; below 0: nothing
    options, grid, target = False, False, False
    example = -1  # the indent of a doctest, up to an empty line or one at less; below 0: none
    inside, item, field = False, -1, False  # as there; of a field, before its listing
    table = 0  # the place behind one of borders
    for place, line in enumerate(lines):
        indent = len(line) - len(line.lstrip())
        if not line.strip() or place < table:
            options, example, grid, inside = False, -1, False, False
            if target:  # an address in lines below its name
                skipped, target = -1, False
            yield ""
            continue
        if field and indent > skipped:  # how deep its prose stands nothing tells
            skipped = indent - 1
        field = False
        if 0 <= skipped < indent or (options and _OPTION.match(line)):
            continue
        skipped, options = -1, False
        if not 0 <= example <= indent:
            example = indent if line.lstrip().startswith(">>> ") else -1
        if border := _BORDER.match(line) is not None:
            table = _behind_table(lines, place)
        grid = _GRID.match(line) is not None or (grid and line.lstrip()[0] in "+|")
        if example >= 0 or border or grid or _ADORNED.match(line):
            inside = False
            yield ""
            continue
        if _FIELD.match(line):
            yield ""
        if (note := _REST_NOTE.match(line)) is not None:
            yield ""
            line = line[note.end() :]
        elif (directive := _DIRECTIVE.match(line)) is not None:
            yield ""
            if directive[2] and directive[2].lower() in _PROSE_DIRECTIVES:
                options, line = True, directive[3]
            else:  # of an empty comment nothing is left out
                target = line.lstrip().startswith(".. _")
                empty = line.strip() == ".." and not "".join(lines[place + 1 : place + 2]).strip()
                skipped, line = -1 if empty else indent, ""
        elif (bullet := _BULLET.match(line)) is not None and (
            not bullet[1] or not inside or indent <= item
        ):
            yield ""
            line, indent, item = line[bullet.end() :], bullet.end(), indent
        else:
            item = item if indent > item else -1
            if line.lstrip().startswith("| ") or line.strip() == "|":  # verses and the like
                line = line.lstrip()[1:]
        if line.rstrip().endswith("::"):
            field = _FIELD.match(line) is not None
            skipped, line = indent, line.rstrip().removesuffix("::").rstrip() + ":"
        inside = bool(line.strip(" :"))
        yield line.rstrip() if inside else ""


def _behind_table(lines: list[str], top: int) -> int:
    """The place behind a simple table, whose top border stands at `top`: behind its second border
    below that, or one with an empty line behind it. Where text that is no row stands before it, or
    the page ends, its bottom is lost, or the text begins directly below it: what follows an empty
    line is none of it, nor is that text, nor is anything where no border came at all."""
    margins = [gap.span() for gap in re.finditer(r"(?<=\S)\s+(?=\S)", lines[top])]
    borders, empty = 0, 0
    for place in range(top + 1, len(lines)):
        line, below = lines[place], "".join(lines[place + 1 : place + 2])
        if _BORDER.match(line):
            borders, empty = borders + 1, 0
            if borders == 2 or not below.strip():
                return place + 1
        elif not line.strip():
            empty = empty or place
        elif (empty or borders) and not (_SPANS.match(line) or _SPANS.match(below)):
            reached = margins[: bisect.bisect_left(margins, (len(line), 0))]
            if any(line[start:end].strip() for start, end in reached):
                empty = empty or place
                break
    return empty if empty and borders else top + 1


def _joined(lines: Iterator[str], rules: list[_Rule], as_is: re.Pattern[str]) -> list[str]:
    """Paragraphs of the lines up to each empty one, with the marks of `rules` taken off, but of
    what is found `as_is`."""
    paragraphs: list[str] = []
    held: list[str] = []

    def end_paragraph() -> None:
        text = squeeze(" ".join(held))  # the rules look from each mark through the spaces after it
        held.clear()
        kept: list[str] = []

        def keep(found: re.Match[str]) -> str:
            kept.append(found["mark"] or found["code"] or "")
            return f"\0{len(kept) - 1}\0"

        text = as_is.sub(keep, text.replace("\0", "").replace(_COMMENT, ""))
        for pattern, put in rules:
            text = pattern.sub(put, text)
        text = re.sub("\0(\\d+)\0", lambda place: kept[int(place[1])], unescape(text))
        if any(c.isalnum() for c in text):
            paragraphs.append(cleaned(text))

    for line in lines:
        if line.strip():
            held.append(line.strip())
        elif held:
            end_paragraph()
    if held:
        end_paragraph()
    return paragraphs


# By the ending of a file's name.
FORMATS: dict[str, Callable[[str], list[str]]] = {
    **dict.fromkeys((".html", ".htm", ".xhtml"), html_paragraphs),
    **dict.fromkeys((".md", ".markdown"), markdown_paragraphs),
    ".rst": rst_paragraphs,
}
