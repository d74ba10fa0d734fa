"""SQuAD 1.1 and 2.0: windows over long contexts, answer spans, and the answers as they stand in
the text.

Scores, in logits: of a span from token i to j (j >= i) S.T_i + E.T_j; of no answer
S.C + E.C. 2.0 leaves a question unanswered when s_null > best span + tau, tau chosen on dev.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from core.errors import UserError, short
from core.files import disk_errors, write_atomically
from data_pipeline.corpus.tokenizer import Tokenizer
from finetune.config import SpanConfig, SquadConfig
from finetune.examples import Item, Problems, sequence, subset
from finetune.heads import HeadSpec
from finetune.metrics import best_threshold, squad_scores
from finetune.tables import NO_TEXT, Twice, each_once, open_table, text_of
from finetune.tasks import Outputs, Score, Task


@dataclass(frozen=True)
class Question:
    """answers: (text, first character in the context); none: the question has no answer."""

    id: str
    article: int
    text: str
    context: str
    answers: tuple[tuple[str, int], ...]


class Window(NamedTuple):
    """A run of a context's tokens. question: its place in the set; first: of the context's tokens;
    offsets: int64 [n, 2] characters; owned: bool [n], no other window shows the token with more
    context; skip: tokens before the context ([CLS] question [SEP]).
    """

    question: int
    first: int
    offsets: np.ndarray
    owned: np.ndarray
    skip: int


class Span(NamedTuple):
    """start: the first character in the context."""

    score: float
    start_logit: float
    end_logit: float
    text: str
    start: int


class Answer(NamedTuple):
    """null: the score of no answer, the least of the windows. spans: the best first."""

    null: float
    spans: list[Span]

    @property
    def margin(self) -> float:
        """Null score minus the best span's; large where no span is possible."""
        return self.null - (self.spans[0].score if self.spans else -1e9)


def read(path: Path, *, labelled: bool) -> tuple[list[Question], Problems]:
    """Questions of a file. Bad ones are left out and counted by their id, or their place if they
    have none; `labelled`: off for a test file, whose answers are not looked at.
    """
    problems, seen = Problems(path, unit="question"), set()
    questions = []
    for question in questions_in(path, problems, labelled=labelled):
        if question.id in seen:
            problems.add("duplicate id", question.id)
        else:
            seen.add(question.id)
            questions.append(question)
    return questions, problems


def questions_in(path: Path, problems: Problems, *, labelled: bool) -> Iterator[Question]:
    """The good questions of an official json file, or one after the other of a table: id (or the
    row, from 0), question, context, answers, and a title where there is one."""
    if path.suffix.lower() != ".json":
        yield from _flat(path, problems, labelled)
        return
    try:
        for i, article in enumerate(_articles(path)):
            for j, paragraph in enumerate(_list_of(article, "paragraphs")):
                context = paragraph["context"]
                for k, qa in enumerate(_list_of(paragraph, "qas")):
                    problems.total += 1
                    name = qa.get("id")
                    if _unusable(name):
                        name = f"data[{i}].paragraphs[{j}].qas[{k}]"
                    try:
                        question = _question(qa, i, context, labelled)
                    except _BadQuestion as error:
                        problems.add(str(error), name)
                    else:
                        yield question
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        why = short(f"{type(error).__name__} {error}", 200)
        raise UserError(
            f"{path}: not in SQuAD's format: {why}; a file of one question a line is named .jsonl"
        ) from None


def _list_of(value: Any, key: str) -> list[Any]:
    if not isinstance(found := value[key], list):
        raise TypeError(f"{key} is no list")
    return found


def _articles(path: Path) -> list[Any]:
    with text_of(path) as file:
        try:
            return _list_of(json.load(file, object_pairs_hook=each_once), "data")
        except Twice as error:
            raise UserError(f"{path}: {error}") from None


def _flat(path: Path, problems: Problems, labelled: bool) -> Iterator[Question]:
    table = open_table(path)
    wanted = ["question", "context", *(["answers"] if labelled else [])]
    records = table.records(wanted, ["id", "title", "is_impossible"])
    problems.unit, articles = table.unit, {}
    for place, record in records:
        problems.total += 1
        try:
            if isinstance(record, str):
                raise _BadQuestion(record)
            name = record.get("id", problems.total - 1)
            qa = record | {"id": str(name) if type(name) is int else name}
            context = record.get("context")
            article = 0
            if labelled:
                answers = qa["answers"] = _listed(record.get("answers"))
                if record.get("is_impossible") is None:
                    qa["is_impossible"] = not answers
                article = articles.setdefault(record.get("title") or context, len(articles))
            yield _question(qa, article, context, labelled)
        except _BadQuestion as error:
            problems.add(str(error), place)
        except TypeError:  # of a dictionary's key
            problems.add("title or context is not text", place)


def _listed(answers: Any) -> Any:
    """{text: [...], answer_start: [...]}, as tables have it, as a list of answers."""
    if not isinstance(answers, dict):
        return answers if answers is not None else []
    texts, starts = answers.get("text"), answers.get("answer_start")
    if not (isinstance(texts, list) and isinstance(starts, list) and len(texts) == len(starts)):
        raise _BadQuestion("answers are not lists of text and answer_start, equally long")
    return [{"text": t, "answer_start": s} for t, s in zip(texts, starts, strict=True)]


class _BadQuestion(Exception):
    """Its text says what is wrong."""


def _question(qa: dict[str, Any], article: int, context: Any, labelled: bool) -> Question:
    for key, text in (("id", qa.get("id")), ("question", qa.get("question")), ("context", context)):
        wrong = _unusable(text)
        if wrong:
            raise _BadQuestion(f"{key} {wrong}")
    found = _answers(qa, context) if labelled else ()
    return Question(qa["id"], article, qa["question"], context, found)


def _unusable(text: Any) -> str | None:
    if not isinstance(text, str):
        return "is not text"
    if not text.strip():
        return "is empty"
    return "holds NUL or a lone surrogate" if NO_TEXT.search(text) else None


def _answers(qa: dict[str, Any], context: str) -> tuple[tuple[str, int], ...]:
    impossible, answers = qa.get("is_impossible", False), qa.get("answers", [])
    if not isinstance(impossible, bool):
        raise _BadQuestion("is_impossible is not true or false")
    if not isinstance(answers, list) or not all(isinstance(a, dict) for a in answers):
        raise _BadQuestion("answers are not a list of objects")
    if bool(answers) == impossible:
        raise _BadQuestion("is_impossible, yet has an answer" if impossible else "no answer")
    found = tuple((a.get("text"), a.get("answer_start")) for a in answers)
    for text, start in found:
        if not isinstance(text, str) or type(start) is not int:
            raise _BadQuestion("text or answer_start of an answer has the wrong type")
        if not text or start < 0 or context[start : start + len(text)] != text:
            raise _BadQuestion("answer not in the context")
    return found


def split_by_article(
    questions: list[Question], dev_share: float
) -> tuple[list[Question], list[Question]]:
    """(train, dev), no article in both; the same split every time."""
    articles = sorted({q.article for q in questions})
    chosen = np.random.Generator(np.random.Philox(key=2016)).permutation(len(articles))
    count = max(1, round(dev_share * len(articles)))
    if count >= len(articles):
        raise UserError(f"squad.dev_share: {dev_share} of {len(articles)} articles leaves none")
    dev = {articles[i] for i in chosen[:count]}
    return [q for q in questions if q.article not in dev], [
        q for q in questions if q.article in dev
    ]


def windows(tokens: int, room: int, stride: int) -> list[tuple[int, int]]:
    """(first, count) runs of at most `room` tokens that cover 0..tokens, starts `stride` apart."""
    assert 0 < stride <= room
    runs, first = [], 0
    while True:
        runs.append((first, min(room, tokens - first)))
        if first + room >= tokens:
            return runs
        first += stride


def owners(runs: list[tuple[int, int]], tokens: int) -> np.ndarray:
    """int64 [tokens]: the window in which each token has the most context on its poorer side.

    Equal windows: the one with more tokens, then the first; google-research/bert's rule.
    """
    best, owner = np.full(tokens, -1.0), np.zeros(tokens, np.int64)
    for w, (first, count) in enumerate(runs):
        at = np.arange(count)
        score = np.minimum(at, count - 1 - at) + 0.01 * count
        better = score > best[first : first + count]
        best[first : first + count][better] = score[better]
        owner[first : first + count][better] = w
    return owner


def answer_tokens(offsets: np.ndarray, start: int, end: int) -> tuple[int, int] | None:
    """First and last token that hold characters of [start, end); None if no token does."""
    inside = np.flatnonzero((offsets[:, 1] > start) & (offsets[:, 0] < end))
    return (int(inside[0]), int(inside[-1])) if len(inside) else None


class Spans:
    """Questions as windows over their contexts, and the windows' logits as answers."""

    def __init__(self, config: SpanConfig, tokenizer: Tokenizer) -> None:
        self.config, self.tokenizer = config, tokenizer
        self._encode = lru_cache(maxsize=64)(self._encode_context)

    def _encode_context(self, context: str) -> tuple[list[int], np.ndarray]:
        ids, offsets = self.tokenizer.encode_with_offsets(context)
        return ids, np.array(offsets, np.int64).reshape(-1, 2)

    def encode(
        self, questions: Sequence[Question], *, labelled: bool = False
    ) -> tuple[list[Item], list[Window]]:
        """All windows of all questions; `labelled`: with the first answer, or [CLS]."""
        items, found = [], []
        for n, question in enumerate(questions):
            for item, window in self._windows(n, question, labelled):
                items.append(item)
                found.append(window)
        return items, found

    def _windows(self, n: int, q: Question, labelled: bool) -> Iterator[tuple[Item, Window]]:
        c = self.config
        question = self.tokenizer.encode(q.text)[: c.max_question_tokens]
        ids, offsets = self._encode(q.context)
        runs = windows(len(ids), c.max_seq_len - len(question) - 3, c.stride)
        owner = owners(runs, len(ids))
        skip = len(question) + 2
        answer = None
        if labelled and q.answers:
            text, start = q.answers[0]
            answer = answer_tokens(offsets, start, start + len(text))
        for w, (first, count) in enumerate(runs):
            label = None
            if labelled:
                label = (0, 0)
                if answer and first <= answer[0] and answer[1] < first + count:
                    label = (answer[0] - first + skip, answer[1] - first + skip)
            here = slice(first, first + count)
            item = Item((sequence(self.tokenizer, question, ids[here]),), label)
            yield item, Window(n, first, offsets[here], owner[here] == w, skip)

    def answers(
        self,
        questions: Sequence[Question],
        windows: Sequence[Window],
        outputs: Sequence[np.ndarray],
    ) -> list[Answer]:
        """Of each question."""
        c = self.config
        null = np.full(len(questions), np.inf)
        spans: list[list[tuple[float, float, float, int, int]]] = [[] for _ in questions]
        for window, logits in zip(windows, outputs, strict=True):
            null[window.question] = min(null[window.question], float(logits[0].sum()))
            spans[window.question] += best_spans(
                logits[window.skip : -1], window, c.max_answer_tokens, c.n_best
            )
        result = []
        for n, q in enumerate(questions):
            kept: dict[str, Span] = {}
            for score, s, e, start, end in sorted(spans[n], key=lambda x: (-x[0], x[3:])):
                text = q.context[start:end]
                if text.strip():
                    kept.setdefault(text, Span(score, s, e, text, start))
                if len(kept) == c.n_best:
                    break
            result.append(Answer(float(null[n]), list(kept.values())))
        return result

    def chosen(self, answer: Answer, tau: float) -> Span | None:
        """The best span; None where there is none, or (2.0) where no answer is likelier."""
        if not answer.spans or (self.config.version == "2.0" and answer.margin > tau):
            return None
        return answer.spans[0]

    def n_best(self, answer: Answer) -> list[dict[str, Any]]:
        """As the official n-best file has them: the empty text is no answer."""
        entries = [(s.score, s.text, s.start_logit, s.end_logit) for s in answer.spans]
        if self.config.version == "2.0" or not entries:
            entries.append((answer.null, "", answer.null / 2, answer.null / 2))
        entries.sort(key=lambda e: -e[0])
        weights = np.exp(np.array([e[0] for e in entries]) - entries[0][0])
        return [
            {"text": text, "probability": float(w), "start_logit": s, "end_logit": e}
            for (_, text, s, e), w in zip(entries, weights / weights.sum(), strict=True)
        ]


class Squad(Task):
    config: SquadConfig
    needed = SpanConfig

    def load(self) -> None:
        config = self.config
        self.head = HeadSpec("span", 2)
        self.spans = Spans(config, self.tokenizer)
        questions = self._read(config.train_file, "train")
        if config.dev_file:
            dev = self._read(config.dev_file, "dev")
        else:
            questions, dev = split_by_article(questions, config.dev_share)
        self.questions = {
            "train": subset(questions, self.wanted("train")),
            "dev": subset(dev, self.wanted("dev")),
        }
        if config.test_file:
            self.questions["test"] = self._read(config.test_file, "test")
        self.windows: dict[str, list[Window]] = {}
        for name, chosen in self.questions.items():
            found = self.spans.encode(chosen, labelled=name == "train")
            self.sets[name], self.windows[name] = found
            without = sum(not q.answers for q in chosen)
            answerless = f" ({without:,} without answer)" if name != "test" else ""
            self.notes.append(
                f"{name}: {len(chosen):,} questions{answerless} in "
                f"{len(self.windows[name]):,} windows"
            )
            if name == "train":
                whole = {w.question for item, w in zip(*found, strict=True) if any(item.label)}
                cut = sum(bool(q.answers) for n, q in enumerate(chosen) if n not in whole)
                if cut:
                    self.notes.append(
                        f"train: {cut:,} answers stand whole in no window: trained as no answer"
                    )
        self.golds = {q.id: [text for text, _ in q.answers] for q in self.questions["dev"]}

    def _read(self, file: str, set_name: str) -> list[Question]:
        labelled = set_name != "test"
        questions, problems = read(Path(file), labelled=labelled)
        self.checked(problems, set_name)
        if labelled and self.config.version == "1.1":
            without = sum(not q.answers for q in questions)
            if without:
                raise UserError(
                    f"{file}: {without} questions have no answer; squad.version is 1.1, not 2.0"
                )
        return questions

    def answers(self, outputs: list[np.ndarray], set_name: str) -> dict[str, Answer]:
        """Of each question of a set, by id."""
        questions = self.questions[set_name]
        found = self.spans.answers(questions, self.windows[set_name], outputs)
        return {q.id: answer for q, answer in zip(questions, found, strict=True)}

    def _predictions(self, answers: dict[str, Answer], tau: float) -> dict[str, str]:
        chosen = {q: self.spans.chosen(answer, tau) for q, answer in answers.items()}
        return {q: span.text if span else "" for q, span in chosen.items()}

    def score(self, outputs: Outputs) -> Score:
        answers = self.answers(outputs["dev"], "dev")
        state: dict[str, Any] = {}
        tau = 0.0
        if self.config.version == "2.0":
            best = self._predictions(answers, math.inf)
            margins = {q: answer.margin for q, answer in answers.items()}
            tau = best_threshold(margins, best, self.golds)
            state = {"tau": tau}
        predictions = self._predictions(answers, tau)
        values = squad_scores(predictions, self.golds, self.config.version)
        failed = len(predictions) > 1 and len(set(predictions.values())) == 1
        return Score(values, "f1", failed, state)

    def write(self, outputs: Outputs, score: Score, folder: Path) -> None:
        """predictions, nbest_predictions and (2.0) null_odds, as the official scripts read them."""
        for name in outputs:
            answers = self.answers(outputs[name], name)
            predictions = self._predictions(answers, score.state.get("tau", 0.0))
            files: dict[str, Any] = {
                "predictions": predictions,
                "nbest_predictions": {q: self.spans.n_best(a) for q, a in answers.items()},
            }
            if self.config.version == "2.0":
                files["null_odds"] = {q: answer.margin for q, answer in answers.items()}
            for file, plain in files.items():
                text = json.dumps(plain, indent=1, ensure_ascii=False)
                path = folder / f"{name}_{file}.json"
                with disk_errors(path):
                    write_atomically(path, text + "\n", durable=False)


def best_spans(
    logits: np.ndarray, window: Window, max_answer_tokens: int, n_best: int
) -> list[tuple[float, float, float, int, int]]:
    """(score, start logit, end logit, first character, one past the last) of the best spans.

    logits: [n, 2] of the window's context tokens. A span begins at a token that the window owns,
    its end is not before its start, and it has at most `max_answer_tokens` tokens.
    """
    n = len(logits)
    if not n:
        return []
    width = min(max_answer_tokens, n)
    start = np.where(window.owned, logits[:, 0].astype(np.float64), -np.inf)
    end = np.concatenate([logits[:, 1].astype(np.float64), np.full(width - 1, -np.inf)])
    scores_nw = start[:, None] + np.lib.stride_tricks.sliding_window_view(end, width)
    flat = scores_nw.ravel()
    top = np.argpartition(-flat, min(n_best, flat.size) - 1)[:n_best]
    found = []
    for i, length in zip(*np.divmod(top, width), strict=True):
        if np.isfinite(scores_nw[i, length]):
            j = i + length
            found.append(
                (
                    float(scores_nw[i, length]),
                    float(logits[i, 0]),
                    float(logits[j, 1]),
                    int(window.offsets[i, 0]),
                    int(window.offsets[j, 1]),
                )
            )
    return found
