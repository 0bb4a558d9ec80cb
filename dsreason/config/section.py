"""What every section of a configuration is."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

from dsreason.config.keys import section_of

LOWEST_TEMPERATURE = 0.01
"""Above 0, as vLLM has it."""
LARGEST_NUMBER = 2**53
"""Of whole numbers: torch takes none of more than 64 bits as a seed, and JSON readers round above this one."""


class Section(BaseModel):
    """Base of every section: unknown keys are errors, values cannot be changed after loading."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def check_no_flag(cls, value: Any, info: ValidationInfo) -> Any:
        """Python counts with true and false as 1 and 0."""
        # With a default value, which needs no check, pydantic 2.12.0 passes no field name or the name of the section.
        field, flag = cls.model_fields.get(info.field_name or ""), first_flag(value)
        if field is None or flag is None:
            return value
        annotation = field.annotation
        plain = plain_types(annotation)
        is_section = isinstance(value, dict) and section_of(annotation) is not None  # which looks at its own keys
        if plain & {int, float} and bool not in plain and not is_section:
            what = "a number" if float in plain else "a whole number"
            raise ValueError(f"{str(flag).lower()} is not {what}; set one")
        return value

    @field_validator("*")
    @classmethod
    def check_extent(cls, value: Any) -> Any:
        if isinstance(value, int) and abs(value) > LARGEST_NUMBER:
            raise ValueError(f"{value} is beyond {LARGEST_NUMBER}, the largest whole number that is taken; lower it")
        return value

    def differing(self) -> list[str]:
        """Names of the fields that were given another value than the default, which is what a written configuration repeats."""
        return [
            name
            for name, field in type(self).model_fields.items()
            if name in self.model_fields_set and getattr(self, name) != field.default
        ]

    def check_exclusive(self, first: str, second: str) -> None:
        """ValueError where both of these keys are set."""
        a, b = getattr(self, first), getattr(self, second)
        if a is not None and b is not None:
            raise ValueError(f"{first} ({a}) and {second} ({b}) exclude each other; remove one")

    def check_order(self, low: str, high: str) -> None:
        """ValueError where both of these keys are set and the first is the greater one."""
        a, b = getattr(self, low), getattr(self, high)
        if a is not None and b is not None and a > b:
            raise ValueError(f"{low} ({a}) is greater than {high} ({b})")


def plain_types(annotation: Any) -> set[type]:
    """What an annotation is made of: `dict[str, float] | None` → `{str, float, NoneType}`."""
    if get_origin(annotation) is Literal:
        return {type(value) for value in get_args(annotation)}
    inside = get_args(annotation)[:1] if get_origin(annotation) is Annotated else get_args(annotation)
    return set().union(*map(plain_types, inside)) if inside else {annotation}


def first_flag(value: Any) -> bool | None:
    """The value, or the first one in a list or mapping of values, that is true or false."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
    return next((one for one in inside if isinstance(one, bool)), None)


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
