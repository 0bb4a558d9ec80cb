"""A literal row of each shipped format, and rows that are refused."""

from __future__ import annotations

import io
import json
import re
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from PIL import Image

from data_adapters import builtin, conversations, cosmos_reason1, jsonl, llava, local_labels
from dsreason.config.schema_data import DataConfig, SourceConfig
from dsreason.data.adapters import find_adapter
from dsreason.data.sources import open_datasets, open_source
from dsreason.errors import ConfigError, DataError
from dsreason.media.images import load_image
from tests.unit.media.videos import write_video

HUMAN, GPT = "human", "gpt"


def turns(*texts: str) -> list[dict[str, str]]:
    return [{"from": (HUMAN, GPT)[i % 2], "value": text} for i, text in enumerate(texts)]


def parts(*items: str) -> list[dict[str, str]]:
    """Build message parts; `image:a.png` becomes a media item, any other string a text."""
    split = [item.split(":", 1) if item.startswith(("image:", "video:")) else ["text", item] for item in items]
    return [{"type": kind, kind: value} for kind, value in split]


def test_jsonl_row_becomes_question_with_lettered_options():
    row = {
        "id": 7,
        "video": "7.mp4",
        "question": "Which way?",
        "options": ["left", "right"],
        "answer": "B",
        "system": "s",
    }
    sample = jsonl.to_sample(row)
    assert sample.id == "7"
    assert sample.options == {"A": "left", "B": "right"}
    assert sample.messages == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": parts("video:7.mp4", "Which way?\n(A) left\n(B) right")},
        {"role": "assistant", "content": "B"},
    ]


@pytest.mark.parametrize("answer", [None, "", " \n"])
def test_jsonl_row_needs_no_answer(answer):
    sample = jsonl.to_sample({"question": "q", "options": ["left", "right"], "answer": answer})
    assert sample.messages == [{"role": "user", "content": "q\n(A) left\n(B) right"}]
    assert sample.answer is None


def test_jsonl_rows_need_no_id():
    assert jsonl.to_sample({"question": "q", "answer": "a"}).id == ""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<image>\nWhat?", ["image:a", "What?"]),
        ("What?\n<image>", ["What?", "image:a"]),
        ("this <image> or <image> that", ["this ", "image:a", " or ", "image:b", " that"]),
        ("<image>\n<image>\nq", ["image:a", "image:b", "q"]),
    ],
)
def test_llava_tags_become_media_in_place(text, expected):
    images = ["a", "b"][: text.count("<image>")]
    sample = llava.to_sample({"id": "1", "images": images, "conversations": turns(text, "yes")})
    assert sample.messages[0]["content"] == parts(*expected)


def test_llava_row_needs_no_reply():
    sample = llava.to_sample({"id": "1", "image": "a", "conversations": turns("<image>\nWhat?")})
    assert ([message["role"] for message in sample.messages], sample.answer) == (["user"], None)


def test_llava_keeps_all_turns_and_media():
    row = {
        "id": "1",
        "image": "a",
        "video": ["v"],
        "conversations": turns("<image>q1", "a1", "q2", "a2", "<video>q3", "a3"),
    }
    sample = llava.to_sample(row)
    assert [message["role"] for message in sample.messages] == ["user", "assistant"] * 3
    assert sample.messages[4]["content"] == parts("video:v", "q3")
    assert sample.answer == "a3"


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (
            {"image": "a", "conversations": turns("<image><image>q", "a")},
            "2 <image> tags or empty parts, but the row has 1 images",
        ),
        (
            {"image": "a", "conversations": turns("<video>q", "a")},
            "0 <image> tags or empty parts, but the row has 1 images",
        ),
        ({"conversations": [{"from": "robot", "value": "q"}]}, "'robot'"),
        ({"conversations": []}, "conversations"),
    ],
)
def test_invalid_llava_row_is_rejected(row, words):
    with pytest.raises(DataError, match=words):
        llava.to_sample(row)


@pytest.mark.parametrize("as_text", [False, True])
def test_conversations_are_read_as_list_or_json(as_text):
    question = [{"type": "video", "video": "v.mp4", "text": None}, {"type": "text", "text": "q", "video": None}]
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": "a"}]
    sample = conversations.to_sample({"conversations": json.dumps(messages) if as_text else messages})
    assert sample.messages[0]["content"] == parts("video:v.mp4", "q")
    assert sample.answer == "a"


@pytest.mark.parametrize("last", ["user", "assistant"])
def test_reference_answer_must_end_the_conversation(last):
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "yes"}]
    messages += [{"role": "user", "content": "and?"}] if last == "user" else []
    assert conversations.to_sample({"messages": messages}).answer == ("yes" if last == "assistant" else None)


MESSAGES = [
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "q"}, {"type": "image"}]},
    {"role": "assistant", "content": "a"},
]


def test_empty_media_parts_use_column_media():
    sample = conversations.to_sample({"messages": MESSAGES, "images": ["1.png", "2.png"]})
    assert sample.messages[0]["content"] == parts("image:1.png", "q", "image:2.png")


@pytest.mark.parametrize("images", [[], ["1.png"], ["1.png", "2.png", "3.png"]])
def test_media_part_count_must_match_columns(images):
    with pytest.raises(DataError, match="image"):
        conversations.to_sample({"messages": MESSAGES, "images": images})


def test_media_without_tags_come_first():
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    sample = conversations.to_sample({"messages": messages, "images": ["1.png"], "video": "v.mp4"})
    assert sample.messages[0]["content"] == parts("image:1.png", "video:v.mp4", "q")


@pytest.mark.parametrize("adapter", ["conversations", "jsonl"])
def test_images_inside_a_table_are_read(tmp_path, monkeypatch, adapter):
    monkeypatch.setenv("COSMOS_CACHE", str(tmp_path / "cache"))
    pictures = [Image.new("RGB", (40 + i, 30), (i, 0, 0)) for i in range(2)]
    row = {"id": "1", "question": "q", "answer": "a", "conversations": json.dumps(MESSAGES)}
    column = "images" if adapter == "conversations" else "image"
    features = datasets.Features(dict.fromkeys(row, datasets.Value("string")) | {column: [datasets.Image()]})
    table = datasets.Dataset.from_list([row | {column: pictures}] * 2, features=features)
    table.to_parquet(tmp_path / "train.parquet")
    samples, _ = open_datasets(DataConfig(adapter=adapter, path=str(tmp_path / "train.parquet")))
    messages = [part["image"] for part in samples[1].messages[0]["content"] if part["type"] == "image"]
    assert [np.asarray(load_image(path)).tolist() for path in messages] == [
        np.asarray(picture).tolist() for picture in pictures
    ]


def test_local_labels_match_videos_by_id(tmp_path):
    (tmp_path / "videos").mkdir()
    (tmp_path / "metas").mkdir()
    video = write_video(tmp_path / "videos" / "01a6.camera_front_wide_120fov.mp4")
    (tmp_path / "metas" / "01a6.label.json").write_text('{"weather": "r\\u00e4iny", "n": null}')
    data = SourceConfig(adapter="local_labels", path=str(tmp_path), question="Describe.")
    [row] = local_labels.rows(data)
    sample = local_labels.to_sample(row, data)
    assert sample.id == "01a6"
    assert sample.messages[0]["content"] == parts(f"video:{video}", "Describe.")
    assert sample.answer == '{"weather": "räiny", "n": null}'
    assert sample.meta == {"label": {"weather": "räiny", "n": None}}


def label_folder(folder: Path, *files: str) -> SourceConfig:
    for name in ("videos", "metas"):
        (folder / name).mkdir()
    for name in files:
        (folder / name).write_text("{}")
    return SourceConfig(adapter="local_labels", path=str(folder))


def shown(data: SourceConfig) -> dict[str, str]:
    """Return the name of each sample's video by sample id."""
    samples = [local_labels.to_sample(row, data) for row in local_labels.rows(data)]
    return {sample.id: Path(sample.messages[0]["content"][0]["video"]).name for sample in samples}


@pytest.mark.parametrize("pattern", [None, "*.camera_front_wide_120fov.mp4"])
def test_ids_of_local_labels_may_have_dots(tmp_path, pattern):
    ids = ("2023.05.01_a", "2023.05.01_a.b", "2023.05.02_a")
    files = [f"videos/{name}.camera_front_wide_120fov.mp4" for name in ids] + [f"metas/{i}.label.json" for i in ids]
    data = label_folder(tmp_path, *files).model_copy(update={"video_pattern": pattern})
    assert shown(data) == {name: f"{name}.camera_front_wide_120fov.mp4" for name in ids}


def test_pattern_leaving_dot_in_id_is_reported(tmp_path):
    data = label_folder(tmp_path, "videos/night-7.v1.2.roof360.mp4", "metas/night-7.v1.2.label.json")
    data = data.model_copy(update={"video_pattern": "*roof360.mp4"})
    row = next(row for row in local_labels.rows(data) if "label" not in row)
    expected = (
        r"data\.video_pattern \('\*roof360\.mp4'\) yields the id 'night-7\.v1\.2\.'; set it to '\*\.roof360\.mp4'"
    )
    with pytest.raises(DataError, match=expected):
        local_labels.to_sample(row, data)


@pytest.mark.parametrize("files", [("run.4.camera_left.mp4",), ("run.4.camera_left.mp4", "run.camera_front.mp4")])
def test_video_never_matches_a_shorter_label_id(tmp_path, files):
    data = label_folder(tmp_path, "metas/run.label.json", *(f"videos/{name}" for name in files))
    of_run, of_run_4 = local_labels.rows(data)
    assert [Path(video).name for video in of_run.get("videos", [])] == list(files[1:])
    with pytest.raises(DataError, match=r"run\.4\.camera_left\.mp4 has no label metas/run\.4\.label\.json"):
        local_labels.to_sample(of_run_4, data)


@pytest.mark.parametrize(
    ("cameras", "advice"),
    [
        ((".4.mp4", ".left.mp4", ".mp4"), 'data.video_pattern, such as "*.left.mp4"'),
        ((".4.mp4", ".mp4"), "_pattern"),
    ],
)
def test_id_part_is_never_suggested_as_camera(tmp_path, cameras, advice):
    data = label_folder(tmp_path, "metas/run.label.json", *(f"videos/run{camera}" for camera in cameras))
    with pytest.raises(DataError, match=rf"select a camera with .*{re.escape(advice)}$"):
        shown(data)


CAMERAS = ("rear.30fov.mp4", "front_wide.mp4", "left.mkv")


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("*.front_wide.mp4", "x.1.front_wide.mp4"),
        (".front_wide.mp4", "x.1.front_wide.mp4"),
        ("*.rear.30fov.mp4", "x.1.rear.30fov.mp4"),
        ("x.*.mkv", "x.1.left.mkv"),
    ],
)
def test_pattern_selects_camera_of_local_labels(tmp_path, pattern, name):
    label = {"x.*.mkv": "1.left"}.get(pattern, "x.1")
    data = label_folder(tmp_path, f"metas/{label}.label.json", *(f"videos/x.1.{camera}" for camera in CAMERAS))
    assert shown(SourceConfig(adapter="local_labels", path=data.path, video_pattern=pattern)) == {label: name}


def test_ambiguous_cameras_are_reported_with_a_pattern(tmp_path):
    data = label_folder(tmp_path, "metas/x.1.label.json", *(f"videos/x.1.{camera}" for camera in CAMERAS[1:]))
    with pytest.raises(DataError) as error:
        shown(data)
    assert "x.1.label.json has 2 videos (x.1.front_wide.mp4, x.1.left.mkv)" in str(error.value)
    assert 'data.video_pattern, such as "*.front_wide.mp4"' in str(error.value)
    assert shown(data.model_copy(update={"video_pattern": "*.front_wide.mp4"})) == {"x.1": "x.1.front_wide.mp4"}


def test_camera_with_dot_requires_a_pattern(tmp_path):
    data = label_folder(tmp_path, "metas/x.1.label.json", "videos/x.1.rear.30fov.mp4")
    rows = {row["id"]: row for row in local_labels.rows(data)}
    with pytest.raises(DataError, match=r"if the camera's name contains a dot, set data\.video_pattern"):
        local_labels.to_sample(rows["x.1.rear"], data)
    assert shown(data.model_copy(update={"video_pattern": "*.rear.30fov.mp4"})) == {"x.1": "x.1.rear.30fov.mp4"}


def test_unmatched_pattern_is_reported_with_an_example(tmp_path):
    data = label_folder(tmp_path, "metas/1.label.json", "videos/1.left.mp4")
    with pytest.raises(
        DataError, match=r"video_pattern \('\*\.right\.mp4'\) matches none of the 1 videos.*1\.left\.mp4"
    ):
        shown(data.model_copy(update={"video_pattern": "*.right.mp4"}))


@pytest.mark.parametrize("pattern", ["left.mp4", "*.*"])
def test_pattern_must_have_one_id_placeholder(pattern):
    with pytest.raises(ValueError, match=r"must contain exactly one \* \(for the id\)"):
        SourceConfig(video_pattern=pattern)


def test_real_label_file_round_trips_as_json():
    label = Path(__file__).parents[4] / "shared" / "data" / "01a6de83.label.json"
    if not label.is_file():
        pytest.skip("../shared/data is not on this machine")
    row = {"id": "01a6de83", "label": str(label), "videos": ["v.mp4"]}
    sample = local_labels.to_sample(row, SourceConfig())
    assert json.loads(sample.answer) == json.loads(label.read_text()) == sample.meta["label"]


@pytest.mark.parametrize(
    ("present", "text"),
    [
        ("videos/1.mp4", r"videos/1\.mp4 has no label metas/1\.label\.json"),
        ("videos/a.1.left.mp4", r"videos/a\.1\.left\.mp4 has no label metas/a\.1\.label\.json"),
        ("metas/1.label.json", r"row 1 \(sample '1'\): video: no such file: .*/videos/1\.\*"),
    ],
)
def test_video_or_label_without_counterpart_is_named(tmp_path, present, text):
    (tmp_path / "videos").mkdir()
    (tmp_path / "metas").mkdir()
    (tmp_path / present).write_text("{}")
    data = SourceConfig(adapter="local_labels", path=str(tmp_path), question="Describe.")
    with pytest.raises(DataError, match="split"):
        local_labels.rows(data.model_copy(update={"split": "validation"}))
    source = open_source(data)
    with pytest.raises(DataError, match=text):
        source.sample(0)


def cosmos_folder(root: Path, subset: str, archive: str | None, clip: str) -> SourceConfig:
    """Write a data set with one row about `clip`, which is packed into `archive` or stored in clips/."""
    inside = root / subset
    (inside / "clips").mkdir(parents=True)
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}] * 2
    (inside / "understanding.json").write_text(json.dumps([{"video": "clips/7.mp4", "conversations": messages}]))
    file = write_video(root / "made.mp4")
    if archive is None:
        file.rename(inside / "clips" / clip)
    else:
        (inside / archive).parent.mkdir(exist_ok=True)
        if archive.endswith(".zip"):
            with zipfile.ZipFile(inside / archive, "w") as zipped:
                zipped.write(file, f"some/folder/{clip}")
        else:
            with tarfile.open(inside / archive, "w:gz" if archive.endswith("gz") else "w") as packed:
                packed.add(file, f"some/folder/{clip}")
        file.unlink()
    return SourceConfig(adapter="cosmos_reason1", path=str(root), subset=subset, split="understanding")


@pytest.mark.parametrize(
    ("subset", "archive", "clip"),
    [
        ("robovqa", "clips.tar.gz", "7.mp4"),
        ("robovqa", "clips/part_1.tar.gz", "7.mp4"),
        ("robovqa", "part_1.tar", "7.mp4"),
        ("robovqa", "clips.zip", "7.mp4"),
        ("robovqa", None, "7.mp4"),
        ("av", None, "7.camera_front.mp4"),
    ],
)
def test_cosmos_archives_and_folders_are_searched(tmp_path, monkeypatch, subset, archive, clip):
    monkeypatch.setenv("COSMOS_CACHE", str(tmp_path / "cache"))
    data = cosmos_folder(tmp_path / "set", subset, archive, clip)
    [row] = find_adapter("cosmos_reason1").rows(data)
    sample = cosmos_reason1.to_sample(row, data)
    first, _, third, _ = sample.messages
    assert Path(first["content"][0]["video"]).is_file()
    assert first["content"][1] == {"type": "text", "text": "q"}
    assert third["content"] == "q"  # the video is shown only once


def test_row_path_disambiguates_cosmos_clip_names(tmp_path):
    data = cosmos_folder(tmp_path, "robovqa", None, "7.mp4")
    (tmp_path / "robovqa" / "more").mkdir()
    write_video(tmp_path / "robovqa" / "more" / "7.mp4")
    for video in ("clips/7.mp4", "more/7.mp4"):
        assert cosmos_reason1.find_clip(video, data) == tmp_path / "robovqa" / video
    with pytest.raises(DataError, match=r"7\.mp4 matches both .*clips/7\.mp4 and .*more/7\.mp4"):
        cosmos_reason1.find_clip("elsewhere/7.mp4", data)


def test_cosmos_folder_clip_wins_over_archive(tmp_path, monkeypatch):
    monkeypatch.setenv("COSMOS_CACHE", str(tmp_path / "cache"))
    data = cosmos_folder(tmp_path / "set", "robovqa", "part_1.tar", "7.mp4")
    clip = write_video(tmp_path / "set" / "robovqa" / "clips" / "7.mp4")
    assert cosmos_reason1.find_clip("some/folder/7.mp4", data) == clip


def test_cosmos_row_cannot_leave_clip_folder(tmp_path):
    data = cosmos_folder(tmp_path / "set", "robovqa", None, "7.mp4")
    write_video(tmp_path / "8.mp4")
    with pytest.raises(DataError, match=r"field 'video': \.\./\.\./8\.mp4 points outside .*/set/robovqa"):
        cosmos_reason1.find_clip("../../8.mp4", data)
    assert cosmos_reason1.find_clip(str(tmp_path / "8.mp4"), data) == tmp_path / "8.mp4"


@pytest.mark.parametrize("as_text", [False, True])
def test_cosmos_file_accepts_parts_or_json_text(tmp_path, as_text):
    data = cosmos_folder(tmp_path, "robovqa", None, "7.mp4")
    turns = [{"role": "user", "content": parts("q")}, {"role": "assistant", "content": "a"}]
    row = {"video": "clips/7.mp4", "conversations": json.dumps(turns) if as_text else turns}
    file = tmp_path / "robovqa" / "understanding.json"
    model_copy = data.model_copy(update={"path": str(file), "subset": None})
    sample = cosmos_reason1.to_sample(row, model_copy)
    assert sample.messages[0]["content"][1] == {"type": "text", "text": "q"}


def test_missing_cosmos_clip_is_named_in_error(tmp_path, monkeypatch):
    monkeypatch.setenv("COSMOS_CACHE", str(tmp_path / "cache"))
    data = cosmos_folder(tmp_path / "set", "robovqa", None, "8.mp4")
    source = open_source(data)
    with pytest.raises(
        DataError, match=r"row 1 \(sample 'clips/7\.mp4'\): video: no such file: .*/robovqa/clips/7\.mp4"
    ):
        source.sample(0)


def test_archive_cannot_unpack_outside_its_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("COSMOS_CACHE", str(tmp_path / "cache"))
    data = cosmos_folder(tmp_path / "set", "robovqa", None, "7.mp4")
    with tarfile.open(tmp_path / "set/robovqa/clips.tar.gz", "w:gz") as packed:
        member = tarfile.TarInfo("../../../escaped.mp4")
        member.size = 1
        packed.addfile(member, io.BytesIO(b"x"))
    with pytest.raises(DataError, match=r"clips\.tar\.gz"):
        cosmos_reason1.find_clip("7.mp4", data)
    assert not list(tmp_path.rglob("escaped.mp4"))


OWN = """
from dsreason.data.types import Sample

def to_sample(row, data):
    messages = [{"role": "user", "content": row["q"]}, {"role": "assistant", "content": row["a"]}]
    return Sample(id=str(row["n"]), messages=messages, answer=row["a"])
"""


def test_custom_adapter_is_found_by_path(tmp_path):
    (tmp_path / "mine.py").write_text(OWN)
    (tmp_path / "rows.jsonl").write_text('{"n": 1, "q": "why", "a": "so"}\n')
    config: dict[str, Any] = {"adapter": str(tmp_path / "mine.py"), "path": str(tmp_path / "rows.jsonl")}
    training, held_out = open_datasets(DataConfig(**config))
    assert training[0].answer == "so"
    assert len(held_out) == 0


def test_unknown_adapter_error_suggests_nearest_name():
    with pytest.raises(ConfigError, match='did you mean "llava"'):
        find_adapter("lava")


def test_custom_rows_require_an_adapter(tmp_path):
    (tmp_path / "rows.jsonl").touch()
    with pytest.raises(DataError, match=r"rows\.jsonl: data\.adapter is \"builtin\".*set data\.adapter = \"auto\""):
        builtin.rows(DataConfig(path=str(tmp_path / "rows.jsonl"), split="train"))
