"""The reference answer of a sample, for rewards that read more than its words."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from dsreason.data.types import Sample
from dsreason.errors import DataError
from dsreason.rewards.reading.plain import answer_of

Read = TypeVar("Read")


def reference(sample: Sample, read: Callable[[str], Read | None], wanted: str) -> Read:
    """Return what `read` finds in the sample's answer.

    Raises:
        DataError: it finds nothing; the text names the sample, its answer and what is `wanted`.
    """
    answer = sample.answer
    reference = read(answer_of(answer)) if isinstance(answer, str) and answer.strip() else None
    if reference is None:
        raise unusable(sample, f"which holds no {wanted}")
    return reference


def unusable(sample: Sample, problem: str) -> DataError:
    return DataError(f"sample {sample.id!r}: field 'answer' is {sample.answer!r:.100}, {problem}")
