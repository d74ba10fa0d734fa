"""The official measures: GLUE's by scikit-learn and SciPy, SQuAD's and CoNLL's as defined."""

from __future__ import annotations

import re
import string
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from scipy import stats
from sklearn import metrics as sk

from core.errors import UserError


def _correlation(measure, gold: np.ndarray, guess: np.ndarray) -> float:
    # A constant guess has no correlation; SciPy warns and gives nan, a failed run scores 0 here.
    # Nor has a single example, for which SciPy raises.
    if len(gold) < 2:
        return 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        value = float(measure(gold, guess).statistic)
    return 0.0 if np.isnan(value) else value


# By name, of (gold, guess), 0 to 1: numbers of classes, bool or 0/1 [items, classes], or scores.
# f1 is that of class 1; f1_micro and f1_macro are over all classes that occur.
MEASURES: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {
    "accuracy": lambda a, b: float(sk.accuracy_score(a, b)),
    "matthews": lambda a, b: float(sk.matthews_corrcoef(a, b)),
    "f1": lambda a, b: float(sk.f1_score(a, b, zero_division=0)),
    "f1_macro": lambda a, b: float(sk.f1_score(a, b, average="macro", zero_division=0)),
    "f1_micro": lambda a, b: float(sk.f1_score(a, b, average="micro", zero_division=0)),
    "pearson": lambda a, b: _correlation(stats.pearsonr, a, b),
    "spearman": lambda a, b: _correlation(stats.spearmanr, a, b),
}


def class_scores(gold: np.ndarray, guess: np.ndarray, labels: Sequence[str]) -> dict[str, float]:
    """F1 of each class in percent, as f1/LABEL."""
    places = range(len(labels))
    found = sk.f1_score(gold, guess, labels=places, average=None, zero_division=0)
    return {f"f1/{label}": 100 * float(v) for label, v in zip(labels, found, strict=True)}


# SQuAD (evaluate-v1.1.py, evaluate-v2.0.py)

_ARTICLES = re.compile(r"\b(a|an|the)\b", re.UNICODE)
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    """Lower case, without ASCII punctuation, articles and extra white space."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def answer_scores(guess: str, golds: Sequence[str], version: str) -> tuple[float, float]:
    """(exact match, F1) of one question against the best of its gold answers, each 0 to 1.

    "2.0": no gold answer means that the empty text is right, and gold answers that normalise to
    nothing do not count. "1.1": F1 without a common word is 0, also between two empty texts.
    """
    if version == "2.0":
        golds = [g for g in golds if normalize_answer(g)] or [""]
    guess = normalize_answer(guess)
    normal = [normalize_answer(g) for g in golds]
    exact = max(float(guess == g) for g in normal)
    return exact, max(_word_f1(guess.split(), g.split(), version) for g in normal)


def _word_f1(guess: list[str], gold: list[str], version: str) -> float:
    if version == "2.0" and not (guess and gold):
        return float(guess == gold)
    common = sum((Counter(guess) & Counter(gold)).values())
    if not common:
        return 0.0
    precision, recall = common / len(guess), common / len(gold)
    return 2 * precision * recall / (precision + recall)


def squad_scores(
    guesses: Mapping[str, str], golds: Mapping[str, Sequence[str]], version: str
) -> dict[str, float]:
    """exact and f1 in percent over all questions; 2.0 also over those with and without answer."""
    scores = {q: answer_scores(guesses[q], golds[q], version) for q in golds}
    groups = {"": list(golds)}
    if version == "2.0":
        groups |= {
            "has_answer_": [q for q in golds if golds[q]],
            "no_answer_": [q for q in golds if not golds[q]],
        }
    result = {}
    for prefix, questions in groups.items():
        if questions:
            exact, word = np.mean([scores[q] for q in questions], axis=0)
            result |= {f"{prefix}exact": 100 * float(exact), f"{prefix}f1": 100 * float(word)}
    return result


def best_threshold(
    margins: Mapping[str, float], spans: Mapping[str, str], golds: Mapping[str, Sequence[str]]
) -> float:
    """tau that maximises F1: a question is left unanswered when its margin (null score minus best
    span's) is above tau.
    """
    # Starting with every question unanswered, raise tau past one question after another.
    questions = sorted(golds, key=lambda q: (margins[q], q))
    none = {q: answer_scores("", golds[q], "2.0")[1] for q in questions}
    score = sum(none.values())
    best, tau = float(score), margins[questions[0]] - 1.0
    for at, q in enumerate(questions):
        score += answer_scores(spans[q], golds[q], "2.0")[1] - none[q]
        last_of_equals = at + 1 == len(questions) or margins[questions[at + 1]] > margins[q]
        if last_of_equals and score > best + 1e-9:
            best, tau = score, margins[q]
    return float(tau)


# CoNLL (conlleval)


def entities(tags: Sequence[str]) -> set[tuple[int, int, str]]:
    """(first token, one past the last, type) of IOB1 or IOB2 tags.

    As in conlleval: B- always begins an entity; I- goes on with one of the same type and begins
    one otherwise.
    """
    found, start, kind = set(), 0, ""
    for at, tag in enumerate([*tags, "O"]):
        mark, _, here = tag.partition("-")
        if kind and (mark != "I" or here != kind):
            found.add((start, at, kind))
            kind = ""
        if mark != "O" and not kind:
            start, kind = at, here
    return found


def to_iob2(tags: Sequence[str]) -> list[str]:
    """IOB1 or IOB2 tags as IOB2: the first token of every entity gets B-."""
    result = ["O"] * len(tags)
    for start, end, kind in entities(tags):
        result[start:end] = [f"B-{kind}"] + [f"I-{kind}"] * (end - start - 1)
    return result


def entity_scores(
    gold: Sequence[Sequence[str]], guess: Sequence[Sequence[str]]
) -> dict[str, float]:
    """precision, recall and f1 in percent over exactly matching entities of all sentences."""
    right = guessed = true = 0
    for g, p in zip(gold, guess, strict=True):
        if len(g) != len(p):
            raise UserError("gold and guessed sentences differ in length")
        a, b = entities(g), entities(p)
        right, guessed, true = right + len(a & b), guessed + len(b), true + len(a)
    precision = right / guessed if guessed else 0.0
    recall = right / true if true else 0.0
    both = precision + recall
    return {
        "f1": 100 * (2 * precision * recall / both if both else 0.0),
        "precision": 100 * precision,
        "recall": 100 * recall,
    }
