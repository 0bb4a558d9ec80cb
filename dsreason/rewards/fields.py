"""A reward for answers that are JSON objects; each field is compared separately."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dsreason.data.types import Sample
from dsreason.errors import ConfigError
from dsreason.problems import find_nearest
from dsreason.rewards.grounding import SLACK, box_iou, points, temporal_iou
from dsreason.rewards.numeric import numeric
from dsreason.rewards.options import RewardValue, Share, check_values, get_defaults
from dsreason.rewards.reading.plain import find_json_values, get_answer, to_finite_float
from dsreason.rewards.reading.reference import build_data_error, read_reference
from dsreason.rewards.trajectory import trajectory
from dsreason.text import normalize_answer

REWARDS: dict[str, Callable[..., RewardValue]] = {
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
) -> RewardValue:
    """Return the weighted mean score, 0 to 1, over all compared fields in the answer's JSON object.

    The object may be inside a code block or surrounded by text; the last object counts. A missing field scores 0, and so does
    an answer without an object.

    Args:
        fields: name → comparison, or name → `{compare, weight, …}` with the comparison's options; `a.b` is the field `b`
            inside `a`. Comparisons are `exact` (equal JSON; 1 equals 1.0), `text` (ignores case, white space and a final
            full stop), `set` (F1 score over list items, compared as texts in any order), and the rewards `numeric`,
            `temporal_iou`, `box_iou`, `points` and `trajectory`. By default, all fields in the reference are compared:
            numbers with `numeric`, texts with `text`, lists of texts with `set`, and everything else with `exact`.
        threshold: return 1 if the mean is at least this value, else 0; 1.0 requires every field to be correct.
        no_others: return 0 if the answer has a field that the reference lacks.
        metrics: also return `read` (whether the answer contains an object) and each field's score.
    """
    right = read_reference(sample, find_last_object, "JSON object")
    answer = find_last_object(get_answer(completion))
    compared = (
        parse_fields(fields)
        if fields is not None
        else {name: Field(choose_comparison(value)) for name, value in right.items()}
    )
    if absent := [name for name in compared if get_value(right, name) is MISSING]:
        raise build_data_error(sample, f"has no field {absent[0]}, but reward.options.json_fields.fields lists it")
    if not compared:
        raise build_data_error(sample, "is an object without fields")
    scores = {
        name: compare(how, get_value(right, name), MISSING if answer is None else get_value(answer, name), sample, name)
        for name, how in compared.items()
    }
    total = sum(how.weight for how in compared.values())
    reward = sum(how.weight * scores[name] for name, how in compared.items()) / total
    if answer is not None and no_others and answer.keys() - right.keys():
        reward = 0.0
    if threshold is not None:
        reward = float(reward >= threshold - SLACK)
    return (reward, {"read": float(answer is not None)} | scores) if metrics else reward


def find_last_object(text: str) -> dict[str, Any] | None:
    return next((value for value in reversed(find_json_values(text)) if isinstance(value, dict)), None)


def get_value(values: dict[str, Any], name: str) -> Any:
    """Return the field `name` (`a.b` is the field `b` inside `a`), or MISSING if it does not exist."""
    if name in values:
        return values[name]
    first, dot, remainder = name.partition(".")
    inside = values.get(first)
    return get_value(inside, remainder) if dot and isinstance(inside, dict) else MISSING


def choose_comparison(value: Any) -> str:
    """Return the default comparison for a value in the reference."""
    if isinstance(value, list):
        return "set" if value and all(isinstance(item, str) for item in value) else "exact"
    return "text" if isinstance(value, str) else "numeric" if to_finite_float(value) is not None else "exact"


def compare(how: Field, right: Any, value: Any, sample: Sample, name: str) -> float:
    """Return a score, 0 to 1, for a field's `value` in the answer.

    Raise DataError if the value in the reference does not suit the comparison.
    """
    if how.compare == "set" and not isinstance(right, list):
        raise build_data_error(sample, f"has a field {name} that is compared as a set, but is not a list")
    if how.compare in REWARDS:
        field_sample = replace(sample, answer=to_text(right), id=f"{sample.id}, field {name}")
        reward = REWARDS[how.compare]("" if value is MISSING else to_text(value), field_sample, **how.options)
        return reward[0] if isinstance(reward, tuple) else reward
    if value is MISSING:
        return 0.0
    if how.compare == "text":
        return float(normalize_answer(to_text(value)) == normalize_answer(to_text(right)))
    return compute_item_f1(value, right) if how.compare == "set" else float(is_equal(value, right))


def to_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def compute_item_f1(value: Any, right: list[Any]) -> float:
    """Return the F1 score over the items of two lists, compared as texts in any order; 0 if `value` is not a list."""
    if not isinstance(value, list):
        return 0.0
    answer_counts, reference_counts = (
        Counter(normalize_answer(to_text(item)) for item in items) for items in (value, right)
    )
    num_shared = (answer_counts & reference_counts).total()
    return 2 * num_shared / (len(value) + len(right)) if value or right else 1.0


def is_equal(first: Any, second: Any) -> bool:
    """Return whether two JSON values are equal. Unlike in Python, `true` does not equal 1."""
    if isinstance(first, bool) or isinstance(second, bool):
        return first is second
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(is_equal(value, second[key]) for key, value in first.items())
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(is_equal, first, second))
    return bool(first == second)


# ---------------------------------------------------------------- the option `fields`


def parse_fields(fields: Mapping[str, Any]) -> dict[str, Field]:
    return {name: Field(how) if isinstance(how, str) else parse_field(how) for name, how in fields.items()}


def parse_field(how: Mapping[str, Any]) -> Field:
    options = {key: value for key, value in how.items() if key not in ("compare", "weight")}
    return Field(how["compare"], how.get("weight", 1.0), options)


def check_fields(fields: Mapping[str, Any]) -> None:
    """Raise ConfigError if the `fields` option of `json_fields` is invalid; the message names the field and the valid values."""
    place = "reward option json_fields.fields"
    if not fields:
        raise ConfigError(f"{place} is empty; add a field, or remove it to compare all fields of the reference")
    for name, how in fields.items():
        compare = how.get("compare") if isinstance(how, dict) else how
        if compare not in COMPARISONS:
            near = find_nearest(str(compare), COMPARISONS)
            hint = f"; did you mean {near}?" if near else ""
            raise ConfigError(
                f"{place}.{name} must be compared by one of {', '.join(COMPARISONS)}; got {compare!r}{hint}"
            )
        field = parse_field(how) if isinstance(how, dict) else Field(compare)
        if isinstance(field.weight, bool) or not isinstance(field.weight, int | float) or not 0 < field.weight < 1e9:
            raise ConfigError(f"{place}.{name}.weight must be a number above 0 and below 1e9; got {field.weight!r}")
        defaults = get_defaults(REWARDS[compare]) if compare in REWARDS else {}
        if unknown := [key for key in field.options if key not in defaults]:
            allowed = ", ".join(["compare", "weight", *defaults])
            raise ConfigError(f"{place}.{name} has the unknown option {unknown[0]}; {compare} accepts {allowed}")
        if compare in REWARDS:
            check_values(REWARDS[compare], field.options, f"json_fields.fields.{name}")
