"""Arguments for the chat template: where they apply, which ones are refused, and what exports and evaluations do with them."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch

from dsreason.checkpoints.trained_template import TEMPLATE_FILE, read_template_arguments, write_template_arguments
from dsreason.config.load import load_config
from dsreason.config.output import check_output_dir, write_run_config
from dsreason.config.schema import ModelConfig, RunConfig, SFTConfig
from dsreason.config.schema_grpo import GRPOConfig, RewardConfig
from dsreason.data.chat import Encoder
from dsreason.data.types import Sample
from dsreason.errors import CheckpointError, ConfigError, DataError
from dsreason.models.processors.loading import open_encoder
from dsreason.rewards.scoring import Scorer
from dsreason.rollout.protocol import Sampling, make_single_turn
from dsreason.train.common.answers import score_completions
from dsreason.train.common.preflight import build_encoder, check_model
from dsreason.train.dpo.pairs import build_pair_encoder
from dsreason.train.grpo.preflight import build_prompt_encoder
from tests.thinking_template import write_thinking_model

OFF = {"enable_thinking": False}
SET = "data.template_arguments.enable_thinking=false"
BARE = Sample("7", [{"role": "user", "content": "Score it."}, {"role": "assistant", "content": "4"}], answer="4")
THOUGHT = "<think>\nIt falls.\n</think>\n\n<answer>4</answer>"


@pytest.fixture(scope="module")
def model(tiny_qwen3_vl: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_thinking_model(tiny_qwen3_vl, tmp_path_factory.mktemp("models") / "thinking")


def open_with(model: Path, **arguments: object) -> Encoder:
    return open_encoder(model, dtype=torch.float32, max_length=512, max_length_key="", template_arguments=arguments)


def load(*changes: str) -> SFTConfig:
    return load_config(SFTConfig, None, changes, default_recipe="builtin_sft.toml")


def decode(encoder: Encoder, ids: torch.Tensor) -> str:
    return str(encoder.processor.tokenizer.decode(ids))


def test_bare_answer_encodes_without_thinking(model: Path) -> None:
    encoder = open_with(model, **OFF)
    encoded, prompt = encoder.encode(BARE), encoder.encode_prompt(BARE)
    text = "<|im_start|>user\nScore it.<|im_end|>\n<|im_start|>assistant\n<think></think>"
    assert decode(encoder, encoded.input_ids) == f"{text}4<|im_end|>\n"
    assert decode(encoder, encoded.input_ids[encoded.loss_mask]) == "4<|im_end|>"
    assert decode(encoder, prompt.encoded.input_ids) == text
    assert prompt.opening == ""
    assert encoder.measure(BARE) == len(encoded)


def test_bare_answer_is_rejected_while_thinking(model: Path) -> None:
    words = (
        r"opens <think> before a reply, but this reply has no reasoning: it begins with '4'; .*data\.template_arguments"
    )
    with pytest.raises(DataError, match=words):
        open_with(model).encode(BARE)


def test_reasoning_encodes_with_default_arguments(model: Path) -> None:
    encoder = open_with(model)
    encoded = encoder.encode(Sample("8", [BARE.messages[0], {"role": "assistant", "content": THOUGHT}]))
    assert decode(encoder, encoded.input_ids[encoded.loss_mask]) == THOUGHT.removeprefix("<think>\n") + "<|im_end|>"


def test_derived_encoders_keep_the_arguments(model: Path) -> None:
    settings = {"data": {"template_arguments": OFF}, "reward": {"functions": {"format": 1}}}
    config = GRPOConfig.model_validate(settings)
    encoder = build_encoder(config, model)
    prompt = encoder.encode_prompt(BARE).prompt_ids
    assert decode(encoder, prompt).endswith("assistant\n<think></think>")
    assert build_prompt_encoder(config, encoder).encode_prompt(BARE).prompt_ids == prompt
    rejected = [BARE.messages[0], {"role": "assistant", "content": "1"}]
    pair = build_pair_encoder(encoder).encode_pair(Sample("9", BARE.messages, rejected=rejected))
    assert pair.chosen.parent is not None
    assert pair.chosen.parent.input_ids.tolist() == prompt


def test_unknown_argument_is_rejected(model: Path) -> None:
    words = (
        r"^data\.template_arguments: enable_thinkin is not an argument of the chat template in .*thinking, which has "
        r"enable_thinking; did you mean enable_thinking\?$"
    )
    with pytest.raises(ConfigError, match=words):
        open_with(model, enable_thinkin=False)
    with pytest.raises(ConfigError, match=r"eos_token is not an argument .* has enable_thinking; remove it$"):
        open_with(model, eos_token="</s>")


def test_only_missing_variables_are_arguments(model: Path, tmp_path: Path) -> None:
    folder = write_thinking_model(model, tmp_path / "model")
    source = (
        "{% macro show(text) %}{{ text }}{% endmacro %}{% for m in messages %}{% if loop.index > 9 %}{% break %}{% endif %}"
        "{% generation %}{{ show(m.content) ~ bos_token ~ tools ~ level ~ strftime_now('%d') }}{% endgeneration %}"
        "{% endfor %}{% set ns = namespace(x=1) %}{{ ns.x }}"
    )
    (folder / "chat_template.jinja").write_text(source)
    assert open_with(folder, level="low").template_arguments == {"level": "low"}
    with pytest.raises(ConfigError, match="which has level; remove it"):
        open_with(folder, m=1)


def test_template_is_tested_with_the_arguments(model: Path, tmp_path: Path) -> None:
    folder = write_thinking_model(model, tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{% if broken %}{{ 1 / 0 }}{% endif %}{{ messages[0].content }}")
    assert open_with(folder, broken=False).template_arguments == {"broken": False}
    with pytest.raises(CheckpointError, match=r"the chat template fails \(ZeroDivisionError"):
        open_with(folder, broken=True)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{tools = 1}", "tools is passed to the chat template by dsreason; remove it"),
        ("{add_generation_prompt = true}", "add_generation_prompt is passed to the chat template by dsreason"),
        ("{level = [1]}", r"data\.template_arguments\.level"),
    ],
)
def test_invalid_arguments_are_rejected_at_loading(value: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(f"data.template_arguments={value}")


def test_values_keep_their_types() -> None:
    changes = [SET, "data.template_arguments.effort=low", "data.template_arguments.budget=5"]
    arguments = load(*changes).data.template_arguments
    assert arguments == {"enable_thinking": False, "effort": "low", "budget": 5}
    assert [type(value) for value in arguments.values()] == [bool, str, int]


def test_resumed_run_must_have_the_same_arguments(tmp_path: Path) -> None:
    before, now = load(SET), load()
    write_run_config(tmp_path, before, {"deepspeed": {}})
    check_output_dir(tmp_path, before, "auto")
    with pytest.raises(ConfigError, match=r"data\.template_arguments\.enable_thinking was False and is now None"):
        check_output_dir(tmp_path, now, "auto")


def test_format_reward_sees_the_opened_tag(model: Path) -> None:
    encoder = open_with(model)
    prompt = encoder.encode_prompt(BARE)
    assert prompt.opening == "<think>\n"
    texts = [THOUGHT.removeprefix("<think>\n"), "It falls. <answer>4</answer>", THOUGHT]
    with Scorer(RewardConfig(functions={"format": 1.0})) as scorer:
        for used, expected in ((prompt, [1, 0, 0]), (open_with(model, **OFF).encode_prompt(BARE), [0, 0, 1])):
            completions = [make_single_turn((5,), text, (0.0,), "stop", 0) for text in texts]
            scores = score_completions(scorer, [used] * 3, completions, Sampling(max_completion_length=8))
            assert scores.total.tolist() == expected


def test_recorded_arguments_are_read_back(tmp_path: Path) -> None:
    assert read_template_arguments(tmp_path) == {}
    write_template_arguments(tmp_path, OFF)
    assert read_template_arguments(tmp_path) == OFF
    (tmp_path / TEMPLATE_FILE).write_text(json.dumps({"arguments": {"messages": "x"}}))
    with pytest.raises(CheckpointError, match=rf"{TEMPLATE_FILE}: is not valid \(.*by dsreason"):
        read_template_arguments(tmp_path)


def test_training_on_export_warns_about_different_arguments(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    export = write_thinking_model(model, tmp_path / "export")
    write_template_arguments(export, OFF)
    same: RunConfig = SFTConfig(model=ModelConfig(path=str(export)))
    with caplog.at_level(logging.WARNING):
        check_model(same.model_copy(update={"data": same.data.model_copy(update={"template_arguments": OFF})}))
        assert "template_arguments" not in caplog.text
        check_model(same)
    assert "was trained with data.template_arguments = {enable_thinking = false}, but they are now {}" in caplog.text
