"""Checks of an SFT run before a model is loaded."""

from __future__ import annotations

from collections.abc import Callable

from dsreason.config.schema import SFTConfig
from dsreason.data.chat import Encoder
from dsreason.data.sources import open_datasets
from dsreason.data.types import Sample
from dsreason.train.common.global_batches import build_step_order, check_steps
from dsreason.train.common.preflight import check_dataset, check_model


def check(config: SFTConfig) -> None:
    """Raise user-fixable errors without reading weights or training.

    Raises:
        DsReasonError: unusable model folder, unmatched freeze pattern, no data, too few rows for one step, a bad row.
    """
    encoder = check_model(config)
    training, validation = open_datasets(config.data)
    check_steps(build_step_order(training, config), config)
    check_dataset("training", training, encoder, config)
    check_dataset("validation", validation, encoder, config)


def row_encoder(config: SFTConfig, encoder: Encoder) -> Callable[[Sample], object]:
    """Return the function that encodes a training row; it raises DataError for an unusable row."""
    return encoder.encode
