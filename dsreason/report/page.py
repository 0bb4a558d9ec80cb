"""A training run's page: `run.html`, a self-contained file without external resources."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from dsreason.config.output import flatten_keys
from dsreason.evaluation.report.html import hash_script, make_environment, read_template
from dsreason.evaluation.report.pictures import Sheet, draw_sheet
from dsreason.files.disk import write_report
from dsreason.report.charts import HEIGHT, LEFT, TOP, WIDTH, DrawnChart, draw_chart, format_value
from dsreason.report.curves import list_other_metrics, make_charts
from dsreason.report.outcome import Interval, measure_outcomes
from dsreason.report.run_files import RunFiles
from dsreason.report.samples import (
    ANSWER_TAGS,
    MOST_CHARACTERS,
    TAGS,
    AnswerHistory,
    PromptGroup,
    choose_answers,
    choose_groups,
    find_question,
)
from dsreason.report.summary import list_next_commands

FILE = "run.html"
MAX_PICTURE_BYTES = 6_000_000
"""Maximum total size of the pictures, in bytes; further pictures are omitted, and the page says so."""


@dataclass(frozen=True)
class Filter:
    """A filter for a list of cards. `tags` maps each tag to (label, number of cards)."""

    tags: Mapping[str, tuple[str, int]]
    steps: Sequence[int]


@dataclass
class Pictures:
    """The pictures on the page, by media."""

    sheets: dict[tuple[str, ...], Sheet]
    num_omitted: int = 0
    num_bytes: int = 0

    def draw(self, media: Sequence[str]) -> None:
        """Draw the pictures for a prompt, unless they have already been drawn or the page would become too large."""
        key = tuple(media)
        if not key or key in self.sheets:
            return
        if self.num_bytes > MAX_PICTURE_BYTES:
            self.num_omitted += 1
            return
        sheet = self.sheets[key] = draw_sheet(media)
        self.num_bytes += sum(len(picture.uri) for picture in sheet.pictures)


def write_run_page(run: RunFiles) -> Path:
    """Write `run.html` to the run folder, and return its path."""
    file = run.folder / FILE
    write_report(file, render_run_page(run))
    return file


def render_run_page(run: RunFiles) -> str:
    """Render the page as HTML. All text is escaped; the page's security policy allows only its own script."""
    outcomes = measure_outcomes(run)
    groups, answers = choose_groups(run), choose_answers(run)
    pictures = Pictures({})
    for row in [*(group.first for group in groups), *(history.last for history in answers)]:
        pictures.draw(row["media"])
    charts = make_charts(run.metrics, run.algorithm)
    return render(
        "run.html.j2",
        run=run,
        facts=collect_facts(run),
        outcomes=outcomes,
        warnings=run.read_warnings(),
        sections={name: draw_charts(section) for name, section in charts.items()},
        other_metrics=list_other_metrics(run.metrics, charts),
        groups=groups,
        group_filter=build_filter(groups, TAGS, [group.step for group in groups]),
        answers=answers,
        answer_filter=build_filter(answers, ANSWER_TAGS, []),
        num_rollouts=len(run.list_steps("rollouts")),
        num_answers=count_answers(run),
        pictures=pictures,
        settings={name: format_setting(value) for name, value in flatten_keys(run.config).items()},
        commands=list_next_commands(run),
    )


def draw_charts(charts: Sequence[Any]) -> list[DrawnChart]:
    return [drawn for chart in charts if (drawn := draw_chart(chart)) is not None]


def build_filter(
    cards: Sequence[PromptGroup] | Sequence[AnswerHistory], labels: Mapping[str, str], steps: Sequence[int]
) -> Filter:
    counts = Counter(tag for card in cards for tag in card.tags)
    return Filter({tag: (label, counts[tag]) for tag, label in labels.items() if tag in counts}, sorted({*steps}))


def count_answers(run: RunFiles) -> int:
    steps = run.list_steps("validation")
    return len(run.read_answers(steps[-1])) if steps else 0


def collect_facts(run: RunFiles) -> dict[str, str]:
    """Collect facts about the training, such as model, data and number of steps: label → text."""
    config, record = run.config, run.record
    data = config.get("data", {})
    sources = [source for source in (data, *data.get("sources", [])) if source.get("path") or source.get("adapter")]
    rows = record.get("rows", {})
    metrics = run.metrics
    facts = {
        "model": str(config.get("model", {}).get("path", "")),
        "trained": describe_trained(config),
        "data": ", ".join(source.get("path") or source.get("adapter", "") for source in sources),
        "rows": ", ".join(f"{part.get('count', 0):,} {name}" for name, part in rows.items()),
        "steps": f"{metrics[-1]['step']:,}" if metrics else "0",
        "epochs": format_last(metrics, "train/epoch"),
        "ranks": str(record.get("world_size", "")),
        "versions": ", ".join(f"{name} {version}" for name, version in record.get("versions", {}).items()),
        "commit": str((record.get("git") or {}).get("commit", ""))[:12],
    }
    return {name: text for name, text in facts.items() if text}


def describe_trained(config: Mapping[str, Any]) -> str:
    rank = config.get("lora", {}).get("rank", 0)
    frozen = config.get("model", {}).get("freeze", [])
    trained = f"LoRA adapters of rank {rank}" if rank else "all weights"
    return f"{trained}, frozen: {', '.join(frozen)}" if frozen else trained


def format_last(metrics: Sequence[Mapping[str, Any]], name: str) -> str:
    values = [line[name] for line in metrics if line.get(name) is not None]
    return format_value(values[-1]) if values else ""


def format_setting(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


# ---------------------------------------------------------------- HTML


def render(template: str, **values: Any) -> str:
    """Render one of this package's templates, with the style and script that all pages share."""
    environment = make_environment("dsreason.report")
    environment.filters |= {
        "value": format_value,
        "interval": format_interval,
        "shortened": shorten,
        "list_key": tuple,
        "question": find_question,
    }
    script = read_template("dsreason.report", "run.js")
    style = read_template("dsreason.evaluation.report", "report.css") + read_template("dsreason.report", "run.css")
    return environment.get_template(template).render(
        **values,
        chart={"width": WIDTH, "height": HEIGHT, "left": LEFT, "top": TOP},
        style=Markup(style),
        script=Markup(script),
        script_digest=hash_script(script),
    )


def format_interval(interval: Interval | None) -> str:
    return "" if interval is None else f"{format_value(interval[0])} to {format_value(interval[1])}"


def shorten(text: str) -> str:
    """Shorten a text that is too long for the page; its end then says how many characters are omitted."""
    omitted = len(text) - MOST_CHARACTERS
    return (
        text if omitted <= 0 else f"{text[:MOST_CHARACTERS]}\n… {omitted:,} more characters are in the files of the run"
    )
