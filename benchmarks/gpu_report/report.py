"""The results of the parts, as a JSON file and a Markdown file that can be sent to others."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.gpu_report.environment import query_nvidia_smi
from benchmarks.gpu_report.parts import PARTS, BenchmarkSetup, Part, Value, format_value
from benchmarks.gpu_report.runner import Ended, get_limit
from dsreason.files.atomic import write_file
from dsreason.job.record import read_git_state
from dsreason.secrets import hide_secrets

JSON_FILE, MARKDOWN_FILE = "gpu-report.json", "gpu-report.md"
GOOD = ("ok", "measured", "skipped")
PATH = re.compile(r"(?<![\w:/.…-])(?:/[\w.@+~=-]+){2,}")

Record = dict[str, Any]
"""A part's record, with the keys verdict, reason, seconds, limit, when, commit, device, tiny, measurements, log."""


def build_record(part: Part, ended: Ended, setup: BenchmarkSetup) -> Record:
    """Build a part's record, without secrets, the folders in file paths, and the machine's name."""
    git = read_git_state()
    rows = (
        check_goals(part, ended.measured, on_gpu=bool(setup.cards))
        if ended.how == "done"
        else build_rows(ended.measured)
    )
    return {
        "verdict": get_verdict(ended, rows),
        "reason": hide_machine(ended.reason),
        "seconds": round(ended.seconds, 1),
        "limit": get_limit(part, setup),
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": git["commit"][:12] + ("" if not git["dirty"] else ", changed") if git else "",
        "device": query_nvidia_smi("name") if setup.cards else "cpu",
        "tiny": setup.tiny,
        "measurements": [{key: clean_value(value) for key, value in row.items()} for row in rows],
        "log": hide_machine(ended.log),
    }


def build_rows(measured: dict[str, Value]) -> list[Record]:
    return [{"name": name, "value": value, "goal": None, "ok": None} for name, value in measured.items()]


def check_goals(part: Part, measured: dict[str, Value], *, on_gpu: bool) -> list[Record]:
    """Return a row for every measurement, with its goal if any, and for every goal without a measurement."""
    goals = [goal for goal in part.goals if on_gpu or goal.on_cpu]
    rows = build_rows(measured)
    for row in rows:
        if goal := next((goal for goal in goals if goal.match_name(row["name"])), None):
            row |= {"goal": str(goal), "ok": goal.is_met(row["value"])}
    unmeasured = [goal for goal in goals if not any(goal.match_name(name) for name in measured)]
    return rows + [
        {"name": goal.pattern, "value": "not measured", "goal": str(goal), "ok": False} for goal in unmeasured
    ]


def get_verdict(ended: Ended, rows: list[Record]) -> str:
    """Return `ok`, `missed` (a goal is not met), `measured` (there is no goal), `skipped`, `timed out` or `failed`."""
    if ended.how != "done":
        return ended.how
    outcomes = [row["ok"] for row in rows if row["ok"] is not None]
    return "measured" if not outcomes else "ok" if all(outcomes) else "missed"


def hide_machine(text: str) -> str:
    """Remove secrets, the machine's name, and the folders in file paths."""
    text = PATH.sub(shorten_path, hide_secrets(text))
    return re.sub(rf"\b{re.escape(socket.gethostname())}\b", "<host>", text)


def shorten_path(path: re.Match[str]) -> str:
    """Return at most the last two components of a path, but never its first two, which may be a person's folder."""
    parts = path.group().split("/")[3:]
    return "/".join(["…", *parts[-2:]])


def clean_value(value: Any) -> Any:
    return hide_machine(value) if isinstance(value, str) else value


def read_records(folder: Path) -> dict[str, Record]:
    """Read the records that earlier invocations have written: part → record."""
    file = folder / JSON_FILE
    return json.loads(file.read_text())["parts"] if file.is_file() else {}


def write_report(folder: Path, records: dict[str, Record]) -> None:
    """Write the JSON file and the Markdown file, each atomically."""
    ordered = {part.name: records[part.name] for part in PARTS if part.name in records}
    write_file(folder / JSON_FILE, json.dumps({"format": 1, "parts": ordered}, indent=1, ensure_ascii=False) + "\n")
    write_file(folder / MARKDOWN_FILE, format_markdown(ordered))


def format_markdown(records: dict[str, Record]) -> str:
    lines = ["# dsreason on a GPU", ""]
    if any(record["device"] == "cpu" for record in records.values()):
        lines += [
            "Parts marked *cpu* ran without a GPU, in tiny sizes: they show that the script works, but say nothing about speed.",
            "",
        ]
    lines += format_table(("part", "verdict", "seconds", "device", "what"), map(format_summary, records.items()))
    for part in PARTS:
        if part.name in records:
            lines += [
                "",
                f"## {part.name}",
                "",
                part.about[0].upper() + part.about[1:] + ".",
                *format_details(records[part.name]),
            ]
    return "\n".join(lines) + "\n"


def format_summary(item: tuple[str, Record]) -> tuple[str, ...]:
    name, record = item
    missed = [row["name"] for row in record["measurements"] if row["ok"] is False]
    remark = record["reason"] or ", ".join(missed)
    device = record["device"] + (", tiny" if record["tiny"] else "")
    return f"[{name}](#{name})", f"**{record['verdict']}**", f"{record['seconds']} of {record['limit']}", device, remark


def format_details(record: Record) -> list[str]:
    ended = f"{record['verdict']}: {record['reason']}" if record["reason"] else record["verdict"]
    lines = ["", f"{ended} ({record['when']}, commit {record['commit'] or 'unknown'})", ""]
    rows = (
        (
            row["name"],
            format_value(row["value"]),
            row["goal"] or "",
            "" if row["ok"] is None else "ok" if row["ok"] else "**no**",
        )
        for row in record["measurements"]
    )
    if record["measurements"]:
        lines += format_table(("measurement", "value", "goal", ""), rows)
    if record["log"]:
        lines += ["", "```", record["log"].replace("```", "'''"), "```"]
    return lines


def format_table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    cells = [head, ("---",) * len(head), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) + " |" for row in cells]
