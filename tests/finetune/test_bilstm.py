"""A BiLSTM on top is torch's own over each sequence alone; it is saved, read and trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from configs.load import check
from core.errors import UserError
from finetune import loading
from finetune.config import EncoderConfig, FinetuneConfig
from finetune.heads import FineTuned, HeadSpec
from finetune.train import forward
from tests.finetune import tiny
from tests.finetune.test_batches import CPU, items, model

KINDS = ["sequence", "choice", "span", "tokens"]


@pytest.mark.parametrize("kind", KINDS)
def test_it_reads_each_sequence_alone(kind: str) -> None:
    made, examples = model(kind, bilstm=7), items(kind)
    plain = nn.LSTM(32, 7, bidirectional=True)
    plain.load_state_dict(made.bilstm.state_dict())
    wanted = []
    for item in examples:
        rows = []
        for tokens in item.sequences:
            packed = made.collate([item._replace(sequences=(tokens,))], CPU).packed
            out, (last_2H, _) = plain(made.bert.encode(*packed)[0])
            top = last_2H.view(1, -1) if made.head.pooled else out
            rows.append(getattr(made, made.head.layer)(top))
        wanted.append(torch.cat(rows).view(-1) if made.head.pooled else rows[0])
    batch = made.collate(examples, CPU)
    logits = made(batch)
    for got, alone in zip(made.split(logits, batch), wanted, strict=True):
        torch.testing.assert_close(torch.from_numpy(got), alone, rtol=1e-4, atol=1e-5)
    made.loss_sum(logits, batch).backward()
    unused = {n for n, p in made.named_parameters() if p.grad is None}
    assert unused == {"bert.pooler.dense.weight", "bert.pooler.dense.bias"}
    made.compute_dtype = torch.bfloat16
    torch.testing.assert_close(forward(made, batch), logits, rtol=0, atol=0.05)


def build(folder: Path, bilstm: int, **more) -> tuple[FineTuned, list[str]]:
    config = EncoderConfig(path=str(folder), bilstm=bilstm, **more)
    return loading.build(loading.read(config, 32), HeadSpec("sequence", 2), config, seed=5)


def test_it_is_new_or_goes_on_from_a_folder_and_is_trained_over_a_frozen_encoder(tmp_path) -> None:
    export = tiny.encoder(tmp_path / "export")
    made, notes = build(export, 7, trained="head")
    assert notes[0] == "new layer: bilstm, classifier (2 outputs)"
    assert made.trained == "head + BiLSTM"
    same = build(export, 7)[0].state_dict()
    assert all(torch.equal(t, same[n]) for n, t in made.state_dict().items())
    trained = {n.split(".")[0] for n, p in made.named_parameters() if p.requires_grad}
    assert trained == {"bilstm", "classifier"}
    made.save(tmp_path / "saved")
    plain = json.loads((tmp_path / "saved/config.json").read_text())
    assert (plain["architectures"], plain["bilstm"]) == (["BertBiLstmForSequenceClassification"], 7)
    again, notes = build(tmp_path / "saved", 7)
    assert notes[0] == f"bilstm, classifier goes on from {tmp_path / 'saved'}"
    assert all(torch.equal(t, again.state_dict()[n]) for n, t in made.state_dict().items())
    for other in (0, 8):
        with pytest.raises(UserError, match="is needed; encoder.new_head: true starts"):
            build(tmp_path / "saved", other)
        assert build(tmp_path / "saved", other, new_head=True)[1][0].startswith("new layer")


@pytest.mark.parametrize(
    ("features", "keys", "said"),
    [
        ("last", {"bilstm": 8}, r"encoder.bilstm: ner.features has a BiLSTM already"),
        ("last", {"dropout": 0.0}, r"encoder.dropout: ner.features trains no encoder"),
        (None, {"dropout": 0.995}, r"encoder.dropout: .*0\.99"),
    ],
)
def test_what_a_model_has_no_use_for_is_refused(features, keys, said) -> None:
    ner = {"train_file": "t", "dev_file": "d", "features": features}
    tree = {"run_dir": "r", "encoder": {"path": "x"} | keys, "ner": ner}
    with pytest.raises(UserError, match=said):
        check(tree, FinetuneConfig, "c.yaml")
