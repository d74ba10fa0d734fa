import numpy as np
import pytest

from data_pipeline.corpus.books import book_paragraphs, cut_gutenberg
from data_pipeline.corpus.documents import (
    Document,
    FilterConfig,
    clean_text,
    minhash,
    near_duplicates,
    share,
    text_hash,
)
from tests.data_pipeline.corpus.text import WORDS, document, with_peak


def test_cleaning_normalises_and_takes_controls_out():
    assert clean_text("e\u0301a\u200bb\x00c\x07\ufeff\u00ad d\u00a0e") == "éabc d\u00a0e"
    assert clean_text("a\vb\f\fc\x1f \x1cd\n\fe.\f\n") == "a b c d\ne.\n"
    assert clean_text("a\r\nb\rc\u2028d\u2029e\x85f") == "a\nb\nc\nd\ne\nf"
    plain = "Plain text, “quoted” – as it is.\n"
    assert clean_text(plain) == plain


def test_no_letter_has_marks_without_end():
    # To sort the marks of this one would take hours.
    few, many = "\u0316\u0301" * 15, "\u0301\u0f73" * 1_000_000
    assert clean_text(f"x{few}.") == "x" + "\u0316" * 15 + "\u0301" * 15 + "."
    assert len(clean_text(f"x{many}. x{few}")) == 1 + 45 + 2 + 31
    for hidden in "\u200b\u00ad":
        assert clean_text("e" + f"{hidden}\u0301" * 99) == "é" + 29 * "\u0301"
    signs = "——🙂\ufe0f" * 100
    assert clean_text(signs) == signs


@pytest.mark.parametrize(
    ("filters", "text", "reason"),
    [
        ({}, "!!! ???", None),
        ({"min_words": 3}, "two words", "too short"),
        ({"min_words": 2}, "two words", None),
        ({"max_symbol_ratio": 0.3}, "$$ %% ab", "too many symbols"),
        ({"max_symbol_ratio": 0.3}, "all fine here.", None),
        ({"min_english_ratio": 0.2}, "der Fluss und die Stadt sind hier", "not English"),
        ({"min_english_ratio": 0.2}, "the river and the city are here", None),
    ],
)
def test_filters_say_why(filters, text, reason):
    assert FilterConfig(**filters).reason(Document("x", [text])) == reason


def test_gutenberg_header_and_licence_are_cut():
    body = "Chapter 1\n\nIt was a dark night.\n"
    text = (
        "The Project Gutenberg EBook of X\n\n*** START OF THIS PROJECT GUTENBERG EBOOK X ***\n\n"
        f"Produced by A. Reader and\nB. Reader\n\n{body}\n"
        "*** END OF THIS PROJECT GUTENBERG EBOOK X ***\n"
        f"Project Gutenberg-tm licence {'words ' * 50}"
    )
    cut = cut_gutenberg(text)
    assert cut.strip() == body.strip()
    older = (
        f"*END*THE SMALL PRINT! FOR PUBLIC DOMAIN*\n{body}\nEnd of the Project Gutenberg Etext\n"
        "Project Gutenberg-tm x"
    )
    assert cut_gutenberg(older).strip() == body.strip()
    assert cut_gutenberg(body) == body
    other = "A foreword.\n\n*** START: the story ***\n\nIt was dark.\n"
    assert cut_gutenberg(other) == other


@pytest.mark.parametrize("blank", ["", " ", "  ", "\t", "\u00a0"])
@pytest.mark.parametrize("lines", [1, 3, 9])
def test_with_its_credit_a_book_loses_one_paragraph(blank: str, lines: int) -> None:
    credit = "\n".join(["Produced by A. Reader", *["and B. Reader"] * (lines - 1)])
    for gap in (f"\n{blank}\n", "\n  "):  # of paragraphs that are told by their indents, too
        body = gap.join(f"{n} it was a dark night.\nAnd a long one." for n in range(30))
        text = (
            f"*** START OF THIS PROJECT GUTENBERG EBOOK X ***\n\n{credit}\n{blank}\n{body}\n"
            "*** END OF THIS PROJECT GUTENBERG EBOOK X ***\n"
        )
        assert cut_gutenberg(text).strip() == body
    joined = f"{credit}\n{body}"  # no blank line between: what is the book is not known
    assert cut_gutenberg(text.replace(f"{credit}\n{blank}\n", f"{credit}\n")).strip() == joined


@pytest.mark.parametrize(
    "form",
    [
        "The Project Gutenberg EBook of X\n\n*** START OF THIS PROJECT GUTENBERG EBOOK X ***\n"
        "Words of book {0}.\n*** END OF THIS PROJECT GUTENBERG EBOOK X ***\nterms of Gutenberg™\n"
        "*** START: FULL LICENSE ***\nlicence words\n",
        "The Project Gutenberg Etext of X\n***START**THE SMALL PRINT!**START***\nterms\n"
        "*END*THE SMALL PRINT! FOR PUBLIC DOMAIN ETEXTS*Ver.04.29.93*END*\n"
        "Words of book {0}.\nEnd of the Project Gutenberg Etext of X\n",
    ],
)
def test_a_short_book_and_books_in_one_file_lose_no_text(form):
    assert cut_gutenberg(form.format(1)).split("\n") == ["", "Words of book 1.", ""]
    text = cut_gutenberg("".join(map(form.format, range(5))))
    assert [line for line in text.split("\n") if line] == [f"Words of book {n}." for n in range(5)]


def test_small_print_behind_a_book_begins_none():
    behind = (
        "*** START OF THE PROJECT GUTENBERG EBOOK X ***\nWords.\n"
        "*** END OF THE PROJECT GUTENBERG EBOOK X ***\n***START**THE SMALL PRINT!***START***\n"
        "terms\n*END THE SMALL PRINT! FOR PUBLIC DOMAIN EBOOKS*Ver.02/11/02*END*\n"
        "[Portions of this eBook's header and trailer may be reprinted only when free.]\n"
    )
    assert cut_gutenberg(behind).strip() == "Words."
    assert cut_gutenberg(behind * 2).split() == ["Words."] * 2


@pytest.mark.parametrize("end", ["*** END OF THE PROJECT GUTENBESG EBOOK X ***", "*** EN OF X ***"])
@pytest.mark.parametrize(
    "next_line",
    [
        "Updated editions will replace the previous one—the old ones will be renamed.",
        "START: FULL LICENSE",
        "THE FULL PROJECT GUTENBERG™ LICENSE",
    ],
)
def test_a_licence_whose_beginning_is_damaged_is_cut_at_the_next_of_its_headings(end, next_line):
    terms = "\n\n".join(["Project Gutenberg-tm terms. " + "Of use. " * 200] * 8)
    head = "*** START OF THE PROJECT GUTENBERG EBOOK X ***\n"
    book = f"{head}{'Words of it. ' * 300}\n{end}\n\n{next_line}\n{terms}\n"
    cut = cut_gutenberg(book * 2)
    assert cut.count("Words of it. ") == 600 and "Of use." not in cut


@pytest.mark.parametrize(
    "shown",
    [
        "*** START OF THE PROJECT GUTENBERG EBOOK TITLE ***",
        "*** END OF THE PROJECT GUTENBERG EBOOK TITLE ***",
        "*** START OF THE PROJECT GUTENBERG EBOOK T ***\n\n{0}\n*** END OF THE PROJECT GUTENBERG",
        "The end of Project Gutenberg",
        "The Full Project Gutenberg License",
        "Updated editions will replace the previous one, it says at gutenberg.org.",
    ],
)
def test_a_page_about_gutenberg_that_shows_its_lines_is_kept(shown: str) -> None:
    around = ["It removes them, page by page. " * 9, "Project Gutenberg has many books. " * 9]
    between = "Here stand the words of a book."
    text = "\n\n".join([around[0], shown.format(between), around[1]])
    assert cut_gutenberg(text).split() == sum(
        (part.split() for part in (around[0], between * ("{0}" in shown), around[1])), []
    )


def test_a_book_whose_credit_stands_with_it_on_one_line_is_kept() -> None:
    begin = "*** START OF THE PROJECT GUTENBERG EBOOK X ***\n\n"
    body = "Produced by A. Reader It was a dark night. " * 30 + "\n\nAnd a long one.\n"
    assert cut_gutenberg(begin + body).strip() == body.strip()


@pytest.mark.parametrize("damaged", [True, False])
def test_behind_a_long_beginning_every_licence_of_a_file_is_cut(damaged: bool) -> None:
    terms = "\n\n".join(["Project Gutenberg-tm terms. " + "Of use. " * 200] * 8)
    begin = "*** START OF THE PROJECT GUTENBERG EBOOK X ***"
    end = "*** END OF THE PROJECT GUTENBERG EBOOK X ***"
    books = [f"{begin}\n\n{'Words of it. ' * 5500}\n\n{end}\n\n{terms}\n\n"] * 11
    if damaged:
        books[0] = books[0].replace("START", "STAR")
    else:
        books[:0] = ["Words of it. " * 5500 + "\n\n"]
    cut = cut_gutenberg("".join(books))
    assert cut.count("Words of it. ") == 5500 * len(books) and "Of use." not in cut


def test_text_that_was_joined_with_a_gutenberg_book_is_kept():
    terms = "\n\n".join(["Project Gutenberg-tm terms. " + "Of use. " * 200] * 8)
    book = (
        "The Project Gutenberg EBook of X\n\n*** START OF THIS PROJECT GUTENBERG EBOOK X ***\n\n"
        f"{'Words of it. ' * 300}\n\n*** END OF THIS PROJECT GUTENBERG EBOOK X ***\n\n{terms}\n\n"
    )
    own = [f"{name}. " * 1500 + "\n\n" for name in ("Before", "Between", "Behind")]
    cut = cut_gutenberg(own[0] + book + own[1] + book + own[2])
    assert [cut.count(f"{name}. ") for name in ("Before", "Between", "Behind")] == [1500] * 3
    assert cut.count("Words of it. ") == 600 and "Of use." not in cut and "GUTENBERG" not in cut
    lines = ["A line, on a pretext. " * 3 + "\n"] * 400  # without blank ones
    for joined in (book.strip() + "\n" + "".join(lines), "".join(lines) + book):
        assert cut_gutenberg(joined).count("pretext") >= 3 * 398
    between = cut_gutenberg(book.strip() + "\n" + "".join(lines) + book)
    assert between.count("pretext") >= 3 * 398 and "Of use." not in between
    said = "The end of Project Gutenberg's first decade saw changes" + " of many kinds" * 20
    assert cut_gutenberg(essay := f"{own[0]}{said}.\n\n{own[2]}") == essay


def test_wrapped_books_are_unwrapped():
    long = "It was the best of times and it was the worst of times, the age"
    lines = [
        "CHAPTER I.",
        *[long] * 12,
        "and it ended so.",
        '"Is it you?" said she,',
        *[long] * 12,
        "and again.",
        "",
        "   Indented begins anew",
        long,
        "at last",
    ]
    paragraphs = book_paragraphs("\n".join(lines))
    assert paragraphs[0] == "CHAPTER I."
    assert paragraphs[1] == " ".join([long] * 12 + ["and it ended so."])
    assert paragraphs[2].startswith('"Is it you?" said she, It was') and paragraphs[2].endswith(
        "again."
    )
    assert paragraphs[3] == f"Indented begins anew {long} at last"


def test_unwrapped_books_keep_their_lines():
    lines = [" ".join(document(seed)) for seed in range(5)]
    assert book_paragraphs("\n\n".join(lines)) == lines


def test_hash_ignores_case_space_and_breaks_only():
    assert text_hash(["A b", "C"]) == text_hash(["a", "bc"])
    assert text_hash(["a b c"]) != text_hash(["a b d"])
    assert text_hash(["ΟΔΟΣ", "Α"]) == text_hash(["οδοσα"])


def test_share_is_even_and_stable():
    values = np.array([share(f"wiki\n{i}") for i in range(4000)])
    assert 0 <= values.min() and values.max() < 1
    assert abs(values.mean() - 0.5) < 0.02
    assert share("wiki\n12") == pytest.approx(0.5465, abs=5e-5)


def _variant(words, changes, random):
    words = list(words)
    for at in random.choice(len(words), changes, replace=False):
        words[at] = WORDS[random.integers(len(WORDS))] + "x"
    return words


def test_near_duplicates_are_those_of_the_true_jaccard():
    """Far from the threshold the estimate must agree with shingles counted exactly."""
    random = np.random.Generator(np.random.Philox(1))
    texts = []
    for seed in range(30):
        words = [WORDS[i] for i in random.integers(0, len(WORDS), 600)]
        texts.append(words)
        texts.append(_variant(words, 2 if seed % 2 else 60, random))
    shingles = [{tuple(t[i : i + 5]) for i in range(len(t) - 4)} for t in texts]
    dropped = near_duplicates(np.array([minhash([" ".join(t)]) for t in texts]), 0.8)
    for n in range(0, 60, 2):
        jaccard = len(shingles[n] & shingles[n + 1]) / len(shingles[n] | shingles[n + 1])
        assert not dropped[n]
        assert dropped[n + 1] == (jaccard > 0.8), jaccard
        assert abs(jaccard - 0.8) > 0.1


def test_the_first_of_a_chain_stays_and_a_dropped_copy_drops_nothing():
    a = np.arange(128, dtype=np.uint64)
    b, c = a.copy(), a.copy()
    b[:15] += 1000  # 88 % like a
    c[:30] += 1000  # 77 % like a, 88 % like b
    c[:15] += 0
    assert near_duplicates(np.stack([a, b, c]), 0.8).tolist() == [False, True, False]
    assert near_duplicates(np.stack([b, a, c]), 0.8).tolist() == [False, True, True]


def test_documents_of_signs_alone_are_not_all_alike():
    signs = [["♥ ♥ ♥"], ["… ! ?"], ["♥ ♥ ♥"]]
    assert near_duplicates(np.array([minhash(s) for s in signs]), 0.8).tolist() == [0, 0, 1]


def test_the_signature_of_a_long_document_is_that_of_its_pieces_and_takes_little_memory():
    random = np.random.Generator(np.random.Philox(2))
    words = list(map(str, random.integers(0, 1000, 100_000)))
    found, peak = with_peak(minhash, [" ".join(words)])
    pieces = [minhash([" ".join(words[at : at + 5004])]) for at in range(0, len(words), 5000)]
    assert (found == np.min(pieces, axis=0)).all()
    assert peak < 60e6, peak  # 128 numbers for each word take 100


def test_one_document_repeats_none():
    assert near_duplicates(np.array([minhash(["one text alone"])]), 0.8).tolist() == [False]


def test_a_page_written_a_thousand_times_over_costs_its_length_and_not_the_square_of_it():
    """As bots write them: a place each, in the same words."""
    random = np.random.Generator(np.random.Philox(1))
    signatures = np.tile(np.arange(128, dtype=np.uint64), (3000, 1))
    for row in signatures:
        row[random.integers(0, 128, 6)] += 1000
    dropped, peak = with_peak(near_duplicates, signatures, 0.8)
    assert dropped.sum() > 2900
    assert peak < 20e6, peak


def test_documents_that_share_a_part_and_are_no_copies_cost_no_square():
    signatures = np.arange(8000 * 128, dtype=np.uint64).reshape(8000, 128)
    signatures[:, :64] = 0
    signatures[7999] = signatures[0]
    dropped, peak = with_peak(near_duplicates, signatures, 0.8)
    assert dropped.nonzero()[0].tolist() == [7999]
    assert peak < 6e6, peak  # all that came before as candidates take 9
