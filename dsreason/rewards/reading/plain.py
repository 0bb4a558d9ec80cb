"""Answers as plain text and as JSON, before anything is looked for in them."""

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
"""Of an answer that are read: what a hostile one costs is bounded by this."""
MOST_FAILURES = 64
"""Brackets that begin no JSON, after which no further ones are tried."""
MOST_DEPTH = 16
"""Of lists and objects inside each other; what is deeper is not read."""
MOST_LITERAL = 8_192
"""Characters of a Python literal."""

SIGNS = str.maketrans(
    {**dict.fromkeys("−‐‑‒–—―﹣－", "-"), **dict.fromkeys("“”„″", '"'), **dict.fromkeys("‘’′", "'")}
    | {"→": "->", "⇒": "->", "×": "x", "【": "[", "】": "]", "、": ",", "。": ".", "〜": "~", "µ": "μ"}
)
SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")


def answer_of(completion: str) -> str:
    """The final answer of a completion, see `split_response`, as `plain` text."""
    return plain(split_response(completion).answer)


def plain(text: str) -> str:
    """The text with ASCII digits, signs and brackets: `１２：３０` → `12:30`, `−3½` → `-3 1/2`, `10²` → `10^2`."""
    text = text[:MOST_CHARACTERS]
    if text.isascii():
        return text
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺]+", lambda found: "^" + found[0].translate(SUPERSCRIPTS), text)
    text = re.sub("[¼-¾⅐-⅞]", lambda found: " " + unicodedata.normalize("NFKC", found[0]), text)
    text = unicodedata.normalize("NFKC", text.translate(SIGNS)).translate(SIGNS).replace("\u2044", "/")
    return "".join(
        str(unicodedata.decimal(character)) if not character.isascii() and character.isdecimal() else character
        for character in text
    )


def json_values(text: str) -> list[Any]:
    """All JSON objects and lists in the text, in their order, outer ones alone; what is no JSON is passed over.

    NaN and infinity are no JSON. Where there is nothing else, a Python literal counts: `{'x': 1}`.
    """
    objects: list[Any] = []
    place = failures = 0
    while failures < MOST_FAILURES and (begin := re.compile(r"[\[{]").search(text, place)):
        try:
            value, place = DECODER.raw_decode(text, begin.start())
        except (ValueError, RecursionError):
            place, failures = begin.end(), failures + 1
        else:
            objects.append(value)
    return [value for value in objects or literal_value(text) if not is_deep(value)]


def literal_value(text: str) -> list[Any]:
    """Return what stands between the first and the last bracket, where Python reads it as a dict or list."""
    begin = min((place for place in (text.find("["), text.find("{")) if place >= 0), default=0)
    literal = text[begin : max(text.rfind("]"), text.rfind("}")) + 1]
    if not literal or len(literal) > MOST_LITERAL:
        return []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd escapes
            value = ast.literal_eval(literal)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return []
    return [value] if isinstance(value, dict | list) else []


def is_deep(value: Any) -> bool:
    """Return whether lists and objects are nested deeper than anybody's answer, and than recursive functions may go."""
    level = [value]
    for _ in range(MOST_DEPTH):
        inside = [
            item for container in level for item in (container.values() if isinstance(container, dict) else container)
        ]
        level = [item for item in inside if isinstance(item, dict | list)]
    return bool(level)


def no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


DECODER = json.JSONDecoder(parse_constant=no_constant)


def key_name(key: Any) -> str:
    """`Start_Time`, `start time` and `startTime` are one key."""
    return re.sub(r"[\W_]", "", str(key)[:64]).lower()


def finite(value: Any) -> float | None:
    """A JSON number as a float; None for anything else, and for what no float can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def says_none(text: str) -> bool:
    """Return whether the whole answer is that there is nothing."""
    return re.fullmatch(r"\W{0,9}(none|nothing|no|n/a|empty|null)\W{0,9}", text.lower()) is not None
