"""BERT for pretraining in one file: Hugging Face's parameter names, packed rows, mathematics only.

Legend: B batch (rows), L row length, T = B*L tokens, D hidden, N heads, K head size,
F feed-forward, V vocabulary (padded), M masked positions, C sequences, S boundaries.
"""

from __future__ import annotations

import warnings
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from core.errors import UserError
from pretrain.attention import Layout, attend, layout
from pretrain.dropout import dropout
from pretrain.linear import embedding_of_few, linear
from pretrain.model_config import ModelConfig


class Packed(NamedTuple):
    """Inputs of `encode`: int64 [B, L] three times, int [B, L], int32 [S], the longest run."""

    input_ids: Tensor
    token_type_ids: Tensor
    position_ids: Tensor
    sequence_ids: Tensor
    cu_seqlens: Tensor
    max_seq_len: int


def pack_dense(
    input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None
) -> Packed:
    """Padded [B, L] inputs (mask 1 on real tokens, at the left of each row) as packed inputs."""
    B, L = input_ids.shape
    device = input_ids.device
    if token_type_ids is None:
        token_type_ids = torch.zeros_like(input_ids)
    starts_B = torch.arange(B, device=device) * L
    ends_B = starts_B + attention_mask.sum(1)
    cu_seqlens = torch.stack([starts_B, ends_B], 1).flatten()
    cu_seqlens = F.pad(cu_seqlens, (0, 1), value=B * L).to(torch.int32)
    position_ids = torch.arange(L, device=device).expand(B, L)
    return Packed(
        input_ids, token_type_ids, position_ids, attention_mask.to(torch.int32), cu_seqlens, L
    )


class Linear(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs))

    def forward(self, x_TI: Tensor) -> Tensor:
        return linear(x_TI, self.weight, self.bias)


class Embedding(nn.Module):
    def __init__(self, entries: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(entries, size))

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)


class LayerNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.bias = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x_TD: Tensor) -> Tensor:
        return F.layer_norm(x_TD, self.weight.shape, self.weight, self.bias, self.eps)


class Embeddings(nn.Module):
    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.word_embeddings = Embedding(cfg.padded_vocab_size, cfg.hidden_size)
        self.position_embeddings = Embedding(cfg.max_position_embeddings, cfg.hidden_size)
        self.token_type_embeddings = Embedding(cfg.type_vocab_size, cfg.hidden_size)
        self.LayerNorm = LayerNorm(cfg.hidden_size, cfg.layer_norm_eps)
        self.dropout_p = cfg.hidden_dropout_prob

    def forward(self, input_ids_T: Tensor, types_T: Tensor, positions_T: Tensor) -> Tensor:
        types_TD = embedding_of_few(types_T, self.token_type_embeddings.weight)
        x_TD = self.word_embeddings(input_ids_T) + types_TD
        x_TD = self.LayerNorm(x_TD + self.position_embeddings(positions_T))
        return dropout(x_TD, self.dropout_p, self.training)


class SelfAttention(nn.Module):
    """Three weights in the file (names, trust ratios), one product in the forward."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.query = Linear(cfg.hidden_size, cfg.hidden_size)
        self.key = Linear(cfg.hidden_size, cfg.hidden_size)
        self.value = Linear(cfg.hidden_size, cfg.hidden_size)
        self.heads = cfg.num_attention_heads
        self.head_size = cfg.head_size
        self.dropout_p = cfg.attention_probs_dropout_prob

    def forward(self, x_TD: Tensor, rows: Layout) -> Tensor:
        parts = (self.query, self.key, self.value)
        weight = torch.cat([p.weight for p in parts])
        bias = torch.cat([p.bias for p in parts])
        qkv_T3NK = linear(x_TD, weight, bias).view(-1, 3, self.heads, self.head_size)
        return attend(qkv_T3NK, rows, self.dropout_p if self.training else 0.0)


class SublayerOutput(nn.Module):
    """Dense, dropout, residual, LayerNorm: the end of the attention and of the feed-forward."""

    def __init__(self, inputs: int, cfg: ModelConfig) -> None:
        super().__init__()
        self.dense = Linear(inputs, cfg.hidden_size)
        self.LayerNorm = LayerNorm(cfg.hidden_size, cfg.layer_norm_eps)
        self.dropout_p = cfg.hidden_dropout_prob

    def forward(self, x_TI: Tensor, residual_TD: Tensor) -> Tensor:
        y_TD = dropout(self.dense(x_TI), self.dropout_p, self.training)
        return self.LayerNorm(y_TD + residual_TD)


class Attention(nn.Module):
    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.self = SelfAttention(cfg)
        self.output = SublayerOutput(cfg.hidden_size, cfg)

    def forward(self, x_TD: Tensor, rows: Layout) -> Tensor:
        return self.output(self.self(x_TD, rows), x_TD)


class Intermediate(nn.Module):
    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.dense = Linear(cfg.hidden_size, cfg.intermediate_size)

    def forward(self, x_TD: Tensor) -> Tensor:
        return F.gelu(self.dense(x_TD))


class Layer(nn.Module):
    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.attention = Attention(cfg)
        self.intermediate = Intermediate(cfg)
        self.output = SublayerOutput(cfg.intermediate_size, cfg)

    def forward(self, x_TD: Tensor, rows: Layout) -> Tensor:
        x_TD = self.attention(x_TD, rows)
        return self.output(self.intermediate(x_TD), x_TD)


class Encoder(nn.Module):
    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.layer = nn.ModuleList(Layer(cfg) for _ in range(cfg.num_hidden_layers))
        self.checkpointing = cfg.activation_checkpointing

    def forward(self, x_TD: Tensor, rows: Layout) -> list[Tensor]:
        states = [x_TD]
        for layer in self.layer:
            if self.checkpointing and self.training:
                x_TD = checkpoint(layer, x_TD, rows, use_reentrant=False)
            else:
                x_TD = layer(x_TD, rows)
            states.append(x_TD)
        return states


class Pooler(nn.Module):
    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.dense = Linear(cfg.hidden_size, cfg.hidden_size)

    def forward(self, cls_CD: Tensor) -> Tensor:
        return torch.tanh(self.dense(cls_CD))


class BertModel(nn.Module):
    """The encoder with its pooler: the part that fine-tuning keeps (`bert.` in checkpoints)."""

    def __init__(self, config: ModelConfig, *, generator: torch.Generator | None) -> None:
        super().__init__()
        assert config.vocab_size > 0, "model.vocab_size is filled in from the data set first"
        self.config = config
        self.embeddings = Embeddings(config)
        self.encoder = Encoder(config)
        self.pooler = Pooler(config)
        if config.compile:
            for part in (self.embeddings, *self.encoder.layer):
                part.compile(dynamic=False)
        if generator is not None:
            initialise(self, config, generator)

    def encode(
        self,
        input_ids: Tensor,
        token_type_ids: Tensor,
        position_ids: Tensor,
        sequence_ids: Tensor,
        cu_seqlens: Tensor,
        max_seq_len: int,
        *,
        all_layers: bool = False,
    ) -> Tensor | list[Tensor]:
        """Packed [B, L] inputs (see `Packed`) -> hidden states [B, L, D].

        `all_layers`: a list of 1 + num_hidden_layers states, the embeddings' output first.
        """
        B, L = input_ids.shape
        if self.config.compile:
            # The number of runs follows the text; one graph serves all.
            torch._dynamo.mark_dynamic(cu_seqlens, 0)
        x_TD = self.embeddings(
            input_ids.flatten(), token_type_ids.flatten(), position_ids.flatten()
        )
        rows = layout(
            self.config.attention,
            sequence_ids,
            cu_seqlens,
            max_seq_len,
            x_TD.dtype,
            self.config.head_size,
            self.config.is_decoder,
        )
        states = [x.view(B, L, -1) for x in self.encoder(x_TD, rows)]
        return states if all_layers else states[-1]


class PredictionTransform(nn.Module):
    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.dense = Linear(cfg.hidden_size, cfg.hidden_size)
        self.LayerNorm = LayerNorm(cfg.hidden_size, cfg.layer_norm_eps)

    def forward(self, x_MD: Tensor) -> Tensor:
        return self.LayerNorm(F.gelu(self.dense(x_MD)))


class Predictions(nn.Module):
    """The language-model head; its decoder weight is the word embedding."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.transform = PredictionTransform(cfg)
        self.bias = nn.Parameter(torch.empty(cfg.padded_vocab_size))
        # Added to the bias: entries that pad the vocabulary get probability and gradient 0, so
        # the loss over the padded vocabulary is the loss over the true one. No copy, unlike a cut.
        beyond = torch.arange(cfg.padded_vocab_size) >= cfg.vocab_size
        self.register_buffer(
            "exclusion", torch.zeros(len(beyond)).masked_fill(beyond, -torch.inf), persistent=False
        )

    def forward(self, x_MD: Tensor, word_embeddings_VD: Tensor) -> Tensor:
        # DeepSpeed rounds parameters to bf16, but not this buffer.
        bias_V = self.bias + self.exclusion.to(self.bias.dtype)
        return linear(self.transform(x_MD), word_embeddings_VD, bias_V)


class PretrainingHeads(nn.Module):
    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.predictions = Predictions(cfg)
        self.seq_relationship = Linear(cfg.hidden_size, 2)
        if cfg.compile:
            self.compile(dynamic=False)

    def forward(
        self,
        hidden_TD: Tensor,
        masked_lm_positions_M: Tensor,
        cls_positions_C: Tensor,
        word_embeddings_VD: Tensor,
        pooler: Pooler,
    ) -> tuple[Tensor, Tensor]:
        masked_MD = hidden_TD.index_select(0, masked_lm_positions_M)
        pooled_CD = pooler(hidden_TD.index_select(0, cls_positions_C))
        return self.predictions(masked_MD, word_embeddings_VD), self.seq_relationship(pooled_CD)


class BertForPreTraining(nn.Module):
    """BERT with masked-LM and next-sentence heads over packed rows.

    Dropout draws from torch's default generator of the device: seed it to repeat a step.
    `generator` draws the initial weights; None leaves them uninitialised for a load.
    """

    def __init__(self, config: ModelConfig, *, generator: torch.Generator | None) -> None:
        super().__init__()
        self.config = config
        self.bert = BertModel(config, generator=None)
        self.cls = PretrainingHeads(config)
        if generator is not None:
            initialise(self, config, generator)

    def forward(
        self,
        input_ids: Tensor,
        token_type_ids: Tensor,
        position_ids: Tensor,
        sequence_ids: Tensor,
        cu_seqlens: Tensor,
        max_seq_len: int,
        masked_lm_positions: Tensor,
        cls_positions: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """One packed micro-batch -> masked-LM logits [M, V] and next-sentence logits [C, 2].

        input_ids, token_type_ids, position_ids, sequence_ids: [B, L]; cu_seqlens: int32 [S];
        masked_lm_positions [M], cls_positions [C]: indices into the flat B*L tokens. Logits of
        entries that pad the vocabulary are -inf.
        """
        hidden_TD = self.encode(
            input_ids, token_type_ids, position_ids, sequence_ids, cu_seqlens, max_seq_len
        ).flatten(0, 1)
        embeddings_VD = self.bert.embeddings.word_embeddings.weight
        pooler = self.bert.pooler
        return self.cls(hidden_TD, masked_lm_positions, cls_positions, embeddings_VD, pooler)

    def freeze_next_sentence(self) -> None:
        """For pretraining without that task: weight decay alone would shrink pooler and head."""
        self.bert.pooler.requires_grad_(False)
        self.cls.seq_relationship.requires_grad_(False)

    def encode(self, *packed, all_layers: bool = False) -> Tensor | list[Tensor]:
        """Hidden states; see BertModel.encode."""
        return self.bert.encode(*packed, all_layers=all_layers)


def check_compiler(device: torch.device) -> None:
    """Compile and run a line on `device`; UserError where that fails, as without a C compiler."""
    # Of sums over the vocabulary, at every start on a GPU: nothing that a user could mend.
    warnings.filterwarnings("ignore", message=r"\s*Online softmax is disabled")
    try:
        torch.compile(torch.neg, dynamic=False)(torch.ones(8, device=device))
    except Exception as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise UserError(
            f"model.compile: torch.compile does not work on {device} of this machine: {reason} "
            "(it takes a C++ compiler, on a GPU Triton and a C compiler; false goes without)"
        ) from None


@torch.no_grad()
def initialise(model: nn.Module, config: ModelConfig, generator: torch.Generator) -> None:
    """BERT's start: weights from a normal truncated at two sigma, biases 0, LayerNorm 1 and 0.

    Rows that pad the vocabulary are 0. Every parameter is set, or an AssertionError names it.
    """
    left = dict(model.named_parameters())
    std = config.initializer_range

    def done(name: str) -> Tensor:
        return left.pop(name)

    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        if isinstance(module, Linear | Embedding):
            weight = done(prefix + "weight")
            nn.init.trunc_normal_(weight, 0.0, std, -2 * std, 2 * std, generator=generator)
        if isinstance(module, LayerNorm):
            done(prefix + "weight").fill_(1.0)
        if isinstance(module, Linear | LayerNorm | Predictions):
            done(prefix + "bias").zero_()
    for module in model.modules():
        if isinstance(module, Embeddings):
            module.word_embeddings.weight[config.vocab_size :] = 0
    assert not left, f"parameters without an initial value: {', '.join(left)}"
