"""Importing a person's own code: an adapter or a reward, by path or by module name."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from dsreason.errors import ConfigError

FILE_MODULE = "dsreason_file_"
"""How the names of modules begin that were imported by path."""


def import_file(path: Path, what: str) -> ModuleType:
    """The module in a `.py` file, imported once. `what` begins the ConfigErrors: `data.adapter "my.py"`."""
    if not path.is_file():
        raise ConfigError(f"{what}: no file {path.absolute()}")
    path = path.resolve()
    module_name = f"{FILE_MODULE}{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{what}: {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # before running it: its dataclasses look themselves up
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # somebody else's code
        del sys.modules[module_name]
        raise ConfigError(f"{what}: {path} does not import: {type(error).__name__}: {error}") from error
    return module


def import_module(target: str, what: str, known: Sequence[str], advice: str) -> ModuleType:
    """The module called `target`, the current folder's included.

    ConfigError where there is none, with the nearest of the `known` names and `advice` on what may be given.
    """
    here = str(Path.cwd())
    if here not in sys.path:
        # `python -m dsreason` has the current folder on the path, the installed command has not: make them agree.
        sys.path.insert(0, here)
    try:
        return importlib.import_module(target)
    except ModuleNotFoundError as error:
        if error.name is None or not (target == error.name or target.startswith(f"{error.name}.")):
            raise ConfigError(f"{what} needs a package that is not installed: {error.name}") from error
        near = difflib.get_close_matches(target, known, n=1)
        hint = f'; did you mean "{near[0]}"?' if near else "."
        raise ConfigError(f"{what} was not found{hint} {advice}") from error
    except Exception as error:  # somebody else's code
        raise ConfigError(f"{what}: {target} does not import: {type(error).__name__}: {error}") from error
