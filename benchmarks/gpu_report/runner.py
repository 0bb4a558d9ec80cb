"""Runs one part in a process of its own, and ends all of it when its time is over."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from benchmarks.gpu_report.parts import Part, Setting, Value

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "PYTHONUNBUFFERED": "1",
}
OF_A_JOB = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""A shell may have kept these from another job; every part is a job of its own."""
LAST_LINES = 30
GONE_WITHIN = 5
"""Seconds that killed processes may take to end."""
TICK = 0.2
"""Seconds between two looks at a part."""


@dataclass(frozen=True)
class Ended:
    """How a part ended, and what it has measured until then."""

    how: str
    """`done`, `skipped`, `timed out` or `failed`."""
    seconds: float
    measured: dict[str, Value]
    reason: str = ""
    """Why it was skipped, or how it failed."""
    log: str = ""
    """The last lines that it wrote, where it did not end well."""


def run_part(
    part: Part,
    setting: Setting,
    logs: Path,
    tick: Callable[[float], bool] = lambda seconds: True,
    limit: float | None = None,
) -> Ended:
    """Run it to its end or its time limit; whatever ends this call, no process of the part is left.

    Args:
        limit: seconds; None: the part's own.
        logs: gets `<part>.log`, all that the part writes to its terminal.
        tick: called several times a second with the seconds so far; returns whether the part may go on.
    """
    results, log = setting.scratch / f"{part.name}.jsonl", logs / f"{part.name}.log"
    results.unlink(missing_ok=True)
    given = {"module": part.module, "part": part.name, "results": results, **asdict(setting)}
    task = json.dumps(given, default=str)
    command = [sys.executable, "-m", "benchmarks.gpu_report.run_part", task]
    started = time.monotonic()
    limit = limit_of(part, setting) if limit is None else limit
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment(), stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            while process.poll() is None and time.monotonic() - started < limit:
                if not tick(time.monotonic() - started):
                    break
                time.sleep(TICK)
            code = process.poll()
        finally:
            end(process)
    return ended(code, time.monotonic() - started, results, log)


def limit_of(part: Part, setting: Setting) -> int:
    """Seconds; a CPU gets more, for vLLM and DeepSpeed compile there, and its cores may be shared."""
    return part.seconds if setting.cards else 10 * part.seconds


def environment() -> dict[str, str]:
    """Offline, outside of any job, with this checkout's packages before others of the same name."""
    kept = {name: value for name, value in os.environ.items() if name not in OF_A_JOB}
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return kept | ENVIRONMENT | {"PYTHONPATH": path}


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill what the part has left: its process group, and ranks, which have sessions of their own."""
    others: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        others = psutil.Process(process.pid).children(recursive=True)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for other in others:
        with suppress(psutil.NoSuchProcess):
            other.kill()
    process.wait()
    psutil.wait_procs(others, timeout=GONE_WITHIN)  # their memory on the card is the next part's


def ended(code: int | None, seconds: float, results: Path, log: Path) -> Ended:
    """`code` is None where the time was over."""
    lines = [json.loads(line) for line in results.read_text().splitlines()] if results.is_file() else []
    measured = {line["name"]: line["value"] for line in lines if "name" in line}
    last = lines[-1] if lines else {}
    if code == 0 and "skipped" in last:
        return Ended("skipped", seconds, measured, last["skipped"])
    if code == 0 and "done" in last:
        return Ended("done", seconds, measured)
    written = "\n".join(log.read_text(errors="replace").splitlines()[-LAST_LINES:])
    if code is None:
        return Ended("timed out", seconds, measured, f"killed after {seconds:.0f} s", written)
    return Ended("failed", seconds, measured, how_it_ended(code), written)


def how_it_ended(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
