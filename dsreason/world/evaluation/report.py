"""The report on an evaluation, optionally compared with a baseline: `summary.json`, `world.html` and tables for the terminal."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table as ConsoleTable
from rich.text import Text

from dsreason.config.output import flatten_keys
from dsreason.evaluation.report.score import Interval
from dsreason.files.atomic import write_file
from dsreason.world.evaluation.history import locate_small_video
from dsreason.world.evaluation.page import FILE, Clip, Page, PromptCard, Table, format_number, write_page
from dsreason.world.evaluation.results import CLIPS, MODEL_KEYS, ClipResult, find_differences, read_clips, read_settings
from dsreason.world.evaluation.score import ClipComparison, ClipSummary, compare, name_reward, summarise

SUMMARY_FILE = "summary.json"


@dataclass(frozen=True)
class ClipReport:
    name: str
    summary: ClipSummary
    comparison: ClipComparison | None
    baseline: str
    notices: tuple[str, ...]
    file: Path


def write_report(folder: Path, baseline: Path | None = None) -> ClipReport:
    """Summarise an evaluation, and write its summary and page to its folder.

    Raises:
        DataError: there are no clips, a file is damaged, or the baseline has different prompts.
    """
    settings, clips = read_settings(folder), read_clips(folder)
    summary, name = summarise(clips), folder.absolute().name
    comparison, before, other, notices = None, list[ClipResult](), "", list[str]()
    if baseline is not None:
        changed = {
            key: v for key, v in find_differences(read_settings(baseline), settings).items() if key not in MODEL_KEYS
        }
        before, other = read_clips(baseline), baseline.absolute().name
        comparison = compare(clips, before)
        notices += [f"{key} differs: {b!r} in the baseline, but {a!r} here" for key, (b, a) in changed.items()]
        if comparison.only_one:
            notices.append(f"{comparison.only_one} clips exist in only one of the two evaluations and are not compared")
    document = {"name": name, **asdict(summary), "baseline": other, "comparison": comparison and asdict(comparison)}
    write_file(folder / SUMMARY_FILE, json.dumps(document, indent=2, ensure_ascii=False) + "\n")
    page = Page(
        kicker="Evaluation of a world model",
        title=f"{name} compared with {other}" if other else name,
        columns=[other, name] if other else [name],
        cards=make_cards(folder, clips, baseline, before),
        tables=make_tables(summary, comparison),
        notices=notices,
        settings={key: str(value) for key, value in flatten_keys(settings).items() if value not in (None, "")},
    )
    return ClipReport(name, summary, comparison, other, tuple(notices), write_page(page, folder / FILE))


def make_cards(
    folder: Path, clips: list[ClipResult], baseline: Path | None, before: list[ClipResult]
) -> list[PromptCard]:
    """Make a card for each clip, lowest reward first. If there is a baseline, the card also shows the baseline's clip."""
    before_by_number = {clip.number: clip for clip in before}
    cards = []
    for clip in sorted(clips, key=lambda clip: clip.rewards.get("", 0.0)):
        shown_clips = [] if baseline is None else [make_clip(baseline, before_by_number.get(clip.number))]
        cards.append(PromptCard(clip.prompt, clip.id, [*shown_clips, make_clip(folder, clip)]))
    return cards


def make_clip(folder: Path, clip: ClipResult | None) -> Clip:
    if clip is None:
        return Clip(None, {})
    file = locate_small_video(folder / CLIPS, clip.number)
    rewards = {name_reward(name): value for name, value in clip.rewards.items()}
    return Clip(file if file.is_file() else None, {**rewards, "brightness": clip.brightness})


def make_tables(summary: ClipSummary, comparison: ClipComparison | None) -> list[Table]:
    rows = {
        name: [format_number(value.mean), format_interval(value.interval)] for name, value in summary.values.items()
    }
    rows["diversity"] = [format_number(summary.diversity), format_interval(None)]
    note = (
        f"{summary.clips} clips of {summary.prompts} distinct prompts. Intervals come from a bootstrap over prompts. "
        "Brightness, motion and diversity reveal reward hacking."
    )
    tables = [Table("Rewards and appearance", ("mean", "95% interval"), rows, note)]
    if comparison is not None:
        columns = ("difference", "95% interval", "clips higher", "clips lower")
        tables.append(
            Table(
                "Comparison with the baseline",
                columns,
                {
                    name: [
                        f"{value.estimate.mean:+.3f}",
                        format_interval(value.estimate.interval),
                        str(value.better),
                        str(value.worse),
                    ]
                    for name, value in comparison.values.items()
                },
                f"Differences within {comparison.clips} pairs of clips; the clips of a pair have the same prompt and noise.",
            )
        )
    return tables


def format_interval(interval: Interval | None) -> str:
    return "–" if interval is None else f"{format_number(interval[0])} to {format_number(interval[1])}"


def make_console_tables(report: ClipReport) -> list[ConsoleTable]:
    console_tables = []
    for table in make_tables(report.summary, report.comparison):
        console_table = ConsoleTable(title=Text(f"{report.name}: {table.title}"), title_justify="left", box=SIMPLE_HEAD)
        console_table.add_column("", overflow="fold")
        for name in table.columns:
            console_table.add_column(name, justify="right", no_wrap=True)
        for name, cells in table.rows.items():
            console_table.add_row(Text(name), *cells)
        console_tables.append(console_table)
    return console_tables
