"""What counting word pieces reaches on the tasks of fine-tuning: the least that BERT must beat.

    python benchmarks/bag_of_words.py --config configs/finetune_glue.yaml --set encoder.path=DIR ...

The tasks, examples, cuts and scores of a fine-tuning config, with scikit-learn in the place of the
encoder. A text is the tf-idf of its pieces; a pair is those of both texts, their product, distance
and cosine. Under them logistic regression, for a score ridge regression; their C is the best of
three on a tenth of the training set. Of tags: a linear layer on each piece and its two neighbours.
Prints a table; the last line is one JSON object.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from scipy import sparse
from sklearn.feature_extraction.text import TfidfTransformer
from sklearn.linear_model import LogisticRegression, Ridge, SGDClassifier

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from configs.load import load, parser
from core.errors import main_guard
from finetune import loading
from finetune.config import FinetuneConfig
from finetune.examples import IGNORE_LABEL, Item
from finetune.tasks import Task, open_task


class Texts:
    """Items of one sequence as rows of numbers; what is counted of the training set stays."""

    def __init__(self, vocab_size: int, specials: Sequence[int], items: Sequence[Item]) -> None:
        self.vocab_size, self.specials = vocab_size, specials
        self.pair = any(item.sequences[0].types.any() for item in items)
        self.weights = TfidfTransformer().fit(sparse.vstack(self._counts(items)))

    def _counts(self, items: Sequence[Item]) -> list[sparse.csr_matrix]:
        """Of each of the one or two texts [items, V]."""
        found = []
        for segment in range(1 + self.pair):
            rows, ids = [], []
            for n, item in enumerate(items):
                tokens = item.sequences[0]
                mine = tokens.ids[tokens.types == segment]
                ids.append(mine[~np.isin(mine, self.specials)])
                rows.append(np.full(len(ids[-1]), n))
            at = (np.concatenate(rows), np.concatenate(ids))
            ones = np.ones(len(at[0]))
            found.append(sparse.csr_matrix((ones, at), (len(items), self.vocab_size)))
        return found

    def __call__(self, items: Sequence[Item]) -> sparse.csr_matrix:
        parts = [self.weights.transform(counts) for counts in self._counts(items)]
        if self.pair:
            a, b = parts
            same = a.multiply(b)
            likeness = sparse.csr_matrix(same.sum(1))  # the cosine
            parts = [a, b, same, abs(a - b), likeness]
        return sparse.hstack(parts).tocsr()


def texts_outputs(task: Task, vocab_size: int, specials: Sequence[int]) -> dict:
    """The dev sets' outputs by the model that fits training best."""
    train = task.sets["train"]
    features = Texts(vocab_size, specials, train)
    x, y = features(train), np.array([item.label for item in train])
    cut = len(y) * 9 // 10
    order = np.random.default_rng(0).permutation(len(y))
    kept, tried = order[:cut], order[cut:]

    def fitted(c: float, rows: np.ndarray):
        if task.head.regression:
            return Ridge(alpha=1 / c).fit(x[rows], y[rows])
        return LogisticRegression(C=c, max_iter=2000).fit(x[rows], y[rows])

    best = max((0.1, 1.0, 10.0), key=lambda c: fitted(c, kept).score(x[tried], y[tried]))
    model = fitted(best, order)

    def outputs(items: Sequence[Item]) -> list[np.ndarray]:
        if task.head.regression:
            return list(model.predict(features(items))[:, None])
        return list(model.predict_proba(features(items)))

    return {name: outputs(task.sets[name]) for name in task.dev_sets}


def tags_outputs(task: Task, vocab_size: int) -> dict:
    """Each labelled piece with its neighbours, as three one-hot words."""

    def features(items: Sequence[Item]) -> sparse.csr_matrix:
        columns = []
        for item in items:
            padded = np.pad(item.sequences[0].ids, 1)
            three = [padded[:-2], padded[1:-1] + vocab_size, padded[2:] + 2 * vocab_size]
            columns.append(np.stack(three, 1))
        at = np.concatenate(columns)
        starts = np.arange(len(at) + 1) * 3
        return sparse.csr_matrix((np.ones(at.size), at.ravel(), starts), (len(at), 3 * vocab_size))

    train = task.sets["train"]
    labels = np.concatenate([item.label for item in train])
    real = labels != IGNORE_LABEL
    model = SGDClassifier(loss="log_loss", alpha=1e-6, random_state=0)
    model.fit(features(train)[real], labels[real])
    result = {}
    for name in task.dev_sets:
        items = task.sets[name]
        scores = np.full((sum(i.tokens for i in items), task.head.outputs), -np.inf)
        scores[:, model.classes_] = model.decision_function(features(items))
        result[name] = np.split(scores, np.cumsum([item.tokens for item in items])[:-1])
    return result


def main() -> int:
    arguments = parser(FinetuneConfig, __doc__).parse_args()

    def run() -> int:
        config = load(arguments.config, FinetuneConfig, arguments.overrides)
        encoder = loading.read(config.encoder, config.task.max_seq_len)
        t = encoder.tokenizer
        scores = {}
        for name in config.task.names:
            task = open_task(config, name, t)
            if task.head.kind == "tokens":
                outputs = tags_outputs(task, len(t))
            else:
                outputs = texts_outputs(task, len(t), (t.cls_id, t.sep_id))
            scores[name] = task.score(outputs).values
            shown = "  ".join(f"{k} {v:.2f}" for k, v in scores[name].items())
            print(f"{name:<8}{shown}", flush=True)
        print(json.dumps({"benchmark": "bag_of_words", "scores": scores}))
        return 0

    return main_guard(run)


if __name__ == "__main__":
    sys.exit(main())
