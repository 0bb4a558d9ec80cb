"""Reward functions, which score completions.

A reward function is `fn(completion: str, sample: Sample) -> float | None | (float, dict)`, plain or async. The dict contains
metrics, and None means that the function does not apply to the sample. See `signatures` for functions written for other tools.
The built-in functions below can be imported from this package. They are pure, except `judge`, which queries another model.
`scoring.Scorer` calls built-in and user-defined functions in worker processes.
"""

from collections.abc import Callable
from typing import Any

from dsreason.rewards.choice import ordinal_choice, single_choice, single_choice_lenient
from dsreason.rewards.fields import json_fields
from dsreason.rewards.grounding import box_iou, points, temporal_iou
from dsreason.rewards.judge import judge
from dsreason.rewards.latex import boxed_math, direct_math
from dsreason.rewards.numeric import numeric
from dsreason.rewards.text import exact_match, format, gsm8k, overlong
from dsreason.rewards.trajectory import trajectory

BUILT_IN: dict[str, Callable[..., Any]] = {
    "format": format,
    "single_choice": single_choice,
    "single_choice_lenient": single_choice_lenient,
    "ordinal_choice": ordinal_choice,
    "gsm8k": gsm8k,
    "boxed_math": boxed_math,
    "direct_math": direct_math,
    "overlong": overlong,
    "exact_match": exact_match,
    "temporal_iou": temporal_iou,
    "box_iou": box_iou,
    "points": points,
    "trajectory": trajectory,
    "numeric": numeric,
    "json_fields": json_fields,
    "judge": judge,
}
WITHOUT_ANSWER = {"format", "overlong", "judge"}
"""Rewards that need no reference answer."""
READS_REFERENCE = ("temporal_iou", "box_iou", "points", "trajectory", "numeric", "json_fields")
"""Rewards that parse the reference answer before the completion, and raise DataError if they cannot parse it."""
