"""Sentence segmentation: one paragraph in, its sentences out.

`punkt` (the default) decides exactly as Punkt with its English model, the segmenter of the known
BERT reproductions. Most ends of sentences are not in doubt (a plain word that is no abbreviation, a
full stop, a capital letter) and are decided here; only what lies between goes to the library, so
the answer is the library's own at a multiple of its speed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Literal

_NUMBER = re.compile("[0-9][0-9,]*")
_CAPITALISED = re.compile("[A-Z][A-Za-z]*")

SentenceSplitter = Literal["punkt", "sentencex", "lines"]
_AT_ONCE = 1 << 14  # characters for sentencex, which takes the square of them where all are quotes


def slices(text: str, most: int) -> Iterator[str]:
    """The text, cut between words where it is longer than `most` characters."""
    start = 0
    while len(text) - start > most:
        end = text.rfind(" ", start + 1, start + most)
        end = end if end > 0 else start + most
        yield text[start:end]
        start = end
    yield text[start:] if start else text


def splitter(name: SentenceSplitter) -> Callable[[str], list[str]]:
    """The function paragraph -> sentences, stripped, none empty."""
    if name == "punkt":
        return Punkt()
    if name == "sentencex":
        import sentencex

        def by_sentencex(paragraph: str) -> list[str]:
            pieces = slices(paragraph, _AT_ONCE)
            found = (s.strip() for piece in pieces for s in sentencex.segment("en", piece))
            return [sentence for sentence in found if sentence]

        return by_sentencex
    return lambda paragraph: [line for raw in paragraph.split("\n") if (line := raw.strip())]


class Punkt:
    """`Punkt()(paragraph)` equals `punkt.tokenizer_for("english").tokenize(paragraph)`.

    The paragraph's words are parted by single spaces, as `documents.squeeze` leaves them.
    """

    def __init__(self) -> None:
        import punkt

        self._library = punkt.tokenizer_for("english")
        params = self._library.params
        doubtful = {*params.abbrev_types, *params.numeric_abbrev_types}
        doubtful.update(first for first, _ in params.collocations)
        doubtful.update([word.rsplit("-", 1)[-1] for word in doubtful])
        self._doubtful = frozenset(doubtful)
        after = re.escape(self._library.rules.non_word_chars)
        self._candidate = re.compile(rf"[.?!](?=[\s{after}?!])")
        # A closing quote or bracket belongs to the sentence it closes. What follows must not be
        # another closer: those are moved, too.
        self._plain = re.compile(
            r"[.?!]([\"')\]]?)\s+(?=[A-Z][A-Za-z ,']|[\"'(\[][A-Za-z0-9]|[a-z0-9“‘])"
        )
        self._after_number = {
            re.match("[a-z]*", second)[0]  # type: ignore[index]
            for first, second in params.collocations
            if first == "##number##"
        }

    def _ends_sentence(self, word: str, text: str, following: int) -> bool:
        """Whether the mark between `word` and `text[following:]` ends a sentence beyond doubt.

        After a bracket or quote it does (unless a candidate stands inside); after a plain word
        only abbreviations and collocations join; after a number, a word in lower case, too.
        """
        if word[-1:] in (")", "]", '"'):
            return not any(mark in word for mark in ".?!")
        word = word.lstrip("(\"'[")
        if len(word) > 1 and word.isascii():
            if word.isalpha():
                return word.lower() not in self._doubtful
            if _NUMBER.fullmatch(word) and (capital := _CAPITALISED.match(text, following)):
                return capital[0].lower() not in self._after_number
        return False

    def __call__(self, paragraph: str) -> list[str]:
        sentences: list[str] = []
        start, doubt = 0, False
        for candidate in self._candidate.finditer(paragraph):
            at = candidate.start()
            if at < start:
                continue
            plain = self._plain.match(paragraph, at)
            if plain:
                word = paragraph[max(start, paragraph.rfind(" ", start, at) + 1) : at]
                if self._ends_sentence(word, paragraph, plain.end()):
                    end = plain.end(1)
                    if doubt:
                        sentences += self._library.tokenize(paragraph[start:end])
                    else:
                        sentences.append(paragraph[start:end])
                    start, doubt = plain.end(), False
                    continue
            doubt = True
        if doubt:
            sentences += self._library.tokenize(paragraph[start:])
        elif start < len(paragraph):
            sentences.append(paragraph[start:].rstrip())
        return [sentence for sentence in sentences if sentence]
