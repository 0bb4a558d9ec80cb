"""The class that describes a cosmos-rl key, and short constructors for the tables in this folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

Takes = Literal["bool", "int", "number", "string", "list", "table", "names", "numbers", "tables", "rewards", "any"]
"""Kind of value. "number" includes integers; "names" and "numbers" are a single value or a list, "tables" is a list of tables,
and "rewards" are names or a table that maps names to weights."""


@dataclass(frozen=True)
class Key:
    """Description of one cosmos-rl key.

    Example: the value of `Key(1e-6, "number", ("optim.lr",), copies=True)` is copied unchanged.
    """

    default: Any
    """Value that cosmos-rl uses if the key is missing."""
    takes: Takes
    becomes: tuple[str, ...] = ()
    """dsreason keys that this key determines, possibly together with other keys; empty if the key is left out."""
    copies: bool = False
    """Whether the converted value is copied to the first key in `becomes`."""
    convert: Callable[[Any], Any] = lambda value: value
    """Conversion of a copied value; raises ValueError with an explanation if the value has no equivalent."""
    because: str = ""
    """Reason for leaving the key out."""
    only: tuple[Any, ...] | None = None
    """Values for which the key can be left out; None: all values."""
    instead: str = ""
    """Advice if the key has another value."""
    trainers: tuple[str, ...] = ("sft", "dpo", "grpo")
    """dsreason trainers for which the key is relevant; cosmos-rl does not read it in other kinds of training."""

    def of(self, *trainers: str) -> Key:
        """Return a copy that applies only to these trainers."""
        return replace(self, trainers=trainers)


def infer_takes(default: Any) -> Takes:
    """Infer the kind of a key's values from its default."""
    kinds: dict[type, Takes] = {bool: "bool", int: "int", float: "number", str: "string", list: "list", dict: "table"}
    return kinds.get(type(default), "any")


def make_copied(
    default: Any, key: str, takes: Takes | None = None, *, convert: Callable[[Any], Any] = lambda value: value
) -> Key:
    """Build a key whose converted value is copied to the dsreason key `key`."""
    return Key(default, takes or infer_takes(default), (key,), copies=True, convert=convert)


def make_joint(default: Any, *keys: str, takes: Takes | None = None) -> Key:
    """Build a key that determines these dsreason keys together with other keys."""
    return Key(default, takes or infer_takes(default), keys)


def make_unused(default: Any, because: str, takes: Takes | None = None) -> Key:
    """Build a key that is left out whatever its value, because no result depends on it."""
    return Key(default, takes or infer_takes(default), because=because)


def make_fixed(default: Any, *values: Any, because: str, instead: str, takes: Takes | None = None) -> Key:
    """Build a key without an equivalent, which can be left out only if it has one of these values."""
    return Key(default, takes or infer_takes(default), because=because, only=values, instead=instead)


def restrict_all(keys: dict[str, Key], *trainers: str) -> dict[str, Key]:
    """Return copies of the keys that apply only to these trainers."""
    return {name: key.of(*trainers) for name, key in keys.items()}


SHOWN: dict[Takes, str] = {
    "bool": "true or false",
    "int": "a whole number",
    "number": "a number",
    "string": "a string",
    "list": "a list",
    "table": "a section",
    "names": "a name or a list of names",
    "numbers": "a number or a list of numbers",
    "tables": "a list of tables",
    "rewards": "a name, a list of names or a table of weights",
}
"""Kind of value → its description in messages."""


def to_list(value: Any) -> list[Any]:
    """Return a list unchanged, any other value as a list with one item, and None as an empty list."""
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def is_of_kind(value: Any, takes: Takes) -> bool:
    """Return whether a value is of this kind; a boolean does not count as a number."""
    if takes == "any":
        return True
    if takes in ("names", "numbers", "tables"):
        item_kind: Takes = "string" if takes == "names" else "number" if takes == "numbers" else "table"
        return (
            all(is_of_kind(item, item_kind) for item in value)
            if isinstance(value, list)
            else takes != "tables" and is_of_kind(value, item_kind)
        )
    if takes == "rewards":
        return is_of_kind(list(value.values()), "numbers") if isinstance(value, dict) else is_of_kind(value, "names")
    if isinstance(value, bool) or takes == "bool":
        return isinstance(value, bool) and takes == "bool"
    kinds = {"int": int, "number": (int, float), "string": str, "list": list, "table": dict}
    return isinstance(value, kinds[takes])  # type: ignore[arg-type]
