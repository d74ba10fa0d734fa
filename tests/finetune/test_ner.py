"""CoNLL files: documents, windows in which each word is labelled once, and the way back."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

from core.errors import UserError
from finetune.config import NerConfig, TagConfig, TrainConfig
from finetune.examples import IGNORE_LABEL, Problems
from finetune.ner import (
    Ner,
    Sentence,
    read,
    sentences_in,
    units_of,
    whole_documents,
    windows,
)
from tests.finetune import tiny

TEXT = """-DOCSTART- -X- O O

Paris NNP I-NP I-LOC
was VBD I-VP O
Rome NNP I-NP B-LOC

He PRP I-NP O
saw VBD I-VP O
Old NNP I-NP I-PER
Kingly NNP I-NP I-PER
. . O O

-DOCSTART- -X- O O

France NNP I-NP I-LOC
\x07 X X O
"""


def task(tmp_path, **changes) -> Ner:
    path = tmp_path / "train.txt"
    path.write_text(TEXT)
    config = NerConfig(train_file=str(path), dev_file=str(path), test_file=str(path), **changes)
    return Ner("NER", config, TrainConfig(), tiny.tokenizer())


def test_sentences_tags_and_documents(tmp_path) -> None:
    ner = task(tmp_path)
    found = [(s.words, s.tags, s.line, s.document) for s in ner.sentences["train"]]
    assert found == [
        (("Paris", "was", "Rome"), ("B-LOC", "O", "B-LOC"), 3, 1),
        (
            ("He", "saw", "Old", "Kingly", "."),
            ("O", "O", "B-PER", "I-PER", "O"),
            7,
            1,
        ),
        (("France", "\x07"), ("B-LOC", "O"), 15, 2),
    ]
    assert ner.head.labels == ("O", "B-LOC", "I-LOC", "B-PER", "I-PER")


def test_lines_that_end_in_cr_alone_are_refused(tmp_path) -> None:
    """They would be one word with the last one's tag."""
    path = tmp_path / "mac.txt"
    path.write_bytes(TEXT.replace("\n", "\r").encode())
    with pytest.raises(UserError, match="mac.txt:1: a CR inside the line"):
        read(path)
    path.write_bytes(TEXT.replace("\n", "\r\n").encode())
    assert len(read(path)[0]) == 3


def test_only_first_pieces_carry_labels(tmp_path) -> None:
    item, other = task(tmp_path, max_seq_len=32).sets["train"]
    # A word of a control character has no piece of its own and still gets a place.
    assert [tiny.PIECES[i] for i in other.sequences[0].ids][1:3] == ["france", "[UNK]"]
    pieces = [tiny.PIECES[i] for i in item.sequences[0].ids]
    assert pieces == "[CLS] paris was rome he saw old king ##ly . [SEP]".split()
    none = IGNORE_LABEL
    assert item.label.tolist() == [none, 1, 0, 1, 0, 0, 3, 4, none, 0, none]


@pytest.mark.parametrize("context", ["document", "sentence"])
@pytest.mark.parametrize("size", [16, 64])
def test_right_logits_give_full_marks_in_any_windows(context, size, tmp_path) -> None:
    ner = task(tmp_path, context=context, max_seq_len=size)
    outputs = {}
    for name in ("dev", "test"):
        gold, outputs[name] = ner.labels_of(name), []
        for item, window in zip(ner.sets[name], ner.windows[name], strict=True):
            logits = np.zeros((item.tokens, len(ner.head.labels)))
            logits[window.places, gold[window.words]] = 1
            outputs[name].append(logits)
    score = ner.score(outputs)
    assert score.value == 100 and not score.failed
    assert ner.test_scores(outputs)["f1"] == 100
    ner.write(outputs, score, tmp_path)
    lines = (tmp_path / "test.txt").read_text().split("\n")
    assert lines[:5] == ["Paris B-LOC B-LOC", "was O O", "Rome B-LOC B-LOC", "", "He O O"]
    nothing = {"dev": [np.eye(5)[[0] * i.tokens] for i in ner.sets["dev"]]}
    assert ner.score(nothing).failed


def test_each_unit_is_labelled_once_where_it_sees_most() -> None:
    rng = np.random.Generator(np.random.Philox(key=2))
    for _ in range(200):
        room = 10
        sizes = rng.integers(1, room + 1, int(rng.integers(1, 12))).tolist()
        ends = np.cumsum([0, *sizes])
        found = windows(sizes, room)
        assert sorted(u for *_, units in found for u in units) == list(range(len(sizes)))
        for i, j, units in found:
            assert ends[j] - ends[i] <= room
            assert all(i <= u < j for u in units)
            # As full as whole sentences allow.
            assert j == len(sizes) or ends[j + 1] - ends[i] > room
        sides = {
            u: [min(ends[u] - ends[i], ends[j] - ends[u + 1]) for i, j, _ in found if i <= u < j]
            for u in range(len(sizes))
        }
        for i, j, units in found:
            for u in units:
                assert min(ends[u] - ends[i], ends[j] - ends[u + 1]) == max(sides[u])
    assert windows([3, 3, 3], 9) == [(0, 3, [0, 1, 2])]


def test_long_sentences_are_split_between_words() -> None:
    for counts in itertools.product((1, 2, 4), repeat=4):
        pieces = [[0] * n for n in counts]
        units = units_of(10, pieces, 4)
        assert [p for u in units for p in u.pieces] == pieces
        assert [u.first for u in units] == [
            10 + sum(len(v.pieces) for v in units[:k]) for k in range(len(units))
        ]
        assert all(u.size <= 4 for u in units)


def test_bad_sentences_are_counted_by_line(tmp_path) -> None:
    path = tmp_path / "bad.txt"
    path.write_text("Paris I-LOC\n\nRome\nis O\n\nKing X-PER\n\nRome I-ORG\n")
    sentences, problems = read(path, frozenset({"LOC"}))
    assert len(sentences) == 1 and problems.total == 4
    assert dict(problems.where) == {
        "fewer than 2 columns": ["3"],
        "unknown tag": ["6 'X-PER'", "8 'I-ORG'"],
    }
    path.write_text("Paris NNP I-LOC\n\nRome NNP\nis VB O\n\nKing NNP I-NP O\n")  # two were cut
    assert dict(read(path)[1].where) == {"not the 3 columns of the first line": ["3", "6"]}
    path.write_text("Paris O\n")
    config = NerConfig(train_file=str(path), dev_file=str(path))
    with pytest.raises(UserError, match="no word has a tag other than O"):
        Ner("NER", config, TrainConfig(), tiny.tokenizer())


def test_a_test_file_must_be_whole(tmp_path) -> None:
    path = tmp_path / "test.txt"
    path.write_text("Paris I-LOC\n\n" * 200 + "Rome\n")
    ner = task(tmp_path).config
    config = ner.model_copy(update={"dev_file": str(path)})
    assert Ner("NER", config, TrainConfig(), tiny.tokenizer()).problems[1].bad == 1
    config = ner.model_copy(update={"test_file": str(path)})
    with pytest.raises(UserError, match=r"test.txt: .*\(line 401\); a test file must be whole"):
        Ner("NER", config, TrainConfig(), tiny.tokenizer())


def test_columns_end_at_spaces_and_tabs_alone(tmp_path) -> None:
    path = tmp_path / "spaces.txt"
    path.write_bytes(
        " Paris  NNP I-LOC \r\n\u00a0 NN O\nin\u2003to X O\n \t\r\n\u3000\n\n"
        " New York \tNNP\tI-LOC\t\r\na\t\tO\n\n\tNN\tO\n".encode()
    )
    sentences, problems = read(path)
    assert [s.words for s in sentences] == [("Paris", "\u00a0", "in\u2003to"), ("New York", "a")]
    assert dict(problems.where) == {"fewer than 2 columns": ["5"], "empty word": ["10"]}
    # Such words are predicted, in a form that holds them.
    config = NerConfig(train_file=str(path), dev_file=str(path), max_seq_len=64)
    ner = Ner("NER", config, TrainConfig(max_bad_share=1), tiny.tokenizer())
    outputs = {"dev": [np.eye(3)[[0] * item.tokens] for item in ner.sets["dev"]]}
    ner.write(outputs, ner.score(outputs), tmp_path)
    last = json.loads((tmp_path / "dev.jsonl").read_text().splitlines()[-1])
    assert last == {"tokens": ["New York", "a"], "tags": ["B-LOC", "O"], "guessed": ["O", "O"]}


def test_columns_that_are_not_looked_at_may_be_missing(tmp_path) -> None:
    path = tmp_path / "x.txt"
    path.write_text("1 Paris\n2 was\n")
    config = TagConfig(columns=["id", "form", "tags"], tokens="form")
    (found,) = sentences_in(path, Problems(path), config, labelled=False)
    assert found.words == ("Paris", "was")


def test_columns_by_name_and_lists_of_a_table_hold_the_same_sentences(tmp_path) -> None:
    plain = tmp_path / "x.txt"
    plain.write_text(TEXT)
    wanted = [(s.words, s.tags) for s in read(plain)[0]]
    named = tmp_path / "named.txt"
    lines = [line.split() for line in TEXT.split("\n")]
    moved = [" ".join((f[0], f[3], f[1]) if len(f) == 4 else f) for f in lines]
    named.write_text("\n".join(moved).replace("-DOCSTART- O -X-", "-DOCSTART-"))
    config = TagConfig(columns=["form", "entity", "pos"], tokens="form", tags="entity")
    assert [(s.words, s.tags) for s in read(named, None, config)[0]] == wanted
    table = tmp_path / "x.jsonl"
    rows = [{"words": words, "ner": tags, "id": 3} for words, tags in wanted]
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = TagConfig(tokens="words", tags="ner")
    found, problems = read(table, None, config)
    assert [(s.words, s.tags) for s in found] == wanted and problems.bad == 0
    assert len({s.document for s in found}) == len(found)
    told = table.rename(tmp_path / "told_by_its_first_bytes.txt")
    assert [(s.words, s.tags) for s in read(told, None, config)[0]] == wanted
    with pytest.raises(UserError, match="x.csv: tags stand in CoNLL columns, or in lists"):
        read(told.rename(tmp_path / "x.csv"))
    with pytest.raises(ValueError, match="tokens: 'tokens' is not one of columns"):
        TagConfig(columns=["word", "tag"])
    with pytest.raises(ValueError, match="tags: 'tags' is not one of columns"):
        NerConfig(train_file="x", dev_file="x", columns=["word", "ner", "chunk"], tokens="word")


def test_bad_rows_of_a_table_are_named(tmp_path) -> None:
    path = tmp_path / "x.jsonl"
    rows = [
        {"tokens": ["a"], "tags": ["O"]},
        {"tokens": "a b", "tags": ["O"]},
        {"tokens": ["a", "b"], "tags": ["O"]},
        {"tokens": ["a"], "tags": [1]},
        {"tokens": ["a"], "tags": ["LOC"]},
        {"tokens": [], "tags": []},
        {"tokens": ["a"]},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "{\n")
    found, problems = read(path)
    assert len(found) == 1 and problems.total == 8
    assert dict(problems.where) == {
        "tokens is not a list of words": ["2", "6"],
        "tags is not a list of names, one a word": ["3", "4", "7"],
        "unknown tag": ["5 'LOC'"],
        "not JSON": ["8"],
    }
    path.write_text('{"words": ["a"]}\n')
    with pytest.raises(
        UserError, match=r"x.jsonl:1: no column tokens, tags; it has words; ner.tok"
    ):
        read(path)


def test_a_subset_keeps_documents_whole() -> None:
    every = [Sentence(("a",), ("O",), 9 * d + n, d) for d in range(9) for n in range(1 + d % 4)]
    for count in (1, 5, 12):
        kept = whole_documents(every, count)
        documents = {s.document for s in kept}
        assert kept == [s for s in every if s.document in documents]
        assert count <= len(kept) < count + 4
    assert whole_documents(every, 0) == every == whole_documents(every, 999)


def test_a_subset_of_many_documents_costs_their_number_and_not_the_square_of_it() -> None:
    every = [Sentence(("a",), ("O",), n, n) for n in range(100_000)]
    assert len(whole_documents(every, 50_000)) == 50_000


def test_a_long_tag_or_id_is_named_in_short(tmp_path) -> None:
    path = tmp_path / "long.txt"
    path.write_text("Paris " + "x" * 10**6)
    with pytest.raises(UserError, match="unknown tag .line 1 'xxx") as error:
        read(path)[1].check(0)
    assert len(str(error.value)) < 1000
