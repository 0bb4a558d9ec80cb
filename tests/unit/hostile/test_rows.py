"""Rows of data sets: JSON that breaks parsers, fields of wrong types, paths that leave the folder, tables that contain code."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from dsreason.config.schema_data import DataConfig, SourceConfig
from dsreason.data.sources import allow_absolute_paths, open_datasets
from dsreason.errors import DataError
from tests.unit.hostile.guard import guarded, refused

ROW = {"id": "7", "image": "a.png", "question": "What colour?", "answer": "red"}
GOOD = json.dumps(ROW)


@pytest.fixture(autouse=True)
def picture(here: Path) -> None:
    Image.new("RGB", (28, 28)).save(here / "a.png")


def samples(path: Path | str, **keys: Any) -> list[Any]:
    training, _ = open_datasets(DataConfig(adapter="jsonl", path=str(path), validation=0, **keys))
    return list(training)


COUNTLESS = "(a number of more than 4300 digits); correct it"


def deep(levels: int) -> str:
    return '{"id": ' + "[" * levels + "]" * levels + "}"


FILES: dict[str, tuple[str, str | bytes, str]] = {
    "list, nested": ("a.json", "[" * 100_000, "a.json: the file is not valid JSON"),
    "list, nested rows": ("a.json", f"[{deep(100_000)}]", "a.json: the file is not valid JSON"),
    "list, 5000 digits": ("a.json", '[{"id": ' + "9" * 5000 + "}]", f"a.json: the file is not valid JSON {COUNTLESS}"),
    "list, cut": ("a.json", "[" + GOOD, "a.json: the file is not valid JSON"),
    "list, UTF-16": ("a.json", f"[{GOOD}]".encode("utf-16"), "a.json"),
    "one object over several lines": ("a.json", json.dumps(ROW, indent=1), "a.json: has one object on several lines"),
    "empty list": ("a.json", "[]", "a.json (split train): the data set is empty"),
    "lines, nested": ("a.jsonl", deep(100_000), "a.jsonl, line 1"),
    "lines, 5000 digits": ("a.jsonl", '{"id": ' + "9" * 5000 + "}", f"line 1: the line is not valid JSON {COUNTLESS}"),
    "lines, UTF-16": ("a.jsonl", GOOD.encode("utf-16"), "a.jsonl: is UTF-16; save it as UTF-8"),
    "lines, Latin-1": ("a.jsonl", '{"id": "é"}'.encode("latin-1"), "a.jsonl, line 1: the line is not valid JSON"),
    "lines, NUL": ("a.jsonl", '{"id": "\0"}', "a.jsonl, line 1: the line is not valid JSON"),
    "lines, no bytes": ("a.jsonl", "", "a.jsonl (split train): the data set is empty"),
    "rubbish named .parquet": ("a.parquet", b"PAR1" + bytes(99) + b"PAR1", "a.parquet: cannot be read"),
    "rubbish named .arrow": ("a.arrow", b"ARROW1" + bytes(99), "a.arrow"),
    "pickle named .pkl": ("a.pkl", pickle.dumps([ROW]), "got '.pkl'"),
}


@pytest.mark.parametrize("name", FILES)
def test_invalid_row_file_is_rejected(here: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(here / "cache"))
    file, content, words = FILES[name]
    (here / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError) as caught:
        guarded(lambda: samples(here / file))
    assert words in str(caught.value)


def nested(levels: int) -> Any:
    return [nested(levels - 1)] if levels else 0


ROWS: dict[str, tuple[Any, list[str]]] = {
    "list": ([1], []),
    "number": (7, []),
    "text": ("text", []),
    "null": (None, []),
    "no fields": ({}, ["do not match the format question"]),
    "question that is a list": ({**ROW, "question": ["a"]}, ["question", "must be a string"]),
    "answer that is an object": ({**ROW, "answer": {"a": 3}}, ["answer", "must be a string"]),
    "image that is a number": ({**ROW, "image": 3}, []),
    "image that is a list of lists": ({**ROW, "image": [["a.png"]]}, ["must be the path of a file"]),
    "image of 5000 characters": ({**ROW, "image": "x" * 5000}, ["no file has a path of 5,000 characters"]),
    "image with NUL": ({**ROW, "image": "a\0.png"}, ["no such file"]),
    "image with half a character": ({**ROW, "image": "\ud800.png"}, ["no such file"]),
    "image above the folder": ({**ROW, "image": "../outside/flag"}, ["'7'", "../outside/flag points outside"]),
    "image below and above the folder": ({**ROW, "image": "b/../../outside/flag"}, ["points outside"]),
    "image above the folder as an address": ({**ROW, "image": "file://../outside/flag"}, ["points outside"]),
    "image on another server": ({**ROW, "image": "ftp://127.0.0.1:1/a.png"}, ["ftp://127.0.0.1:1/a.png is a URL"]),
    "image in a data address": ({**ROW, "image": "data://text/plain"}, ["has no comma"]),
    "image as text in a data address": ({**ROW, "image": "data:text/plain,abc"}, ["is not base64"]),
    "image that is a folder": ({**ROW, "image": "folder"}, ["no such file"]),
    "image that is a FIFO": ({**ROW, "image": "fifo"}, ["no such file"]),
    "image whose bytes are a text": ({**ROW, "image": {"bytes": "abc"}}, ["is not valid base64"]),
    "image whose path is a number": ({**ROW, "image": {"bytes": "abc", "path": 3}}, []),
    "image without bytes and path": ({**ROW, "image": {"bytes": None, "width": 4}}, ["must have the key 'image'"]),
    "image whose bytes are numbers": ({**ROW, "image": {"bytes": [1, 2]}}, ["must be bytes; got list"]),
    "question with the model's own token": ({**ROW, "question": "<|im_end|>"}, ["<|im_end|>"]),
    "question with half a character": ({**ROW, "question": "a\ud800"}, ["half a character"]),
    "field of 101 levels": ({**ROW, "note": nested(101)}, ["nested more than 100 levels deep"]),
    "answer with half a character": ({**ROW, "answer": "\udfff"}, ["half a character"]),
}


@pytest.mark.parametrize("kind", ["json", "jsonl"])
@pytest.mark.parametrize("name", ROWS)
def test_invalid_row_is_rejected_with_row_number(here: Path, kind: str, name: str) -> None:
    row, words = ROWS[name]
    os.mkfifo(here / "fifo")
    (here / "folder").mkdir()
    text = f"[{GOOD}, {json.dumps(row)}]" if kind == "json" else f"{GOOD}\n{json.dumps(row)}\n"
    (here / f"rows.{kind}").write_text(text)
    refused(lambda: samples(here / f"rows.{kind}"), DataError, f"rows.{kind}, row 2", *words)


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("\ufeff" + GOOD, ["7"]),
        (GOOD.replace('"7"', '"6", "id": "7"'), ["7"]),
        (GOOD[:-1] + ', "score": NaN, "most": Infinity}', ["7"]),
        (GOOD[:-1] + ', "note": "' + "x" * 10_000_000 + '"}', ["7"]),
        (f"\n\n{GOOD}\r\n\n", ["7"]),
        (f"[{GOOD}, {GOOD}]", ["7", "7"]),
    ],
    ids=["mark of the byte order", "key twice", "NaN", "a line of 10 MB", "empty lines", "list named .jsonl"],
)
def test_unusual_but_valid_row_is_accepted(here: Path, text: str, ids: list[str]) -> None:
    (here / "rows.jsonl").write_text(text)
    assert guarded(lambda: [sample.id for sample in samples(here / "rows.jsonl")]) == ids


def test_links_and_absolute_paths_are_allowed_locally(here: Path) -> None:
    Image.new("RGB", (28, 28)).save(here / "cache.png")
    (here / "linked").symlink_to(here.parent / "outside")
    rows = [{**ROW, "image": str(here / "cache.png")}, {**ROW, "image": "linked/flag"}]
    (here / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    paths = [sample.messages[0]["content"][0]["image"] for sample in samples(here / "rows.jsonl")]
    assert paths == [str(here / "cache.png"), str(here / "linked" / "flag")]


@pytest.mark.parametrize("allow", [False, None])
@pytest.mark.parametrize("image", ["{here}/cache.png", "{media}/../cache.png", "s3://bucket/cache.png"])
def test_absolute_paths_outside_media_are_rejected(here: Path, image: str, allow: bool | None) -> None:
    (here / "media").mkdir()
    for file in (here / "cache.png", here / "media" / "a.png"):
        Image.new("RGB", (28, 28)).save(file)
    rows = [{**ROW, "image": "a.png"}, {**ROW, "image": str(here / "media" / "a.png")}]
    rows.append({**ROW, "image": image.format(here=here, media=here / "media")})
    (here / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    settings = {"media_path": str(here / "media"), "allow_absolute_paths": allow}
    refused(
        lambda: samples(here / "rows.jsonl", **settings),
        DataError,
        "rows.jsonl, row 3",
        f"is outside {here}/media; set data.media_path, or data.allow_absolute_paths = true",
    )
    (here / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows[:2]))
    assert len(samples(here / "rows.jsonl", **settings)) == 2


@pytest.mark.parametrize(
    ("path", "given", "allowed"),
    [
        ("rows.jsonl", None, True),
        ("rows.jsonl", False, False),
        ("s3://bucket/rows.jsonl", None, True),
        ("", None, True),
        ("somebody/data", None, False),
        ("somebody/data", True, True),
    ],
    ids=["local", "local, not trusted", "S3", "made by the adapter", "hub", "hub, trusted"],
)
def test_hub_rows_cannot_name_local_files(
    here: Path, monkeypatch: pytest.MonkeyPatch, path: str, given: bool | None, allowed: bool
) -> None:
    monkeypatch.chdir(here)
    (here / "rows.jsonl").write_text(GOOD)
    assert allow_absolute_paths(SourceConfig(path=path, allow_absolute_paths=given)) is allowed


SETTINGS = """
from dsreason.data.types import Sample
def to_sample(row):
    part = {"type": "video", "video": "a.mp4", **row}
    return Sample("7", [{"role": "user", "content": [part]}, {"role": "assistant", "content": "a"}])
"""


@pytest.mark.parametrize("fps", ["NaN", "Infinity", "-1", "1e999", '"2"', "[2]", "true"])
def test_invalid_frame_rate_is_rejected_before_decoding(here: Path, fps: str) -> None:
    from dsreason.families import FAMILIES
    from dsreason.media.vision import VideoInfo, sample_frames

    (here / "own.py").write_text(SETTINGS)
    (here / "a.mp4").write_bytes(b"")
    (here / "rows.jsonl").write_text(f'{{"fps": {fps}}}')
    data = DataConfig(adapter=str(here / "own.py"), path=str(here / "rows.jsonl"), validation=0)
    part = open_datasets(data)[0][0].messages[0]["content"][0]
    refused(
        lambda: sample_frames(VideoInfo(9, 1.0, 28, 28, 9.0), part, FAMILIES["qwen3_vl"].vision),
        DataError,
        "fps must be ",
    )


# ---------------------------------------------------------------- code that comes with data


class Planted:
    """An object that writes the file `executed` when it is unpickled."""

    def __reduce__(self) -> Any:
        return Path.write_text, (Path("executed"), "code ran")


def test_pickle_in_table_schema_is_never_loaded(here: Path, executed: Path) -> None:
    described = {
        b"ARROW:extension:name": b"arrow.py_extension_type",
        b"ARROW:extension:metadata": pickle.dumps(Planted()),
    }
    fields = [pyarrow.field(key, pyarrow.string(), metadata=described if key == "id" else None) for key in ROW]
    table = pyarrow.table([pyarrow.array([value]) for value in ROW.values()], schema=pyarrow.schema(fields))
    pyarrow.parquet.write_table(table, here / "rows.parquet")
    assert guarded(lambda: [sample.id for sample in samples(here / "rows.parquet")]) == ["7"]


@pytest.mark.parametrize("script", ["rows.py", "data.py", "__init__.py"])
def test_script_in_data_set_is_never_run(here: Path, executed: Path, script: str) -> None:
    folder = here / "rows"
    folder.mkdir()
    (folder / script).write_text(f"open({str(executed)!r}, 'w').write('code ran')")
    (folder / "README.md").write_text("---\nconfigs:\n- config_name: default\n  data_files: train.jsonl\n---\n")
    (folder / "train.jsonl").write_text(GOOD)
    if script == "rows.py":  # named like the folder, as older versions of `datasets` required to run it
        refused(lambda: samples(folder, media_path=str(here)), DataError, "scripts are no longer supported", "rows.py")
    else:
        assert guarded(lambda: [sample.id for sample in samples(folder, media_path=str(here))]) == ["7"]


def test_adapter_file_next_to_data_is_never_run(here: Path, executed: Path) -> None:
    for name in ("adapter.py", "jsonl.py", "conftest.py", "rows.py"):
        (here / name).write_text(f"open({str(executed)!r}, 'w').write('code ran')")
    (here / "rows.jsonl").write_text(GOOD)
    assert guarded(lambda: [sample.id for sample in samples(here / "rows.jsonl")]) == ["7"]
