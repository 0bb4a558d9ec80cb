"""Questions from benchmark folders and from adapters' rows: their prompts, and the errors in them that are reported."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from dsreason.config.schema_eval import EvalConfig
from dsreason.errors import DataError
from dsreason.evaluation.questions.questions import compute_even_shares, load_questions
from dsreason.evaluation.types import Question
from tests.unit.media.videos import write_video

CHOICE = {"question": "Which way?", "index2ans": {"A": "left", "B": "right"}, "answer": "B"}
CHOICE_TEXT = "Which way?\n(A) left\n(B) right\nAnswer with the option's letter from the given choices directly."
REASONING = (
    "\nPlease answer the question in the following format: "
    "<think> your reasoning </think> <answer> your single letter answer </answer>."
)
CHOICE_KEY = hashlib.sha256(b"Which way?\n(A) left\n(B) right\n1").hexdigest()[:16]
"""Key of the question: a hash of its text (without the requested answer format) and of the clip's name."""
OPEN_REASONING = REASONING.replace("single letter answer", "answer")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A `data` folder with the clips 1 and 2 of robovqa, but without questions."""
    clips = tmp_path / "data" / "robovqa" / "clips"
    clips.mkdir(parents=True)
    write_video(clips / "1.mp4")
    (clips / "2.mp4").write_bytes((clips / "1.mp4").read_bytes())
    return tmp_path / "data"


def item(video: str, *pairs: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {"video": f"clips/{video}.mp4", "qa_pairs": list(pairs) if pairs else CHOICE | changes}


def load(folder: Path, items: Any, **sections: Any) -> list[Question]:
    text = items if isinstance(items, str) else json.dumps(items)
    (folder / "robovqa" / "robovqa_benchmark_qa_pairs.json").write_text(text)
    value = {"datasets": ["robovqa"], "data_dir": str(folder), "model": {"path": "m"}} | sections
    return load_questions(EvalConfig.model_validate(value))


def load_rows(folder: Path, rows: list[Any], answer_type: str = "letter", **source: Any) -> list[Question]:
    file = folder / "robovqa" / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "sources": [{"path": str(file)} | source],
        "model": {"path": "m"},
        "evaluation": {"answer_type": answer_type},
    }
    return load_questions(EvalConfig.model_validate(settings))


def text_asked(question: Question) -> str:
    content = question.sample.messages[-1]["content"]
    return content if isinstance(content, str) else content[-1]["text"]


# ---------------------------------------------------------------- benchmark folders


def test_benchmark_question_matches_cosmos_reason1_prompt(folder: Path) -> None:
    [question] = load(folder, [item("1")])
    clip = str(folder / "robovqa" / "clips" / "1.mp4")
    assert question.sample.messages == [
        {"role": "system", "content": "Answer the questions."},
        {
            "role": "user",
            "content": [{"type": "video", "video": clip, "fps": 4.0}, {"type": "text", "text": CHOICE_TEXT}],
        },
    ]
    assert (question.id, question.dataset, question.video_id) == (f"robovqa/1/{CHOICE_KEY}", "robovqa", "1")
    assert (question.kind, question.answer, question.options) == ("multiple_choice", "B", CHOICE["index2ans"])
    assert question.problem is None


def test_reasoning_prompt_requests_thoughts_and_answer(folder: Path) -> None:
    [question] = load(folder, [item("1")], evaluation={"answer_type": "reasoning"})
    assert text_asked(question) == CHOICE_TEXT + REASONING


@pytest.mark.parametrize(
    ("answer", "kind", "text"),
    [
        ("yes", "yes_no", "Which way?\nAnswer with yes or no directly."),
        ("No", "yes_no", "Which way?\nAnswer with yes or no directly."),
        ("to the left", "open", "Which way?\nAnswer the question using a single word or phrase."),
        (3, "open", "Which way?\nAnswer the question using a single word or phrase."),
    ],
)
def test_answer_determines_kind_of_question_without_options(folder: Path, answer: Any, kind: str, text: str) -> None:
    pair = {"question": "Which way?", "answer": answer}
    [question] = load(folder, [item("1", pair)])
    assert (question.kind, question.answer, question.options) == (kind, str(answer), None)
    assert text_asked(question) == text
    [question] = load(folder, [item("1", pair)], evaluation={"answer_type": "reasoning"})
    assert text_asked(question) == text + OPEN_REASONING


def test_question_may_specify_its_kind(folder: Path) -> None:
    [question] = load(folder, [item("1", {"question": "What?", "answer": "yes", "question_kind": "free_text"})])
    assert (question.kind, text_asked(question)) == ("free_text", "What?")


@pytest.mark.parametrize("place", ["", "benchmark"])
def test_data_folder_may_contain_a_benchmark_folder(folder: Path, place: str) -> None:
    if place:
        (folder / place).mkdir()
        (folder / "robovqa").rename(folder / place / "robovqa")
    file = folder / place / "robovqa" / "robovqa_benchmark_qa_pairs.json"
    file.write_text(json.dumps([item("1")]))
    config = EvalConfig.model_validate({"datasets": ["robovqa"], "data_dir": str(folder), "model": {"path": "m"}})
    assert [question.problem for question in load_questions(config)] == [None]


YES = {"question": "Does it move?", "answer": "yes"}
ROWS = [item("1", CHOICE, YES, CHOICE), item("2"), item("1", YES | {"question": "Is it red?"}), item("3", YES)]


def test_repeated_questions_have_distinct_ids(folder: Path) -> None:
    ids = [question.id for question in load(folder, ROWS)]
    assert len(set(ids)) == 6
    assert (ids[0], ids[2]) == (f"robovqa/1/{CHOICE_KEY}", f"robovqa/1/{CHOICE_KEY}-2")


@pytest.mark.parametrize("row", range(len(ROWS)))
def test_removing_a_row_leaves_others_unchanged(folder: Path, row: int) -> None:
    full = load(folder, ROWS)
    counts = [len(r["qa_pairs"]) if isinstance(r["qa_pairs"], list) else 1 for r in ROWS]
    local = range(sum(counts[:row]), sum(counts[: row + 1]))
    remaining = load(folder, ROWS[:row] + ROWS[row + 1 :])
    assert remaining == [question for place, question in enumerate(full) if place not in local]


def test_removing_a_question_leaves_others_unchanged(folder: Path) -> None:
    pairs = [CHOICE, YES, CHOICE | {"question": "Which colour?"}]
    full = load(folder, [item("1", *pairs)])
    assert load(folder, [item("1", *pairs[1:])]) == full[1:]


def test_id_does_not_depend_on_answer_type(folder: Path) -> None:
    [plain] = load(folder, [item("1")])
    [thinking] = load(folder, [item("1")], evaluation={"answer_type": "reasoning", "system_prompt": "Be brief."})
    assert plain.id == thinking.id


def test_older_correct_answer_key_is_accepted(folder: Path) -> None:
    pair = {key: value for key, value in CHOICE.items() if key != "answer"} | {"correct_answer": "A"}
    assert load(folder, [item("1", pair)])[0].answer == "A"


@pytest.mark.parametrize("written", ["b", " B ", "B"])
def test_answer_becomes_the_option_letter(folder: Path, written: str) -> None:
    assert load(folder, [item("1", answer=written)])[0].answer == "B"


def test_null_options_are_ignored(folder: Path) -> None:
    options = {"A": "left", "B": "right", "C": None}
    assert load(folder, [item("1", index2ans=options)])[0].options == {"A": "left", "B": "right"}


@pytest.mark.parametrize(
    ("sizes", "limit", "shares"),
    [
        ([5, 1, 9], 8, [3, 1, 4]),
        ([5, 1, 9], None, [5, 1, 9]),
        ([5, 1, 9], 99, [5, 1, 9]),
        ([5, 5], 3, [2, 1]),
        ([5, 5, 5], 2, [1, 1, 0]),
    ],
)
def test_limit_is_split_evenly_between_datasets(sizes: list[int], limit: int | None, shares: list[int]) -> None:
    assert compute_even_shares(sizes, limit) == shares


def test_limit_applies_to_each_dataset(folder: Path) -> None:
    rows = [item("1", CHOICE, CHOICE), item("2")]
    local = folder / "rows.jsonl"
    local.write_text("".join(json.dumps({"id": i, "question": "q", "answer": "a"}) + "\n" for i in range(5)))
    questions = load(folder, rows, evaluation={"limit": 4}, sources=[{"path": str(local)}])
    assert [(q.dataset, q.video_id) for q in questions] == [("robovqa", "1")] * 2 + [("rows", "0"), ("rows", "1")]


@pytest.mark.parametrize(
    ("prompt", "messages"), [("", []), ("Be brief.", [{"role": "system", "content": "Be brief."}])]
)
def test_system_prompt_can_be_replaced_or_omitted(folder: Path, prompt: str, messages: list[Any]) -> None:
    [question] = load(folder, [item("1")], evaluation={"system_prompt": prompt})
    assert question.sample.messages[:-1] == messages


def test_vision_settings_are_attached_to_clip(folder: Path) -> None:
    [question] = load(folder, [item("1")], vision={"nframes": 8, "max_pixels": 5000})
    messages = question.sample.messages[-1]["content"][0]
    assert {key: messages[key] for key in messages.keys() - {"type", "video"}} == {"nframes": 8, "max_pixels": 5000}


# ---------------------------------------------------------------- what is wrong with them


def test_missing_clip_affects_only_its_question(folder: Path) -> None:
    rows = [item("1"), item("9"), item("2")]
    questions = load(folder, rows)
    clip = folder / "robovqa" / "clips" / "9.mp4"
    assert [question.problem for question in questions] == [None, f"video: {clip} does not exist", None]
    assert (text_asked(questions[1]), questions[1].answer) == (CHOICE_TEXT, "B")
    assert [questions[0], questions[2]] == load(folder, [rows[0], rows[2]])


def test_data_folder_may_be_a_relative_path(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    [question] = load(folder, [item("1")], data_dir="../data")
    assert (question.problem, question.video_id) == (None, "1")


def test_clips_with_equal_names_stay_distinct(folder: Path) -> None:
    rows = [{"video": f"clips/{name}.mp4", "qa_pairs": CHOICE} for name in ("left/1", "right/1")]
    first, second = load(folder, rows)
    assert (first.video_id, second.video_id) == ("left/1", "right/1")
    assert [second] == load(folder, rows[1:])


def test_packed_clips_are_reported_with_advice(folder: Path) -> None:
    (folder / "robovqa" / "clips.tar.gz").write_bytes(b"")
    [question] = load(folder, [item("9")])
    assert question.problem is not None
    assert question.problem.endswith("; clips.tar.gz in its folder is not unpacked: run `dsreason data fetch`")


@pytest.mark.parametrize("video", ["../../secret.mp4", "/etc/secret.mp4", "", ".", "clips/../.."])
def test_clip_outside_its_folder_is_rejected(folder: Path, video: str) -> None:
    with pytest.raises(DataError, match=r"row 1 \(.*\): field 'video': '.*' must be a file in .*robovqa$"):
        load(folder, [{"video": video, "qa_pairs": CHOICE}])


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"answer": "C"}, "the answer must be one of the options A, B; got 'C'"),
        ({"answer": "left"}, "the answer must be one of the options A, B; got 'left'"),
        ({"answer": None}, "field 'answer' must be a non-empty string or a number; got None"),
        ({"answer": True}, "field 'answer' must be a non-empty string or a number; got True"),
        ({"answer": " "}, "field 'answer' must be a non-empty string or a number; got ' '"),
        ({"question": 3}, "field 'question' must be a string; got 3"),
        ({"index2ans": ["left"]}, "field 'index2ans' must map each letter to a string; got ['left']"),
        ({"index2ans": {}}, "field 'index2ans' must have a string for each letter; got {}"),
        ({"question": "<|video_pad|>"}, "the text contains the model's special token <|video_pad|>"),
        ({"question_kind": "essay"}, "question_kind must be one of multiple_choice, yes_no, open"),
    ],
)
def test_malformed_question_error_names_its_row(folder: Path, changes: Any, text: str) -> None:
    with pytest.raises(DataError) as caught:
        load(folder, [item("1"), item("2", **changes)])
    file = folder / "robovqa" / "robovqa_benchmark_qa_pairs.json"
    assert str(caught.value).startswith(f"{file}, row 2 (clips/2.mp4): {text}")


def test_error_locates_malformed_question_in_its_row(folder: Path) -> None:
    with pytest.raises(DataError, match=r"row 1, question 2 \(clips/1.mp4\): field 'question' is missing"):
        load(folder, [item("1", CHOICE, {"answer": "yes"})])


@pytest.mark.parametrize(
    ("items", "text"),
    [
        ([], "contains no questions"),
        ([item("1") | {"qa_pairs": []}], r"row 1 \(clips/1.mp4\): qa_pairs is empty"),
        ([{"video": "clips/1.mp4"}], "row 1: must have video and qa_pairs"),
        ([3], "row 1: must have video and qa_pairs; got 3"),
        ([{"video": "clips/1.mp4", "qa_pairs": "x"}], "qa_pairs must have question, index2ans and answer; got 'x'"),
        ("[{", "not valid JSON|cannot be|Expecting"),
    ],
)
def test_malformed_question_file_is_rejected(folder: Path, items: Any, text: str) -> None:
    with pytest.raises(DataError, match=text):
        load(folder, items)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("robovqua", r"did you mean robovqa\? \(available: robovqa\)"),
        ("holoassist", r"run `dsreason data fetch` to download it \(available: robovqa\)"),
        ("xyz", r"check datasets and data_dir \(available: robovqa\)"),
    ],
)
def test_unknown_dataset_error_lists_available_datasets(folder: Path, name: str, advice: str) -> None:
    with pytest.raises(
        DataError, match=rf"^dataset {name}: {name}/{name}_benchmark_qa_pairs.json was not found in .*; {advice}"
    ):
        load(folder, [item("1")], datasets=[name])


# ---------------------------------------------------------------- rows of an adapter


ROW = {"id": "a/1", "video": "clips/1.mp4", "question": "Which way?", "options": ["left", "right"], "answer": "B"}


def test_row_prompt_omits_the_answer(folder: Path) -> None:
    [question] = load_rows(folder, [ROW])
    clip = str(folder / "robovqa" / "clips" / "1.mp4")
    assert question.sample.messages == [
        {
            "role": "user",
            "content": [
                {"fps": 4.0, "type": "video", "video": clip},
                {"type": "text", "text": "Which way?\n(A) left\n(B) right"},
            ],
        }
    ]
    assert (question.id, question.video_id) == (f"rows/a/1/{CHOICE_KEY}", "a/1")
    assert (question.kind, question.answer, question.options) == ("multiple_choice", "B", {"A": "left", "B": "right"})


@pytest.mark.parametrize("options", [[1, 2], {"A": 1, "B": 2, "C": None}])
def test_row_options_may_be_numbers_or_null(folder: Path, options: Any) -> None:
    [question] = load_rows(folder, [ROW | {"options": options}])
    assert (question.options, text_asked(question)) == ({"A": "1", "B": "2"}, "Which way?\n(A) 1\n(B) 2")


def test_reasoning_is_requested_unless_row_sets_format(folder: Path) -> None:
    [question] = load_rows(folder, [ROW], "reasoning")
    assert text_asked(question) == "Which way?\n(A) left\n(B) right" + REASONING
    system = "Think in <think></think>, answer in <answer></answer>."
    [question] = load_rows(folder, [ROW | {"system": system}], "reasoning")
    assert text_asked(question) == "Which way?\n(A) left\n(B) right"


def test_row_reference_comes_from_last_answer_tags(folder: Path) -> None:
    reply = {"role": "assistant", "content": "<think>It moves.</think> <answer>left</answer>"}
    messages = [{"role": "user", "content": "Which way?"}, reply]
    [question] = load_rows(folder, [{"id": "1", "messages": messages}], adapter="conversations")
    assert (question.answer, question.kind) == ("left", "open")
    assert question.sample.messages == messages[:1]


LISTED = "What gives way?\nA) The van\nB) The tram"


@pytest.mark.parametrize("answer", ["B", "b", "(B)", "B) The tram", "the tram"])
def test_options_in_row_question_imply_multiple_choice(folder: Path, answer: str) -> None:
    [question] = load_rows(folder, [{"id": "a", "video": "clips/1.mp4", "question": LISTED, "answer": answer}])
    assert (question.kind, question.answer) == ("multiple_choice", "B")
    assert question.options == {"A": "The van", "B": "The tram"}
    assert text_asked(question) == LISTED
    key = hashlib.sha256(f"{LISTED}\n1".encode()).hexdigest()[:16]
    assert question.id == f"rows/a/{key}"  # the same key as before options were detected


def test_options_in_benchmark_question_imply_multiple_choice(folder: Path) -> None:
    [question] = load(folder, [item("1", {"question": LISTED, "answer": "The van"})])
    assert (question.kind, question.answer) == ("multiple_choice", "A")
    assert text_asked(question) == f"{LISTED}\nAnswer with the option's letter from the given choices directly."


def test_options_in_non_choice_questions_stay_text(folder: Path) -> None:
    row = {"id": "a", "question": LISTED, "answer": "the tram"}
    [question] = load_rows(folder, [row], kind="open")
    assert (question.kind, question.answer) == ("open", "the tram")
    [question] = load_rows(folder, [row | {"answer": "neither"}])
    assert (question.kind, question.options) == ("open", None)
    [question] = load_rows(folder, [row | {"question": "Does it stop? [Yes/No]", "answer": "Yes"}])
    assert (question.kind, question.options) == ("yes_no", None)


def test_source_may_set_its_question_kind(folder: Path) -> None:
    row = {"id": "1", "question": "How many?", "answer": "3"}
    assert load_rows(folder, [row])[0].kind == "open"
    assert load_rows(folder, [row | {"question_kind": "ordinal"}])[0].kind == "ordinal"
    assert load_rows(folder, [row], kind="free_text")[0].kind == "free_text"


def test_rows_with_equal_ids_stay_distinct(folder: Path) -> None:
    rows = [
        ROW,
        ROW | {"id": "b"},
        ROW,
        ROW | {"id": "a_1"},
        ROW | {"video": "clips/2.mp4"},
        ROW | {"question": "Why?"},
    ]
    full = load_rows(folder, rows)
    assert len({question.id for question in full}) == len(rows)
    assert full[2].id == f"{full[0].id}-2"
    assert load_rows(folder, rows[3:]) == full[3:]


@pytest.mark.parametrize("path", ["clips/1.mp4", "clips/9.mp4"])
def test_rows_without_id_use_path_or_text(folder: Path, path: str) -> None:
    def row(*content: dict[str, Any]) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": list(content)}, {"role": "assistant", "content": "left"}]}

    words = {"type": "text", "text": "Which way?"}
    rows = [
        row({"type": "video", "video": path}, words),
        row({"type": "video", "video": "clips/2.mp4"}, words),
        row(words),
    ]
    first, second, third = load_rows(folder, rows, adapter="conversations")
    assert (first.video_id, second.video_id) == (path, "clips/2.mp4")
    assert third.id == f"rows/{third.video_id}/{third.video_id}"
    assert load_rows(folder, rows[1:], adapter="conversations") == [second, third]


@pytest.mark.parametrize("path", ["clips/1.mp4", "clips/9.mp4"])
def test_rows_without_id_are_identified_by_file(folder: Path, path: str) -> None:
    without = {key: value for key, value in ROW.items() if key != "id"} | {"video": path}
    [question] = load_rows(folder, [without])
    assert question.video_id == path
    assert (question.problem is None) == (path == "clips/1.mp4")


OWN = """
from dsreason.data.types import Sample

def to_sample(row):
    shown = [{"type": "video", "video": row["video"]}, {"type": "text", "text": "Why?"}]
    return Sample(row["id"], [{"role": "user", "content": shown}], answer="so")
"""


def test_missing_id_field_of_adapter_is_rejected(folder: Path) -> None:
    (folder / "own.py").write_text(OWN)
    with pytest.raises(DataError, match="row 2: field 'id' is missing"):
        load_rows(folder, [ROW, {"video": "clips/1.mp4"}], adapter=str(folder / "own.py"))


def test_segments_of_one_clip_are_distinct_questions(folder: Path) -> None:
    def row(**part: float) -> dict[str, Any]:
        displayed = [{"type": "video", "video": "clips/1.mp4", **part}, {"type": "text", "text": "Which way?"}]
        reply = {"role": "assistant", "content": "left"}
        return {"id": "a", "messages": [{"role": "user", "content": displayed}, reply]}

    rows = [row(), row(video_start=0.5), row(video_end=0.5), row(video_start=0.2, video_end=0.5)]
    full = load_rows(folder, rows, adapter="conversations")
    assert len({question.id for question in full}) == 4
    assert not any(question.id.endswith("-2") for question in full)
    assert load_rows(folder, rows[1:], adapter="conversations") == full[1:]


@pytest.mark.parametrize("path", ["clips/9.mp4", "/nowhere/9.mp4"])
def test_row_with_missing_clip_keeps_its_question(folder: Path, path: str) -> None:
    questions = load_rows(folder, [ROW, ROW | {"id": "x", "video": path}])
    assert questions[0].problem is None
    clip = str(folder / "robovqa" / path)
    assert questions[1].problem == f"video: no such file: {clip}"
    assert (text_asked(questions[1]), questions[1].answer) == ("Which way?\n(A) left\n(B) right", "B")
    assert questions[1].sample.messages[0]["content"][0]["video"] == clip


def test_missing_file_is_reported_for_any_adapter(folder: Path) -> None:
    (folder / "own.py").write_text(OWN.replace('row["video"]', 'row["clip"]'))
    [question] = load_rows(folder, [{"id": "x", "clip": "clips/9.mp4"}], adapter=str(folder / "own.py"))
    assert question.problem == f"video: no such file: {folder}/robovqa/clips/9.mp4"
    gone = {"type": "image", "image": {"path": "gone.png", "bytes": None}}
    messages = [{"role": "user", "content": [gone]}, {"role": "assistant", "content": "so"}]
    [question] = load_rows(folder, [{"id": "x", "messages": messages}], adapter="conversations")
    assert question.problem == f"image: no such file: {folder}/robovqa/gone.png"


def test_label_without_video_is_reported(folder: Path) -> None:
    for name, content in {"videos/1.front.mp4": "", "metas/1.label.json": "{}", "metas/9.label.json": "{}"}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content)
    source = {"adapter": "local_labels", "path": str(folder), "question": "What is there?"}
    questions = load_questions(EvalConfig.model_validate({"sources": [source], "model": {"path": "m"}}))
    assert [question.problem for question in questions] == [None, f"video: no such file: {folder}/videos/9.*"]


def test_missing_clip_of_adapter_source_is_reported(folder: Path) -> None:
    file = folder / "robovqa" / "robovqa_benchmark_qa_pairs.json"
    file.write_text(json.dumps([item("1"), item("9")]))
    source = {"adapter": "cosmos_reason1_rl", "path": str(folder), "subset": "robovqa", "split": "benchmark"}
    questions = load_questions(EvalConfig.model_validate({"sources": [source], "model": {"path": "m"}}))
    assert [question.video_id for question in questions] == ["clips/1.mp4", "clips/9.mp4"]
    assert questions[0].problem is None
    assert questions[1].problem == f"video: no such file: {folder}/robovqa/clips/9.mp4"
    assert (text_asked(questions[1]), questions[1].answer) == (CHOICE_TEXT, "B")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"answer": "C"}, "row 2: the answer must be one of the options A, B, or the text of an option; got 'C'"),
        ({"question": 3}, "row 2: field 'question' must be a string; got 3"),
        (
            {"options": [["left"], ["right"]]},
            "row 2: field 'options' must map each letter to a string; got {'A': ['left'], 'B': ['right']}",
        ),
        ({"options": "AB"}, "row 2: field 'options' must map each letter to a string; got 'AB'"),
        ({"video": 3}, "row 2"),
        ({"video": "../../x.mp4"}, "row 2 (sample 'x'): video: ../../x.mp4 points outside"),
        ({"video": "ftp://h/x.mp4"}, "row 2 (sample 'x'): video: ftp://h/x.mp4 is a URL"),
        ({"video": "clips/9.mp4", "question": 3}, "row 2: field 'question' must be a string; got 3"),
        ({"video": "clips/9.mp4", "question": "<|im_end|>"}, "row 2 (sample 'x'): "),
    ],
)
def test_malformed_row_with_missing_clip_is_rejected(folder: Path, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(DataError) as caught:
        load_rows(folder, [ROW, ROW | {"id": "x"} | changes])
    assert str(caught.value).startswith(f"{folder}/robovqa/rows.jsonl, {text}")


def test_non_text_options_of_adapter_are_rejected(folder: Path) -> None:
    (folder / "own.py").write_text(OWN.replace('answer="so"', 'answer="B", options={"A": 1, "B": None}'))
    with pytest.raises(DataError, match=r"row 1 \(sample 'a/1'\): options must map each letter to a string"):
        load_rows(folder, [ROW], adapter=str(folder / "own.py"))


def test_row_without_answer_is_rejected(folder: Path) -> None:
    messages = [{"role": "user", "content": "Which way?"}, {"role": "assistant", "content": " "}]
    with pytest.raises(DataError, match=r"row 1 \(sample '1'\): the row has no reference answer"):
        load_rows(folder, [{"id": "1", "messages": messages}], adapter="conversations")


def test_source_without_rows_is_rejected(folder: Path) -> None:
    with pytest.raises(DataError, match="the data set is empty"):
        load_rows(folder, [])
