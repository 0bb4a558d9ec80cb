"""`dsreason toy`: the command of the toy trainer."""

from __future__ import annotations

from dsreason.config.schema_toy import ToyConfig

from dsreason.cli.job import Trainer

TRAINER = Trainer("toy", ToyConfig, "builtin_sft.toml", help="Rows in their order, with a scaled loss.")
