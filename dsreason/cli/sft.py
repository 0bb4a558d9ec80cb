"""`dsreason sft`: supervised fine-tuning of a vision-language model."""

from __future__ import annotations

from dsreason.cli.job import Trainer
from dsreason.config.schema import SFTConfig

TRAINER = Trainer(
    "sft",
    SFTConfig,
    "builtin_sft.toml",
    help="Fine-tune on questions and answers about videos and images. Without --config: the built-in task.",
)
