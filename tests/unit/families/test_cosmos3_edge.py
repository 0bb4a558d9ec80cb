"""The reasoner of Cosmos3-Edge: names in its published files, encoding, equality with transformers, and memory plans."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dsreason.models.fused_kernels import FusedRMSNorm
from torch import Tensor
from transformers import AutoModelForImageTextToText, PreTrainedModel

from dsreason.checkpoints.processor_limits import compute_limits
from dsreason.checkpoints.trained_vision import TrainedVision
from dsreason.config.schema import ModelConfig, SFTConfig
from dsreason.config.schema_lora import LoRAConfig
from dsreason.data.chat import Encoder
from dsreason.data.collate import collate, join_parent, pack
from dsreason.data.sources import open_datasets
from dsreason.data.types import EncodedSample, Sample
from dsreason.errors import ConfigError, DataError
from dsreason.families import FAMILIES
from dsreason.models.attention import build_mask, check_attention
from dsreason.models.load import load_model
from dsreason.models.lora import find_adapted_layers
from dsreason.models.policy import Policy, enable_gradient_checkpointing
from dsreason.models.processors.loading import open_encoder
from dsreason.rollout.protocol import make_single_turn
from dsreason.tools.planning.architecture import Architecture
from dsreason.tools.planning.parameters import build_meta_model, count_parameters
from dsreason.tools.planning.pieces import build_pieces
from dsreason.tools.planning.shape import read_shape
from dsreason.train.grpo.rollouts import Rollout, build_training_sample
from tests.integration.rows import write_mixed_rows
from tests.published_layout import write_published_layout
from tests.unit.media.videos import write_video

FAMILY = FAMILIES["cosmos3_edge"]
NAMES = {
    "layers.3.self_attn.to_q.weight": "model.language_model.layers.3.self_attn.q_proj.weight",
    "layers.3.self_attn.to_out.weight": "model.language_model.layers.3.self_attn.o_proj.weight",
    "layers.3.mlp.up_proj.weight": "model.language_model.layers.3.mlp.fc1.weight",
    "layers.3.mlp.down_proj.weight": "model.language_model.layers.3.mlp.fc2.weight",
    "layers.3.input_layernorm.weight": "model.language_model.layers.3.input_layernorm.weight",
    "embed_tokens.weight": "model.language_model.embed_tokens.weight",
    "norm.weight": "model.language_model.norm.weight",
    "model.visual.encoder.layers.1.mlp.fc1.bias": "model.visual.encoder.layers.1.mlp.fc1.bias",
    "model.projector.linear_fc1.weight": "model.projector.linear_fc1.weight",
    "lm_head.weight": "lm_head.weight",
}
"""Published tensor name → name in memory, from the mappings of transformers and vLLM."""


@pytest.fixture(scope="module")
def folder(tiny_cosmos3_edge: Path) -> Path:
    return tiny_cosmos3_edge


@pytest.fixture(scope="module")
def encoder(folder: Path) -> Encoder:
    return open_encoder(folder, dtype=torch.float32, max_length=512, max_length_key="model.max_length")


@pytest.fixture(scope="module")
def encoded(encoder: Encoder, tmp_path_factory: pytest.TempPathFactory) -> list[EncodedSample]:
    """Rows with text only, one image, a video and two images."""
    rows = write_mixed_rows(tmp_path_factory.mktemp("rows"), 4)
    config = SFTConfig.model_validate({"data": {"adapter": "jsonl", "path": str(rows), "vision": {"fps": 4.0}}})
    samples, _ = open_datasets(config.data)
    encoded = [encoder.encode(samples[i]) for i in range(4)]
    assert [encoder.measure(samples[i]) for i in range(4)] == [len(item) for item in encoded]
    return encoded


@pytest.fixture(scope="module")
def reference(folder: Path) -> PreTrainedModel:
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


@pytest.fixture(scope="module")
def expected(reference: PreTrainedModel, encoded: list[EncodedSample]) -> Tensor:
    """The trained tokens' log-probabilities from transformers, which sees the images wrongly without an attention mask."""
    logprobs = []
    for item in encoded:
        inputs = {"input_ids": item.input_ids[None], "mm_token_type_ids": item.mm_token_type_ids[None]}
        with torch.no_grad():
            mask = torch.ones_like(inputs["input_ids"])
            logits = reference(**inputs, attention_mask=mask, **item.mm_kwargs).logits[0]
        places = item.loss_mask.nonzero().flatten()
        logprobs.append(logits.log_softmax(-1)[places - 1, item.input_ids[places]])
    return torch.cat(logprobs)


def test_renaming_tensors_round_trips() -> None:
    for published, in_memory in NAMES.items():
        assert FAMILY.rename(published) == in_memory
        assert FAMILY.to_exported_name(in_memory) == published
        assert FAMILY.rename(in_memory) == in_memory  # folders whose files already use these names


@pytest.mark.parametrize(
    "name",
    [
        "layers.0.self_attn.add_q_proj.weight",
        "layers.0.self_attn.to_add_out.weight",
        "layers.0.self_attn.norm_added_q.weight",
        "layers.0.self_attn.k_norm_und_for_gen.weight",
        "layers.0.input_layernorm_moe_gen.weight",
        "layers.0.mlp_moe_gen.up_proj.weight",
        "norm_moe_gen.weight",
        "proj_in.weight",
        "time_embedder.linear_1.bias",
        "action_proj_in.fc.weight",
        "action_modality_embed",
    ],
)
def test_generator_tensors_are_not_loaded(name: str) -> None:
    assert FAMILY.rename(name) is None


def test_weights_load_from_published_layout(folder: Path, tmp_path: Path) -> None:
    published = write_published_layout(folder, tmp_path / "published")
    result, expected = (load_model(item, dtype=torch.float32).state_dict() for item in (published, folder))
    assert all(result[name].equal(expected[name]) for name in expected)


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("attention", ["auto", "sdpa", "eager"])
def test_mixed_media_logprobs_match_transformers(
    folder: Path, encoded: list[EncodedSample], expected: Tensor, attention: str, layout: str
) -> None:
    policy = Policy(load_model(folder, dtype=torch.float32, attention=attention))
    if layout == "packed" and attention != "auto":
        with pytest.raises(ValueError, match=r'packed rows of Cosmos3-Edge .* need model.attention = "auto"'):
            policy(pack(encoded))
        return
    batch = pack(encoded) if layout == "packed" else collate(encoded, pad_id=0)
    with torch.no_grad():
        torch.testing.assert_close(policy(batch), expected, rtol=0, atol=5e-6)


def test_fused_norms_keep_logprobs(folder: Path, encoded: list[EncodedSample], expected: Tensor) -> None:
    """Only the norms are fused, because the feed-forward blocks have no gate."""
    model = load_model(folder, dtype=torch.float32, fused_kernels=True)
    assert {type(module) for module in model.modules() if "RMSNorm" in type(module).__name__} == {FusedRMSNorm}
    with torch.no_grad():
        torch.testing.assert_close(Policy(model)(pack(encoded)), expected, rtol=0, atol=5e-6)


def test_answers_sharing_prompt_match_separate_rows(folder: Path, encoder: Encoder, tmp_path: Path) -> None:
    parts = [{"type": "video", "video": str(write_video(tmp_path / "a.mp4", 9))}, {"type": "text", "text": "When?"}]
    prompt = encoder.encode_prompt(Sample("7", [{"role": "user", "content": parts}]))
    answers = [
        build_training_sample(Rollout(prompt, make_single_turn(ids, "", (0.0,) * len(ids), "stop", 0), 0.0, {}))
        for ids in ((5, 6, 7), (8, 9))
    ]
    policy = Policy(load_model(folder, dtype=torch.float32))
    with torch.no_grad():
        apart = torch.cat([policy(pack([join_parent(item)])) for item in answers])
        torch.testing.assert_close(policy(pack(answers)), apart, rtol=0, atol=5e-6)


def test_positions_equal_those_of_transformers(reference: PreTrainedModel, encoded: list[EncodedSample]) -> None:
    for item in encoded:
        grids = {key: value for key, value in item.mm_kwargs.items() if key.endswith("thw")}
        types = item.mm_token_type_ids[None]
        positions, _ = reference.model.get_rope_index(item.input_ids[None], mm_token_type_ids=types, **grids)
        assert positions[:, 0].equal(item.position_ids)


def test_packed_gradients_equal_padded_gradients(folder: Path, encoded: list[EncodedSample]) -> None:
    """Compare them with gradient checkpointing and a mask on one side only; a key's bias has no gradient."""
    gradients: list[dict[str, Tensor]] = []
    for batch, recomputing in ((pack(encoded), True), (collate(encoded, pad_id=0), False)):
        model = load_model(folder, dtype=torch.float32)
        if recomputing:
            enable_gradient_checkpointing(model)
        Policy(model)(batch).sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if not name.endswith("k_proj.bias")})
    for name, gradient in gradients[0].items():
        error = float((gradient - gradients[1][name]).norm() / gradients[1][name].norm())
        assert error <= 2e-5, (name, error)


def test_packed_row_has_no_mask_of_all_pairs() -> None:
    shape = {"batch_size": 1, "q_length": 3, "kv_length": 3}
    assert build_mask(**shape) is None
    mask = build_mask(**shape, attention_mask=torch.tensor([[True, True, False]]))
    assert mask is not None and mask[0, 0].int().tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 0]]


@pytest.mark.parametrize(
    ("attention", "packing", "message"),
    [
        ("sdpa", True, r'does not work for .* with packed rows, .* set .* = "auto", or train\.packing = false'),
        ("flash_attention_2", False, r'does not work for Cosmos3-Edge .*; set model\.attention = "auto"$'),
    ],
)
def test_unusable_attention_is_rejected(attention: str, packing: bool, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_attention(FAMILY, attention, packing=packing)
    check_attention(FAMILIES["qwen3_vl"], attention, packing=packing)


def test_each_frame_has_time_and_marks(encoder: Encoder, tmp_path: Path) -> None:
    """A file of 10 frames per second; the chat template's marks around the video are dropped."""
    part = {"type": "video", "video": str(write_video(tmp_path / "a.mp4", 40)), "nframes": 3, "max_pixels": 32 * 32}
    content = [{"type": "text", "text": "A"}, part, {"type": "text", "text": "B"}]
    ids = encoder.encode_prompt(Sample("7", [{"role": "user", "content": content}])).encoded.input_ids
    frame = "<|vision_start|><|video_pad|><|vision_end|>"
    text = f"A<0.0 seconds>{frame}<2.0 seconds>{frame}<3.9 seconds>{frame}B"
    assert encoder.processor.tokenizer.decode(ids) == f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def test_single_frame_can_be_sampled(encoder: Encoder, tmp_path: Path) -> None:
    part = {"type": "video", "video": str(write_video(tmp_path / "a.mp4", 40)), "nframes": 1}
    [(frames, metadata)] = encoder.encode_prompt(Sample("7", [{"role": "user", "content": [part]}])).media
    assert len(frames) == 1 and metadata["frames_indices"] == [0]


def test_video_normalization_handles_unequal_channels(encoder: Encoder) -> None:
    """Compare with the processor's own normalisation, with a different mean and deviation for each channel."""
    video = encoder.processor.video_processor
    frames = np.random.default_rng(0).integers(0, 256, (2, 64, 96, 3), np.uint8)
    changed = open_copy(encoder, image_mean=[0.1, 0.5, 0.9], image_std=[0.2, 0.5, 0.8])
    metadata: dict[str, Any] = {"total_num_frames": 2, "fps": 1.0, "frames_indices": [0, 1], "do_sample_frames": False}
    result = changed._build_mm_kwargs([(frames, metadata)])["pixel_values_videos"]
    expected = changed.processor.video_processor(
        [frames], do_sample_frames=False, do_resize=False, return_tensors="pt"
    )["pixel_values_videos"]
    assert video.image_mean != [0.1, 0.5, 0.9]
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-6)


def open_copy(encoder: Encoder, **settings: Any) -> Encoder:
    """Copy an encoder, and change settings of its video processor."""
    video = type(encoder.processor.video_processor)(**encoder.processor.video_processor.to_dict() | settings)
    processor = type(encoder.processor)(
        encoder.processor.image_processor,
        encoder.processor.tokenizer,
        video,
        chat_template=encoder.processor.chat_template,
    )
    return replace(encoder, processor=processor)


def test_adapters_are_added_to_all_layers(folder: Path) -> None:
    model = load_model(folder, dtype=torch.float32)
    assert len(find_adapted_layers(model, LoRAConfig(rank=4))) == 2 * 6
    # Each vision block has four projections and two feed-forward layers, and the projector has two layers.
    assert len(find_adapted_layers(model, LoRAConfig(rank=4, vision=True))) == 2 * 6 + 2 * 6 + 2


def test_quantization_covers_only_language_layers(folder: Path) -> None:
    model = load_model(folder, dtype=torch.float32, quantize="nf4")
    quantized = {name for name, parameter in model.named_parameters() if parameter.dtype == torch.uint8}
    assert len(quantized) == 2 * 6 and all(".language_model.layers." in name for name in quantized)


def test_vision_pieces_are_traced_for_plans(reference: PreTrainedModel) -> None:
    """A plan's shape and the bytes of a block and the projector; only the projector is trained besides the text layers."""
    shape = read_shape(reference.config)
    assert (shape.vision_depth, shape.vision_heads, shape.merge, shape.mergers) == (2, 4, 2, 1)
    assert shape.patch_values == 3 * 16 * 16  # one frame
    config = SFTConfig(model=ModelConfig(path="tiny:cosmos3_edge", freeze=("visual",)))
    architecture = Architecture(reference.config, "")
    parameters = count_parameters(build_meta_model(architecture, config), config)
    trained = {name for name in parameters.blocks if any(p.name.startswith(name) for p in parameters.trained)}
    assert "model.projector." in trained and not any("visual" in name for name in trained)
    pieces = build_pieces(architecture, config, parameters)
    forward, trained_projector = pieces.trace_vision_block(64, training=False), pieces.trace_merger(64)
    assert forward.kept == 0 and forward.peak >= 64 * 128 * 2  # at least a block's output in bfloat16
    assert trained_projector.kept >= 16 * 128 * 2  # at least the features of 16 tokens


def test_config_keeps_the_section_of_vllm(folder: Path) -> None:
    projector = json.loads((folder / "config.json").read_text())["projector_config"]
    sizes = ("input_hidden_size", "merger_intermediate_size", "out_hidden_size", "spatial_merge_size")
    assert [projector[name] for name in sizes] == [128, 256, 128, 2]


def test_exported_limits_omit_unknown_keys(encoder: Encoder) -> None:
    """The processor cannot limit a single frame; its own limits are 2 and 768 tokens of 32 x 32 pixels."""
    settings: dict[str, Any] = {"fps": 1.0, "max_pixels": 65536}
    assert FAMILY.vision is not None
    limits = compute_limits(encoder.processor, TrainedVision(settings), FAMILY.vision)
    size = {"shortest_edge": 2048, "longest_edge": 786432}
    assert limits.video == {"size": size, "fps": 1.0, "min_frames": 4, "max_frames": 768}
    assert limits.unexpressed == ["at most 65536 pixels per frame"]


def test_template_without_placeholder_is_rejected(encoder: Encoder, tmp_path: Path) -> None:
    """The template keeps the marks around the video."""
    changed = replace(encoder, processor=open_copy(encoder).processor)
    changed.processor.chat_template = changed.processor.chat_template.replace("<|video_pad|>", "")
    part = {"type": "video", "video": str(write_video(tmp_path / "a.mp4", 9))}
    with pytest.raises(DataError, match="omits some of the 1 media"):
        changed.encode_prompt(Sample("7", [{"role": "user", "content": [part]}]))
