"""Correct results for publicly reported faults in the choice of trained tokens.

Covered by other tests:

- trl#5988 (the token that ends a turn is not trained) and trl#3751 (questions about images are trained):
  tests/unit/data/test_chat.py::test_loss_mask_covers_only_assistant_turns
- trl#4147 and trl#4201 (the boundary of prompt and completion is off), the ids:
  tests/unit/data/test_chat.py::test_generation_prompt_is_prefix_of_training_ids
- NeMo Automodel#3024 (the template shortens earlier turns, so the mask is off), without a published template:
  tests/unit/data/test_chat.py::test_template_may_drop_reasoning_except_in_training
"""

from __future__ import annotations

import pickle

import pytest

from dsreason.data.chat import Encoder
from dsreason.data.collate import collate, pack
from dsreason.data.formats.read import read_row
from dsreason.data.types import Sample
from dsreason.errors import DataError
from tests.unit.data.test_chat import runs
from tests.unit.reported.chats import ask, render, reply, reported, train_on, use_published_template

EMPTY = "<think>\n\n</think>\n\n"


@pytest.mark.parametrize("layout", ["padded", "packed"])
@reported("trl#1623", "open-r1#492", "open-r1#494", "granite-3.1#2", "llm-course#33")
def test_end_token_used_as_padding_is_trained(qwen3_vl: Encoder, layout: str) -> None:
    encoder = pickle.loads(pickle.dumps(qwen3_vl))
    encoder.processor.tokenizer.pad_token = encoder.processor.tokenizer.eos_token
    samples = [encoder.encode(Sample("1", [ask("Up?" * n), reply("yes" * n)])) for n in (1, 5)]
    batch = collate(samples, pad_id=encoder.pad_id) if layout == "padded" else pack(samples)
    trained = batch.input_ids.flatten()[batch.targets]
    assert trained.tolist().count(encoder.pad_id) == 2  # the end of each reply
    assert encoder.processor.tokenizer.decode(trained) == f"yes<|im_end|>{'yes' * 5}<|im_end|>"


@reported("axolotl#3088")
def test_plain_and_reasoning_replies_are_trained(qwen3_vl: Encoder) -> None:
    """Check conversations whose tokens were all masked in the report."""
    thoughtful = "<think>I should respond positively</think>I'm doing great, thanks for asking!"
    messages = [ask("Hello"), reply("Hi there!"), ask("How are you?"), reply(thoughtful)]
    assert train_on(qwen3_vl, messages) == ["Hi there!<|im_end|>", f"{thoughtful}<|im_end|>"]


@pytest.mark.parametrize("template", ["qwen2_5", "qwen2_5_training"], ids=["without marks", "with marks"])
@reported("Megatron-Bridge#2598")
def test_mask_needs_no_generation_marks(qwen3_vl: Encoder, template: str) -> None:
    encoder = use_published_template(qwen3_vl, template)
    messages = [{"role": "system", "content": "Be brief."}, ask("a"), reply("one"), ask("b"), reply("two")]
    assert train_on(encoder, messages) == ["one<|im_end|>", "two<|im_end|>"]


@pytest.mark.parametrize("template", ["qwen3", "qwen3_5_think", "qwen3_5_nothink"])
@reported("Automodel#3738", "ArcticTraining#286")
def test_empty_thoughts_are_not_trained(qwen3_vl: Encoder, template: str) -> None:
    encoder = use_published_template(qwen3_vl, template)
    sample = read_row({"messages": [ask("Up?"), reply("yes")]})
    assert render(encoder, sample).endswith(f"<|im_start|>assistant\n{EMPTY}yes<|im_end|>\n")
    assert runs(encoder, encoder.encode(sample)) == ["yes<|im_end|>"]


@reported("ArcticTraining#286")
def test_empty_thoughts_of_row_are_trained(qwen3_vl: Encoder) -> None:
    """Train an empty block of thoughts if the row contains it."""
    encoder = use_published_template(qwen3_vl, "qwen3")
    assert train_on(encoder, [ask("Up?"), reply(f"{EMPTY}yes")]) == [f"{EMPTY}yes<|im_end|>"]


@reported("Automodel#3024")
def test_loss_mask_ends_with_the_turn(qwen3_vl: Encoder) -> None:
    encoder = use_published_template(qwen3_vl, "qwen3")
    first, last = reply("<think>\nx\n</think>\n\none"), reply("<think>\ny\n</think>\n\ntwo")
    with pytest.raises(DataError, match=r"message 1: .*begins with '<think>\\nx.*template renders 'one<"):
        train_on(encoder, [ask("a"), first, ask("b"), last])
    messages = [ask("a"), {**first, "loss": False}, ask("b"), last]
    assert train_on(encoder, messages) == ["<think>\ny\n</think>\n\ntwo<|im_end|>"]


@pytest.mark.parametrize("value", [0, False])
@reported("LoongForge#89")
def test_loss_mask_of_message_is_respected(qwen3_vl: Encoder, value: object) -> None:
    messages = [ask("a"), reply("no", loss_mask=value), ask("b"), reply("yes", loss_mask=1)]
    assert train_on(qwen3_vl, messages) == ["yes<|im_end|>"]


@reported("LoongForge#89")
def test_token_level_loss_mask_is_rejected() -> None:
    with pytest.raises(DataError, match=r"messages\[1\]: 'loss_mask' must be true, false, 0 or 1; got \[0, 1\]"):
        read_row({"messages": [ask("a"), reply("no", loss_mask=[0, 1])]})


@reported("trl#4147", "trl#4201")
def test_completion_of_prompt_is_trained(qwen3_vl: Encoder) -> None:
    sample = read_row({"prompt": [ask("a"), reply("no"), ask("b")], "completion": [reply("yes")]})
    assert runs(qwen3_vl, qwen3_vl.encode(sample)) == ["yes<|im_end|>"]


@reported("slime#330")
def test_separate_reasoning_is_trained(qwen3_vl: Encoder) -> None:
    encoder = use_published_template(qwen3_vl, "qwen3")
    messages = [ask("Up?"), reply("Yes.", reasoning_content="It rises.")]
    assert train_on(encoder, messages) == ["<think>\nIt rises.\n</think>\n\nYes.<|im_end|>"]
