"""A rich console for tables and progress bars that removes control characters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TextIO

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook
from rich.segment import Segment

from dsreason.screen import escape_control


class Visible:
    """A renderable that removes control characters from its text; rich adds its own, for colours, afterwards."""

    def __init__(self, content: ConsoleRenderable) -> None:
        self.content = content

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for text, style, control in console.render(self.content, options):
            yield Segment(text if control else escape_control(text), style, control)


class VisibleTexts(RenderHook):
    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [Visible(renderable) for renderable in renderables]


def open_console(*, file: TextIO | None = None, stderr: bool = False, highlight: bool = True) -> Console:
    """Open a rich console, by default for stdout, that removes control characters; rich itself leaves them in table cells."""
    console = Console(file=file, stderr=stderr, highlight=highlight)
    console.push_render_hook(VisibleTexts())
    return console
