"""Folders with `meta.json`, `text/` and `media/`, whose conversations name media by key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dsreason.config.schema_data import SourceConfig
from dsreason.data.formats.row_formats import describe_detection
from dsreason.data.sources import DataSource, open_source
from dsreason.errors import DataError

ROW = {"id": "7", "media": "media/video_7.mp4", "conversation": "text/conversation_7.json"}


def part(kind: str, key: str | None = None) -> dict[str, str]:
    return {"type": kind} | ({} if key is None else {kind: key})


def ask(*media: dict[str, str], **others: Any) -> dict[str, Any]:
    text = {"type": "text", "text": "Score the physics."}
    reply = {"role": "assistant", "content": [{"type": "text", "text": "4"}]}
    return {"conversations": [{"role": "user", "content": [*media, text]}, reply]} | others


def write(folder: Path, row: dict[str, Any] = ROW, conversation: Any = None) -> Path:
    (folder / "text").mkdir(parents=True)
    (folder / "media").mkdir()
    for name in ("video_7.mp4", "a.png", "b.png", "c.png"):
        (folder / "media" / name).write_bytes(b"")
    document = ask(part("video", "video_0")) if conversation is None else conversation
    text = document if isinstance(document, str) else json.dumps(document)
    (folder / "text" / "conversation_7.json").write_text(text)
    (folder / "meta.json").write_text(json.dumps([row]))
    return folder


def opened(path: Path, adapter: str = "auto") -> DataSource:
    return open_source(SourceConfig(adapter=adapter, path=str(path)))


@pytest.mark.parametrize("adapter", ["auto", "conversation_files"])
@pytest.mark.parametrize("name", ["", "meta.json"])
def test_key_stands_for_the_row_medium(tmp_path: Path, adapter: str, name: str) -> None:
    write(tmp_path)
    sample = opened(tmp_path / name, adapter).sample(0)
    assert (sample.id, sample.answer) == ("7", "4")
    assert sample.messages[0]["content"][0] == {"type": "video", "video": str(tmp_path / "media" / "video_7.mp4")}
    assert sample.messages[0]["content"][1] == {"type": "text", "text": "Score the physics."}
    assert sample.meta == {}


def test_folder_is_detected_with_reason() -> None:
    assert describe_detection(ROW) == "format conversation file (recognised by conversation, which names a .json file)"


@pytest.mark.parametrize(
    ("media", "keys", "files"),
    [
        (["a", "b"], ["image_1", "image_0"], "ba"),
        (["a", "b"], ["image_0", "image_1", "image_0"], "aba"),
        (["a", "b", "c"], ["image_2", "image_10", "image_9"], "acb"),
        (["a", "b"], ["front", "rear"], "ab"),
        (["a", "b"], [None, None], "ab"),
        ({"rear": "b", "front": "a"}, ["front", "rear"], "ab"),
    ],
)
def test_keys_stand_for_media_by_number(tmp_path: Path, media: Any, keys: list[str | None], files: str) -> None:
    def locate(name: str) -> str:
        return f"media/{name}.png"

    located = (
        {key: locate(name) for key, name in media.items()} if isinstance(media, dict) else list(map(locate, media))
    )
    write(tmp_path, ROW | {"media": located}, ask(*(part("image", key) for key in keys)))
    content = opened(tmp_path).sample(0).messages[0]["content"]
    assert "".join(Path(item["image"]).stem for item in content[:-1]) == files


def test_other_fields_are_kept(tmp_path: Path) -> None:
    write(tmp_path, ROW | {"source": "sora"}, ask(part("video", "video_0"), rater=3))
    assert opened(tmp_path).sample(0).meta == {"source": "sora", "rater": 3}


@pytest.mark.parametrize(
    ("row", "conversation", "text"),
    [
        ({"conversation": "text/gone.json"}, None, "gone.json cannot be read: No such file"),
        ({"conversation": "../x.json"}, None, "points outside"),
        ({}, "{", "conversation_7.json is not valid JSON"),
        ({}, "[1]", "must contain an object; got list"),
        ({}, {"turns": []}, "must have a list of messages in 'conversations'; it has turns"),
        ({"media": ["media/a.png"] * 2}, None, "shows 1 media, but the row's field 'media' has 2"),
        ({"media": None}, None, "shows 1 media, but the row's field 'media' has 0"),
        ({"media": {"video_1": "media/video_7.mp4"}}, None, "has video_1; correct video_0"),
        ({"score": 3}, ask(part("video", "video_0"), score=4), "its field 'score' is 4, but the row has 3"),
        ({"media": "media/gone.mp4"}, None, "no such file"),
    ],
)
def test_damaged_row_is_named(tmp_path: Path, row: dict[str, Any], conversation: Any, text: str) -> None:
    write(tmp_path, ROW | row, conversation)
    with pytest.raises(DataError, match=r"row 1") as caught:
        opened(tmp_path).sample(0)
    assert text in str(caught.value)


def test_folder_without_list_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"meta.json does not exist, but the adapter conversation_files reads its rows"):
        opened(tmp_path, "conversation_files")


def test_row_without_file_is_refused(tmp_path: Path) -> None:
    write(tmp_path, {"id": "1", "question": "Which?"})
    with pytest.raises(DataError, match="must be an object with a field 'conversation'"):
        opened(tmp_path, "conversation_files").sample(0)
