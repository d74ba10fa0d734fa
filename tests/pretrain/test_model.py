"""The model equals Hugging Face's, and a packed row equals its sequences alone."""

import math

import pytest
import torch
import transformers

from pretrain.linear import embedding_of_few
from pretrain.loss import IGNORE_INDEX, pretraining_loss
from pretrain.model import BertForPreTraining, ModelConfig, pack_dense
from tests.pretrain.packing import STILL, TINY, pack, sequences

LENGTHS = [17, 5, 9, 30, 2]


def hugging_face(model: BertForPreTraining) -> transformers.BertForPreTraining:
    """Hugging Face's model with our weights, on the padded vocabulary."""
    cfg = model.config
    config = transformers.BertConfig(
        **cfg.model_dump(
            include={
                "hidden_size",
                "num_hidden_layers",
                "num_attention_heads",
                "intermediate_size",
                "max_position_embeddings",
                "type_vocab_size",
                "hidden_dropout_prob",
                "attention_probs_dropout_prob",
                "layer_norm_eps",
            }
        ),
        vocab_size=cfg.vocab_size,
        attn_implementation="eager",
    )
    peer = transformers.BertForPreTraining(config)
    weights = {
        name: w[: cfg.vocab_size] if len(w) == cfg.padded_vocab_size else w
        for name, w in model.state_dict().items()
    }
    missing, unexpected = peer.load_state_dict(weights, strict=False)
    assert not unexpected
    assert set(missing) == {"cls.predictions.decoder.weight", "cls.predictions.decoder.bias"}
    return peer


def make(config: ModelConfig, seed: int = 0) -> BertForPreTraining:
    model = BertForPreTraining(config, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():  # biases and LayerNorm too must be seen to matter
        generator = torch.Generator().manual_seed(seed + 1)
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model


def batch(row_len: int = 40, max_seq_len: int = 32):
    """The five sequences in two rows, with predictions and next-sentence labels."""
    seqs = sequences(LENGTHS, 101, seed=3)
    rows = [[seqs[0], seqs[1], seqs[2]], [seqs[3], seqs[4]]]
    packed = pack(rows, row_len, max_seq_len)
    starts = [0, 17, 22, row_len, row_len + 30]
    positions, labels = [], []
    for i, (start, length) in enumerate(zip(starts, LENGTHS, strict=True)):
        for offset in sorted({0, length // 2}):
            positions.append(start + offset)
            labels.append((7 * i + offset) % 101)
    positions += [0, 0]
    labels += [IGNORE_INDEX, IGNORE_INDEX]
    return (
        seqs,
        starts,
        packed,
        torch.tensor(positions),
        torch.tensor(labels),
        torch.tensor([*starts, 0]),
        torch.tensor([0, 1, 1, 0, 1, IGNORE_INDEX]),
    )


@pytest.mark.parametrize("path", ["per_sequence", "sdpa"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_logits_and_gradients_equal_hugging_face(path, checkpointing):
    config = STILL.model_copy(update={"attention": path, "activation_checkpointing": checkpointing})
    model = make(config)
    peer = hugging_face(model)
    seqs, starts, packed, positions, labels, cls_positions, nsp_labels = batch()
    mlm, nsp = model(*packed, positions, cls_positions)
    sums = pretraining_loss(mlm.clone(), labels, nsp, nsp_labels, 10, 5)

    loss, at = 0.0, 0
    for i, ((ids, types), start) in enumerate(zip(seqs, starts, strict=True)):
        out = peer(input_ids=torch.tensor([ids]), token_type_ids=torch.tensor([types]))
        own = (positions >= start) & (positions < start + len(ids)) & (labels != IGNORE_INDEX)
        logits = out.prediction_logits[0, positions[own] - start]
        torch.testing.assert_close(mlm[own, :101], logits, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(nsp[i], out.seq_relationship_logits[0], rtol=1e-5, atol=1e-5)
        cross_entropy = torch.nn.functional.cross_entropy
        loss = loss + cross_entropy(logits, labels[own], reduction="sum") / 10
        loss = loss + cross_entropy(out.seq_relationship_logits, nsp_labels[i : i + 1]) / 5
        at += int(own.sum())
    assert at == 10
    torch.testing.assert_close(sums.loss, loss, rtol=1e-6, atol=1e-6)

    sums.loss.backward()
    loss.backward()
    theirs = dict(peer.named_parameters())
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        if len(parameter) == config.padded_vocab_size:
            assert grad[101:].count_nonzero() == 0
            grad = grad[:101]
        expected = theirs[name].grad
        if name.endswith("word_embeddings.weight"):
            # Hugging Face stops the lookup's gradient at [PAD]; the sequences here hold none.
            assert not any(0 in ids for ids, _ in seqs)
        torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-6, msg=name)


def test_hidden_states_of_every_layer_and_the_dense_front_equal_hugging_face():
    model = make(STILL)
    peer = hugging_face(model).bert
    ids = torch.randint(1, 101, (3, 20), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(20) < torch.tensor([[20], [7], [1]])).long()
    types = (torch.arange(20) > 3).long().expand(3, 20)
    ours = model.encode(*pack_dense(ids, mask, types), all_layers=True)
    theirs = peer(ids, mask, types, output_hidden_states=True).hidden_states
    assert len(ours) == len(theirs) == 3
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a[mask.bool()], b[mask.bool()], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("entries", [1, 2, 5])
def test_embedding_of_few_is_a_lookup_with_the_gradient_of_one(entries, dtype):
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(0, entries, (700,), generator=g)
    weight, grad = torch.randn(entries, 24, generator=g), torch.randn(700, 24, generator=g)
    errors = []
    for lookup in (embedding_of_few, torch.nn.functional.embedding):
        own = weight.to(dtype).requires_grad_()
        out = lookup(ids, own)
        assert torch.equal(out, weight.to(dtype)[ids])
        out.backward(grad.to(dtype))
        exact = torch.zeros(entries, 24, dtype=torch.float64)
        exact.index_add_(0, ids, grad.to(dtype).double())
        errors.append(float((own.grad.double() - exact).norm()))
    assert errors[0] < 3 * errors[1] + 1e-4


def test_padding_and_neighbours_change_nothing():
    model = make(STILL)
    _, _, packed, positions, _, cls_positions, _ = batch()
    mlm, nsp = model(*packed, positions, cls_positions)
    _, _, wide, _, _, _, _ = batch(row_len=64)
    wide.input_ids[:, 40:] = 5
    shifted = torch.where(positions >= 40, positions + 24, positions)
    mlm2, nsp2 = model(
        *wide, shifted, torch.where(cls_positions >= 40, cls_positions + 24, cls_positions)
    )
    torch.testing.assert_close(mlm, mlm2, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(nsp, nsp2, rtol=1e-5, atol=1e-5)


def test_start_is_a_truncated_normal_with_unit_layer_norms_like_the_original():
    config = TINY.model_copy(update={"hidden_size": 256, "vocab_size": 1000})
    model = BertForPreTraining(config, generator=torch.Generator().manual_seed(0))
    again = BertForPreTraining(config, generator=torch.Generator().manual_seed(0))
    # Standard deviation of a normal cut at two sigma.
    expected = 0.02 * math.sqrt(1 - 4 * math.exp(-2) / math.sqrt(2 * math.pi) / math.erf(2**0.5))
    peer = transformers.BertForPreTraining(hugging_face(model).config)
    for (name, p), q in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(p, q), name
        theirs = peer.get_parameter(name)
        if theirs.ndim == 1:
            fill = theirs.unique()
            assert len(fill) == 1, name
            assert torch.all(p == fill), name
        else:
            used = p[:1000] if len(p) == config.padded_vocab_size else p
            assert p.abs().max() <= 0.04, name
            if used.numel() > 5000:
                assert abs(used.std() / expected - 1) < 0.02, name
                assert abs(theirs.std() / 0.02 - 1) < 0.02, name
    assert model.bert.embeddings.word_embeddings.weight[1000:].count_nonzero() == 0


def test_hidden_dropout_sits_where_hugging_face_has_it(monkeypatch):
    # With dropout replaced by a pattern fixed by position, every site must agree to the digit.
    # (Dropout of the attention probabilities is tested in test_attention.py.)
    sites = []

    def pattern(x, p=0.5, training=True, inplace=False):
        if not training or p == 0:
            return x
        sites.append(p)
        keep = (torch.arange(x.shape[-2] * x.shape[-1]) * 7) % 10 > 0
        return x * keep.view(x.shape[-2:]) / (1 - p)

    config = TINY.model_copy(update={"attention_probs_dropout_prob": 0.0})
    model = make(config).train()
    peer = hugging_face(model).bert.train()
    monkeypatch.setattr(torch.nn.functional, "dropout", pattern)
    monkeypatch.setattr("pretrain.model.dropout", pattern)
    ids = torch.randint(1, 101, (1, 6), generator=torch.Generator().manual_seed(1))
    ours = model.encode(*pack_dense(ids, torch.ones_like(ids)), all_layers=True)
    assert sites == [0.1] * 5
    theirs = peer(ids, torch.ones_like(ids), output_hidden_states=True).hidden_states
    assert sites == [0.1] * 10
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_dropout_repeats_with_the_seed_and_stops_in_eval():
    model = make(TINY).train()
    _, _, packed, positions, _, cls_positions, _ = batch()
    with torch.random.fork_rng():
        torch.manual_seed(5)
        first = model(*packed, positions, cls_positions)[0]
        torch.manual_seed(5)
        second = model(*packed, positions, cls_positions)[0]
        third = model(*packed, positions, cls_positions)[0]
    assert torch.equal(first, second)
    assert not torch.equal(first, third)
    model.eval()
    a, b = (model(*packed, positions, cls_positions)[0] for _ in range(2))
    assert torch.equal(a, b)


def test_checkpointing_gives_the_same_gradients_under_dropout():
    grads = []
    for checkpointing in (False, True):
        model = make(TINY.model_copy(update={"activation_checkpointing": checkpointing})).train()
        _, _, packed, positions, labels, cls_positions, nsp_labels = batch()
        with torch.random.fork_rng():
            torch.manual_seed(5)
            mlm, nsp = model(*packed, positions, cls_positions)
            pretraining_loss(mlm, labels, nsp, nsp_labels, 10, 5).loss.backward()
        grads.append([p.grad for p in model.parameters()])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_bf16_errs_less_than_three_times_hugging_face():
    model = make(STILL)
    peer = hugging_face(model)
    seqs, starts, packed, positions, labels, cls_positions, _ = batch()
    exact = model(*packed, positions, cls_positions)[0][:, :101]
    peer, model = peer.bfloat16(), model.bfloat16()
    ours = model(*packed, positions, cls_positions)[0][:, :101].float()
    worst_ours = worst_theirs = 0.0
    for (ids, types), start in zip(seqs, starts, strict=True):
        out = peer(input_ids=torch.tensor([ids]), token_type_ids=torch.tensor([types]))
        own = (positions >= start) & (positions < start + len(ids)) & (labels != IGNORE_INDEX)
        theirs = out.prediction_logits[0, positions[own] - start].float()
        worst_ours = max(worst_ours, (ours[own] - exact[own]).abs().max().item())
        worst_theirs = max(worst_theirs, (theirs - exact[own]).abs().max().item())
    assert 0 < worst_ours < 3 * worst_theirs
