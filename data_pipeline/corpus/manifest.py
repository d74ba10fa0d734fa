"""The manifest of a dataset: its shards and sources, its settings, and the hash of all that."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from core.console import printable
from core.errors import TryAgain, UserError, short
from core.files import disk_errors, write_atomically
from core.urls import NotThere, Patience, is_url, join, read

T = TypeVar("T")

FORMAT = "bert-shards-1"
MANIFEST = "manifest.json"
VOCAB = "vocab.txt"
SOURCES = "sources.json"
# The setting that holds the sha256 of the vocabulary whose [unusedN] this one puts to use.
EXTENDS = "vocabulary_extends"

Split = Literal["train", "heldout"]
PREFIX: dict[Split, str] = {"train": "shard", "heldout": "heldout"}
Count = Annotated[int, Field(ge=0, lt=1 << 62)]


class ShardFile(NamedTuple):
    """A file of a shard, as the manifest has it."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class ShardInfo:
    """One shard. `bytes` and `sha256` are of NAME.tar, `idx_bytes` and `idx_sha256` of NAME.idx."""

    name: str
    split: Split
    bytes: Count
    sha256: str
    idx_bytes: Count
    idx_sha256: str
    documents: Count
    sentences: Count
    tokens: Count

    @property
    def files(self) -> tuple[ShardFile, ShardFile]:
        """NAME.tar and NAME.idx."""
        return (
            ShardFile(f"{self.name}.tar", self.bytes, self.sha256),
            ShardFile(f"{self.name}.idx", self.idx_bytes, self.idx_sha256),
        )

    def missing_from(self, directory: Path) -> Path | None:
        """The first of the two files that is not there, or not of its size."""
        for file in self.files:
            path = directory / file.name
            if not path.is_file() or path.stat().st_size != file.bytes:
                return path
        return None


def shard_name(split: Split, number: int) -> str:
    """NAME of the files of a split's shard."""
    return f"{PREFIX[split]}-{number:06d}"


SHARD_NAME = rf"(?:{'|'.join(PREFIX.values())})-[0-9]{{6,12}}"  # a pattern, as of `shard_name`
SHARD_FILE = re.compile(rf"{SHARD_NAME}\.(?:tar|idx)")


def shard_files(folder: Path) -> list[Path]:
    """The files that have the names of a shard's."""
    found = (path for path in folder.iterdir() if SHARD_FILE.fullmatch(path.name))
    return [path for path in found if not path.is_dir()]


@dataclass(frozen=True)
class SourceInfo:
    """One source of text: where it came from, and what became of its documents."""

    name: str
    kind: str = "text"
    provenance: str = ""
    licence: str = ""
    documents_in: Count = 0
    documents_out: Count = 0
    words: Count = 0
    sentences: Count = 0
    tokens: Count = 0
    dropped: dict[str, Count] = field(default_factory=dict)
    notes: dict[str, Count] = field(default_factory=dict)


@dataclass(frozen=True)
class Manifest:
    """The table of contents of a dataset; `dataset_id` is the hash of everything else in it."""

    vocab_size: Count
    vocab_sha256: str
    lowercase: bool
    shards: tuple[ShardInfo, ...]
    sources: tuple[SourceInfo, ...]
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def extends(self) -> str | None:
        """sha256 of the vocabulary that this one is but for words in place of [unusedN], if any."""
        found = self.settings.get(EXTENDS)
        return found if isinstance(found, str) else None

    def split(self, name: Split) -> tuple[ShardInfo, ...]:
        """The shards of split "train" or "heldout", in order."""
        return tuple(shard for shard in self.shards if shard.split == name)

    @property
    def first_ordinals(self) -> dict[str, int]:
        """By shard the number, in its split, of its first document."""
        found: dict[str, int] = {}
        next_of = dict.fromkeys(PREFIX, 0)
        for shard in self.shards:
            found[shard.name] = next_of[shard.split]
            next_of[shard.split] += shard.documents
        return found

    @property
    def dataset_id(self) -> str:
        text = json.dumps(self._body(), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return hashlib.sha256(text.encode("utf-8")).hexdigest()[:32]

    def card(self) -> list[tuple[str, str]]:
        """What it is, in words, by what is asked; sources, licences and counts."""
        rows = [
            ("data set", self.dataset_id),
            ("vocabulary", f"{self.vocab_size:,} pieces, sha256 {self.vocab_sha256[:12]}"),
            ("lowercase", str(self.lowercase)),
            ("shards", f"{len(self.shards):,}"),
        ]
        for source in self.sources:
            count = f"{source.documents_out:,} documents, {source.tokens:,} tokens"
            dropped = sum(source.dropped.values())
            count += f"; {dropped:,} dropped" if dropped else ""
            terms = printable(source.licence) or "licence not stated"
            rows.append((printable(source.name), f"{count}; {terms}"))
        return rows

    def _body(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self)}

    def to_json(self) -> str:
        """The text of manifest.json."""
        body = {"dataset_id": self.dataset_id, **self._body()}
        return json.dumps(body, indent=1, ensure_ascii=False) + "\n"


for _kind in (ShardInfo, SourceInfo, Manifest):
    _kind.__pydantic_config__ = ConfigDict(strict=True, extra="forbid")  # type: ignore[attr-defined]
_MANIFEST = TypeAdapter(Manifest)


def load_manifest(directory: str | Path, patience: Patience | None = None) -> Manifest:
    """Reads DIR/manifest.json. UserError if missing, of another format, or edited by hand (the id
    disagrees)."""
    path = join(directory, MANIFEST)
    try:
        return read_checked(path, lambda data: _manifest(data, path), patience, _no_json)
    except NotThere as error:
        if is_url(path):
            raise
        raise NotThere(
            f"{error}; make the dataset with `python -m data_pipeline prepare --config FILE`"
        ) from None


def read_checked(
    path: str,
    check: Callable[[bytes], T],
    patience: Patience | None = None,
    wrong: Callable[[bytes], str] = lambda data: "",
    size: int | None = None,
) -> T:
    """What `check` makes of the file, or its UserError. A remote one is asked for once more then,
    since a connection can change bytes, and look whole; TryAgain where each answer is another.
    wrong, size: as of `read`."""
    data = read(path, patience, wrong, size)
    for _ in range((patience or Patience()).retries + 1):
        try:
            return check(data)
        except UserError:
            if not is_url(path) or (again := read(path, patience, wrong, size)) == data:
                raise
        data = again
    try:
        return check(data)
    except UserError:
        raise TryAgain(f"{path}: its origin gives other bytes each time") from None


def _manifest(data: bytes, path: str) -> Manifest:
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON ({error})") from None
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise UserError(f"{path}: format is not {FORMAT!r}")
    stated = body.pop("dataset_id", None)
    del body["format"]
    try:
        manifest = _MANIFEST.validate_json(json.dumps(body))
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        place = ".".join(map(str, fault["loc"])) or "the text"
        found = short(json.dumps(fault["input"]))
        raise UserError(f"{path}: {place}: {fault['msg']}; it is {found}") from None
    _check_names(manifest.shards, path)
    if len({source.name for source in manifest.sources}) < len(manifest.sources):
        raise UserError(f"{path}: sources: a name stands there twice")
    if stated != manifest.dataset_id:
        raise UserError(
            f"{path}: dataset_id {stated} is not the hash of its content; the file was changed"
        )
    return manifest


def _no_json(data: bytes) -> str:
    try:
        json.loads(data)
    except (ValueError, RecursionError) as error:
        return f"not JSON ({error})"
    return ""


def _check_names(shards: Sequence[ShardInfo], where: str) -> None:
    """Names become parts of paths, of URLs and of a pipe's command: only the writer's pass."""
    if not shards:
        raise UserError(f"{where}: shards: names none")
    for number, shard in enumerate(shards):
        if not re.fullmatch(f"{PREFIX[shard.split]}-[0-9]{{1,12}}", shard.name):
            raise UserError(
                f"{where}: shards.{number}: name {short(shard.name)!r} is not that of a shard of "
                f"split {shard.split!r}, such as {shard_name(shard.split, 0)}"
            )
    if len({shard.name for shard in shards}) < len(shards):
        raise UserError(f"{where}: shards: a name stands there twice")


Runs = list[tuple[Count, Count]]


@dataclass(frozen=True)
class SourceMap:
    """Which source each document is of. shards: by name the runs of a shard's documents, each
    (place in `manifest.sources`, documents)."""

    dataset_id: str
    shards: dict[str, Runs]


_SOURCE_MAP = TypeAdapter(SourceMap)
_SOURCES_REMEDY = "`python -m data_pipeline sources DIR` writes it"


def write_source_map(directory: str | Path, manifest: Manifest, shards: dict[str, Runs]) -> None:
    """DIR/sources.json. UserError where it does not fit the manifest."""
    path, found = Path(directory) / SOURCES, SourceMap(manifest.dataset_id, shards)
    _check_source_map(found, manifest, str(path))
    with disk_errors(path):
        write_atomically(path, json.dumps(asdict(found)) + "\n")


def load_source_map(
    directory: str | Path, manifest: Manifest, patience: Patience | None = None
) -> SourceMap:
    """Reads DIR/sources.json. UserError if missing, or not of this data set."""
    path = join(directory, SOURCES)

    def checked(data: bytes) -> SourceMap:
        try:
            found = _SOURCE_MAP.validate_json(data)
        except ValidationError as error:
            fault = error.errors(include_url=False)[0]["msg"]
            raise UserError(f"{path}: {fault}; {_SOURCES_REMEDY}") from None
        _check_source_map(found, manifest, path)
        return found

    try:
        return read_checked(path, checked, patience, _no_json)
    except NotThere as error:
        raise NotThere(f"{error}; {_SOURCES_REMEDY}") from None


def _check_source_map(found: SourceMap, manifest: Manifest, path: str) -> None:
    """Its sums are the manifest's; of each record a reader sees it when it first touches it."""
    if found.dataset_id != manifest.dataset_id:
        raise UserError(
            f"{path}: is of data set {short(found.dataset_id)}, not of {manifest.dataset_id}; "
            f"{_SOURCES_REMEDY}"
        )
    by_shard, by_source = Counter[str](), Counter[int]()
    for name, runs in found.shards.items():
        for source, documents in runs:
            by_shard[name] += documents
            by_source[source] += documents
    stated = Counter({shard.name: shard.documents for shard in manifest.shards})
    kept = Counter({n: source.documents_out for n, source in enumerate(manifest.sources)})
    # Of none that the manifest has not, of which there may be no documents.
    strange = by_shard.keys() - stated.keys() or by_source.keys() - kept.keys()
    if strange or (+by_shard, +by_source) != (+stated, +kept):
        raise UserError(f"{path}: its documents are not the manifest's; {_SOURCES_REMEDY}")


def load_vocabulary(
    directory: str | Path, manifest: Manifest, patience: Patience | None = None
) -> bytes:
    """DIR/vocab.txt. UserError if missing, or not the one the shards were made with."""
    path = join(directory, VOCAB)

    def checked(data: bytes) -> bytes:
        if hashlib.sha256(data).hexdigest() != manifest.vocab_sha256:
            what = "not the vocabulary these shards were made with (sha256 differs)"
            raise UserError(f"{path}: {what}")
        return data

    return read_checked(path, checked, patience, _no_vocabulary)


def _no_vocabulary(data: bytes) -> str:
    return "" if b"[MASK]" in data else "no vocabulary (without [MASK])"


def vocab_bytes(tokens: Sequence[str]) -> bytes:
    """vocab.txt: one piece a line, the line number is its id."""
    return "".join(f"{token}\n" for token in tokens).encode("utf-8")
