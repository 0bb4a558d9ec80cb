"""Checks that a data set uses only its own files: a local data set's README and index files may name only files in its folder.

Like media paths, these paths are checked without resolving links: a link may point anywhere, because somebody created it on
purpose. A data set on the Hub may name URLs, but no files on this machine.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import DatasetCard, hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, RemoteEntryNotFoundError

from dsreason.errors import DataError
from dsreason.secrets import mask_credentials

README = "README.md"
STANDALONE = ".huggingface.yaml"
"""Name of a file that may contain the YAML header in place of the README; if both do, the README takes precedence."""
STATE, SPLITS = "state.json", "dataset_dict.json"
"""Names of the index files that `save_to_disk` writes: `STATE` lists a table's files, and `SPLITS` the folders of the splits."""

ADDRESS = re.compile(r"[A-Za-z][\w+.-]*:|.*(://|::)", re.DOTALL)
"""Pattern for URLs: `http://…`, `data:…`, and URL chains for the `fsspec` library, such as `zip://rows.jsonl::http://…`."""


def is_inside(path: str | Path, folder: str | Path) -> bool:
    """Return whether an absolute path is below an absolute `folder`, without resolving links."""
    return Path(os.path.normpath(path)).is_relative_to(os.path.normpath(folder))


def check_configs(folder: Path) -> None:
    """Raise DataError if a `configs` entry in the folder's README names files outside the folder."""
    for name in (README, STANDALONE):
        if (file := folder / name).is_file():
            for key, text in _iter_named_files(file):
                _check(file, key, text, folder, folder)


def check_hub_configs(repository: str, revision: str | None) -> None:
    """Raise DataError if the README of a data set on the Hub names files on this machine."""
    for name in (README, STANDALONE):
        try:
            file = Path(hf_hub_download(repository, name, repo_type="dataset", revision=revision))
        except RemoteEntryNotFoundError:
            continue
        except (HfHubHTTPError, OSError, ValueError):
            return  # `datasets` will meet the same error and report it
        for key, text in _iter_named_files(file):
            if _is_local(text):
                raise DataError(
                    f"{repository}: {name}: {key}: {text} is a file on this machine, not in the data set; "
                    "remove the entry in a copy of the data set, and use the copy"
                )


def check_saved(folder: Path) -> None:
    """Raise DataError if the index files written by `save_to_disk` name tables or splits outside `folder`."""
    tables = [folder]
    if (file := folder / SPLITS).is_file():
        splits = list(_iter_texts(_read_index(file).get("splits")))
        for i, split in enumerate(splits):
            _check(file, f"splits[{i}]", split, folder, folder)
        tables += [folder / split for split in splits]
    for table in tables:
        if (file := table / STATE).is_file():
            entries = _read_index(file).get("_data_files")
            for i, entry in enumerate(entries if isinstance(entries, list) else []):
                for text in _iter_texts(entry):
                    _check(file, f"_data_files[{i}].filename", text, table, folder)


def _iter_named_files(file: Path) -> Iterator[tuple[str, str]]:
    """Yield (key, text) for each file named in the YAML header of a README or standalone file, parsed as `datasets` does."""
    try:
        header = (
            DatasetCard.load(file).data.to_dict() if file.name == README else yaml.safe_load(file.read_text()) or {}
        )
        configs = header.get("configs")
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{file}: its YAML header cannot be read: {error}; correct it") from error
    for i, config in enumerate(configs if isinstance(configs, list) else []):
        for key in ("data_dir", "data_files"):
            for text in _iter_texts(config.get(key) if isinstance(config, dict) else None):
                yield f"configs[{i}].{key}", text


def _is_local(text: str) -> bool:
    """Return whether an entry in a README on the Hub refers to a local file.

    This is true of an absolute path, a path that leaves the repository, a `file:` URL, and a URL chain that ends in a plain path.
    """
    first, *chained = text.split("::")
    repository = Path("/repository")
    return (
        any("://" not in part for part in chained)
        or any(re.match("(file|local):", part) for part in (first, *chained))
        or not is_inside(repository / first, repository)
    )


def _read_index(file: Path) -> dict[str, Any]:
    try:
        document = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file}: is not valid JSON ({error}); save the data set again") from error
    if not isinstance(document, dict):
        raise DataError(f"{file}: must contain a JSON object, but contains {document!r:.100}; save the data set again")
    return document


def _iter_texts(value: Any) -> Iterator[str]:
    """Yield all strings in nested lists and mappings: `[{split: train, path: [a, b]}]` → train, a, b."""
    waiting, visited = [value], set()
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, list | dict) and id(item) not in visited:
            visited.add(id(item))  # YAML aliases can turn a short text into a billion items or a recursive list
            waiting += reversed(list(item.values() if isinstance(item, dict) else item))


def _check(file: Path, key: str, path: str, base: Path, folder: Path) -> None:
    """Raise DataError unless `path`, relative to `base`, is inside `folder`."""
    if ADDRESS.match(path):
        raise DataError(
            f"{file}: {key}: {mask_credentials(path)} is a URL, but a local data set may use only files in its folder; "
            f"download the file into {folder}, and refer to it there"
        )
    if not is_inside(base.absolute() / path, folder.absolute()):
        raise DataError(f"{file}: {key}: {path} is outside {folder}; move the file there, or set data.path to it")


def is_saved(folder: Path) -> bool:
    """Return whether the folder was written by `save_to_disk` from `datasets`."""
    return (folder / SPLITS).is_file() or (folder / STATE).is_file()


def has_configs(folder: Path) -> bool:
    """Return whether the folder has a README in the Hub's format that assigns files to splits."""
    readme = folder / README
    if not readme.is_file():
        return False
    parts = readme.read_text(errors="replace").split("---", 2)
    return len(parts) == 3 and not parts[0].strip() and "\nconfigs:" in parts[1]
