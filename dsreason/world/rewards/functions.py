"""Reward functions for clips, `fn(clips, samples)`, both built-in and user-defined.

    def quiet(clips, samples):  # clips: float32 [B, 3, T, H, W] in [0, 1]; samples[i].prompt, samples[i].meta["fps"], …
        return 1 - clips.mean(dim=(1, 2, 3, 4))  # B finite numbers: tensor, array or list

User-defined functions are called like text rewards: in worker processes and with a time limit. Their results are checked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsreason.rewards.functions import bind_options, find_function
from dsreason.rewards.worker import BOUND, LARGEST, FunctionKind, describe_value
from dsreason.world.rewards import pixels
from dsreason.world.types import WorldRow

ClipReward = Callable[[Tensor, Sequence[WorldRow]], Any]

BUILT_IN: dict[str, ClipReward] = {
    "brightness": pixels.brightness,
    "sharpness": pixels.sharpness,
    "motion": pixels.motion,
    "flicker": pixels.flicker,
    "colour": pixels.colour,
    "red": pixels.red,
    "solid": pixels.solid,
    "follow": pixels.follow,
    "red_solid": pixels.red_solid,
}
ADVICE = (
    f"Built in: {', '.join(BUILT_IN)}. "
    "Your own: package.module:attr, or a path to a .py file, with :attr if it has several functions"
)


def find_clip_reward(name: str, options: Mapping[str, Any] | None = None) -> Callable[..., Any]:
    """Return the reward `name` as a function of (uint8 `[B, 3, T, H, W]`, rows).

    Raises:
        ConfigError: the function does not exist, its file cannot be imported, or it cannot be called as fn(clips, samples)
            with its options.
    """
    named_function = find_function(name, BUILT_IN, ADVICE)
    function = bind_options(named_function, dict(options or {}), name, {"clips": None, "samples": []})

    def on_pixels(clips: NDArray[np.uint8], samples: Sequence[WorldRow]) -> Any:
        with torch.no_grad():
            return function(torch.from_numpy(clips).float().div_(255), samples)

    return on_pixels


def check_scores(result: Any, arguments: tuple[Any, ...]) -> tuple[list[float], dict[str, float]]:
    """Convert a reward function's result to one plain number per clip. The returned dict is always empty.

    Raises:
        ValueError: the result is not one finite number per clip.
    """
    try:
        scores = to_numbers(result)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError comes from tensors
        raise ValueError(f"returned {describe_value(result)}; it must return a finite number for each clip") from None
    count = len(arguments[1])
    if scores.shape != (count,):
        raise ValueError(
            f"returned values of shape {list(scores.shape)} for {count} clips; the shape must be [{count}]"
        )
    if not np.isfinite(scores).all():
        worst = int(np.flatnonzero(~np.isfinite(scores))[0])
        raise ValueError(f'returned {scores[worst]} for "{arguments[1][worst].id}"; rewards must be finite')
    if (np.abs(scores) > LARGEST).any():
        worst = int(np.abs(scores).argmax())
        raise ValueError(f'returned {scores[worst]} for "{arguments[1][worst].id}"; {BOUND}')
    return scores.tolist(), {}


def to_numbers(result: Any) -> NDArray[np.float64]:
    """Convert a result to numbers. Reject strings, which numpy would parse, and complex numbers, which it would truncate."""
    if isinstance(result, Tensor):
        result = result.detach().cpu().to(torch.promote_types(result.dtype, torch.float64)).numpy()
    values = np.asarray(result)
    if values.dtype.kind not in "biuf" and not all(isinstance(value, Real) for value in values.flat):
        raise TypeError(values.dtype)
    return values.astype(np.float64)


KIND = FunctionKind(find_clip_reward, check_scores)


def check_functions(names: Mapping[str, float], options: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise ConfigError if a reward cannot be found or called. This imports user code."""
    for name in names:
        find_clip_reward(name, options.get(name))
