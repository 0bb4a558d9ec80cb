"""Faster imports of large libraries, and the command that installs a missing optional one."""

from __future__ import annotations

import gc
import importlib.util
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager

EXTRAS = {"similarity": "sentence-transformers>=5", "wandb": "wandb>=0.31"}
"""Extras of pyproject.toml: name → the package that it requires."""


@contextmanager
def make_imports_fast() -> Iterator[None]:
    """Pause the garbage collector and hide scikit-learn while torch, transformers and DeepSpeed are imported.

    The imports create a million objects that live until the process ends. The collector would traverse them again and again
    during the imports, then in each full collection, and once more at exit: a third of the start-up time.

    If scikit-learn is installed, transformers loads it together with pandas: 0.4 s per process, for a generation method that
    dsreason does not use. It can be imported afterwards.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    hides = "sklearn" not in sys.modules
    if hides:
        sys.modules["sklearn"] = None  # type: ignore[assignment]  # Python then raises ModuleNotFoundError
    try:
        yield
    finally:
        if hides:
            sys.modules.pop("sklearn", None)
        gc.freeze()
        if was_enabled:
            gc.enable()


def build_install_command(extra: str) -> str:
    """Return the command that adds an extra to the environment that runs this process.

    It installs the extra's package, since dsreason is not on a package index. An environment created by uv has no pip.
    """
    pip = importlib.util.find_spec("pip") is not None
    installer = (
        [sys.executable, "-m", "pip", "install"] if pip else ["uv", "pip", "install", "--python", sys.executable]
    )
    return shlex.join([*installer, EXTRAS[extra]])
