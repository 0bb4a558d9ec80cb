"""Reports, which are complete, reproducible, and safe whatever text a model has written."""

from __future__ import annotations

import base64
import html
import io
import json
import re
from dataclasses import asdict
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dsreason.errors import DataError
from dsreason.evaluation.report import pictures
from dsreason.evaluation.report.report import get_question_text, read_settings, write_report, write_reports
from dsreason.evaluation.report.results import find_run, write_results
from dsreason.evaluation.report.score import RunSummary
from dsreason.media.frames import write_frame_list
from dsreason.media.videos import load_video
from tests.unit.evaluation.made_results import made
from tests.unit.media.videos import number_frame, read_number, write_video

HOSTILE = [
    "<script>alert(1)</script>",
    "</textarea></pre></article><img src=x onerror=alert(1)>",
    "{{ 7 * 7 }} {% raw %} {# x #}",
    "\"><a href='javascript:alert(1)'>",
    "<!-- -->\0&amp;",
]


class Page(HTMLParser):
    """Parser that records all tags with their attributes, in order, and the text of each card."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]

    def cards(self) -> list[dict[str, str | None]]:
        return self.all("article")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """`<results_dir>/<model>/<answer_type>` with one question of each verdict."""
    folder = tmp_path / "results" / "big" / "letter"
    write_results(folder, "robovqa", "1", [made("1"), made("1", 1, "B", reasoning="It turns.", finish_reason="length")])
    write_results(folder, "av", "2", [made("2", answer="", datasource="av")])
    gone = made("3", answer="", datasource="av", error="clip 3.mp4: no such file", media=["/data/3.mp4"], kind="open")
    write_results(folder, "av", "3", [gone])
    (folder / "run.json").write_text(json.dumps({"model": "big", "sampling": {"temperature": 0.6, "seed": None}}))
    return folder


def score_run(folder: Path, frames: int | None = None) -> RunSummary:
    return write_report(find_run(folder), frames=frames).summary


def page(folder: Path) -> Page:
    return Page((folder / "report.html").read_text(encoding="utf-8"))


# ---------------------------------------------------------------- files


def test_scored_run_gets_three_reports(folder: Path) -> None:
    summary = score_run(folder)
    assert summary.accuracy.over_all.share == 0.25
    assert {"summary.json", "report.md", "report.html"} < {file.name for file in folder.iterdir()}
    document = json.loads((folder / "summary.json").read_text())
    assert document["run"] == "big/letter"
    assert document["comparison"] is None
    assert document["datasets"]["robovqa"]["over_all"]["count"] == 1


def test_scoring_again_gives_the_same_bytes(folder: Path) -> None:
    score_run(folder)
    names = ("summary.json", "report.md", "report.html")
    before = [(folder / name).read_bytes() for name in names]
    score_run(folder)
    assert [(folder / name).read_bytes() for name in names] == before


def test_folder_of_result_files_gets_reports(tmp_path: Path) -> None:
    (tmp_path / "1.json").write_text('[{"is_correct": true}]')
    score_run(tmp_path)
    assert "100.0%" in (tmp_path / "report.md").read_text()
    assert len(page(tmp_path).cards()) == 1


def test_every_run_in_a_folder_is_scored(folder: Path) -> None:
    write_results(folder.parent / "reasoning", "av", "2", [made("2", datasource="av")])
    reports = write_reports(folder.parent, with_html=False)
    assert [report.summary.run for report in reports] == ["big/letter", "big/reasoning"]
    assert not (folder / "report.html").exists()
    with pytest.raises(DataError, match="contains 2 evaluations"):
        score_run(folder.parent)


def test_partial_report_lists_omitted_datasets(folder: Path) -> None:
    (report,) = write_reports(folder, ["robovqa"])
    assert report.summary.left_out == ("av",)
    assert "Data sets not included: av" in (folder / "report.md").read_text()
    assert "Data sets not included: av" in page(folder).text


def test_malformed_result_prevents_every_report(folder: Path) -> None:
    (folder / "av" / "2.json").write_text("[{")
    with pytest.raises(DataError, match=r"av/2\.json: is not valid JSON"):
        score_run(folder)
    assert not list(folder.glob("report.*"))


# ---------------------------------------------------------------- settings


def test_settings_are_shown_with_dotted_names(folder: Path) -> None:
    assert read_settings(folder) == {"model": "big", "sampling.temperature": "0.6"}
    score_run(folder)
    assert "sampling.temperature" in page(folder).text
    assert "| sampling.temperature | 0.6 |" in (folder / "report.md").read_text()


def test_deciding_threshold_is_named_in_every_report(folder: Path) -> None:
    write_results(folder, "av", "4", [made("4", datasource="av", scores={"share": 0.75}, graded_by="share >= 0.5")])
    assert score_run(folder).graded_by == {"kind": 3, "share >= 0.5": 1}
    text = "share >= 0.5 (1 of 4 answers)"
    assert html.escape(text) in (folder / "report.md").read_text()
    assert text in page(folder).text
    assert json.loads((folder / "summary.json").read_text())["graded_by"] == {"kind": 3, "share >= 0.5": 1}


def test_scorer_without_threshold_is_reported_with_key(folder: Path) -> None:
    settings = {"config": {"evaluation": {"scorer": "format", "scorer_threshold": None}}}
    (folder / "run.json").write_text(json.dumps(settings))
    score_run(folder)
    assert "The scorer format does not decide" in page(folder).text
    assert "evaluation.scorer_threshold is not set" in page(folder).text
    assert "evaluation.scorer\\_threshold is not set" in (folder / "report.md").read_text()


@pytest.mark.parametrize(
    ("settings", "note"),
    [
        (
            {"parser": "compat", "scorer": "format", "scorer_threshold": 0.5},
            "its mean is listed with the scores. Answers are graded by their letters only",
        ),
        (
            {"parser": "default", "scorer": "judge.py:x"},
            "correct if evaluation.scorer (judge.py:x) scores it at least 0.5",
        ),
    ],
    ids=["compat", "before there was a threshold"],
)
def test_scorer_note_follows_run_settings(folder: Path, settings: dict[str, Any], note: str) -> None:
    (folder / "run.json").write_text(json.dumps({"config": {"evaluation": settings}}))
    score_run(folder)
    assert note in page(folder).text
    assert "scorer_threshold is not set" not in page(folder).text


def test_run_without_saved_settings_is_scored(folder: Path) -> None:
    (folder / "run.json").unlink()
    assert read_settings(folder) == {}
    score_run(folder)


def test_non_object_settings_are_rejected(folder: Path) -> None:
    (folder / "run.json").write_text("[]")
    with pytest.raises(DataError, match=r"run\.json: must contain a JSON object"):
        score_run(folder)


# ---------------------------------------------------------------- cards


def test_every_question_becomes_filterable_card(folder: Path) -> None:
    score_run(folder)
    cards = [(card["data-dataset"], card["data-kind"], card["data-tags"]) for card in page(folder).cards()]
    assert cards == [
        ("av", "multiple_choice", "wrong unparsed"),
        ("av", "open", "wrong unanswered"),
        ("robovqa", "multiple_choice", "right"),
        ("robovqa", "multiple_choice", "wrong truncated"),
    ]


def test_filter_labels_count_displayed_cards(folder: Path) -> None:
    score_run(folder)
    text = page(folder).text
    for label in (
        "right (1)",
        "wrong, including unparsed and unanswered (3)",
        "unparsed (1)",
        "unanswered (1)",
        "truncated (1)",
    ):
        assert label in text
    assert "gained" not in text


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "Which way?"),
        ({"options": None}, "Which way?\n(A) left"),
        ({"prompt": []}, ""),
        ({"prompt": ["Which?"]}, "Which?"),
    ],
)
def test_question_is_displayed_without_trailing_options(changes: dict[str, Any], text: str) -> None:
    assert get_question_text(made(**changes))[: len(text) + 5].startswith(text)
    assert ("(A)" in get_question_text(made(**changes))) == ("(A)" in text)


def test_markdown_lists_wrong_and_unanswered_questions(folder: Path) -> None:
    score_run(folder)
    text = (folder / "report.md").read_text()
    assert "| robovqa/1/1 | multiple\\_choice | A | B | letter |" in text
    assert "| av/3/0 | clip 3.mp4: no such file |" in text
    assert "robovqa/1/0" not in text


# ---------------------------------------------------------------- hostile texts


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    text = "\n".join(HOSTILE)
    bad = made("1", answer=text, reasoning=text, full_response=text, prompt=[text], rule=text, media=[f"/{text}.mp4"])
    fields = {"options": {"A": text, "B": "x"}, "correct_answer": text, "id": text, "datasource": text, "error": text}
    write_results(tmp_path, "d", "1", [made(**asdict(bad) | fields | {"scores": {text: 1.0}, "kind": "open"})])
    (tmp_path / "run.json").write_text(json.dumps({text: text}))
    score_run(tmp_path)
    return tmp_path


def test_model_output_is_displayed_as_text(hostile: Path) -> None:
    result = page(hostile)
    assert [tag for tag, _ in result.tags].count("script") == 1
    assert result.all("img") == []
    assert all((link["href"] or "").startswith("#q") for link in result.all("a"))
    assert not [name for _, attributes in result.tags for name in attributes if name.startswith("on")]
    assert result.text.count("<script>alert(1)</script>") >= 5
    assert "{{ 7 * 7 }} {% raw %} {# x #}" in result.text


def test_hostile_text_is_escaped_in_markdown(hostile: Path) -> None:
    text = (hostile / "report.md").read_text()
    assert not re.search(r"<[a-z/!]", text)
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert all(row.endswith("|") for row in rows)


def test_pipe_in_answer_is_escaped_in_markdown(tmp_path: Path) -> None:
    write_results(tmp_path, "d", "1", [made("1", answer="a|b\nc `d` [e](f)")])
    score_run(tmp_path)
    assert r"| A | a\|b c \`d\` \[e\](f) | letter |" in (tmp_path / "report.md").read_text()


def test_page_loads_no_external_resources(folder: Path) -> None:
    score_run(folder)
    result = page(folder)
    assert result.all("link") == []
    text = (folder / "report.html").read_text()
    assert not re.search(r"""(src|href|url)\s*[=(]\s*["']?\s*(https?:|//|file:)|@import""", text)
    (policy,) = [meta for meta in result.all("meta") if meta.get("http-equiv") == "Content-Security-Policy"]
    assert "default-src 'none'" in (policy["content"] or "")
    assert "unsafe-inline" not in (policy["content"] or "").partition("script-src")[2]


# ---------------------------------------------------------------- comparison


def test_comparison_appears_in_every_report(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "results" / "small" / "letter"
    write_results(other, "robovqa", "1", [made("1", answer="C"), made("1", 1)])
    (report,) = write_reports(folder, baseline=other)
    assert report.comparison is not None
    assert (report.comparison.gained, report.comparison.lost) == (("robovqa/1/0",), ("robovqa/1/1",))
    assert json.loads((folder / "summary.json").read_text())["comparison"]["baseline"] == "small/letter"
    tags = [card["data-tags"] for card in page(folder).cards()]
    assert tags[2:] == ["right gained", "wrong truncated lost"]
    for text in ((folder / "report.md").read_text(), page(folder).text):
        assert "2 are only in big/letter, and 0 are only in small/letter" in text


# ---------------------------------------------------------------- pictures


def images(folder: Path) -> list[Image.Image]:
    uris = [str(image["src"]).removeprefix("data:image/jpeg;base64,") for image in page(folder).all("img")]
    return [Image.open(io.BytesIO(base64.b64decode(uri))) for uri in uris]


def test_six_frames_span_the_whole_video(tmp_path: Path) -> None:
    video = write_video(tmp_path / "v.mp4", 26)
    write_results(tmp_path / "r", "d", "1", [made("1", media=[str(video)])])
    score_run(tmp_path / "r")
    assert [read_number(np.asarray(image)) for image in images(tmp_path / "r")] == [0, 5, 10, 15, 20, 25]
    assert all(label in page(tmp_path / "r").text for label in ("0.0 s", "0.5 s", "2.5 s"))


def test_given_frames_are_shown_with_their_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COSMOS_CACHE", str(tmp_path))
    files = [str(tmp_path / f"{number}.png") for number in range(3)]
    for number, file in enumerate(files):
        Image.fromarray(number_frame(number)).save(file)
    shown = pictures.draw_sheet([str(write_frame_list(files, {"timestamps": [3, 4.5, 20]}))]).pictures
    assert [picture.label for picture in shown] == ["3.0 s", "4.5 s", "20.0 s"]


def test_frames_are_downscaled_during_decoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[Any] = []

    def load(path: str, indices: list[int], *, size: tuple[int, int] | None = None) -> Any:
        sizes.append(size)
        return load_video(path, indices, size=size)

    monkeypatch.setattr(pictures, "load_video", load)
    video = write_video(tmp_path / "v.mp4", 2, frames=[number_frame(i, 240, 640) for i in range(2)])
    sheet = pictures.draw_sheet([str(video)])
    assert sizes == [(60, 160)]
    assert [(picture.height, picture.width) for picture in sheet.pictures] == [(60, 160)] * 2


def test_report_shows_each_short_video_frame_once(tmp_path: Path) -> None:
    sheet = pictures.draw_sheet([str(write_video(tmp_path / "v.mp4", 1))])
    assert len(sheet.pictures) == 1
    assert len(pictures.draw_sheet([str(write_video(tmp_path / "w.mp4", 3))]).pictures) == 3


def test_images_are_downscaled_and_keep_aspect_ratio(tmp_path: Path) -> None:
    Image.new("RGBA", (1000, 500)).save(tmp_path / "i.png")
    (picture,) = pictures.draw_sheet([str(tmp_path / "i.png")]).pictures
    assert (picture.width, picture.height, picture.label) == (160, 80, "")


def test_media_without_extension_are_recognised_by_content(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "image", "PNG")
    write_video(tmp_path / "v.mp4", 3).rename(tmp_path / "video")
    sheet = pictures.draw_sheet([str(tmp_path / "image"), str(tmp_path / "video")])
    assert [picture.label for picture in sheet.pictures] == ["", "0.0 s", "0.1 s", "0.2 s"]


@pytest.mark.parametrize("name", ["v.mp4", "i.png"])
def test_report_notes_unreadable_media(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"no picture at all")
    sheet = pictures.draw_sheet([str(tmp_path / name), str(tmp_path / "absent.mp4")])
    assert sheet.pictures == ()
    assert len(sheet.notes) == 2
    assert name in sheet.notes[0]
    assert "absent.mp4: no such file" in sheet.notes[1]


def test_report_notes_media_with_too_long_path() -> None:
    (note,) = pictures.draw_sheet(["/" + "x" * 5000 + ".mp4"]).notes
    assert note.endswith("no such file")


@pytest.fixture
def four(tmp_path: Path) -> Path:
    """Results of four questions with one image each; the last two answers are wrong."""
    for number, answer in enumerate("AABB"):
        file = tmp_path / f"{number}.png"
        Image.new("RGB", (16, 16)).save(file)
        write_results(tmp_path / "r", "d", str(number), [made(str(number), answer=answer, media=[str(file)])])
    return tmp_path / "r"


@pytest.mark.parametrize(("frames", "shown"), [(0, ""), (1, "2"), (3, "230"), (9, "2301"), (None, "2301")])
def test_pictures_of_wrong_answers_come_first(four: Path, frames: int | None, shown: str) -> None:
    score_run(four, frames=frames)
    html = (four / "report.html").read_text()
    with_picture = [text for text in html.split("<article")[1:] if "<img" in text]
    assert sorted(re.findall(r'title="[^"]*/(\d)\.png"', " ".join(with_picture))) == sorted(shown)
    assert (f"{4 - len(shown)} of 4 questions are shown without their pictures" in page(four).text) == (len(shown) < 4)


def test_report_pictures_are_limited_in_size(four: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "MAX_BYTES", 1)
    score_run(four)
    assert len(images(four)) == 1
    assert "3 of 4 questions are shown without their pictures" in page(four).text
    assert "(1 of them wrong" in page(four).text


def test_image_shared_by_questions_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    monkeypatch.setattr(pictures, "load_image", lambda path: read.append(path) or Image.new("RGB", (4, 4)))
    sheets = pictures.draw_sheets([made("1", number, media=["a.png"]) for number in range(3)])
    assert (len(sheets), read) == (3, ["a.png"])
