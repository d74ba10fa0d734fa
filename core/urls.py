"""The one door to files that may be elsewhere: a path, file:, pipe:, http(s):, and cloud stores.

`pipe:COMMAND` runs COMMAND/NAME in a shell and reads what it prints; http and https go through the
standard library; every other scheme (s3:, gs:, ...) through fsspec and its package for that store.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import http.client
import io
import os
import re
import selectors
import signal
import socket
import ssl
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from core.errors import TryAgain, UserError, disk_error, may_pass, short, takes_no_more
from core.files import MOST_IN_MEMORY, disk_errors, open_regular
from core.processes import begin_command

T = TypeVar("T")

_CHUNK = 1 << 20
_CLOUD_CHUNK = 8 << 20
_URL = re.compile(r"pipe:|[a-z][a-z0-9+.-]*://", re.IGNORECASE)
SLOWEST = 1024  # bytes a second
_DEEPEST = 250  # folders of a path: pathlib makes each by a call within the call before
SMALL = MOST_IN_MEMORY  # the most that is read of a file whose size is not known
_GONE = (404, 410)
_PASSING = (408, 416, 425, 429)  # of 300 to 499: those that another try may not meet
# Names of a cloud library's errors that are of its settings and not of what is elsewhere; and of
# those that are so as a rule, but who gives credentials may be busy, or a file half brought.
_SETTINGS = re.compile("Profile|Config|Validation|Region|^Netrc")
_MOSTLY_SETTINGS = re.compile("Credential|Authentication|^BadZip|^error_perm$")
_EXPIRED = re.compile(r"\((ExpiredToken\w*|TokenRefreshRequired)\)")  # as botocore quotes S3
_BUSY = re.compile("too many|maximum|busy|later", re.IGNORECASE)  # so FTP servers refuse a login


class NotThere(UserError):
    """No file of that name."""


class Refused(UserError):
    """Its origin does not give it, or nobody vouches for that, which says nothing of what lies
    there."""


class TransferError(Exception):
    """One try has failed and another may not; where all tries are `lasting`, broke off after the
    same number of bytes, `at`, and gave the same, the user has to mend something, else the same
    start may succeed later. sha256: of what came whole, and is wrong."""

    def __init__(
        self, text: str, *, lasting: bool = False, at: int = 0, sha256: bytes = b""
    ) -> None:
        super().__init__(" ".join(text.split()))
        self.lasting, self.at, self.sha256 = lasting, at, sha256


class Wrong(TryAgain):
    """Each try has given the same bytes, which are not what was asked for."""


@dataclass(frozen=True)
class Patience:
    """timeout: seconds without a byte, with less than a kB a second, to the end of an http
    answer's head, or for a MB of a cloud store; retries: further tries; pause: seconds before
    the second try, doubled with each."""

    timeout: float = 60.0
    retries: int = 5
    pause: float = 1.0


def is_url(place: str | Path) -> bool:
    """Whether the files of `place` have to be fetched: a URL, but for file:, which is a path."""
    return isinstance(place, str) and bool(_URL.match(place)) and _scheme(place) != "file"


def is_command(place: str | Path) -> bool:
    """Whether a program of its choosing is run to read `place`."""
    return is_url(place) and _scheme(str(place)) == "pipe"


def local_path(place: str | Path) -> Path:
    """The path that a path, or a file: URL, names."""
    if isinstance(place, str) and _URL.match(place) and _scheme(place) == "file":
        parts = urllib.parse.urlsplit(place)
        if parts.netloc not in ("", "localhost"):
            raise UserError(f"{place}: names another host; file:// URLs have three slashes")
        return Path(urllib.parse.unquote(parts.path))
    return Path(place)


def on_this_machine(place: str) -> str:
    """The path that a path, one with `~`, or a file: URL names; UserError where it is no path."""
    if not place:
        raise UserError("a path is expected, not an empty text")
    if is_url(place):
        raise UserError(f"{place}: a path on this machine is expected")
    path = os.path.expanduser(str(local_path(place)) if _URL.match(place) else place)
    if path.startswith("~"):
        raise UserError(f"{place}: no such user's home; ./{place} is a name here")
    if path.count("/") > _DEEPEST:
        raise UserError(f"{short(place, 200)}: a path of over {_DEEPEST} folders")
    return path


def path_here(place: str) -> Path:
    """As `on_this_machine`: the type of a command's argument that names what is written."""
    return Path(on_this_machine(place))


def join(directory: str | Path, name: str) -> str:
    """DIR/NAME, for a folder or a URL (`pipe:cat /x` gives `pipe:cat /x/NAME`). UserError for a
    URL without a host or bucket, of which this would make a path."""
    begin = str(directory).rstrip("/")
    if is_url(directory) and not is_url(begin):
        raise UserError(f"{directory}: names no host or bucket")
    return begin + "/" + name


def read(
    place: str | Path,
    patience: Patience | None = None,
    wrong: Callable[[bytes], str] = lambda data: "",
    size: int | None = None,
) -> bytes:
    """All bytes of a small file. NotThere, Refused; UserError; TryAgain when its origin does not
    answer. size: what a remote one has. wrong: what is wrong with the bytes, for which they are
    fetched again; "" when nothing is. Wrong where they are the same each time."""
    if size is not None and size > SMALL:
        size = None  # no more than that is held
    with open_file(place, patience, memory=True, size=size, wrong=wrong) as file:
        return read_open(file, place)


def read_open(file: BinaryIO, name: str | Path) -> bytes:
    """All bytes of a small file that is open. UserError, which names it, where it is none."""
    with disk_errors(name):  # of a file of /proc, which has no end to seek
        if file.seek(0, os.SEEK_END) > SMALL:
            raise UserError(f"{name}: more than {SMALL:,} bytes")
        file.seek(0)
        return file.read()


def open_file(
    place: str | Path,
    patience: Patience | None = None,
    *,
    memory: bool = False,
    size: int | None = None,
    limit: int = 0,
    wrong: Callable[[bytes], str] = lambda data: "",
) -> BinaryIO:
    """For reading; what is remote is fetched whole first, to memory or to a file without a name.
    limit: bytes that a remote file may have, where that is more than SMALL. size: as of `read`.
    wrong: as of `read`, of what is remote and in memory. Errors as of `read`."""
    if not is_url(place):
        try:
            return open_regular(local_path(place))
        except FileNotFoundError:
            raise NotThere(f"{place}: no such file") from None
        except ValueError as error:  # of a name with a zero byte
            raise UserError(f"{place}: {error}") from None
        except OSError as error:
            raise disk_error(error, place) from None
    patience = patience or Patience()
    file: BinaryIO = io.BytesIO() if memory else tempfile.TemporaryFile()  # noqa: SIM115

    def attempt() -> None:
        file.seek(0)
        file.truncate()
        transfer(str(place), file, size, patience.timeout, limit=max(limit, SMALL))
        if isinstance(file, io.BytesIO) and (what := wrong(file.getvalue())):
            raise TransferError(what, sha256=hashlib.sha256(file.getvalue()).digest())

    try:
        persist(str(place), attempt, patience)
    except BaseException:
        with contextlib.suppress(OSError):  # what waits for room on a full disk
            file.close()
        raise
    file.seek(0)
    return file


def persist(url: str, attempt: Callable[[], T], patience: Patience) -> T:
    """What `attempt` returns, tried again with growing pauses after TransferError or OSError."""
    trouble, kinds = TransferError(""), set[tuple[bool, int, bytes]]()
    for tried in range(patience.retries + 1):
        if tried:
            pause = min(patience.pause * 2 ** (tried - 1), 60.0)
            # Jitter, so that a thousand nodes do not come back at the same moment.
            time.sleep(pause * (0.5 + int.from_bytes(os.urandom(2), "big") / 65536))
        try:
            return attempt()
        except TransferError as error:
            trouble = error
        except ValueError as error:  # of a name with a zero byte
            raise UserError(f"{url}: {error}") from None
        except OSError as error:
            if isinstance(error.__context__, UserError):  # a file that could not be written, closed
                raise error.__context__ from None
            if error.filename is not None and not may_pass(error):
                raise disk_error(error, error.filename) from None  # of a file here
            lasting = takes_no_more(error)
            trouble = TransferError(str(error) or type(error).__name__, lasting=lasting)
        kinds.add((trouble.lasting, trouble.at, trouble.sha256))
    kind = TryAgain
    if len(kinds) == 1 and (trouble.lasting or trouble.sha256):
        kind = UserError if trouble.lasting else Wrong
    raise kind(f"{url}: {trouble} (given up after {patience.retries + 1} tries)")


class _Target:
    """The file that a transfer goes on with, from `have` bytes on."""

    def __init__(
        self, file: BinaryIO, limit: int, timeout: float, count: Callable[[int], None]
    ) -> None:
        self._file, self._limit, self._timeout, self._count = file, limit, timeout, count
        name = getattr(file, "name", None)  # a number of what has none
        self._place = name if isinstance(name, str | Path) else tempfile.gettempdir()
        self.have = file.seek(0, os.SEEK_END)
        self._since: tuple[float, int] | None = None  # when there were how many bytes

    def write(self, chunk: bytes) -> None:
        began, before = self._since = self._since or (time.monotonic(), self.have)
        self.have += len(chunk)
        if (seconds := time.monotonic() - began) > self._timeout:
            if self.have - before < SLOWEST * seconds:
                raise TransferError(f"less than {SLOWEST} bytes a second")
            self._since = None
        if self.have > self._limit:
            self.have -= len(chunk)
            self.restart()
            raise TransferError(f"is over {self._limit} bytes long", lasting=True)
        with disk_errors(self._place):
            self._file.write(chunk)
        self._count(len(chunk))

    def flush(self) -> None:
        with disk_errors(self._place):
            self._file.flush()

    def restart(self) -> None:
        """Where the origin can only begin at the beginning, or more is there than the whole."""
        self._file.seek(0)
        self._file.truncate()
        self._count(-self.have)
        self.have, self._since = 0, None


def transfer(
    url: str,
    file: BinaryIO,
    size: int | None,
    timeout: float,
    count: Callable[[int], None] = lambda _: None,
    *,
    limit: int = SMALL,
) -> None:
    """One try to bring the bytes of `url` from the end of `file` on; `size`: the whole, if known,
    else at most `limit`. TransferError or OSError where another try may help, UserError where none
    will. Of too few bytes those are kept that may be a beginning. count: told of bytes that came,
    and, below zero, of those that were there and are not kept."""
    target = _Target(file, limit if size is None else size, timeout, count)
    scheme, whole = _scheme(url), False
    if (scheme == "pipe" and target.have) or (size is not None and target.have > size):
        target.restart()
    if scheme == "pipe":
        _from_pipe(url.partition(":")[2], target, timeout)
    elif scheme in ("http", "https"):
        _has_no_password(url, by_name=True)
        whole = _from_http(url, target, timeout)
    else:
        _has_no_password(url, by_name=False)
        _from_cloud(f"{scheme}:{url.partition(':')[2]}", target, size, timeout)
    target.flush()
    if size is not None and target.have < size:
        # A command whose last program hides the failure of another breaks off here and there.
        at = target.have if scheme == "pipe" or whole else 0
        text = f"ended after {target.have} of {size} bytes"
        short = TransferError(text, lasting=whole or at > 0, at=at)
        if whole:
            target.restart()
        raise short


def _has_no_password(url: str, by_name: bool, where: str = "") -> None:
    """UserError, which does not show it; by_name: nor a user alone, as abfs: has of containers.
    where: it stands."""
    host = urllib.parse.urlsplit(url).netloc
    user, at, place = host.rpartition("@")
    if at and (by_name or ":" in user):
        raise UserError(
            f"{where}{url.replace(host, '...@' + place)}: a user or password in a URL is not "
            "supported"
        )


def _scheme(url: str) -> str:
    return url.partition(":")[0].lower()


def _by_proxy(url: str) -> str:
    """Of an error: the variable that names a proxy, unless no_proxy leaves that aside."""
    direct = urllib.request.proxy_bypass(urllib.parse.urlsplit(url).netloc)
    proxied = _scheme(url) in urllib.request.getproxies() and not direct
    return f" (by way of {_scheme(url)}_proxy)" if proxied else ""


def _from_http(url: str, target: _Target, timeout: float) -> bool:
    """Whether the answer was of the whole file, and said where it ends."""
    have = target.have
    try:
        request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
        with _opener().open(request, timeout=timeout) as response:
            if have and not _continues(response, have):
                target.restart()
            if not target.have and _is_a_part(response):
                raise TransferError("answers with a part where the whole was asked for")
            while chunk := response.read1(_CHUNK):
                target.write(chunk)
            # Reads in pieces end in silence where the connection does.
            if response.length:
                raise TransferError(f"ended {response.length} bytes early")
            return response.status == 200 and (response.chunked or response.length is not None)
    except urllib.error.HTTPError as error:
        error.close()
        text = " ".join(f"HTTP {error.code} {error.reason}".split())
        if error.code in _GONE:
            raise NotThere(f"{url}: {text}") from None
        if _refuses(error.code):
            raise Refused(f"{url}: {text}") from None
        if error.code == 416:
            target.restart()
        raise TransferError(text) from None
    except urllib.error.URLError as error:
        if isinstance(error.reason, str):  # urllib's own objection to the URL
            raise UserError(f"{url}: {error.reason}{_by_proxy(url)}") from None
        why = getattr(error.reason, "strerror", None) or error.reason
        if isinstance(error.reason, ssl.SSLCertVerificationError):
            raise Refused(f"{url}: {why}{_by_proxy(url)}") from None
        raise TransferError(f"{why}{_by_proxy(url)}") from None
    except (http.client.InvalidURL, ValueError) as error:
        raise UserError(f"{url}: {error}{_by_proxy(url)}") from None
    except http.client.HTTPException as error:
        raise TransferError(f"{type(error).__name__}: {error}") from None


@contextlib.contextmanager
def _ended_after(seconds: float, connection: socket.socket, what: str) -> Iterator[None]:
    """What is read inside is there in so many seconds, or TransferError: a socket's own bound is
    for each byte, and where the connection ends what was read may look complete."""
    late = threading.Event()

    def stop() -> None:
        late.set()
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(seconds, stop)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if late.is_set():
            raise TransferError(f"no {what} in {seconds:g} s")


class _Prompt:
    """A connection whose answer's head has to be there, whole, in `timeout` seconds, and of a body
    in chunks, whose own heads and end may be long, the next bytes."""

    timeout: float
    sock: socket.socket
    port: int

    def connect(self) -> None:
        if not 0 <= self.port < 1 << 16:  # the C library would take another
            raise http.client.InvalidURL(f"port {short(str(self.port))}: there is none such")
        super().connect()  # type: ignore[misc]

    def getresponse(self) -> http.client.HTTPResponse:
        connection, seconds = self.sock, self.timeout
        response: http.client.HTTPResponse | None = None
        try:
            with _ended_after(seconds, connection, "answer's head"):
                response = super().getresponse()  # type: ignore[misc]
        except TransferError:
            if response is not None:
                response.close()
            raise
        if response.chunked:
            read1 = response.read1

            def read_in_time(most: int = -1) -> bytes:
                with _ended_after(seconds, connection, "byte"):
                    return read1(most)

            response.read1 = read_in_time  # type: ignore[method-assign]
        return response


class _OnwardHandler(urllib.request.HTTPRedirectHandler):
    """The library's own reads what comes with an answer that sends on, however long."""

    def redirect_request(
        self, asked: urllib.request.Request, *answer: Any
    ) -> urllib.request.Request | None:
        found = super().redirect_request(asked, *answer)
        answer[0].close()
        if found is not None:
            _has_no_password(found.full_url, True, f"{asked.full_url}: sends on to ")
        return found


class _HttpConnection(_Prompt, http.client.HTTPConnection):
    pass


class _HttpsConnection(_Prompt, http.client.HTTPSConnection):
    pass


class _HttpHandler(urllib.request.HTTPHandler):
    def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_HttpConnection, request)


class _HttpsHandler(urllib.request.HTTPSHandler):
    def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_HttpsConnection, request)


def _opener() -> urllib.request.OpenerDirector:
    """Of http and https alone: an origin may send on to another place, but not by other ways."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler,
        _HttpHandler,
        _HttpsHandler,
        urllib.request.HTTPDefaultErrorHandler,
        _OnwardHandler,
        urllib.request.HTTPErrorProcessor,
        urllib.request.UnknownHandler,
    ):
        opener.add_handler(handler())
    return opener


def _is_a_part(response: http.client.HTTPResponse) -> bool:
    """Whether it does not say that it is the whole."""
    stated = re.match(
        r"\s*bytes 0-(\d{1,18})/(\d{1,18})\s*$", response.headers.get("Content-Range", "")
    )
    return response.status == 206 and not (stated and int(stated[1]) + 1 == int(stated[2]))


def _continues(response: http.client.HTTPResponse, have: int) -> bool:
    stated = response.headers.get("Content-Range", "")
    return response.status == 206 and stated.strip().startswith(f"bytes {have}-")


# A shell that waits for the command's, and at a signal kills its group: the kernel tells one
# process of the end of ours, a shell that runs several hears of it when they have ended, and what
# is run by `&` ignores SIGINT and SIGQUIT.
_AS_ONE = """trap 'kill -KILL 0' TERM INT QUIT HUP USR1 USR2; /bin/sh -c "$1" & wait $!"""


def _from_pipe(command: str, target: _Target, timeout: float) -> None:
    process = subprocess.Popen(
        ["/bin/sh", "-c", _AS_ONE, "sh", command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        bufsize=0,
        process_group=0,  # what the shell starts ends with it
        preexec_fn=functools.partial(begin_command, os.getpid()),
    )
    assert process.stdout is not None
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while True:
                if not selector.select(timeout):
                    raise TransferError(f"no byte in {timeout:g} s")
                chunk = process.stdout.read(_CHUNK)
                if not chunk:
                    break
                target.write(chunk)
        code = process.wait(timeout)
    except subprocess.TimeoutExpired:
        raise TransferError(f"did not end in {timeout:g} s") from None
    finally:
        # Also where the shell has died before the command: until it is reaped the group is ours.
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
    if code:
        # 126 and 127 are the shell's own: there is no such program.
        raise TransferError(f"exit code {code}", lasting=code in (126, 127))


def _from_cloud(url: str, target: _Target, size: int | None, timeout: float) -> None:
    if "::" in url:
        # What stands behind is read whole into memory, or written to the disk, however large.
        raise UserError(f"{url}: a chain of fsspec's, by `::`, is not read")
    try:
        import fsspec
        import fsspec.asyn

        kind = fsspec.get_filesystem_class(_scheme(url))
    except ImportError as error:
        raise UserError(
            f"{url}: {error}; `pip install s3fs` reads s3://, `pip install gcsfs` gs://"
        ) from None
    except Exception as error:  # no such scheme, or a package that does not begin
        raise UserError(f"{url}: {type(error).__name__}: {error}") from None
    by_asyncio = issubclass(kind, fsspec.asyn.AsyncFileSystem)
    # A connection that another try waits on in vain is not used again.
    options: dict[str, Any] = {} if by_asyncio else {"skip_instance_cache": True}
    if _scheme(url) == "s3":
        limits = {"connect_timeout": timeout, "read_timeout": timeout}
        options = {"config_kwargs": {**limits, "retries": {"max_attempts": 0}}}
    wanted, seconds = "the connection", timeout

    def ask(method: str, **arguments: int) -> Any:
        """Of the store, whatever drips. TimeoutError."""
        if by_asyncio:
            call = getattr(system, f"_{method}")
            return fsspec.asyn.sync(system.loop, call, path, timeout=seconds, **arguments)
        return in_time(seconds, functools.partial(getattr(system, method), path, **arguments))

    try:
        connect = functools.partial(fsspec.core.url_to_fs, url, **options)
        system, path = in_time(seconds, connect)
        system.retries = 1  # of s3fs: tries are counted in `persist`
        if _scheme(url) == "s3":
            in_time(seconds, system.connect)  # may run a program that gives credentials
        wanted = "its size"
        there, most = None, _CHUNK
        try:
            there = ask("size")
        except Exception as error:
            if not _refuses(_status(error)) or isinstance(error, FileNotFoundError):
                raise
            # An answer without a body, as of HEAD, has no why; and some stores refuse that alone.
            ask("cat_file", start=0, end=1)
        if there is None and size is None:
            raise TransferError("the store does not tell its size", lasting=True)
        if size is not None and there is not None and there < size:
            raise TransferError(f"has {there} bytes, not {size}", lasting=True)
        end = size if size is not None else there
        while target.have < end:
            began, last = time.monotonic(), min(target.have + most, end)
            wanted = f"{last - target.have:,} bytes"
            seconds = timeout * max(1.0, (last - target.have) / _CHUNK)
            chunk = ask("cat_file", start=target.have, end=last)
            if not chunk:
                raise TransferError("ended early")
            target.write(chunk)
            if time.monotonic() - began < timeout / 8:
                most = min(2 * most, _CLOUD_CHUNK)
    except TimeoutError:
        raise TransferError(f"{wanted} took over {seconds:g} s") from None
    except (TransferError, UserError):
        raise
    except Exception as error:
        begins, file = wanted == "the connection", getattr(error, "filename", None)
        if begins and isinstance(error, OSError) and file is not None and str(file) not in url:
            raise  # of a file here, such as a token's
        if isinstance(error, FileNotFoundError):
            raise NotThere(f"{url}: no such object") from None
        name, said = type(error).__name__, error.__cause__ or error
        text = " ".join(f"{type(said).__name__}: {said}".split())
        if _EXPIRED.search(text):
            kind.clear_instance_cache()  # the next try reads the credentials anew
            raise TransferError(text, lasting=True) from None
        denied = isinstance(error, PermissionError) or str(error).startswith("Forbidden")  # gcsfs
        if denied or _refuses(_status(error)):
            raise Refused(f"{url}: {text}") from None
        busy = _BUSY.search(text)
        option = begins and isinstance(error, (TypeError, ValueError))
        if (option or _SETTINGS.search(name)) and not busy:
            raise UserError(f"{url}: {text}") from None
        # Each cloud library has errors of its own; all others are worth another try.
        settings = bool(_MOSTLY_SETTINGS.search(name))
        raise TransferError(text, lasting=settings and not busy) from None


def in_time(seconds: float, call: Callable[[], T]) -> T:
    """What `call` returns; TimeoutError, and its thread, which cannot be ended, waits on."""
    answer = Future[T]()

    def run() -> None:
        try:
            answer.set_result(call())
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return answer.result(seconds)


def _refuses(status: int) -> bool:
    """Whether an answer of this HTTP status is the same another time."""
    return 300 <= status < 500 and status not in _PASSING


def _status(error: Exception) -> int:
    """HTTP's, as the error of a cloud library, or its cause, has it; 0 where there is none."""
    for each in (error, error.__cause__):
        if type(each).__module__ == "aiohttp.http_exceptions":  # 400 of a body that broke off
            continue
        answer = getattr(each, "response", None)
        if isinstance(answer, dict):  # of botocore
            return int(answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        for name in ("status_code", "status", "code"):
            if isinstance(found := getattr(each, name, None), int):
                return found
    return 0
