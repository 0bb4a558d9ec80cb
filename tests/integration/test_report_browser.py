"""The HTML report in a real browser: its filters, width and appearance are right, and the console stays empty."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dsreason.evaluation.report.report import HTML, write_reports
from dsreason.evaluation.report.results import write_results
from tests.unit.evaluation.made_results import made
from tests.unit.media.videos import write_video

CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")

LONG = "averyveryverylongwordwithoutanyspace" * 8
WIDTHS = (1280, 400)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a report with a comparison, every verdict, a video, and texts that are hostile or do not fit on a line."""
    root = tmp_path_factory.mktemp("report")
    video = [str(write_video(root / "v.mp4", 26))]
    evil = "<script>document.title = 'evil'</script><img src=x onerror=\"document.title = 'evil'\">{{ 7 }}"
    results = [
        made("1", media=video, reasoning="It turns left.", full_response="It turns left. A"),
        made("2", answer="B", media=video, full_response=evil, reasoning=evil),
        made("3", answer="", media=video, finish_reason="length", full_response=LONG),
        made("4", answer="", error=f"{LONG}.mp4: no such file", media=[f"/{LONG}.mp4"], options={"A": LONG, "B": "x"}),
        made(LONG[:150], answer="red", correct_answer="red", kind="open", options=None, prompt=[LONG], datasource="av"),
    ]
    for result in results:
        write_results(root / "big" / "letter", result.datasource, result.video_id, [result])
        write_results(
            root / "small" / "letter",
            result.datasource,
            result.video_id,
            [made(**asdict(result) | {"is_correct": False})],
        )
    (root / "big" / "letter" / "run.json").write_text('{"model": "' + LONG + '", "sampling": {"temperature": 0.6}}')
    write_reports(root / "big", baseline=root / "small")
    return root / "big" / "letter" / HTML


def chromium(page: Path, tmp_path: Path, *options: str, address: str = "") -> subprocess.CompletedProcess[str]:
    command = [str(CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--enable-logging=stderr", "--virtual-time-budget=5000"]
    return subprocess.run([*command, *options, f"file://{page}{address}"], capture_output=True, text=True, timeout=120)


def shown_cards(page: Path, tmp_path: Path, address: str = "") -> tuple[list[str], str]:
    """Return the tags of the visible cards, and the text of the counter."""
    dom = chromium(page, tmp_path, "--dump-dom", address=address).stdout
    cards = re.findall(r"<article [^>]*>", dom)
    tags = [re.search(r'data-tags="([^"]*)"', card) for card in cards if ' hidden=""' not in card]
    counter = re.search(r"<output[^>]*>([^<]*)<", dom)
    assert counter, dom[:2000]
    return [tag[1] for tag in tags if tag], counter[1]


def with_script(page: Path, folder: Path, script: str) -> Path:
    """Write a copy of the page that ends with the given script, without the security policy that would forbid it."""
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page.read_text(encoding="utf-8"))
    copy = folder / "copy.html"
    copy.write_text(text.replace("</body>", f"<script>{script}</script></body>"), encoding="utf-8")
    return copy


def test_report_initially_shows_all_questions(report: Path, tmp_path: Path) -> None:
    tags, counter = shown_cards(report, tmp_path)
    assert tags == ["right gained", "right gained", "wrong", "wrong unparsed truncated", "wrong unanswered"]
    assert counter == "5 of 5 shown"


@pytest.mark.parametrize(
    ("address", "count"),
    [("#wrong", 3), ("#right", 2), ("#unparsed", 1), ("#unanswered", 1), ("#gained", 2), ("#q2", 5), ("#nonsense", 5)],
)
def test_url_fragment_sets_filter(report: Path, tmp_path: Path, address: str, count: int) -> None:
    tags, counter = shown_cards(report, tmp_path, address)
    assert (len(tags), counter) == (count, f"{count} of 5 shown")


@pytest.mark.parametrize(
    ("control", "value", "count"),
    [("dataset", "av", 1), ("kind", "multiple_choice", 4), ("search", "TURNS left", 1), ("search", "no such words", 0)],
)
def test_each_control_filters_questions(report: Path, tmp_path: Path, control: str, value: str, count: int) -> None:
    change = f"const it = document.getElementById('{control}'); it.value = '{value}';"
    page = with_script(report, tmp_path, change + "it.dispatchEvent(new Event('input', {bubbles: true}));")
    tags, counter = shown_cards(page, tmp_path)
    assert (len(tags), counter) == (count, f"{count} of 5 shown")


def test_link_reveals_card_hidden_by_filter(report: Path, tmp_path: Path) -> None:
    page = with_script(report, tmp_path, "setTimeout(() => { location.hash = '#q1'; }, 100);")
    tags, _ = shown_cards(page, tmp_path, "#wrong")
    assert len(tags) == 5


def test_scripts_in_model_output_do_not_run(report: Path, tmp_path: Path) -> None:
    dom = chromium(report, tmp_path, "--dump-dom").stdout
    assert "<title>big/letter: evaluation</title>" in dom
    assert "&lt;script&gt;document.title" in dom


def console(page: Path, tmp_path: Path) -> list[str]:
    return re.findall(r"CONSOLE.*", chromium(page, tmp_path, "--dump-dom", address="#wrong").stderr)


def test_browser_console_stays_empty(report: Path, tmp_path: Path) -> None:
    assert console(report, tmp_path) == []


def test_injected_script_is_blocked(report: Path, tmp_path: Path) -> None:
    page = tmp_path / "copy.html"
    page.write_text(
        report.read_text(encoding="utf-8").replace("</body>", "<script>document.title = 'evil'</script></body>")
    )
    assert "Content Security Policy" in "".join(console(page, tmp_path))
    assert "<title>evil</title>" not in chromium(page, tmp_path, "--dump-dom").stdout


@pytest.mark.parametrize("width", WIDTHS)
def test_report_fits_window_width(report: Path, tmp_path: Path, width: int) -> None:
    measure = "for (const it of document.querySelectorAll('details')) it.open = true;"
    # Content outside the viewport is normally not laid out, and content that exceeds its card is cut off; both would
    # hide an overflow.
    measure += "for (const it of document.querySelectorAll('.card')) it.style.contentVisibility = 'visible';"
    measure += "const root = document.documentElement; root.dataset.widths = `${innerWidth} ${root.scrollWidth}`;"
    page = with_script(report, tmp_path, measure)
    frame = tmp_path / "frame.html"  # a window cannot be as narrow as a phone, but a frame can
    frame.write_text(
        f"<iframe src='copy.html' style='border:0' width='{width}' height='900'></iframe><script>onload = () => "
        "{ document.title = frames[0].document.documentElement.dataset.widths; }</script>"
    )
    dom = chromium(frame, tmp_path, "--dump-dom", "--allow-file-access-from-files").stdout
    assert page.exists()
    assert f"<title>{width} {width}</title>" in dom


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_report_supports_light_and_dark_colour_schemes(report: Path, tmp_path: Path, width: int, dark: bool) -> None:
    file = tmp_path / "page.png"
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    chromium(report, tmp_path, f"--screenshot={file}", f"--window-size={width},1600", scheme)
    picture = np.asarray(Image.open(file).convert("L"))
    assert picture.shape == (1600, width)
    assert (np.median(picture) < 64) == dark  # the background has the expected brightness
    assert picture.std() > 10  # the page is not empty
