"""Rewards: what a completion is worth.

A reward is `fn(completion: str, sample: Sample) -> float | (float, dict)`, plain or async; the dict holds metrics. The
built-in ones below are pure and can be imported from here. `scoring.Scorer` calls them, and a user's own, in worker
processes.
"""

from collections.abc import Callable

from dsreason.rewards.choice import ordinal_choice, single_choice, single_choice_lenient
from dsreason.rewards.latex import boxed_math, direct_math
from dsreason.rewards.text import exact_match, format, gsm8k, overlong

BUILT_IN: dict[str, Callable[..., float]] = {
    "format": format,
    "single_choice": single_choice,
    "single_choice_lenient": single_choice_lenient,
    "ordinal_choice": ordinal_choice,
    "gsm8k": gsm8k,
    "boxed_math": boxed_math,
    "direct_math": direct_math,
    "overlong": overlong,
    "exact_match": exact_match,
}
