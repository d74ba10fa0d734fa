"""The encoder with one new layer on top, as in sections 4 and 5.3 of the paper, or with a BiLSTM
in between (section 5.1).

Names are Hugging Face's (`bert.*`, `classifier`, `qa_outputs`), so that a fine-tuned folder loads
there. Legend: T tokens, C sequences, D hidden, K outputs, H width of a direction of the BiLSTM.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from data_pipeline.corpus.tokenizer import Tokenizer
from finetune.batches import Batch, collate
from finetune.examples import IGNORE_LABEL, Item
from pretrain import hugging_face
from pretrain.attention import choose
from pretrain.model import BertModel, Linear, ModelConfig

READING = "finetune"  # the key of config.json


@dataclass(frozen=True)
class HeadSpec:
    """kind: sequence (a class or a score of each sequence), choice (one of `outputs` sequences),
    span (start and end token), tokens (a class of each token). multi: of a sequence each class is
    or is not.
    """

    kind: Literal["sequence", "choice", "span", "tokens"]
    outputs: int
    labels: tuple[str, ...] = ()
    multi: bool = False

    @property
    def regression(self) -> bool:
        return self.kind == "sequence" and self.outputs == 1 and not self.multi

    @property
    def problem(self) -> str:
        """Hugging Face's name of what a sequence is told by."""
        if self.regression:
            return "regression"
        return "multi_label_classification" if self.multi else "single_label_classification"

    @property
    def width(self) -> int:
        return {"choice": 1, "span": 2}.get(self.kind, self.outputs)

    @property
    def layer(self) -> str:
        return "qa_outputs" if self.kind == "span" else "classifier"

    @property
    def pooled(self) -> bool:
        return self.kind in ("sequence", "choice")

    @property
    def architecture(self) -> str:
        """Hugging Face's class."""
        kinds = {"sequence": "SequenceClassification", "choice": "MultipleChoice"}
        kinds |= {"span": "QuestionAnswering", "tokens": "TokenClassification"}
        return f"BertFor{kinds[self.kind]}"


class TaskModel(nn.Module):
    """What the training loop asks of a model. trained: what of it is, for result.json."""

    trained: str
    compute_dtype: torch.dtype | None = None

    def prepare(self, dtype: torch.dtype | None, device: torch.device, max_seq_len: int) -> None:
        """Choose precision of the products (None: the weights') and layout of the batches."""

    def collate(self, items: Sequence[Any], device: torch.device) -> Any:
        """Items as the batch that `forward` takes."""
        raise NotImplementedError

    def loss_sum(self, logits: Tensor, batch: Any) -> Tensor:
        """Summed over the batch's labels."""
        raise NotImplementedError

    def split(self, logits: Tensor, batch: Any) -> list[np.ndarray]:
        """Outputs of each item."""
        raise NotImplementedError

    def save(
        self, folder: Path, reading: Mapping[str, Any] | None = None, card: str | None = None
    ) -> None:
        """model.safetensors and what else describes the model; UserError if it cannot be.

        reading: how data are read for it, kept in its configuration. card: the text of README.md.
        """
        raise NotImplementedError

    def load_saved(self, folder: Path) -> None:
        """Weights that `save` wrote for this very model."""
        self.load_state_dict(load_file(str(folder / "model.safetensors")))


class BiLstm(nn.LSTM):
    """An LSTM in both directions over sequences that stand one after the other, without padding."""

    def __init__(self, inputs: int, size: int, layers: int = 1, dropout: float = 0.0) -> None:
        between = dropout if layers > 1 else 0.0
        super().__init__(inputs, size, layers, bidirectional=True, dropout=between)

    def forward(self, x_TI: Tensor, lengths: Sequence[int]) -> Tensor:
        """[T, I] -> [T, 2H], the direction of reading first."""
        parts = nn.utils.rnn.pack_sequence(torch.split(x_TI, list(lengths)), enforce_sorted=False)
        return torch.cat(nn.utils.rnn.unpack_sequence(super().forward(parts)[0]))

    def ends(self, out_T2H: Tensor, lengths: Sequence[int]) -> Tensor:
        """Of `forward`'s outputs [C, 2H]: where each direction has read the whole sequence."""
        after_C = torch.tensor(lengths, device=out_T2H.device).cumsum(0)
        first_C = F.pad(after_C[:-1], (1, 0))
        ahead, back = out_T2H[after_C - 1], out_T2H[first_C]
        return torch.cat([ahead[:, : self.hidden_size], back[:, self.hidden_size :]], 1)


@torch.no_grad()
def initialise_lstm(
    parameters: Iterable[Tensor], size: int, generator: torch.Generator | None
) -> None:
    """torch's own start of an LSTM of this width, and of a layer on top of it."""
    for parameter in parameters:
        parameter.uniform_(-(size**-0.5), size**-0.5, generator=generator)


class FineTuned(TaskModel):
    """BertModel, perhaps a BiLSTM of width `bilstm`, and the task's layer.

    `frozen`: the encoder has neither dropout nor gradient. With a BiLSTM the task's layer sees its
    outputs at each token, or at the two ends of a sequence; the pooler is not used.
    """

    def __init__(
        self,
        config: ModelConfig,
        head: HeadSpec,
        tokenizer: Tokenizer | None = None,
        *,
        frozen: bool = False,
        bilstm: int = 0,
    ) -> None:
        super().__init__()
        self.bert = BertModel(config, generator=None)
        self.bilstm = BiLstm(config.hidden_size, bilstm) if bilstm else None
        self.head, self.tokenizer, self.frozen = head, tokenizer, frozen
        self.trained = ("head" if frozen else "all") + (" + BiLSTM" if bilstm else "")
        self.dropout_p = 0.0 if head.kind == "span" else config.hidden_dropout_prob
        self.pad_id = tokenizer.pad_id if tokenizer is not None else 0
        self.row_len: int | None = None
        setattr(self, head.layer, Linear(2 * bilstm or config.hidden_size, head.width))
        if frozen:
            self.bert.requires_grad_(False)

    @property
    def pooled(self) -> bool:
        """Whether the pooler is used."""
        return self.head.pooled and self.bilstm is None

    @property
    def new_layers(self) -> tuple[str, ...]:
        """Beside the encoder."""
        return (self.head.layer,) if self.bilstm is None else ("bilstm", self.head.layer)

    def train(self, mode: bool = True) -> FineTuned:
        super().train(mode)
        if self.frozen:
            self.bert.eval()
        return self

    def prepare(self, dtype: torch.dtype | None, device: torch.device, max_seq_len: int) -> None:
        self.compute_dtype = dtype
        config = self.bert.config
        path = choose(config.attention, device, dtype or torch.float32, config.head_size)
        # Where no kernel of a GPU takes boundaries, rows keep the mask small.
        self.row_len = max_seq_len if device.type == "cuda" and path == "sdpa" else None

    def collate(self, items: Sequence[Item], device: torch.device) -> Batch:
        return collate(items, self.pad_id, device, self.row_len)

    def forward(self, batch: Batch) -> Tensor:
        """sequence: [C, K]; choice: [items, choices]; span: [T, 2]; tokens: [T, K]."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen):
            hidden_TD = self.bert.encode(*batch.packed).flatten(0, 1)
            if self.pooled:
                # Left to right only the last token has seen its sequence.
                places_C = batch.ends if self.bert.config.is_decoder else batch.starts
                x = self.bert.pooler(hidden_TD.index_select(0, places_C))
            else:
                x = hidden_TD.index_select(0, batch.positions)
        if self.bilstm is not None:
            x = self.bilstm(x, batch.lengths)
            x = self.bilstm.ends(x, batch.lengths) if self.head.pooled else x
        x = F.dropout(x, self.dropout_p, self.training)
        logits = getattr(self, self.head.layer)(x).float()
        return logits.view(batch.items, -1) if self.head.kind == "choice" else logits

    def loss_sum(self, logits: Tensor, batch: Batch) -> Tensor:
        """Summed over the batch's labels: cross-entropy in nats, or squared error for a score.

        A span's loss is the mean of those of its two ends, each a softmax over its sequence.
        """
        assert batch.labels is not None
        if self.head.kind == "span":
            ends_CL2 = _by_sequence(logits, batch.lengths)
            losses = F.cross_entropy(ends_CL2, batch.labels, reduction="none")
            return losses.sum() / 2
        if self.head.regression:
            return F.mse_loss(logits[:, 0], batch.labels, reduction="sum")
        if self.head.multi:
            wanted = batch.labels.view_as(logits)
            return F.binary_cross_entropy_with_logits(logits, wanted, reduction="sum")
        return F.cross_entropy(logits, batch.labels, ignore_index=IGNORE_LABEL, reduction="sum")

    def save(
        self, folder: Path, reading: Mapping[str, Any] | None = None, card: str | None = None
    ) -> None:
        """A Hugging Face folder: config, weights, vocabulary. One with a BiLSTM, or that pools the
        last token, names a class that Hugging Face does not have."""
        head = self.head
        config: dict[str, Any] = {"architectures": [head.architecture]}
        if self.pooled and self.bert.config.is_decoder:
            config = {"architectures": [head.architecture.replace("Bert", "BertLastToken")]}
        if self.bilstm is not None:
            config = {
                "architectures": [head.architecture.replace("Bert", "BertBiLstm")],
                "bilstm": self.bilstm.hidden_size,
            }
        if reading is not None:
            config[READING] = dict(reading)
        if head.kind == "sequence":
            config["problem_type"] = head.problem
        if head.labels:
            config["id2label"] = {str(i): label for i, label in enumerate(head.labels)}
            config["label2id"] = {label: i for i, label in enumerate(head.labels)}
        elif head.regression:
            config["id2label"] = {"0": "LABEL_0"}
        hugging_face.write(
            folder,
            self.state_dict(),
            self.bert.config,
            self.tokenizer,
            by="finetune/run.py",
            config=config,
            card=card,
            force=True,  # a job's own folder
        )

    def split(self, logits: Tensor, batch: Batch) -> list[np.ndarray]:
        """Outputs of each item: [K], [choices], or [L, K]."""
        values = logits.detach().cpu()
        parts = values if self.head.pooled else torch.split(values, list(batch.lengths))
        return [part.numpy() for part in parts]


@torch.no_grad()
def initialise_head(model: FineTuned, config: ModelConfig, generator: torch.Generator) -> None:
    """The new layer as the paper's code starts it: truncated normal, bias 0; a BiLSTM as torch."""
    if model.bilstm is not None:
        initialise_lstm(model.bilstm.parameters(), model.bilstm.hidden_size, generator)
    layer = getattr(model, model.head.layer)
    std = config.initializer_range
    nn.init.trunc_normal_(layer.weight, 0.0, std, -2 * std, 2 * std, generator=generator)
    layer.bias.zero_()


def _by_sequence(logits_TK: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """[T, K] -> [C, longest, K], -inf where a sequence is shorter."""
    parts = torch.split(logits_TK, list(lengths))
    return nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_value=-torch.inf)
