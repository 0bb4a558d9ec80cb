"""Media features from one call of the vision tower per batch, compared with transformers, which calls it for each kind."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText, PreTrainedModel

from dsreason.data.collate import collate, find_media_tokens
from dsreason.data.types import Batch, EncodedSample, MediaTokens
from dsreason.models.load import load_model
from dsreason.models.media_features import PatchProduct, build_batch_inputs, patch_vision
from dsreason.models.policy import Policy

SIZES = {"image": ([1, 4, 4], [1, 4, 8], [1, 2, 6]), "video": ([2, 4, 4], [3, 2, 4])}
ROWS = {
    "image": (("image", 0),),
    "video": (("video", 0),),
    "video, image": (("video", 0), ("image", 1)),
    "image, video, image": (("image", 0), ("video", 1), ("image", 2)),
    "image again": (("image", 0), ("image", 0)),
}
KINDS = {"image": (1, "pixel_values", "image_grid_thw"), "video": (2, "pixel_values_videos", "video_grid_thw")}


@pytest.fixture
def model(tiny_of_each_architecture: Path) -> PreTrainedModel:
    return AutoModelForImageTextToText.from_pretrained(tiny_of_each_architecture, dtype=torch.float32)


def make_row(model: PreTrainedModel, name: str, seed: int) -> EncodedSample:
    """Build a row of text and media whose last four tokens are trained."""
    width = next(p[0].numel() for name, p in model.model.visual.named_parameters() if "patch_embed" in name)
    generator = torch.Generator().manual_seed(seed)
    placeholders = {"image": model.config.image_token_id, "video": model.config.video_token_id}
    ids, types = [5], [0]
    mm_kwargs: dict[str, list[Tensor]] = {}
    for kind, number in ROWS[name]:
        token_type, pixels, grids = KINDS[kind]
        frames, height, width_in_patches = SIZES[kind][number]
        patches = frames * height * width_in_patches
        ids += [placeholders[kind]] * (patches // 4) + [6]
        types += [token_type] * (patches // 4) + [0]
        mm_kwargs.setdefault(pixels, []).append(torch.randn(patches, width, generator=generator))
        mm_kwargs.setdefault(grids, []).append(torch.tensor([[frames, height, width_in_patches]]))
    ids, types = ids + [7, 8, 9, 7], types + [0] * 4
    return EncodedSample(
        id=name,
        input_ids=torch.tensor(ids),
        loss_mask=torch.arange(len(ids)) >= len(ids) - 4,
        position_ids=torch.arange(len(ids)).expand(3, -1),
        mm_token_type_ids=torch.tensor(types),
        mm_kwargs={key: torch.cat(values) for key, values in mm_kwargs.items()},
    )


def transformers_logprobs(model: PreTrainedModel, batch: Batch) -> Tensor:
    """Compute the targets' log-probabilities with transformers' own forward pass.

    The pixels contain one copy for each displayed medium.
    """
    output = model(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        position_ids=batch.position_ids,
        mm_token_type_ids=batch.mm_token_type_ids,
        **batch.mm_kwargs,
    )
    logprobs = output.logits.flatten(0, 1).log_softmax(-1)
    return logprobs[batch.predictors, batch.input_ids.flatten()[batch.targets]]


def gradients(model: PreTrainedModel, logprobs: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    (logprobs * torch.arange(1, len(logprobs) + 1)).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("names", [[name] for name in ROWS] + [list(ROWS)], ids=[*ROWS, "all of them"])
def test_logprobs_and_gradients_equal_those_of_transformers(model: PreTrainedModel, names: list[str]) -> None:
    batch = collate([make_row(model, name, seed) for seed, name in enumerate(names)], pad_id=0)
    expected = transformers_logprobs(model, batch)
    expected_gradients = gradients(model, expected)
    patch_vision(model)
    calls: list[int] = []
    model.model.visual.register_forward_hook(lambda module, args, output: calls.append(len(args[0])))
    logprobs = Policy(model)(batch)
    assert calls == [sum(len(batch.mm_kwargs[pixels]) for _, pixels, _ in KINDS.values() if pixels in batch.mm_kwargs)]
    torch.testing.assert_close(logprobs, expected, rtol=2e-6, atol=2e-6)
    result = gradients(model, logprobs)
    assert result.keys() == expected_gradients.keys()
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(result[name], gradient, rtol=1e-4, atol=5e-6 * float(gradient.abs().max() + 1))


def test_text_row_does_not_run_vision_tower(model: PreTrainedModel) -> None:
    row = replace(make_row(model, "image", 0), mm_kwargs={})
    text = replace(row, input_ids=torch.full_like(row.input_ids, 7), mm_token_type_ids=row.mm_token_type_ids * 0)
    batch = collate([text], pad_id=0)
    model.model.visual.register_forward_hook(lambda *_: pytest.fail("the tower was called"))
    torch.testing.assert_close(Policy(model)(batch), transformers_logprobs(model, batch), rtol=1e-6, atol=1e-6)


def test_shared_media_are_encoded_once(model: PreTrainedModel) -> None:
    """Compare three completions of a prompt, which share a pixel tensor, with three rows that have separate ones."""
    prompt = make_row(model, "image, video, image", 0)
    pixels = {key: value.clone() for key, value in prompt.mm_kwargs.items()}
    shared = collate([prompt, prompt, prompt], pad_id=0)
    repeated = collate(
        [replace(prompt, mm_kwargs={k: v.clone() for k, v in pixels.items()}) for _ in range(3)], pad_id=0
    )
    assert len(repeated.mm_kwargs["pixel_values"]) == 3 * len(shared.mm_kwargs["pixel_values"])
    expected = transformers_logprobs(model, repeated)
    expected_gradients = gradients(model, expected)
    patch_vision(model)
    logprobs = Policy(model)(shared)
    torch.testing.assert_close(logprobs, expected, rtol=2e-6, atol=2e-6)
    for name, gradient in gradients(model, logprobs).items():
        expected_gradient = expected_gradients[name]
        limit = 5e-6 * float(expected_gradient.abs().max() + 1)
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-4, atol=limit)


def test_media_tokens_number_images_before_videos(model: PreTrainedModel) -> None:
    rows = [make_row(model, "video, image", 0), make_row(model, "image", 1)]
    media = find_media_tokens(collate([rows[0], rows[1], rows[0]], pad_id=0))
    assert media is not None
    assert media.grids.tolist() == [[1, 4, 8], [1, 4, 4], [2, 4, 4]]
    assert media.numbers == (0, 1, 0, 2, 2)
    width = len(
        rows[0]
    )  # first row: 8 video tokens from 1 and 8 image tokens from 10; second row: 4 image tokens from 1
    images = [*range(10, 18), *range(width + 1, width + 5), *range(2 * width + 10, 2 * width + 18)]
    assert media.indices.tolist() == [*images, *range(1, 9), *range(2 * width + 1, 2 * width + 9)]


def test_repeated_features_follow_row_order() -> None:
    grids = torch.tensor([[1, 2, 2], [1, 2, 4]])
    media = MediaTokens(grids, (1, 0, 1), torch.arange(5))
    assert media.repeat_features(torch.tensor([[10.0], [20.0], [21.0]])).flatten().tolist() == [20, 21, 10, 20, 21]


def test_batch_keeps_grids_and_types_on_host(model: PreTrainedModel) -> None:
    batch = collate([make_row(model, "video, image", 0)], pad_id=0).to(torch.device("meta"))
    on_host = {key for key, value in batch.mm_kwargs.items() if value.device.type == "cpu"}
    assert on_host == {"image_grid_thw", "video_grid_thw"} and batch.mm_token_type_ids.device.type == "cpu"
    assert batch.mm_kwargs["pixel_values"].device.type == batch.input_ids.device.type == "meta"


def test_deepstack_features_match_transformers(tiny_qwen3_vl: Path) -> None:
    model = AutoModelForImageTextToText.from_pretrained(tiny_qwen3_vl, dtype=torch.float32)
    batch = collate([make_row(model, "image, video, image", 0)], pad_id=0)
    expected = transformers_logprobs(model, batch)
    patch_vision(model)
    torch.testing.assert_close(transformers_logprobs(model, batch), expected, rtol=2e-6, atol=2e-6)
    inputs = build_batch_inputs(model, batch)
    assert inputs["visual_pos_masks"].dtype == torch.int64 and len(inputs["deepstack_visual_embeds"]) == 1


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 8e-3)])
def test_patch_product_equals_the_convolution(tiny: Path, dtype: torch.dtype, bound: float) -> None:
    embedding = AutoModelForImageTextToText.from_pretrained(tiny, dtype=dtype).model.visual.patch_embed
    state = {name: tuple(values.shape) for name, values in embedding.state_dict().items()}
    pixels = torch.randn(24, embedding.proj.weight[0].numel(), dtype=dtype, generator=torch.Generator().manual_seed(0))

    def run() -> tuple[Tensor, Tensor]:
        embedding.zero_grad()
        features = embedding(pixels)
        features.float().square().sum().backward()
        return features.float(), embedding.proj.weight.grad.float()

    expected = run()
    embedding.proj.__class__ = PatchProduct
    assert {name: tuple(values.shape) for name, values in embedding.state_dict().items()} == state
    for values, reference in zip(run(), expected, strict=True):
        assert float((values - reference).norm() / reference.norm()) <= bound


def test_loaded_model_embeds_patches_by_matrix_product(tiny: Path) -> None:
    model = load_model(tiny, dtype=torch.float32)
    assert type(model.model.visual.patch_embed.proj) is PatchProduct
