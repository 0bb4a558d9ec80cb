"""Grading of answers, and scores that they get in addition."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Self

from dsreason.answers.correct import is_any
from dsreason.answers.parsing import parse
from dsreason.answers.types import Parsed
from dsreason.config.schema_eval import EvaluationConfig
from dsreason.config.schema_grpo import RewardConfig
from dsreason.evaluation.questions.similarity import Similarity, compute_overlap
from dsreason.evaluation.types import KIND, Question
from dsreason.rewards import BUILT_IN
from dsreason.rewards.functions import check_references, check_reward
from dsreason.rewards.scoring import Scorer, to_optional
from dsreason.rewards.text import add_opening
from dsreason.text import split_response


@dataclass(frozen=True)
class Graded:
    """A graded answer.

    Example: `Graded(Parsed("A red car", "", "tagged text"), is_correct=False, scores={"bleu": 35.4, "rouge1": 0.67})`.
    """

    parsed: Parsed
    is_correct: bool
    scores: dict[str, float]
    graded_by: str = KIND
    """Rule that determined `is_correct`: `kind`, or the scorer with its threshold, such as `helpful >= 0.5`."""


def check_scorer(config: EvaluationConfig, questions: Iterable[Question]) -> None:
    """Check a built-in scorer before any question is asked.

    Raises:
        ConfigError: the scorer's options, or the judge's URL or key, are invalid.
        DataError: the scorer cannot parse a question's reference; the message names the question.
    """
    if config.scorer not in BUILT_IN:
        return
    check_reward(config.scorer, config.scorer_options)
    for question in questions:
        sample = replace(question.sample, id=question.id, answer=question.answer)
        check_references([config.scorer], {config.scorer: config.scorer_options}, sample)


class Grader:
    """A parser and grader for answers. It is a context manager, because a scorer runs in worker processes.

        with Grader(config.evaluation) as grader:
            graded = grader.grade(question, text)

    Depending on the question's kind, an answer is correct if
      - multiple_choice: it names the same option as the reference, by letter or text;
      - yes_no, open, free_text: it equals the reference, ignoring case, white space and a final full stop;
      - ordinal: it is the same number (`3` equals `3.0`).
    If a row has several accepted answers, matching one of them is enough. An unparsed answer is never correct. Free texts also
    get the scores `bleu` (0 to 100), `rouge1`, `rouge2` and `rougeL` (0 to 1) and, if `similarity_model` is set, `similarity`
    (-1 to 1), all computed against the first accepted answer; see the module `similarity`. They are 0 if the answer could not
    be parsed.

    `scorer` is a reward, `fn(completion, sample)`; see `dsreason.rewards.functions.find_reward`. It gets the full response and
    the `scorer_options`, and the value that it returns is stored as a score under its short name. If `scorer_threshold` is set,
    a parsed answer is correct if this value is at least the threshold. Otherwise, the scorer does not affect correctness,
    because some rewards, such as `format`, do not measure it. If the scorer returns None, the answer has no such score.

    With `compat`, every question is graded as in cosmos-reason1: only letters are compared, regardless of kind and scorer.

    Raises:
        ConfigError: the similarity model or, on entering the context, the scorer cannot be loaded.
        RewardError: the scorer raises an error or does not return a number; the message names the scorer and the sample.
    """

    def __init__(self, config: EvaluationConfig) -> None:
        self.answer_type, self.parser = config.answer_type, config.parser
        self._similarity = Similarity(config.similarity_model) if config.similarity_model is not None else None
        self.threshold = None if self.parser == "compat" else config.scorer_threshold
        self._scorer: Scorer | None = None
        if config.scorer is not None:
            options = {config.scorer: config.scorer_options}
            self._scorer = Scorer(RewardConfig(functions={config.scorer: 1.0}, options=options))

    def __enter__(self) -> Self:
        if self._scorer is not None:
            self._scorer.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._scorer is not None:
            self._scorer.__exit__(*exc)

    def grade(self, question: Question, text: str, opening: str = "") -> Graded:
        """Grade a response; `opening` is the tag with which its prompt already opens the thoughts."""
        kind, options, compat = question.kind, question.options, self.parser == "compat"
        parsed = parse(text, self.answer_type, self.parser, kind=kind, options=options)
        if compat:
            is_correct = parsed.answer.lower() in [accepted.lower() for accepted in question.accepted]
        else:
            is_correct = is_any(parsed.answer, question.accepted, kind, options)
        scores: dict[str, float] = {}
        if kind == "free_text" and not compat:
            reference = split_response(question.answer).answer
            scores = compute_overlap(parsed.answer, reference)
            if self._similarity is not None:
                scores["similarity"] = self._similarity.compute_cosine(parsed.answer, reference)
        if self._scorer is not None:
            sample = add_opening(replace(question.sample, answer=question.answer, options=options), opening)
            value = to_optional(self._scorer.score([text], [sample]).total[0])
            if value is not None:
                scores[self._scorer.labels[0]] = value
            if value is not None and self.threshold is not None:
                is_correct = parsed.answer != "" and value >= self.threshold
                return Graded(parsed, is_correct, scores, f"{self._scorer.labels[0]} >= {self.threshold:g}")
        return Graded(parsed, is_correct, scores)
