"""Safe output to the terminal and to logs: text can neither control the terminal nor imitate a separate message.

File names, rows and the output of models and servers may contain any character. Therefore, all output passes through
`print_message`, `write`, the log formatter (`dsreason.secrets`) or the console for tables and progress bars
(`dsreason.monitor.console`), each of which escapes control characters. A test finds code that writes to the terminal in any
other way.
"""

from __future__ import annotations

import errno
import io
import os
import re
import sys
from typing import Any, TextIO

CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters except tab and line feed
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # marks that change the writing direction
    "\u2028\u2029\ufeff\U000e0000-\U000e007f"  # line breaks and invisible characters
    "\ud800-\udfff]"  # surrogates, which UTF-8 cannot encode
)
DIM, PLAIN = "\x1b[2m", "\x1b[0m"


class Terminal(io.FileIO):
    """A terminal stream that discards output once the terminal is closed, so that a job can still save its state."""

    def write(self, content: Any) -> int:
        try:
            return super().write(content) or 0
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            discard_output(self.fileno())
            return memoryview(content).nbytes


def wrap_terminal() -> None:
    """Make stdout and stderr escape characters that their encoding cannot represent; if they are terminals, wrap them."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
            if stream.isatty():
                raw = io.BufferedWriter(Terminal(stream.fileno(), "w", closefd=False))
                setattr(sys, name, io.TextIOWrapper(raw, stream.encoding, "backslashreplace", line_buffering=True))


def escape_control(text: str) -> str:
    r"""Escape control characters as JSON does (`\u001b`), except tabs and line breaks."""
    return CONTROL.sub(escape_match, text)


def escape_match(match: re.Match[str]) -> str:
    return re.sub("(....)", r"\\u\1", match[0].encode("utf-16-be", "surrogatepass").hex())


def to_one_line(text: str) -> str:
    r"""Escape all control characters, including tabs and line breaks. Use it for untrusted text within a message."""
    return escape_control(text).replace("\t", r"\t").replace("\n", r"\n")


def format_message(text: str) -> str:
    """Apply `escape_control` and indent all lines after the first, so that untrusted text cannot imitate a separate message."""
    return re.sub(r"\n(?=\S)", "\n  ", escape_control(text))


def print_message(text: object = "", *, err: bool = False) -> None:
    """Print a message after formatting it with `format_message`, to stderr if `err` is set."""
    write(format_message(str(text)), file=sys.stderr if err else sys.stdout)


def write(text: str, *, file: TextIO | None = None, end: str = "\n", dim: bool = False) -> None:
    """Print a multi-line text, such as an answer, JSON or a traceback, to `file` (by default stdout)."""
    escaped_text, stream = escape_control(text), file or sys.stdout
    try:
        print(f"{DIM}{escaped_text}{PLAIN}" if dim else escaped_text, file=stream, end=end, flush=True)
    except BrokenPipeError:  # the reader, such as `| head -1`, has exited
        discard_output(stream.fileno())


def discard_output(descriptor: int) -> None:
    """Redirect a file descriptor to /dev/null."""
    null_device = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null_device, descriptor)
    os.close(null_device)
