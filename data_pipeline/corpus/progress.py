"""How far the job is, on stderr."""

from __future__ import annotations

import sys
import time


class Progress:
    """One line on stderr: share done, rate, time left. Rank 0 only."""

    def __init__(self, label: str, total: int, before: int, unit: str = "MB") -> None:
        self.label, self.total, self.done, self.before = label, total, before, before
        self.documents = 0
        self.problems = 0
        self._start = time.monotonic()
        self._terminal = sys.stderr.isatty()
        self._last = self._start if not self._terminal else 0.0

    def add(self, amount: int, documents: int = 0, problems: int = 0) -> None:
        self.done += amount
        self.documents += documents
        self.problems += problems
        now = time.monotonic()
        if now - self._last >= (0.5 if self._terminal else 10.0):
            self._last = now
            self._print("\r" if self._terminal else "", "" if self._terminal else "\n")

    def close(self) -> None:
        self._print("\r" if self._terminal else "", "\n")

    def _print(self, before: str, after: str) -> None:
        seconds = max(1e-3, time.monotonic() - self._start)
        rate = (self.done - self.before) / seconds
        left = (self.total - self.done) / rate if rate > 0 else float("inf")
        parts = [
            f"{self.label} {100 * self.done / max(1, self.total):5.1f} %",
            f"{self.done / 1e6:.1f}/{self.total / 1e6:.1f} MB",
            f"{rate / 1e6:.2f} MB/s",
        ]
        if self.documents:
            parts.append(f"{self.documents:,} documents")
        if self.problems:
            parts.append(f"{self.problems} broken inputs")
        parts.append(f"{clock(left)} left" if self.done < self.total else f"in {clock(seconds)}")
        line = " | ".join(parts)
        print(f"{before}{line:<100}" if before else line, end=after, file=sys.stderr, flush=True)


def clock(seconds: float) -> str:
    """h:mm:ss, or m:ss under an hour."""
    if seconds == float("inf"):
        return "?"
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
