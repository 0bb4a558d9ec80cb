"""Qwen3.5: equality with transformers in packed and padded rows, sampling, adapters, and settings that are rejected."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText

from dsreason.config.schema import SFTConfig
from dsreason.config.schema_lora import LoRAConfig
from dsreason.data.chat import Encoder
from dsreason.data.collate import collate, pack
from dsreason.data.sources import open_datasets
from dsreason.data.types import EncodedSample, Sample
from dsreason.errors import ConfigError
from dsreason.families import FAMILIES
from dsreason.models.load import load_model
from dsreason.models.lora import find_adapted_layers
from dsreason.models.policy import Policy
from dsreason.models.processors.loading import open_encoder
from dsreason.rollout.protocol import Sampling
from dsreason.rollout.transformers_engine import TransformersEngine
from dsreason.train.common.preflight import check_heads_and_attention
from dsreason.train.grpo.rollouts import Rollout, build_training_sample
from tests.integration.rows import write_mixed_rows


@pytest.fixture(scope="module")
def encoder(tiny_qwen3_5: Path) -> Encoder:
    return open_encoder(tiny_qwen3_5, dtype=torch.float32, max_length=512, max_length_key="model.max_length")


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> list[Sample]:
    """Samples with text only, one image, and a video with two images."""
    rows = write_mixed_rows(tmp_path_factory.mktemp("rows"), 4)
    config = SFTConfig.model_validate({"data": {"adapter": "jsonl", "path": str(rows), "vision": {"fps": 4.0}}})
    dataset, _ = open_datasets(config.data)
    return [dataset[i] for i in range(4)]


@pytest.fixture(scope="module")
def encoded(encoder: Encoder, samples: list[Sample]) -> list[EncodedSample]:
    return [encoder.encode(sample) for sample in samples]


@pytest.fixture(scope="module")
def policy(tiny_qwen3_5: Path) -> Policy:
    return Policy(load_model(tiny_qwen3_5, dtype=torch.float32)).requires_grad_(False)


def test_multi_token_prediction_head_is_not_loaded(policy: Policy) -> None:
    assert FAMILIES["qwen3_5"].rename("mtp.layers.0.mlp.up_proj.weight") is None
    assert not any(name.startswith("mtp") for name, _ in policy.model.named_parameters())


def test_mixed_media_logprobs_match_transformers(
    tiny_qwen3_5: Path, policy: Policy, encoded: list[EncodedSample]
) -> None:
    """Compare packed rows and rows padded on either side with transformers' model, which gets one sample at a time."""
    assert any("pixel_values_videos" in item.mm_kwargs for item in encoded)
    reference = AutoModelForImageTextToText.from_pretrained(
        tiny_qwen3_5, dtype=torch.float32, attn_implementation="eager"
    )
    expected = []
    for item in encoded:
        inputs = {"input_ids": item.input_ids[None], "mm_token_type_ids": item.mm_token_type_ids[None]}
        with torch.no_grad():
            logits = reference(**inputs, **item.mm_kwargs).logits[0]
        places = item.loss_mask.nonzero().flatten()
        expected.append(logits.log_softmax(-1)[places - 1, item.input_ids[places]])
    batches = [pack(encoded), *(collate(encoded, pad_id=0, padding_side=side) for side in ("left", "right"))]
    for batch in batches:
        torch.testing.assert_close(policy(batch), torch.cat(expected), rtol=0, atol=1e-5)


def test_sampled_probabilities_match_training_probabilities(
    tiny_qwen3_5: Path, encoder: Encoder, policy: Policy, samples: list[Sample]
) -> None:
    """Sample in batches of prompts of different lengths; the trainer computes all completions in a row that shares prompts."""
    engine = TransformersEngine(
        tiny_qwen3_5, encoder.processor.tokenizer, dtype=torch.float32, device=torch.device("cpu")
    )
    engine.load(0)
    prompts = [encoder.encode_prompt(samples[i]) for i in (0, 0, 1, 2, 2, 3)]
    prompts[1], prompts[4] = prompts[0], prompts[3]  # two completions of the same prompt
    sampling = Sampling(temperature=0.8, max_completion_length=6, seed=1)
    completions = engine.generate(prompts, sampling, version=0, streams=list(range(6)))
    rollouts = [Rollout(prompt, item, 0.0, {}) for prompt, item in zip(prompts, completions, strict=True)]
    batch = pack([build_training_sample(rollout) for rollout in rollouts])
    assert [segment.parent for segment in batch.segments].count(None) == 4
    logprobs = policy(batch, 0.8, torch.as_tensor(engine.banned_ids))
    drawn = [value for completion in completions for value in completion.logprobs]
    assert logprobs.tolist() == pytest.approx(drawn, abs=1e-5)


def test_adapters_cover_both_layer_types(policy: Policy) -> None:
    names = find_adapted_layers(policy.model, LoRAConfig(rank=4, vision=True))
    prefix = "model.language_model.layers."
    assert [name.removeprefix(prefix) for name in names if name.startswith(prefix)] == [
        *(f"0.linear_attn.{name}" for name in ("out_proj", "in_proj_qkv", "in_proj_z")),
        *(f"0.mlp.{name}_proj" for name in ("gate", "up", "down")),
        *(f"1.self_attn.{name}_proj" for name in "qkvo"),
        *(f"1.mlp.{name}_proj" for name in ("gate", "up", "down")),
    ]
    assert len(names) == 13 + 2 * 4 + 2  # two vision blocks with four layers each, and the merger


def test_sequence_parallelism_is_rejected(tiny_qwen3_5: Path) -> None:
    config = SFTConfig.model_validate(
        {"model": {"path": str(tiny_qwen3_5)}, "data": {"path": "r"}, "train": {"sequence_parallel_size": 2}}
    )
    with pytest.raises(
        ConfigError, match=r"sequence_parallel_size \(2\) is not supported for model_type qwen3_5 .*= 1"
    ):
        check_heads_and_attention(config, tiny_qwen3_5)
