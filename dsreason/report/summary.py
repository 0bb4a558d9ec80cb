"""The summary that a run prints at its end: results, warnings, and the commands that usually come next."""

from __future__ import annotations

import shlex

from dsreason.report.charts import format_value
from dsreason.report.outcome import Measurement, Outcome, measure_outcomes
from dsreason.report.run_files import RunFiles

MOST_WARNINGS = 10


def describe_run(run: RunFiles) -> list[str]:
    """Return the lines that a finished run prints. They include only the newest warnings, and how many more are in the log."""
    warnings = run.read_warnings()
    lines = [f"result: {describe_outcome(outcome)}" for outcome in measure_outcomes(run)]
    lines += [
        f"warning{f' ({warning.count} times)' if warning.count > 1 else ''}: {warning.text}"
        for warning in warnings[-MOST_WARNINGS:]
    ]
    if len(warnings) > MOST_WARNINGS:
        lines.append(f"{len(warnings) - MOST_WARNINGS} earlier warnings are in {run.folder}/logs/rank_0.log")
    return lines + [f"next: {command}" for command in list_next_commands(run)]


def describe_outcome(outcome: Outcome) -> str:
    """Describe an outcome. Example: `accuracy 0.547 (0.486 to 0.607) at step 0, 0.914 (0.873 to 0.943) at step 60: better`."""
    start, end = map(describe_measurement, (outcome.start, outcome.end))
    return f"{outcome.name} {start}, {end}: {outcome.verdict} ({outcome.source})"


def describe_measurement(measurement: Measurement) -> str:
    interval = measurement.interval
    limits = f" ({format_value(interval[0])} to {format_value(interval[1])})" if interval else ""
    return f"{format_value(measurement.value)}{limits} at step {measurement.step}"


def list_next_commands(run: RunFiles) -> list[str]:
    """Return the commands that usually come next: to evaluate and publish a finished run, or to continue an unfinished run."""
    folder = shlex.quote(str(run.folder))
    if (run.folder / "export" / "final").is_dir():
        return [
            f"dsreason eval --model {folder} --data my_questions.jsonl",
            f"dsreason push {folder}/export/final --to hub:me/{shlex.quote(run.name)}",
        ]
    command = [argument for argument in run.record.get("command", []) if not argument.startswith("--output-dir")]
    arguments = " ".join(map(shlex.quote, command)) or run.algorithm
    return [f"dsreason {arguments} --output-dir {folder} --resume auto"]
