"""Functions that freeze the parameters whose names match regular expressions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches

from torch import nn

from dsreason.errors import ConfigError


def check_freeze(names: Iterable[str], patterns: Sequence[str]) -> set[str]:
    """Return the names of the parameters to freeze, which match any pattern (`re.search`: `visual` matches `model.visual.…`).

    Raises:
        ConfigError: a pattern is empty or matches no name (the message lists all such patterns, with similar names), or the
            patterns match all parameters.
    """
    names = list(names)
    matched: set[str] = set()
    problems = []
    for pattern in patterns:
        matches = {name for name in names if re.search(pattern, name)}
        if not pattern:
            problems.append("model.freeze contains an empty pattern, which would match every parameter; remove it")
        elif not matches:
            examples = ", ".join(find_similar_names(pattern, names))
            problems.append(
                f"model.freeze pattern '{pattern}' matches none of {len(names)} parameters; similar names: {examples}"
            )
        matched |= matches
    if problems:
        raise ConfigError("\n".join(problems))
    if names and len(matched) == len(names):
        raise ConfigError(f"model.freeze ({', '.join(patterns)}) freezes all {len(names)} parameters; remove a pattern")
    return matched


def freeze(model: nn.Module, patterns: Sequence[str]) -> int:
    """Disable gradients for the parameters that match a pattern, and return their number; raise the errors of `check_freeze`.

    A tied embedding is matched by only one name (`….embed_tokens.weight`).
    """
    parameters = dict(model.named_parameters())
    matched = check_freeze(parameters, patterns)
    for name in matched:
        parameters[name].requires_grad_(False)
    return len(matched)


def find_similar_names(pattern: str, names: Sequence[str]) -> list[str]:
    """Return the names most similar to a mistyped pattern or, if no name is similar, one name from each part of the model."""
    plain = re.sub(r"\.?[*+]|[\\^$?()\[\]|]", "", pattern).strip(".")
    prefixes = {".".join(name.split(".")[: depth + 1]): None for name in names for depth in range(name.count(".") + 1)}
    words = {word: None for prefix in prefixes for word in prefix.split(".") if not word.isdigit()}
    parts = {".".join(name.split(".")[:2]): name for name in reversed(names)}  # the first name in each part
    return get_close_matches(plain, [*prefixes, *words], n=3, cutoff=0.5) or [*reversed(parts.values())][:3]
