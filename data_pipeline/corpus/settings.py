"""The configuration of corpus preparation."""

from __future__ import annotations

from pydantic import Field, create_model, field_validator, model_validator

from configs.load import Config, LocalPath
from data_pipeline.corpus.sentences import SentenceSplitter
from data_pipeline.corpus.sources import SourceConfig

# Made by a call, for no class can have a field of this name.
Extend = create_model(
    "Extend",
    __base__=Config,
    **{
        "from": (
            LocalPath,
            Field(description="a Hugging Face folder with [unusedN], or vocab.txt"),
        ),
        "pieces": (int, Field(ge=1, description="words to put in the place of [unusedN], at most")),
    },
)


class VocabularyConfig(Config):
    """A given vocabulary (`path`), a given one with words of the corpus in its free places
    (`extend`), or WordPiece trained on a sample of the corpus."""

    path: LocalPath | None = Field(
        None,
        description="a Hugging Face folder (vocab.txt or tokenizer.json), or a BERT vocab.txt; "
        "null: train one",
    )
    extend: Extend | None = Field(
        None,
        description="in place of `path`: that vocabulary, with words of a sample that it splits "
        "most in place of its [unusedN]; a run with init_from of that folder begins each as the "
        "mean of its old pieces",
    )
    lowercase: bool | None = Field(
        None,
        description="lower-case and strip accents; null: as the given folder says or its pieces "
        "show, true for a vocabulary to be trained",
    )
    size: int = Field(30522, ge=200, le=65536, description="pieces, specials and unused included")
    unused: int = Field(994, ge=0, description="[unusedN] pieces; BERT uncased 994, cased 101")
    sample_bytes: int = Field(
        200_000_000, ge=10_000, description="about how much text to train on, characters"
    )

    @model_validator(mode="after")
    def _one_vocabulary(self) -> VocabularyConfig:
        if self.path is not None and self.extend is not None:
            raise ValueError("extend: path names a vocabulary, too; leave one of them out")
        specials = self.unused + 5
        if self.given is None and self.size <= specials:
            raise ValueError(
                f"size: {self.size} leaves no room for {specials} specials and the alphabet; say "
                f"at least {self.unused + 200}, or fewer `unused`"
            )
        return self

    @property
    def given(self) -> str | None:
        """Where a vocabulary is that is taken, or extended."""
        return getattr(self.extend, "from") if self.extend is not None else self.path


class DuplicatesConfig(Config):
    """Which documents repeat another. The copy that stands first (by source, file, place) stays."""

    exact: bool = Field(True, description="drop documents equal but for case and white space")
    near: bool = Field(False, description="drop near duplicates too (MinHash; slower)")
    jaccard: float = Field(  # beyond 0.98 MinHashLSH finds no two bands
        0.8, gt=0, le=0.98, description="similarity of 5-word shingles from which"
    )


class PrepareConfig(Config):
    """Corpus preparation."""

    out: LocalPath = Field(description="folder of the dataset to make")
    sources: tuple[SourceConfig, ...] = Field(description="where the text comes from")
    vocabulary: VocabularyConfig = Field(VocabularyConfig(), description="WordPiece vocabulary")
    sentences: SentenceSplitter = Field(
        "punkt",
        description="punkt: as the known BERT reproductions; sentencex: faster, keeps quotations "
        "whole; lines: every line is a sentence",
    )
    max_sentence_tokens: int = Field(
        512, ge=8, le=65535, description="longer sentences are cut between words, tokens"
    )
    duplicates: DuplicatesConfig = Field(DuplicatesConfig(), description="duplicate documents")
    heldout_fraction: float = Field(
        0.005, ge=0, lt=1, description="share of documents held out, chosen by hash of their id"
    )
    shard_bytes: int = Field(64_000_000, ge=10_000, description="about the size of a .tar, bytes")
    unit_bytes: int = Field(
        4_000_000, ge=1_000, description="about the text of one unit of work, bytes"
    )
    seed: int = Field(0, description="of the order of units in the shards and of the sample")

    @field_validator("sources")
    @classmethod
    def _some_sources(cls, value: tuple[SourceConfig, ...]) -> tuple[SourceConfig, ...]:
        names = [source.name for source in value]
        if not names:
            raise ValueError("at least one source is needed")
        if len(set(names)) < len(names):
            raise ValueError("two sources have the same name")
        return value
