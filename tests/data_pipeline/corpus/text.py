"""Made-up English for the tests of the corpus room: deterministic, real enough for every stage."""

from __future__ import annotations

import bz2
import html
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import yaml

from data_pipeline.corpus.documents import Document, Dropped, Problem
from data_pipeline.corpus.sources import SourceConfig, list_files, plan_units, read_unit
from data_pipeline.corpus.tokenizer import special_layout

T = TypeVar("T")
WORDS = (
    "the of and to in a is that for it as was with be by on not he his but at are this have from "
    "river mountain city people world history music water house family school theory market king "
    "small great early modern northern ancient several important found became made called known "
    "during between after before under against through without within century year town language"
).split()


def vocabulary() -> list[str]:
    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)] + list("0123456789")
    marks = list(".,;:!?'\"()-–")
    pieces = special_layout(99) + letters + [f"##{c}" for c in letters] + marks
    return pieces + [word for word in WORDS if len(word) > 1]


def write_vocabulary(path: Path) -> Path:
    path.write_text("".join(f"{piece}\n" for piece in vocabulary()), encoding="utf-8")
    return path


def sentence(random: np.random.Generator) -> str:
    words = [WORDS[i] for i in random.integers(0, len(WORDS), random.integers(8, 20))]
    return " ".join(words).capitalize() + "."


def document(seed: int, paragraphs: int = 4) -> list[str]:
    random = np.random.Generator(np.random.Philox(seed))
    return [
        " ".join(sentence(random) for _ in range(random.integers(2, 6))) for _ in range(paragraphs)
    ]


def wikiextractor(documents: Sequence[int]) -> str:
    """Pages as WikiExtractor writes them; page `seed` holds `document(seed)`."""
    pages = []
    for seed in documents:
        body = "\n".join(document(seed))
        head = f'<doc id="{seed}" url="https://x.org/wiki?curid={seed}" title="Page {seed}">'
        pages.append(f"{head}\nPage {seed}\n\nEarly life.\n{body}\n\n</doc>\n")
    return "".join(pages)


def dump(documents: Sequence[int], extra: str = "") -> str:
    """A MediaWiki XML dump; page `seed` holds `document(seed)`, every tenth is a redirect."""
    pages = []
    for seed in documents:
        redirect = '    <redirect title="Page 1" />\n' if seed % 10 == 0 else ""
        text = html.escape("\n\n".join(document(seed)) + "\n\n== See also ==\n* [[Other]]\n", False)
        pages.append(
            f"  <page>\n    <title>Page {seed}</title>\n    <ns>0</ns>\n    <id>{seed}</id>\n"
            f'{redirect}    <revision>\n      <id>9</id>\n      <text xml:space="preserve">'
            f"{text}</text>\n    </revision>\n  </page>\n"
        )
    return f"<mediawiki>\n  <siteinfo></siteinfo>\n{''.join(pages)}{extra}</mediawiki>\n"


def multistream(pages: Sequence[int], each: int) -> bytes:
    """A dump as independent bzip2 streams of `each` pages."""
    text = dump(pages)
    head, *rest = text.split("  <page>")
    streams = [bz2.compress(head.encode())]
    rest = ["  <page>" + page for page in rest]
    for start in range(0, len(rest), each):
        streams.append(bz2.compress("".join(rest[start : start + each]).encode()))
    return b"".join(streams)


def write_config(path: Path, vocab: Path | None, sources: list[dict], **more: object) -> Path:
    config: dict[str, object] = {
        "out": str(path.parent / "out"),
        "sources": sources,
        "heldout_fraction": 0.1,
        "unit_bytes": 20_000,
        "shard_bytes": 20_000,
        **more,
    }
    if vocab is not None and "vocabulary" not in more:
        config["vocabulary"] = {"path": str(vocab)}
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


def read(
    kind: str, path: Path | str, unit_bytes: int = 10**9, **more: object
) -> tuple[list[Document | Dropped | Problem], int]:
    """All items of a source, unit after unit, and the number of units."""
    source = SourceConfig(name="s", kind=kind, path=str(path), **more)
    names = list_files(source)
    units = plan_units(source, names, 0, unit_bytes)
    items: list[Document | Dropped | Problem] = []
    for unit in units:
        for item in read_unit(source, unit, names, items.append):
            items.append(item)
    return items, len(units)


def with_peak(call: Callable[..., T], *args: object, **more: object) -> tuple[T, int]:
    """What a call gives, and the most bytes that Python held for it at once."""
    tracemalloc.start()
    try:
        return call(*args, **more), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def documents(items: list[Document | Dropped | Problem]) -> dict[str, list[str]]:
    return {item.id: item.paragraphs for item in items if isinstance(item, Document)}


def problems(items: list[Document | Dropped | Problem]) -> list[Problem]:
    return [item for item in items if isinstance(item, Problem)]
