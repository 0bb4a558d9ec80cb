"""Driving clips with one label file each: `videos/<id>.<camera>.mp4` and `metas/<id>.label.json` below `data.path`.

A label is a JSON object, `{"weather": "Light rain", "driving_difficulty": 3, …}`. The model learns to answer
`data.question` with that object as JSON text, so that the answer can be parsed again; `sample.meta["label"]` is the object.

An id may have dots. `data.video_pattern = "*.camera_front_wide_120fov.mp4"` takes the videos of one camera, and the id is what
`*` stands for. Without it a video belongs to the label whose id is its name without the ending, or also without the part
between the last two dots, which is the camera.
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
"""`.left.mp4`. The `.4.mp4` of a video `run.4.mp4` is rather a part of an id."""


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
    """The videos that the pattern takes, or all. DataError if it takes none of those that are there."""
    videos = sorted(path for path in folder.iterdir() if path.suffix.lower() in VIDEO_SUFFIXES)
    if pattern is None:
        return videos
    taken = [video for video in videos if id_by_pattern(video.name, pattern)]
    if videos and not taken:
        raise DataError(
            f"{folder}: data.video_pattern ({pattern!r}) takes none of the {len(videos)} videos there, such as "
            f"{videos[0].name}; correct it"
        )
    return taken


def id_by_pattern(name: str, pattern: str) -> str:
    """Return what `*` stands for; "" if the pattern does not take the name."""
    before, after = pattern.split("*")
    takes = name.startswith(before) and name.endswith(after) and len(name) > len(before) + len(after)
    return name[len(before) : len(name) - len(after)] if takes else ""


def video_id(name: str, labels: Collection[str], pattern: str | None) -> str:
    """`2023.05.01_a` of `2023.05.01_a.camera_front.mp4` and, where there is such a label, of `2023.05.01_a.mp4`.

    Never a shorter one: `run.4.camera_left.mp4` is no video of `run`, also where the label of `run.4` is missing.
    """
    if pattern is not None:
        return id_by_pattern(name, pattern)
    stem = Path(name).stem
    return stem if stem in labels else Path(stem).stem


def to_sample(row: dict[str, Any], data: SourceConfig) -> Sample:
    if "label" not in row:
        advice = "if its camera has a dot in its name, set data.video_pattern"
        if data.video_pattern:
            advice = f"by data.video_pattern ({data.video_pattern!r}) its id is {row['id']!r}"
            if row["id"].endswith("."):
                advice += f"; set {data.video_pattern.replace('*', '*.', 1)!r}"
        raise DataError(f"{row['videos'][0]} has no label metas/{row['id']}{LABEL}; {advice}")
    label = Path(row["label"])
    pattern = data.video_pattern or "*.*"
    videos = row.get("videos", [str(label.parent.parent / "videos" / pattern.replace("*", row["id"], 1))])
    if len(videos) != 1:
        names = [Path(video).name for video in videos]
        endings = [name.removeprefix(row["id"]) for name in names]
        example = next((f', such as "*{ending}"' for ending in endings if CAMERA.fullmatch(ending)), "")
        raise DataError(
            f"{label.name} has {len(videos)} videos ({', '.join(names)}), and one is shown; choose a camera: set "
            f"data.video_pattern{example}"
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
