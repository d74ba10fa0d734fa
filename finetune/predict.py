"""What a fine-tuned model says of new data: classes or scores of texts, spans, tags.

MODEL is a fine-tuned folder (ours or Hugging Face's own BertForSequenceClassification,
BertForTokenClassification or BertForQuestionAnswering), a job's folder, or a run with one task,
whose best job is taken. FILE, read and answered in runs, so that it may be larger than memory:

  text classes, scores   csv, tsv, jsonl or parquet with the columns of training, or --text
  tags                   CoNLL columns, or jsonl or parquet with `tokens`, a list of words
  spans                  SQuAD's json, or a table of question, context and perhaps id

The answers come in the order of FILE, as csv, tsv or jsonl by the suffix of --out (tags: jsonl, or
.txt and .conll for a word and its tag a line). They are there when all are, or not at all; a record
that cannot be read stops with its line. `row` counts the records of FILE from 0.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import itertools
import json
import math
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from configs.load import Config, add_overrides, check, overridden, override
from core.console import Console
from core.errors import UserError, short
from core.files import disk_errors, is_there, look, open_regular, read_json
from core.processes import ends_are_heard
from core.urls import path_here
from data_pipeline.corpus.tokenizer import Tokenizer
from finetune import classify, loading, ner, results, squad
from finetune.config import EncoderConfig, SpanConfig, TagConfig, TextConfig, TrainConfig
from finetune.examples import Item, Problems
from finetune.heads import READING, FineTuned, HeadSpec
from finetune.tables import JSON_LINES, Row, flat, open_table, text_in, write_table
from finetune.train import compute_dtype, predict
from pretrain.hugging_face import Pretrained

RUN = 1024  # records answered at a time
_LONGEST = 8 * RUN  # records of one document that are kept together
_TOKENS = 16384  # computed at a time
_OURS = re.compile("BiLstm|LastToken")  # in names of classes that Hugging Face has not
# Hugging Face's; a folder of its own need not say.
_PROBLEMS = (
    None, "regression", "single_label_classification", "multi_label_classification",
)  # fmt: skip
E = TypeVar("E")


class Answering(Generic[E]):
    """One kind of model: FILE's examples, their sequences, and what the outputs say of them."""

    settings: type[Config]
    found: frozenset[str] = frozenset()  # what was found on dev, kept beside the settings
    cuts = 0  # how many texts were longer than max_seq_len so far
    paired = False  # whether it reads two texts together, told apart by their types

    def __init__(
        self, head: HeadSpec, tokenizer: Tokenizer, settings: Any, state: Mapping[str, Any]
    ) -> None:
        self.head, self.tokenizer, self.config, self.state = head, tokenizer, settings, state

    def read(self, path: Path, problems: Problems) -> Iterator[E]:
        raise NotImplementedError

    def together(self, one: E, other: E) -> bool:
        """Whether two examples, one after the other, are of one document."""
        return False

    def answers(
        self, examples: list[E], outputs: Callable[[Sequence[Item]], list[np.ndarray]]
    ) -> Iterable[dict[str, Any]]:
        raise NotImplementedError


class Texts(Answering[Row]):
    settings = TextConfig

    @property
    def paired(self) -> bool:
        return len(self.config.text) == 2

    def read(self, path: Path, problems: Problems) -> Iterator[Row]:
        table = open_table(path, quotes=self.config.quotes, quotes_key="--set quotes=")
        records = table.records(self.config.text, remedy="; --text names them")
        problems.unit = table.unit
        for number, (place, record) in enumerate(records):
            problems.total += 1
            try:
                if isinstance(record, str):
                    raise ValueError(record)
                texts = tuple(text_in(record, column, True) for column in self.config.text)
                yield Row(place, str(number), texts, None)
            except ValueError as error:
                problems.add(str(error), place)

    def answers(self, examples, outputs):
        items, cuts = classify.encode(self.tokenizer, examples, self.config.max_seq_len)
        self.cuts += cuts
        for row, values in zip(examples, outputs(items), strict=True):
            yield {"row": int(row.index)} | classify.answer(self.head, values)


class Tags(Answering[ner.Sentence]):
    settings = TagConfig

    def read(self, path: Path, problems: Problems) -> Iterator[ner.Sentence]:
        return ner.sentences_in(path, problems, self.config, labelled=False)

    def together(self, one: ner.Sentence, other: ner.Sentence) -> bool:
        return self.config.context == "document" and one.document == other.document

    def answers(self, examples, outputs):
        items, windows = ner.encode(self.tokenizer, examples, self.config)
        classes = ner.word_classes(windows, outputs(items))
        labels = self.head.labels or classify.numbered(self.head.outputs)
        for sentence, tags in zip(
            examples, ner.by_sentence(classes, examples, labels), strict=True
        ):
            yield {"tokens": list(sentence.words), "tags": tags}


class Answers(Answering[squad.Question]):
    settings, paired = SpanConfig, True
    found = frozenset({"tau"})

    def read(self, path: Path, problems: Problems) -> Iterator[squad.Question]:
        return squad.questions_in(path, problems, labelled=False)

    def answers(self, examples, outputs):
        spans = squad.Spans(self.config, self.tokenizer)
        items, windows = spans.encode(examples)
        found = spans.answers(examples, windows, outputs(items))
        for question, answer in zip(examples, found, strict=True):
            span = spans.chosen(answer, self.state.get("tau", 0.0))
            text = span.text if span else ""
            shares = {e["text"]: e["probability"] for e in spans.n_best(answer)}
            yield {
                "id": question.id,
                "answer": text,
                "start": span.start if span else None,
                "probability": shares.get(text),
            }


KINDS: dict[str, type[Answering]] = {"sequence": Texts, "tokens": Tags, "span": Answers}


def folder_of(path: Path) -> Path:
    """The fine-tuned folder that a user's MODEL names."""
    for folder in (path, path / "model"):
        if is_there(folder / "config.json"):
            return folder
    tasks = sorted({p.parent.parent for p in path.glob(f"*/*/{results.RESULT}")})
    if len(tasks) == 1:
        best, _ = results.best(results.of_task(tasks[0]))
        if (best / "model" / "config.json").exists():
            return best / "model"
        raise UserError(
            f"{best}: keeps no weights of an encoder (train.keep_weights, ner.features)"
        )
    if tasks:
        names = ", ".join(task.name for task in tasks)
        raise UserError(f"{path}: holds several tasks ({names}); name a job's folder: TASK/JOB")
    raise UserError(f"{path}: no fine-tuned folder, job or run with finished jobs")


def head_of(folder: Path, plain: Mapping[str, Any], source: Pretrained) -> HeadSpec:
    """Of a fine-tuned folder; UserError where it has none that is known."""
    for kind in KINDS:
        head = HeadSpec(kind, 2)
        weight = source.weights.get(f"{head.layer}.weight")
        names = plain.get("architectures")
        named = str(names[0]) if isinstance(names, list) and names else ""
        if head.architecture == _OURS.sub("", named) and weight is not None and weight.dim() == 2:
            decoder = plain.get("is_decoder") is True
            if decoder and kind == "sequence" and "LastToken" not in named:
                raise UserError(
                    f"{folder / 'config.json'}: is_decoder: true with {named}, whose layer "
                    "reads the first token, is not supported"
                )
            outputs, problem = len(weight), plain.get("problem_type")
            labels = source.labels if outputs > 1 and kind != "span" else ()
            if outputs > 1 and problem == "regression" or not outputs:
                raise UserError(f"{folder}: {outputs} scores of a text are not supported")
            if labels and len(set(labels)) != outputs:
                raise UserError(
                    f"{folder / 'config.json'}: id2label: {outputs} different names are expected, "
                    f"one of each class, not {short(', '.join(labels))}"
                )
            if problem not in _PROBLEMS:
                raise UserError(
                    f"{folder / 'config.json'}: problem_type: {short(json.dumps(problem))} is none "
                    f"of {', '.join(filter(None, _PROBLEMS))}"
                )
            # A pipeline takes one output for the logit of one class unless a regression is named.
            one = kind == "sequence" and outputs == 1 and problem != "regression"
            return HeadSpec(kind, outputs, labels, one or problem == "multi_label_classification")
    known = ", ".join(HeadSpec(kind, 2).architecture for kind in KINDS)
    raise UserError(f"{folder}: is not one of {known}, with its layer; was it fine-tuned?")


class Predictor:
    """A fine-tuned model at work."""

    def __init__(self, path: Path, overrides: Sequence[str], device: torch.device) -> None:
        folder = folder_of(path)
        plain = read_json(folder / "config.json")
        bilstm = plain.get("bilstm", 0)
        given = {"path": str(folder), "bilstm": bilstm}
        encoder = check(given, EncoderConfig, str(folder / "config.json"))
        source = loading.read(encoder, 0)
        # Asked before the LSTM is made, whose size in memory the config alone would decide.
        found = tuple(source.weights.get("bilstm.weight_hh_l0", torch.empty(0)).shape)
        if bilstm and found != (4 * bilstm, bilstm):
            have = "the weights' bilstm.weight_hh_l0 has the shape"
            raise UserError(f"{folder / 'config.json'}: bilstm: {bilstm}, {have} {found}")
        self.left_out = source.left_out
        self.head = head_of(folder, plain, source)
        kind = KINDS[self.head.kind]
        positions = source.shape.max_position_embeddings
        # A folder of Hugging Face's does not say.
        reading = plain.get(READING, {"max_seq_len": min(512, positions)})
        if not isinstance(reading, dict) or not reading:
            found = short(json.dumps(reading))
            raise UserError(
                f"{folder / 'config.json'}: {READING}: {found} says not how data are read"
            )
        kept = {key: value for key, value in reading.items() if key not in kind.found}
        settings = check(overridden(kept, overrides), kind.settings, str(folder / "config.json"))
        _same_count(kept.get("text"), settings, folder)
        loading.check_length(source, settings.max_seq_len)
        state = {key: value for key, value in reading.items() if key in kind.found}
        tau = state.get("tau", 0.0)
        if type(tau) not in (int, float) or not abs(tau) < math.inf:
            found = short(json.dumps(tau))
            raise UserError(f"{folder / 'config.json'}: {READING}.tau: {found} is no number")
        self.kind = kind(self.head, source.tokenizer, settings, state)
        if self.kind.paired and source.untyped:
            raise UserError(f"{source.untyped}; name them there if the model was trained with them")
        self.model: FineTuned = loading.build(source, self.head, encoder, 0)[0]
        self.device, self.folder = device, folder
        self.model.to(device)
        self.model.prepare(compute_dtype(TrainConfig(), device), device, settings.max_seq_len)

    def answers(self, path: Path, console: Console) -> Iterator[dict[str, Any]]:
        """Of each record of a file, in order."""
        problems, done, started = Problems(path), 0, time.monotonic()

        def outputs(items: Sequence[Item]) -> list[np.ndarray]:
            found = predict(self.model, items, _TOKENS, self.device)
            if not all(np.isfinite(item).all() for item in found):
                raise UserError(f"{self.folder}: gives answers that are not finite numbers")
            return found

        for examples in self._runs(self.kind.read(path, problems)):
            problems.check_whole()
            yield from self.kind.answers(examples, outputs)
            done += len(examples)
            rate = done / max(time.monotonic() - started, 1e-9)
            console.progress(f"{path}: {done:,} answered  {rate:.1f} examples/s")
        problems.check_whole()
        if not done:
            raise UserError(f"{path}: holds no example")
        rate = done / max(time.monotonic() - started, 1e-9)
        console.progress(f"{path}: {done:,} answered  {rate:.1f} examples/s", last=True)
        if self.kind.cuts:
            limit = self.kind.config.max_seq_len
            console.say(f"{path}: {self.kind.cuts:,} texts were cut to {limit} tokens")

    def _runs(self, examples: Iterable[Any]) -> Iterator[list[Any]]:
        run: list[Any] = []
        for example in examples:
            full = len(run) >= RUN and not self.kind.together(run[-1], example)
            if full or len(run) >= _LONGEST:
                yield run
                run = []
            run.append(example)
        if run:
            yield run


def _same_count(trained: Any, settings: Any, folder: Path) -> None:
    """UserError where a model of pairs is given one text, or the other way round. trained: the
    columns of training; a folder of Hugging Face's does not say."""
    if isinstance(trained, list) and len(trained) != len(settings.text):
        kind = "one text" if len(trained) == 1 else "pairs of texts"
        raise UserError(
            f"{folder}: was trained on {kind}; --text names {len(trained)} column(s), "
            f"given: {', '.join(settings.text)}"
        )


def write(path: Path, answers: Iterator[dict[str, Any]], *, tags: bool) -> None:
    """Whole or not at all, by the suffix of `path`."""
    if not tags or path.suffix.lower() in JSON_LINES:
        write_table(path, answers)
    elif path.suffix.lower() in (".txt", ".conll"):
        ner.write_columns(path, ((row["tokens"], row["tags"]) for row in answers))
    else:
        raise UserError(f"{path}: tags are written as .jsonl, .txt or .conll")


def _check_replaceable(path: Path, first: Mapping[str, Any] | None) -> None:
    """UserError where a file is there that holds no answers of the form of `first`; tags, for
    which that is None, look as labelled data do, so that none is known for earlier answers."""
    if look(path) is None:
        return
    with disk_errors(path), open_regular(path) as file:
        line = file.readline(1 << 20).decode("utf-8", "replace")
    suffix, found = path.suffix.lower(), []
    if suffix in JSON_LINES:
        with contextlib.suppress(ValueError, RecursionError, TypeError):
            found = list(json.loads(line))
    else:
        with contextlib.suppress(csv.Error):
            found = next(csv.reader([line], delimiter="," if suffix == ".csv" else "\t"), [])
    if line and (first is None or found != list(first if suffix in JSON_LINES else flat(first))):
        raise UserError(
            f"{path}: is there, and is not known for earlier answers: move it away, or --force"
        )


@ends_are_heard()
def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m finetune predict",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("file", metavar="FILE")
    parser.add_argument(
        "--out",
        required=True,
        metavar="FILE",
        type=path_here,
        help="is written over no other file; a table over earlier answers",
    )
    parser.add_argument("--force", action="store_true", help="write over --out whatever it is")
    parser.add_argument(
        "--text", nargs="+", metavar="COLUMN", help="of the text, or of each of two"
    )
    add_overrides(
        parser,
        "otherwise than in training, such as max_seq_len=256, quotes=false, tokens=words, "
        "stride=64",
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    arguments = parser.parse_args(argv)
    file, out = Path(arguments.file), arguments.out
    with disk_errors(file):
        open_regular(file).close()
    if out.exists() and out.samefile(file):
        raise UserError(f"--out: {short(str(out))} is the file that is read")
    cuda = torch.cuda.is_available()
    if arguments.device == "cuda" and not cuda:
        raise UserError("--device: cuda is asked for but torch sees no GPU")
    device = torch.device("cuda" if cuda and arguments.device != "cpu" else "cpu")
    overrides = arguments.overrides
    if arguments.text is not None:
        overrides = [*overrides, override("text", arguments.text)]
    console = Console(True, sys.stderr)
    predictor = Predictor(Path(arguments.model), overrides, device)
    if predictor.left_out:
        console.say(predictor.left_out)
    tags = predictor.head.kind == "tokens"
    answers = predictor.answers(file, console)
    if tags and not arguments.force:
        _check_replaceable(out, None)
    elif not arguments.force:
        first = next(answers)
        _check_replaceable(out, first)
        answers = itertools.chain([first], answers)
    write(out, answers, tags=tags)
    console.say(f"{predictor.folder} -> {out}")
    return 0
