"""What can be found wrong before a model is loaded: model folder, freeze patterns, data rows and media headers."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from pydantic import ValidationError

from dsreason.config.cache import cache_dir
from dsreason.config.deepspeed import zero_section
from dsreason.config.problems import config_error
from dsreason.config.schema import GRPOConfig, RunConfig, SFTConfig
from dsreason.data.chat import Encoder, SampleTooLong
from dsreason.data.order import StepOrder
from dsreason.data.sources import SampleDataset, open_datasets
from dsreason.errors import ConfigError, DataError
from dsreason.models.families import family_of
from dsreason.models.freeze import check_freeze
from dsreason.models.load import load_processor, model_config, parameter_names, resolve_model
from dsreason.rewards.functions import REMOTE, find_reward
from dsreason.runtime.checkpoint import check_sizes, check_stage, choose_checkpoint, read_checkpoint
from dsreason.runtime.metrics import check_wandb
from dsreason.runtime.schedule import warmup_steps

log = logging.getLogger(__name__)

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}

MAX_SECONDS = 30.0
"""Time for looking at rows one by one; in larger data sets the rest is met while training."""


def check_sft(config: SFTConfig) -> None:
    """Raise what a person can mend: nothing is trained, and no weight is read.

    Raises:
        DsReasonError: unusable model folder, unmatched freeze pattern, no data, too few rows for one step, a bad row.
    """
    encoder = check_model(config)
    training, validation = open_datasets(config.data)
    for note in notes(step_order(training, config), config):
        log.warning("%s", note)
    check_datasets(training, validation, encoder, config)


def check_model(config: RunConfig) -> Encoder:
    """The encoder of a model folder that can be used, with monitoring, DeepSpeed's values and freezing checked."""
    check_wandb(config.monitor)
    check_zero_values(config.deepspeed)
    model_path = find_model(config)
    check_freeze(parameter_names(model_path), config.model.freeze)
    return build_encoder(config, model_path)


def check_datasets(training: SampleDataset, validation: SampleDataset, encoder: Encoder, config: RunConfig) -> None:
    """DataError for a row that may not be left out; names those that are."""
    for name, dataset in (("training", training), ("validation", validation)):
        left_out = check_rows(dataset, encoder, config, name)
        if left_out:
            more = f"\n  and {len(left_out) - 20} more, named when they are met" if len(left_out) > 20 else ""
            log.warning("%s: %d rows are left out:\n  %s%s", name, len(left_out), "\n  ".join(left_out[:20]), more)


def check_grpo(config: GRPOConfig) -> None:
    """Raise what a person can mend, as `check_sft` does; a prompt must leave room for the longest completion."""
    for name in config.reward.functions:
        if not name.startswith(REMOTE):
            find_reward(name)
    encoder = check_model(config)
    training, validation = open_datasets(config.data)
    rollout_order(training, config)
    room = config.model.max_length - config.rollout.max_completion_length
    if room < 1:
        raise ConfigError(
            f"rollout.max_completion_length ({config.rollout.max_completion_length}) leaves no room for a prompt in "
            f"model.max_length ({config.model.max_length}); raise that or lower it"
        )
    encoder = replace(encoder, max_length=room, max_length_key="model.max_length without rollout.max_completion_length")
    check_datasets(training, validation, encoder, config)


def check_resume(config: RunConfig, resume: str | None) -> None:
    """What is known of a checkpoint without a model: that it is there, whole, and of the same ZeRO stage.

    Raises:
        CheckpointError: it cannot be resumed from.
    """
    checkpoint = choose_checkpoint(Path(str(config.output_dir)) / "checkpoints", resume)
    if checkpoint is not None:
        saved = read_checkpoint(checkpoint)
        check_sizes(checkpoint)
        check_stage(checkpoint, saved, zero_section(config.deepspeed)["stage"])


def check_zero_values(name: str) -> None:
    """ConfigError where DeepSpeed does not take a value of `zero_optimization`."""
    try:
        DeepSpeedZeroConfig(**zero_section(name))
    except ValidationError as error:
        problems = [
            f"{name}: {'.'.join(map(str, ('zero_optimization', *problem['loc'])))} ({problem['input']!r}): {problem['msg']}"
            for problem in error.errors()
        ]
        raise config_error(problems) from error


def notes(order: StepOrder, config: SFTConfig) -> list[str]:
    """What a person should know about the steps; one text each, none of them an error."""
    found = []
    unused = config.train.epochs * order.rows_per_epoch - order.num_steps * order.batch_size
    if unused and (config.train.max_steps is None or order.num_steps < config.train.max_steps):
        found.append(
            f"{unused} of the {config.train.epochs} x {order.rows_per_epoch} rows do not fill a last step of "
            f"train.global_batch_size ({order.batch_size}) and are not used"
        )
    warmup = warmup_steps(order.num_steps, config.optim)
    if warmup >= order.num_steps:
        found.append(
            f"optim.warmup ({warmup} steps) is as long as the run ({order.num_steps}): optim.lr is not reached"
        )
    return found


def find_model(config: RunConfig) -> Path:
    """The local model folder; downloads or builds it where needed. Safe on several ranks at once."""
    return resolve_model(config.model, cache_dir() / "models")


def build_encoder(config: RunConfig, model_path: Path) -> Encoder:
    dtype = DTYPES[config.train.precision]  # of the engine that serves the model: it rounds video times to it
    model = model_config(model_path, dtype=dtype, trust_remote_code=config.model.trust_remote_code)
    processor = load_processor(model_path, trust_remote_code=config.model.trust_remote_code)
    positions = partial(family_of(model.model_type).position_ids, config=model)
    budget = config.train.max_tokens_per_micro_batch
    if budget is not None and budget < config.model.max_length:
        return Encoder(processor, positions, budget, "train.max_tokens_per_micro_batch")
    return Encoder(processor, positions, config.model.max_length)


def step_order(training: SampleDataset, config: SFTConfig) -> StepOrder:
    train = config.train
    return StepOrder(
        training.weighted_lengths,
        batch_size=train.global_batch_size,
        epochs=train.epochs,
        max_steps=train.max_steps,
        seed=train.seed,
        shuffle=config.data.shuffle,
    )


def rollout_order(training: SampleDataset, config: GRPOConfig) -> StepOrder:
    """Which prompts each rollout has; `train.max_steps` counts optimizer steps."""
    train, steps = config.train, config.grpo.optimizer_steps_per_rollout
    return StepOrder(
        training.weighted_lengths,
        batch_size=config.grpo.prompts_per_step,
        epochs=train.epochs,
        max_steps=None if train.max_steps is None else -(-train.max_steps // steps),
        seed=train.seed,
        shuffle=config.data.shuffle,
    )


def check_rows(dataset: SampleDataset, encoder: Encoder, config: RunConfig, name: str) -> list[str]:
    """Read rows and media headers (no decoding), in an order that spreads over the data set.

    Returns what `data.on_bad_row` or `model.on_too_long` leave out, one text each.

    Raises:
        DataError: the first unusable row, where that is an error.
    """
    left_out: list[str] = []
    deadline = time.monotonic() + MAX_SECONDS
    for checked, index in enumerate(spread(len(dataset))):
        if time.monotonic() > deadline:
            log.info("%s: %d of %d rows checked before training, the others on use", name, checked, len(dataset))
            break
        try:
            sample = dataset[index]
        except DataError as error:  # it names the row
            if config.data.on_bad_row == "error":
                raise
            left_out.append(str(error))
            continue
        try:
            encoder.check_length(sample, encoder.measure(sample))
        except DataError as error:
            policy = config.model.on_too_long if isinstance(error, SampleTooLong) else config.data.on_bad_row
            text = f"{dataset.location(index)}: {error}"
            if policy == "error":
                raise type(error)(text) from error
            left_out.append(text)
    if left_out and len(left_out) == len(dataset):
        raise DataError(f"{name}: none of the {len(dataset)} rows can be used; the first: {left_out[0]}")
    return left_out


def spread(count: int) -> list[int]:
    """0 … count - 1, coarse to fine, so that a time limit still sees the whole range: 5 → [0, 4, 2, 1, 3]."""
    order: dict[int, None] = {}
    step = max(1, count - 1)
    while len(order) < count:
        order.update(dict.fromkeys(range(0, count, step)))
        step = max(1, step // 2)
    return list(order)
