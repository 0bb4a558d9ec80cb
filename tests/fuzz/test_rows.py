"""Any row either becomes a sample, or is rejected with its file and position; no media file outside the folder is used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import strategies as st
from PIL import Image

from dsreason.config.schema_data import DataConfig
from dsreason.data.messages import list_media_paths
from dsreason.data.sources import open_datasets
from dsreason.errors import DataError
from dsreason.files.archives import get_media_cache
from tests.fuzz.fuzzing import Fuzz, changed, damaged, texts, values

pytestmark = [pytest.mark.integration, pytest.mark.long]

TURNS = [
    {"role": "system", "content": "Answer."},
    {"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "Which way?"}]},
    {"role": "assistant", "content": "left"},
]
QUESTION = {"question": "Which way?", "index2ans": {"A": "left", "B": "right"}, "answer": "A"}
ROWS: dict[str, dict[str, Any]] = {
    "jsonl": {
        "id": "7",
        "image": ["a.png"],
        "question": "Which?",
        "options": {"A": "left", "B": "right"},
        "answer": "A",
    },
    "llava": {
        "id": "7",
        "image": "a.png",
        "conversations": [{"from": "human", "value": "<image>\nWhich way?"}, {"from": "gpt", "value": "left"}],
    },
    "conversations": {"id": "7", "conversations": TURNS},
    "cosmos_reason1": {"video": "a.mp4", "conversations": [{"role": "user", "content": "Which?"}, TURNS[2]]},
    "cosmos_reason1_rl": {"video": "a.mp4", "qa_pairs": [QUESTION, QUESTION]},
    "preferences": {
        "id": "7",
        "prompt": TURNS[:2],
        "chosen": TURNS[2:],
        "rejected": "right",
        "ref_chosen_logprob": -1.5,
    },
}
NAMES = [
    *(
        "a.png",
        "a.mp4",
        "../outside/flag",
        "/etc/passwd",
        "~/x",
        "b/../../outside/flag",
        "file:///etc/passwd",
        "http://127.0.0.1:1/a.png",
    ),
    *(
        "",
        ".",
        "..",
        "a\0.png",
        "\ud800",
        "x" * 300,
        "folder",
        "linked/../a.png",
        "<image>",
        "<|im_end|>",
        "<video>" * 3,
        "A",
        "Z",
    ),
    *("s3://b/k", "data:image/png;base64,AAAA", "a.png::/etc/passwd", "zip://a::b", "role", "user", "text", "video"),
]
odd = st.one_of(
    values,
    texts,
    st.sampled_from(NAMES),
    st.sampled_from([[], {}, [[]], [None], {"bytes": None, "path": "/etc/passwd"}]),
)


@st.composite
def files(draw: st.DrawFn) -> tuple[str, str, bytes]:
    """Draw an adapter, the name of a file, and the content of the file."""
    adapter = draw(st.sampled_from([*ROWS]))
    rows = [ROWS[adapter], draw(changed(ROWS[adapter], odd))]
    match draw(st.sampled_from(["jsonl", "json", "damaged"] * 5 + ["parquet"])):
        case "jsonl":
            return adapter, "rows.jsonl", b"\n".join(as_json(row) for row in rows)
        case "json":
            return adapter, "rows.json", as_json(rows)
        case "damaged":
            name, content = draw(st.sampled_from([("rows.jsonl", as_json(rows[0])), ("rows.json", as_json(rows))]))
            return adapter, name, draw(damaged(st.just(content)))
    return adapter, "rows.parquet", draw(damaged(st.just(PARQUET[adapter])))


def as_json(value: Any) -> bytes:
    return json.dumps(value).encode()


def parquet(row: dict[str, Any]) -> bytes:
    buffer = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), buffer)
    return bytes(buffer.getvalue())


PARQUET = {
    name: parquet({**row, **{key: json.dumps(value) for key, value in row.items() if isinstance(value, list)}})
    for name, row in ROWS.items()
}


@pytest.fixture
def folder(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (here / "outside").mkdir()
    (here / "outside" / "flag").write_text("untouched")
    (here / "data" / "folder").mkdir(parents=True)
    Image.new("RGB", (28, 28)).save(here / "data" / "a.png")
    (here / "data" / "a.mp4").touch()  # media are not decoded in this test
    monkeypatch.chdir(here / "data")
    return here / "data"


def read(folder: Path, adapter: str, name: str) -> list[Any]:
    settings = {
        "adapter": adapter,
        "path": str(folder / name),
        "media_path": str(folder),
        "allow_absolute_paths": False,
    }
    training, _ = open_datasets(DataConfig.model_validate({**settings, "validation": 0}))
    return list(training)


@pytest.mark.parametrize("adapter", ROWS)
def test_ordinary_row_is_read(folder: Path, adapter: str) -> None:
    (folder / "rows.jsonl").write_bytes(as_json(ROWS[adapter]))
    assert read(folder, adapter, "rows.jsonl")


def test_any_row_is_read_or_rejected(fuzz: Fuzz, folder: Path) -> None:
    def check(case: tuple[str, str, bytes]) -> None:
        adapter, name, content = case
        (folder / name).write_bytes(content)
        try:
            samples = read(folder, adapter, name)
        except DataError as error:
            assert name in str(error), str(error)
            return
        for sample in samples:
            assert isinstance(sample.id, str)
            for path in list_media_paths(sample.messages):
                assert Path(path).is_relative_to(folder) or Path(path).is_relative_to(get_media_cache())
                assert ".." not in Path(path).parts

    fuzz(check, files())
