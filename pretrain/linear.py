"""One door to matrix products with a weight: plain, or widened where a CPU lacks bf16 units.

Legend: T tokens, I and O inputs and outputs, E entries of a table, D their size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# Asked once: compiled code takes a constant, and would break at the question.
_HAS_BF16_PRODUCTS = torch.backends.mkldnn.is_available() and bool(
    torch.ops.mkldnn._is_mkldnn_bf16_supported()
)


def cpu_has_bf16_products() -> bool:
    """Whether this CPU multiplies bf16 matrices at speed (AVX-512 or AMX; oneDNN knows)."""
    return _HAS_BF16_PRODUCTS


def is_widened(x: Tensor) -> bool:
    """Whether products of tensors like `x` are computed in fp32 and rounded once at the end.

    Without bf16 units PyTorch's own bf16 product on a CPU is a scalar loop (1-20 GFLOP/s where
    fp32 reaches 170). Widening computes the same sum of exact bf16 products in fp32.
    """
    return x.device.type == "cpu" and x.dtype == torch.bfloat16 and not cpu_has_bf16_products()


class _WidenedLinear(torch.autograd.Function):
    # Saving the narrow tensors (and widening again in backward) keeps bf16's memory.
    @staticmethod
    def forward(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor) -> Tensor:
        return F.linear(x_TI.float(), weight_OI.float(), bias_O.float()).to(x_TI.dtype)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.save_for_backward(inputs[0], inputs[1])

    @staticmethod
    def backward(ctx, grad_TO: Tensor):
        x_TI, weight_OI = ctx.saved_tensors
        wide_TO = grad_TO.float()
        grad_x = (wide_TO @ weight_OI.float()).to(x_TI.dtype)
        grad_weight = (wide_TO.t() @ x_TI.float()).to(weight_OI.dtype)
        return grad_x, grad_weight, wide_TO.sum(0).to(weight_OI.dtype)


def linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor) -> Tensor:
    """x W^T + b: [T, I], [O, I], [O] -> [T, O]."""
    if is_widened(x_TI):
        return _WidenedLinear.apply(x_TI, weight_OI, bias_O)
    return F.linear(x_TI, weight_OI, bias_O)


class _EmbeddingOfFew(torch.autograd.Function):
    @staticmethod
    def forward(ids_T: Tensor, weight_ED: Tensor) -> Tensor:
        return F.embedding(ids_T, weight_ED)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ids_T, weight_ED = inputs
        ctx.save_for_backward(ids_T)
        ctx.entries = len(weight_ED)

    @staticmethod
    def backward(ctx, grad_TD: Tensor) -> tuple[None, Tensor]:
        (ids_T,) = ctx.saved_tensors
        wide_TD = grad_TD.float() if is_widened(grad_TD) else grad_TD
        entries_E = torch.arange(ctx.entries, device=ids_T.device)
        chosen_ET = (entries_E.unsqueeze(1) == ids_T).to(wide_TD.dtype)
        return None, (chosen_ET @ wide_TD).to(grad_TD.dtype)


def embedding_of_few(ids_T: Tensor, weight_ED: Tensor) -> Tensor:
    """F.embedding for a table of few entries [E, D], whose gradient is a product with ones and
    zeros. The lookup's own gives the tokens of an entry to one group of a GPU's threads, and
    there are as many groups as entries.
    """
    return _EmbeddingOfFew.apply(ids_T, weight_ED)
