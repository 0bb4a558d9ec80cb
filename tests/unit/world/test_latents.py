"""Codecs: Wan's autoencoder with the pipeline's normalisation, and the linear codec with the same shapes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dsreason.errors import CheckpointError
from dsreason.world.latents import LatentCodec, LinearCodec
from dsreason.world.models import load_vae
from dsreason.world.types import ClipSize

SIZE = ClipSize(9, 32, 48, 16.0)


def squares(count: int) -> torch.Tensor:
    """Make clips `[B, 3, 9, 32, 48]`, with values from -1 to 1, of a square that moves to the right."""
    numbers = torch.Generator().manual_seed(0)
    clips = torch.full((count, 3, 9, 32, 48), -0.8)
    for clip in clips:
        colour = torch.rand(3, 1, 1, generator=numbers)
        top, left = (int(torch.randint(0, high, (), generator=numbers)) for high in (22, 20))
        for frame in range(9):
            clip[:, frame, top : top + 10, left + frame : left + frame + 10] = colour
    return clips


@pytest.fixture(scope="module")
def linear() -> LinearCodec:
    return LinearCodec.fit(squares(64))


@pytest.fixture(params=["wan", "linear"])
def codec(request: pytest.FixtureRequest, tiny_worlds: dict[str, Path], linear: LinearCodec) -> LatentCodec:
    return linear if request.param == "linear" else load_vae(tiny_worlds["wan"], "cpu", torch.float32)


def test_latents_and_pixels_have_expected_shapes(codec: LatentCodec) -> None:
    clips = squares(2)
    latents = codec.encode(clips)
    assert latents.shape == (2, 16, 3, 4, 6) == (2, *codec.shape(SIZE))
    assert latents.dtype == torch.float32
    pixels = codec.decode(latents)
    assert pixels.shape == clips.shape
    assert pixels.min() >= 0
    assert pixels.max() <= 1


def test_single_frame_is_encoded_as_image(codec: LatentCodec) -> None:
    latents = codec.encode(squares(1)[:, :, :1])
    assert latents.shape == (1, *codec.shape(ClipSize(1, 32, 48, 16.0)))
    assert codec.decode(latents).shape == (1, 3, 1, 32, 48)


def test_encoding_is_deterministic_and_independent_per_clip(codec: LatentCodec) -> None:
    clips = squares(3)
    together = codec.encode(clips)
    torch.testing.assert_close(torch.cat([codec.encode(clip[None]) for clip in clips]), together)
    torch.testing.assert_close(codec.decode(together)[1:2], codec.decode(together[1:2]))


def test_codec_is_frozen_and_normalizes_like_autoencoder(tiny_worlds: dict[str, Path]) -> None:
    from diffusers import AutoencoderKLWan

    vae = AutoencoderKLWan.from_pretrained(tiny_worlds["wan"] / "vae").eval()
    codec = load_vae(tiny_worlds["wan"], "cpu", torch.float32)
    assert not any(parameter.requires_grad for parameter in codec.vae.parameters())  # type: ignore[attr-defined]
    clips = squares(1)
    with torch.no_grad():
        mode = vae.encode(clips).latent_dist.mode()
        latents = codec.encode(clips)
        for channel in (0, 15):
            expected = (mode[:, channel] - vae.config.latents_mean[channel]) / vae.config.latents_std[channel]
            torch.testing.assert_close(latents[:, channel], expected)
        torch.testing.assert_close(codec.decode(latents), (vae.decode(mode).sample / 2 + 0.5).clamp(0, 1))


def test_linear_codec_reconstructs_its_training_clips(linear: LinearCodec) -> None:
    clips = squares(64)[:8]
    latents = linear.encode(clips)
    assert latents.std().item() == pytest.approx(1, abs=0.3)
    error = (linear.decode(latents) - (clips / 2 + 0.5)).pow(2).mean().item()
    assert error < 0.25 * (clips / 2 + 0.5).var().item()


def test_linear_codec_is_saved_in_model_folder(linear: LinearCodec, tmp_path: Path) -> None:
    linear.save(tmp_path / "vae")
    vae = load_vae(tmp_path, "cpu", torch.bfloat16)
    assert torch.equal(vae.encode(squares(1)), linear.encode(squares(1)))


def test_unknown_codec_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "vae").mkdir()
    (tmp_path / "vae" / "config.json").write_text('{"_class_name": "AutoencoderKLCosmos"}')
    with pytest.raises(
        CheckpointError, match="_class_name must be AutoencoderKLWan or LinearCodec; got AutoencoderKLCosmos"
    ):
        load_vae(tmp_path, "cpu", torch.float32)


@pytest.mark.parametrize(("name", "dtype"), [("wan", torch.float32), ("cosmos_predict2_5", torch.bfloat16)])
def test_autoencoder_uses_dtype_of_its_family(tiny_worlds: dict[str, Path], name: str, dtype: torch.dtype) -> None:
    codec = load_vae(tiny_worlds[name], "cpu", torch.bfloat16)
    assert codec.vae.dtype == dtype  # type: ignore[attr-defined]
