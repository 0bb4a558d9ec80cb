"""Result files: written atomically and inside their folder, read strictly, found at any depth."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from dsreason.errors import DataError
from dsreason.evaluation.questions.identity import compute_question_key, name_medium
from dsreason.evaluation.report import results
from dsreason.evaluation.report.results import (
    find_run,
    find_runs,
    locate_result_file,
    make_safe_name,
    read_file,
    read_run,
    write_results,
    write_text,
)
from dsreason.media.frames import write_frame_list
from tests.unit.evaluation.made_results import made

COSMOS_TEXT = (
    "Which way?\n(A) left\n(B) right\nAnswer with the option's letter from the given choices directly.\nPlease answer the "
    "question in the following format: <think> your reasoning </think> <answer> your single letter answer </answer>."
)
COSMOS = {
    "datasource": "robovqa",
    "video_id": "0123",
    "prompt": [
        {"role": "system", "content": "Answer the questions."},
        {
            "role": "user",
            "content": [
                {"type": "video", "video": "data/benchmark/robovqa/clips/0123.mp4", "fps": 4},
                {"type": "text", "text": COSMOS_TEXT},
            ],
        },
    ],
    "correct_answer": "A",
    "reasoning": "It turns.",
    "answer": "B",
    "full_response": "<think>It turns.</think> <answer>B</answer>",
    "is_correct": False,
}


def put(file: Path, content: Any) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return file


# ---------------------------------------------------------------- writing


def test_results_round_trip_through_files(tmp_path: Path) -> None:
    stored = [
        made("0123"),
        made("0123", 1, "", error="no such file", scores={"bleu": 3.5}, options=None, media=["a.mp4"]),
    ]
    write_results(tmp_path, "robovqa", "0123", stored)
    assert read_file(tmp_path / "robovqa" / "0123.json") == stored
    assert json.loads((tmp_path / "robovqa" / "0123.json").read_text())[0]["is_correct"] is True


def test_text_in_any_script_stays_readable(tmp_path: Path) -> None:
    write_results(tmp_path, "d", "v", [made(reasoning="向左転")])
    assert "向左転" in (tmp_path / "d" / "v.json").read_text(encoding="utf-8")


def test_lone_surrogate_is_replaced(tmp_path: Path) -> None:
    write_results(tmp_path, "d", "v", [made(full_response="a\ud83db")])
    assert read_file(tmp_path / "d" / "v.json")[0].full_response == "a?b"


def test_rewriting_replaces_the_file_without_leftovers(tmp_path: Path) -> None:
    write_results(tmp_path, "d", "v", [made()])
    write_results(tmp_path, "d", "v", [made(answer="C")])
    assert [result.answer for result in read_file(tmp_path / "d" / "v.json")] == ["C"]
    assert [file.name for file in (tmp_path / "d").iterdir()] == ["v.json"]


def test_unwritable_folder_is_reported(tmp_path: Path) -> None:
    put(tmp_path / "file", "")
    with pytest.raises(DataError, match=r"file/d/v\.json: cannot be written"):
        write_text(tmp_path / "file" / "d" / "v.json", "x")


@pytest.mark.parametrize("name", ["0123", "task-1-head-0-90", "a.b._.totalframe010.clipframe003", "Kitchen 2", "é"])
def test_safe_names_are_unchanged(name: str) -> None:
    assert make_safe_name(name) == name


ODD_NAMES = [
    "../../etc/passwd",
    "a/b",
    "a\\b",
    "",
    ".",
    "..",
    ".hidden",
    "a\0b",
    "a\nb",
    "a.",
    "a ",
    "x" * 5000,
    "é" * 150,
]
ODD_NAMES += ["run", "summary", "a~b", "\ud800", "CON:", "a*b?"]


@pytest.mark.parametrize("name", ODD_NAMES, ids=lambda name: ascii(name)[:20])
def test_unsafe_names_become_safe_file_names(tmp_path: Path, name: str) -> None:
    file = locate_result_file(tmp_path, name, name)
    write_text(file, "[]")
    assert file.resolve().parent.parent == tmp_path.resolve()
    assert read_file(file) == []
    assert len(file.name.encode()) < 256


def test_different_texts_have_different_names() -> None:
    texts = [*ODD_NAMES, *map(make_safe_name, ODD_NAMES), "a_b", "a/b/", "x" * 5001]
    assert len({make_safe_name(text) for text in texts}) == len(set(texts))


# ---------------------------------------------------------------- reading


def test_cosmos_reason1_result_files_are_read(tmp_path: Path) -> None:
    put(tmp_path / "robovqa" / "0123.json", [COSMOS, COSMOS | {"correct_answer": "B", "is_correct": True}])
    first, second = read_run(find_run(tmp_path))
    key = hashlib.sha256(b"Which way?\n(A) left\n(B) right\n0123").hexdigest()[:16]
    assert (first.id, first.kind, first.rule) == (f"robovqa/0123/{key}", "multiple_choice", "not recorded")
    assert (first.options, first.media, first.attempts, first.error, first.scores) == (None, [], 1, None, {})
    assert (first.reasoning, first.answer, first.is_correct) == ("It turns.", "B", False)
    assert first.prompt == ["Answer the questions.", COSMOS_TEXT]
    assert (second.id, second.is_correct) == (f"robovqa/0123/{key}-2", True)


def test_content_parts_without_type_are_read(tmp_path: Path) -> None:
    prompt = [{"role": "user", "content": [{"video": "1.mp4"}, {"text": "Which way?"}, {"text": "Say it."}]}]
    [result] = read_file(put(tmp_path / "robovqa" / "1.json", [COSMOS | {"prompt": prompt}]))
    assert result.prompt == ["Which way?\nSay it."]


@pytest.mark.parametrize("content", [None, 3, ["text"], [{"text": 3}], {"text": "Which way?"}])
def test_malformed_prompt_is_rejected(tmp_path: Path, content: Any) -> None:
    file = put(tmp_path / "robovqa" / "1.json", [COSMOS | {"prompt": [{"role": "user", "content": content}]}])
    with pytest.raises(DataError, match=r"1\.json: item 1: prompt\.0 is .*: input should be a valid string"):
        read_file(file)


def test_cosmos_question_id_matches_for_dotted_clips(tmp_path: Path) -> None:
    video_id = "k.12._.totalframe058.clipframe018"
    [result] = read_file(put(tmp_path / "bridgev2" / "1.json", [COSMOS | {"video_id": video_id}]))
    requested = compute_question_key(COSMOS_TEXT, [name_medium({"type": "video", "video": f"/d/clips/{video_id}.mp4"})])
    assert result.id == f"robovqa/{video_id}/{requested}"


def test_given_frames_keep_their_name_when_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COSMOS_CACHE", str(tmp_path))
    lists = [write_frame_list([f"{root}/pour/1.png", f"{root}/pour/2.png"], {"fps": 2}) for root in ("/a", "/b")]
    parts = [{"type": "video", "video": str(file), "video_start": 1} for file in lists]
    assert [name_medium(part) for part in parts] == ["pour/1.png pour/2.png@1-"] * 2


@pytest.mark.parametrize("prompt", ["", [], None])
def test_unrecognised_question_is_identified_by_index(tmp_path: Path, prompt: Any) -> None:
    [result] = read_file(put(tmp_path / "robovqa" / "7.json", [COSMOS | {"prompt": prompt}]))
    assert (result.id, result.prompt) == ("robovqa/0123/0", [])


def test_is_correct_is_the_only_required_field(tmp_path: Path) -> None:
    (result,) = read_file(put(tmp_path / "robovqa" / "7.json", [{"is_correct": True}]))
    assert (result.datasource, result.video_id, result.id, result.is_correct) == ("robovqa", "7", "robovqa/7/0", True)
    assert result.kind == "open"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[{", r"1\.json: is not valid JSON"),
        ("[" * 100_000, r"1\.json: is not valid JSON"),
        ("{}", r"1\.json: must contain a list of results, but contains an object"),
        ("null", r"1\.json: must contain a list of results, but contains null"),
        ([asdict(made()), 5], r"1\.json: item 2: must be an object with a result; got a number"),
        ([asdict(made()), {"answer": "A"}], r"1\.json: item 2: is_correct is missing"),
        ([{"is_correct": "false"}], r"1\.json: item 1: is_correct is 'false': input should be a valid boolean"),
        ([{"is_correct": 1}], r"1\.json: item 1: is_correct is 1: input should be a valid boolean"),
        ([{"is_correct": None}], r"1\.json: item 1: is_correct is None: input should be a valid boolean"),
        ([asdict(made()) | {"kind": "riddle"}], r"1\.json: item 1: kind is 'riddle': input should be"),
        ([asdict(made()) | {"answer": 5}], r"1\.json: item 1: answer is 5: input should be a valid string"),
        ([asdict(made()) | {"scores": {"bleu": "x"}}], r"1\.json: item 1: scores\.bleu is 'x'"),
        (
            [asdict(made()), asdict(made())],
            r"1\.json: item 2: question 'robovqa/v/0' appears twice \(.*item 1\)",
        ),
        ([], r"all result files \(1\) contain empty lists"),
    ],
)
def test_invalid_result_file_is_rejected(tmp_path: Path, content: Any, message: str) -> None:
    put(tmp_path / "robovqa" / "1.json", content)
    with pytest.raises(DataError, match=message):
        read_run(find_run(tmp_path))


def test_non_text_bytes_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "1.json").write_bytes(b'["\xff"]')
    with pytest.raises(DataError, match=r"1\.json: is not valid JSON"):
        read_run(find_run(tmp_path))


def test_duplicate_question_across_files_is_rejected(tmp_path: Path) -> None:
    put(tmp_path / "robovqa" / "1.json", [asdict(made())])
    put(tmp_path / "robovqa" / "2.json", [asdict(made())])
    with pytest.raises(DataError, match=r"2\.json: item 1: question 'robovqa/v/0' appears twice .*1\.json: item 1"):
        read_run(find_run(tmp_path))


def test_results_are_ordered_by_set_and_clip(tmp_path: Path) -> None:
    write_results(tmp_path, "b", "1", [made("1", 1, datasource="b"), made("1", 0, datasource="b")])
    write_results(tmp_path, "a", "2", [made("2", datasource="a")])
    assert [result.id for result in read_run(find_run(tmp_path))] == ["a/2/0", "b/1/1", "b/1/0"]


# ---------------------------------------------------------------- finding


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Create the results of two runs, and other files that contain no results."""
    for model in ("big", "small"):
        run = tmp_path / model / "letter"
        put(run / "run.json", {"model": model})
        put(run / "summary.json", {})
        put(run / "notes.json", "not even JSON")
        for dataset in ("agibot", "robovqa"):
            write_results(run, dataset, "1", [made("1", datasource=dataset)])
    return tmp_path


@pytest.mark.parametrize(
    ("level", "names"),
    [(".", ["big/letter", "small/letter"]), ("big", ["big/letter"]), ("big/letter", ["big/letter"])],
)
def test_runs_are_found_from_every_level(root: Path, level: str, names: list[str]) -> None:
    runs = find_runs(root / level)
    assert [run.name for run in runs] == names
    assert all([file.name for file in run.files] == ["1.json", "1.json"] for run in runs)


def test_cyclic_links_stop_at_folder_limit(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "MOST_FOLDERS", 8)
    assert len(find_runs(root)) == 2
    for name in ("a", "b"):
        (root / name).symlink_to(root)
    with pytest.raises(
        DataError, match=r"contains more than 8 folders, the maximum; pass the --results-dir of an evaluation"
    ):
        find_runs(root)


def test_single_data_set_folder_is_read(root: Path) -> None:
    assert [result.id for result in read_run(find_run(root / "big" / "letter" / "agibot"))] == ["agibot/1/0"]


def test_current_folder_is_accepted_as_results_dir(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root / "big" / "letter")
    assert (find_run(Path()).name, find_run(Path()).folder) == ("big/letter", Path())


def test_only_requested_data_sets_are_read(root: Path) -> None:
    (run, _) = find_runs(root, ["agibot"])
    assert ([file.parent.name for file in run.files], run.left_out) == (["agibot"], ("robovqa",))
    assert [result.datasource for result in read_run(find_run(root / "big", ["agibot", "robovqa"]))] == [
        "agibot",
        "robovqa",
    ]


def test_clip_may_be_named_run_or_summary(tmp_path: Path) -> None:
    for name in ("run", "summary"):
        write_results(tmp_path, "d", name, [made(name)])
    assert [result.video_id for result in read_run(find_run(tmp_path))] == ["run", "summary"]


def test_files_at_all_depths_are_counted(tmp_path: Path) -> None:
    put(tmp_path / "1.json", [{"is_correct": True}])
    put(tmp_path / "sub" / "2.json", [{"is_correct": False}])
    (run,) = find_runs(tmp_path)
    assert (run.folder, len(run.files)) == (tmp_path, 2)


def test_unknown_data_sets_list_the_known_ones(root: Path) -> None:
    with pytest.raises(DataError, match="contains no results for av, only for agibot, robovqa"):
        find_runs(root, ["agibot", "av"])


def test_folder_without_results_is_rejected(tmp_path: Path) -> None:
    put(tmp_path / "run.json", {})
    with pytest.raises(DataError, match="contains no results"):
        find_runs(tmp_path)
    with pytest.raises(DataError, match="the folder does not exist"):
        find_runs(tmp_path / "absent")


def test_ambiguous_results_dir_is_rejected(root: Path) -> None:
    with pytest.raises(
        DataError, match=r"contains 2 evaluations; pass the folder of one of them: .*big/letter, .*small/letter"
    ):
        read_run(find_run(root))
