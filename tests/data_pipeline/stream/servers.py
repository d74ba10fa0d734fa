"""A real HTTP server on the loopback that misbehaves on demand."""

from __future__ import annotations

import http.server
import os
import re
import ssl
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


class Behaviour:
    """What the server does. `faults[name]`: a list of faults, one used up by each request for the
    file; a status as "503", or "403 CODE" with the code of an S3 store's error, "drop" (half the
    body, then the connection closes), "stall", "drip" (20 bytes a second), "slow" (a stall before
    each MB but the first), "wrong" or "wrong N" (a byte changed), "digit N" (N more in a digit of
    JSON), "short" (half the file as if it were all), "page" (a proxy's, instead), "cut" (half the
    body, whose length is not stated), "to URL" (it is there), "moved URL" (for ever).
    `faults["HEAD NAME"]`: "drip" or a status. `fault`: of all requests that have none.
    `requests`: (name, first byte asked for)."""

    def __init__(self) -> None:
        self.faults: dict[str, list[str]] = {}
        self.fault = ""
        self.requests: list[tuple[str, int]] = []
        self.stall = 1.0
        self.ranges = True
        self.guard = threading.Lock()

    @property
    def counts(self) -> Counter[str]:
        return Counter(name for name, _ in self.requests)


@contextmanager
def http_server(folder: Path, certificate: Path | None = None) -> Iterator[tuple[str, Behaviour]]:
    """(URL of the folder, its behaviour). certificate: with its key; by https."""
    behaviour = Behaviour()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            name = self.path.lstrip("/")
            path = folder / name
            with behaviour.guard:
                faults = behaviour.faults.get(f"HEAD {name}", [])
                fault = faults.pop(0) if faults else ""
            if fault[:1].isdigit():
                self.refuse(fault)
                return
            self.send_response(200 if path.is_file() else 404)
            if fault == "drip":
                for _ in range(40):
                    self.flush_headers()
                    time.sleep(0.05)
                    self.send_header("X-Drip", "y")
            self.send_header("Content-Length", str(path.stat().st_size if path.is_file() else 0))
            self.end_headers()

        def refuse(self, fault: str) -> None:
            code, _, name = fault.partition(" ")
            text = f"<Error><Code>{name}</Code><Message>no</Message></Error>" if name else ""
            body = b"" if self.command == "HEAD" else text.encode()
            self.send_response(int(code))
            self.send_header("Retry-After", "120")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            name = self.path.lstrip("/")
            asked = re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            start = int(asked.group(1)) if asked else 0
            with behaviour.guard:
                behaviour.requests.append((name, start))
                faults = behaviour.faults.get(name, [])
                fault = faults.pop(0) if faults else behaviour.fault
            path = folder / name
            if fault[:1].isdigit() or not path.is_file():
                self.refuse(fault or "404")
                return
            if fault.startswith(("to ", "moved ")):
                how, _, where = fault.partition(" ")
                self.send_response(302 if how == "to" else 301)
                self.send_header("Location", where)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            data = path.read_bytes()
            if fault.startswith("wrong"):
                at = int(fault[6:] or 0)
                data = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
            if fault.startswith("digit "):
                digit = re.search(rb"[ \[]([0-9])", data)
                more = b"%d" % ((int(digit[1]) + int(fault[6:])) % 10)
                data = data[: digit.start(1)] + more + data[digit.end(1) :]
            if fault == "page":
                data = b"<html>The origin is away.</html>"
            if fault in ("short", "part"):
                data = data[: len(data) // 2]
            if asked and behaviour.ranges:
                if start >= len(data):
                    self.send_error(416)
                    return
                self.send_response(206)
                end = min(int(asked.group(2) or len(data)), len(data) - 1)
                self.send_header("Content-Range", f"bytes {start}-{end}/{len(data)}")
                data = data[start : end + 1]
            else:
                self.send_response(206 if fault in ("part", "all of it") else 200)
                if fault == "all of it":
                    end = len(data) - 1
                    self.send_header("Content-Range", f"bytes 0-{end}/{len(data)}")
            if fault == "cut":
                data = data[: len(data) // 2]
                self.send_header("Connection", "close")
            else:
                self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if fault in ("drop", "stall"):
                self.wfile.write(data[: len(data) // 2])
                self.wfile.flush()
                if fault == "stall":
                    time.sleep(behaviour.stall)
                self.close_connection = True
                return
            try:
                for at in range(len(data) if fault == "drip" else 0):
                    self.wfile.write(data[at : at + 1])
                    time.sleep(0.05)
                while fault == "slow" and len(data) > 1 << 20:
                    self.wfile.write(data[: 1 << 20])
                    data = data[1 << 20 :]
                    time.sleep(behaviour.stall)
                self.wfile.write(data)
            except (BrokenPipeError, ConnectionResetError):
                pass

    class Server(http.server.ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: object) -> None:
            pass

    server = Server(("127.0.0.1", 0), Handler)
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    scheme = "https" if certificate else "http"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"{scheme}://127.0.0.1:{server.server_address[1]}", behaviour
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def s3_server(folder: Path) -> Iterator[str]:
    """URL of the folder's files in a bucket of moto's server on the loopback."""
    moto = pytest.importorskip("moto.server", reason="moto[server] is not installed")
    fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed")
    pytest.importorskip("s3fs", reason="s3fs is not installed")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    settings = {
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
    }
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        system = fsspec.filesystem("s3", skip_instance_cache=True)
        bucket = f"books-{port}"  # moto keeps what every server of a process was given
        system.mkdir(bucket)
        system.put([str(p) for p in folder.iterdir() if p.is_file()], f"{bucket}/set/")
        yield f"s3://{bucket}/set"
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        server.stop()
