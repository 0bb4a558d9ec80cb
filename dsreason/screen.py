"""What people see: text on the terminal and in logs, where nothing in it can act on the terminal or pass for another line.

File names, rows, models and servers may hold any character. `say` and `write`, the formatter of log lines (`dsreason.secrets`)
and the console of tables and bars (`dsreason.monitor.console`) are all ways to the terminal, and each makes them visible; a
test finds any other one.
"""

from __future__ import annotations

import errno
import io
import os
import re
import sys
from typing import Any, TextIO

CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # but for tab and line feed
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # of the direction of writing
    "\u2028\u2029\ufeff\U000e0000-\U000e007f"  # line breaks, and what nobody sees
    "\ud800-\udfff]"  # halves of characters, which no encoding can write
)
DIM, PLAIN = "\x1b[2m", "\x1b[0m"


class Terminal(io.FileIO):
    """A terminal that may be closed while a job saves what it has: what is written after that goes nowhere."""

    def write(self, content: Any) -> int:
        try:
            return super().write(content) or 0
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            lead_nowhere(self.fileno())
            return memoryview(content).nbytes


def outlive_terminal() -> None:
    """Make stdout and stderr a `Terminal` each if they are one, and escape what their encoding lacks."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
            if stream.isatty():
                raw = io.BufferedWriter(Terminal(stream.fileno(), "w", closefd=False))
                setattr(sys, name, io.TextIOWrapper(raw, stream.encoding, "backslashreplace", line_buffering=True))


def visible(text: str) -> str:
    r"""Control characters as JSON writes them, `\u001b`; tabs and line breaks stay."""
    return CONTROL.sub(escaped, text)


def escaped(found: re.Match[str]) -> str:
    return re.sub("(....)", r"\\u\1", found[0].encode("utf-16-be", "surrogatepass").hex())


def in_one_line(text: str) -> str:
    r"""As `visible`, tabs and line breaks too: for a foreign text in a message."""
    return visible(text).replace("\t", r"\t").replace("\n", r"\n")


def as_message(text: str) -> str:
    """As `visible`, with every line after the first indented: a foreign line break begins no message of its own."""
    return re.sub(r"\n(?=\S)", "\n  ", visible(text))


def say(text: object = "", *, err: bool = False) -> None:
    """Print a message, see `as_message`."""
    write(as_message(str(text)), file=sys.stderr if err else sys.stdout)


def write(text: str, *, file: TextIO | None = None, end: str = "\n", dim: bool = False) -> None:
    """Print a text of many lines to stdout or `file`: an answer, JSON, a traceback."""
    shown_text, stream = visible(text), file or sys.stdout
    try:
        print(f"{DIM}{shown_text}{PLAIN}" if dim else shown_text, file=stream, end=end, flush=True)
    except BrokenPipeError:  # such as `| head -1`: who reads no more misses nothing
        lead_nowhere(stream.fileno())


def lead_nowhere(descriptor: int) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)
