"""Adapter for driving clips with one label file each: `videos/<id>.<camera>.mp4` and `metas/<id>.label.json` in `data.path`.

A label is a JSON object, such as `{"weather": "Light rain", "driving_difficulty": 3, …}`. The model learns to answer
`data.question` with this object as JSON text, which programs can parse; `sample.meta["label"]` contains the object itself.

An id may contain dots. `data.video_pattern = "*.camera_front_wide_120fov.mp4"` selects one camera's videos; the id is the part of
the file name that matches `*`. Without a pattern, a video's id is its file name without the suffix, provided that a label with
this id exists; otherwise, the part after the last remaining dot, which names the camera, is removed as well.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from dsreason.config.schema import SourceConfig
from dsreason.data.rows import only_train
from dsreason.data.types import Message, Sample
from dsreason.errors import DataError

LABEL = ".label.json"
VIDEO_SUFFIXES = (".mp4", ".mov", ".mkv", ".webm", ".avi")
CAMERA = re.compile(r"\.[A-Za-z_][^.]*\.\w+")
"""Pattern for a camera and suffix, such as `.left.mp4`. A number, as in `run.4.mp4`, is more likely to be part of the id."""


def rows(data: SourceConfig) -> list[dict[str, Any]]:
    """Return one row per id that has a video or a label; if either is missing, `to_sample` raises an error."""
    folder = Path(data.path).expanduser()
    only_train(data, f"{folder}: a folder of videos/ and metas/")
    for name in ("videos", "metas"):
        if not (folder / name).is_dir():
            raise DataError(
                f"{folder / name} does not exist, but the adapter local_labels needs the folders videos/ and metas/ in "
                "data.path"
            )
    labels = {label.name.removesuffix(LABEL): label for label in (folder / "metas").glob(f"*{LABEL}")}
    files_by_id: dict[str, dict[str, Any]] = {name: {"label": str(label.absolute())} for name, label in labels.items()}
    for video in find_videos(folder / "videos", data.video_pattern):
        name = get_video_id(video.name, labels, data.video_pattern)
        files_by_id.setdefault(name, {}).setdefault("videos", []).append(str(video.absolute()))
    return [{"id": name, **files} for name, files in sorted(files_by_id.items())]


def find_videos(folder: Path, pattern: str | None) -> list[Path]:
    """Return the videos that match the pattern, or all videos if `pattern` is None. Raise DataError if no video matches."""
    videos = sorted(path for path in folder.iterdir() if path.suffix.lower() in VIDEO_SUFFIXES)
    if pattern is None:
        return videos
    matches = [video for video in videos if extract_id(video.name, pattern)]
    if videos and not matches:
        raise DataError(
            f"{folder}: data.video_pattern ({pattern!r}) matches none of the {len(videos)} videos (for example, "
            f"{videos[0].name}); correct the pattern"
        )
    return matches


def extract_id(name: str, pattern: str) -> str:
    """Return the part of a file name that matches the `*` in the pattern; "" if the name does not match the pattern."""
    before, after = pattern.split("*")
    is_match = name.startswith(before) and name.endswith(after) and len(name) > len(before) + len(after)
    return name[len(before) : len(name) - len(after)] if is_match else ""


def get_video_id(name: str, labels: Collection[str], pattern: str | None) -> str:
    """Return a video's id: `2023.05.01_a` for `2023.05.01_a.camera_front.mp4`.

    `2023.05.01_a.mp4` also has the id `2023.05.01_a` if a label with this id exists. At most one part is removed before the
    suffix: `run.4.camera_left.mp4` does not belong to `run`, even if `run.4` has no label.
    """
    if pattern is not None:
        return extract_id(name, pattern)
    stem = Path(name).stem
    return stem if stem in labels else Path(stem).stem


def to_sample(row: dict[str, Any], data: SourceConfig) -> Sample:
    if "label" not in row:
        advice = "if the camera's name contains a dot, set data.video_pattern"
        if data.video_pattern:
            advice = f"data.video_pattern ({data.video_pattern!r}) yields the id {row['id']!r}"
            if row["id"].endswith("."):
                advice += f"; set it to {data.video_pattern.replace('*', '*.', 1)!r}"
        raise DataError(f"{row['videos'][0]} has no label metas/{row['id']}{LABEL}; {advice}")
    label = Path(row["label"])
    pattern = data.video_pattern or "*.*"
    videos = row.get("videos", [str(label.parent.parent / "videos" / pattern.replace("*", row["id"], 1))])
    if len(videos) != 1:
        names = [Path(video).name for video in videos]
        endings = [name.removeprefix(row["id"]) for name in names]
        example = next((f', such as "*{ending}"' for ending in endings if CAMERA.fullmatch(ending)), "")
        raise DataError(
            f"{label.name} has {len(videos)} videos ({', '.join(names)}), but a sample can use only one; select a camera "
            f"with data.video_pattern{example}"
        )
    label_object = read_label(label)
    # The answer is JSON rather than Python syntax, so that any program can parse the model's answers.
    answer = json.dumps(label_object, ensure_ascii=False)
    content = [{"type": "video", "video": videos[0]}, {"type": "text", "text": data.question}]
    messages: list[Message] = [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
    return Sample(id=row["id"], messages=messages, answer=answer, meta={"label": label_object})


def read_label(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as JSON: {error}") from error
