"""Work that the ranks do beside training, and rank 0 completes: how checkpoints get to disk.

The threads have a gloo group of their own, so they cannot meet the collectives of the training
step, and a checkpoint is still written when the launcher, and its rendezvous store, is gone. That
the work has ended is a vote of the main threads, so all learn it at the same step.
"""

from __future__ import annotations

import functools
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from core.errors import TryAgain, UserError
from core.processes import in_background
from pretrain import distributed
from pretrain.distributed import Vote, World

Part = TypeVar("Part")
Whole = TypeVar("Whole")


@dataclass(frozen=True)
class Failed:
    """Why there is no result.

    kind: `broken`, an error of the program; `lost`, a rank is gone; `failed`, of the user or disk.
    """

    why: str
    kind: str = "failed"


class Writer(Generic[Part, Whole]):
    """At most one piece of work under way; its results can be pickled."""

    def __init__(self, world: World, threads: World | None = None) -> None:
        """`threads`: the world of the threads; by default `distributed.apart(world)`."""
        self._world = world
        self._vote = Vote(world)
        self._threads = threads or distributed.apart(world)
        self._begun = False
        self._thread: threading.Thread | None = None
        self._result: Whole | Failed = Failed("nothing was begun")

    @property
    def busy(self) -> bool:
        """Whether work was started whose end is not agreed yet; the same on all ranks."""
        return self._begun

    def start(
        self,
        part: Callable[[], Part],
        complete: Callable[[list[Part]], Whole],
        discard: Callable[[], None],
    ) -> None:
        """(all ranks) `part()` on a thread of every rank; when all have returned, on rank 0's
        `complete(results by rank)`, or `discard()` if any of these failed."""
        assert not self.busy
        self._result = Failed("the end of the writing was not seen")
        self._begun = True
        run = functools.partial(self._run, part, complete, discard)
        self._thread = in_background(run, "writer")

    def poll(self) -> Whole | Failed | None:
        """(all ranks) Once a step: the result of `complete`, or what failed, when the work has
        ended, None before. RuntimeError on every rank for an error of the program."""
        if not self.busy:
            return None
        at_work = self._thread is not None and self._thread.is_alive()
        if self._vote.cast(int(self._world.is_main and at_work)) != 0:
            return None
        return self.wait()

    def wait(self) -> Whole | Failed | None:
        """(all ranks) The same, when it has ended; None if there was nothing under way."""
        if not self.busy:
            return None
        self._vote.collect()
        if self._thread is not None:
            self._thread.join()
        self._begun, self._thread = False, None
        result = distributed.from_main(self._world, self._result)
        if isinstance(result, Failed) and result.kind == "broken":
            raise RuntimeError(result.why)
        if isinstance(result, Failed) and result.kind == "lost":
            # A gloo group that has failed once fails for ever; a start makes another.
            raise TryAgain(result.why)
        return result

    def join(self, seconds: float) -> None:
        """Wait for this rank's thread alone, on the way out after an error."""
        if self._thread is not None:
            self._thread.join(seconds)

    def _run(
        self,
        part: Callable[[], Part],
        complete: Callable[[list[Part]], Whole],
        discard: Callable[[], None],
    ) -> None:
        own = _attempt(part)
        try:
            parts = distributed.to_main(self._threads, own)
        except RuntimeError as error:  # another rank is gone
            first = str(error).partition("\n")[0]
            why = f"the ranks lost each other while writing a checkpoint: {first}"
            parts = [Failed(why, "lost")]
        if not self._world.is_main:
            return
        bad = [p for p in parts if isinstance(p, Failed)]
        failed = [p for kind in ("broken", "lost", "failed") for p in bad if p.kind == kind]
        result = failed[0] if failed else _attempt(lambda: complete(parts))
        if isinstance(result, Failed):
            _attempt(discard)
        self._result = result


def _attempt(call: Callable[[], Whole]) -> Whole | Failed:
    try:
        return call()
    except UserError as error:
        return Failed(str(error))
    except OSError as error:
        return Failed(f"{error.filename or 'I/O'}: {error.strerror or error}")
    except BaseException:
        return Failed(traceback.format_exc(), "broken")
