"""The description of one key of cosmos-rl, and short forms for the tables beside this file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

Takes = Literal["bool", "int", "number", "string", "list", "table", "names", "numbers", "tables", "rewards", "any"]
"""Kind of a value; 1 is also a number. "names" and "numbers" are one or a list of them, "tables" is such a list, and
"rewards" are names or a table of their weights."""


@dataclass(frozen=True)
class Key:
    """One key of cosmos-rl.

    Example: `Key(1e-6, "number", ("optim.lr",), copies=True)` is copied as it is.
    """

    default: Any
    """Value that cosmos-rl takes if the file does not have the key."""
    takes: Takes
    becomes: tuple[str, ...] = ()
    """Our keys that it decides, alone or with others; none: it is left out."""
    copies: bool = False
    """Its value becomes that of the first of them."""
    convert: Callable[[Any], Any] = lambda value: value
    """Conversion if the value is copied. ValueError says what is wrong with the value."""
    because: str = ""
    """Why it can be left out."""
    only: tuple[Any, ...] | None = None
    """The values for which that holds; None: all."""
    instead: str = ""
    """Advice for any other value."""
    trainers: tuple[str, ...] = ("sft", "dpo", "grpo")
    """Trainers of ours for which cosmos-rl reads it."""

    def of(self, *trainers: str) -> Key:
        """The same, read for these trainers only."""
        return replace(self, trainers=trainers)


def infer_takes(default: Any) -> Takes:
    """Return what a key with this default takes."""
    kinds: dict[type, Takes] = {bool: "bool", int: "int", float: "number", str: "string", list: "list", dict: "table"}
    return kinds.get(type(default), "any")


def make_copied(
    default: Any, key: str, takes: Takes | None = None, *, convert: Callable[[Any], Any] = lambda value: value
) -> Key:
    """A key whose value, converted, is that of `key` here."""
    return Key(default, takes or infer_takes(default), (key,), copies=True, convert=convert)


def make_joint(default: Any, *keys: str, takes: Takes | None = None) -> Key:
    """A key that decides these of ours together with others."""
    return Key(default, takes or infer_takes(default), keys)


def make_unused(default: Any, because: str, takes: Takes | None = None) -> Key:
    """A key without an equivalent, whatever its value: nothing that is computed depends on it."""
    return Key(default, takes or infer_takes(default), because=because)


def make_fixed(default: Any, *values: Any, because: str, instead: str, takes: Takes | None = None) -> Key:
    """A key without an equivalent, which can be left out for these values."""
    return Key(default, takes or infer_takes(default), because=because, only=values, instead=instead)


def restrict_all(keys: dict[str, Key], *trainers: str) -> dict[str, Key]:
    """All of these, read for the same trainers."""
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
"""Expected kinds of values, for messages."""


def to_list(value: Any) -> list[Any]:
    """One or several, as several; None is none."""
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def is_of_kind(value: Any, takes: Takes) -> bool:
    """Return whether a value is of the kind; True does not count as a number."""
    if takes == "any":
        return True
    if takes in ("names", "numbers", "tables"):
        one: Takes = "string" if takes == "names" else "number" if takes == "numbers" else "table"
        return (
            all(is_of_kind(item, one) for item in value)
            if isinstance(value, list)
            else takes != "tables" and is_of_kind(value, one)
        )
    if takes == "rewards":
        return is_of_kind(list(value.values()), "numbers") if isinstance(value, dict) else is_of_kind(value, "names")
    if isinstance(value, bool) or takes == "bool":
        return isinstance(value, bool) and takes == "bool"
    kinds = {"int": int, "number": (int, float), "string": str, "list": list, "table": dict}
    return isinstance(value, kinds[takes])  # type: ignore[arg-type]
