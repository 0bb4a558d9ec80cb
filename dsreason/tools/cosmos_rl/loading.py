"""Functions that load the configuration of a run from a dsreason file or one that can be imported."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from dsreason.config.load import load_config, read_config, read_values
from dsreason.errors import ConfigError
from dsreason.tools.cosmos_rl.convert import Imported, convert, is_importable

S = TypeVar("S", bound=BaseModel)


def find_import(path: Path | None) -> Imported | None:
    """Convert a file for cosmos-rl or cosmos-framework; return None for a dsreason configuration or without a path.

    Raises:
        ConfigError: the file cannot be read, or has keys that can be neither used nor left out.
    """
    if path is None:
        return None
    document: dict[str, Any] = read_config(path)
    if not is_importable(document):
        return None
    imported = convert(document)
    imported.check(str(path))
    return imported


def load_run(
    trainer: str, schema: type[S], path: Path | None, overrides: Sequence[str], *, default_recipe: str
) -> tuple[S, Imported | None]:
    """Load a configuration as `load_config` does, from a dsreason file or one that can be imported.

    Returns:
        The configuration, and the result of the conversion (None for a dsreason file).

    Raises:
        ConfigError: as for `load_config`, or the imported file is for another command.
    """
    imported = find_import(path)
    if imported is None:
        return load_config(schema, path, overrides, default_recipe=default_recipe), None
    if imported.trainer != trainer:
        raise ConfigError(
            f"{path}: is a {imported.tool} configuration for `dsreason {imported.trainer}`, but this is `dsreason {trainer}`; "
            f"run `dsreason {imported.trainer}`"
        )
    return read_values(schema, imported.config, f"{path} ({imported.tool})", overrides), imported
