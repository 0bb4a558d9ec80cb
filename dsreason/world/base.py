"""The base models that exports refer to.

An export contains only the trained weights; other components, such as the 16 GB text encoder, come from its base model.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dsreason.errors import CheckpointError
from dsreason.files.atomic import build_once
from dsreason.world.families.components import read_json
from dsreason.world.schema import WorldModelConfig

FILE = "base_model.json"
"""File in an export that names the base model: `{"path": "nvidia/Cosmos-Predict2.5-2B", "revision": "…"}`."""

JOINED = "export-"
"""Prefix of the cache folders that link to an export and its base model."""


def describe_base(model: Mapping[str, Any], source: Path) -> str:
    """Return the content of an export's `base_model.json`, which names the model that the run started from.

    Args:
        model: `path` and `revision` from the run's configuration; empty if they are unknown.
        source: local folder with that model. If it is itself an export, the base model is copied from its
            `base_model.json`, so an export never refers to another export.
    """
    if (source / FILE).is_file():
        note = read_json(source / FILE)
        return json.dumps({"path": note.get("path"), "revision": note.get("revision")}, indent=2) + "\n"
    path = model.get("path", str(source))
    if (local := Path(path).expanduser()).is_dir():
        path = str(local.absolute())
    return json.dumps({"path": path, "revision": model.get("revision")}, indent=2) + "\n"


def add_base(folder: Path, cache: Path, resolve: Callable[[WorldModelConfig], Path]) -> Path:
    """Return a folder that links to an export's transformer and to its base model's other components.

    A folder that is not an export is returned unchanged.

    Raises:
        CheckpointError: the base model cannot be found, or the export contains only an adapter.
    """
    if not is_export(folder):
        return folder
    if not (folder / "transformer").is_dir():
        raise CheckpointError(
            f"{folder}: is an export of an adapter, which cannot be trained further; set model.path to its base model, "
            f"{read_json(folder / FILE).get('path')}, or continue its run with --resume"
        )
    return join_folders(folder, find_base(folder, resolve), cache)


def is_export(folder: Path) -> bool:
    """Return whether `folder` is an export without the components of its base model."""
    return os.path.isfile(folder / FILE) and not (folder / "vae").is_dir()


def find_base(folder: Path, resolve: Callable[[WorldModelConfig], Path]) -> Path:
    """Return the local folder of an export's base model."""
    note = read_json(folder / FILE)
    named_folder = Path(str(note.get("path"))).expanduser()
    if is_export(named_folder):
        raise CheckpointError(
            f'{folder / FILE}: names another export, {named_folder}; set "path" to the model from which that was trained'
        )
    try:
        return resolve(WorldModelConfig(path=note["path"], revision=note.get("revision")))
    except (KeyError, ValueError) as error:
        raise CheckpointError(
            f'{folder / FILE}: does not name the base model ({error}); set "path" to its folder or Hub name'
        ) from error
    except CheckpointError as error:
        raise CheckpointError(f'{folder / FILE}: {error}; set "path" to the current location of the model') from error


def join_folders(folder: Path, base: Path, cache: Path) -> Path:
    folder, base = folder.resolve(), base.resolve()
    key = hashlib.sha256(f"{folder}\n{base}".encode()).hexdigest()[:16]

    def link(target: Path) -> None:
        target.mkdir(parents=True, exist_ok=True)
        for part in sorted({part.name for part in base.iterdir()} | {"transformer", "scheduler", FILE}):
            if part.startswith("."):
                continue
            part_folder = folder / part if (folder / part).exists() else base / part
            (target / part).unlink(missing_ok=True)
            (target / part).symlink_to(part_folder)

    return build_once(cache / f"{JOINED}{key}", link)


def find_component_folder(folder: Path, part: str, cache: Path) -> Path:
    """Return the folder that contains the model's file or component `part`; if `folder` is a joined folder, follow its link."""
    joined = folder.parent == cache and folder.name.startswith(JOINED)
    return Path(os.readlink(folder / part)).parent if joined else folder
