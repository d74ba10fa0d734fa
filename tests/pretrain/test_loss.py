"""The in-place cross-entropy equals torch's, in chunks and as it is compiled."""

import functools

import pytest
import torch
import torch.nn.functional as F

from pretrain import loss
from pretrain.loss import CPU_CHUNK_ROWS, IGNORE_INDEX


@pytest.fixture(params=["chunks", "compiled"])
def pretraining_loss(request, monkeypatch):
    """The loss both ways; what would be compiled runs as it stands."""
    monkeypatch.setattr(loss, "compile_once", lambda function: function)
    return functools.partial(loss.pretraining_loss, compiled=request.param == "compiled")


def case(rows: int, vocab: int, seed: int = 0):
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab, generator=g) * 3
    labels = torch.randint(0, vocab, (rows,), generator=g)
    labels[::5] = IGNORE_INDEX
    nsp = torch.randn(7, 2, generator=g)
    nsp_labels = torch.tensor([0, 1, 1, 0, IGNORE_INDEX, 1, IGNORE_INDEX])
    return logits, labels, nsp, nsp_labels


@pytest.mark.parametrize("rows", [3, CPU_CHUNK_ROWS, 2 * CPU_CHUNK_ROWS + 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_and_gradients_equal_torch(rows, dtype, pretraining_loss):
    logits, labels, nsp, nsp_labels = case(rows, 50)
    logits = logits.to(dtype)
    ours = logits.clone().requires_grad_()
    theirs = logits.float().requires_grad_()
    ours_nsp, theirs_nsp = nsp.clone().requires_grad_(), nsp.clone().requires_grad_()
    sums = pretraining_loss(ours * 1, labels, ours_nsp, nsp_labels, 90, 5)
    mlm = F.cross_entropy(theirs, labels, reduction="sum", ignore_index=IGNORE_INDEX)
    expected = (
        mlm / 90
        + F.cross_entropy(theirs_nsp, nsp_labels, reduction="sum", ignore_index=IGNORE_INDEX) / 5
    )
    torch.testing.assert_close(sums.loss, expected)
    torch.testing.assert_close(sums.mlm_sum, mlm.detach())
    right = (logits.argmax(-1) == labels).sum()
    assert sums.mlm_correct == right
    assert sums.nsp_correct == (nsp.argmax(-1) == nsp_labels).sum()
    (2 * sums.loss).backward()
    (2 * expected).backward()
    torch.testing.assert_close(ours.grad, theirs.grad.to(dtype))
    torch.testing.assert_close(ours_nsp.grad, theirs_nsp.grad)


def test_of_equal_logits_the_first_counts_as_the_guess(pretraining_loss):
    logits = torch.randint(0, 3, (400, 6), generator=torch.Generator().manual_seed(2)).float()
    labels = torch.randint(0, 6, (400,), generator=torch.Generator().manual_seed(3))
    labels[::7] = IGNORE_INDEX
    nsp, nsp_labels = torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64)
    sums = pretraining_loss(logits.clone(), labels, nsp, nsp_labels, 1, 1)
    assert sums.mlm_correct == (logits.argmax(-1) == labels).sum()
    assert (
        sums.mlm_correct
        < (logits.amax(-1)[:, None] == logits)
        .gather(1, labels.clamp(min=0)[:, None])[:, 0]
        .logical_and(labels >= 0)
        .sum()
    )


def test_gradient_takes_the_storage_of_the_logits(pretraining_loss):
    logits, labels, nsp, nsp_labels = case(200, 50)
    leaf = logits.requires_grad_()
    product = leaf * 1
    seen = []
    product.register_hook(lambda grad: seen.append(grad.data_ptr()))
    pretraining_loss(product, labels, nsp, nsp_labels, 9, 5).loss.backward()
    assert seen == [product.data_ptr()]


def test_backward_twice_is_refused(pretraining_loss):
    logits, labels, nsp, nsp_labels = case(10, 50)
    product = logits.requires_grad_() * 1
    total = pretraining_loss(product, labels, nsp, nsp_labels, 9, 5).loss
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward can run once"):
        total.backward()


def test_vocabulary_padding_counts_nothing(pretraining_loss):
    logits, labels, nsp, nsp_labels = case(30, 50)
    padded = torch.cat([logits, torch.full((30, 14), -torch.inf)], 1).requires_grad_()
    whole = pretraining_loss(padded * 1, labels, nsp, nsp_labels, 9, 5)
    cut = pretraining_loss(logits, labels, nsp, nsp_labels, 9, 5)
    torch.testing.assert_close(whole.loss, cut.loss, rtol=0, atol=1e-5)
    assert whole.mlm_correct == cut.mlm_correct
    whole.loss.backward()
    assert padded.grad[:, 50:].count_nonzero() == 0
    assert padded.grad.isfinite().all()


def test_parts_add_up_to_the_whole_and_an_empty_part_is_nought(pretraining_loss):
    logits, labels, nsp, nsp_labels = case(30, 50)
    whole = pretraining_loss(logits, labels, nsp, nsp_labels, 24, 5)
    parts = [
        pretraining_loss(logits[a], labels[a], nsp[b], nsp_labels[b], 24, 5)
        for a, b in [(slice(0, 11), slice(0, 2)), (slice(11, 30), slice(2, 7))]
    ]
    torch.testing.assert_close(parts[0].loss + parts[1].loss, whole.loss)
    none = torch.full((4,), IGNORE_INDEX)
    empty = pretraining_loss(logits[:4], none, nsp[:4], none, 24, 5)
    assert empty.loss == 0 and empty.mlm_correct == 0 and empty.nsp_correct == 0
