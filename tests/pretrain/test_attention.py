"""Every attention path gives the numbers of plain attention on each sequence alone."""

import dataclasses
import math
import sys
import types

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from core.errors import UserError
from pretrain import attention
from tests.pretrain.packing import pack, sequences

N, K = 3, 8


def packed():
    seqs = sequences([9, 4, 16, 1 + 1, 12], 50, seed=0)
    return pack([[seqs[0], seqs[1]], [seqs[2], seqs[3]], [seqs[4]]], row_len=24, max_seq_len=16)


def plain(qkv, sequence_ids, causal=False):
    """Attention written out for each sequence; padding tokens are left at 0."""
    B, L = sequence_ids.shape
    out = torch.zeros(B * L, N * K, dtype=qkv.dtype)
    for b in range(B):
        for i in range(1, int(sequence_ids[b].max()) + 1):
            where = torch.nonzero(sequence_ids[b] == i)[:, 0] + b * L
            q, k, v = qkv[where].permute(1, 2, 0, 3)
            scores = q @ k.transpose(1, 2) / math.sqrt(K)
            for t in range(len(where) if causal else 0):
                scores[:, t, t + 1 :] = -torch.inf
            p = torch.softmax(scores, -1)
            out[where] = (p @ v).transpose(0, 1).reshape(len(where), N * K)
    return out


def inputs(dtype=torch.float32):
    g = torch.Generator().manual_seed(2)
    return torch.randn(72, 3, N, K, generator=g).to(dtype)


@pytest.mark.parametrize("path", ["per_sequence", "sdpa"])
@pytest.mark.parametrize("causal", [False, True])
def test_paths_equal_plain_attention(path, causal):
    batch = packed()
    real = batch.sequence_ids.flatten() > 0
    shape = batch.sequence_ids, batch.cu_seqlens, 16
    rows = attention.layout(path, *shape, torch.float32, K, causal)
    assert rows.path == path
    ours, theirs = inputs().requires_grad_(), inputs().requires_grad_()
    o = attention.attend(ours, rows, 0.0)
    expected = plain(theirs, batch.sequence_ids, causal)
    torch.testing.assert_close(o[real], expected[real], rtol=1e-5, atol=1e-6)
    weight = torch.randn(o.shape, generator=torch.Generator().manual_seed(3)) * real[:, None]
    (o * weight).sum().backward()
    (expected * weight).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("path", ["per_sequence", "sdpa"])
def test_bf16_errs_less_than_three_times_plain_bf16(path):
    batch = packed()
    real = batch.sequence_ids.flatten() > 0
    rows = attention.layout(path, batch.sequence_ids, batch.cu_seqlens, 16, torch.bfloat16, K)
    narrow = inputs(torch.bfloat16)
    exact = plain(narrow.float(), batch.sequence_ids)[real]
    reference = (plain(narrow, batch.sequence_ids)[real].float() - exact).abs().max()
    ours = (attention.attend(narrow, rows, 0.0)[real].float() - exact).abs().max()
    assert 0 < ours < 3 * reference


def test_by_sequence_passes_torchs_operator_checks():
    batch = packed()
    for dropout_p in (0.0, 0.3):
        torch.library.opcheck(
            attention._by_sequence,
            (inputs().requires_grad_(), batch.cu_seqlens, 16, dropout_p, dropout_p > 0),
            test_utils=["test_schema", "test_autograd_registration", "test_faketensor"],
        )


@pytest.mark.parametrize("causal", [False, True])
def test_dropout_of_probabilities_drops_at_its_rate_and_its_gradient_is_exact(causal):
    batch = packed()
    rows = attention.layout(
        "per_sequence", batch.sequence_ids, batch.cu_seqlens, 16, torch.float64, K, causal
    )
    p = 0.4

    def run(x):
        with torch.random.fork_rng():
            torch.manual_seed(11)
            return attention.attend(x, rows, p)

    x = inputs(torch.float64).requires_grad_()
    y = run(x)
    g = torch.Generator().manual_seed(4)
    at, along = (torch.randn(t.shape, generator=g, dtype=t.dtype) for t in (y, x))
    (grad,) = torch.autograd.grad(y, x, at)
    difference = (run(x + 1e-6 * along) - run(x - 1e-6 * along)) * at / 2e-6
    torch.testing.assert_close((grad * along).sum(), difference.sum(), rtol=1e-7, atol=0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        with torch.no_grad():
            draws = torch.stack([attention.attend(x, rows, p) for _ in range(300)])
            still = attention.attend(x, rows, 0.0)
    error = (draws.mean(0) - still).abs() / (draws.std(0) / math.sqrt(300) + 1e-12)
    assert error.max() < 5.5
    # Constant values: the output is v times the share of probability kept over 1 - p.
    ones = torch.ones_like(x)
    ones[:, :2] = 0
    with torch.random.fork_rng():
        torch.manual_seed(0)
        kept = attention.attend(ones, rows, p)[batch.sequence_ids.flatten() == 1]
    assert abs(float(kept.mean()) - 1) < 0.1 and float(kept.std()) > 0.05


def test_varlen_call_is_accepted_by_torch_with_dropout_and_gradient():
    # The kernel itself needs a GPU; on the meta device torch checks the call and its gradient.
    batch = packed()
    meta = [t.to("meta") for t in (batch.sequence_ids, batch.cu_seqlens)]
    rows = attention.layout("varlen", *meta, 16, torch.bfloat16, K)
    qkv = torch.empty(72, 3, N, K, device="meta", dtype=torch.bfloat16, requires_grad=True)
    o = attention.attend(qkv, rows, 0.1)
    assert o.shape == (72, N * K)
    o.sum().backward()
    assert qkv.grad.shape == qkv.shape
    # No operator takes one packed gradient to write into: dq, dk and dv are stacked afterwards.
    assert torch.ops.aten._flash_attention_backward.overloads() == ["default"]
    schema = torch.ops.aten._flash_attention_backward.default._schema
    assert [str(r.type) for r in schema.returns] == ["Tensor"] * 3 and not schema.is_mutable


class Calls(TorchDispatchMode):
    """Notes the causal flag of each call of the flash kernel."""

    def __init__(self):
        super().__init__()
        self.causal = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "flash_attention" in str(function):
            names = [a.name for a in function._schema.arguments]
            self.causal.append(args[names.index("is_causal")])
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("causal", [False, True])
def test_the_kernels_are_told_of_the_mask(monkeypatch, causal):
    batch, told = packed(), []
    meta = [t.to("meta") for t in (batch.sequence_ids, batch.cu_seqlens)]
    qkv = torch.empty(72, 3, N, K, device="meta", dtype=torch.bfloat16, requires_grad=True)
    with Calls() as calls:
        rows = attention.layout("varlen", *meta, 16, torch.bfloat16, K, causal)
        attention.attend(qkv, rows, 0.1).sum().backward()
    assert calls.causal == [causal, causal]  # forward and backward

    def kernel(qkv, cu_seqlens, longest, *, dropout_p, causal):
        told.append(causal)
        return qkv[:, 0]

    package = types.SimpleNamespace(flash_attn_varlen_qkvpacked_func=kernel)
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    attention.attend(qkv, dataclasses.replace(rows, path="flash_attn"), 0.1)
    assert told == [causal]


@pytest.fixture
def capability(monkeypatch):
    """Makes torch's GPU one of the compute capability given."""
    attention.choose.cache_clear()
    yield lambda *pair: monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: pair)
    attention.choose.cache_clear()


@pytest.mark.parametrize("pair", [(7, 0), (7, 5)])
def test_gpus_before_ampere_take_sdpa(capability, pair):
    capability(*pair)
    cuda = torch.device("cuda", 0)
    assert attention.choose("auto", cuda, torch.float16, 64) == "sdpa"
    here = f"here: compute capability {pair[0]}.{pair[1]}, float16, 64"
    with pytest.raises(UserError, match="varlen needs .* capability 8.0 .*" + here) as error:
        attention.choose("varlen", cuda, torch.float16, 64)
    assert "\n" not in str(error.value)


def test_a_path_that_cannot_run_is_one_line(capability):
    capability(9, 0)
    cpu = torch.device("cpu")
    assert attention.choose("auto", cpu, torch.float32, 64) == "per_sequence"
    cuda = torch.device("cuda", 0)
    assert attention.choose("auto", cuda, torch.bfloat16, 64) == "varlen"
    assert attention.choose("auto", cuda, torch.float32, 64) == "sdpa"
    assert attention.choose("auto", cuda, torch.bfloat16, 20) == "sdpa"
    with pytest.raises(UserError, match="model.attention: varlen needs a CUDA device"):
        attention.choose("varlen", cpu, torch.bfloat16, 64)
    with pytest.raises(UserError, match="per_sequence is for CPUs"):
        attention.choose("per_sequence", cuda, torch.bfloat16, 64)
    with pytest.raises(UserError, match="not one of auto"):
        attention.choose("magic", cpu, torch.bfloat16, 64)
