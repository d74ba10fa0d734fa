"""Books: a file each, or rows of sentences whose book boundaries are lost."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import numpy as np

from data_pipeline.corpus.compressed import Broken
from data_pipeline.corpus.documents import Document, Dropped, clean_text, squeeze
from data_pipeline.corpus.markup import FORMATS
from data_pipeline.corpus.parts import Input, Record, Row, suffix_of
from data_pipeline.corpus.web_pages import html_encoding, html_paragraphs

_MOST_SENTENCES_A_BOOK = 20_000


def read_book(source: Input, record: Record) -> Document | Dropped:
    """A text file: one document. Markup is told by the ending of its name."""
    name = str(record.at)
    markup = FORMATS.get(suffix_of(record.file))
    encoding = html_encoding(record.data) if markup is html_paragraphs else "UTF-8"
    text = clean_text(source.decode(record.data, name, encoding))
    if markup:
        found = [p for p in cut_gutenberg("\n\n".join(markup(text))).split("\n") if p.strip()]
    else:
        found = book_paragraphs(cut_gutenberg(text))
    least = source.min_paragraph_words
    paragraphs = [p for p in found if p.count(" ") + 1 >= least]
    return Document(name, paragraphs) if paragraphs else Dropped("empty", name)


def read_crawled(source: Input, record: Record) -> Document | Dropped:
    """A book as a crawler saved it, which may be an error page."""
    text = clean_text(record.data[:2000].decode("utf-8", "replace"))[:500].lstrip()
    if text.lower().startswith(("<!doctype", "<html", "<?xml")):
        return Dropped("not a text (HTML)", str(record.at), text[:200])
    return read_book(source, record)


_BEGINS = r"\*{2,} ?START OF (?:THE|THIS) PROJECT GUTENBERG|\*END[ \*]*THE SMALL PRINT"
_GUTENBERG_START = re.compile(
    rf"^[ \t]*(?:{_BEGINS}|\*{{3}} ?START:).*$", re.MULTILINE | re.IGNORECASE
)
_GUTENBERG_END = re.compile(
    r"^[ \t]*(?:\*{2,} ?END OF (?:THE|THIS) PROJECT GUTENBERG|"
    r"(?:THE )?END OF (?:THE |THIS )?PROJECT GUTENBERG(?=.{0,200}$)|"
    r"(?:\*{3} ?)?START: FULL LICENSE|THE FULL PROJECT GUTENBERG\S{0,5} LICENSE$|"
    r"UPDATED EDITIONS WILL REPLACE THE PREVIOUS ONE).*$",
    re.MULTILINE | re.IGNORECASE,
)
_NEXT_GUTENBERG = re.compile(rf"^[ \t]*(?:{_BEGINS})", re.MULTILINE | re.IGNORECASE)
_HEADER = 60_000  # characters, in which the text begins
# Within their header and licence they name themselves each 2,000 characters or sooner.
_NAMED, _UNNAMED = re.compile(r"gutenberg|\be-?texts?\b", re.IGNORECASE), 3000
# Words of theirs; a page about Gutenberg may show the lines that stand around a book.
_TERMS = re.compile(
    r"project gutenberg(?:.s)? e-?(?:book|text) of|for the use of anyone|restrictions whatsoever|"
    r"give it away|\be-?(?:book|text) ?#\d|small ?print|gutenberg(?:-tm|™|\(tm\))|"
    r"electronic works|release date:|character set encoding",
    re.IGNORECASE,
)
# A paragraph of up to ten lines, to a blank one: a longer one may be the book.
_PRODUCED_BY = re.compile(
    r"\A\s*(?:(?:E-?text |This etext was )?(?:produced|prepared|transcribed) by|"
    r"\[?Transcriber.s note)[^\n]{0,1000}(?:\n[^\S\n]*\S[^\n]{0,100}(?=\n)){0,9}\n[^\S\n]*\n",
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(r"[.!?:;][\"'”’)\]_*]*$")
_HEADING = re.compile(
    r"(?:chapter|book|part|volume|canto|act|scene|section|letter)\s+[\divxlc]+\b|[IVXLC]+\.?$|\d+\.?$",
    re.IGNORECASE,
)


def cut_gutenberg(text: str) -> str:
    """The text without Project Gutenberg's header and licence, of each book in it; what else stands
    around them is kept, as where a book was joined with another text."""
    if re.search("gutenberg", text, re.IGNORECASE) is None:
        return text
    kept: list[str] = []
    at: int | None = 0
    ends = _GUTENBERG_END.finditer(text, max(0, len(text) - _HEADER))
    last_end = max((m.start() for m in ends), default=0)
    while at is not None:
        start = _GUTENBERG_START.search(text, at, at + _HEADER)
        unled = min(len(text) // 4, at + _HEADER)  # where no line begins the first book
        end = _GUTENBERG_END.search(text, start.end() if start else unled)
        if start is None and end is None:
            return text
        stop = end.start() if end else len(text)
        starts = list(_GUTENBERG_START.finditer(text, at, min(at + _HEADER, stop)))
        begin = starts[-1].end() if starts else at
        kept += _of_others(text[at:begin])
        kept.append(_PRODUCED_BY.sub("", text[begin:stop], count=1))
        following = _NEXT_GUTENBERG.finditer(text, end.end()) if end else iter(())
        at = next((m.start() for m in following if _begins_a_book(text, m, last_end)), None)
        kept += _of_others(text[end.end() if end else stop : at])
    return "\n\n".join(kept)


def _of_others(cut: str) -> Iterator[str]:
    """The stretches of what was cut that are not Gutenberg's: all of what holds none of its terms,
    else those between two of its names, without the lines of these unless they are long."""
    if _TERMS.search(cut) is None:
        if rest := _GUTENBERG_START.sub("", cut).strip():
            yield rest
        return
    at = 0
    for here in (*(m.start() for m in _NAMED.finditer(cut)), len(cut)):
        if here - at > _UNNAMED:
            begin = max(at, cut.find("\n", at, at + _UNNAMED)) if at else 0
            end = cut.rfind("\n", here - _UNNAMED, here) if here < len(cut) else here
            yield cut[begin : end if end >= 0 else here]
        at = here


def _begins_a_book(text: str, mark: re.Match[str], last_end: int) -> bool:
    """Not so of small print that stands behind the last book, with a notice or nothing after it."""
    at = mark.end()
    return "SMALL PRINT" not in mark[0].upper() or len(text) - at > _HEADER or last_end >= at


def book_paragraphs(text: str) -> list[str]:
    """Paragraphs of a plain-text book.

    Texts wrapped at a column (most lines near the longest, none over 120) are unwrapped: a
    paragraph ends at a blank line, before an indented line, after a short line that ends a
    sentence, and around headings. In other texts every line is a paragraph already.
    """
    lines = text.split("\n")
    widths = np.array([len(line) for line in lines if line.strip()])
    if not len(widths):
        return []
    width = int(np.percentile(widths, 95))
    wrapped = len(widths) >= 20 and 40 <= width <= 120 and np.mean(widths > 0.6 * width) > 0.5
    if not wrapped:
        return [squeeze(line) for line in lines if line.strip()]
    paragraphs: list[str] = []
    current: list[str] = []

    def end_paragraph() -> None:
        if current:
            paragraphs.append(squeeze(" ".join(current)))
            current.clear()

    for line in lines:
        stripped = line.strip()
        if not stripped:
            end_paragraph()
            continue
        heading = len(stripped) < 0.7 * width and (
            stripped.isupper() or _HEADING.match(stripped) is not None
        )
        if heading or line[:1] in " \t":
            end_paragraph()
        # A word broken at the line's end ("some-" / "thing") keeps its hyphen: it may be its own.
        current.append(stripped)
        if heading or (len(line) < 0.75 * width and _SENTENCE_END.search(stripped)):
            end_paragraph()
    end_paragraph()
    return paragraphs


_FRONT_MATTER = re.compile(
    r"\bisbn\b|all rights reserved|copyright (?:©|\(c\)|\d{4})|©\s*\d{4}|smashwords edition|"
    r"this (?:book|novel|story) is a work of fiction|published by\b"
)
_FIRST_CHAPTER = re.compile(r"(?:chapter (?:one|1|i)|prologue)\b[\s.:]*\S{0,30}$")
_THE_END = re.compile(r"(?:the end|~? ?fin ?~?|end of book \w+)[\s.!*~]*$")


class BookBoundaries:
    """Infers where books begin in a list of lower-cased sentences. Rules, in this order:

    1. A row of front matter (ISBN, copyright, "all rights reserved", ...) begins a book, unless
       one began within the last 100 rows (front matter is several rows).
    2. After "the end" the next row begins a book.
    3. "chapter one" or "prologue" as a row begins a book, unless one began within the last 100
       rows (it follows front matter) .
    4. A blank row is a boundary (google-research/bert's own input format has them).
    5. A run of 20,000 rows without any sign is cut.
    """

    def __init__(self) -> None:
        self.since = 0
        self._ended = False

    def begins(self, row: str) -> str:
        """The sign by which a new book begins with this row, empty if none does. Call once for each
        row, in order."""
        sign = ""
        text = row.strip().lower()
        if self.since:
            if not text:
                sign = "blank row"
            elif self._ended:
                sign = "the end"
            elif self.since > 100 and len(text) < 300 and _FRONT_MATTER.search(text):
                sign = "front matter"
            elif self.since > 100 and _FIRST_CHAPTER.match(text):
                sign = "first chapter"
            elif self.since >= _MOST_SENTENCES_A_BOOK:
                sign = "length"
        self._ended = len(text) < 30 and _THE_END.match(text) is not None
        self.since = (0 if sign else self.since) + bool(text)
        return sign


def read_rows(source: Input, rows: Iterable[Row]) -> Iterator[Document]:
    """Rows of sentences as books. Nulls of a table are blank rows."""
    boundaries = BookBoundaries()
    first, paragraphs = 0, []
    nulls, first_null = 0, 0
    broken: list[Broken] = []

    def readable() -> Iterator[Row]:
        try:
            yield from rows
        except Broken as error:  # the book before it is given first
            broken.append(error)

    for row in readable():
        if row.text is None:
            first_null = first_null if nulls else row.at
            nulls += 1
        text = row.text if isinstance(row.text, str) else ""
        if boundaries.begins(text) and paragraphs:
            yield Document(f"{source.name}:{first}", paragraphs)
            paragraphs = []
        text = squeeze(clean_text(text))
        if text:
            if not paragraphs:
                first = row.at
            paragraphs.append(text)
    if paragraphs:
        yield Document(f"{source.name}:{first}", paragraphs)
    if nulls:
        source.report(f"row {first_null}", f"{nulls:,} rows without text (null), as blank ones")
    if broken:
        raise broken[0]
