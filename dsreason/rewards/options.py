"""Options of built-in rewards: their types, and the check of values against them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, get_type_hints

from annotated_types import Ge, Gt, Interval

from dsreason.errors import ConfigError

Share = Annotated[float, Interval(gt=0, le=1)]
Positive = Annotated[float, Gt(0)]
NotNegative = Annotated[float, Ge(0)]

Worth = float | tuple[float, dict[str, float]]
"""What a reward returns: a number, or a number and metrics."""


def check_values(function: Callable[..., Any], options: Mapping[str, Any], name: str) -> None:
    """Raise ConfigError if an option has a value that its annotation does not allow; the text names both.

    The options must be arguments of the function.
    """
    if not options:
        return
    from pydantic import ConfigDict, TypeAdapter, ValidationError  # workers without options do without it

    hints = get_type_hints(function, include_extras=True)
    for key, value in options.items():
        try:
            TypeAdapter(hints[key], config=ConfigDict(strict=True, allow_inf_nan=False)).validate_python(value)
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            place = ".".join(str(part) for part in problem["loc"] if isinstance(part, str) and part in str(value))
            raise ConfigError(
                f"reward option {name}.{key}{f'.{place}' if place else ''} ({value!r:.100}): "
                f"{problem['msg'][0].lower()}{problem['msg'][1:]}"
            ) from error


def defaults_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The options that a reward takes, with their defaults."""
    return dict(function.__kwdefaults__ or {})
