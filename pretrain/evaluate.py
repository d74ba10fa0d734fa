"""Held-out masked LM and next sentence, beside what guessing without a model would reach."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from data_pipeline.stream.batch import IGNORE_INDEX, Batch
from data_pipeline.stream.dataset import Dataset
from pretrain.loss import LossSums, pretraining_loss
from pretrain.model import BertForPreTraining

_COUNTED = 1_000_000


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
    task. by_source: of each source that was met, by name; empty where the data set has one."""

    mlm_loss: float
    nsp_loss: float | None
    mlm_accuracy: float
    nsp_accuracy: float | None
    by_source: dict[str, dict[str, float]] = field(default_factory=dict)


def token_counts(dataset: Dataset, tokens: int = _COUNTED) -> torch.Tensor:
    """fp64 [V]: of training text, and one more of each. Of about `tokens` of them from all over the
    data set, in which each source has the share that it has in an epoch, repeats counted."""
    sources, weights = dataset.manifest.sources, dataset.data.weights
    found: dict[int, torch.Tensor] = {}
    for document in dataset.sample("train", tokens):
        own = torch.bincount(
            torch.from_numpy(document.ids.astype("int64")), minlength=len(dataset.tokenizer)
        )
        found[document.source] = found.get(document.source, 0) + own.double()
    known = sum(source.tokens for source in sources)
    counted = float(sum(own.sum() for own in found.values()))
    counts = torch.zeros(len(dataset.tokenizer), dtype=torch.float64)
    for place, own in found.items():
        if place < len(sources) and sources[place].tokens:
            in_epoch = weights.get(sources[place].name, 1.0) * sources[place].tokens
            own *= counted * in_epoch / known / own.sum().clamp(min=1)
        counts += own
    return counts + 1


def guessing_sums(
    batches: Iterable[Batch], counts: torch.Tensor, sep_id: int
) -> tuple[float, int, int]:
    """(nats, the commonest token's hits, predictions) on the predicted tokens of `batches` but
    [SEP], which no text holds; `counts`, fp64 [V], of training text, none of them 0."""
    labels = torch.cat([batch.masked_lm_labels for batch in batches])
    labels = labels[(labels != IGNORE_INDEX) & (labels != sep_id)]
    nats = (counts.sum() / counts).log()[labels].sum()
    return float(nats), int((labels == counts.argmax()).sum()), len(labels)


def guessing(*found: tuple[float, int, int]) -> Guessing:
    """Means from the `guessing_sums` of all ranks."""
    nats, hits, predictions = map(sum, zip(*found, strict=True))
    return Guessing(nats / max(predictions, 1), hits / max(predictions, 1))


def batch_losses(
    model: Callable[..., Any], batch: Batch, step_predictions: int, step_sequences: int
) -> LossSums:
    """Forward and loss of one micro-batch that is on the model's device."""
    return _losses(model, batch, *_logits(model, batch), step_predictions, step_sequences)


def _logits(model: Callable[..., Any], batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    return model(
        batch.input_ids,
        batch.token_type_ids,
        batch.position_ids,
        batch.sequence_ids,
        batch.cu_seqlens,
        batch.max_seq_len,
        batch.masked_lm_positions,
        batch.cls_positions,
    )


def _losses(
    model: Callable[..., Any],
    batch: Batch,
    mlm_logits: torch.Tensor,
    nsp_logits: torch.Tensor,
    step_predictions: int,
    step_sequences: int,
) -> LossSums:
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
def sums(
    model: Callable[..., Any],
    batches: Iterable[Batch],
    device: torch.device,
    sources: Sequence[str] = (),
) -> torch.Tensor:
    """fp64 [6 + 3 S]: MLM loss, NSP loss, MLM right, NSP right, predictions, next-sentence labels,
    summed; then MLM loss, MLM right and predictions of each of S sources, where there are several
    and the batches are a HeldOut's.

    The model should be in eval mode; the sums of several ranks may be added.
    """
    whole = torch.zeros(6, dtype=torch.float64, device=device)
    parts = torch.zeros(len(sources), 3, dtype=torch.float64, device=device)
    for on_host in batches:
        batch = on_host.to(device, non_blocking=True)
        logits = _logits(model, batch)
        found = _losses(model, batch, *logits, 1, 1)
        counts = torch.tensor([batch.predictions, batch.next_sentences], device=device)
        whole += torch.cat([torch.stack([x.double() for x in found[1:]]), counts.double()])
        if len(sources) > 1:
            _add_parts(parts, on_host.prediction_sources, logits[0], batch.masked_lm_labels)
    return torch.cat([whole, parts.flatten()]) if len(sources) > 1 else whole


def _add_parts(
    parts_S3: torch.Tensor, sources_M: torch.Tensor, logits_MV: torch.Tensor, labels_M: torch.Tensor
) -> None:
    """Eagerly: the number of predictions of a source is another in each batch."""
    none = logits_MV.new_zeros(0, 2), labels_M.new_zeros(0)
    for source in range(len(parts_S3)):
        mine = (sources_M == source).nonzero()[:, 0].to(labels_M.device)
        if len(mine):
            found = pretraining_loss(logits_MV[mine], labels_M[mine], *none, 1, 1)
            parts_S3[source, :2] += torch.stack([found.mlm_sum, found.mlm_correct]).double()
            parts_S3[source, 2] += len(mine)


def score(
    model: BertForPreTraining, batches: Iterable[Batch], sources: Sequence[str] = ()
) -> Scores:
    """`sums` of one process as means; the model should be in eval mode."""
    return scores_of(sums(model, batches, next(model.parameters()).device, sources), sources)


def scores_of(total: torch.Tensor, sources: Sequence[str] = ()) -> Scores:
    """Means from the (all ranks') `sums` of the same sources."""
    mlm, nsp, mlm_right, nsp_right, predictions, judged = total[:6].tolist()
    predictions = max(predictions, 1)
    by_source = {
        name: {"mlm_loss": nats / count, "mlm_accuracy": right / count}
        for name, (nats, right, count) in zip(sources, total[6:].view(-1, 3).tolist(), strict=False)
        if count
    }
    return Scores(
        mlm / predictions,
        nsp / judged if judged else None,
        mlm_right / predictions,
        nsp_right / judged if judged else None,
        by_source,
    )
