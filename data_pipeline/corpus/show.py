"""A look at a dataset in the terminal: documents back as text, lengths, counts by source. What is
read is checked."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence

import numpy as np

from core.console import histogram, printable
from core.errors import UserError
from data_pipeline.corpus.manifest import Manifest, load_manifest
from data_pipeline.corpus.report import closing_table
from data_pipeline.corpus.shards import index_of, iterate_documents
from data_pipeline.corpus.tokenizer import Tokenizer


def bars(values: Sequence[int] | np.ndarray, bounds: Sequence[int], width: int) -> list[str]:
    """One bar a bin [bounds[i], bounds[i+1]), with its share; the last bin is open."""
    edges = [*bounds, np.iinfo(np.int64).max]
    counts = np.histogram(values, edges)[0]
    bins = []
    for low, high, count in zip(edges[:-1], edges[1:], counts.tolist(), strict=True):
        label = f"{low:,}+" if high == edges[-1] else f"{low:,}-{high - 1:,}"
        bins.append((label, count))
    return histogram(bins, max(10, width - 40))


def overview(directory: str, manifest: Manifest, width: int) -> str:
    """Counts by source and two histograms, from the indexes alone."""
    sentences, documents = [], []
    for shard in manifest.shards:
        index = index_of(directory, shard)
        sentences.append(index.sentence_lengths)
        documents.append(index.document_tokens())
    case = "uncased" if manifest.lowercase else "cased"
    return "\n".join(
        [
            f"dataset {manifest.dataset_id}, vocabulary of {manifest.vocab_size:,} ({case})",
            closing_table(manifest),
            "",
            "tokens a sentence:",
            *bars(np.concatenate(sentences), (1, 5, 10, 20, 30, 40, 60, 80, 128, 256, 512), width),
            "",
            "tokens a document:",
            *bars(
                np.concatenate(documents),
                (1, 64, 128, 256, 512, 1024, 2048, 4096, 16384, 65536, 262144),
                width,
            ),
        ]
    )


def main(argv: list[str]) -> int:
    """`python -m data_pipeline show DIR`."""
    parser = argparse.ArgumentParser(
        prog="python -m data_pipeline show", description="Look at a dataset."
    )
    parser.add_argument("directory", metavar="DIR")
    parser.add_argument(
        "--document", metavar="ID", help="print this document, sentence by sentence"
    )
    parser.add_argument("--grep", metavar="TEXT", help="print the sentences (of it) that hold TEXT")
    parser.add_argument("--limit", type=int, default=20, help="most matches printed (default 20)")
    options = parser.parse_args(argv)
    for flag, text in (("--document", options.document), ("--grep", options.grep)):
        if text is not None and not text.strip():
            parser.error(f"{flag}: is empty")
    if any("\ud800" <= letter <= "\udfff" for letter in options.grep or ""):
        parser.error("--grep: is no UTF-8")  # bytes that Python could not read
    if options.limit < 1:
        parser.error(f"--limit: {options.limit} is not 1 or more")
    manifest = load_manifest(options.directory)
    if options.document is None and options.grep is None:
        print(overview(options.directory, manifest, shutil.get_terminal_size((100, 24)).columns))
        return 0
    tokenizer = Tokenizer.from_dataset(options.directory, manifest)
    wanted = None
    if options.grep is not None:
        # Through the vocabulary and back, as the text itself went.
        wanted = tokenizer.decode(tokenizer.encode(options.grep))
        if not wanted:
            parser.error("--grep: holds nothing that the tokenizer keeps")
        # The first and the last may be parts of words, which have other pieces.
        whole_words = " ".join(options.grep.split()[1:-1])
        rarest = set(tokenizer.encode(whole_words))
    found = 0
    for split in ("train", "heldout"):
        for document in iterate_documents(options.directory, split, manifest):
            if options.document is not None and document.id != options.document:
                continue
            if wanted is not None and not rarest.issubset(np.unique(document.ids).tolist()):
                continue
            known = document.source < len(manifest.sources)
            source = manifest.sources[document.source].name if known else "?"
            head = printable(
                f"[{source}] {document.id}  ({split}, {len(document.lengths):,} sentences, "
                f"{len(document.ids):,} tokens)"
            )
            if wanted is None:
                print(head)
                found += 1
            for number, ids in enumerate(document.sentences()):
                text = tokenizer.decode(ids.tolist())
                if wanted is None:
                    print(f"{number:>6}  {printable(text)}")
                elif wanted in text and found < options.limit:
                    print(f"{head} sentence {number}:\n        {printable(text)}")
                    found += 1
            if wanted is not None and found >= options.limit:
                print(f"(stopped at --limit {options.limit})")
                return 0
    if not found:
        asked = {"document": options.document, "text": options.grep}
        what = " with ".join(f"{name} {x!r}" for name, x in asked.items() if x is not None)
        raise UserError(f"{options.directory}: no such {what}")
    return 0
