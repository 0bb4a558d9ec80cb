"""The interface for answerers: an engine in this process, or a server."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from dsreason.evaluation.types import Question
from dsreason.rollout.protocol import Sampling

Gather = Callable[[Any], list[Any]]
"""Function that takes this rank's value and returns the values of a group of ranks, in rank order. Collective."""


def wrap_in_list(value: Any) -> list[Any]:
    return [value]


@dataclass(frozen=True)
class QuestionRequest:
    """A request to answer a question, either for the first time (`attempt` 0) or as a retry."""

    question: Question
    sampling: Sampling
    attempt: int = 0


@dataclass(frozen=True)
class Reply:
    """The reply to a request. If there is no answer, `error` gives the reason, and the other fields are empty."""

    text: str = ""
    finish_reason: str = ""
    completion_tokens: int = 0
    seconds: float = 0.0
    error: str | None = None
    sent: bool = True
    """Whether the request was sent; False if an error occurred before, such as an unreadable clip."""
    opening: str = ""
    """The tag with which the prompt already opens the thoughts, as in `EncodedPrompt`; servers do not report it."""


class Answerer(Protocol):
    def batches(self, batches: Sequence[Sequence[Question]]) -> Iterator[Sequence[Question]]:
        """Yield the batches, possibly in parts, as soon as their media are decoded. `ask` may be called only for the most
        recently yielded questions."""

    def ask(self, requests: Sequence[QuestionRequest]) -> Iterator[tuple[QuestionRequest, Reply]]:
        """Yield each request with its reply as soon as the reply arrives, in any order.

        An error that affects one question (an unreadable clip, a failed request) results in a `Reply` with an `error`. An error
        that affects all questions (a server that is down or rejects the key) is raised.
        """
