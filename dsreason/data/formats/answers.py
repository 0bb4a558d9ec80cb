"""A row's reference answer: a string, a number, true or false, or a list of accepted answers."""

from __future__ import annotations

import ast
import json
import math
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from decimal import Decimal
from typing import Any

import numpy as np

from dsreason.data.options import find_option_letter
from dsreason.errors import DataError

COLUMNS = ("answer", "answers", "solution", "ground_truth")
"""Columns that may contain the reference answer, in order of precedence."""
TEXT_COLUMNS = (
    *("answerKey", "answer_key", "correct_answer", "correct_option", "gold"),
    *("expected_answer", "final_answer", "reference_answer", "multiple_choice_answer"),
)
"""Columns that may contain the reference answer as a string if none of `COLUMNS` has one."""
INDEX_COLUMNS = ("answer_idx", "answer_index", "correct_idx", "correct_index", "gold", "cop", "label")
"""Columns that may contain the index of the right option."""
FULL_DIGITS = 15
"""Number of digits from which a number may be a 32-bit float that a table has converted to 64 bits."""
REMEDY = "write the letter or the text of the right option (whether a number counts from 0 or 1 is unknown)"


def read_answers(row: Mapping[str, Any]) -> tuple[list[str], str | None]:
    """Return a row's accepted answers and the column that contains them; ([], None) if the row has no answer.

    A solution or ground truth that is an object or a list of coordinates is ignored, because no text can equal it; rewards can
    read it from `sample.meta`.
    """
    model = parse_json_text(row.get("reward_model"))
    ground_truth = model.get("ground_truth") if isinstance(model, dict) else None
    if not is_object(ground_truth) and not is_coordinates(ground_truth) and (answers := to_answers(ground_truth)):
        return answers, "reward_model"
    for column in COLUMNS:
        value = row.get(column)
        if column == "answers":  # an `answer` may be a box or a span, such as "[12.0, 15.0]"
            value = parse_json_text(value)
        if isinstance(value, dict) and isinstance(value.get("text"), list):
            value = value["text"]  # SQuAD
        if column == "answer" and is_coordinates(value):
            raise DataError(
                f"field 'answer' is a list of numbers, {value!r:.100}; write a box or a span as a text, such as "
                f"\"{value!r:.50}\", or accepted answers to the column 'answers'"
            )
        if column == "answers" and (votes := read_votes(value)):
            return votes, column
        if (is_object(value) and column != "answer") or (is_coordinates(value) and column != "answers"):
            continue
        if answers := to_answers(value):
            return answers, column
    for column in TEXT_COLUMNS:
        if isinstance(row.get(column), str) and row[column].strip():
            return [row[column]], column
    return [], None


def read_votes(value: Any) -> list[str]:
    """Return the answers from VQA's list of annotations, `[{"answer": …}, …]`, most frequent first; [] for other values."""
    if not isinstance(value, list) or not all(isinstance(item, dict) and "answer" in item for item in value):
        return []
    return [text for text, _ in Counter(to_answers([item["answer"] for item in value])).most_common()]


def parse_json_text(value: Any) -> Any:
    """Parse a list or object that a table stores as JSON text or as Python's `repr`; return other values unchanged."""
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


def is_coordinates(value: Any) -> bool:
    """Return whether a value is a list of numbers that may be a box or a span; two integers count as accepted answers instead."""
    if not isinstance(value, list) or len(value) < 2 or not all(isinstance(item, int | float) for item in value):
        return False
    return len(value) > 2 or any(isinstance(item, float) for item in value)


def to_answers(value: Any) -> list[str]:
    """Convert a value to a list of accepted answers; [] if it is missing or blank."""
    items = value if isinstance(value, list) else [value]
    return [text for item in items if not is_missing(item) and (text := to_text(item)).strip()]


def is_missing(value: Any) -> bool:
    """Return whether a value is missing: None, or a non-finite number, which tables use for missing values."""
    return value is None or (isinstance(value, float) and not math.isfinite(value))


def to_text(value: Any) -> str:
    """Return an answer as a model would write it: `true` → yes, 2.0 → 2, and the 32-bit float nearest to 0.1 → 0.1."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, float) and len(Decimal(str(value)).as_tuple().digits) >= FULL_DIGITS:
        single = np.float32(value)
        return str(single) if float(single) == value else str(value)
    if isinstance(value, str | int | float):
        return str(value)
    raise DataError(f"field 'answer' is {value!r:.100}; it must be a string, a number, true, false, or a list of these")


def check_option(row: Mapping[str, Any], options: Mapping[str, str], labels: Mapping[str, str]) -> None:
    """Raise DataError if the answer to a question with options is a number, true or false, or a letter without an option.

    Some data sets count options from 0 and others from 1, so the meaning of a number is unknown unless the row numbers its
    options. `labels` maps those numbers, and truth values, to option letters or texts.
    """
    accepted, column = read_answers(row)
    index = next((name for name in INDEX_COLUMNS if not is_missing(row.get(name)) and row[name] != ""), None)
    if column is None and index is not None:
        raise DataError(
            f"the question has options, but no answer; {REMEDY}, to the column 'answer', or set data.columns = "
            f'{{answer = "{index}"}} if {index!r} ({row[index]!r:.100}) is one of these'
        )
    if len(accepted) != 1 or isinstance(row.get(column or ""), list):
        return
    text = accepted[0].strip()
    letter = find_option_letter(text, dict(options))
    if text in labels:
        if letter is not None and labels[text] not in (letter, options[letter]):
            raise DataError(
                f"field {column!r}: {text!r} is both the number of an option and the text of another; {REMEDY}"
            )
    elif letter is None and (isinstance(row.get(column or ""), bool) or text.isdigit() or len(text) == 1):
        raise DataError(
            f"the answer must be one of the options {', '.join(options)}, or the text of an option; got "
            f"{row.get(column or '', text)!r:.100}; {REMEDY}"
        )
