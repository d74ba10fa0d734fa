"""The same weights, batches and rates, dropout off: after some steps Hugging Face's padded training
and ours stand at the same weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.finetune_vs_hf import Padded, adamw
from finetune.batches import labelled, step_items
from finetune.config import TrainConfig
from finetune.examples import IGNORE_LABEL, Item, Tokens
from finetune.heads import FineTuned, HeadSpec, initialise_head
from finetune.train import forward
from pretrain.model import initialise
from pretrain.optim import OptimizerConfig, build_optimizer
from tests.finetune import tiny

CPU = torch.device("cpu")


def items(head: HeadSpec) -> list[Item]:
    rng = np.random.Generator(np.random.Philox(key=8))
    result = []
    for n in range(12):
        # Their span loss is a softmax over padding too, so its windows are equally long here.
        count = 4 if head.kind == "choice" else 1
        lengths = [9] if head.kind == "span" else rng.integers(3, 20, count)
        sequences = tuple(Tokens(rng.integers(5, 40, k), np.arange(k) // 3 % 2) for k in lengths)
        k = len(sequences[0].ids)
        label = {
            "choice": n % 4,
            "span": (n % 9, 8),
            "tokens": np.where(np.arange(k) % 2, n % 3, IGNORE_LABEL),
            "sequence": float(n % 5) if head.regression else n % head.outputs,
        }[head.kind]
        result.append(Item(sequences, label))
    return result


@pytest.mark.parametrize(
    "head",
    [
        HeadSpec("sequence", 3),
        HeadSpec("sequence", 1),
        HeadSpec("choice", 4),
        HeadSpec("span", 2),
        HeadSpec("tokens", 3),
    ],
    ids=lambda h: f"{h.kind}-{h.outputs}",
)
def test_training_is_theirs(head) -> None:
    shape = tiny.shape(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    ours = FineTuned(shape, head)
    initialise(ours.bert, shape, torch.Generator().manual_seed(1))
    initialise_head(ours, shape, torch.Generator().manual_seed(2))
    before = {name: p.detach().clone() for name, p in ours.named_parameters()}
    theirs = Padded(ours, 0, CPU)
    train, examples, rate = TrainConfig(), items(head), 1e-3
    c = OptimizerConfig(name="adamw", eps=train.eps, weight_decay=train.weight_decay)
    optimizers = build_optimizer(ours, c), adamw(theirs.model, train, rate)
    for group in optimizers[0].param_groups:
        group["lr"] = rate
    ours.train()
    theirs.model.train()
    for step in range(6):
        chosen = [examples[i] for i in step_items(len(examples), 5, 0, step)]
        batch = ours.collate(chosen, CPU)
        loss = ours.loss_sum(forward(ours, batch), batch) / labelled(chosen)
        wanted = theirs.loss(chosen, None if head.kind == "span" else 24)
        assert float(loss.detach()) == pytest.approx(float(wanted.detach()), rel=2e-4)
        loss.backward()
        wanted.backward()
        for model, optimizer in zip((ours, theirs.model), optimizers, strict=True):
            parameters = [p for p in model.parameters() if p.grad is not None]
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()
    their_weights = dict(theirs.model.named_parameters())
    moved = difference = 0.0
    for name, p in ours.named_parameters():
        if name in their_weights:
            p = p.detach()
            moved += float((p - before[name]).pow(2).sum())
            difference += float((p - their_weights[name].detach()).pow(2).sum())
    assert difference < 1e-3 * moved
