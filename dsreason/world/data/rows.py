"""The rows of a data set with those that cannot be used, and rows made from JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dsreason.errors import DataError
from dsreason.problems import MOST_LEVELS, is_nested_deeper
from dsreason.world.types import WorldRow


@dataclass(frozen=True)
class CheckedRows:
    """The rows that can be used, and a text for each that cannot."""

    rows: list[WorldRow] = field(default_factory=list)
    bad: list[str] = field(default_factory=list)

    def add(self, row_id: str, fields: Any, clip: str | None) -> None:
        """Add the row of a JSON object with a `prompt`; its other fields are what rewards see as `meta`."""
        try:
            self.rows.append(to_row(row_id, fields, clip))
        except DataError as error:
            self.bad.append(str(error))


def to_row(row_id: str, fields: Any, clip: str | None) -> WorldRow:
    """Raise DataError if the prompt is missing, or no file could hold it."""
    if not isinstance(fields, Mapping):
        raise DataError(f"{row_id}: must be a JSON object with a prompt, is {fields!r:.80}")
    prompt = fields.get("prompt")
    if not isinstance(prompt, str) or not prompt.strip():
        raise DataError(f'{row_id}: has no text under "prompt"; its fields are {", ".join(map(str, fields)) or "none"}')
    for name, text in {"name": row_id, "prompt": prompt, "video": clip or ""}.items():
        if (place := find_surrogate(text)) is not None:
            raise DataError(f"{row_id!r}: its {name} has half of a character ({text[place]!r}) at {place}; correct it")
    if is_nested_deeper(fields):
        raise DataError(
            f"{row_id}: its fields are nested deeper than {MOST_LEVELS} levels; leave out what no reward needs"
        )
    return WorldRow(row_id, prompt.strip(), clip, {key: value for key, value in fields.items() if key != "prompt"})


def find_surrogate(text: str) -> int | None:
    """Return the index of what UTF-8 cannot hold: half of a pair as JSON's `\\ud800`, a byte of a name that is not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None
