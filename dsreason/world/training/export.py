"""Exports of the transformer or the adapter in diffusers' format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from deepspeed import DeepSpeedEngine
from torch import Tensor

from dsreason.checkpoints.checkpoint_folder import CARD, SavedRun, read_checkpoint
from dsreason.checkpoints.export import parse_size, write_weights
from dsreason.checkpoints.export_folder import check_target_empty, copy_file, write_folder_atomically
from dsreason.checkpoints.marker import check_content
from dsreason.checkpoints.model_card import build_model_card, read_run_record
from dsreason.checkpoints.shards import DTYPES, iter_checkpoint_tensors
from dsreason.engine.average import WeightAverage, get_average_file, read_saved_average
from dsreason.engine.engine import iter_full_parameters, list_frozen_names, to_hf_name
from dsreason.files.cache import get_cache_dir
from dsreason.job.ranks import World, run_on_rank_zero, share_errors
from dsreason.world.base import FILE as BASE
from dsreason.world.base import describe_base, find_component_folder
from dsreason.world.families.components import WEIGHTS
from dsreason.world.lora import FILE, save_lora

INDEX = "model_index.json"


def export_file(lora: dict[str, Any] | None) -> str:
    """Return the name of the file that every export of this kind contains."""
    return INDEX if lora is None else FILE


def write_export(
    engine: DeepSpeedEngine,
    average: WeightAverage | None,
    source: Path,
    output: Path,
    world: World,
    *,
    lora: dict[str, Any] | None,
    dtype: Literal["bf16", "fp32"],
    max_shard_size: str,
    run: Path,
    step: int,
) -> None:
    """Write the weights, or their moving average if there is one. Collective; only rank 0 writes.

    If all weights are trained, `output` contains `transformer/` and the pipeline's small files. The autoencoder, the text
    encoder and the tokenizer remain in `source`, the folder from which the model was loaded. An adapter is exported as a
    single weight file, whose metadata contains its rank and alpha.
    """
    tensors = iter_trained_tensors(engine, average, dtype, without_frozen=lora is not None)
    run_on_rank_zero(lambda: check_target_empty(output))
    with share_errors():
        try:
            if world.is_main:
                texts = write_texts(run, step, source, dtype)
                write_folder(tensors, source, output, lora, dtype, parse_size(max_shard_size), texts)
        finally:
            for _ in tensors:  # gathering is collective, so every rank must consume all tensors, even if writing failed
                pass


def write_texts(run: Path, step: int, source: Path, dtype: str) -> dict[str, str]:
    """Return the texts of the model card and of `base_model.json`: file name → text."""
    card = build_model_card(run, step, dtype=dtype, library="diffusers", task="text-to-video", kind="world model")
    return {CARD: card, BASE: describe_base(read_run_record(run).get("config", {}).get("model", {}), source)}


def iter_trained_tensors(
    engine: DeepSpeedEngine, average: WeightAverage | None, dtype: str, *, without_frozen: bool
) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter's full tensor, averaged if there is an average. Collective.

    If `without_frozen` is true, frozen parameters are skipped.
    """
    if average is not None:
        yield from average.iter_full()
    trained = set() if average is None else set(average.shares)
    without = trained | set(list_frozen_names(engine) if without_frozen else ())
    yield from iter_full_parameters(engine, master=dtype == "fp32" and engine.bfloat16_enabled(), without=without)


def write_folder(
    tensors: Iterator[tuple[str, Tensor]],
    source: Path,
    output: Path,
    lora: dict[str, Any] | None,
    dtype: str,
    max_bytes: int,
    texts: Mapping[str, str],
) -> None:
    """Write the export folder atomically. Raise SaveError if it cannot be written."""
    with write_folder_atomically(output) as partial:
        if lora is None:
            copy_pipeline(source, partial)
            write_weights(tensors, partial / "transformer", DTYPES[dtype], max_bytes, stem=WEIGHTS)
        else:
            save_lora({name: tensor.to("cpu", DTYPES[dtype], copy=True) for name, tensor in tensors}, partial, lora)
        for name, text in texts.items():
            (partial / name).write_text(text, encoding="utf-8")


def copy_pipeline(source: Path, output: Path) -> None:
    """Copy the index and the configurations of the scheduler and the transformer."""
    for name in (INDEX, "transformer/config.json", "scheduler/scheduler_config.json"):
        copy_file(find_component_folder(source, Path(name).parts[0], get_cache_dir() / "models"), name, output)


def export_world_checkpoint(checkpoint: Path, output: Path, *, dtype: str, max_shard_size: str) -> None:
    """Export a saved checkpoint like `write_export`, but in a single process and without building the model."""
    saved = read_checkpoint(checkpoint)
    check_content(checkpoint)
    check_target_empty(output)
    lora = saved.state.extra.get("lora")
    tensors = iter_saved_tensors(checkpoint, saved, with_frozen=lora is None)
    run = checkpoint.absolute().parent.parent
    source = Path(saved.state.model_path)
    texts = write_texts(run, saved.state.step, source, dtype)
    write_folder(tensors, source, output, lora, dtype, parse_size(max_shard_size), texts)


def iter_saved_tensors(checkpoint: Path, saved: SavedRun, *, with_frozen: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter of a checkpoint; if there is a moving average, yield the averaged values.

    Parameters are read one by one, because a 14B model's parameters take 56 GB.
    """
    averaged = (checkpoint / get_average_file("ema", 0)).is_file()
    trained = {to_hf_name(name) for name, parameter in saved.parameters.items() if parameter.trained}
    for name, tensor in iter_checkpoint_tensors(checkpoint, saved, with_frozen=with_frozen):
        if averaged and name in trained:
            yield from read_saved_average(checkpoint, "ema", {name: tensor.shape}, saved.world_size)
        else:
            yield name, tensor
