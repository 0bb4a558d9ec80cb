"""Types shared by asking, grading and reporting: a question, and a stored result."""

from __future__ import annotations

from dataclasses import dataclass, field

from pydantic import FiniteFloat, StrictBool

from dsreason.data.types import Sample
from dsreason.text import QuestionKind

KIND = "kind"
"""Value of `Result.graded_by` if the rules for the question's kind, rather than a scorer, determined correctness."""


@dataclass(frozen=True)
class Question:
    """A question, with everything needed to ask and grade it.

    Example: `Question(id="robovqa/0123/5f1c09ae7d3b2e60", dataset="robovqa", video_id="0123", kind="multiple_choice",
    sample=Sample(…), answer="A", options={"A": "left", "B": "right"})`.
    """

    id: str
    """Unique id, independent of the other questions in the evaluation: `<dataset>/<video_id>/<key>`; see `identity`."""
    dataset: str
    video_id: str
    """Base name of the result file: a clip's file name without its suffix, or a row's id."""
    kind: QuestionKind
    sample: Sample
    """Sample to send to the model. Its `messages` end with the user's message, and its media paths are absolute."""
    answer: str
    options: dict[str, str] | None = None
    problem: str | None = None
    """Reason why the question cannot be asked and counts as unanswered, such as a missing clip; None if it can be asked."""

    @property
    def accepted(self) -> tuple[str, ...]:
        """All accepted answers: `answer`, and any further answers from the row."""
        return (self.answer, *filter(str.strip, self.sample.other_answers))


@dataclass(frozen=True)
class Result:
    """A graded answer, as stored in `<results_dir>/<model>/<answer_type>/<dataset>/<video_id>.json`.

    The first eight fields are the same as in cosmos-reason1.
    """

    datasource: str
    video_id: str
    prompt: list[str]
    """Texts of the messages that were sent, in order: system (if any), user."""
    correct_answer: str
    reasoning: str
    answer: str
    """Parsed answer; "" if there is no answer, or if it could not be parsed."""
    full_response: str
    is_correct: StrictBool
    id: str
    """Id of the question; see `Question.id`."""
    kind: QuestionKind
    options: dict[str, str] | None
    media: list[str]
    """Media paths, in the order in which the media appear in the prompt."""
    rule: str
    """Name of the parser rule that matched; "none" if none did."""
    attempts: int
    """Number of times that the question was asked; 0 if it could not be asked."""
    finish_reason: str
    """`stop`, `length`, or "" if there is no answer."""
    completion_tokens: int
    seconds: FiniteFloat
    """Seconds between the last request for the question (or its batch) and the answer."""
    error: str | None = None
    """Reason why the answer is missing, such as an unreadable clip or a failed request; None if there is an answer. The next
    evaluation asks the question again."""
    scores: dict[str, FiniteFloat] = field(default_factory=dict)
    """Scores by name: `bleu`, `rougeL` and others for free texts, and the value returned by a user's scorer."""
    graded_by: str = KIND
    """Rule that determined `is_correct`: `kind`, or the scorer with its threshold, such as `helpful >= 0.5`."""
    other_answers: tuple[str, ...] = ()
    """Accepted answers in addition to `correct_answer`."""

    @property
    def accepted(self) -> tuple[str, ...]:
        return (self.correct_answer, *self.other_answers)
