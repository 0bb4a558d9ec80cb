"""Helpers for error messages that combine problems, shorten lists and suggest corrections for misspelt words."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsreason.errors import ConfigError

if TYPE_CHECKING:
    from pydantic import ValidationError


SCREEN_LINES, SCREEN_WIDTH = 40, 100
"""Size of the screen that a summary of problems must fit on: lines, and characters per line."""
PER_KIND = 3
"""Maximum number of messages of one kind in a summary of problems."""
MOST_CHARACTERS = 500
"""Maximum length of a message in a summary of problems."""
MOST_LEVELS = 100
"""Maximum nesting depth of a row's fields."""


def build_config_error(problems: Sequence[str]) -> ConfigError:
    """Build one error that lists all problems, one per line: `file: key: what is wrong; what to do`."""
    if len(problems) == 1:
        return ConfigError(problems[0])
    return ConfigError(f"{len(problems)} problems in the configuration\n" + "\n".join(f"  {text}" for text in problems))


def join_first(texts: Sequence[str], max_texts: int = 20, *, separator: str = "; ") -> str:
    """Join the first `max_texts` texts, and add the number of those remaining: `a; b; and 3 more`."""
    more = [f"and {len(texts) - max_texts} more"] if len(texts) > max_texts else []
    return separator.join([*texts[:max_texts], *more])


def summarise_problems(messages: Sequence[str]) -> list[str]:
    """Summarise messages about rows in at most a screenful of lines, grouped by kind.

    Each group has its number of messages and the first of them. Groups are in the order of their first messages. If not all
    groups fit, the last line counts the remaining messages.
    """
    groups: dict[str, list[str]] = {}
    for message in messages:
        groups.setdefault(mask_values(message), []).append(" ".join(message.split()))
    lines, num_screen_lines, num_messages = list[str](), 1, 0  # 1: the last line
    for number, (kind, group) in enumerate(groups.items()):
        block = (
            group if len(group) == 1 else [f"{len(group)} times: {kind}", *(f"  {text}" for text in group[:PER_KIND])]
        )
        block = [line if len(line) <= MOST_CHARACTERS else line[: MOST_CHARACTERS - 1] + "…" for line in block]
        num_screen_lines += sum(math.ceil(len(line) / SCREEN_WIDTH) for line in block)
        if num_screen_lines > SCREEN_LINES:
            return [*lines, f"and {len(messages) - num_messages} more, for {len(groups) - number} other reasons"]
        lines, num_messages = lines + block, num_messages + len(group)
    return lines


def mask_values(message: str) -> str:
    """Return the kind of a message about a row: without the row's location, and with quoted values, paths and numbers as "…".

    Example: `rows.jsonl, row 2 (sample '1'): image: no file /d/a.png` → `image: no file …`.
    """
    text = re.sub(r"""(?<!\w)('(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*")(?!\w)""", "…", " ".join(message.split()))
    text = re.sub(r"(?<!\w)/[^:;,()…]*\.\w{2,5}|[^\s:;,()]*/[^\s:;,()]*|[\w-]+\.[a-zA-Z]\w{1,4}(?![\w.])", "…", text)
    text = re.sub(r"\d+(\.\d+)*", "…", text)
    return re.sub(r"(^|: )[^:]*, (?:row|line) …[^:]*: ", r"\1", text, count=1)


def describe_first_problem(error: ValidationError, hide: Callable[[str], str] = str) -> str:
    """Describe the first invalid value and what it should be: `scores.bleu is 'x': input should be a valid number`.

    `hide` masks secrets. It is applied to the value before truncation, and again to the complete message.
    """
    problem = error.errors(include_url=False)[0]
    place, message = ".".join(map(str, problem["loc"])), problem["msg"][0].lower() + problem["msg"][1:]
    if problem["type"] == "missing":
        return hide(f"{place} is missing")
    return hide(f"{place} is {hide(repr(problem['input'])):.80}: {message}" if place else message)


def describe_parse_error(error: Exception) -> str:
    """Return a JSON, TOML or YAML parser's message on one line, without Python's advice for programmers about long numbers."""
    text = " ".join(str(error).split())
    return re.sub(r"Exceeds the limit \((\d+) digits\).*", r"a number of more than \1 digits", text)


def find_nearest(word: str, candidates: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the candidate most similar to `word`, or None if none is similar enough.

    Example: `find_nearest("temprature", ["temperature"])`.
    """
    matches = difflib.get_close_matches(word, list(candidates), n=1, cutoff=cutoff)
    return matches[0] if matches else None


def is_nested_deeper(value: Any, max_levels: int = MOST_LEVELS) -> bool:
    """Return whether lists and mappings are nested more than `max_levels` levels deep.

    Pickling such a value would raise RecursionError, and traversing a circular one would never end.
    """
    layer: list[Any] = [[value]]
    for _ in range(max_levels + 1):
        inner = (part for outer in layer for part in (outer.values() if isinstance(outer, dict) else outer))
        layer = list({id(part): part for part in inner if isinstance(part, (dict, list, tuple))}.values())
        if not layer:
            return False
    return True


def describe_missing_file(place: Path) -> str:
    """Describe what is wrong with a path that should be a file, for use in a message."""
    return "is not a regular file" if place.exists() else "does not exist"
