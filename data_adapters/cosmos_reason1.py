"""Adapter for Cosmos-Reason1 SFT rows, from the Hub or from a local folder with the same layout.

    {"video": "clips/0123.mp4", "conversations": [{"role": "user", "content": "What does the robot do next?"},
                                                  {"role": "assistant", "content": "<think>…</think> It grasps the cup."}]}

`data.path` is `nvidia/Cosmos-Reason1-SFT-Dataset`, a folder with the same layout, or an annotation file. `data.subset` is
robovqa, av, agibot, bridgev2 or holoassist; `data.split` is understanding or reasoning.

The adapter looks for clips in `<subset>/` and in `data.media_path`, in folders and in archives (.tar.gz, .tgz, .tar, .zip). A
row's clip is the file at the row's path or, if that does not exist, the only file with the same name; in `av`, only the part of
the name before the first dot must match. The video is inserted into the first user turn. For rows with `qa_pairs`, use the
adapter `cosmos_reason1_rl`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from dsreason.config.schema import SourceConfig
from dsreason.data.formats.read import get_last_reply
from dsreason.data.formats.turns import read_messages
from dsreason.data.messages import join_text
from dsreason.data.rows import text_field
from dsreason.data.types import Message, Sample
from dsreason.errors import DataError
from dsreason.files.archives import SUFFIXES as ARCHIVE_SUFFIXES
from dsreason.files.archives import unpack
from dsreason.files.hub import convert_dataset_errors, fetch_snapshot
from dsreason.files.own_files import is_inside

SUFFIXES = {"video": (".mp4", ".mov", ".mkv", ".webm", ".avi"), "image": (".jpg", ".jpeg", ".png", ".webp")}


def to_sample(row: dict[str, Any], data: SourceConfig) -> Sample:
    if "qa_pairs" in row and "conversations" not in row:
        raise DataError(
            "the row has the field 'qa_pairs' instead of 'conversations'; set data.adapter = \"cosmos_reason1_rl\""
        )
    clip = find_clip(text_field(row, "video"), data)
    turns = read_messages(row["conversations"], "conversations")
    messages: list[Message] = [{**turn, "content": join_text(turn)} for turn in turns]
    first = next((message for message in messages if message["role"] == "user"), None)
    if first is None:
        raise DataError("field 'conversations' has no user turn to which the video could be added; add a user turn")
    answer = get_last_reply(messages)
    first["content"] = [{"type": "video", "video": str(clip)}, {"type": "text", "text": first["content"]}]
    return Sample(str(row.get("id", row["video"])), messages, answer=answer)


def find_clip(video: str, data: SourceConfig, kind: str = "video") -> Path:
    """Return the path of a clip or image: the file at the row's path, or else the only file with the same name.

    Folders are searched before archives. If no file matches, return the path at which the file should be.
    """
    subset = data.subset or ""
    indexes = index_clips(data.path, subset, data.revision, data.media_path)
    for clips in indexes:
        for folder in clips.folders:
            if not Path(video).is_absolute() and not is_inside(folder.absolute() / video, folder.absolute()):
                raise DataError(
                    f"field {kind!r}: {video} points outside {folder}; use a path inside it or an absolute path"
                )
            if (folder / video).is_file():
                return (folder / video).absolute()
        matches = clips.by_name.get((kind, get_clip_name(video, subset)), [])
        if len(matches) > 1:
            raise DataError(
                f"field {kind!r}: {video} matches both {matches[0]} and {matches[1]}; specify its path relative to "
                f"{clips.folders[0]}"
            )
        if matches:
            return matches[0]
    return (indexes[0].folders[0] / video).absolute()


def get_clip_name(video: str, subset: str) -> str:
    return Path(video).name.split(".")[0] if subset == "av" else Path(video).name


@dataclass(frozen=True)
class Clips:
    """Index of the clips and images in `folders`; `by_name` maps (kind, name) to file paths."""

    folders: list[Path]
    by_name: dict[tuple[str, str], list[Path]]


@cache
def index_clips(path: str, subset: str, revision: str | None, media_path: str) -> tuple[Clips, Clips]:
    """Unpack the archives in the folders; return an index of the clips in the folders, and an index of those unpacked."""
    source = Path(path).expanduser()
    folder = source if source.is_dir() else source.parent if source.is_file() else download(path, subset, revision)
    folders = [folder / subset, folder] if subset else [folder]
    folders += [Path(media_path).expanduser()] if media_path else []
    # If a subset is set, the folder above it is not searched, because clips of other subsets may have the same names.
    searched = [root for root in folders if root != folder or not subset]
    files = sorted({file.absolute() for root in searched for file in root.rglob("*")})
    unpacked = [unpack(file) for file in files if file.name.lower().endswith(ARCHIVE_SUFFIXES)]
    members = [file for root in unpacked for file in sorted(root.rglob("*"))]
    return Clips(folders, group_by_name(files, subset)), Clips(unpacked, group_by_name(members, subset))


def group_by_name(files: Iterable[Path], subset: str) -> dict[tuple[str, str], list[Path]]:
    paths: dict[tuple[str, str], list[Path]] = {}
    for file in files:
        for kind, suffixes in SUFFIXES.items():
            if file.suffix.lower() in suffixes:
                paths.setdefault((kind, get_clip_name(file.name, subset)), []).append(file)
    return paths


def download(path: str, subset: str, revision: str | None) -> Path:
    patterns = [f"{subset}/clips*", f"{subset}/clips/*"]
    with convert_dataset_errors(path, revision):
        return fetch_snapshot(path, repo_type="dataset", revision=revision, allow_patterns=patterns)
