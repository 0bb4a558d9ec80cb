"""Whether an answer is right, and what else it scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

from dsreason.answers.correct import is_same
from dsreason.answers.parsing import Parser, parse
from dsreason.answers.text import split_response
from dsreason.answers.types import AnswerType, Parsed
from dsreason.evaluation.questions.similarity import Overlap, Similarity
from dsreason.evaluation.types import Question
from dsreason.rewards.scoring import Scorer

PASS = 0.5
"""From this value of the user's scorer on an answer is right."""


@dataclass(frozen=True)
class Graded:
    """Example: `Graded(Parsed("A red car", "", "tagged text"), is_correct=False, scores={"bleu": 35.4, "rouge1": 0.67})`."""

    parsed: Parsed
    is_correct: bool
    scores: dict[str, float]


class Grader:
    """Parses and grades answers; a context manager, since a user's scorer runs in worker processes.

        with Grader("reasoning", similarity_model="models/minilm", scorer="judge.py:helpful") as grader:
            graded = grader.grade_all(questions, texts)

    By the question's kind an answer is right when
      - multiple_choice: it names the option that the reference names (by letter or text);
      - yes_no, open, free_text: it is the reference, case, white space and a final full stop aside;
      - ordinal: it is the same number (`3` and `3.0` are).
    Nothing read is never right. Free texts also score `bleu` (0 to 100), `rouge1`, `rouge2`, `rougeL` (0 to 1) and, with the
    folder of a `similarity_model`, `similarity` (-1 to 1), see `similarity`; all are 0 where nothing was read.

    `scorer` is a reward of the user, `fn(completion, sample)`, see `dsreason.rewards.functions.find_reward`, with
    `scorer_options` as its keyword arguments. It gets the whole response; its value is a score under its short name, and
    decides: from 0.5 on the answer is right.

    With `compat` every question is graded as by cosmos-reason1, by the letters alone, whatever its kind and scorer.

    Raises:
        ConfigError: the similarity model or, on entering, the scorer cannot be had.
        RewardError: when the scorer raises or gives no number; the text names it and the sample.
    """

    def __init__(
        self,
        answer_type: AnswerType,
        parser: Parser = "default",
        *,
        similarity_model: str | None = None,
        scorer: str | None = None,
        scorer_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.answer_type, self.parser = answer_type, parser
        self._similarity = Similarity(similarity_model) if similarity_model is not None else None
        self._scorer = Scorer({scorer: 1.0}, options={scorer: scorer_options or {}}) if scorer is not None else None

    def __enter__(self) -> Self:
        if self._scorer is not None:
            self._scorer.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._scorer is not None:
            self._scorer.__exit__(*exc)

    def grade(self, question: Question, text: str) -> Graded:
        return self.grade_all([question], [text])[0]

    def grade_all(self, questions: Sequence[Question], texts: Sequence[str]) -> list[Graded]:
        """Grades `texts[i]` as the response to `questions[i]`; one call for many is faster where there is a model or scorer."""
        graded = [self._exact(question, text) for question, text in zip(questions, texts, strict=True)]
        if self.parser == "default":
            self._add_text_scores(questions, graded)
        return graded if self._scorer is None else self._scored(self._scorer, questions, texts, graded)

    def _exact(self, question: Question, text: str) -> Graded:
        kind, options = question.kind, question.options
        parsed = parse(text, self.answer_type, self.parser, kind=kind, options=options)
        if self.parser == "compat":
            return Graded(parsed, parsed.answer.lower() == question.answer.lower(), {})
        return Graded(parsed, is_same(parsed.answer, question.answer, kind, options), {})

    def _add_text_scores(self, questions: Sequence[Question], graded: Sequence[Graded]) -> None:
        free = [
            (grade.scores, (grade.parsed.answer, split_response(question.answer).answer))
            for question, grade in zip(questions, graded, strict=True)
            if question.kind == "free_text"
        ]
        for scores, (answer, reference) in free:
            scores.update(self._overlap.scores(answer, reference))
        if self._similarity is not None:
            cosines = self._similarity.cosines([pair for _, pair in free])
            for (scores, _), cosine in zip(free, cosines, strict=True):
                scores["similarity"] = cosine

    @cached_property
    def _overlap(self) -> Overlap:
        return Overlap()

    def _scored(
        self, scorer: Scorer, questions: Sequence[Question], texts: Sequence[str], graded: Sequence[Graded]
    ) -> list[Graded]:
        samples = [replace(q.sample, answer=q.answer, options=q.options) for q in questions]
        values = scorer.score(texts, samples).total
        return [
            Graded(
                grade.parsed,
                is_correct=grade.is_correct if self.parser == "compat" else bool(value >= PASS),
                scores=grade.scores | {scorer.labels[0]: float(value)},
            )
            for grade, value in zip(graded, values, strict=True)
        ]
