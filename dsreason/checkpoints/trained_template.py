"""The chat-template arguments with which a model was trained, which exports record."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict

from dsreason.config.schema_data import TemplateArguments
from dsreason.errors import CheckpointError
from dsreason.files.disk import read_small
from dsreason.problems import describe_first_problem

TEMPLATE_FILE = "dsreason_template.json"
"""Name of the file in an export; an export of a run without arguments has no such file."""


class RecordedArguments(TypedDict):
    """Content of the file."""

    arguments: TemplateArguments


def write_template_arguments(folder: Path, arguments: Mapping[str, Any]) -> None:
    document = {"arguments": dict(arguments)}
    (folder / TEMPLATE_FILE).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def read_template_arguments(folder: Path) -> dict[str, Any]:
    """Return the arguments that an export records; {} if it records none, or is not an export.

    Raises:
        CheckpointError: the export's file is invalid.
    """
    file = folder / TEMPLATE_FILE
    if not file.is_file():
        return {}
    try:
        return TypeAdapter(RecordedArguments).validate_json(read_small(file))["arguments"]
    except (OSError, ValueError) as cause:
        problem = describe_first_problem(cause) if isinstance(cause, ValidationError) else cause
        raise CheckpointError(
            f"{file}: is not valid ({problem}); export the model again, or remove the file"
        ) from cause


def format_arguments(arguments: Mapping[str, Any]) -> str:
    """Format arguments as in TOML: `enable_thinking = false, effort = "low"`."""
    return ", ".join(f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in arguments.items())
