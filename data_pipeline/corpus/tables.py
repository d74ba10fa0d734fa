"""Documents from rows: JSON lines, and columns of parquet."""

from __future__ import annotations

import json
from collections.abc import Iterator

from core.errors import UserError
from data_pipeline.corpus.compressed import Broken
from data_pipeline.corpus.documents import Document, Dropped, clean_text, squeeze
from data_pipeline.corpus.parts import Input, Row, line_records


def json_rows(source: Input) -> Iterator[Row | Broken]:
    """One JSON object a line; blank lines are passed over."""
    good = False
    for record in line_records(source):
        if isinstance(record, Broken):
            yield record
            continue
        at, line = record
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            text = row[source.text_column]
            yield Row(int(at), row.get(source.id_column), text)
            good = True
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            what = "a JSON array" if line.lstrip().startswith(b"[") else str(error)
            yield Broken(f"byte {at}", f"not a JSON object on one line ({what})")
        except KeyError:
            if not good:
                raise UserError(
                    f"{source.file}: byte {at}: no field {source.text_column!r}; there are: "
                    f"{', '.join(sorted(row))[:200]} (set text_column of the source)"
                ) from None
            yield Broken(f"byte {at}", f"no field {source.text_column!r}")


def read_row(source: Input, row: Row) -> Iterator[Document | Dropped]:
    """A row whose text is a document, one paragraph a line."""
    name = f"{source.name}:{row.at}" if row.id is None else str(row.id)
    paragraphs: list[str] = []
    if isinstance(row.text, str):
        least = source.min_paragraph_words
        found = (squeeze(line) for line in clean_text(row.text).split("\n"))
        paragraphs = [
            line for line in found if line and (not least or line.count(" ") + 1 >= least)
        ]
    yield Document(name, paragraphs) if paragraphs else Dropped("empty", name)
