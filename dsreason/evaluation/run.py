"""The evaluation behind `dsreason eval`: it asks all questions, and grades and stores each answer as soon as it arrives."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dsreason.answers.parsing import Parser, parse
from dsreason.answers.types import AnswerType, Parsed
from dsreason.config.schema_eval import EvalConfig
from dsreason.data.messages import get_text, list_media_paths
from dsreason.errors import ConfigError, DataError
from dsreason.evaluation.ask.answerers import Answering, open_answering
from dsreason.evaluation.ask.asking import QuestionRequest, Reply
from dsreason.evaluation.ask.sampling import choose_sampling
from dsreason.evaluation.questions.grading import Graded, Grader, check_scorer
from dsreason.evaluation.questions.questions import load_questions
from dsreason.evaluation.report.results import (
    list_dataset_files,
    locate_result_file,
    make_safe_name,
    read_file,
    write_results,
)
from dsreason.evaluation.settings import get_run_folder, open_run_folder
from dsreason.evaluation.types import Question, Result
from dsreason.files.disk import make_folder
from dsreason.files.lock import FolderLock
from dsreason.job.launch import report_and_exit
from dsreason.monitor.progress import Advance

log = logging.getLogger(__name__)

MIN_FAILURES = 16
"""Number of consecutive failures, from the first question on, after which a server counts as misconfigured."""
NOT_ASKED = "not asked yet"
"""Error stored for questions that the evaluation has not reached yet."""
VISIBILITY_TIMEOUT_S = 60.0
"""Seconds to wait for a file that another host has written; network file systems may show new files late."""


@dataclass(frozen=True)
class Throughput:
    """The new answers that this job has received over all ranks, not counting errors: their number, tokens and total time."""

    questions: int
    completion_tokens: int
    seconds: float

    def __str__(self) -> str:
        if not self.questions:
            return "no new answers"
        seconds = max(self.seconds, 1e-9)
        return (
            f"{self.questions} questions in {self.seconds:.1f} s: {self.questions / seconds:.2f} questions/s, "
            f"{self.completion_tokens / seconds:,.0f} tokens/s"
        )


def evaluate(config: EvalConfig, vision: Mapping[str, Any] = MappingProxyType({})) -> tuple[Path, Throughput]:
    """Answer and grade all questions in the configuration. Collective.

    Stored answers are kept, so that an interrupted evaluation continues where it stopped; questions that ended in an error
    are asked again. No other evaluation may use the results folder at the same time. `vision` is stored in `run.json`.

    Returns:
        The results folder, `<results_dir>/<model>/<answer_type>`, and the throughput.

    Raises:
        DsReasonError: a data set, the model or the server does not exist; or the results folder contains results with different
            settings, is in use, or is not the same on all hosts.
    """
    questions = load_questions(config)
    check_scorer(config.evaluation, questions)
    if absent := [question for question in questions if question.problem]:
        log.warning(
            *(
                "%d of %d questions cannot be asked and count as wrong; for example, %s: %s",
                len(absent),
                len(questions),
            ),
            *(absent[0].id, absent[0].problem),
        )
    # The grader comes first, so that its errors are raised before the slow startup of the engine.
    with (
        Grader(config.evaluation) as grader,
        FolderLock(on_lost=report_and_exit) as lock,
        open_answering(config, lambda model: open_results(config, questions, model, lock, vision)) as answering,
    ):
        folder = get_run_folder(config, answering.model["name"])
        evaluation = Evaluation(config, folder, grader, answering)
        own_questions = select_for_rank(questions, answering.rank, answering.size)
        with answering.progress(len(questions)) as advance:
            answered = evaluation.prepare(own_questions)
            answering.run_on_first_rank(lambda: check_stored(folder, questions))
            advance(sum(question.id in answered or question.problem is not None for question in own_questions))
            started = time.perf_counter()
            results = list(evaluation.run(own_questions, answered, advance))
            seconds = time.perf_counter() - started
        token_counts = [result.completion_tokens for result in results if result.error is None]
        parts = answering.gather((len(token_counts), sum(token_counts), seconds))
    return folder, Throughput(sum(a for a, *_ in parts), sum(b for _, b, _ in parts), max(c for *_, c in parts))


def open_results(
    config: EvalConfig,
    questions: Sequence[Question],
    model: dict[str, str],
    lock: FolderLock,
    vision: Mapping[str, Any],
) -> None:
    """Lock and prepare the results folder; see `open_run_folder` and `check_asked`."""
    folder = get_run_folder(config, model["name"])
    make_folder(folder, "results_dir")
    lock.take(folder)
    open_run_folder(folder, config, model, vision)
    check_asked(folder, config, questions)


def check_asked(folder: Path, config: EvalConfig, questions: Sequence[Question]) -> None:
    """Raise DataError if there are stored answers to questions that a data set no longer has, because they would be scored.

    With `evaluation.limit`, such answers may belong to questions beyond the limit, so a warning is logged instead.
    """
    question_ids = {question.id for question in questions}
    files = [file for name in config.names for file in list_dataset_files(folder / make_safe_name(name))]
    other_results = [(file, result.id) for file in files for result in read_file(file) if result.id not in question_ids]
    if not other_results:
        return
    file, first = other_results[0]
    if config.evaluation.limit is not None:
        log.warning(
            "%s contains answers to %d additional questions, such as %s; they are scored as well",
            folder,
            len(other_results),
            first,
        )
        return
    raise DataError(
        f"{folder}: contains answers to {len(other_results)} questions that are no longer in the data, such as {first} in "
        f"{file}; set another results_dir, delete these answers, or set evaluation.overwrite = true to replace all answers"
    )


def check_stored(folder: Path, questions: Sequence[Question]) -> None:
    """Raise DataError if a question is missing from the folder although all ranks have stored their placeholders."""
    clips = dict.fromkeys((question.dataset, question.video_id) for question in questions)
    deadline = time.monotonic() + VISIBILITY_TIMEOUT_S
    while missing := {question.id for question in questions} - read_stored_ids(folder, clips):
        if time.monotonic() >= deadline:
            raise DataError(
                f"{folder}: the results of {len(missing)} questions, such as {min(missing)}, are missing on the first "
                "host, because other hosts store them elsewhere; set results_dir to a folder that all hosts share"
            )
        time.sleep(1)


def read_stored_ids(folder: Path, clips: Iterable[tuple[str, str]]) -> set[str]:
    files = [locate_result_file(folder, dataset, video_id) for dataset, video_id in clips]
    return {result.id for file in files if file.exists() for result in read_file(file)}


def select_for_rank(questions: Sequence[Question], rank: int, size: int) -> list[Question]:
    """Select a rank's questions. All questions about a clip go to the same rank, so that only one rank writes the clip's file."""
    clips = dict.fromkeys((question.dataset, question.video_id) for question in questions)
    own_clips = set(list(clips)[rank::size])
    return [question for question in questions if (question.dataset, question.video_id) in own_clips]


@dataclass(frozen=True)
class Evaluation:
    """The evaluation of one rank's questions, from asking them to storing the results."""

    config: EvalConfig
    folder: Path
    grader: Grader
    answering: Answering

    def prepare(self, questions: Sequence[Question]) -> set[str]:
        """Store a placeholder for every question that has no answer yet, and return the ids of the answered questions.

        This way, scores always cover all questions, even if the job is killed.
        """
        clips: dict[tuple[str, str], list[Question]] = {}
        for question in questions:
            clips.setdefault((question.dataset, question.video_id), []).append(question)
        answered: set[str] = set()
        for (dataset, video_id), clip_questions in clips.items():
            stored = {result.id: result for result in self.read_stored(dataset, video_id)}
            done = [
                question for question in clip_questions if question.id in stored and stored[question.id].error is None
            ]
            for question in done:
                check_question_unchanged(
                    question, stored[question.id], locate_result_file(self.folder, dataset, video_id)
                )
            answered |= {question.id for question in done}
            if missing := [question for question in clip_questions if question.id not in answered]:
                unasked = {
                    question.id: self.grade(question, Reply(error=question.problem or NOT_ASKED), 0)
                    for question in missing
                }
                write_results(self.folder, dataset, video_id, list((stored | unasked).values()))
        return answered

    def run(self, questions: Sequence[Question], answered: Set[str], advance: Advance) -> Iterator[Result]:
        """Ask the unanswered questions, and yield each result as soon as it is stored.

        Batches of a fixed size are asked completely, even if only some of their answers are missing. Rounding depends on the
        composition of a batch, so this makes an evaluation give the same answers no matter how many times it was interrupted.
        """
        for batch in self.answering.answerer.batches(self.batches(questions, answered)):
            for question, reply, attempts in self.answers(batch, is_first=not answered):
                if question.id not in answered:
                    yield self.store(question, reply, attempts)
                    advance(1)

    def read_stored(self, dataset: str, video_id: str) -> list[Result]:
        file = locate_result_file(self.folder, dataset, video_id)
        return read_file(file) if file.exists() else []

    def batches(self, questions: Sequence[Question], answered: Set[str]) -> list[list[Question]]:
        """Split the questions to ask into batches. Ranks that share a model get the same number of batches."""
        size = self.answering.batch_size
        if size is None:
            open_questions = [
                question for question in questions if not question.problem and question.id not in answered
            ]
            return [open_questions] if any(self.answering.in_step(bool(open_questions))) else []
        cut = [questions[i : i + size] for i in range(0, len(questions), size)]
        usable = [[question for question in batch if not question.problem] for batch in cut]
        missing = [batch for batch in usable if any(question.id not in answered for question in batch)]
        return missing + [[]] * (max(self.answering.in_step(len(missing))) - len(missing))

    def answers(self, batch: Sequence[Question], *, is_first: bool) -> Iterator[tuple[Question, Reply, int]]:
        """Yield (question, last reply, number of attempts) once per question. Questions with unparsed answers are asked again."""
        settings, last = self.config.evaluation, self.config.generation.max_retries
        place = {question.id: i for i, question in enumerate(batch)}
        pending = list(batch)
        for attempt in range(last + 1):
            if not any(self.answering.in_step(bool(pending))):
                return
            unread = []
            requests = [
                QuestionRequest(question, choose_sampling(self.config, question.kind, attempt), attempt)
                for question in pending
            ]
            replies = self.answering.answerer.ask(requests)
            if is_first and attempt == 0 and self.config.server.url is not None:
                replies = check_server_answers(replies, len(requests), self.config.server.url)
            for request, reply in replies:
                question = request.question
                is_read = reply.error is not None or is_readable(
                    question, reply.text, settings.answer_type, settings.parser
                )
                if is_read or attempt == last:
                    yield question, reply, attempt + (reply.error is None)
                else:
                    unread.append(question)
            pending = sorted(unread, key=lambda question: place[question.id])  # replies arrive in any order

    def store(self, question: Question, reply: Reply, attempts: int) -> Result:
        """Grade a reply and store the result in its clip's file. A reply with an error counts as a wrong answer."""
        result = self.grade(question, reply, attempts)
        stored = {other.id: other for other in self.read_stored(question.dataset, question.video_id)} | {
            result.id: result
        }
        write_results(self.folder, question.dataset, question.video_id, list(stored.values()))
        return result

    def grade(self, question: Question, reply: Reply, attempts: int) -> Result:
        unread = Graded(Parsed("", "", "none"), False, {})
        grade = self.grader.grade(question, reply.text, reply.opening) if reply.error is None else unread
        return Result(
            datasource=question.dataset,
            video_id=question.video_id,
            prompt=[get_text(message) for message in question.sample.messages],
            correct_answer=question.answer,
            reasoning=grade.parsed.reasoning,
            answer=grade.parsed.answer,
            full_response=reply.text,
            is_correct=grade.is_correct,
            id=question.id,
            kind=question.kind,
            options=question.options,
            media=list_media_paths(question.sample.messages),
            rule=grade.parsed.rule,
            attempts=attempts,
            finish_reason=reply.finish_reason,
            completion_tokens=reply.completion_tokens,
            seconds=round(reply.seconds, 3),
            error=reply.error,
            scores=grade.scores,
            graded_by=grade.graded_by,
            other_answers=question.accepted[1:],
        )


def check_server_answers(
    replies: Iterator[tuple[QuestionRequest, Reply]], num_asked: int, url: str
) -> Iterator[tuple[QuestionRequest, Reply]]:
    """Yield the replies unchanged; raise an error if the server answers none of the first questions.

    Questions that were never sent to the server do not count.

    Raises:
        ConfigError: the first `MIN_FAILURES` questions failed, or all of them if there are fewer.
    """
    num_failed, last = 0, ""
    for request, reply in replies:
        yield request, reply
        if reply.error is None:
            yield from replies
            return
        if reply.sent:
            num_failed, last = num_failed + 1, f"{request.question.id}: {reply.error}"
        else:
            num_asked -= 1
        if num_failed and num_failed >= min(num_asked, MIN_FAILURES):
            raise ConfigError(
                f"server.url ({url}): the server answered none of the first {num_failed} questions (for example, {last}); "
                "correct the server or server.url, and run the same command again"
            )


def is_readable(question: Question, text: str, answer_type: AnswerType, parser: Parser) -> bool:
    """Return whether the parser finds an answer in the response `text`."""
    return parse(text, answer_type, parser, kind=question.kind, options=question.options).answer != ""


def check_question_unchanged(question: Question, stored: Result, file: Path) -> None:
    """Raise DataError if a stored answer belongs to a different version of the question."""
    texts = [get_text(message) for message in question.sample.messages]
    for fact, old, new in (
        ("prompt", stored.prompt, texts),
        ("answer", " | ".join(stored.accepted), " | ".join(question.accepted)),
        ("options", stored.options, question.options),
        ("kind", stored.kind, question.kind),
        ("media", stored.media, list_media_paths(question.sample.messages)),
    ):
        if old != new:
            raise DataError(
                f"{file}: question {question.id} is stored with the {fact} {old!r:.200}, but now has {new!r:.200}; set "
                "another results_dir, or set evaluation.overwrite = true to replace the existing results"
            )
