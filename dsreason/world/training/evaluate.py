"""Evaluation of world models with `dsreason eval`: like validation, it samples clips from held-out prompts and fixed noise."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dsreason.checkpoints.export_digests import check_digests
from dsreason.config.load import dump_config
from dsreason.errors import CheckpointError
from dsreason.files.cache import get_cache_dir
from dsreason.files.disk import make_folder
from dsreason.files.lock import FolderLock, check_not_in_use
from dsreason.job.launch import report_and_exit
from dsreason.job.ranks import init_world, run_first_rank_first, run_on_rank_zero, shutdown
from dsreason.monitor.progress import open_progress
from dsreason.train.common.preflight import DTYPES
from dsreason.user_code import find_code_file
from dsreason.world import lora
from dsreason.world.base import FILE, find_base
from dsreason.world.cache import compute_fingerprint
from dsreason.world.evaluation.history import locate_small_video
from dsreason.world.evaluation.results import (
    CLIPS,
    ClipResult,
    check_settings,
    locate_clip_result,
    open_results,
    write_clip,
)
from dsreason.world.families import find_family
from dsreason.world.models import (
    check_components,
    check_installed,
    load_transformer,
    load_vae,
    resolve_world_model,
)
from dsreason.world.rewards.functions import BUILT_IN
from dsreason.world.schema import WorldConfig, WorldLoRAConfig
from dsreason.world.training.build import compute_share, open_group_scorer
from dsreason.world.training.inputs import list_validation_rows, open_inputs
from dsreason.world.training.preflight import check_conditioning, check_rewards, open_data
from dsreason.world.training.validate import ValidationClip, build_validation_dataset, sample_clips
from dsreason.world.training.velocity import ClipMaker
from dsreason.world.video import shrink, write_mp4

SECTIONS = ("model", "data", "world", "reward", "validation")
"""Sections of the configuration that determine the clips and their scores."""
IGNORED = {
    "model": ("freeze_text_projection", "gradient_checkpointing"),
    "data": ("workers", "prefetch", "shuffle"),
    "reward": ("workers", "time_limit", "enqueue_url", "fetch_url"),
}
PARTS = ("transformer", "scheduler", "vae", "text_encoder", "tokenizer")
"""Subfolders of a model folder whose contents determine the clips."""


def find_evaluated_model(config: WorldConfig) -> tuple[Path, Path | None]:
    """Return the model's local folder, and the adapter's folder (None unless `model.path` is an adapter export)."""
    cache, model_path = get_cache_dir() / "models", Path(config.model.path).expanduser()
    if (model_path / lora.FILE).is_file():
        if not (model_path / FILE).is_file():
            raise CheckpointError(
                f"model.path {model_path}: is an adapter without {FILE}, which names its base model; export it again"
            )
        return find_base(model_path, lambda base: resolve_world_model(base, cache)), model_path
    return resolve_world_model(config.model, cache), None


def check(config: WorldConfig, results: Path, *, overwrite: bool) -> None:
    """Check the configuration before the ranks start, and raise errors that the user can fix."""
    check_installed()
    check_not_in_use(results)
    folder, adapter = find_evaluated_model(config)
    check_digests(Path(config.model.path).expanduser())
    check_components(folder)
    if not overwrite:
        check_settings(results, collect_settings(adapt_to_evaluation(config), identify_weights(folder, adapter)))
    check_conditioning(config, find_family(folder))
    if config.reward.functions or config.reward.services:
        check_rewards(config)
    open_data(config)


def evaluate(config: WorldConfig, results: Path, *, overwrite: bool = False) -> None:
    """Evaluate the clips that have no result yet, and write each batch once it is scored. Every rank must call this."""
    config = adapt_to_evaluation(config)
    with ExitStack() as stack:
        world = init_world()
        stack.callback(shutdown)
        with run_first_rank_first(world):
            folder, adapter = find_evaluated_model(config)
            datasets = open_data(config)
        rows = list_validation_rows(config, datasets)
        lock = stack.enter_context(FolderLock(on_lost=report_and_exit))

        def open_folder() -> None:
            make_folder(results, "--results-dir")
            lock.take(results)
            open_results(results, collect_settings(config, identify_weights(folder, adapter)), overwrite=overwrite)

        run_on_rank_zero(open_folder)
        codec, dtype = load_vae(folder, world.device, DTYPES[config.train.precision]), DTYPES[config.train.precision]
        prompts = dict.fromkeys([config.data.negative_prompt, *(row.prompt for row in rows)])
        inputs = open_inputs(config, folder, list(prompts), codec, world)
        share = compute_share(config, world)
        maker = ClipMaker(
            config=config,
            family=find_family(folder),
            model_path=folder,
            transformer=load_model(folder, adapter, dtype, world.device),
            codec=codec,
            inputs=inputs,
            share=share,
            scorer=open_group_scorer(config, share, stack),
            device=world.device,
        )
        dataset = build_validation_dataset(rows, datasets)
        missing = run_on_rank_zero(
            lambda: [n for n in range(len(rows)) if not locate_clip_result(results, n).is_file()]
        )
        progress = stack.enter_context(open_progress(rank=world.rank, total_steps=len(missing)))
        with progress.track_phase("clips", len(missing), "clips") as advance:
            for numbers in split_into_batches(missing, config.train.micro_batch_size * world.size):
                clips = sample_clips(maker, dataset, numbers, advance)
                run_on_rank_zero(partial(save_clips, clips, results, inputs.size.fps))


def adapt_to_evaluation(config: WorldConfig) -> WorldConfig:
    """Return a copy of the configuration that keeps all clips' pixels and turns off context parallelism and new adapters."""
    validation = config.validation.model_copy(update={"show": config.validation.max_samples})
    train = config.train.model_copy(update={"context_parallel_size": 1})
    return config.model_copy(update={"validation": validation, "train": train, "lora": WorldLoRAConfig()})


def identify_weights(folder: Path, adapter: Path | None) -> str:
    """Return a fingerprint of the weights, which distinguishes models that had the same path at different times."""
    fingerprints = [compute_fingerprint(*(folder / part for part in PARTS))]
    fingerprints += [] if adapter is None else [compute_fingerprint(adapter / lora.FILE)]
    return "-".join(part_fingerprint[:16] for part_fingerprint in fingerprints)


def collect_settings(config: WorldConfig, weights: str) -> dict[str, Any]:
    """Return the settings that must be equal for an evaluation to be continued or compared with another.

    Args:
        weights: result of `identify_weights`.
    """
    sections = {name: dict(dump_config(config)[name]) for name in SECTIONS}
    for section, names in IGNORED.items():
        for name in names:
            del sections[section][name]
    sections["model"]["weights"] = weights
    sections["reward"]["code"] = fingerprint_code(config.reward.functions)
    return sections | {"train": {"seed": config.train.seed, "precision": config.train.precision}}


def fingerprint_code(rewards: Iterable[str]) -> dict[str, str]:
    """Return a fingerprint of each user-defined reward's source file: reward name → fingerprint."""
    files = {name: find_code_file(name) for name in rewards if name not in BUILT_IN}
    return {name: hashlib.sha256(file.read_bytes()).hexdigest()[:16] for name, file in files.items() if file}


def load_model(folder: Path, adapter: Path | None, dtype: torch.dtype, device: torch.device) -> nn.Module:
    transformer: nn.Module = load_transformer(folder, dtype, None, device)
    if adapter is not None:
        lora.load_lora(transformer, adapter)
    return transformer.eval().requires_grad_(False)


def split_into_batches(numbers: Sequence[int], size: int) -> list[Sequence[int]]:
    return [numbers[i : i + size] for i in range(0, len(numbers), size)]


def save_clips(clips: Sequence[ValidationClip], results: Path, fps: float) -> None:
    """Write each clip's videos and result. The JSON is written last, because it marks the clip as complete."""
    for clip in clips:
        assert clip.pixels is not None
        write_mp4(clip.pixels, results / CLIPS / f"{clip.number}.mp4", fps)
        write_mp4(shrink(clip.pixels), locate_small_video(results / CLIPS, clip.number), fps)
        picture = (clip.look.small * 255).round().astype(int).ravel().tolist()
        write_clip(
            results,
            ClipResult(clip.number, clip.row.id, clip.row.prompt, clip.rewards, **clip.look.facts, picture=picture),
        )
