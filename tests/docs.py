"""The examples in README.md and docs/: their fenced blocks, read by the tests that run them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "AGENTS.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
FENCE = re.compile(r"^```(\S*) ?([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """```` ```toml sft run.toml ```` is `Block(…, language="toml", words=("sft", "run.toml"))`."""

    page: Path
    line: int
    language: str
    words: tuple[str, ...]
    text: str

    @property
    def name(self) -> str:
        return f"{self.page.name}:{self.line}"

    @property
    def file(self) -> str | None:
        """The file that a reader would write it to."""
        return next((word for word in self.words if "." in word), None)


def blocks(*languages: str, page: Path | None = None) -> list[Block]:
    """The blocks in these languages, all of them without one."""
    result = []
    for item in [page] if page else PAGES:
        text = item.read_text(encoding="utf-8")
        for match in FENCE.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            result.append(Block(item, line, match[1], tuple(match[2].split()), match[3]))
    return [block for block in result if not languages or block.language in languages]


def write_files(page: Path, folder: Path) -> None:
    """Write the page's named blocks, and those of README.md that it does not have, into `folder`."""
    for item in (PAGES[0], page):
        for block in blocks(page=item):
            if block.file is not None:
                (folder / block.file).write_text(block.text, encoding="utf-8")


def commands(page: Path) -> Iterator[tuple[int, list[str]]]:
    """(line, words) of each command of a page, without comments and the variables in front."""
    for block in blocks("sh", page=page):
        for number, line in enumerate(block.text.splitlines(), block.line + 1):
            words = shlex.split(line, comments=True)
            while words and re.match(r"[A-Z_]+=", words[0]):
                words.pop(0)
            if words:
                yield number, words
