"""Sources: the shapes in which people have their text, their files, cut into units of work.

`plan_units` lists the units of a source; they depend on the files alone, never on the number of
ranks. `readers.py` reads them.
"""

from __future__ import annotations

import glob
import importlib.util
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from pydantic import Field, field_validator

from configs.load import Config
from core.errors import UserError
from data_pipeline.corpus.compressed import (
    is_compressed,
)
from data_pipeline.corpus.documents import (
    Document,
    FilterConfig,
)
from data_pipeline.corpus.sentences import SentenceSplitter

Kind = Literal[
    "wikipedia", "wikiextractor", "books", "sentences", "crawl", "jsonl", "parquet", "text"
]

# Of 1 byte of input at least this much text is expected; markup and compression are why not more.
_LEAST_YIELD: dict[str, float] = {
    "wikipedia": 0.03,
    "wikiextractor": 0.2,
    "books": 0.2,
    "sentences": 0.3,
    "crawl": 0.1,
    "jsonl": 0.05,
    "parquet": 0.05,
    "text": 0.3,
}
_COMPRESSION = 4
_MOST_PARTS = 32
# Headings in WikiExtractor's output are lines of their own that end in a full stop.
_LEAST_PARAGRAPH_WORDS = {"wikiextractor": 8, "wikipedia": 3}


class SourceConfig(Config):
    """One source of text."""

    name: str = Field(description="short name, kept in the manifest")
    kind: Kind = Field(
        description="wikipedia: XML dump, .xml(.bz2, also multistream; .gz); wikiextractor: its "
        "<doc> or --json output; books: a folder or tar(.gz) of one .txt a book; sentences: text "
        "or parquet with one sentence a row (book boundaries are inferred); crawl: folders of a "
        "book crawler; jsonl: .jsonl(.gz, .zst); parquet: a text column; text: one document a file"
    )
    path: str | tuple[str, ...] = Field(
        description="file, folder or glob, or several; `package:NAME/PATH` is a path inside an "
        "installed Python package (which is not imported)"
    )
    provenance: str = Field("", description="where the text comes from; kept in the manifest")
    licence: str = Field("", description="under which terms; kept in the manifest")
    text_column: str = Field("text", description="jsonl, parquet: the field that holds the text")
    id_column: str = Field("id", description="jsonl, parquet: the field that names the document")
    min_paragraph_words: int | None = Field(
        None,
        ge=0,
        description="paragraphs of fewer words are left out (headings, stray cells); null: 8 for "
        "wikiextractor, 3 for wikipedia, else 0",
    )
    sentences: SentenceSplitter | None = Field(
        None, description="null: the `sentences` of the whole run (kind sentences: lines)"
    )
    filters: FilterConfig = Field(
        FilterConfig(), description="filters on whole documents, off by default"
    )
    min_yield: float | None = Field(
        None,
        ge=0,
        description="an error when less text comes out of 1 byte of (uncompressed) input; null: by "
        "kind, from .03 (wikipedia) to .3 (text)",
    )

    @field_validator("name")
    @classmethod
    def _plain_name(cls, value: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9_.-]+", value):
            raise ValueError("only letters, digits, dot, dash and underscore")
        return value

    @property
    def least_paragraph_words(self) -> int:
        if self.min_paragraph_words is not None:
            return self.min_paragraph_words
        return _LEAST_PARAGRAPH_WORDS.get(self.kind, 0)

    @property
    def least_yield(self) -> float:
        return _LEAST_YIELD[self.kind] if self.min_yield is None else self.min_yield


@dataclass(frozen=True)
class Unit:
    """A part of a source that one rank reads alone.

    files: paths, in order. One file may be cut: bytes [start, end) of it, or (start, end of 0) as
    row groups, members or documents dealt to part `part` of `parts`.
    """

    source: int
    files: tuple[str, ...]
    bytes: int
    start: int = 0
    end: int = 0
    part: int = 0
    parts: int = 1


@dataclass(frozen=True)
class Dropped:
    """A document that is left out, why, and the beginning of its text."""

    reason: str
    id: str
    sample: str = ""


@dataclass(frozen=True)
class Problem:
    """Broken input. The job goes on after it."""

    file: str
    place: str
    what: str


Item = Document | Dropped | Problem

# ------------------------------------------------------------------------------------------ files


def resolve(path: str) -> str:
    """`package:NAME/REST` as a path in the installed package; other paths as they are."""
    if not path.startswith("package:"):
        return os.path.expanduser(path)
    package, _, rest = path.removeprefix("package:").partition("/")
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise UserError(f"{path}: the Python package {package} is not installed")
    return os.path.join(list(spec.submodule_search_locations)[0], rest)


_SUFFIXES: dict[str, tuple[str, ...]] = {
    "wikipedia": (".xml", ".xml.bz2", ".xml.gz"),
    "jsonl": (".jsonl", ".json", ".ndjson"),
    "parquet": (".parquet",),
    "books": (".txt", ".tar", ".tgz"),
    "crawl": (".txt", ".tar", ".tgz"),
    "text": (".txt", ".text", ".tar", ".tgz"),
    "sentences": (".txt", ".parquet"),
}


def list_files(source: SourceConfig) -> dict[str, str]:
    """The files of a source in order, each with its name for document ids: its path below the
    folder that the configuration gives, without endings, so that files added later rename none.

    UserError names a path that is missing, unreadable, packed in an unknown way, or empty."""
    found: dict[str, str] = {}
    taken: set[str] = set()
    for pattern in [source.path] if isinstance(source.path, str) else source.path:
        path = resolve(pattern)
        if os.path.isdir(path):
            root = path
            here = sorted(_walk(path, source.kind))
        elif os.path.exists(path):
            root = os.path.dirname(path)
            here = [path]
        else:
            root = os.path.dirname(re.split(r"[*?\[]", path, maxsplit=1)[0])
            here = sorted(p for p in glob.glob(path, recursive=True) if os.path.isfile(p))
            here = [p for p in here if not _is_multistream_index(p)]
        if not here:
            missing = "no such file or folder" if not os.path.isdir(path) else "holds no such files"
            raise UserError(
                f"sources: {source.name}: {pattern}: {missing}"
                + (f" as kind {source.kind} reads" if os.path.isdir(path) else "")
            )
        for file in here:
            if file.endswith(_UNREAD):
                raise UserError(
                    f"sources: {source.name}: {file}: packed in a way that is not read; unpack it "
                    "first"
                )
            if file in found:
                continue
            name = os.path.relpath(file, root or ".")
            name = re.sub(r"(?:\.epub)?\.(?:txt|text)(?:\.(?:gz|bz2|zst))?$", "", name)
            found[file] = os.path.abspath(file) if name in taken else name
            taken.add(name)
    return found


_UNREAD = (".xz", ".txz", ".lzma", ".zip", ".7z", ".rar", ".lz4", ".Z", ".epub", ".pdf")


def _walk(path: str, kind: str) -> Iterator[str]:
    def stop(error: OSError) -> None:
        raise UserError(f"{error.filename}: {error.strerror}")

    for folder, folders, names in os.walk(path, followlinks=True, onerror=stop):
        # A link to a folder above would be followed for ever.
        inside = os.path.realpath(folder) + os.sep
        folders[:] = [
            name
            for name in folders
            if not inside.startswith(os.path.realpath(os.path.join(folder, name)) + os.sep)
        ]
        for name in names:
            if _fits(kind, name):
                yield os.path.join(folder, name)


def _fits(kind: str, name: str) -> bool:
    if name.startswith(".") or _is_multistream_index(name):
        return False
    plain = re.sub(r"\.(?:bz2|gz|zst)$", "", name)
    if kind == "wikipedia":
        return name.endswith(_SUFFIXES[kind])
    return kind not in _SUFFIXES or plain.endswith(_SUFFIXES[kind])


def _is_multistream_index(path: str) -> bool:
    # The dump's parts are found in its own bytes, so the index is not needed.
    return "multistream-index" in os.path.basename(path)


# ------------------------------------------------------------------------------------------ units


def plan_units(source: SourceConfig, number: int, unit_bytes: int) -> list[Unit]:
    """The units of source `number`, about `unit_bytes` of text each, in the order of the text."""
    units: list[Unit] = []
    group: list[str] = []
    group_bytes = 0

    def close_group() -> None:
        nonlocal group_bytes
        if group:
            units.append(Unit(number, tuple(group), group_bytes))
            group.clear()
            group_bytes = 0

    for file in list_files(source):
        try:
            size = os.path.getsize(file)
        except OSError as error:
            raise UserError(f"{file}: {error.strerror}") from None
        packed = is_compressed(file) or file.endswith(".parquet")
        text_bytes = size * _COMPRESSION if packed else size
        whole = source.kind in ("books", "crawl", "text") and not is_tar(file)
        if text_bytes <= unit_bytes or whole:
            if group_bytes + text_bytes > unit_bytes:
                close_group()
            group.append(file)
            group_bytes += text_bytes
            continue
        close_group()
        units += _cut(source, number, file, size, text_bytes, unit_bytes)
    close_group()
    return units


def _cut(
    source: SourceConfig, number: int, file: str, size: int, text_bytes: int, unit_bytes: int
) -> list[Unit]:
    parts = -(-text_bytes // unit_bytes)
    by_bytes = not is_compressed(file) and not file.endswith(".parquet") and not is_tar(file)
    by_bytes = by_bytes or (source.kind == "wikipedia" and file.endswith(".bz2"))
    if by_bytes:
        cuts = [size * i // parts for i in range(parts + 1)]
        return [
            Unit(number, (file,), text_bytes // parts, a, b, i, parts)
            for i, (a, b) in enumerate(zip(cuts[:-1], cuts[1:], strict=True))
        ]
    if file.endswith(".parquet"):
        parts = min(parts, _row_groups(file))
    elif is_compressed(file):
        # Each part reads the whole file: it cannot be entered in the middle.
        parts = min(parts, _MOST_PARTS)
    return [Unit(number, (file,), text_bytes // parts, 0, 0, i, parts) for i in range(parts)]


def _row_groups(file: str) -> int:
    import pyarrow
    import pyarrow.parquet

    try:
        return max(1, pyarrow.parquet.ParquetFile(file).num_row_groups)
    except (pyarrow.ArrowException, OSError):
        return 1


def is_tar(file: str) -> bool:
    return re.search(r"\.(?:tar|tgz|tar\.gz|tar\.bz2|tar\.zst)$", file) is not None
