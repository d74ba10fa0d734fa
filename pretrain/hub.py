"""An exported folder to a repository of the Hugging Face hub: the one import of its package."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

from core.errors import TryAgain, UserError, short

_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def check(name: str) -> None:
    """UserError where a push cannot be meant or made."""
    if not _NAME.fullmatch(name):
        raise UserError(f"--push: {short(name)}: not of the form ORG/NAME")
    if importlib.util.find_spec("huggingface_hub") is None:
        raise UserError("--push: huggingface_hub is not installed: pip install huggingface_hub")


def push(folder: Path, name: str, origin: str) -> str:
    """Upload all files of the folder in one commit; the repository's address. HF_ENDPOINT names
    another hub, HF_TOKEN or `hf auth login` who pushes; a repository that is not there is made,
    and private. UserError for what the hub refuses, TryAgain where it does not answer."""
    from huggingface_hub import HfApi

    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
    try:
        address = api.create_repo(name, private=True, exist_ok=True)
        api.upload_folder(folder_path=folder, repo_id=name, commit_message=f"From {origin}")
    except Exception as error:  # the package's, or one of the http client that it brings
        status = getattr(getattr(error, "response", None), "status_code", None)
        refused = isinstance(error, ValueError) or (status is not None and status < 500)
        why = short(" ".join(str(error).split()), 300)
        raise (UserError if refused else TryAgain)(f"--push {name}: {why}") from None
    return str(address)
