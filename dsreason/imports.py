"""Imports of large libraries without the garbage collector, and without what they load for nothing."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

UNUSED = ("sklearn", "scipy")
"""What transformers imports where it is installed, for a way of generating and for losses that nobody needs here; with
pandas 0.5 s of each process."""


@contextmanager
def quick_imports() -> Iterator[None]:
    """Put the imports of torch, transformers and DeepSpeed inside.

    They make a million objects that all stay. The collector would look through them again and again while they are
    made, then in each of its full rounds, and once more when the process ends: a third of what a start costs.

    Nor do they see `UNUSED`.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    hidden = [name for name in UNUSED if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None: Python says that there is no such module
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
        gc.freeze()
        if was_enabled:
            gc.enable()
