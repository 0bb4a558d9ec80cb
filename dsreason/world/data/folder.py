"""Folders with videos (`videos/<name>.mp4`) and prompts (`metas/<name>.txt`, or `.json` with a `prompt` and other fields)."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from dsreason.errors import DataError
from dsreason.files.address import is_s3
from dsreason.files.remote import fetch_folder
from dsreason.world.data.rows import CheckedRows

log = logging.getLogger(__name__)

VIDEOS, METAS = "videos", "metas"
VIDEO_SUFFIXES = (".mp4", ".mov", ".mkv", ".webm", ".avi")
META_SUFFIXES = (".txt", ".json")
EMBEDDINGS = ("t5_xxl", "text_embedding")


def read_folder(path: str) -> CheckedRows:
    """Build one row per video, sorted by name. Videos without prompts and prompts without videos are bad rows.

    Raises:
        DataError: the folder or its subfolder `videos/` does not exist.
    """
    if is_s3(path):
        folder = fetch_folder(path, lambda name: name.startswith((f"{VIDEOS}/", f"{METAS}/")))
    else:
        folder = Path(path).expanduser()
    if not path or not (folder / VIDEOS).is_dir():
        start = f"{path}:" if path else "is empty, but"
        raise DataError(f"{start} must be a folder with {VIDEOS}/*.mp4 and {METAS}/*.txt")
    if any((folder / name).is_dir() for name in EMBEDDINGS):
        log.info("%s: ignoring the pickled text embeddings; prompts are encoded with the model's text encoder", path)
    videos = list_by_name(folder / VIDEOS, VIDEO_SUFFIXES)
    metas = list_by_name(folder / METAS, META_SUFFIXES)
    rows = CheckedRows()
    for name, file in videos.items():
        row_id = f"{path.rstrip('/')}/{VIDEOS}/{file.name}"
        if name not in metas:
            rows.bad.append(f"{row_id}: has no prompt: {METAS}/{name}.txt does not exist")
            continue
        try:
            rows.add(row_id, read_meta(metas[name]), str(file))
        except (OSError, ValueError, RecursionError) as error:
            cause = error.strerror if isinstance(error, OSError) else error
            rows.bad.append(f"{row_id}: {METAS}/{metas[name].name} cannot be read: {cause}")
    lonely = [metas[name].name for name in metas if name not in videos]
    rows.bad.extend(f"{path.rstrip('/')}/{METAS}/{name}: has no video" for name in lonely)
    return rows


def list_by_name(folder: Path, suffixes: tuple[str, ...]) -> dict[str, Path]:
    """Return the files that have one of the suffixes: stem → file. Raise DataError if two of them have the same stem."""
    clips: dict[str, Path] = {}
    for file in sorted(folder.iterdir()) if folder.is_dir() else []:
        if file.suffix.lower() in suffixes and not file.name.startswith("."):
            if file.stem in clips:
                raise DataError(
                    f"{folder}: {clips[file.stem].name} and {file.name} belong to the same clip; remove one"
                )
            clips[file.stem] = file
    return clips


def read_meta(file: Path) -> Any:
    """Return the fields of a `.json` file, or the text of any other file as the `prompt`. Raise ValueError if it is invalid."""
    text = file.read_text(encoding="utf-8-sig")
    return json.loads(text) if file.suffix.lower() == ".json" else {"prompt": " ".join(text.split())}
