"""Where things that can be made again are kept: tiny models, the built-in task, unpacked archives."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """`$DSREASON_CACHE`, or `dsreason` in the user's cache folder (`$XDG_CACHE_HOME`, `~/.cache`)."""
    own = os.environ.get("DSREASON_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dsreason"
