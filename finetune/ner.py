"""CoNLL-2003 named entities: the first piece of each word is labelled, in as much of its document
as a window holds.
"""

from __future__ import annotations

import itertools
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from core.errors import UserError, short
from core.files import disk_errors, replacing
from data_pipeline.corpus.tokenizer import Tokenizer
from finetune.config import NerConfig, TagConfig
from finetune.examples import IGNORE_LABEL, Item, Problems, sequence
from finetune.heads import HeadSpec
from finetune.metrics import entity_scores, to_iob2
from finetune.tables import NO_TEXT, holds_lists, open_table, text_of, write_table
from finetune.tasks import Outputs, Score, Task

_GAP = re.compile(r"[ \t]+")  # a word may be another space, such as U+00A0
_ENDS = re.compile(r"[ \t\r\n]")  # what ends a column or a line
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


def read(
    path: Path,
    tags: frozenset[str] | None = None,
    config: TagConfig = TagConfig(),  # noqa: B008 (frozen)
) -> tuple[list[Sentence], Problems]:
    """Sentences of one file with IOB1 or IOB2 tags.

    `tags`: those that training knows (None: any). Sentences with a bad line are left out.
    """
    problems = Problems(path)
    return list(sentences_in(path, problems, config, tags)), problems


def sentences_in(
    path: Path,
    problems: Problems,
    config: TagConfig,
    known: frozenset[str] | None = None,
    *,
    labelled: bool = True,
) -> Iterator[Sentence]:
    """The good sentences of CoNLL columns, or of a table with a list of words (and one of tags) a
    row; bad ones are counted. `labelled`: off where tags are not looked at, and all are O."""
    if path.suffix.lower() == ".csv":
        raise UserError(
            f"{path}: tags stand in CoNLL columns, or in lists of a jsonl or parquet file"
        )
    if holds_lists(path):
        found = _of_table(path, problems, config, labelled)
    else:
        found = _of_columns(path, config, labelled)
    for line, document, words, tags in found:
        problems.total += 1
        try:
            if isinstance(words, _Bad):
                raise words
            for place, tag in tags:
                if not _TAG.fullmatch(tag) or (tag != "O" and known and tag[2:] not in known):
                    raise _Bad("unknown tag", place, tag)
        except _Bad as bad:
            problems.add(*bad.args)
        else:
            marks = to_iob2([tag for _, tag in tags]) if labelled else ["O"] * len(words)
            yield Sentence(tuple(words), tuple(marks), line, document)


class _Bad(Exception):
    """What is wrong, where, and perhaps what stands there."""


# Line, document, words (or what is wrong), (line, tag) of each.
_Raw = tuple[int, int, list[str] | _Bad, list[tuple[int, str]]]


def _of_columns(path: Path, config: TagConfig, labelled: bool) -> Iterator[_Raw]:
    names = config.columns or ()
    word = names.index(config.tokens) if names else 0
    tag = names.index(config.tags) if names and labelled else -1
    least = (len(names) or 2) if labelled else word + 1
    document, rows, width = 0, [], None
    with text_of(path) as file:
        for number, line in enumerate(itertools.chain(file, [""]), 1):
            if "\r" in line.rstrip("\r\n"):
                raise UserError(
                    f"{path}:{number}: a CR inside the line: save it with lines that end in LF"
                )
            fields = _fields(line)
            begins = fields[0] == "-DOCSTART-"
            if fields != [""] and not begins:
                rows.append((number, fields))
                width = width or len(fields)
                continue
            if rows:
                short_ = next((n for n, f in rows if len(f) < least), None)
                # Of a line without its last column another one would be the tag.
                other = next(
                    (n for n, f in rows if labelled and not names and len(f) != width), None
                )
                found: list[str] | _Bad = [f[word] for _, f in rows if len(f) > word]
                if short_ is not None:
                    found = _Bad(f"fewer than {least} columns", short_)
                elif other is not None:
                    found = _Bad(f"not the {width} columns of the first line", other)
                elif "" in found:
                    found = _Bad("empty word", rows[found.index("")][0])
                tags = [(n, f[tag]) for n, f in rows] if labelled and short_ is None else []
                yield rows[0][0], document, found, tags
            document, rows = document + begins, []


def _fields(line: str) -> list[str]:
    """Of a line of columns: between tabs where it has any, else between spaces; [""] of a blank."""
    line = line.rstrip(" \t\r\n").lstrip(" ")
    return [field.strip(" ") for field in line.split("\t")] if "\t" in line else _GAP.split(line)


def _of_table(path: Path, problems: Problems, config: TagConfig, labelled: bool) -> Iterator[_Raw]:
    table = open_table(path)
    records = table.records(
        [config.tokens, *([config.tags] if labelled else [])],
        remedy="; ner.tokens and ner.tags name the columns",
    )
    problems.unit = table.unit
    for place, record in records:
        words, tags = _Bad(record, place) if isinstance(record, str) else None, []
        if words is None:
            words, tags = record.get(config.tokens), record.get(config.tags) if labelled else []
            if not _texts(words) or not words:
                words = _Bad(f"{config.tokens} is not a list of words", place)
            elif labelled and (not _texts(tags) or len(tags) != len(words)):
                words = _Bad(f"{config.tags} is not a list of names, one a word", place)
        yield place, place, words, [(place, tag) for tag in tags] if _texts(tags) else []


def _texts(values: Any) -> bool:
    if not isinstance(values, list):
        return False
    return all(isinstance(v, str) and v and not NO_TEXT.search(v) for v in values)


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
    spans, i = [], 0  # both of their ends only grow
    while True:
        j = max(i + 1, int(np.searchsorted(ends, ends[i] + room, "right")) - 1)
        spans.append((i, j))
        if j == len(sizes):
            break
        half = int(np.searchsorted(ends, ends[i] + room / 2, "left"))
        i = min(max(i + 1, half), j)
    firsts, stops = zip(*spans, strict=True)
    labelled: list[list[int]] = [[] for _ in spans]
    for u in range(len(sizes)):
        held = range(bisect_right(stops, u), bisect_right(firsts, u))

        def context(w: int, u: int = u) -> tuple[int, int]:
            begin, end = ends[firsts[w]], ends[stops[w]]
            return min(ends[u] - begin, end - ends[u + 1]), end - begin

        labelled[max(held, key=context)].append(u)  # the first of equals
    return [(i, j, units) for (i, j), units in zip(spans, labelled, strict=True) if units]


def whole_documents(sentences: list[Sentence], count: int) -> list[Sentence]:
    """Documents drawn by a fixed seed until they hold `count` sentences; 0 takes all."""
    if not 0 < count < len(sentences):
        return sentences
    sizes = Counter(s.document for s in sentences)
    documents = sorted(sizes)
    chosen: set[int] = set()
    held = 0
    for i in np.random.Generator(np.random.Philox(key=2003)).permutation(len(documents)):
        if held >= count:
            break
        chosen.add(documents[i])
        held += sizes[documents[i]]
    return [s for s in sentences if s.document in chosen]


def encode(
    tokenizer: Tokenizer,
    sentences: Sequence[Sentence],
    config: TagConfig,
    gold: np.ndarray | None = None,
) -> tuple[list[Item], list[Window]]:
    """Windows over the sentences' documents. gold: int64 [words], the class of every word."""
    room = config.max_seq_len - 2
    pieces = tokenizer.encode_batch([w for s in sentences for w in s.words])
    # A word of nothing but control characters has no piece, yet it wants a label.
    pieces = [p[:room] or [tokenizer.unk_id] for p in pieces]
    items, where = [], []
    documents: dict[int, list[Unit]] = {}
    first = 0
    for number, s in enumerate(sentences):
        key = s.document if config.context == "document" else number
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
            label = None
            if gold is not None:
                label = np.full(len(tokens.ids), IGNORE_LABEL, np.int64)
                label[places] = gold[words]
            items.append(Item((tokens,), label))
            where.append(Window(np.array(words), np.array(places)))
    return items, where


def word_classes(windows: Sequence[Window], outputs: Sequence[np.ndarray]) -> np.ndarray:
    """int64 [words], the guessed class."""
    found = np.zeros(sum(len(w.words) for w in windows), np.int64)
    for window, values in zip(windows, outputs, strict=True):
        found[window.words] = values[window.places].argmax(1)
    return found


def by_sentence(
    classes: np.ndarray, sentences: Sequence[Sentence], labels: Sequence[str]
) -> list[list[str]]:
    """The tags of each sentence."""
    ends = np.cumsum([len(s.words) for s in sentences])[:-1]
    return [[labels[c] for c in part] for part in np.split(classes, ends)]


def write_columns(path: Path, sentences: Iterable[tuple[Sequence[str], ...]]) -> None:
    """Of each sentence its columns, such as words and tags: a word a line, then an empty line.
    Whole or not at all; UserError for a word or tag that is no column."""
    with disk_errors(path), replacing(path, durable=False) as part:
        with part.open("w", encoding="utf-8") as file:
            for columns in sentences:
                if bad := next(filter(_ENDS.search, itertools.chain(*columns)), None):
                    raise UserError(f"{path}: {short(repr(bad))} holds a space; write .jsonl")
                rows = zip(*columns, strict=True)
                file.write("".join(" ".join(row) + "\n" for row in rows) + "\n")


class Ner(Task):
    config: NerConfig
    needed = TagConfig

    def load(self) -> None:
        config = self.config
        self.sentences: dict[str, list[Sentence]] = {}
        self.windows: dict[str, list[Window]] = {}
        kinds: frozenset[str] | None = None
        for set_name, file in config.files.items():
            sentences, problems = read(Path(file), kinds, config)
            self.checked(problems, set_name)
            if kinds is None:
                kinds = frozenset(t[2:] for s in sentences for t in s.tags if t != "O")
                if not kinds:
                    raise UserError(f"{file}: no word has a tag other than O")
                labels = ("O", *(f"{m}-{k}" for k in sorted(kinds) for m in "BI"))
                self.head = HeadSpec("tokens", len(labels), labels)
            sentences = whole_documents(sentences, self.wanted(set_name))
            self.sentences[set_name] = sentences
            self.sets[set_name], self.windows[set_name] = encode(
                self.tokenizer, sentences, config, self.labels_of(set_name)
            )
            documents = len({s.document for s in sentences})
            self.notes.append(
                f"{set_name}: {len(sentences):,} sentences of {documents:,} documents in "
                f"{len(self.windows[set_name]):,} windows"
            )

    def labels_of(self, set_name: str) -> np.ndarray:
        """int64 [words]: the class of every word of a set."""
        classes = {label: n for n, label in enumerate(self.head.labels)}
        return np.array([classes[t] for s in self.sentences[set_name] for t in s.tags], np.int64)

    def classes(self, outputs: Outputs) -> dict[str, np.ndarray]:
        """For each set int64 [words], the guessed class."""
        return {name: word_classes(self.windows[name], found) for name, found in outputs.items()}

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
        return by_sentence(classes[name], self.sentences[name], self.head.labels)

    def write(self, outputs: Outputs, score: Score, folder: Path) -> None:
        """word, true and guessed tag a line, as conlleval reads them; jsonl where a word or tag
        holds a space."""
        classes = self.classes(outputs)
        for name in classes:
            pairs = list(zip(self.sentences[name], self._tags(classes, name), strict=True))
            if any(_ENDS.search(x) for s, t in pairs for x in itertools.chain(s.words, s.tags, t)):
                rows = ({"tokens": s.words, "tags": s.tags, "guessed": t} for s, t in pairs)
                write_table(folder / f"{name}.jsonl", rows)
            else:
                columns = ((s.words, s.tags, tags) for s, tags in pairs)
                write_columns(folder / f"{name}.txt", columns)
