"""What a file looks like by its first bytes, for the line that says a source is of another kind."""

from __future__ import annotations

import contextlib
import csv
import json
import re
from typing import NamedTuple

from data_pipeline.corpus.archives import is_tar
from data_pipeline.corpus.compressed import Broken, chunks
from data_pipeline.corpus.markup import FORMATS
from data_pipeline.corpus.parts import BYTE_ORDER_MARK, NO_TEXTS, kind_of_no_text, suffix_of

_HEAD = 1 << 16


class Look(NamedTuple):
    """what: in words. kinds: of the sources that read it; None where that cannot be told."""

    what: str
    kinds: tuple[str, ...] | None
    remedy: str = ""

    def __str__(self) -> str:
        remedy = self.remedy or (f"kind {self.kinds[0]}" if self.kinds else "")
        return f"looks like {self.what}" + (f" ({remedy})" if remedy else "")


_MAGIC = {
    b"PAR1": Look("parquet", ("parquet", "sentences")),
    b"\xd0\xcf\x11\xe0": Look("an old Office file", (), "save it as text or csv"),
    b"ARROW1": Look("an Arrow file", (), "save it as parquet"),
    b"\xff\xfe": Look("UTF-16 text", (), "save it as UTF-8"),
    b"\xfe\xff": Look("UTF-16 text", (), "save it as UTF-8"),
}
_REMEDIES = (  # of NO_TEXTS
    "unpack it, or save it as text or csv",
    "save it as text",
    "take its text out first",
    "take its text out first",
)
_MARKS = {
    r"<mediawiki\b": Look("a Wikipedia dump", ("wikipedia",)),
    r"<doc id=": Look("WikiExtractor's output", ("wikiextractor",)),
    r"<!doctype html|<html\b|<head>|<body\b": Look("HTML", ("crawl",), "kind text reads .html"),
    r"<\?xml|<\w[^<>]*\sxmlns": Look(
        "XML", ("wikipedia", "wikiextractor"), "take its text out first"
    ),
    # A line of text may begin so, as <s> and <unk> do.
    r"<": Look("XML", None, "if it is, take its text out first"),
}
_ARRAY = re.compile(r"\[\s*(?=[\[{\"])")
_PLAIN = ("books", "sentences", "text", "crawl")


def looks_like(file: str) -> Look:
    """By the first bytes, unpacked, and where a text is one kind's by its name, that."""
    if is_tar(file):
        return Look("a tar", ("text", "books", "crawl"))
    try:
        with contextlib.closing(chunks(file)) as pieces:
            head = next(pieces, b"")[:_HEAD]
    except (Broken, OSError):
        return Look("a damaged file", None)
    for magic, look in _MAGIC.items():
        if head.startswith(magic):
            return look
    if kind := kind_of_no_text(head):
        return Look(kind, (), dict(zip(NO_TEXTS, _REMEDIES, strict=True))[kind])
    text = head.removeprefix(BYTE_ORDER_MARK).decode("utf-8", "replace").lstrip()
    if text.count("\0") + text.count("\ufffd") > len(text) / 10:
        return Look("binary data", None)
    suffix = suffix_of(file)
    for mark, look in _MARKS.items():
        if re.match(mark, text, re.IGNORECASE):
            return Look("markup", None) if suffix in FORMATS else look
    if (array := _ARRAY.match(text)) is not None:
        with contextlib.suppress(ValueError, RecursionError):
            _, end = json.JSONDecoder().raw_decode(text, array.end())
            if text[end:].lstrip()[:1] in (",", "]"):
                return Look("a JSON array", (), "write one object a line, for kind jsonl")
    lines = text.split("\n")[:10]
    lines = lines[:-1] if len(lines) > 1 else lines  # the last may be cut
    if text.startswith("{"):
        with contextlib.suppress(ValueError, RecursionError):
            json.loads(lines[0])
            return Look("JSON lines", ("jsonl", "wikiextractor"))
        return Look("JSON over several lines", None, "kind jsonl wants one object a line")
    for kind, delimiter in (("tsv", "\t"), ("csv", ","), ("csv", ";")):
        with contextlib.suppress(csv.Error):
            widths = {len(row) for row in csv.reader(lines, delimiter=delimiter) if row}
            if len(lines) > 1 and len(widths) == 1 and max(widths) > 1:
                named = suffix in (".csv", ".tsv", ".tab")
                others = () if named else (*_PLAIN, "wikiextractor")
                return Look(kind.upper(), (kind, "csv", "tsv", *others))
    return Look("plain text", None)
