"""Preflight checks for an SFT run, before the model is loaded."""

from __future__ import annotations

from collections.abc import Callable

from dsreason.config.schema import SFTConfig
from dsreason.data.chat import Encoder
from dsreason.data.sources import open_datasets
from dsreason.data.types import Sample
from dsreason.train.common.global_batches import build_step_order, check_steps
from dsreason.train.common.preflight import check_dataset, check_model
from dsreason.train.common.preflight import describe_modules as describe_modules  # for the command


def check(config: SFTConfig) -> None:
    """Check for problems that the user can fix, without reading weights or training.

    Raises:
        DsReasonError: the model folder is unusable, a freeze pattern matches nothing, there is no data, there are too few
            rows for one step, or a row is unusable.
    """
    encoder = check_model(config)
    training, validation = open_datasets(config.data)
    check_steps(build_step_order(training, config), config)
    check_dataset("training", training, encoder, config)
    check_dataset("validation", validation, encoder, config)


def build_row_encoder(config: SFTConfig, encoder: Encoder) -> Callable[[Sample], object]:
    """Return a function that encodes a training row and raises DataError if the row is unusable."""
    return encoder.encode
