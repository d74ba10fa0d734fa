"""Open windows in the order of the plan, and the next one ahead of time."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from core.errors import UserError
from core.processes import in_background
from data_pipeline.stream.plan import Planner, WindowPlan
from data_pipeline.stream.reader import OpenWindow, Store, Window
from data_pipeline.stream.sharing import SharedPlans

Place = tuple[int, int, int]  # epoch, window, row in it


@dataclass(frozen=True)
class RowRange:
    """Rows [first, last) of an open window."""

    window: OpenWindow
    first: int
    last: int

    @property
    def plan(self) -> WindowPlan:
        return self.window.plan

    @property
    def places(self) -> slice:
        """Of its sequences in the plan."""
        starts = self.plan.row_starts
        return slice(int(starts[self.first]), int(starts[self.last]))

    @property
    def sequences(self) -> int:
        return self._total(self.plan.row_starts)

    @property
    def predictions(self) -> int:
        return self._total(self.plan.row_predictions)

    @property
    def tokens(self) -> int:
        return self._total(self.plan.row_tokens)

    def _total(self, running_sums: np.ndarray) -> int:
        return int(running_sums[self.last] - running_sums[self.first])


class WindowIterator:
    """Rows by their number from `start` on, window after window, epoch after epoch.

    What is let go does not come back; a thread plans and fetches the next window while the current
    one is in use. `stop`: a damaged record is an error, not an empty place. `shared`: plans that
    other processes have a part in.
    """

    def __init__(
        self,
        planner: Planner,
        store: Store,
        start: Place,
        *,
        stop: bool,
        shared: SharedPlans | None = None,
    ) -> None:
        self._planner, self._store, self._start, self._stop = planner, store, start, stop
        self._shared = shared
        self._windows: deque[tuple[int, OpenWindow]] = deque()  # number of its first row
        self._ahead: Future[OpenWindow] | None = None

    def first_plan(self) -> WindowPlan:
        """The plan of the window it starts in."""
        if not self._windows:
            epoch, window, row = self._start
            if window >= self._planner.windows:
                raise UserError(
                    f"data position: window {window} of {self._planner.windows}; the checkpoint's "
                    "record is damaged"
                )
            opened = self._open(epoch, window)
            if row > opened.plan.rows:
                raise UserError(
                    f"data position: row {row} of a window of {opened.plan.rows} rows; "
                    "the checkpoint's record is damaged"
                )
            self._windows.append((-row, opened))
        return self._windows[0][1].plan

    def ranges(self, first: int, last: int) -> list[RowRange]:
        """Rows [first, last), window by window; windows are opened as they are needed."""
        self.first_plan()
        while self._end() < last:
            self._append_next()
        found = []
        for at, window in self._windows:
            begin, end = max(first - at, 0), min(last - at, window.plan.rows)
            if begin < end:
                found.append(RowRange(window, begin, end))
        return found

    def let_go(self, row: int) -> None:
        """Rows before the number `row` are not asked for any more."""
        self.first_plan()
        while self._windows[0][0] + self._windows[0][1].plan.rows <= row:
            if len(self._windows) == 1:
                self._append_next()
            self._windows.popleft()

    def place(self, row: int) -> Place:
        """Of the row number `row`, which must be in an open window or just after the last."""
        for at, window in self._windows:
            if row - at < window.plan.rows:
                return window.plan.epoch, window.plan.window, row - at
        last = self._windows[-1][1].plan
        return *self._planner.after(last.epoch, last.window), 0

    def look_ahead(self) -> None:
        """Starts to plan and fetch the next window, if nobody does yet."""
        if self._ahead is None:
            last = self._windows[-1][1].plan
            following = self._planner.after(last.epoch, last.window)
            self._ahead = Future()
            run = functools.partial(self._run_ahead, self._ahead, following)
            in_background(run, "plan-ahead")
            self._store.prefetch(self._upcoming(*following))

    def release(self) -> None:
        """Lets everything go; rows can be asked for no more."""
        self._windows.clear()
        self._store.close()
        self._shared = None

    def _end(self) -> int:
        at, window = self._windows[-1]
        return at + window.plan.rows

    def _upcoming(self, epoch: int, window: int) -> Iterator[Window]:
        while True:
            yield self._planner.window_shards(epoch, window)
            epoch, window = self._planner.after(epoch, window)

    def _append_next(self) -> None:
        self.look_ahead()
        assert self._ahead is not None
        ahead, self._ahead = self._ahead, None
        opened = ahead.result()
        opened.plan.require_rows()
        self._windows.append((self._end(), opened))

    def _open(self, epoch: int, window: int) -> OpenWindow:
        planner = self._planner
        infos = planner.window_shards(epoch, window)
        in_use = [planner.window_shards(w.plan.epoch, w.plan.window) for _, w in self._windows]
        self._store.hold([*in_use, infos])
        plan = (self._shared or planner).plan(epoch, window)
        return OpenWindow(plan, self._store, infos, planner.vocab_size, stop=self._stop)

    def _run_ahead(self, ahead: Future[OpenWindow], place: tuple[int, int]) -> None:
        try:
            ahead.set_result(self._open(*place))
        except BaseException as error:
            ahead.set_exception(error)
            return
        if (shared := self._shared) is not None:
            shared.plan_ahead(*self._planner.after(*place))
