r"""Parser for the number in an answer: `about 1,200.5 kg`, `12 %`, `3 1/2`, `\boxed{3.2\,\text{m}}`, `three boxes`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

UNITS = {
    "length": {
        "mm": 0.001,
        "millimeter": 0.001,
        "cm": 0.01,
        "centimeter": 0.01,
        "dm": 0.1,
        "m": 1.0,
        "meter": 1.0,
        "km": 1000.0,
    }
    | {"kilometer": 1000.0, "in": 0.0254, "inch": 0.0254, "inche": 0.0254, "ft": 0.3048, "foot": 0.3048, "feet": 0.3048}
    | {"yd": 0.9144, "yard": 0.9144, "mi": 1609.344, "mile": 1609.344},
    "time": {"ms": 0.001, "millisecond": 0.001, "s": 1.0, "sec": 1.0, "second": 1.0, "min": 60.0, "minute": 60.0}
    | {"h": 3600.0, "hr": 3600.0, "hour": 3600.0},
    "speed": {"m/s": 1.0, "mps": 1.0, "km/h": 1 / 3.6, "kmh": 1 / 3.6, "kph": 1 / 3.6, "mph": 0.44704, "ft/s": 0.3048},
    "mass": {
        "mg": 1e-6,
        "g": 0.001,
        "gram": 0.001,
        "kg": 1.0,
        "kilogram": 1.0,
        "t": 1000.0,
        "ton": 1000.0,
        "tonne": 1000.0,
    }
    | {"lb": 0.45359237, "pound": 0.45359237, "oz": 0.028349523125},
    "angle": {"°": 1.0, "deg": 1.0, "degree": 1.0, "rad": 57.29577951308232, "radian": 57.29577951308232},
    "area": {"mm^2": 1e-6, "cm^2": 1e-4, "m^2": 1.0, "km^2": 1e6},
    "volume": {"ml": 0.001, "l": 1.0, "liter": 1.0, "litre": 1.0, "cm^3": 0.001, "m^3": 1000.0},
    "acceleration": {"m/s^2": 1.0, "g0": 9.80665},
    "temperature": {"°c": 1.0, "celsius": 1.0},
    "share": {"%": 1.0, "percent": 1.0, "pct": 1.0},
}
"""Dimension → unit → factor that converts it to the base unit, whose factor is 1."""
FACTORS = {unit: (dimension, factor) for dimension, units in UNITS.items() for unit, factor in units.items()}
MULTIPLES = {"thousand": 1e3, "k": 1e3, "million": 1e6, "billion": 1e9}
NAMES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty"
)
WORDS = {word: value for value, word in enumerate(NAMES.split())}

DIGITS = r"[0-9]{1,40}(?:[.,'_][0-9]{1,40}){0,12}(?: [0-9]{3}(?![0-9.,/]))*|\.[0-9]{1,40}"
TOKEN = re.compile(
    rf"(?<![\w.])(?P<sign>[+-]\s?)?(?:(?P<whole>[0-9]{{1,6}})\s(?=[0-9]{{1,12}}\s?/))?(?P<digits>{DIGITS})(?![0-9])(?:\s?/\s?(?P<below>[0-9]{{1,12}})(?![0-9/.]))?"
    r"(?:e(?P<exponent>[+-]?[0-9]{1,3})(?![0-9a-z])|\s?[x*]\s?10\s?\^\s?\{?(?P<power>[+-]?[0-9]{1,3})\}?)?"
    r"(?:\s?(?P<multiple>thousand|million|billion|k)(?![a-z]))?"
    r"(?:[\s-]{0,2}(?P<unit>%|°\s?[cf]?(?![a-z])|[a-zμ]{1,12}(?:\^?[23](?![0-9]))?(?:\s?/\s?[a-z]{1,3}(?:\^?2)?|\sper\s[a-z]{1,12})?))?"
)
RANGE = re.compile(r"\s{0,2}(?:-|~|\.{2,3}|to|or)\s{0,2}")
VERDICT = re.compile(
    r"(?:=|:|\b(?:is|are|was|were|equals?|equal to|measures|answer|total|has|have|count|there(?:'s)?|gives|get))"
    r"(?:[\s*\"(\[]|about|around|approximately|approx\.?|roughly|nearly|almost|exactly|only|of|~|a total of|the|at){0,6}\Z"
)
EXPLAINED = re.compile(r"[^0-9]{0,40}?(?:\(|\.\s|;|\n|\b(?:because|since|as|i\.e|namely|made up of)\b)")
"""Pattern for the text after the first number if that number is the answer and the numbers after it only explain it."""
MOST_POWER = 100
LATEX = (
    (re.compile(r"\\[dt]?frac\s?\{([0-9]{1,12})\}\s?\{([0-9]{1,12})\}"), r" \1/\2"),
    (re.compile(r"\\(?:text|mathrm|textbf|mathbf|operatorname)\s?\{([^{}]{0,99})\}"), r" \1"),
    (re.compile(r"\\(?:,|;|:|!|quad|qquad|left|right)|\{,\}|[$`~]|\*\*"), " "),
    (re.compile(r"\\(?:times|cdot)"), "x"),
    (re.compile(r"\\(?:approx|sim|simeq)"), "="),
    (re.compile(r"\^?\\circ"), "°"),
    (re.compile(r"\\%"), "%"),
)


@dataclass(frozen=True)
class Quantity:
    """A number with its unit: `3.2 m` is `Quantity(3.2, "length", 1.0)`. If the unit is unknown, `dimension` is "" and
    `factor` is 1."""

    value: float
    dimension: str = ""
    factor: float = 1.0

    @property
    def base(self) -> float:
        """Value in the dimension's base unit."""
        return self.value * self.factor


@dataclass(frozen=True)
class NumberToken:
    quantity: Quantity | None
    """The number with its unit; None if the digits do not form a number, as in `1.2.3`."""
    start: int
    end: int


def read_quantity(text: str, dimension: str = "") -> Quantity | None:
    """Return the number that a text (see `to_plain`) gives as its answer; None if it has none, or several equally likely ones.

    Args:
        dimension: dimension of the reference; if the text has several numbers, the one with this dimension is the answer.
    """
    text = clean(text.lower())
    tokens = [make_token(match) for match in TOKEN.finditer(text)]
    if not tokens:
        number_words = [word for word in re.findall(r"[a-z]+", text) if word in WORDS]
        return Quantity(float(WORDS[number_words[0]])) if len(number_words) == 1 else None
    return choose_quantity(text, join_tokens(tokens, text), dimension)


def clean(text: str) -> str:
    r"""Remove LaTeX markup; if the text has a `\boxed{…}`, keep only the content of the last one."""
    _, boxed, inside = text.rpartition(r"\boxed{")
    if boxed:
        text = inside.rpartition("}")[0] or inside
    for pattern, replacement in LATEX:
        text = pattern.sub(replacement, text)
    return text


def choose_quantity(text: str, tokens: Sequence[NumberToken], dimension: str) -> Quantity | None:
    """Return the quantity of the token picked by `pick_token`; None if it picks none or if the token is part of a range."""
    ranged = [end for pair in zip(tokens, tokens[1:], strict=False) if is_range(text, *pair) for end in pair]
    token = pick_token(text, tokens, dimension)
    return token.quantity if token is not None and token not in ranged else None


def pick_token(text: str, tokens: Sequence[NumberToken], dimension: str) -> NumberToken | None:
    """Pick the token that is the answer: the only distinct number (in the dimension), the last number after a word such as
    `is` or `=`, or a first number that the others only explain."""
    tokens = [
        token for token in tokens if not re.search(r"(?:±|\+/-?)\s?\Z", text[max(0, token.start - 4) : token.start])
    ]
    for candidates in (
        tokens,
        [token for token in tokens if token.quantity and token.quantity.dimension == dimension != ""],
    ):
        if len({f"{token.quantity.base:.9g}" if token.quantity else "" for token in candidates}) == 1:
            return candidates[0]
    if verdicts := [token for token in tokens if VERDICT.search(text[max(0, token.start - 60) : token.start])]:
        return verdicts[-1]
    leads = not text[: tokens[0].start].strip("([\"'* \n")
    return tokens[0] if leads and EXPLAINED.match(text[tokens[0].end : tokens[0].end + 60]) else None


def is_range(text: str, first: NumberToken, second: NumberToken) -> bool:
    """Return whether two numbers form a range: `3-4`, `3 to 4`, `between 3 and 4`."""
    gap = text[first.end : second.start + 1].rstrip("0123456789.")  # the second number's sign is the dash of the range
    between = re.search(r"\bbetween\s{1,3}\Z", text[max(0, first.start - 12) : first.start]) is not None
    return RANGE.fullmatch(gap) is not None or (between and gap.strip() == "and")


def join_tokens(tokens: Sequence[NumberToken], text: str) -> list[NumberToken]:
    """Join the parts of compound quantities such as `1 m 20 cm` and `5 feet 3 inches` into one token each."""
    merged: list[NumberToken] = []
    for token in tokens:
        if merged and is_part(merged[-1], token, text):
            previous, last = merged[-1], merged[-1].quantity or Quantity(0.0)
            base = last.base + (token.quantity or Quantity(0.0)).base
            merged[-1] = NumberToken(
                Quantity(base / last.factor, last.dimension, last.factor), previous.start, token.end
            )
        else:
            merged.append(token)
    return merged


def is_part(whole: NumberToken, part: NumberToken, text: str) -> bool:
    """Return whether `part` directly follows `whole` and has a smaller unit of the same dimension."""
    a, b = whole.quantity, part.quantity
    if a is None or b is None or not a.dimension or a.dimension != b.dimension or a.factor <= b.factor:
        return False
    return a.value >= 0 <= b.value and re.fullmatch(r"\s{0,2}(?:and\s)?", text[whole.end : part.start]) is not None


def make_token(match: re.Match[str]) -> NumberToken:
    start, end = match.span()
    dimension, factor = find_unit(match["unit"] or "")
    if match["unit"] and not dimension:
        end = match.start("unit")  # not a unit, but an ordinary word
    value, below = parse_digits(match["digits"]), float(match["below"] or 1)
    power = int(match["exponent"] or match["power"] or 0)
    of_clock = re.match(r":[0-9]", match.string[end : end + 2]) or re.match(
        r"[0-9]:", match.string[max(0, start - 2) : start]
    )
    if value is None or not below or abs(power) > MOST_POWER or of_clock:
        return NumberToken(None, start, end)
    value = (value / below + float(match["whole"] or 0)) * MULTIPLES.get(match["multiple"] or "", 1.0) * 10.0**power
    sign = -1.0 if (match["sign"] or "").startswith("-") else 1.0
    return NumberToken(Quantity(sign * value, dimension, factor), start, end)


def find_unit(text: str) -> tuple[str, float]:
    """Return a unit's dimension and factor, or ("", 1) if the unit is unknown."""
    unit = re.sub(r"\s?/\s?|\sper\s", "/", text).replace("metre", "meter")
    unit = re.sub(r"(?<=[a-z])\^?([23])\Z", r"^\1", unit)
    unit = {"meter/second": "m/s", "kilometer/hour": "km/h", "mile/hour": "mph"}.get(unit.replace("s/", "/"), unit)
    return FACTORS.get(unit) or FACTORS.get(unit.removesuffix("s")) or ("", 1.0)


def parse_digits(text: str) -> float | None:
    """Convert `1,234.5`, `1.234,5`, `1 234`, `3,2` or `.5` to a float; return None if the separators are inconsistent."""
    text = re.sub(r"[ '_]", "", text)
    commas, dots = text.count(","), text.count(".")
    if commas and dots:
        decimal = max(",.", key=text.rfind)
        thousands = "," if decimal == "." else "."
    elif commas == 1:
        decimal, thousands = ("", ",") if re.fullmatch(r"[1-9][0-9]{0,2},[0-9]{3}", text) else (",", "")
    elif commas > 1 or dots > 1:
        decimal, thousands = "", "," if commas else "."
    else:
        return float(text)
    whole_part, _, fraction = text.rpartition(decimal) if decimal else (text, "", "")
    if decimal and (decimal in whole_part or thousands and thousands in fraction):
        return None
    if thousands and not re.fullmatch(rf"[0-9]{{1,3}}(?:{re.escape(thousands)}[0-9]{{3}})+", whole_part):
        return None
    return float(f"{whole_part.replace(thousands, '') if thousands else whole_part}.{fraction or 0}")
