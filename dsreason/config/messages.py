"""Functions that reword pydantic's validation errors for users: messages state the value, the bound, and what to do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel
from pydantic_core import ErrorDetails, PydanticUndefined

from dsreason.config.keys import KeyPath, find_field_at
from dsreason.problems import find_nearest

EXPECTED = {
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "a string",
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "a section",
    "model_type": "a section",
    "model_attributes_type": "a section",
}
"""Pydantic error type → description of the expected value."""


def translate_errors(
    schema: type[BaseModel], errors: Iterable[ErrorDetails], document: dict[str, Any]
) -> list[tuple[KeyPath, str]]:
    """Return one (key, message) pair per key: `("optim", "lr"), "must be greater than 0; got 0"`."""
    by_path: dict[KeyPath, list[ErrorDetails]] = {}
    for error in errors:
        by_path.setdefault(find_document_path(document, error["loc"]), []).append(error)
    # If one member of a union matches down to a nested key, the type errors of the other members would only confuse users.
    shallow = {path[:depth] for path in by_path for depth in range(len(path))}
    return [
        (path, _format_errors(schema, path, path_errors))
        for path, path_errors in by_path.items()
        if path not in shallow or any(error["type"] not in EXPECTED for error in path_errors)
    ]


def find_document_path(document: Any, loc: tuple[str | int, ...]) -> KeyPath:
    """Convert pydantic's `loc` to a path in the document by removing the names of union members, which are not keys."""
    path: list[str | int] = []
    for part in loc:
        in_list = isinstance(document, list) and isinstance(part, int) and part < len(document)
        if in_list or (isinstance(document, dict) and part in document):
            path.append(part)
            document = document[part]
    return tuple(path)


def _format_errors(schema: type[BaseModel], path: KeyPath, errors: list[ErrorDetails]) -> str:
    field = find_field_at(schema, path)
    default = field.default if field else PydanticUndefined
    types = " or ".join(dict.fromkeys(EXPECTED[error["type"]] for error in errors if error["type"] in EXPECTED))
    other_problems = dict.fromkeys(_format_error(error, default) for error in errors if error["type"] not in EXPECTED)
    if other_problems:
        has_advice = any(error["type"] == "value_error" for error in errors)  # messages of value errors contain advice
        return "; ".join(other_problems) + (f" ({types} is also allowed)" if types and not has_advice else "")
    plain = isinstance(default, (bool, int, float, str)) and default != ""
    return f"must be {types}; got {errors[0]['input']!r}" + (f" (the default is {default!r})" if plain else "")


def _format_error(error: ErrorDetails, default: Any) -> str:
    value, context = repr(error["input"]), error.get("ctx", {})
    match error["type"]:
        case "greater_than":
            return f"must be greater than {context['gt']:g}; got {value}"
        case "greater_than_equal":
            return f"must be at least {context['ge']:g}; got {value}"
        case "less_than":
            return f"must be less than {context['lt']:g}; got {value}"
        case "less_than_equal":
            return f"must be at most {context['le']:g}; got {value}"
        case "literal_error":
            choices = str(context["expected"]).replace(" or ", ", ").replace("'", "").split(", ")
            suggestion = find_nearest(str(error["input"]), choices)
            advice = f"; did you mean {suggestion}?" if suggestion else ""
            return f"must be one of {', '.join(choices)}; got {value}{advice}"
        case "string_pattern_mismatch":
            return f"must have the form of {default!r}; got {value}"
        case "missing":
            name = error["loc"][-1]
            return (
                f"{value} has no {name!r}; add it"
                if isinstance(name, str)
                else f"{value} is incomplete; set all of its values"
            )
        case "too_short" | "string_too_short":
            return f"{value} is too short: the minimum length is {context['min_length']}; extend it, or remove the key"
        case "too_long":
            return (
                f"has {context['actual_length']} entries, but at most {context['max_length']} are allowed; remove some"
            )
        case "value_error":
            return str(context["error"])
    return f"{value}: {error['msg'][0].lower()}{error['msg'][1:]}"
