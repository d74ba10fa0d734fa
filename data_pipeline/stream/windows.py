"""Open windows in the order of the plan, and the next one ahead of time."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from core.errors import UserError
from data_pipeline.stream.plan import Planner
from data_pipeline.stream.reader import OpenWindow, Store, Window

Position = tuple[int, int, int]  # epoch, window, row in it


class Course:
    """Rows by their number from the start position on, window after window, epoch after epoch.

    Rows may be asked for in ascending order only; a thread plans and fetches the next window while
    the current one is in use.
    """

    def __init__(self, planner: Planner, store: Store, start: Position, *, stop: bool) -> None:
        self._planner, self._store, self._start, self._stop = planner, store, start, stop
        self._windows: deque[tuple[int, OpenWindow]] = deque()  # number of its first row
        self._ahead: _Ahead | None = None
        self.shape = planner.shape

    def first_plan(self) -> Any:
        """The plan of the window the course starts in."""
        if not self._windows:
            epoch, window, row = self._start
            opened = self._open(epoch, window)
            if row > opened.plan.rows:
                raise UserError(
                    f"data position: row {row} of a window of {opened.plan.rows} rows; "
                    "the checkpoint's record is damaged"
                )
            self._windows.append((-row, opened))
        return self._windows[0][1].plan

    def window_range(self, first: int, last: int) -> list[OpenWindow]:
        """The windows that rows [first, last) lie in; windows before `first` are let go."""
        self.first_plan()
        while self._windows[0][0] + self._windows[0][1].plan.rows <= first:
            if len(self._windows) == 1:
                self._append_next()
            self._windows.popleft()
        while self._windows[-1][0] + self._windows[-1][1].plan.rows < last:
            self._append_next()
        return [w for at, w in self._windows if at < last]

    def pieces(self, first: int, last: int) -> list[tuple[OpenWindow, int, int]]:
        """(window, rows [from, to) of it) that make up rows [first, last)."""
        self.window_range(first, last)
        found = []
        for at, window in self._windows:
            begin, end = max(first - at, 0), min(last - at, window.plan.rows)
            if begin < end:
                found.append((window, begin, end))
        return found

    def look_ahead(self) -> None:
        """Starts to plan and fetch the next window, if nobody does yet."""
        if self._ahead is None:
            last = self._windows[-1][1].plan
            following = self._planner.after(last.epoch, last.window)
            self._ahead = _Ahead(self._open, following)
            self._store.prefetch(self._upcoming(*following))

    def release(self) -> None:
        """Lets everything go; rows can be asked for no more."""
        self._windows.clear()
        self._store.release()

    def _upcoming(self, epoch: int, window: int) -> Iterator[Window]:
        while True:
            yield self._planner.window_shards(epoch, window)
            epoch, window = self._planner.after(epoch, window)

    def position(self, row: int) -> Position:
        """Of the row number `row`, which must be in an open window or just after the last."""
        for at, window in self._windows:
            if row - at < window.plan.rows:
                return window.plan.epoch, window.plan.window, row - at
        last = self._windows[-1][1].plan
        return *self._planner.after(last.epoch, last.window), 0

    def _append_next(self) -> None:
        self.look_ahead()
        assert self._ahead is not None
        at, last = self._windows[-1]
        ahead, self._ahead = self._ahead, None
        opened = ahead.result()
        if not opened.plan.rows:
            raise UserError(f"shards {', '.join(opened.plan.shards)}: no sentence to train on")
        self._windows.append((at + last.plan.rows, opened))

    def _open(self, epoch: int, window: int) -> OpenWindow:
        planner = self._planner
        infos = planner.window_shards(epoch, window)
        in_use = [planner.window_shards(w.plan.epoch, w.plan.window) for _, w in self._windows]
        self._store.hold([*in_use, infos])
        plan = planner.plan(epoch, window)
        return OpenWindow(plan, self._store, infos, stop=self._stop)


class _Ahead:
    """One call in a daemon thread: it must not keep a finished run from ending."""

    def __init__(self, call: Callable[..., OpenWindow], arguments: tuple[int, int]) -> None:
        self._value: OpenWindow | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(
            target=self._run, args=(call, arguments), daemon=True, name="plan-ahead"
        )
        self._thread.start()

    def _run(self, call: Callable[..., OpenWindow], arguments: tuple[int, int]) -> None:
        try:
            self._value = call(*arguments)
        except BaseException as error:
            self._error = error

    def result(self) -> OpenWindow:
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._value is not None
        return self._value
