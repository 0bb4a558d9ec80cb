"""Parsing of reference answers, for rewards that need their value."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from dsreason.data.types import Sample
from dsreason.errors import DataError
from dsreason.rewards.reading.plain import get_answer

Read = TypeVar("Read")


def read_reference(sample: Sample, read: Callable[[str], Read | None], expected: str) -> Read:
    """Parse the sample's answer with `read`, and return the result.

    Raises:
        DataError: the answer could not be parsed; the message names the sample, its answer and what was `expected`.
    """
    answer = sample.answer
    parsed = read(get_answer(answer)) if isinstance(answer, str) and answer.strip() else None
    if parsed is None:
        raise build_data_error(sample, f"contains no {expected}")
    return parsed


def build_data_error(sample: Sample, problem: str) -> DataError:
    """Build an error about the sample's answer; `problem` is a predicate, such as "has no fields"."""
    return DataError(f"sample {sample.id!r}: field 'answer' ({sample.answer!r:.100}) {problem}")
