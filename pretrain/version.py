"""Which code this is."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path


@functools.cache
def code_version() -> str:
    """The commit of the checkout, with a mark when files were changed; else `unknown`."""
    root = Path(__file__).resolve().parent.parent
    try:
        return subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
