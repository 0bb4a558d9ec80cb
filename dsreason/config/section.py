"""Base class for all configuration sections, and validators that several sections share."""

from __future__ import annotations

import re
from collections.abc import Sized

from pydantic import BaseModel, ConfigDict

LOWEST_TEMPERATURE = 0.01
"""Minimum temperature above 0, as in vLLM."""


class Section(BaseModel):
    """Base class for all configuration sections. Unknown keys are errors, and values cannot change after loading."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    def differing(self) -> list[str]:
        """Return the names of the fields whose values differ from the default.

        `model_fields_set` alone is not enough, because a saved configuration sets all fields.
        """
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
    """Return the value unchanged; raise ValueError if it is a bool, which pydantic would convert to 0 or 1 rows."""
    if isinstance(value, bool):
        raise ValueError(f"must be a fraction or a number of rows, such as 0.1; got {value}")
    return value


def check_regex(pattern: str) -> str:
    """Return the pattern unchanged; raise ValueError if it is not a regular expression."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is not a valid regular expression ({error}); correct it") from None
    return pattern


def check_multiplier(value: float) -> float:
    """Return a learning-rate multiplier unchanged; raise ValueError if it is not positive."""
    if value <= 0:
        raise ValueError(
            f"must be greater than 0; got {value:g}; to keep parameters unchanged, use model.freeze instead"
        )
    return value


def choose_pronoun(names: Sized) -> str:
    """Return the pronoun for `names` in a message: "it" or "them"."""
    return "them" if len(names) > 1 else "it"


def check_temperature(value: float) -> float:
    """Return the temperature unchanged; raise ValueError if it is so low that dividing the logits by it could overflow."""
    if 0 < value < LOWEST_TEMPERATURE:
        raise ValueError(f"must be 0 or at least {LOWEST_TEMPERATURE}; got {value:g}")
    return value
