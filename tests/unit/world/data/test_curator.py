"""JSON lines of cosmos-curator: windows, captions and clips."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from dsreason.errors import DataError
from dsreason.world.data import open_world_data
from dsreason.world.data.dataset import WorldDataset
from dsreason.world.schema import WorldDataConfig
from dsreason.world.types import ClipSize
from tests.unit.world.data.test_clips import levels, video

SIZE = ClipSize(5, 32, 32, 8.0)
CAPTION = {"scene": "A dock, “Pier 7”.", "objects": ["crane"]}


def window(start: Any, end: Any, **captions: Any) -> dict[str, Any]:
    return {"start_frame": start, "end_frame": end, "temporal_interval": 1} | captions


def write(path: Path, *rows: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def opened(path: Path | str, **settings: Any) -> WorldDataset:
    return open_world_data(WorldDataConfig(format="curator", path=str(path), **settings), 0)[0]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a file with one video of 24 frames and two windows, of frames 0 to 4 and 10 to 23."""
    folder = tmp_path_factory.mktemp("curator")
    video(folder / "clips" / "a.mp4")
    windows = [window(0, 4, caption_json=CAPTION, caption="A dock."), window(10, 23, caption=" A crane. ")]
    row = {
        "uuid": "a",
        "duration": 3.0,
        "width": 64,
        "height": 32,
        "vision_path": "clips/a.mp4",
        "t2w_windows": windows,
    }
    return write(folder / "rows.jsonl", row)


def test_each_window_is_a_row(file: Path) -> None:
    rows = opened(file).rows
    assert [row.id for row in rows] == [f"{file}:1, window 0", f"{file}:1, window 1"]
    assert rows[0].prompt == '{"scene": "A dock, “Pier 7”.", "objects": ["crane"]}'
    assert rows[1].prompt == "A crane."
    shared = {"uuid": "a", "duration": 3.0, "width": 64, "height": 32, "vision_path": "clips/a.mp4"}
    frames = {"start_frame": 0, "end_frame": 4, "temporal_interval": 1}
    assert rows[0].meta == shared | frames | {"caption": "A dock."}


def test_clip_lies_within_its_window(file: Path) -> None:
    rows = opened(file)
    assert levels(rows.read_clip(rows[0], SIZE)) == [0, 1, 2, 3, 4]
    assert levels(rows.read_clip(rows[1], SIZE)) == [10, 11, 12, 13, 14]
    assert levels(rows.read_clip(rows[1], ClipSize(5, 32, 32, 4.0))) == [10, 12, 14, 16, 18]
    with pytest.raises(DataError, match=r"rows.jsonl:1, window 0: .*5 frames at 4 per second need 9 frames .*only 5"):
        rows.read_clip(rows[0], ClipSize(5, 32, 32, 4.0))


def test_folder_of_files_is_read_in_order(tmp_path: Path) -> None:
    for name in ("b", "a"):
        row = {"vision_path": f"/clips/{name}.mp4", "t2w_windows": [window(0, 4, caption=name)]}
        write(tmp_path / f"{name}.jsonl", row)
    assert [(row.prompt, row.clip) for row in opened(tmp_path).rows] == [("a", "/clips/a.mp4"), ("b", "/clips/b.mp4")]


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ("{", "rows.jsonl:2: is not JSON"),
        ("[1]", "rows.jsonl:2: must be a JSON object; got [1]"),
        ({"t2w_windows": [window(0, 4, caption="x")]}, "rows.jsonl:2: must have a vision_path"),
        ({"vision_path": "a.mp4", "t2w_windows": []}, "the fields of the row: vision_path, t2w_windows"),
        (
            {"vision_path": "../a.mp4", "t2w_windows": [window(0, 4, caption="x")]},
            "its vision_path ../a.mp4 is outside",
        ),
        ({"vision_path": "a.mp4", "t2w_windows": [3]}, "rows.jsonl:2, window 0: must be an object; got 3"),
        ({"vision_path": "a.mp4", "t2w_windows": [window(9, 4, caption="x")]}, "got 9 and 4"),
        ({"vision_path": "a.mp4", "t2w_windows": [window(0, True, caption="x")]}, "got 0 and True"),
        (
            {"vision_path": "a.mp4", "t2w_windows": [window(0, 4)]},
            "has no caption_json or caption; its fields: start_frame",
        ),
        ({"vision_path": "a.mp4", "t2w_windows": [window(0, 4, caption=" ")]}, '"prompt" must be a non-empty string'),
    ],
)
def test_unusable_window_is_reported(row: Any, text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    good = {"vision_path": "a.mp4", "t2w_windows": [window(0, 4, caption="good")]}
    file = write(tmp_path / "rows.jsonl", good, row)
    with pytest.raises(DataError) as caught:
        opened(file)
    assert text in str(caught.value)
    with caplog.at_level(logging.WARNING):
        assert [row.prompt for row in opened(file, on_bad_row="skip").rows] == ["good"]


def test_window_beyond_video_is_reported(file: Path) -> None:
    late = file.with_name("late.jsonl")
    write(late, {"vision_path": "clips/a.mp4", "t2w_windows": [window(0, 30, caption="x")]})
    rows = opened(late)
    with pytest.raises(DataError, match="the window ends with frame 30, but the video has only 24 frames"):
        rows.read_clip(rows[0], SIZE)


@pytest.mark.parametrize(("name", "text"), [("", "is empty, but must be"), ("rows.json", "must be a .jsonl file")])
def test_other_file_is_refused(name: str, text: str) -> None:
    with pytest.raises(DataError, match=text):
        opened(name)


def test_folder_without_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no .jsonl file"):
        opened(tmp_path)
