import numpy as np
import punkt
import pytest
import sentencex

from data_pipeline.corpus.sentences import Punkt, splitter

LIBRARY = punkt.tokenizer_for("english")

TRICKY = [
    "Mr. Smith went to Washington. He met Dr. Jones, Ph.D., at 5 p.m. on Friday. Then he left.",
    'He said "Stop." She did not. "Why?" he asked. (It was late.) They left [or so it seems.] Yes.',
    "The U.S. Army, e.g. the 1st Inf. Div., was there. J. R. R. Tolkien was not. A. Nobody came.",
    "In 1939. The war began. It cost 3.5 million. Version 2.0 came. In 1999. it failed.",
    "Wait . . . what? Really?! Yes!!! (Hm.) Fine... Then we go. Well ... 'Tis so.' So.",
    "It was rare.\". Next. It was so (etc.). Next. See fig. 3. Next. Ends with bracket). Next one.",
    "Jones et al. found it. St. John's is a city. Apple Inc. on Monday, grew. Jan. 5.",
    "word.“ He said. end.” But no. ‘One.’ Two. Last «three.» Four. five. Six;. Seven:. eight",
    "No end here", "", ".", "...", "a. b. c. d.", "Ends. ", "One.Two. Three.four. Five!six? Seven",
    "A pre-war sentence. A well-known etc. It is vs. them. Gen. Grant. Approx. 5 km. Nos. 4 and 5.",
]  # fmt: skip


@pytest.mark.parametrize("text", TRICKY)
def test_equal_to_the_library_on_tricky_text(text):
    ours = Punkt()
    assert ours(" ".join(text.split())) == LIBRARY.tokenize(" ".join(text.split()))


def test_equal_to_the_library_on_random_joins():
    """Every pair of an ending and a beginning that occurs in text, in random order."""
    ours = Punkt()
    ends = [
        "word",
        "etc",
        "Mr",
        "U.S",
        "1999",
        "3.5",
        "p.m",
        "A",
        "end)",
        'end"',
        "end]",
        "vs",
        "i.e",
    ]
    ends += [
        "well-known",
        "(word",
        '"Word',
        "no",
        "it's",
        "rare.",
        "so!",
        "é",
        "naïve",
        "B.C",
        "4th",
    ]
    marks = [".", "?", "!", "...", '."', '".', ".)", ").", ".'", "?!", ".]", ". . .", ".:", ";"]
    begins = [
        "The",
        "the",
        '"The',
        "(The",
        "A",
        "A.",
        "I",
        "5",
        "1990",
        "'Tis",
        "“So",
        ")",
        "Él",
        "New-York",
        "",
    ]
    random = np.random.Generator(np.random.Philox(3))
    for _ in range(3000):
        count = int(random.integers(2, 7))
        parts = [
            f"{begins[random.integers(len(begins))]} {ends[random.integers(len(ends))]}"
            f"{marks[random.integers(len(marks))]}"
            for _ in range(count)
        ]
        text = " ".join(" ".join(parts).split())
        assert ours(text) == LIBRARY.tokenize(text), text


@pytest.mark.parametrize("name", ["punkt", "sentencex"])
def test_nothing_is_lost(name):
    split = splitter(name)
    for text in TRICKY:
        assert "".join("".join(split(text)).split()) == "".join(text.split())


def test_a_line_of_short_answers_takes_no_more_than_its_length():
    # A minute and more where each word is taken from the line's beginning on.
    assert Punkt()('"Well." ' * 400_000) == ['"Well."'] * 400_000


def test_lines_are_sentences():
    assert splitter("lines")("one two\n\n three. Four \n") == ["one two", "three. Four"]


def test_sentencex_is_given_no_endless_paragraph(monkeypatch):
    """Of some texts it takes the square of their length."""
    given, plain = [], sentencex.segment
    monkeypatch.setattr(sentencex, "segment", lambda *a: given.append(len(a[1])) or plain(*a))
    text = "```. " * 5_000 + "`" * 20_000
    found = splitter("sentencex")(text)
    assert max(given) <= 1 << 14 and "".join(found).replace(" ", "") == text.replace(" ", "")
