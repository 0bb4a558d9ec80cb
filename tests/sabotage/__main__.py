"""Plants the faults one at a time and runs the tests that should see them: `python -m tests.sabotage --help`."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from tests.sabotage import ROOT, Fault, read_faults

TIME_LIMIT_S = 1800
"""Seconds that one run of tests may take. A fault that makes them hang counts as detected."""
SUITES = {"short": [], "whole": ["--all", "-m", "long"]}
"""Suite name → pytest's options for the tests that it adds to the previous suite."""
NO_TEST_FAILED = (0, 5)
"""pytest's exit codes; 5: the suite has none of these tests."""


@dataclass(frozen=True)
class Finding:
    fault: Fault
    suite: str
    """The smallest suite with a failing test, or "none"."""
    test: str
    seconds: float


def copy_tree(folder: Path) -> None:
    """The files that git knows or would add, as they are now."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


@contextmanager
def planted(fault: Fault, tree: Path) -> Iterator[None]:
    file = tree / fault.file
    sound = file.read_text()
    file.write_text(fault.planted_in(sound))
    try:
        yield
    finally:
        file.write_text(sound)


def failed_test(tree: Path, tests: Sequence[str], options: Sequence[str]) -> str | None:
    """The first test that fails, without its parameters; a file where it cannot be read or hangs; None if all pass.

    Raises:
        RuntimeError: pytest could not run them.
    """
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n0", "-p", "no:cacheprovider", *options, *tests]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    with subprocess.Popen(
        command,
        cwd=tree,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # so that what the tests have started ends with them
    ) as process:
        try:
            output, _ = process.communicate(timeout=TIME_LIMIT_S)
        except subprocess.TimeoutExpired:
            return tests[0]
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode in NO_TEST_FAILED:
        return None
    failed = re.search(r"^(?:FAILED|ERROR) ([^\s\[]+)", output, re.MULTILINE)
    if failed is None:
        raise RuntimeError(f"pytest ended with {process.returncode} and names no test:\n{output[-3000:]}")
    return failed[1]


def try_fault(fault: Fault, tree: Path) -> Finding:
    """Find a test that detects the fault.

    Raise RuntimeError if that test also fails without the fault, which would prove nothing.
    """
    started = time.monotonic()
    for suite, options in SUITES.items():
        with planted(fault, tree):
            test = failed_test(tree, fault.tests, options)
        if test is not None:
            if failed_test(tree, [test], options) is not None:
                raise RuntimeError(f"fault {fault.name}: {test} fails without it, too; correct the test first")
            return Finding(fault, suite, test, time.monotonic() - started)
    return Finding(fault, "none", "", time.monotonic() - started)


def as_markdown(findings: Sequence[Finding]) -> str:
    rows = ["| fault | file | seen by | suite |", "|---|---|---|---|"]
    for finding in findings:
        recorded = f"`{finding.test.removeprefix('tests/')}`" if finding.test else "nothing"
        file = finding.fault.file.removeprefix("dsreason/")
        rows.append(f"| {finding.fault.what} | `{file}` | {recorded} | {finding.suite} |")
    return "\n".join([*rows, "", summary(findings), ""])


def summary(findings: Sequence[Finding]) -> str:
    counts = {suite: sum(finding.suite == suite for finding in findings) for suite in ("short", "whole", "none")}
    return (
        f"{len(findings)} faults: {counts['short']} seen by the short suite, {counts['whole']} only by the whole, "
        f"{counts['none']} by none."
    )


def chosen(names: Sequence[str], *, only_unit: bool) -> list[Fault]:
    faults = read_faults()
    if unknown := set(names) - {fault.name for fault in faults}:
        raise typer.BadParameter(
            f"{', '.join(sorted(unknown))}: no such fault; there are {', '.join(f.name for f in faults)}"
        )
    return [
        fault for fault in faults if (not names or fault.name in names) and (fault.is_for_unit_tests or not only_unit)
    ]


def main(
    names: Annotated[list[str] | None, typer.Argument(help="Faults to try; all of them where none is named.")] = None,
    unit: Annotated[bool, typer.Option("--unit", help="Only faults that unit tests should see.")] = False,
    markdown: Annotated[Path | None, typer.Option(help="Write the table there, too.")] = None,
) -> None:
    """Plant faults one at a time, and tell which test sees each."""
    faults = chosen(names or [], only_unit=unit)
    findings: list[Finding] = []
    with TemporaryDirectory(prefix="sabotage-") as folder:
        tree = Path(folder) / "tree"
        copy_tree(tree)
        for number, fault in enumerate(faults, start=1):
            result = try_fault(fault, tree)
            findings.append(result)
            place = f"{result.suite}, {result.test}" if result.test else "no test sees it"
            print(f"{number}/{len(faults)} {fault.name}: {place} ({result.seconds:.0f} s)", flush=True)
            if markdown is not None:
                markdown.write_text(as_markdown(findings))
    print(summary(findings))
    if any(finding.suite == "none" for finding in findings):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
