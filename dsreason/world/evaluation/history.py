"""The HTML page for a training run. It compares clips from the same prompts and noise at several validations."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, FiniteFloat, TypeAdapter

from dsreason.config.output import find_run_record, flatten_keys
from dsreason.files.disk import read_valid_lines
from dsreason.files.step_names import format_step, is_step_name, parse_step
from dsreason.monitor.sinks.json_lines import read_lines
from dsreason.report.samples import choose_evenly
from dsreason.world.evaluation.page import FILE, Clip, Curve, Page, PromptCard, Table, format_number, write_page
from dsreason.world.evaluation.score import name_reward

log = logging.getLogger(__name__)

MOST_COLUMNS = 5
"""Maximum number of validations to show: the first, the last, and evenly spaced ones in between."""
LOOKS = ("brightness", "motion", "diversity")
SETTINGS = ("model.", "lora.", "data.", "optim.lr", "world.", "reward.")
Row = dict[str, Any]
"""The object on a line of a JSONL file: a clip in `validation/step_N.jsonl`, or a step's metrics in `metrics.jsonl`."""


class ClipRow(BaseModel):
    """A line of `validation/step_N.jsonl`: a clip and its rewards, if any. The weighted sum of the rewards has the name ""."""

    id: str
    prompt: str
    rewards: dict[str, FiniteFloat]
    brightness: FiniteFloat


CLIP_ROW = TypeAdapter(ClipRow)


def locate_small_video(folder: Path, clip: int) -> Path:
    """Return the path of a clip's small video, which the page shows; `{clip}.mp4` next to it has the original size."""
    return folder / f"{clip}_small.mp4"


def write_run_page(run: Path) -> Path | None:
    """Write `world.html` to a run's folder and return its path; return None if the run has no validations yet."""
    validations = read_validations(run)
    return write_page(build_run_page(run, validations), run / FILE) if validations else None


def read_validations(run: Path) -> dict[int, list[Row]]:
    """Read each validation's clips: step → clips. Leave out damaged files, because a report must not end a run."""
    files = {parse_step(file): file for file in (run / "validation").glob("*.jsonl") if is_step_name(file.stem)}
    validations = {step: read_validation(files[step]) for step in sorted(files)}
    return {step: rows for step, rows in validations.items() if rows}


def read_validation(file: Path) -> list[Row]:
    """Read a validation's clips; return [] if any line is damaged, because a line's number is also its clip's number."""
    try:
        rows, problem = read_valid_lines(file, CLIP_ROW)
    except OSError as error:
        rows, problem = [], f"cannot be read ({error.strerror})"
    if not rows and not problem:
        problem = "is empty"
    if not problem and any(row["rewards"] and "" not in row["rewards"] for row in rows):
        problem = "a clip has no weighted sum of its rewards"
    if problem:
        warn_left_out(file, problem)
    return [] if problem else rows


def read_metrics(run: Path) -> list[Row]:
    try:
        return read_lines(run / "metrics.jsonl", last_step=None)
    except OSError as error:
        warn_left_out(run / "metrics.jsonl", f"cannot be read ({error.strerror})")
        return []


@cache
def warn_left_out(file: Path, problem: str) -> None:
    """Log a warning, but only once per process: the page is rewritten at every validation."""
    log.warning("%s: %s, so %s omits it", file, problem, FILE)


def build_run_page(run: Path, validations: dict[int, list[Row]]) -> Page:
    steps = choose_steps([*validations])
    lines = read_metrics(run)
    config = (find_run_record(run) or {}).get("config", {})
    algorithm = config.get("world", {}).get("algorithm", "")
    columns = [f"step {step}" for step in steps]
    settings = {name: str(value) for name, value in flatten_keys(config).items() if name.startswith(SETTINGS)}
    return Page(
        kicker=f"World model, {algorithm}".rstrip(", "),
        title=run.absolute().name,
        columns=columns,
        cards=make_cards(run, validations, steps),
        tables=[make_means_table(validations, lines, steps, columns), make_clips_table(validations, steps, columns)],
        curves=make_curves(lines),
        settings={name: value for name, value in settings.items() if value not in ("None", "")},
    )


def choose_steps(steps: Sequence[int]) -> list[int]:
    """Return at most `MOST_COLUMNS` evenly spaced steps, including the first and the last."""
    return choose_evenly(steps, MOST_COLUMNS)


def make_cards(run: Path, validations: dict[int, list[Row]], steps: Sequence[int]) -> list[PromptCard]:
    """Make a card for each clip that has a video in the last validation."""
    folders = {step: run / "validation" / format_step(step) for step in steps}
    last = validations[steps[-1]]
    return [
        PromptCard(row["prompt"], row["id"], [build_clip(folders[step], validations[step], i) for step in steps])
        for i, row in enumerate(last)
        if locate_small_video(folders[steps[-1]], i).is_file()
    ]


def build_clip(folder: Path, rows: Sequence[Row], i: int) -> Clip:
    if i >= len(rows):
        return Clip(None, {})
    file, row = locate_small_video(folder, i), rows[i]
    values = {"reward": row["rewards"][""]} if row["rewards"] else {}
    return Clip(file if file.is_file() else None, values | {"brightness": row["brightness"]})


def make_means_table(
    validations: dict[int, list[Row]], lines: Sequence[Row], steps: Sequence[int], columns: Sequence[str]
) -> Table:
    """Make the table of mean rewards, brightness, motion and diversity at the displayed validations."""
    names = list(validations[steps[-1]][0]["rewards"])
    rows = {
        name_reward(name): [
            format_number(compute_mean([row["rewards"].get(name, 0.0) for row in validations[step]])) for step in steps
        ]
        for name in names
    }
    by_step = {line["step"]: line for line in lines}
    for name in LOOKS:
        values = [by_step.get(step, {}).get(f"val/{name}") for step in steps]
        if any(value is not None for value in values):
            rows[name] = ["–" if value is None else format_number(value) for value in values]
    clips = len(validations[steps[-1]])
    note = f"Means over {clips} clips, sampled along the ODE. Diversity is the clips' standard deviation at low resolution."
    return Table("Rewards and appearance", columns, rows, note)


def make_clips_table(validations: dict[int, list[Row]], steps: Sequence[int], columns: Sequence[str]) -> Table:
    """Make the table of every clip's reward, sorted by the clip's gain over the run, smallest gain first."""
    first, last = validations[steps[0]], validations[steps[-1]]
    if not last[0]["rewards"]:
        return Table("Every clip", columns, {}, folded=True)
    numbers = sorted(range(len(last)), key=lambda i: last[i]["rewards"][""] - get_reward(first, i))
    rows = {
        f"{i}: {last[i]['prompt']} ({last[i]['id']})": [
            format_number(get_reward(validations[step], i)) for step in steps
        ]
        for i in numbers
    }
    return Table("Reward of every clip, smallest gain first", columns, rows, folded=True)


def get_reward(rows: Sequence[Row], i: int) -> float:
    return float(rows[i]["rewards"].get("", 0.0)) if i < len(rows) else float("nan")


def make_curves(lines: Sequence[Row]) -> list[Curve]:
    """Make the curves of the rewards, the clips' appearance, the loss and the distance to the reference."""

    def points(name: str) -> list[tuple[float, float]]:
        return [(line["step"], line[name]) for line in lines if line.get(name) is not None]

    names = list(dict.fromkeys(name.removeprefix("val/") for line in lines for name in line if "reward/" in name))
    rewards = [name for name in names if name.endswith("/mean")]
    curves = [Curve(name.removesuffix("/mean"), points(name), points(f"val/{name}")) for name in rewards]
    curves += [Curve(name, points(f"clips/{name}"), points(f"val/{name}")) for name in LOOKS[:2]]
    curves += [
        Curve("diversity within a prompt", training=points("clips/diversity")),
        Curve("diversity across prompts", validation=points("val/diversity")),
    ]
    curves += [Curve("loss", points("train/loss"), points("val/loss")), Curve("kl", points("policy/kl"))]
    return curves


def compute_mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
