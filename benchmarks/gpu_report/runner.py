"""A runner for parts. Each part runs in a separate process, which is killed with all its children at the time limit."""

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

from benchmarks.gpu_report.parts import BenchmarkSetup, Part, Value

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "PYTHONUNBUFFERED": "1",
}
JOB_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that the shell may still have from another job; every part is a separate job."""
LAST_LINES = 30
GONE_WITHIN = 5
"""Maximum number of seconds to wait for killed processes to end."""
TICK = 0.2
"""Seconds between two checks of whether a part has ended."""


@dataclass(frozen=True)
class Ended:
    """A part's result: how the part ended, and its measurements until then."""

    how: str
    """`done`, `skipped`, `timed out` or `failed`."""
    seconds: float
    measured: dict[str, Value]
    reason: str = ""
    """Reason why the part was skipped, or description of its failure."""
    log: str = ""
    """Last lines of the part's output if it failed or timed out."""


def run_part(
    part: Part,
    setup: BenchmarkSetup,
    logs: Path,
    tick: Callable[[float], bool] = lambda seconds: True,
    limit: float | None = None,
) -> Ended:
    """Run a part until it ends or reaches its time limit. However this call ends, none of the part's processes are left behind.

    Args:
        limit: time limit in seconds; None: the part's own limit.
        logs: folder for `<part>.log`, which gets the part's terminal output.
        tick: function called several times per second with the elapsed seconds; returns whether the part may continue.
    """
    results, log = setup.scratch / f"{part.name}.jsonl", logs / f"{part.name}.log"
    results.unlink(missing_ok=True)
    settings = {"module": part.module, "part": part.name, "results": results, **asdict(setup)}
    task = json.dumps(settings, default=str)
    command = [sys.executable, "-m", "benchmarks.gpu_report.run_part", task]
    started = time.monotonic()
    limit = get_limit(part, setup) if limit is None else limit
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=build_environment(), stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            while process.poll() is None and time.monotonic() - started < limit:
                if not tick(time.monotonic() - started):
                    break
                time.sleep(TICK)
            code = process.poll()
        finally:
            end(process)
    return read_result(code, time.monotonic() - started, results, log)


def get_limit(part: Part, setup: BenchmarkSetup) -> int:
    """Return the time limit in seconds. It is longer on a CPU, where vLLM and DeepSpeed compile code and cores may be shared."""
    return part.seconds if setup.cards else 10 * part.seconds


def build_environment() -> dict[str, str]:
    """Build environment variables that keep a part offline and outside other jobs, and put this checkout first on its path."""
    variables = {name: value for name, value in os.environ.items() if name not in JOB_VARIABLES}
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return variables | ENVIRONMENT | {"PYTHONPATH": path}


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a part's remaining processes: those in its process group, and its ranks, which have separate sessions."""
    children: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        children = psutil.Process(process.pid).children(recursive=True)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for child in children:
        with suppress(psutil.NoSuchProcess):
            child.kill()
    process.wait()
    psutil.wait_procs(children, timeout=GONE_WITHIN)  # the next part needs the GPU memory that they still hold


def read_result(code: int | None, seconds: float, results: Path, log: Path) -> Ended:
    """Build a part's result from its files; `code` is its exit code, or None if it exceeded its time limit."""
    lines = [json.loads(line) for line in results.read_text().splitlines()] if results.is_file() else []
    measured = {line["name"]: line["value"] for line in lines if "name" in line}
    last_line = lines[-1] if lines else {}
    if code == 0 and "skipped" in last_line:
        return Ended("skipped", seconds, measured, last_line["skipped"])
    if code == 0 and "done" in last_line:
        return Ended("done", seconds, measured)
    written = "\n".join(log.read_text(errors="replace").splitlines()[-LAST_LINES:])
    if code is None:
        return Ended("timed out", seconds, measured, f"killed after {seconds:.0f} s", written)
    return Ended("failed", seconds, measured, describe_exit(code), written)


def describe_exit(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
