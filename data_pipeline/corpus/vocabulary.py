"""A vocabulary trained on the corpus itself, or a given one that is extended by its words. The
sentences are kept until it is made."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from core.console import clock_text, notice, printable
from core.errors import UserError
from data_pipeline.corpus.job import Job
from data_pipeline.corpus.store import Store, Writer
from data_pipeline.corpus.tokenizer import extend_vocabulary, train_vocabulary
from data_pipeline.corpus.units import Tally, read_text_unit

_CHARACTERS_A_PIECE = 1000


class _Sample:
    """Sentences of a seeded sample of whole documents, the same whoever made the units, as often as
    they are asked for. share: of the text."""

    def __init__(self, job: Job, texts: Store[Tally], tallies: dict[str, Tally]) -> None:
        characters = sum(tally.characters for tally in tallies.values())
        self.share = min(1.0, job.config.vocabulary.sample_bytes / max(1, characters))
        self.megabytes = self.share * characters / 1e6
        self._job, self._texts = job, texts

    def __iter__(self) -> Iterator[str]:
        key = str(self._job.config.seed).encode()
        for unit in self._job.units:
            for document in read_text_unit(self._texts, unit):
                digest = hashlib.blake2b(document.hash, digest_size=8, key=key).digest()
                if int.from_bytes(digest, "big") / 2**64 < self.share:
                    yield from document.sentences


def _train(job: Job, sample: _Sample) -> list[str]:
    started = time.monotonic()
    pieces = train_vocabulary(
        sample,
        size=job.config.vocabulary.size,
        lowercase=job.lowercase,
        unused=job.config.vocabulary.unused,
    )
    size, characters = job.config.vocabulary.size, int(sample.megabytes * 1e6)
    if characters < _CHARACTERS_A_PIECE * size:
        fit = max(characters // _CHARACTERS_A_PIECE, job.config.vocabulary.unused + 200)
        notice(
            f"warning: vocabulary.size: {size:,} pieces for {characters / 1e6:.2f} MB of text, "
            f"{characters / size:,.0f} characters a piece; below {_CHARACTERS_A_PIECE:,} many are "
            f"met too seldom to be learned. This text fills about {fit:,}"
        )
    took = clock_text(time.monotonic() - started)
    notice(f"vocabulary: {len(pieces):,} pieces trained on {sample.megabytes:.1f} MB in {took}")
    return pieces


def _extend(job: Job, sample: _Sample) -> list[str]:
    extend = job.config.vocabulary.extend
    where, wanted = getattr(extend, "from"), extend.pieces
    room = len(job.given.unused_ids)
    chunks: Counter[str] = Counter()
    for sentence in sample:
        chunks.update(sentence.split())
    pieces, words, fewer = extend_vocabulary(job.given, chunks, wanted)
    if not words:
        raise UserError(f"vocabulary.extend: {where} splits no word of the text that is met twice")
    first = ", ".join(words[:8])
    notice(
        printable(
            f"vocabulary: {len(words)} of {room} [unusedN] of {where} are words of the text, which "
            f"make its tokens {fewer:.1%} fewer: {first}{', ...' * (len(words) > 8)}"
        )
    )
    return pieces


@dataclass(frozen=True)
class _Kept:
    pieces: list[str]


def vocabulary(job: Job, texts: Store[Tally], tallies: dict[str, Tally]) -> list[str]:
    """The pieces of the trained or extended vocabulary, which are kept for the next start."""
    store = Store(texts.folder, job.fingerprint, _Kept, texts.check)
    if (kept := store.load("vocabulary")) is not None:
        return kept.pieces
    sample = _Sample(job, texts, tallies)
    pieces = _train(job, sample) if job.given is None else _extend(job, sample)
    with Writer(store, "vocabulary") as writer:
        return writer.finish(_Kept(pieces)).pieces
