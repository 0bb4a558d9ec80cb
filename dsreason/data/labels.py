"""The labels of rows, and an order that shows each of them equally often."""

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
from dsreason.data.messages import text_of
from dsreason.data.options import option_letter
from dsreason.data.order import Part
from dsreason.data.sources import SampleDataset
from dsreason.data.types import Sample
from dsreason.errors import DataError
from dsreason.problems import listed
from dsreason.text import split_response

log = logging.getLogger(__name__)

SHORT_ANSWER = 40
"""Longest answer in characters that counts as a label."""
MANY_TIMES = 10
"""A row that an epoch shows more often than this is worth a warning."""


@dataclass(frozen=True)
class Label:
    """Example: of 10 rows 8 are "no" and 2 "yes"; then `Label(rows=2, per_epoch=5)` is of "yes"."""

    rows: int
    per_epoch: int
    """Rows of this label that an epoch shows."""


def answer_label(sample: Sample) -> str | None:
    """The letter of the option that the sample's answer gives, else a short answer; None if it is a longer text or none.

    The answer is `sample.answer`, else a last message of the assistant.
    """
    last = sample.messages[-1] if sample.messages else {}
    reply = text_of(last) if last.get("role") == "assistant" else ""
    answer = sample.answer or reply
    return option_letter(answer, sample.options or {}) or short_answer(answer)


def short_answer(text: str) -> str | None:
    """Return what stands in `<answer>` tags, else behind the thoughts; None if that is a longer text or none."""
    answer = split_response(text).answer
    return answer if 0 < len(answer) <= SHORT_ANSWER and "\n" not in answer else None


def order_parts(dataset: SampleDataset, data: DataConfig) -> list[Part]:
    """Return what `StepOrder` takes: the sources with their weights, or their rows by label where `data.balance` asks for it.

    Raises:
        DataError: a row without a label, unless `data.on_bad_row` leaves it out.
    """
    if data.balance is None:
        return dataset.weighted_parts
    by_label = balance(dataset.weighted_parts, labels_of(dataset, data))
    labels = count_labels(by_label)
    log.info("data.balance: %d labels, of each %d rows an epoch", len(labels), next(iter(labels.values())).per_epoch)
    rare = [
        f"{name!r} ({label.rows} rows, each {label.per_epoch / label.rows:.0f} times)"
        for name, label in labels.items()
        if label.per_epoch > MANY_TIMES * label.rows
    ]
    if rare:
        log.warning("data.balance: few rows come often in an epoch; more of these would teach more: %s", listed(rare))
    return [part for parts in by_label.values() for part in parts]


def labels_per_epoch(dataset: SampleDataset, data: DataConfig) -> dict[str, Label]:
    """By label, where `data.balance` asks for one. Errors: as `order_parts`."""
    if data.balance is None:
        return {}
    return count_labels(balance(dataset.weighted_parts, labels_of(dataset, data)))


def balance(parts: Sequence[Part], labels: Sequence[str | None]) -> dict[str, list[Part]]:
    """By label the rows of each part, with weights that give every label the same number of rows in an epoch.

    Rows whose label is None are left out. An epoch has as many rows as the others have without labels, rounded up to a
    multiple of the labels. Within a label the weights of the parts keep their proportion.

    Args:
        labels: of every row, by its number.
    """
    names = sorted({label for label in labels if label is not None})
    numbers = {name: number for number, name in enumerate(names)}
    column = np.array([-1 if label is None else numbers[label] for label in labels])
    labelled = [Part(part.rows[column[part.rows] >= 0], part.weight) for part in parts]
    per_label = math.ceil(sum(part.per_epoch for part in labelled) / max(1, len(names)))
    return {name: share(parts, column == number, per_label) for name, number in numbers.items()}


def share(parts: Sequence[Part], chosen: NDArray[np.bool_], count: int) -> list[Part]:
    """The chosen rows of each part, weighted so that an epoch shows `count` of them in all."""
    rows = [part.rows[chosen[part.rows]] for part in parts]
    cumulative = np.cumsum([part.weight * len(indices) for part, indices in zip(parts, rows, strict=True)])
    counts = np.diff(np.rint(cumulative / cumulative[-1] * count), prepend=0.0)
    return [
        Part(indices, float(number) / len(indices))
        for indices, number in zip(rows, counts, strict=True)
        if len(indices)
    ]


def count_labels(by_label: dict[str, list[Part]]) -> dict[str, Label]:
    return {
        name: Label(sum(len(part.rows) for part in parts), sum(part.per_epoch for part in parts))
        for name, parts in by_label.items()
    }


def labels_of(dataset: SampleDataset, data: DataConfig) -> list[str | None]:
    """The label of every row; None where `data.on_bad_row` leaves out a row that has none. Media are not looked at.

    What differs in case or a last full stop only is one label, written as in its first row.

    Raises:
        DataError: a row without a label that is not left out, or no row with one.
    """
    labels: list[str | None] = []
    reasons: Counter[str] = Counter()
    examples: dict[str, str] = {}
    first: dict[str, str] = {}
    for index in range(len(dataset)):
        try:
            label = label_of(dataset.without_media(index), str(data.balance))
        except DataError as error:
            where = dataset.location(index)
            reason = str(error).removeprefix(f"{where}: ")
            if data.on_bad_row == "error":
                raise DataError(f"{where}: data.balance ({data.balance}): {reason}") from error
            reasons[reason] += 1
            examples.setdefault(reason, where)
            labels.append(None)
        else:
            labels.append(first.setdefault(label_key(label), label))
    summaries = [f"{count} rows, such as {examples[reason]}: {reason}" for reason, count in reasons.most_common()]
    if not first:
        raise DataError(f"data.balance ({data.balance}): no row has such a label: {listed(summaries)}")
    if summaries:
        log.warning(
            "data.balance (%s): %d rows have no label and are left out:\n  %s",
            data.balance,
            reasons.total(),
            listed(summaries, separator="\n  "),
        )
    return labels


def label_key(label: str) -> str:
    """Return what is the same of labels that differ in case or a last full stop only."""
    return label.rstrip(".").casefold()


def label_of(sample: Sample, field: str) -> str:
    """`answer`: see `answer_label`; else a value of `sample.meta`, `label.weather` one inside another.

    Raises:
        DataError: it has none.
    """
    if field == "answer":
        answer = answer_label(sample)
        if answer is None:
            raise DataError(
                f"the row has no answer of at most {SHORT_ANSWER} characters, which could be a label; "
                "name another field of the rows"
            )
        return answer
    value = value_at(sample.meta, field)
    if not isinstance(value, str | int | float) or value == "":
        raise DataError(
            f"sample.meta has no text or number as {field}; name a field that has one "
            f"(there are {', '.join(fields_of(sample.meta)) or 'none'}), or answer"
        )
    return str(value)


def fields_of(values: dict[str, Any]) -> list[str]:
    """The names of all texts and numbers: `{"id": 1, "label": {"weather": "rain"}}` has `id` and `label.weather`."""
    names: list[str] = []
    for name, value in values.items():
        if isinstance(value, dict):
            names += [f"{name}.{inner}" for inner in fields_of(value)]
        elif isinstance(value, str | int | float):
            names.append(name)
    return names


def value_at(values: Any, field: str) -> Any:
    """Of `a.b` the value under that key, else the value of `b` in that of `a`; None if there is none."""
    if not isinstance(values, dict):
        return None
    if field in values:
        return values[field]
    outer, dot, inner = field.partition(".")
    return value_at(values.get(outer), inner) if dot else None
