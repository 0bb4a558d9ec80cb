"""What can be found wrong before a model is loaded: data rows, media, model folder, freeze patterns."""

from __future__ import annotations

import logging
import time

from dsreason.config.schema import SFTConfig
from dsreason.data.chat import Encoder, SampleTooLong
from dsreason.data.order import StepOrder
from dsreason.data.sources import SampleDataset
from dsreason.errors import DataError

log = logging.getLogger(__name__)

MAX_SECONDS = 30.0
"""Budget for looking at rows one by one; in larger data sets the rest is met while training."""


def check_rows(dataset: SampleDataset, encoder: Encoder, config: SFTConfig, name: str) -> list[str]:
    """Read every row's text and media header (no decoding), in an order that spreads over the data set.

    Returns the rows that `data.on_bad_row` or `model.on_too_long` leave out, one text each.

    Raises:
        DataError: the first unusable rows, where they are errors.
    """
    bad: list[str] = []
    deadline = time.monotonic() + MAX_SECONDS
    checked = 0
    for index in spread(len(dataset)):
        if time.monotonic() > deadline:
            log.info("%s: looked at %d of %d rows before training; the rest is checked on use", name, checked, len(dataset))
            break
        checked += 1
        try:
            encoder.measure(dataset[index])
        except DataError as error:
            keep_going = config.model.on_too_long if isinstance(error, SampleTooLong) else config.data.on_bad_row
            if keep_going == "error":
                raise
            bad.append(str(error))
    return bad


def spread(count: int) -> list[int]:
    """0 … count - 1, coarse to fine, so that a time limit still sees the whole range: 5 → [0, 4, 2, 1, 3]."""
    order: dict[int, None] = {}
    step = max(1, count - 1)
    while len(order) < count:
        order.update(dict.fromkeys(range(0, count, step)))
        step = max(1, step // 2)
    return list(order)
