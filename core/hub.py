"""The one door to the Hugging Face hub: `hf:ORG/NAME[@REVISION][:PATTERN]` in, ORG/NAME out. Its
package is imported where a name asks for it; HF_ENDPOINT names another hub, HF_TOKEN or `hf auth
login` who asks: a token goes by https:// or to this machine alone."""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import ipaddress
import logging
import os
import re
import urllib.parse
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from core.console import notice, printable
from core.errors import TryAgain, UserError, disk_error, short
from core.files import sha256

_PLACE = re.compile(r"hf:([\w.-]+(?:/[\w.-]+)?)(?:@([\w./-]+))?(?::([^:]+))?")
_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
# What libraries may read of a repository in place of a model that lies there, too.
_READ_BEFORE = (
    *("tokenizer.json", "added_tokens.json", "special_tokens_map.json"),
    *("*.safetensors", "*.safetensors.index.json", "pytorch_model*", "adapter_*"),
)
_SILENCE = 60.0  # seconds without a byte, after which a hub counts as one that does not answer


def is_hub(place: str | Path) -> bool:
    """Whether `place` names something on the hub."""
    return isinstance(place, str) and place.startswith("hf:") and not place.startswith("hf://")


def fetch(place: str, kind: str, patterns: Sequence[str] = ()) -> tuple[Path, str]:
    """(the folder of a repository's files in the library's own cache, the pattern that `place`
    names or ""). kind: "dataset" or "model". patterns: of the files to fetch where `place` names
    none; none: all. What is there already is not fetched again; without a network what the cache
    holds is taken, and said where nothing tells whether that is all. UserError; TryAgain where
    the hub does not answer."""
    found = _PLACE.fullmatch(place)
    if found is None:
        raise UserError(f"{place}: hf:ORG/NAME, hf:ORG/NAME@REVISION or hf:ORG/NAME:PATTERN")
    name, revision, pattern = found.groups()
    library, private = _library(place), _private(place)
    errors = library.errors
    held_back = "" if private else " (HF_ENDPOINT is http://: no token was sent)"
    try:
        with _plain_warnings():
            folder = library.snapshot_download(
                name,
                repo_type=kind,
                revision=revision,
                allow_patterns=[pattern] if pattern else list(patterns) or None,
                # As they are now: the library's own are those of its import.
                endpoint=os.environ.get("HF_ENDPOINT"),
                token=None if private else False,
                cache_dir=os.environ.get("HF_HUB_CACHE"),
            )
    except errors.GatedRepoError:
        raise UserError(
            f"{place}: its owner asks for consent; give it on its page, then "
            f"`hf auth login`{held_back}"
        ) from None
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError):
        raise UserError(f"{place}: no such public {kind} on the hub{held_back}") from None
    except Exception as error:  # the package's, or one of the http client that it brings
        raise _error(error, place) from None
    try:  # the list of a commit's files, which the library keeps of those that it fetches whole
        if hasattr(library, "get_cached_repo_tree"):
            library.get_cached_repo_tree(
                name,
                repo_type=kind,
                revision=Path(folder).name,
                cache_dir=os.environ.get("HF_HUB_CACHE"),
            )
    except errors.CachedRepoTreeNotFoundError:
        notice(
            f"warning: {place}: the hub was not reached, and nothing tells whether {folder} holds "
            "all files that it has"
        )
    return Path(folder), pattern or ""


def check(name: str) -> None:
    """UserError where a push cannot be meant or made."""
    if not _NAME.fullmatch(name):
        raise UserError(f"--push: {short(name)}: not of the form ORG/NAME")
    _library("--push")
    if not _private("--push"):
        raise UserError(
            f"--push: HF_ENDPOINT: {os.environ['HF_ENDPOINT']}: the token would go there in the "
            "clear; https:// is wanted"
        )


def push(folder: Path, name: str, origin: str) -> str:
    """Upload all files of a model's folder in one commit; the repository's address. A repository
    that is not there is made, and private. UserError for what the hub refuses or leaves out, and,
    before anything is sent, where it has other weights or files of a tokenizer; TryAgain where it
    does not answer."""
    library = _library("--push")
    api, errors = library.HfApi(endpoint=os.environ.get("HF_ENDPOINT")), library.errors
    files = {p.relative_to(folder).as_posix(): p for p in folder.rglob("*") if p.is_file()}
    try:
        with _plain_warnings():
            address = api.create_repo(name, private=True, exist_ok=True)
            listed: list[str] = []
            with contextlib.suppress(errors.RevisionNotFoundError, errors.EntryNotFoundError):
                listed = api.list_repo_files(name)  # nothing, where nothing was committed yet
            others = sorted(n for n in {*listed} - {*files} if "/" not in n)
            if others := [n for n in others if any(fnmatch.fnmatch(n, x) for x in _READ_BEFORE)]:
                raise UserError(
                    f"--push {name}: holds {short(', '.join(others), 200)}, which other libraries "
                    f"may read in place of what is in {folder}: take such files away there"
                )
            message = f"From {origin}"
            commit = api.upload_folder(folder_path=folder, repo_id=name, commit_message=message)
            found = api.get_paths_info(name, sorted(files), revision=commit.oid)
            there = {file.path: file for file in found}
            missing = [n for n in sorted(files) if not _is_of(files[n], there.get(n))]
    except UserError:
        raise
    except Exception as error:
        raise _error(error, f"--push {name}") from None
    if replaced := sorted(({*listed} & {*files}) - {*missing}):
        kept = "the hub keeps what they were in its history"
        notice(f"{name}: replaced {', '.join(replaced)}, which were there; {kept}")
    if missing:
        raise UserError(
            f"--push {name}: {short(', '.join(missing), 200)}: not there as in {folder}; does "
            "the repository's .gitignore keep such files out?"
        )
    return str(address)


def _is_of(path: Path, stored: Any) -> bool:
    """Whether the hub's file, by the sum that it has of it, is the one of `path`."""
    if getattr(stored, "lfs", None) is not None:
        return stored.lfs.sha256 == sha256(path)
    data = path.read_bytes() if getattr(stored, "size", None) == path.stat().st_size else b""
    return (
        getattr(stored, "blob_id", "") == hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    )


@contextlib.contextmanager
def _plain_warnings() -> Iterator[None]:
    """What the library warns of inside, since a hub said so, is told in lines of ours."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", UserWarning)
        try:
            yield
        finally:
            for text in dict.fromkeys(str(warning.message) for warning in said):
                notice(f"warning: the hub: {short(' '.join(text.split()), 1000)}")


class _Printable(logging.Filter):
    """Of the library's log, which quotes what a hub says."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = printable(short(record.getMessage(), 1000)), ()
        return True


_PRINTABLE = _Printable()


def _private(what: str) -> bool:
    """Whether none on the way to the hub can read a token. UserError where HF_ENDPOINT is none."""
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        parts = urllib.parse.urlsplit(endpoint)
        host, _ = parts.hostname or "", parts.port
    except ValueError:
        host = ""
    plain = f"{parts.scheme}://" if host else ""
    if plain not in ("http://", "https://") or "@" in parts.netloc or not endpoint.isprintable():
        raise UserError(
            f"{what}: HF_ENDPOINT: {endpoint.rpartition('@')[2]!r}: https://HOST is wanted"
        )
    with contextlib.suppress(ValueError):
        return plain == "https://" or ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _library(what: str) -> ModuleType:
    try:
        import huggingface_hub
        import huggingface_hub.errors
    except ImportError:
        raise UserError(
            f"{what}: huggingface_hub is not installed: pip install huggingface_hub"
        ) from None
    try:
        before_a_request = huggingface_hub.get_session().event_hooks["request"]
    except Exception as error:  # of its http client, before anything is asked
        raise UserError(
            f"{what}: of the proxies and certificates that the environment names: {error}"
        ) from None
    for handler in logging.getLogger("huggingface_hub").handlers:
        handler.addFilter(_PRINTABLE)  # once: it knows its own
    if _give_up_in_time not in before_a_request:
        before_a_request.append(_give_up_in_time)
    return huggingface_hub


def _give_up_in_time(request: Any) -> None:
    """Bound what the library would wait for without end, as it does for an answer of its API."""
    given = request.extensions.get("timeout", {})
    longest = _SILENCE if request.method in ("GET", "HEAD") else 10 * _SILENCE  # a commit's answer
    request.extensions["timeout"] = {
        wait: given.get(wait) or longest for wait in ("connect", "read", "write", "pool")
    }


def _error(error: Exception, what: str) -> UserError:
    if isinstance(error, OSError) and error.errno:  # of the cache's disk
        from huggingface_hub.constants import HF_HUB_CACHE

        place = error.filename or os.environ.get("HF_HUB_CACHE", HF_HUB_CACHE)
        return disk_error(error, place, what)
    # Of a file that the hub refuses the library says that the cache has it not.
    if getattr(cause := error.__cause__, "response", None) is not None:
        error = cause
    status = getattr(getattr(error, "response", None), "status_code", None)
    passing = status is None or status >= 500 or status in (408, 429)
    refused = isinstance(error, ValueError) or not passing
    why = short(" ".join(str(error).split()) or type(error).__name__, 300)
    if status is None and "HF_ENDPOINT" in os.environ:
        why += f" (HF_ENDPOINT: {os.environ['HF_ENDPOINT']})"
    return (UserError if refused else TryAgain)(f"{what}: {why}")
