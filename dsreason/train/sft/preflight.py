"""What SFT can find wrong before a model is loaded, and the order of its rows."""

from __future__ import annotations

import logging
from collections.abc import Callable

from dsreason.config.schema import SFTConfig
from dsreason.data.chat import Encoder
from dsreason.data.labels import order_parts
from dsreason.data.order import StepOrder
from dsreason.data.sources import SampleDataset, open_datasets
from dsreason.data.types import Sample
from dsreason.engine.schedule import warmup_note
from dsreason.monitor.profile import check_profiled_steps
from dsreason.train.common.preflight import check_dataset, check_model

log = logging.getLogger(__name__)


def check(config: SFTConfig) -> None:
    """Raise user-fixable errors: nothing is trained, and no weight is read.

    Raises:
        DsReasonError: unusable model folder, unmatched freeze pattern, no data, too few rows for one step, a bad row.
    """
    encoder = check_model(config)
    training, validation = open_datasets(config.data)
    order = step_order(training, config)
    check_profiled_steps(config.monitor.profile, order.num_steps)
    for note in notes(order, config):
        log.warning("%s", note)
    check_dataset("training", training, encoder, config)
    check_dataset("validation", validation, encoder, config)


def notes(order: StepOrder, config: SFTConfig) -> list[str]:
    """What a person should know about the steps; one text each, none of them an error."""
    found = []
    unused = config.train.epochs * order.rows_per_epoch - order.num_steps * order.batch_size
    if unused and (config.train.max_steps is None or order.num_steps < config.train.max_steps):
        found.append(
            f"{unused} of the {config.train.epochs} x {order.rows_per_epoch} rows do not fill a last step of "
            f"train.global_batch_size ({order.batch_size}) and are not used"
        )
    if note := warmup_note(order.num_steps, config.optim):
        found.append(note)
    return found


def step_order(training: SampleDataset, config: SFTConfig) -> StepOrder:
    train = config.train
    return StepOrder(
        order_parts(training, config.data),
        batch_size=train.global_batch_size,
        epochs=train.epochs,
        max_steps=train.max_steps,
        seed=train.seed,
        shuffle=config.data.shuffle,
    )


def row_encoder(config: SFTConfig, encoder: Encoder) -> Callable[[Sample], object]:
    """What a row of training goes through; raises DataError for one that cannot be used."""
    return encoder.encode
