"""Formatting of the imported configuration as a TOML file that the user can edit."""

from __future__ import annotations

from typing import Any

import tomlkit
from tomlkit.items import Item, Table

from dsreason.tools.cosmos_rl.convert import Imported

ORDER = (
    "model", "lora", "data", "optim", "train", "dpo", "grpo", "world", "rollout", "reward", "distill", "validation",
    "checkpoint", "monitor",
)  # fmt: skip
"""Order of the sections in the file, as in the recipes."""


def write_toml(imported: Imported, source: str) -> str:
    """Return the content of the file: comments that list the command and the differences, and the sections."""
    document = tomlkit.document()
    document.add(tomlkit.comment(f"Imported from the {imported.tool} file {source}, for {describe_gpus(imported)}."))
    document.add(tomlkit.comment(f"  {write_command(imported, 'this.toml')}"))
    for finding in imported.findings:
        if finding.verdict == "differs":
            document.add(tomlkit.comment(f"{finding.key}: {join_lines(finding.text)}"))
    plain = {key: value for key, value in imported.config.items() if not isinstance(value, dict)}
    document.add(tomlkit.nl())
    for key, value in plain.items():
        document.add(key, make_item(value))
    for key in sorted(imported.config.keys() - plain.keys(), key=ORDER.index):
        document.add(key, make_table(imported.config[key]))
    return tomlkit.dumps(document)


def make_table(values: dict[str, Any]) -> Table:
    """Build a table with plain values first, because a value after a subtable's header would belong to the subtable."""
    made = tomlkit.table()
    for key, value in values.items():
        if not isinstance(value, dict):
            made.add(key, make_item(value))
    for key, value in values.items():
        if isinstance(value, dict):
            made.add(key, make_table(value))
    return made


def make_item(value: Any) -> Item:
    made: Item = tomlkit.item(value)
    return made


def write_command(imported: Imported, file: str) -> str:
    """Return the command that starts the run."""
    return " ".join(["dsreason", imported.trainer, "--config", file, *imported.arguments])


def describe_gpus(imported: Imported) -> str:
    return f"{imported.num_gpus} GPU{'s' * (imported.num_gpus != 1)}"


def join_lines(text: str) -> str:
    return " ".join(text.split())
