"""Imports of large libraries without the garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quick_imports() -> Iterator[None]:
    """Put the imports of torch, transformers and DeepSpeed inside.

    They make a million objects that all stay. The collector would look through them again and again while they are
    made, then in each of its full rounds, and once more when the process ends: a third of what a start costs.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
