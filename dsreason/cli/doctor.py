"""`dsreason doctor`: check whether this machine can train, and explain how to fix problems."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from dsreason.cli.job import ConfigOption, find_trainers
from dsreason.monitor.console import open_console
from dsreason.screen import print_message
from dsreason.tools.doctor.finding import DoctorFinding, Verdict

STYLES: dict[Verdict, str] = {"pass": "green", "warn": "yellow", "fail": "bold red"}


def doctor(
    config: ConfigOption = None,
    hostfile: Annotated[
        Path | None, typer.Option(help="Also check the hosts in this DeepSpeed hostfile, over SSH.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Skip the two short runs, which take about a minute.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
) -> None:
    """Check everything that a run needs: versions, compiler, GPUs, memory, disks, ports, tokens, a collective and an engine.

    Each line is a pass, a warning or a failure, with a remedy. The exit code is 1 if any check fails.
    """
    counts: dict[Verdict, int] = {"pass": 0, "warn": 0, "fail": 0}
    console = open_console(highlight=False)
    for finding in collect_findings(config, hostfile, console, quick=quick, speaks=not as_json):
        counts[finding.verdict] += 1
        if as_json:
            print_message(json.dumps(asdict(finding)))
        else:
            show(finding, console)
    if not as_json:
        console.print(f"{counts['pass']} pass, {counts['warn']} warn, {counts['fail']} fail")
    if counts["fail"]:
        raise typer.Exit(1)


def collect_findings(
    config: Path | None, hostfile: Path | None, console: Console, *, quick: bool, speaks: bool
) -> Iterator[DoctorFinding]:
    from dsreason.tools.doctor import checks, network, trial

    planned = list(checks.CHECKS)
    if hostfile is not None:
        hosts = network.read_hostfile(hostfile)
        planned.append(checks.Check("hosts", lambda: network.check_hosts(hosts)))
    if config is not None:
        loaded = load(config)
        planned.append(checks.Check("configuration", lambda: checks.check_config(loaded)))
    if not quick and trial.is_outside_launcher():
        planned += checks.TRIALS
    for check in planned:
        with console.status(f"{check.name} …") if speaks and console.is_terminal else console.capture():
            findings = list(checks.iter_findings(check))
        yield from findings
    if quick and speaks:
        console.print("--quick: the collective and the engine were not tested")


def load(config: Path) -> object:
    """Load a configuration of any training command."""
    from dsreason.cli.data.chosen_run import choose_trainer
    from dsreason.tools.cosmos_rl.loading import load_run

    trainer = choose_trainer(config, None, None)
    return load_run(trainer.name, find_trainers()[trainer.name].schema, config, (), default_recipe=trainer.recipe)[0]


def show(finding: DoctorFinding, console: Console) -> None:
    line = Text.assemble((finding.verdict, STYLES[finding.verdict]), f"  {finding.name}: {finding.what}")
    console.print(line, soft_wrap=True)
    if finding.cure:
        console.print(Text(f"      → {finding.cure}"), soft_wrap=True)
