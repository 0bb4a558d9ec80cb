"""A small model that learns the built-in clips within a minute on a CPU: `tiny:squares`."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from dsreason.world.data import builtin
from dsreason.world.families.cosmos_predict2_5 import COSMOS_PREDICT2_5
from dsreason.world.latents import LinearCodec
from dsreason.world.types import ClipSize

SIZE = ClipSize(9, 32, 32, 16.0)
NUM_CLIPS = 512
"""That the codec is fitted to."""
NUM_LAYERS = 4


def build_squares(folder: Path) -> None:
    """A Cosmos-Predict2.5 folder with a linear codec in place of the autoencoder, which would take hours to train."""
    COSMOS_PREDICT2_5.build_tiny(folder, num_layers=NUM_LAYERS)
    squares = [builtin.draw_square(0, number)[0] for number in range(NUM_CLIPS)]
    clips = torch.stack([builtin.draw_clip(square, SIZE) for square in squares])
    shutil.rmtree(folder / "vae")
    LinearCodec.fit(clips.float() / 127.5 - 1).save(folder / "vae")
