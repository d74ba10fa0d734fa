"""Blanks are the same whatever comes after them, and filling them in leaves no trace."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from data_pipeline.stream.dataset import Dataset
from data_pipeline.stream.plan import StreamConfig
from pretrain.fill_in import Filled, choose, fill, recorded
from pretrain.metrics import Recorder
from pretrain.model import BertForPreTraining, pack_dense
from pretrain.model_config import ModelConfig
from tests.datasets import write_dataset

WORDS = [f"{a}{b}" for a in "bdfgk" for b in "aeiou"]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    rng, folder = np.random.default_rng(0), tmp_path_factory.mktemp("data")
    vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, "##x", "."]
    sentences = [rng.integers(5, len(vocab), rng.integers(9, 20)).tolist() for _ in range(40)]
    write_dataset(folder, [sentences], heldout=[sentences], vocab=vocab)
    return Dataset(StreamConfig(dir=str(folder)))


def model(**keys: object) -> BertForPreTraining:
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    shape |= {"intermediate_size": 32, "max_position_embeddings": 32, "vocab_size": 32}
    config = ModelConfig.model_validate(shape | {"initializer_range": 0.3} | keys)
    return BertForPreTraining(config, generator=torch.Generator().manual_seed(1))


def test_more_blanks_begin_with_the_fewer_and_hide_whole_words(dataset: Dataset) -> None:
    many = choose(dataset, 8, seed=7, positions=32)
    assert (
        choose(dataset, 3, seed=7, positions=32)
        == many[:3]
        != choose(dataset, 3, seed=8, positions=32)
    )
    word_start = dataset.tokenizer.word_start
    for blank in many:
        assert word_start[blank.ids[blank.place]] and word_start[blank.ids[blank.place + 1]]
        assert dataset.tokenizer.decode([blank.ids[blank.place]]) in WORDS
    assert choose(dataset, 0, seed=7, positions=32) == []


@torch.no_grad()
@pytest.mark.parametrize("causal", [False, True])
def test_a_blank_is_guessed_as_alone_and_the_model_stays_as_it_is(
    dataset: Dataset, causal: bool
) -> None:
    net, tokenizer = model(is_decoder=causal), dataset.tokenizer
    blanks = choose(dataset, 6, seed=7, positions=32)
    state = torch.get_rng_state()
    together = fill(net, blanks, tokenizer)
    assert net.training and torch.equal(torch.get_rng_state(), state)
    net.eval()
    assert [one for blank in blanks for one in fill(net, [blank], tokenizer)] == together
    for blank, found in zip(blanks, together, strict=True):
        before, _, after = found.sentence.partition(" ____ ")
        assert before == tokenizer.decode(list(blank.ids[: blank.place]))
        assert after == ("" if causal else tokenizer.decode(list(blank.ids[blank.place + 1 :])))
        ids = list(blank.ids[: blank.place])
        if not causal:
            ids += [tokenizer.mask_id, *blank.ids[blank.place + 1 :]]
        row = torch.tensor([[tokenizer.cls_id, *ids, tokenizer.sep_id]])
        at = torch.tensor([blank.place if causal else blank.place + 1])
        logits, _ = net(*pack_dense(row, torch.ones_like(row)), at, torch.tensor([0]))
        chance, best = logits[0].softmax(-1).max(-1)
        assert found.guesses[0] == (
            tokenizer.decode([int(best)]),
            pytest.approx(float(chance), abs=1e-4),
        )
        chances = [p for _, p in found.guesses]
        assert chances == sorted(chances, reverse=True) and sum(chances) <= 1


def test_a_sentence_fits_the_model(dataset: Dataset) -> None:
    for positions in (5, 11, 12, 18):
        found = choose(dataset, 40, seed=7, positions=positions)
        assert all(len(blank.ids) + 2 <= positions for blank in found)
        assert bool(found) == (positions > 10)
        fill(model(max_position_embeddings=positions), found, dataset.tokenizer)


def test_only_pieces_are_guessed_and_nothing_of_what_is_not_finite(dataset: Dataset) -> None:
    blanks, net, pieces = choose(dataset, 3, seed=7, positions=32), model(), len(dataset.tokenizer)
    bias = net.cls.predictions.bias
    assert len(bias) > pieces and not bias[pieces:].any()
    before = fill(net, blanks, dataset.tokenizer)
    bias.data[pieces:] = 100.0  # of the padding: likelier than all words
    assert fill(net, blanks, dataset.tokenizer) == before
    bias.data[pieces - 1] = float("nan")
    assert fill(net, blanks, dataset.tokenizer) == []


def test_nothing_is_compiled_to_fill_in(dataset: Dataset) -> None:
    blanks, before = choose(dataset, 3, seed=7, positions=32), counters["stats"]["unique_graphs"]
    found = [fill(model(compile=on), blanks, dataset.tokenizer) for on in (True, False)]
    assert found[0] == found[1] and counters["stats"]["unique_graphs"] == before


def test_what_was_filled_in_is_read_back_and_numbers_are_not_disturbed(tmp_path: Path) -> None:
    one = Filled("a ____ c", "b", (("b", 0.5), ("d", 0.25)))
    recorder = Recorder(tmp_path, 0, active=True)
    for step in (1, 2, 3):
        recorder.note(
            step, {"fill_in": [{"sentence": "a ____ c", "word": "b", "guesses": one.guesses}]}
        )
    recorder.note(0, {"fill_in": [{"sentence": 1}]})
    recorder.close()
    Recorder(tmp_path, 2, active=True).close()
    assert recorded(tmp_path / "metrics.jsonl") == {1: [one], 2: [one]}
    assert one.listed() == "b 50%, d 25%" and one.listed(1) == "b 50%"
