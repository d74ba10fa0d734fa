"""Names the rank that hangs or dies and ends the run, so that a requeue can start it again.

A thread of every rank sends a heartbeat to rank 0 over a TCP connection of its own, which depends
on no collective and no store. Rank 0 compares them and tells all ranks whom to blame; a rank that
hears nothing from rank 0, or loses its connection, blames rank 0 by itself. Time is the monotonic
clock of whoever listens, so a clock that jumps changes nothing.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import json
import os
import secrets
import selectors
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.console import last_words
from core.errors import TryAgain
from core.processes import go_on_within, in_background
from pretrain import distributed
from pretrain.distributed import REQUEUE_EXIT_CODE, World
from pretrain.machine import Launchers, launchers

SLOW = 2.5  # start, first step, checkpoint and evaluation may take this many times the bound
_HELD = 5  # times the bound, after which one alone whose interpreter a call holds ends itself
_GRACE = 1.0  # seconds to wait for the end of a process, which explains an error better
_TO_WRITE = 5.0  # seconds for the stacks
_WAITS_IN = ("distributed_c10d.py", "pretrain/distributed.py", "deepspeed/comm/")
_ROOT = str(Path(__file__).resolve().parent.parent)


class Progress:
    """What this rank is doing; `now` is called by the training loop and read by the watchdog."""

    def __init__(self) -> None:
        self.state: tuple[int, int, str, float] = (0, 0, "start", SLOW)

    def now(self, step: int, what: str, factor: float = 1.0) -> None:
        """Step `step` of the run is at `what`, which may take `factor` times the bound."""
        self.state = (self.state[0] + 1, step, what, factor)


@dataclass
class _Peer:
    """What one rank knows of another. Times are this process's monotonic clock."""

    rank: int
    host: str
    pid: int
    space: str
    connection: _Connection | None = None
    beat: tuple[int, int, str, float] = (0, 0, "start", SLOW)
    at: str = ""
    waits: bool = False
    heard: float = 0.0  # when it last spoke
    moved: float = 0.0  # when it last made progress
    error: str = ""
    failed: float = 0.0  # when the error came
    gone: bool = False  # its process ended without a word
    done: bool = False  # it said that it ends

    def take(self, message: dict[str, Any]) -> None:
        self.heard = time.monotonic()
        beat = tuple(message["beat"])
        if beat != self.beat:
            self.beat, self.moved = beat, self.heard
        self.at, self.waits = message["at"], message["waits"]

    def fail(self, error: str) -> None:
        if error and not self.error:
            self.error, self.failed = error, time.monotonic()

    def name(self) -> str:
        return f"rank {self.rank} on {self.host} (pid {self.pid})"

    def place(self) -> str:
        _, step, what, _ = self.beat
        return f"step {step:,}, in {what}" + (f" at {self.at}" if self.at else "")


class _Connection:
    """Lines of JSON over a socket. `lost` once the other side is gone."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(5)
        self.sock = sock
        self.lost = False
        self._full = False
        self._buffer = b""
        self._sending = threading.Lock()

    def send(self, message: dict[str, Any] | bytes) -> None:
        """`message`, or a line that was made of one, which goes to many."""
        line = message if isinstance(message, bytes) else _line(message)
        with self._sending:
            if not self._full:
                try:
                    self.sock.sendall(line)
                except OSError:
                    self._full = True  # it is stopped, or gone: reading tells which

    def receive(self) -> list[dict[str, Any]]:
        """The whole lines that have come. Called when the socket is readable."""
        try:
            data = self.sock.recv(1 << 16)
        except TimeoutError:
            return []
        except OSError:
            data = b""
        self.lost = not data
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def greeting(self, secret: str) -> dict[str, Any] | None:
        """The first line of one who knows the secret, without it; {} while it has not come; None
        of a stranger."""
        try:
            lines = self.receive()
            if not lines:
                return None if self.lost or len(self._buffer) > 4096 else {}
            return lines[0] if lines[0].pop("secret") == secret else None
        except (AttributeError, LookupError, RecursionError, TypeError, ValueError):
            return None


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


class Watchdog:
    """Started by every rank together; `close` before the process ends.

    seconds: a rank without progress for so long (times the factor of what it is doing) ends the
    run with exit code 85 on every rank that can still run. Stacks are written to
    `run_dir/stack-rank-N.txt`. began_under: the launchers of this process when
    it began (`machine.py`), whose end is SIGTERM to it; by default those of now.
    """

    def __init__(
        self,
        world: World,
        seconds: float,
        run_dir: Path,
        progress: Progress,
        began_under: list[int] | None = None,
    ) -> None:
        self._world = world
        self._seconds = seconds
        self._run_dir = run_dir
        self._progress = progress
        # Of more ranks rank 0 would hear, in the process that trains, over 500 a second.
        self._interval = min(max(1.0, world.size / 500), seconds / 10)
        self._main = threading.main_thread().ident
        if began_under is None:
            began_under = launchers()
        self._launchers = Launchers(began_under if world.launcher != "alone" else [])
        self._closed = threading.Event()
        self._judged = threading.Event()
        self._blamed = -1
        self._selector = selectors.DefaultSelector()
        self._me = _Peer(world.rank, socket.gethostname(), os.getpid(), _pid_space())
        self._me.heard = self._me.moved = time.monotonic()
        self._peers: dict[int, _Peer] = {world.rank: self._me}
        self._meet()
        self._thread = threading.Thread(target=self._loop, name="watchdog", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------------- the trainer

    def failed(self, error: BaseException) -> None:
        """An exception ends this rank. Returns if it is the first cause, which is to be shown; if
        another rank died or failed before, that one is named and the process ends in here."""
        text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        self._me.fail(text)
        for peer in self._others():
            peer.connection.send({"error": text})
        if self._judged.wait(30) and self._blamed != self._world.rank:
            self._thread.join()

    def close(self, code: int, error: str = "") -> None:
        """This rank leaves by itself with `code`; `error` is what the user has to mend."""
        go_on_within(self._seconds)  # nobody watches it from here on
        for peer in self._others():
            peer.connection.send({"bye": code, "error": error})
        self._closed.set()
        self._thread.join(10)
        faulthandler.cancel_dump_traceback_later()

    # -------------------------------------------------------------------------------- connecting

    def _meet(self) -> None:
        """(all ranks) Connect every rank to rank 0."""
        world, me = self._world, self._me
        if world.size == 1:
            return
        hello = {"rank": me.rank, "host": me.host, "pid": me.pid, "space": me.space}
        if world.is_main:
            dual = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if dual else socket.AF_INET
            secret = secrets.token_hex(16)
            with socket.create_server(
                ("", 0), family=family, dualstack_ipv6=dual, backlog=world.size + 64
            ) as listener:
                distributed.from_main(world, (listener.getsockname()[1], secret, hello))
                with distributed.errors_shared(world):
                    self._admit(listener, secret)
            return
        port, secret, main = distributed.from_main(world, None)
        address = (distributed.main_address(), port)
        with distributed.errors_shared(world):
            try:
                sock = socket.create_connection(address, timeout=60)
            except OSError as error:
                raise TryAgain(
                    f"the watchdog of {me.name()} cannot reach rank 0 at {address[0]}:{port}: "
                    f"{error}; without it: watchdog_seconds: 0"
                ) from None
            connection = _Connection(sock)
            connection.send(hello | {"secret": secret})
            self._add(_Peer(**main, connection=connection))

    def _admit(self, listener: socket.socket, secret: str) -> None:
        """Until all ranks are here. Whoever does not begin with the secret is dropped, and who
        says nothing keeps nobody waiting."""
        unknown: dict[socket.socket, _Connection] = {}
        until = time.monotonic() + 120
        with selectors.DefaultSelector() as ready:

            def drop(sock: socket.socket) -> _Connection:
                ready.unregister(sock)
                return unknown.pop(sock)

            ready.register(listener, selectors.EVENT_READ)
            while len(self._peers) < self._world.size:
                found = ready.select(until - time.monotonic())
                if time.monotonic() > until:
                    missing = sorted(set(range(self._world.size)) - set(self._peers))
                    raise TryAgain(
                        f"the watchdog of rank 0 waited in vain for ranks {missing}"
                    ) from None
                for sock in [key.fileobj for key, _ in found]:
                    if sock is listener:
                        with contextlib.suppress(OSError):  # gone again
                            new = listener.accept()[0]
                            ready.register(new, selectors.EVENT_READ)
                            unknown[new] = _Connection(new)
                        if len(unknown) > self._world.size + 64:
                            drop(next(iter(unknown))).sock.close()
                    elif sock in unknown:
                        hello = unknown[sock].greeting(secret)
                        if hello:
                            until = time.monotonic() + 120
                            self._add(_Peer(**hello, connection=drop(sock)))
                        elif hello is None:
                            drop(sock).sock.close()
            for sock in unknown:
                sock.close()

    def _add(self, peer: _Peer) -> None:
        self._peers[peer.rank] = peer
        peer.heard = peer.moved = time.monotonic()
        sock = peer.connection.sock
        self._selector.register(sock, selectors.EVENT_READ, peer)
        # A forked data worker that held the socket would hide this process's death.
        os.register_at_fork(after_in_child=sock.close)

    # ---------------------------------------------------------------------------------- the loop

    def _loop(self) -> None:
        beat_at = judge_at = 0.0
        ran_at = time.monotonic()
        while not self._closed.is_set():
            if time.monotonic() >= beat_at:
                beat_at = time.monotonic() + self._interval
                self._beat()
            for key, _ in self._selector.select(self._interval / 2):
                self._read(key.data)
            ran_at, away = time.monotonic(), time.monotonic() - ran_at
            if away > 5 * self._interval:
                # Nor, perhaps, did the others run: a job may be suspended and go on.
                for peer in self._peers.values():
                    peer.heard = min(peer.heard + away, ran_at)
                    peer.moved = min(peer.moved + away, ran_at)
            # Not at every heartbeat: those of N ranks would cost N looks at N of them.
            if time.monotonic() >= judge_at and not self._judged.is_set():
                judge_at = time.monotonic() + self._interval / 2
                self.judge()

    def _beat(self) -> None:
        at, waits = _main_frame(self._main)
        message = {"beat": self._progress.state, "at": at, "waits": waits}
        self._me.take(message)
        line = _line(message)
        for peer in self._others():
            peer.connection.send(line)
        # Where a call holds the interpreter, this thread starves too, which other ranks hear.
        # faulthandler's needs nothing, but does not know a job that was suspended for so long.
        if self._world.size == 1:
            with contextlib.suppress(RuntimeError):  # where no more threads can be begun
                faulthandler.dump_traceback_later(_HELD * self._bound(self._me), exit=True, file=2)
        if self._launchers.gone():
            self._launchers = Launchers([])
            last_words(f"the launcher of {self._me.name()} is gone: stopping")
            os.kill(os.getpid(), signal.SIGTERM)

    def _read(self, peer: _Peer) -> None:
        for message in peer.connection.receive():
            if "beat" in message:
                peer.take(message)
            elif "line" in message:
                self._end(**message)
            elif message.get("bye") == 1 or "bye" not in message:
                peer.fail(message["error"])
            else:
                peer.done = True
                if message["error"]:
                    self._blame(peer, f"{peer.name()}: {message['error']}", message["bye"], True)
        if peer.connection.lost:
            self._selector.unregister(peer.connection.sock)
            peer.gone = not peer.done

    def judge(self) -> None:
        """End the run if a rank is gone, has failed or stands still."""
        now, everyone, main = time.monotonic(), list(self._peers.values()), self._peers[0]
        gone = next((p for p in everyone if p.gone), None)
        failed = min((p for p in everyone if p.error), key=lambda p: p.failed, default=None)
        if gone is not None:
            self._blame(gone, f"{gone.name()} died at {gone.place()}")
        elif self._world.is_main or main.done:
            if failed is not None:
                # The end of a process explains the errors of others, and may be seen after them.
                if now - failed.failed > _GRACE:
                    _, step, what, _ = failed.beat
                    line = f"{failed.name()} failed at step {step:,}, in {what}: {failed.error}"
                    self._blame(failed, line)
            elif any(now - p.moved > self._bound(p) for p in everyone if not p.done):
                self._blame_hang([p for p in everyone if not p.done], now)
        elif now - main.heard > self._bound(main) + 3 * self._interval:
            # Rank 0 judges all others, and the others judge whether rank 0 still speaks.
            line = f"{main.name()} is silent for {now - main.heard:.0f} s: {main.place()}"
            self._blame(main, line, stopped=True)

    def _blame_hang(self, peers: list[_Peer], now: float) -> None:
        """Name the silent one, else the one that waits for nobody, else the one farthest behind."""
        silent = [p for p in peers if now - p.heard > max(5 * self._interval, self._seconds / 2)]
        working = [p for p in peers if not p.waits]
        peer = min(silent or working or peers, key=lambda p: p.beat)
        if silent:
            what = f"is silent for {now - peer.heard:.0f} s"
        else:
            what = f"made no progress for {now - peer.moved:.0f} s"
        if not silent and not working:
            what = f"and all others wait in collectives and {what}"
        self._blame(peer, f"{peer.name()} {what}: {peer.place()}", stopped=bool(silent))

    def _bound(self, peer: _Peer) -> float:
        return self._seconds * peer.beat[3]

    # ----------------------------------------------------------------------------------- the end

    def _blame(
        self,
        peer: _Peer,
        line: str,
        code: int = REQUEUE_EXIT_CODE,
        known: bool = False,
        stopped: bool = False,
    ) -> None:
        verdict = {
            "line": line, "code": code, "known": known, "rank": peer.rank, "pid": 0, "place": "",
        }  # fmt: skip
        if stopped:
            verdict |= {"pid": peer.pid, "place": f"{peer.host} {peer.space}"}
        if self._world.is_main:
            for other in self._others():
                other.connection.send(verdict)
        self._end(**verdict)

    def _end(self, line: str, code: int, known: bool, rank: int, pid: int, place: str) -> None:
        """Rank `rank` is to blame: write the stacks and end this process with `code`.

        known: a line for the user, without stacks. pid, place: a stopped process, which the ranks
        of its own host end.
        """
        self._blamed = rank
        self._judged.set()
        if rank == self._world.rank and self._me.error:
            return  # the program shows its own error
        if known:
            if self._closed.wait(5):
                return  # all ranks met it: each says it by itself
            last_words(f"error: {line}", dated=False)
        else:
            # The disk may be what stands still.
            stacks = in_background(functools.partial(self._write_stacks, line), "stacks")
            last_words(f"watchdog: {line}; exit code {code}, start again")
            if stacks is not None:
                stacks.join(_TO_WRITE)
        # Time for rank 0's word to arrive before its connections end, and for a last stack.
        time.sleep(2 * self._interval)
        if place == f"{self._me.host} {self._me.space}" and pid != self._me.pid:
            # A stopped process would keep its GPU memory and the lock of the run folder.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        os._exit(code)

    def _write_stacks(self, line: str) -> None:
        path = self._run_dir / f"stack-rank-{self._world.rank}.txt"
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
            with path.open("x") as file:
                print(line, file=file, flush=True)
                faulthandler.dump_traceback(file, all_threads=True)

    def _others(self) -> list[_Peer]:
        return [p for p in self._peers.values() if p.connection and not p.connection.lost]


def _main_frame(ident: int | None) -> tuple[str, bool]:
    """(innermost line of this project in the main thread, whether it waits in a collective)."""
    frame, at, waits = sys._current_frames().get(ident), "", False
    while frame is not None:
        file = frame.f_code.co_filename
        waits = waits or any(part in file for part in _WAITS_IN)
        if not at and file.startswith(_ROOT) and "site-packages" not in file:
            at = f"{os.path.relpath(file, _ROOT)}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return at, waits


def _pid_space() -> str:
    """Two processes of one space and host can end each other by pid."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return secrets.token_hex(8)
