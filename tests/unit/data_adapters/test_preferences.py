"""Preference rows in the formats of published data sets, and rows that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from PIL import Image

from data_adapters import builtin, jsonl, preferences
from dsreason.config.schema_data import DataConfig, SourceConfig
from dsreason.data.sources import open_datasets, open_source
from dsreason.errors import DataError


def says(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


ASKED = [says("user", "Which way?")]
LEFT, RIGHT = [says("assistant", "left")], [says("assistant", "right")]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Which way?", "chosen": "left", "rejected": "right"},
        {"question": "Which way?", "chosen": "left", "rejected": "right"},
        {"prompt": ASKED, "chosen": LEFT, "rejected": RIGHT},
        {"prompt": "Which way?", "chosen": LEFT, "rejected": "right"},
        {"chosen": ASKED + LEFT, "rejected": ASKED + RIGHT},
        {"prompt": "Which way?", "chosen": ASKED + LEFT, "rejected": ASKED + RIGHT},
        {"prompt": json.dumps(ASKED), "chosen": json.dumps(LEFT), "rejected": json.dumps(RIGHT)},
    ],
)
def test_all_row_forms_yield_same_sample(row: dict[str, Any]) -> None:
    sample = preferences.to_sample(row)
    assert sample.messages == ASKED + LEFT
    assert sample.rejected == ASKED + RIGHT
    assert sample.answer == "left"


@pytest.mark.parametrize("text", ['[{"bbox_2d": [1, 2, 3, 4], "label": "cup"}]', "[1]", "[]", "[" * 100_000])
def test_json_answer_without_messages_is_text(text: str) -> None:
    sample = preferences.to_sample({"prompt": "Where is the cup?", "chosen": text, "rejected": "left"})
    assert sample.messages[-1] == says("assistant", text)
    assert sample.answer == text


SYSTEM = says("system", "Be short.")
PARTS = [says("user", [{"type": "image", "text": None}, text("Which way?")])]
SHOWN = [says("user", [{"type": "image", "image": "a.png"}, text("Which way?")])]


@pytest.mark.parametrize(
    ("beside", "begin", "expected"),
    [
        ({"prompt": "Which way?", "image": "a.png"}, PARTS, SHOWN),
        ({"prompt": PARTS, "image": "a.png"}, ASKED, SHOWN),
        ({"prompt": "Which way?", "system": "Be short."}, ASKED, [SYSTEM, *ASKED]),
        ({"system": "Be short."}, ASKED, [SYSTEM, *ASKED]),
        ({"prompt": "Which way?", "system": "Be short."}, [SYSTEM, *ASKED], [SYSTEM, *ASKED]),
        ({"prompt": "Which way?"}, [SYSTEM, *ASKED], [SYSTEM, *ASKED]),
    ],
)
def test_prompt_and_system_may_accompany_conversations(beside: Any, begin: Any, expected: Any) -> None:
    row = beside | {"chosen": begin + LEFT, "rejected": begin + RIGHT}
    sample = preferences.to_sample(row)
    assert sample.messages == expected + LEFT
    assert sample.rejected == expected + RIGHT


@pytest.mark.parametrize(
    ("beside", "missing"),
    [
        ({"prompt": "Which colour?"}, "user message of the row's other columns, 'Which colour"),
        ({"prompt": "Which way?", "system": "Be long."}, "system message of the row's other columns, 'Be long"),
        ({"system": "Be long."}, "system message of the row's other columns, 'Be long"),
        (
            {"prompt": [*ASKED, {"role": "assistant", "content": "Up."}, *ASKED]},
            "assistant message of the row's other columns, 'Up",
        ),
    ],
)
def test_prompt_missing_from_full_conversations_is_rejected(beside: Any, missing: str) -> None:
    begin = [SYSTEM, *ASKED]
    with pytest.raises(DataError, match=f"field 'chosen' is a complete conversation, but lacks the {missing}"):
        preferences.to_sample(beside | {"chosen": begin + LEFT, "rejected": begin + RIGHT})


@pytest.mark.parametrize(
    "prompt",
    ["", " ", "<image>Which way?", "Really?"],
    ids=["empty", "blank", "with a mark", "the last of two"],
)
def test_redundant_or_empty_prompt_is_accepted(prompt: Any) -> None:
    begin = [*ASKED, says("assistant", "Up."), says("user", "Really?")]
    sample = preferences.to_sample({"prompt": prompt, "chosen": begin + LEFT, "rejected": begin + RIGHT})
    assert sample.messages == begin + LEFT


@pytest.mark.parametrize("key", ["from", "Role", "content"])
def test_messages_without_roles_are_rejected_as_answers(key: str) -> None:
    text = json.dumps([{key: "gpt", "value": "hello"}])
    with pytest.raises(DataError, match="a JSON text lists messages, but not all have a role"):
        preferences.to_sample({"prompt": "Which way?", "chosen": text, "rejected": "left"})


@pytest.mark.parametrize(
    ("prompt", "content"),
    [
        ("Same?", [{"type": "image", "image": "a.png"}, {"type": "image", "image": "b.png"}, text("Same?")]),
        (
            [says("user", [{"type": "image"}, text("and"), {"type": "image"}, text("Same?")])],
            [{"type": "image", "image": "a.png"}, text("and"), {"type": "image", "image": "b.png"}, text("Same?")],
        ),
        (  # Arrow gives all parts the same keys
            [says("user", [{"type": "text", "text": "Same?", "image": None}])],
            [{"type": "image", "image": "a.png"}, {"type": "image", "image": "b.png"}, text("Same?")],
        ),
    ],
)
def test_media_columns_are_inserted_into_prompt(prompt: Any, content: list[dict[str, Any]]) -> None:
    row = {"prompt": prompt, "chosen": "yes", "rejected": "no", "images": ["a.png", "b.png"]}
    sample = preferences.to_sample(row)
    assert sample.messages[0]["content"] == content
    assert sample.rejected is not None
    assert sample.rejected[0] == sample.messages[0]


def test_system_text_and_reference_values_have_own_columns() -> None:
    row = {"prompt": "Which way?", "system": "Be short.", "chosen": "left", "rejected": "right", "answer": "L"}
    sample = preferences.to_sample(row | {"ref_chosen_logprob": -1.5, "ref_rejected_logprob": -2.0, "video": "a.mp4"})
    assert [message["role"] for message in sample.messages] == ["system", "user", "assistant"]
    assert sample.meta == {"ref_chosen_logprob": -1.5, "ref_rejected_logprob": -2.0}
    assert sample.answer == "L"


@pytest.mark.parametrize(
    ("row", "error"),
    [
        ({"chosen": "left", "rejected": "right"}, "field 'chosen' has only a reply, and the row has no prompt"),
        ({"prompt": "Which?", "chosen": "left"}, "field 'rejected' is missing"),
        ({"prompt": "Which?", "chosen": "left", "rejected": None}, "field 'rejected' is missing, null or empty"),
        ({"prompt": "Which?", "chosen": "left", "rejected": 3}, "field 'rejected' must be a list of messages"),
        ({"prompt": 7, "chosen": "left", "rejected": "right"}, "field 'prompt' must be a list of messages"),
        ({"prompt": "Which?", "chosen": [], "rejected": "right"}, "field 'chosen' is missing, null or empty"),
        (
            {"prompt": [says("user", [{"type": "image"}])], "chosen": "a", "rejected": "b", "images": ["1", "2"]},
            "the messages have 1 <image> tags or empty parts, but the row has 2 images",
        ),
        (
            {"prompt": "Which?", "chosen": "left", "rejected": [says("assistant", [{"type": "sound"}])]},
            r"the type of a part must be text, image or video; got 'sound'",
        ),
        (
            {"prompt": "Which?", "chosen": "left", "rejected": [says("tool", "x")]},
            "field 'rejected' starts with a tool's message",
        ),
    ],
)
def test_bad_row_error_names_file_and_field(tmp_path: Path, row: dict[str, Any], error: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}) + "\n" + json.dumps(row))
    source = open_source(SourceConfig(adapter="preferences", path=str(file)))
    assert source.sample(0).rejected == [says("user", "a"), says("assistant", "c")]
    with pytest.raises(DataError, match=rf"rows\.jsonl, row 2.*{error}"):
        source.sample(1)


def test_both_conversations_get_media_and_system_prompt(tmp_path: Path) -> None:
    Image.new("RGB", (56, 56)).save(tmp_path / "a.png")
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"id": "1", "question": "Red?", "image": "a.png", "chosen": "no", "rejected": "yes"}))
    sample = open_source(SourceConfig(path=str(file), system_prompt="Be short.")).sample(0)
    for messages, answer in ((sample.messages, "no"), (sample.rejected or [], "yes")):
        assert messages[0] == says("system", "Be short.")
        assert messages[1]["content"][0] == {"type": "image", "image": str(tmp_path / "a.png")}
        assert messages[2] == says("assistant", answer)


def test_images_inside_a_table_are_read(tmp_path: Path) -> None:
    Image.new("RGB", (56, 56), "red").save(tmp_path / "a.png")
    row = {
        "prompt": "Red?",
        "chosen": "yes",
        "rejected": "no",
        "images": [{"bytes": (tmp_path / "a.png").read_bytes(), "path": None}],
    }
    features = datasets.Features(
        {name: datasets.Value("string") for name in ("prompt", "chosen", "rejected")}
        | {"images": datasets.List(datasets.Image())}
    )
    datasets.Dataset.from_list([row], features=features).to_parquet(tmp_path / "rows.parquet")
    training, _ = open_datasets(DataConfig(adapter="preferences", path=str(tmp_path / "rows.parquet")))
    sample = training[0]
    assert sample.messages[0]["content"][0]["type"] == "image"
    assert (sample.rejected or [])[0] == sample.messages[0]


@pytest.mark.parametrize(
    ("row", "chosen"),
    [
        ({"question": "Which?", "chosen": "left", "rejected": "right"}, "left"),
        ({"question": "Which?", "answer": "left", "rejected": "right"}, "left"),
        ({"question": "Which?", "answer": "A", "chosen": "left, I think", "rejected": "right"}, "left, I think"),
    ],
)
def test_plain_row_has_chosen_and_rejected_answers(row: dict[str, Any], chosen: str) -> None:
    sample = jsonl.to_sample(row)
    assert sample.messages[-1] == says("assistant", chosen)
    assert sample.rejected == [*sample.messages[:-1], says("assistant", "right")]
    assert sample.answer == row.get("answer", chosen)


def test_plain_row_without_rejected_answer_has_none() -> None:
    assert jsonl.to_sample({"question": "Which?", "answer": "left"}).rejected is None


@pytest.mark.parametrize(
    ("row", "rejected"),
    [
        (
            {"id": "1", "kind": "count", "image": "a.png", "question": "How many shapes are there?", "answer": "two"},
            "three",
        ),
        (
            {"id": "1", "kind": "collide", "video": "a.mp4", "question": "Will the balls collide?", "answer": "no"},
            "yes",
        ),
    ],
)
def test_builtin_preferences_reject_the_next_answer(row: dict[str, Any], rejected: str) -> None:
    (changed,) = builtin.SUBSETS["preferences"]([row])
    sample = builtin.to_sample(changed)
    assert sample.rejected == [*sample.messages[:-1], says("assistant", rejected)]
    assert sample.messages[-1] == says("assistant", row["answer"])
    assert "rejected" not in sample.meta
