"""`python -m data_pipeline fetch`: dumps of Wikipedia and its sisters, by published checksums.

    python -m data_pipeline fetch wikipedia 20260101 --out data/raw
    python -m data_pipeline fetch wikibooks 20260101 --language de --out data/raw

The list of a dump's files, with size and sha1, is the `dumpstatus.json` beside them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import stat
import time
from pathlib import Path
from typing import Any

from core.console import Progress, quantity, show
from core.errors import TryAgain, UserError
from core.files import Lock, disk_errors, open_regular, put_in_place
from core.urls import (
    SLOWEST,
    NotThere,
    Patience,
    is_url,
    join,
    path_here,
    persist,
    read,
    transfer,
)

ORIGIN = "https://dumps.wikimedia.org"
PROJECTS = ("wikipedia", "wikibooks", "wikinews", "wikisource", "wikiversity", "wikivoyage")


def fetch(
    project: str,
    date: str,
    out: Path,
    *,
    language: str = "en",
    mirror: str = ORIGIN,
    patience: Patience | None = None,
) -> Path:
    """The articles of a dump, whole and of the published sha1; goes on where a transfer broke, by
    the same call too. UserError; TryAgain when the origin does not answer."""
    if not re.fullmatch(r"20\d{6}", date):
        raise UserError(f"{date}: the date of a dump is YYYYMMDD; {mirror} lists them")
    if not re.fullmatch("[a-z0-9]+(?:[-_][a-z0-9]+)*", language):
        raise UserError(f"{language}: is no code of a language, such as en or zh-min-nan")
    if not is_url(mirror):
        mirror = path_here(mirror).absolute().as_uri()
    patience = patience or Patience()
    wiki = language.replace("-", "_") + ("wiki" if project == "wikipedia" else project)
    folder, name = (
        join(mirror, f"{wiki}/{date}"),
        f"{wiki}-{date}-pages-articles-multistream.xml.bz2",
    )
    path, url = out / name, join(folder, name)
    size, digest = _published(folder, name, patience)
    with disk_errors(out):
        out.mkdir(parents=True, exist_ok=True)
        if path.exists():
            if (path.stat().st_size, _sha1(path)) != (size, digest):
                raise UserError(f"{path}: is not what {folder} lists; move it away")
            show(f"{path}: is there already, and whole")
            return path
        with Lock(out / f".{name}.lock") as lock:
            if not lock.alone():
                raise UserError(f"{path}: another `fetch` is at work on it")
            try:
                part = out / f"{name}.part"
                if os.path.lexists(part) and not stat.S_ISREG(part.lstat().st_mode):
                    raise UserError(f"{part}: not a regular file; move it away")
                have = part.stat().st_size if part.exists() else 0
                if shutil.disk_usage(out).free < size - have:
                    raise UserError(f"{out}: {quantity(size - have, 'B')} are needed for {name}")
                for last in (False, True):  # bytes may be lost on the way, but not twice
                    _bring(url, part, size, patience)
                    if _sha1(part) == digest:
                        break
                    part.unlink()
                    if last:
                        raise UserError(f"{url}: came twice with another sha1 than {folder} lists")
                put_in_place(part, path)
            finally:
                lock.remove()
    show(f"{path}: {size:,} bytes, sha1 as published; in a data set's sources: kind: wikipedia")
    return path


def _published(folder: str, name: str, patience: Patience) -> tuple[int, str]:
    """Size and sha1 of a file that a dump lists as done."""
    url = join(folder, "dumpstatus.json")
    try:
        plain: Any = json.loads(read(url, patience))
        jobs = [job for job in plain["jobs"].values() if name in job.get("files", {})]
        done = [job["files"][name] for job in jobs if job["status"] == "done"]
        if done:
            size, digest = done[0]["size"], done[0]["sha1"]
            if not (
                type(size) is int and 0 < size < 2**63 and re.fullmatch("[0-9a-f]{40}", digest)
            ):
                raise ValueError
            return size, digest
    except NotThere:
        raise UserError(
            f"{url}: no such dump; {folder.rsplit('/', 1)[0]}/ lists the dates"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UserError(f"{url}: is no list of a dump's files") from None
    raise UserError(
        f"{url}: {name} is {'not done yet' if jobs else 'not listed'}; take an older date"
    )


def _bring(url: str, part: Path, size: int, patience: Patience) -> None:
    """All bytes, in as many tries as it takes while they bring bytes, and not by the drop."""

    def held() -> int:
        return part.stat().st_size if part.exists() else 0

    progress = Progress(part.name.removesuffix(".part"), size, held())

    def attempt() -> None:
        with open(part, "ab") as file:
            if file.tell() != size:
                transfer(url, file, size, patience.timeout, progress.add)

    while True:
        began, before = time.monotonic(), held()
        try:
            persist(url, attempt, patience)
            break
        except TryAgain:
            if held() - before <= SLOWEST * (time.monotonic() - began):
                raise
    progress.close()


def _sha1(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha1").hexdigest()


def main(argv: list[str]) -> int:
    """`python -m data_pipeline fetch`."""
    parser = argparse.ArgumentParser(
        prog="python -m data_pipeline fetch",
        description="Fetch the articles of a Wikimedia dump; resumable: run the same command.",
    )
    parser.add_argument("project", choices=PROJECTS)
    parser.add_argument("date", help=f"of the dump, YYYYMMDD, as {ORIGIN}/enwiki/ lists them")
    parser.add_argument("--out", metavar="DIR", type=path_here, default=Path("data/raw"))
    parser.add_argument("--language", default="en", help="its code in the project's address")
    parser.add_argument(
        "--mirror", metavar="URL", default=ORIGIN, help=f"or a folder, in place of {ORIGIN}"
    )
    options = parser.parse_args(argv)
    fetch(
        options.project,
        options.date,
        options.out,
        language=options.language,
        mirror=options.mirror,
    )
    return 0
