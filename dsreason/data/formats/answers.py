"""The reference answer of a row: a text, a number, a truth value, or a list of accepted answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dsreason.data.options import find_option_letter
from dsreason.errors import DataError

COLUMNS = ("answer", "answers", "solution", "ground_truth")
"""Columns with the reference answer, in the order of precedence."""


def read_answers(row: Mapping[str, Any]) -> tuple[list[str], str | None]:
    """Return the accepted answers of a row, and the column that has them.

    A solution or ground truth that is an object is not read, because no text can equal it; rewards find it in `sample.meta`.
    """
    model = row.get("reward_model")
    ground_truth = model.get("ground_truth") if isinstance(model, dict) else None
    if not is_object(ground_truth) and (answers := to_answers(ground_truth)):
        return answers, "reward_model"
    for column in COLUMNS:
        value = row.get(column)
        if is_object(value) and column != "answer":
            continue
        if answers := to_answers(value):
            return answers, column
    return [], None


def is_object(value: Any) -> bool:
    items = value if isinstance(value, list) else [value]
    return any(isinstance(item, dict | list) for item in items)


def to_answers(value: Any) -> list[str]:
    """Convert a value to the accepted answers, as texts; [] if it is missing or blank."""
    items = value if isinstance(value, list) else [value]
    return [text for item in items if item is not None and (text := to_text(item)).strip()]


def to_text(value: Any) -> str:
    """Return an answer as a model would write it: `true` is yes, and 2.0 is 2."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, str | int | float):
        return str(value)
    raise DataError(f"field 'answer' is {value!r:.100}; it must be a string, a number, true, false, or a list of these")


def check_number_of_option(value: Any, options: Mapping[str, str] | None) -> None:
    """Raise DataError if a row with options has a number as its answer that is not the text of an option.

    Some data sets count options from 0 and others from 1, so the option that is meant cannot be known.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if options and is_number and find_option_letter(to_text(value), dict(options)) is None:
        raise DataError(
            f"field 'answer' is {value}, but must be one of the letters {', '.join(options)} or the text of an option"
        )
