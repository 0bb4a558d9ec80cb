"""The cache folder for files that can be recreated: tiny models, the built-in task and unpacked archives."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dsreason.errors import ConfigError, StorageError
from dsreason.files.disk import to_os_error


def get_cache_dir() -> Path:
    """Return `$DSREASON_CACHE`, or else `$COSMOS_CACHE`, or else `dsreason` in `$XDG_CACHE_HOME` or `~/.cache`."""
    folder = os.environ.get("DSREASON_CACHE") or os.environ.get("COSMOS_CACHE")
    try:
        if folder:
            return Path(folder).expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dsreason"
    except RuntimeError as error:
        raise ConfigError(f"cannot determine the cache folder: {error}; set HOME or DSREASON_CACHE") from None


@contextmanager
def convert_cache_errors(path: Path, variable: str) -> Iterator[None]:
    """Convert OS errors in the block to StorageErrors, because the data are not at fault if the cache is not writable.

    `variable` is the environment variable that sets the cache folder.
    """
    try:
        yield
    except Exception as error:
        if (cause := to_os_error(error)) is None:
            raise
        raise StorageError(
            f"{path}: cannot be written: {cause}; free disk space, or set {variable} to another folder"
        ) from error
