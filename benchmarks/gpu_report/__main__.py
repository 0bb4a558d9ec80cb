"""`python -m benchmarks.gpu_report`: run the parts one after another, and write the report after each part.

    make gpu-report SECONDS=300

runs the most informative parts within five minutes: first the checks in parallel, then the speed measurements one by one. If a
call may take ten minutes at most, three calls fill one report:

    make gpu-report PARTS="environment zero attention vision fused head parity ledger_05b"
    make gpu-report PARTS="ledger_2b state_poison sft grpo"
    make gpu-report PARTS="sync checkpoint leaks processor lora_8b ledger_7b"
"""

from __future__ import annotations

import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.status import Status

from benchmarks.gpu_report.parts import BY_NAME, CHECKS_SHARE, PARTS, SHORT, BenchmarkSetup, Part
from benchmarks.gpu_report.report import GOOD, MARKDOWN_FILE, build_record, read_records, write_report
from benchmarks.gpu_report.runner import Ended, get_limit, run_part
from dsreason.job import launch
from dsreason.problems import find_nearest

app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})
console = Console(highlight=False)
SHORTEST = 15
"""Minimum number of remaining seconds to start a part; with less time, it could not measure anything."""


def choose_parts(names: str) -> list[Part]:
    """Return the parts in `names` (separated by spaces or commas), in the order of `PARTS`; all parts if `names` is empty.

    `ledger` stands for `ledger_05b` and all other parts that begin with `ledger_`.
    """
    selected: set[str] = set()
    for name in names.replace(",", " ").split():
        matches = {part for part in BY_NAME if part == name or part.startswith(f"{name}_")}
        if not matches:
            likely = find_nearest(name, BY_NAME)
            hint = f"; did you mean {likely!r}?" if likely else ""
            raise typer.BadParameter(f"unknown part {name!r}{hint} (parts: {', '.join(BY_NAME)})")
        selected |= matches
    return [part for part in PARTS if part.name in selected or not selected]


def show_parts(enabled: bool) -> None:
    if enabled:
        for part in PARTS:
            console.print(f"{part.name:25}{part.seconds:5} s  {part.about}")
        raise typer.Exit


def catch_stop_signals() -> threading.Event:
    """Return an event that Ctrl-C and SIGTERM set. Raising an exception instead could leave a part running if it was just being
    started."""
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    return stopped


@app.command()
def main(
    parts: Annotated[str, typer.Option(help="Parts to run, separated by spaces; default: all.")] = "",
    out: Annotated[Path, typer.Option(help="Folder for the report; results of earlier invocations are kept.")] = Path(
        "outputs/gpu-report"
    ),
    scratch: Annotated[
        Path | None,
        typer.Option(help="Folder for models and runs, up to 40 GB; default: the system's temporary folder."),
    ] = None,
    seconds: Annotated[
        int,
        typer.Option(
            min=0, help="Time limit for the entire call in seconds; the most informative parts run first. 0: no limit."
        ),
    ] = 0,
    tiny: Annotated[bool, typer.Option("--tiny", help="Use tiny sizes; always on without a GPU.")] = False,
    show: Annotated[
        bool, typer.Option("--list", callback=show_parts, is_eager=True, help="List the parts and exit.")
    ] = False,
) -> None:
    """Measure what dsreason does on a GPU; nothing is downloaded. The exit code is 1 if a part fails or misses a goal."""
    selected = choose_parts(parts)
    if seconds:
        selected = [BY_NAME[name] for name in SHORT if BY_NAME[name] in selected]
    stopped = catch_stop_signals()
    launch.prepare_environment()
    gpus = launch.count_gpus()
    cards = gpus if launch.get_device_kind(gpus) == "cuda" else 0
    logs = out / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    records = read_records(out)
    with tempfile.TemporaryDirectory(prefix="gpu-report-", dir=scratch) as folder, console.status("") as status:
        setup = BenchmarkSetup(Path(folder), cards, tiny or not cards)
        runner = Runner(setup, logs, stopped, status)
        for part, result in runner.run_within(selected, seconds) if seconds else runner.run_all(selected):
            records[part.name] = build_record(part, result, setup)
            write_report(out, records)
            print_verdict(part, records[part.name])
    if stopped.is_set():
        console.print("stopped; the report contains the measurements made so far")
        raise typer.Exit(130)
    console.print(f"\n{out / MARKDOWN_FILE}: send this file together with the JSON file next to it")
    raise typer.Exit(0 if all(records[part.name]["verdict"] in GOOD for part in selected) else 1)


@dataclass(frozen=True)
class Runner:
    """A runner of parts. Once `stopped` is set, running parts end with their measurements so far, and no further part starts."""

    setup: BenchmarkSetup
    logs: Path
    stopped: threading.Event
    status: Status

    def run_all(self, parts: list[Part]) -> Iterator[tuple[Part, Ended]]:
        """Run the parts one after another, each within its own time limit."""
        for number, part in enumerate(parts):
            if self.stopped.is_set():
                return
            later = sum(get_limit(other, self.setup) for other in parts[number + 1 :])
            yield part, self.run(part, get_limit(part, self.setup), later)

    def run_within(self, parts: list[Part], seconds: float) -> Iterator[tuple[Part, Ended]]:
        """Run the checks in parallel, then the timed parts one by one, until `seconds` have passed."""
        deadline = time.monotonic() + seconds
        checks = [part for part in parts if part.beside]
        with ThreadPoolExecutor(max(1, len(checks))) as pool:
            limits = {part: min(get_limit(part, self.setup), CHECKS_SHARE * seconds) for part in checks}
            futures = {pool.submit(self.run, part, limit): part for part, limit in limits.items()}
            for future in as_completed(futures):
                yield futures[future], future.result()
        for part in parts:
            if part.beside:
                continue
            if self.stopped.is_set():
                return
            remaining = deadline - time.monotonic()
            if remaining < SHORTEST:
                yield part, Ended("skipped", 0.0, {}, f"the {seconds:g} s are used up")
            else:
                yield part, self.run(part, min(get_limit(part, self.setup), remaining))

    def run(self, part: Part, limit: float, later: float = 0.0) -> Ended:
        """Run a part, and display the elapsed time and the maximum time that it and the `later` parts still need."""
        cards = self.setup.cards
        if cards and cards < part.cards:
            return Ended("skipped", 0.0, {}, f"needs {part.cards} GPUs, but only {cards} are visible")

        def show_progress(seconds: float) -> bool:
            minutes = (limit - seconds + later) / 60
            self.status.update(f"{part.name}: {seconds:.0f} of {limit:.0f} s; at most {minutes:.0f} minutes more")
            return not self.stopped.is_set()

        return run_part(part, self.setup, self.logs, show_progress, limit)


def print_verdict(part: Part, record: dict[str, object]) -> None:
    console.print(
        f"{part.name:25}{record['verdict']:10}{record['seconds']:7} of {record['limit']} s  {record['reason']}"
    )


if __name__ == "__main__":
    app()
