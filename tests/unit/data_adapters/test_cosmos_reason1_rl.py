"""Cosmos-Reason1 RL and benchmark rows: questions with lettered options, in the Hub's folder layouts."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import datasets
import pytest
from PIL import Image

from data_adapters import cosmos_reason1
from dsreason.config.schema_data import DataConfig, SourceConfig
from dsreason.data.sources import open_datasets
from dsreason.errors import DataError
from dsreason.rewards.text import COSMOS_FORMAT, FORMAT, REQUEST, describe_format_problem
from tests.unit.media.videos import write_video

CHOICE = {"question": "What next?", "index2ans": {"A": "grasp the cup", "B": "open the door"}, "answer": "B"}
ROW = {"video": "clips/7.mp4", "qa_pairs": CHOICE}
TEXT = (
    "What next?\n(A) grasp the cup\n(B) open the door\nAnswer with the option's letter from the given choices directly."
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the clip of `ROW` in robovqa/."""
    (tmp_path / "robovqa" / "clips").mkdir(parents=True)
    write_video(tmp_path / "robovqa" / "clips" / "7.mp4")
    return tmp_path


def open_rows(folder: Path, rows: list[Any], task: str = "rl", **keys: Any) -> Any:
    (folder / "robovqa" / f"robovqa_{task}_qa_pairs.json").write_text(json.dumps(rows))
    settings = {"adapter": "cosmos_reason1_rl", "path": str(folder), "subset": "robovqa", "split": task, **keys}
    return open_datasets(DataConfig(**settings))[0]


def test_row_becomes_cosmos_rl_question(folder):
    [sample] = open_rows(folder, [ROW], system_prompt=REQUEST)
    system, question, reply = sample.messages
    assert system == {"role": "system", "content": REQUEST}
    displayed, text = question["content"]
    assert displayed == {"type": "video", "video": str(folder / "robovqa" / "clips" / "7.mp4")}
    assert text == {"type": "text", "text": TEXT}
    assert reply == {"role": "assistant", "content": "B"}
    assert (sample.id, sample.answer, sample.options) == ("clips/7.mp4", "B", CHOICE["index2ans"])


@pytest.mark.parametrize("answer", [{}, {"answer": None}, {"answer": " "}])
def test_question_without_answer_is_accepted(folder, answer):
    choice = {key: CHOICE[key] for key in ("question", "index2ans")}
    [sample] = open_rows(folder, [{**ROW, "qa_pairs": choice | answer}])
    assert [message["role"] for message in sample.messages] == ["user"]
    assert (sample.answer, sample.options) == (None, CHOICE["index2ans"])


@pytest.mark.parametrize("pattern", [FORMAT, COSMOS_FORMAT])
def test_system_prompt_requests_the_rewarded_format(pattern):
    assert describe_format_problem(f"{REQUEST}\n{TEXT}", pattern) is None


def test_data_path_may_be_single_annotation_file(folder):
    file = folder / "robovqa" / "robovqa_rl_qa_pairs.json"
    [sample] = open_rows(folder, [ROW], path=str(file), subset=None, split="train")
    assert sample.answer == "B"


def test_clips_in_an_archive_are_found(folder, monkeypatch):
    monkeypatch.setenv("COSMOS_CACHE", str(folder / "cache"))
    clips = folder / "robovqa" / "clips"
    with tarfile.open(folder / "robovqa" / "clips.tar.gz", "w:gz") as packed:
        packed.add(clips / "7.mp4", "clips/7.mp4")
    (clips / "7.mp4").unlink()
    [sample] = open_rows(folder, [ROW])
    assert Path(sample.messages[0]["content"][0]["video"]).is_file()


def test_options_exclude_letters_of_other_rows(folder):
    longer = {**CHOICE, "index2ans": {**CHOICE["index2ans"], "C": "wait"}, "answer": "C"}
    table = datasets.Dataset.from_list([ROW, {**ROW, "qa_pairs": longer}])
    table.to_parquet(folder / "robovqa" / "robovqa_rl.parquet")
    data = DataConfig(adapter="cosmos_reason1_rl", path=str(folder), subset="robovqa", split="rl")
    first, second = open_datasets(data)[0]
    assert list(first.options) == ["A", "B"]
    assert list(second.options) == ["A", "B", "C"]


def test_each_question_of_list_becomes_one_row(folder):
    names = {"question": "And then?", "index2ans": CHOICE["index2ans"], "correct_answer": "A"}
    rows = [{**ROW, "qa_pairs": [CHOICE]}, {**ROW, "qa_pairs": [CHOICE, names, {**names, "correct_answer": "E"}]}]
    samples = open_rows(folder, rows, "benchmark")
    assert len(samples) == 4
    assert [samples[i].answer for i in range(3)] == ["B", "B", "A"]
    assert [samples[i].id for i in range(3)] == ["clips/7.mp4"] * 3  # regardless of which other clips exist
    with pytest.raises(
        DataError, match=r"robovqa_benchmark_qa_pairs\.json, row 2, question 3: .* one of A, B; got 'E'"
    ):
        samples[3]


def test_optionless_question_and_lowercase_letter_are_accepted(folder):
    yes = {"question": "Does it move?", "answer": "yes"}
    first, second = open_rows(folder, [{**ROW, "qa_pairs": yes}, {**ROW, "qa_pairs": {**CHOICE, "answer": "b"}}])
    assert (first.messages[0]["content"][1]["text"], first.answer, first.options) == ("Does it move?", "yes", None)
    assert second.answer == "B"


def test_row_may_have_image_instead_of_video(folder):
    Image.new("RGB", (28, 28)).save(folder / "robovqa" / "clips" / "7.jpg")
    row = {"video": None, "image": "images/7.jpg", "qa_pairs": CHOICE}
    [sample] = open_rows(folder, [row])
    assert sample.messages[0]["content"][0] == {"type": "image", "image": str(folder / "robovqa/clips/7.jpg")}


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"video": "clips/8.mp4", "qa_pairs": CHOICE}, r"video: no such file: .*/robovqa/clips/8\.mp4"),
        ({"image": "8.jpg", "qa_pairs": CHOICE}, r"image: no such file: .*/robovqa/8\.jpg"),
        ({"qa_pairs": CHOICE}, "field 'video' is missing"),
        ({"video": "clips/7.mp4"}, "field 'qa_pairs' is missing"),
        ({**ROW, "qa_pairs": []}, "field 'qa_pairs' must be .*; got None"),
        ({**ROW, "qa_pairs": "B"}, "field 'qa_pairs' must be .*; got 'B'"),
        ({**ROW, "qa_pairs": {**CHOICE, "question": 3}}, "field 'question' must be a string; got 3"),
        (
            {**ROW, "qa_pairs": {**CHOICE, "index2ans": ["x", "y"]}},
            r"field 'qa_pairs.index2ans' must .*; got \['x', 'y'\]",
        ),
        (
            {**ROW, "qa_pairs": {**CHOICE, "index2ans": {"A": [1]}}},
            r"field 'qa_pairs.index2ans' must .*; got \{'A': \[1\]\}",
        ),
        ({**ROW, "qa_pairs": {**CHOICE, "answer": "E"}}, "field 'qa_pairs.answer' must be one of A, B; got 'E'"),
        ({**ROW, "qa_pairs": {"question": "?", "answer": 3}}, "field 'answer' must be a string; got 3"),
    ],
)
def test_bad_row_error_names_row_and_field(folder, row, text):
    samples = open_rows(folder, [ROW, row])
    with pytest.raises(DataError, match=r"robovqa_rl_qa_pairs\.json, row 2( \(sample '.*'\))?: " + text):
        samples[1]


def test_conversation_adapter_error_names_question_adapter(folder):
    with pytest.raises(DataError, match="cosmos_reason1_rl"):
        cosmos_reason1.to_sample(ROW, SourceConfig(path=str(folder), subset="robovqa"))
