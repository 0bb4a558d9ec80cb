"""Checks that run before any rank starts, and the encoding of a row."""

from __future__ import annotations

from collections.abc import Callable

from dsreason.config.schema_toy import ToyConfig

from dsreason.data.chat import Encoder
from dsreason.data.sources import open_datasets
from dsreason.data.types import Sample
from dsreason.train.common.preflight import check_dataset, check_model
from dsreason.train.common.preflight import describe_modules as describe_modules  # for the command


def check(config: ToyConfig) -> None:
    encoder = check_model(config)
    for name, dataset in zip(("training", "validation"), open_datasets(config.data), strict=True):
        check_dataset(name, dataset, encoder, config)


def build_row_encoder(config: ToyConfig, encoder: Encoder) -> Callable[[Sample], object]:
    return encoder.encode
