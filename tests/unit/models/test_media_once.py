"""A batch that shows a medium several times: one pass of the vision tower, and what several give."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

from dsreason.models import media_once

GRIDS = [[1, 4, 4], [1, 4, 8], [1, 4, 4], [2, 4, 4]]
SHOWN = [0, 1, 0, 2, 3, 1]  # the third has the first's size and other pixels


def media_of(model: torch.nn.Module) -> tuple[Tensor, Tensor]:
    width = model.model.visual.patch_embed.proj.weight[0].numel()
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(t * h * w, width, generator=generator) for t, h, w in GRIDS]
    return torch.cat([parts[i] for i in SHOWN]), torch.tensor([GRIDS[i] for i in SHOWN])


def outputs(model: torch.nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """Features of every medium, deepstack's included, and the gradients of a sum that weighs each differently."""
    found = model.model.get_image_features(*media_of(model))
    features = [torch.cat(found.pooler_output)]
    deepstack = getattr(found, "deepstack_features", None) or []
    features += [layer if isinstance(layer, Tensor) else torch.cat(layer) for layer in deepstack]  # whole before 5.19
    model.zero_grad()
    sum((rows * torch.arange(len(rows))[:, None]).sum() for rows in features).backward()
    return features, [p.grad.clone() for p in model.model.visual.parameters()]


def test_features_and_gradients_are_those_of_all_media_and_each_is_computed_once(tiny: Path) -> None:
    model = AutoModelForImageTextToText.from_pretrained(tiny)
    expected_features, expected_gradients = outputs(model)
    patches: list[int] = []
    model.model.visual.patch_embed.register_forward_hook(lambda module, args, output: patches.append(len(args[0])))
    media_once.install(model.model.visual)
    features, gradients = outputs(model)
    assert patches == [16 + 32 + 16 + 32]
    for found, expected in zip(features, expected_features, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for found, expected in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize(
    ("media", "grids", "expected"),
    [
        ([[1, 2], [1, 2]], [[1, 1, 2], [1, 1, 2]], ([0, 0], [0])),
        ([[1, 2], [1, 2]], [[1, 1, 2], [1, 2, 1]], ([0, 1], [0, 1])),
        ([[1, 2], [1, 3], [1, 2]], [[1, 1, 2]] * 3, ([0, 1, 0], [0, 1])),
    ],
)
def test_media_are_the_same_where_pixels_and_grid_are(
    media: list[list[int]], grids: list[list[int]], expected: tuple[list[int], list[int]]
) -> None:
    assert media_once.distinct([torch.tensor(values) for values in media], grids) == expected
