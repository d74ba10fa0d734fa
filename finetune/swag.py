"""SWAG: which of four endings follows? Four sequences, each scored by one vector."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from finetune.config import SwagConfig
from finetune.examples import Item, Problems, fit, sequence, subset, write_lines
from finetune.heads import HeadSpec
from finetune.metrics import MEASURES
from finetune.tables import Row, one_of, open_table, read_rows
from finetune.tasks import Outputs, Score, Task

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


class Swag(Task):
    config: SwagConfig

    def load(self) -> None:
        config = self.config
        self.head = HeadSpec("choice", CHOICES)
        self.rows: dict[str, list[Row]] = {}
        cut = 0
        for set_name, file in config.files.items():
            rows, problems = read(Path(file), labelled=set_name != "test")
            self.checked(problems, set_name)
            self.rows[set_name] = rows = subset(rows, self.wanted(set_name))
            items = []
            for row in rows:
                given, begun, *endings = row.texts
                whole = [f"{begun} {ending}".strip() for ending in endings]
                first, *seconds = self.tokenizer.encode_batch([given, *whole])
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
        return Score({"accuracy": 100 * MEASURES["accuracy"](gold, guess)}, "accuracy", failed)

    def write(self, outputs: Outputs, score: Score, folder: Path) -> None:
        """index and label a row, in the order of the file."""
        for name in outputs:
            pairs = zip(self.rows[name], outputs[name], strict=True)
            lines = [f"{row.index},{int(logits.argmax())}" for row, logits in pairs]
            write_lines(folder / f"{name}.csv", ["index,label", *lines])
