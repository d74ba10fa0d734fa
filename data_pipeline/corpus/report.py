"""What is said at the end: the closing table, samples of what was dropped."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, fields
from pathlib import Path

from core.console import printable, table
from core.errors import UserError
from core.files import check_own, disk_errors, write_atomically
from data_pipeline.corpus.assembly import Assembly
from data_pipeline.corpus.documents import Problem
from data_pipeline.corpus.job import WORK, Job
from data_pipeline.corpus.manifest import Manifest

REJECTS, _BROKEN = "--rejects", "broken.jsonl"
_OF_PROBLEMS = [field.name for field in fields(Problem)]


def begin_rejects(folder: Path, job: Job) -> None:
    """Makes the folder, before the work; UserError as of `write_rejects`."""
    with disk_errors(folder, REJECTS):
        if Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(job.out / WORK)):
            raise UserError(f"{REJECTS}: {folder}: is removed at the end: use another folder")
        folder.mkdir(parents=True, exist_ok=True)
    _check_replaceable(folder / _BROKEN, _OF_PROBLEMS, job)


def write_rejects(folder: Path, assembly: Assembly, job: Job) -> None:
    """DIR/SOURCE/REASON.jsonl with samples of the dropped, and DIR/broken.jsonl. UserError where a
    file of the name is there that no earlier run has written."""
    for source, reasons in assembly.samples.items():
        (folder / source).mkdir(exist_ok=True)
        for reason, samples in reasons.items():
            rows = [{"id": sample.id, "text": sample.sample} for sample in samples]
            name = "".join(c if c.isalnum() else "_" for c in reason)
            _write_rows(folder / source / f"{name}.jsonl", rows, ["id", "text"], job)
    _write_rows(folder / _BROKEN, [asdict(p) for p in assembly.problems], _OF_PROBLEMS, job)


def _write_rows(path: Path, rows: list[dict[str, str]], keys: list[str], job: Job) -> None:
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    _check_replaceable(path, keys, job)
    write_atomically(path, text.encode("utf-8", "replace"))


def _check_replaceable(path: Path, keys: list[str], job: Job) -> None:
    """UserError for a file of other keys, and for one that is read."""

    def is_earlier(line: bytes) -> bool:
        try:
            return list(json.loads(line)) == keys
        except (ValueError, RecursionError, TypeError):
            return False

    check_own(path, is_earlier, REJECTS)
    if path.exists() and os.path.realpath(path) in map(os.path.realpath, job.stamps):
        raise UserError(f"{REJECTS}: {path}: is a file of the sources: use another folder")


_MOST_UNKNOWN = 0.01
_MOST_BAD_UTF8 = 0.1


def unknown_lines(assembly: Assembly) -> list[str]:
    """The share of [UNK] by source, with a warning where the vocabulary does not fit the text."""
    shares = ", ".join(f"{name} {100 * share:.2f} %" for name, share in assembly.unknown.items())
    many = [name for name, share in assembly.unknown.items() if share > _MOST_UNKNOWN]
    return [f"[UNK] among the tokens: {shares}"] + [
        f"warning: source {name}: over {100 * _MOST_UNKNOWN:.0f} % of its tokens are [UNK]; is the "
        "vocabulary of its language and case?"
        for name in many
    ]


def bad_utf8_lines(assembly: Assembly) -> list[str]:
    """A warning for each source that is of another encoding."""
    return [
        f"warning: source {name}: {100 * share:.0f} % of its documents have bad UTF-8, whose "
        "letters are lost; save it as UTF-8, and make the dataset with --fresh"
        for name, share in assembly.bad_utf8.items()
        if share > _MOST_BAD_UTF8
    ]


def closing_table(manifest: Manifest) -> str:
    """Counts by source, and the totals of the splits."""
    head = ("source", "documents in", "out", "words", "sentences", "tokens", "dropped")
    rows = [head]
    for s in manifest.sources:
        dropped = ", ".join(f"{printable(reason)} {n:,}" for reason, n in s.dropped.items()) or "-"
        numbers = (s.documents_in, s.documents_out, s.words, s.sentences, s.tokens)
        rows.append((printable(s.name), *(f"{n:,}" for n in numbers), dropped))
    lines = table(rows)
    for split in ("train", "heldout"):
        shards = manifest.split(split)
        lines.append(
            f"{split}: {len(shards)} shards, {sum(s.documents for s in shards):,} documents, "
            f"{sum(s.sentences for s in shards):,} sentences, {sum(s.tokens for s in shards):,} "
            f"tokens, {sum(s.bytes for s in shards) / 1e6:.1f} MB"
        )
    return "\n".join(lines)
