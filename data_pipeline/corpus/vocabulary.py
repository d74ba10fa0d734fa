"""A vocabulary trained on the corpus itself, whose sentences are kept until it is made."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator

from core.console import clock_text
from core.files import write_atomically
from data_pipeline.corpus.job import Job
from data_pipeline.corpus.store import Store
from data_pipeline.corpus.tokenizer import train_vocabulary
from data_pipeline.corpus.units import Tally, read_text_unit


def _train(job: Job, texts: Store[Tally], tallies: dict[str, Tally]) -> list[str]:
    """Trains on a seeded sample of whole documents, the same whoever made the units."""
    config = job.config
    characters = sum(tally.characters for tally in tallies.values())
    wanted = config.vocabulary.sample_bytes / max(1, characters)

    class Sample:
        """The sample's sentences, as often as they are asked for."""

        def __iter__(self) -> Iterator[str]:
            key = str(config.seed).encode()
            for unit in job.units:
                for document in read_text_unit(texts, unit):
                    digest = hashlib.blake2b(document.hash, digest_size=8, key=key).digest()
                    if int.from_bytes(digest, "big") / 2**64 < wanted:
                        yield from document.sentences

    started = time.monotonic()
    pieces = train_vocabulary(
        Sample(),
        size=config.vocabulary.size,
        lowercase=config.vocabulary.lowercase,
        unused=config.vocabulary.unused,
    )
    trained = min(1.0, wanted) * characters / 1e6
    took = clock_text(time.monotonic() - started)
    print(f"vocabulary: {len(pieces):,} pieces trained on {trained:.1f} MB in {took}")
    return pieces


def vocabulary(job: Job, texts: Store[Tally], tallies: dict[str, Tally]) -> list[str]:
    """The pieces of the trained vocabulary, which is kept for the next start."""
    kept = texts.folder / "vocabulary.json"
    try:
        facts = json.loads(kept.read_bytes())
        if facts["job"] == job.fingerprint:
            return facts["pieces"]
    except (OSError, ValueError, KeyError):
        pass
    pieces = _train(job, texts, tallies)
    write_atomically(kept, json.dumps({"job": job.fingerprint, "pieces": pieces}))
    return pieces
