"""Masked-LM and next-sentence loss as sums over the global counts.

The logits are the largest tensor of a step. Compiled, one kernel reads them in forward and one
turns them into their gradient in backward: 6 bytes a bf16 logit. Eager, that would be a pass over
fp32 copies for every operator, so chunks that fit a CPU's cache go through all of them in turn.

Legend: M masked positions (capacity), C sequences (capacity), V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from data_pipeline.stream.batch import IGNORE_INDEX

# Rows of logits handled at a time: 64 rows of a 30,592-word vocabulary in fp32 are 8 MB, which
# stay in a CPU's cache; a GPU wants longer kernels and has the memory.
CPU_CHUNK_ROWS = 64
GPU_CHUNK_ROWS = 1024


class LossSums(NamedTuple):
    """`loss` carries the gradient; the rest are detached sums over this micro-batch (0-dim)."""

    loss: Tensor
    mlm_sum: Tensor
    nsp_sum: Tensor
    mlm_correct: Tensor
    nsp_correct: Tensor


def pretraining_loss(
    mlm_logits: Tensor,
    masked_lm_labels: Tensor,
    nsp_logits: Tensor,
    next_sentence_labels: Tensor,
    step_predictions: int,
    step_sequences: int,
    *,
    compiled: bool = False,
) -> LossSums:
    """Cross-entropy sums in nats, divided by the counts of the whole optimiser step.

    mlm_logits [M, V], masked_lm_labels [M], nsp_logits [C, 2], next_sentence_labels [C]; slots
    labelled IGNORE_INDEX count nothing. `step_predictions`, `step_sequences`: global counts over
    all ranks and micro-batches of the step, so the losses of the parts add up to the global mean.
    Backward overwrites `mlm_logits` with their gradient: no second copy of the largest tensor.
    `compiled`: by torch.compile, as the model's own parts under `model.compile`.
    """
    mlm_sum, mlm_correct = _CrossEntropySum.apply(mlm_logits, masked_lm_labels, compiled)
    next_sentence = compile_once(_next_sentence) if compiled else _next_sentence
    nsp_sum, nsp_correct = next_sentence(nsp_logits, next_sentence_labels)
    loss = mlm_sum / max(1, step_predictions) + nsp_sum / max(1, step_sequences)
    return LossSums(loss, mlm_sum.detach(), nsp_sum.detach(), mlm_correct, nsp_correct)


def _next_sentence(logits_C2: Tensor, labels_C: Tensor) -> tuple[Tensor, Tensor]:
    """(sum of nats, number right)"""
    nats = F.cross_entropy(logits_C2.float(), labels_C, ignore_index=IGNORE_INDEX, reduction="sum")
    return nats, (logits_C2.argmax(-1) == labels_C).sum()


@functools.cache
def compile_once(function: Callable) -> Callable:
    """torch.compile of `function`, the same object at every call."""
    return torch.compile(function, dynamic=False)


class _CrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits_MV: Tensor, labels_M: Tensor, compiled: bool) -> tuple[Tensor, Tensor]:
        read = compile_once(_read) if compiled else _read_in_chunks
        total, correct, normaliser_M1 = read(logits_MV.detach(), labels_M)
        ctx.save_for_backward(logits_MV, labels_M, normaliser_M1)
        ctx.consumed = False
        ctx.mark_non_differentiable(correct)
        return total, correct

    @staticmethod
    def backward(ctx, grad_total: Tensor, _) -> tuple[Tensor, None, None]:
        if ctx.consumed:
            raise RuntimeError("pretraining_loss: backward can run once; it consumes the logits")
        ctx.consumed = True
        logits_MV, labels_M, normaliser_M1 = ctx.saved_tensors
        # Nothing else reads the logits again: the product that made them saved its inputs only.
        grad_MV = logits_MV.detach()
        if normaliser_M1 is None:
            _write_in_chunks(grad_MV, labels_M, grad_total.float())
        else:
            compile_once(_write)(grad_MV, labels_M, normaliser_M1, grad_total.float())
        return grad_MV, None, None


def _read(logits_MV: Tensor, labels_M: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(sum of nats, number right, log of the sum of exponentials [M, 1])"""
    wide_MV = logits_MV.float()
    # Spelt as inductor's pattern for maximum and sum in one pass; torch.logsumexp takes two.
    largest_M1 = wide_MV.amax(-1, keepdim=True)
    normaliser_M1 = (wide_MV - largest_M1).exp().sum(-1, keepdim=True).log() + largest_M1
    kept_M1 = (labels_M != IGNORE_INDEX).unsqueeze(1)
    target_M1 = labels_M.clamp(min=0).unsqueeze(1)
    nats_M1 = normaliser_M1 - wide_MV.gather(1, target_M1)
    correct_M1 = (logits_MV.argmax(-1, keepdim=True) == target_M1) & kept_M1
    return torch.where(kept_M1, nats_M1, 0.0).sum(), correct_M1.sum(), normaliser_M1


def _write(logits_MV: Tensor, labels_M: Tensor, normaliser_M1: Tensor, grad_total: Tensor) -> None:
    """Their gradient over the logits: (softmax - one-hot target) x grad_total."""
    scale_M1 = torch.where(labels_M != IGNORE_INDEX, grad_total, 0.0).unsqueeze(1)
    target_MV = labels_M.unsqueeze(1) == torch.arange(logits_MV.shape[1], device=logits_MV.device)
    p_MV = (logits_MV.float() - normaliser_M1).exp()
    logits_MV.copy_((p_MV - target_MV.float()) * scale_M1)


def _read_in_chunks(logits_MV: Tensor, labels_M: Tensor) -> tuple[Tensor, Tensor, None]:
    kept_M = labels_M != IGNORE_INDEX
    target_M1 = labels_M.clamp(min=0)[:, None]
    nats_M = torch.empty(len(labels_M), dtype=torch.float32, device=logits_MV.device)
    correct = torch.zeros((), dtype=torch.int64, device=logits_MV.device)
    for rows, logits, log_p in _chunks(logits_MV):
        torch.log_softmax(logits, -1, out=log_p)
        nats_M[rows] = -log_p.gather(1, target_M1[rows])[:, 0]
        correct += _correct(logits_MV[rows], target_M1[rows]).logical_and_(kept_M[rows]).sum()
    return torch.where(kept_M, nats_M, 0.0).sum(), correct, None


def _write_in_chunks(logits_MV: Tensor, labels_M: Tensor, grad_total: Tensor) -> None:
    scale_M = torch.where(labels_M != IGNORE_INDEX, grad_total, 0.0)
    for rows, logits, p in _chunks(logits_MV):
        torch.softmax(logits, -1, out=p).mul_(scale_M[rows, None])
        target = labels_M[rows].clamp(min=0)[:, None]
        logits_MV[rows] = p.scatter_add_(1, target, -scale_M[rows, None])


def _correct(logits_MV: Tensor, target_M1: Tensor) -> Tensor:
    """Whether the target is the first of the largest logits [M]."""
    if logits_MV.device.type != "cpu":
        return logits_MV.argmax(-1) == target_M1[:, 0]
    # A CPU finds the largest value ten times as fast as its place, and most targets are not it.
    correct_M = logits_MV.amax(-1) == logits_MV.gather(1, target_M1)[:, 0]
    rows = correct_M.nonzero()[:, 0]
    correct_M[rows] = logits_MV[rows].argmax(-1) == target_M1[rows, 0]
    return correct_M


def _chunks(logits_MV: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """(rows, their logits in fp32, as much memory for a result) until all rows are done.

    The same memory again and again: a CPU would map and clear new pages for every chunk.
    """
    size = min(len(logits_MV), CPU_CHUNK_ROWS if logits_MV.device.type == "cpu" else GPU_CHUNK_ROWS)
    wide, result = torch.empty(
        2, size, logits_MV.shape[1], dtype=torch.float32, device=logits_MV.device
    )
    for start in range(0, len(logits_MV), max(1, size)):
        rows = slice(start, min(start + size, len(logits_MV)))
        n = rows.stop - start
        yield rows, wide[:n].copy_(logits_MV[rows]), result[:n]
