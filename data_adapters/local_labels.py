"""Driving clips with one label file each: `videos/<id>.<camera>.mp4` and `metas/<id>.label.json` below `data.path`.

A label is a JSON object, `{"weather": "Light rain", "driving_difficulty": 3, …}`. The model learns to answer
`data.question` with that object as JSON text, so that the answer can be parsed again.
"""

from __future__ import annotations

import json
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
    found: dict[str, dict[str, Any]] = {}
    for video in sorted(path for path in (folder / "videos").iterdir() if path.suffix.lower() in VIDEO_SUFFIXES):
        found.setdefault(video.name.split(".")[0], {}).setdefault("videos", []).append(str(video.absolute()))
    for label in sorted((folder / "metas").glob(f"*{LABEL}")):
        found.setdefault(label.name.removesuffix(LABEL), {})["label"] = str(label.absolute())
    return [{"id": name, **files} for name, files in sorted(found.items())]


def to_sample(row: dict[str, Any], data: SourceConfig) -> Sample:
    if "label" not in row:
        raise DataError(f"{row['videos'][0]} has no label metas/{row['id']}{LABEL}")
    label = Path(row["label"])
    videos = row.get("videos", [str(label.parent.parent / "videos" / f"{row['id']}.*")])
    if len(videos) != 1:
        raise DataError(f"{label} needs one video named {row['id']}.*, found {videos}")
    answer = label_text(label)
    content = [{"type": "video", "video": videos[0]}, {"type": "text", "text": data.question}]
    messages: list[Message] = [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
    return Sample(id=row["id"], messages=messages, answer=answer)


def label_text(path: Path) -> str:
    """JSON again and not Python's notation: what the model answers can then be read by any program."""
    try:
        return json.dumps(json.loads(path.read_text(encoding="utf-8")), ensure_ascii=False)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: not valid JSON: {error}") from error
