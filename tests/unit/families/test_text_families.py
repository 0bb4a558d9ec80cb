"""Text-only models, which support the same rows, segments, positions and sampling as other models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dsreason.config.schema_lora import LoRAConfig
from dsreason.data.chat import Encoder
from dsreason.data.collate import collate, pack
from dsreason.data.micro_batches import align_batches
from dsreason.data.types import Sample
from dsreason.errors import CheckpointError, ConfigError, DataError
from dsreason.models.load import load_model
from dsreason.models.lora import find_adapted_layers
from dsreason.models.policy import Policy
from dsreason.models.processors.loading import load_processor, open_encoder
from dsreason.models.tiny import build_tiny
from dsreason.rollout.protocol import Sampling
from dsreason.rollout.transformers_engine import TransformersEngine


@pytest.fixture(scope="module", params=["qwen2", "qwen3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(request.param, tmp_path_factory.mktemp("models") / request.param)


@pytest.fixture(scope="module")
def encoder(folder: Path) -> Encoder:
    return open_encoder(folder, dtype=torch.float32, max_length=512, max_length_key="model.max_length")


def sample(question: object, answer: str = "red") -> Sample:
    return Sample("7", [{"role": "user", "content": question}, {"role": "assistant", "content": answer}])


def test_message_parts_are_joined_to_one_text(encoder: Encoder) -> None:
    parts = [{"type": "text", "text": "What colour "}, {"type": "text", "text": "is it?"}]
    result, expected = encoder.encode(sample(parts)), encoder.encode(sample("What colour is it?"))
    assert result.input_ids.tolist() == expected.input_ids.tolist()
    assert result.position_ids.tolist() == [list(range(len(result)))] * 3
    assert encoder.processor.tokenizer.decode(result.input_ids[result.loss_mask]) == "red<|im_end|>"


def test_row_with_image_is_rejected(encoder: Encoder) -> None:
    parts = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "What is it?"}]
    with pytest.raises(DataError, match=r"sample '7' contains a\.png, but Qwen\d.* accepts only text"):
        encoder.encode(sample(parts))


@pytest.mark.parametrize("attention", ["auto", "sdpa", "eager"])
def test_packed_row_matches_padded_rows(folder: Path, encoder: Encoder, attention: str) -> None:
    samples = [encoder.encode(sample("What colour? " * n, "red " * n + "!")) for n in range(1, 6)]
    expected = Policy(load_model(folder, dtype=torch.float32, attention="sdpa"))(collate(samples, pad_id=0))
    policy = Policy(load_model(folder, dtype=torch.float32, attention=attention))(pack(samples))
    assert torch.allclose(policy, expected, atol=2e-6)


def test_ranks_without_rows_need_no_media(encoder: Encoder) -> None:
    (batch,) = align_batches([], [0, 1], encoder, packing=True)
    assert batch.mm_kwargs == {} and len(batch.targets) == 0


def test_sampled_probabilities_match_training_probabilities(folder: Path, encoder: Encoder) -> None:
    from dsreason.train.grpo.rollouts import Rollout, build_training_sample

    tokenizer = load_processor(folder).tokenizer
    engine = TransformersEngine(folder, tokenizer, dtype=torch.float32, device=torch.device("cpu"))
    engine.load(0)
    prompts = [encoder.encode_prompt(sample("What colour? " * n)) for n in (1, 4)]
    sampling = Sampling(temperature=0.8, max_completion_length=6, seed=1)
    completions = engine.generate(prompts, sampling, version=0, streams=[0, 1])
    rollouts = [Rollout(prompt, item, 0.0, {}) for prompt, item in zip(prompts, completions, strict=True)]
    batch = pack([build_training_sample(rollout) for rollout in rollouts])
    policy = Policy(load_model(folder, dtype=torch.float32))
    logprobs = policy(batch, 0.8, torch.as_tensor(engine.banned_ids))
    drawn = [value for completion in completions for value in completion.logprobs]
    assert logprobs.tolist() == pytest.approx(drawn, abs=1e-5)


def test_adapters_cover_layers_and_vision_is_rejected(folder: Path) -> None:
    model = load_model(folder, dtype=torch.float32)
    assert len(find_adapted_layers(model, LoRAConfig(rank=4))) == 2 * 7
    with pytest.raises(ConfigError, match=r"lora\.vision is true, but Qwen.* has no vision tower"):
        find_adapted_layers(model, LoRAConfig(rank=4, vision=True))


def test_folder_without_chat_template_is_rejected(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        if file.name != "chat_template.jinja":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(CheckpointError, match="the chat template is missing"):
        load_processor(tmp_path)
