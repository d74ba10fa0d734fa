"""Dropout: its rate, its scale and its gradient."""

import pytest
import torch

from pretrain.dropout import dropout, dropped, upscale


@pytest.mark.parametrize("p", [0.1, 0.5, 1 / 3])
def test_drop_mask_has_its_rate_and_no_pattern_in_its_sixteen_bit_lanes(p):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        mask = dropped(torch.empty(4, 500, 500), p)
    for part in (mask, *mask.flatten().view(-1, 4).unbind(1), mask[0], mask[:, 7], mask[:, :, 3]):
        spread = (p * (1 - p) / part.numel()) ** 0.5
        assert abs(float(part.double().mean()) - p) < 5 * spread
    assert upscale(0.0) == 1
    assert abs(upscale(p) * (1 - p) - 1) < 2e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_passes_where_the_value_does(dtype):
    x = (torch.arange(1.0, 4001).view(40, 100) / 4000).to(dtype).requires_grad_()
    with torch.random.fork_rng():
        torch.manual_seed(5)
        y = dropout(x, 0.25, True)
        torch.manual_seed(5)
        mask = dropped(x, 0.25) == 1
    y.backward(torch.full_like(y, 3.0))
    scale = upscale(0.25)
    assert torch.equal(y, torch.where(mask, 0, x * scale))
    assert torch.equal(x.grad, torch.where(mask, 0, torch.full_like(x, 3.0) * scale))
    assert 0.2 < mask.float().mean() < 0.3


def test_nothing_is_dropped_in_eval_or_at_rate_0():
    x = torch.ones(3, 5)
    assert dropout(x, 0.5, False) is x
    assert dropout(x, 0.0, True) is x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_dropped_infinity_or_nan_is_gone(dtype):
    x = torch.full((1000,), torch.nan, dtype=dtype)
    x[::2] = torch.inf
    with torch.random.fork_rng():
        torch.manual_seed(7)
        y = dropout(x, 0.5, True)
    assert 300 < (y == 0).sum() < 700
    assert torch.equal(y[y != 0].isnan(), x[y != 0].isnan())
