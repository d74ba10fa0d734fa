"""CoNLL-2003 named entities: the first piece of each word is labelled, in as much of its document
as a window holds.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from core.errors import UserError
from finetune.config import NerConfig
from finetune.examples import IGNORE_LABEL, Item, Problems, read_text, sequence, write_lines
from finetune.heads import HeadSpec
from finetune.metrics import entity_scores, to_iob2
from finetune.tasks import Outputs, Score, Task

_GAP = re.compile(r"[ \t]+")  # a word may be another space, such as U+00A0
_TAG = re.compile(r"O|[BI]-\S+")


@dataclass(frozen=True)
class Sentence:
    """words and their tags (IOB2); line: of its first word; document: its number."""

    words: tuple[str, ...]
    tags: tuple[str, ...]
    line: int
    document: int


class Window(NamedTuple):
    """words: numbers of the words of the set that are labelled here; places: of their first
    pieces in the window's sequence. int64 both.
    """

    words: np.ndarray
    places: np.ndarray


class Unit(NamedTuple):
    """A sentence, or a part of one too long for a window: words first..first+len(pieces)."""

    first: int
    pieces: list[list[int]]

    @property
    def size(self) -> int:
        return sum(map(len, self.pieces))


def read(path: Path, tags: frozenset[str] | None = None) -> tuple[list[Sentence], Problems]:
    """Sentences of one file; word first and tag last on each line, IOB1 or IOB2.

    `tags`: those that training knows (None: any). Sentences with a bad line are left out.
    """
    problems = Problems(path)
    sentences: list[Sentence] = []
    document, start, rows, bad = 0, 0, [], None

    def close() -> None:
        nonlocal rows, bad
        if rows or bad:
            problems.total += 1
            if bad:
                problems.add(*bad)
            else:
                words, found = zip(*rows, strict=True)
                sentences.append(Sentence(words, tuple(to_iob2(found)), start, document))
        rows, bad = [], None

    for number, line in enumerate(read_text(path).split("\n"), 1):
        fields = _GAP.split(line.strip(" \t\r"))
        if fields == [""]:
            close()
        elif fields[0] == "-DOCSTART-":
            close()
            document += 1
        else:
            start = number if not rows and not bad else start
            if len(fields) < 2:
                bad = bad or ("fewer than 2 columns", number)
            elif not _TAG.fullmatch(fields[-1]):
                bad = bad or ("unknown tag", number, fields[-1])
            elif tags is not None and fields[-1] != "O" and fields[-1][2:] not in tags:
                bad = bad or ("unknown tag", number, fields[-1])
            rows.append((fields[0], fields[-1]))
    close()
    return sentences, problems


def units_of(first: int, pieces: list[list[int]], room: int) -> list[Unit]:
    """A sentence in parts of whole words with at most `room` pieces each."""
    units, begin, size = [], 0, 0
    for at, word in enumerate(pieces):
        if at > begin and size + len(word) > room:
            units.append(Unit(first + begin, pieces[begin:at]))
            begin, size = at, 0
        size += len(word)
    return [*units, Unit(first + begin, pieces[begin:])]


def windows(sizes: list[int], room: int) -> list[tuple[int, int, list[int]]]:
    """(first unit, one past the last, units labelled there) over the units of one document.

    A window takes as many units as fit; the next begins half a window further. Each unit is
    labelled once, where its poorer side has the most context.
    """
    ends = np.cumsum([0, *sizes])
    spans, i = [], 0
    while True:
        j = max(i + 1, int(np.searchsorted(ends, ends[i] + room, "right")) - 1)
        spans.append((i, j))
        if j == len(sizes):
            break
        half = int(np.searchsorted(ends, ends[i] + room / 2, "left"))
        i = min(max(i + 1, half), j)
    labelled: list[list[int]] = [[] for _ in spans]
    for u in range(len(sizes)):
        context = [
            (min(ends[u] - ends[i], ends[j] - ends[u + 1]), ends[j] - ends[i])
            if i <= u < j
            else (-1, 0)
            for i, j in spans
        ]
        labelled[max(range(len(spans)), key=lambda w: (*context[w], -w))].append(u)
    return [(i, j, units) for (i, j), units in zip(spans, labelled, strict=True) if units]


def whole_documents(sentences: list[Sentence], count: int) -> list[Sentence]:
    """Documents drawn by a fixed seed until they hold `count` sentences; 0 takes all."""
    if not 0 < count < len(sentences):
        return sentences
    sizes = Counter(s.document for s in sentences)
    documents = sorted(sizes)
    chosen: set[int] = set()
    for i in np.random.Generator(np.random.Philox(key=2003)).permutation(len(documents)):
        if sum(sizes[d] for d in chosen) >= count:
            break
        chosen.add(documents[i])
    return [s for s in sentences if s.document in chosen]


class Ner(Task):
    config: NerConfig

    def load(self) -> None:
        config = self.config
        self.sentences: dict[str, list[Sentence]] = {}
        self.windows: dict[str, list[Window]] = {}
        kinds: frozenset[str] | None = None
        for set_name, file in config.files.items():
            sentences, problems = read(Path(file), kinds)
            self.checked(problems, whole=set_name == "test")
            if kinds is None:
                kinds = frozenset(t[2:] for s in sentences for t in s.tags if t != "O")
                if not kinds:
                    raise UserError(f"{file}: no word has a tag other than O")
                labels = ("O", *(f"{m}-{k}" for k in sorted(kinds) for m in "BI"))
                self.head = HeadSpec("tokens", len(labels), labels)
            sentences = whole_documents(sentences, self.wanted(set_name))
            self.sentences[set_name] = sentences
            self._add(set_name, sentences)
            documents = len({s.document for s in sentences})
            self.notes.append(
                f"{set_name}: {len(sentences):,} sentences of {documents:,} documents in "
                f"{len(self.windows[set_name]):,} windows"
            )

    def labels_of(self, set_name: str) -> np.ndarray:
        """int64 [words]: the class of every word of a set."""
        classes = {label: n for n, label in enumerate(self.head.labels)}
        return np.array([classes[t] for s in self.sentences[set_name] for t in s.tags], np.int64)

    def _add(self, set_name: str, sentences: list[Sentence]) -> None:
        room, tokenizer = self.config.max_seq_len - 2, self.tokenizer
        pieces = tokenizer.encode_batch([w for s in sentences for w in s.words])
        # A word of nothing but control characters has no piece, yet it wants a label.
        pieces = [p[:room] or [tokenizer.unk_id] for p in pieces]
        gold = self.labels_of(set_name)
        items, where = [], []
        documents: dict[int, list[Unit]] = {}
        first = 0
        for number, s in enumerate(sentences):
            key = s.document if self.config.context == "document" else number
            parts = units_of(first, pieces[first : first + len(s.words)], room)
            documents.setdefault(key, []).extend(parts)
            first += len(s.words)
        for units in documents.values():
            for i, j, labelled in windows([u.size for u in units], room):
                ids, words, places = [], [], []
                for u in range(i, j):
                    for number, word in enumerate(units[u].pieces, units[u].first):
                        if u in labelled:
                            words.append(number)
                            places.append(len(ids) + 1)
                        ids += word
                tokens = sequence(tokenizer, ids)
                label = np.full(len(tokens.ids), IGNORE_LABEL, np.int64)
                label[places] = gold[words]
                items.append(Item((tokens,), label))
                where.append(Window(np.array(words), np.array(places)))
        self.sets[set_name], self.windows[set_name] = items, where

    def classes(self, outputs: Outputs) -> dict[str, np.ndarray]:
        """For each set int64 [words], the guessed class."""
        result = {}
        for name, logits in outputs.items():
            found = np.zeros(sum(len(s.words) for s in self.sentences[name]), np.int64)
            for window, values in zip(self.windows[name], logits, strict=True):
                found[window.words] = values[window.places].argmax(1)
            result[name] = found
        return result

    def score(self, outputs: Outputs) -> Score:
        classes = self.classes(outputs)
        failed = len(np.unique(classes["dev"])) == 1
        return Score(self._entity_scores(classes, "dev"), "f1", failed)

    def test_scores(self, outputs: Outputs) -> dict[str, float]:
        classes = self.classes(outputs)
        return self._entity_scores(classes, "test") if "test" in classes else {}

    def _entity_scores(self, classes: Mapping[str, np.ndarray], name: str) -> dict[str, float]:
        return entity_scores([s.tags for s in self.sentences[name]], self._tags(classes, name))

    def _tags(self, classes: Mapping[str, np.ndarray], name: str) -> list[list[str]]:
        tags, first = [], 0
        for s in self.sentences[name]:
            here = classes[name][first : first + len(s.words)]
            tags.append([self.head.labels[c] for c in here])
            first += len(s.words)
        return tags

    def write(self, outputs: Outputs, score: Score, folder: Path) -> None:
        """word, true and guessed tag a line, as conlleval reads them."""
        classes = self.classes(outputs)
        for name in classes:
            lines = []
            for s, tags in zip(self.sentences[name], self._tags(classes, name), strict=True):
                lines += [" ".join(row) for row in zip(s.words, s.tags, tags, strict=True)]
                lines.append("")
            write_lines(folder / f"{name}.txt", lines)
