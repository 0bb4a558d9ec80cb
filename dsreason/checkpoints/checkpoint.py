"""Saving and loading of checkpoints, from which a run can resume on the same number of ranks or on a different one.

`checkpoint_folder` describes their layout. `step_N/universal/` is created when a run first resumes on a different number of
ranks.
"""

from __future__ import annotations

import contextlib
import io
from argparse import Namespace  # noqa: TID251 (DeepSpeed's converter requires it)
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

import deepspeed
import torch
from deepspeed import DeepSpeedEngine
from deepspeed.checkpoint import ds_to_universal
from safetensors.torch import save_file
from torch import Tensor

from dsreason.checkpoints.checkpoint_folder import (
    SAVING,
    Parameter,
    SavedRun,
    TrainerState,
    check_written,
    convert_to_save_error,
    delete_folder,
    get_rng_file,
    read_checkpoint,
)
from dsreason.checkpoints.digests import compute_digest
from dsreason.checkpoints.marker import (
    MARKER,
    STATE_FILE,
    check_content,
    check_sizes,
    read_json,
    write_json,
    write_marker,
)
from dsreason.checkpoints.rng import load_rng_state, take_rng_state
from dsreason.checkpoints.shards import UNREADABLE, check_names, load_model_file, load_optimizer_file, load_safely
from dsreason.engine.average import get_average_file
from dsreason.engine.engine import get_full_shape
from dsreason.errors import CheckpointError
from dsreason.files.atomic import flush, open_draft
from dsreason.files.step_names import format_step
from dsreason.job.ranks import World, run_on_rank_zero, run_once_per_folder, share_errors
from dsreason.problems import join_first

UNIVERSAL = "universal"


def make_partial_folder(folder: Path, step: int, world: World) -> Path:
    """Create an empty, temporarily named folder in which to write a checkpoint, and return its path. Collective."""
    partial = folder / f"{SAVING}{format_step(step)}"

    def make() -> None:
        with convert_to_save_error(partial):
            delete_folder(partial)
            partial.mkdir(parents=True)
            flush(folder.parent)

    run_once_per_folder(world, make)
    return partial


def build_state_writer(
    engine: DeepSpeedEngine,
    partial: Path,
    state: TrainerState,
    world: World,
    averages: Mapping[str, Mapping[str, Tensor]],
) -> Callable[[], list[Path]]:
    """Return a function that writes the checkpoint files that DeepSpeed does not write, and returns their paths.

    The function writes the trainer's state and the random-number states as of now, and the local shards in `averages`, which
    must not change until the function is called. Call it once DeepSpeed's files are on disk, because the random-number file shows
    that a rank has written all its files.
    """
    write_rng_state = take_rng_state(world.device)
    saved = SavedRun(
        state=state,
        world_size=world.size,
        ranks=list(world.ranks_here),
        zero_stage=int(engine.zero_optimization_stage()),
        precision="bf16" if engine.bfloat16_enabled() else "fp32",
        versions={"torch": torch.__version__, "deepspeed": deepspeed.__version__},
        parameters=describe_parameters(engine),
    )
    described = asdict(saved)  # converted now because training continues to change the state

    def write() -> list[Path]:
        files = []
        if world.is_first_of_folder:
            files.append(partial / STATE_FILE)
            write_json(files[-1], described)
        for label, shares in averages.items():
            files.append(partial / get_average_file(label, world.rank))
            with open_draft(files[-1], durable=True) as draft:
                save_file(dict(shares), draft)
        files.append(partial / get_rng_file(world.rank))
        with open_draft(files[-1], durable=True) as draft:
            write_rng_state(draft)
        return files

    return write


def describe_parameters(engine: DeepSpeedEngine) -> dict[str, Parameter]:
    return {
        name: Parameter(list(get_full_shape(parameter)), parameter.requires_grad)
        for name, parameter in engine.module.named_parameters()
    }


def load_checkpoint(engine: DeepSpeedEngine, path: Path, world: World, *, with_frozen: bool = True) -> TrainerState:
    """Load weights, optimizer state and random-number states from `path`, whose content `check_together` has checked. Collective.

    If the number of ranks is the same as when the checkpoint was saved, the run continues bit for bit. Otherwise, DeepSpeed's
    universal format is used, which is created once inside the checkpoint; frozen parameters then keep the values of the
    loaded model, and additional ranks keep their random-number states. The learning rate, betas and weight decay in `engine`
    never change.

    Args:
        with_frozen: whether the checkpoint contains the frozen weights; if not, they keep the values of the loaded model.

    Raises:
        CheckpointError: a file is missing or damaged, or the parameters differ; raised on every rank.
    """
    saved = run_on_rank_zero(lambda: read_checkpoint(path))
    check_files(path, world)
    check_matches(path, saved, engine)
    settings = [
        {key: value for key, value in group.items() if key != "params"} for group in engine.optimizer.param_groups
    ]
    if saved.world_size != world.size:
        run_on_rank_zero(lambda: make_universal(path, saved))
    with share_errors():
        reading = path
        try:
            if saved.world_size == world.size:
                check_groups(path, saved, engine, world)
                with load_safely():
                    loaded, _ = engine.load_checkpoint(str(path.parent), tag=path.name, load_module_strict=with_frozen)
                if loaded is None:
                    raise CheckpointError(
                        f"{path}: DeepSpeed found no checkpoint in this folder; choose another checkpoint"
                    )
            else:
                load_universal(engine, path)
            if world.rank < saved.world_size:
                reading = path / get_rng_file(world.rank)
                load_rng_state(reading, world.device)
        except UNREADABLE as cause:
            raise CheckpointError(f"{reading}: cannot be loaded ({cause}); choose another checkpoint") from cause
    for group, values in zip(engine.optimizer.param_groups, settings, strict=True):
        group.update(values)
    return saved.state


def check_files(path: Path, world: World) -> None:
    """Check that all files have the listed sizes, that no host's files are missing, and that this rank can read its files."""
    with share_errors():
        check_sizes(path)
        saved = read_checkpoint(path)
        check_parts(path, saved.world_size, world)
        if saved.world_size == world.size:
            load_optimizer_file(path, world.rank)
            load_model_file(path, world.rank, saved.zero_stage)


def check_parts(path: Path, size: int, world: World) -> None:
    """Raise CheckpointError if the folder lacks this rank's files or, if the number of ranks differs, any rank's files."""
    needed = [world.rank] if size == world.size else range(size)
    advice = f"resume with {size} ranks on the same hosts in the same order, or copy the folders of all hosts into one"
    check_written(path, size, needed, advice)


def check_matches(path: Path, saved: SavedRun, engine: DeepSpeedEngine) -> None:
    """Raise CheckpointError if the model, the frozen parameters or the ZeRO stage differ from the saved run."""
    now, before = describe_parameters(engine), saved.parameters
    trained_now = {name for name in now if now[name].trained}
    trained_before = {name for name in before if before[name].trained}
    differences = {
        "not in the checkpoint": now.keys() - before.keys(),
        "only in the checkpoint": before.keys() - now.keys(),
        "with a different shape": {
            name for name in now.keys() & before.keys() if now[name].shape != before[name].shape
        },
        "trained in the checkpoint, frozen now": (trained_before - trained_now) & now.keys(),
        "frozen in the checkpoint, trained now": (trained_now - trained_before) & before.keys(),
    }
    problems = [
        f"{kind}: {join_first(sorted(names), 3, separator=', ')}" for kind, names in differences.items() if names
    ]
    if problems:
        raise CheckpointError(
            f"{path}: the parameters differ: {'; '.join(problems)}; set model.path, model.freeze and lora as in the saved run"
        )
    check_stage(path, saved, int(engine.zero_optimization_stage()))


def check_groups(path: Path, saved: SavedRun, engine: DeepSpeedEngine, world: World) -> None:
    """Raise CheckpointError if parameters are in different optimizer groups than in the checkpoint.

    DeepSpeed stores each group as one flat tensor, so it would load weights and moments into the wrong parameters.
    """
    before = load_model_file(path, world.rank, saved.zero_stage)["param_shapes"]
    now = engine._get_zero_param_shapes()
    if [list(names) for names in before] != [list(names) for names in now]:
        raise CheckpointError(
            f"{path}: was saved with {len(before)} optimizer groups of other parameters than the {len(now)} groups of this run; "
            "set optim.lr_multipliers, and zero_optimization.sub_group_size in the DeepSpeed JSON, as in the saved run"
        )


def check_stage(path: Path, saved: SavedRun, stage: int) -> None:
    if saved.zero_stage != stage:
        raise CheckpointError(
            f"{path}: was saved with ZeRO stage {saved.zero_stage}, but this run uses stage {stage}; use the DeepSpeed JSON of "
            "the saved run"
        )


def make_universal(path: Path, saved: SavedRun) -> None:
    """Write `<path>/universal`, which holds each parameter's unsharded float32 weight and optimizer state in a separate folder.

    An existing folder is reused if it was created from this version of the checkpoint and all its files are intact.
    """
    made_of = compute_digest(path / MARKER)
    with contextlib.suppress(CheckpointError):
        check_content(path / UNIVERSAL)
        if read_json(path / UNIVERSAL / MARKER).get("made_of") == made_of:
            return
    check_names(path, saved)
    partial = path / f"{SAVING}{UNIVERSAL}"
    delete_folder(partial)
    delete_folder(path / UNIVERSAL)
    arguments = Namespace(
        input_folder=str(path),
        output_folder=str(partial),
        num_extract_workers=1,  # more workers would fork this process and keep the files of several ranks in memory
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    try:
        with load_safely(), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            ds_to_universal.main(arguments)
        write_marker(partial, made_of=made_of)
        partial.rename(path / UNIVERSAL)
    except UNREADABLE as cause:
        raise CheckpointError(
            f"{path}: cannot be converted for a different number of ranks ({cause}); resume with {saved.world_size} ranks"
        ) from cause
    (path / "latest_universal").unlink(missing_ok=True)


def load_universal(engine: DeepSpeedEngine, path: Path) -> None:
    engine._config.load_universal_checkpoint = True  # same effect as `checkpoint.load_universal` in the DeepSpeed JSON
    try:
        with load_safely():
            engine.load_checkpoint(str(path), tag=UNIVERSAL)
    finally:
        engine._config.load_universal_checkpoint = False
    # DeepSpeed gives all flat groups the same step tensor, which AdamW would increment once per group.
    for parameter, state in engine.optimizer.optimizer.state.items():
        state["step"] = state["step"].to(parameter.device, copy=True)
