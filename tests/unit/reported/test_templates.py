"""Correct results for publicly reported faults of chat templates and their use.

Covered by other tests:

- trl#6044 (the template does not end the turn): tests/unit/data/test_chat.py::test_template_without_end_of_turn_is_rejected
- trl#6361 and trl#6363 (the prompt opens the thoughts), without tool calls:
  tests/unit/data/test_chat.py::test_reasoning_opened_by_prompt_is_not_trained
- trl#6361 (the answer of a completion that only closes its thoughts is not read):
  tests/unit/answers/test_parsing.py::test_response_is_split_into_reasoning_and_answer
- lmdeploy#3475 (Qwen2.5-VL has another default system prompt than Qwen2.5):
  tests/unit/data/test_chat.py::test_text_tokens_and_loss_mask_match_chat_format
"""

from __future__ import annotations

import json

import pytest

from dsreason.data.chat import Encoder
from dsreason.data.formats.read import read_row
from dsreason.data.types import Sample
from dsreason.errors import DataError
from tests.unit.data.test_chat import PROMPT, TEXT, TURNS, runs, with_template
from tests.unit.reported.chats import LAMP, ask, call_lamp, render, reply, reported, train_on, use_published_template

QWEN2_5_SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
PROMPT_ENDS = {"qwen3": "", "qwen3_5_think": "<think>\n", "qwen3_5_nothink": "<think>\n\n</think>\n\n"}
"""Published template → text that its generation prompt adds after the header of a turn."""


@reported("prime-rl#1334", "OpenRLHF#1080", "verl#6854")
def test_reasoning_stripped_from_earlier_turn_is_refused(qwen3_vl: Encoder) -> None:
    encoder = use_published_template(qwen3_vl, "qwen3")
    messages = [ask("a"), reply("<think>\nx\n</think>\n\none"), ask("b"), reply("<think>\ny\n</think>\n\ntwo")]
    with pytest.raises(DataError, match="message 1: the chat template changes the conversation"):
        train_on(encoder, messages)
    assert train_on(encoder, messages[:2]) == ["<think>\nx\n</think>\n\none<|im_end|>"]


@reported("verl#7807", "prime-rl#1334")
def test_reasoning_between_tool_calls_is_trained(qwen3_vl: Encoder) -> None:
    encoder = use_published_template(qwen3_vl, "qwen3")
    messages = [
        ask("On and off."),
        call_lamp({"on": 1}, reasoning_content="First on."),
        {"role": "tool", "content": "done"},
        call_lamp({"on": 0}, reasoning_content="Now off."),
        {"role": "tool", "content": "done"},
        reply("Both.", reasoning_content="Finished."),
    ]
    call = '<tool_call>\n{"name": "lamp", "arguments": {"on": %d}}\n</tool_call><|im_end|>'
    assert train_on(encoder, messages, tools=[LAMP]) == [
        f"<think>\nFirst on.\n</think>\n\n{call % 1}",
        f"<think>\nNow off.\n</think>\n\n{call % 0}",
        "<think>\nFinished.\n</think>\n\nBoth.<|im_end|>",
    ]


@reported("trl#6361", "trl#6363")
def test_thoughts_before_call_may_be_opened_by_prompt(qwen3_vl: Encoder) -> None:
    encoder = use_published_template(qwen3_vl, "qwen3_5_think")
    messages = [ask("On."), call_lamp({"on": 1}, reasoning_content="First on."), {"role": "tool", "content": "done"}]
    call = "<tool_call>\n<function=lamp>\n<parameter=on>\n1\n</parameter>\n</function>\n</tool_call>"
    trained = train_on(encoder, [*messages, reply("Done.", reasoning_content="It is.")], tools=[LAMP])
    assert trained == [f"First on.\n</think>\n\n{call}<|im_end|>", "It is.\n</think>\n\nDone.<|im_end|>"]


@pytest.mark.parametrize("template", PROMPT_ENDS)
@reported("LlamaFactory#10773")
def test_training_starts_with_generation_prompt(qwen3_vl: Encoder, template: str) -> None:
    encoder = use_published_template(qwen3_vl, template)
    sample = Sample("1", [ask("Up?"), reply("yes")])
    prompt = encoder.encode_prompt(sample).prompt_ids
    assert encoder.processor.tokenizer.decode(prompt).endswith(f"<|im_start|>assistant\n{PROMPT_ENDS[template]}")
    assert encoder.encode(sample).input_ids.tolist()[: len(prompt)] == prompt


@reported("LlamaFactory#10773")
def test_empty_thoughts_of_history_keep_prompt_ids(qwen3_vl: Encoder) -> None:
    """Use a template that shows empty thoughts in all turns."""
    encoder = use_published_template(qwen3_vl, "qwen3_training")
    sample = Sample("1", [ask("a"), reply("one"), ask("b"), reply("two")])
    prompt = encoder.encode_prompt(sample).prompt_ids
    assert encoder.processor.tokenizer.decode(prompt).count("<think>\n\n</think>\n\none<|im_end|>") == 1
    assert encoder.encode(sample).input_ids.tolist()[: len(prompt)] == prompt
    assert runs(encoder, encoder.encode(sample)) == ["one<|im_end|>", "two<|im_end|>"]


@pytest.mark.parametrize(
    ("system", "expected"), [([], QWEN2_5_SYSTEM), ([{"role": "system", "content": "Be brief."}], "Be brief.")]
)
@reported("ollama#6873", "LlamaFactory#10772")
def test_default_system_prompt_is_shown_once(qwen3_vl: Encoder, system: list[dict[str, str]], expected: str) -> None:
    encoder = use_published_template(qwen3_vl, "qwen2_5")
    text = render(encoder, Sample("1", [*system, ask("Up?"), reply("yes")]))
    assert text.startswith(f"<|im_start|>system\n{expected}<|im_end|>\n<|im_start|>user\n")
    assert text.count("<|im_start|>system") == 1


@pytest.mark.parametrize("template", ["qwen2_5", "qwen3", "qwen3_vl"])
@pytest.mark.parametrize("arguments", [{"on": 1}, '{"on": 1}'], ids=["object", "text"])
@reported("flama#258", "oumi#2599", "llama.cpp#19553")
def test_call_arguments_are_not_escaped(qwen3_vl: Encoder, template: str, arguments: object) -> None:
    encoder = use_published_template(qwen3_vl, template)
    messages = [ask("On."), call_lamp(arguments), {"role": "tool", "content": "done"}, reply("It is on.")]
    call, _ = train_on(encoder, messages, tools=json.dumps([LAMP]))
    assert call.strip() == '<tool_call>\n{"name": "lamp", "arguments": {"on": 1}}\n</tool_call><|im_end|>'


@reported("Qwen3#1894", "Qwen3-Coder#444")
def test_template_may_iterate_over_arguments_as_text(qwen3_vl: Encoder) -> None:
    """Check that arguments in JSON text are parsed for templates that iterate over them."""
    encoder = use_published_template(qwen3_vl, "qwen3_5_nothink")
    messages = [ask("On."), call_lamp('{"on": 1}'), {"role": "tool", "content": "done"}, reply("It is on.")]
    assert "<parameter=on>\n1\n</parameter>" in train_on(encoder, messages, tools=[LAMP])[0]


@reported("LiteRT-LM#3443", "LiteRT-LM#3166")
def test_next_turn_may_change_the_last(qwen3_vl: Encoder) -> None:
    """Use a template that shows empty thoughts only in the last turn, so two rendered turns are not a prefix of four."""
    encoder = use_published_template(qwen3_vl, "qwen3")
    messages = [ask("a"), reply("one"), ask("b"), reply("two")]
    assert "assistant\n<think>\n\n</think>\n\none<|im_end|>" in render(encoder, Sample("1", messages[:2]))
    conversation = Sample("1", messages)
    assert "assistant\none<|im_end|>" in render(encoder, conversation)
    assert runs(encoder, encoder.encode(conversation)) == ["one<|im_end|>", "two<|im_end|>"]
    prompt = encoder.encode_prompt(conversation).prompt_ids
    assert encoder.encode(conversation).input_ids.tolist()[: len(prompt)] == prompt


@reported("LiteRT-LM#3417")
def test_template_omitting_assistant_turns_is_refused(qwen3_vl: Encoder) -> None:
    turns = TURNS.replace("%s", TEXT).replace(
        "{% for m in messages %}", "{% for m in messages if m.role != 'assistant' %}"
    )
    with pytest.raises(DataError, match="message 1: the chat template changes the conversation"):
        with_template(qwen3_vl, turns + PROMPT).encode(Sample("1", [ask("a"), reply("one"), ask("b"), reply("two")]))


@reported("LlamaFactory#7592")
def test_system_column_replaces_the_default(qwen3_vl: Encoder) -> None:
    encoder = use_published_template(qwen3_vl, "qwen2_5")
    row = {"instruction": "Up?", "output": "yes", "system": "Be brief."}
    text = render(encoder, read_row(row))
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n") and QWEN2_5_SYSTEM not in text
