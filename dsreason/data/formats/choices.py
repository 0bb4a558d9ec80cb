"""A question's options: a list, an object, ARC's labels and texts, or the columns A, B, C …"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from string import ascii_uppercase
from typing import Any

from dsreason.data.formats.answers import parse_json_text, to_text
from dsreason.data.messages import join_text
from dsreason.data.options import options_field, parse_listed_options
from dsreason.data.types import Message
from dsreason.errors import DataError
from dsreason.text import normalize_option

COLUMNS = ("options", "choices")
QUESTION_COLUMNS = (*COLUMNS, "candidates")
COLUMN_NAMES = (
    re.compile("([A-Z])"),
    re.compile(r"(?:option|choice|opt|op)[ _]?([a-z]|\d{1,2})", re.IGNORECASE),
    re.compile(r"a(\d)"),  # NExT-QA
    re.compile("([a-z])"),
)
"""Patterns for columns that contain one option each, such as `A`, `option_a`, `opa` (MedMCQA) or `option1`."""
BARE_LETTER = COLUMN_NAMES[-1]
TRUTH = {True: ("true", "yes"), False: ("false", "no")}
LETTER = re.compile(r"\s*(?:\(([A-Z])\)|([A-Z])[.):])\s+")
"""Letter at the start of an option, such as `A. left` or `(A) left`."""


def read_options(row: Mapping[str, Any]) -> tuple[dict[str, str] | None, set[str]]:
    """Return the options by letter or number (None if the row has none), and the columns that contain them."""
    column = next((column for column in QUESTION_COLUMNS if row.get(column) is not None), None)
    if column is None:
        return read_option_columns(row)
    value = parse_json_text(row[column])
    if isinstance(value, dict) and value.keys() == {"label", "text"}:  # ARC
        value = dict(zip(value["label"], value["text"], strict=True))
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        value = {str(item.get("label")): item.get("text") for item in value}
    if isinstance(value, list):
        value = {ascii_uppercase[i]: strip_letter(text, ascii_uppercase[i]) for i, text in enumerate(value[:26])}
    return options_field(value, column), {column}


def read_option_columns(row: Mapping[str, Any]) -> tuple[dict[str, str] | None, set[str]]:
    """Return the options that are in separate columns and the names of these columns; (None, set()) if there are none."""
    for pattern in COLUMN_NAMES:
        columns = {match[1].upper(): column for column in row if (match := pattern.fullmatch(str(column)))}
        ordered = sorted(columns.items(), key=lambda item: (len(item[0]), item[0]))
        options = {label: str(row[column]) for label, column in ordered if is_option(row[column])}
        is_answered = pattern is not BARE_LETTER or str(row.get("answer")).strip().upper() in options
        if list(options)[:2] in (["A", "B"], ["0", "1"], ["1", "2"]) and is_answered:
            return options, set(columns.values())
    return None, set()


def is_option(value: Any) -> bool:
    return isinstance(value, int | float) if not isinstance(value, str) else bool(value.strip())


def assign_option_letters(options: dict[str, str] | None, answer: Any) -> tuple[dict[str, str] | None, dict[str, str]]:
    """Return the options by letter, and a map from numeric or true/false answers to the option's letter or text."""
    labels: dict[str, str] = {}
    if options and all(label.isdigit() for label in options):
        labels = dict(zip(options, ascii_uppercase, strict=False))
        options = dict(zip(ascii_uppercase, options.values(), strict=False))
    if options and isinstance(answer, bool):
        texts = [text for text in options.values() if normalize_option(text) in TRUTH[answer]]
        labels |= {to_text(answer): text for text in texts[:1]}
    return options, labels


def strip_letter(text: Any, letter: str) -> Any:
    """Remove the letter at the start of an option if it matches the option's position."""
    match = LETTER.match(text) if isinstance(text, str) else None
    return text[match.end() :] if match and letter in match.groups() else text


def has_listed_options(options: Mapping[str, str] | None, question: str) -> bool:
    """Return whether the question already lists the options."""
    listed = parse_listed_options(question) if options else None
    if not options or not listed:
        return False
    return [normalize_option(text) for text in listed.values()] == [normalize_option(text) for text in options.values()]


def read_options_of_prompt(
    row: Mapping[str, Any], messages: Sequence[Message]
) -> tuple[dict[str, str] | None, set[str]]:
    """Return the options and their columns for a row whose question is in its messages or prompt.

    Raises:
        DataError: the question does not contain the options.
    """
    if not any(row.get(column) is not None for column in COLUMNS):
        return None, set()
    options, columns = read_options(row)
    questions = [join_text(message) for message in messages if message["role"] == "user"]
    for text in (options or {}).values():
        if not questions or text not in questions[-1]:
            raise DataError(
                f"the column {min(columns)!r} has the option {text!r:.100}, but the question does not; write the options into "
                "the question, or use the columns question, options and answer"
            )
    return options, columns
