"""Types shared by the modules of world-model training."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class ClipSize:
    """Number of frames, height and width in pixels, and frame rate of a clip. Example: `ClipSize(93, 704, 1280, 16.0)`."""

    frames: int
    height: int
    width: int
    fps: float


@dataclass(frozen=True)
class WorldRow:
    """A row of a data set."""

    id: str
    """Origin of the row, for messages: file and line, or shard and member."""
    prompt: str
    clip: str | None = None
    """Video that `WorldDataset.read_clip` reads; None if the row has only a prompt."""
    meta: dict[str, Any] = field(default_factory=dict)
    """Other fields of the row, for use by rewards."""


@dataclass(frozen=True)
class Conditioning:
    """Latent frames that are given rather than sampled."""

    latents: Tensor
    """`[B, C, T, h, w]`, float32; zero where `mask` is zero."""
    mask: Tensor
    """`[B, 1, T, 1, 1]`, float32: 1 for given latent frames, 0 for sampled frames."""
