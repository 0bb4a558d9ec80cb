"""Imports of large libraries without the garbage collector and what they load for nothing; and of those not installed."""

from __future__ import annotations

import gc
import importlib.util
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager

EXTRAS = {"similarity": "sentence-transformers>=5", "wandb": "wandb>=0.31"}
"""What pyproject.toml asks for under these names."""


@contextmanager
def quick_imports() -> Iterator[None]:
    """Put the imports of torch, transformers and DeepSpeed inside.

    They make a million objects that all stay. The collector would look through them again and again while they are
    made, then in each of its full rounds, and once more when the process ends: a third of what a start costs.

    Nor do they see scikit-learn, which transformers loads, with pandas, where it is installed: 0.4 s of each process, for a
    way of generating that nobody uses here. It can be imported afterwards.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    hides = "sklearn" not in sys.modules
    if hides:
        sys.modules["sklearn"] = None  # type: ignore[assignment]  # Python then says that there is no such module
    try:
        yield
    finally:
        if hides:
            sys.modules.pop("sklearn", None)
        gc.freeze()
        if was_enabled:
            gc.enable()


def install_command(extra: str) -> str:
    """Return what a person types to add an extra to the environment that runs this.

    By its package: ours is on no package index. An environment that uv made has no pip.
    """
    pip = importlib.util.find_spec("pip") is not None
    installer = (
        [sys.executable, "-m", "pip", "install"] if pip else ["uv", "pip", "install", "--python", sys.executable]
    )
    return shlex.join([*installer, EXTRAS[extra]])
