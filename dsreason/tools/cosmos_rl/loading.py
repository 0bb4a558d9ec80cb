"""Run configurations of ours, and cosmos-rl's in their place."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from dsreason.config.load import load_config, read_config, read_values
from dsreason.errors import ConfigError
from dsreason.tools.cosmos_rl.convert import Imported, convert, is_cosmos_rl

S = TypeVar("S", bound=BaseModel)


def find_import(path: Path | None) -> Imported | None:
    """Return what becomes of a file of cosmos-rl; None for a configuration of ours.

    Raises:
        ConfigError: it cannot be read, or has keys that cannot be left out.
    """
    if path is None:
        return None
    document: dict[str, Any] = read_config(path)
    if not is_cosmos_rl(document):
        return None
    imported = convert(document)
    imported.check(str(path))
    return imported


def load_run(
    trainer: str, schema: type[S], path: Path | None, overrides: Sequence[str], *, default_recipe: str
) -> tuple[S, Imported | None]:
    """The configuration as `load_config` has it, from a file of ours or of cosmos-rl.

    Raises:
        ConfigError: as `load_config`; also where a file of cosmos-rl is for another command.
    """
    imported = find_import(path)
    if imported is None:
        return load_config(schema, path, overrides, default_recipe=default_recipe), None
    if imported.trainer != trainer:
        raise ConfigError(
            f"{path}: is a configuration of cosmos-rl for `dsreason {imported.trainer}`, and this is `dsreason {trainer}`; start "
            "that one"
        )
    return read_values(schema, imported.config, f"{path} (of cosmos-rl)", overrides), imported
