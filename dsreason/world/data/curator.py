"""JSON lines of cosmos-curator (`metas_jsonl`): a video per line, with windows that each have a caption.

    {"uuid": "a1", "vision_path": "clips/a1.mp4", "width": 1280, "height": 720, "duration": 8.0, "t2w_windows":
     [{"start_frame": 0, "end_frame": 92, "temporal_interval": 1, "caption_json": {"scene": "A dock."}, "caption": "A dock."}]}

Each window is a row. Its prompt is `caption_json`, written as JSON, or else `caption`; all other fields are in its meta.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

from torch import Tensor

from dsreason.errors import DataError
from dsreason.problems import describe_parse_error
from dsreason.world.data.clips import load_clip
from dsreason.world.data.prompts import JSON_LINES, resolve_beside, split_lines
from dsreason.world.data.rows import CheckedRows
from dsreason.world.types import ClipSize, WorldRow

WINDOWS, VIDEO = "t2w_windows", "vision_path"
CAPTIONS = ("caption_json", "caption")
"""Fields with a window's caption, in order of preference."""


def read_windows(path: str) -> CheckedRows:
    """Read a row for each window of each line of a `.jsonl` file, or of all such files in a folder.

    Raises:
        DataError: the file is missing or has another suffix, or the folder has no such file.
    """
    rows = CheckedRows()
    for file in list_files(path):
        for number, line in enumerate(split_lines(file), 1):
            if line.strip():
                add_video(rows, file, f"{file}:{number}", line)
    return rows


def list_files(path: str) -> list[str]:
    folder = Path(path).expanduser()
    if path and folder.is_dir():
        files = sorted(str(file) for file in folder.iterdir() if file.suffix.lower() in JSON_LINES)
        if not files:
            raise DataError(f"{path}: has no .jsonl file")
        return files
    if Path(path).suffix.lower() not in JSON_LINES:
        start = f"{path}:" if path else "is empty, but"
        raise DataError(f"{start} must be a .jsonl file with {WINDOWS} in each line, or a folder of such files")
    return [path]


def add_video(rows: CheckedRows, path: str, location: str, line: str) -> None:
    """Add the windows of one line, each of which may be unusable without affecting the others."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        rows.bad.append(f"{location}: is not JSON: {describe_parse_error(error)}")
        return
    if not isinstance(fields, dict):
        rows.bad.append(f"{location}: must be a JSON object; got {fields!r:.80}")
        return
    video, windows = fields.get(VIDEO), fields.get(WINDOWS)
    if not isinstance(video, str) or not video or not isinstance(windows, list) or not windows:
        rows.bad.append(
            f"{location}: must have a {VIDEO} and a list of {WINDOWS}; the fields of the row: {', '.join(fields) or 'none'}"
        )
        return
    try:
        clip = resolve_beside(path, video)
    except DataError as error:
        rows.bad.append(f"{location}: its {VIDEO} {error}")
        return
    shared = {key: value for key, value in fields.items() if key != WINDOWS}
    for index, window in enumerate(windows):
        row_id = f"{location}, window {index}"
        try:
            rows.add(row_id, shared | read_window(window), clip)
        except DataError as error:
            rows.bad.append(f"{row_id}: {error}")


def read_window(window: Any) -> dict[str, Any]:
    """Return the window's fields with its caption as `prompt`. Raise DataError if its frames or captions are unusable."""
    if not isinstance(window, Mapping):
        raise DataError(f"must be an object; got {window!r:.80}")
    start, end = (window.get(name) for name in ("start_frame", "end_frame"))
    if not is_index(start) or not is_index(end) or end < start:
        raise DataError(
            f"start_frame and end_frame must be whole numbers, the first and the last frame; got {start!r:.40} and {end!r:.40}"
        )
    column = next((name for name in CAPTIONS if window.get(name)), None)
    if column is None:
        raise DataError(f"has no {' or '.join(CAPTIONS)}; its fields: {', '.join(map(str, window))}")
    caption = window[column]
    prompt = caption if isinstance(caption, str) else json.dumps(caption, ensure_ascii=False)
    return {name: value for name, value in window.items() if name != column} | {"prompt": prompt}


def is_index(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def read_clip(row: WorldRow, size: ClipSize) -> Tensor:
    """Read a clip from the frames of the row's window, like `clips.read_clip`."""
    try:
        window = range(row.meta["start_frame"], row.meta["end_frame"] + 1)
        return load_clip(str(row.clip), size, window=window)
    except DataError as error:
        raise DataError(f"{row.id}: {error}") from error
