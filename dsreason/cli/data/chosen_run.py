"""Functions that determine the trainer and the configuration that `data`, `plan` and `doctor` inspect."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from dsreason.cli.job import Trainer, find_trainers
from dsreason.config.load import read_config
from dsreason.config.schema import RunConfig
from dsreason.errors import ConfigError
from dsreason.screen import print_message
from dsreason.tools.cosmos_rl.loading import find_import
from dsreason.tools.cosmos_rl.loading import load_run as load_any

R = TypeVar("R", bound=RunConfig)


def choose_trainer(config: Path | None, overrides: list[str] | None, command: str | None) -> Trainer[Any]:
    """Return the trainer for `command`; if it is None, the trainer whose schema fits the configuration best, or SFT.

    Raises:
        ConfigError: `command` is not a training command.
    """
    trainer_of_name = find_trainers()
    if command is not None:
        if command not in trainer_of_name:
            raise ConfigError(f"--for must be one of {', '.join(trainer_of_name)}; got {command!r}")
        return trainer_of_name[command]
    if imported := find_import(config):
        return trainer_of_name[imported.trainer]
    document = {} if config is None else read_config(config)
    sections = {*document, *(text.partition(".")[0] for text in overrides or ())}
    chosen = max(trainer_of_name.values(), key=lambda trainer: len(trainer.own_sections & sections))
    return chosen if chosen.own_sections & sections else trainer_of_name["sft"]


def check_has_rows(trainer: Trainer[Any]) -> Trainer[Any]:
    """Return the trainer unchanged; raise ConfigError if its rows are clips instead of questions and answers."""
    if not issubclass(trainer.schema, RunConfig):
        raise ConfigError(
            f"the configuration is for `dsreason {trainer.name}`, whose rows are clips and prompts; "
            f"check them with `dsreason {trainer.name} --dry-run`"
        )
    return trainer


def load_run(trainer: Trainer[R], config: Path | None, overrides: list[str] | None) -> R:
    """Load the configuration, or the trainer's shipped recipe if `config` is None."""
    if config is None:
        print_message(f"no --config: using the built-in recipe {trainer.recipe}", err=True)
    return load_any(trainer.name, trainer.schema, config, overrides or (), default_recipe=trainer.recipe)[0]
