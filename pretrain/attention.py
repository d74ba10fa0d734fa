"""One door to the attention kernels. Attention is allowed inside a sequence, never across; under a
causal mask to a token itself and to those before it.

A packed batch is a flat run of T = B*L tokens, cut into sequences by `cu_seqlens`. Four paths give
the same numbers:

    varlen        PyTorch's flash kernel over `cu_seqlens`, with dropout (CUDA from Ampere on,
                  fp16 or bf16)
    flash_attn    the same from the `flash-attn` package, where it is installed
    sdpa          scaled_dot_product_attention under a block-diagonal mask (any device, any dtype)
    per_sequence  a loop over sequences of one length: no work on masked pairs, no mask (CPU)

All paths apply dropout to the attention probabilities as BERT does.

Legend: B batch, L length, T = B*L, S sequences + 1, N heads, K head size, D = N*K,
G heads of a group of sequences.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from core.errors import UserError
from pretrain.dropout import bits_of, dropped, upscale
from pretrain.linear import is_widened

PATHS = ("varlen", "flash_attn", "sdpa", "per_sequence")


@dataclass(frozen=True)
class Layout:
    """What every layer of one forward needs to know of the packing. Made by `layout`."""

    path: str
    rows: int
    row_len: int
    max_seq_len: int
    cu_seqlens_S: Tensor
    mask_B1LL: Tensor | None
    causal: bool


@functools.cache
def has_flash_attn() -> bool:
    return importlib.util.find_spec("flash_attn") is not None


@functools.cache
def choose(path: str, device: torch.device, dtype: torch.dtype, head_size: int) -> str:
    """The kernel path for tensors of this kind; `auto` takes the fastest that is there.

    Raises UserError when a forced path cannot run here.
    """
    flash = device.type == "cuda" and dtype in (torch.float16, torch.bfloat16)
    flash = flash and head_size % 8 == 0 and head_size <= 256
    flash = flash and torch.cuda.get_device_capability(device) >= (8, 0)
    if path == "auto":
        chosen = "varlen" if flash else "per_sequence" if device.type == "cpu" else "sdpa"
    elif path not in PATHS:
        raise UserError(f"model.attention: {path!r} is not one of auto, {', '.join(PATHS)}")
    else:
        chosen = path
    if chosen in ("varlen", "flash_attn") and not flash and device.type != "meta":
        raise UserError(
            f"model.attention: {chosen} needs a CUDA device of compute capability 8.0 (Ampere) or "
            "newer, fp16 or bf16 and a head size that is a multiple of 8 up to 256; here: "
            f"{_kind(device)}, {str(dtype).removeprefix('torch.')}, {head_size} (auto would take "
            "the right one)"
        )
    if chosen == "per_sequence" and device.type == "cuda":
        raise UserError("model.attention: per_sequence is for CPUs; auto takes the right one here")
    if chosen == "flash_attn" and not has_flash_attn():
        raise UserError("model.attention: flash_attn is asked for, but it is not installed")
    return chosen


def _kind(device: torch.device) -> str:
    if device.type != "cuda":
        return device.type
    major, minor = torch.cuda.get_device_capability(device)
    return f"compute capability {major}.{minor}"


def layout(
    path: str,
    sequence_ids_BL: Tensor,
    cu_seqlens_S: Tensor,
    max_seq_len: int,
    dtype: torch.dtype,
    head_size: int,
    causal: bool = False,
) -> Layout:
    """Prepare one forward pass. No host synchronisation on a GPU.

    `sequence_ids_BL`: equal ids in a row are one sequence; padding has an id of its own (0).
    `cu_seqlens_S`: int32 boundaries over the T flat tokens, covering all of them.
    """
    B, L = sequence_ids_BL.shape
    chosen = choose(path, sequence_ids_BL.device, dtype, head_size)
    mask = None
    if chosen == "sdpa":
        mask = sequence_ids_BL[:, None, :, None] == sequence_ids_BL[:, None, None, :]
        if causal:  # the sequences of a row stand one behind the other
            mask = mask.tril()
    return Layout(chosen, B, L, max_seq_len, cu_seqlens_S, mask, causal)


def attend(qkv_T3NK: Tensor, layout: Layout, dropout_p: float) -> Tensor:
    """softmax(q k^T / sqrt(K)), dropout, times v, within each sequence: -> [T, N*K]."""
    T, _, N, K = qkv_T3NK.shape
    if layout.path == "per_sequence":
        o_TNK, _ = _by_sequence(
            qkv_T3NK, layout.cu_seqlens_S, layout.max_seq_len, dropout_p, layout.causal
        )
    elif layout.path == "sdpa":
        q, k, v = qkv_T3NK.view(layout.rows, layout.row_len, 3, N, K).permute(2, 0, 3, 1, 4)
        o_BNLK = F.scaled_dot_product_attention(
            q, k, v, attn_mask=layout.mask_B1LL, dropout_p=dropout_p
        )
        o_TNK = o_BNLK.transpose(1, 2)
    elif layout.path == "varlen":
        # torch.nn.attention.varlen.varlen_attn is this call with dropout fixed at 0; BERT drops.
        q_TNK, k_TNK, v_TNK = qkv_T3NK.unbind(1)
        o_TNK = torch.ops.aten._flash_attention_forward(
            q_TNK,
            k_TNK,
            v_TNK,
            layout.cu_seqlens_S,
            layout.cu_seqlens_S,
            layout.max_seq_len,
            layout.max_seq_len,
            dropout_p,
            layout.causal,
            return_debug_mask=False,
        )[0]
    else:
        from flash_attn import flash_attn_varlen_qkvpacked_func

        o_TNK = flash_attn_varlen_qkvpacked_func(
            qkv_T3NK,
            layout.cu_seqlens_S,
            layout.max_seq_len,
            dropout_p=dropout_p,
            causal=layout.causal,
        )
    return o_TNK.reshape(T, N * K)


# The loop over sequences is one operator, so that torch.compile sees static shapes around it.
# Sequences of one length are taken together, which spares calls and lets threads share the work.
# Its second output holds the probabilities for backward, group after group; an entry that
# dropout removed is stored negative, which spares a mask. The buffer has the largest size that
# could be needed; memory that is never touched costs nothing.

# Probabilities of a group of sequences; about what a CPU's cache holds.
_GROUP_ENTRIES = 1 << 18


@torch.library.custom_op("bert_pretraining::attention_by_sequence", mutates_args=())
def _by_sequence(
    qkv_T3NK: Tensor, cu_seqlens_S: Tensor, max_seq_len: int, dropout_p: float, causal: bool
) -> tuple[Tensor, Tensor]:
    T, _, N, K = qkv_T3NK.shape
    wide = qkv_T3NK.float() if is_widened(qkv_T3NK) else qkv_T3NK
    o_TNK = wide.new_empty(T, N, K)
    signed = wide.new_empty(T * max_seq_len * N)
    used = 0
    for rows, length in _groups(cu_seqlens_S, N):
        q, k, v = _taken(wide, rows, length)
        scores_GLL = torch.baddbmm(
            wide.new_empty(1, 1, 1), q, k.transpose(1, 2), beta=0, alpha=1 / math.sqrt(K)
        )
        if causal:  # backward needs no mask: probabilities of 0 have no gradient
            scores_GLL += scores_GLL.new_full((length, length), -torch.inf).triu(1)
        p_GLL = _block(signed, used, scores_GLL)
        torch.softmax(scores_GLL, -1, out=p_GLL)
        kept_GLL = p_GLL
        if dropout_p > 0:
            bits = bits_of(p_GLL)
            bits.bitwise_or_(dropped(p_GLL, dropout_p).to(bits.dtype) << _sign_place(bits))
            kept_GLL = p_GLL.clamp(min=0)
        _put(o_TNK[:, None], rows, length, torch.bmm(kept_GLL, v)[None])
        used += p_GLL.numel()
    return o_TNK.mul_(upscale(dropout_p)).to(qkv_T3NK.dtype), signed


@_by_sequence.register_fake
def _(qkv_T3NK, cu_seqlens_S, max_seq_len, dropout_p, causal):
    T, _, N, K = qkv_T3NK.shape
    wide = torch.float32 if is_widened(qkv_T3NK) else qkv_T3NK.dtype
    return qkv_T3NK.new_empty(T, N, K), qkv_T3NK.new_empty(T * max_seq_len * N, dtype=wide)


@torch.library.custom_op("bert_pretraining::attention_by_sequence_backward", mutates_args=())
def _by_sequence_backward(
    grad_TNK: Tensor, qkv_T3NK: Tensor, signed: Tensor, cu_seqlens_S: Tensor, dropout_p: float
) -> Tensor:
    N, K = qkv_T3NK.shape[2:]
    wide, grad_TNK = qkv_T3NK.to(signed.dtype), grad_TNK.to(signed.dtype) * upscale(dropout_p)
    grad_qkv = torch.empty_like(wide)
    used = 0
    for rows, length in _groups(cu_seqlens_S, N):
        q, k, v = _taken(wide, rows, length)
        (do,) = _taken(grad_TNK[:, None], rows, length)
        dp_GLL = torch.bmm(do, v.transpose(1, 2))
        p_GLL = _block(signed, used, dp_GLL)
        kept_GLL = p_GLL
        if dropout_p > 0:
            kept_GLL = p_GLL.clamp(min=0)
            bits = bits_of(p_GLL)
            bits_of(dp_GLL).bitwise_and_((bits >> _sign_place(bits)).bitwise_not_())
            p_GLL = p_GLL.abs()
        ds_GLL = torch._softmax_backward_data(dp_GLL, p_GLL, -1, p_GLL.dtype)
        grads = q.new_empty(3, *q.shape)
        torch.bmm(ds_GLL, k, out=grads[0])
        torch.bmm(ds_GLL.transpose(1, 2), q, out=grads[1])
        grads[:2].mul_(1 / math.sqrt(K))
        torch.bmm(kept_GLL.transpose(1, 2), do, out=grads[2])
        _put(grad_qkv, rows, length, grads)
        used += p_GLL.numel()
    return grad_qkv.to(qkv_T3NK.dtype)


@_by_sequence_backward.register_fake
def _(grad_TNK, qkv_T3NK, signed, cu_seqlens_S, dropout_p):
    return torch.empty_like(qkv_T3NK)


def _by_sequence_setup(ctx, inputs, output) -> None:
    qkv_T3NK, cu_seqlens_S, _, ctx.dropout_p, _ = inputs
    ctx.save_for_backward(qkv_T3NK, output[1], cu_seqlens_S)
    ctx.mark_non_differentiable(output[1])


def _by_sequence_grad(ctx, grad_TNK, _):
    qkv_T3NK, signed, cu_seqlens_S = ctx.saved_tensors
    grad = _by_sequence_backward(grad_TNK, qkv_T3NK, signed, cu_seqlens_S, ctx.dropout_p)
    return grad, None, None, None, None


_by_sequence.register_autograd(_by_sequence_grad, setup_context=_by_sequence_setup)


def _groups(cu_seqlens_S: Tensor, N: int) -> Iterator[tuple[Tensor, int]]:
    """(their tokens' places, their length) of sequences of one length, group after group."""
    bounds = cu_seqlens_S.tolist()
    starts: dict[int, list[int]] = {}
    for start, end in zip(bounds, bounds[1:], strict=False):
        starts.setdefault(end - start, []).append(start)
    starts.pop(0, None)
    for length, those in starts.items():
        count = max(1, _GROUP_ENTRIES // (N * length * length))
        for at in range(0, len(those), count):
            starts_n1 = torch.tensor(those[at : at + count])[:, None]
            yield (starts_n1 + torch.arange(length)).flatten(), length


def _taken(x_TPNK: Tensor, rows: Tensor, length: int) -> Tensor:
    """[P, G, L, K]: the sequences at `rows`, G heads of them, L tokens each."""
    P, N, K = x_TPNK.shape[1:]
    x = x_TPNK.index_select(0, rows).view(-1, length, P, N, K)
    return x.permute(2, 0, 3, 1, 4).reshape(P, -1, length, K)


def _put(out_TPNK: Tensor, rows: Tensor, length: int, x_PGLK: Tensor) -> None:
    P, N, K = out_TPNK.shape[1:]
    x = x_PGLK.view(P, -1, N, length, K).permute(1, 3, 0, 2, 4)
    out_TPNK[rows] = x.reshape(-1, P, N, K)


def _sign_place(bits: Tensor) -> int:
    return 8 * bits.element_size() - 1


def _block(flat: Tensor, used: int, like: Tensor) -> Tensor:
    return flat[used : used + like.numel()].view(like.shape)
