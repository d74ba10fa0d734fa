"""Held-out masked LM and next sentence, beside what guessing without a model would reach."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from data_pipeline.stream.batch import IGNORE_INDEX, Batch
from pretrain.loss import LossSums, pretraining_loss
from pretrain.model import BertForPreTraining


@dataclass(frozen=True)
class Guessing:
    """What a guesser that only knows the token counts of training text reaches at the masked
    positions of held-out text.

    entropy: nats by their frequencies; commonest: share of the commonest token.
    """

    entropy: float
    commonest: float


@dataclass(frozen=True)
class Scores:
    """Means over held-out text: losses in nats, accuracies in 0..1. None: next sentence was no
    task."""

    mlm_loss: float
    nsp_loss: float | None
    mlm_accuracy: float
    nsp_accuracy: float | None


def guessing(batches: Iterable[Batch], counts: torch.Tensor, sep_id: int) -> Guessing:
    """On the predicted tokens of `batches` but [SEP], which no text holds; `counts`, fp64 [V], of
    training text, none of them 0."""
    labels = torch.cat([batch.masked_lm_labels for batch in batches])
    labels = labels[(labels != IGNORE_INDEX) & (labels != sep_id)]
    nats = (counts.sum() / counts).log()[labels]
    return Guessing(float(nats.mean()), float((labels == counts.argmax()).double().mean()))


def batch_losses(
    model: Callable[..., Any], batch: Batch, step_predictions: int, step_sequences: int
) -> LossSums:
    """Forward and loss of one micro-batch that is on the model's device."""
    mlm_logits, nsp_logits = model(
        batch.input_ids,
        batch.token_type_ids,
        batch.position_ids,
        batch.sequence_ids,
        batch.cu_seqlens,
        batch.max_seq_len,
        batch.masked_lm_positions,
        batch.cls_positions,
    )
    return pretraining_loss(
        mlm_logits,
        batch.masked_lm_labels,
        nsp_logits,
        batch.next_sentence_labels,
        step_predictions,
        step_sequences,
        compiled=getattr(model, "module", model).config.compile,  # inside DeepSpeed's engine
    )


@torch.no_grad()
def sums(model: Callable[..., Any], batches: Iterable[Batch], device: torch.device) -> torch.Tensor:
    """fp64 [6]: MLM loss, NSP loss, MLM right, NSP right, predictions, next-sentence labels,
    summed.

    The model should be in eval mode; the sums of several ranks may be added.
    """
    total = torch.zeros(6, dtype=torch.float64, device=device)
    for batch in batches:
        found = batch_losses(model, batch.to(device, non_blocking=True), 1, 1)
        counts = torch.tensor([batch.predictions, batch.next_sentences], device=device)
        total += torch.cat([torch.stack([x.double() for x in found[1:]]), counts.double()])
    return total


def score(model: BertForPreTraining, batches: Iterable[Batch]) -> Scores:
    """`sums` of one process as means; the model should be in eval mode."""
    return scores_of(sums(model, batches, next(model.parameters()).device))


def scores_of(total: torch.Tensor) -> Scores:
    """Means from the (all ranks') `sums`."""
    mlm, nsp, mlm_right, nsp_right, predictions, judged = total.tolist()
    predictions = max(predictions, 1)
    return Scores(
        mlm / predictions,
        nsp / judged if judged else None,
        mlm_right / predictions,
        nsp_right / judged if judged else None,
    )
