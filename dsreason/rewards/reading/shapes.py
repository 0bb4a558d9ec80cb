"""Parser of boxes and points in texts: JSON as Qwen-VL writes it, tags, bracketed and named numbers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from dsreason.rewards.reading.plain import finite, json_values, key_name, says_none

Order = Literal["xyxy", "xywh", "cxcywh", "yxyx"]
"""Meaning of a box's four numbers: two corners; a corner (or `c`, the centre) with width and height; or Gemini's order."""

NUMBER = r"[+-]?[0-9]{1,12}(?:\.[0-9]{0,12})?(?:e[+-]?[0-9]{1,3})?"
METRES = {"m": 1.0, "meter": 1.0, "meters": 1.0, "metre": 1.0, "metres": 1.0, "cm": 0.01, "mm": 0.001, "km": 1000.0}
METRES |= {"ft": 0.3048, "feet": 0.3048, "in": 0.0254}
UNIT = rf"(?:{'|'.join(sorted(METRES, key=len, reverse=True))}|px|pixels?|%)(?![a-z])"
ITEM = rf"(?:[a-z]{{1,2}}[0-9]?\s?[=:]\s?)?(?:{NUMBER})(?:\s?{UNIT})?"
"""Pattern of a number with its name and unit: `x=1.5`, `3 m`."""
BETWEEN = r"\s{0,3}(?:[,;]\s{0,3}|\s)"
GROUP = re.compile(rf"[\[(]\s{{0,9}}({ITEM}(?:{BETWEEN}{ITEM}){{1,7}})\s{{0,9}},?\s{{0,9}}[\])]")
ROW = re.compile(rf"\W{{0,9}}?({ITEM}(?:{BETWEEN}{ITEM}){{1,7}})\W{{0,9}}")
VALUE = re.compile(rf"({NUMBER})\s?({UNIT})?(?![\w.=:])")
NAMED = re.compile(
    rf"(?<![a-z0-9_])(x_?[0-9]?|y_?[0-9]?|[xy]_?m(?:in|ax)|left|top|right|bottom)[\"']?\s?[=:]\s?[\"']?({NUMBER})"
)
CORNERS = {
    "xmin": "x1",
    "ymin": "y1",
    "xmax": "x2",
    "ymax": "y2",
    "left": "x1",
    "top": "y1",
    "right": "x2",
    "bottom": "y2",
}
LABEL_KEYS = ("label", "class", "classname", "category", "name", "object", "type", "ref")
BOX_KEYS = {"bbox", "bbox2d", "box", "box2d", "boundingbox", "boundingbox2d", "boxes", "bboxes", "rect"}
LARGEST = 1e12
"""Bound of coordinates; larger ones are never meant, and the sum of their squares overflows."""
MOST_STRING = 4_096


@dataclass(frozen=True)
class Shape:
    """A point (x, y, …) or a box (x1, y1, x2, y2). Example: `Shape((10.0, 20.0, 30.0, 40.0), "cup")`."""

    numbers: tuple[float, ...]
    label: str = ""

    def scaled(self, x: float, y: float) -> Shape:
        """Multiply all x and all y by one factor each."""
        return replace(self, numbers=tuple(value * (y if index % 2 else x) for index, value in enumerate(self.numbers)))


@dataclass(frozen=True)
class PointForm:
    """Expected form of points: possible counts of numbers, and the length unit, in metres, of the result."""

    sizes: Sequence[int] = (2,)
    metres: float = 1.0


Shapes = list[Shape] | None
"""Shapes of a text: [] if it says that none exist; None if it could not be parsed."""


def boxes(text: str, order: Order = "xyxy") -> Shapes:
    """Return all boxes of a `plain` text as x1, y1, x2, y2."""
    shapes = read(text, json_boxes, text_boxes)
    return [replace(box, numbers=corners(box.numbers, order)) for box in shapes] if shapes else shapes


PLAIN_POINT = PointForm()


def points(text: str, form: PointForm = PLAIN_POINT) -> Shapes:
    """Return all points of a `plain` text in order."""
    return read(text, lambda value: json_points(value, form), lambda lower: text_points(lower, form))


def read(text: str, in_json: Callable[[Any], Iterator[Shape]], in_text: Callable[[str], list[Shape]]) -> Shapes:
    values = json_values(text)
    shapes = [shape for value in values for shape in in_json(value)] or in_text(text.lower())
    shapes = [shape for shape in shapes if all(abs(value) < LARGEST for value in shape.numbers)]
    if not shapes and (says_none(text) or (values and all(value in ([], {}) for value in map(unwrapped, values)))):
        return []
    return shapes or None


def unwrapped(value: Any) -> Any:
    """Return the value of an object with one key: `{"boxes": []}` → `[]`; other values unchanged."""
    return next(iter(value.values())) if isinstance(value, dict) and len(value) == 1 else value


def corners(numbers: tuple[float, ...], order: Order) -> tuple[float, float, float, float]:
    a, b, c, d = numbers
    if order == "xywh":
        return a, b, a + c, b + d
    if order == "cxcywh":
        return a - c / 2, b - d / 2, a + c / 2, b + d / 2
    return (b, a, d, c) if order == "yxyx" else (a, b, c, d)


# ---------------------------------------------------------------- JSON


def json_boxes(value: Any, label: str = "") -> Iterator[Shape]:
    if isinstance(value, dict):
        label = label_of(value) or label
        keys = {key_name(key): item for key, item in value.items()}
        named_numbers = {
            CORNERS.get(key, key): number for key, item in keys.items() if (number := finite(item)) is not None
        }
        if all(key in named_numbers for key in ("x1", "y1", "x2", "y2")):
            yield Shape((named_numbers["x1"], named_numbers["y1"], named_numbers["x2"], named_numbers["y2"]), label)
            return
        yield from (box for item in value.values() for box in json_boxes(item, label))
    elif isinstance(value, list):
        numbers = numbers_of([part for item in value for part in (item if isinstance(item, list) else [item])])
        flat = not any(isinstance(item, list) for item in value)
        if len(numbers) == 4 and (flat or [len(item) for item in value if isinstance(item, list)] == [2, 2]):
            yield Shape(numbers, label)
            return
        yield from (box for item in value for box in json_boxes(item, label))
    elif isinstance(value, str):
        yield from (replace(box, label=label) for box in text_boxes(value[:MOST_STRING].lower()))


def json_points(value: Any, form: PointForm, label: str = "") -> Iterator[Shape]:
    if isinstance(value, dict):
        label = label_of(value) or label
        keys = {key_name(key): item for key, item in value.items()}
        x, y = keys.get("x"), keys.get("y")
        if isinstance(x, list) and isinstance(y, list) and len(x) == len(y):
            yield from (Shape(pair, label) for pair in map(numbers_of, zip(x, y, strict=True)) if pair)
            return
        if pair := numbers_of([x, y, keys["z"]] if 3 in form.sizes and "z" in keys else [x, y]):
            yield Shape(pair, label)
            return
        inside = [item for key, item in value.items() if key_name(key) not in BOX_KEYS]
        yield from (point for item in inside for point in json_points(item, form, label))
    elif isinstance(value, list):
        numbers = numbers_of(value)
        if len(numbers) in form.sizes:
            yield Shape(numbers, label)
            return
        yield from (point for item in value for point in json_points(item, form, label))
    elif isinstance(value, str):
        yield from (replace(point, label=label) for point in text_points(value[:MOST_STRING].lower(), form))


def label_of(value: dict[Any, Any]) -> str:
    keys = {key_name(key): item for key, item in value.items()}
    return next((keys[key] for key in LABEL_KEYS if isinstance(keys.get(key), str)), "")


def numbers_of(values: Sequence[Any]) -> tuple[float, ...]:
    """Convert all values, including numbers in quotes, to floats; return () if one is not a number."""
    numbers = [number(value) if isinstance(value, str) else finite(value) for value in values]
    return tuple(value for value in numbers if value is not None) if None not in numbers else ()


def number(text: str) -> float | None:
    match = re.fullmatch(rf"\s{{0,9}}({NUMBER})\s{{0,9}}(?:[a-z]{{1,6}}|%)?", text[:64].lower())
    return finite(float(match[1])) if match else None


# ---------------------------------------------------------------- text


def text_boxes(text: str) -> list[Shape]:
    named_numbers = [(CORNERS.get(key_name(key), key_name(key)), float(value)) for key, value in NAMED.findall(text)]
    if named_numbers and len(named_numbers) % 4 == 0:
        fours = [dict(named_numbers[first : first + 4]) for first in range(0, len(named_numbers), 4)]
        if all(four.keys() == {"x1", "y1", "x2", "y2"} for four in fours):
            return [Shape((four["x1"], four["y1"], four["x2"], four["y2"])) for four in fours]
    groups = groups_of(text)
    if shapes := [Shape(group) for group in groups if len(group) == 4]:
        return shapes
    twos = [group for group in groups if len(group) == 2]
    if twos and len(twos) % 2 == 0:
        return [Shape(twos[first] + twos[first + 1]) for first in range(0, len(twos), 2)]
    return rows_of(text, (4,))


def text_points(text: str, form: PointForm) -> list[Shape]:
    if shapes := [Shape(group) for group in groups_of(text, form.metres) if len(group) in form.sizes]:
        return shapes
    named_numbers = [(key[0], float(value)) for key, value in NAMED.findall(text) if key[0] in "xy"]
    pairs = [named_numbers[first : first + 2] for first in range(0, len(named_numbers), 2)]
    if pairs and all([axis for axis, _ in pair] == ["x", "y"] for pair in pairs):
        return [Shape((pair[0][1], pair[1][1])) for pair in pairs]
    return rows_of(text, form.sizes, form.metres)


def groups_of(text: str, metres: float = 1.0) -> list[tuple[float, ...]]:
    """Return the numbers in each innermost pair of brackets that contains only numbers."""
    return [values_of(match[1], metres) for match in GROUP.finditer(text)]


def rows_of(text: str, sizes: Sequence[int], metres: float = 1.0) -> list[Shape]:
    """Return the shapes of a text that consists of rows, split by lines, `;`, `->` or tags, with one of `sizes` numbers each."""
    parts = [part for part in re.split(r"<[^<>]{0,200}>|[\n;]|->", text) if re.search("[0-9]", part)]
    rows = [ROW.fullmatch(part) for part in parts]
    shapes = [Shape(values_of(row[1], metres)) for row in rows if row]
    return shapes if len(shapes) == len(parts) and all(len(shape.numbers) in sizes for shape in shapes) else []


def values_of(text: str, metres: float) -> tuple[float, ...]:
    """Return the numbers of a group; convert lengths with a unit to the unit of `metres` metres."""
    return tuple(
        float(value) * (METRES[unit] / metres if unit in METRES else 1.0) for value, unit in VALUE.findall(text)
    )
