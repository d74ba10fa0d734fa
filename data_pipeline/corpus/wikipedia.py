"""Articles of Wikipedia: from the pages of a dump, and from WikiExtractor's output."""

from __future__ import annotations

import functools
import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Container
from xml.parsers import expat

from core.errors import short
from data_pipeline.corpus import wikitext
from data_pipeline.corpus.documents import Document, Dropped, clean_text, unescape
from data_pipeline.corpus.parts import (
    DOC_LINE,
    Input,
    Record,
    head_of,
    is_stamp,
    namespaces,
    newest_revision,
    page_title,
    stands_twice,
)

_FORMULA = re.compile(r"\b(?:formula|codice)_\d+\b")


def read_page(source: Input, record: Record) -> Document | Dropped | None:
    """A page of a dump. Only articles with prose are kept."""
    try:
        page = _element(record.data)
    except expat.ExpatError as error:
        source.report(page_title(record.data), f"bad XML: {error}")
        return None
    if any(len(page.findall(name)) > 1 for name in ("title", "id")):
        source.report(page_title(record.data), "two titles or ids: two pages in one")
        return None
    title = page.findtext("title") or ""
    number = page.findtext("id") or title
    # A full-history dump holds all revisions of a page.
    revisions = page.findall("revision")
    stamps = [revision.findtext("timestamp", "").strip() for revision in revisions]
    newest = revisions[newest_revision(stamps)] if revisions else ElementTree.Element("revision")
    texts = newest.findall("text")
    if len(stamps) > 1 and not all(map(is_stamp, stamps)):
        source.report(page_title(record.data), "a damaged timestamp: the newest of the others")
    if len(texts) > 1:
        source.report(page_title(record.data), f"{len(texts)} texts in a revision")
        return None
    text = "".join(texts[0].itertext()) if texts else ""
    if (page.findtext("ns") or _namespace(source.file, title)) != "0":
        return Dropped("other namespace", number, title)
    if (newest.findtext("model") or "wikitext").strip().lower() != "wikitext":
        return Dropped("not wikitext", number, title)
    if page.find("redirect") is not None or text[:20].lstrip().lower().startswith("#redirect"):
        return Dropped("redirect", number, title)
    if wikitext.is_disambiguation(title, text):
        return Dropped("disambiguation", number, title)
    least = source.min_paragraph_words
    paragraphs = [
        p
        for p in wikitext.passages(clean_text(text), _hidden(source.file))
        if p.count(" ") + 1 >= least
    ]
    return Document(number, paragraphs) if paragraphs else Dropped("no prose", number, title)


def _element(data: bytes) -> ElementTree.Element:
    """Without ElementTree's own parser, which joins the text anew at each comment, and gives every
    name the whole of its namespace: both cost the square of a hostile page."""
    tree, parser = ElementTree.TreeBuilder(), expat.ParserCreate()

    def start(name: str, attributes: dict[str, str]) -> None:
        if ":" in name:
            raise expat.ExpatError(f"an element of a namespace: {short(name)}")
        tree.start(name, attributes)

    parser.buffer_text = True
    parser.StartElementHandler, parser.EndElementHandler = start, tree.end
    parser.CharacterDataHandler = tree.data
    parser.Parse(data, True)
    return tree.close()


# Of a dump whose head names none.
_ENGLISH = frozenset(
    f"{name}{talk}"
    for name in (
        "Talk User Wikipedia Project File Image MediaWiki Template Help Category Portal Book Draft "
        "TimedText Module Special Media"
    ).split()
    for talk in ("", " talk")
)
_FILE, _CATEGORY = "6", "14"


def _namespace(file: str, title: str) -> str:
    """Of a page that does not say (export formats before 0.6): the prefix of its title tells."""
    prefix, colon, _ = title.partition(":")
    return "1" if colon and prefix in _prefixes(file) else "0"


def _prefixes(file: str) -> Container[str]:
    """Of the titles of pages that are no articles."""
    return _namespaces(file) or _ENGLISH


@functools.cache
def _hidden(file: str) -> frozenset[str]:
    """The namespaces to which links show no words, in the wiki's language too."""
    own = (name for name, key in _namespaces(file).items() if key in (_FILE, _CATEGORY))
    return wikitext.NOT_SHOWN.union(clean_text(name).lower() for name in own)


@functools.cache
def _namespaces(file: str) -> dict[str, str]:
    """The names of namespaces and their keys."""
    return namespaces(head_of(file) or b"")[0]


def read_extracted(source: Input, record: Record) -> Document | Dropped | None:
    """A document of WikiExtractor, as <doc> or as JSON."""
    head = DOC_LINE.match(record.data)
    if head is not None:
        number, title = (part.decode("utf-8", "replace") for part in (head[1], head[2] or b""))
        text = source.decode(record.data[head.end() :], f"document {number}")
    else:
        try:
            row = json.loads(record.data)
            number, title, text = str(row["id"]), str(row.get("title", "")), row["text"]
            if not isinstance(text, str):
                raise TypeError("its text is no string")
            if stands_twice(record.data, "text"):
                raise ValueError("its text stands there twice")
            source.tell_left_out(text, f"document {number}")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            what = f"not a JSON article ({type(error).__name__}: {error})"
            source.report(f"byte {record.at}", what)
            return None
    return _extracted(source, number, title, text)


def _extracted(source: Input, number: str, title: str, text: str) -> Document | Dropped:
    lines = clean_text(text).strip().split("\n")
    if lines[0].strip() == unescape(title):
        lines = lines[1:]
    least = source.min_paragraph_words
    paragraphs = []
    for line in lines:
        if line.count(" ") + 1 < least:
            continue
        if "formula_" in line or "codice_" in line:
            line = _FORMULA.sub("", line)
        line = wikitext.clean_line(line)
        if line and line.count(" ") + 1 >= least:
            paragraphs.append(line)
    if not paragraphs:
        return Dropped("no prose", number, title)
    if len(paragraphs) <= 3 and paragraphs[0].endswith(("refer to:", "refers to:", "refer to")):
        return Dropped("disambiguation", number, title)
    return Document(number, paragraphs)
