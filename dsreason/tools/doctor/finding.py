"""The finding of a check."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dsreason.secrets import hide_secrets

Verdict = Literal["pass", "warn", "fail"]


@dataclass(frozen=True)
class DoctorFinding:
    """One line. Example: `DoctorFinding("compiler", "fail", "no c++ was found", "install g++")`."""

    name: str
    verdict: Verdict
    what: str
    cure: str = ""
    """Advice; empty if nothing has to be done."""


def report_pass(name: str, what: str) -> DoctorFinding:
    return DoctorFinding(name, "pass", what)


def report_warning(name: str, what: str, cure: str) -> DoctorFinding:
    return DoctorFinding(name, "warn", what, cure)


def report_failure(name: str, what: str, cure: str) -> DoctorFinding:
    return DoctorFinding(name, "fail", what, cure)


def run_program(command: Sequence[str], seconds: float) -> tuple[int, str]:
    """Return the exit code of a program and everything it prints; 124 if it takes longer, 127 if it is missing."""
    try:
        ended = subprocess.run(
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
    return ended.returncode, ended.stdout.decode(errors="replace")


def find_last_line(text: str) -> str:
    """The line that mostly says why, without secrets and control characters: the last `error:` line, else the last one."""
    printable = "".join(letter if letter.isprintable() or letter == "\n" else " " for letter in hide_secrets(text))
    lines = [" ".join(line.split()) for line in printable.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error:")]
    return (errors or lines or ["nothing was printed"])[-1][:300]
