"""Several problems as one error, the first of many, and the nearest word to a misspelt one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from dsreason.errors import ConfigError


def config_error(problems: Sequence[str]) -> ConfigError:
    """One error that lists all problems: `file: key: what, with both values; what to do`, one a line."""
    if len(problems) == 1:
        return ConfigError(problems[0])
    return ConfigError(f"{len(problems)} problems in the configuration\n" + "\n".join(f"  {text}" for text in problems))


def listed(texts: Sequence[str], most: int = 20, *, separator: str = "; ") -> str:
    """The first of them, and how many more there are: `a; b; and 3 more`."""
    more = [f"and {len(texts) - most} more"] if len(texts) > most else []
    return separator.join([*texts[:most], *more])


def nearest(word: str, candidates: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The candidate most like `word`, or None where none is alike: `nearest("temprature", ["temperature"])`."""
    matches = difflib.get_close_matches(word, list(candidates), n=1, cutoff=cutoff)
    return matches[0] if matches else None
