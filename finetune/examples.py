"""What a task's files become: token sequences with a label, and a count of bad records."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from core.errors import UserError, short
from data_pipeline.corpus.tokenizer import Tokenizer

IGNORE_LABEL = -100
# A class or a score; (start, end) token of an answer; or int64 [L] with IGNORE_LABEL where a token
# has none. None on a test set.
Label = int | float | tuple[int, int] | np.ndarray | None
T = TypeVar("T")


class Tokens(NamedTuple):
    """Token ids (int32 [L]) and segment types (uint8 [L]), [CLS] and [SEP] included."""

    ids: np.ndarray
    types: np.ndarray


class Item(NamedTuple):
    """One example: its sequences (one, or one a choice) and its label."""

    sequences: tuple[Tokens, ...]
    label: Label

    @property
    def tokens(self) -> int:
        return sum(len(s.ids) for s in self.sequences)


class Example(Protocol):
    """What the training loop knows of an item."""

    @property
    def label(self) -> Label: ...

    @property
    def tokens(self) -> int: ...


def sequence(tokenizer: Tokenizer, first: list[int], second: list[int] | None = None) -> Tokens:
    """[CLS] A [SEP], or [CLS] A [SEP] B [SEP]; type 0 through the first [SEP], then 1."""
    ids = [tokenizer.cls_id, *first, tokenizer.sep_id]
    types = np.zeros(len(ids) + (len(second) + 1 if second is not None else 0), np.uint8)
    if second is not None:
        types[len(ids) :] = 1
        ids += [*second, tokenizer.sep_id]
    return Tokens(np.array(ids, np.int32), types)


def fit(
    first: list[int], second: list[int] | None, max_seq_len: int
) -> tuple[list[int], list[int] | None, bool]:
    """Cut from the end of the longer part until both fit beside the special tokens.

    The third value says whether anything was cut. Where both are, an odd token is of the second
    unless the first was longer, as transformers has it (google-research/bert: of the first).
    """
    if second is None:
        room = max_seq_len - 2
        return first[:room], None, len(first) > room
    room = max_seq_len - 3
    a, b = len(first), len(second)
    if a + b <= room:
        return first, second, False
    shorter = min(a, b, room // 2)
    a, b = (room - shorter, shorter) if a > b else (shorter, room - shorter)
    return first[:a], second[:b], True


@dataclass
class Problems:
    """Bad records of one file, counted by kind and named by line."""

    path: Path
    unit: str = "line"
    total: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    where: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    def add(self, kind: str, place: int | str, found: str | None = None) -> None:
        """One more, at a line or an id; `found`: what stands there."""
        self.kinds[kind] += 1
        if len(self.where[kind]) < 5:
            quoted = f" {short(repr(found))}" if found is not None else ""
            self.where[kind].append(short(str(place)) + quoted)

    @property
    def bad(self) -> int:
        return sum(self.kinds.values())

    def lines(self) -> Iterator[str]:
        for kind, count in self.kinds.most_common():
            shown = ", ".join(self.where[kind]) + (", ..." if count > 5 else "")
            yield f"{self.path}: {count} of {self.total} left out: {kind} ({self.unit} {shown})"

    def check(self, max_bad_share: float) -> None:
        """UserError when nothing is usable or more than the share is bad."""
        if self.total - self.bad <= 0:
            raise UserError("; ".join(self.lines()) or f"{self.path}: holds no example")
        if self.bad > max_bad_share * self.total:
            raise UserError(
                f"{'; '.join(self.lines())}; mend them: more than train.max_bad_share "
                f"{max_bad_share:g}"
            )

    def check_whole(self) -> None:
        """UserError when a record of a test file is bad: the leaderboard wants every one."""
        if self.bad:
            raise UserError("; ".join(self.lines()) + "; a test file must be whole")


def subset(items: list[T], count: int) -> list[T]:
    """`count` of the items, the same for every seed, in their order; 0 takes all."""
    if not 0 < count < len(items):
        return items
    chosen = np.random.Generator(np.random.Philox(key=20181011)).permutation(len(items))[:count]
    return [items[i] for i in np.sort(chosen)]
