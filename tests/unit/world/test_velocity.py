"""The inputs that a family gives its transformer, and the use it makes of the output."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dsreason.world.cache import TextCache
from dsreason.world.families import FAMILIES
from dsreason.world.models import load_transformer
from dsreason.world.types import Conditioning

SHAPE = (2, 16, 3, 4, 4)
S = torch.tensor([0.3, 0.995])
PROMPTS = ["a red square", "a blue square"]


class Recorder(nn.Module):
    """A transformer that returns ones in bfloat16, and records its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
        self.asked: dict[str, Any] = {}

    def forward(self, **asked: Any) -> tuple[Tensor]:
        self.asked = asked
        return (torch.ones(SHAPE, dtype=torch.bfloat16),)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("name", "most"), [("cosmos_predict2_5", 1.0), ("wan", 1000.0)])
def test_times_match_model_training(name: str, most: float) -> None:
    """Check that sampling and training share one function, so that their times cannot differ."""
    recorder = Recorder()
    v = FAMILIES[name].velocity(recorder, draw(*SHAPE), S, draw(2, 8, 32))
    times = recorder.asked["timestep"]
    assert times.dtype == torch.float32
    torch.testing.assert_close(times.reshape(2, -1)[:, 0], S * most)
    assert v.dtype == torch.float32
    assert recorder.asked["hidden_states"].dtype == recorder.asked["encoder_hidden_states"].dtype == torch.bfloat16


def test_unconditioned_clip_has_a_single_timestep(tiny_worlds: dict[str, Path]) -> None:
    """Check that the result equals that with a time per frame, which needs a modulation per token."""
    recorder, family, none = Recorder(), FAMILIES["cosmos_predict2_5"], torch.zeros(2, 1, 3, 1, 1)
    x, text = draw(*SHAPE), draw(2, 8, 128)
    family.velocity(recorder, x, S, text)
    assert recorder.asked["timestep"].shape == (2,)
    transformer = load_transformer(tiny_worlds["cosmos_predict2_5"], torch.float32)
    with torch.no_grad():
        by_frame = family.velocity(transformer, x, S, text, Conditioning(torch.zeros(SHAPE), none), x)
        torch.testing.assert_close(family.velocity(transformer, x, S, text), by_frame, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_solver_times_match_schedule(tiny_worlds: dict[str, Path], name: str) -> None:
    from dsreason.world.families.components import load_scheduler

    scheduler = load_scheduler(tiny_worlds[name])
    scheduler.set_timesteps(10)
    sigmas = FAMILIES[name].sigmas(tiny_worlds[name], 10)
    torch.testing.assert_close(FAMILIES[name].solver_times(scheduler).double(), sigmas[:-1], atol=1.1e-3, rtol=0)


def test_conditioning_frames_have_separate_time_and_velocity() -> None:
    recorder, noise, latents = Recorder(), draw(*SHAPE, seed=1), draw(*SHAPE, seed=2)
    mask = torch.zeros(2, 1, 3, 1, 1)
    mask[0, :, :1] = 1  # the first frame of the first clip, and none of the second
    x = draw(*SHAPE)
    v = FAMILIES["cosmos_predict2_5"].velocity(
        recorder, x, S, draw(2, 8, 32), Conditioning(latents * mask, mask), noise
    )
    expected = torch.tensor([[1e-4, 0.3, 0.3], [0.995] * 3])
    torch.testing.assert_close(recorder.asked["timestep"].reshape(2, 3), expected)
    recorded = recorder.asked["hidden_states"].float()
    torch.testing.assert_close(recorded[0, :, 0], latents[0, :, 0], atol=0.02, rtol=0.01)
    torch.testing.assert_close(recorded[0, :, 1:], x[0, :, 1:], atol=0.02, rtol=0.01)
    assert recorder.asked["condition_mask"].shape == (2, 1, 3, 4, 4)
    torch.testing.assert_close(v[0, :, 0], noise[0, :, 0] - latents[0, :, 0])
    assert (v[0, :, 1:] == 1).all()
    assert (v[1] == 1).all()


def test_projected_text_gives_the_same_velocity(tiny_worlds: dict[str, Path], tmp_path: Path) -> None:
    folder, family = tiny_worlds["cosmos_predict2_5"], FAMILIES["cosmos_predict2_5"]
    plain, projected = (
        TextCache.open(family, folder, 64, torch.float32, tmp_path, project=project) for project in (False, True)
    )
    assert plain.folder != projected.folder
    for cache in (plain, projected):
        cache.encode(PROMPTS)
        cache.check_different(PROMPTS)
    assert plain.read(PROMPTS).shape == (2, 64, 128)
    assert projected.read(PROMPTS).shape == (2, 64, 32)
    transformer = load_transformer(folder, torch.float32)
    result, expected = (
        family.velocity(transformer, draw(*SHAPE), S, cache.read(PROMPTS)) for cache in (projected, plain)
    )
    torch.testing.assert_close(result, expected)
    expected.sum().backward()
    assert transformer.crossattn_proj[0].weight.grad.abs().max() > 0


@pytest.mark.parametrize("name", FAMILIES)
def test_projection_is_skipped_without_size_reduction(tiny_worlds: dict[str, Path], tmp_path: Path, name: str) -> None:
    """Cover Wan, which has no such layer, and a Cosmos layer that keeps the width, by which projected text is detected."""
    folder = shutil.copytree(tiny_worlds[name], tmp_path / "model")
    if name != "wan":
        keep_width(folder / "transformer", 128)
    plain, projected = (
        TextCache.open(FAMILIES[name], folder, 64, torch.float32, tmp_path, project=project)
        for project in (False, True)
    )
    assert plain == projected


def keep_width(folder: Path, width: int) -> None:
    """Replace the text projection of a Cosmos transformer with one from `width` to `width`."""
    from diffusers import CosmosTransformer3DModel

    config = CosmosTransformer3DModel.load_config(folder)
    widths = dict.fromkeys(("crossattn_proj_in_channels", "encoder_hidden_states_channels", "text_embed_dim"), width)
    CosmosTransformer3DModel.from_config(config | widths).save_pretrained(folder)


def test_text_is_projected_once_despite_equal_width(tiny_worlds: dict[str, Path], tmp_path: Path) -> None:
    from diffusers import CosmosTransformer3DModel

    folder = shutil.copytree(tiny_worlds["cosmos_predict2_5"], tmp_path / "model")
    keep_width(folder / "transformer", 128)
    family = FAMILIES["cosmos_predict2_5"]
    cache = TextCache.open(family, folder, 64, torch.float32, tmp_path, project=True)
    cache.encode(PROMPTS)
    transformer = load_transformer(folder, torch.float32)
    with torch.no_grad():
        velocity = family.velocity(transformer, draw(*SHAPE), S, cache.read(PROMPTS))
        text = family.encode_text(folder, PROMPTS, 64, "cpu", torch.float32)
        original = CosmosTransformer3DModel.from_pretrained(folder / "transformer")
        torch.testing.assert_close(velocity, family.velocity(original, draw(*SHAPE), S, text))


@pytest.mark.parametrize("name", FAMILIES)
def test_text_embeddings_are_frozen(tiny_worlds: dict[str, Path], name: str) -> None:
    text = FAMILIES[name].encode_text(tiny_worlds[name], PROMPTS, 64, "cpu", torch.float32)
    assert not text.requires_grad
    alone = FAMILIES[name].encode_text(tiny_worlds[name], PROMPTS[1:], 64, "cpu", torch.float32)
    assert torch.equal(text[1:], alone)
