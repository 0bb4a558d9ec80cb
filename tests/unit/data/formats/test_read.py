"""A literal row of each format, the sample that it becomes, and the contradictions that are refused."""

from __future__ import annotations

from typing import Any

import pytest

from dsreason.data.formats.read import read_row
from dsreason.data.types import Message, Sample
from dsreason.errors import DataError


def shorten(messages: list[Message] | None) -> list[str]:
    """Write each message as `user: [image a.png] text`; an untrained reply as `(assistant): text`."""
    return [write_message(message) for message in messages or []]


def write_message(message: Message) -> str:
    content = message["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    texts = [part["text"] if part["type"] == "text" else f"[{part['type']} {part[part['type']]}]" for part in parts]
    calls = [f"{call['function']['name']}({call['function']['arguments']})" for call in message.get("tool_calls", [])]
    role = message["role"] if message.get("trained", True) else f"({message['role']})"
    return f"{role}: {''.join([*texts, *calls])}"


def turn(role: str, content: Any, **keys: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **keys}


ASK, REPLY = turn("user", "Up?"), turn("assistant", "Yes.")


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": [ASK, REPLY]}, ["user: Up?", "assistant: Yes."]),
        ({"messages": [ASK, REPLY], "system": "Be short."}, ["system: Be short.", "user: Up?", "assistant: Yes."]),
        (
            {
                "conversations": [{"from": "human", "value": "<image>\nUp?"}, {"from": "gpt", "value": "Yes."}],
                "image": "a",
            },
            ["user: [image a]Up?", "assistant: Yes."],
        ),
        ({"messages": [turn("developer", "Hm."), ASK, REPLY]}, ["system: Hm.", "user: Up?", "assistant: Yes."]),
        ({"prompt": "Up?", "completion": " yes "}, ["user: Up?", "assistant:  yes "]),
        (
            {"prompt": [ASK, turn("assistant", "No."), ASK], "completion": [REPLY]},
            ["user: Up?", "(assistant): No.", "user: Up?", "assistant: Yes."],
        ),
        ({"prompt": "Up?", "solution": "yes"}, ["user: Up?", "assistant: yes"]),
        ({"prompt": [ASK], "reward_model": {"ground_truth": "3"}}, ["user: Up?", "assistant: 3"]),
        ({"instruction": "Rank.", "input": "a, b", "output": "b, a"}, ["user: Rank.\na, b", "assistant: b, a"]),
        (
            {"query": "And b?", "response": "No.", "history": [["a?", "Yes."]]},
            ["user: a?", "assistant: Yes.", "user: And b?", "assistant: No."],
        ),
        ({"question": "Up?", "answer": True, "options": None}, ["user: Up?", "assistant: yes"]),
        ({"problem": "1 + 1?", "answer": 2.0}, ["user: 1 + 1?", "assistant: 2"]),
        (
            {"system_prompt": "Hm.", "question": "Up?", "response": "Yes."},
            ["system: Hm.", "user: Up?", "assistant: Yes."],
        ),
        ({"prompt": "Up?", "response": "Yes."}, ["user: Up?", "assistant: Yes."]),
        ({"instruction": "Up?", "context": "A lift.", "response": "Yes."}, ["user: Up?\nA lift.", "assistant: Yes."]),
        (
            {
                "input": {"messages": [ASK]},
                "preferred_output": [REPLY],
                "non_preferred_output": [turn("assistant", "No.")],
            },
            ["user: Up?", "assistant: Yes."],
        ),
        ({"messages": [turn("system", ""), ASK, REPLY]}, ["user: Up?", "assistant: Yes."]),
        ({"messages": [ASK, REPLY], "chosen": "", "rejected_messages": []}, ["user: Up?", "assistant: Yes."]),
        (
            {"query": "b?", "response": 5, "history": '[["a?", "x"]]'},
            ["user: a?", "assistant: x", "user: b?", "assistant: 5"],
        ),
        ({"question": "Q?", "A": "x", "B": "y", "C": None, "answer": "B"}, ["user: Q?\n(A) x\n(B) y", "assistant: B"]),
        (
            {"question": "Q?", "options": None, "choices": "['x', 'y']", "answer": "B"},
            ["user: Q?\n(A) x\n(B) y", "assistant: B"],
        ),
        ({"question": "Q?", "options": ["A. x", "(B) y"], "answer": "B"}, ["user: Q?\n(A) x\n(B) y", "assistant: B"]),
        (
            {"question": "Q?", "choices": {"label": ["A", "B"], "text": ["x", "y"]}, "answer": "A"},
            ["user: Q?\n(A) x\n(B) y", "assistant: A"],
        ),
        (
            {"question": "Q?\nA. x\nB. y", "options": ["x", "y"], "answer": "A"},
            ["user: Q?\nA. x\nB. y", "assistant: A"],
        ),
        ({"question": "Which?", "options": ["a", "b"], "answer": "B"}, ["user: Which?\n(A) a\n(B) b", "assistant: B"]),
    ],
)
def test_format_is_found_by_columns(row, expected):
    assert shorten(read_row(row).messages) == expected


@pytest.mark.parametrize(
    ("row", "chosen", "rejected"),
    [
        ({"prompt": "Up?", "chosen": "Yes.", "rejected": "No."}, ["user: Up?", "assistant: Yes."], "assistant: No."),
        (
            {"chosen": [ASK, REPLY], "rejected": [ASK, turn("assistant", "No.")]},
            ["user: Up?", "assistant: Yes."],
            "assistant: No.",
        ),
        ({"messages": [ASK, REPLY], "rejected_response": "No."}, ["user: Up?", "assistant: Yes."], "assistant: No."),
        ({"question": "Up?", "answer": "Yes.", "rejected": "No."}, ["user: Up?", "assistant: Yes."], "assistant: No."),
        (
            {"instruction": "Up?", "input": "Now.", "chosen": "Yes.", "rejected": "No."},
            ["user: Up?\nNow.", "assistant: Yes."],
            "assistant: No.",
        ),
        (
            {
                "conversations": [{"from": "human", "value": "Up?"}],
                "chosen": {"from": "gpt", "value": "Yes."},
                "rejected": "No.",
            },
            ["user: Up?", "assistant: Yes."],
            "assistant: No.",
        ),
        (
            {
                "prompt": "Up?",
                "messages": [ASK, REPLY],
                "chosen": [ASK, REPLY],
                "rejected": [ASK, turn("assistant", "No.")],
            },
            ["user: Up?", "assistant: Yes."],
            "assistant: No.",
        ),
    ],
)
def test_preferences_have_two_conversations(row, chosen, rejected):
    sample = read_row(row)
    assert shorten(sample.messages) == chosen
    assert shorten(sample.rejected) == [*chosen[:-1], rejected]


@pytest.mark.parametrize("key", ["loss", "train", "trained", "weight"])
@pytest.mark.parametrize("value", [False, 0])
def test_reply_marked_untrained_stays_untrained(key, value):
    messages = [ASK, turn("assistant", "No.", **{key: value}), ASK, turn("assistant", "Yes.", **{key: 1})]
    assert shorten(read_row({"messages": messages}).messages) == [
        "user: Up?",
        "(assistant): No.",
        "user: Up?",
        "assistant: Yes.",
    ]


def test_fractional_weight_is_rejected():
    with pytest.raises(DataError, match=r"messages\[1\]: 'weight' must be true, false, 0 or 1; got 0.5"):
        read_row({"messages": [ASK, turn("assistant", "No.", weight=0.5)]})


def test_reasoning_is_put_before_the_reply():
    sample = read_row({"messages": [ASK, turn("assistant", "Yes.", reasoning_content="It rises.")]})
    assert sample.messages[1]["content"] == "<think>\nIt rises.\n</think>\n\nYes."


@pytest.mark.parametrize(
    "calls",
    [
        [turn("assistant", None, tool_calls=[{"function": {"name": "lamp", "arguments": '{"on": true}'}}])],
        [{"from": "function_call", "value": '{"name": "lamp", "arguments": {"on": true}}'}],
        [turn("tool_call", '[{"name": "lamp", "arguments": {"on": true}}]')],
    ],
)
def test_tool_call_formats_are_unified(calls):
    sample = read_row({"messages": [ASK, *calls, turn("tool_response", "done"), REPLY], "tools": '[{"name": "lamp"}]'})
    assert shorten(sample.messages) == ["user: Up?", "assistant: lamp({'on': True})", "tool: done", "assistant: Yes."]
    assert sample.tools == [{"type": "function", "function": {"name": "lamp"}}]


def test_parallel_tool_calls_share_a_message():
    calls = [turn("tool_call", f'{{"name": "{name}", "arguments": {{}}}}') for name in "ab"]
    assert shorten(read_row({"messages": [ASK, *calls, REPLY]}).messages)[1] == "assistant: a({})b({})"


@pytest.mark.parametrize(
    ("row", "answer", "others"),
    [
        ({"answer": 2}, "2", ()),
        ({"answer": 0}, "0", ()),
        ({"answer": -0.125}, "-0.125", ()),
        ({"answer": False}, "no", ()),
        ({"answer": ["wrench", "spanner"]}, "wrench", ("spanner",)),
        ({"answer": [2, 3]}, "2", ("3",)),
        ({"answers": [2.5, 3.0, 4]}, "2.5", ("3", "4")),
        ({"answers": ["left", "west"]}, "left", ("west",)),
        ({"answers": {"text": ["left", "west"], "answer_start": [0, 3]}}, "left", ("west",)),
        ({"answers": '["left", "west"]'}, "left", ("west",)),
        ({"answer": "[12.0, 15.0]"}, "[12.0, 15.0]", ()),
        ({"reward_model": '{"ground_truth": 3}'}, "3", ()),
        ({"answer": float("nan")}, None, ()),
        ({"answer": ""}, None, ()),
        ({"ground_truth": {"target": [1]}}, None, ()),
    ],
)
def test_answers_are_converted_to_text(row, answer, others):
    sample = read_row({"question": "Which?", **row})
    assert (sample.answer, sample.other_answers) == (answer, others)


def test_other_columns_are_kept_in_meta():
    row = {
        "id": 7,
        "prompt": "Up?",
        "solution": "yes",
        "site": "north",
        "images": [],
        "reward_model": {"style": "rule"},
    }
    sample = read_row(row)
    assert sample.id == "7"
    assert sample.meta == {"solution": "yes", "site": "north", "reward_model": {"style": "rule"}}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": [ASK, REPLY], "conversations": [ASK]}, "'messages' and 'conversations' both hold a conversation"),
        (
            {"messages": [turn("system", "a"), ASK, REPLY], "system": "b"},
            r"'system' \('b'\) and the system message .* differ",
        ),
        ({"messages": [ASK, REPLY], "instruction": "Else?"}, "'instruction' also holds a part of a conversation"),
        ({"messages": [ASK, REPLY], "audio": "a.wav"}, "audio is not supported"),
        ({"messages": [ASK, REPLY], "kto_tag": False}, "unpaired preferences are not supported"),
        ({"messages": [ASK, REPLY], "label": False}, "field 'label' marks an unpaired preference"),
        ({"prompt": "Up?", "completion": "No.", "label": 0}, "field 'label' marks an unpaired preference"),
        ({"messages": [ASK, REPLY], "rejected_response": "No.", "rejected_images": ["a"]}, "must have the same images"),
        ({"messages": [ASK, turn("assistant", "No.", mask=1)]}, r"messages\[1\]: key 'mask': masks are not supported"),
        ({"messages": [ASK, turn("assistant", "<think>a</think>b", reasoning="c")]}, "reasoning both in its content"),
        ({"messages": [turn("user", {"text": "Up?", "image": "a.png"})]}, "either a text or a media item"),
        ({"question": " ", "answer": "a"}, "message 0: the user's message is empty"),
        (
            {"question": "Which?", "options": ["a", "b"], "answer": "E"},
            "one of the options A, B, or the text of an option; got 'E'",
        ),
        ({"messages": [ASK, REPLY], "options": ["x", "y"]}, "has the option 'x', but the question does not"),
        (
            {"messages": [ASK, turn("tool_call", '{"name": "a"}', loss=False), turn("tool_call", '{"name": "b"}')]},
            "either all or none of the consecutive tool calls must be trained on",
        ),
        ({"messages": [ASK, REPLY], "objects": {"bbox": [1]}}, "boxes of objects"),
        ({"prompt": "Up?", "completion": "No.", "label": False}, "unpaired preference"),
        ({"messages": [ASK, REPLY], "weight": 0.5}, "field 'weight' is 0.5, but weights per row are not supported"),
        ({"question": "Up?", "answer": "a", "passage": "Long ago."}, "'passage' also holds a part"),
        ({"messages": [turn("user", "Up?", audio="a.wav")]}, "audio is not supported"),
        ({"prompt": "Up?", "chosen": "Yes."}, "field 'rejected' is missing, null or empty"),
        ({"chosen": "Yes.", "rejected": "No."}, "the row has no prompt"),
        (
            {"question": "Which?", "options": ["a", "b"], "answer": 1},
            "one of the options A, B, or the text of an option; got 1",
        ),
        ({"question": "Which?", "answer": {"a": 1}}, "field 'answer' is {'a': 1}"),
        ({"messages": []}, "field 'messages' has no messages"),
        ({"messages": [turn("overseer", "x")]}, r"messages\[0\]: the role must be one of .*'overseer'"),
        ({"messages": [turn("user", None)]}, r"messages\[0\] has no content"),
        ({"text": "a"}, "the columns text match no row format"),
        ({"messages": [ASK, turn("tool_call", "not json")]}, "not valid JSON"),
        ([1], "each row must be an object"),
    ],
)
def test_contradictory_row_is_rejected(row, reason):
    with pytest.raises(DataError, match=reason):
        read_row(row)


def test_named_format_keeps_other_columns():
    row = {"question": "Up?", "answer": "yes", "messages": [ASK, REPLY]}
    assert read_row(row, "question").meta == {"messages": [ASK, REPLY]}
    with pytest.raises(DataError, match="do not match the format instruction"):
        read_row(row, "instruction")


def test_repeated_prompt_is_kept_for_rewards():
    sample: Sample = read_row({"messages": [ASK, REPLY], "prompt": "Up?"})
    assert sample.meta == {"prompt": "Up?"}


def test_text_prompts_are_marked_for_rewards() -> None:
    assert read_row({"prompt": "Up?", "answer": "yes"}).has_text_prompt
    assert not read_row({"prompt": [ASK], "answer": "yes"}).has_text_prompt


def test_null_arguments_of_tables_are_removed():
    call = {"function": {"name": "lamp", "arguments": {"on": True, "level": None}}}
    sample = read_row(
        {"messages": [ASK, turn("assistant", None, tool_calls=[call])], "tools": [{"name": "lamp", "x": None}]}
    )
    assert sample.messages[1]["tool_calls"][0]["function"]["arguments"] == {"on": True}
    assert sample.tools == [{"type": "function", "function": {"name": "lamp"}}]


def test_options_of_a_prompt_row_are_read():
    row = {"prompt": "Which?\n(A) left\n(B) right", "options": ["left", "right"], "answer": "B"}
    assert read_row(row).options == {"A": "left", "B": "right"}


def test_null_id_becomes_an_empty_string():
    assert read_row({"id": None, "prompt": "Up?"}).id == ""
