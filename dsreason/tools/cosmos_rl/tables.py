"""Tables of the findings about the keys of an imported file, and of what both configurations do."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from dsreason.monitor.console import open_console
from dsreason.tools.cosmos_rl.convert import Imported
from dsreason.tools.cosmos_rl.draft import KeyFinding, Verdict

STYLES: dict[Verdict, str] = {"not read": "magenta", "differs": "yellow", "mapped": "", "left out": "dim"}
HEADS: dict[Verdict, str] = {
    "not read": "not read by {tool}",
    "differs": "behaves differently",
    "mapped": "mapped",
    "left out": "no equivalent, ignored safely because …",
}
"""Verdict → title of its table, in which {tool} is the program's name, in display order, starting with those that need
attention. Errors are raised afterwards."""


def show(imported: Imported) -> None:
    """Print the findings about the keys and the comparison of both configurations to stderr."""
    console = open_console(stderr=True)
    for verdict in HEADS:
        findings = [finding for finding in imported.findings if finding.verdict == verdict]
        if findings:
            console.print(make_keys_table(verdict, findings, imported.tool))
    if imported.meanings:
        table = Table("", imported.tool, "dsreason", title="What they mean", box=SIMPLE_HEAD, title_justify="left")
        for meaning in imported.meanings:
            table.add_row(meaning.name, Text(meaning.cosmos_rl), Text(meaning.dsreason))
        console.print(table)


def make_keys_table(verdict: Verdict, findings: Sequence[KeyFinding], tool: str) -> Table:
    """Build the table of one verdict; keys that were left out for the same reason share a row."""
    title = f"{HEADS[verdict].format(tool=tool)} ({len(findings)})"
    table = Table(f"{tool} key", "dsreason", title=title, box=SIMPLE_HEAD, title_justify="left", style=STYLES[verdict])
    if verdict != "left out":
        for finding in findings:
            table.add_row(Text(f"{finding.key} = {finding.value!r:.60}"), Text(finding.text))
        return table
    for reason in dict.fromkeys(finding.text for finding in findings):
        keys = [f"{finding.key} = {finding.value!r:.40}" for finding in findings if finding.text == reason]
        shown_cells = (
            keys if len(keys) <= MOST_KEYS else [*keys[: MOST_KEYS - 1], f"and {len(keys) - MOST_KEYS + 1} more"]
        )
        table.add_row(Text("\n".join(shown_cells)), Text(reason))
    return table


MOST_KEYS = 12
"""Maximum number of lines per reason: keys, and possibly a final "and N more"."""
