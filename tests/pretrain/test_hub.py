"""A folder reaches a hub whole, in one commit, and what the hub says becomes one line."""

from __future__ import annotations

import base64
import http.server
import json
import sys
import threading
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

    def log_message(self, *_: object) -> None: ...

    def answer(self, plain: object, status: int = 200) -> None:
        data = json.dumps(plain).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        self.answer({"error": "not here"}, 404)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("authorization") != "Bearer hf_token":
            return self.answer({"error": "Invalid credentials"}, 401)
        if self.path == "/api/validate-yaml":
            return self.answer({"errors": [], "warnings": []})
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
            inline = {"uploadMode": "regular", "shouldIgnore": False}
            return self.answer({"files": [{"path": path, **inline} for path in files]})
        assert action == "commit", self.path
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "header":
                self.messages.append(line["value"]["summary"])
            else:
                data = base64.b64decode(line["value"]["content"])
                self.repositories[name][line["value"]["path"]] = data
        where = f"{base}/{name}/commit/{'0' * 40}"
        return self.answer({"commitUrl": where, "commitOid": "0" * 40, "pullRequestUrl": None})


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    Hub.repositories, Hub.private, Hub.messages = {}, set(), []
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
