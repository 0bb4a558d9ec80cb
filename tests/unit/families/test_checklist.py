"""What holds for every family in `FAMILIES`; a new family is tested as soon as it is registered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from dsreason.config.schema import SFTConfig
from dsreason.config.schema_lora import LoRAConfig
from dsreason.data.chat import Encoder
from dsreason.data.collate import collate, join_parent, pack
from dsreason.data.sources import open_datasets
from dsreason.data.types import EncodedSample, Sample
from dsreason.families import FAMILIES, get_family
from dsreason.models.load import load_model
from dsreason.models.lora import (
    Delta,
    add_adapters,
    get_adapted_layer,
    get_adapter_names,
    get_adapter_scales,
    is_adapter,
    to_base_name,
)
from dsreason.models.policy import Policy
from dsreason.models.processors.loading import open_encoder
from dsreason.models.tiny import build_tiny
from dsreason.monitor.flops import Work, compute_model_flops
from dsreason.rollout.protocol import make_single_turn
from dsreason.train.grpo.rollouts import Rollout, build_training_sample
from tests.integration.rows import write_mixed_rows
from tests.unit.monitor.test_flops import CONVOLUTION_BACKWARD

TOLERANCE = 1e-5
"""Largest difference between log-probabilities in fp32."""


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(request.param, tmp_path_factory.mktemp("models") / request.param)


@pytest.fixture(scope="module")
def reference(folder: Path) -> PreTrainedModel:
    """The model as transformers loads it."""
    with_vision = get_family(folder.name).vision is not None
    auto_class = AutoModelForImageTextToText if with_vision else AutoModelForCausalLM
    return auto_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


@pytest.fixture(scope="module")
def encoder(folder: Path) -> Encoder:
    return open_encoder(folder, dtype=torch.float32, max_length=512, max_length_key="model.max_length")


@pytest.fixture(scope="module")
def samples(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Sample]:
    """Return samples with text only, one image, a video and two images; for a text-only family, only the text."""
    rows = write_mixed_rows(tmp_path_factory.mktemp("rows"), 8)
    config = SFTConfig.model_validate({"data": {"adapter": "jsonl", "path": str(rows), "vision": {"fps": 4.0}}})
    training, _ = open_datasets(config.data)
    numbers = range(4) if get_family(folder.name).vision is not None else (0, 4)
    return [training[i] for i in numbers]


@pytest.fixture(scope="module")
def encoded(encoder: Encoder, samples: list[Sample]) -> list[EncodedSample]:
    return [encoder.encode(sample) for sample in samples]


@pytest.fixture(scope="module")
def expected(reference: PreTrainedModel, encoded: list[EncodedSample]) -> Tensor:
    """The trained tokens' log-probabilities from transformers, one sample at a time and with an attention mask."""
    logprobs = []
    for item in encoded:
        with torch.no_grad():
            logits = reference(**make_inputs(item)).logits[0]
        places = item.loss_mask.nonzero().flatten()
        logprobs.append(logits.log_softmax(-1)[places - 1, item.input_ids[places]])
    return torch.cat(logprobs)


def make_inputs(item: EncodedSample) -> dict[str, Any]:
    ids = item.input_ids[None]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **item.mm_kwargs}
    if item.mm_kwargs:
        inputs["mm_token_type_ids"] = item.mm_token_type_ids[None]
    if (
        "second_per_grid_ts" in item.mm_kwargs
    ):  # transformers rounds the times of frames; `test_positions_vllm.py` compares them
        inputs["position_ids"] = item.position_ids[:, None]
    return inputs


def test_tokens_equal_those_of_processor(encoder: Encoder, samples: list[Sample], encoded: list[EncodedSample]) -> None:
    """Videos, whose frames dsreason samples itself, are compared in `tests/unit/data/test_chat.py`."""
    for sample, item in zip(samples, encoded, strict=True):
        parts = [
            part
            for message in sample.messages
            if not isinstance(message["content"], str)
            for part in message["content"]
        ]
        if any(part["type"] == "video" for part in parts):
            continue
        arguments = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
        template = encoder.processor.apply_chat_template if parts else encoder.processor.tokenizer.apply_chat_template
        assert template(sample.messages, **arguments)["input_ids"][0].tolist() == item.input_ids.tolist()


def test_measured_length_equals_encoded_length(
    encoder: Encoder, samples: list[Sample], encoded: list[EncodedSample]
) -> None:
    assert [encoder.measure(sample) for sample in samples] == [len(item) for item in encoded]


def test_packed_and_padded_logprobs_match_transformers(
    folder: Path, encoded: list[EncodedSample], expected: Tensor
) -> None:
    policy = Policy(load_model(folder, dtype=torch.float32))
    with torch.no_grad():
        for batch in (pack(encoded), collate(encoded, pad_id=0)):
            torch.testing.assert_close(policy(batch), expected, rtol=0, atol=TOLERANCE)


def test_packed_gradients_equal_padded_gradients(folder: Path, encoded: list[EncodedSample]) -> None:
    gradients = []
    for batch in (pack(encoded), collate(encoded, pad_id=0)):
        model = load_model(folder, dtype=torch.float32)
        Policy(model)(batch).sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    largest = max(float(gradient.norm()) for gradient in gradients[1].values())
    for name, gradient in gradients[0].items():
        assert float((gradient - gradients[1][name]).norm()) <= 1e-4 * largest, name


def test_answers_sharing_prompt_match_separate_rows(folder: Path, encoder: Encoder, samples: list[Sample]) -> None:
    prompt = encoder.encode_prompt(samples[min(2, len(samples) - 1)])  # with a video if the family reads videos
    answers = [
        build_training_sample(Rollout(prompt, make_single_turn(ids, "", (0.0,) * len(ids), "stop", 0), 0.0, {}))
        for ids in ((5, 6, 7), (8, 9))
    ]
    policy = Policy(load_model(folder, dtype=torch.float32))
    with torch.no_grad():
        apart = torch.cat([policy(pack([join_parent(item)])) for item in answers])
        torch.testing.assert_close(policy(pack(answers)), apart, rtol=0, atol=TOLERANCE)


def test_exported_names_and_values_round_trip(folder: Path) -> None:
    family = get_family(folder.name)
    for name, parameter in load_model(folder, dtype=torch.float32).named_parameters():
        assert family.rename(family.to_exported_name(name)) == name
        assert family.swap_axes(name, family.swap_axes(name, parameter)).equal(parameter)


def test_merged_adapters_compute_same_logprobs(folder: Path, encoded: list[EncodedSample]) -> None:
    model, base = (load_model(folder, dtype=torch.float32) for _ in range(2))
    policy = Policy(model)
    add_adapters(model, LoRAConfig(rank=4, vision=get_family(folder.name).vision is not None), seed=0)
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        if is_adapter(name):
            torch.nn.init.normal_(parameter, std=0.05)
    scales = get_adapter_scales(model)
    weights = dict(base.named_parameters())
    adapted = [name for name in parameters if get_adapted_layer(name) is not None and not is_adapter(name)]
    assert adapted
    for name in adapted:
        if any(adapter not in parameters for adapter in get_adapter_names(name)):
            continue  # a bias
        a, b = (parameters[adapter].detach() for adapter in get_adapter_names(name))
        weight = weights[to_base_name(name)]
        weight.data = Delta(a, b, scales[str(get_adapted_layer(name))]).merge_with(weight.data, torch.float32)
    batch = pack(encoded)
    with torch.no_grad():
        torch.testing.assert_close(policy(batch), Policy(base)(batch), rtol=0, atol=5e-5)


def test_flops_are_near_counted_ones(folder: Path) -> None:
    """Compare a text; `tests/unit/monitor/test_flops.py` also compares images, frozen weights and tied embeddings."""
    model = load_model(folder, dtype=torch.float32, attention="eager")
    if get_family(folder.name).modules.experts:
        model.config.text_config._experts_implementation = "eager"  # torch does not count grouped products
    ids = torch.arange(128)[None] + 100
    with FlopCounterMode(display=False, custom_mapping=CONVOLUTION_BACKWARD) as counter:
        model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits.sum().backward()
    flops = compute_model_flops(model).step(Work([(128, 0)], 128), causal=False)
    assert flops == pytest.approx(counter.get_total_flops(), rel=0.05)
