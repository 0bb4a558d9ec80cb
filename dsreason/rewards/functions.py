"""Finding a reward function: a built-in one, one of an installed package, or one in somebody's file."""

from __future__ import annotations

import difflib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from dsreason.data.types import Sample
from dsreason.errors import ConfigError
from dsreason.rewards import BUILT_IN

Result = float | tuple[float, Mapping[str, float]]
RewardFn = Callable[[str, Sample], Result | Awaitable[Result]]

REMOTE = "remote:"
"""Begins the name of a score that a reward server gives, see `dsreason.rewards.remote`."""


def score_on_timeout(score: float) -> Callable[[Callable[..., float]], Callable[..., float]]:
    """Marks a plain reward for which a call beyond the time limit is worth this much, instead of an end to the run."""

    def mark(function: Callable[..., float]) -> Callable[..., float]:
        vars(function)["score_on_timeout"] = score
        return function

    return mark


def find_reward(name: str, options: Mapping[str, Any] | None = None) -> RewardFn:
    """The reward called `name`: a built-in one, `package.module:attr`, `path.py` or `path.py:attr`.

    Without `:attr` it is the function `reward` of the module, else the only public one that is written there. `options`
    are keyword arguments of every call (`{"pattern": …}` for `format`).
    Errors: ConfigError when there is none, when its file does not import, or when it does not take (completion, sample).
    """
    target, _, attribute = name.partition(":")
    if name in BUILT_IN:
        module, attribute = _import_module(f"dsreason.rewards.{BUILT_IN[name]}", name), name
    elif target.endswith(".py") or "/" in target:
        module = _import_file(Path(target).expanduser(), name)
    else:
        module = _import_module(target, name)
    function = _attribute(module, attribute, name) if attribute else _only_function(module, name)
    return _with_options(function, dict(options or {}), name)


def reward_labels(names: Sequence[str]) -> list[str]:
    """Short names for metrics: `judge` of `rewards.py:judge`, `rewards` of `rewards.py`; the whole name where two agree."""
    short = [_short(name) for name in names]
    return [label if short.count(label) == 1 else name for label, name in zip(short, names, strict=True)]


def _short(name: str) -> str:
    target, _, attribute = name.partition(":")
    return attribute or Path(target).name.removesuffix(".py").rpartition(".")[2]


def _with_options(function: Any, options: dict[str, Any], name: str) -> RewardFn:
    if not callable(function):
        raise ConfigError(f'reward "{name}" is no function but {type(function).__name__}')
    try:
        inspect.signature(function).bind("completion", Sample("id", []), **options)
    except TypeError as error:
        given = "".join(f", {key}=…" for key in options)
        raise ConfigError(f'reward "{name}" cannot be called as fn(completion, sample{given}): {error}') from error
    except ValueError:  # a builtin without a signature: the first call will show
        pass
    return functools.partial(function, **options) if options else function


def _attribute(module: ModuleType, attribute: str, name: str) -> Any:
    if attribute not in vars(module):
        near = difflib.get_close_matches(attribute, _functions(module), n=1)
        hint = f'; did you mean "{near[0]}"?' if near else ""
        raise ConfigError(f'reward "{name}": {_place(module)} has no "{attribute}"{hint}')
    return vars(module)[attribute]


def _only_function(module: ModuleType, name: str) -> Any:
    found = _functions(module)
    if "reward" in found:
        return found["reward"]
    if len(found) != 1:
        listed = f"it has {', '.join(found)}" if found else "it has none"
        raise ConfigError(f'reward "{name}": {_place(module)} has no function "reward" ({listed}); name one as :attr')
    return next(iter(found.values()))


def _functions(module: ModuleType) -> dict[str, Any]:
    """The public functions that are written in the module, not imported into it."""
    return {
        key: value
        for key, value in vars(module).items()
        if inspect.isfunction(value) and not key.startswith("_") and value.__module__ == module.__name__
    }


def _place(module: ModuleType) -> str:
    return str(module.__file__) if module.__name__.startswith("dsreason_reward_") else module.__name__


def _import_module(target: str, name: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path:
        # `python -m dsreason` has the current folder on the path, the installed command has not: make them agree.
        sys.path.insert(0, here)
    try:
        return importlib.import_module(target)
    except ModuleNotFoundError as error:
        if error.name is None or not (target == error.name or target.startswith(f"{error.name}.")):
            raise ConfigError(f'reward "{name}" needs a package that is not installed: {error.name}') from error
        near = difflib.get_close_matches(target, BUILT_IN, n=1)
        hint = f'; did you mean "{near[0]}"?' if near else "."
        raise ConfigError(
            f'reward "{name}" was not found{hint} Built in: {", ".join(BUILT_IN)}. '
            "Your own: package.module:attr, or a path to a .py file, with :attr where it has several functions"
        ) from error
    except Exception as error:  # somebody else's code
        raise ConfigError(f'reward "{name}": {target} does not import: {type(error).__name__}: {error}') from error


def _import_file(path: Path, name: str) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f'reward "{name}": no file {path.absolute()}')
    path = path.resolve()
    module_name = f"dsreason_reward_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f'reward "{name}": {path} is not a Python file')
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # before running it: its dataclasses look themselves up
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # somebody else's code
        del sys.modules[module_name]
        raise ConfigError(f'reward "{name}": {path} does not import: {type(error).__name__}: {error}') from error
    return module
