"""Faster imports of large libraries, and the command that installs a missing optional library."""

from __future__ import annotations

import gc
import importlib.util
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager

EXTRAS = {"similarity": "sentence-transformers>=5", "wandb": "wandb>=0.31"}
"""Extra in pyproject.toml → required package."""


@contextmanager
def make_imports_fast() -> Iterator[None]:
    """Pause the garbage collector and hide scikit-learn while torch, transformers and DeepSpeed are imported.

    The imports create a million objects that live until the process ends. Traversing them again and again, during the imports,
    in every later full collection and at exit, would take a third of the start-up time.

    If scikit-learn is installed, transformers imports it, along with pandas, for a generation method that dsreason does not use,
    which takes 0.4 s per process. After the block, scikit-learn can be imported again.
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

    The command installs the extra's package directly, because dsreason is not on a package index. It uses uv if the environment
    has no pip, as in environments that uv has created.
    """
    pip = importlib.util.find_spec("pip") is not None
    installer = (
        [sys.executable, "-m", "pip", "install"] if pip else ["uv", "pip", "install", "--python", sys.executable]
    )
    return shlex.join([*installer, EXTRAS[extra]])
