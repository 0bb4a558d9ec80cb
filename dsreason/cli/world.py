"""`dsreason world`: training of world models."""

from __future__ import annotations

from dsreason.cli.job import Trainer
from dsreason.world.schema import WorldConfig

TRAINER = Trainer(
    "world",
    WorldConfig,
    "builtin_world.toml",
    help="Train a world model (video diffusion) with rewards for its clips, or on clips. Without --config: the built-in task.",
    package="dsreason.world.training",
)
