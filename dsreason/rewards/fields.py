"""A reward for answers that are a JSON object: each field is compared in its own way."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dsreason.data.types import Sample
from dsreason.errors import ConfigError
from dsreason.problems import nearest
from dsreason.rewards.grounding import SLACK, box_iou, points, temporal_iou
from dsreason.rewards.numeric import numeric
from dsreason.rewards.options import Share, Worth, check_values, defaults_of
from dsreason.rewards.reading.plain import answer_of, finite, json_values
from dsreason.rewards.reference import reference, unusable
from dsreason.rewards.trajectory import trajectory
from dsreason.text import normalized_answer

REWARDS: dict[str, Callable[..., Worth]] = {
    "numeric": numeric,
    "temporal_iou": temporal_iou,
    "box_iou": box_iou,
    "points": points,
    "trajectory": trajectory,
}
COMPARISONS = ("exact", "text", "set", *REWARDS)
MISSING = object()


@dataclass(frozen=True)
class Field:
    """How one field is compared. Example: `Field("numeric", weight=2.0, options={"relative": 0.1})`."""

    compare: str
    weight: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)


def json_fields(
    completion: str,
    sample: Sample,
    *,
    fields: dict[str, Any] | None = None,
    threshold: Share | None = None,
    no_others: bool = False,
    metrics: bool = False,
) -> Worth:
    """The weighted mean of how well each field of the answer's JSON object is the reference's, 0 to 1.

    The object may stand in a code block or in other text; of several the last counts. A field that is missing is worth 0,
    and so is an answer without an object.

    Args:
        fields: name → comparison, or → `{compare, weight, …}` with the comparison's own options; `a.b` is the field `b`
            inside `a`. Comparisons are `exact` (the same JSON; 1 and 1.0 are), `text` (case, white space and a final full
            stop aside), `set` (F1 of the items of a list, as texts, their order aside), and the rewards `numeric`,
            `temporal_iou`, `box_iou`, `points` and `trajectory`. Where it is not given all of the reference's are compared:
            numbers by `numeric`, texts by `text`, lists of texts by `set`, others by `exact`.
        threshold: the reward is 1 from this mean on, else 0; 1.0 wants every field right.
        no_others: an answer with a field that the reference has not is worth 0.
        metrics: also return `read` and the worth of each field.
    """
    right = reference(sample, last_object, "JSON object")
    answer = last_object(answer_of(completion))
    compared = (
        given_fields(fields) if fields is not None else {name: Field(usual(value)) for name, value in right.items()}
    )
    if absent := [name for name in compared if value_at(right, name) is MISSING]:
        raise unusable(sample, f"without the field {absent[0]}, which reward.options.json_fields.fields names")
    if not compared:
        raise unusable(sample, "an object without fields")
    worths = {
        name: compare(how, value_at(right, name), MISSING if answer is None else value_at(answer, name), sample, name)
        for name, how in compared.items()
    }
    total = sum(how.weight for how in compared.values())
    worth = sum(how.weight * worths[name] for name, how in compared.items()) / total
    if answer is not None and no_others and answer.keys() - right.keys():
        worth = 0.0
    if threshold is not None:
        worth = float(worth >= threshold - SLACK)
    return (worth, {"read": float(answer is not None)} | worths) if metrics else worth


def last_object(text: str) -> dict[str, Any] | None:
    return next((value for value in reversed(json_values(text)) if isinstance(value, dict)), None)


def value_at(found: dict[str, Any], name: str) -> Any:
    """Return what stands under `name`, or under `a.b` inside `a`; MISSING where nothing does."""
    if name in found:
        return found[name]
    first, dot, remainder = name.partition(".")
    inside = found.get(first)
    return value_at(inside, remainder) if dot and isinstance(inside, dict) else MISSING


def usual(value: Any) -> str:
    if isinstance(value, list):
        return "set" if value and all(isinstance(item, str) for item in value) else "exact"
    return "text" if isinstance(value, str) else "numeric" if finite(value) is not None else "exact"


def compare(how: Field, right: Any, given: Any, sample: Sample, name: str) -> float:
    """0 to 1. DataError if the reference's value is nothing that can be compared so."""
    if how.compare == "set" and not isinstance(right, list):
        raise unusable(sample, f"whose field {name} is no list, and is compared as a set")
    if how.compare in REWARDS:
        field_sample = replace(sample, answer=as_text(right), id=f"{sample.id}, field {name}")
        worth = REWARDS[how.compare]("" if given is MISSING else as_text(given), field_sample, **how.options)
        return worth[0] if isinstance(worth, tuple) else worth
    if given is MISSING:
        return 0.0
    if how.compare == "text":
        return float(normalized_answer(as_text(given)) == normalized_answer(as_text(right)))
    return item_f1(given, right) if how.compare == "set" else float(same(given, right))


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def item_f1(given: Any, right: list[Any]) -> float:
    if not isinstance(given, list):
        return 0.0
    answer_counts, reference_counts = (
        Counter(normalized_answer(as_text(item)) for item in items) for items in (given, right)
    )
    both = (answer_counts & reference_counts).total()
    return 2 * both / (len(given) + len(right)) if given or right else 1.0


def same(one: Any, other: Any) -> bool:
    """Equal JSON. Of Python's equality it has not that True is 1."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


# ---------------------------------------------------------------- the option


def given_fields(fields: Mapping[str, Any]) -> dict[str, Field]:
    return {name: Field(how) if isinstance(how, str) else parted(how) for name, how in fields.items()}


def parted(how: Mapping[str, Any]) -> Field:
    options = {key: value for key, value in how.items() if key not in ("compare", "weight")}
    return Field(how["compare"], how.get("weight", 1.0), options)


def check_fields(fields: Mapping[str, Any]) -> None:
    """Raise ConfigError if the option `fields` of `json_fields` is none; the text names the field and what may stand there."""
    place = "reward option json_fields.fields"
    if not fields:
        raise ConfigError(f"{place} is empty; name a field, or leave it out to compare all of the reference's")
    for name, how in fields.items():
        compare = how.get("compare") if isinstance(how, dict) else how
        if compare not in COMPARISONS:
            near = nearest(str(compare), COMPARISONS)
            hint = f"; did you mean {near}?" if near else ""
            raise ConfigError(
                f"{place}.{name} compares by {compare!r}, which is none of {', '.join(COMPARISONS)}{hint}"
            )
        field = parted(how) if isinstance(how, dict) else Field(compare)
        if isinstance(field.weight, bool) or not isinstance(field.weight, int | float) or not 0 < field.weight < 1e9:
            raise ConfigError(f"{place}.{name}.weight ({field.weight!r}): must be a number above 0")
        defaults = defaults_of(REWARDS[compare]) if compare in REWARDS else {}
        if unknown := [key for key in field.options if key not in defaults]:
            allowed = ", ".join(["compare", "weight", *defaults])
            raise ConfigError(f"{place}.{name} has {unknown[0]}, which {compare} does not know; it may have {allowed}")
        if compare in REWARDS:
            check_values(REWARDS[compare], field.options, f"json_fields.fields.{name}")
