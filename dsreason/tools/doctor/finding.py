"""Findings of the checks, and functions to create them."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dsreason.secrets import hide_secrets

Verdict = Literal["pass", "warn", "fail"]


@dataclass(frozen=True)
class DoctorFinding:
    """One line of the report.

    Example: `DoctorFinding("C++ compiler", "fail", "c++ was not found", "install g++")`.
    """

    name: str
    verdict: Verdict
    what: str
    cure: str = ""
    """Advice; empty if no action is needed."""


def report_pass(name: str, what: str) -> DoctorFinding:
    return DoctorFinding(name, "pass", what)


def report_warning(name: str, what: str, cure: str) -> DoctorFinding:
    return DoctorFinding(name, "warn", what, cure)


def report_failure(name: str, what: str, cure: str) -> DoctorFinding:
    return DoctorFinding(name, "fail", what, cure)


def run_program(command: Sequence[str], seconds: float) -> tuple[int, str]:
    """Run a program, and return its exit code and its output (stdout and stderr).

    The code is 124 if the program takes more than `seconds`, and 127 if it cannot be started.
    """
    try:
        completed = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        return 124, (error.stdout or b"").decode(errors="replace")
    except OSError as error:
        return 127, str(error)
    return completed.returncode, completed.stdout.decode(errors="replace")


def find_last_line(text: str) -> str:
    """Return the line most likely to contain the cause: the last line that starts with `error:`, or else the last line of all.

    Secrets and control characters are removed.
    """
    printable = "".join(
        character if character.isprintable() or character == "\n" else " " for character in hide_secrets(text)
    )
    lines = [" ".join(line.split()) for line in printable.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error:")]
    return (errors or lines or ["no output"])[-1][:300]
