"""Rewards: what a completion is worth.

A reward is `fn(completion: str, sample: Sample) -> float | (float, dict)`, plain or async; the dict holds metrics. The
built-in ones below are pure and can be imported from here. `scoring.Scorer` calls them, and a user's own, in worker
processes. A module is loaded when one of its functions is asked for: `boxed_math` brings sympy, `format` does not.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsreason.rewards.choice import ordinal_choice, single_choice, single_choice_lenient
    from dsreason.rewards.latex import boxed_math, direct_math
    from dsreason.rewards.text import exact_match, format, gsm8k, overlong

__all__ = [
    "boxed_math",
    "direct_math",
    "exact_match",
    "format",
    "gsm8k",
    "ordinal_choice",
    "overlong",
    "single_choice",
    "single_choice_lenient",
]

BUILT_IN = {
    "format": "text",
    "single_choice": "choice",
    "single_choice_lenient": "choice",
    "ordinal_choice": "choice",
    "gsm8k": "text",
    "boxed_math": "latex",
    "direct_math": "latex",
    "overlong": "text",
    "exact_match": "text",
}
"""Name of a built-in reward → the module that has it."""


def __getattr__(name: str) -> Callable[..., Any]:
    if name not in BUILT_IN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    function: Callable[..., Any] = getattr(importlib.import_module(f"{__name__}.{BUILT_IN[name]}"), name)
    return function
