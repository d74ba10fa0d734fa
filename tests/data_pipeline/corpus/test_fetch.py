"""Dumps from a server on the loopback that misbehaves: whole and as published, or one line."""

from __future__ import annotations

import bz2
import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from core.errors import TryAgain, UserError
from core.urls import Patience
from data_pipeline.__main__ import main
from data_pipeline.corpus.fetch import fetch
from tests.data_pipeline.corpus.text import documents, dump, read
from tests.data_pipeline.stream.servers import Behaviour, http_server

QUICK = Patience(timeout=0.5, retries=1, pause=0.001)
DATA = bz2.compress(dump(range(1, 40)).encode())
NAME = "enwiki-20260101-pages-articles-multistream.xml.bz2"
PLACE = f"enwiki/20260101/{NAME}"


def publish(folder: Path, name: str = NAME, **changes: object) -> None:
    facts = {"size": len(DATA), "sha1": hashlib.sha1(DATA).hexdigest(), **changes}
    status = facts.pop("status", "done")
    jobs = {
        "xmlstubs": {"status": "waiting"},
        "articles": {"status": status, "files": {name: facts}},
    }
    (folder / "dumpstatus.json").write_text(json.dumps({"version": "0.8", "jobs": jobs}))


@pytest.fixture
def mirror(tmp_path: Path) -> Iterator[tuple[str, Behaviour, Path]]:
    folder = tmp_path / "web" / "enwiki" / "20260101"
    folder.mkdir(parents=True)
    (folder / NAME).write_bytes(DATA)
    publish(folder)
    with http_server(tmp_path / "web") as (url, behaviour):
        yield url, behaviour, folder


def test_a_dump_that_breaks_off_goes_on_where_it_was(
    mirror: tuple[str, Behaviour, Path], tmp_path: Path
) -> None:
    url, behaviour, _ = mirror
    behaviour.faults[PLACE] = ["drop"] * 5  # more than the tries that bring nothing may be
    path = fetch("wikipedia", "20260101", tmp_path / "raw", mirror=url, patience=QUICK)
    assert path.name == NAME and path.read_bytes() == DATA
    starts = [start for name, start in behaviour.requests if name == PLACE]
    assert len(starts) == 6 and starts == sorted(set(starts))
    assert [p.name for p in path.parent.iterdir()] == [NAME]
    assert len(documents(read("wikipedia", path)[0])) == 36
    assert fetch("wikipedia", "20260101", path.parent, mirror=url, patience=QUICK) == path
    assert behaviour.counts[PLACE] == 6


def test_a_server_that_drips_is_given_up(
    mirror: tuple[str, Behaviour, Path], tmp_path: Path
) -> None:
    url, behaviour, folder = mirror
    behaviour.faults[PLACE] = ["drip"] * 50
    with pytest.raises(TryAgain, match="less than 1024 bytes a second"):
        fetch("wikipedia", "20260101", tmp_path / "raw", mirror=url, patience=QUICK)
    assert behaviour.counts[PLACE] == 2
    assert (tmp_path / "raw" / f"{NAME}.part").stat().st_size > 0
    behaviour.faults[PLACE] = []
    assert fetch("wikipedia", "20260101", tmp_path / "raw", mirror=url).read_bytes() == DATA


def test_the_same_command_goes_on_with_what_an_earlier_one_brought(
    mirror: tuple[str, Behaviour, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, behaviour, _ = mirror
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / f"{NAME}.part").write_bytes(DATA[:500])
    words = ["fetch", "wikipedia", "20260101", "--out", str(tmp_path / "raw"), "--mirror", url]
    assert main(words) == 0
    assert [start for name, start in behaviour.requests if name == PLACE] == [500]
    assert "sha1 as published" in capsys.readouterr().out
    (tmp_path / "raw" / NAME).unlink()
    (tmp_path / "raw" / f"{NAME}.part").write_bytes(DATA + b"more")
    assert main(words) == 0 and (tmp_path / "raw" / NAME).read_bytes() == DATA
    assert [start for name, start in behaviour.requests if name == PLACE] == [500, 0]


@pytest.mark.parametrize(
    ("there", "faults", "ranges"),
    [(b"", ["short"], True), (DATA[:500], ["drop"], False), (DATA + b"more", [], True)],
)
def test_bytes_that_come_again_are_counted_once(
    mirror: tuple[str, Behaviour, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    there: bytes,
    faults: list[str],
    ranges: bool,
) -> None:
    url, behaviour, _ = mirror
    behaviour.faults[PLACE], behaviour.ranges = faults, ranges
    (tmp_path / f"{NAME}.part").write_bytes(there)
    assert fetch("wikipedia", "20260101", tmp_path, mirror=url, patience=QUICK).exists()
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"{NAME} 100.0 %")


def test_a_mirror_may_be_a_folder(
    mirror: tuple[str, Behaviour, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = next(up for up in (mirror[2], *mirror[2].parents) if (up / "enwiki").is_dir())
    monkeypatch.chdir(folder.parent)
    for place in (str(folder), folder.name):
        path = fetch("wikipedia", "20260101", tmp_path / "raw", mirror=place)
        assert path.read_bytes() == DATA
        path.unlink()


def test_what_is_too_long_to_go_on_with_costs_no_try(
    mirror: tuple[str, Behaviour, Path], tmp_path: Path
) -> None:
    url, behaviour, _ = mirror
    behaviour.faults[PLACE] = ["wrong"]
    (tmp_path / f"{NAME}.part").write_bytes(DATA + b"more")
    assert fetch("wikipedia", "20260101", tmp_path, mirror=url, patience=QUICK).exists()


def test_what_is_not_as_published_is_not_kept(
    mirror: tuple[str, Behaviour, Path], tmp_path: Path
) -> None:
    url, behaviour, folder = mirror
    behaviour.faults[PLACE] = ["wrong", "wrong"]
    raw = tmp_path / "raw"
    with pytest.raises(UserError, match=f"{NAME}: came twice with another sha1") as caught:
        fetch("wikipedia", "20260101", raw, mirror=url, patience=QUICK)
    assert list(raw.iterdir()) == [] and caught.type is UserError
    behaviour.faults[PLACE] = ["wrong"]
    fetch("wikipedia", "20260101", raw, mirror=url, patience=QUICK)
    assert (raw / NAME).read_bytes() == DATA
    (raw / NAME).write_bytes(DATA[:-1])
    with pytest.raises(UserError, match=f"{NAME}: is not what .* lists; move it away"):
        fetch("wikipedia", "20260101", raw, mirror=url, patience=QUICK)
    assert (raw / NAME).read_bytes() == DATA[:-1]


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("other")])
def test_what_is_no_file_is_not_gone_on_with(
    mirror: tuple[str, Behaviour, Path], tmp_path: Path, make: Callable[[Path], None]
) -> None:
    make(tmp_path / f"{NAME}.part")
    (tmp_path / "other").write_bytes(DATA * 2)
    with pytest.raises(UserError, match=f"{NAME}.part: not a regular file"):
        fetch("wikipedia", "20260101", tmp_path, mirror=mirror[0], patience=QUICK)
    assert (tmp_path / "other").read_bytes() == DATA * 2


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"status": "in-progress"}, "is not done yet; take an older date"),
        ({"name": "enwiki-20260101-other"}, "is not listed"),
        ({"size": "1"}, "is no list of a dump's files"),
        ({"sha1": 5}, "is no list of a dump's files"),
        ({"size": 10**18}, "1 EB are needed"),
        ({"size": 10**400}, "is no list of a dump's files"),
    ],
)
def test_a_list_that_does_not_name_it_is_one_line(
    mirror: tuple[str, Behaviour, Path], tmp_path: Path, change: dict, line: str
) -> None:
    url, _, folder = mirror
    publish(folder, **change)
    with pytest.raises(UserError, match=line):
        fetch("wikipedia", "20260101", tmp_path, mirror=url, patience=QUICK)
    (folder / "dumpstatus.json").write_text("[" * 5000)
    with pytest.raises(UserError, match="is no list of a dump's files"):
        fetch("wikipedia", "20260101", tmp_path, mirror=url, patience=QUICK)
    with pytest.raises(UserError, match="dewikibooks/20260101/dumpstatus.json: no such dump"):
        fetch("wikibooks", "20260101", tmp_path, language="de", mirror=url, patience=QUICK)
    with pytest.raises(UserError, match="YYYYMMDD"):
        fetch("wikipedia", "../..", tmp_path, mirror=url, patience=QUICK)
    with pytest.raises(UserError, match="is no code of a language, such as en"):
        fetch("wikipedia", "20260101", tmp_path, language="../../en", mirror=url, patience=QUICK)


def test_a_disk_without_locks_takes_a_dump(
    mirror: tuple[str, Behaviour, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("core.files.fcntl.flock", none)
    path = fetch("wikipedia", "20260101", tmp_path / "raw", mirror=mirror[0], patience=QUICK)
    assert path.read_bytes() == DATA and os.listdir(path.parent) == [NAME]
