"""Keys of the model: its shape and its mathematics. Imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from configs.load import Config

_MOST = 1 << 30  # of a size of tensors: the bytes of two such sizes are counted in 64 bits


class ModelConfig(Config):
    """Shape and mathematics of the network; the defaults are BERT-BASE."""

    vocab_size: int = Field(
        0, ge=0, le=_MOST, description="entries of the vocabulary; 0: taken from the data set"
    )
    hidden_size: int = Field(768, ge=1, le=_MOST, description="width of the hidden states")
    num_hidden_layers: int = Field(12, ge=1, le=1000, description="transformer layers")
    num_attention_heads: int = Field(12, ge=1, le=_MOST, description="attention heads a layer")
    intermediate_size: int = Field(
        3072, ge=1, le=_MOST, description="width of the feed-forward part"
    )
    max_position_embeddings: int = Field(
        512, ge=1, le=_MOST, description="longest sequence in tokens"
    )
    type_vocab_size: int = Field(2, ge=1, le=_MOST, description="number of segment types")
    is_decoder: bool = Field(
        False, description="causal mask: a token sees those before it; follows from objective"
    )
    hidden_dropout_prob: float = Field(
        0.1, ge=0, le=0.99, description="dropout probability on embeddings and sublayer outputs"
    )
    attention_probs_dropout_prob: float = Field(
        0.1, ge=0, le=0.99, description="dropout probability on attention probabilities"
    )
    layer_norm_eps: float = Field(1e-12, gt=0, description="epsilon added to the variance")
    initializer_range: float = Field(
        0.02, gt=0, description="scale of the truncated normal that weights start from"
    )
    vocab_multiple: int = Field(
        128,
        ge=1,
        le=_MOST,
        description="the vocabulary is padded to a multiple of this for the hardware",
    )
    attention: Literal["auto", "varlen", "flash_attn", "sdpa", "per_sequence"] = Field(
        "auto", description="attention kernel; auto takes the fastest that runs here"
    )
    compile: bool = Field(False, description="torch.compile embeddings, layers, heads and loss")
    activation_checkpointing: bool = Field(
        False, description="recompute each layer in backward: less memory, a third more work"
    )

    @model_validator(mode="after")
    def _heads_divide(self) -> ModelConfig:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"num_attention_heads: {self.num_attention_heads} does not divide "
                f"hidden_size {self.hidden_size}"
            )
        return self

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def padded_vocab_size(self) -> int:
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    def with_vocab_size(self, vocab_size: int) -> ModelConfig:
        """This config with the vocabulary of a data set filled in."""
        return self.model_copy(update={"vocab_size": vocab_size})


# The keys that fix the shapes of tensors, or the function of the same ones; the vocabulary's size
# aside.
SHAPE_KEYS = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "max_position_embeddings",
    "type_vocab_size",
    "is_decoder",
)
# The keys that Hugging Face's config.json has too, by the same names.
SHARED_KEYS = (
    "vocab_size",
    *SHAPE_KEYS,
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "layer_norm_eps",
    "initializer_range",
)
