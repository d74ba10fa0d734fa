"""The door to files that may be elsewhere: each kind of place gives the same bytes or one line."""

from __future__ import annotations

import contextlib
import datetime
import importlib
import io
import ipaddress
import itertools
import multiprocessing
import netrc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from core.commands import dispatch
from core.errors import TryAgain, UserError
from core.urls import (
    NotThere,
    Patience,
    Refused,
    TransferError,
    is_url,
    join,
    local_path,
    open_file,
    persist,
    read,
    transfer,
)
from tests.data_pipeline.stream.servers import Behaviour, http_server

QUICK = Patience(timeout=0.5, retries=2, pause=0.001)
AMPLE = 60.0  # seconds, of one try whose bound is not what is tested
DATA = bytes(range(256)) * 4000


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, Behaviour]]:
    (tmp_path / "a file").mkdir()
    (tmp_path / "file").write_bytes(DATA)
    with http_server(tmp_path) as pair:
        yield pair


@pytest.mark.parametrize("place", ["http://h/d", "HTTP://h/d", "pipe:cat /d", "s3://b/d", "GS://b"])
def test_what_has_to_be_fetched_is_told_by_its_scheme(place: str) -> None:
    assert is_url(place)
    assert join(place, "x") == join(place + "/", "x") == f"{place}/x"


@pytest.mark.parametrize("place", ["data/x", "/data/x", "file:///data/x", "http:/h/x", "a:b"])
def test_what_has_a_path_is_read_in_place(place: str) -> None:
    assert not is_url(place) and not is_url(Path(place))
    assert local_path("file:///a%20b/c") == Path("/a b/c") and local_path("x/y") == Path("x/y")
    with pytest.raises(UserError, match="three slashes"):
        local_path("file://host/x")


@pytest.mark.parametrize(
    ("room", "words"),
    [
        ("pretrain", ["export", "run", "URL"]),
        ("pretrain", ["import", "run", "URL"]),
        ("pretrain", ["report", "run", "--html", "URL"]),
        ("finetune", ["report", "run", "--out", "URL"]),
        ("finetune", ["predict", "run", "run", "--out", "URL"]),
        ("data_pipeline", ["fetch", "wikipedia", "20260101", "--out", "URL"]),
        ("data_pipeline", ["prepare", "--config", "run", "--rejects", "URL"]),
    ],
)
def test_no_command_writes_to_a_url(
    room: str,
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    table = importlib.import_module(f"{room}.__main__").COMMANDS
    given = ["s3://bucket/x" if word == "URL" else word for word in words]
    assert dispatch(room, table, given) == 2
    assert capsys.readouterr().err == "error: s3://bucket/x: a path on this machine is expected\n"
    assert not list(tmp_path.iterdir())


def test_every_kind_of_place_gives_the_same_bytes(
    server: tuple[str, Behaviour], tmp_path: Path
) -> None:
    url, path = server[0], tmp_path / "file"
    loud = url.replace("http:", "HTTP:")
    for place in (path, str(path), f"file://{path}", f"{url}/file", f"{loud}/file"):
        assert read(place, QUICK) == DATA
    assert read(f"pipe:cat {path}", QUICK) == DATA
    with open_file(f"{url}/file", QUICK) as file:
        file.seek(1000)
        assert file.read() == DATA[1000:]


def test_no_program_is_needed_for_http(
    server: tuple[str, Behaviour], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert read(f"{server[0]}/file", QUICK) == DATA


def test_a_missing_file_is_not_there(server: tuple[str, Behaviour], tmp_path: Path) -> None:
    for place in (f"{server[0]}/gone", str(tmp_path / "gone"), f"file://{tmp_path}/gone"):
        with pytest.raises(NotThere, match=f"^{place}: "):
            read(place, QUICK)
    assert server[1].counts["gone"] == 1
    with pytest.raises(UserError, match="Is a directory"):
        read(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="pipe: not a regular file"):
        read(tmp_path / "pipe")


def test_an_origin_that_does_not_answer_may_do_so_later(server: tuple[str, Behaviour]) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        with pytest.raises(TryAgain, match=r"Connection refused.* \(given up after 3 tries\)"):
            read(f"http://127.0.0.1:{bound.getsockname()[1]}/file", QUICK)
    server[1].faults["file"] = ["503", "drop", "503"]
    with pytest.raises(TryAgain, match="HTTP 503"):
        read(f"{server[0]}/file", QUICK)
    server[1].faults["file"] = ["503", "drop"]
    assert read(f"{server[0]}/file", QUICK) == DATA


def test_a_part_that_was_not_asked_for_is_not_the_whole(server: tuple[str, Behaviour]) -> None:
    url, behaviour = server
    behaviour.faults["file"] = ["part", "part"]
    assert read(f"{url}/file", QUICK) == DATA
    behaviour.faults["file"] = ["all of it"]
    assert read(f"{url}/file", QUICK) == DATA and behaviour.counts["file"] == 4
    behaviour.faults["file"] = ["part"] * 3
    with pytest.raises(TryAgain, match="a part where the whole was asked for"):
        read(f"{url}/file", QUICK)


@pytest.mark.parametrize(
    "place",
    [
        "http://h:port/x",
        "nowhere://x/y",
        "pipe:/nowhere/program",
        "http://",
        "pipe:\0",
        "file:///\0",
        "zip://x::file:///etc/passwd",
        "http://127.0.0.1:65536/x",
        f"https://127.0.0.1:{10**20}/x",
        "http://127.0.0.1:-1/x",
    ],
)
def test_a_place_that_can_never_be_is_the_users_to_mend(place: str) -> None:
    with pytest.raises(UserError, match=f"^{place}: ") as caught:
        read(place, QUICK)
    assert not isinstance(caught.value, TryAgain)


def test_a_chain_of_fsspec_is_not_followed(server: tuple[str, Behaviour], tmp_path: Path) -> None:
    """What stands behind `::` would be read whole, or kept in a folder of its choosing."""
    url, behaviour = server
    for kind in ("reference", "zip", "tar", "dir", "s3"):
        place = f"{kind}://x::filecache::{url}/file"
        with pytest.raises(UserError, match=f"^{place}: a chain of fsspec's") as caught:
            read(place, QUICK)
        assert caught.value.code == 2
    assert not behaviour.requests


def test_an_origin_sends_on_by_http_alone(server: tuple[str, Behaviour], tmp_path: Path) -> None:
    url, behaviour = server
    (tmp_path / "moved").touch()
    why = "(unknown url type: ftp|not allowed|port 9+: there is none)"
    own = url.rpartition(":")[2]
    elsewhere = f"http://127.0.0.1:{10**20 - 1}"
    for place in (f"ftp://127.0.0.1:{own}/x", f"file://{tmp_path}/file", elsewhere):
        behaviour.faults["moved"] = [f"to {place}"] * 3
        with pytest.raises(UserError, match=f"^{url}/moved: .*{why}") as caught:
            read(f"{url}/moved", QUICK)
        assert caught.value.code == 2
    behaviour.faults["moved"] = [f"to {url}/file"]
    assert read(f"{url}/moved", QUICK) == DATA


def test_an_origin_that_drips_is_given_up(server: tuple[str, Behaviour]) -> None:
    server[1].faults["file"] = ["drip"]
    with pytest.raises(TryAgain, match="less than 1024 bytes a second"):
        read(f"{server[0]}/file", Patience(timeout=0.1, retries=0))


@pytest.fixture
def bucket(server: tuple[str, Behaviour], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of an S3 store that is the server."""
    s3fs = pytest.importorskip("s3fs", reason="s3fs is not installed")
    s3fs.S3FileSystem.clear_instance_cache()  # of another test's server
    for name, value in (
        ("ACCESS_KEY_ID", "x"),
        ("SECRET_ACCESS_KEY", "x"),
        ("ENDPOINT_URL", server[0]),
    ):
        monkeypatch.setenv(f"AWS_{name}", value)
    (tmp_path / "bucket").mkdir()
    (tmp_path / "bucket" / "x").write_bytes(DATA * 12)
    return tmp_path / "bucket"


def test_a_cloud_store_that_drips_is_given_up(server: tuple[str, Behaviour], bucket: Path) -> None:
    data = (bucket / "x").read_bytes()
    file, url = io.BytesIO(), "s3://bucket/x"
    transfer(url, file, len(data), 60)
    assert file.getvalue() == data
    starts = [start for _, start in server[1].requests]
    assert starts[:4] == [0, 1 << 20, 3 << 20, 7 << 20]
    server[1].faults["bucket/x"] = ["drip"]
    with pytest.raises(TransferError, match="bytes took over 3 s"):
        transfer(url, io.BytesIO(), len(data), 3)
    server[1].faults["HEAD bucket/x"] = ["drip"]
    with pytest.raises(TransferError, match="(its size|the connection) took over 1 s"):
        transfer(url, io.BytesIO(), len(data), 1)
    # A request for 4 MB has four times as long as one for a MB.
    server[1].faults["bucket/x"], server[1].stall = ["", "", "slow"], 1.2
    file = io.BytesIO()
    transfer(url, file, len(data), 3)
    assert file.getvalue() == data


def test_a_store_whose_answer_breaks_off_is_asked_again(
    server: tuple[str, Behaviour], bucket: Path
) -> None:
    """aiohttp's error has a status of its own."""
    patience, data = Patience(timeout=30.0, retries=2, pause=0.001), (bucket / "x").read_bytes()
    server[1].faults["bucket/x"] = ["drop", "drop"]
    assert read("s3://bucket/x", patience) == data
    server[1].faults["bucket/x"] = ["drop"] * 3
    with pytest.raises(TryAgain, match="given up after 3 tries"):
        read("s3://bucket/x", patience)


def test_a_store_that_refuses_is_not_asked_for_ever(
    server: tuple[str, Behaviour], bucket: Path
) -> None:
    """Of an error of the size S3 tells no more than the status: why stands in the answer to a
    read. http says the same."""
    behaviour, patience = server[1], Patience(timeout=30.0, retries=2, pause=0.001)
    for answer, tries, code in (
        ("403 AccessDenied", 1, 2),
        ("401 Unauthorized", 1, 2),
        ("400 AuthorizationHeaderMalformed", 1, 2),
        ("301 PermanentRedirect", 1, 2),
        ("429 TooManyRequests", 3, 85),
        ("503 SlowDown", 3, 85),
    ):
        status, name = answer.split()
        behaviour.requests.clear()
        behaviour.faults = {name: [answer] * 9 for name in ("HEAD bucket/x", "bucket/x", "file")}
        of_size = ("GetObject", name, 1) if code == 2 else ("HeadObject", status, 0)
        for at, found, reads in (of_size, ("GetObject", name, tries)):
            with pytest.raises(UserError, match=rf"^s3://bucket/x: .*\({found}\).* {at} ") as said:
                read("s3://bucket/x", patience)
            assert said.value.code == code and behaviour.counts["bucket/x"] == reads
            behaviour.faults.pop("HEAD bucket/x", None)
            behaviour.requests.clear()
        with pytest.raises(UserError, match=f"^{server[0]}/file: .*{status}") as said:
            read(f"{server[0]}/file", patience)
        assert said.value.code == code and behaviour.counts["file"] == tries


def test_a_store_may_refuse_its_size_alone(server: tuple[str, Behaviour], bucket: Path) -> None:
    server[1].faults["HEAD bucket/x"] = ["403"] * 9
    data = (bucket / "x").read_bytes()
    assert read("s3://bucket/x", QUICK, size=len(data)) == data
    with pytest.raises(UserError, match="^s3://bucket/x: the store does not tell its size"):
        read("s3://bucket/x", QUICK)


@pytest.mark.parametrize("answer", ["400 ExpiredToken", "400 TokenRefreshRequired"])
def test_a_token_that_has_expired_is_read_anew(
    answer: str,
    server: tuple[str, Behaviour],
    bucket: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And is the user's to renew where all tries find it so."""
    given = tmp_path / "given"
    keys = '{"Version": 1, "AccessKeyId": "x", "SecretAccessKey": "x", "SessionToken": "x"}'
    (tmp_path / "give").write_text(f"echo >> {given}\necho '{keys}'\n")
    (tmp_path / "config").write_text(f"[default]\ncredential_process = sh {tmp_path}/give\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    behaviour, patience = server[1], Patience(timeout=30.0, retries=3, pause=0.001)
    behaviour.faults = {"HEAD bucket/x": ["400", "", "400"], "bucket/x": [answer, answer, answer]}
    data = (bucket / "x").read_bytes()
    assert read("s3://bucket/x", patience, size=len(data)) == data
    assert given.read_text().count("\n") == 4
    behaviour.faults = {"HEAD bucket/x": ["400"] * 4, "bucket/x": [answer] * 4}
    what = rf"^s3://bucket/x: .*\({answer[4:]}\).*: no .given up after 4 tries"
    with pytest.raises(UserError, match=what) as said:
        read("s3://bucket/x", patience)
    assert said.value.code == 2


def test_an_origin_that_sends_on_to_itself_is_a_mistake(server: tuple[str, Behaviour]) -> None:
    url = f"{server[0]}/file"
    server[1].faults["file"] = [f"moved {url}"] * 99
    with pytest.raises(UserError, match=f"^{url}: HTTP 301 .* infinite loop") as said:
        read(url, QUICK)
    assert said.value.code == 2 and "\n" not in str(said.value)


@pytest.mark.parametrize(
    ("lines", "timeout", "code", "what"),
    [
        ("", 0.3, 85, "the connection took over 0.3 s"),
        ("220 331 230", 1, 85, "its size took over 1 s"),
        ("220 331 530", 30, 2, "error_perm: 530 x"),  # such a password is never right
        ("421", 30, 85, "error_temp: 421 x"),
    ],
)
def test_a_store_that_takes_no_timeout_has_one(
    lines: str, timeout: float, code: int, what: str
) -> None:
    """As fsspec's for FTP, that falls silent after these lines."""
    pytest.importorskip("fsspec", reason="fsspec is not installed")
    silent = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer(peer: socket.socket) -> None:
            with peer, contextlib.suppress(OSError):
                for line in lines.split():
                    peer.sendall(f"{line} x\r\n".encode())
                    peer.recv(1000)
                silent.wait()

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    threading.Thread(target=answer, args=server.accept()[:1], daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        url = f"ftp://127.0.0.1:{server.getsockname()[1]}/file"
        try:
            with pytest.raises(UserError, match=f"^{url}: {what} .given up after 2 t") as said:
                read(url, Patience(timeout=timeout, retries=1, pause=0.001))
            assert said.value.code == code
        finally:
            silent.set()


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (None, 85, "store://x/y: the connection took over 0.1 s"),
        (ConnectionRefusedError(111, "Connection refused"), 85, "store://x/y: .*on refused"),
        (EOFError("gone"), 85, "store://x/y: EOFError: gone"),
        (TypeError("no option"), 2, "store://x/y: TypeError: no option"),
        (netrc.NetrcParseError("bad", "/x/netrc", 3), 2, "store://x/y: NetrcParseError: bad"),
        (FileNotFoundError(2, "No such file", "/x/token"), 2, "/x/token: No such file"),
        (FileNotFoundError(2, "No such file", "x/y"), 2, "store://x/y: no such object"),
        (FileNotFoundError("x/y"), 2, "store://x/y: no such object"),
    ],
)
def test_a_store_that_does_not_begin(error: Exception | None, code: int, line: str) -> None:
    """Of those that answer by asyncio, which have no bound for it either. Where another try would
    end alike, none is made."""
    begun = []
    fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed")
    asyn = pytest.importorskip("fsspec.asyn")
    end_of_test = threading.Event()

    class Store(asyn.AsyncFileSystem):
        def __init__(self, **_: object) -> None:
            begun.append(self)
            if error is not None:
                raise error
            end_of_test.wait(10)

    fsspec.register_implementation("store", Store, clobber=True)
    with pytest.raises(UserError, match=f"^{line}") as said:
        read("store://x/y", Patience(timeout=0.1, retries=1, pause=0.001))
    end_of_test.set()
    assert len(begun) == (1 if code == 2 else 2)
    assert said.value.code == code and isinstance(said.value, NotThere) == ("no such o" in line)


def test_a_program_that_gives_no_credentials_is_not_waited_for_in_vain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("s3fs", reason="s3fs is not installed")
    (tmp_path / "config").write_text("[default]\nregion = x\ncredential_process = sleep 3\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(TryAgain, match="the connection took over 0.2 s"):
        read("s3://slow/x", Patience(timeout=0.2, retries=0))


def test_a_stores_package_that_does_not_begin_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed")
    (tmp_path / "broken_store.py").write_text("import os\n\nos.nothing\n")
    monkeypatch.syspath_prepend(tmp_path)
    fsspec.register_implementation("broken", "broken_store.Store", clobber=True)
    with pytest.raises(UserError, match="^broken://x/y: AttributeError: .* 'nothing'"):
        read("broken://x/y", QUICK)


def test_a_store_whose_size_takes_no_timeout_is_read() -> None:
    """As Azure's."""
    fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed")
    asyn = pytest.importorskip("fsspec.asyn")

    class Store(asyn.AsyncFileSystem):
        async def _info(self, path: str, **_: object) -> dict[str, object]:
            return {"name": path, "size": len(DATA), "type": "file"}

        def size(self, path: str) -> int:
            return len(DATA)

        async def _cat_file(self, path: str, start: int = 0, end: int = 0, **_: object) -> bytes:
            return DATA[start:end]

    fsspec.register_implementation("sized", Store, clobber=True)
    assert read("sized://x/y", QUICK) == DATA


@pytest.mark.parametrize(
    ("answer", "code", "line"),
    [
        (None, 2, "the store does not tell its size"),
        (FileNotFoundError(2, "No such file", "/container/x/y"), 2, "no such object"),
        (OSError(5, "Input/output error", "/container/x/y"), 85, "OSError: .*error"),
        (ValueError("no JSON"), 85, "ValueError: no JSON"),
    ],
)
def test_what_a_store_says_of_its_objects_is_no_setting(
    answer: Exception | None, code: int, line: str
) -> None:
    fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed")
    asyn = pytest.importorskip("fsspec.asyn")

    class Store(asyn.AsyncFileSystem):
        async def _info(self, path: str, **_: object) -> dict[str, object]:
            if answer is not None:
                raise answer
            return {"name": path, "size": None, "type": "file"}

    fsspec.register_implementation("named", Store, clobber=True)
    with pytest.raises(UserError, match=f"^named://x/y: (?:{line})") as said:
        read("named://x/y", QUICK)
    assert said.value.code == code and isinstance(said.value, NotThere) == ("no such o" in line)


@pytest.mark.parametrize("answer", ["HTTP/1.1 100 Continue\r\n\r\n", "HTTP/1.1 200 OK\r\nX: y"])
def test_the_head_of_an_answer_is_not_waited_for_in_vain(answer: str) -> None:
    """It comes byte by byte, or never ends."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with server.accept()[0] as peer, contextlib.suppress(OSError):
                peer.recv(1000)
                for byte in itertools.cycle(answer.encode()):
                    peer.sendall(bytes([byte]))
                    time.sleep(0.001)

        threading.Thread(target=serve, daemon=True).start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}/file"
        with pytest.raises(TryAgain, match="no answer's head in 0.2 s"):
            read(url, Patience(timeout=0.2, retries=0))


@pytest.mark.parametrize(
    ("head", "forever", "said"),
    [
        ("200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n", "X: y\r\n", "no byte in"),
        ("200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n1;", "a", "no byte in"),
        ("302 Found\r\nLocation: /file\r\n\r\n", "a", "HTTP 302"),
    ],
)
def test_what_stands_around_a_body_is_not_waited_for_in_vain(
    head: str, forever: str, said: str
) -> None:
    """The heads of chunks, what follows the last, and what comes with a redirection."""
    taken_whole: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve(peer: socket.socket) -> None:
            with peer, contextlib.suppress(OSError):
                peer.recv(1000)
                peer.sendall(f"HTTP/1.1 {head}".encode())
                for _ in range(400):
                    peer.sendall(forever.encode())
                    time.sleep(0.005)
                taken_whole.append(forever)

        def answer() -> None:
            with contextlib.suppress(OSError):
                while True:
                    threading.Thread(target=serve, args=(server.accept()[0],), daemon=True).start()

        threading.Thread(target=answer, daemon=True).start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}/file"
        with pytest.raises(UserError, match=said):
            read(url, Patience(timeout=0.5, retries=0))
    assert not taken_whole


def test_a_command_that_drips_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    command = f"cut -d' ' -f5 /proc/self/stat > {pid}; while printf x; do sleep 0.01; done | cat #"
    with pytest.raises(TryAgain, match="less than 1024 bytes a second"):
        read(f"pipe:{command}", Patience(timeout=0.1, retries=0))
    while _alive(pid.read_text().strip()):  # a signal takes its time
        time.sleep(0.01)


@pytest.mark.parametrize("end", ["INT", "QUIT", "KILL"])
def test_a_command_whose_shell_has_died_is_ended_too(tmp_path: Path, end: str) -> None:
    """As by a signal to the whole group, which the command ignores, or for want of memory."""
    pid = tmp_path / "pid"
    command = f"cut -d' ' -f5 /proc/self/stat > {pid}; kill -{end} $PPID; sleep 100 | sleep 100 #"
    with pytest.raises(TryAgain):
        read(f"pipe:{command}", Patience(timeout=0.1, retries=0))
    end_of_test = time.monotonic() + 30
    while _alive(pid.read_text().strip()):
        assert time.monotonic() < end_of_test
        time.sleep(0.01)


def _alive(group: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has gone
            state, _, owner = path.read_text().rpartition(")")[2].split()[:3]
            found += [path.parent.name] * (owner == group and state != "Z")
    return found


@pytest.mark.parametrize("kind", ["http", "pipe", "memory"])
def test_a_full_disk_is_named_and_no_other_try_made(
    server: tuple[str, Behaviour], tmp_path: Path, kind: str
) -> None:
    url = {"http": f"{server[0]}/file", "pipe": f"pipe:cat {tmp_path}/file"}.get(kind)
    if url is None:
        fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed")
        url = "memory://full/file"
        fsspec.filesystem("memory").pipe_file("/full/file", DATA)
    with (
        open("/dev/full", "wb", buffering=0) as file,
        pytest.raises(UserError, match="^/dev/full: the disk is full"),
    ):
        transfer(url, file, len(DATA), AMPLE)


def test_a_file_here_that_cannot_be_opened_is_no_outage(tmp_path: Path) -> None:
    (tmp_path / "part").mkdir()
    with pytest.raises(UserError, match="part: Is a directory") as caught:
        persist("http://host/x", lambda: (tmp_path / "part").open("ab"), QUICK)
    assert not isinstance(caught.value, TryAgain)


@pytest.mark.parametrize(
    "proxy", ["socks5://127.0.0.1:1", "http://127.0.0.1:1", "http://host:port", "http://host:70000"]
)
def test_a_proxy_is_named(proxy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", proxy)
    with pytest.raises(UserError, match="^http://host/x: .* .by way of http_proxy"):
        read("http://host/x", QUICK)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with pytest.raises(UserError, match="^http://127.0.0.1:1/x: Connection refused .given up"):
        read("http://127.0.0.1:1/x", QUICK)


def certificate(path: Path) -> Path:
    """Of 127.0.0.1 by itself, and its key."""
    pytest.importorskip("cryptography", reason="cryptography is not installed")
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "a test")])
    here = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    made = x509.CertificateBuilder(name, name, key.public_key(), 1, now - day, now + day)
    made = made.add_extension(here, critical=False).sign(key, hashes.SHA256())
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8)
    private = key.private_bytes(*form, serialization.NoEncryption())
    path.write_bytes(private + made.public_bytes(form[0]))
    return path


def test_by_https_and_a_certificate_that_nobody_vouches_for_is_the_users_to_mend(
    tmp_path, monkeypatch
) -> None:
    folder, own = tmp_path / "folder", certificate(tmp_path / "own.pem")
    folder.mkdir()
    (folder / "file").write_bytes(DATA)
    with http_server(folder, own) as (url, behaviour):
        with pytest.raises(Refused, match=f"^{url}/file: .*certificate") as caught:
            read(f"{url}/file", QUICK)
        assert caught.value.code == 2 and not behaviour.requests
        monkeypatch.setenv("SSL_CERT_FILE", str(own))
        behaviour.faults["file"] = ["drop", "503"]
        assert read(f"{url}/file", QUICK) == DATA
        assert behaviour.counts == {"file": 3}


def of_a_store(settings: dict[str, str]) -> tuple[int, str]:
    """Exit code and line of an object's reading, in a process of its own with these settings."""
    pytest.importorskip("s3fs", reason="s3fs is not installed")
    keys = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "x"}
    code = "import sys; from core.errors import main_guard; from core.urls import Patience, read; "
    code += "sys.exit(main_guard(lambda: read('s3://b/file', Patience(2.0, 1, 0.001)) and 0))"
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | keys | settings, capture_output=True
    )
    return done.returncode, done.stderr.decode()


@pytest.mark.slow
def test_a_stores_settings_are_the_users_to_mend() -> None:
    for settings in ({"AWS_PROFILE": "none"}, {"AWS_DEFAULT_REGION": "a b"}):
        code, line = of_a_store({"AWS_ENDPOINT_URL": "http://127.0.0.1:1"} | settings)
        assert code == 2 and line.startswith("error: s3://b/file: ") and line.count("\n") == 1


@pytest.mark.slow
def test_a_store_that_is_silent_is_asked_as_often_as_patience_says() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        peers = []

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    peers.append(server.accept()[0])

        threading.Thread(target=serve, daemon=True).start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        code, line = of_a_store({"AWS_ENDPOINT_URL": url})
        assert code == 85 and "given up after 2 tries" in line
        assert len(peers) == 2


def test_a_password_in_a_url_is_not_shown() -> None:
    for url in ("http://name:pass@host/x", "https://pass@host:1/x", "ftp://name:pass@host/x"):
        with pytest.raises(UserError, match=r"^\w+://\.\.\.@host.*not supported") as caught:
            read(url, QUICK)
        assert "pass@" not in str(caught.value)


@pytest.mark.parametrize("place", ["http://name:word@host/x", "//name:word@host:1/x"])
def test_a_password_that_an_origin_sends_on_to_is_not_shown(
    server: tuple[str, Behaviour], place: str
) -> None:
    url, behaviour = server
    behaviour.faults = {"file": [f"to {place}"]}
    with pytest.raises(UserError, match=rf"^{url}/file: sends on to http://\.\.\.@host") as caught:
        read(f"{url}/file", QUICK)
    assert "word@" not in str(caught.value)
    assert len(behaviour.requests) == 1


@pytest.mark.parametrize("place", ["s3://", "gs:///", "http://"])
def test_a_url_without_a_bucket_is_no_folder_here(place: str) -> None:
    with pytest.raises(UserError, match=f"^{place}: names no host or bucket"):
        join(place, "manifest.json")


def test_a_transfer_goes_on_where_the_last_one_broke(server: tuple[str, Behaviour]) -> None:
    url, behaviour = f"{server[0]}/file", server[1]
    file = io.BytesIO(DATA[:1000])
    transfer(url, file, len(DATA), AMPLE)
    assert file.getvalue() == DATA and behaviour.requests[-1] == ("file", 1000)
    behaviour.ranges = False
    file = io.BytesIO(b"x" * 1000)
    transfer(url, file, len(DATA), AMPLE)
    assert file.getvalue() == DATA


def test_more_bytes_than_stated_are_not_taken(server: tuple[str, Behaviour]) -> None:
    file = io.BytesIO()
    with pytest.raises(Exception, match="is over 1000 bytes long"):
        transfer(f"{server[0]}/file", file, 1000, AMPLE)
    assert len(file.getvalue()) <= 1000


def test_what_broke_off_is_kept_and_what_is_short_is_not(
    server: tuple[str, Behaviour], tmp_path: Path
) -> None:
    """A length that the origin states of the whole tells the one from the other."""
    url = f"{server[0]}/file"
    for place, fault, have, lasting in (
        (url, "short", 0, True),
        (url, "short", 1000, False),
        (url, "cut", 0, False),
    ):
        server[1].faults["file"] = [fault]
        file = io.BytesIO(DATA[:have])
        text = f"ended after {len(DATA) // 2} of {len(DATA)} bytes"
        with pytest.raises(TransferError, match=text) as caught:
            transfer(place, file, len(DATA), AMPLE)
        assert caught.value.lasting == lasting
        assert file.getvalue() == (b"" if lasting else DATA[: len(DATA) // 2])


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("head -c 1000 {0}/file", 2),  # a file that is short
        ("false | cat", 85),  # a failure that the shell does not tell
        ("echo >> {0}/tries; head -c $(wc -l < {0}/tries) {0}/file", 85),  # what breaks anywhere
    ],
)
def test_a_command_that_is_short_in_one_place_is_not_asked_for_ever(
    tmp_path: Path, command: str, code: int
) -> None:
    (tmp_path / "file").write_bytes(DATA)
    url, file = f"pipe:{command.format(tmp_path)} #", io.BytesIO()
    with pytest.raises(UserError, match=r"ended after \d+ of .* .given up after 3 tries") as said:
        persist(url, lambda: transfer(url, file, len(DATA), AMPLE), QUICK)
    assert said.value.code == code


def test_a_file_that_is_short_after_an_outage_may_be_whole_again(
    server: tuple[str, Behaviour],
) -> None:
    url = f"{server[0]}/file"
    for faults, code in ((["short"] * 3, 2), (["503", "short", "short"], 85)):
        server[1].faults["file"] = list(faults)
        with pytest.raises(UserError, match=f"ended after {len(DATA) // 2} of") as said:
            read(url, QUICK, size=len(DATA))
        assert said.value.code == code


def test_a_command_ends_with_its_reader_and_hears_signals(tmp_path: Path) -> None:
    with pytest.raises(TryAgain, match="exit code 143"):
        before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            read("pipe:kill -TERM $$; echo", Patience(retries=0))
        finally:
            signal.signal(signal.SIGTERM, before)
    ready = tmp_path / "pid"
    group = f"cut -d' ' -f5 /proc/self/stat > {ready}.new; mv {ready}.new {ready}"
    command = f"pipe:{group}; sleep 100 | sleep 100 #"
    reader = multiprocessing.get_context("fork").Process(target=read, args=(command,))
    reader.start()
    end = time.monotonic() + 30
    while not ready.exists():
        assert time.monotonic() < end
        time.sleep(0.01)
    group = ready.read_text().strip()
    assert _alive(group)
    reader.kill()
    reader.join()
    while _alive(group):
        assert time.monotonic() < end
        time.sleep(0.01)


def pipes() -> set[str]:
    """Those that this process holds; what other tests left closes meanwhile."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.add(os.readlink(f"/proc/self/fd/{number}"))
    return {name for name in found if name.startswith("pipe:")}


def test_a_pipe_leaves_no_descriptor(tmp_path: Path) -> None:
    before = pipes()
    for _ in range(3):
        with pytest.raises(TryAgain, match="exit code 3"):
            read("pipe:exit 3;", QUICK)
    assert pipes() <= before
