"""Option types for built-in rewards, and validation of option values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, get_type_hints

from annotated_types import Ge, Gt, Interval

from dsreason.errors import ConfigError

Share = Annotated[float, Interval(gt=0, le=1)]
Positive = Annotated[float, Gt(0)]
NotNegative = Annotated[float, Ge(0)]

RewardValue = float | tuple[float, dict[str, float]]
"""Result of a reward: a number, or a number with metrics."""


def check_values(function: Callable[..., Any], options: Mapping[str, Any], name: str) -> None:
    """Raise ConfigError if an option's value does not match its annotation; the message names the option and the value.

    The function must have a parameter for each option.
    """
    if not options:
        return
    from pydantic import ConfigDict, TypeAdapter, ValidationError  # not needed in workers without options

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


def get_defaults(function: Callable[..., Any]) -> dict[str, Any]:
    """Return a reward's options with their defaults."""
    return dict(function.__kwdefaults__ or {})
