"""`hf:` names, against a hub on the loopback that speaks as much of its protocol as is needed."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import resource
import socket
import sys
import threading
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub.utils import disable_progress_bars, enable_progress_bars, tqdm

from core.errors import TryAgain, UserError
from core.hub import check, fetch, is_hub, push
from data_pipeline.corpus.sources import SourceConfig, list_files
from data_pipeline.corpus.tokenizer import Tokenizer
from pretrain import hugging_face
from pretrain.convert import import_main
from pretrain.model import BertForPreTraining
from tests.finetune import tiny

SHA = "0123456789" * 4
FILES = {
    "README.md": b"A card.",
    "data/a.jsonl": b'{"text": "One."}\n',
    "data/b.jsonl": b'{"text": "Two."}\n',
    "c.csv": b"text,n\nThree.,3\n",
}


class Hub(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, code: int, data: bytes, **headers: str) -> None:
        self.send_response(code)
        for name, value in {"X-Repo-Commit": SHA, **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def do_GET(self) -> None:
        if "/org/" in self.path:  # the library asks for more, of what is about it
            self.server.tokens.append(self.headers["Authorization"])  # type: ignore[attr-defined]
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        self.server.asked.append(path)  # type: ignore[attr-defined]
        model = path.startswith(("/api/models/org/bert/", "/org/bert/"))
        files = self.server.model if model else FILES  # type: ignore[attr-defined]
        tree = [
            {"type": "file", "path": n, "size": len(d), "oid": hashlib.sha1(d).hexdigest()}
            for n, d in files.items()
        ]
        path = path.replace("/api/models/org/bert", "/api/datasets/org/set")
        path = path.replace("/org/bert/resolve", "/datasets/org/set/resolve")
        if path.startswith("/api/datasets/org/set/revision/main"):
            plain = {"id": "org/set", "sha": SHA, "siblings": [{"rfilename": n} for n in files]}
            self._answer(200, json.dumps(plain).encode(), Content_Type="application/json")
        elif path.startswith("/api/datasets/org/set/tree/"):
            self._answer(200, json.dumps(tree).encode(), Content_Type="application/json")
        elif path.endswith(getattr(self.server, "busy", "/none.")):
            self._answer(getattr(self.server, "status", 408), b"")
        elif path.startswith(f"/datasets/org/set/resolve/{SHA}/"):
            data = files[path.partition(f"{SHA}/")[2]]
            self._answer(200, data, ETag=f'"{hashlib.sha1(data).hexdigest()}"')
        elif path.startswith("/api/datasets/org/gated/"):
            self._answer(403, b"", X_Error_Code="GatedRepo")
        else:
            self._answer(404, b"", X_Error_Code="RepoNotFound")

    do_HEAD = do_GET


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[http.server.HTTPServer]:
    """A hub on the loopback; its library looks there and nowhere else."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.asked, server.tokens = [], []  # type: ignore[attr-defined]
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()
    huggingface_hub.close_session()  # it keeps proxies and connections


@pytest.fixture
def asked(hub: http.server.HTTPServer) -> list[str]:
    """Paths that it was asked for."""
    return hub.asked  # type: ignore[attr-defined]


@pytest.mark.slow  # the library tries five times more
def test_an_interrupted_fetch_is_an_error_and_no_part_of_the_files(
    hub: http.server.HTTPServer,
) -> None:
    hub.busy = "/b.jsonl"  # type: ignore[attr-defined]
    with pytest.raises(TryAgain, match="hf:org/set"):
        fetch("hf:org/set:data/*", "dataset")
    hub.shutdown()
    hub.server_close()
    with pytest.raises(TryAgain, match="incomplete"):
        fetch("hf:org/set:data/*", "dataset")


def test_a_file_that_the_hub_refuses_is_no_outage(hub: http.server.HTTPServer) -> None:
    hub.busy, hub.status = "/b.jsonl", 403  # type: ignore[attr-defined]
    with pytest.raises(UserError, match=r"^hf:org/set:data/\*: .*403 Forbidden") as caught:
        fetch("hf:org/set:data/*", "dataset")
    assert caught.value.code == 2


def test_the_files_of_a_kind_are_fetched_once_and_named_by_their_path(asked: list[str]) -> None:
    source = SourceConfig(name="s", kind="jsonl", path="hf:org/set")
    files = list_files(source)
    assert list(files.values()) == ["data/a.jsonl", "data/b.jsonl"]
    assert [Path(file).read_bytes() for file in files] == [FILES[n] for n in files.values()]
    resolved = {path.rpartition("/")[2] for path in asked if "/resolve/" in path}
    assert resolved == {"a.jsonl", "b.jsonl"}
    asked.clear()
    assert list_files(source) == files
    assert not any("/resolve/" in path for path in asked)


def test_a_cache_that_may_hold_a_part_is_told(
    asked: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "data/a.jsonl"
    huggingface_hub.hf_hub_download(
        "org/set", name, repo_type="dataset", revision=SHA,
        endpoint=os.environ["HF_ENDPOINT"], cache_dir=os.environ["HF_HUB_CACHE"],
    )  # fmt: skip
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    folder, _ = fetch(f"hf:org/set@{SHA}", "dataset")
    assert (folder / name).exists() and not (folder / "c.csv").exists()
    warning = f"warning: hf:org/set@{SHA}: the hub was not reached, and nothing tells whether"
    assert capsys.readouterr().out.startswith(warning)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    for offline in (False, True):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
        assert (fetch("hf:org/set", "dataset")[0] / "c.csv").exists()
        assert not capsys.readouterr().out


def test_a_pattern_names_the_files(asked: list[str]) -> None:
    def names(place: str, kind: str = "jsonl") -> list[str]:
        return list(list_files(SourceConfig(name="s", kind=kind, path=place)).values())

    assert names("hf:org/set:*b.jsonl") == ["data/b.jsonl"]
    assert names("hf:org/set:data/*") == ["data/a.jsonl", "data/b.jsonl"]
    assert names("hf:org/set:*.csv", "csv") == ["c.csv"]
    with pytest.raises(UserError, match="hf:org/set:"):
        names("hf:org/set:*.parquet", "parquet")


def test_what_the_hub_does_not_give_is_one_line(
    asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert is_hub("hf:a/b") and not is_hub("hf://a/b") and not is_hub("data/hf:a")
    for place, line in {
        "hf:org/none": "hf:org/none: no such public dataset on the hub$",
        "hf:org/gated": "asks for consent.*login`$",
        "hf:": "hf:ORG/NAME",
        "hf:a/b/c": "hf:ORG/NAME",
        "hf:../x": "hf:../x: ",
    }.items():
        with pytest.raises(UserError, match=line) as caught:
            fetch(place, "dataset")
        assert "\n" not in str(caught.value)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match="pip install huggingface_hub"):
        fetch("hf:org/set", "dataset")


def test_a_cache_whose_disk_refuses_is_named(asked: list[str], tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # A bar whose own write fails keeps tqdm's lock, and a later bar waits for it for ever.
    disable_progress_bars()
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(UserError) as caught:
            fetch("hf:org/set", "dataset")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        enable_progress_bars()
    assert not tqdm.get_lock()._is_owned()
    assert str(caught.value).startswith(f"hf:org/set: {tmp_path / 'hub'}")
    assert str(caught.value).endswith(": File too large")


def test_a_hub_that_does_not_answer_may_do_so_later(
    asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(TryAgain, match="^hf:org/other: .*(HF_ENDPOINT: http://127.0.0.1:9)"):
        fetch("hf:org/other", "dataset")


def test_a_hub_that_says_nothing_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("core.hub._SILENCE", 0.2)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        for call in (lambda: fetch("hf:org/set", "dataset"), lambda: push(tmp_path, "a/b", "x")):
            with pytest.raises(TryAgain, match="timed out"):
                call()
    huggingface_hub.close_session()


@pytest.mark.parametrize(
    ("name", "value"),
    [("ALL_PROXY", "socks5://127.0.0.1:9"), ("HTTPS_PROXY", "ftp://x"), ("SSL_CERT_FILE", "/none")],
)
def test_an_environment_that_its_client_cannot_be_made_of_is_one_line(
    hub: http.server.HTTPServer, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    huggingface_hub.close_session()
    monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="^hf:org/set: of the proxies and certificates") as caught:
        fetch("hf:org/set", "dataset")
    assert caught.value.code == 2


@pytest.mark.parametrize(
    "endpoint", ["hub.example", "ftp://hub.example", "https://", "https://h:x", "https://h\n", ""]
)
def test_an_endpoint_that_is_none_is_one_line(
    monkeypatch: pytest.MonkeyPatch, endpoint: str
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    for call in (lambda: fetch("hf:org/set", "dataset"), lambda: check("org/name")):
        with pytest.raises(UserError, match="HF_ENDPOINT: ") as caught:
            call()
        assert repr(endpoint) in str(caught.value) and caught.value.code == 2


def test_a_token_goes_to_nobody_in_the_clear(
    hub: http.server.HTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    fetch("hf:org/set", "dataset")
    assert set(hub.tokens) == {"Bearer secret"}  # type: ignore[attr-defined]
    hub.tokens.clear()  # type: ignore[attr-defined]
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{hub.server_port}")  # in place of that host
    monkeypatch.setenv("HF_ENDPOINT", "http://hub.invalid")
    huggingface_hub.close_session()  # it asks for proxies once
    for place in ("hf:org/none", "hf:org/gated"):
        with pytest.raises(UserError, match=r" \(HF_ENDPOINT is http://: no token was sent\)$"):
            fetch(place, "dataset")
    assert set(hub.tokens) == {None}  # type: ignore[attr-defined]
    with pytest.raises(UserError, match="http://hub.invalid: the token"):
        check("org/name")
    huggingface_hub.close_session()
    monkeypatch.setenv("HF_ENDPOINT", "https://name:password@hub.invalid")
    with pytest.raises(UserError, match="'hub.invalid'") as caught:
        fetch("hf:org/set", "dataset")
    assert "password" not in str(caught.value)


def test_a_model_is_imported_by_its_name(hub: http.server.HTTPServer, tmp_path: Path) -> None:
    folder = tmp_path / "bert"
    shape = tiny.shape()
    weights = BertForPreTraining(shape, generator=torch.Generator().manual_seed(3)).state_dict()
    tokenizer = Tokenizer(tiny.PIECES, True)
    hugging_face.write(folder, weights, shape, tokenizer, by="test", card="", force=False)
    hub.model = {p.name: p.read_bytes() for p in folder.iterdir()} | {"x.h5": b"not fetched"}  # type: ignore[attr-defined]
    assert import_main(["hf:org/bert", str(tmp_path / "out")]) == 0
    got = hugging_face.read(tmp_path / "out").weights
    assert got.keys() == weights.keys()
    assert all(torch.equal(got[name], weights[name]) for name in got)
    assert not any(path.endswith("x.h5") for path in hub.asked)  # type: ignore[attr-defined]
    with pytest.raises(UserError, match="no such public model"):
        import_main(["hf:org/none", str(tmp_path / "other")])
