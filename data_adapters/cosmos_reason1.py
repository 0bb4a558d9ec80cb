"""Cosmos-Reason1 SFT rows, from the hub or from a local folder of the same layout.

    {"video": "clips/0123.mp4", "conversations": [{"role": "user", "content": "What does the robot do next?"},
                                                  {"role": "assistant", "content": "<think>…</think> It grasps the cup."}]}

`data.path` is `nvidia/Cosmos-Reason1-SFT-Dataset` or a folder, `data.subset` robovqa, av, agibot, bridgev2 or holoassist,
`data.split` understanding or reasoning. Clips lie below `<subset>/` and `data.media_path`, in folders or in archives
(.tar.gz, .tgz, .tar, .zip), and are matched by file name; in `av` by its first part, up to the first dot.
The video is shown in the first user turn only.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from dsreason.config.schema import SourceConfig
from dsreason.data.archives import SUFFIXES as ARCHIVE_SUFFIXES
from dsreason.data.archives import unpack
from dsreason.data.types import Message, Sample
from dsreason.errors import DataError

VIDEO_SUFFIXES = (".mp4", ".mov", ".mkv", ".webm", ".avi")


def to_sample(row: dict[str, Any], data: SourceConfig) -> Sample:
    clip = find_clip(row["video"], data)
    messages: list[Message] = [{"role": turn["role"], "content": turn["content"]} for turn in row["conversations"]]
    first = next((message for message in messages if message["role"] == "user"), None)
    if first is None:
        raise DataError("field 'conversations': no user turn to show the video in")
    first["content"] = [{"type": "video", "video": str(clip)}, {"type": "text", "text": first["content"]}]
    answers = [message["content"] for message in messages if message["role"] == "assistant"]
    return Sample(str(row.get("id", row["video"])), messages, answer=answers[-1] if answers else None)


def find_clip(video: str, data: SourceConfig) -> Path:
    subset = data.subset or ""
    clips = index_clips(data.path, subset, data.revision, data.media_path)
    clip = clips.get(clip_name(video, subset))
    if clip is None:
        raise DataError(
            f"field 'video': no clip named {Path(video).name} among the {len(clips)} of {data.path} {subset}"
        )
    return clip


def clip_name(video: str, subset: str) -> str:
    return Path(video).name.split(".")[0] if subset == "av" else Path(video).name


@cache
def index_clips(path: str, subset: str, revision: str | None, media_path: str) -> dict[str, Path]:
    """Clip name → file, of everything that the folder and its archives hold."""
    folder = Path(path).expanduser() if Path(path).expanduser().is_dir() else download(path, subset, revision)
    inside = folder / subset
    places = [inside, Path(media_path).expanduser()] if media_path else [inside]
    files = sorted(file for place in places for file in place.rglob("*"))
    unpacked = [unpack(file) for file in files if file.name.lower().endswith(ARCHIVE_SUFFIXES)]
    found: dict[str, Path] = {}
    for file in (*files, *(file for place in unpacked for file in sorted(place.rglob("*")))):
        if file.suffix.lower() in VIDEO_SUFFIXES:
            found.setdefault(clip_name(file.name, subset), file.absolute())
    return found


def download(path: str, subset: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = [f"{subset}/clips*", f"{subset}/clips/*"]
    try:
        return Path(snapshot_download(path, repo_type="dataset", revision=revision, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise DataError(f"data.path {path}: no local folder, and its clips cannot be fetched: {error}") from error
