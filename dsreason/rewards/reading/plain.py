"""Conversion of answers to plain text and to JSON values, which the other parsers then search."""

from __future__ import annotations

import ast
import json
import math
import re
import unicodedata
import warnings
from typing import Any

from dsreason.text import split_response

MOST_CHARACTERS = 65_536
"""Number of characters of an answer that are parsed; this bounds the cost of a hostile answer."""
MOST_FAILURES = 64
"""Number of opening brackets without valid JSON after which the search ends."""
MOST_DEPTH = 16
"""Maximum nesting depth of lists and objects; values nested more deeply are ignored."""
MOST_LITERAL = 8_192
"""Maximum number of characters in a Python literal."""

SIGNS = str.maketrans(
    {**dict.fromkeys("−‐‑‒–—―﹣－", "-"), **dict.fromkeys("“”„″", '"'), **dict.fromkeys("‘’′", "'")}
    | {"→": "->", "⇒": "->", "×": "x", "【": "[", "】": "]", "、": ",", "。": ".", "〜": "~", "µ": "μ"}
)
SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")


def get_answer(completion: str) -> str:
    """Return a completion's final answer (see `split_response`), converted by `to_plain`."""
    return to_plain(split_response(completion).answer)


def to_plain(text: str) -> str:
    """Convert digits, signs and brackets to ASCII: `１２：３０` → `12:30`, `−3½` → `-3 1/2`, `10²` → `10^2`."""
    text = text[:MOST_CHARACTERS]
    if text.isascii():
        return text
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺]+", lambda match: "^" + match[0].translate(SUPERSCRIPTS), text)
    text = re.sub("[¼-¾⅐-⅞]", lambda match: " " + unicodedata.normalize("NFKC", match[0]), text)
    text = unicodedata.normalize("NFKC", text.translate(SIGNS)).translate(SIGNS).replace("\u2044", "/")
    return "".join(
        str(unicodedata.decimal(character)) if not character.isascii() and character.isdecimal() else character
        for character in text
    )


def find_json_values(text: str) -> list[Any]:
    """Return all outermost JSON objects and lists in the text, in order; skip text that is not JSON.

    NaN and infinity are not JSON. If the text has no JSON, a Python literal such as `{'x': 1}` is accepted.
    """
    objects: list[Any] = []
    position = failures = 0
    while failures < MOST_FAILURES and (begin := re.compile(r"[\[{]").search(text, position)):
        try:
            value, position = DECODER.raw_decode(text, begin.start())
        except (ValueError, RecursionError):
            position, failures = begin.end(), failures + 1
        else:
            objects.append(value)
    return [value for value in objects or parse_literal(text) if not is_deep(value)]


def parse_literal(text: str) -> list[Any]:
    """Parse the text from the first to the last bracket as a Python literal; return [value] if it is a dict or list, else []."""
    begin = min((position for position in (text.find("["), text.find("{")) if position >= 0), default=0)
    literal = text[begin : max(text.rfind("]"), text.rfind("}")) + 1]
    if not literal or len(literal) > MOST_LITERAL:
        return []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escape sequences cause warnings
            value = ast.literal_eval(literal)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return []
    return [value] if isinstance(value, dict | list) else []


def is_deep(value: Any) -> bool:
    """Return whether lists and objects are nested more deeply than an answer should be and recursive functions can handle."""
    level = [value]
    for _ in range(MOST_DEPTH):
        inside = [
            item for container in level for item in (container.values() if isinstance(container, dict) else container)
        ]
        level = [item for item in inside if isinstance(item, dict | list)]
    return bool(level)


def reject_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


DECODER = json.JSONDecoder(parse_constant=reject_constant)


def normalize_key(key: Any) -> str:
    """Normalise a key, so that `Start_Time`, `start time` and `startTime` are equal."""
    return re.sub(r"[\W_]", "", str(key)[:64]).lower()


def to_finite_float(value: Any) -> float | None:
    """Convert a JSON number to a float; return None if it is not a number or does not fit into a float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def is_none_answer(text: str) -> bool:
    """Return whether the full answer only states that nothing exists: `none`, `n/a`, `empty` …"""
    return re.fullmatch(r"\W{0,9}(none|nothing|no|n/a|empty|null)\W{0,9}", text.lower()) is not None
