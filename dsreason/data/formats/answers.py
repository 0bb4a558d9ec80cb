"""The reference answer of a row: a text, a number, a truth value, or a list of accepted answers."""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from dsreason.data.options import find_option_letter
from dsreason.errors import DataError

COLUMNS = ("answer", "answers", "solution", "ground_truth")
"""Columns with the reference answer, in the order of precedence."""


def read_answers(row: Mapping[str, Any]) -> tuple[list[str], str | None]:
    """Return the accepted answers of a row, and the column that has them.

    A solution or ground truth that is an object is not read, because no text can equal it; rewards find it in `sample.meta`.
    """
    model = parse_json_text(row.get("reward_model"))
    ground_truth = model.get("ground_truth") if isinstance(model, dict) else None
    if not is_object(ground_truth) and (answers := to_answers(ground_truth)):
        return answers, "reward_model"
    for column in COLUMNS:
        value = row.get(column)
        if column == "answers":  # an `answer` may be a box or a span, such as "[12.0, 15.0]"
            value = parse_json_text(value)
        if isinstance(value, dict) and isinstance(value.get("text"), list):
            value = value["text"]  # SQuAD
        if is_object(value) and column != "answer":
            continue
        if answers := to_answers(value):
            return answers, column
    return [], None


def parse_json_text(value: Any) -> Any:
    """Parse a list or object that a table stores as text, as JSON or as Python writes it; return other values unchanged."""
    if not isinstance(value, str) or not value.lstrip().startswith(("[", "{")):
        return value
    for parse in (json.loads, ast.literal_eval):
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            parsed = parse(value)
            return parsed if isinstance(parsed, dict | list) else value
    return value


def is_object(value: Any) -> bool:
    items = value if isinstance(value, list) else [value]
    return any(isinstance(item, dict | list) for item in items)


def to_answers(value: Any) -> list[str]:
    """Convert a value to the accepted answers, as texts; [] if it is missing or blank."""
    items = value if isinstance(value, list) else [value]
    return [text for item in items if not is_missing(item) and (text := to_text(item)).strip()]


def is_missing(value: Any) -> bool:
    """Return whether a value stands for no value: None, or a number that is not finite, as tables write it."""
    return value is None or (isinstance(value, float) and not math.isfinite(value))


def to_text(value: Any) -> str:
    """Return an answer as a model would write it: `true` is yes, and 2.0 is 2."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, str | int | float):
        return str(value)
    raise DataError(f"field 'answer' is {value!r:.100}; it must be a string, a number, true, false, or a list of these")


def check_option(value: Any, options: Mapping[str, str] | None) -> None:
    """Raise DataError if a row with options has a number or a single letter as its answer that is none of the options.

    Some data sets count options from 0 and others from 1, so the option that a number means cannot be known.
    """
    if not options or isinstance(value, bool | list | dict) or is_missing(value):
        return
    text = to_text(value).strip()
    if (text.isdigit() or len(text) == 1) and find_option_letter(text, dict(options)) is None:
        raise DataError(
            f"the answer must be one of the options {', '.join(options)}, or the text of an option; got {value!r}"
        )
