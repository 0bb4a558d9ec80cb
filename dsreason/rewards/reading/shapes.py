"""Parser for boxes and points in texts: JSON as Qwen-VL writes it, tags, and numbers in brackets or with names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from dsreason.rewards.reading.plain import find_json_values, is_none_answer, normalize_key, to_finite_float

Order = Literal["xyxy", "xywh", "cxcywh", "yxyx"]
"""Meaning of a box's four numbers: two corners (`yxyx`: in Gemini's order), or a corner (`c`: the centre), width and height."""

NUMBER = r"[+-]?[0-9]{1,12}(?:\.[0-9]{0,12})?(?:e[+-]?[0-9]{1,3})?"
METRES = {"m": 1.0, "meter": 1.0, "meters": 1.0, "metre": 1.0, "metres": 1.0, "cm": 0.01, "mm": 0.001, "km": 1000.0}
METRES |= {"ft": 0.3048, "feet": 0.3048, "in": 0.0254}
UNIT = rf"(?:{'|'.join(sorted(METRES, key=len, reverse=True))}|px|pixels?|%)(?![a-z])"
ITEM = rf"(?:[a-z]{{1,2}}[0-9]?\s?[=:]\s?)?(?:{NUMBER})(?:\s?{UNIT})?"
"""Pattern for a number with an optional name and unit: `x=1.5`, `3 m`."""
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
"""Upper bound for coordinates. Larger ones are never intended, and their squares might overflow."""
MOST_STRING = 4_096


@dataclass(frozen=True)
class PlaneShape:
    """A point (x, y, …) or a box (x1, y1, x2, y2). Example: `PlaneShape((10.0, 20.0, 30.0, 40.0), "cup")`."""

    numbers: tuple[float, ...]
    label: str = ""

    def scale(self, x: float, y: float) -> PlaneShape:
        """Multiply all x coordinates by `x` and all y coordinates by `y`."""
        return replace(self, numbers=tuple(value * (y if index % 2 else x) for index, value in enumerate(self.numbers)))


@dataclass(frozen=True)
class PointForm:
    """Expected form of points: the possible counts of numbers per point, and the unit of length for the result, in metres."""

    sizes: Sequence[int] = (2,)
    metres: float = 1.0


Shapes = list[PlaneShape] | None
"""Shapes in a text; [] if the text states that there are none, None if it could not be parsed."""


def read_boxes(text: str, order: Order = "xyxy") -> Shapes:
    """Return all boxes in a text (see `to_plain`) as x1, y1, x2, y2."""
    shapes = read_shapes(text, iter_json_boxes, find_text_boxes)
    return [replace(box, numbers=to_corners(box.numbers, order)) for box in shapes] if shapes else shapes


PLAIN_POINT = PointForm()


def read_points(text: str, form: PointForm = PLAIN_POINT) -> Shapes:
    """Return all points in a text (see `to_plain`), in order."""
    return read_shapes(text, lambda value: iter_json_points(value, form), lambda lower: find_text_points(lower, form))


def read_shapes(
    text: str, parse_json: Callable[[Any], Iterator[PlaneShape]], parse_text: Callable[[str], list[PlaneShape]]
) -> Shapes:
    values = find_json_values(text)
    shapes = [shape for value in values for shape in parse_json(value)] or parse_text(text.lower())
    shapes = [shape for shape in shapes if all(abs(value) < LARGEST for value in shape.numbers)]
    if not shapes and (is_none_answer(text) or (values and all(value in ([], {}) for value in map(unwrap, values)))):
        return []
    return shapes or None


def unwrap(value: Any) -> Any:
    """Return the inner value of an object with only one key, `{"boxes": []}` → `[]`, and any other value unchanged."""
    return next(iter(value.values())) if isinstance(value, dict) and len(value) == 1 else value


def to_corners(numbers: tuple[float, ...], order: Order) -> tuple[float, float, float, float]:
    a, b, c, d = numbers
    if order == "xywh":
        return a, b, a + c, b + d
    if order == "cxcywh":
        return a - c / 2, b - d / 2, a + c / 2, b + d / 2
    return (b, a, d, c) if order == "yxyx" else (a, b, c, d)


# ---------------------------------------------------------------- JSON


def iter_json_boxes(value: Any, label: str = "") -> Iterator[PlaneShape]:
    if isinstance(value, dict):
        label = find_label(value) or label
        keys = {normalize_key(key): item for key, item in value.items()}
        named_numbers = {
            CORNERS.get(key, key): parse_number
            for key, item in keys.items()
            if (parse_number := to_finite_float(item)) is not None
        }
        if all(key in named_numbers for key in ("x1", "y1", "x2", "y2")):
            yield PlaneShape(
                (named_numbers["x1"], named_numbers["y1"], named_numbers["x2"], named_numbers["y2"]), label
            )
            return
        yield from (box for item in value.values() for box in iter_json_boxes(item, label))
    elif isinstance(value, list):
        numbers = to_numbers([part for item in value for part in (item if isinstance(item, list) else [item])])
        flat = not any(isinstance(item, list) for item in value)
        if len(numbers) == 4 and (flat or [len(item) for item in value if isinstance(item, list)] == [2, 2]):
            yield PlaneShape(numbers, label)
            return
        yield from (box for item in value for box in iter_json_boxes(item, label))
    elif isinstance(value, str):
        yield from (replace(box, label=label) for box in find_text_boxes(value[:MOST_STRING].lower()))


def iter_json_points(value: Any, form: PointForm, label: str = "") -> Iterator[PlaneShape]:
    if isinstance(value, dict):
        label = find_label(value) or label
        keys = {normalize_key(key): item for key, item in value.items()}
        x, y = keys.get("x"), keys.get("y")
        if isinstance(x, list) and isinstance(y, list) and len(x) == len(y):
            yield from (PlaneShape(pair, label) for pair in map(to_numbers, zip(x, y, strict=True)) if pair)
            return
        if pair := to_numbers([x, y, keys["z"]] if 3 in form.sizes and "z" in keys else [x, y]):
            yield PlaneShape(pair, label)
            return
        inside = [item for key, item in value.items() if normalize_key(key) not in BOX_KEYS]
        yield from (point for item in inside for point in iter_json_points(item, form, label))
    elif isinstance(value, list):
        numbers = to_numbers(value)
        if len(numbers) in form.sizes:
            yield PlaneShape(numbers, label)
            return
        yield from (point for item in value for point in iter_json_points(item, form, label))
    elif isinstance(value, str):
        yield from (replace(point, label=label) for point in find_text_points(value[:MOST_STRING].lower(), form))


def find_label(value: dict[Any, Any]) -> str:
    keys = {normalize_key(key): item for key, item in value.items()}
    return next((keys[key] for key in LABEL_KEYS if isinstance(keys.get(key), str)), "")


def to_numbers(values: Sequence[Any]) -> tuple[float, ...]:
    """Convert all values, including numbers in quotes, to floats; return () if one of them is not a number."""
    numbers = [parse_number(value) if isinstance(value, str) else to_finite_float(value) for value in values]
    return tuple(value for value in numbers if value is not None) if None not in numbers else ()


def parse_number(text: str) -> float | None:
    match = re.fullmatch(rf"\s{{0,9}}({NUMBER})\s{{0,9}}(?:[a-z]{{1,6}}|%)?", text[:64].lower())
    return to_finite_float(float(match[1])) if match else None


# ---------------------------------------------------------------- text


def find_text_boxes(text: str) -> list[PlaneShape]:
    named_numbers = [
        (CORNERS.get(normalize_key(key), normalize_key(key)), float(value)) for key, value in NAMED.findall(text)
    ]
    if named_numbers and len(named_numbers) % 4 == 0:
        fours = [dict(named_numbers[first : first + 4]) for first in range(0, len(named_numbers), 4)]
        if all(four.keys() == {"x1", "y1", "x2", "y2"} for four in fours):
            return [PlaneShape((four["x1"], four["y1"], four["x2"], four["y2"])) for four in fours]
    groups = find_groups(text)
    if shapes := [PlaneShape(group) for group in groups if len(group) == 4]:
        return shapes
    twos = [group for group in groups if len(group) == 2]
    if twos and len(twos) % 2 == 0:
        return [PlaneShape(twos[first] + twos[first + 1]) for first in range(0, len(twos), 2)]
    return find_rows(text, (4,))


def find_text_points(text: str, form: PointForm) -> list[PlaneShape]:
    if shapes := [PlaneShape(group) for group in find_groups(text, form.metres) if len(group) in form.sizes]:
        return shapes
    named_numbers = [(key[0], float(value)) for key, value in NAMED.findall(text) if key[0] in "xy"]
    pairs = [named_numbers[first : first + 2] for first in range(0, len(named_numbers), 2)]
    if pairs and all([axis for axis, _ in pair] == ["x", "y"] for pair in pairs):
        return [PlaneShape((pair[0][1], pair[1][1])) for pair in pairs]
    return find_rows(text, form.sizes, form.metres)


def find_groups(text: str, metres: float = 1.0) -> list[tuple[float, ...]]:
    """Return one tuple for each innermost pair of brackets that contains only numbers."""
    return [parse_values(match[1], metres) for match in GROUP.finditer(text)]


def find_rows(text: str, sizes: Sequence[int], metres: float = 1.0) -> list[PlaneShape]:
    """Return one shape per row if the text consists only of rows of numbers, each with a count in `sizes`; otherwise [].

    Rows are separated by line breaks, `;`, `->` or tags.
    """
    parts = [part for part in re.split(r"<[^<>]{0,200}>|[\n;]|->", text) if re.search("[0-9]", part)]
    rows = [ROW.fullmatch(part) for part in parts]
    shapes = [PlaneShape(parse_values(row[1], metres)) for row in rows if row]
    return shapes if len(shapes) == len(parts) and all(len(shape.numbers) in sizes for shape in shapes) else []


def parse_values(text: str, metres: float) -> tuple[float, ...]:
    """Return the numbers in a group. Numbers with a unit of length are converted to a unit that is `metres` metres long."""
    return tuple(
        float(value) * (METRES[unit] / metres if unit in METRES else 1.0) for value, unit in VALUE.findall(text)
    )
