"""Preflight checks for a GRPO run, before the model is loaded, and the order of its prompts."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from functools import partial

from dsreason.answers.correct import get_reference
from dsreason.config.deepspeed import read_zero_section
from dsreason.config.schema_grpo import GRPOConfig
from dsreason.data.chat import Encoder
from dsreason.data.labels import build_order_parts
from dsreason.data.loader import read_row
from dsreason.data.order import StepOrder
from dsreason.data.prompts import PromptEncoder, encode_checked_prompt
from dsreason.data.sources import SampleDataset, open_datasets
from dsreason.data.types import Sample
from dsreason.engine.schedule import describe_long_warmup
from dsreason.errors import ConfigError
from dsreason.losses.objective import build_objective
from dsreason.monitor.profile import check_profiled_steps
from dsreason.rollout.vllm_arguments import check_engine_options
from dsreason.train.common.preflight import check_dataset, check_model, find_model, order_coarse_to_fine
from dsreason.train.common.preflight import describe_modules as describe_modules  # for the command
from dsreason.train.grpo.check_rewards import (
    build_held_out_check,
    build_row_check,
    check_format,
    check_functions,
    try_user_functions,
)
from dsreason.train.grpo.teacher import check_teacher

log = logging.getLogger(__name__)

NUM_PROMPTS = 8
"""Number of rows per data set whose prompts or reference answers are checked before training."""


def check(config: GRPOConfig) -> None:
    """Check for problems that the user can fix, such as a reward that cannot be loaded or can never be earned.

    Raises:
        DsReasonError: a problem was found.
    """
    check_functions(config)
    check_engine_choice(config)
    check_distillation(config)
    encoder = check_model(config)
    check_teacher(config, encoder, find_model(config))
    prompts = build_prompt_encoder(config, encoder)
    training, validation = open_datasets(config.data)
    total_steps = count_optimizer_steps(build_rollout_order(training, config), config)
    check_profiled_steps(config.monitor.profile, total_steps)
    if note := describe_long_warmup(total_steps, config.optim):
        log.warning("%s", note)
    indices = order_coarse_to_fine(len(training))[:NUM_PROMPTS]
    first = [(training.describe_location(index), read_row(training, index, lambda sample: sample)) for index in indices]
    rows = [(location, sample) for location, sample in first if isinstance(sample, Sample)]
    check_format(config, [sample for _, sample in rows])
    try_user_functions(config, rows, lambda text: encoder.processor.tokenizer(text)["input_ids"])
    check_dataset("training", training, prompts, config, build_row_check(config))
    check_dataset("validation", validation, encoder, config, build_held_out_check(config))
    check_best_metric(config, validation)


def check_best_metric(config: GRPOConfig, validation: SampleDataset) -> None:
    """Raise ConfigError if `checkpoint.best_metric` needs reference answers but the held-out rows have none."""
    best = config.checkpoint.best_metric
    if not len(validation) or not config.checkpoint.keep_best or best == "val/reward/mean":
        return
    first = [
        read_row(validation, index, lambda sample: sample)
        for index in order_coarse_to_fine(len(validation))[:NUM_PROMPTS]
    ]
    samples = [sample for sample in first if isinstance(sample, Sample)]
    if samples and all(get_reference(sample) is None for sample in samples):
        raise ConfigError(
            f'checkpoint.best_metric ("{best}") needs reference answers, but the held-out rows have none; set '
            'checkpoint.best_metric = "val/reward/mean", or checkpoint.keep_best = false'
        )


def check_engine_choice(config: GRPOConfig) -> None:
    """Raise ConfigError if the settings are incompatible with the rollout engine or the reference policy."""
    if config.rollout.engine == "vllm" and importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            'rollout.engine ("vllm"): vLLM is not installed; install it, or set rollout.engine = "transformers"'
        )
    check_engine_options(config.rollout.engine_options, "rollout.engine_options")
    if config.rollout.engine == "transformers" and config.rollout.tensor_parallel_size > 1:
        raise ConfigError(
            f"rollout.tensor_parallel_size ({config.rollout.tensor_parallel_size}): the transformers engine does not "
            "support tensor parallelism; remove it"
        )
    if read_zero_section(config.deepspeed).get("zero_quantized_weights") and build_objective(config.grpo).kl_coef:
        raise ConfigError(
            f"{config.deepspeed}: zero_optimization.zero_quantized_weights rounds the weights, but the reference policy of "
            "the KL term needs exact weights; remove it, or set grpo.kl_coef = 0"
        )


def check_distillation(config: GRPOConfig) -> None:
    """Raise ConfigError if dynamic sampling is combined with a teacher, which must score every completion."""
    if config.distill.teacher is not None and build_objective(config.grpo).dynamic_sampling:
        setting = "grpo.dynamic_sampling" if config.grpo.dynamic_sampling else f'grpo.preset = "{config.grpo.preset}"'
        raise ConfigError(
            f"{setting} replaces groups with equal rewards, but distill.teacher needs every completion; set "
            "grpo.dynamic_sampling = false"
        )


def build_prompt_encoder(config: GRPOConfig, encoder: Encoder) -> PromptEncoder:
    """Build a prompt encoder that leaves room for the longest completion after each prompt."""
    longest = config.rollout.max_completion_length
    room = encoder.max_length - longest
    if room < 1:
        raise ConfigError(
            f"rollout.max_completion_length ({longest}) leaves no room for a prompt in {encoder.max_length_key} "
            f"({encoder.max_length}); raise {encoder.max_length_key}, or lower rollout.max_completion_length"
        )
    key = f"{encoder.max_length_key} minus rollout.max_completion_length"
    return PromptEncoder(
        *(encoder.processor, encoder.family, encoder.position_ids, room, key),
        video_decoder=encoder.video_decoder,
        template_arguments=encoder.template_arguments,
    )


def build_rollout_order(training: SampleDataset, config: GRPOConfig) -> StepOrder:
    """Build the order in which rollouts use the prompts. A step of this order is a rollout, not an optimizer step as in
    `train.max_steps`."""
    train, steps = config.train, config.grpo.optimizer_steps_per_rollout
    return StepOrder(
        build_order_parts(training, config.data),
        batch_size=config.grpo.prompts_per_step,
        epochs=train.epochs,
        max_steps=None if train.max_steps is None else -(-train.max_steps // steps),
        seed=train.seed,
        shuffle=config.data.shuffle,
        batch_key="grpo.prompts_per_step",
    )


def count_optimizer_steps(order: StepOrder, config: GRPOConfig) -> int:
    """Return the run's number of optimizer steps; a step of `order` is a rollout."""
    return order.num_steps * config.grpo.optimizer_steps_per_rollout


def build_row_encoder(config: GRPOConfig, encoder: Encoder) -> Callable[[Sample], object]:
    """Return a function that encodes a training row and raises DataError if the row is unusable."""
    return partial(encode_checked_prompt, build_prompt_encoder(config, encoder), build_row_check(config))
