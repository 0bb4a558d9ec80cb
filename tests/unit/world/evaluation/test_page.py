"""Pages of world models: their contents, atomic writing, and the escaping of users' text."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from dsreason.errors import DataError
from dsreason.media.videos import probe_video
from dsreason.train.common.answers import write_rows
from dsreason.world.evaluation import page as pages
from dsreason.world.evaluation.history import choose_steps, locate_small_video, write_run_page
from dsreason.world.evaluation.page import Clip, Curve, Page, PromptCard, build_panel, format_number, render
from dsreason.world.evaluation.report import write_report
from dsreason.world.evaluation.results import ClipResult, open_results, write_clip
from dsreason.world.video import encode_gif, shrink, write_mp4

EVIL = '<script>alert(1)</script> "quoted" & {{ 7 * 7 }}'
CLIP = np.random.default_rng(0).integers(0, 256, (3, 9, 32, 48), dtype=np.uint8)


def tags(html: str) -> list[str]:
    result: list[str] = []

    class Tags(HTMLParser):
        def handle_starttag(self, tag: str, attrs: object) -> None:
            result.append(tag)

    Tags().feed(html)
    return result


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder after validations of two prompts at the steps 0, 5 and 10; only one prompt has videos."""
    for step in (0, 5, 10):
        rows = [
            {
                "id": f"row {i}",
                "prompt": EVIL if i == 0 else "a prompt",
                "rewards": {"": 0.1 * step + i / 100, "colour": 0.5},
                "brightness": 0.5 - 0.04 * step,
                "motion": 0.1,
            }
            for i in range(2)
        ]
        folder = tmp_path / "validation" / f"step_{step}"
        write_mp4(shrink(CLIP), locate_small_video(folder, 0), 16.0)
        folder.with_suffix(".jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = [{"step": step, "reward/mean": step / 10, "clips/brightness": 0.5 - step / 25} for step in range(1, 11)]
    lines.insert(0, {"step": 0, "val/reward/mean": 0.0, "val/diversity": 0.25})
    lines[10] |= {"val/reward/mean": 1.0, "val/diversity": 0.125}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def test_run_page_shows_steps_rewards_and_metrics(run: Path) -> None:
    file = write_run_page(run)
    assert file == run / "world.html"
    html = file.read_text()
    assert tags(html).count("video") == 3
    text = re.sub(r"<[^>]*>", " ", re.sub(r"<style>.*?</style>", "", html, flags=re.DOTALL))
    text = " ".join(text.split())
    assert "reward 0.005 0.505 1.005" in text
    assert "diversity 0.250 – 0.125" in text
    assert "step 10 · reward 1.000 · brightness 0.100" in text
    assert "step 0 · reward 0.000 · brightness 0.500" in text


def test_page_escapes_text_and_fetches_nothing(run: Path) -> None:
    html = (write_run_page(run) or run).read_text()
    assert "script" not in tags(html)
    assert "49" not in re.sub(r"[\d.]*\d{2,}[\d.,]*", "", html.replace("{{ 7 * 7 }}", ""))
    assert "default-src 'none'; media-src data:" in html
    assert re.findall(r'(?:src|href)="(?!data:)', html) == []


def test_prompts_may_contain_any_character(run: Path) -> None:
    for file in (run / "validation").glob("*.jsonl"):
        rows = [json.loads(line) | {"prompt": "a red\u0085 or\u2028 blue\u2029 square"} for line in file.open()]
        write_rows(file, rows)
    assert "blue\u2029 square" in (write_run_page(run) or run).read_text()


def test_run_without_validation_gets_no_page(tmp_path: Path) -> None:
    assert write_run_page(tmp_path) is None


def test_run_without_rewards_still_gets_page(run: Path) -> None:
    for file in (run / "validation").glob("*.jsonl"):
        rows = [json.loads(line) | {"rewards": {}} for line in file.read_text().splitlines()]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "brightness" in (write_run_page(run) or run).read_text()


@pytest.mark.parametrize(
    ("steps", "expected"), [([0], [0]), ([0, 9], [0, 9]), ([*range(0, 101, 10)], [0, 20, 50, 80, 100])]
)
def test_first_and_last_validation_are_always_displayed(steps: list[int], expected: list[int]) -> None:
    assert choose_steps(steps) == expected


def test_curve_spans_the_width_of_its_panel() -> None:
    panel = build_panel(Curve("reward", training=[(1, 0.25), (2, 0.5), (3, 0.75)], validation=[(0, 0.0), (4, 1.0)]))
    assert panel is not None
    assert panel.dots == [(4.0, pages.HEIGHT - 4), (pages.WIDTH - 4, 4.0)]
    assert panel.line.split()[1] == f"{pages.WIDTH / 2},{pages.HEIGHT / 2}"
    assert (panel.low, panel.high, panel.last) == ("0.000", "1.000", "1.000")
    assert build_panel(Curve("empty")) is None
    assert build_panel(Curve("constant", training=[(1, 0.5)])) is not None


def test_oversized_videos_are_omitted_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "ab":
        (tmp_path / name).write_bytes(b"x" * 60)
    monkeypatch.setattr(pages, "MAX_BYTES", 100)
    cards = [PromptCard("p", name, [Clip(tmp_path / name, {})]) for name in "ab"]
    html = render(Page("k", "t", ["one"], cards))
    assert tags(html).count("video") == 1
    assert "1 clips are omitted" in html


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.8125, "0.812"), (0.0, "0.000"), (1.5e-9, "1.50e-09"), (123456.0, "1.23e+05"), (-0.5, "-0.500")],
)
def test_numbers_are_formatted_briefly(value: float, text: str) -> None:
    assert format_number(value) == text


def test_evaluation_page_shows_the_baseline(tmp_path: Path) -> None:
    for name, reward in (("base", 0.25), ("new", 0.75)):
        folder = tmp_path / name
        open_results(folder, {"model": {"path": name}, "world": {"sampling_steps": len(name)}}, overwrite=False)
        for i in range(3):
            write_clip(folder, ClipResult(i, f"row {i}", f"{EVIL} {i}", {"": reward}, 0.5, 0.1, [1, 2]))
            write_mp4(shrink(CLIP), locate_small_video(folder / "clips", i), 16.0)
    report = write_report(tmp_path / "new", tmp_path / "base")
    assert report.notices == ("world.sampling_steps differs: 4 in the baseline, but 3 here",)
    html = report.file.read_text()
    assert tags(html).count("video") == 6
    assert "script" not in tags(html)
    assert "+0.500" in html
    summary = json.loads((tmp_path / "new" / "summary.json").read_text())
    assert summary["comparison"]["values"]["reward"]["estimate"] == {"mean": 0.5, "interval": [0.5, 0.5]}


@pytest.mark.parametrize(
    ("name", "said"), [("typo", "typo: does not exist"), ("text", r"text/world\.json: does not contain the settings")]
)
def test_invalid_baseline_is_reported(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / "text").mkdir()
    open_results(tmp_path / "new", {"model": {"path": "new"}}, overwrite=False)
    write_clip(tmp_path / "new", ClipResult(0, "row 0", "a prompt", {"": 1.0}, 0.5, 0.1, [1, 2]))
    with pytest.raises(DataError, match=said):
        write_report(tmp_path / "new", tmp_path / name)


def test_clip_size_is_adjusted_only_for_display(tmp_path: Path) -> None:
    write_mp4(CLIP, tmp_path / "clip.mp4", 16.0)
    info = probe_video(tmp_path / "clip.mp4")
    assert (info.num_frames, info.fps, info.height, info.width) == (9, 16.0, 32, 48)
    assert shrink(CLIP).shape == (3, 9, 96, 144)
    assert (shrink(CLIP)[:, :, ::3, ::3] == CLIP).all()
    large = np.zeros((3, 2, 704, 1280), np.uint8)
    assert shrink(large).shape == (3, 2, 176, 320)
    assert shrink(shrink(large)).shape == (3, 2, 176, 320)


def test_gif_keeps_speed_when_frames_are_dropped() -> None:
    from io import BytesIO

    from PIL import Image

    ramp = np.arange(96, dtype=np.uint8)[None, :, None, None].repeat(3, 0).repeat(8, 2).repeat(8, 3)
    made = Image.open(BytesIO(encode_gif(ramp, 16.0)))
    assert made.n_frames == 48
    assert made.info["duration"] == 120  # 125 ms, in the format's hundredths of a second
