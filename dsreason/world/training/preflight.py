"""Checks that run before a world model is loaded for training, and the order of the rows."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dsreason.checkpoints.export_digests import check_digests
from dsreason.config.deepspeed import read_zero_section
from dsreason.data.order import StepOrder, WeightedRows
from dsreason.engine.learning_rates import describe_learning_rates, get_multipliers
from dsreason.engine.schedule import describe_long_warmup
from dsreason.errors import ConfigError, DataError
from dsreason.files.cache import get_cache_dir
from dsreason.monitor.metrics import check_sinks
from dsreason.monitor.profile import check_profiled_steps
from dsreason.problems import find_nearest
from dsreason.train.common.preflight import DTYPES, check_deepspeed, order_coarse_to_fine
from dsreason.world.cache import TextCache
from dsreason.world.context_parallel import check_sizes
from dsreason.world.data import WorldDataset, open_world_data
from dsreason.world.families import WorldFamily, find_family
from dsreason.world.families.cosmos_predict2_5 import PROJECTED
from dsreason.world.latents import SPACE, TIME
from dsreason.world.lora import add_lora
from dsreason.world.models import (
    build_empty_transformer,
    check_components,
    check_installed,
    resolve_world_model,
)
from dsreason.world.noise import compute_sigmas
from dsreason.world.rewards.scorer import open_scorer
from dsreason.world.schema import WorldConfig, WorldDataConfig
from dsreason.world.steps import build_step
from dsreason.world.types import ClipSize

log = logging.getLogger(__name__)

DATA_SEED = 0
"""Seed for choosing held-out rows; the choice does not depend on `train.seed`."""
NUM_CLIPS = 8
"""Number of rows per data set whose clips are read to check them."""


def check(config: WorldConfig) -> None:
    """Check a run without reading any weights, and raise errors that the user can fix.

    Raises:
        DsReasonError: a package is missing, the model folder is unusable, settings conflict, there is no data or too little
            for a step, a reward cannot be found, or clips are missing.
    """
    check_installed()
    check_sinks(config.monitor)
    check_deepspeed(config)
    check_rewards(config)
    folder = find_model(config)
    check_digests(Path(config.model.path).expanduser())
    family, layers = find_family(folder), check_components(folder)
    check_lora(config, layers)
    if config.optim.lr_multipliers:
        get_multipliers(dict(build_trained_transformer(config, folder).named_parameters()), config.optim)
    check_unused(config)
    check_conditioning(config, family)
    check_exchange(config)
    check_bad_rows(config)
    if config.world.algorithm in ("flow_grpo", "ddrl"):
        list_trained_steps(config, [float(s) for s in compute_sigmas(config, folder)])
    check_divisible_by_ranks(config, folder)
    training, validation = open_data(config)
    order = build_step_order(config, len(training))
    num_steps = total_steps(config, order)
    check_profiled_steps(config.monitor.profile, num_steps)
    if note := describe_long_warmup(num_steps, config.optim):
        log.warning("%s", note)
    check_texts(config, folder, training, order)
    if needs_clips(config):
        check_clips("training", training, config)
        check_clips("validation", validation, config)


def find_model(config: WorldConfig) -> Path:
    """Return the local model folder; download or build it if necessary. Several ranks may call this at the same time."""
    check_installed()
    return resolve_world_model(config.model, get_cache_dir() / "models")


def open_data(config: WorldConfig) -> tuple[WorldDataset, WorldDataset]:
    return open_world_data(config.data, DATA_SEED)


def get_clip_size(data: WorldDataConfig) -> ClipSize:
    return ClipSize(data.frames, data.height, data.width, data.fps)


def build_step_order(config: WorldConfig, num_rows: int) -> StepOrder:
    """Build the order of the rows, by step (sft) or by rollout (other algorithms); `train.max_steps` counts optimizer steps."""
    train, world = config.train, config.world
    sft, max_steps = world.algorithm == "sft", train.max_steps
    if max_steps is not None and not sft:
        max_steps //= world.optimizer_steps_per_rollout
    return StepOrder(
        [WeightedRows(np.arange(num_rows))],
        batch_size=config.samples_per_step if sft else world.prompts_per_step,
        epochs=train.epochs,
        max_steps=max_steps,
        seed=train.seed,
        shuffle=config.data.shuffle,
        batch_key="train.global_batch_size" if sft else "world.prompts_per_step",
    )


def total_steps(config: WorldConfig, order: StepOrder) -> int:
    """Return the number of optimizer steps in the run."""
    if config.world.algorithm == "sft":
        return order.num_steps
    return order.num_steps * config.world.optimizer_steps_per_rollout


def list_trained_steps(config: WorldConfig, levels: list[float]) -> list[int]:
    """Return the numbers of the steps that add noise and can therefore be trained on.

    Raises:
        ConfigError: no step adds noise, or one in `world.trained_steps` does not.
    """
    world = config.world
    stds = [
        build_step(world.sde, s, s_next, world.noise_level, s_cap=levels[1]).std
        for s, s_next in zip(levels, levels[1:], strict=False)
    ]
    noisy = [number for number, std in enumerate(stds) if std > 0]
    silent = [number for number in world.trained_steps or () if number not in noisy]
    if silent:
        raise ConfigError(
            f"world.trained_steps contains step {silent[0]}, which adds no noise with world.sde = {world.sde!r} and "
            f"noise_level = {world.noise_level:g}, so it has no probability; remove it"
        )
    if not noisy:
        raise ConfigError(
            f"world.noise_level ({world.noise_level:g}) adds no noise to any of the {len(stds)} steps, so none can be "
            "trained; raise it"
        )
    return noisy


def check_rewards(config: WorldConfig) -> None:
    """Raise ConfigError if rewards that the algorithm or `checkpoint.best_metric` needs are missing, or settings conflict."""
    world, rewards = config.world, bool(config.reward.functions or config.reward.services)
    if rewards:
        open_scorer(config.reward)  # starts no process before it is entered
    elif world.algorithm != "sft":
        raise ConfigError(
            f"world.algorithm ({world.algorithm}) needs a reward; set reward.functions, such as {{ colour = 1.0 }}, or "
            "[[reward.services]]"
        )
    elif config.checkpoint.keep_best and config.checkpoint.best_metric == "val/reward/mean":
        raise ConfigError(
            "checkpoint.best_metric (val/reward/mean) needs rewards, but none are configured; set "
            'checkpoint.best_metric = "val/loss", checkpoint.keep_best = false, or reward.functions'
        )
    if world.algorithm == "nft" and world.same_noise:
        raise ConfigError(
            "world.same_noise = true makes all clips of a group equal with nft, whose steps add no noise; remove it"
        )
    if world.prompts_per_step < world.optimizer_steps_per_rollout:
        raise ConfigError(
            f"world.optimizer_steps_per_rollout ({world.optimizer_steps_per_rollout}) is greater than world.prompts_per_step "
            f"({world.prompts_per_step}), but each step needs at least one prompt; lower it"
        )


def check_lora(config: WorldConfig, layers: Sequence[str]) -> None:
    """Raise ConfigError if a LoRA target matches no linear layer in `layers`, because it would be ignored silently."""
    for target in config.lora.targets:
        if not any(name == target or name.endswith(f".{target}") for name in layers):
            names = sorted({name.rpartition(".")[2] if not name[-1].isdigit() else name for name in layers})
            near = find_nearest(target, names)
            advice = f"did you mean {near}?" if near else f"choose from {', '.join(names[:12])}"
            raise ConfigError(f"lora.targets: the transformer has no linear layer {target!r}; {advice}")


def select_trained(transformer: Any, config: WorldConfig, family: WorldFamily) -> None:
    """Freeze the parameters that the configuration freezes, and add its adapters."""
    if config.model.freeze_text_projection:
        transformer.get_submodule(PROJECTED).requires_grad_(False)
    if config.lora.rank:
        targets = config.lora.targets or family.lora_targets
        add_lora(transformer, rank=config.lora.rank, alpha=config.lora.scale, targets=targets, seed=config.train.seed)


def build_trained_transformer(config: WorldConfig, folder: Path) -> Any:
    """Build the transformer without weights, with the frozen parameters and adapters that the run will have."""
    transformer = build_empty_transformer(folder)
    select_trained(transformer, config, find_family(folder))
    return transformer


def has_different_rates(config: WorldConfig) -> bool:
    """Return whether parts of the transformer are frozen or have other learning rates than the rest, apart from adapters."""
    return bool(config.model.freeze_text_projection or config.optim.lr_multipliers)


def describe_modules(config: WorldConfig) -> str:
    """Return the table of learning rates by module; "" if all parameters have the same learning rate."""
    if not has_different_rates(config):
        return ""
    return describe_learning_rates(build_trained_transformer(config, find_model(config)), config.optim)


OF_SAMPLING = {"sde", "noise_level", "trained_steps", "window", "clip_range", "kl"}
OF_DATA = {"data_coef", "data_noise", "data_steps", "exponential_advantages"}
OF_NFT = {"nft_beta", "nft_times", "nft_decay"}
OF_REWARDS = {"advantage_clip", "advantage_std", "kl_coef", "same_noise", "optimizer_steps_per_rollout"}
UNUSED = {
    "sft": OF_SAMPLING | OF_DATA | OF_NFT | OF_REWARDS,
    "flow_grpo": OF_DATA | OF_NFT,
    "ddrl": OF_NFT,
    "nft": OF_SAMPLING | OF_DATA,
}
"""Algorithm → keys of [world] that it does not use."""


def check_unused(config: WorldConfig) -> None:
    """Log a warning if the user has changed settings that the algorithm does not use."""
    world = config.world
    fields = type(world).model_fields
    names = [
        f"world.{name}"
        for name in fields
        if name in UNUSED[world.algorithm] and getattr(world, name) != fields[name].default
    ]
    if world.algorithm != "sft" and config.train.global_batch_size is not None:
        names.append("train.global_batch_size")
    if names:
        log.warning("world.algorithm (%s) does not use %s", world.algorithm, ", ".join(names))


def check_conditioning(config: WorldConfig, family: WorldFamily) -> None:
    low, high = config.world.conditional_frames
    frames, most = (config.data.frames - 1) // TIME + 1, family.max_conditional_frames
    if not 0 <= low <= high:
        raise ConfigError(
            f"world.conditional_frames must be a minimum and a maximum of at least 0, in this order; got ({low}, {high})"
        )
    if high > most:
        limit = f"at most {most} given frames" if most else "only text"
        raise ConfigError(
            f"world.conditional_frames ({low}, {high}): {family.name} accepts {limit}; lower it, or use another model"
        )
    if high >= frames:
        raise ConfigError(
            f"world.conditional_frames ({low}, {high}) leaves none of the {frames} latent frames of data.frames "
            f"({config.data.frames}) to sample; lower it, or raise data.frames"
        )


def check_exchange(config: WorldConfig) -> None:
    """Raise ConfigError if DeepSpeed quantizes weights that the run must swap out and restore exactly."""
    uses = {
        "world.kl_coef": config.world.kl_coef > 0,
        "world.algorithm = nft": config.world.algorithm == "nft",
        "train.ema_decay": config.train.ema_decay is not None,
    }
    if read_zero_section(config.deepspeed).get("zero_quantized_weights") and any(uses.values()):
        names = " and ".join(name for name, used in uses.items() if used)
        raise ConfigError(
            f"{config.deepspeed}: zero_optimization.zero_quantized_weights rounds the weights, but exact weights are required "
            f"for {names}; remove one of them"
        )


def check_divisible_by_ranks(config: WorldConfig, folder: Path) -> None:
    """Raise ConfigError if a clip cannot be divided evenly among the ranks of a context-parallel group."""
    data, size = config.data, config.train.context_parallel_size
    if size > 1:
        shape = (1, (data.frames - 1) // TIME + 1, data.height // SPACE, data.width // SPACE)
        check_sizes(find_family(folder).read_transformer_config(folder), shape, size)


def is_projection_kept(config: WorldConfig) -> bool:
    """Return whether to cache the output of the transformer's first text layer, which is possible only if it is not trained."""
    if config.lora.rank == 0:
        return config.model.freeze_text_projection
    return not any(target == PROJECTED or PROJECTED.endswith(f".{target}") for target in config.lora.targets)


def check_texts(config: WorldConfig, folder: Path, training: WorldDataset, order: StepOrder) -> None:
    """Check that the prompts' embeddings fit on the cache's disk.

    Raises:
        ConfigError: the configuration freezes a layer that the model does not have.
        StorageError: the embeddings do not fit.
    """
    family, model = find_family(folder), config.model
    if model.freeze_text_projection and family.project_text is None:
        raise ConfigError(f"model.freeze_text_projection: {family.name} has no text projection; remove the key")
    rows = dict.fromkeys(index for step in range(order.num_steps) for index in order.indices(step))
    dtype, project = DTYPES[config.train.precision], is_projection_kept(config)
    texts = TextCache.open(family, folder, model.max_prompt_length, dtype, get_cache_dir(), project=project)
    texts.check_room(list(dict.fromkeys(training[row].prompt for row in rows)))


def needs_clips(config: WorldConfig) -> bool:
    return config.world.algorithm in ("sft", "ddrl") or config.world.conditional_frames[1] > 0


def explain_need_for_clips(config: WorldConfig) -> str:
    if config.world.algorithm in ("sft", "ddrl"):
        return f"world.algorithm ({config.world.algorithm})"
    return f"world.conditional_frames {config.world.conditional_frames}"


def check_bad_rows(config: WorldConfig) -> None:
    """Raise ConfigError if `data.on_bad_row` is "skip" but clips cannot be skipped, because rollouts have a fixed set of rows."""
    if config.data.on_bad_row == "skip" and config.world.algorithm != "sft" and needs_clips(config):
        raise ConfigError(
            f'data.on_bad_row = "skip" can skip clips only if world.algorithm is "sft", but {explain_need_for_clips(config)} '
            'needs the clip of every row of a rollout; set data.on_bad_row = "error", and remove the rows that the error names'
        )


def check_clips(name: str, dataset: WorldDataset, config: WorldConfig) -> None:
    """Read a few clips, spread over the rows. Raise DataError for an unusable clip, or log a warning if it can be skipped."""
    for index in order_coarse_to_fine(len(dataset))[:NUM_CLIPS]:
        try:
            dataset.read_clip(dataset[index], get_clip_size(config.data))
        except DataError as error:
            if config.data.on_bad_row == "error" or dataset[index].clip is None:
                raise DataError(f"{name}: {error} ({explain_need_for_clips(config)} needs clips)") from error
            log.warning("%s: skipped a row: %s", name, error)
