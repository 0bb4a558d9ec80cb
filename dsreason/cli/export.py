"""`dsreason export`: from a checkpoint to a Hugging Face folder."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from dsreason.runtime import launch
from dsreason.runtime.imports import quick_imports


class Dtype(StrEnum):
    bf16 = "bf16"
    fp32 = "fp32"


def export(
    checkpoint: Annotated[Path, typer.Option(help="Checkpoint (D/checkpoints/step_N), or the folder of a run.")],
    output: Annotated[Path, typer.Option(help="Folder to write.")],
    dtype: Annotated[Dtype, typer.Option(help="Of the written weights.")] = Dtype.bf16,
    max_shard_size: Annotated[str, typer.Option(help="Of one safetensors file.")] = "4GB",
) -> None:
    """Write a checkpoint as a Hugging Face folder, which transformers and vLLM load."""
    launch.prepare_environment()  # before what follows imports torch and DeepSpeed
    with quick_imports():
        from dsreason.export import export_checkpoint
    from dsreason.runtime.checkpoint_folder import find_checkpoint

    folder = checkpoint if checkpoint.name == "checkpoints" else checkpoint / "checkpoints"
    export_checkpoint(find_checkpoint(folder) or checkpoint, output, dtype=dtype.value, max_shard_size=max_shard_size)
    typer.echo(f"exported to {output}", err=True)
