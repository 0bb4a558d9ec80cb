"""The process that runs a single part. It writes each measurement at once, so none is lost if the process is killed."""

from __future__ import annotations

import importlib
import json
import math
import sys
from pathlib import Path

from benchmarks.gpu_report.parts import BenchmarkSetup, SkipPart, Value
from dsreason.job import launch


def main(task: str) -> None:
    launch.die_with_parent()
    launch.prepare_environment()
    settings = json.loads(task)
    setup = BenchmarkSetup(Path(settings["scratch"]), settings["cards"], settings["tiny"])
    measure = getattr(importlib.import_module(settings["module"]), settings["part"])
    with Path(settings["results"]).open("a", buffering=1) as file:
        try:
            for name, value in measure(setup):
                file.write(json.dumps({"name": name, "value": to_json_value(value)}) + "\n")
        except SkipPart as skip:
            file.write(json.dumps({"skipped": str(skip)}) + "\n")
        else:
            file.write(json.dumps({"done": True}) + "\n")


def to_json_value(value: Value) -> Value:
    """Convert infinities and NaN, which JSON cannot represent, to strings."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


if __name__ == "__main__":
    main(sys.argv[1])
