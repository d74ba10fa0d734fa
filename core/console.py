"""What a user sees: lines that stay, one line that is replaced, tables, and only text in them."""

from __future__ import annotations

import contextlib
import io
import math
import os
import re
import select
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

PLAIN_EVERY = 10.0  # seconds, where a line cannot be replaced
_CALM_AFTER = 600.0  # seconds, from where on such lines are less frequent
_CALM_EVERY = 60.0
_FILE_COLUMNS = 120  # of a line in a file
LIVE_EVERY = 0.5
_DATE = "%Y-%m-%d %H:%M:%S "

# Control characters (C0, DEL, C1), marks that turn the direction of writing, and halves of
# characters, which no encoding can write.
_CONTROL = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


class OutputFailed(OSError):
    """Stdout takes no more: an error of no file, whatever was at work when a line was due."""


class OutputGone(OutputFailed, BrokenPipeError):
    """Nobody reads stdout."""


class _Stdout(io.TextIOWrapper):
    """Over Python's own buffer: a raw layer in Python could be left by Ctrl-C behind its write, and
    the buffer would write the same again."""

    failed: OutputFailed | None = None

    def write(self, text: str) -> int:
        return self._or_failed(super().write, text)

    def flush(self) -> None:
        self._or_failed(super().flush)

    def _or_failed(self, act: Callable[..., Any], *text: str) -> Any:
        try:
            if not self.closed:
                os.set_blocking(self.fileno(), True)  # which another program may have changed
            return act(*text)
        except OSError as error:
            kind = OutputGone if isinstance(error, BrokenPipeError) else OutputFailed
            self.failed = kind(error.errno, error.strerror)
            raise self.failed from None


def own_stdout() -> None:
    """From here on stdout fails with OutputFailed. PYTHONUNBUFFERED, with which Python passes over
    what a file or a pipe has not taken of a text, is to flush each line. A character that its
    encoding has not is escaped."""
    old = sys.stdout
    if old is not sys.__stdout__ or not isinstance(old, io.TextIOWrapper):
        return  # another's already, or ours
    old.flush()
    sys.stdout = _Stdout(
        io.BufferedWriter(io.FileIO(old.fileno(), "wb", closefd=False)),
        encoding=old.encoding,
        # Of LANG=en_US.ISO-8859-1 and the like.
        errors="backslashreplace" if old.errors == "strict" else old.errors,
        line_buffering=old.line_buffering or old.write_through,
    )


def look_at_stdout() -> None:
    """OutputFailed where stdout has not taken all that was written, whoever was told."""
    sys.stdout.flush()
    if isinstance(sys.stdout, _Stdout) and sys.stdout.failed is not None:
        raise sys.stdout.failed


def printable(text: str) -> str:
    """`text` on one line without a character that a terminal would obey: those are escaped."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def show(text: str) -> None:
    """Lines of `printable` text, what was asked for, on stdout. OSError where they cannot be
    written."""
    print("\n".join(map(printable, text.split("\n"))), flush=True)


def wrap(text: str, first: str = "", rest: str = "  ") -> list[str]:
    """`text`, broken between words, in lines as wide as the terminal, 80 columns off one; `first`
    and `rest` begin the first line and the others."""
    return textwrap.wrap(
        text,
        shutil.get_terminal_size().columns,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )


def notice(text: str, stream: TextIO | None = None, *, lines: bool = True) -> None:
    """Lines, or with `lines` off one line, of `printable` text, on stdout by default; on a terminal
    broken between words. A full disk or a terminal that is gone loses them, and ends nothing;
    OutputGone where stdout is a pipe that nobody reads."""
    parts = [printable(part) for part in (text.split("\n") if lines else [text])]
    stream = stream or sys.stdout
    if stream.isatty():
        parts = [line for part in parts for line in wrap(part) or [""]]
    _write(stream, "\n".join(parts) + "\n", needs_reader=stream is sys.stdout)


def last_words(line: str, dated: bool = True) -> None:
    """On stderr, in one piece, whatever the main thread is printing, `dated` off a terminal. Where
    nobody reads it is left out: who has to end the process does not wait for room in a pipe."""
    if dated and not os.isatty(2):
        line = time.strftime(_DATE) + line
    poll = select.poll()
    poll.register(2, select.POLLOUT)
    if any(event & select.POLLOUT for _, event in poll.poll(1000)):
        with contextlib.suppress(OSError):
            os.write(2, (printable(line) + "\n").encode()[: select.PIPE_BUF])


def _write(stream: TextIO, text: str, *, needs_reader: bool = False) -> None:
    try:
        stream.write(text)
        stream.flush()
    except OSError as error:
        if isinstance(error, OutputGone) and needs_reader:
            raise
        # What waits in the buffer would fail every later line, and the end of the process.
        handle = stream.fileno()
        kept, nowhere = os.dup(handle), os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, handle)
        with contextlib.suppress(OSError):
            stream.flush()
        os.dup2(kept, handle)
        os.close(kept)
        os.close(nowhere)


class Console:
    """One live line on a terminal; plain lines anywhere else, at most one in ten seconds, after ten
    minutes one a minute. Lines that cannot be written, or that nobody reads, are lost: what ends
    `tee` in a terminal is a signal to the job as well, which still has its checkpoint to write.

    dated: lines that stay begin with the date and time of day.
    """

    def __init__(self, active: bool, stream: TextIO | None = None, *, dated: bool = False) -> None:
        self._active, self._dated = active, dated
        self._stream = stream or sys.stdout
        self.live = active and self._stream.isatty()
        self._open = False
        self._began, self._last_plain = time.monotonic(), -1e9

    def say(self, text: str) -> None:
        """A line that stays; on a terminal broken between words."""
        if self._active:
            start = "\r\x1b[K" if self._open else ""
            line = self._date() + printable(text)
            lines = wrap(line, rest="    ") if self.live else [line]
            self._write(start + "\n".join(lines) + "\n")
            self._open = False

    def progress(self, text: str, more: Sequence[str] = (), *, last: bool = False) -> None:
        """A line that the next one replaces. Of `more` there is as much as fits."""
        if not self._active:
            return
        text = printable(text) if self.live else self._date() + printable(text)
        width = shutil.get_terminal_size().columns if self.live else _FILE_COLUMNS
        for part in map(printable, more):
            if len(text) + len(part) + 2 >= width:
                break
            text += f"  {part}"
        if self.live:
            self._write("\r\x1b[K" + text[: width - 1] + ("\n" if last else ""))
            self._open = not last
        elif last or self._plain_due():
            self._last_plain = time.monotonic()
            self._write(text + "\n")

    def _plain_due(self) -> bool:
        now = time.monotonic()
        every = _CALM_EVERY if now - self._began > _CALM_AFTER else PLAIN_EVERY
        return now - self._last_plain >= every

    def _date(self) -> str:
        return time.strftime(_DATE) if self._dated else ""

    def _write(self, text: str) -> None:
        _write(self._stream, text)


class Progress:
    """How far a job of `total` bytes is, `done` of them before this start: share, rate, time
    left, on stderr."""

    def __init__(self, label: str, total: int, done: int = 0, *, active: bool = True) -> None:
        self._console = Console(active, sys.stderr)
        self._label, self._total, self._done, self._before = label, total, done, done
        self._counts: dict[str, int] = {}
        self._every = LIVE_EVERY if self._console.live else PLAIN_EVERY
        self._start = self._last = time.monotonic()

    def add(self, amount: int, counts: Mapping[str, int] | None = None) -> None:
        """`amount` bytes more are done, or are to be done again where it is below zero, and so many
        more things of each name in `counts`."""
        self._done += amount
        self._before = min(self._before, self._done)
        for name, count in (counts or {}).items():
            self._counts[name] = self._counts.get(name, 0) + count
        now = time.monotonic()
        if now - self._last >= self._every:
            self._last = now
            self._show(last=False)

    def close(self) -> None:
        """The line of the end stays."""
        self._show(last=True)

    def _show(self, last: bool) -> None:
        seconds = max(1e-3, time.monotonic() - self._start)
        rate = (self._done - self._before) / seconds
        left = (self._total - self._done) / rate if rate > 0 else math.inf
        ended = self._done >= self._total
        self._console.progress(
            f"{self._label} {100 * self._done / max(1, self._total):.1f} %",
            [
                f"{self._done / 1e6:.1f}/{self._total / 1e6:.1f} MB",
                f"{rate / 1e6:.2f} MB/s",
                f"in {clock_text(seconds)}" if ended else f"{clock_text(left)} left",
                *(f"{count:,} {name}" for name, count in self._counts.items() if count),
            ],
            last=last,
        )


def clock_text(seconds: float) -> str:
    """m:ss, h:mm:ss from an hour on, with days in front; "?" where it is not known."""
    if not math.isfinite(seconds):
        return "?"
    whole = max(int(seconds), 0)
    days, rest = divmod(whole, 86400)
    hours, rest = divmod(rest, 3600)
    minutes, rest = divmod(rest, 60)
    text = f"{hours}:{minutes:02}:{rest:02}" if hours or days else f"{minutes}:{rest:02}"
    return f"{days}d {text}" if days else text


def short_number(value: float) -> str:
    """Three digits with a unit: 950, 61.2k, 1.23M, 12.3G."""
    size = min(int(math.log10(max(value, 1))), 11)
    digits = 2 - size % 3 if size >= 3 else 0
    return f"{value / 1000 ** (size // 3):.{digits}f}{'kMG'[size // 3 - 1] if size >= 3 else ''}"


def quantity(value: float, what: str) -> str:
    """Three digits with k, M, G, T, P or E."""
    power = min(max(int(math.log10(max(value, 1)) // 3), 0), 6)
    return f"{value / 1000**power:.3g} {('', 'k', 'M', 'G', 'T', 'P', 'E')[power]}{what}".rstrip()


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns in line: the first to the left, the others to the right, the last as it comes."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    lines = []
    for first, *middle, last in rows:
        cells = [cell.rjust(width) for cell, width in zip(middle, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells, last]))
    return lines


def markdown_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table in Markdown; the first row is its header."""
    cells = ([printable(cell).replace("|", "/") for cell in row] for row in rows)
    lines = ["| " + " | ".join(row) + " |" for row in cells]
    return [lines[0], "|" + "---|" * len(rows[0]), *lines[1:]]


def histogram(bins: Sequence[tuple[str, int]], width: int = 40) -> list[str]:
    """A line a bin of (label, count): count, share, and a bar, `width` long for the most."""
    total = max(1, sum(count for _, count in bins))
    most = max([1, *(count for _, count in bins)])
    wide = max([0, *(len(label) for label, _ in bins)])
    return [
        f"{label:>{wide}} {count:>11,} {100 * count / total:5.1f} % "
        + "#" * round(count / most * width)
        for label, count in bins
    ]
