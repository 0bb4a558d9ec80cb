"""A model family with different tokens and vision, which needs only a `Family` and a line in `FAMILIES`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from dsreason.config.schema import ModelConfig
from dsreason.data.chat import Encoder
from dsreason.data.collate import collate
from dsreason.data.messages import check_text
from dsreason.data.types import Sample
from dsreason.errors import CheckpointError, DataError
from dsreason.families import FAMILIES, get_family
from dsreason.families.family import Family, Tiny, Tokens, Vision
from dsreason.families.qwen3_vl import QWEN3_VL, build_tiny_processor
from dsreason.models.load import load_model, resolve_model
from dsreason.models.policy import Policy
from dsreason.models.processors.loading import open_encoder
from dsreason.monitor.flops import compute_model_flops
from dsreason.rollout.protocol import find_media_token_ids
from tests.unit.media.videos import write_video


class ToyConfig(Qwen3VLConfig):
    """A configuration class like those that new releases of transformers add."""

    model_type = "toy_vl"


class ToyForConditionalGeneration(Qwen3VLForConditionalGeneration):
    config_class = ToyConfig


def tiny_config(text: dict[str, Any], vision: dict[str, Any], head_size: int, common: dict[str, Any]) -> ToyConfig:
    return ToyConfig(**QWEN3_VL.tiny.config(text, vision, head_size, common).to_dict() | {"model_type": "toy_vl"})


def toy_processor(tokenizer: Any, unit: int, patches: dict[str, int]) -> Any:
    tokenizer._set_model_specific_special_tokens(
        {
            "image_token": "<pic>",
            "video_token": "<clip>",
            "vision_start_token": "<see>",
            "vision_end_token": "</see>",
        }
    )
    return build_tiny_processor(tokenizer, unit, patches)


TOY = Family(
    name="Toy-VL",
    model_type="toy_vl",
    tokens=Tokens(
        image="<pic>",
        video="<clip>",
        media_start="<see>",
        media_end="</see>",
        turn_start="<turn>",
        turn_end="</turn>",
        padding="<pad>",
    ),
    vision=Vision(
        bounds_are_per_video=True,
        fps=1.0,
        min_frames=2,
        max_frames=6,
        max_frame_tokens=4,
        max_video_tokens=0,
    ),
    grids=QWEN3_VL.grids,
    modules=QWEN3_VL.modules,
    tiny=Tiny(patch_size=8, default_system="Be a toy.", config=tiny_config, processor=toy_processor),
)


@pytest.fixture(scope="module", autouse=True)
def known() -> None:
    AutoConfig.register("toy_vl", ToyConfig)
    AutoModelForImageTextToText.register(ToyConfig, ToyForConditionalGeneration)


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Family:
    monkeypatch.setitem(FAMILIES, TOY.model_type, TOY)
    return TOY


@pytest.fixture
def folder(toy: Family, tmp_path: Path) -> Path:
    return resolve_model(ModelConfig(path="tiny:toy_vl"), tmp_path)


@pytest.fixture
def encoder(folder: Path) -> Encoder:
    return open_encoder(folder, dtype=torch.float32, max_length=4096, max_length_key="model.max_length")


@pytest.fixture
def sample(tmp_path: Path) -> Sample:
    """Build a sample with an image and a video of 40 frames at 10 per second."""
    Image.fromarray(np.full((48, 64, 3), 200, np.uint8)).save(tmp_path / "a.png")
    video = write_video(tmp_path / "a.mp4", 40)
    parts = [
        {"type": "image", "image": str(tmp_path / "a.png")},
        {"type": "video", "video": str(video)},
        {"type": "text", "text": "What is it?"},
    ]
    return Sample("7", [{"role": "user", "content": parts}, {"role": "assistant", "content": "red"}])


def test_family_is_found_by_model_type(toy: Family) -> None:
    assert get_family("toy_vl") is toy
    with pytest.raises(CheckpointError, match=r"Toy-VL \(toy_vl\)"):
        get_family("other_vl")


def test_unregistered_family_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="the tiny model must be one of"):
        resolve_model(ModelConfig(path="tiny:toy_vl"), tmp_path)


def test_family_tokens_are_rejected_in_row_texts(toy: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="</turn>"):
        check_text("red</turn>")
    monkeypatch.delitem(FAMILIES, "toy_vl")
    check_text("red</turn>")


def test_conversation_uses_family_tokens_and_vision(encoder: Encoder, sample: Sample) -> None:
    encoded = encoder.encode(sample)
    text = encoder.processor.tokenizer.decode(encoded.input_ids)
    assert text.startswith("<turn>system\nBe a toy.</turn>\n<turn>user\n<see><pic>")
    assert text.endswith("<turn>assistant\nred</turn>\n")
    assert encoder.processor.tokenizer.decode(encoded.input_ids[encoded.loss_mask]) == "red</turn>"
    times, height, width = encoded.mm_kwargs["video_grid_thw"][0].tolist()
    assert times == 2  # 4 s at 1 frame per second, in groups of two frames
    assert height * width // 4 <= 4  # tokens of one frame
    assert encoded.mm_kwargs["pixel_values"].shape[1] == 3 * 2 * 8 * 8


def test_message_with_family_tokens_is_rejected(encoder: Encoder, sample: Sample) -> None:
    question = [{"role": "user", "content": "<turn>system"}, *sample.messages[1:]]
    with pytest.raises(DataError, match="special token '<turn>'"):
        encoder.encode(replace(sample, messages=question))


@pytest.mark.parametrize(("kind", "placeholder"), [("image", "<pic>"), ("video", "<clip>")])
def test_dummies_are_enclosed_in_family_marks(encoder: Encoder, kind: Any, placeholder: str) -> None:
    text = encoder.processor.tokenizer.decode(encoder.build_dummy(kind).input_ids)
    assert text.startswith("<see>") and text.endswith("</see>") and placeholder in text


def test_family_media_tokens_are_never_sampled(encoder: Encoder, toy: Family) -> None:
    tokenizer = encoder.processor.tokenizer
    banned = tokenizer.convert_ids_to_tokens(find_media_token_ids(tokenizer, toy))
    assert set(banned) == {"<pic>", "<clip>", "<see>", "</see>"}


def test_family_model_trains_and_counts_flops(folder: Path, encoder: Encoder, sample: Sample) -> None:
    model = load_model(folder, dtype=torch.float32)
    batch = collate([encoder.encode(sample)], pad_id=encoder.pad_id)
    logprobs = Policy(model)(batch)
    logprobs.sum().backward()
    assert logprobs.shape == (len(batch.targets),)
    assert model.get_submodule("model.visual").patch_embed.proj.weight.grad.abs().sum() > 0
    flops = compute_model_flops(model)
    assert min(flops.vision_patch, flops.vision_merged_token, flops.text_token, flops.head_token) > 0
