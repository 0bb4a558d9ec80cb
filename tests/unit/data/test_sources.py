"""The path from configuration to finished samples."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dsreason.config.schema_data import DataConfig
from dsreason.data.sources import SampleDataset, open_datasets
from dsreason.errors import ConfigError, DataError
from dsreason.secrets import hide_payloads
from tests.unit.media.videos import write_video


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with ten rows about one image."""
    Image.new("RGB", (28, 28)).save(tmp_path / "a.png")
    write(tmp_path, [row(i) for i in range(10)])
    return tmp_path


def row(number: int, **changes: Any) -> dict[str, Any]:
    return {"id": str(number), "image": "a.png", "question": "q", "answer": "a", **changes}


def write(folder: Path, rows: list[dict[str, Any]]) -> None:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def config(folder: Path, **keys: Any) -> DataConfig:
    return DataConfig(adapter="jsonl", path=str(folder / "rows.jsonl"), **keys)


def ids(dataset: Any) -> list[str]:
    return [dataset[i].id for i in range(len(dataset))]


@pytest.mark.parametrize(("validation", "count"), [(0.2, 2), (3, 3), (0.01, 1), (0, 0)])
def test_held_out_rows_are_disjoint_and_stable(folder, validation, count):
    training, held_out = open_datasets(config(folder, validation=validation))
    assert len(held_out) == count
    assert sorted(ids(training) + ids(held_out)) == [str(i) for i in range(10)]
    assert ids(open_datasets(config(folder, validation=validation))[1]) == ids(held_out)


def test_holding_out_all_rows_is_rejected(folder):
    with pytest.raises(DataError, match="10"):
        open_datasets(config(folder, validation=10))


@pytest.mark.parametrize(
    ("split", "expected"), [("train[:3]", ["0", "1", "2"]), ("train[80%:]", ["8", "9"]), ("train[:16%]", ["0", "1"])]
)
def test_split_range_selects_rows(folder, split, expected):
    assert ids(open_datasets(config(folder, split=split))[0]) == expected


def weights(dataset: SampleDataset) -> list[tuple[list[int], float]]:
    return [(part.rows.tolist(), part.weight) for part in dataset.weighted_parts]


def test_sources_are_concatenated_with_weights(folder):
    item = {"adapter": "jsonl", "path": str(folder / "rows.jsonl")}
    training, _ = open_datasets(DataConfig(sources=[{**item, "limit": 2}, {**item, "limit": 1, "weight": 3.0}]))
    assert ids(training) == ["0", "1", "0"]
    assert weights(training) == [([0, 1], 1.0), ([2], 3.0)]
    choice = training.select(np.array([1, 2]))
    assert (ids(choice), weights(choice)) == (["1", "0"], [([0], 1.0), ([1], 3.0)])
    last = choice.select(np.array([1]))
    assert (ids(last), weights(last)) == (["0"], [([0], 3.0)])  # no rows of the first source


def test_rows_without_data_source_get_source_name(folder):
    write(folder, [row(0), row(1, data_source="own")])
    training, _ = open_datasets(config(folder, name="general"))
    assert [training[i].meta["data_source"] for i in range(2)] == ["general", "own"]


@pytest.mark.parametrize("index", [-1, 10])
def test_out_of_range_index_is_rejected(folder, index):
    training, _ = open_datasets(config(folder))
    with pytest.raises(IndexError, match=f"sample index {index} is out of range for 10 samples"):
        training[index]


def test_system_prompt_is_added_only_if_missing(folder):
    write(folder, [row(0), row(1, system="own")])
    training, _ = open_datasets(config(folder, system_prompt="general"))
    assert [training[i].messages[0]["content"] for i in range(2)] == ["general", "own"]


def test_media_parts_get_paths_and_settings(folder):
    training, _ = open_datasets(config(folder, vision={"fps": 1, "max_pixels": 5000}))
    part = training[0].messages[0]["content"][0]
    assert part == {"type": "image", "image": str(folder / "a.png"), "max_pixels": 5000}


OWN = """
from dsreason.data.types import Sample
def to_sample(row):
    part = {"type": "video", "video": row["image"], **row["settings"]}
    return Sample(row["id"], [{"role": "user", "content": [part]}, {"role": "assistant", "content": "a"}])
"""


@pytest.mark.parametrize(
    ("own", "general", "expected"),
    [
        ({"nframes": 4}, {"fps": 1, "max_pixels": 9}, {"nframes": 4, "max_pixels": 9}),
        ({"fps": 3}, {"nframes": 8}, {"fps": 3}),
        ({"max_pixels": 5}, {"fps": 1, "max_pixels": 9}, {"fps": 1.0, "max_pixels": 5}),
    ],
)
def test_media_part_settings_override_source_settings(folder, own, general, expected):
    (folder / "own.py").write_text(OWN)
    write_video(folder / "a.mp4")
    write(folder, [row(0, image="a.mp4", settings=own)])
    data = DataConfig(adapter=str(folder / "own.py"), path=str(folder / "rows.jsonl"), vision=general)
    part = open_datasets(data)[0][0].messages[0]["content"][0]
    assert {key: value for key, value in part.items() if key not in ("type", "video")} == expected


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"image": "gone.png"}, r"rows\.jsonl.*2.*gone\.png"),
        ({"image": "../../etc/passwd"}, "points outside"),
        ({"image": "ftp://host/a.png"}, "only local files and s3://, http:// and https:// URLs are supported"),
        ({"question": "see <|image_pad|>"}, r"<\|image_pad\|>"),
        ({"answer": {"a": 3}}, "answer"),
    ],
)
def test_bad_row_is_named_in_error(folder, changes, words):
    write(folder, [row(0), row(1, **changes)])
    training, _ = open_datasets(config(folder))
    assert training[0].id == "0"
    with pytest.raises(DataError, match=words):
        training[1]


def test_linked_media_folders_are_followed(folder, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("disk")
    Image.new("RGB", (28, 28)).save(elsewhere / "b.png")
    (folder / "images").symlink_to(elsewhere)
    write(folder, [row(0, image="images/b.png")])
    assert open_datasets(config(folder))[0][0].id == "0"


def test_misspelt_part_setting_is_reported(folder):
    (folder / "own.py").write_text(OWN)
    write(folder, [row(0, settings={"fsp": 3})])
    with pytest.raises(DataError, match="unknown key 'fsp'; did you mean 'fps'"):
        open_datasets(DataConfig(adapter=str(folder / "own.py"), path=str(folder / "rows.jsonl")))[0][0]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("def to_sample(row): open('gone')", r"rows\.jsonl.*row 1.*gone"),
        ("def to_sample(row): assert row['id'] == '7', 'no seven'", r"row 1.*no seven"),
        ("def to_sample(row): return {'id': 1}", r"row 1.*must return a Sample.*'id': 1"),
        ("def to_sample(row): pass\ndef rows(data): raise RuntimeError('no net')", r"rows\(data\).*no net"),
    ],
)
def test_custom_adapter_error_names_the_row(folder, code, words):
    (folder / "own.py").write_text(code)
    with pytest.raises(DataError, match=words):
        open_datasets(DataConfig(adapter=str(folder / "own.py"), path=str(folder / "rows.jsonl")))[0][0]


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "messages: the list is empty"),
        ([{"role": "human", "content": "a"}], r"messages\[0\]: role must be .*'human'"),
        ([{"role": "user", "content": 3}], r"messages\[0\].content must be .*3"),
        (
            [{"role": "user", "content": [{"type": "audio"}]}],
            "the type of a part must be text, image or video; got 'audio'",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "the text of a part must be a string; got None"),
        ([{"role": "user", "content": [{"type": "image"}]}], "image must be the path of a file"),
    ],
)
def test_malformed_messages_are_reported_with_row(folder, messages, words):
    (folder / "own.py").write_text(
        f"from dsreason.data.types import Sample\ndef to_sample(row): return Sample('1', {messages!r}, answer='b')"
    )
    with pytest.raises(DataError, match=rf"row 1.*{words}"):
        open_datasets(DataConfig(adapter=str(folder / "own.py"), path=str(folder / "rows.jsonl")))[0][0]


def test_unimportable_adapter_is_reported(folder):
    (folder / "own.py").write_text("x = y")
    with pytest.raises(ConfigError, match=r"own\.py cannot be imported.*'y' is not defined"):
        open_datasets(DataConfig(adapter=str(folder / "own.py"), path=str(folder / "rows.jsonl")))


@pytest.mark.parametrize("split", ["train_sft", "test"])
def test_split_name_must_match_completely(folder, split):
    for name in ("train_sft", "test"):
        (folder / f"{name}.jsonl").write_text(json.dumps(row(0, answer=name)) + "\n")
    (folder / "rows.jsonl").unlink()
    training, _ = open_datasets(DataConfig(adapter="jsonl", path=str(folder), split=split))
    assert training[0].answer == split


def test_missing_field_error_names_row_and_field(folder):
    write(folder, [{"id": "0", "answer": "a"}])
    with pytest.raises(DataError, match=r"rows\.jsonl.*the columns id, answer do not match the format question"):
        open_datasets(config(folder))[0][0]


def test_source_without_rows_is_rejected(folder):
    write(folder, [])
    with pytest.raises(DataError, match="empty"):
        open_datasets(config(folder))


ASKING = """
from dsreason.data.types import Sample

def to_sample(row):
    return Sample(row["id"], [{"role": "user", "content": row["question"]}], answer=row.get("answer"))
"""


@pytest.mark.parametrize("answer", ["left", "", None])
def test_bare_answer_becomes_assistant_message(folder, answer):
    (folder / "mine.py").write_text(ASKING)
    write(folder, [{"id": "0", "question": "q", "answer": answer}])
    samples, _ = open_datasets(DataConfig(adapter=str(folder / "mine.py"), path=str(folder / "rows.jsonl")))
    added = [{"role": "assistant", "content": "left"}] if answer else []
    assert samples[0].messages == [{"role": "user", "content": "q"}, *added]


JOINING = """
import bz2
import gzip
import json
import lzma
from pathlib import Path

from data_adapters import jsonl

def rows(data):
    folder = Path(data.path)
    found = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    return [{**row, "image": str(folder / row["image"])} for row in found]

to_sample = jsonl.to_sample
"""
"""An adapter like the loaders of cosmos-reason1's guides, which join the data folder and the paths themselves."""


def test_already_joined_path_is_reported_with_advice(folder, monkeypatch):
    (folder / "mine.py").write_text(JOINING)
    monkeypatch.chdir(folder.parent)
    keys = {"adapter": str(folder / "mine.py"), "path": folder.name}
    with pytest.raises(DataError) as error:
        open_datasets(DataConfig(**keys))[0][0]
    value = f"{folder.name}/a.png"
    assert f"image: no such file: {folder / value}; the file {value} exists in the working folder" in str(error.value)
    assert 'set data.media_path = "."' in str(error.value)
    sample = open_datasets(DataConfig(**keys, media_path="."))[0][0]  # as advised
    assert sample.messages[0]["content"][0]["image"] == str(folder / "a.png")
    assert open_datasets(DataConfig(**{**keys, "path": str(folder)}))[0][0].id == "0"


def test_joined_path_outside_working_folder_gets_advice(folder, monkeypatch):
    (folder / "mine.py").write_text(JOINING)
    (folder / "work").mkdir()
    monkeypatch.chdir(folder / "work")
    keys = {"adapter": str(folder / "mine.py"), "path": f"../../{folder.name}"}
    for media_path in ("", ".", ".."):
        with pytest.raises(DataError) as error:
            open_datasets(DataConfig(**keys, media_path=media_path))[0][0]
        assert f"image: ../../{folder.name}/a.png points outside" in str(error.value)
        assert "it exists relative to the working folder" in str(error.value)
        assert str(error.value).endswith("; use absolute paths")
    assert open_datasets(DataConfig(**{**keys, "path": str(folder)}))[0][0].id == "0"  # as advised


def test_video_pattern_is_rejected_by_other_adapters(folder):
    with pytest.raises(
        ConfigError, match=r"data\.video_pattern \(\*\.mp4\) applies only to .*local_labels, but data\.adapter is jsonl"
    ):
        open_datasets(config(folder, video_pattern="*.mp4"))
    (folder / "own.py").write_text("from data_adapters.jsonl import to_sample")
    model_copy = config(folder, video_pattern="*.mp4").model_copy(update={"adapter": str(folder / "own.py")})
    assert open_datasets(model_copy)[0][0].id == "0"


def test_missing_file_error_has_no_path_advice(folder):
    (folder / "a.png").unlink()
    with pytest.raises(DataError, match=r"image: no such file: .*/a\.png$"):
        open_datasets(config(folder))[0][0]


def test_row_columns_can_be_renamed(folder):
    write(folder, [{"number": "7", "problem": "2 + 2?", "solution": "4", "question": "not this one"}])
    columns = {"id": "number", "question": "problem", "answer": "solution"}
    (sample,) = open_datasets(config(folder, columns=columns))[0]
    assert (sample.id, sample.answer, sample.messages[0]["content"]) == ("7", "4", "2 + 2?")


def test_unknown_column_is_reported_with_known_ones(folder):
    with pytest.raises(DataError, match="data.columns names 'problem', but the row has only the columns id, "):
        open_datasets(config(folder, columns={"question": "problem"}))[0][0]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ("raise OSError(5, 'broken')", r"rows\(data\) failed on .*rows.jsonl: OSError"),
        ("yield {}", r"rows\(data\) must return a list or another sequence with a length, but returned generator"),
        ("return None", r"rows\(data\) must return a list or another sequence with a length, but returned NoneType"),
    ],
)
def test_invalid_custom_rows_are_reported(folder, rows, words):
    (folder / "mine.py").write_text(f"def rows(data):\n    {rows}\ndef to_sample(row): ...\n")
    with pytest.raises(DataError, match=words):
        open_datasets(config(folder).model_copy(update={"adapter": str(folder / "mine.py")}))


QUESTION = '{"question": "Q1", "answer": "007"}\n{"question": "Q2", "answer": "none"}\n'


@pytest.mark.parametrize("in_folder", [False, True])
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("train.jsonl.gz", gzip.compress(QUESTION.encode(), mtime=0)),
        ("train.json.bz2", bz2.compress(QUESTION.encode())),
        ("train.csv.xz", lzma.compress(b"question,answer\nQ1,007\nQ2,none\n")),
        ("train.csv", b"question;answer\nQ1;007\n\nQ2;none\n"),
        ("train.tsv", b"question\tanswer\nQ1\t007\nQ2\tnone\n"),
    ],
)
def test_packed_and_delimited_files_are_read(tmp_path, name, content, in_folder):
    (tmp_path / name).write_bytes(content)
    training, _ = open_datasets(DataConfig(path=str(tmp_path if in_folder else tmp_path / name)))
    assert [sample.answer for sample in training] == ["007", "none"]
    assert training.describe_location(0).startswith(str(tmp_path / name))


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"a.csv": b"question,answer\nQ,A\nQ,A,extra\n"}, "a.csv, line 3: has 3 fields, but the header has 2"),
        ({"a.csv": b"question,answer\nQ,A,\nQ,A,\n"}, "a.csv, line 2: has 3 fields"),
        ({"a.csv": b"question,answer\nQ\n"}, "line 2: has 1 fields"),
        ({"a.csv": b"question,answer,\nQ,A,\n"}, "line 1: column 3 has no name"),
        ({"a.csv": b"question,question,answer\nQ,Q2,A\n"}, "line 1: has two columns 'question'"),
        ({"a.csv": b"question,answer\nQ,A\n", "b.csv": b"question\nQ\n"}, "b.csv: has the columns question"),
        ({"a.jsonl": QUESTION.encode(), "b.csv": b"question,answer\nQ,A\n"}, "several types .*: a.jsonl, b.csv"),
        ({"train/metadata.jsonl": b"{}"}, "set data.path to .*/train"),
        ({"a.json": b'{"data": [{"question": "Q"}]}'}, "has its rows in the list 'data' of an object"),
        ({"a.json": b'{\n"data": [{"question": "Q"}]}'}, "has its rows in the list 'data' of an object"),
        ({"a.json": b'{\n"question": "Q",\n"answer": "A"}'}, "has one object on several lines"),
        ({"a.jsonl": QUESTION.encode("utf-16")}, "is UTF-16; save it as UTF-8"),
        ({"a.csv": "question,answer".encode("utf-16")}, "is UTF-16; save it as UTF-8"),
        ({"a.jsonl.gz": gzip.compress(bytes(300 * 1024**2))}, "a.jsonl.gz: unpacks to more than the maximum"),
        ({"a.jsonl.gz": gzip.compress(QUESTION.encode())[:-9]}, "a.jsonl.gz cannot be unpacked"),
    ],
)
def test_unreadable_file_is_rejected_with_reason(tmp_path, files, reason):
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=reason):
        open_datasets(DataConfig(path=str(tmp_path)))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (r"got b'\x89PNG\r\n\x1a'; set", "got b'…'; set"),
        (r"got b'\x89PNG\r", "got b'…'"),
        ("got b'abc'", "got b'abc'"),
        ("no file iVBORw0KGgoAAAANSUhEUgAA" + "aB3/" * 60 + "==: x", "no file iVBORw0KGgoAAAANSUhEUgAA…: x"),
        ("a" * 300, "a" * 300),
    ],
)
def test_raw_payloads_are_hidden(text, shown):
    assert hide_payloads(text) == shown
