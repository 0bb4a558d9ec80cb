"""Which arguments vLLM's engine has: read from its source, for importing it takes seconds, and a device."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterable
from pathlib import Path

from dsreason.config.problems import nearest
from dsreason.errors import ConfigError


def check_engine_options(options: Iterable[str], key: str) -> None:
    """ConfigError for options under our `key` that the installed vLLM does not have."""
    options = list(options)
    if not options:
        return
    known = engine_arguments()
    problems = []
    for name in sorted(set(options) - known):
        near = nearest(name, known)
        problems.append(
            f"{key}.{name}: is no argument of this vLLM; " + (f"did you mean {near}?" if near else "remove it")
        )
    if problems:
        raise ConfigError("\n".join(problems))


def engine_arguments() -> set[str]:
    """The public fields of vLLM's `EngineArgs`."""
    package = importlib.util.find_spec("vllm")
    if package is None or package.origin is None:
        raise ConfigError("engine_options are vLLM's, and vLLM is not installed; install it, or remove them")
    source = (Path(package.origin).parent / "engine" / "arg_utils.py").read_text(encoding="utf-8")
    (arguments,) = (
        node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == "EngineArgs"
    )
    names = {
        field.target.id
        for field in arguments.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }
    return {name for name in names if not name.startswith("_")}
