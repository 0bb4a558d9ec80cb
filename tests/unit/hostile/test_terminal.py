"""Untrusted text on the terminal and in logs: it cannot control the terminal or forge log lines."""

from __future__ import annotations

import ast
import io
import json
import logging
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.table import Table
from rich.text import Text

from dsreason.errors import ConfigError, DataError, RewardError, StorageError
from dsreason.files.address import S3Address
from dsreason.files.s3 import build_refusal
from dsreason.job import launch, logs
from dsreason.job.failures import Failure, RankError
from dsreason.monitor.console import open_console
from dsreason.monitor.progress import open_progress, track
from dsreason.screen import escape_control, format_message, print_message, to_one_line, write
from dsreason.secrets import HidingFormatter, VisibleRecord

ROOT = Path(__file__).parents[3]
HOSTILE = {
    "clear": "\x1b[2J",
    "title": "\x1b]0;root\x07",
    "bell": "\a",
    "back": "\b\b\b",
    "return": "fine\rerror",
    "CSI in one character": "\x9b31m",
    "delete": "\x7f",
    "zero": "\0",
    "right to left": "\u202egpj.exe",
    "isolate": "\u2066a\u2069",
    "mark": "\u200f",
    "line separator": "\u2028error: b",
    "next line": "\x85error: b",
    "form feed": "\ferror: b",
    "tags": "\U000e0041",
    "half a character": "\ud800",
}
LINE = "x\nerror: all is lost"
ACTING = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\U000e0000-\U000e007f\ud800-\udfff]"
)


def said(text: str, capsys: pytest.CaptureFixture[str]) -> str:
    print_message(text)
    print_message(text, err=True)
    write(text)
    out = capsys.readouterr()
    return out.out + out.err


def notice(text: str, capsys: pytest.CaptureFixture[str]) -> str:
    print_message(f"row 3: {text}")
    print_message(f"note: {text}", err=True)
    out = capsys.readouterr()
    return out.out + out.err


def ended(text: str, capsys: pytest.CaptureFixture[str]) -> str:
    for error in (ConfigError(text), DataError(text), RewardError(text), StorageError(text)):
        launch.report(error)
    launch.report(RankError(Failure(1, text, 1, user_fixable=True, time=0.0)))
    return capsys.readouterr().err


def crashed(text: str, capsys: pytest.CaptureFixture[str]) -> str:
    logging.disable(logging.CRITICAL)  # pytest captures log lines unescaped, and cannot report a lone surrogate
    launch.report(RuntimeError(text))
    logging.disable(logging.NOTSET)
    return capsys.readouterr().err


def logged(text: str, capsys: pytest.CaptureFixture[str]) -> str:
    stream = io.StringIO()
    for formatter in (HidingFormatter(), logs.RankFormatter(0)):
        record = logging.LogRecord("dsreason", logging.INFO, "f", 1, "row %s", (text,), None)
        stream.write(formatter.format(record) + "\n")
    return stream.getvalue()


def from_library(text: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the output of a library's logger that has its own handler, as transformers has."""
    library, stream = logging.Logger("library"), io.StringIO()
    library.addHandler(logging.StreamHandler(stream))
    before = logging.getLogRecordFactory()
    logging.setLogRecordFactory(VisibleRecord)
    try:
        library.warning("unknown key %s", text)
    finally:
        logging.setLogRecordFactory(before)
    return stream.getvalue()


def on_screen(text: str, capsys: pytest.CaptureFixture[str]) -> str:
    handler = logs.ScreenHandler()
    handler.setFormatter(logs.RankFormatter(0))
    handler.emit(logging.LogRecord("dsreason", logging.INFO, "f", 1, "row %s", (text,), None))
    return capsys.readouterr().err


def in_table(text: str, capsys: pytest.CaptureFixture[str]) -> str:
    console = open_console()
    console.width = 300
    table = Table(title=Text(text))
    table.add_column(Text(text))
    table.add_row(Text(text))
    console.print(table)
    console.print(text, markup=False)
    return capsys.readouterr().out


def in_lines(text: str, capsys: pytest.CaptureFixture[str]) -> str:
    with open_progress(rank=0, total_steps=1) as progress, progress.track_phase(text, 3, "rows"):
        pass
    with track(text, 1, "rows"):
        pass
    out = capsys.readouterr()
    return out.out + out.err


def from_s3(text: str, capsys: pytest.CaptureFixture[str]) -> str:
    answer = {"ResponseMetadata": {"HTTPStatusCode": 400}, "Error": {"Code": text, "Message": text}}
    launch.report(build_refusal(S3Address("bucket", "key"), answer))
    return capsys.readouterr().err


WAYS: dict[str, Callable[[str, pytest.CaptureFixture[str]], str]] = {
    "said": said,
    "notice": notice,
    "error": ended,
    "crash": crashed,
    "log": logged,
    "library": from_library,
    "screen": on_screen,
    "table": in_table,
    "lines": in_lines,
    "S3": from_s3,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", HOSTILE)
def test_control_characters_never_reach_the_terminal(way: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    ways = WAYS[way](f"a{HOSTILE[name]}b", capsys)
    assert ways
    assert not ACTING.search(ways)


@pytest.mark.parametrize("way", ["error", "log", "library", "screen", "lines", "S3", "notice"])
def test_foreign_line_break_cannot_fake_a_message(way: str, capsys: pytest.CaptureFixture[str]) -> None:
    ways = WAYS[way](LINE, capsys)
    assert "all is lost" in ways
    assert not [line for line in ways.splitlines() if line.startswith("error: all")]


@pytest.mark.parametrize(
    ("text", "shown", "line"),
    [
        ("plain é 漢 \N{GRINNING FACE}", "plain é 漢 \N{GRINNING FACE}", "plain é 漢 \N{GRINNING FACE}"),
        ("שלום", "שלום", "שלום"),
        ("a\tb\nc", "a\tb\nc", r"a\tb\nc"),
        ("\x1b[0m\x9b\u202e", r"\u001b[0m\u009b\u202e", r"\u001b[0m\u009b\u202e"),
    ],
)
def test_only_control_characters_are_escaped(text: str, shown: str, line: str) -> None:
    assert escape_control(text) == shown
    assert to_one_line(text) == line


def test_escaped_json_has_same_content() -> None:
    result = {"a": "".join(text for name, text in HOSTILE.items() if name != "half a character")}
    assert json.loads(escape_control(json.dumps(result, ensure_ascii=False))) == result


def test_indented_message_lines_are_unchanged() -> None:
    assert format_message("2 problems\n  one\n  two\nthree") == "2 problems\n  one\n  two\n  three"


def test_own_styles_reach_the_terminal() -> None:
    stream = io.StringIO()
    write("thought\x1b[2J", file=stream, dim=True)
    assert stream.getvalue() == "\x1b[2mthought\\u001b[2J\x1b[0m\n"


# ---------------------------------------------------------------- no other way


OWN_WAYS = {"dsreason/screen.py", "dsreason/monitor/console.py"}
NOT_SHOWN = {"dsreason/monitor/memory.py"}
"""Files that print only into a string, such as a table for a log."""


def ways_to_the_terminal(source: str) -> list[str]:
    """List the calls that print, except those of `say`, `write` and `open_console`."""
    result = []
    for node in ast.walk(ast.parse(source)):
        name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        if name in ("print", "typer.echo", "typer.secho", "click.echo", "Console", "rich.print") or re.fullmatch(
            r"sys\.std(out|err)(\.buffer)?\.write", name
        ):
            result.append(f"{node.lineno}: {name}")  # type: ignore[attr-defined]
    return result


@pytest.mark.parametrize(
    "file", sorted((ROOT / "dsreason").rglob("*.py")), ids=lambda file: str(file.relative_to(ROOT))
)
def test_all_output_goes_through_escaping_functions(file: Path) -> None:
    if str(file.relative_to(ROOT)) not in OWN_WAYS | NOT_SHOWN:
        assert ways_to_the_terminal(file.read_text()) == []


def test_unescaped_output_is_detected() -> None:
    source = "print(1)\ntyper.echo(2)\nsys.stderr.write(x)\nConsole()\nsay(3)"
    assert len(ways_to_the_terminal(source)) == 4
