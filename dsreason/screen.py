"""Safe output to the terminal and to logs: no text can control the terminal or imitate a separate line.

File names, rows, models and servers may contain any character. All output passes through `print_message`, `write`, the formatter
of log lines (`dsreason.secrets`) or the console of tables and bars (`dsreason.monitor.console`), and each of them escapes control
characters; a test reports any other way to the terminal.
"""

from __future__ import annotations

import errno
import io
import os
import re
import sys
from typing import Any, TextIO

CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # all but tab and line feed
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # marks that change the writing direction
    "\u2028\u2029\ufeff\U000e0000-\U000e007f"  # line breaks and invisible characters
    "\ud800-\udfff]"  # surrogates, which no encoding can write
)
DIM, PLAIN = "\x1b[2m", "\x1b[0m"


class Terminal(io.FileIO):
    """A terminal that may close while a job saves its state; later output is discarded."""

    def write(self, content: Any) -> int:
        try:
            return super().write(content) or 0
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            discard_output(self.fileno())
            return memoryview(content).nbytes


def wrap_terminal() -> None:
    """Wrap stdout and stderr in a `Terminal` if they are one, and escape characters that their encoding lacks."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
            if stream.isatty():
                raw = io.BufferedWriter(Terminal(stream.fileno(), "w", closefd=False))
                setattr(sys, name, io.TextIOWrapper(raw, stream.encoding, "backslashreplace", line_buffering=True))


def escape_control(text: str) -> str:
    r"""Escape control characters the way JSON does, `\u001b`; keep tabs and line breaks."""
    return CONTROL.sub(escape_match, text)


def escape_match(match: re.Match[str]) -> str:
    return re.sub("(....)", r"\\u\1", match[0].encode("utf-16-be", "surrogatepass").hex())


def to_one_line(text: str) -> str:
    r"""Escape tabs and line breaks as well as what `escape_control` escapes: for foreign text in a message."""
    return escape_control(text).replace("\t", r"\t").replace("\n", r"\n")


def format_message(text: str) -> str:
    """Apply `escape_control` and indent every line after the first, so that a foreign line break cannot start a message."""
    return re.sub(r"\n(?=\S)", "\n  ", escape_control(text))


def print_message(text: object = "", *, err: bool = False) -> None:
    """Print a message, formatted by `format_message`."""
    write(format_message(str(text)), file=sys.stderr if err else sys.stdout)


def write(text: str, *, file: TextIO | None = None, end: str = "\n", dim: bool = False) -> None:
    """Print a text of several lines, such as an answer, JSON or a traceback, to stdout or `file`."""
    escaped_text, stream = escape_control(text), file or sys.stdout
    try:
        print(f"{DIM}{escaped_text}{PLAIN}" if dim else escaped_text, file=stream, end=end, flush=True)
    except BrokenPipeError:  # the reader, such as `| head -1`, has ended
        discard_output(stream.fileno())


def discard_output(descriptor: int) -> None:
    """Redirect a file descriptor to /dev/null."""
    null_device = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null_device, descriptor)
    os.close(null_device)
