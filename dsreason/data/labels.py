"""Labels of rows, and row weights that make all labels equally frequent in an epoch."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsreason.config.schema_data import DataConfig
from dsreason.data.messages import get_text
from dsreason.data.options import find_option_letter
from dsreason.data.order import WeightedRows
from dsreason.data.sources import SampleDataset
from dsreason.data.types import Sample
from dsreason.errors import DataError
from dsreason.problems import join_first
from dsreason.text import split_response

log = logging.getLogger(__name__)

SHORT_ANSWER = 40
"""Maximum number of characters in an answer that counts as a label."""
MANY_TIMES = 10
"""Number of times that a row may appear in an epoch before a warning is logged."""


@dataclass(frozen=True)
class Label:
    """Row counts for a label. Example: with 8 rows labelled "no" and 2 labelled "yes", "yes" has `Label(rows=2, per_epoch=5)`."""

    rows: int
    per_epoch: int
    """Number of rows with this label in an epoch, including repetitions."""


def get_answer_label(sample: Sample) -> str | None:
    """Return the option letter that the sample's answer selects, or else the answer itself; None if it is missing or too long.

    The answer is `sample.answer` or, if that is not set, the final assistant message.
    """
    last = sample.messages[-1] if sample.messages else {}
    reply = get_text(last) if last.get("role") == "assistant" else ""
    answer = sample.answer or reply
    return find_option_letter(answer, sample.options or {}) or extract_short_answer(answer)


def extract_short_answer(text: str) -> str | None:
    """Return the text in the `<answer>` tags, or else after the reasoning; None if it is empty, too long or multi-line."""
    answer = split_response(text).answer
    return answer if 0 < len(answer) <= SHORT_ANSWER and "\n" not in answer else None


def build_order_parts(dataset: SampleDataset, data: DataConfig) -> list[WeightedRows]:
    """Return the weighted parts for `StepOrder`: one per source or, if `data.balance` is set, one per label and source.

    Raises:
        DataError: a row has no label and `data.on_bad_row` is "error", or no row has a label.
    """
    if data.balance is None:
        return dataset.weighted_parts
    by_label = balance_labels(dataset.weighted_parts, read_labels(dataset, data))
    labels = count_labels(by_label)
    log.info("data.balance: %d labels, each with %d rows per epoch", len(labels), next(iter(labels.values())).per_epoch)
    rare = [
        f"{name!r} ({label.rows} rows, each {label.per_epoch / label.rows:.0f} times)"
        for name, label in labels.items()
        if label.per_epoch > MANY_TIMES * label.rows
    ]
    if rare:
        log.warning(
            "data.balance: some labels have so few rows that each is repeated many times per epoch; add rows with "
            "these labels: %s",
            join_first(rare),
        )
    return [part for parts in by_label.values() for part in parts]


def count_labels_per_epoch(dataset: SampleDataset, data: DataConfig) -> dict[str, Label]:
    """Return the row counts for each label; {} if `data.balance` is unset. Raise the same errors as `build_order_parts`."""
    if data.balance is None:
        return {}
    return count_labels(balance_labels(dataset.weighted_parts, read_labels(dataset, data)))


def balance_labels(parts: Sequence[WeightedRows], labels: Sequence[str | None]) -> dict[str, list[WeightedRows]]:
    """Group each part's rows by label, with weights that give every label the same number of rows per epoch.

    Rows whose label is None are skipped. An epoch has the same number of rows as an unbalanced epoch over the labelled rows,
    rounded up to a multiple of the number of labels. Within a label, the parts keep the ratio of their weights.

    Args:
        labels: the label of each row, by row index.
    """
    names = sorted({label for label in labels if label is not None})
    numbers = {name: number for number, name in enumerate(names)}
    column = np.array([-1 if label is None else numbers[label] for label in labels])
    labelled = [WeightedRows(part.rows[column[part.rows] >= 0], part.weight) for part in parts]
    per_label = math.ceil(sum(part.per_epoch for part in labelled) / max(1, len(names)))
    return {name: reweight_rows(parts, column == number, per_label) for name, number in numbers.items()}


def reweight_rows(parts: Sequence[WeightedRows], chosen: NDArray[np.bool_], count: int) -> list[WeightedRows]:
    """Return each part's rows that the mask `chosen` selects, with weights such that an epoch contains `count` of them."""
    rows = [part.rows[chosen[part.rows]] for part in parts]
    cumulative = np.cumsum([part.weight * len(indices) for part, indices in zip(parts, rows, strict=True)])
    counts = np.diff(np.rint(cumulative / cumulative[-1] * count), prepend=0.0)
    return [
        WeightedRows(indices, float(number) / len(indices))
        for indices, number in zip(rows, counts, strict=True)
        if len(indices)
    ]


def count_labels(by_label: dict[str, list[WeightedRows]]) -> dict[str, Label]:
    return {
        name: Label(sum(len(part.rows) for part in parts), sum(part.per_epoch for part in parts))
        for name, parts in by_label.items()
    }


def read_labels(dataset: SampleDataset, data: DataConfig) -> list[str | None]:
    """Return the label of every row; None for a row without a label, if `data.on_bad_row` allows skipping such rows.

    Labels that differ only in case or in a final full stop are merged under the spelling that occurs first. Media files are not
    opened.

    Raises:
        DataError: a row has no label and `data.on_bad_row` is "error", or no row has a label.
    """
    labels: list[str | None] = []
    reasons: Counter[str] = Counter()
    examples: dict[str, str] = {}
    first: dict[str, str] = {}
    for index in range(len(dataset)):
        try:
            label = get_label(dataset.read_without_media(index), str(data.balance))
        except DataError as error:
            location = dataset.describe_location(index)
            reason = str(error).removeprefix(f"{location}: ")
            if data.on_bad_row == "error":
                raise DataError(f"{location}: data.balance ({data.balance}): {reason}") from error
            reasons[reason] += 1
            examples.setdefault(reason, location)
            labels.append(None)
        else:
            labels.append(first.setdefault(normalise_label(label), label))
    summaries = [f"{count} rows, such as {examples[reason]}: {reason}" for reason, count in reasons.most_common()]
    if not first:
        raise DataError(f"data.balance ({data.balance}): no row has a usable label: {join_first(summaries)}")
    if summaries:
        log.warning(
            "data.balance (%s): %d rows have no label and are skipped:\n  %s",
            data.balance,
            reasons.total(),
            join_first(summaries, separator="\n  "),
        )
    return labels


def normalise_label(label: str) -> str:
    """Return the label in lower case and without final full stops, for comparisons that ignore both."""
    return label.rstrip(".").casefold()


def get_label(sample: Sample, field: str) -> str:
    """Return a sample's label: the result of `get_answer_label` if `field` is "answer", else the field's value in `sample.meta`.

    Raises:
        DataError: the sample has no such label.
    """
    if field == "answer":
        answer = get_answer_label(sample)
        if answer is None:
            raise DataError(
                f"the row has no one-line answer of at most {SHORT_ANSWER} characters to use as a label; "
                "choose another field"
            )
        return answer
    value = get_value(sample.meta, field)
    if not isinstance(value, str | int | float) or value == "":
        raise DataError(
            f"sample.meta has no string or number named {field}; choose answer or one of the available fields "
            f"({', '.join(list_fields(sample.meta)) or 'none'})"
        )
    return str(value)


def list_fields(values: dict[str, Any]) -> list[str]:
    """List the fields with strings or numbers: `{"id": 1, "label": {"weather": "rain"}}` → `["id", "label.weather"]`."""
    names: list[str] = []
    for name, value in values.items():
        if isinstance(value, dict):
            names += [f"{name}.{inner}" for inner in list_fields(value)]
        elif isinstance(value, str | int | float):
            names.append(name)
    return names


def get_value(values: Any, field: str) -> Any:
    """Return the value of the key `a.b` or, if it does not exist, of the key `b` in the object `a`; None if neither exists."""
    if not isinstance(values, dict):
        return None
    if field in values:
        return values[field]
    outer, dot, inner = field.partition(".")
    return get_value(values.get(outer), inner) if dot else None
