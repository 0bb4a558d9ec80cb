"""Rewards that read text: format, exact match, GSM8K's final number, and the penalty for long completions."""

from __future__ import annotations

import dataclasses
import re

from dsreason.answers.compat import hash_number
from dsreason.data.types import Sample
from dsreason.text import normalized, split_response

FORMAT = r"\s*<think>(?:(?!</?think>).)*</think>\s*<answer>.*</answer>\s*"
"""Thoughts, then the answer, any white space around them and nothing else."""
COSMOS_FORMAT = r"<think>(?:(?!</?think>).)*</think>\n\n<answer>.*</answer>\n?"
"""As cosmos-rl has it: one empty line between the two. Its own prompt shows a space there."""
REQUEST = (
    "Answer the question in the following format: "
    "<think>\nyour reasoning\n</think>\n\n<answer>\nyour answer\n</answer>."
)
"""For a system prompt: asks for what both accept. Cosmos-Reason1's model card has it there."""


def format(completion: str, sample: Sample, *, pattern: str = FORMAT) -> float:
    """1 if the whole completion matches the regular expression (where `.` is any character), else 0.

    A second `<answer>` block belongs to the answer's text, as in cosmos-rl, whose rewards read the first; ours read the last.
    """
    return float(re.fullmatch(pattern, completion, re.DOTALL) is not None)


def format_problem(prompt: str, pattern: str = FORMAT) -> str | None:
    """Return why a completion that follows the prompt would get no `format` reward; None when it would.

    The format that a prompt asks for is what stands in it from the first tag to the last closing tag:
    `… in the following format: <think> your reasoning </think> <answer> your answer </answer>.`
    """
    first, closing = re.search(r"<\w+>", prompt), [*re.finditer(r"</\w+>", prompt)]
    example = prompt[first.start() : closing[-1].end()] if first and closing else ""
    if not example:
        return "the prompt asks for no format: it has no <tag>…</tag>"
    if re.fullmatch(pattern, example, re.DOTALL) is None:
        return f"the prompt asks for {example!r}, which the pattern {pattern!r} does not accept"
    return None


def exact_match(completion: str, sample: Sample) -> float:
    """1 if the final answer is the reference, case and the amount of white space aside, else 0.

    Evaluation also forgives a final full stop.
    """
    if sample.answer is None:
        return 0.0
    answer, right = (normalized(split_response(text).answer) for text in (completion, sample.answer))
    return float(answer != "" and answer == right)


def gsm8k(completion: str, sample: Sample) -> float:
    """1 if the first `#### number` is the reference's, digit for digit (thousands commas aside), else 0.

    The reference ends in `#### 72`, as the data set has it, or is the bare number. A completion without a number gets 0
    (in cosmos-rl it gets 1 when the reference has none either).
    """
    number = hash_number(completion)
    if number is None or sample.answer is None:
        return 0.0
    return float(number == (hash_number(sample.answer) or sample.answer.strip().replace(",", "")))


def overlong(completion: str, sample: Sample, *, buffer: int | None = None, factor: float = 1.0) -> float:
    """DAPO's soft punishment, see `soft_overlong`; the lengths are in `sample.meta`, see `with_length`.

    `buffer` is a fifth of the longest completion when it is not given, as in the paper (4096 of 20480).
    """
    missing = {"completion_length", "max_completion_length"} - sample.meta.keys()
    if missing:
        raise ValueError(f"overlong needs {' and '.join(sorted(missing))} in sample.meta; with_length puts them there")
    longest = sample.meta["max_completion_length"]
    return soft_overlong(
        sample.meta["completion_length"], longest, max(longest // 5, 1) if buffer is None else buffer, factor=factor
    )


def soft_overlong(length: int, max_length: int, buffer: int, *, factor: float = 1.0) -> float:
    """0 up to `max_length - buffer` tokens, from there linear to `-factor` at `max_length` (DAPO)."""
    if not 0 < buffer <= max_length:
        raise ValueError(
            f"the overlong buffer ({buffer}) must be between 1 and the longest completion ({max_length} tokens): "
            "a longer one punishes every completion"
        )
    excess = length - (max_length - buffer)
    return -factor * min(excess / buffer, 1.0) if excess > 0 else 0.0


def with_length(sample: Sample, length: int, max_length: int) -> Sample:
    """The sample with what the caller knows about its completion: its tokens, and how many there could have been."""
    return dataclasses.replace(
        sample, meta={**sample.meta, "completion_length": length, "max_completion_length": max_length}
    )
