"""A folder reaches a hub whole, in one commit, and what the hub says becomes one line."""

from __future__ import annotations

import base64
import hashlib
import http.server
import json
import logging
import sys
import threading
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

import pytest

from core import hub
from core.errors import TryAgain, UserError

pytest.importorskip("huggingface_hub")


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the hub's interface as a push of small files uses."""

    repositories: dict[str, dict[str, bytes]]
    private: set[str]
    messages: list[str]
    ignored: list[str]
    warning: str

    def log_message(self, *_: object) -> None: ...

    def answer(self, plain: object, status: int = 200) -> None:
        data = json.dumps(plain).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        if self.warning:
            self.send_header("X-HF-Warning", self.warning)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        name, _, what = self.path.removeprefix("/api/models/").partition("/tree/main")
        if self.path.startswith("/api/models/") and what:
            files = self.repositories[name].items()
            return self.answer(
                [{"type": "file", "path": p, "size": len(d), "oid": git_sum(d)} for p, d in files]
            )
        self.answer({"error": "not here"}, 404)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("authorization") != "Bearer hf_token":
            return self.answer({"error": "Invalid credentials"}, 401)
        if self.path == "/api/validate-yaml":
            warnings = [{"message": self.warning}] if self.warning else []
            return self.answer({"errors": [], "warnings": warnings})
        base = f"http://{self.headers['Host']}"
        if self.path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            if asked["organization"] == "down":
                return self.answer({"error": "not now"}, 503)
            self.repositories.setdefault(name, {})
            self.private.update([name] if asked.get("visibility") == "private" else [])
            return self.answer({"url": f"{base}/{name}", "name": name, "id": name})
        name, _, action = (
            self.path.removeprefix("/api/models/").rpartition("/main")[0].rpartition("/")
        )
        if action == "preupload":
            files = [f["path"] for f in json.loads(body)["files"]]
            inline = [{"uploadMode": "regular", "shouldIgnore": p in self.ignored} for p in files]
            found = [{"path": p, **how} for p, how in zip(files, inline, strict=True)]
            return self.answer({"files": found})
        if self.path.endswith(f"/paths-info/{'0' * 40}"):
            name = "/".join(self.path.split("/")[3:5])
            asked_for = urllib.parse.parse_qs(body.decode())["paths"]
            return self.answer(
                [
                    {"type": "file", "path": path, "size": len(data), "oid": git_sum(data)}
                    for path, data in self.repositories[name].items()
                    if path in asked_for
                ]
            )
        assert action == "commit", self.path
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "header":
                self.messages.append(line["value"]["summary"])
            else:
                data = base64.b64decode(line["value"]["content"])
                self.repositories[name][line["value"]["path"]] = data
        where = f"{base}/{name}/commit/{'0' * 40}"
        return self.answer({"commitUrl": where, "commitOid": "0" * 40, "pullRequestUrl": None})


def git_sum(data: bytes) -> str:
    """As `git hash-object` has it."""
    return hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    Hub.repositories, Hub.private, Hub.messages = {}, set(), []
    Hub.ignored, Hub.warning = [], ""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("HF_TOKEN", "hf_token")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        yield Hub
        server.shutdown()


def test_a_push_has_every_byte_in_a_private_repository(served: type[Hub], tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n# a\n")
    (tmp_path / "model.safetensors").write_bytes(bytes(range(256)) * 40)
    hub.check("me/mine")
    for _ in range(2):
        assert hub.push(tmp_path, "me/mine", "run, step 10").endswith("/me/mine")
    found = {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()}
    assert served.repositories == {"me/mine": found} and served.private == {"me/mine"}
    assert served.messages == ["From run, step 10"] * 2


def test_files_that_the_repository_keeps_out_are_told(
    served: type[Hub], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By a .gitignore that lies there already; the library says nothing of it."""
    (tmp_path / "README.md").write_text("# a\n")
    (tmp_path / "vocab.txt").write_text("a\n")
    (tmp_path / "model.safetensors").write_bytes(bytes(range(256)) * 40)
    served.ignored = ["model.safetensors", "vocab.txt"]
    with pytest.raises(
        UserError, match="model.safetensors, vocab.txt: not there as in .*gitignore"
    ):
        hub.push(tmp_path, "me/mine", "")
    served.ignored = []
    hub.push(tmp_path, "me/mine", "")
    served.ignored = ["model.safetensors"]  # where an earlier one of its size stays
    (tmp_path / "model.safetensors").write_bytes(bytes(reversed(range(256))) * 40)
    capsys.readouterr()
    with pytest.raises(UserError, match="mine: model.safetensors: not there as in"):
        hub.push(tmp_path, "me/mine", "")
    assert "replaced README.md, vocab.txt, which" in capsys.readouterr().out


def test_files_that_others_would_read_in_place_of_ours_are_refused_before_anything_is_sent(
    served: type[Hub], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "vocab.txt").write_text("a\n")
    there = {
        "tokenizer.json": b"{}",
        "adapter_config.json": b"{}",
        "notes.md": b"",
        "a/b.json": b"",
        "vocab.txt": b"b\n",
    }
    served.repositories["me/mine"] = dict(there)
    with pytest.raises(
        UserError, match="me/mine: holds adapter_config.json, tokenizer.json, which other"
    ):
        hub.push(tmp_path, "me/mine", "")
    assert served.repositories["me/mine"] == there
    for name in ("tokenizer.json", "adapter_config.json"):
        del served.repositories["me/mine"][name], there[name]
    assert "replaced" not in capsys.readouterr().out
    hub.push(tmp_path, "me/mine", "")
    assert "me/mine: replaced vocab.txt, which were there; the hub" in capsys.readouterr().out
    assert served.repositories["me/mine"] == there | {"vocab.txt": b"a\n"}


def test_what_a_hub_warns_of_reaches_the_terminal_as_text(
    served: type[Hub], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n# a\n")
    served.warning = "a topic; \x1b]0;owned\x07 it says"
    handler = logging.StreamHandler()  # the library's own writes to the stderr of its import
    logging.getLogger("huggingface_hub").addHandler(handler)
    try:
        hub.push(tmp_path, "me/mine", "")
    finally:
        logging.getLogger("huggingface_hub").removeHandler(handler)
    out, err = capfd.readouterr()
    assert "\x1b" not in out + err
    assert "\\x1b]0;owned\\x07 it says" in out and "\\x1b]0;owned\\x07 it says" in err


def test_what_the_hub_refuses_is_one_line(
    served: type[Hub], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(TryAgain, match="--push down/x: .*503") as caught:
        hub.push(tmp_path, "down/x", "")
    assert "\n" not in str(caught.value)
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    with pytest.raises(UserError, match="--push me/x: .*401") as caught:
        hub.push(tmp_path, "me/x", "")
    assert "\n" not in str(caught.value) and not isinstance(caught.value, TryAgain)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(TryAgain, match="--push me/x"):
        hub.push(tmp_path, "me/x", "")
    for name in ("mine", "../x", "a/b/c", "/x", "a/"):
        with pytest.raises(UserError, match="not of the form ORG/NAME"):
            hub.check(name)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match="pip install huggingface_hub"):
        hub.check("a/b")
