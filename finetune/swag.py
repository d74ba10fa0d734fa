"""SWAG: which of four endings follows? Four sequences, each scored by one vector."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import NamedTuple

import numpy as np

from core.errors import UserError
from finetune.config import SwagConfig
from finetune.examples import Item, Problems, check_columns, fit, read_text, sequence, subset
from finetune.heads import HeadSpec
from finetune.metrics import accuracy
from finetune.tasks import Outputs, Score, Task

CHOICES = 4
ENDINGS = tuple(f"ending{i}" for i in range(CHOICES))


class Row(NamedTuple):
    """first: the given sentence; starts: the second sentence's beginning with each ending."""

    index: str
    first: str
    seconds: tuple[str, ...]
    label: int | None


def read(path: Path, *, labelled: bool) -> tuple[list[Row], Problems]:
    """Rows of the official csv. Bad ones are left out and counted."""
    reader = csv.reader(io.StringIO(read_text(path), newline=""))
    problems = Problems(path)
    rows: list[Row] = []
    seen: set[str] = set()
    try:
        header = next(reader, [])
        wanted = ["sent1", "sent2", *ENDINGS, *(["label"] if labelled else [])]
        check_columns(path, wanted, header)
        at = {name: header.index(name) for name in header}
        for fields in reader:
            problems.total += 1
            number = reader.line_num
            if len(fields) != len(header):
                problems.add(f"not {len(header)} columns", number)
                continue
            index = fields[at[""]] if "" in at else str(len(rows))
            endings = [fields[at[e]].strip() for e in ENDINGS]
            if not fields[at["sent1"]].strip() or not all(endings):
                problems.add("empty text", number)
            elif labelled and fields[at["label"]] not in ("0", "1", "2", "3"):
                problems.add("unknown label", number, fields[at["label"]])
            elif index in seen:
                problems.add("duplicate id", number, index)
            else:
                seen.add(index)
                seconds = tuple(f"{fields[at['sent2']].strip()} {e}".strip() for e in endings)
                label = int(fields[at["label"]]) if labelled else None
                rows.append(Row(index, fields[at["sent1"]].strip(), seconds, label))
    except csv.Error as error:
        raise UserError(f"{path}:{reader.line_num}: {error}") from None
    return rows, problems


class Swag(Task):
    config: SwagConfig

    def load(self) -> None:
        config = self.config
        self.head = HeadSpec("choice", CHOICES)
        self.rows: dict[str, list[Row]] = {}
        files = {"train": config.train_file, "dev": config.dev_file, "test": config.test_file}
        cut = 0
        for set_name, file in files.items():
            if file is None:
                continue
            rows, problems = read(Path(file), labelled=set_name != "test")
            self.checked(problems, whole=set_name == "test")
            self.rows[set_name] = rows = subset(rows, self.wanted(set_name))
            items = []
            for row in rows:
                first, *seconds = self.tokenizer.encode_batch([row.first, *row.seconds])
                fitted = [fit(first, second, config.max_seq_len) for second in seconds]
                cut += sum(c for _, _, c in fitted)
                sequences = tuple(sequence(self.tokenizer, a, b) for a, b, _ in fitted)
                items.append(Item(sequences, row.label))
            self.sets[set_name] = items
        if cut:
            self.notes.append(f"{cut} texts were cut to {config.max_seq_len} tokens")

    def score(self, outputs: Outputs) -> Score:
        guess = np.stack(outputs["dev"]).argmax(1)
        gold = np.array([row.label for row in self.rows["dev"]])
        failed = len(guess) > 1 and len(np.unique(guess)) == 1
        return Score({"accuracy": 100 * accuracy(gold, guess)}, "accuracy", failed)

    def write(self, outputs: Outputs, score: Score, folder: Path) -> None:
        """index and label a row, in the order of the file."""
        for name in outputs:
            lines = ["index,label"]
            for row, logits in zip(self.rows[name], outputs[name], strict=True):
                lines.append(f"{row.index},{int(logits.argmax())}")
            (folder / f"{name}.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
