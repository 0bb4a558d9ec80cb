"""`dsreason dpo`: training on preference pairs."""

from __future__ import annotations

from dsreason.cli.job import Trainer
from dsreason.config.schema_dpo import DPOConfig

TRAINER = Trainer(
    "dpo",
    DPOConfig,
    "builtin_dpo.toml",
    help="Train on pairs of a better and a worse answer to the same question. Without --config: the built-in task.",
)
