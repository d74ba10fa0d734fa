"""Products widened to fp32 equal a bf16 product with fp32 sums, forward and backward."""

import torch

from pretrain import linear as door


def case():
    g = torch.Generator().manual_seed(0)
    shapes = ((9, 33), (17, 33), (17,))
    return [torch.randn(s, generator=g).bfloat16() for s in shapes]


def test_widened_product_is_the_rounded_exact_one(monkeypatch):
    monkeypatch.setattr(door, "cpu_has_bf16_products", lambda: False)
    x, w, b = (t.requires_grad_() for t in case())
    X, W, B = (t.detach().double().requires_grad_() for t in (x, w, b))
    y, Y = door.linear(x, w, b), X @ W.t() + B
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    y.backward(grad)
    Y.backward(grad.double())
    for ours, exact in ((y, Y), (x.grad, X.grad), (w.grad, W.grad), (b.grad, B.grad)):
        assert ours.dtype == torch.bfloat16
        # one rounding: half a unit in the last of 8 bits, and the fp32 sum's own error
        torch.testing.assert_close(ours.double(), exact, rtol=2**-8, atol=1e-5)


def test_widening_is_for_cpus_without_bf16_units_only(monkeypatch):
    x = torch.ones(1).bfloat16()
    monkeypatch.setattr(door, "cpu_has_bf16_products", lambda: False)
    assert door.is_widened(x)
    assert not door.is_widened(x.float())
    assert not door.is_widened(x.to("meta"))
    monkeypatch.setattr(door, "cpu_has_bf16_products", lambda: True)
    assert not door.is_widened(x)
