"""Positions of a row's media in its messages, and refused combinations of tags and media."""

from __future__ import annotations

from typing import Any

import pytest

from dsreason.data.formats.read import read_row
from dsreason.errors import DataError


def show(row: dict[str, Any]) -> list[Any]:
    """Return the parts of the first message, with each media item as (kind, file, other keys)."""
    content = read_row(row).messages[0]["content"]
    if isinstance(content, str):
        return [content]
    return [part["text"] if part["type"] == "text" else write_medium(part) for part in content]


def write_medium(part: dict[str, Any]) -> tuple[Any, ...]:
    times = {key: value for key, value in part.items() if key not in ("type", part["type"])}
    return (part["type"], part[part["type"]], times) if times else (part["type"], part[part["type"]])


def ask(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}, {"role": "assistant", "content": "Yes."}]


A, B, V, W = ("image", "a.png"), ("image", "b.png"), ("video", "v.mp4"), ("video", "w.mp4")
FRAMES = ["f/00.png", "f/01.png"]
PNG = b"\x89PNG\r\n\x1a\n"
EMBEDDED = [{"bytes": PNG, "path": None}, {"bytes": PNG + b"2", "path": None}]
URIS = ["data:image/png;base64,QQ==", "data:image/png;base64,Qg=="]


def speak(*texts: str) -> list[dict[str, Any]]:
    """Return messages with these texts, from system, user and assistant in turn."""
    return [{"role": role, "content": text} for role, text in zip(("system", "user", "assistant"), texts, strict=True)]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": ask("<image>Up?"), "images": ["a.png"]}, [A, "Up?"]),
        ({"messages": ask("Is <image> in <video>?"), "image": "a.png", "video": "v.mp4"}, ["Is ", A, " in ", V, "?"]),
        ({"messages": ask("Up?\n<image>\n<image>"), "images": ["a.png", "b.png"]}, ["Up?", A, B]),
        ({"messages": ask("Up?"), "images": "a.png", "videos": ["v.mp4", "w.mp4"]}, [A, V, W, "Up?"]),
        ({"messages": ask([{"type": "image"}, {"type": "text", "text": "Up?"}]), "images": ["a.png"]}, [A, "Up?"]),
        ({"messages": ask([{"type": "image_url", "image_url": {"url": "a.png"}}, "Up?"])}, [A, "Up?"]),
        ({"messages": ask([{"image": "a.png"}, {"text": "Up?"}]), "images": ["a.png"]}, [A, "Up?"]),
        ({"messages": ask([{"type": "video_url", "video_url": "v.mp4"}])}, [V]),
        ({"question": "Up?", "image": None, "videos": [], "answer": "a"}, ["Up?"]),
        ({"question": "Up?", "file_name": "a.png"}, [A, "Up?"]),
        ({"question": "Up?", "file_name": "v.mp4"}, [V, "Up?"]),
        (
            {"question": "Up?", "image": {"bytes": b"x", "path": None}},
            [("image", {"bytes": b"x", "path": None}), "Up?"],
        ),
        (
            {"question": "Up?", "images": {"front": "a.png", "rear": "b.png"}},
            ["front: ", A, "\n", "rear: ", B, "\n", "Up?"],
        ),
        ({"question": "Up?", "video": FRAMES, "fps": 2}, [("video", FRAMES, {"fps": 2}), "Up?"]),
        (
            {"question": "Up?", "videos": [FRAMES], "timestamps": [0.0, 0.7]},
            [("video", FRAMES, {"timestamps": [0.0, 0.7]}), "Up?"],
        ),
        (
            {"question": "Up?", "videos": [FRAMES, FRAMES], "fps": [2, 4]},
            [("video", FRAMES, {"fps": 2}), ("video", FRAMES, {"fps": 4}), "Up?"],
        ),
        (
            {"messages": [{"role": "user", "content": [{"video": FRAMES, "sample_fps": 3}, "Up?"]}]},
            [("video", FRAMES, {"fps": 3}), "Up?"],
        ),
        ({"question": "Up?", "video": "f/*.png", "fps": 5}, [("video", "f/*.png", {"fps": 5}), "Up?"]),
        ({"question": "Up?", "video": "f", "fps": 5}, [("video", "f", {"fps": 5}), "Up?"]),
        ({"question": "Up?", "video": "f/v1.0", "fps": 5}, [("video", "f/v1.0", {"fps": 5}), "Up?"]),
        ({"question": "Up?", "video": "v.mp4", "fps": 5}, [("video", "v.mp4", {"fps": 5}), "Up?"]),
        ({"messages": ask("<image 2> or <image 1>?"), "images": ["a.png", "b.png"]}, [B, " or ", A, "?"]),
        ({"messages": ask("<|image_1|> is <|image_1|>"), "images": ["a.png"]}, [A, " is ", A]),
        ({"query": "See <img>a.png</img>", "response": "a"}, ["See ", A]),
        ({"messages": [{"role": "user", "content": "Up?", "images": ["a.png"]}]}, [A, "Up?"]),
        ({"question": "Up?", "images": [{"type": "image", "image": "a.png"}]}, [A, "Up?"]),
        ({"question": "Up?", "videos": [{"video": "v.mp4", "fps": 1}]}, [("video", "v.mp4", {"fps": 1}), "Up?"]),
        # frames that are not paths
        ({"question": "Up?", "video": EMBEDDED, "fps": 2}, [("video", EMBEDDED, {"fps": 2}), "Up?"]),
        ({"question": "Up?", "video": URIS, "fps": 2}, [("video", URIS, {"fps": 2}), "Up?"]),
        (
            {"question": "Up?", "video": [{"path": "0.png", "timestamp": 0}, {"path": "1.png", "timestamp": 0.5}]},
            [("video", ["0.png", "1.png"], {"timestamps": [0, 0.5]}), "Up?"],
        ),
        ({"question": "Up?", "video": {"frames": FRAMES, "fps": 2}}, [("video", FRAMES, {"fps": 2}), "Up?"]),
        (
            {"question": "Up?", "video": {"video": FRAMES, "timestamps": [0, 3]}},
            [("video", FRAMES, {"timestamps": [0, 3]}), "Up?"],
        ),
        (
            {"question": "Up?", "videos": {"l": FRAMES, "r": FRAMES}, "fps": {"l": 1, "r": 2}},
            ["l: ", ("video", FRAMES, {"fps": 1}), "\n", "r: ", ("video", FRAMES, {"fps": 2}), "\n", "Up?"],
        ),
        (
            {"question": "Up?", "videos": ["v.mp4", FRAMES], "timestamps": [None, [0, 3]]},
            [V, ("video", FRAMES, {"timestamps": [0, 3]}), "Up?"],
        ),
        # objects with one file
        ({"question": "Up?", "image": {"url": "a.png"}}, [A, "Up?"]),
        ({"question": "Up?", "image": {"file_name": "a.png"}}, [A, "Up?"]),
        ({"question": "Up?", "image": {"path": "a.png", "width": 4}}, [A, "Up?"]),
        ({"question": "Up?", "image": {"src": "a.png", "height": 3}}, [A, "Up?"]),
        ({"question": "Up?", "image": {"image_url": {"url": "a.png"}}}, [A, "Up?"]),
        ({"question": "Up?", "image": "a.png", "images": ["a.png"]}, [A, "Up?"]),
        ({"question": "Up?", "image": "a.png", "images": ["b.png", "a.png"]}, [B, A, "Up?"]),
        ({"messages": ask("<image>Up?"), "image": "a.png", "images": ["a.png"]}, [A, "Up?"]),
        # tags and parts
        ({"messages": speak("See <image>", "Up?", "Yes."), "images": ["a.png"]}, ["See ", A]),
        ({"messages": speak("Count <image> tags", "Up?", "Yes.")}, ["Count <image> tags"]),
        ({"messages": ask([{"type": "image", "index": 0}, "Up?"]), "images": ["a.png"]}, [A, "Up?"]),
        (
            {
                "messages": ask([{"type": "image", "index": 1}, {"type": "image", "index": 0}]),
                "images": ["a.png", "b.png"],
            },
            [B, A],
        ),
        ({"messages": ask("<image>Up?"), "video": "v.mp4"}, [V, "Up?"]),
        ({"messages": ask("<image>Up?<image>"), "videos": ["v.mp4", "w.mp4"]}, [V, "Up?", W]),
        # JSON text
        ({"question": "Up?", "images": '["a.png", "b.png"]'}, [A, B, "Up?"]),
        ({"question": "Up?", "images": "[1].png"}, [("image", "[1].png"), "Up?"]),
        (
            {"question": "Up?", "video": '["f/00.png", "f/01.png"]', "timestamps": "[0, 3]"},
            [("video", FRAMES, {"timestamps": [0, 3]}), "Up?"],
        ),
        # settings in columns
        (
            {"question": "Up?", "video": "v.mp4", "video_start": 0.5, "video_end": "1.0", "nframes": "4"},
            [("video", "v.mp4", {"nframes": 4, "video_end": 1.0, "video_start": 0.5}), "Up?"],
        ),
        ({"question": "Up?", "image": "a.png", "max_pixels": 9}, [("image", "a.png", {"max_pixels": 9}), "Up?"]),
        ({"question": "Up?", "nframes": 4}, ["Up?"]),
        # further columns whose files are shown
        ({"question": "Up?", "image": "a.png", "file": "a.png", "source": "/data/a.png"}, [A, "Up?"]),
    ],
)
def test_media_appear_where_row_places_them(row, expected):
    assert show(row) == expected


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": ask("<image>Up?")}, "1 <image> tags or empty parts, but the row has 0 images"),
        (
            {"messages": ask("<image>Up?"), "images": ["a", "b"]},
            "1 <image> tags or empty parts, but the row has 2 images",
        ),
        ({"messages": ask("<video>Up?"), "images": ["a"]}, "0 <image> tags or empty parts, but the row has 1 images"),
        ({"messages": ask("<image>Up?"), "images": {"front": "a"}}, r"camera names \(front\)"),
        ({"question": "Up?", "images": {"front": "a"}, "videos": ["v"]}, "others have none"),
        (
            {"messages": ask([{"image": "a.png"}]), "images": ["b.png"]},
            "some media from the columns images are missing from them .for example, 'b.png'",
        ),
        (
            {"messages": [{"role": "assistant", "content": "Yes."}], "images": ["a"]},
            "no user message that could show them",
        ),
        ({"question": "Up?", "videos": [FRAMES, FRAMES], "fps": [2]}, "field 'fps' has 1 entries"),
        (
            {"messages": ask("<image 1> <image 3>"), "images": ["a", "b"]},
            r"either all have numbers, from 1 on, or none; got \[1, 3\]",
        ),
        ({"messages": ask("Up?"), "video_path": "v.mp4"}, 'data.columns = {video = "video_path"}'),
        *(
            ({"question": "Up?", column: value}, f"the column '{column}' seems to have a media file")
            for column, value in {
                "jpg": EMBEDDED[0],
                "raw": PNG,
                "screenshot": {"path": "a.png"},
                "frames": EMBEDDED,
                "views": {"front": "a.png"},
                "info": {"inner": [{"path": "a.png", "t": 0}]},
            }.items()
        ),
        (
            {"question": "Up?", "image": "a.png", "wrist_image": "b.png"},
            "'wrist_image' seems to have a media file, 'b.png'",
        ),
        ({"question": "Up?", "image": "a.png", "goal": {"bytes": None, "path": "b.png"}}, "'goal' seems to have"),
        ({"question": "Up?", "video": "v.mp4", "timestamps": [0, 1]}, "'timestamps' is for a video given as frames"),
        ({"question": "Up?", "images": FRAMES, "timestamps": [0, 1]}, "'timestamps' is for a video given as frames"),
        ({"question": "Up?", "videos": ["v.mp4", FRAMES], "timestamps": [[1], [0, 3]]}, "video 1 has timestamps, but"),
        ({"question": "Up?", "videos": {"l": FRAMES}, "fps": {"r": 2}}, "has times for r, but none for l"),
        ({"question": "Up?", "video": [{"path": "0.png", "time": 0}, "1.png"]}, "frame 1 of a video has no timestamp"),
        ({"question": "Up?", "videos": ["v.mp4", "w.mp4"], "nframes": 4}, "this row has 2 videos and 0 images"),
        (
            {"question": "Up?", "image": "a.png", "nframes": 4},
            "exactly one video, but this row has 0 videos and 1 images",
        ),
        (
            {"question": "Up?", "images": ["a", "b"], "max_pixels": 4},
            "one video or image, but this row has 0 videos and 2",
        ),
        (
            {"messages": speak("S", "Draw <image>", "Here: <image>"), "images": ["a.png"]},
            "assistant message 1: the reply has the tag <image>",
        ),
        (
            {"messages": speak("S", "<image>Up?", "<image>"), "images": ["a", "b"]},
            "assistant message 1: the reply",
        ),
        (
            {"question": "Up?", "image": "a", "video": "v.mp4", "max_pixels": 4},
            "one video or image, but this row has 1 videos and 1 images",
        ),
        (
            {"messages": speak("Use <video>", "Up <video>?", "Yes."), "videos": ["v.mp4"]},
            "2 <video> tags or empty parts, but the row has 1 videos",
        ),
        (
            {"messages": ask([{"type": "image", "value": "a.png"}])},
            "unknown keys value and no file; the file is read from",
        ),
        (
            {"messages": ask([{"type": "image", "index": 1}]), "images": ["a", "b"]},
            r"got \[2\] \(a part's index is one less",
        ),
        (
            {"messages": ask([{"type": "image", "index": "x"}]), "images": ["a"]},
            "must be a number, 0 or greater; got 'x'",
        ),
        ({"question": "Up?", "images": [{"file": "a.png"}]}, "must have the key 'image'; got one with file"),
    ],
)
def test_mismatched_media_are_rejected(row, reason):
    with pytest.raises(DataError, match=reason):
        read_row(row)


def test_tag_in_reply_stays_text():
    row = {"messages": [{"role": "user", "content": "Up?"}, {"role": "assistant", "content": "A <video> tag."}]}
    assert read_row(row).messages[1]["content"] == "A <video> tag."
