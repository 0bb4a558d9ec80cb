"""A batch that shows a medium several times: one pass of the vision tower, and what several give."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

from dsreason.data.collate import collate
from dsreason.data.types import EncodedSample
from dsreason.models.policy import Policy
from dsreason.models.shared_media import SharedMediaForward, shared_media

GRIDS = [[1, 4, 4], [1, 4, 8], [1, 4, 4], [2, 4, 4]]


NUMBERS = (0, 1, 0, 2, 3, 1)  # the third has the first's size and other pixels
ALL = tuple(range(len(NUMBERS)))


def media_of(model: torch.nn.Module, places: tuple[int, ...]) -> Tensor:
    """Patches of these of the media, one after the other."""
    width = model.model.visual.patch_embed.proj.weight[0].numel()
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(t * h * w, width, generator=generator) for t, h, w in GRIDS]
    return torch.cat([parts[place] for place in places])


def outputs(model: torch.nn.Module, pixels: Tensor, numbers: tuple[int, ...]) -> tuple[list[Tensor], list[Tensor]]:
    """Features of every medium, deepstack's included, and the gradients of a sum that weighs each differently."""
    with shared_media(model.model.visual, {"image": numbers}):
        found = model.model.get_image_features(pixels, torch.tensor([GRIDS[number] for number in NUMBERS]))
    features = [torch.cat(found.pooler_output)]
    deepstack = getattr(found, "deepstack_features", None) or []
    features += [layer if isinstance(layer, Tensor) else torch.cat(layer) for layer in deepstack]  # whole before 5.19
    model.zero_grad()
    sum((rows * torch.arange(len(rows))[:, None]).sum() for rows in features).backward()
    return features, [p.grad.clone() for p in model.model.visual.parameters()]


def test_features_and_gradients_are_those_of_all_media_and_each_is_computed_once(tiny: Path) -> None:
    model = AutoModelForImageTextToText.from_pretrained(tiny)
    model.model.visual.forward = SharedMediaForward(model.model.visual.forward)
    patches: list[int] = []
    model.model.visual.patch_embed.register_forward_hook(lambda module, args, output: patches.append(len(args[0])))
    expected_features, expected_gradients = outputs(model, media_of(model, NUMBERS), ALL)
    features, gradients = outputs(model, media_of(model, (0, 1, 2, 3)), NUMBERS)
    assert patches == [16 + 32 + 16 + 16 + 32 + 32, 16 + 32 + 16 + 32]
    for found, expected in zip(features, expected_features, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for found, expected in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_numbers_are_those_of_one_forward_and_of_as_many_media(tiny: Path) -> None:
    model = AutoModelForImageTextToText.from_pretrained(tiny)
    model.model.visual.forward = SharedMediaForward(model.model.visual.forward)
    pixels = media_of(model, (0, 0))
    grids = torch.tensor([GRIDS[0]] * 2)
    with (
        shared_media(model.model.visual, {"video": (0, 0, 1)}),
        pytest.raises(ValueError, match="2 grids for 3 media"),
    ):
        model.model.get_video_features(pixels, grids)
    assert len(torch.cat(model.model.get_image_features(pixels, grids).pooler_output)) == 2 * 4


def test_images_go_before_videos_in_whichever_order_a_batch_numbers_them() -> None:
    def forward(patches: Tensor, grids: Tensor) -> dict[str, Tensor]:
        return {"features": patches}

    tower = SimpleNamespace(forward=SharedMediaForward(forward))
    grids = torch.tensor([[1, 1, 2]] * 3)
    with shared_media(tower, {"video": (0, 0, 1), "image": (0, 1, 1)}):  # type: ignore[arg-type]  # all that is used
        images = tower.forward(torch.tensor([1, 2, 3, 4]), grids)["features"]
        videos = tower.forward(torch.tensor([5, 6, 7, 8]), grids)["features"]
    assert images.tolist() == [1, 2, 3, 4, 3, 4]
    assert videos.tolist() == [5, 6, 5, 6, 7, 8]


def test_a_batch_that_shares_pixels_gives_the_log_probabilities_of_one_that_repeats_them(tiny: Path) -> None:
    model = AutoModelForImageTextToText.from_pretrained(tiny, dtype=torch.float32).eval()
    model.model.visual.forward = SharedMediaForward(model.model.visual.forward)
    policy, pixels, token = Policy(model), media_of(model, (0,)), model.config.image_token_id
    grids = torch.tensor([GRIDS[0]])

    def row(completion: int, mm_kwargs: dict[str, Tensor]) -> EncodedSample:
        ids = torch.tensor([5, token, token, token, token, 6, completion])
        return EncodedSample(
            id="",
            input_ids=ids,
            loss_mask=torch.arange(7) == 6,
            position_ids=torch.arange(7).expand(3, -1),
            mm_token_type_ids=(ids == token).long(),
            mm_kwargs=mm_kwargs,
        )

    shared = {"pixel_values": pixels, "image_grid_thw": grids}
    once = collate([row(completion, shared) for completion in (7, 8, 9)], pad_id=0)
    again = collate([row(completion, {**shared, "pixel_values": pixels.clone()}) for completion in (7, 8, 9)], pad_id=0)
    assert (len(once.mm_kwargs["pixel_values"]), len(again.mm_kwargs["pixel_values"])) == (16, 48)
    with torch.no_grad():
        torch.testing.assert_close(policy(once), policy(again), rtol=1e-6, atol=1e-6)
