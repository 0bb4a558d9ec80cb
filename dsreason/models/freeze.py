"""Freezing parameters by regular expression."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches

from torch import nn

from dsreason.errors import ConfigError


def match_patterns(names: Iterable[str], patterns: Sequence[str]) -> set[str]:
    """The names in which any pattern is found (`re.search`, so `visual` matches `model.visual.blocks.0.…`).

    ConfigError lists every pattern that is empty, no regular expression or found in no name, with names to choose from.
    """
    names = list(names)
    matched: set[str] = set()
    problems = []
    for pattern in patterns:
        try:
            found = {name for name in names if re.search(pattern, name)}
        except re.error as error:
            problems.append(f"model.freeze pattern {pattern!r} is not a regular expression: {error}")
            continue
        if not pattern:
            problems.append("model.freeze holds an empty pattern, which would match every parameter; remove it")
        elif not found:
            examples = ", ".join(near_names(pattern, names))
            problems.append(
                f"model.freeze pattern {pattern!r} matches none of {len(names)} parameters; near: {examples}"
            )
        matched |= found
    if problems:
        raise ConfigError("\n".join(problems))
    return matched


def freeze(model: nn.Module, patterns: Sequence[str]) -> int:
    """Switch off gradients of the parameters that match; returns how many tensors that are.

    A tied embedding has one name (`….embed_tokens.weight`). ConfigError where a pattern matches nothing or nothing is
    left to train.
    """
    parameters = dict(model.named_parameters())
    matched = match_patterns(parameters, patterns)
    if parameters and len(matched) == len(parameters):
        raise ConfigError(
            f"model.freeze {list(patterns)} freezes all {len(parameters)} parameters; nothing is left to train"
        )
    for name in matched:
        parameters[name].requires_grad_(False)
    return len(matched)


def near_names(pattern: str, names: Sequence[str], count: int = 3) -> list[str]:
    """Names a mistyped pattern may have meant; where nothing is near, one name of each part of the model."""
    plain = pattern.replace("\\", "")
    prefixes = sorted({".".join(name.split(".")[:depth]) for name in names for depth in range(1, 8)})
    near = get_close_matches(plain, prefixes, n=count, cutoff=0.6)
    if near:
        return near
    words = sorted({part for name in names for part in name.split(".") if not part.isdigit()})
    near_words = get_close_matches(plain, words, n=1, cutoff=0.6)
    if near_words:
        return [name for name in names if near_words[0] in name.split(".")][:count]
    parts = {".".join(name.split(".")[:2]): name for name in reversed(names)}
    return list(parts.values())[:count]
