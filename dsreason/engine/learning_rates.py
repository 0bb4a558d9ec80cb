"""Learning rates by module: each parameter's learning-rate multiplier, and a table of what is trained at which rate."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations

from torch import nn

from dsreason.config.schema import OptimConfig
from dsreason.errors import ConfigError
from dsreason.models.freeze import find_similar_names
from dsreason.models.lora import A, B, get_adapted_weight, to_base_name
from dsreason.monitor.flops import count_values
from dsreason.problems import join_first

KEY = "optim.lr_multipliers"


def assign_multipliers(trained: Mapping[str, bool], multipliers: Mapping[str, float]) -> dict[str, float]:
    """Return each parameter's learning-rate multiplier: that of the narrowest pattern that matches its name, or 1.

    A pattern may match any part of a name, as in `model.freeze`. A pattern is narrower than another if all parameters that it
    matches are also matched by the other; the order and the length of the patterns do not matter.

    Args:
        trained: name → whether the parameter, or an adapter on it, is trained.
        multipliers: pattern → multiplier.

    Raises:
        ConfigError: a pattern is empty, matches nothing or applies to no trained parameter, or two patterns overlap although
            neither is narrower. The message lists all such patterns.
    """
    matches = {pattern: {name for name in trained if re.search(pattern, name)} for pattern in multipliers}
    problems = [*_find_unmatched(matches, trained), *_find_overlaps(matches)]
    widest_first = sorted(matches, key=lambda pattern: len(matches[pattern]), reverse=True)
    owners = {name: pattern for pattern in widest_first for name in matches[pattern]}
    problems = problems or [*_find_unused(matches, owners, trained)]
    if problems:
        raise ConfigError("\n".join(problems))
    return {name: multipliers[owners[name]] if name in owners else 1.0 for name in trained}


def _find_unmatched(matches: Mapping[str, Collection[str]], names: Collection[str]) -> Iterator[str]:
    for pattern in matches:
        if not pattern:
            yield f"{KEY} contains an empty pattern, which would match every parameter; remove it, or change optim.lr"
        elif not matches[pattern]:
            examples = ", ".join(find_similar_names(pattern, [*names]))
            yield (
                f"{KEY} pattern '{pattern}' matches none of {len(names)} parameters; correct or remove it; similar names: "
                f"{examples}"
            )


def _find_overlaps(matches: Mapping[str, set[str]]) -> Iterator[str]:
    for first, second in combinations(filter(None, matches), 2):
        common = matches[first] & matches[second]
        if common and matches[first] == matches[second]:
            yield f"{KEY} patterns '{first}' and '{second}' match the same {len(common)} parameters; remove one of them"
        elif common and common not in (matches[first], matches[second]):
            yield (
                f"{KEY} patterns '{first}' and '{second}' both match {join_first(sorted(common), 2, separator=', ')}, but each "
                "also matches other parameters, so neither is narrower; restrict one of them"
            )


def _find_unused(
    matches: Mapping[str, set[str]], owners: Mapping[str, str], trained: Mapping[str, bool]
) -> Iterator[str]:
    """Yield a problem for each pattern whose trained parameters are all matched by narrower patterns, or that has none."""
    for pattern, names in matches.items():
        trained_owners = {owners[name] for name in names if trained[name]}
        if not trained_owners:
            yield (
                f"{KEY} pattern '{pattern}' has no effect: none of the parameters that it matches ({len(names)}) is trained, "
                "because of model.freeze or lora; remove the pattern, or train them"
            )
        elif pattern not in trained_owners:
            narrower = " and ".join(f"'{owner}'" for owner in sorted(trained_owners))
            yield (
                f"{KEY} pattern '{pattern}' has no effect: each trained parameter that it matches also matches the narrower "
                f"{narrower}; remove '{pattern}', or restrict {narrower}"
            )


def get_multipliers(parameters: Mapping[str, nn.Parameter], optim: OptimConfig) -> dict[str, float]:
    """Return each parameter's learning-rate multiplier, by its name in the Hugging Face model, which may have adapters.

    Patterns match names in the model without adapters, and an adapter has the multiplier of the weight that it changes.

    Raises the errors of `assign_multipliers`.
    """
    trained: dict[str, bool] = {}
    for name, parameter in parameters.items():
        base_name = get_base_name(name)
        trained[base_name] = trained.get(base_name, False) or parameter.requires_grad
    multipliers = assign_multipliers(trained, optim.lr_multipliers)
    return {name: multipliers[get_base_name(name)] for name in parameters}


def get_base_name(name: str) -> str:
    """Return a parameter's name in a model without adapters; for an adapter, the name of the weight that it changes."""
    layer = name.removesuffix(A).removesuffix(B)
    return to_base_name(name) if layer == name else get_adapted_weight(layer)


@dataclass(frozen=True)
class TrainedWeight:
    """Size and learning rate of a weight with its adapter, if any, or of several weights with the same learning rate."""

    numel: int
    trained: int
    """Number of values that are trained."""
    multiplier: float | None
    """Learning-rate multiplier; None if nothing is trained."""


def describe_learning_rates(model: nn.Module, optim: OptimConfig) -> str:
    """Return a table of the modules with their number of parameters, number of trained parameters, and learning rates.

    A module is split only if its parts have different learning rates; consecutive identical layers share a row.
    """
    parameters = dict(model.named_parameters())
    multipliers = get_multipliers(parameters, optim)
    weights: dict[str, TrainedWeight] = {}
    for name, parameter in parameters.items():
        numel, is_trained = count_values(model, name, parameter), parameter.requires_grad
        weight = TrainedWeight(numel, numel * is_trained, multipliers[name] if is_trained else None)
        base_name = get_base_name(name)
        weights[base_name] = _add(weights[base_name], weight) if base_name in weights else weight
    # If the model has adapters, most modules also contain frozen weights, which are no reason to split a module.
    has_adapters = any(get_base_name(name) != to_base_name(name) for name in parameters)
    modules = [*_iter_modules(weights, "", split_frozen=not has_adapters), ("total", list(weights.values()))]
    rows = [("module", "parameters", "trained", "learning rate")]
    for module, members in modules:
        numel, trained = sum(weight.numel for weight in members), sum(weight.trained for weight in members)
        rates = {weight.multiplier: None for weight in members if weight.multiplier is not None}
        rate = "" if module == "total" else ", ".join(_format_rate(rate, optim.lr) for rate in rates) or "frozen"
        rows.append((module or "all", f"{numel:,}", f"{trained:,}", rate))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(
        f"{row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]}".rstrip() for row in rows
    )


def _format_rate(multiplier: float, lr: float) -> str:
    return f"{lr:g}" if multiplier == 1 else f"{multiplier * lr:g} ({multiplier:g} x {lr:g})"


def _add(first: TrainedWeight, second: TrainedWeight) -> TrainedWeight:
    multiplier = second.multiplier if first.multiplier is None else first.multiplier
    return TrainedWeight(first.numel + second.numel, first.trained + second.trained, multiplier)


def _iter_modules(
    weights: Mapping[str, TrainedWeight], prefix: str, *, split_frozen: bool
) -> Iterator[tuple[str, list[TrainedWeight]]]:
    """Yield the largest modules whose weights have the same multiplier, with their weights.

    Args:
        split_frozen: whether to separate frozen weights from trained ones.
    """
    if len({weight.multiplier for weight in weights.values() if split_frozen or weight.trained}) <= 1:
        yield prefix, list(weights.values())
        return
    for part, members in _merge_alike(weights).items():
        yield from _iter_modules(members, f"{prefix}.{part}" if prefix else part, split_frozen=split_frozen)


def _merge_alike(weights: Mapping[str, TrainedWeight]) -> dict[str, dict[str, TrainedWeight]]:
    """Group weights by the first part of their names, and merge consecutive layers that have the same multipliers: `0-3`."""
    parts: dict[str, dict[str, TrainedWeight]] = {}
    for name, weight in weights.items():
        part, _, remainder = name.partition(".")
        parts.setdefault(part, {})[remainder] = weight
    merged: dict[str, dict[str, TrainedWeight]] = {}
    label = ""
    for part, members in parts.items():
        previous = merged.get(label, {})
        if part.isdigit() and label.partition("-")[0].isdigit() and _have_same_multipliers(previous, members):
            del merged[label]
            members = {name: _add(previous[name], weight) for name, weight in members.items()}
            label = f"{label.partition('-')[0]}-{part}"
        else:
            label = part
        merged[label] = members
    return merged


def _have_same_multipliers(first: Mapping[str, TrainedWeight], second: Mapping[str, TrainedWeight]) -> bool:
    return {name: weight.multiplier for name, weight in first.items()} == {
        name: weight.multiplier for name, weight in second.items()
    }
