"""The console of tables and bars."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TextIO

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook
from rich.segment import Segment

from dsreason.screen import visible


class Visible:
    """What is to be shown, its texts without control characters; those of colours are rich's own and come later."""

    def __init__(self, shown: ConsoleRenderable) -> None:
        self.shown = shown

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for text, style, control in console.render(self.shown, options):
            yield Segment(text if control else visible(text), style, control)


class VisibleTexts(RenderHook):
    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [Visible(renderable) for renderable in renderables]


def open_console(*, file: TextIO | None = None, stderr: bool = False, highlight: bool = True) -> Console:
    """rich's, for stdout where nothing else is said. It lets control characters in cells through."""
    made = Console(file=file, stderr=stderr, highlight=highlight)
    made.push_render_hook(VisibleTexts())
    return made
