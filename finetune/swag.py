"""SWAG: which of four endings follows? Four sequences, each scored by one vector."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from finetune.classify import TableTask
from finetune.config import SwagConfig
from finetune.examples import Item, Problems, fit, sequence
from finetune.heads import HeadSpec
from finetune.tables import Row, one_of, open_table, read_rows

CHOICES = 4
ENDINGS = tuple(f"ending{i}" for i in range(CHOICES))


def read(path: Path, *, labelled: bool) -> tuple[list[Row], Problems]:
    """Rows of the official csv: the given sentence, the second one's beginning, the endings.

    Bad rows are left out and counted.
    """
    problems = Problems(path)
    rows = read_rows(
        problems,
        open_table(path),
        texts=("sent1", "sent2", *ENDINGS),
        label="label" if labelled else None,
        value=one_of([str(choice) for choice in range(CHOICES)]),
        index="",
        optional=("sent2",),
    )
    return rows, problems


class Swag(TableTask):
    config: SwagConfig
    measures = ("accuracy",)

    def load_rows(self) -> None:
        self.head = HeadSpec("choice", CHOICES)
        for set_name, file in self.config.files.items():
            rows, problems = read(Path(file), labelled=set_name != "test")
            self.checked(problems, set_name)
            self.add(set_name, rows)

    def encode(self, rows: list[Row]) -> tuple[list[Item], int]:
        items, cuts = [], 0
        for row in rows:
            given, begun, *endings = row.texts
            whole = [f"{begun} {ending}".strip() for ending in endings]
            first, *seconds = self.tokenizer.encode_batch([given, *whole])
            fitted = [fit(first, second, self.config.max_seq_len) for second in seconds]
            cuts += sum(cut for _, _, cut in fitted)
            sequences = tuple(sequence(self.tokenizer, a, b) for a, b, _ in fitted)
            items.append(Item(sequences, row.label))
        return items, cuts

    def said(self, row: Row, values: np.ndarray) -> dict[str, Any]:
        return {"index": row.index, "label": int(values.argmax())}
