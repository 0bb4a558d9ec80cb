"""`dsreason export`: conversion of a checkpoint to a Hugging Face folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from dsreason.config.output import find_run_record
from dsreason.errors import CheckpointError
from dsreason.files.disk import check_writable
from dsreason.files.lock import check_not_in_use
from dsreason.files.step_names import is_step_name
from dsreason.imports import make_imports_fast
from dsreason.job import launch
from dsreason.screen import print_message

if TYPE_CHECKING:
    from dsreason.checkpoints.model_card import CardScore


def export(
    checkpoint: Annotated[Path, typer.Option(help="Checkpoint (D/checkpoints/step_N), or the folder of a run.")],
    output: Annotated[Path, typer.Option(help="Folder to write the model to.")],
    dtype: Annotated[Literal["bf16", "fp32"], typer.Option(help="Data type of the exported weights.")] = "bf16",
    max_shard_size: Annotated[str, typer.Option(help="Maximum size of each safetensors file.")] = "4GB",
    results_dir: Annotated[
        Path | None, typer.Option(help="Evaluation results of the model, whose scores are added to its model card.")
    ] = None,
) -> None:
    """Export a checkpoint to a Hugging Face folder for transformers and vLLM, or for diffusers if it is a world model."""
    check_writable(Path(os.path.realpath(output)).parent, "--output")  # if --output is a link, this checks its target
    check_run_does_not_write(output)
    launch.prepare_environment()  # must precede the imports below, which load torch and DeepSpeed
    with make_imports_fast():
        from dsreason.checkpoints.export import export_checkpoint
    from dsreason.checkpoints.checkpoint_folder import find_checkpoint

    folder = checkpoint if checkpoint.name == "checkpoints" else checkpoint / "checkpoints"
    checkpoint_folder = find_checkpoint(folder) or checkpoint
    if checkpoint_folder == checkpoint and find_run_record(checkpoint) is not None:
        raise CheckpointError(
            f"{checkpoint}: the run has no complete checkpoint in {folder} yet; export it after it has saved one"
        )
    if is_world_checkpoint(checkpoint_folder):
        if results_dir:
            raise typer.BadParameter(
                f"{checkpoint_folder} is a world model, whose model card has no scores; remove --results-dir",
                param_hint="--results-dir",
            )
        with make_imports_fast():
            from dsreason.world.training.export import export_world_checkpoint

        export_world_checkpoint(checkpoint_folder, output, dtype=dtype, max_shard_size=max_shard_size)
    else:
        scores = read_accuracies(results_dir) if results_dir else ()
        export_checkpoint(checkpoint_folder, output, dtype=dtype, max_shard_size=max_shard_size, scores=scores)
    print_message(f"exported to {output}", err=True)


def check_run_does_not_write(output: Path) -> None:
    """Raise ConfigError if `output` is an export that a running job writes, replaces or deletes itself."""
    exports = output.absolute().parent
    if exports.name == "export" and (output.name == "final" or is_step_name(output.name)):
        check_not_in_use(exports.parent)


def is_world_checkpoint(checkpoint: Path) -> bool:
    """Return whether the checkpoint's base model is a folder in diffusers' format."""
    from dsreason.checkpoints.checkpoint_folder import read_checkpoint

    return (Path(read_checkpoint(checkpoint).state.model_path) / "model_index.json").is_file()


def read_accuracies(results_dir: Path) -> list[CardScore]:
    with make_imports_fast():
        from dsreason.checkpoints.model_card import CardScore
        from dsreason.evaluation.report.results import find_runs, read_run
        from dsreason.evaluation.report.score import score

    accuracies = []
    for run in find_runs(results_dir):
        for name, accuracy in score(read_run(run)).datasets.items():
            over_all = accuracy.over_all
            accuracies.append(CardScore(name, run.folder.name, over_all.share or 0.0, over_all.total))
    return accuracies
