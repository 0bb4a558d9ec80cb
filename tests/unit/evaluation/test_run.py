"""Evaluations with a stand-in for the engine: the order of questions, counts, reused results and refusals."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dsreason.config.schema_eval import EvalConfig
from dsreason.data.types import Sample
from dsreason.errors import ConfigError, DataError
from dsreason.evaluation import run
from dsreason.evaluation.ask.answerers import Answering, OnModel
from dsreason.evaluation.ask.asking import QuestionRequest, Reply
from dsreason.evaluation.report.report import write_reports
from dsreason.evaluation.report.results import find_run, read_run, write_results
from dsreason.evaluation.types import Question, Result
from tests.unit.evaluation.stand_in import PROXIES, serving

Answer = Callable[[Question], Reply]
ROWS = [{"id": str(i), "question": f"What is {i}?", "answer": str(i)} for i in range(5)]


class StandIn:
    """An answerer in this process."""

    def __init__(self, answer: Answer) -> None:
        self.answer, self.asked = answer, []

    def batches(self, batches: Sequence[Sequence[Question]]) -> Iterator[Sequence[Question]]:
        yield from batches

    def ask(self, requests: Sequence[QuestionRequest]) -> Iterator[tuple[QuestionRequest, Reply]]:
        for request in requests:
            self.asked.append(request.question.video_id)
            yield request, self.answer(request.question)

    def close(self) -> None:
        pass


def right(question: Question) -> Reply:
    return Reply(question.answer, "stop", completion_tokens=3)


@pytest.fixture
def evaluate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[StandIn, run.Throughput]]:
    """A function that evaluates rows, and returns the answerer and the throughput."""

    def call(rows: list[dict[str, Any]], answer: Answer = right, **sections: Any) -> tuple[StandIn, run.Throughput]:
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        settings = {"sources": [{"path": str(tmp_path / "rows.jsonl")}], "results_dir": str(tmp_path / "results")}
        settings |= {"model": {"path": "m"}} | sections
        if "server" in sections:
            del settings["model"]
        stand_in = StandIn(answer)

        @contextmanager
        def opened(config: EvalConfig, on_model: OnModel) -> Iterator[Answering]:
            model = {"name": "m", "fingerprint": "1"}
            on_model(model)
            yield Answering(stand_in, None, model)

        monkeypatch.setattr(run, "open_answering", opened)
        return stand_in, run.evaluate(EvalConfig.model_validate(settings))[1]

    return call


def stored(tmp_path: Path) -> dict[str, Result]:
    return {result.video_id: result for result in read_run(find_run(tmp_path / "results"))}


def no_engine(config: EvalConfig, on_model: OnModel) -> Any:
    raise AssertionError("the engine was started")


# ---------------------------------------------------------------- what counts


def test_throughput_counts_only_this_run(evaluate: Any, tmp_path: Path) -> None:
    def only_from_2_on(question: Question) -> Reply:
        return right(question) if question.video_id >= "2" else Reply(error="unreadable")

    gone = {"id": "6", "video": "gone.mp4", "question": "?", "answer": "6"}
    requested, counted = evaluate([*ROWS, gone], only_from_2_on)
    assert requested.asked == ["0", "1", "2", "3", "4"]
    assert (counted.questions, counted.completion_tokens) == (3, 9)
    requested, counted = evaluate([*ROWS, gone])
    assert requested.asked == ["0", "1"]
    assert (counted.questions, counted.completion_tokens) == (2, 6)
    _, counted = evaluate([*ROWS, gone])
    assert (counted.questions, str(counted)) == (0, "no new answers")
    assert [result.is_correct for result in stored(tmp_path).values()] == [True] * 5 + [False]


# ---------------------------------------------------------------- whose results


@pytest.mark.parametrize(
    "changed",
    [ROWS[:4], [*ROWS[:4], ROWS[4] | {"question": "What else?"}], [*ROWS[:4], ROWS[4] | {"id": "other"}]],
    ids=["a row is gone", "a row asks something else", "a row has another id"],
)
def test_answers_to_removed_questions_are_rejected(
    evaluate: Any, tmp_path: Path, changed: list[dict[str, Any]]
) -> None:
    evaluate(ROWS)
    before = stored(tmp_path)
    says = f"contains answers to 1 questions that are no longer in the data, such as {before['4'].id} in .*4.json"
    with pytest.raises(DataError, match=says):
        evaluate(changed)
    assert stored(tmp_path) == before
    evaluate(changed, evaluation={"overwrite": True})
    assert len(stored(tmp_path)) == len(changed)


def test_answers_beyond_limit_are_kept_and_reported(
    evaluate: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    evaluate(ROWS)
    evaluate(ROWS, evaluation={"limit": 3})
    assert "contains answers to 2 additional questions" in caplog.text
    assert len(stored(tmp_path)) == 5


def test_changed_settings_are_rejected(evaluate: Any) -> None:
    evaluate(ROWS)
    with pytest.raises(ConfigError, match="evaluation.seed was 1, but is now 2"):
        evaluate(ROWS, evaluation={"seed": 2})


def test_report_file_does_not_count_as_answer(evaluate: Any, tmp_path: Path) -> None:
    evaluate(ROWS)
    write_reports(tmp_path / "results" / "m" / "letter" / "rows", None, with_html=False)
    assert (tmp_path / "results" / "m" / "letter" / "rows" / "summary.json").exists()
    evaluate(ROWS)


def test_concurrent_evaluation_in_folder_is_rejected(evaluate: Any, tmp_path: Path) -> None:
    def another(question: Question) -> Reply:
        with pytest.raises(ConfigError, match=rf"m/letter: is in use by process {os.getpid()} on "):
            evaluate(ROWS)
        return right(question)

    evaluate(ROWS[:1], another)
    evaluate(ROWS[:1])


def test_unshared_results_folder_is_rejected_before_prompting(
    evaluate: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "VISIBILITY_TIMEOUT_S", 0)
    monkeypatch.setattr(
        run, "select_for_rank", lambda questions, rank, size: questions[:3]
    )  # the other two belong to another host
    with pytest.raises(
        DataError, match=r"m/letter: the results of 2 questions, .*, are missing .* that all hosts share"
    ):
        evaluate(ROWS, lambda question: pytest.fail("asked"))


def test_attempts_count_replies_and_not_errors(evaluate: Any, tmp_path: Path) -> None:
    replies = {"0": Reply(error="refused"), "1": Reply("1", "stop"), "2": Reply("", "stop")}
    evaluate(ROWS[:3], lambda question: replies[question.video_id], generation={"max_retries": 2})
    assert {name: result.attempts for name, result in stored(tmp_path).items()} == {"0": 0, "1": 1, "2": 3}


def test_ranks_split_questions_by_whole_clips() -> None:
    def question(dataset: str, video_id: str, number: int) -> Question:
        return Question(f"{dataset}/{video_id}/{number}", dataset, video_id, "open", Sample("", []), "a")

    clips = [("x", "1"), ("x", "2"), ("y", "1")]
    questions = [question(*clip, number) for number in range(2) for clip in clips]
    shares = [[item.id for item in run.select_for_rank(questions, rank, 2)] for rank in range(2)]
    assert shares == [["x/1/0", "y/1/0", "x/1/1", "y/1/1"], ["x/2/0", "x/2/1"]]


def test_clip_file_is_written_before_first_question(
    evaluate: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []

    def counted(folder: Path, dataset: str, video_id: str, results: Sequence[Result]) -> None:
        written.append(len(results))
        write_results(folder, dataset, video_id, results)

    monkeypatch.setattr(run, "write_results", counted)
    evaluate([ROWS[0] | {"question": f"What is {i}?"} for i in range(3)], lambda question: Reply(error=f"{written}"))
    assert {result.error for result in read_run(find_run(tmp_path / "results"))} == {"[3]", "[3, 3]", "[3, 3, 3]"}


# ---------------------------------------------------------------- in which order


@pytest.mark.parametrize(
    ("evaluation", "text"),
    [
        ({"scorer": "nowhere.py"}, "nowhere.py"),
        ({"scorer": "broken.py"}, "broken.py"),
        ({"similarity_model": "nowhere"}, "evaluation.similarity_model nowhere: the folder does not exist"),
    ],
)
def test_graders_are_checked_before_engine_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, evaluation: dict[str, Any], text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROWS[0]))
    (tmp_path / "broken.py").write_text("import nothing_of_this_name")
    monkeypatch.setattr(run, "open_answering", no_engine)
    settings = {"sources": [{"path": "rows.jsonl"}], "model": {"path": "m"}, "evaluation": evaluation}
    with pytest.raises(ConfigError, match=text):
        run.evaluate(EvalConfig.model_validate(settings))


# ---------------------------------------------------------------- a server that fails at everything


SERVER = {"url": "http://localhost:8000"}


def fails(question: Question) -> Reply:
    return Reply(error="the server responds with 500: out of order")


def test_evaluation_ends_early_if_server_never_answers(evaluate: Any, tmp_path: Path) -> None:
    rows = [{"id": f"{i:02}", "question": f"What is {i}?", "answer": "x"} for i in range(40)]
    with pytest.raises(
        ConfigError, match=r"server.url \(.*8000\): the server answered none of the first 16 questions.*500"
    ):
        evaluate(rows, fails, server=SERVER)
    assert len(stored(tmp_path)) == 40
    evaluate(rows, server=SERVER)  # asks the questions again
    assert all(result.is_correct for result in stored(tmp_path).values())


def test_few_unanswered_questions_also_end_evaluation(evaluate: Any) -> None:
    with pytest.raises(ConfigError, match="the server answered none of the first 5 questions"):
        evaluate(ROWS, fails, server=SERVER)


def broken(question: Question) -> Reply:
    return Reply(error="v.mp4: not a usable video", sent=False)


def test_server_is_not_blamed_for_unsendable_questions(evaluate: Any, tmp_path: Path) -> None:
    many = [{"id": f"{i:02}", "question": f"What is {i}?", "answer": "x"} for i in range(20)]
    evaluate(many, broken, server=SERVER)
    assert {result.error for result in stored(tmp_path).values()} == {"v.mp4: not a usable video"}


def test_broken_clips_do_not_stop_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (*PROXIES, "OPENAI_API_KEY"):
        monkeypatch.delenv(variable, raising=False)
    (tmp_path / "v.mp4").write_bytes(b"no video")
    rows = [{"id": str(i), "video": "v.mp4", "question": f"What is {i}?", "answer": "x"} for i in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"sources": [{"path": str(tmp_path / "rows.jsonl")}], "results_dir": str(tmp_path / "results")}
    with serving() as server:
        run.evaluate(EvalConfig.model_validate(settings | {"server": {"url": server.url}}))
        assert server.requests == []
    errors = [str(result.error) for result in stored(tmp_path).values()]
    assert len(errors) == 20 and all("v.mp4: is not a usable video" in error for error in errors)


def test_broken_clips_do_not_hide_failing_server(evaluate: Any) -> None:
    with pytest.raises(ConfigError, match=r"answered none of the first 2 questions \(for example, rows/1/.*500"):
        evaluate(ROWS, lambda question: fails(question) if question.video_id < "2" else broken(question), server=SERVER)


def test_partly_failing_server_is_queried_to_end(evaluate: Any, tmp_path: Path) -> None:
    evaluate(ROWS, lambda question: right(question) if question.video_id == "4" else fails(question), server=SERVER)
    assert [result.error is None for result in stored(tmp_path).values()] == [False] * 4 + [True]
    evaluate(ROWS, fails, server=SERVER)  # the remaining questions may fail again
