"""The folder of a dataset while it is made: whose it is, what was begun there, who works in it."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from core.errors import UserError
from core.files import Lock, disk_error, disk_errors, write_json
from data_pipeline.corpus.shards import MANIFEST, VOCAB, load_manifest

JOB = "prepare.json"
WORK = "work"


def open_output(out: Path, facts: dict[str, Any], fresh: bool) -> bool:
    """True when `out` holds this very dataset, finished. UserError when it holds anything else."""
    state = out / JOB
    try:
        out.mkdir(parents=True, exist_ok=True)
        present = {path.name for path in out.iterdir() if not path.name.startswith(".")}
        if present and JOB not in present:
            what = "another dataset" if MANIFEST in present else "other files"
            raise UserError(f"{out}: holds {what}; choose another --out, or an empty folder")
        if fresh:
            clear_output(out)
        if fresh or not present:
            write_json(state, facts)
            return False
        changed = _changes(json.loads(state.read_bytes()), facts)
    except ValueError:
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
    manifest = load_manifest(out)
    for shard in manifest.shards:
        for name, size in (
            (f"{shard.name}.tar", shard.bytes),
            (f"{shard.name}.idx", shard.idx_bytes),
        ):
            path = out / name
            if not path.exists() or path.stat().st_size != size:
                raise UserError(
                    f"{path}: missing or of the wrong size; use --fresh to make the dataset again"
                )
    return True


def _changes(old: dict[str, Any], new: dict[str, Any]) -> str:
    """What differs, in words, at most three things; empty if nothing."""
    found: list[str] = []

    def compare(a: Any, b: Any, path: str) -> None:
        if a == b:
            return
        if isinstance(a, dict) and isinstance(b, dict):
            for key in sorted({*a, *b}):
                compare(a.get(key), b.get(key), f"{path}.{key}" if path else key)
        elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
            for number, (x, y) in enumerate(zip(a, b, strict=True)):
                compare(x, y, f"{path}.{number}")
        else:
            found.append(f"{path} was {json.dumps(a)[:60]}, is {json.dumps(b)[:60]}")

    old_files = {row[1]: row for row in old.pop("files", [])}
    new_files = {row[1]: row for row in new.get("files", [])}
    compare(old, {k: v for k, v in new.items() if k != "files"}, "")
    for file in sorted({*old_files, *new_files}):
        if old_files.get(file) != new_files.get(file):
            state = (
                "is new" if file not in old_files else "is gone" if file not in new_files else ""
            )
            found.append(f"{file} {state or 'has changed'}")
    more = f", and {len(found) - 3} more" if len(found) > 3 else ""
    return "; ".join(found[:3]) + more


def clear_output(out: Path) -> None:
    """Removes what `prepare` makes, and nothing else; last, the sign that the folder is its own."""
    for pattern in (
        MANIFEST,
        VOCAB,
        "shard-*.tar",
        "shard-*.idx",
        "heldout-*.tar",
        "heldout-*.idx",
    ):
        for path in out.glob(pattern):
            path.unlink()
    for path in out.glob(".*.part"):
        path.unlink()
    shutil.rmtree(out / WORK, ignore_errors=True)
    (out / JOB).unlink(missing_ok=True)


@contextlib.contextmanager
def locked(out: Path) -> Iterator[None]:
    """Keeps a second job out of the folder; the lock goes with the process, however it ends."""
    with disk_errors(out):
        out.mkdir(parents=True, exist_ok=True)
        lock = Lock(out / ".lock")
    with lock:
        with contextlib.suppress(OSError):  # a file system without locks
            if not lock.take(wait=False):
                raise UserError(
                    f"{out}: another `prepare` is at work in this folder (were several single "
                    "processes started in place of one MPI job?)"
                )
        try:
            yield
        finally:
            lock.path.unlink(missing_ok=True)
