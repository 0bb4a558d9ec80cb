"""The interface of what answers questions: an engine in this process, or a server."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from dsreason.evaluation.types import Question
from dsreason.rollout.protocol import Sampling

Gather = Callable[[Any], list[Any]]
"""The values of some ranks, by rank, from that of this one. Collective."""


def wrap_in_list(value: Any) -> list[Any]:
    return [value]


@dataclass(frozen=True)
class QuestionRequest:
    """A question, asked for the first time (`attempt` 0) or again."""

    question: Question
    sampling: Sampling
    attempt: int = 0


@dataclass(frozen=True)
class Reply:
    """The reply to a request; if `error` says why there is no answer, the other fields are empty."""

    text: str = ""
    finish_reason: str = ""
    completion_tokens: int = 0
    seconds: float = 0.0
    error: str | None = None
    sent: bool = True
    """False if an error came before anybody was asked: a clip that cannot be read."""


class Answerer(Protocol):
    def batches(self, batches: Sequence[Sequence[Question]]) -> Iterator[Sequence[Question]]:
        """Yield the same batches, each when its media have been read; only questions of the last batch may be asked."""

    def ask(self, requests: Sequence[QuestionRequest]) -> Iterator[tuple[QuestionRequest, Reply]]:
        """Each request with its reply, as they come, in any order.

        What concerns one question (an unreadable clip, a request that fails) is a `Reply` with an `error`; what concerns
        all of them (a server that is down or refuses the key) is raised.
        """
