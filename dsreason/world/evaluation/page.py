"""A self-contained HTML page that shows clips side by side, with their rewards, curves and tables."""

from __future__ import annotations

import base64
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from markupsafe import Markup

from dsreason.evaluation.report.html import make_environment, read_template
from dsreason.files.disk import write_report

log = logging.getLogger(__name__)

FILE = "world.html"
MAX_BYTES = 30_000_000
"""Maximum total size of the embedded videos in bytes; videos that would exceed it are omitted."""
WIDTH, HEIGHT = 260.0, 90.0
"""Size of a curve's panel, in SVG user units."""
DECIMALS = 3

Points = Sequence[tuple[float, float]]
"""Pairs (step, value), sorted by step."""


@dataclass(frozen=True)
class Clip:
    """A clip in a prompt's card. `video` is None if the file is missing."""

    video: Path | None
    facts: Mapping[str, float]
    """Values shown below the video, such as `{"reward": 0.9, "brightness": 0.2}`."""


@dataclass(frozen=True)
class PromptCard:
    """The clips of a prompt, one per column, all from the same noise."""

    prompt: str
    id: str
    clips: Sequence[Clip]


@dataclass(frozen=True)
class Curve:
    """A metric's values over the run; its panel shows training values as a line and validation values as dots."""

    name: str
    training: Points = ()
    validation: Points = ()


@dataclass(frozen=True)
class Table:
    """A table on the page; `rows` maps each row's name to the texts in its cells."""

    title: str
    columns: Sequence[str]
    rows: Mapping[str, Sequence[str]]
    note: str = ""
    folded: bool = False


@dataclass(frozen=True)
class Page:
    kicker: str
    title: str
    columns: Sequence[str]
    """Column titles, such as `step 0`, `step 100`."""
    cards: Sequence[PromptCard]
    tables: Sequence[Table] = ()
    curves: Sequence[Curve] = ()
    notices: Sequence[str] = ()
    settings: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Panel:
    """The SVG panel that displays a curve."""

    name: str
    line: str
    """Points of the polyline, in SVG syntax."""
    dots: Sequence[tuple[float, float]]
    low: str
    high: str
    last: str


def write_page(page: Page, file: Path) -> Path:
    write_report(file, render(page))
    return file


def render(page: Page) -> str:
    """Render the page as HTML. All text is escaped, and the page's security policy forbids scripts and external resources."""
    environment = make_environment("dsreason.world.evaluation")
    environment.filters["number"] = format_number
    videos, left_out = read_videos(page.cards)
    return environment.get_template("world.html.j2").render(
        page=page,
        panels=[panel for curve in page.curves if (panel := build_panel(curve)) is not None],
        videos=videos,
        left_out=left_out,
        style=Markup(read_template("dsreason.world.evaluation", "world.css")),
        width=WIDTH,
        height=HEIGHT,
    )


def read_videos(cards: Sequence[PromptCard]) -> tuple[dict[Path, str], int]:
    """Return the videos as data URIs (file → URI), up to `MAX_BYTES` in total, and the number of omitted files."""
    uris: dict[Path, str] = {}
    num_bytes = left_out = 0
    for file in dict.fromkeys(clip.video for card in cards for clip in card.clips if clip.video is not None):
        try:
            if num_bytes + file.stat().st_size > MAX_BYTES:
                left_out += 1
                continue
            num_bytes += file.stat().st_size
            uris[file] = "data:video/mp4;base64," + base64.b64encode(file.read_bytes()).decode()
        except OSError as error:
            log.warning("the page omits %s, because it cannot be read (%s)", file, error.strerror)
            left_out += 1
    return uris, left_out


def build_panel(curve: Curve) -> Panel | None:
    """Convert a curve to a panel; return None if the curve has no values."""
    both = [*curve.training, *curve.validation]
    if not both:
        return None
    steps, values = [step for step, _ in both], [value for _, value in both]
    (first, last), (low, high) = (min(steps), max(steps)), (min(values), max(values))

    def at(point: tuple[float, float]) -> tuple[float, float]:
        x = (point[0] - first) / (last - first) if last > first else 0.5
        y = (point[1] - low) / (high - low) if high > low else 0.5
        return round(4 + x * (WIDTH - 8), 1), round(4 + (1 - y) * (HEIGHT - 8), 1)

    line = " ".join(f"{x},{y}" for x, y in map(at, curve.training))
    newest = (curve.validation or curve.training)[-1][1]
    return Panel(
        curve.name,
        line,
        [at(point) for point in curve.validation],
        format_number(low),
        format_number(high),
        format_number(newest),
    )


def format_number(value: float) -> str:
    """Format a number as `0.812`, or as `1.20e-05` if it is very small or very large."""
    return f"{value:.2e}" if value and not 1e-3 <= abs(value) < 1e5 else f"{value:.{DECIMALS}f}"
