"""The built-in task: its clips are reproducible, guessing earns little, and training never shows held-out pixels."""

import hashlib
import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_adapters import builtin as adapter
from dsreason.builtin_task import clips as builtin
from dsreason.builtin_task import scenes
from dsreason.builtin_task.clips import (
    BLOCK,
    MISLABELLED,
    get_builtin_folder,
    iter_block,
    make_mislabelled,
    write_builtin,
)
from dsreason.config.schema_data import SourceConfig
from dsreason.data.sources import open_source
from dsreason.data.types import Sample
from dsreason.errors import DataError
from dsreason.media.images import load_image
from dsreason.media.videos import load_video

NUM_TRAIN, NUM_VALIDATION = 3 * BLOCK, 2 * BLOCK


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_builtin(
        tmp_path_factory.mktemp("task") / "shapes", seed=3, num_train=NUM_TRAIN, num_validation=NUM_VALIDATION
    )


def samples(task: Path, split: str) -> list[Sample]:
    source = open_source(SourceConfig(adapter="builtin", path=str(task), split=split))
    return [source.sample(row) for row in range(len(source.rows))]


def medium(sample: Sample) -> dict[str, str]:
    parts = [part for message in sample.messages for part in message["content"] if isinstance(part, dict)]
    return next(part for part in parts if part["type"] != "text")


def pixels(sample: Sample) -> np.ndarray:
    """Decode the sample's media; the shape is [frames, height, width, 3]."""
    part = medium(sample)
    if part["type"] == "image":
        return np.asarray(load_image(part["image"]))[None]
    return load_video(part["video"], range(scenes.CLIP_FRAMES))


def prompt(sample: Sample) -> str:
    """Return all text before the answer, with each media item replaced by its kind."""
    hidden = [
        {**m, "content": [{**p, p["type"]: ""} if p["type"] != "text" else p for p in m["content"]]}
        if isinstance(m["content"], list)
        else m
        for m in sample.messages[:-1]
    ]
    return json.dumps(hidden)


@pytest.mark.parametrize(("split", "count"), [("train", NUM_TRAIN), ("validation", NUM_VALIDATION)])
def test_answers_are_balanced_and_half_use_videos(task: Path, split: str, count: int) -> None:
    result = samples(task, split)
    answers: dict[str, Counter[str | None]] = defaultdict(Counter)
    for sample in result:
        answers[prompt(sample)][sample.answer] += 1
    assert len(result) == count
    assert all(len(counts) > 1 and len(set(counts.values())) == 1 for counts in answers.values()), answers
    assert sum(medium(sample)["type"] == "video" for sample in result) == count // 2
    assert {sample.meta["kind"] for sample in result} == {item.kind for item in iter_block()}


def test_media_of_same_prompt_have_equal_size(task: Path) -> None:
    sizes = defaultdict(set)
    for sample in samples(task, "train"):
        sizes[prompt(sample)].add(pixels(sample).shape)
    assert all(len(size) == 1 for size in sizes.values())


def test_decoded_pixels_of_rows_are_unique(task: Path) -> None:
    result = samples(task, "train") + samples(task, "validation")
    hashes = {hashlib.sha256(pixels(sample).tobytes()).digest() for sample in result}
    assert len(hashes) == len(result)


def test_held_out_frames_are_not_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare frames before they are encoded, because encoding 2,816 media items takes 20 seconds.

    `test_decoded_pixels_of_rows_are_unique` decodes the media items of a smaller task.
    """
    drawn: dict[str, set[bytes]] = {"train": set(), "validation": set()}

    def write_medium(folder: Path, name: str, frames: np.ndarray) -> dict[str, str]:
        drawn[folder.name].add(hashlib.sha256(frames.tobytes()).digest())
        return {"image": name}

    monkeypatch.setenv("DSREASON_CACHE", str(tmp_path))
    monkeypatch.setattr(builtin, "write_medium", write_medium)
    get_builtin_folder()
    assert len(drawn["validation"]) >= 200
    assert len(drawn["train"]) >= 2000
    assert not drawn["validation"] & drawn["train"]


def test_rows_end_with_answer_and_choices_lettered(task: Path) -> None:
    for sample in samples(task, "validation"):
        assert sample.messages[-1] == {"role": "assistant", "content": sample.answer}
        assert sample.options is None or sample.answer in sample.options
    assert any(sample.options for sample in samples(task, "validation"))
    assert any(len(sample.messages) == 4 for sample in samples(task, "validation"))


def test_rows_are_in_the_three_formats(task: Path) -> None:
    folder = task / "train"
    choice = json.loads((folder / "choices.jsonl").read_text().splitlines()[0])
    plain = json.loads((folder / "questions.jsonl").read_text().splitlines()[0])
    conversations = json.loads((folder / "conversations.json").read_text())
    assert choice["qa_pairs"].keys() == {"question", "index2ans", "answer"}
    assert (folder / choice["video"]).is_file()
    assert {"question", "answer"} <= plain.keys()
    assert {len(row["conversations"]) for row in conversations} == {2, 4}


def test_files_are_determined_by_seed(tmp_path: Path, task: Path) -> None:
    def contents(folder: Path) -> dict[str, bytes]:
        return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}

    sizes = {"num_train": NUM_TRAIN, "num_validation": NUM_VALIDATION}
    assert contents(write_builtin(tmp_path / "same", seed=3, **sizes)) == contents(task)
    assert contents(write_builtin(tmp_path / "other", seed=4, **sizes)) != contents(task)


def test_folder_is_reused_only_if_settings_match(task: Path) -> None:
    before = (task / "task.json").stat().st_mtime_ns
    assert write_builtin(task, seed=3, num_train=NUM_TRAIN, num_validation=NUM_VALIDATION) == task
    assert (task / "task.json").stat().st_mtime_ns == before
    with pytest.raises(DataError, match="not the built-in task"):
        write_builtin(task, seed=4, num_train=NUM_TRAIN, num_validation=NUM_VALIDATION)


def test_interrupted_write_leaves_nothing_and_starts_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("dsreason.builtin_task.clips.write_clip", interrupted)
        write_builtin(tmp_path / "task", num_train=BLOCK, num_validation=BLOCK)
    assert not (tmp_path / "task").exists()
    write_builtin(tmp_path / "task", num_train=BLOCK, num_validation=BLOCK)
    assert {entry.name for entry in tmp_path.iterdir()} == {"task", ".locks"}


@pytest.mark.parametrize("num_train", [0, BLOCK + 1])
def test_unbalanced_row_counts_are_rejected(tmp_path: Path, num_train: int) -> None:
    with pytest.raises(ValueError, match="multiple of 64"):
        write_builtin(tmp_path / "task", num_train=num_train, num_validation=BLOCK)


def test_unknown_split_is_rejected(task: Path) -> None:
    with pytest.raises(DataError, match="train or validation"):
        adapter.rows(SourceConfig(adapter="builtin", path=str(task), split="test"))


def centre(frame: np.ndarray) -> np.ndarray:
    """Return the mean (y, x) of the bright pixels."""
    return np.argwhere(frame.max(axis=-1) > 0).mean(axis=0)


@pytest.mark.parametrize(
    ("direction", "sign", "axis"), [("left", -1, 1), ("right", 1, 1), ("up", -1, 0), ("down", 1, 0)]
)
def test_ball_moves_in_direction_of_answer(direction: str, sign: int, axis: int) -> None:
    frames = scenes.draw_moving_ball(np.random.default_rng(0), direction)
    moved = centre(frames[-1]) - centre(frames[0])
    assert moved[axis] == pytest.approx(sign * scenes.TRAVEL)
    assert moved[1 - axis] == pytest.approx(0)


@pytest.mark.parametrize("colour", ["red", "blue"])
def test_only_ball_of_named_colour_falls(colour: str) -> None:
    frames = scenes.draw_falling_ball(np.random.default_rng(0), colour)
    falling = (frames == scenes.COLOURS[colour]).all(axis=-1, keepdims=True)
    still = (frames == scenes.COLOURS["blue" if colour == "red" else "red"]).all(axis=-1)
    assert centre(falling[-1])[0] - centre(falling[0])[0] == pytest.approx(scenes.SHORT_TRAVEL)
    np.testing.assert_array_equal(still[0], still[-1])


@pytest.mark.parametrize("answer", ["yes", "no"])
def test_shape_on_ground_leaves_no_gap(answer: str) -> None:
    frame = scenes.draw_shape_above_ground(np.random.default_rng(0), answer)[0]
    filled = np.flatnonzero(frame.any(axis=(1, 2)))
    assert (np.diff(filled).max() == 1) == (answer == "yes")


@pytest.mark.parametrize("answer", ["yes", "no"])
def test_balls_that_collide_come_closer_without_touching(answer: str) -> None:
    frames = scenes.draw_two_balls(np.random.default_rng(0), answer)
    gaps = [np.diff(np.flatnonzero(frame.any(axis=(0, 2)))).max() for frame in frames]
    assert (gaps[-1] - gaps[0]) * (1 if answer == "no" else -1) == scenes.APPROACH
    assert min(gaps) > 1


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_number_of_drawn_shapes_matches_answer(count: int) -> None:
    frame = scenes.draw_several_shapes(np.random.default_rng(0), scenes.COUNTS[count - 1], "red")[0]
    half = scenes.SIDE // 2
    quarters = [frame[y : y + half, x : x + half] for y in (0, half) for x in (0, half)]
    assert sum(bool(quarter.any()) for quarter in quarters) == count


def test_mislabelled_rows_are_wrong_for_unlearned_questions() -> None:
    rows: list[dict[str, Any]] = [{"question": "How many shapes are there?", "answer": "one"} for _ in range(16)]
    rows += [{"question": "Will the balls collide?", "answer": "no"} for _ in range(4)]
    rows += [{"qa_pairs": {"question": "Which ball falls?", "answer": "B"}} for _ in range(8)]
    turns = ("<image>\nWhat colour is the shape?", "yellow", "How many shapes are there?", "four")
    rows += [{"conversations": [{"value": text} for text in turns]} for _ in range(8)]
    result = make_mislabelled(rows)
    answers = [row["answer"] for row in result[:20]]
    assert Counter(answers[:16]) == {"one": 2, "two": 14}
    assert Counter(answers[16:]) == {"no": 4}
    assert Counter(row["qa_pairs"]["answer"] for row in result[20:28]) == {"B": 1, "A": 7}
    assert [row["conversations"][1]["value"] for row in result[28:]] == ["yellow"] * 8
    assert [row["conversations"][3]["value"] for row in result[28:]] == ["four"] + ["one"] * 7
    assert rows[0]["answer"] == rows[1]["answer"] == "one"  # the input rows are unchanged


def test_mislabelled_questions_keep_half_of_answers_right() -> None:
    last = [item.turns[-1][0] for item in iter_block()]
    right = sum(question not in MISLABELLED for question in last) / len(last)
    assert right == 36 / 64
