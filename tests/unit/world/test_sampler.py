"""The sampler, compared step by step with diffusers' pipelines with the same solver; and the tensors that rollouts keep."""

from __future__ import annotations

import json
import math
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from dsreason.world.families import FAMILIES
from dsreason.world.families.components import load_scheduler
from dsreason.world.models import load_transformer, load_vae
from dsreason.world.sampler import apply_guidance, sample, solve
from dsreason.world.steps import Step, build_step
from dsreason.world.types import Conditioning

STEPS, LENGTH, FRAMES, SIDE = 6, 64, 9, 32
PROMPT, NEGATIVE = "a red square moves left", "bad"
NOISE = (1, 16, 3, 4, 4)


class NoSafety(nn.Module):
    """A safety checker that does nothing, which the Cosmos pipeline requires."""

    device, dtype = torch.device("cpu"), torch.float32

    def check_text_safety(self, prompt: str) -> bool:
        return True

    def check_video_safety(self, frames: Any) -> Any:
        return frames


@pytest.fixture(scope="module")
def image() -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 255, (SIDE, SIDE, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


@pytest.fixture(scope="module")
def pipelines(tiny_worlds: dict[str, Path]) -> dict[str, Any]:
    from diffusers import Cosmos2_5_PredictBasePipeline, WanPipeline

    made = {
        "cosmos_predict2_5": Cosmos2_5_PredictBasePipeline.from_pretrained(
            tiny_worlds["cosmos_predict2_5"], safety_checker=NoSafety()
        ),
        "wan": WanPipeline.from_pretrained(tiny_worlds["wan"]),
    }
    for pipeline in made.values():
        pipeline.set_progress_bar_config(disable=True)
    return made


def given_frames(folder: Path, image: Image.Image, mode: str) -> Conditioning | None:
    """Build the conditioning that the pipeline derives from an image or a video.

    An image has grey frames behind it; a video gives its last five frames.
    """
    if mode == "text":
        return None
    frame = torch.from_numpy(np.array(image)).permute(2, 0, 1)[:, None].float() / 127.5 - 1  # [3, 1, H, W]
    other_items = torch.full_like(frame, -1.0) if mode == "image" else frame
    pixels = torch.cat([frame] + [other_items] * (FRAMES - 1), dim=1)[None]
    mask = torch.zeros(1, 1, 3, 1, 1)
    mask[:, :, : {"image": 1, "video": 2}[mode]] = 1
    latents = load_vae(folder, "cpu", torch.float32).encode(pixels)
    return Conditioning(latents * mask, mask)


@pytest.mark.parametrize("scale", [1.0, 3.0])
@pytest.mark.parametrize(
    ("name", "mode"),
    [("cosmos_predict2_5", "text"), ("cosmos_predict2_5", "image"), ("cosmos_predict2_5", "video"), ("wan", "text")],
)
def test_solver_matches_the_pipeline(
    tiny_worlds: dict[str, Path],
    pipelines: dict[str, Any],
    image: Image.Image,
    name: str,
    mode: str,
    scale: float,
) -> None:
    family, folder = FAMILIES[name], tiny_worlds[name]
    media = {"text": {}, "image": {"image": image}, "video": {"video": [image] * FRAMES}}[mode]
    expected = pipelines[name](
        prompt=PROMPT,
        negative_prompt=NEGATIVE,
        height=SIDE,
        width=SIDE,
        num_frames=FRAMES,
        num_inference_steps=STEPS,
        guidance_scale=scale,
        max_sequence_length=LENGTH,
        output_type="latent",
        generator=torch.Generator().manual_seed(1),
        **media,
    ).frames

    text, negative = family.encode_text(folder, [PROMPT, NEGATIVE], LENGTH, "cpu", torch.float32).split(1)
    noise = torch.randn(NOISE, generator=torch.Generator().manual_seed(1))
    conditioning = given_frames(folder, image, mode)
    predict = partial(
        family.velocity,
        load_transformer(folder, torch.float32).eval(),
        conditioning=conditioning,
        initial_noise=noise,
    )
    own_scale = scale + family.guidance_offset if scale > 1 else 1.0

    def velocity(x: Tensor, s: Tensor) -> Tensor:
        v = predict(x, s, text)
        return apply_guidance(v, predict(x, s, negative), own_scale) if own_scale > 1 else v

    result = solve(velocity, noise, load_scheduler(folder), STEPS, family.solver_times)
    assert expected.std() > 0.1
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)


def test_wan_supports_the_newer_scheduler(tiny_worlds: dict[str, Path], tmp_path: Path) -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline

    folder, family = shutil.copytree(tiny_worlds["wan"], tmp_path / "wan"), FAMILIES["wan"]
    FlowMatchEulerDiscreteScheduler(shift=3.0).save_pretrained(folder / "scheduler")
    index = json.loads((folder / "model_index.json").read_text())
    index["scheduler"] = ["diffusers", "FlowMatchEulerDiscreteScheduler"]
    (folder / "model_index.json").write_text(json.dumps(index))
    text = family.encode_text(folder, [PROMPT], LENGTH, "cpu", torch.float32)
    noise = torch.randn(NOISE, generator=torch.Generator().manual_seed(1))
    pipeline = WanPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    expected = pipeline(
        prompt_embeds=text,
        latents=noise,
        height=SIDE,
        width=SIDE,
        num_frames=FRAMES,
        num_inference_steps=STEPS,
        guidance_scale=1.0,
        output_type="latent",
    ).frames
    predict = partial(family.velocity, load_transformer(folder, torch.float32).eval(), text=text)
    result = solve(predict, noise, load_scheduler(folder), STEPS, family.solver_times)
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)
    # this solver equals Euler steps along the folder's own noise levels
    sigmas = family.sigmas(folder, STEPS).tolist()
    steps = [build_step("ode", sigmas[i], sigmas[i + 1]) for i in range(STEPS)]
    torch.testing.assert_close(
        sample(predict, noise, sigmas, steps, {}.__getitem__, ()).latents, expected, atol=1e-5, rtol=1e-5
    )


def test_wan_guidance_scale_of_one_disables_guidance() -> None:
    v, negative = torch.tensor([1.0, 2.0]), torch.tensor([0.5, 0.0])
    torch.testing.assert_close(apply_guidance(v, negative, 1.0), v)
    torch.testing.assert_close(apply_guidance(v, negative, 3.0), torch.tensor([2.0, 6.0]))


def straight(x: Tensor, s: Tensor) -> Tensor:
    """Return the velocity for data at the origin, where x = s·noise."""
    return x / s.view(-1, 1, 1, 1, 1)


def levels(count: int) -> list[float]:
    return [1 - i / count for i in range(count + 1)]


def test_recorded_steps_match_the_rollout() -> None:
    sigmas = levels(4)
    steps = [build_step("flow" if i in (1, 2) else "ode", sigmas[i], sigmas[i + 1], 0.7, sigmas[1]) for i in range(4)]
    drawn = {i: torch.randn(2, 3, 2, 2, 2, generator=torch.Generator().manual_seed(i)) for i in range(4)}
    result = sample(straight, drawn[0], sigmas, steps, drawn.__getitem__, keep={1, 2})
    assert set(result.trajectory) == {1, 2}
    torch.testing.assert_close(result.trajectory[1].x, 0.75 * drawn[0])
    assert torch.equal(result.trajectory[1].x_next, result.trajectory[2].x)
    torch.testing.assert_close(result.latents, torch.zeros_like(drawn[0]), atol=1e-6, rtol=0)
    # x' − mean is std·ε, so the mean log-density follows from the noise alone
    spread = steps[1].std
    expected = -(drawn[1] ** 2).mean(dim=(1, 2, 3, 4)) / 2 - torch.tensor(spread).log() - 0.9189385
    torch.testing.assert_close(result.trajectory[1].log_prob, expected, atol=1e-5, rtol=1e-5)


def test_deterministic_steps_draw_no_noise() -> None:
    sigmas = levels(3)
    steps = [build_step("ode", sigmas[i], sigmas[i + 1]) for i in range(3)]
    sample(straight, torch.ones(1, 1, 1, 1, 1), sigmas, steps, {}.__getitem__, keep=())


def test_conditioning_frames_follow_ode_without_probability() -> None:
    sigmas, data = levels(4), torch.full((1, 1, 1, 1, 1), 5.0)
    noise = torch.randn(1, 1, 2, 2, 2, generator=torch.Generator().manual_seed(0))
    free = torch.tensor([0.0, 1.0]).view(1, 1, 2, 1, 1)

    def velocity(x: Tensor, s: Tensor) -> Tensor:
        return torch.cat([noise[:, :, :1] - data, straight(x, s)[:, :, 1:]], dim=2)

    steps = [build_step("cps", sigmas[i], sigmas[i + 1], 0.8) for i in range(4)]
    draw = [torch.randn(noise.shape, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    result = sample(velocity, noise, sigmas, steps, draw.__getitem__, keep={0, 1}, free=free)
    torch.testing.assert_close(result.latents[:, :, :1], data.expand(1, 1, 1, 2, 2))
    other = [torch.cat([d[:, :, :1] + 1, d[:, :, 1:]], dim=2) for d in draw]
    second = sample(velocity, noise, sigmas, steps, other.__getitem__, keep={0, 1}, free=free)
    assert torch.equal(result.latents, second.latents)
    # only the sampled frame counts: x' − mean is std·ε
    expected = -(draw[1][:, :, 1:] ** 2).mean() / 2 - math.log(steps[1].std) - 0.9189385
    assert result.trajectory[1].log_prob.tolist() == pytest.approx([expected.item()], abs=1e-5)


def test_mismatched_noise_levels_and_steps_are_rejected() -> None:
    with pytest.raises(ValueError, match="3 noise levels for 3 steps"):
        sample(straight, torch.ones(1, 1, 1, 1, 1), levels(2), [Step(1, -0.1, 0)] * 3, {}.__getitem__, keep=())
