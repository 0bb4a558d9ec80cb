"""A sink that writes `metrics.jsonl`, with one line for the scalars of each step."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsreason.errors import CheckpointError
from dsreason.files.atomic import write_file
from dsreason.files.disk import check_regular
from dsreason.monitor.sinks.sink import Sink

log = logging.getLogger(__name__)


class JSONLines(Sink):
    """A JSON Lines file with one object per step. The last line is rewritten while its step still receives values.

    JSON cannot represent NaN and infinities, so these are written as null and listed under `"nonfinite"`:
    `{"step": 3, "train/loss": null, "nonfinite": {"train/loss": "nan"}}`.
    """

    def __init__(self, path: Path, resume_step: int | None) -> None:
        entries = [] if resume_step is None else read_lines(path, last_step=resume_step)
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


def read_lines(path: Path, *, last_step: int) -> list[dict[str, Any]]:
    """Return the entries up to and including `last_step`. Skip invalid lines, such as those left by a crash, with a warning.

    Raises:
        CheckpointError: the path is not a regular file, or cannot be read.
    """
    if not path.exists():
        return []
    try:
        check_regular(path, path)
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be read ({error.strerror}), so the metrics cannot be continued; remove it"
        ) from None
    entries = []
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            entry = None
        if isinstance(entry, dict) and isinstance(entry.get("step"), int):
            entries.append(entry)
        else:
            log.warning("%s:%d: the line is dropped, because it is not a record of a step: %r", path, number, line[:80])
    return [entry for entry in entries if entry["step"] <= last_step]
