"""`dsreason grpo`: reinforcement learning from rewards."""

from __future__ import annotations

from dsreason.cli.job import Trainer
from dsreason.config.schema_grpo import GRPOConfig

TRAINER = Trainer(
    "grpo",
    GRPOConfig,
    "builtin_grpo.toml",
    help="Train with rewards for the model's own answers to questions about videos and images.",
)
