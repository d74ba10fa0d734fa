"""The official measures on cases where a near-miss implementation differs."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from finetune import metrics
from finetune.metrics import answer_scores, best_threshold, entities, entity_scores, to_iob2


@pytest.mark.parametrize(
    ("guess", "golds", "exact", "f1"),
    [
        ("The Cat", ["cat"], 1, 1),
        ("an apple a day", ["apple day"], 1, 1),
        ("theatre", ["atre"], 0, 0),  # "the" only as a word
        ("U.S.A.", ["usa"], 1, 1),
        ("co-operate", ["cooperate"], 1, 1),
        ("“cat”", ["cat"], 0, 0),  # only ASCII punctuation goes
        ("café", ["cafe"], 0, 0),
        ("STRASSE", ["straße"], 0, 0),  # lower(), not casefold()
        ("10\u00a0 km", ["10 km"], 1, 1),  # any Unicode white space
        ("red red cat", ["red cat cat"], 0, 2 / 3),  # words counted with multiplicity
        ("big red cat", ["dog", "red cat"], 0, 0.8),  # the best gold answer counts
        ("paris", ["rome", "paris", "paris"], 1, 1),
    ],
)
def test_answers_score_as_officially_defined(guess, golds, exact, f1) -> None:
    for version in ("1.1", "2.0"):
        assert answer_scores(guess, golds, version) == pytest.approx((exact, f1))


def test_empty_answers_differ_between_the_versions() -> None:
    assert answer_scores("", [], "2.0") == (1, 1)
    assert answer_scores("cat", [], "2.0") == (0, 0)
    assert answer_scores("", ["cat"], "2.0") == (0, 0)
    # A gold answer of articles alone is none in 2.0; in 1.1 it matches exactly without a word.
    assert answer_scores("", ["the"], "2.0") == (1, 1)
    assert answer_scores("a", ["the"], "1.1") == (1, 0)
    assert answer_scores("cat", ["the", "cat"], "2.0") == (1, 1)
    assert answer_scores("", ["the", "cat"], "2.0") == (0, 0)


def test_squad_scores_by_group() -> None:
    golds = {"a": ["cat"], "b": [], "c": []}
    found = metrics.squad_scores({"a": "the cat", "b": "", "c": "dog"}, golds, "2.0")
    assert found == pytest.approx(
        {
            "exact": 200 / 3,
            "f1": 200 / 3,
            "has_answer_exact": 100,
            "has_answer_f1": 100,
            "no_answer_exact": 50,
            "no_answer_f1": 50,
        }
    )


def test_threshold_is_the_best_of_all_possible() -> None:
    rng = np.random.Generator(np.random.Philox(key=5))
    for _ in range(40):
        n = int(rng.integers(1, 9))
        margins = {str(i): float(m) for i, m in enumerate(rng.integers(-3, 4, n))}  # with ties
        spans = {q: "cat" for q in margins}
        choices = ([], ["cat"], ["dog"], ["cat dog"], ["The"])  # the last is no word
        golds = {q: choices[int(rng.integers(5))] for q in margins}

        def f1(tau, margins=margins, golds=golds):
            guesses = {q: "cat" if m <= tau else "" for q, m in margins.items()}
            return metrics.squad_scores(guesses, golds, "2.0")["f1"]

        tau = best_threshold(margins, spans, golds)
        assert f1(tau) == pytest.approx(max(f1(t) for t in np.arange(-5, 6, 0.5)))


def test_entities_follow_conlleval() -> None:
    assert entities("I-A I-A O I-A B-A I-B".split()) == {
        (0, 2, "A"),
        (3, 4, "A"),
        (4, 5, "A"),
        (5, 6, "B"),
    }
    assert entities(["B-A", "I-B", "I-B"]) == {(0, 1, "A"), (1, 3, "B")}
    assert entities(["O"]) == set() == entities([])


def test_iob2_keeps_the_entities() -> None:
    for tags in itertools.product(("O", "B-A", "I-A", "I-B"), repeat=4):
        converted = to_iob2(tags)
        assert entities(converted) == entities(tags)
        for before, here in zip(["O", *converted], converted, strict=False):
            assert not here.startswith("I-") or before in (here, "B" + here[1:])


def test_entity_f1_wants_whole_entities_of_the_right_type() -> None:
    gold = [["B-A", "I-A", "O"], ["B-B"]]
    guess = [["B-A", "O", "O"], ["B-B"]]
    assert entity_scores(gold, guess) == pytest.approx({"f1": 50, "precision": 50, "recall": 50})
    assert entity_scores(gold, [["O"] * 3, ["O"]])["f1"] == 0
    # Sentences stay apart: no entity runs from one into the next.
    assert entity_scores([["I-A"], ["I-A"]], [["B-A"], ["B-A"]])["f1"] == 100


def test_measures_of_a_constant_guess() -> None:
    gold, constant = np.array([0, 1, 1, 0]), np.ones(4, int)
    measures = metrics.MEASURES
    assert measures["matthews"](gold, constant) == 0
    assert measures["f1"](gold, constant) == pytest.approx(2 / 3)
    assert measures["f1"](gold, 1 - constant) == 0
    for name in ("pearson", "spearman"):
        assert measures[name](gold, constant) == 0
        assert measures[name](gold[:1], gold[:1]) == 0 == measures[name](gold[:0], gold[:0])
    far = measures["spearman"](np.array([1.0, 2, 3]), np.array([1.0, 10, 100]))
    assert far == pytest.approx(1)


def test_scores_of_classes() -> None:
    gold, guess = np.array([0, 0, 1, 1]), np.array([0, 1, 1, 1])
    found = metrics.class_scores(gold, guess, ["a", "b", "c"])
    assert found == pytest.approx({"f1/a": 200 / 3, "f1/b": 80, "f1/c": 0})
    assert metrics.MEASURES["f1_macro"](gold, guess) == pytest.approx((2 / 3 + 0.8) / 2)
    assert metrics.MEASURES["f1_micro"](gold, guess) == 0.75
    many, said = np.array([[1, 0], [1, 1]]), np.array([[True, True], [True, False]])
    assert metrics.MEASURES["accuracy"](many, said) == 0
    assert metrics.MEASURES["f1_micro"](many, said) == pytest.approx(2 / 3)
