"""Where the time of a step goes, by part, without making a GPU wait."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P, R = ParamSpec("P"), TypeVar("R")
Mark = float | torch.cuda.Event

# What a step is made of; what else a run does between them is `other`.
PARTS = ("data", "forward", "backward", "reduce", "update")


class Stopwatch:
    """Seconds by part; a part lasts from its `switch` to the next one, so parts never overlap.

    On a GPU each switch is an event on the current stream: the time is the device's, including
    what it waits for the host. Elsewhere it is the clock's.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._cuda = device.type == "cuda"
        self._marks: list[tuple[str, Mark]] = []

    def switch(self, part: str) -> str:
        """`part` begins ("": none does); the name of the one that this ends."""
        before = self._marks[-1][0] if self._marks else ""
        self._marks.append((part, self._now()))
        return before

    def timed(self, part: str, function: Callable[P, R]) -> Callable[P, R]:
        """`function` with its calls counted as `part`, and not as what they interrupt."""

        def call(*args: P.args, **more: P.kwargs) -> R:
            before = self.switch(part)
            try:
                return function(*args, **more)
            finally:
                self.switch(before)

        return call

    def lap(self) -> Callable[[], dict[str, float]]:
        """What gives the seconds since the last lap; on a GPU it waits for their end."""
        marks, self._marks = self._marks, []
        return functools.partial(self._seconds, marks)

    def _seconds(self, marks: list[tuple[str, Mark]]) -> dict[str, float]:
        seconds = dict.fromkeys(PARTS, 0.0)
        if self._cuda and marks:
            marks[-1][1].synchronize()
        for (part, start), (_, end) in itertools.pairwise(marks):
            if part:
                seconds[part] += start.elapsed_time(end) / 1e3 if self._cuda else end - start
        return seconds

    def _now(self) -> Mark:
        if not self._cuda:
            return self._clock()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
