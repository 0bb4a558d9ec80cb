"""Reports of `dsreason data inspect`, and rows that cannot be rendered."""

import json
import os
import re
import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dsreason.cli.data.inspection_tables import collect_facts
from dsreason.config.schema import ModelConfig, SFTConfig
from dsreason.config.schema_data import DataConfig
from dsreason.data.chat import Encoder
from dsreason.data.labels import extract_short_answer
from dsreason.data.order import pick_evenly
from dsreason.data.sources import SampleDataset, open_datasets
from dsreason.data.types import Sample
from dsreason.tools.datasets.inspection import (
    Inspection,
    Letter,
    Overlap,
    PixelReport,
    PreferenceReport,
    Spread,
    compute_spread,
    inspect_data,
)
from dsreason.tools.datasets.rendering import render_rows
from dsreason.tools.datasets.row_facts import UnusableRow, normalise
from dsreason.train.common import contact_sheet
from dsreason.train.common.contact_sheet import draw_sample_sheets
from dsreason.train.common.preflight import build_encoder
from tests.unit.media.videos import write_video

SHARED = Path(__file__).resolve().parents[5] / "shared" / "data"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="the folder ../shared/data with real media is absent")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_video(tmp_path / "a.mp4", 12)
    shutil.copy(tmp_path / "a.mp4", tmp_path / "copy.mp4")
    write_video(tmp_path / "b.mp4", 24, frames=[np.zeros((56, 84, 3), np.uint8)] * 24)
    Image.new("RGB", (40, 30)).save(tmp_path / "c.png")
    (tmp_path / "broken.mp4").write_bytes(b"no video" * 99)
    return tmp_path


@pytest.fixture
def encoder(tiny_qwen2_5_vl: Path) -> Encoder:
    return build_encoder(SFTConfig(model=ModelConfig(path=str(tiny_qwen2_5_vl), max_length=60)), tiny_qwen2_5_vl)


def row(number: int, **changes: Any) -> dict[str, Any]:
    return {"id": str(number), "question": f"question {number}", "answer": "yes", **changes}


def open_rows(folder: Path, *rows: dict[str, Any], name: str = "rows.jsonl", **keys: Any) -> SampleDataset:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return open_datasets(DataConfig(adapter="jsonl", path=str(folder / name), **keys))[0]


def inspect(folder: Path, *rows: dict[str, Any], **options: Any) -> Inspection:
    return inspect_data({"training": open_rows(folder, *rows)}, **options)


def test_spread_has_min_median_p95_and_max() -> None:
    assert compute_spread(range(1, 102)) == Spread(1, 51, 96, 101)
    assert compute_spread([]) is None


@pytest.mark.parametrize(
    ("count", "limit", "rows"), [(10, 3, [0, 3, 6]), (2, 5, [0, 1]), (3, None, [0, 1, 2]), (0, 4, [])]
)
def test_a_limit_takes_evenly_spaced_rows(count: int, limit: int | None, rows: list[int]) -> None:
    assert pick_evenly(count, limit) == rows


def test_rows_lengths_and_modalities_are_counted(folder: Path) -> None:
    part = inspect(
        folder,
        row(0, question="abcd", answer="12"),
        row(1, question="ab", answer="123456", image="c.png"),
        row(2, question="abcdef", answer="1234", image="c.png", video="a.mp4"),
    ).parts["training"]
    assert (part.rows, part.inspected, part.unusable) == (3, 3, {})
    assert part.modalities == {"text": 1, "image": 1, "image and video": 1}
    assert part.question_characters == Spread(2, 4, pytest.approx(5.8), 6)
    assert part.answer_characters == Spread(2, 4, pytest.approx(5.8), 6)
    assert part.tokens is None and part.too_long is None


def test_preference_answer_lengths_are_reported(folder: Path) -> None:
    pairs = [("12", "1234"), ("12345", "1"), ("12", "12"), ("123", "1")]
    rows = [row(i, answer=choice, rejected=rejected) for i, (choice, rejected) in enumerate(pairs)]
    part = inspect(folder, *rows, row(9)).parts["training"]
    assert part.preferences == PreferenceReport(4, Spread(1, 1.5, pytest.approx(3.7), 4), longer_chosen=2, undecided=1)
    message = collect_facts(part, None)
    assert message["preferences"] == "4"
    assert message["chosen answer is longer"] == "50.0%"
    assert message["both answers are identical"] == "1"
    assert inspect(folder, row(0)).parts["training"].preferences is None


def test_media_files_are_measured_once_each(folder: Path) -> None:
    rows = [row(0, video="a.mp4"), row(1, video="b.mp4"), row(2, video="b.mp4"), row(3, image="c.png")]
    media = inspect(folder, *rows).parts["training"].media
    assert (media["video"].files, media["image"].files) == (2, 1)
    assert media["video"].seconds == Spread(pytest.approx(1.2), pytest.approx(1.8), pytest.approx(2.34), 2.4)
    assert media["video"].height == Spread(48, 52, pytest.approx(55.6), 56)
    assert media["image"].width == Spread(40, 40, 40, 40)
    assert media["image"].bytes == (folder / "c.png").stat().st_size


def test_media_sized_differently_by_qwen_are_listed(folder: Path, encoder: Encoder) -> None:
    """Compare the tiny model's processor (1 to 256 tokens) with qwen-vl-utils (128 to 768 per frame, at least 4 per image)."""
    rows = [row(0, video="a.mp4"), row(1, video="b.mp4"), row(2, image="c.png"), row(3)]
    samples = open_rows(folder, *rows, vision={"min_frames": 6})
    pixels = inspect_data({"training": samples}, encoder).parts["training"].pixels
    assert pixels is not None and (pixels.compared, pixels.differing) == (3, 3)
    assert pixels.examples == [
        f"{folder}/a.mp4: 6 frames of 56x56 pixels, 12 tokens; qwen-vl-utils: 6 frames of 392x280 pixels, 420 tokens",
        f"{folder}/b.mp4: 6 frames of 84x56 pixels, 18 tokens; qwen-vl-utils: 6 frames of 392x280 pixels, 420 tokens",
        f"{folder}/c.png: 28x28 pixels, 1 tokens; qwen-vl-utils: 84x56 pixels, 6 tokens",
    ]


def test_equally_sized_media_are_only_counted(folder: Path, encoder: Encoder) -> None:
    large = {"min_pixels": 300 * 784, "max_pixels": 400 * 784}
    samples = open_rows(folder, row(0, video="a.mp4"), row(1, video="gone.mp4"), row(2), vision=large)
    pixels = inspect_data({"training": samples}, encoder).parts["training"].pixels
    assert pixels == PixelReport(compared=1, differing=0, examples=[])


def test_refused_media_and_differing_frames_are_reported(folder: Path, encoder: Encoder) -> None:
    same = {"min_pixels": 300 * 784, "max_pixels": 400 * 784}
    write_video(folder / "film.mp4", range(0, 960, 40), rate=25)
    samples = open_rows(folder, row(0, video="film.mp4"), vision={**same, "video_start": 0.28, "nframes": 4})
    pixels = inspect_data({"training": samples}, encoder).parts["training"].pixels
    # 0.28 s x 25 frames per second is 7.000000000000001 in binary, which qwen-vl-utils rounds up.
    assert pixels is not None and pixels.examples[0].endswith("tokens (frame 7 in dsreason, 8 in qwen-vl-utils)")
    samples = open_rows(folder, row(0, video="a.mp4"), vision={**same, "nframes": 1})
    pixels = inspect_data({"training": samples}, encoder).parts["training"].pixels
    assert pixels is not None and pixels.examples[0].endswith("; qwen-vl-utils cannot sample 0 of 12 frames")


@pytest.mark.parametrize("workers", [0, 2])
def test_missing_and_unreadable_media_are_listed(folder: Path, workers: int) -> None:
    result = inspect(
        folder,
        row(0, video="a.mp4"),
        row(1, video="gone.mp4"),
        row(2, video="broken.mp4"),
        {"id": "3", "answer": "a"},
        workers=workers,
    )
    part = result.parts["training"]
    assert part.unusable == {"missing media": 1, "other": 1}
    assert part.unreadable_media == 1
    assert [(problem["kind"], problem["where"].partition(", ")[2]) for problem in result.problems] == [
        ("missing media", "row 2"),
        ("unreadable media", "row 3"),
        ("unusable row", "row 4"),
    ]
    assert "gone.mp4" in result.problems[0]["reason"] and "broken.mp4" in result.problems[1]["reason"]


@pytest.mark.parametrize(
    ("reason", "missing"),
    [
        ("rows.jsonl, row 3 (sample '2'): video: no such file: /d/gone.mp4", True),
        ("a.json, row 1: field 'video': no clip named a.mp4 in data robovqa", True),
        ("a.json, row 1: field 'image': no image named a.png in data", True),
        ("rows.jsonl, row 7: field 'question' is missing (adapter jsonl)", False),
    ],
)
def test_missing_media_are_distinguished_from_other_reasons(reason: str, missing: bool) -> None:
    assert UnusableRow("", reason).is_missing_media is missing


def test_token_counts_match_encoding(folder: Path, encoder: Encoder) -> None:
    samples = open_rows(folder, row(0), row(1, image="c.png"), row(2, question="word " * 80))
    part = inspect_data({"training": samples}, encoder).parts["training"]
    lengths = sorted(encoder.measure(samples[i]) for i in range(3))
    assert len(encoder.encode(samples[1])) == lengths[1]
    assert part.tokens is not None
    assert (part.tokens.min, part.tokens.median, part.tokens.max) == tuple(lengths)
    assert part.too_long == 1


def test_option_letters_in_questions_are_counted(folder: Path) -> None:
    question = "Which?\n(A) one\n(B) two"
    rows = [row(i, question=f"{i} {question}", answer=answer) for i, answer in enumerate(["A", "(a)", "two", "no"])]
    part = inspect(folder, *rows).parts["training"]
    assert part.letters == {"A": Letter(2, 1.5), "B": Letter(1, 1.5)}
    assert part.answers == {"no": 1}
    assert part.unlisted_answers == 1
    assert collect_facts(part, None)["answers that match no option of the question"] == "1"


def test_answers_are_merged_ignoring_case_and_period(folder: Path) -> None:
    answers = ["ja", "Ja.", "JA", "nein", "nein.", "<answer>ja</answer>"]
    part = inspect(folder, *(row(i, answer=answer) for i, answer in enumerate(answers))).parts["training"]
    assert part.answers == {"ja": 4, "nein": 2}
    assert part.best_constant == pytest.approx(4 / 6)


def test_letter_counts_are_compared_with_uniform_ones(folder: Path) -> None:
    four, two = {"A": "a", "B": "b", "C": "c", "D": "d"}, {"A": "a", "B": "b"}
    rows = [row(0, options=four, answer="B"), row(1, options=four, answer="B"), row(2, options=two, answer="A")]
    part = inspect(folder, *rows).parts["training"]
    assert part.letters == {"A": Letter(1, 1.0), "B": Letter(2, 1.0), "C": Letter(0, 0.5), "D": Letter(0, 0.5)}
    assert part.best_constant == pytest.approx(2 / 3)
    assert part.answers == {}


def test_answers_system_prompts_and_tags_are_counted(folder: Path) -> None:
    part = inspect(
        folder,
        row(0, answer="<think>b</think> <answer>yes</answer>", system="Think."),
        row(1, answer="yes", system="Think."),
        row(2, answer="no"),
        row(3, answer="a longer text " * 9),
    ).parts["training"]
    assert part.answers == {"yes": 2, "no": 1}
    assert part.system_prompts == {"Think.": 2}
    assert (part.with_think, part.with_answer_tag) == (1, 1)
    assert part.best_constant == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("left", "left"),
        (" left\n", "left"),
        ("<think>so</think>\n\n<answer> B </answer>", "B"),
        ("<think>so</think> right", "right"),
        ("one\ntwo", None),
        ("", None),
        ("x" * 41, None),
    ],
)
def test_answer_is_extracted_from_its_tags(text: str, answer: str | None) -> None:
    assert extract_short_answer(text) == answer


def test_questions_are_compared_by_their_words() -> None:
    assert normalise("Which  WAY does\nit move?") == normalise("which way does it move") == "which way does it move"
    assert normalise("Wohin geht's? 左") != normalise("Wohin geht's? 右")


def test_duplicates_are_found_across_names_and_parts(folder: Path) -> None:
    training = open_rows(
        folder,
        row(0, question="Which way?", video="a.mp4"),
        row(1, question="which way", video="copy.mp4"),
        row(2, question="Which way?", video="b.mp4"),
    )
    test = open_rows(
        folder,
        row(7, question="WHICH way?", video="copy.mp4"),
        row(8, question="How many?", video="a.mp4"),
        row(9, question="Which way?", image="c.png"),
        row(10, question="Which way?"),
        name="test.jsonl",
    )
    data = inspect_data({"training": training, "test": test})
    assert data.parts["training"].duplicates == 1
    assert data.parts["test"].duplicates == 0
    assert data.overlaps == [Overlap("test", "training", same_rows=1, same_media=2)]
    assert [
        (item["part"], item["where"].rpartition(" ")[2], item["of"].rpartition(" ")[2]) for item in data.duplicates
    ] == [
        ("training", "2", "1"),
        ("test", "1", "1"),
    ]


def test_different_clip_ranges_are_not_duplicates(folder: Path) -> None:
    def part(number: int, **seconds: float) -> dict[str, Any]:
        content = [{"type": "video", "video": "a.mp4", **seconds}, {"type": "text", "text": "Which way?"}]
        messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "left"}]
        return {"id": str(number), "messages": messages}

    rows = [part(0), part(1, video_start=0.5), part(2, video_start=0.5, video_end=1), part(3, video_start=0)]
    (folder / "parts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    samples = open_datasets(DataConfig(adapter="conversations", path=str(folder / "parts.jsonl")))[0]
    data = inspect_data({"training": samples})
    assert [(item["where"].rpartition(" ")[2], item["of"].rpartition(" ")[2]) for item in data.duplicates] == [
        ("4", "1")
    ]
    assert data.parts["training"].media["video"].files == 1


def test_files_of_equal_size_are_not_duplicates(folder: Path) -> None:
    for name, colour in (("x.bmp", "red"), ("y.bmp", "blue")):
        Image.new("RGB", (8, 8), colour).save(folder / name)
    rows = [row(0, question="q", image="x.bmp"), row(1, question="q", image="y.bmp")]
    assert inspect(folder, *rows).parts["training"].duplicates == 0


def test_given_frames_are_inspected(folder: Path, encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COSMOS_CACHE", str(folder / "cache"))
    for name, colours in (("x", "rgb"), ("same", "rgb"), ("other", "rbg")):
        (folder / name).mkdir()
        for number, colour in enumerate(colours):
            shade = {"r": "red", "g": "green", "b": "blue"}[colour]
            Image.new("RGB", (112, 112), shade).save(folder / name / f"{number}.bmp")
    rows = [row(i, question="q", video=name, fps=4) for i, name in enumerate(("x", "same", "other"))]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    dataset = open_datasets(DataConfig(adapter="auto", path=str(folder / "rows.jsonl")))[0]
    part = inspect_data({"training": dataset}, encoder).parts["training"]
    assert (part.rows, part.unusable, part.duplicates) == (3, {}, 1)
    video = part.media["video"]
    assert (video.files, video.bytes) == (3, 9 * (folder / "x" / "0.bmp").stat().st_size)
    assert (video.seconds.median, video.fps.median) == (0.75, 4)
    assert part.pixels is not None
    assert re.search(r"x/0\.bmp … 2\.bmp: 4 frames of .*; qwen-vl-utils: 4 frames of 336x336", part.pixels.examples[0])


def test_limit_restricts_the_inspected_rows(folder: Path) -> None:
    part = inspect(folder, *[row(i) for i in range(10)], limit=4).parts["training"]
    assert (part.rows, part.inspected) == (10, 4)


@needs_shared
def test_size_of_real_media_is_measured(tmp_path: Path) -> None:
    rows = [row(0, video="sample.mp4"), row(1, image="photo.jpg"), row(2, image="sample.png")]
    data = inspect_data({"training": open_rows(tmp_path, *rows, media_path=str(SHARED))})
    media = data.parts["training"].media
    assert data.problems == []
    assert (media["video"].files, media["image"].files) == (1, 2)
    assert media["video"].bytes == (SHARED / "sample.mp4").stat().st_size


def test_contact_sheet_shows_media_and_placeholders(folder: Path) -> None:
    rows = [row(0, video="a.mp4"), row(1, image="c.png"), row(2, video="broken.mp4")]
    samples = open_rows(folder, *rows)
    page = np.asarray(draw_sample_sheets([samples[i] for i in range(3)]))
    assert page.shape[1] == 1280
    assert (page[40:100, 10:150] > 200).all()  # the video's frame 0 is white
    assert (page[40:100, 168:196] < 60).all()  # frame 3 has two black bars on the left
    assert (page[40:60, 650:760] < 50).all()  # the black picture beside it
    assert draw_sample_sheets([]).size == (1280, 1)


def test_contact_sheet_holds_media_at_displayed_size(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.new("RGB", (400, 300)).save(folder / "large.png")
    frames = [np.zeros((240, 320, 3), np.uint8)] * 4
    write_video(folder / "large.mp4", 4, frames=frames)
    held: list[Any] = []
    make = contact_sheet.draw_contact_sheet
    monkeypatch.setattr(
        contact_sheet, "draw_contact_sheet", lambda media, text: held.extend(media) or make(media, text)
    )
    samples = open_rows(folder, row(0, video="large.mp4"), row(1, image="large.png"))
    draw_sample_sheets([samples[0], samples[1]])
    assert [held[0][0].shape, held[1].size] == [(4, 117, 156, 3), (156, 117)]


# ---------------------------------------------------------------- rendering every row


@pytest.mark.parametrize("workers", [0, 2])
def test_every_row_rejected_by_training_is_reported(folder: Path, encoder: Encoder, workers: int) -> None:
    samples = open_rows(
        folder,
        row(0, image="c.png"),
        row(1, video="broken.mp4"),
        row(2, video="gone.mp4"),
        row(3, question="word " * 80),
        {"id": "4", "question": "q"},
    )
    count, bad = render_rows("training", samples, encoder.encode, workers=workers)
    assert count == 5
    words = [r"row 2: .*broken\.mp4", r"row 3 .*gone\.mp4", r"row 4: .*tokens", "row 5: .*nor an answer"]
    assert len(bad) == len(words)
    assert all(re.search(pattern, text) for pattern, text in zip(words, bad, strict=True))


def test_media_damaged_after_header_are_detected(folder: Path, encoder: Encoder) -> None:
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)).save(folder / "whole.png")
    (folder / "half.png").write_bytes((folder / "whole.png").read_bytes()[:6000])
    samples = open_rows(folder, row(0, image="half.png"))
    assert inspect_data({"training": samples}).problems == []
    _, bad = render_rows("training", samples, encoder.encode)
    assert len(bad) == 1 and "half.png: is not a usable image" in bad[0]


def die_on(name: str, sample: Sample) -> None:
    if sample.id == name:
        os.kill(os.getpid(), signal.SIGKILL)


def test_row_that_kills_its_process_is_reported(folder: Path) -> None:
    samples = open_rows(folder, *[row(i) for i in range(6)])
    count, bad = render_rows("training", samples, partial(die_on, "3"), workers=2)
    assert count == 6
    assert bad == [
        f"{folder / 'rows.jsonl'}, row 4: the process that worked on it was killed by SIGKILL "
        "(often: out of memory; see the kernel log)"
    ]
