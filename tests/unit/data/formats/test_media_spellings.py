"""Spellings of media in other tools: clips, camera names, numbered columns, embedded content, and refused spellings."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from dsreason.config.schema_data import SourceConfig
from dsreason.data.formats.column_use import find_column_use
from dsreason.data.formats.read import read_row
from dsreason.data.sources import open_source
from dsreason.data.types import Sample
from dsreason.errors import DataError
from tests.unit.data.formats.test_media_columns import FRAMES, A, B, V, ask, show

VIDEO = {"question": "Up?", "video": "v.mp4"}
IMAGES = {"question": "Up?", "images": ["a.png", "b.png"]}
CLIP = ("video", "v.mp4", {"video_end": 1.5, "video_start": 0.5})
NAMED = ["front: ", A, "\n", "rear: ", B, "\n", "Up?"]


def write_png() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(file, "png")
    return file.getvalue()


PNG = write_png()
BASE64 = base64.b64encode(PNG).decode()


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        # clip limits
        *(
            ({"question": "Up?", "video": {"path": "v.mp4", start: 0.5, end: 1.5}}, [CLIP, "Up?"])
            for start, end in (("start", "end"), ("start_time", "end_time"), ("video_start", "video_end"))
        ),
        ({"question": "Up?", "videos": [{"video": "v.mp4", "clip": [0.5, 1.5]}]}, [CLIP, "Up?"]),
        ({"question": "Up?", "videos": [{"video": {"path": "v.mp4", "start": 0.5, "end": 1.5}}]}, [CLIP, "Up?"]),
        ({"messages": ask([{"type": "video", "video": {"path": "v.mp4", "start": 0.5, "end": 1.5}}])}, [CLIP]),
        ({**VIDEO, "start": 0.5, "end": "1.5"}, [CLIP, "Up?"]),
        ({**VIDEO, "start_sec": 0.5, "end_sec": 1.5}, [CLIP, "Up?"]),
        ({**VIDEO, "clip": [0.5, 1.5]}, [CLIP, "Up?"]),
        ({**VIDEO, "clip": "[0.5, 1.5]"}, [CLIP, "Up?"]),
        ({**VIDEO, "start": 0.5, "video_start": 0.5, "end": 1.5}, [CLIP, "Up?"]),
        ({"question": "Up?", "image": "a.png", "start": 0.5}, [A, "Up?"]),
        # camera names
        *(
            ({"question": "Up?", "images": [{"path": "a.png", key: "front"}, {"path": "b.png", key: "rear"}]}, NAMED)
            for key in ("label", "camera", "name", "view")
        ),
        *(
            ({**IMAGES, column: ["front", "rear"]}, NAMED)
            for column in ("cameras", "views", "camera_names", "image_labels")
        ),
        ({**IMAGES, "camera_names": '["front", "rear"]'}, NAMED),
        ({**IMAGES, "views": 1200}, [A, B, "Up?"]),
        ({"question": "Up?", "image": {"path": "a.png", "name": "a.png", "width": 3, "sha256": "f"}}, [A, "Up?"]),
        # settings
        (
            {**VIDEO, "fps": 1, "max_frames": 8, "min_frames": 4},
            [("video", "v.mp4", {"fps": 1, "max_frames": 8, "min_frames": 4}), "Up?"],
        ),
        (
            {"question": "Up?", "videos": ["v.mp4", "w.mp4"], "fps": [1, 2]},
            [("video", "v.mp4", {"fps": 1}), ("video", "w.mp4", {"fps": 2}), "Up?"],
        ),
        ({"question": "Up?", "video": FRAMES, "sample_fps": 2}, [("video", FRAMES, {"fps": 2}), "Up?"]),
        ({"question": "Up?", "videos": [{"video": FRAMES, "sample_fps": 2}]}, [("video", FRAMES, {"fps": 2}), "Up?"]),
        (
            {"messages": ask([{"image": "a.png"}]), "images": [{"path": "a.png", "max_pixels": 9}]},
            [("image", "a.png", {"max_pixels": 9})],
        ),
        (
            {"messages": ask([{"video": [{"path": file, "timestamp": i} for i, file in enumerate(FRAMES)]}])},
            [("video", FRAMES, {"timestamps": [0, 1]})],
        ),
        # numbered columns
        (
            {"question": "<image 1> or <image 2>?", "image_1": "a.png", "image_2": "b.png", "image_3": None},
            [A, " or ", B, "?"],
        ),
        ({"question": "Up?", "image_1": "b.png", "image_0": "a.png"}, [A, B, "Up?"]),
        ({"question": "Up?", "image1": "a.png", "image2": {"bytes": None, "path": None}}, [A, "Up?"]),
        ({"question": "Up?", "video_1": "v.mp4"}, [V, "Up?"]),
        # empty items
        ({"messages": ask("Up?"), "images": [None]}, ["Up?"]),
        ({"messages": ask("Up?"), "images": [{"bytes": None, "path": None}]}, ["Up?"]),
        ({"question": "Up?", "image": {"bytes": None, "path": None}}, ["Up?"]),
        ({"question": "Up?", "images": {"front": None}}, ["Up?"]),
        # tags
        ({"messages": ask("<image>What does <img> do?"), "image": "a.png"}, [A, "What does <img> do?"]),
        ({"messages": ask("Is <imagine> or 1 < 2 > 0?"), "image": "a.png"}, [A, "Is <imagine> or 1 < 2 > 0?"]),
        ({"messages": ask("Is <bbox>1, 2</bbox> red?"), "image": "a.png"}, [A, "Is <bbox>1, 2</bbox> red?"]),
    ],
)
def test_alternative_spellings_are_read(row: dict[str, Any], expected: list[Any]) -> None:
    assert show(row) == expected


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"question": "Up?", "image": {"path": "a.png", "caption": "A dog"}}, "unknown key 'caption' .'A dog'."),
        (
            {"question": "Up?", "video": {"path": "v.mp4", "start_frame": 2}},
            "'start_frame' .* give the clip in seconds",
        ),
        (
            {"question": "Up?", "video": {"path": "v.mp4", "start": 1, "start_time": 2}},
            "'start_time' is 2, but another key sets the same limit to 1",
        ),
        ({"question": "Up?", "video": {"path": "v.mp4", "start": "00:05"}}, "key 'start' must be a number of seconds"),
        ({**VIDEO, "start": "00:05"}, "column 'start' must be a number of seconds .*; got '00:05'"),
        ({**VIDEO, "clip": [1]}, r"column 'clip' must be a list \[start, end\] in seconds; got \[1\]"),
        ({**VIDEO, "start": 1, "video_start": 2}, "column 'start' is 1, but the part has 2"),
        ({**VIDEO, "start_frame": 5}, "column 'start_frame' counts frames; .*'video_start'"),
        ({**VIDEO, "time": [1, 2]}, 'set data.columns = {clip = "time"}.*{reward_time = "time"}'),
        ({**VIDEO, "sample_fps": 2}, "column 'sample_fps' is not read; use 'fps'"),
        (
            {"question": "Up?", "videos": ["v.mp4", "w.mp4"], "start": 1},
            "'start' applies to a row with exactly one video",
        ),
        ({**IMAGES, "fps": 2}, "2 images; .*frames of a video, rename their column to 'video'"),
        ({"question": "Up?", "videos": [None, FRAMES], "fps": [1, 2]}, "'fps' has 2 entries, but the row has 1 videos"),
        ({"question": "Up?", "video": [{"path": "0.png", "label": "x"}]}, "frame 0 of a video has the key 'label'"),
        ({"question": "Up?", "image": {"path": "a.png", "label": 3}}, "must be the name of its camera; got 3"),
        ({"question": "Up?", "images": {"front": {"path": "a.png", "camera": "rear"}}}, "several names of cameras"),
        ({"question": "Up?", "images": [{"path": "a.png", "camera": "front"}, "b.png"]}, "others have none"),
        ({**IMAGES, "views": ["front"]}, "'views' names the cameras front, but the row has 2 images and videos"),
        ({**IMAGES, "labels": ["front", "rear"]}, 'data.columns = {cameras = "labels"}'),
        ({"messages": ask([{"image": "a.png"}]), "images": {"front": "a.png"}}, "camera names .front. have no place"),
        (
            {"messages": ask([{"image": "a.png", "max_pixels": 8}]), "image": {"path": "a.png", "max_pixels": 9}},
            "is 9 in the col",
        ),
        ({"question": "Up?", "image_0": "a.png", "image_2": "b.png"}, "image_0, image_2 must be numbered"),
        (
            {"question": "Up?", "image": "a.png", "image_1": "b.png"},
            "no message uses it; put all files into one column",
        ),
        (
            {"messages": [*ask("Up?")], "images": ["a.png"], "rejected_response": "No.", "rejected_images": ["b.png"]},
            "same images",
        ),
        (
            {"system": "S", "messages": ask([{"type": "image", "source": {"data": "QQ=="}}])},
            "user message 1: a part of type 'image' has the unknown keys source",
        ),
        *(
            ({"messages": ask(f"See {tag} ok?"), "images": ["a.png"]}, "user message 1: the text has .*replace it")
            for tag in (
                *(
                    "<image_placeholder>",
                    "<Image>",
                    "<IMAGE>",
                    "<img>",
                    "<ImageHere>",
                    "<IMG_CONTEXT>",
                    "<start_of_image>",
                ),
                *("[IMG]", "<image/>", "< image >", "{image}", "<image-1>", "<video_token>"),
            )
        ),
        *(
            ({"messages": ask(f"See {tag}"), "images": ["a.png"]}, "which ms-swift replaces")
            for tag in ("<ref-object>", "<bbox>", "<audio>")
        ),
        ({"messages": ask("What is <video>?")}, "with a space: <video >"),
        ({"question": "Up?", "frames": FRAMES, "fps": 2}, 'data.columns = {video = "frames"}'),
        (
            {"question": "Up?", "info": {"image": "a.png", "author": "x"}},
            "uses it; put all files into one column 'image'",
        ),
        ({"question": "Up?", "text64": BASE64}, "'text64' seems to have a media file, 'bytes'"),
    ],
)
def test_ambiguous_spellings_are_rejected(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        read_row(row)


def test_equal_rejected_images_are_accepted() -> None:
    row = {"messages": ask("<image>Up?"), "images": ["a.png"], "rejected_response": "No.", "rejected_images": ["a.png"]}
    assert show(row) == [A, "Up?"]


# ---------------------------------------------------------------- content in the row


def read_sample(folder: Path, row: dict[str, Any]) -> Sample:
    (folder / "rows.jsonl").write_text(json.dumps({"question": "Up?", "answer": "a", **row}) + "\n")
    return open_source(SourceConfig(path=str(folder / "rows.jsonl"))).sample(0)


@pytest.mark.parametrize(
    "row",
    [
        {"image": BASE64},
        {"image": {"bytes": BASE64, "path": "a.png"}},
        {"images": [f"{BASE64[:60]}\n{BASE64[60:]}"]},
        {"image_1": BASE64},
        {"image": f"data:image/png;base64,{BASE64}"},
    ],
)
def test_base64_text_is_read_as_image(tmp_path: Path, row: dict[str, Any]) -> None:
    sample = read_sample(tmp_path, row)
    assert Path(sample.messages[0]["content"][0]["image"]).read_bytes() == PNG
    assert sample.id == ""


def test_bytes_are_read_as_media() -> None:
    assert show({"question": "Up?", "image": PNG})[0] == ("image", {"bytes": PNG, "path": None})
    assert show({"question": "Up?", "images": [PNG]})[0] == ("image", {"bytes": PNG, "path": None})
    frames = [{"bytes": PNG, "path": None}] * 2
    assert show({"question": "Up?", "video": [PNG, PNG], "fps": 2})[0] == ("video", frames, {"fps": 2})


def test_error_names_kind_of_bad_embedded_image(tmp_path: Path) -> None:
    uri = f"data:image/png;base64,{base64.b64encode(b'no image').decode()}"
    with pytest.raises(
        DataError, match=r"image: the 8 embedded bytes, which start with b'no image', are not a usable"
    ) as error:
        read_sample(tmp_path, {"image": uri})
    assert "cache" not in str(error.value)


def test_error_suggests_known_key_for_frame_rate(tmp_path: Path) -> None:
    (tmp_path / "v.mp4").write_bytes(b"x")
    with pytest.raises(DataError, match="unknown key 'raw_fps'; use 'fps': the frames per second"):
        read_sample(
            tmp_path,
            {"question": None, "answer": None, "messages": ask([{"type": "video", "video": "v.mp4", "raw_fps": 2}])},
        )


def test_unused_media_keys_are_reported(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(PNG)
    row = {
        "images": [{"path": "a.png", "width": 8, "camera": "front", "max_pixels": 9}],
        "question": "Up?",
        "answer": "a",
    }
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    use = find_column_use(open_source(SourceConfig(path=str(tmp_path / "rows.jsonl"))))
    assert use.ignored == {"images[].width"}
