"""Driving clips with one label file each: `videos/<id>.<camera>.mp4` and `metas/<id>.label.json` below `data.path`.

A label is a JSON object, `{"weather": "Light rain", "driving_difficulty": 3, …}`. The model learns to answer
`data.question` with that object as JSON text, so that the answer can be parsed again; `sample.meta["label"]` is the object.

An id may have dots. `data.video_pattern = "*.camera_front_wide_120fov.mp4"` takes the videos of one camera, and the id is what
`*` stands for. Without it a video belongs to the label whose id, and a dot, its name begins with.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from dsreason.config.schema import SourceConfig
from dsreason.data.rows import only_train
from dsreason.data.types import Message, Sample
from dsreason.errors import DataError

LABEL = ".label.json"
VIDEO_SUFFIXES = (".mp4", ".mov", ".mkv", ".webm", ".avi")


def rows(data: SourceConfig) -> list[dict[str, Any]]:
    """One row for every id that has a video or a label; a missing partner is reported when the row is used."""
    folder = Path(data.path).expanduser()
    only_train(data, f"{folder}: a folder of videos/ and metas/")
    for name in ("videos", "metas"):
        if not (folder / name).is_dir():
            raise DataError(
                f"{folder / name}: no such folder; the adapter local_labels needs videos/ and metas/ in data.path"
            )
    labels = {label.name.removesuffix(LABEL): label for label in (folder / "metas").glob(f"*{LABEL}")}
    found: dict[str, dict[str, Any]] = {name: {"label": str(label.absolute())} for name, label in labels.items()}
    for video in find_videos(folder / "videos", data.video_pattern):
        name = video_id(video.name, labels, data.video_pattern)
        found.setdefault(name, {}).setdefault("videos", []).append(str(video.absolute()))
    return [{"id": name, **files} for name, files in sorted(found.items())]


def find_videos(folder: Path, pattern: str | None) -> list[Path]:
    """The videos that the pattern takes, or all. DataError where it takes none of those that are there."""
    videos = sorted(path for path in folder.iterdir() if path.suffix.lower() in VIDEO_SUFFIXES)
    if pattern is None:
        return videos
    before, after = pattern.split("*")
    room = len(before) + len(after)
    taken = [
        video
        for video in videos
        if video.name.startswith(before) and video.name.endswith(after) and len(video.name) > room
    ]
    if videos and not taken:
        raise DataError(
            f"{folder}: data.video_pattern ({pattern!r}) takes none of the {len(videos)} videos there, such as "
            f"{videos[0].name}; correct it"
        )
    return taken


def video_id(name: str, labels: Collection[str], pattern: str | None) -> str:
    """`2023.05.01_a` of `2023.05.01_a.camera_front.mp4`: the longest id of a label that fits, else all but the camera."""
    if pattern is not None:
        before, after = pattern.split("*")
        return name[len(before) : len(name) - len(after)]
    parts = name.split(".")[:-1]
    beginnings = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
    without_camera = beginnings[min(1, len(beginnings) - 1)]
    return next((beginning for beginning in beginnings if beginning in labels), without_camera)


def to_sample(row: dict[str, Any], data: SourceConfig) -> Sample:
    if "label" not in row:
        raise DataError(f"{row['videos'][0]} has no label metas/{row['id']}{LABEL}")
    label = Path(row["label"])
    pattern = data.video_pattern or "*.*"
    videos = row.get("videos", [str(label.parent.parent / "videos" / pattern.replace("*", row["id"], 1))])
    if len(videos) != 1:
        names = [Path(video).name for video in videos]
        raise DataError(
            f"{label.name} has {len(videos)} videos ({', '.join(names)}), and one is shown; choose a camera, such as "
            f'data.video_pattern = "*{names[0].removeprefix(row["id"])}"'
        )
    content = read_label(label)
    # Not in Python's notation, so that any program can read what the model answers.
    answer = json.dumps(content, ensure_ascii=False)
    shown = [{"type": "video", "video": videos[0]}, {"type": "text", "text": data.question}]
    messages: list[Message] = [{"role": "user", "content": shown}, {"role": "assistant", "content": answer}]
    return Sample(id=row["id"], messages=messages, answer=answer, meta={"label": content})


def read_label(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: not valid JSON: {error}") from error
