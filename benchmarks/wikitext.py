"""Wikitext cleaning: what is left of the markup and how many words are kept, beside wikiextractor.

    python benchmarks/wikitext.py [--dump DUMP.xml.bz2]

wikiextractor 3.1.0 (AGPL) is never a dependency: it is installed into a virtual environment of its
own in a temporary folder and run there as a separate program on the same dump. Residue is counted
in the text of the pages both keep. A word is kept when it stands as often in our text of the same
page; also shown are the same without wikiextractor's section headings (lines of at most seven
words that end in a full stop), which BERT does not want.
"""

from __future__ import annotations

import argparse
import collections
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from configs.load import load
from core.errors import UserError, main_guard
from data_pipeline.corpus.documents import Document
from data_pipeline.corpus.settings import PrepareConfig
from data_pipeline.corpus.sources import (
    SourceConfig,
    list_files,
    plan_units,
    read_unit,
    resolve,
)

ROOT = Path(__file__).resolve().parent.parent

VERSION = "3.1.0"
RESIDUE = {
    "[[": r"\[\[",
    "]]": r"\]\]",
    "{{": r"\{\{",
    "}}": r"\}\}",
    "|thumb": r"\|\s*thumb",
    "Category:": r"Category:",
    "==": r"==",
    "leading * or #": r"^[*#]",
    "&xxx;": r"&(?:[A-Za-z]\w*|#\w+);",
    "( ; )": r"\(\s*[;,]|[;,]\s*\)|\(\s*\)",
    "''": r"''",
}


def theirs(dump: Path, scratch: Path) -> tuple[dict[str, list[str]], float] | None:
    """Lines of each page as wikiextractor gives them, and its seconds; None where no network is
    there to install it from."""
    python = scratch / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", python.parent.parent], check=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    installed = subprocess.run(
        [*pip, f"wikiextractor=={VERSION}"], stderr=subprocess.PIPE, text=True
    )
    if installed.returncode:
        if "connection broken" in installed.stderr:  # pip's words where nobody answers
            return None
        sys.exit(f"wikiextractor {VERSION} cannot be installed:\n{installed.stderr.strip()}")
    command = [str(python), "-m", "wikiextractor.WikiExtractor", "--json", "--quiet"]
    started = time.perf_counter()
    subprocess.run(
        [*command, "--discard_empty", "-o", str(scratch / "text"), str(dump)],
        check=True,
        capture_output=True,
        cwd=scratch,
    )
    seconds = time.perf_counter() - started
    pages = {}
    for path in sorted(p for p in (scratch / "text").rglob("*") if p.is_file()):
        for row in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
            pages[str(row["id"])] = [line for line in row["text"].split("\n") if line.strip()]
    return pages, seconds


def ours(dump: Path) -> tuple[dict[str, list[str]], float]:
    """Lines of each page as ours, and our seconds."""
    source = SourceConfig(name="dump", kind="wikipedia", path=str(dump))
    names = list_files(source)
    started = time.perf_counter()
    pages = {
        item.id: item.paragraphs
        for unit in plan_units(source, names, 0, 4_000_000)
        for item in read_unit(source, unit, names, told=print)
        if isinstance(item, Document)
    }
    return pages, time.perf_counter() - started


def words(lines: list[str]) -> collections.Counter[str]:
    return collections.Counter(re.findall(r"\w+", " ".join(lines).lower()))


def kept(theirs: dict[str, list[str]], ours: dict[str, list[str]], pages: list[str]) -> float:
    """Share of their words that stand in our text of the same pages."""
    total = found = 0
    for page in pages:
        wanted, have = words(theirs[page]), words(ours.get(page, []))
        total += wanted.total()
        found += (wanted & have).total()
    return found / total


def is_heading(line: str) -> bool:
    return len(line.split()) <= 7 and line.endswith(".")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--dump", type=Path, help="a raw .xml.bz2 dump (default: the demo's, requirements-demo.txt)"
    )
    options = parser.parse_args()
    if options.dump is None:
        demo = load(ROOT / "configs/data_demo.yaml", PrepareConfig)
        options.dump = Path(resolve(demo.sources[0].path))
    if not options.dump.is_file():
        raise UserError(f"--dump: {options.dump}: no such file")
    scratch = Path(tempfile.mkdtemp(prefix="bench-wikitext-"))
    try:
        found = theirs(options.dump.resolve(), scratch)
    finally:
        shutil.rmtree(scratch)
    if found is None:
        print(f"nothing measured: wikiextractor {VERSION} cannot be installed (it takes a network)")
        print(json.dumps({"benchmark": "wikitext", "ratio": {}, "detail": {}}))
        return
    reference, their_seconds = found
    own, own_seconds = ours(options.dump.resolve())
    both = [page for page in reference if page in own]
    if not both:
        raise UserError(f"--dump: {options.dump}: no article came out of it; is it a dump?")
    print(f"pages: wikiextractor {len(reference)}, ours {len(own)}, both {len(both)}\n")
    print(f"{'residue (occurrences)':<24}{'wikiextractor':>14}{'ours':>8}")
    counts: dict[str, tuple[int, int]] = {}
    for name, expression in RESIDUE.items():
        pattern = re.compile(expression)
        counts[name] = tuple(  # type: ignore[assignment]
            sum(len(pattern.findall(line)) for page in both for line in text[page])
            for text in (reference, own)
        )
        print(f"{name:<24}{counts[name][0]:>14}{counts[name][1]:>8}")
    prose = {p: [line for line in reference[p] if not is_heading(line)] for p in reference}
    shares = {
        "same pages": kept(reference, own, both),
        "same pages, without headings": kept(prose, own, both),
        "all pages": kept(reference, own, list(reference)),
        "theirs of ours": kept(own, reference, both),
    }
    print("\nwords of wikiextractor that we keep")
    print(f"  on the pages both keep               {100 * shares['same pages']:6.2f} %")
    headings = shares["same pages, without headings"]
    print(f"  the same without its section headings {100 * headings:5.2f} %")
    print(f"  on all its pages (ours drops disambiguation) {100 * shares['all pages']:.2f} %")
    print(f"words of ours that wikiextractor keeps    {100 * shares['theirs of ours']:5.2f} %")
    print(f"seconds: wikiextractor {their_seconds:.1f}, ours {own_seconds:.1f}")
    residue = [sum(c[i] for c in counts.values()) for i in (0, 1)]
    detail = {"residue": counts, "kept": shares, "pages": [len(reference), len(own)]}
    ratio = {
        "words_kept": round(shares["same pages"], 4),
        "residue": residue[1] / max(1, residue[0]),
    }
    print(json.dumps({"benchmark": "wikitext", "ratio": ratio, "detail": detail}))


if __name__ == "__main__":
    sys.exit(main_guard(main))
