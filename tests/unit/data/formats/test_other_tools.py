"""Rows of other tools: every meaningful field is either used with its original meaning or refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dsreason.data.formats.read import read_row
from dsreason.errors import DataError
from tests.unit.data.formats.test_read import ASK, REPLY, shorten, turn

QUESTION = {"question": "Which?", "answer": "B"}
LETTERED = ["user: Which?\n(A) x\n(B) y", "assistant: B"]


@pytest.mark.parametrize("key", ["training", "trainable"])
def test_axolotl_loss_keys_are_read(key):
    messages = [ASK, turn("assistant", "No.", **{key: False}), ASK, turn("assistant", "Yes.", **{key: True})]
    assert shorten(read_row({"messages": messages}).messages)[1::2] == ["(assistant): No.", "assistant: Yes."]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("train_detail", [{"begin_offset": 0, "end_offset": 1, "train": False}]),
        ("masked", True),
        ("is_masked", True),
        ("loss_weight", 0),
        ("loss_scale", 0),
        ("do_train", False),
        ("label_mask", 0),
        ("learn", False),
        ("skip", True),
        ("refusal", "I can't."),
        ("audios", ["a.wav"]),
        ("rejected", "No."),
        ("objects", {"bbox": [[1, 2, 3, 4]]}),
        ("bbox", [1, 2, 3, 4]),
        ("system", "Be short."),
        ("thoughts", "Hm."),
        ("reasoning_details", [{"text": "Hm."}]),
    ],
)
def test_message_key_with_meaning_is_refused(key, value):
    with pytest.raises(DataError, match=rf"messages\[1\]: key '{key}'"):
        read_row({"messages": [ASK, turn("assistant", "Yes.", **{key: value})]})


@pytest.mark.parametrize(
    ("key", "value"),
    [("masked", False), ("loss_weight", 1.0), ("refusal", None), ("train_detail", []), ("objects", {"bbox": []})],
)
def test_key_without_effect_is_accepted(key, value):
    row = {"messages": [turn("user", "Up?", masked=True), turn("assistant", "Yes.", **{key: value})]}
    assert shorten(read_row(row).messages) == ["user: Up?", "assistant: Yes."]


def test_untrained_part_of_reply_is_refused():
    parts = [{"type": "text", "text": "Well. ", "loss": False}, {"type": "text", "text": "Yes.", "loss": True}]
    with pytest.raises(DataError, match="key 'loss'"):
        read_row({"messages": [ASK, turn("assistant", parts)]})


def test_video_setting_outside_its_part_is_refused():
    with pytest.raises(DataError, match="key 'video_start': settings of a video belong in its part"):
        read_row({"messages": [turn("user", "Up?", video="a.mp4", video_start=1), REPLY]})


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("loss_mask", [0, 1]),
        ("loss_mask", 0),
        ("turn_weights", [0]),
        ("train_on_input", True),
        ("weight", 0.0),
        ("loss", False),
        ("train", False),
        ("enable_thinking", False),
        ("paragraph", "Long ago."),
    ],
)
def test_column_with_meaning_is_refused(column, value):
    for row in ({"question": "Up?", "answer": "Yes."}, {"messages": [ASK, REPLY]}):
        with pytest.raises(DataError, match=f"'{column}'"):
            read_row({**row, column: value})


def test_tokenized_rows_are_refused():
    with pytest.raises(DataError, match="rows of tokens are not supported"):
        read_row({"messages": [ASK, REPLY], "input_ids": [1, 2], "labels": [-100, 2]})


@pytest.mark.parametrize(
    ("column", "value"),
    [("objects", {"ref": [], "bbox": []}), ("weight", 1), ("weight", "1"), ("weight", ""), ("train_on_input", False)],
)
def test_column_without_effect_is_accepted(column, value):
    assert read_row({"messages": [ASK, REPLY], column: value}).answer == "Yes."


@pytest.mark.parametrize(
    "columns",
    [
        {"option_a": "x", "option_b": "y"},
        {"optionA": "x", "optionB": "y", "optionC": None},
        {"choice_a": "x", "choice_b": "y"},
        {"opa": "x", "opb": "y", "cop": 1},
        {"a": "x", "b": "y"},
        {"candidates": ["x", "y"]},
        {"option1": "x", "option2": "y", "answer": "2"},
        {"a0": "x", "a1": "y", "answer": 1},
        {"options": {"1": "x", "2": "y"}, "answer": "2"},
        {"choices": {"label": ["1", "2"], "text": ["x", "y"]}, "answer": None, "answerKey": "2"},
    ],
)
def test_option_columns_are_lettered(columns):
    sample = read_row({**QUESTION, **columns})
    assert shorten(sample.messages) == LETTERED
    assert (sample.answer, sample.options) == ("B", {"A": "x", "B": "y"})


def test_letter_columns_are_options_only_if_answer_matches():
    sample = read_row({"question": "What is a + b?", "a": "3", "b": "4", "answer": "7"})
    assert sample.options is None and sample.meta == {"a": "3", "b": "4"}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"option1": "2", "option2": "1", "answer": "2"}, "both the number of an option and the text of another"),
        ({"options": ["x", "y"], "answer": True}, "got True; write the letter or the text of the right option"),
        ({"options": ["x", "y"], "answer": None, "label": 1}, r'data.columns = {answer = "label"} if \'label\' \(1\)'),
        ({"options": ["x", "y"], "answer": 0}, "whether a number counts from 0 or 1 is unknown"),
        ({"answer": [12, 15, 3, 4]}, "'answer' is a list of numbers"),
        ({"answer": [12.0, 15.5]}, "'answer' is a list of numbers"),
        ({"answer": "Yes.", "reasoning": ["First.", "Then."]}, "'reasoning': the reasoning must be text"),
        ({"answer": "<think>a</think>b", "reasoning": "Hm."}, "reasoning both in its content"),
    ],
)
def test_ambiguous_answer_is_refused(row, reason):
    with pytest.raises(DataError, match=reason):
        read_row({"question": "Which?", **row})


@pytest.mark.parametrize(("value", "text"), [(True, "True"), (False, "False")])
def test_boolean_answer_is_matched_to_option(value, text):
    assert read_row({"question": "Red?", "options": ["True", "False"], "answer": value}).answer == text


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"correct_answer": "4"}, ["4"]),
        ({"gold": "4", "solution": "5"}, ["5"]),
        ({"answers": [{"answer": "a"}, {"answer": "b"}, {"answer": "b"}]}, ["b", "a"]),
        ({"ground_truth": [12.0, 15.5, 3, 4]}, [None]),
        ({"answer": float(np.float32(0.1))}, ["0.1"]),
        ({"answer": 2.0**-20}, [str(2.0**-20)]),
        ({"answer": 1 / 3}, [str(1 / 3)]),
    ],
)
def test_reference_answers_are_found(columns, expected):
    sample = read_row({"question": "Which?", **columns})
    assert [sample.answer, *sample.other_answers] == expected


@pytest.mark.parametrize(
    "row",
    [
        {"question": "Up?", "answer": "Yes.", "reasoning_content": "It rises."},
        {"prompt": "Up?", "completion": "Yes.", "reasoning": "It rises."},
        {"query": "Up?", "response": "Yes.", "thinking": "<think>\nIt rises.\n</think>"},
        {"problem": "Up?", "solution": "Yes.", "process": "<think>It rises.</think>"},
    ],
)
def test_reasoning_column_precedes_the_reply(row: dict[str, Any]) -> None:
    sample = read_row(row)
    assert shorten(sample.messages) == ["user: Up?", "assistant: <think>\nIt rises.\n</think>\n\nYes."]
    assert sample.answer == "Yes."


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": [ASK, turn("assistant", "Let me")], "solution": "4"}, "ends with a message of the assistant"),
        ({"prompt": [turn("system", "Hm.")], "answer": "4"}, "ends with a message of the system"),
        ({"System": "Hm.", "Question": "Up?"}, 'data.columns = {system = "System", question = "Question"}'),
        ({"role": "user", "content": "Up?"}, "the row is a message"),
        ({"prompt": "Up?", "chosen": "Yes.", "rejected": ["No.", "Down."]}, "is a list of 2 texts"),
        ({"chosen": [ASK, REPLY, ASK], "rejected": [ASK, REPLY, turn("user", "Hm?")]}, "must end with a reply"),
        (
            {"chosen": [ASK, REPLY, ASK, REPLY], "rejected": [ASK, turn("assistant", "No."), ASK, REPLY]},
            "differ from message 2 on",
        ),
        ({"prompt": "Up?", "chosen": [turn("tool", "1"), REPLY], "rejected": "No."}, "starts with a tool's message"),
    ],
)
def test_ambiguous_conversation_is_refused(row, reason):
    with pytest.raises(DataError, match=reason):
        read_row(row)


def test_chosen_response_is_the_better_reply():
    sample = read_row({"prompt": "Up?", "chosen_response": "Yes.", "rejected_response": "No."})
    assert (shorten(sample.messages)[1], shorten(sample.rejected)[1]) == ("assistant: Yes.", "assistant: No.")


@pytest.mark.parametrize(
    "turns",
    [
        [{"from": "Human", "value": "Up?"}, {"from": "ChatGPT", "value": "Yes."}],
        [turn("USER", "Up?"), turn("bot", "Yes.")],
        [{"human": "Up?", "assistant": "Yes."}],
        [{"system": "", "input": "Up?", "output": "Yes."}],
    ],
)
def test_alternative_role_names_are_read(turns):
    assert shorten(read_row({"conversation": turns}).messages) == ["user: Up?", "assistant: Yes."]
