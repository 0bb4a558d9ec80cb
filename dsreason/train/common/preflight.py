"""Preflight checks that run without loading the model: model folder, freeze patterns, data rows and media headers."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from pydantic import ValidationError
from torch import nn

from dsreason.checkpoints.checkpoint import check_stage
from dsreason.checkpoints.checkpoint_folder import choose_checkpoint, find_complete_checkpoints, read_checkpoint
from dsreason.checkpoints.export_digests import check_digests
from dsreason.checkpoints.export_folder import check_base_links
from dsreason.checkpoints.marker import check_sizes
from dsreason.checkpoints.trained_template import format_arguments, read_template_arguments
from dsreason.config.deepspeed import build_trial_settings, format_json, read_zero_section
from dsreason.config.deepspeed_keys import REMOVED_ZERO
from dsreason.config.schema import JobConfig, OptimConfig, RunConfig
from dsreason.data.chat import Encoder
from dsreason.data.formats.column_use import find_column_use
from dsreason.data.loader import find_fatal_error, read_row
from dsreason.data.prompts import Check
from dsreason.data.sources import SampleDataset
from dsreason.data.types import Sample
from dsreason.engine.learning_rates import describe_learning_rates, get_multipliers
from dsreason.errors import CheckpointError, ConfigError, DataError
from dsreason.families import get_family
from dsreason.families.layer_types import has_delta_nets
from dsreason.files.cache import get_cache_dir
from dsreason.media.videos import check_torchcodec
from dsreason.models.attention import check_attention
from dsreason.models.freeze import check_freeze, freeze
from dsreason.models.load import build_empty_model, read_model_config, read_parameter_names, resolve_model
from dsreason.models.lora import add_adapters, find_adapted_layers
from dsreason.models.nf4.layers import check_experts
from dsreason.models.processors.loading import open_encoder
from dsreason.monitor.metrics import check_sinks
from dsreason.problems import build_config_error, find_nearest, summarise_problems
from dsreason.storage.storage import check_target

log = logging.getLogger(__name__)

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}

LOW_ADAPTER_LR = 5e-6
MAX_SECONDS = 30.0
"""Time limit for checking rows, in seconds. Rows of a large data set that remain unchecked are checked when they are used."""


def check_model(config: RunConfig) -> Encoder:
    """Check the model folder, patterns, adapters, and the monitoring and DeepSpeed settings; return the encoder."""
    check_sinks(config.monitor)
    check_deepspeed(config)
    if config.data.video_decoder == "torchcodec":
        check_torchcodec()
    model_path = find_model(config)
    check_digests(model_path)
    if config.checkpoint.export != "none":
        check_base_links(model_path, with_code=config.model.trust_remote_code)
    check_freeze(read_parameter_names(model_path), config.model.freeze)
    if config.lora.rank:
        check_adapters(config, model_path)
    if config.optim.lr_multipliers:
        get_multipliers(dict(build_trained_model(config, model_path).named_parameters()), config.optim)
    check_heads_and_attention(config, model_path)
    check_mixture(config, model_path)
    encoder = build_encoder(config, model_path)
    arguments, recorded = config.data.template_arguments, read_template_arguments(model_path)
    if recorded not in ({}, arguments):
        log.warning(
            "%s was trained with data.template_arguments = {%s}, but they are now {%s}, so its prompts differ",
            *(config.model.path, format_arguments(recorded), format_arguments(arguments)),
        )
    return encoder


def check_mixture(config: RunConfig, model_path: Path) -> None:
    """Raise ConfigError if a dense model has a router loss, or if the weights of experts should be quantised."""
    model = read_model_config(model_path, trust_remote_code=config.model.trust_remote_code)
    family = get_family(model.model_type)
    if config.train.router_loss_weight and not family.modules.experts:
        raise ConfigError(
            f"train.router_loss_weight is {config.train.router_loss_weight}, but {family.name} is not a mixture of experts; "
            "set it to 0"
        )
    if config.model.quantize:
        check_experts(family)


def build_trained_model(config: RunConfig, model_path: Path) -> nn.Module:
    """Build the model without weights, with the frozen parameters and adapters that the run will have."""
    trusted = config.model.trust_remote_code
    settings = read_model_config(model_path, trust_remote_code=trusted)
    model: nn.Module = build_empty_model(settings, torch.float32, "sdpa", trusted)
    freeze(model, config.model.freeze)
    if config.lora.rank:
        add_adapters(model, config.lora, seed=config.train.seed)
    return model


def has_different_rates(config: RunConfig) -> bool:
    """Return whether parts of the model are frozen or have other learning rates than the rest, apart from adapters."""
    return bool(config.model.freeze or config.optim.lr_multipliers)


def describe_modules(config: RunConfig) -> str:
    """Return the table of learning rates by module; "" if all parameters have the same learning rate."""
    if not has_different_rates(config):
        return ""
    return describe_learning_rates(build_trained_model(config, find_model(config)), config.optim)


def check_heads_and_attention(config: RunConfig, model_path: Path) -> None:
    """Raise ConfigError if the model cannot use `model.attention`, or if ranks cannot compute a row together, because of its
    delta nets or its number of attention heads."""
    size = config.ranks_per_row
    model = read_model_config(model_path, trust_remote_code=config.model.trust_remote_code)
    check_attention(get_family(model.model_type), config.model.attention, packing=config.train.packing)
    text = model.get_text_config()
    if size > 1 and has_delta_nets(text):
        raise ConfigError(
            f"train.sequence_parallel_size ({size}) is not supported for model_type {model.model_type} ({config.model.path}), "
            "because the state of its linear-attention layers runs along the entire row; set train.sequence_parallel_size = 1"
        )
    heads = text.num_attention_heads
    if heads % size:
        raise ConfigError(
            f"train.sequence_parallel_size ({size}) does not divide the {heads} attention heads of {config.model.path}; set it "
            f"to a divisor of {heads}"
        )


def check_adapters(config: RunConfig, model_path: Path) -> None:
    """Raise ConfigError if the model does not support the adapters; warn about `[optim]` settings unsuitable for adapters."""
    trusted = config.model.trust_remote_code
    model = read_model_config(model_path, trust_remote_code=trusted)
    find_adapted_layers(build_empty_model(model, torch.float32, "sdpa", trusted), config.lora)
    for note in list_adapter_warnings(config.optim):
        log.warning("%s", note)


def list_adapter_warnings(optim: OptimConfig) -> list[str]:
    """Return warnings about settings that are unsuitable for adapters; they do not stop the run."""
    notes = []
    if optim.lr < LOW_ADAPTER_LR:
        notes.append(
            f"optim.lr ({optim.lr:g}) is low for adapters, which need about ten times the learning rate of full fine-tuning, so "
            "they will hardly change; remove it, or set it to 1e-5 or more"
        )
    if optim.weight_decay:
        notes.append(
            f"optim.weight_decay ({optim.weight_decay:g}) pulls the adapters towards zero, and so the model towards its base; "
            "the usual value is 0"
        )
    return notes


def check_upload(config: JobConfig, checkpoint: Path | None, *, create: bool = False) -> None:
    """Raise ConfigError if any upload target does not accept uploads; the message lists all such targets.

    Args:
        checkpoint: checkpoint that the run continues from; if set, targets may be temporarily unreachable.
        create: whether to create repositories that do not exist.
    """
    problems = []
    for target in config.checkpoint.targets:
        try:
            check_target(str(target.address), create=create, tolerate_outage=checkpoint is not None)
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise build_config_error(problems)


def check_resume(config: JobConfig, resume: str | None) -> Path | None:
    """Return the checkpoint to continue from, after checking, without a model, that it is complete and has the same ZeRO stage.

    This check compares only file sizes; the ranks verify the contents later. With `auto`, incomplete checkpoints are skipped.

    Raises:
        CheckpointError: the run cannot be resumed from the checkpoint.
    """
    folder = Path(str(config.output_dir)) / "checkpoints"
    if resume == "auto":
        candidates = find_complete_checkpoints(folder)[::-1]
    else:
        checkpoint = choose_checkpoint(folder, resume)
        candidates = [] if checkpoint is None else [checkpoint]
    for checkpoint in candidates:
        try:
            saved = read_checkpoint(checkpoint)
            check_sizes(checkpoint)
        except CheckpointError:
            if resume != "auto":
                raise
            continue
        check_stage(checkpoint, saved, read_zero_section(config.deepspeed)["stage"])
        return checkpoint
    return None


def check_deepspeed(config: JobConfig) -> None:
    """Raise ConfigError if DeepSpeed rejects the JSON. The message names the file and the keys; DeepSpeed's own rarely does."""
    name, settings = config.deepspeed, build_trial_settings(config.deepspeed, config)
    error = find_deepspeed_error(settings)
    if error is None:
        return
    problems = [
        f"{name}: {'.'.join(path)} ({format_json(value)}) is rejected by DeepSpeed ({format_error(cause)}); {choose_advice(path)}"
        for path, value, cause in find_rejected_parts(settings)
    ]
    raise build_config_error(
        problems or [f"{name}: DeepSpeed rejects the configuration as a whole ({format_error(error)}); correct it"]
    ) from error


def find_rejected_parts(
    section: dict[str, Any], path: tuple[str, ...] = ()
) -> list[tuple[tuple[str, ...], Any, Exception]]:
    """Find the innermost keys and sections that DeepSpeed rejects on their own; return each with its key path and the error."""
    problems = []
    for key, value in section.items():
        document: dict[str, Any] = {key: value}
        for outer in reversed(path):
            document = {outer: document}
        error = find_deepspeed_error({"train_micro_batch_size_per_gpu": 1} | document)
        if error is not None:
            inside = find_rejected_parts(value, (*path, key)) if isinstance(value, dict) else []
            problems += inside or [((*path, key), value, error)]
    return problems


def find_deepspeed_error(settings: dict[str, Any]) -> Exception | None:
    try:
        DeepSpeedConfig(settings)
    except Exception as error:  # noqa: BLE001 (any exception is possible; a value of the wrong type often causes AttributeError)
        return error
    return None


def choose_advice(path: tuple[str, ...]) -> str:
    known_keys = [field.alias or name for name, field in DeepSpeedZeroConfig.model_fields.items()]
    if len(path) == 2 and path[0] == "zero_optimization" and path[1] not in known_keys:
        if path[1] in REMOVED_ZERO:
            return f"DeepSpeed has removed this key; remove it ({REMOVED_ZERO[path[1]]})"
        near = find_nearest(path[1], known_keys, cutoff=0.8)
        return f"did you mean {near}?" if near else "correct or remove it"
    return "correct or remove it"


def format_error(error: Exception) -> str:
    if isinstance(error, ValidationError):
        return "; ".join(problem["msg"] for problem in error.errors())
    return str(error)


def find_model(config: RunConfig) -> Path:
    """Return the local model folder, downloading or building it if necessary. Several ranks may call this at the same time."""
    return resolve_model(config.model, get_cache_dir() / "models")


def build_encoder(config: RunConfig, model_path: Path) -> Encoder:
    longest, key = config.model.max_length, "model.max_length"
    budget, budget_key = config.token_budget
    if budget is not None and budget < longest:
        longest, key = budget, budget_key
    encoder = open_encoder(
        model_path,
        dtype=DTYPES[config.train.precision],
        max_length=longest,
        max_length_key=key,
        template_arguments=config.data.template_arguments,
        trust_remote_code=config.model.trust_remote_code,
    )
    return replace(encoder, needs_reply=config.rows_need_answers, video_decoder=config.data.video_decoder)


def check_dataset(
    name: str, dataset: SampleDataset, encoder: Encoder, config: RunConfig, check: Check | None = None
) -> list[str]:
    """Check rows and their media headers, without decoding media, for at most `MAX_SECONDS`.

    Rows are checked in an order that spreads even a partial check over the entire data set. Unusable rows are reported
    in data set order, grouped by reason.

    Args:
        name: name of the data set, for messages.
        check: additional check for each sample; raises DataError to reject it.

    Returns:
        One message for each row that is skipped because of `data.on_bad_row` or `model.on_too_long`. They are also logged.

    Raises:
        DataError: rows are unusable or `check` rejects them, and the configuration does not skip such rows.
    """

    def check_row(sample: Sample) -> None:
        if check is not None:
            check(sample)
        encoder.check_length(sample, encoder.measure(sample))

    log_column_use(dataset)
    bad: dict[int, DataError] = {}
    deadline = time.monotonic() + MAX_SECONDS
    for checked, index in enumerate(order_coarse_to_fine(len(dataset))):
        if time.monotonic() > deadline:
            log.info(
                "%s: checked %d of %d rows before training; the others are checked when they are used",
                name,
                checked,
                len(dataset),
            )
            break
        result = read_row(dataset, index, check_row)
        if isinstance(result, DataError):
            bad[index] = result
    errors = [bad[index] for index in sorted(bad)]
    fatal = [error for error in errors if find_fatal_error([error], config) is not None]
    if len(fatal) == 1:
        raise fatal[0]
    messages = [str(error) for error in fatal or errors]
    summary = "\n  ".join(summarise_problems(messages))
    if fatal:
        raise DataError(
            f"{name}: {len(fatal)} rows cannot be used; correct them (`dsreason data validate --all` lists all):\n  {summary}"
        )
    if errors and len(errors) == len(dataset):
        raise DataError(f"{name}: none of the {len(dataset)} rows can be used:\n  {summary}")
    if errors:
        log.warning("%s: %d rows are skipped:\n  %s", name, len(errors), summary)
    return messages


def log_column_use(dataset: SampleDataset) -> None:
    """Log how the data adapters use the columns of their rows; ignored columns are logged as a warning."""
    for source in dataset.sources:
        use = find_column_use(source)
        log.log(logging.WARNING if use.ignored else logging.INFO, "%s", use.describe())


def order_coarse_to_fine(count: int) -> list[int]:
    """Order 0 … count - 1 from coarse to fine, so that any prefix spans the entire range: 5 → [0, 4, 2, 1, 3]."""
    order: dict[int, None] = {}
    step = max(1, count - 1)
    while len(order) < count:
        order.update(dict.fromkeys(range(0, count, step)))
        step = max(1, step // 2)
    return list(order)
