"""Packing changes nothing, order is a function of seed and step."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from finetune.batches import by_tokens, collate, labelled, order, step_items, steps_of
from finetune.config import TrainConfig
from finetune.examples import IGNORE_LABEL, Item, Tokens
from finetune.heads import FineTuned, HeadSpec, initialise_head
from finetune.train import compute_dtype
from pretrain.attention import choose
from pretrain.model import initialise
from tests.finetune import tiny

CPU = torch.device("cpu")


def items(kind, count=7) -> list[Item]:
    rng = np.random.Generator(np.random.Philox(key=3))
    result = []
    for n in range(count):
        sequences = tuple(
            Tokens(rng.integers(5, 40, k), np.arange(k) // 3 % 2)
            for k in rng.integers(3, 20, 4 if kind == "choice" else 1)
        )
        length = len(sequences[0].ids)
        label = {
            "sequence": n % 2,
            "choice": n % 4,
            "span": (1, length - 1),
            "tokens": np.where(np.arange(length) % 2, n % 3, IGNORE_LABEL),
        }[kind]
        result.append(Item(sequences, label))
    return result


def model(kind, attention="auto", **options) -> FineTuned:
    outputs = {"sequence": 2, "choice": 4, "span": 2, "tokens": 3}[kind]
    made = FineTuned(tiny.shape(attention=attention), HeadSpec(kind, outputs), **options)
    initialise(made.bert, made.bert.config, torch.Generator().manual_seed(1))
    initialise_head(made, made.bert.config, torch.Generator().manual_seed(2))
    return made.eval()


@pytest.mark.parametrize("kind", ["sequence", "choice", "span", "tokens"])
def test_a_batch_is_its_examples_one_by_one(kind) -> None:
    """Loss and logits of one row, of packed rows and of every example alone agree."""
    made, examples = model(kind), items(kind)
    alone_logits, alone_loss = [], 0.0
    for example in examples:
        batch = collate([example], 0, CPU)
        logits = made(batch)
        alone_logits += made.split(logits, batch)
        alone_loss += float(made.loss_sum(logits, batch).detach())
    for row_len, attention in ((None, "auto"), (20, "auto"), (33, "sdpa"), (None, "sdpa")):
        made = model(kind, attention)
        batch = collate(examples, 0, CPU, row_len)
        logits = made(batch)
        for got, wanted in zip(made.split(logits, batch), alone_logits, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)
        assert float(made.loss_sum(logits, batch).detach()) == pytest.approx(alone_loss, rel=1e-4)
        assert (batch.packed.input_ids.numel() == sum(i.tokens for i in examples)) == (
            row_len is None
        )


@pytest.fixture
def gpu(monkeypatch):
    """Makes torch's GPU one of the compute capability given; bf16 is its own from 8.0 on."""

    def becomes(*pair: int) -> torch.device:
        has = pair >= (8, 0)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: pair)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has)
        choose.cache_clear()
        return torch.device("cuda", 0)

    yield becomes
    choose.cache_clear()


def test_a_gpu_s_precision_is_its_own_and_a_mask_is_never_of_a_whole_batch(gpu) -> None:
    made, auto = model("sequence"), TrainConfig()
    forced = TrainConfig(precision="bf16")
    narrow = tiny.shape(hidden_size=24, num_attention_heads=2)  # a head of 12
    for pair, config, shape, wanted in (
        ((9, 0), auto, None, (torch.bfloat16, None)),
        ((9, 0), auto, narrow, (torch.bfloat16, 32)),
        ((9, 0), TrainConfig(precision="fp32"), None, (None, 32)),
        ((7, 0), auto, None, (None, 32)),
        ((7, 0), forced, None, (torch.bfloat16, 32)),
    ):
        device = gpu(*pair)
        made.bert.config = shape or tiny.shape()
        made.prepare(compute_dtype(config, device), device, 32)
        assert (made.compute_dtype, made.row_len) == wanted, (pair, config.precision)
    made.prepare(compute_dtype(forced, CPU), CPU, 32)
    assert (made.compute_dtype, made.row_len) == (torch.bfloat16, None)


def test_the_span_loss_is_the_softmax_over_the_own_sequence() -> None:
    made, examples = model("span"), items("span", 3)
    batch = collate(examples, 0, CPU)
    logits = made(batch)
    wanted = 0.0
    for part, example in zip(made.split(logits, batch), examples, strict=True):
        p = torch.log_softmax(torch.from_numpy(part), 0)
        wanted -= (p[example.label[0], 0] + p[example.label[1], 1]) / 2
    assert float(made.loss_sum(logits, batch).detach()) == pytest.approx(float(wanted), rel=1e-5)


def test_a_frozen_encoder_gets_no_gradient_and_no_dropout() -> None:
    made = model("sequence", frozen=True).train()
    batch = collate(items("sequence"), 0, CPU)
    made.dropout_p = 0.0
    first, second = made(batch), made(batch)
    assert torch.equal(first, second)
    made.loss_sum(first, batch).backward()
    have = {name for name, p in made.named_parameters() if p.grad is not None}
    assert have == {"classifier.weight", "classifier.bias"}


def test_every_example_once_an_epoch_in_an_order_of_its_own() -> None:
    seen = [np.concatenate([step_items(23, 5, 4, 5 * e + k) for k in range(5)]) for e in range(3)]
    for epoch in seen:
        assert sorted(epoch) == list(range(23))
    assert not np.array_equal(seen[0], seen[1])
    assert not np.array_equal(order(23, 4, 0), order(23, 5, 0))
    assert np.array_equal(seen[2], order(23, 4, 2))
    assert np.shares_memory(step_items(23, 5, 4, 0), order(23, 4, 0)), "drawn at each step"
    assert steps_of(23, 5, 3) == 15 and steps_of(23, 5, 0.5) == 3 and steps_of(2, 5, 0.1) == 1


def test_runs_of_items_keep_order_and_bound() -> None:
    examples = items("choice", 9)
    for limit in (1, 60, 200, 10**6):
        runs = list(by_tokens(examples, limit))
        assert [i for run in runs for i in run] == examples
        assert all(len(run) == 1 or sum(i.tokens for i in run) <= limit for run in runs)
    assert list(by_tokens([], 5)) == []


def test_the_loss_is_the_mean_over_labels() -> None:
    examples = items("tokens", 4)
    wanted = sum(int((e.label != IGNORE_LABEL).sum()) for e in examples)
    assert labelled(examples) == wanted
    assert labelled(items("choice", 4)) == 4
