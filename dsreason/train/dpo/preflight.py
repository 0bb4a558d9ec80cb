"""Preflight checks for a DPO run, before the model is loaded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from dsreason.config.schema_dpo import DPOConfig
from dsreason.data.chat import Encoder
from dsreason.data.sources import SampleDataset, open_datasets
from dsreason.data.types import Sample
from dsreason.errors import ConfigError, DataError
from dsreason.train.common.global_batches import build_step_order, check_steps
from dsreason.train.common.preflight import check_dataset, check_model
from dsreason.train.common.preflight import describe_modules as describe_modules  # for the command
from dsreason.train.dpo.pairs import PairEncoder, build_pair_encoder, read_reference_logprobs
from dsreason.train.dpo.reference import NOTHING_GIVEN, FileReference, read_reference_file


def check(config: DPOConfig) -> None:
    """Check for problems that the user can fix, without loading weights or training.

    Raises:
        DsReasonError: the model folder, the reference file or a row is unusable, there is no data, or there are too few rows
            for one step.
    """
    file = open_reference_file(config)
    encoder = build_pair_encoder(check_model(config))
    training, validation = open_datasets(config.data)
    check_best_metric(config, validation)
    check_steps(build_step_order(training, config), config)
    check_file = partial(check_reference_logprobs, config, file)
    check_dataset("training", training, encoder, config, check_file)
    check_dataset("validation", validation, encoder, config, check_file)


def check_best_metric(config: DPOConfig, validation: SampleDataset) -> None:
    """Raise ConfigError if `checkpoint.best_metric` is set but there are no held-out rows on which to measure it."""
    set_keys = config.checkpoint.model_fields_set
    if len(validation) == 0 and "best_metric" in set_keys and config.checkpoint.keep_best:
        raise ConfigError(
            f"checkpoint.best_metric ({config.checkpoint.best_metric}) is measured on held-out rows, but the run has "
            "none; set data.validation, or remove checkpoint.best_metric"
        )


def open_reference_file(config: DPOConfig) -> FileReference | None:
    return None if config.dpo.reference_file is None else read_reference_file(config.dpo.reference_file)


def check_reference_logprobs(
    config: DPOConfig, file: FileReference | None, sample: Sample, fingerprint: str | None = None
) -> None:
    """Raise DataError if a row lacks its required reference log-probabilities or has changed since they were measured."""
    if file is not None and (problem := file.find_problem(sample.id, fingerprint)):
        raise DataError(f"sample {sample.id!r}: {problem}")
    if config.dpo.reference == "precomputed" and file is None and read_reference_logprobs(sample) is None:
        raise DataError(f"sample {sample.id!r}: {NOTHING_GIVEN}")


def build_row_encoder(config: DPOConfig, encoder: Encoder) -> Callable[[Sample], object]:
    """Return a function that encodes a training row and raises DataError if the row is unusable."""
    return partial(encode_row, config, open_reference_file(config), build_pair_encoder(encoder))


def encode_row(config: DPOConfig, file: FileReference | None, encoder: PairEncoder, sample: Sample) -> object:
    pair = encoder.encode_pair(sample)
    check_reference_logprobs(config, file, sample, pair.fingerprint)
    return pair
