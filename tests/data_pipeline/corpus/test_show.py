from pathlib import Path

import pytest

from core.errors import UserError
from data_pipeline.corpus.show import bars, main
from data_pipeline.corpus.tokenizer import Tokenizer
from tests.data_pipeline.corpus.text import vocabulary
from tests.datasets import write_dataset


@pytest.fixture
def dataset(tmp_path):
    tokenizer = Tokenizer(vocabulary(), True)
    texts = [["The river city.", "A zq of it."], ["The house market.", "River, river."], ["King."]]
    documents = [[tokenizer.encode(s) for s in d] for d in texts]
    write_dataset(
        tmp_path, documents, heldout=[documents[0]], vocab=vocabulary(), sources=["tales"]
    )
    return str(tmp_path)


def test_overview_counts_sources_and_lengths(dataset, capsys):
    assert main([dataset]) == 0
    printed = capsys.readouterr().out
    assert "tales" in printed and "train: 1 shards, 3 documents, 5 sentences" in printed
    assert "tokens a sentence:" in printed and "tokens a document:" in printed


def test_documents_of_no_sentences_have_no_tokens(tmp_path, capsys):
    """No corpus holds one, but nothing else in a data set speaks against it."""
    write_dataset(tmp_path, [[], [[5, 6], [7]], []], vocab=vocabulary())
    assert main([str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "train: 1 shards, 3 documents, 2 sentences" in printed
    first = printed.split("tokens a document:\n")[1].split("\n")[0]
    assert first.split()[:3] == ["1-63", "1", "100.0"]


def test_a_document_as_text_with_sentence_breaks(dataset, capsys):
    assert main([dataset, "--document", "train-0"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "[tales] train-0  (train, 2 sentences, 10 tokens)",
        "     0  the river city .",
        "     1  a zq of it .",
    ]


def test_grep_goes_through_the_vocabulary(dataset, capsys):
    assert main([dataset, "--grep", "River  CITY."]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines[::2]] == ["[tales] train-0", "[tales] heldout-0"]
    main([dataset, "--grep", "river", "--limit", "1"])
    assert "stopped at --limit 1" in capsys.readouterr().out
    with pytest.raises(UserError, match="no such text 'mountain'"):
        main([dataset, "--grep", "mountain"])
    with pytest.raises(UserError, match="no such document 'x'"):
        main([dataset, "--document", "x"])


@pytest.mark.parametrize("text", ["\x01", "\u0301"])
def test_grep_for_what_the_tokenizer_drops_is_refused(dataset, capsys, text):
    with pytest.raises(SystemExit):
        main([dataset, "--grep", text])
    assert "--grep: holds nothing that the tokenizer keeps" in capsys.readouterr().err


def test_grep_within_a_document(dataset, capsys):
    assert main([dataset, "--document", "train-1", "--grep", "river"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines[::2]] == ["[tales] train-1"]
    with pytest.raises(UserError, match="no such document 'train-1' with text 'city'"):
        main([dataset, "--document", "train-1", "--grep", "city"])


def test_grep_finds_parts_of_words(dataset, capsys):
    assert main([dataset, "--grep", "he river cit"]) == 0
    assert "the river city" in capsys.readouterr().out
    assert main([dataset, "--grep", "arke"]) == 0
    assert "the house market" in capsys.readouterr().out


def test_histogram_bins():
    lines = bars([1, 1, 5, 9, 100], (1, 5, 10), 60)
    assert [line.split()[:3] for line in lines] == [
        ["1-4", "2", "40.0"],
        ["5-9", "2", "40.0"],
        ["10+", "1", "20.0"],
    ]
    assert lines[0].count("#") == lines[1].count("#") == 2 * lines[2].count("#")


def test_a_missing_vocabulary_is_one_line(dataset):
    (Path(dataset) / "vocab.txt").unlink()
    with pytest.raises(UserError, match="vocab.txt: no such file"):
        main([dataset, "--grep", "river"])


@pytest.mark.parametrize("ending", ["tar", "idx"])
def test_a_missing_shard_is_one_line(dataset, ending):
    next(Path(dataset).glob(f"shard-*.{ending}")).unlink()
    with pytest.raises(UserError, match=r"shard-\d+.*: no such file"):
        main([dataset, "--grep", "river"])


def test_a_damaged_record_is_one_line(dataset):
    path = Path(dataset) / "shard-000000.tar"
    data = bytearray(path.read_bytes())
    data[520] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match="shard-000000.tar record 0: its bytes do not match"):
        main([dataset, "--grep", "river"])


@pytest.mark.parametrize(
    "wrong", [["--grep", " "], ["--grep", "\udcff"], ["--document", ""], ["--limit", "0"]]
)
def test_arguments_that_would_match_nothing_or_everything_are_refused(dataset, wrong, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([dataset, *wrong])
    assert stopped.value.code == 2
    assert wrong[0] in capsys.readouterr().err
