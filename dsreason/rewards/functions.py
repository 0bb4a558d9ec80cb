"""Lookup of reward functions: built-in ones, and those in an installed package or in one of the user's files."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from dsreason.data.types import Sample
from dsreason.errors import ConfigError
from dsreason.rewards import BUILT_IN, READS_REFERENCE, WITHOUT_ANSWER
from dsreason.rewards.fields import check_fields, json_fields
from dsreason.rewards.judge import check_judge
from dsreason.rewards.latex import boxed_math, direct_math
from dsreason.rewards.options import check_values
from dsreason.rewards.signatures import ACCEPTED, adapt_function
from dsreason.user_code import find_code

Result = float | tuple[float, Mapping[str, float]]
RewardFn = Callable[[str, Sample], Result | Awaitable[Result]]

ADVICE = (
    f"Built-in rewards: {', '.join(BUILT_IN)}. "
    "Your own rewards: package.module:attr, or the path of a .py file, followed by :attr if it has several functions"
)
REMOTE = "remote:"
"""Name prefix of rewards that a reward server provides; see `dsreason.rewards.remote`."""


def find_reward(name: str, options: Mapping[str, Any] | None = None) -> RewardFn:
    """Return the reward function with this name: a built-in one, `package.module:attr`, `path.py` or `path.py:attr`.

    For a name without `:attr`, see `_find_only_function`. `options` are passed to every call as keyword arguments
    (`{"pattern": …}` for `format`). Functions written for TRL, verl or ms-swift are wrapped; see
    `dsreason.rewards.signatures`.

    Raises:
        ConfigError: the function does not exist, its file cannot be imported, its signature is not one of those accepted, or
            an option of a built-in function has an invalid value.
    """
    function = find_function(name, BUILT_IN, ADVICE)
    if name not in BUILT_IN and (wrapped := adapt_function(function, options or {}, name)) is not None:
        return wrapped
    if function in (boxed_math, direct_math):
        import math_verify  # noqa: F401  # takes seconds, which must not count towards the first call's time limit
    arguments = dict(options or {})
    positional = {"completion": "", "sample": Sample("id", [])}
    bound = bind_options(function, arguments, name, positional, advice=f". Accepted signatures: {ACCEPTED}")
    if name in BUILT_IN:
        check_values(function, arguments, name)
    if function is json_fields and arguments.get("fields") is not None:
        check_fields(arguments["fields"])
    return bound


def check_reward(name: str, options: Mapping[str, Any]) -> None:
    """Raise ConfigError if a reward cannot be used with these options. No process is started and no request is sent."""
    find_reward(name, options)
    if name == "judge":
        check_judge(options)


def check_references(rewards: Sequence[str], options: Mapping[str, Mapping[str, Any]], sample: Sample) -> None:
    """Raise DataError if one of these rewards cannot parse the sample's reference answer."""
    for name in rewards:
        if name in READS_REFERENCE:
            for accepted in list_accepted(name, sample):
                BUILT_IN[name]("", accepted, **options.get(name, {}))


def list_accepted(name: str, sample: Sample) -> list[Sample]:
    """Return the samples with which a reward is called for `sample`; the best score over these calls counts.

    A built-in reward that compares with `sample.answer` is called once per accepted answer. All other rewards get the sample
    unchanged.
    """
    if name not in BUILT_IN or name in WITHOUT_ANSWER or not sample.other_answers:
        return [sample]
    return [replace(sample, answer=answer, other_answers=()) for answer in (sample.answer, *sample.other_answers)]


def find_function(name: str, built_in: Mapping[str, Any], advice: str) -> Any:
    """Return the function for a reward name; raise ConfigError if there is none."""
    code = built_in.get(name) or find_code(name, f'reward "{name}"', [*built_in], advice)
    return _find_only_function(code, name) if isinstance(code, ModuleType) else code


def make_reward_labels(names: Sequence[str]) -> list[str]:
    """Return short names for metrics: `judge` for `rewards.py:judge`, `rewards` for `rewards.py`; full names if two collide."""
    short = [_make_short_label(name) for name in names]
    return [label if short.count(label) == 1 else name for label, name in zip(short, names, strict=True)]


def _make_short_label(name: str) -> str:
    target, _, attribute = name.partition(":")
    return attribute or Path(target).name.removesuffix(".py").rpartition(".")[2]


def bind_options(
    function: Any, options: dict[str, Any], name: str, arguments: Mapping[str, Any], advice: str = ""
) -> Callable[..., Any]:
    """Bind options to a function. Raise ConfigError if it cannot be called with them plus the (positional) `arguments`.

    The error message ends with `advice`.
    """
    if not callable(function):
        raise ConfigError(f'reward "{name}" must be a function; got an object of type {type(function).__name__}')
    try:
        inspect.signature(function).bind(*arguments.values(), **options)
    except TypeError as error:
        call = ", ".join([*arguments, *(f"{key}=…" for key in options)])
        raise ConfigError(f'reward "{name}" cannot be called as fn({call}): {error}{advice}') from error
    except ValueError:  # a builtin without a signature; a mistake would only surface at the first call
        pass
    return functools.partial(function, **options) if options else function


def _find_only_function(module: ModuleType, name: str) -> Any:
    """Return the module's `reward` or `compute_score`, or else the only public function defined in the module itself.

    In a module without public functions, classes with callable instances count as functions.
    """
    members: dict[str, Any] = {
        key: value
        for key, value in vars(module).items()
        if not key.startswith("_") and getattr(value, "__module__", None) == module.__name__
    }
    public_functions: dict[str, Any] = {key: value for key, value in members.items() if inspect.isfunction(value)}
    if not public_functions:
        public_functions = {
            key: value for key, value in members.items() if inspect.isclass(value) and "__call__" in vars(value)
        }
    for default in ("reward", "compute_score"):  # `compute_score` is verl's name
        if default in public_functions:
            return public_functions[default]
    if len(public_functions) != 1:
        listed = f"it has {', '.join(public_functions)}" if public_functions else "it has no public functions"
        raise ConfigError(
            f'reward "{name}" has no function "reward" ({listed}); append the function\'s name, for example {name}:my_function'
        )
    return next(iter(public_functions.values()))
