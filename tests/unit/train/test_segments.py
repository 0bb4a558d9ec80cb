"""Completions of several segments, compared with the same conversation encoded as one sample."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from dsreason.data.chat import EncodedPrompt, Encoder
from dsreason.data.collate import collate, join_parent, pack
from dsreason.data.micro_batches import compute_work
from dsreason.data.types import EncodedSample, Sample
from dsreason.models.load import load_model
from dsreason.models.policy import Policy
from dsreason.models.processors.loading import open_encoder
from dsreason.rollout.protocol import Completion, CompletionSegment
from dsreason.train.grpo.mismatch import measure_mismatches
from dsreason.train.grpo.rollouts import Rollout, build_training_sample, flatten


@pytest.fixture(params=["tiny_qwen3_vl", "tiny_qwen2_5_vl"])
def model_path(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)  # type: ignore[no-any-return]


@pytest.fixture
def encoder(model_path: Path) -> Encoder:
    return open_encoder(model_path, dtype=torch.float32, max_length=4096, max_length_key="model.max_length")


@pytest.fixture
def conversation(tmp_path: Path) -> Sample:
    """Build a conversation: a question about an image, a tool call, the image that the tool returns, and an answer."""
    for name, size in (("street.png", (96, 64)), ("crop.png", (64, 64))):
        Image.new("RGB", size, (len(name) * 20, 90, 10)).save(tmp_path / name)

    def turn(image: str, text: str) -> dict[str, object]:
        return {
            "role": "user",
            "content": [{"type": "image", "image": str(tmp_path / image)}, {"type": "text", "text": text}],
        }

    messages = [
        turn("street.png", "Is the light red?"),
        {"role": "assistant", "content": "zoom 3 4"},
        turn("crop.png", "Here it is."),
        {"role": "assistant", "content": "yes"},
    ]
    return Sample("tool", messages)  # type: ignore[arg-type]


def cut_into_segments(whole: EncodedSample, prompt: EncodedPrompt) -> Completion:
    """Return the assistant's turns as sampled segments, with the tool's turn and its image between them."""
    mask, ids = whole.loss_mask, whole.input_ids
    starts = [i for i in range(len(prompt.encoded), len(ids)) if i == len(prompt.encoded) or mask[i] != mask[i - 1]]
    segments = []
    for start, end in zip(starts, [*starts[1:], len(ids)], strict=True):
        tolist = tuple(ids[start:end].tolist())
        if mask[start]:
            segments.append(CompletionSegment(tolist, tuple(-0.1 * n for n in range(len(tolist)))))
            continue
        positions = whole.position_ids[:, start:end]
        types = whole.mm_token_type_ids[start:end]
        media = without_media_of(prompt.encoded, whole) if types.any() else {}
        encoded = EncodedSample("", ids[start:end], mask[start:end], positions - positions[0, 0], types, media)
        segments.append(CompletionSegment(tolist, None, encoded))
    return Completion(tuple(segments), "yes", "stop", version=0)


def without_media_of(prompt: EncodedSample, whole: EncodedSample) -> dict[str, torch.Tensor]:
    return {key: whole.mm_kwargs[key][len(values) :] for key, values in prompt.mm_kwargs.items()}


@pytest.fixture
def rollout(encoder: Encoder, conversation: Sample) -> Rollout:
    prompt = encoder.encode_prompt(replace(conversation, messages=conversation.messages[:1]))
    return Rollout(prompt, cut_into_segments(encoder.encode(conversation), prompt), 1.0, {}, advantage=0.5)


def test_segments_match_whole_conversation(encoder: Encoder, conversation: Sample, rollout: Rollout) -> None:
    full, sample = encoder.encode(conversation), join_parent(build_training_sample(rollout))
    assert [segment.logprobs is None for segment in rollout.completion.segments][:3] == [False, True, False]
    for name in ("input_ids", "loss_mask", "position_ids", "mm_token_type_ids"):
        assert torch.equal(getattr(sample, name), getattr(full, name)), name
    assert sample.mm_kwargs.keys() == full.mm_kwargs.keys()
    assert all(torch.equal(sample.mm_kwargs[key], value) for key, value in full.mm_kwargs.items())


def test_only_sampled_tokens_are_trained(rollout: Rollout) -> None:
    completion = rollout.completion
    assert len(completion.logprobs) == sum(completion.sampled) < len(completion.ids)
    tokens = flatten([rollout, rollout], torch.device("cpu"))
    assert tokens.rollout_logprobs.tolist() == pytest.approx(2 * list(completion.logprobs))
    assert tokens.sequence.tolist() == [0] * len(completion.logprobs) + [1] * len(completion.logprobs)
    (mismatch,) = measure_mismatches([rollout], tokens.rollout_logprobs[: len(completion.logprobs)])
    assert (mismatch.num_tokens, mismatch.largest) == (len(completion.logprobs), pytest.approx(0.0, abs=1e-6))


def test_packed_segments_match_conversation_logprobs(
    model_path: Path, encoder: Encoder, conversation: Sample, rollout: Rollout
) -> None:
    policy = Policy(load_model(model_path, dtype=torch.float32).eval())
    short = replace(rollout, completion=replace(rollout.completion, segments=rollout.completion.segments[:1]))
    samples = [build_training_sample(rollout), build_training_sample(short)]
    expected = policy(collate([encoder.encode(conversation)], pad_id=encoder.pad_id))
    packed = policy(pack(samples))
    assert torch.allclose(packed[: len(expected)], expected, atol=1e-5)
    assert torch.allclose(packed[len(expected) :], expected[: len(short.completion.ids)], atol=1e-5)
    assert torch.allclose(policy(collate(samples, pad_id=encoder.pad_id)), packed, atol=1e-5)
    grids = [
        grid for sample in (rollout.prompt.encoded, samples[0]) for grid in sample.mm_kwargs["image_grid_thw"].tolist()
    ]
    assert sorted(map(list, compute_work([samples], packing=True).grids)) == sorted(grids)
