"""Media that are not files beside their rows: at URLs, in `data:` URIs, and embedded in tables."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from dsreason.config.schema import SFTConfig
from dsreason.config.schema_data import DataConfig, SourceConfig
from dsreason.config.schema_eval import EvalConfig
from dsreason.data.formats.read import read_row
from dsreason.data.sources import DataSource, finish_sample, open_datasets, open_source
from dsreason.data.types import Sample
from dsreason.errors import DataError
from dsreason.evaluation.questions.questions import iter_row_questions
from dsreason.media.frames import read_frame_list
from dsreason.media.images import probe_image
from dsreason.secrets import hide_payloads, hide_secrets
from dsreason.tools.datasets.show import iter_json
from tests.unit.hostile.server import content, misbehaving


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one image; the caches are below it."""
    monkeypatch.setenv("DSREASON_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("COSMOS_CACHE", raising=False)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    Image.new("RGB", (32, 24)).save(tmp_path / "a.png")
    return tmp_path


def write(folder: Path, **changes: Any) -> None:
    row = {"image": "a.png", "question": "What colour?", "answer": "red", **changes}
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")


def open_rows(folder: Path, **keys: Any) -> DataSource:
    return open_source(SourceConfig(path=str(folder / "rows.jsonl"), **{"adapter": "auto", **keys}))


def encode(folder: Path) -> str:
    return base64.b64encode((folder / "a.png").read_bytes()).decode()


@pytest.mark.parametrize("adapter", ["auto", "jsonl"])
def test_data_uri_is_cached_like_embedded_media(folder: Path, adapter: str) -> None:
    write(folder, image=f"data:image/png;base64,{encode(folder)}")
    sample = open_rows(folder, adapter=adapter).sample(0)
    digest = hashlib.sha256((folder / "a.png").read_bytes()).hexdigest()
    path = sample.messages[0]["content"][0]["image"]
    assert path == str(folder / "cache" / "media" / digest[:2] / f"{digest}.png")
    assert (sample.id, probe_image(path)) == ("", (24, 32))


def test_bare_base64_in_media_part_is_decoded(folder: Path) -> None:
    part = {"type": "image", "base64": encode(folder)}
    write(folder, messages=[{"role": "user", "content": [part]}, {"role": "assistant", "content": "red"}])
    row = json.loads((folder / "rows.jsonl").read_text())
    sample = finish_sample(read_row({"messages": row["messages"]}), SourceConfig(), folder)
    assert probe_image(sample.messages[0]["content"][0]["image"]) == (24, 32)


def test_data_uri_is_allowed_despite_refused_paths(folder: Path) -> None:
    write(folder, image=f"data:image/png;base64,{encode(folder)}")
    assert open_rows(folder, allow_absolute_paths=False).sample(0).answer == "red"


@pytest.mark.parametrize("adapter", ["auto", "jsonl"])
@pytest.mark.parametrize("kind", ["image", "video"])
def test_url_is_fetched_when_row_is_used(folder: Path, adapter: str, kind: str) -> None:
    with misbehaving(content((folder / "a.png").read_bytes())) as server:
        url = f"{server.url}/pictures/7.png?width=9"
        write(folder, **{"image": None, kind: url})
        source = open_rows(folder, adapter=adapter, allow_private_urls=True)
        assert source.read(0).messages[0]["content"][0][kind] == url
        assert server.requests == []
        samples = [source.sample(0) for _ in range(2)]
    assert len(server.requests) == 1
    path = Path(samples[1].messages[0]["content"][0][kind])
    assert (path.name, path.read_bytes()) == ("7.png", (folder / "a.png").read_bytes())
    assert samples[1].id == f"{server.url}/pictures/7.png?…"


def test_urls_of_both_conversations_are_fetched(folder: Path) -> None:
    with misbehaving(content((folder / "a.png").read_bytes())) as server:
        write(folder, image=f"{server.url}/a.png", chosen="red", rejected="blue", answer=None)
        sample = open_rows(folder, adapter="jsonl", allow_private_urls=True).sample(0)
    assert sample.rejected is not None
    paths = [messages[0]["content"][0]["image"] for messages in (sample.messages, sample.rejected)]
    assert paths[0] == paths[1] and Path(paths[0]).is_file()


def test_private_url_requires_allow_private_urls(folder: Path) -> None:
    with misbehaving(content(b"x")) as server:
        write(folder, image=f"{server.url}/a.png", id="7")
        with pytest.raises(DataError) as error:
            open_rows(folder).sample(0)
    assert f"rows.jsonl, row 1 (sample '7'): {server.url}/a.png: 127.0.0.1 is not a public address" in str(error.value)
    assert server.requests == []


@pytest.mark.parametrize("keys", [{"media_path": "."}, {"allow_absolute_paths": False}])
def test_url_is_refused_if_absolute_paths_are(folder: Path, keys: dict[str, Any]) -> None:
    write(folder, image="https://me:secret@host/a.png?key=1")
    with pytest.raises(DataError, match=r"image: https://…@host/a\.png\?… is outside of .*allow_absolute_paths = true"):
        open_rows(folder, **keys).read(0)


def test_url_of_a_hub_row_is_refused(folder: Path) -> None:
    row = {"question": "What colour?", "answer": "red", "image": "https://host/a.png"}
    with pytest.raises(DataError, match="https://host/a.png is outside of"):
        finish_sample(read_row(row), SourceConfig(path="somebody/data"), folder)
    allowed = SourceConfig(path="somebody/data", allow_absolute_paths=True)
    assert finish_sample(read_row(row), allowed, folder).id == "https://host/a.png"


def test_fetched_non_image_file_is_reported(folder: Path) -> None:
    with misbehaving(content(b'{"error": "expired"}')) as server:
        write(folder, image=f"{server.url}/a.png")
        sample = open_rows(folder, allow_private_urls=True).sample(0)
    with pytest.raises(DataError, match=r"/a\.png: "):
        probe_image(sample.messages[0]["content"][0]["image"])


def test_question_with_missing_url_records_the_problem(folder: Path) -> None:
    with misbehaving(content(b"", status="404 Not Found")) as server:
        write(folder, image=f"{server.url}/a.png")
        source = {"adapter": "auto", "path": str(folder / "rows.jsonl"), "allow_private_urls": True}
        config = EvalConfig.model_validate({"sources": [source], "model": {"path": "tiny:qwen2_5_vl"}})
        (question,) = iter_row_questions(config.sources[0], config)
    assert question.problem is not None and "404 Not Found" in question.problem


# ---------------------------------------------------------------- messages never have a payload

PAYLOAD = "iVBORw0KGgoAAAANSUhEUgAA" * 20
URI = f"data:image/png;base64,{PAYLOAD}"
PART = {"type": "image", "base64": PAYLOAD}


@pytest.mark.parametrize(
    "row",
    [
        {"image": f"{URI}!", "question": "q", "answer": "a"},
        {"image": PAYLOAD * 10 + "!", "question": "q", "answer": "a"},
        {"image": {"bytes": None, "path": f"{URI}!"}, "question": "q", "answer": "a"},
        {"images": [URI, "a.png"], "messages": [{"role": "user", "content": "<image>q"}]},
        {"images": [URI], "messages": [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}]},
        {"messages": [{"role": "user", "content": URI, "extra": [PART]}, {"role": "human"}]},
        {"messages": [{"role": "user", "content": [[PART, URI]]}]},
        {"messages": [{"role": "user", "content": [{**PART, "type": "text"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "image", "image": [URI]}]}]},
        {"messages": [PART, URI]},
        {"question": [URI], "answer": "a"},
        {"prompt": 3, "images": [URI]},
        {"system": URI, "messages": [{"role": "system", "content": "b"}, {"role": "user", "content": "q"}]},
        {"tools": [URI], "messages": [{"role": "user", "content": "q"}]},
        {"unknown": URI},
        [URI],
        URI,
    ],
)
@pytest.mark.parametrize("adapter", ["auto", "jsonl", "llava", "conversations", "preferences"])
def test_errors_contain_no_payload(folder: Path, row: Any, adapter: str) -> None:
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    message = "" if adapter == "auto" else "an adapter may ignore a column"
    try:
        open_rows(folder, adapter=adapter).sample(0)
    except DataError as error:
        message = str(error)
    assert 0 < len(message) < 800
    assert PAYLOAD[:16] not in message


def test_invalid_data_uri_is_shown_shortened(folder: Path) -> None:
    write(folder, image=f"{URI}!")
    with pytest.raises(
        DataError, match=r"row 1 \(sample ''\): image: data:image/png;base64,… \(481 characters\): is not valid"
    ):
        open_rows(folder).sample(0)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"[{URI!r}, 'b']", "['data:image/png;base64,…', 'b']"),
        (f"{URI:.200} is", "data:image/png;base64,… is"),
        (f"{PART}", "{'type': 'image', 'base64': '…'}"),
        (f"{json.dumps(PART)}", '{"type": "image", "base64": "…"}'),
        (f"{ {'bytes': b'RIFF' + bytes(99), 'path': None} }", "{'bytes': b'…', 'path': None}"),
        ("{'bytes': b'a\\'b c', 'path': 1}", "{'bytes': b'…', 'path': 1}"),
        ("{'bytes': b\"a'b c", "{'bytes': b'…'"),
        ("data: a sentence, 3 words; metadata:a,b", "data: a sentence, 3 words; metadata:a,b"),
    ],
)
def test_payloads_are_hidden_in_texts(text: str, shown: str) -> None:
    assert hide_payloads(text) == hide_secrets(text) == shown


def test_displayed_rows_have_no_payload_in_meta(folder: Path) -> None:
    write(folder, note={"thumbnail": URI})
    (entry,) = iter_json(open_rows(folder, adapter="jsonl"), range(1), "sft", None)
    assert entry["meta"]["note"] == {"thumbnail": "data:image/png;base64,…"}


def test_bad_urls_follow_the_bad_row_policy(folder: Path) -> None:
    from dsreason.data.loader import find_fatal_error
    from dsreason.data.loader import read_row as read_one

    write(folder, image="http://127.0.0.1:1/a.png")
    data = {"adapter": "auto", "path": str(folder / "rows.jsonl")}
    dataset, _ = open_datasets(DataConfig.model_validate(data))
    error = read_one(dataset, 0, lambda sample: sample)
    assert isinstance(error, DataError)
    for policy in ("error", "skip"):
        config = SFTConfig.model_validate({"data": {**data, "on_bad_row": policy}})
        assert (find_fatal_error([error], config) is None) == (policy == "skip")


@pytest.mark.parametrize("raw", ["a.png", "bytes", "uri"])
def test_image_file_is_rejected_as_video(folder: Path, raw: str) -> None:
    content = (folder / "a.png").read_bytes()
    uri = f"data:image/png;base64,{encode(folder)}"
    video = {"a.png": "a.png", "bytes": {"bytes": content, "path": None}, "uri": uri}[raw]
    messages = [{"role": "user", "content": [{"type": "video", "video": video}]}]
    with pytest.raises(DataError, match=r"video: .* is an image; put it into 'image'"):
        finish_sample(Sample("7", messages), SourceConfig(), folder)


def test_embedded_frames_become_one_video(folder: Path) -> None:
    frames = [{"bytes": (folder / "a.png").read_bytes(), "path": None}, "a.png"]
    row = {"question": "Up?", "answer": "no", "video": frames, "timestamps": [0, 0.5]}
    part = finish_sample(read_row(row), SourceConfig(), folder).messages[0]["content"][0]
    written = read_frame_list(part["video"])
    assert (len(written.paths), written.paths[1], written.seconds) == (2, str(folder / "a.png"), (0, 0.5))
