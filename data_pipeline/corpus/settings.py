"""The configuration of corpus preparation."""

from __future__ import annotations

from pydantic import Field, field_validator

from configs.load import Config
from data_pipeline.corpus.sentences import SentenceSplitter
from data_pipeline.corpus.sources import SourceConfig


class VocabularyConfig(Config):
    """Either a given vocab.txt (`path`), or WordPiece trained on a sample of the corpus."""

    path: str | None = Field(None, description="a BERT vocab.txt; null: train one")
    lowercase: bool = Field(True, description="uncased: lower-case and strip accents")
    size: int = Field(30522, ge=200, le=65536, description="pieces, specials and unused included")
    unused: int = Field(994, ge=0, description="[unusedN] pieces; BERT uncased 994, cased 101")
    sample_bytes: int = Field(
        200_000_000, ge=10_000, description="about how much text to train on, characters"
    )


class DuplicatesConfig(Config):
    """Which documents repeat another. The copy that stands first (by source, file, place) stays."""

    exact: bool = Field(True, description="drop documents equal but for case and white space")
    near: bool = Field(False, description="drop near duplicates too (MinHash; slower)")
    jaccard: float = Field(0.8, gt=0, le=1, description="similarity of 5-word shingles from which")


class PrepareConfig(Config):
    """Corpus preparation."""

    out: str = Field(description="folder of the dataset to make")
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
