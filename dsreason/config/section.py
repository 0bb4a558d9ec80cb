"""The base class of all configuration sections, and shared validators."""

from __future__ import annotations

import re
from collections.abc import Sized

from pydantic import BaseModel, ConfigDict

LOWEST_TEMPERATURE = 0.01
"""Minimum temperature above 0, as in vLLM."""


class Section(BaseModel):
    """Base class of all sections: unknown keys are errors, and values are immutable after loading."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    def differing(self) -> list[str]:
        """Return the names of fields whose value differs from the default (a saved configuration sets all fields)."""
        return [
            name
            for name, field in type(self).model_fields.items()
            if name in self.model_fields_set and getattr(self, name) != field.default
        ]

    def check_exclusive(self, first: str, second: str) -> None:
        """Raise ValueError if both keys are set."""
        a, b = getattr(self, first), getattr(self, second)
        if a is not None and b is not None:
            raise ValueError(f"{first} ({a}) and {second} ({b}) are mutually exclusive; remove one")

    def check_order(self, low: str, high: str) -> None:
        """Raise ValueError if both keys are set and `low` is greater than `high`."""
        a, b = getattr(self, low), getattr(self, high)
        if a is not None and b is not None and a > b:
            raise ValueError(f"{low} ({a}) is greater than {high} ({b}); correct one of them")


def refuse_flag(value: object) -> object:
    """Raise ValueError if a number of rows is a bool, which pydantic would convert to 0 or 1; else return it unchanged."""
    if isinstance(value, bool):
        raise ValueError(f"must be a share or a number of rows, such as 0.1; got {value}")
    return value


def check_regex(pattern: str) -> str:
    """Return the pattern unchanged; raise ValueError if it is not a regular expression."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is not a valid regular expression ({error}); correct it") from None
    return pattern


def choose_pronoun(names: Sized) -> str:
    """Return the pronoun that refers to these names in a message: "it" or "them"."""
    return "them" if len(names) > 1 else "it"


def check_temperature(value: float) -> float:
    """Return the temperature unchanged; raise ValueError if it is so low that dividing the logits by it overflows."""
    if 0 < value < LOWEST_TEMPERATURE:
        raise ValueError(f"must be 0 or at least {LOWEST_TEMPERATURE}; got {value:g}")
    return value
