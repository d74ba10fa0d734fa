"""Answers for a file are the model's own, in order, whole or none; as Hugging Face gives them."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from core.console import Console
from core.errors import UserError
from finetune import predict
from finetune.__main__ import main
from finetune.config import SpanConfig, TagConfig, TextConfig
from finetune.heads import FineTuned, HeadSpec, initialise_head
from pretrain.model import initialise
from tests.finetune import tiny

CPU = torch.device("cpu")
TEXTS = ["the cat sat.", "a dog ran in the sun", "he saw paris", ""] * 3
WORDS = [["Paris", "was", "big"], ["a", "king", "sat", "in", "rome"]]
QUESTIONS = [("who sat", "a king sat in the sun. he was old."), ("where", "paris, france")]
HEADS = {
    "single": HeadSpec("sequence", 3, ("a", "b", "c")),
    "multi": HeadSpec("sequence", 3, ("a", "b", "c"), multi=True),
    "score": HeadSpec("sequence", 1),
    "tags": HeadSpec("tokens", 3, ("O", "B-LOC", "I-LOC")),
    "spans": HeadSpec("span", 2),
}
READING = {
    "tags": TagConfig(max_seq_len=64).model_dump(),
    "spans": SpanConfig(
        max_seq_len=32, max_question_tokens=8, stride=8, max_answer_tokens=6
    ).model_dump(),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """A fine-tuned folder of each kind, large weights in its head so that answers differ."""
    shape, made = tiny.shape(), {}
    for n, (name, head) in enumerate(HEADS.items()):
        model = FineTuned(shape, head, tiny.tokenizer())
        initialise(model.bert, shape, torch.Generator().manual_seed(4))
        initialise_head(model, shape, torch.Generator().manual_seed(n))
        getattr(model, head.layer).weight.data *= 60
        made[name] = tmp_path_factory.mktemp("models") / name
        model.save(made[name], READING.get(name, TextConfig(max_seq_len=32).model_dump()))
    return made


def table(path: Path, texts=TEXTS) -> Path:
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    return path


def answers(folder: Path, file: Path, *overrides: str) -> list[dict]:
    made = predict.Predictor(folder, overrides, CPU)
    return list(made.answers(file, Console(False)))


@pytest.mark.parametrize("kind", ["single", "multi", "score"])
def test_a_pipeline_of_texts_gives_the_same_answers(kind, folders, tmp_path) -> None:
    pipe = transformers.pipeline("text-classification", model=str(folders[kind]), device="cpu")
    ours = answers(folders[kind], table(tmp_path / "x.jsonl"))
    theirs = pipe(TEXTS, top_k=None)
    assert len({json.dumps(a | {"row": 0}) for a in ours}) > 2
    for n, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        other = {entry["label"]: entry["score"] for entry in other}
        assert mine["row"] == n
        if kind == "score":
            assert mine["score"] == pytest.approx(other["LABEL_0"], abs=1e-4)
            continue
        assert mine["probabilities"] == pytest.approx(other, abs=1e-5)
        if kind == "multi":
            assert mine["labels"] == [name for name in "abc" if other[name] > 0.5]
        else:
            assert mine["label"] == max(other, key=other.__getitem__)


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("score", None),
        ("score", "regression"),
        ("score", "multi_label_classification"),
        ("single", None),
        ("single", "single_label_classification"),
        ("single", "multi_label_classification"),
    ],
)
@pytest.mark.parametrize("said", [{}, {"function_to_apply": "none"}])
def test_what_is_made_of_the_outputs_is_what_a_pipeline_makes(
    kind, problem, said, folders, tmp_path
) -> None:
    folder = shutil.copytree(folders[kind], tmp_path / "copy")
    _config(problem_type=problem, **said)(folder)
    pipe = transformers.pipeline("text-classification", model=str(folder), device="cpu")
    ours = answers(folder, table(tmp_path / "x.jsonl"))
    for mine, theirs in zip(ours, pipe(TEXTS, top_k=None), strict=True):
        other = {entry["label"]: entry["score"] for entry in theirs}
        found = mine.get("probabilities") or {"LABEL_0": mine["score"]}
        assert found == pytest.approx(other, abs=1e-4)


def test_a_pipeline_of_pairs_gives_the_same_answers(folders, tmp_path) -> None:
    pipe = transformers.pipeline("text-classification", model=str(folders["single"]), device="cpu")
    path = tmp_path / "x.csv"
    path.write_text("q,a\nthe cat,it sat\na dog,he ran\n")
    pairs = shutil.copytree(folders["single"], tmp_path / "pairs")
    tiny.edit_json(pairs / "config.json", finetune={"text": ["q", "a"], "max_seq_len": 32})
    ours = answers(pairs, path)
    with pytest.raises(UserError, match=r"was trained on pairs of texts; --text names 2 col"):
        answers(pairs, path, "text=q")
    theirs = [
        pipe({"text": a, "text_pair": b}) for a, b in (("the cat", "it sat"), ("a dog", "he ran"))
    ]
    for mine, other in zip(ours, theirs, strict=True):
        other = other[0] if isinstance(other, list) else other
        assert (mine["label"], max(mine["probabilities"].values())) == (
            other["label"], pytest.approx(other["score"], abs=1e-5)
        )  # fmt: skip


def test_pairs_that_are_cut_have_the_answers_of_a_pipeline_and_are_counted(
    folders, tmp_path
) -> None:
    pairs = shutil.copytree(folders["single"], tmp_path / "pairs")
    _config(finetune={"text": ["q", "a"], "max_seq_len": 16})(pairs)
    pipe = transformers.pipeline("text-classification", model=str(pairs), device="cpu")
    words = "the cat sat on a mat and a dog ran to it".split()
    texts = [(" ".join(words[:n]), " ".join(words[m:])) for n in (3, 8, 12) for m in (0, 4, 9)]
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps({"q": q, "a": a}) + "\n" for q, a in texts))
    said = io.StringIO()
    found = predict.Predictor(pairs, [], CPU).answers(path, Console(True, said))
    for mine, (q, a) in zip(found, texts, strict=True):
        theirs = pipe({"text": q, "text_pair": a}, top_k=None, truncation=True, max_length=16)
        other = {entry["label"]: entry["score"] for entry in theirs}
        assert mine["probabilities"] == pytest.approx(other, abs=1e-5)
    lengths = [len(pipe.tokenizer(*pair).input_ids) for pair in texts]
    assert f"{sum(n > 16 for n in lengths)} texts were cut to 16 tokens" in said.getvalue()


def test_pairs_whose_types_the_tokenizer_does_not_give_are_refused(folders, tmp_path) -> None:
    """transformers takes 0 for both texts; of a text alone the answers are the same."""
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "the cat", "question": "who sat", "context": "a king sat."}\n')
    for kind in ("single", "spans"):
        folder = shutil.copytree(folders[kind], tmp_path / kind)
        transformers.BertTokenizer.from_pretrained(folder).save_pretrained(folder)
        tiny.edit_json(folder / "tokenizer_config.json", tokenizer_class="TokenizersBackend")
    texts, spans = tmp_path / "single", tmp_path / "spans"
    _config(finetune={"text": "text", "max_seq_len": 32})(texts)
    pipe = transformers.pipeline("text-classification", model=str(texts), device="cpu")
    other = {entry["label"]: entry["score"] for entry in pipe("the cat", top_k=None)}
    assert answers(texts, path)[0]["probabilities"] == pytest.approx(other, abs=1e-5)
    _config(finetune={"text": ["question", "context"], "max_seq_len": 32})(texts)
    for folder in (texts, spans):
        said = f"{folder}/tokenizer_config.json: model_input_names: no token_type_ids, so the texts"
        with pytest.raises(UserError, match=said):
            answers(folder, path)
        names = ["input_ids", "token_type_ids", "attention_mask"]
        tiny.edit_json(folder / "tokenizer_config.json", model_input_names=names)
        assert len(answers(folder, path)) == 1
    pipe = transformers.pipeline("text-classification", model=str(texts), device="cpu")
    theirs = pipe({"text": "who sat", "text_pair": "a king sat."}, top_k=None)
    other = {entry["label"]: entry["score"] for entry in theirs}
    assert answers(texts, path)[0]["probabilities"] == pytest.approx(other, abs=1e-5)


def test_a_pipeline_of_tags_gives_the_same_answers(folders, tmp_path) -> None:
    pipe = transformers.pipeline(
        "token-classification", model=str(folders["tags"]), device="cpu", ignore_labels=[]
    )
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps({"tokens": words}) + "\n" for words in WORDS))
    ours = answers(folders["tags"], path)
    assert [row["tokens"] for row in ours] == WORDS
    for words, row in zip(WORDS, ours, strict=True):
        assert row["tags"] == [entry["entity"] for entry in pipe(" ".join(words))]
    assert len({tag for row in ours for tag in row["tags"]}) > 1


def test_hugging_face_s_model_of_spans_gives_the_same_answers(folders, tmp_path) -> None:
    """transformers 5 has no pipeline of them: the best span of its logits."""
    theirs = transformers.AutoModelForQuestionAnswering.from_pretrained(folders["spans"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(folders["spans"])
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps({"question": q, "context": c}) + "\n" for q, c in QUESTIONS))
    for (question, context), row in zip(QUESTIONS, answers(folders["spans"], path), strict=True):
        encoded = tokenizer(question, context, return_tensors="pt", return_offsets_mapping=True)
        offsets = encoded.pop("offset_mapping")[0]
        with torch.no_grad():
            found = theirs(**encoded)
        here = np.flatnonzero(encoded["token_type_ids"][0].numpy())[:-1]
        _, i, j = max(
            (float(found.start_logits[0, i] + found.end_logits[0, j]), i, j)
            for i in here
            for j in here
            if i <= j < i + 6
        )
        assert row["answer"] == context[offsets[i][0] : offsets[j][1]]
        assert context[row["start"] :].startswith(row["answer"]) and 0 < row["probability"] <= 1


def test_runs_change_nothing_and_hold_no_more_than_their_records(
    folders, tmp_path, monkeypatch
) -> None:
    path = table(tmp_path / "x.jsonl")
    whole = answers(folders["single"], path)
    monkeypatch.setattr(predict, "RUN", 5)
    seen, plain = [], predict.predict
    monkeypatch.setattr(
        predict, "predict", lambda m, items, *a: (seen.append(len(items)), plain(m, items, *a))[1]
    )
    parts = answers(folders["single"], path)
    assert seen == [5, 5, 2]
    for a, b in zip(whole, parts, strict=True):
        assert a["label"] == b["label"]
        assert a["probabilities"] == pytest.approx(b["probabilities"], abs=1e-5)


def test_a_document_is_not_cut_between_runs(folders, tmp_path, monkeypatch) -> None:
    path = tmp_path / "x.txt"
    path.write_text("-DOCSTART-\n\n" + "paris\n\n" * 3 + "-DOCSTART-\n\n" + "a X Y\ncat\n\n" * 2)
    whole = answers(folders["tags"], path)
    assert [row["tokens"] for row in whole] == [["paris"]] * 3 + [["a", "cat"]] * 2
    monkeypatch.setattr(predict, "RUN", 2)
    assert answers(folders["tags"], path) == whole


@pytest.mark.parametrize(
    ("kind", "name", "lines"),
    [
        ("single", "out.csv", "row,label,probabilities.a,probabilities.b,probabilities.c"),
        ("multi", "out.tsv", "row\tlabels\tprobabilities.a\tprobabilities.b\tprobabilities.c"),
        ("score", "out.jsonl", '{"row": 0, "score": '),
    ],
)
def test_the_command_writes_what_the_suffix_says(
    kind, name, lines, folders, tmp_path, capsys
) -> None:
    file, out = table(tmp_path / "x.jsonl"), tmp_path / name
    assert main(["predict", str(folders[kind]), str(file), "--out", str(out)]) == 0
    assert out.read_text().startswith(lines)
    assert "12 answered" in capsys.readouterr().err
    if name.endswith(".csv"):
        with out.open() as opened:
            rows = list(csv.DictReader(opened))
        assert [row["row"] for row in rows] == [str(n) for n in range(12)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_no_half_of_the_answers(
    number, folders, tmp_path, monkeypatch, capsys
) -> None:
    plain, halves = predict.Predictor.answers, []

    def and_killed(self, *given):
        yield from plain(self, *given)
        halves.extend(tmp_path.glob(".out.csv.*.part"))
        os.kill(os.getpid(), number)

    monkeypatch.setattr(predict.Predictor, "answers", and_killed)
    file, out = table(tmp_path / "x.jsonl"), tmp_path / "out.csv"
    assert main(["predict", str(folders["single"]), str(file), "--out", str(out)]) == 128 + number
    assert halves and list(tmp_path.iterdir()) == [file]
    assert f"stopped by {number.name}\n" in capsys.readouterr().err
    assert signal.getsignal(number) == signal.SIG_DFL


def test_tokens_added_to_a_model_are_said(folders, tmp_path, capsys) -> None:
    folder = shutil.copytree(folders["single"], tmp_path / "model")
    (folder / "added_tokens.json").write_text('{"covid19": 100, "[MASK]": 4}')
    file, out = table(tmp_path / "x.jsonl"), tmp_path / "out.csv"
    assert main(["predict", str(folder), str(file), "--out", str(out)]) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if "tokens added" in line]
    assert (
        len(said) == 1 and "added_tokens.json: without the tokens added to it: covid19" in said[0]
    )


@pytest.mark.parametrize(
    ("kind", "name", "content"),
    [
        ("single", "train.csv", "text,label\na b,a\n"),
        ("single", "train.csv", "row,label,text\n1,a,a b\n"),
        ("single", "train.jsonl", '{"row": 1, "label": "a", "text": "a b"}\n'),
        ("tags", "gold.jsonl", '{"tokens": ["paris"], "tags": ["B-LOC"]}\n'),
        ("tags", "gold.conll", "paris B-LOC\n\n"),
        ("single", "train.tsv", "rows\tlabel\n"),
        ("score", "metrics.jsonl", '{"step": 1}\n'),
        ("tags", "metrics.jsonl", '{"step": 1}\n'),
    ],
)
def test_answers_take_no_other_file_s_place(kind, name, content, folders, tmp_path, capsys):
    file, out = table(tmp_path / "x.jsonl"), tmp_path / name
    if kind == "tags":
        file.write_text('{"tokens": ["paris"]}\n')
    arguments = ["predict", str(folders[kind]), str(file), "--out", str(out)]
    out.write_text(content)
    assert main(arguments) == 2
    assert f"{name}: is there, and is not known for earlier answers" in capsys.readouterr().err
    assert out.read_text() == content
    out.unlink()
    assert main(arguments) == 0 and main([*arguments, "--force"]) == 0
    assert main(arguments) == (2 if kind == "tags" else 0)


def test_tags_as_words_and_tags(folders, tmp_path) -> None:
    file, out = tmp_path / "x.txt", tmp_path / "out.conll"
    file.write_text("paris\nwas\n\nbig\n")
    assert main(["predict", str(folders["tags"]), str(file), "--out", str(out)]) == 0
    assert [line.split(" ")[0] for line in out.read_text().split("\n")] == [
        "paris", "was", "", "big", "", "",
    ]  # fmt: skip
    spaced = tmp_path / "x.jsonl"
    spaced.write_text('{"tokens": ["new york"]}\n')
    forced = ["--out", str(out), "--force"]
    with pytest.raises(UserError, match="out.conll: 'new york' holds a space; write .jsonl"):
        predict.main([str(folders["tags"]), str(spaced), *forced])
    folder = shutil.copytree(folders["tags"], tmp_path / "copy")
    _config(id2label={"0": "O\n", "1": "B\n", "2": "I\n"})(folder)
    with pytest.raises(UserError, match=r"out.conll: '[OBI].n' holds a space; write .jsonl"):
        predict.main([str(folder), str(file), *forced])


def test_overrides_are_of_the_model_s_own_settings(folders) -> None:
    made = predict.Predictor(folders["spans"], ["max_seq_len=48"], CPU)
    assert (made.kind.config.max_seq_len, made.kind.config.stride) == (48, 8)
    with pytest.raises(UserError, match="config.json: stride: 30 is more than the 21 context"):
        predict.Predictor(folders["spans"], ["stride=30"], CPU)


@pytest.mark.parametrize(
    ("kind", "content", "arguments", "message"),
    [
        (
            "single",
            '{"text": "a"}\n{"text"\n',
            [],
            r"x.jsonl: 1 of 2 left out: not JSON \(line 2\)",
        ),
        (
            "single",
            '{"words": "a"}\n',
            [],
            r"x.jsonl:1: no column text; it has words; --text names",
        ),
        (
            "single",
            '{"text": "a"}\n',
            ["--set", "max_seq_len=65"],
            "max_seq_len: 65 is more than the 64",
        ),
        ("single", '{"text": ""}\n{}\n', [], r"1 of 2 left out: no column text \(line 2\)"),
        ("single", '{"text": null}\n', [], r"1 of 1 left out: empty text \(line 1\)"),
        ("single", '{"text": "a"}\n', ["--set", "stride=9"], "stride: unknown key"),
        (
            "single",
            '{"a": "x", "b": "y"}\n',
            ["--text", "a", "b"],
            r"was trained on one text; --text names 1 column\(s\), given: a, b",
        ),
        ("tags", '{"tokens": "a b"}\n', [], r"tokens is not a list of words \(line 1\)"),
        ("spans", '{"question": "a"}\n', [], "no column context; it has question"),
        ("spans", '{"question": "a", "context": " "}\n', [], r"context is empty \(line 1\)"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_no_file(
    kind, content, arguments, message, folders, tmp_path, capsys
) -> None:
    import re

    file, out = tmp_path / "x.jsonl", tmp_path / "out.jsonl"
    file.write_text(content)
    assert main(["predict", str(folders[kind]), str(file), "--out", str(out), *arguments]) == 2
    shown = capsys.readouterr().err.splitlines()[-1]
    assert shown.startswith("error: ") and re.search(message, shown)
    assert not out.exists() and not list(tmp_path.glob(".*part"))


def test_marks_of_a_tsv_that_are_text_join_no_answers(folders, tmp_path) -> None:
    path = tmp_path / "x.tsv"
    path.write_text('text\na\n"the cat\nsat\non a mat"\n')
    with pytest.raises(UserError, match="x.tsv:3: a field .*; --set quotes=false where the marks"):
        answers(folders["single"], path)
    assert len(answers(folders["single"], path, "quotes=false")) == 4
    assert len(answers(folders["single"], path, "quotes=true")) == 2
    path.write_text('question\tcontext\n"who\ta cat\n"why"\ta dog"\n')
    with pytest.raises(UserError, match="x.tsv:2: .*; write it as jsonl where"):
        answers(folders["spans"], path)
    path.write_text('question\tcontext\nwho\t"a cat\nwhy\ta dog"\n')
    with pytest.raises(UserError, match="x.tsv:2: .* a tab; write it as jsonl"):
        answers(folders["spans"], path)


def test_what_is_no_fine_tuned_model_is_named(tmp_path, folders) -> None:
    with pytest.raises(UserError, match="no fine-tuned folder, job or run"):
        predict.folder_of(tmp_path)
    folder = tiny.encoder(tmp_path / "encoder")
    with pytest.raises(UserError, match="is not one of BertForSequenceClass.*was it fine-tuned"):
        predict.Predictor(folder, [], CPU)
    with pytest.raises(UserError, match="is the file that is read"):
        file = str(table(tmp_path / "x.jsonl"))
        predict.main([str(folders["single"]), file, "--out", file])


def _head(value, name="classifier.weight"):
    def change(folder):
        state = load_file(folder / "model.safetensors")
        save_file(state | {name: value(state)}, folder / "model.safetensors")

    return change


def _overflow(folder):
    state = load_file(folder / "model.safetensors")
    for name in ("bert.pooler.dense.weight", "classifier.weight"):
        state[name] = state[name].sign() * 3e38
    save_file(state, folder / "model.safetensors")


def _reading(**changes):
    def change(folder):
        plain = json.loads((folder / "config.json").read_text())
        tiny.edit_json(folder / "config.json", finetune=plain["finetune"] | changes)

    return change


def _lstm(*shape):
    def change(folder):
        _config(bilstm=8)(folder)
        _head(lambda s: torch.zeros(shape), "bilstm.weight_hh_l0")(folder)

    return change


def _config(**changes):
    return lambda folder: tiny.edit_json(folder / "config.json", **changes)


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("single", _config(problem_type="regression"), "3 scores of a text are not supported"),
        ("multi", _config(problem_type="multi_label"), "problem_type: .* is none of regression, "),
        ("single", _config(id2label={"0": "a", "1": "b"}), "id2label: 3 different names are"),
        ("tags", _config(id2label={"0": "O", "1": "B", "2": "B"}), "id2label: 3 different names"),
        ("single", _config(is_decoder=True), "is_decoder: true with BertForSequenceClass"),
        ("single", _config(bilstm=65536), "config.json: bilstm: 65536, the weights'"),
        ("single", _config(bilstm=1 << 40), "config.json: bilstm: .* given 1099511627776"),
        ("single", _lstm(), r"bilstm: 8, the weights' .* has the shape \(\)"),
        ("single", _lstm(1, 8), r"bilstm: 8, the weights' .* has the shape \(1, 8\)"),
        ("single", _head(lambda s: torch.zeros(0, 32)), "0 scores of a text are not supported"),
        ("single", _head(lambda s: torch.tensor(1.0)), "is not one of .* was it fine-tuned"),
        ("single", _head(lambda s: s["classifier.weight"] * math.nan), "are not finite real"),
        ("single", _head(lambda s: s["classifier.weight"].int()), "are not finite real numbers"),
        ("single", _overflow, "answers that are not finite"),
        ("spans", _reading(tau="x"), "tau: .x. is no number"),
        ("spans", _reading(tau=math.nan), "tau: NaN is no number"),
        ("spans", _reading(versiom="2.0"), "config.json: versiom: unknown key"),
        ("single", _reading(tau=1.0), "config.json: tau: unknown key"),
        *[
            (kind, _config(finetune=said), f"finetune: {shown} says not how data are read")
            for kind in ("single", "tags", "spans")
            for said, shown in [("x", ".x."), ([], r"\[\]"), (-1, "-1"), (None, "null"), ({}, "{}")]
        ],
    ],
)
def test_a_damaged_head_is_one_line(kind, change, message, folders, tmp_path) -> None:
    folder = shutil.copytree(folders[kind], tmp_path / "copy")
    change(folder)
    with pytest.raises(UserError, match=message):
        answers(folder, table(tmp_path / "x.jsonl"))


def test_a_folder_that_hugging_face_made(folders, tmp_path) -> None:
    theirs = transformers.BertForSequenceClassification.from_pretrained(folders["single"])
    del theirs.config.finetune
    theirs.save_pretrained(tmp_path / "theirs")
    transformers.AutoTokenizer.from_pretrained(folders["single"]).save_pretrained(
        tmp_path / "theirs"
    )
    path = table(tmp_path / "x.jsonl")
    assert answers(tmp_path / "theirs", path) == answers(folders["single"], path)
