"""Validation of rows read from JSON. Errors in unusable rows are collected, not raised."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dsreason.errors import DataError
from dsreason.problems import MOST_LEVELS, is_nested_deeper
from dsreason.world.types import WorldRow


@dataclass(frozen=True)
class CheckedRows:
    """The usable rows of a data set, and an error message for each unusable one."""

    rows: list[WorldRow] = field(default_factory=list)
    bad: list[str] = field(default_factory=list)

    def add(self, row_id: str, fields: Any, clip: str | None) -> None:
        """Add a row from a JSON object with a `prompt`; rewards see its other fields as `meta`."""
        try:
            self.rows.append(to_row(row_id, fields, clip))
        except DataError as error:
            self.bad.append(str(error))


def to_row(row_id: str, fields: Any, clip: str | None) -> WorldRow:
    """Build a row. Raise DataError if the prompt is missing, a string has a surrogate, or the fields are nested too deeply."""
    if not isinstance(fields, Mapping):
        raise DataError(f"{row_id}: must be a JSON object with a prompt; got {fields!r:.80}")
    prompt = fields.get("prompt")
    if not isinstance(prompt, str) or not prompt.strip():
        names = ", ".join(map(str, fields)) or "none"
        raise DataError(f'{row_id}: "prompt" must be a non-empty string; the fields of the row: {names}')
    for name, text in {"name": row_id, "prompt": prompt, "video": clip or ""}.items():
        if (place := find_surrogate(text)) is not None:
            raise DataError(
                f"{row_id!r}: its {name} contains an unpaired surrogate ({text[place]!r}) at index {place}; correct it"
            )
    if is_nested_deeper(fields):
        raise DataError(
            f"{row_id}: its fields are nested more than {MOST_LEVELS} levels deep; remove those that no reward needs"
        )
    return WorldRow(row_id, prompt.strip(), clip, {key: value for key, value in fields.items() if key != "prompt"})


def find_surrogate(text: str) -> int | None:
    """Return the index of the first surrogate, which UTF-8 cannot encode; None if the text has none.

    Surrogates come from escapes in JSON, such as `\\ud800`, and from bytes of file names that are not UTF-8.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None
