"""A sink that writes `metrics.jsonl`, with one line of scalars per step."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, FiniteFloat, NonNegativeInt, TypeAdapter

from dsreason.files.atomic import write_file
from dsreason.files.disk import read_valid_lines, set_aside
from dsreason.monitor.sinks.sink import Sink

log = logging.getLogger(__name__)


class Entry(BaseModel):
    """A line of `metrics.jsonl`: a step and its metrics."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, FiniteFloat | None]

    step: NonNegativeInt
    nonfinite: dict[str, str] = {}


ENTRY = TypeAdapter(Entry)


class JSONLines(Sink):
    """A JSON Lines file with one object per step. The last line is rewritten while its step still receives values.

    JSON cannot represent NaN and infinities, so these are written as null and listed under `"nonfinite"`:
    `{"step": 3, "train/loss": null, "nonfinite": {"train/loss": "nan"}}`.
    """

    def __init__(self, path: Path, resume_step: int | None) -> None:
        entries = [] if resume_step is None else read_earlier_entries(path, last_step=resume_step)
        write_file(path, b"".join(map(encode_line, entries)))
        self.current: dict[str, Any] = entries[-1] if entries else {"step": -1}
        self.file = path.open("r+b")
        self.offset = self.file.seek(0, os.SEEK_END)  # offset of the line that holds `current`
        if entries:
            self.offset -= len(encode_line(self.current))

    def log_scalars(self, step: int, values: Mapping[str, float]) -> None:
        if step < self.current["step"]:
            raise ValueError(f"metrics of step {step} were logged after those of step {self.current['step']}")
        if step > self.current["step"]:
            self.offset = self.file.seek(0, os.SEEK_END)
            self.current = {"step": step}
        nonfinite = self.current.pop("nonfinite", {})
        for name, value in values.items():
            nonfinite.pop(name, None)
            self.current[name] = float(value) if math.isfinite(value) else None
            if not math.isfinite(value):
                nonfinite[name] = str(float(value))
        if nonfinite:
            self.current["nonfinite"] = nonfinite
        self.file.seek(self.offset)
        self.file.write(encode_line(self.current))
        self.file.truncate()
        self.file.flush()

    def close(self) -> None:
        self.file.close()


def encode_line(entry: Mapping[str, Any]) -> bytes:
    return json.dumps(entry, allow_nan=False).encode() + b"\n"


def read_earlier_entries(path: Path, *, last_step: int) -> list[dict[str, Any]]:
    """Return the entries as `read_lines` does. If the file cannot be read, rename it, and let the run continue without it."""
    try:
        return read_lines(path, last_step=last_step)
    except OSError as error:
        set_aside(path, f"cannot be read ({error.strerror})")
        return []


def read_lines(path: Path, *, last_step: int | None) -> list[dict[str, Any]]:
    """Return the entries up to and including `last_step` (None: all).

    Damaged lines, such as those left by a crash, are left out with a warning.

    Raises:
        OSError: the file cannot be read, or is not a regular file.
    """
    if not os.path.lexists(path):
        return []
    entries, problem = read_valid_lines(path, ENTRY)
    if problem:
        warn_damaged(path, problem)
    return [entry for entry in entries if last_step is None or entry["step"] <= last_step]


@cache
def warn_damaged(path: Path, problem: str) -> None:
    """Log a warning, but only once per process: a world model's page reads the file at every validation."""
    log.warning("%s: damaged lines are left out: %s", path, problem)
