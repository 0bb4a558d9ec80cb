"""Codecs that convert pixels to latents and back."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dsreason.errors import CheckpointError
from dsreason.world.types import ClipSize


class LatentCodec(Protocol):
    """A frozen autoencoder whose latents have a mean of about 0 and a standard deviation of about 1."""

    def encode(self, pixels: Tensor) -> Tensor:
        """Encode pixels `[B, 3, T, H, W]` in [-1, 1] as latents `[B, C, t, h, w]`, float32. Encoding is deterministic."""

    def decode(self, latents: Tensor) -> Tensor:
        """Decode latents `[B, C, t, h, w]` to pixels `[B, 3, T, H, W]`, float32, in [0, 1]."""

    def shape(self, size: ClipSize) -> tuple[int, int, int, int]:
        """Return the shape `(C, t, h, w)` of a clip's latents."""


@dataclass(frozen=True)
class WanCodec:
    """The autoencoder of Wan and Cosmos.

    The first frame becomes one latent frame, and so does every later group of 4 frames; 8 x 8 pixels become one latent.
    The mean and standard deviation are read from the autoencoder's configuration, because the meaning of the pipelines'
    attributes differs between versions of diffusers. Clips are processed one by one to save memory.
    """

    vae: Any
    mean: Tensor
    """Mean of each latent channel: `[1, C, 1, 1, 1]`, float32."""
    std: Tensor
    """Standard deviation of each latent channel: `[1, C, 1, 1, 1]`, float32."""

    @classmethod
    def wrap(cls, vae: Any) -> WanCodec:
        def column(values: list[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float32, device=vae.device).view(1, -1, 1, 1, 1)

        return cls(vae.eval().requires_grad_(False), column(vae.config.latents_mean), column(vae.config.latents_std))

    @torch.no_grad()
    def encode(self, pixels: Tensor) -> Tensor:
        clips = pixels.to(self.vae.device, self.vae.dtype).split(1)
        modes = [self.vae.encode(clip).latent_dist.mode().float() for clip in clips]
        return (torch.cat(modes) - self.mean) / self.std

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        scaled = latents.to(self.mean) * self.std + self.mean
        clips = [self.vae.decode(clip.to(self.vae.dtype), return_dict=False)[0].float() for clip in scaled.split(1)]
        return (torch.cat(clips) / 2 + 0.5).clamp(0, 1)

    def shape(self, size: ClipSize) -> tuple[int, int, int, int]:
        time, space = 2 ** sum(self.vae.temperal_downsample), 2 ** len(self.vae.temperal_downsample)
        return self.vae.config.z_dim, (size.frames - 1) // time + 1, size.height // space, size.width // space


TIME, SPACE = 4, 8
"""Frames per latent frame (after the first) and pixels per latent along each side, for `LinearCodec` and Wan's autoencoder."""


@dataclass(frozen=True)
class LinearCodec:
    """A codec based on the principal components of patches.

    It compresses by the same factors as Wan's autoencoder, but is fast to fit. A patch has P = 3 x 4 x 8 x 8 values. The first
    frame is encoded separately, so its patches contain it four times.
    """

    centre: Tensor
    """Mean patch: `[P]`."""
    basis: Tensor
    """Principal components: `[C, P]`."""
    scale: Tensor
    """Standard deviation of each component: `[C]`."""

    @classmethod
    def fit(cls, clips: Tensor, channels: int = 16, *, patches: int = 20_000, seed: int = 0) -> LinearCodec:
        """Fit a codec to pixels `[B, 3, T, H, W]` in [-1, 1]; compute its components from `patches` random patches."""
        rows = _split_into_patches(clips.float()).flatten(0, -2)
        centre = rows.mean(0)
        patch_indices = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[:patches]
        basis = torch.linalg.svd(rows[patch_indices] - centre, full_matrices=False).Vh[:channels]
        scale = ((rows - centre) @ basis.T).std(0).clamp(min=1e-6)
        return cls(centre, basis, scale)

    def encode(self, pixels: Tensor) -> Tensor:
        components = (_split_into_patches(pixels.to(self.basis)) - self.centre) @ self.basis.T
        return (components / self.scale).permute(0, 4, 1, 2, 3).contiguous()

    def decode(self, latents: Tensor) -> Tensor:
        rows = (latents.to(self.basis).permute(0, 2, 3, 4, 1) * self.scale) @ self.basis + self.centre
        batch, frames, height, width, _ = rows.shape
        clips = rows.view(batch, frames, height, width, 3, TIME, SPACE, SPACE).permute(0, 4, 1, 5, 2, 6, 3, 7)
        pixels = clips.reshape(batch, 3, frames * TIME, height * SPACE, width * SPACE)
        first = pixels[:, :, :TIME].mean(2, keepdim=True)
        return (torch.cat([first, pixels[:, :, TIME:]], dim=2) / 2 + 0.5).clamp(0, 1)

    def shape(self, size: ClipSize) -> tuple[int, int, int, int]:
        return len(self.basis), (size.frames - 1) // TIME + 1, size.height // SPACE, size.width // SPACE

    def save(self, folder: Path) -> None:
        """Write the codec to `folder`, a model's `vae/` folder."""
        folder.mkdir(parents=True, exist_ok=True)
        save_file(
            {name: tensor.contiguous() for name, tensor in vars(self).items()}, folder / "linear_codec.safetensors"
        )
        (folder / "config.json").write_text(json.dumps({"_class_name": type(self).__name__}) + "\n")

    @classmethod
    def load(cls, folder: Path, device: torch.device | str = "cpu") -> LinearCodec:
        """Load the codec; raise CheckpointError if its file is missing or cannot be read."""
        file = folder / "linear_codec.safetensors"
        try:
            return cls(**load_file(file, device=str(device)))
        except (SafetensorError, OSError, TypeError) as error:  # TypeError if the tensors have different names
            raise CheckpointError(f"{file}: cannot be read ({error}); restore the model folder") from error


def _split_into_patches(pixels: Tensor) -> Tensor:
    """Split pixels into patches: `[B, 3, T, H, W]` → `[B, t, h, w, P]`."""
    padded = torch.cat([pixels[:, :, :1].expand(-1, -1, TIME - 1, -1, -1), pixels], dim=2)
    batch, _, frames, height, width = padded.shape
    cut = padded.reshape(batch, 3, frames // TIME, TIME, height // SPACE, SPACE, width // SPACE, SPACE)
    return cut.permute(0, 2, 4, 6, 1, 3, 5, 7).flatten(4)
