"""Default adapter, which detects each row's format from its columns.

    {"messages": [{"role": "user", "content": "<image>Which tool is nearest?"}, {"role": "assistant", "content": "The ruler."}],
     "images": ["bench.png"]}
    {"question": "Which way does it move?", "video": "clips/7.mp4", "options": ["left", "right"], "answer": "A"}
    {"prompt": "Wet floor ahead. What now?", "chosen": "Slow down.", "rejected": "Speed up."}
    {"instruction": "Rank these by weight.", "input": "anvil, feather", "output": "feather, anvil"}

docs/data.md describes the formats. `auto:conversation`, `auto:preference`, `auto:prompt`, `auto:instruction` and `auto:question`
read every row in the named format and keep columns of other formats in `sample.meta`. If `data.path` is not set, the adapter
reads the built-in task.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_adapters import builtin, cosmos_reason1_rl
from dsreason.config.schema_data import SourceConfig
from dsreason.data.formats.read import read_row
from dsreason.data.rows import read_rows
from dsreason.data.types import Sample
from dsreason.errors import DataError
from dsreason.files.own_files import is_inside


def rows(data: SourceConfig) -> Sequence[Any]:
    return read_rows(data) if data.path else builtin.rows(data)


def to_sample(row: Any, data: SourceConfig) -> Sample:
    if not data.path:
        return builtin.to_sample(row)
    if isinstance(row, dict) and isinstance(row.get("qa_pairs"), dict):
        return cosmos_reason1_rl.to_sample(row, data)
    if isinstance(row, dict) and isinstance(row.get("conversation"), str) and row["conversation"].endswith(".json"):
        row = read_cosmos3_row(row, Path(data.path).expanduser())
    return read_row(row)


def read_cosmos3_row(row: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Read the conversation file named in a Cosmos 3 row, and insert the row's media into the file's media parts, in order."""
    folder = folder if folder.is_dir() else folder.parent
    file = folder / row["conversation"]
    if not is_inside(file, folder):
        raise DataError(
            f"field 'conversation': {row['conversation']} points outside {folder}; use a path inside the folder"
        )
    try:
        conversation = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"field 'conversation': {file} cannot be read: {error}") from error
    media = row["media"] if isinstance(row.get("media"), list) else [row.get("media")]
    turns = conversation["conversations"]
    parts = [part for turn in turns if isinstance(turn["content"], list) for part in turn["content"]]
    slots = [part for part in parts if part["type"] in ("image", "video")]
    if len(slots) != len(media):
        raise DataError(
            f"{file} has {len(slots)} media parts, but the row's field 'media' has {len(media)} media items"
        )
    for part, item in zip(slots, media, strict=True):
        part[part["type"]] = item
    rest = {column: value for column, value in row.items() if column not in ("media", "conversation")}
    return {**rest, "conversations": turns}


@dataclass(frozen=True)
class OneFormat:
    """Adapter that reads every row in the format `name`."""

    name: str

    def rows(self, data: SourceConfig) -> Sequence[Any]:
        return read_rows(data)

    def to_sample(self, row: Any) -> Sample:
        return read_row(row, self.name)


conversation, preference, prompt = OneFormat("conversation"), OneFormat("preference"), OneFormat("prompt")
instruction, question = OneFormat("instruction"), OneFormat("question")
