"""Work that the ranks do beside training, and rank 0 completes: how checkpoints get to disk.

The threads use no collective, so they cannot meet those of the training step: each rank's thread
posts what it has done to the rendezvous store, rank 0's reads the posts. That it has ended is a
vote of the main threads, once a step, so all ranks learn it at the same step.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from core.errors import UserError
from pretrain import distributed
from pretrain.distributed import Board, Vote, World

_LOOK_SECONDS = 0.02  # between looks of rank 0's thread at the posts


class Writer:
    """At most one piece of work under way; its results are plain data that JSON holds."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._vote = Vote(world)
        # Runs of one process group share the store.
        self._board = Board(world, f"writer-{distributed.from_main(world, time.time_ns())}")
        self._thread: threading.Thread | None = None
        self._started = 0
        self._result: dict[str, Any] = {}

    @property
    def busy(self) -> bool:
        """Whether work was started whose end is not agreed yet; the same on all ranks."""
        return self._thread is not None

    def start(
        self,
        part: Callable[[], Any],
        complete: Callable[[list[Any]], Any],
        discard: Callable[[], None],
    ) -> None:
        """(all ranks) `part()` on a thread of every rank; when all have returned, on rank 0's
        `complete(results by rank)`, or `discard()` if any of these failed."""
        assert not self.busy
        self._started += 1
        # A daemon: a process that is told to die does not wait for its disk.
        self._thread = threading.Thread(
            target=self._run, args=(part, complete, discard), name="writer", daemon=True
        )
        self._thread.start()

    def poll(self) -> tuple[Any, str | None] | None:
        """(all ranks) Once a step: (result of `complete`, None) or (None, what failed) when the
        work has ended, None before. RuntimeError on every rank for an error of the program."""
        if not self.busy:
            return None
        if self._vote.cast(int(self._world.is_main and self._thread.is_alive())) != 0:
            return None
        return self.wait()

    def wait(self) -> tuple[Any, str | None] | None:
        """(all ranks) The same, when it has ended; None if there was nothing under way."""
        if not self.busy:
            return None
        self._vote.collect()
        self._thread.join()
        self._thread = None
        result = distributed.from_main(self._world, self._result)
        if "broken" in result:
            raise RuntimeError(result["broken"])
        return result.get("done"), result.get("failed")

    def join(self, seconds: float) -> None:
        """Wait for this rank's thread alone, on the way out after an error."""
        if self._thread is not None:
            self._thread.join(seconds)

    def _run(
        self,
        part: Callable[[], Any],
        complete: Callable[[list[Any]], Any],
        discard: Callable[[], None],
    ) -> None:
        note = _attempt(part)
        if not self._world.is_main:
            self._board.post(self._key(self._world.rank), note)
            return
        notes = [note] + [self._posted(rank) for rank in range(1, self._world.size)]
        bad = [n for kind in ("broken", "failed") for n in notes if kind in n]
        if not bad:
            self._result = _attempt(lambda: complete([n["done"] for n in notes]))
            bad = [self._result] if "done" not in self._result else []
        if bad:
            self._result = bad[0]
            discard()

    def _posted(self, rank: int) -> Any:
        while (note := self._board.take(self._key(rank))) is None:
            time.sleep(_LOOK_SECONDS)
        return note

    def _key(self, rank: int) -> str:
        return f"{self._started}/{rank}"


def _attempt(call: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"done": call()}
    except UserError as error:
        return {"failed": str(error)}
    except OSError as error:
        return {"failed": f"{error.filename or 'I/O'}: {error.strerror or error}"}
    except BaseException:
        return {"broken": traceback.format_exc()}
