"""Where the media of a row's columns are shown, and which numbers of tags and media are refused."""

from __future__ import annotations

from typing import Any

import pytest

from dsreason.data.formats.read import read_row
from dsreason.errors import DataError


def show(row: dict[str, Any]) -> list[Any]:
    """Return the parts of the first message; a medium as (kind, file, other keys)."""
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
        ({"question": "Up?", "video": "f/*.png", "fps": 5}, [("video", "f/*.png", {"fps": 5}), "Up?"]),
        ({"question": "Up?", "video": "f", "fps": 5}, [("video", "f", {"fps": 5}), "Up?"]),
        ({"question": "Up?", "video": "f/v1.0", "fps": 5}, [("video", "f/v1.0", {"fps": 5}), "Up?"]),
        ({"question": "Up?", "video": "v.mp4", "fps": 5}, [V, "Up?"]),
        ({"messages": ask("<image 2> or <image 1>?"), "images": ["a.png", "b.png"]}, [B, " or ", A, "?"]),
        ({"messages": ask("<|image_1|> is <|image_1|>"), "images": ["a.png"]}, [A, " is ", A]),
        ({"query": "See <img>a.png</img>", "response": "a"}, ["See ", A]),
        ({"messages": [{"role": "user", "content": "Up?", "images": ["a.png"]}]}, [A, "Up?"]),
        ({"question": "Up?", "images": [{"type": "image", "image": "a.png"}]}, [A, "Up?"]),
        ({"question": "Up?", "videos": [{"video": "v.mp4", "fps": 1}]}, [("video", "v.mp4", {"fps": 1}), "Up?"]),
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
            "not all media of the columns images, such as 'b.png'",
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
        ({"question": "Up?", "images": [{"file": "a.png"}]}, "must have the key 'image', but has file"),
    ],
)
def test_mismatched_media_are_rejected(row, reason):
    with pytest.raises(DataError, match=reason):
        read_row(row)


def test_tag_in_reply_stays_text():
    row = {"messages": [{"role": "user", "content": "Up?"}, {"role": "assistant", "content": "A <video> tag."}]}
    assert read_row(row).messages[1]["content"] == "A <video> tag."
