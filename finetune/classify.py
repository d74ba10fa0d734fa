"""Tables of texts, or pairs of texts, with a class, several classes or a score: a user's own here,
GLUE's in glue.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import expit

from core.errors import UserError, short
from data_pipeline.corpus.tokenizer import Tokenizer
from finetune.config import ClassifyConfig, TextConfig
from finetune.examples import Item, Problems, fit, sequence, subset
from finetune.heads import HeadSpec
from finetune.metrics import MEASURES, class_scores
from finetune.tables import Row, number, open_table, read_rows, text_in, write_table
from finetune.tasks import Outputs, Score, Task


def encode(tokenizer: Tokenizer, rows: Sequence[Row], max_seq_len: int) -> tuple[list[Item], int]:
    """An item a row, and how many were cut to `max_seq_len` tokens."""
    parts = [tokenizer.encode_batch(texts) for texts in zip(*(r.texts for r in rows), strict=True)]
    items, cuts = [], 0
    for row, first, *second in zip(rows, *parts, strict=True):
        a, b, cut = fit(first, second[0] if second else None, max_seq_len)
        cuts += cut
        items.append(Item((sequence(tokenizer, a, b),), row.label))
    return items, cuts


def decide(head: HeadSpec, outputs: Sequence[np.ndarray]) -> np.ndarray:
    """Of each item its class, its classes (bool [items, K]), or its score."""
    values = np.stack(outputs)
    if head.regression:
        return values[:, 0].astype(np.float64)
    return values > 0 if head.multi else values.argmax(1)


def numbered(classes: int) -> tuple[str, ...]:
    """Hugging Face's names of classes that have none."""
    return tuple(f"LABEL_{n}" for n in range(classes))


def answer(head: HeadSpec, values: np.ndarray) -> dict[str, Any]:
    """What is said of one item: its score, of one class its probability, or its label or labels
    and all probabilities."""
    if head.regression:
        return {"score": float(values[0])}
    names = head.labels or numbered(head.outputs)
    values = values.astype(np.float64)
    if head.multi:
        shares = expit(values)
        if head.outputs == 1:
            return {"score": float(shares[0])}
        said: Any = {"labels": [name for name, v in zip(names, values, strict=True) if v > 0]}
    else:
        weights = np.exp(values - values.max())
        shares, said = weights / weights.sum(), {"label": names[int(values.argmax())]}
    return said | {"probabilities": {n: float(p) for n, p in zip(names, shares, strict=True)}}


def _as_a_number(digits: str) -> tuple[int, str, str]:
    """For sorting; Python makes no number of thousands of digits."""
    plain = digits.lstrip("0")
    return len(plain), plain, digits


class TableTask(Task):
    """A task whose examples are rows of tables.

    measures: names in `MEASURES`, the one that chooses first.
    """

    measures: tuple[str, ...]

    def load(self) -> None:
        self.rows: dict[str, list[Row]] = {}
        self._cuts = 0
        self.load_rows()
        if self._cuts:
            self.notes.append(f"{self._cuts} texts were cut to {self.config.max_seq_len} tokens")
        if not self.head.regression and not self.head.multi:
            counts = Counter(row.label for row in self.rows["dev"])
            self.notes.append(
                f"dev: {100 * max(counts.values()) / counts.total():.1f} % are of the largest class"
            )

    def load_rows(self) -> None:
        """Read the files: `head`, and `add` each set."""
        raise NotImplementedError

    def add(self, set_name: str, rows: list[Row]) -> None:
        self.rows[set_name] = rows = subset(rows, self.wanted(set_name))
        self.sets[set_name], cuts = self.encode(rows)
        self._cuts += cuts

    def encode(self, rows: list[Row]) -> tuple[list[Item], int]:
        """An item a row, and how many texts were cut."""
        return encode(self.tokenizer, rows, self.config.max_seq_len)

    def decide(self, outputs: Sequence[np.ndarray]) -> np.ndarray:
        return decide(self.head, outputs)

    def measured(self, set_name: str, outputs: Outputs) -> dict[str, float]:
        """`measures` of a set with labels, 0 to 100."""
        gold = np.array([row.label for row in self.rows[set_name]])
        guess = self.decide(outputs[set_name])
        return {name: 100 * MEASURES[name](gold, guess) for name in self.measures}

    def score(self, outputs: Outputs) -> Score:
        values = {}
        for name in self.dev_sets:
            suffix = name.removeprefix("dev")
            values |= {m + suffix: v for m, v in self.measured(name, outputs).items()}
        guess = self.decide(outputs["dev"])
        constant = guess.std() < 1e-3 if self.head.regression else (guess == guess[0]).all()
        return Score(values, self.measures[0], bool(constant))

    def write(self, outputs: Outputs, score: Score, folder: Path) -> None:
        for name in outputs:
            pairs = zip(self.rows[name], outputs[name], strict=True)
            write_table(folder / self.file_of(name), (self.said(*pair) for pair in pairs))

    def file_of(self, set_name: str) -> str:
        """Name of a set's prediction file."""
        return f"{set_name}.csv"

    def said(self, row: Row, values: np.ndarray) -> dict[str, Any]:
        """A row of a prediction file, from the outputs for one of the data."""
        return {"row": int(row.index)} | answer(self.head, values)


class Classify(TableTask):
    config: ClassifyConfig
    needed = TextConfig

    def load_rows(self) -> None:
        c = self.config
        files = {name: Path(path) for name, path in c.files.items()}
        train = self._read("train", files["train"])
        labels = self._labels(train, files["train"])
        self.head = HeadSpec("sequence", max(1, len(labels)), labels, multi=c.kind == "multi")
        self.measures = c.metrics
        sets = {"train": train}
        if c.dev_file is None:
            sets["train"], sets["dev"] = self._split(train, files["train"])
        for name in files.keys() - {"train"}:
            sets[name] = self._read(name, files[name])
        numbers = {label: number for number, label in enumerate(labels)}
        for name in sorted(sets, key=("train", "dev", "test").index):
            path = files.get(name, files["train"])
            self.add(name, [self._numbered(row, path, numbers) for row in sets[name]])

    def _read(self, set_name: str, path: Path) -> list[Row]:
        """Rows whose labels are as they stand in the file: names, or a score."""
        c = self.config
        table = open_table(path, quotes=c.quotes, quotes_key="classify.quotes: ")
        problems = Problems(path)
        rows = read_rows(
            problems,
            table,
            texts=c.text,
            label=c.label if set_name != "test" or c.label in table.columns else None,
            value={"single": self._name, "multi": self._names, "score": number()}[c.kind],
            remedy="; classify.text and classify.label name the columns",
        )
        self.checked(problems, set_name)
        return rows

    @staticmethod
    def _name(value: Any) -> str:
        try:
            return text_in({"label": value}, "label")
        except ValueError:
            if isinstance(value, bool):
                return str(value).lower()
            raise ValueError("no label") from None

    def _names(self, value: Any) -> tuple[str, ...]:
        if isinstance(value, str | None):
            value = [part for part in (value or "").split(self.config.separator) if part.strip()]
        if not isinstance(value, list):
            raise ValueError("labels that are neither text nor a list")
        return tuple(map(self._name, value))

    def _labels(self, train: list[Row], path: Path) -> tuple[str, ...]:
        """Those of the training file, sorted (numbers as numbers); none for a score."""
        if self.config.kind == "score":
            return ()
        multi = self.config.kind == "multi"
        counts = Counter(name for r in train for name in (r.label if multi else [r.label]))
        plain = all(name.isascii() and name.isdigit() for name in counts)
        labels = tuple(sorted(counts, key=_as_a_number if plain else None))
        if len(labels) < 2:
            found = f"only the label {short(labels[0])!r}" if labels else "no label"
            raise UserError(
                f"{path}: {found} in column {self.config.label!r}; examples of two or more are "
                "needed"
            )
        if len(labels) > len(train) // 2 and plain:
            self.notes.append(f"{len(labels)} labels in {len(train)} rows: is it a kind: score?")
        single = [name for name, count in counts.items() if count == 1]
        if single:
            self.notes.append(f"one training example alone of {short(', '.join(sorted(single)))}")
        return labels

    def _split(self, train: list[Row], path: Path) -> tuple[list[Row], list[Row]]:
        """(train, dev) by dev_share, the same split every time; classes keep their shares."""
        from sklearn.model_selection import train_test_split

        kinds = [row.label for row in train] if self.config.kind == "single" else None
        counts = Counter(kinds)
        for row in train:
            if counts[row.label] == 1:
                raise UserError(
                    f"{path}:{row.place}: the only example of {short(str(row.label))!r}, and "
                    "classify.dev_share needs two of each; add one, drop this, or give dev_file"
                )
        try:
            parts = train_test_split(
                range(len(train)),
                test_size=self.config.dev_share,
                random_state=2018,
                stratify=kinds,
            )
        except ValueError as error:
            raise UserError(f"{path}: classify.dev_share: {error}") from None
        return tuple([train[n] for n in sorted(part)] for part in parts)  # type: ignore[return-value]

    def _numbered(self, row: Row, path: Path, numbers: Mapping[str, int]) -> Row:
        """Its label as the model gives it: the number of a class, 0 or 1 for each, or the score."""
        if row.label is None or self.head.regression:
            return row
        names = row.label if self.head.multi else [row.label]
        for name in names:
            if name not in numbers:
                raise UserError(
                    f"{path}:{row.place}: label {short(name)!r} is not in "
                    f"{self.config.train_file}; add examples of it there, or drop the row"
                )
        places = [numbers[name] for name in names]
        if not self.head.multi:
            return row._replace(label=places[0])
        return row._replace(label=np.isin(np.arange(self.head.outputs), places).astype(np.float32))

    def measured(self, set_name: str, outputs: Outputs) -> dict[str, float]:
        values = super().measured(set_name, outputs)
        if self.head.regression:
            return values
        gold = np.stack([row.label for row in self.rows[set_name]])
        return values | class_scores(gold, self.decide(outputs[set_name]), self.head.labels)

    def test_scores(self, outputs: Outputs) -> dict[str, float]:
        if "test" in outputs and all(row.label is not None for row in self.rows["test"]):
            return self.measured("test", outputs)
        return {}
