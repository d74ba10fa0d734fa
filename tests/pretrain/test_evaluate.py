"""Held-out losses by source, beside a plain sum over predictions."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from core.errors import UserError
from data_pipeline.stream.batch import IGNORE_INDEX
from data_pipeline.stream.dataset import Dataset
from data_pipeline.stream.heldout import HeldOut
from data_pipeline.stream.plan import PhaseSpec, StreamConfig
from pretrain import board
from pretrain.evaluate import score, scores_of, sums, token_counts
from pretrain.model import BertForPreTraining
from pretrain.model_config import ModelConfig
from tests.datasets import write_dataset

PHASE = PhaseSpec(max_seq_len=32, row_len=64, max_predictions=5)
SOURCES = ("wikipedia", "own", "news")
VOCAB, SPLIT = 120, 60


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ids below SPLIT are of wikipedia, the others of own: a token tells the source. Of news no
    document is held out."""
    folder = tmp_path_factory.mktemp("sources")
    generator = torch.Generator().manual_seed(1)

    def document(number: int) -> list[list[int]]:
        low, high = ((10, SPLIT), (SPLIT, VOCAB))[number % 2]
        return torch.randint(low, high, (7, 6), generator=generator).tolist()

    def source_of(name: str) -> int:
        split, number = name.split("-")
        return 2 if split == "train" else int(number) % 2

    held_out = [document(n) for n in range(30)]
    write_dataset(folder, [document(0)], heldout=held_out, vocab=VOCAB, sources=SOURCES,
                  source_of=source_of)  # fmt: skip
    return folder


def held_out(data: Path, way: str, rank: int, world: int) -> HeldOut:
    dataset = Dataset(StreamConfig(dir=str(data), next_sentence=way))
    return HeldOut(dataset, PHASE, seed=3, rank=rank, world=world, micro_batch_rows=3, rows=1000)


@pytest.mark.parametrize("way", ["original", "none"])
def test_losses_by_source_are_exact_over_ranks(data: Path, way: str) -> None:
    config = ModelConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=32,
    )  # fmt: skip
    model = BertForPreTraining(config, generator=torch.Generator().manual_seed(0)).eval()
    plain = {name: [0.0, 0, 0] for name in SOURCES}
    whole = held_out(data, way, 0, 1)
    with torch.no_grad():
        for batch in whole:
            logits, _ = model(
                batch.input_ids, batch.token_type_ids, batch.position_ids, batch.sequence_ids,
                batch.cu_seqlens, batch.max_seq_len, batch.masked_lm_positions,
                batch.cls_positions,
            )  # fmt: skip
            original = batch.input_ids.flatten().clone()
            real = batch.masked_lm_labels != IGNORE_INDEX
            original[batch.masked_lm_positions[real]] = batch.masked_lm_labels[real]
            for place, label, row in zip(
                batch.masked_lm_positions[real].tolist(), batch.masked_lm_labels[real].tolist(),
                logits[real], strict=True,
            ):  # fmt: skip
                first = place - int(batch.position_ids.flatten()[place])  # [CLS]; then A
                own = plain["wikipedia" if original[first + 1] < SPLIT else "own"]
                own[0] += float(F.cross_entropy(row[None], torch.tensor([label])))
                own[1] += int(row.argmax() == label)
                own[2] += 1
    alone = score(model, whole, whole.sources)
    assert set(alone.by_source) == {"wikipedia", "own"}
    for name, found in alone.by_source.items():
        nats, right, count = plain[name]
        assert found["mlm_loss"] == pytest.approx(nats / count, rel=1e-5)
        assert found["mlm_accuracy"] == right / count and count > 30
    total = plain["wikipedia"][0] + plain["own"][0]
    count = plain["wikipedia"][2] + plain["own"][2]
    assert alone.mlm_loss == pytest.approx(total / count, rel=1e-5)
    assert vars(score(model, whole)) == {**vars(alone), "by_source": {}}
    for world in (2, 3):
        ranks = [held_out(data, way, rank, world) for rank in range(world)]
        parts = [sums(model, one, torch.device("cpu"), one.sources) for one in ranks]
        together = scores_of(torch.stack(parts).sum(0), ranks[0].sources)
        assert together.mlm_accuracy == alone.mlm_accuracy
        for name, found in alone.by_source.items():
            assert together.by_source[name] == pytest.approx(found, rel=1e-6)


@pytest.mark.parametrize("weights", [{}, {"own": 3.0, "news": 0.0}])
def test_frequencies_are_of_all_sources_by_their_share_of_an_epoch(
    tmp_path: Path, weights: dict[str, float]
) -> None:
    lengths = {"wikipedia": 400, "own": 100, "news": 100}  # documents; a shard has 10 of one source

    def source_of(name: str) -> int:
        number = int(name.split("-")[1])
        return 0 if number < 400 else 1 if number < 500 else 2

    documents = [[[10 + source_of(f"train-{n}")] * 6] * 7 for n in range(sum(lengths.values()))]
    write_dataset(tmp_path, documents, vocab=VOCAB, sources=SOURCES,
                  source_of=source_of, documents_per_shard=10)  # fmt: skip
    data = Dataset(StreamConfig(dir=str(tmp_path), weights=weights))
    counts = token_counts(data, 42 * 100) - 1
    assert 2000 < counts.sum() < 9000
    expected = torch.tensor([n * weights.get(name, 1.0) for name, n in lengths.items()])
    assert (counts / counts.sum())[10:13].tolist() == pytest.approx(
        (expected / expected.sum()).tolist(), rel=1e-6
    )
    assert len(list(data.sample("train", 42 * 100))) < 200


def test_held_out_text_that_makes_no_row_is_named(tmp_path: Path) -> None:
    write_dataset(tmp_path, [[[9] * 6] * 7] * 9, heldout=[[]], vocab=VOCAB)
    with pytest.raises(UserError, match="held-out data: no row"):
        list(held_out(tmp_path, "original", 0, 1))


def test_the_board_has_a_curve_a_source() -> None:
    values = {"heldout/mlm_loss": 3.0, "heldout/own/mlm_loss": 2.0, "heldout/seconds": 1.0}
    assert board.scalars(values, 128) == {
        "heldout_128/masked_lm": 3.0,
        "heldout_128/own/masked_lm": 2.0,
    }
