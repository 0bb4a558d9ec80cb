"""Faster imports of large libraries, and the command that installs a missing optional one."""

from __future__ import annotations

import gc
import importlib.util
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager

EXTRAS = {"similarity": "sentence-transformers>=5", "wandb": "wandb>=0.31"}
"""Optional extras of pyproject.toml: name → required package."""


@contextmanager
def make_imports_fast() -> Iterator[None]:
    """Pause the garbage collector and hide scikit-learn while torch, transformers and DeepSpeed are imported.

    The imports create a million objects that live until the process ends. The collector would traverse them repeatedly during
    the imports, in every later full collection and again at exit, which would take a third of the start-up time.

    If scikit-learn is installed, transformers imports it and pandas for a generation method that dsreason does not use, and this
    takes 0.4 s per process. After the block, scikit-learn can be imported again.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    hides = "sklearn" not in sys.modules
    if hides:
        sys.modules["sklearn"] = None  # type: ignore[assignment]  # an import of it now raises ModuleNotFoundError
    try:
        yield
    finally:
        if hides:
            sys.modules.pop("sklearn", None)
        gc.freeze()
        if was_enabled:
            gc.enable()


def build_install_command(extra: str) -> str:
    """Return the command that installs an extra into this process's environment.

    The command installs the extra's package directly, since dsreason is not on a package index. It uses uv if the environment
    has no pip, as is the case for environments created by uv.
    """
    pip = importlib.util.find_spec("pip") is not None
    installer = (
        [sys.executable, "-m", "pip", "install"] if pip else ["uv", "pip", "install", "--python", sys.executable]
    )
    return shlex.join([*installer, EXTRAS[extra]])
