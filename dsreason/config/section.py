"""What every section of a configuration is."""

from __future__ import annotations

import re

from pydantic import BaseModel, ConfigDict

LOWEST_TEMPERATURE = 0.01
"""Above 0, as vLLM has it."""


class Section(BaseModel):
    """Base of every section: unknown keys are errors, values cannot be changed after loading."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    def differing(self) -> list[str]:
        """Names of the fields that were given another value than the default, which is what a written configuration repeats."""
        return [
            name
            for name, field in type(self).model_fields.items()
            if name in self.model_fields_set and getattr(self, name) != field.default
        ]

    def check_exclusive(self, first: str, second: str) -> None:
        """Raise ValueError if both of these keys are set."""
        a, b = getattr(self, first), getattr(self, second)
        if a is not None and b is not None:
            raise ValueError(f"{first} ({a}) and {second} ({b}) exclude each other; remove one")

    def check_order(self, low: str, high: str) -> None:
        """Raise ValueError if both of these keys are set and the first is the greater one."""
        a, b = getattr(self, low), getattr(self, high)
        if a is not None and b is not None and a > b:
            raise ValueError(f"{low} ({a}) is greater than {high} ({b})")


def refuse_flag(value: object) -> object:
    """ValueError for true and false in place of a number of rows: pydantic takes them for 1 and 0."""
    if isinstance(value, bool):
        raise ValueError(f"{value} is not a number of rows; set a share or a number, such as 0.1")
    return value


def check_regex(pattern: str) -> str:
    """ValueError for what is not a regular expression."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is not a regular expression ({error}); correct it") from None
    return pattern


def check_temperature(value: float) -> float:
    """ValueError for one by which scores become infinite."""
    if 0 < value < LOWEST_TEMPERATURE:
        raise ValueError(f"{value:g} must be 0, or at least {LOWEST_TEMPERATURE}")
    return value
