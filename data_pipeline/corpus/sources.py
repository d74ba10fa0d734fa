"""Sources: the shapes in which people have their text, their files, cut into units of work.

A new shape is a row of `KINDS` and a reader: a function that makes documents of the records of
parts.py. Units depend on the files alone, never on the number of ranks.
"""

from __future__ import annotations

import glob
import importlib.util
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib.machinery import PathFinder
from typing import Any, Literal, NoReturn

from pydantic import Field, field_validator

from configs.load import Config
from core import hub
from core.console import notice
from core.errors import UserError, disk_error, short
from core.files import disk_errors, look
from data_pipeline.corpus.archives import TAR_ENDINGS, is_tar, tar_members
from data_pipeline.corpus.books import read_book, read_crawled, read_rows
from data_pipeline.corpus.compressed import Broken, packing
from data_pipeline.corpus.documents import Document, Dropped, FilterConfig, Problem
from data_pipeline.corpus.looks import looks_like
from data_pipeline.corpus.markup import FORMATS
from data_pipeline.corpus.parts import (
    PACKINGS,
    Input,
    Part,
    extracted_pages,
    name_text,
    pages,
    suffix_of,
    text_rows,
    whole_file,
    without_endings,
)
from data_pipeline.corpus.sentences import SentenceSplitter
from data_pipeline.corpus.tables import (
    csv_rows,
    json_rows,
    parquet_rows,
    read_row,
    row_groups,
    tsv_rows,
)
from data_pipeline.corpus.wikipedia import read_extracted, read_page

_Item = Document | Dropped
_Records = Callable[[Input], Iterator[Any]]  # of Record or of Row, or of what is dropped


def _each(read: Callable[[Input, Any], _Item | None]) -> Callable[[Input, Iterable[Any]], Any]:
    """A reader of one record, as a reader of all."""

    def read_all(source: Input, records: Iterable[Any]) -> Iterator[_Item]:
        for record in records:
            item = record if isinstance(record, Dropped) else read(source, record)
            if item is not None:
                yield item

    return read_all


@dataclass(frozen=True)
class Kind:
    """One shape of text.

    suffixes: of the files that count in a folder, before .gz, .bz2 or .zst.
    least_yield: text expected of a byte of input; markup and compression are why not more.
    read: documents from records. records, of_tar, of_parquet: the records of a part of a file, of
    an archive, of a parquet file; None where there are none of these.
    min_paragraph_words: shorter paragraphs are headings and stray cells.
    """

    suffixes: tuple[str, ...]
    least_yield: float
    read: Callable[[Input, Iterable[Any]], Iterator[_Item]]
    records: _Records | None
    of_tar: _Records | None = None
    of_parquet: _Records | None = None
    min_paragraph_words: int = 0


# Headings in WikiExtractor's output are lines of their own that end in a full stop.
KINDS: dict[str, Kind] = {
    "wikipedia": Kind((".xml",), 0.03, _each(read_page), pages, min_paragraph_words=3),
    "wikiextractor": Kind(
        ("",), 0.2, _each(read_extracted), extracted_pages, min_paragraph_words=8
    ),
    "books": Kind((".txt", *TAR_ENDINGS), 0.2, _each(read_book), whole_file, tar_members),
    "sentences": Kind((".txt", ".parquet"), 0.3, read_rows, text_rows, of_parquet=parquet_rows),
    "crawl": Kind((".txt", *TAR_ENDINGS), 0.1, _each(read_crawled), whole_file, tar_members),
    "jsonl": Kind((".jsonl", ".json", ".ndjson"), 0.05, _each(read_row), json_rows),
    "csv": Kind((".csv",), 0.05, _each(read_row), csv_rows),
    "tsv": Kind((".tsv", ".tab"), 0.05, _each(read_row), tsv_rows),
    "parquet": Kind((".parquet",), 0.05, _each(read_row), None, of_parquet=parquet_rows),
    "text": Kind((".txt", ".text", *TAR_ENDINGS), 0.3, _each(read_book), whole_file, tar_members),
}
_COMPRESSION = 4
_MARKUP = 10  # of web pages; of Markdown it is less
_MOST_PARTS = 32
_MOST_UNITS = 1 << 17  # of a file: a sparse one may claim any size
_UNREAD = (".xz", ".txz", ".lzma", ".zip", ".7z", ".rar", ".lz4", ".z", ".epub", ".pdf")


class SourceConfig(Config):
    """One source of text."""

    name: str = Field(description="short name, kept in the manifest")
    kind: Literal[tuple(KINDS)] = Field(  # type: ignore[valid-type]
        description="wikipedia: XML dump, .xml(.bz2, also multistream; .gz); wikiextractor: its "
        "<doc> or --json output; books: a folder or tar(.gz) of one .txt a book; sentences: text "
        "or parquet with one sentence a row (book boundaries are inferred); crawl: folders of a "
        "book crawler; jsonl: .jsonl(.gz, .zst); csv: commas, semicolons or tabs under a header; "
        "tsv: tabs, one row a line; parquet: a text column; text: one document a file, .html, .md "
        "and .rst without their markup"
    )
    path: str | tuple[str, ...] = Field(
        description="file, folder or glob, or several; `package:NAME/PATH` is a path inside an "
        "installed Python package (which is not imported); `hf:ORG/NAME[@REVISION][:PATTERN]` are "
        "files of a data set of the Hugging Face hub, fetched where its library keeps them"
    )
    suffixes: tuple[str, ...] | None = Field(
        None,
        description="of the files that count in a folder or archive, before .gz, .bz2, .zst; null: "
        "by kind (text: .txt .text .tar .tgz)",
    )
    provenance: str = Field("", description="where the text comes from; kept in the manifest")
    licence: str = Field("", description="under which terms; kept in the manifest")
    text_column: str = Field("text", description="of tables: the field that holds the text")
    id_column: str = Field("id", description="of tables: the field that names the document")
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

    max_document_bytes: int = Field(
        20_000_000,
        ge=1000,
        description="a longer document (page, row, file, member of an archive) is left out and "
        "named, so that it bounds the memory of a rank; bytes",
    )

    @field_validator("name")
    @classmethod
    def _plain_name(cls, value: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9_.-]+", value) or value in (".", ".."):  # as of a folder
            raise ValueError("only letters, digits, dot, dash and underscore, not . or ..")
        return value

    @field_validator("path")
    @classmethod
    def _some_path(cls, value: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if not value or (isinstance(value, tuple) and not all(value)):
            raise ValueError("a path is expected, not an empty text or list")
        return value

    @field_validator("suffixes")
    @classmethod
    def _plain_suffixes(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for suffix in value or ():
            if not re.fullmatch(r"(?:\.\w+)+", suffix):
                raise ValueError(f"{suffix!r}: a dot and letters, as .md")
            if suffix.lower() in (*_UNREAD, *PACKINGS):
                raise ValueError(f"{suffix} is a packing or a format that is not read")
        return value and tuple(suffix.lower() for suffix in value)

    @property
    def endings(self) -> tuple[str, ...]:
        """Of the files that count in a folder, in small letters."""
        return KINDS[self.kind].suffixes if self.suffixes is None else self.suffixes

    @property
    def least_yield(self) -> float:
        return KINDS[self.kind].least_yield if self.min_yield is None else self.min_yield

    def input(
        self, file: str, name: str, part: Part, checked: bool, told: Callable[[Problem], None]
    ) -> Input:
        """A part of one of the source's files, for a reader."""
        words = self.min_paragraph_words
        least = KINDS[self.kind].min_paragraph_words if words is None else words
        columns, texts = (self.text_column, self.id_column), self.suffixes or (".txt", ".text")
        limit = self.max_document_bytes
        return Input(file, name, part, *columns, least, limit, checked, told, texts)


@dataclass(frozen=True)
class Unit:
    """What one rank reads alone: files of source number `source`, or a part of one file.

    number: in the order of the text. bytes: about how much text is to be expected.
    """

    number: int
    source: int
    files: tuple[str, ...]
    bytes: int
    part: Part = Part()

    @property
    def key(self) -> str:
        return f"{self.number:06d}"


def read_unit(
    source: SourceConfig,
    unit: Unit,
    names: dict[str, str],
    told: Callable[[Problem], None],
    checked: bool = True,
) -> Iterator[Document | Dropped]:
    """The documents of a unit in order; `names` from `list_files`, `told` hears of broken input.
    Without `checked` a file whose reading breaks off is raised as Broken: what it gave may be
    altered, so it is to be read again."""
    for file in unit.files:
        given = source.input(file, names[file], unit.part, checked, told)
        last = ""
        try:
            for document in KINDS[source.kind].read(given, _records_of(source, file)(given)):
                yield document
                last = f" behind {short(document.id)!r}"
        except Broken as broken:
            if not checked:
                raise
            if unit.part.end or unit.part.index == 0:  # of parts that all read the whole file
                given.report(broken.place, broken.what)
        except FileNotFoundError:
            raise UserError(f"{file}: the file is gone") from None
        except PermissionError:
            raise UserError(f"{file}: no permission to read it") from None
        except (UserError, OSError):
            raise
        except Exception as error:
            error.add_note(f"{file}: while it was read{last}")
            raise


def _records_of(source: SourceConfig, file: str) -> _Records:
    kind = KINDS[source.kind]
    if is_tar(file):
        what, records = "a tar", kind.of_tar
    elif file.lower().endswith(".parquet"):
        what, records = "parquet", kind.of_parquet
    else:
        what, records = "this", kind.records
    if records is None:
        raise UserError(f"sources: {source.name}: {file}: kind {source.kind} does not read {what}")
    return records


def resolve(path: str) -> str:
    """`package:NAME/REST` as a path in the installed package; other paths as they are."""
    if not path.startswith("package:"):
        return os.path.expanduser(path)
    package, _, rest = path.removeprefix("package:").partition("/")
    first, *inner = package.split(".")
    try:
        spec = importlib.util.find_spec(first)
    except (ImportError, ValueError):  # of a strange name
        spec = None
    for name in inner:  # find_spec would import the package that holds it
        folders = spec and spec.submodule_search_locations
        spec = PathFinder.find_spec(name, list(folders)) if folders else None
    if spec is None or not spec.submodule_search_locations:
        raise UserError(f"{path}: the Python package {short(package, 200)} is not installed")
    return os.path.join(list(spec.submodule_search_locations)[0], rest)


def list_files(source: SourceConfig, out: str = "") -> dict[str, str]:
    """The files of a source in order, each with its name for document ids: its path below the
    folder that the configuration gives, without endings, so that files added later rename none.
    A folder `out` in it, or that a pattern finds, with what comes out, is none of it.

    UserError names a path that is missing, unreadable, packed in an unknown way, or empty."""

    def refuse(place: str, why: str) -> NoReturn:
        raise UserError(f"sources: {source.name}: {place}: {why}")

    found: dict[str, str] = {}
    taken: set[str] = set()
    out = out and os.path.realpath(out)
    for pattern in [source.path] if isinstance(source.path, str) else source.path:
        endings, wanted = source.endings, ""
        if hub.is_hub(pattern):
            of_kind = [f"*{ending}{packed}" for ending in endings for packed in ("", *PACKINGS)]
            folder, wanted = hub.fetch(pattern, "dataset", of_kind)
            path, endings = str(folder), ("",) if wanted else endings
            if "@" not in pattern:
                notice(
                    f"sources: {source.name}: {pattern}: commit {folder.name}; written as "
                    "hf:ORG/NAME@COMMIT it stays the same when the data set changes"
                )
        else:
            path = resolve(pattern)
        if os.path.isdir(path):
            root, others = path, Counter[str]()
            here = sorted(_walk(path, source, endings, others, out))
            if wanted:
                here = [p for p in here if fnmatch(os.path.relpath(p, path), wanted)]
            common = others.most_common(9)
            kinds = ", ".join(f"{n:,} {s or 'without'}" for s, n in common)
            if rest := others.total() - sum(n for _, n in common):
                kinds += f", {rest:,} others"
            if here and others:
                notice(f"sources: {source.name}: {pattern}: passed over by ending: {kinds}")
            elif not here:
                why = f"holds no such files as kind {source.kind} reads ({', '.join(endings)})"
                more = f"; there are {kinds} (set suffixes of the source)" if kinds else ""
                refuse(pattern, f"{why}{more}" if not wanted else "holds no file of that pattern")
        elif look(path) is not None:
            root = os.path.dirname(path)
            here = [path]
        else:
            root = os.path.dirname(re.split(r"[*?\[]", path, maxsplit=1)[0])
            fits = [p for p in _glob(path) if not _is_index(source, p)]
            if out:
                inner = {f for f in set(map(os.path.dirname, fits)) if _lies_in(f, out)}
                fits = [p for p in fits if os.path.dirname(p) not in inner]
            folders = sorted(filter(os.path.isdir, fits))
            here = sorted(set(fits).difference(folders))
            if folders and "**" not in pattern:
                passed = f"{len(folders):,} folder(s) of that name, the first {folders[0]}: name a "
                passed += "folder itself, or use **, to read what is in it"
                if not here:
                    refuse(pattern, f"no such file, but {passed}")
                notice(f"sources: {source.name}: {pattern}: passed over {passed}")
        if out and _lies_in(root, out):
            refuse(pattern, "lies in `out`, which is made anew: copy it")
        if not here:
            refuse(pattern, "no such file or folder")
        for file in here:
            if not os.path.isfile(file):
                try:
                    os.stat(file)
                except FileNotFoundError:
                    refuse(file, "a link to nothing")
                except OSError as error:
                    raise disk_error(error, file) from None
                refuse(file, "not a regular file")
            if file.lower().endswith(_UNREAD):
                refuse(file, "packed in a way that is not read; unpack it first")
            if file not in found:
                name = without_endings(name_text(os.path.relpath(file, root or ".")))
                found[file] = name_text(os.path.abspath(file)) if name in taken else name
                taken.add(name)
    _check_looks(source, list(found), refuse)
    return found


def _check_looks(source: SourceConfig, files: list[str], refuse: Callable) -> None:
    """Ends a job before its work where all of some files are another kind's."""
    some = files[:: -(-len(files) // 8)]
    looks = [looks_like(file) for file in some]
    if all(look.kinds is not None and source.kind not in look.kinds for look in looks):
        refuse(some[0], f"kind {source.kind} does not read it; it {looks[0]}")


def _walk(
    path: str, source: SourceConfig, endings: tuple[str, ...], others: Counter[str], out: str
) -> Iterator[str]:
    """The files that count, but for those in a folder `out`; `others`: how many have another
    ending, by that."""
    for folder, names in _folders(path, out=out):
        for name in names:
            if name.startswith(".") or _is_index(source, name):
                continue
            if _fits(endings, name):
                yield os.path.join(folder, name)
            else:
                others[os.path.splitext(name)[1].lower()] += 1


def _folders(path: str, hidden: bool = True, out: str = "") -> Iterator[tuple[str, list[str]]]:
    """The folder and those in it, of any depth, each once, and the names of their files. Without
    `hidden` none is entered whose name begins with a dot; nor is a folder `out` in it."""
    # Not by their inode numbers: some file systems (FUSE, 9p) have none of their own.
    seen: set[str] = set()
    waiting = [path]
    while waiting:
        folder = waiting.pop()
        real = os.path.realpath(folder)
        if real in seen or (real == out and folder != path):  # by way of a link
            continue
        seen.add(real)
        with disk_errors(folder):
            names = sorted(os.listdir(folder), reverse=True)
        inner = {name for name in names if os.path.isdir(os.path.join(folder, name))}
        entered = [name for name in names if name in inner and (hidden or name[0] != ".")]
        waiting += [os.path.join(folder, name) for name in entered]
        yield folder, [name for name in names if name not in inner]


def _glob(pattern: str) -> list[str]:
    """As a recursive glob.glob, but through no folder twice by way of links, and with an error for
    a folder that cannot be read."""
    anywhere = re.fullmatch(r"(|.*?/)\*\*(?:/(.*))?", pattern, re.DOTALL)
    if not anywhere:
        head, tail = os.path.split(pattern)
        for folder in _glob(head) if glob.has_magic(head) else [head or "."]:
            if not glob.has_magic(tail):
                look(os.path.join(folder, tail))
            elif os.path.isdir(folder):
                with disk_errors(folder):
                    os.listdir(folder)
        return glob.glob(pattern)
    if anywhere[2] == "":
        return []  # folders alone
    head, tail = anywhere[1], anywhere[2] or "*"
    found: list[str] = []
    for root in glob.glob(head) if head else ["."]:
        for folder, _ in _folders(root, hidden=False):
            found += _glob(os.path.join(glob.escape(folder), tail))
    return sorted(set(found))


def _lies_in(folder: str, out: str) -> bool:
    return f"{os.path.realpath(folder)}/".startswith(f"{out}/")


def _fits(endings: tuple[str, ...], name: str) -> bool:
    plain, packing = os.path.splitext(name.lower())
    if packing not in (*PACKINGS, *_UNREAD):  # what is not read is refused, by name
        plain += packing
    return plain.endswith(endings)


def _is_index(source: SourceConfig, path: str) -> bool:
    # Of a multistream dump, whose parts are found in its own bytes.
    return source.kind == "wikipedia" and "multistream-index" in os.path.basename(path)


def plan_units(
    source: SourceConfig, files: Iterable[str], number: int, unit_bytes: int, first: int = 0
) -> list[Unit]:
    """The units of the files of source `number`, about `unit_bytes` of text each, in the order of
    the text; their numbers begin with `first`."""
    planned: list[tuple[list[str], int, Part]] = []
    room = -1  # left for small files in the last unit; below 0: none
    for file in files:
        parts, text_bytes = _cut(source, file, unit_bytes)
        if parts:
            planned += [([file], text_bytes // len(parts), part) for part in parts]
            room = -1
        elif text_bytes <= room:
            together, size, part = planned[-1]
            together.append(file)
            planned[-1] = (together, size + text_bytes, part)
            room -= text_bytes
        else:
            planned.append(([file], text_bytes, Part()))
            room = unit_bytes - text_bytes
    return [
        Unit(first + i, number, tuple(together), size, part)
        for i, (together, size, part) in enumerate(planned)
    ]


def _cut(source: SourceConfig, file: str, unit_bytes: int) -> tuple[list[Part], int]:
    """The parts of a file, none when it is read whole, and about how much text it holds, bytes."""
    try:
        size, packed = os.path.getsize(file), packing(file)
    except OSError as error:
        raise disk_error(error, file) from None
    records = _records_of(source, file)
    text_bytes = size * _COMPRESSION if packed or records is parquet_rows else size
    marked = FORMATS.keys() & (source.endings if is_tar(file) else [suffix_of(file)])
    text_bytes //= _MARKUP if marked else 1
    parts = min(-(-text_bytes // unit_bytes), _MOST_UNITS)
    if parts <= 1 or records is whole_file:
        return [], text_bytes
    if records is parquet_rows:
        parts = min(parts, row_groups(file, _MOST_PARTS))
    elif records in (csv_rows, tsv_rows, tar_members) or (
        packed and not (records is pages and packed == "bzip2")
    ):
        # Each part reads the whole file: it cannot be entered in the middle.
        parts = min(parts, _MOST_PARTS)
    else:
        cuts = [size * i // parts for i in range(parts + 1)]
        return [Part(cuts[i], cuts[i + 1], i, parts) for i in range(parts)], text_bytes
    return [Part(0, 0, i, parts) for i in range(parts)], text_bytes
