"""Documents: what a source yields, how their text is cleaned, why one is dropped, when two are one.

A text is a list of paragraphs; a paragraph is one line of prose.  Filters return the reason for
which a document is dropped, or None.
"""

from __future__ import annotations

import hashlib
import html
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from pydantic import Field

from configs.load import Config


@dataclass
class Document:
    """One document of a source. `id` is unique within the source; `paragraphs` keep their order.

    Words of a paragraph are parted by single spaces (`squeeze`).
    """

    id: str
    paragraphs: list[str]

    @property
    def words(self) -> int:
        return sum(paragraph.count(" ") + 1 for paragraph in self.paragraphs)


@dataclass(frozen=True)
class Dropped:
    """A document that is left out, why, and the beginning of its text."""

    reason: str
    id: str
    sample: str = ""


@dataclass(frozen=True)
class Problem:
    """Broken input. The job goes on after it."""

    file: str
    place: str
    what: str


class FilterConfig(Config):
    """Filters on whole documents. All are off by default: BERT had none."""

    min_words: int = Field(0, ge=0, description="drop documents of fewer words; 0: off")
    max_symbol_ratio: float = Field(
        1.0,
        ge=0,
        le=1,
        description="drop documents in which a larger share of the characters is neither letter, "
        "digit nor space; 1: off",
    )
    min_english_ratio: float = Field(
        0.0,
        ge=0,
        le=1,
        description="drop documents in which a smaller share of the words is among the 50 "
        "commonest English function words (English prose: .3 to .5); 0: off",
    )

    def reason(self, document: Document) -> str | None:
        """Why the document is to be dropped; None keeps it."""
        if self.min_words and document.words < self.min_words:
            return "too short"
        if self.max_symbol_ratio < 1:
            text = "".join(document.paragraphs)
            symbols = sum(not (c.isalnum() or c.isspace()) for c in text)
            if symbols > self.max_symbol_ratio * max(1, len(text)):
                return "too many symbols"
        if self.min_english_ratio > 0:
            words = " ".join(document.paragraphs).lower().split()
            known = sum(word in _FUNCTION_WORDS for word in words)
            if known < self.min_english_ratio * max(1, len(words)):
                return "not English"
        return None


_FUNCTION_WORDS = frozenset(
    "the of and to in a is that for it as was with be by on not he his but at are this have from "
    "or had an they which one you were all her she there would their we him been has when who "
    "will no more if".split()
)

# Control and format characters: no glyph, and BERT's own cleaning deletes them anyway.
_INVISIBLE = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f\u00ad\u061c\u180e\u200b-\u200f\u202a-\u202e"
    "\u2060-\u2064\u2066-\u206f\ud800-\udfff\ufeff\ufff9-\ufffd\ufffe\uffff]"
)
# Of control characters those that part lines or pages, where they stand between two words.
_PARTS = "[\x0b\x0c\x1c-\x1f]"
_PARTING = re.compile(rf"{_PARTS}(?<=\S{_PARTS}){_PARTS}*(?=\S)")
_BREAKS = "\r\x85\u2028\u2029"
# No letter of any script has more. To put a run in order costs the square of its length. (The first
# of the class stands alone, as the engine looks for one character much faster.)
_MOST_MARKS = 30
_MANY_MARKS = re.compile(rf"[^\0-\u02ff\w\s][^\0-\u02ff\w\s]{{{_MOST_MARKS},}}")


def _without_more_marks(run: re.Match[str]) -> str:
    kept: list[str] = []
    marks = 0  # in a row
    for character in run[0]:
        marks = marks + 1 if unicodedata.category(character)[0] == "M" else 0
        if marks <= _MOST_MARKS:
            kept.append(character)
    return "".join(kept)


def clean_text(text: str) -> str:
    """Unicode NFC, line ends as \\n, no control or invisible characters. Keeps lines and spaces.
    Of over 30 combining marks on a letter the first 30 stay."""
    for mark in _BREAKS:
        if mark in text:
            text = text.replace("\r\n", "\n").replace(mark, "\n")
    # `isprintable` is many times faster than the expression, and most texts pass it.
    if "\ufffd" in text or not text.replace("\n", " ").isprintable():
        text = _PARTING.sub(" ", text)
        text = _INVISIBLE.sub("", text)  # first, as it stands between letters and marks
    if not text.isascii():
        text = _MANY_MARKS.sub(_without_more_marks, text)
        if not unicodedata.is_normalized("NFC", text):
            text = unicodedata.normalize("NFC", text)
    return text


_ENDLESS_NUMBER = re.compile(r"&#[0-9]{20,};?")


def unescape(text: str) -> str:
    """The characters of HTML's entities. Numbers that Python refuses to read are no character."""
    return html.unescape(_ENDLESS_NUMBER.sub("", text) if "&#" in text else text)


def squeeze(line: str) -> str:
    """Any run of white space becomes one space."""
    # Of all white space only the space is printable.
    if "  " not in line and line.isprintable():
        return line.strip(" ")
    return " ".join(line.split())


def cleaned(line: str) -> str:
    """A line in which entities were read: what they stand for is cleaned as all else was."""
    return squeeze(line if line.isascii() and line.isprintable() else clean_text(line))


def text_hash(paragraphs: Sequence[str]) -> bytes:
    """16 bytes, equal for texts that differ in case, white space and paragraph breaks only."""
    text = "".join(paragraphs)
    # Most paragraphs are ASCII, which is lowered many times faster. Only how a capital sigma is
    # lowered depends on what follows it, in the next paragraph even.
    text = text.lower() if "Σ" in text else "".join([p.lower() for p in paragraphs])
    text = text.replace(" ", "")
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def share(key: str) -> float:
    """A number in [0, 1) that depends on the text alone: the same now and when the corpus grows."""
    digest = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


MINHASH_PERMUTATIONS = 128
_SHINGLE_WORDS = 5
_AT_ONCE = 10_000  # shingles; each takes a number of every permutation
_MOST_UNLIKE = 256


def minhash(paragraphs: Sequence[str]) -> np.ndarray:
    """MinHash signature of the document's 5-word shingles, uint64 [128]."""
    import datasketch

    text = " ".join(paragraphs).lower()
    words = re.findall(r"\w+", text) or text.split()  # of signs alone
    last = max(1, len(words) - _SHINGLE_WORDS + 1)
    signature = datasketch.MinHash(MINHASH_PERMUTATIONS, seed=1, hashfunc=_hash32)
    for first in range(0, last, _AT_ONCE):
        places = range(first, min(first + _AT_ONCE, last))
        signature.update_batch({" ".join(words[i : i + _SHINGLE_WORDS]).encode() for i in places})
    return signature.hashvalues


def _hash32(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=4).digest(), "little")


def near_duplicates(signatures: np.ndarray, threshold: float) -> np.ndarray:
    """Which documents repeat an earlier one that is kept: bool [documents].

    `signatures` [documents, 128] in the order in which copies are preferred. Banded LSH as
    datasketch sets it for the threshold; a candidate counts when the signatures agree in at
    least `threshold` of their places (the estimate of the Jaccard similarity). Of the documents
    that share a band and are no copies of each other the first 256 are candidates for more.
    """
    from datasketch import MinHashLSH

    lsh = MinHashLSH(threshold=threshold, num_perm=signatures.shape[1])
    bands, rows = lsh.b, lsh.r
    dropped = np.zeros(len(signatures), bool)
    # By document its groups; a group lists those that are kept, since of many alike few are.
    groups: dict[int, list[list[int]]] = {}
    for band in range(bands):
        block = np.ascontiguousarray(signatures[:, band * rows : (band + 1) * rows])
        _, group = np.unique(block.view(f"V{block.itemsize * rows}").ravel(), return_inverse=True)
        order = np.argsort(group, kind="stable")
        cuts = np.flatnonzero(np.diff(group[order])) + 1
        for members in np.split(order, cuts):
            kept: list[int] = []
            for member in members.tolist() if len(members) > 1 else ():
                groups.setdefault(member, []).append(kept)
    for later in sorted(groups):
        earlier = sorted({number for kept in groups[later] for number in kept})
        alike = np.mean(signatures[earlier] == signatures[later], axis=1) >= threshold
        dropped[later] = alike.any()
        for kept in groups[later] if not dropped[later] else ():
            if len(kept) < _MOST_UNLIKE:
                kept.append(later)
    return dropped
