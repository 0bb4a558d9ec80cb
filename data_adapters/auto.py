"""Default adapter, which determines the format of each row from the row's columns.

    {"messages": [{"role": "user", "content": "<image>Which tool is nearest?"}, {"role": "assistant", "content": "The ruler."}],
     "images": ["bench.png"]}
    {"question": "Which way does it move?", "video": "clips/7.mp4", "options": ["left", "right"], "answer": "A"}
    {"prompt": "Wet floor ahead. What now?", "chosen": "Slow down.", "rejected": "Speed up."}
    {"instruction": "Rank these by weight.", "input": "anvil, feather", "output": "feather, anvil"}

docs/data.md describes the formats. `auto:conversation`, `auto:preference`, `auto:prompt`, `auto:instruction` and `auto:question`
read every row in the named format, and keep the columns of other formats in `sample.meta`. If `data.path` is not set, the adapter
reads the built-in task.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from data_adapters import builtin, conversation_files, cosmos_reason1_rl
from dsreason.config.schema_data import SourceConfig
from dsreason.data.formats.read import read_row
from dsreason.data.formats.row_formats import names_conversation_file
from dsreason.data.rows import read_rows
from dsreason.data.types import Sample


def rows(data: SourceConfig) -> Sequence[Any]:
    return read_rows(data) if data.path else builtin.rows(data)


def to_sample(row: Any, data: SourceConfig) -> Sample:
    if not data.path:
        return builtin.to_sample(row)
    if isinstance(row, dict) and isinstance(row.get("qa_pairs"), dict):
        return cosmos_reason1_rl.to_sample(row, data)
    if isinstance(row, dict) and names_conversation_file(row):
        return conversation_files.to_sample(row, data)
    return read_row(row)


@dataclass(frozen=True)
class OneFormat:
    """Adapter that reads every row in the same, named format."""

    name: str

    def rows(self, data: SourceConfig) -> Sequence[Any]:
        return read_rows(data)

    def to_sample(self, row: Any) -> Sample:
        return read_row(row, self.name)


conversation, preference, prompt = OneFormat("conversation"), OneFormat("preference"), OneFormat("prompt")
instruction, question = OneFormat("instruction"), OneFormat("question")
