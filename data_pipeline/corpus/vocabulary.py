"""A vocabulary trained on the corpus itself: its sentences are kept in units until it is made."""

from __future__ import annotations

import hashlib
import io
import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from core.console import clock_text
from core.files import write_atomically
from data_pipeline.corpus.job import Job, text_rules
from data_pipeline.corpus.output import WORK
from data_pipeline.corpus.settings import PrepareConfig
from data_pipeline.corpus.tokenizer import train_vocabulary
from data_pipeline.corpus.units import Sentences, Tally, UnitStore, documents_of


def make_text_unit(
    config: PrepareConfig, job: Job, store: UnitStore, strict: bool, number: int
) -> dict[str, Any]:
    """A unit of text as sentences, kept because the vocabulary has still to be trained on it."""
    unit = job.units[number]
    tally = Tally()
    with store.write(number) as writer:
        with zstandard.ZstdCompressor(level=1).stream_writer(
            writer.file("text"), closefd=False
        ) as packed:
            source = config.sources[unit.source]
            rules = text_rules(config, strict)
            for document in documents_of(source, unit, job.names[unit.source], rules, tally):
                row = asdict(document)
                row["hash"] = document.hash.hex()
                if document.signature is not None:
                    row["signature"] = document.signature.tolist()
                packed.write(json.dumps(row).encode() + b"\n")
        return writer.finish({"job": job.fingerprint, "tally": asdict(tally)})


def read_text_unit(store: UnitStore, number: int) -> Iterator[Sentences]:
    """The documents of a unit made by `make_text_unit`."""
    with store.open(number, "text") as file:
        reader = zstandard.ZstdDecompressor().stream_reader(file)
        for line in io.TextIOWrapper(reader, encoding="utf-8"):
            row = json.loads(line)
            row["hash"] = bytes.fromhex(row["hash"])
            if row["signature"] is not None:
                row["signature"] = np.array(row["signature"], np.uint64)
            yield Sentences(**row)


def trained_vocabulary(config: PrepareConfig, job: Job, texts: UnitStore) -> list[str]:
    """Trains on a seeded sample of whole documents, the same whoever made the units."""
    characters = sum(texts.facts(n)["tally"]["characters"] for n in range(len(job.units)))
    wanted = config.vocabulary.sample_bytes / max(1, characters)

    class Sample:
        """The sample's sentences, as often as they are asked for."""

        def __iter__(self) -> Iterator[str]:
            key = str(config.seed).encode()
            for number in range(len(job.units)):
                for document in read_text_unit(texts, number):
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
    seconds = time.monotonic() - started
    print(
        f"vocabulary: {len(pieces):,} pieces trained on {trained:.1f} MB in {clock_text(seconds)}"
    )
    return pieces


def vocabulary(config: PrepareConfig, job: Job, out: Path, texts: UnitStore) -> list[str]:
    """The pieces of the trained vocabulary, which is kept for the next start."""
    kept = out / WORK / "vocabulary.json"
    try:
        facts = json.loads(kept.read_bytes())
        if facts["job"] == job.fingerprint:
            return facts["pieces"]
    except (OSError, ValueError, KeyError):
        pass
    pieces = trained_vocabulary(config, job, texts)
    write_atomically(kept, json.dumps({"job": job.fingerprint, "pieces": pieces}))
    return pieces
