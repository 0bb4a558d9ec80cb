"""Imports of the user's own code, such as an adapter or a reward, by path or by module name.

The current folder is not on the import path; otherwise, a library that tries to import an optional package might import a file
that lies next to the user's data. Code named in the configuration is still found in the current folder. Imports in that code are
resolved from installed packages first, then from the code's own folder, and then from the current folder.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from dsreason.errors import ConfigError
from dsreason.problems import describe_missing_file, find_nearest

FILE_MODULE = "dsreason_file_"
"""Prefix for the names of modules that are imported by path."""


class UserCodeFinder(MetaPathFinder):
    """An import finder that searches the folders of the user's code, but only for imports made by that code.

    The finder is queried last, so it never shadows an installed package, and it finds nothing for imports in libraries.
    """

    def __init__(self) -> None:
        self.folders: dict[str, list[str]] = {}
        """Top-level user module → folders to search for it and for its imports."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if path is not None:  # submodules are found through their package
            return None
        folders = self.folders.get(fullname) or self.folders.get(_find_importer())
        spec = PathFinder.find_spec(fullname, folders) if folders else None
        if spec is not None and folders is not None:
            self.folders[fullname] = folders
        return spec

    def add(self, module: str, folders: Sequence[Path]) -> None:
        self.folders[module] = [str(folder) for folder in folders]
        if self not in sys.meta_path:
            sys.meta_path.append(self)


FINDER = UserCodeFinder()


def _find_importer() -> str:
    """Return the top-level module whose code runs the current import statement or `import_module` call."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = str(frame.f_globals.get("__name__")).partition(".")[0]
        if name not in ("importlib", "_frozen_importlib", "_frozen_importlib_external"):
            return name
        frame = frame.f_back
    return ""


def find_code(name: str, what: str, known: Sequence[str], advice: str) -> Any:
    """Import `package.module` or `path.py` and return the module, or its attribute if the name ends with `:attr`.

    Args:
        what: beginning of error messages, such as `data.adapter "my.py"`.
        known: valid names, of which an error message suggests the nearest.
        advice: end of an error message, which explains the allowed names.

    Raises:
        ConfigError: the module or attribute does not exist, or the import fails.
    """
    target, _, attribute = name.partition(":")
    if target.endswith(".py") or "/" in target:
        module = import_file(Path(target).expanduser(), what)
    else:
        module = import_module(target, what, known, advice)
    try:
        return getattr(module, attribute) if attribute else module  # some packages import it only now
    except AttributeError:
        near = find_nearest(attribute, vars(module))
        hint = f'; did you mean "{near}"?' if near else ""
        raise ConfigError(f'{what}: {target} has no "{attribute}"{hint}') from None
    except Exception as error:
        raise ConfigError(f"{what}: {name} cannot be imported: {type(error).__name__}: {error}") from error


def find_code_file(name: str) -> Path | None:
    """Return the file that `find_code` would import for this name, or None if no such file exists."""
    target = name.partition(":")[0]
    if target.endswith(".py") or "/" in target:
        candidates = [Path(target).expanduser()]
    else:
        module = Path(*target.split("."))
        folders = [*map(Path, sys.path), Path.cwd()]
        candidates = [path for folder in folders for path in (folder / f"{module}.py", folder / module / "__init__.py")]
    return next((path for path in candidates if path.is_file()), None)


def import_file(path: Path, what: str) -> ModuleType:
    """Import a `.py` file as a module, once per process."""
    if not path.is_file():
        raise ConfigError(f"{what}: {path.absolute()}: {describe_missing_file(path)}")
    path = path.resolve()
    stem = path.stem.replace(".", "_")
    module_name = f"{FILE_MODULE}{stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{what}: {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # set before the code runs, because dataclasses look up their module
    FINDER.add(module_name, [path.parent, Path.cwd()])
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # a script that calls sys.exit() would end this process with exit code 0
        del sys.modules[module_name]
        raise ConfigError(f"{what}: {path} cannot be imported: {type(error).__name__}: {error}") from error
    return module


def import_module(target: str, what: str, known: Sequence[str], advice: str) -> ModuleType:
    """Import the module `target` from the installed packages or from the current folder."""
    package = target.partition(".")[0]
    try:
        if package not in sys.modules and importlib.util.find_spec(package) is None:
            FINDER.add(package, [Path.cwd()])
        return importlib.import_module(target)
    except ModuleNotFoundError as error:
        if error.name is None or not (target == error.name or target.startswith(f"{error.name}.")):
            raise ConfigError(f"{what} needs a package that is not installed: {error.name}") from error
        near = find_nearest(target, known)
        hint = f'; did you mean "{near}"?' if near else "."
        raise ConfigError(f"{what} was not found{hint} {advice}") from error
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{what}: {target} cannot be imported: {type(error).__name__}: {error}") from error


def restore_script_folders() -> None:
    """Remove the PYTHONSAFEPATH set by `dsreason.__main__`, so that processes started by user code do not inherit it."""
    if os.environ.get("PYTHONSAFEPATH") == "dsreason":
        del os.environ["PYTHONSAFEPATH"]
