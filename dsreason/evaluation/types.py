"""Types that asking, grading and reporting exchange: a question, and a stored result."""

from __future__ import annotations

from dataclasses import dataclass, field

from pydantic import StrictBool

from dsreason.data.types import Sample
from dsreason.text import QuestionKind

KIND = "kind"
"""Rules that decide whether an answer is right if no scorer does, by the question's kind."""


@dataclass(frozen=True)
class Question:
    """One question, with everything that asking and grading it takes.

    Example: `Question(id="robovqa/0123/5f1c09ae7d3b2e60", dataset="robovqa", video_id="0123", kind="multiple_choice",
    sample=Sample(…), answer="A", options={"A": "left", "B": "right"})`.
    """

    id: str
    """Unique in an evaluation, and the same whatever else is asked: `<dataset>/<video_id>/<key>`, see `identity`."""
    dataset: str
    video_id: str
    """Names the result file: a clip's name without its ending, or a row's id."""
    kind: QuestionKind
    sample: Sample
    """The sample as it is asked: `messages` end with the user's, media paths are absolute."""
    answer: str
    options: dict[str, str] | None = None
    problem: str | None = None
    """Why it cannot be asked: a clip that is missing, say. It then counts as unanswered."""


@dataclass(frozen=True)
class Result:
    """One graded answer, as it stands in `<results_dir>/<model>/<answer_type>/<dataset>/<video_id>.json`.

    The first eight fields are cosmos-reason1's.
    """

    datasource: str
    video_id: str
    prompt: list[str]
    """The texts of the messages asked, in order: system (if there is one), user."""
    correct_answer: str
    reasoning: str
    answer: str
    """The parsed answer; "" if nothing was read or answered."""
    full_response: str
    is_correct: StrictBool
    id: str
    """Kind of the question."""
    kind: QuestionKind
    options: dict[str, str] | None
    media: list[str]
    """Paths, in the order in which they are shown."""
    rule: str
    """Rule of the parser that matched; "none" if none did."""
    attempts: int
    """Number of times that the question was asked; 0 if it could not be."""
    finish_reason: str
    """`stop`, `length`, or "" if nothing was answered."""
    completion_tokens: int
    seconds: float
    """Seconds from the question's (last) request to its answer, those of its batch included."""
    error: str | None = None
    """Reason why the answer is missing: a missing or unreadable clip, a server that failed. The next evaluation asks again."""
    scores: dict[str, float] = field(default_factory=dict)
    """`bleu`, `rougeL`, `similarity` of free texts, and a user's own."""
    graded_by: str = KIND
    """Rule that decided `is_correct`: `kind`, or the scorer with its threshold, as in `helpful >= 0.5`."""
