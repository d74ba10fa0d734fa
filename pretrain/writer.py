"""Work that the ranks do beside training, and rank 0 completes: how checkpoints get to disk.

The threads have a gloo group of their own, so they cannot meet the collectives of the training
step, and a checkpoint is still written when the launcher, and its rendezvous store, is gone. That
the work has ended is a vote of the main threads, so all learn it at the same step.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from typing import Any

from core.errors import TryAgain, UserError
from pretrain import distributed
from pretrain.distributed import Vote, World


class Writer:
    """At most one piece of work under way; its results are plain data that JSON holds."""

    def __init__(self, world: World, threads: World | None = None) -> None:
        """`threads`: the world of the threads; by default `distributed.apart(world)`."""
        self._world = world
        self._vote = Vote(world)
        self._threads = threads or distributed.apart(world)
        self._thread: threading.Thread | None = None
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
        self._result = {"failed": "the end of the writing was not seen"}
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
        if "lost" in result:
            # A gloo group that has failed once fails for ever; a start makes another.
            raise TryAgain(result["lost"])
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
        try:
            notes = distributed.to_main(self._threads, note)
        except RuntimeError as error:  # another rank is gone
            first = str(error).partition("\n")[0]
            notes = [{"lost": f"the ranks lost each other while writing a checkpoint: {first}"}]
        if not self._world.is_main:
            return
        bad = [n for kind in ("broken", "lost", "failed") for n in notes if kind in n]
        result = bad[0] if bad else _attempt(lambda: complete([n["done"] for n in notes]))
        if "done" not in result:
            _attempt(discard)
        self._result = result


def _attempt(call: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"done": call()}
    except UserError as error:
        return {"failed": str(error)}
    except OSError as error:
        return {"failed": f"{error.filename or 'I/O'}: {error.strerror or error}"}
    except BaseException:
        return {"broken": traceback.format_exc()}
