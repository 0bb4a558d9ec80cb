"""`python -m benchmarks.gpu_report`: runs the parts, one after the other, and writes the report after each.

Where no call may take more than ten minutes, three of them fill one report:

    make gpu-report PARTS="environment zero attention vision head parity ledger_05b"
    make gpu-report PARTS="ledger_2b sync state_poison sft grpo"
    make gpu-report PARTS="checkpoint leaks processor ledger_7b"
"""

from __future__ import annotations

import signal
import tempfile
import threading
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.gpu_report.parts import BY_NAME, PARTS, Part, Setting
from benchmarks.gpu_report.report import GOOD, MARKDOWN_FILE, read_records, record_of, write_report
from benchmarks.gpu_report.runner import Ended, limit_of, run_part
from dsreason.job import launch
from dsreason.problems import nearest

app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})
console = Console(highlight=False)


def chosen(names: str) -> list[Part]:
    """The parts named, separated by blanks or commas, in the table's order; all where none is.

    `ledger` stands for `ledger_05b` and all others that begin so.
    """
    wanted: set[str] = set()
    for name in names.replace(",", " ").split():
        found = {part for part in BY_NAME if part == name or part.startswith(f"{name}_")}
        if not found:
            likely = nearest(name, BY_NAME)
            meant = f"; did you mean {likely!r}?" if likely else ""
            raise typer.BadParameter(f"{name!r} is no part{meant} (there are {', '.join(BY_NAME)})")
        wanted |= found
    return [part for part in PARTS if part.name in wanted or not wanted]


def show_parts(wanted: bool) -> None:
    if wanted:
        for part in PARTS:
            console.print(f"{part.name:25}{part.seconds:5} s  {part.about}")
        raise typer.Exit


def listen() -> threading.Event:
    """Set by Ctrl-C and SIGTERM. Not an exception, which might come while a part is being started, and leave it behind."""
    asked = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: asked.set())
    return asked


@app.command()
def main(
    parts: Annotated[str, typer.Option(help="Which to run, separated by blanks; default: all.")] = "",
    out: Annotated[Path, typer.Option(help="Where the report is; results of an earlier call stay in it.")] = Path(
        "outputs/gpu-report"
    ),
    scratch: Annotated[
        Path | None, typer.Option(help="Folder for models and runs, up to 40 GB; default: the temporary one.")
    ] = None,
    tiny: Annotated[bool, typer.Option("--tiny", help="Tiny sizes; without a GPU always.")] = False,
    show: Annotated[
        bool, typer.Option("--list", callback=show_parts, is_eager=True, help="Show the parts and exit.")
    ] = False,
) -> None:
    """Measure what a GPU shows of dsreason; nothing is downloaded. Exit code 1 where a part is not as it should be."""
    wanted = chosen(parts)
    stopped = listen()
    launch.prepare_environment()
    gpus = launch.gpu_count()
    cards = gpus if launch.device_kind(gpus) == "cuda" else 0
    logs = out / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    records = read_records(out)
    with tempfile.TemporaryDirectory(prefix="gpu-report-", dir=scratch) as folder:
        setting = Setting(Path(folder), cards, tiny or not cards)
        try:
            for number, part in enumerate(wanted):
                records[part.name] = record_of(part, run(part, setting, logs, wanted[number + 1 :], stopped), setting)
                write_report(out, records)
                tell(part, records[part.name])
        except KeyboardInterrupt:
            console.print("stopped; what was measured before is in the report")
            raise typer.Exit(130) from None
    console.print(f"\n{out / MARKDOWN_FILE}: send it with the JSON beside it")
    raise typer.Exit(0 if all(records[part.name]["verdict"] in GOOD for part in wanted) else 1)


def run(part: Part, setting: Setting, logs: Path, later: list[Part], stopped: threading.Event) -> Ended:
    """The part, with its time and that of the later ones on the screen. KeyboardInterrupt where `stopped` is set."""
    if setting.cards and setting.cards < part.cards:
        return Ended("skipped", 0.0, {}, f"needs {part.cards} cards, and there is {setting.cards}")
    rest = sum(limit_of(other, setting) for other in later)
    with console.status("") as status:

        def tick(seconds: float) -> None:
            if stopped.is_set():
                raise KeyboardInterrupt
            limit = limit_of(part, setting)
            left = (limit - seconds + rest) / 60
            status.update(f"{part.name}: {seconds:.0f} of {limit} s; all parts: at most {left:.0f} minutes more")

        return run_part(part, setting, logs, tick)


def tell(part: Part, record: dict[str, object]) -> None:
    console.print(
        f"{part.name:25}{record['verdict']:10}{record['seconds']:7} of {record['limit']} s  {record['reason']}"
    )


if __name__ == "__main__":
    app()
