"""Exports of models as Hugging Face folders, written one tensor at a time from a running engine or a checkpoint."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoProcessor

from dsreason.checkpoints.adapter import Merge, iter_weights_with_adapters, write_adapter
from dsreason.checkpoints.checkpoint_folder import CARD, SavedAdapter, read_checkpoint
from dsreason.checkpoints.export_folder import check_target, copy_base_files, write_folder_atomically
from dsreason.checkpoints.marker import STATE_FILE, check_content
from dsreason.checkpoints.model_card import CardScore, build_model_card
from dsreason.checkpoints.processor_limits import ProcessorLimits, compute_limits, write_limits
from dsreason.checkpoints.shards import DTYPES, iter_checkpoint_tensors
from dsreason.checkpoints.trained_template import format_arguments, write_template_arguments
from dsreason.checkpoints.trained_vision import TrainedVision, read_run_vision
from dsreason.config.output import find_run_record
from dsreason.data.render import NO_ARGUMENTS
from dsreason.engine.merged import iter_unmerged_parameters
from dsreason.errors import CheckpointError, ConfigError
from dsreason.families import Family, get_family
from dsreason.job.ranks import World, run_on_rank_zero, share_errors
from dsreason.models.generation import add_turn_end
from dsreason.models.load import read_model_config

UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}
HEADER_BYTES = 160
"""Maximum size in bytes of a tensor's entry in a safetensors header, not counting its name."""


def parse_size(text: str) -> int:
    """Convert a size in decimal units to bytes, as Hugging Face does: "4GB" → 4,000,000,000. Raise ConfigError if invalid."""
    size = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]B)\s*", text)
    if size is None or float(size[1]) == 0:
        raise ConfigError(f"max-shard-size must be a size such as 500MB or 4GB; got {text!r}")
    return int(float(size[1]) * UNITS[size[2]])


def write_model_folder(
    tensors: Iterable[tuple[str, Tensor]],
    source: Path,
    output: Path,
    *,
    dtype: str = "bf16",
    max_shard_size: str = "4GB",
    merge: Merge | None = None,
    card: Callable[[], str] | None = None,
    limits: ProcessorLimits | None = None,
    template_arguments: Mapping[str, Any] = NO_ARGUMENTS,
    trust_remote_code: bool = False,
    durable: bool = True,
) -> Path:
    """Write `tensors` as safetensors files, and copy the config, tokenizer and processor files from `source`.

    The weights and the model card in `source` are not copied. The token that ends a turn in the chat template is added to
    generation_config.json. Memory holds at most one shard (`max_shard_size`, or one larger tensor) and one other tensor at a
    time. The folder gets its final name only once it is complete.

    Args:
        dtype: precision of the weights, "bf16" or "fp32".
        merge: the merge that yields `tensors`; its adapter is also written separately. None if the model has no adapter.
        card: function that returns the text of the model card; called after all other files have been written.
        limits: training's media limits, written to the processor's files; None copies these unchanged.
        template_arguments: chat-template arguments used in training, which the export records.
        trust_remote_code: whether to copy the Python files in `source`, too.
        durable: whether to write digests and sync the files to disk; False for a folder that is deleted after use.

    Raises:
        CheckpointError: `output` is not empty, `source` is not a model folder, or a file in it is a link that leads outside it.
        ConfigError: another process is writing `output`.
        SaveError: the folder cannot be written; it has been removed.
    """
    max_bytes = parse_size(max_shard_size)
    check_target(source, output, with_code=trust_remote_code)
    with write_folder_atomically(output, durable=durable) as partial:
        copy_base_files(source, partial, with_code=trust_remote_code)
        write_settings(partial / "config.json", dtype, get_family(read_model_config(source).model_type))
        add_turn_end(partial, read_model_config(source))
        if limits is not None:
            limits.trained.write(partial)
            write_limits(partial, limits)
        if template_arguments:
            write_template_arguments(partial, template_arguments)
        write_weights(tensors, partial, DTYPES[dtype], max_bytes)
        if merge is not None:
            write_adapter(merge, partial)
        if card is not None:
            (partial / CARD).write_text(card(), encoding="utf-8")
    if merge is not None:
        merge.report(output)
    return output


def rename_for_export(tensors: Iterable[tuple[str, Tensor]], source: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors under the names and in the layout that the model family uses in exports."""
    family = get_family(read_model_config(source).model_type)
    for name, tensor in tensors:
        yield family.to_exported_name(name), family.swap_axes(name, tensor)


def write_settings(file: Path, dtype: str, family: Family) -> None:
    """Set the dtype of the weights in a copied config.json, and add settings that only vLLM needs."""
    config = json.loads(file.read_text(encoding="utf-8"))
    config.setdefault("dtype", None)
    config = set_dtype(config, str(DTYPES[dtype]).removeprefix("torch."))
    if family.fixed_settings:
        config["text_config"] = dict(family.fixed_settings) | config["text_config"]
    file.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def set_dtype(config: Any, dtype: str) -> Any:
    """Return `config` with every `dtype` or older `torch_dtype` key set, even in its text and vision sections."""
    if not isinstance(config, dict):
        return config
    return {key: dtype if key in ("dtype", "torch_dtype") else set_dtype(value, dtype) for key, value in config.items()}


def write_weights(
    tensors: Iterable[tuple[str, Tensor]],
    output: Path,
    dtype: torch.dtype,
    max_shard_bytes: int,
    stem: str = "model",
) -> None:
    """Write `<stem>.safetensors` or, if there are several shards, `<stem>-00001-of-0000N.safetensors` … and an index."""
    shards: list[list[str]] = []
    total = 0
    for number, shard in enumerate(cut_shards(tensors, dtype, max_shard_bytes), start=1):
        total += sum(tensor.nbytes for tensor in shard.values())
        shards.append(list(shard))
        unnamed = output / f"shard_{number}"
        save_file(shard, unnamed, metadata={"format": "pt"})
        shutil.copymode(output / "config.json", unnamed)  # safetensors creates files that only their owner can read
        shard.clear()  # otherwise the shard would stay in memory while the next one is filled
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        part = f"-{number:05d}-of-{len(shards):05d}" if len(shards) > 1 else ""
        file = f"{stem}{part}.safetensors"
        (output / f"shard_{number}").rename(output / file)
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (output / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def cut_shards(
    tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype, max_bytes: int
) -> Iterator[dict[str, Tensor]]:
    """Copy tensors to the CPU and yield them in order, in shards whose files have at most `max_bytes` if possible."""
    shard: dict[str, Tensor] = {}
    size = HEADER_BYTES
    for name, tensor in tensors:
        nbytes = tensor.numel() * dtype.itemsize + HEADER_BYTES + len(name)
        if shard and size + nbytes > max_bytes:
            yield shard
            shard, size = {}, HEADER_BYTES
        shard[name] = tensor.detach().to("cpu", dtype, copy=True).contiguous()
        size += nbytes
    if shard:
        yield shard


def export_engine(
    engine: DeepSpeedEngine,
    source: Path,
    output: Path,
    world: World,
    *,
    dtype: str = "bf16",
    max_shard_size: str = "4GB",
    run: Path | None = None,
    step: int = 0,
    adapter: SavedAdapter | None = None,
    vision: TrainedVision | None = None,
    template_arguments: Mapping[str, Any] = NO_ARGUMENTS,
    trust_remote_code: bool = False,
) -> Path:
    """Export the policy being trained. Collective; rank 0 writes the files.

    Args:
        source: folder from which the model was loaded.
        dtype: precision of the weights, "bf16" or "fp32"; "fp32" exports the float32 master weights.
        run: folder of the run, for the model card; None writes no card.
        step: step of the weights, for the model card.
        adapter: description of the adapter, which is then also written separately; None if the model has no adapter.
        vision: training's vision settings, for the processor's files; None copies these files unchanged.
        template_arguments: chat-template arguments used in training, which the export records.
        trust_remote_code: whether to copy the Python files in `source`, too.
    """
    weights = iter_unmerged_parameters(engine, master=dtype == "fp32" and engine.bfloat16_enabled())
    run_on_rank_zero(lambda: check_target(source, output, with_code=trust_remote_code))
    with share_errors():
        try:
            if world.is_main:
                merge, limits = Merge(dtype, adapter), find_limits(source, vision, run=None)
                write_model_folder(
                    rename_for_export(merge.merge_weights(weights), source),
                    source,
                    output,
                    dtype=dtype,
                    max_shard_size=max_shard_size,
                    merge=merge if adapter else None,
                    card=None
                    if run is None
                    else lambda: build_model_card(
                        run,
                        step,
                        dtype=dtype,
                        adapter=merge.summary,
                        inputs=describe_inputs(limits, template_arguments),
                    ),
                    limits=limits,
                    template_arguments=template_arguments,
                    trust_remote_code=trust_remote_code,
                )
        finally:
            # All ranks must take part in gathering every tensor; on rank 0, tensors remain only if writing has failed.
            for _ in weights:
                pass
    return output


def export_checkpoint(
    checkpoint: Path,
    output: Path,
    *,
    dtype: str = "auto",
    max_shard_size: str = "4GB",
    scores: Sequence[CardScore] = (),
    durable: bool = True,
) -> Path:
    """Export the model in a saved checkpoint from a single process, without loading the model or starting ranks.

    Args:
        dtype: precision of the weights: "bf16", "fp32", or "auto" for the run's precision.
        scores: evaluation scores for the model card.
        durable: whether to write digests and sync the files to disk; False for a folder that is deleted after use.
    """
    saved = read_checkpoint(checkpoint)
    check_content(checkpoint)
    if not saved.parameters:
        raise CheckpointError(f"{checkpoint / STATE_FILE}: lists no parameters; choose another checkpoint")
    dtype = saved.precision if dtype == "auto" else dtype
    run, adapter, step = checkpoint.absolute().parent.parent, saved.state.adapter, saved.state.step
    source, merge = Path(saved.state.model_path), Merge(dtype, adapter)
    trust_remote_code = trusts_remote_code(run)
    check_target(source, output, with_code=trust_remote_code)
    limits = find_limits(source, saved.state.vision, run)
    if adapter is None:
        tensors = iter_checkpoint_tensors(checkpoint, saved)
    else:
        tensors = merge.merge_weights(iter_weights_with_adapters(checkpoint, saved, adapter, dtype))
    return write_model_folder(
        rename_for_export(tensors, source),
        source,
        output,
        dtype=dtype,
        max_shard_size=max_shard_size,
        merge=merge if adapter else None,
        card=lambda: build_model_card(
            *(run, step),
            dtype=dtype,
            scores=scores,
            adapter=merge.summary,
            inputs=describe_inputs(limits, saved.state.template_arguments),
        ),
        limits=limits,
        template_arguments=saved.state.template_arguments,
        trust_remote_code=trust_remote_code,
        durable=durable,
    )


def describe_inputs(limits: ProcessorLimits | None, template_arguments: Mapping[str, Any]) -> dict[str, str]:
    """Describe, for the model card, how training rendered conversations and which sizes and frames their media had."""
    rows = {"chat template arguments": f"`{format_arguments(template_arguments)}`"} if template_arguments else {}
    return rows | (limits.describe() if limits else {})


def trusts_remote_code(run: Path) -> bool:
    """Return whether the run used `model.trust_remote_code`; False if its folder has no record of the configuration."""
    record = find_run_record(run)
    model = record["config"].get("model") if record else None
    return isinstance(model, dict) and model.get("trust_remote_code") is True


def find_limits(source: Path, trained: TrainedVision | None, run: Path | None) -> ProcessorLimits | None:
    """Return training's media limits for the processor in `source`; None if training's settings are unknown.

    If `trained` is None, as for older checkpoints, the settings of `run` apply.
    """
    family = get_family(read_model_config(source).model_type).vision
    if family is None:
        return None
    if trained is None and run is not None:
        trained = read_run_vision(run)
    if trained is None:
        return None
    # Never run code here, because the folder is named in a checkpoint, which somebody else may have written.
    return compute_limits(AutoProcessor.from_pretrained(source, trust_remote_code=False), trained, family)
