"""Rewards for a completion's text: its format, an exact match, GSM8K's final number, and a penalty for its length."""

from __future__ import annotations

import dataclasses
import re

from dsreason.answers.compat import extract_hash_number
from dsreason.data.types import Sample
from dsreason.text import normalize, split_response

FORMAT = r"\s*<think>(?:(?!</?think>).)*</think>\s*<answer>.*</answer>\s*"
"""Pattern for reasoning followed by an answer, with nothing but white space around the two blocks."""
COSMOS_FORMAT = r"<think>(?:(?!</?think>).)*</think>\n\n<answer>.*</answer>\n?"
"""Pattern of cosmos-rl, with an empty line between reasoning and answer, although its own prompt shows a space."""
OPENING = "reply_opening"
"""Key in a sample's `meta` of the tag in the prompt that opens the reply's thoughts."""
REQUEST = (
    "Answer the question in the following format: "
    "<think>\nyour reasoning\n</think>\n\n<answer>\nyour answer\n</answer>."
)
"""Format request for a system prompt, from the Cosmos-Reason1 model card; both patterns accept the requested format."""


def format(completion: str, sample: Sample, *, pattern: str = FORMAT) -> float:
    """Return 1 if the regular expression matches the entire completion (`.` matches any character), else 0.

    A second `<answer>` block is part of the answer's text, as in cosmos-rl. cosmos-rl's rewards use the first block; the rewards
    of this package use the last one. If the prompt already opens the reply's thoughts (see `add_opening`), the tag in the prompt
    is part of the text that must match.
    """
    return float(re.fullmatch(pattern, sample.meta.get(OPENING, "") + completion, re.DOTALL) is not None)


def describe_format_problem(prompt: str, pattern: str = FORMAT) -> str | None:
    """Return why a completion in the format that the prompt requests would fail the `format` reward; None if it would pass.

    The requested format is the part of the prompt from the first tag to the last closing tag:
    `… in the following format: <think> your reasoning </think> <answer> your answer </answer>.`
    """
    first, closing = re.search(r"<\w+>", prompt), [*re.finditer(r"</\w+>", prompt)]
    example = prompt[first.start() : closing[-1].end()] if first and closing else ""
    if not example:
        return "the prompt requests no format: it contains no <tag>…</tag>"
    if re.fullmatch(pattern, example, re.DOTALL) is None:
        return f"the prompt requests {example!r}, but the pattern {pattern!r} does not accept it"
    return None


def exact_match(completion: str, sample: Sample) -> float:
    """Return 1 if the final answer equals the reference, ignoring case and the amount of white space, else 0.

    Evaluation, unlike this reward, also ignores a final full stop.
    """
    if sample.answer is None:
        return 0.0
    answer, right = (normalize(split_response(text).answer) for text in (completion, sample.answer))
    return float(answer != "" and answer == right)


def gsm8k(completion: str, sample: Sample) -> float:
    """Return 1 if the first `#### number` has the same digits as the reference, ignoring thousands separators, else 0.

    The reference ends in `#### 72`, as in the data set, or consists of only the number. A completion without a number gets 0;
    in cosmos-rl, it gets 1 if the reference has no number either.
    """
    number = extract_hash_number(completion)
    if number is None or sample.answer is None:
        return 0.0
    return float(number == (extract_hash_number(sample.answer) or sample.answer.strip().replace(",", "")))


def overlong(completion: str, sample: Sample, *, buffer: int | None = None, factor: float = 1.0) -> float:
    """Return DAPO's soft length penalty (`compute_soft_overlong`) for the lengths in `sample.meta`, which `add_length` sets.

    By default, `buffer` is a fifth of the maximum completion length, as in the paper (4096 of 20480).
    """
    missing = {"completion_length", "max_completion_length"} - sample.meta.keys()
    if missing:
        raise ValueError(
            f"overlong requires {' and '.join(sorted(missing))} in sample.meta; add them with `add_length`"
        )
    longest = sample.meta["max_completion_length"]
    return compute_soft_overlong(
        sample.meta["completion_length"], longest, max(longest // 5, 1) if buffer is None else buffer, factor=factor
    )


def add_opening(sample: Sample, opening: str) -> Sample:
    """Add to the sample's `meta` the tag with which the prompt already opens the reply's thoughts, unless it opens none."""
    return dataclasses.replace(sample, meta={**sample.meta, OPENING: opening}) if opening else sample


def compute_soft_overlong(length: int, max_length: int, buffer: int, *, factor: float = 1.0) -> float:
    """Return 0 up to `max_length - buffer` tokens; beyond that, decrease linearly to `-factor` at `max_length` (DAPO)."""
    if not 0 < buffer <= max_length:
        raise ValueError(
            f"the overlong buffer ({buffer}) must be between 1 and the maximum completion length ({max_length} tokens); "
            "a larger buffer would penalise every completion"
        )
    excess = length - (max_length - buffer)
    return -factor * min(excess / buffer, 1.0) if excess > 0 else 0.0


def add_length(sample: Sample, length: int, max_length: int) -> Sample:
    """Add the completion's number of tokens, and the maximum number, to the sample's `meta`."""
    return dataclasses.replace(
        sample, meta={**sample.meta, "completion_length": length, "max_completion_length": max_length}
    )
