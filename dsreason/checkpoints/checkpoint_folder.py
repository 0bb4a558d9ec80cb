"""Functions that find, complete, rename and delete checkpoint folders. This module does not need torch.

<folder>/step_N/            DeepSpeed's files, trainer_state.json, and rng_rank_R.safetensors, the last file that rank R writes
<folder>/step_N/COMPLETE    marker, written last: size and digest of every file; without it, a folder is never used
<folder>/.saving_step_N/    checkpoint that is being written, or that a killed run has left; see `finish_interrupted`
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, NonNegativeInt, TypeAdapter, ValidationError

from dsreason.checkpoints.marker import MARKER, STATE_FILE, check_content, write_marker
from dsreason.checkpoints.trained_vision import TrainedVision
from dsreason.config.schema_data import TemplateArguments
from dsreason.errors import CheckpointError, SaveError
from dsreason.files.atomic import flush
from dsreason.files.disk import read_small, remove, to_os_error
from dsreason.files.step_names import PREFIX, format_step, is_step_name, parse_step
from dsreason.problems import describe_first_problem, join_first

CARD, STEPS = "README.md", "optimizer steps"
"""File name of an export's model card, and label of its row that contains the step of the weights."""
SAVING, DELETING = ".saving_", ".deleting_"
DAMAGED = "damaged_"
"""Prefix of the names of checkpoints that were found to be damaged."""
MAX_RANKS = 100_000
"""Maximum number of ranks in a checkpoint. A larger number must be an error; checking the files of all ranks would take long."""


@dataclass(frozen=True)
class SavedAdapter:
    """The description of a checkpoint's adapter and of the base model on which it was trained."""

    base: str
    """Value of `model.path` for the base model."""
    revision: str | None
    fingerprint: str
    """Fingerprint of the base model's folder."""
    settings: dict[str, Any]
    """Content of peft's adapter_config.json."""
    scales: dict[str, float]
    """Scale factor of each layer's adapter: layer name → factor."""
    quantize: Literal["nf4"] | None = None
    """Format of the base model's quantized matrices (see `model.quantize`); None if they were not quantized."""


@dataclass
class TrainerState:
    """The state of a run other than weights, optimizer state and random-number states."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    step: NonNegativeInt = 0
    """Number of completed optimizer steps."""
    epoch: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    consumed_samples: Annotated[int, Field(ge=0, le=2**62)] = 0
    best_metric: float | None = None
    best_name: str = ""
    """Name of the metric whose value is `best_metric`."""
    best_step: NonNegativeInt | None = None
    model_path: str = ""
    """Folder from which the model was loaded; exports copy its config, tokenizer and processor."""
    adapter: SavedAdapter | None = None
    """Adapter, if the run trains one. The checkpoint then contains only the adapter's weights, and exports read the base model's
    weights from `model_path`."""
    vision: TrainedVision | None = None
    """Vision settings of the training rows; None for text-only and world models, and in older checkpoints."""
    template_arguments: TemplateArguments = field(default_factory=dict)
    """Arguments of the chat template in training; {} for world models, and in older checkpoints."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Additional state that a resumed run restores, as JSON values."""


@dataclass(frozen=True)
class Parameter:
    shape: list[NonNegativeInt]
    trained: bool


@dataclass(frozen=True)
class SavedRun:
    """The content of trainer_state.json."""

    state: TrainerState
    world_size: Annotated[int, Field(ge=1, le=MAX_RANKS)]
    zero_stage: Annotated[int, Field(ge=1, le=3)]
    precision: Literal["bf16", "fp32"]
    parameters: dict[str, Parameter]
    ranks: list[NonNegativeInt] = field(default_factory=list)
    """Ranks whose files are in this folder; empty in older checkpoints, which contain the files of all ranks."""
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def stored_ranks(self) -> Sequence[int]:
        return self.ranks or range(self.world_size)


def choose_checkpoint(folder: Path, resume: str | None) -> Path | None:
    """Return the checkpoint that `--resume` selects for a run whose checkpoints are in `folder`; None to start a new run.

    `auto` selects the newest complete checkpoint in `folder`. A path may be that of a checkpoint, of a run, or of a run's
    checkpoints folder.

    Raises:
        CheckpointError: the path contains no complete checkpoint.
    """
    if resume is None:
        return None
    if resume == "auto":
        return find_checkpoint(folder)
    path = Path(resume)
    if not path.name.startswith(PREFIX):
        checkpoints = path if path.name == "checkpoints" else path / "checkpoints"
        newest = find_checkpoint(checkpoints)
        if newest is None:
            raise CheckpointError(
                f"--resume {resume}: {checkpoints} has no complete checkpoint; pass a folder such as run/checkpoints/step_N"
            )
        path = newest
    check_complete(path)
    return path


def find_checkpoint(folder: Path) -> Path | None:
    """Return the complete checkpoint with the highest step; None if the folder has no complete checkpoint."""
    complete = find_complete_checkpoints(folder)
    return complete[-1] if complete else None


def find_newer_checkpoint(folder: Path, file: Path) -> Path | None:
    """Return the checkpoint with the highest step if it is newer than the export that contains `file`; otherwise None.

    The steps are compared if the export's model card contains its step. If it does not, or if the export has the higher step,
    the modification times decide: the export's checkpoint may have been deleted, or the export may be from an older run.
    """
    newest = find_checkpoint(folder)
    if newest is None:
        return None
    step = read_exported_step(file.parent)
    if step is None or parse_step(newest) < step:
        is_newer = (newest / MARKER).stat().st_mtime > file.stat().st_mtime
    else:
        is_newer = parse_step(newest) > step
    return newest if is_newer else None


def read_exported_step(export: Path) -> int | None:
    """Return the step of an export's weights according to its model card; None if the card is missing or has no step."""
    try:
        text = read_small(export / CARD).decode("utf-8", errors="replace")
    except OSError:
        return None
    steps_row = re.search(rf"^\| {STEPS} \| ([0-9]{{1,18}}) \|$", text, re.MULTILINE)
    return int(steps_row[1]) if steps_row else None


def find_complete_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in a folder, sorted by step."""
    if not folder.is_dir():
        return []
    complete = [path for path in folder.iterdir() if is_step_name(path.name) and (path / MARKER).is_file()]
    return sorted(complete, key=parse_step)


def find_unfinished_steps(folder: Path) -> list[int]:
    """Return the steps of checkpoints that are being written."""
    return [parse_step(Path(path.name.removeprefix(SAVING))) for path in folder.glob(f"{SAVING}{PREFIX}*")]


def check_complete(path: Path) -> None:
    if not path.is_dir():
        raise CheckpointError(f"{path}: the checkpoint folder does not exist; choose another checkpoint")
    if not (path / MARKER).is_file():
        raise CheckpointError(f"{path}: is not a complete checkpoint ({MARKER} is missing); choose another checkpoint")


def read_checkpoint(path: Path) -> SavedRun:
    """Read trainer_state.json of a complete checkpoint, and check that the folder's name matches its step."""
    check_complete(path)
    saved = read_state(path)
    if is_step_name(path.name) and parse_step(path) != saved.state.step:
        raise CheckpointError(
            f"{path}: contains the checkpoint of step {saved.state.step} according to its {STATE_FILE}; rename it to "
            f"{format_step(saved.state.step)}, or choose another checkpoint"
        )
    return saved


def read_state(folder: Path) -> SavedRun:
    """Read trainer_state.json of a checkpoint; raise CheckpointError with the first problem if the file is invalid."""
    file = folder / STATE_FILE
    try:
        saved = TypeAdapter(SavedRun).validate_json(read_small(file), strict=True)
        if max(saved.stored_ranks) >= saved.world_size:
            raise ValueError(f"ranks is {saved.ranks}, but world_size is {saved.world_size}")
    except (OSError, ValueError) as cause:
        problem = describe_first_problem(cause) if isinstance(cause, ValidationError) else cause
        raise CheckpointError(
            f"{file}: is not a valid checkpoint state ({problem}); choose another checkpoint"
        ) from cause
    return saved


def finish(partial: Path, final: Path, ranks: Iterable[int], digests: Mapping[str, str] | None = None) -> None:
    """Write the marker and rename `partial` to `final`, which completes the checkpoint. Replace an existing one of that name.

    Call this on one rank per folder, after `ranks` have written their files to it, whose `digests` are computed here if unknown.
    """
    missing = find_unwritten(partial, ranks)
    if missing:
        raise CheckpointError(
            f"{partial}: does not contain {', '.join(missing)}, which the ranks of this folder should have written"
        )
    with convert_to_save_error(final):
        write_marker(partial, digests)
        # This is safe now: the new checkpoint has its marker, so `finish_interrupted` can recover it.
        replaced = mark_deleted(final)
        partial.rename(final)
        flush(final.parent)
        if replaced is not None:
            remove(replaced)


def find_unwritten(folder: Path, ranks: Iterable[int]) -> list[str]:
    """Return the names of missing random-number files, whose ranks have not written all their files."""
    return [name for name in map(get_rng_file, ranks) if not (folder / name).is_file()]


def check_written(folder: Path, world_size: int, ranks: Iterable[int], advice: str) -> None:
    """Raise CheckpointError with `advice` if the folder lacks files of `ranks`, which were written on other hosts."""
    if missing := find_unwritten(folder, ranks):
        raise CheckpointError(
            f"{folder}: does not contain {join_first(missing, 3, separator=', ')}: the {world_size} ranks of this run wrote to "
            f"folders on several hosts; {advice}"
        )


def get_rng_file(rank: int) -> str:
    return f"rng_rank_{rank}.safetensors"


def finish_interrupted(folder: Path) -> list[Path]:
    """Clean up after a killed run: complete and return the checkpoints that all ranks have written, and delete other leftovers.

    Call this only on rank 0, before training.
    """
    recovered = []
    for partial in sorted(folder.glob(f"{SAVING}{PREFIX}*")):
        final = folder / partial.name.removeprefix(SAVING)
        with contextlib.suppress(CheckpointError):
            digests = check_content(partial).full_digests if (partial / MARKER).is_file() else {}
            saved = read_state(partial)
            if final.name == format_step(saved.state.step):
                finish(partial, final, saved.stored_ranks, digests)
                recovered.append(final)
    for prefix in (SAVING, DELETING):
        for path in folder.glob(f"{prefix}*"):
            remove(path)
    return recovered


def set_aside_newer(folder: Path, path: Path) -> list[Path]:
    """Rename the checkpoints in `folder` that are newer than `path`, because a run that resumes from `path` repeats their steps.

    A checkpoint of the same step is also renamed if `path` belongs to another run. Call this only on rank 0, before training.
    Return the new paths, whose names are `replaced_step_N`.
    """
    renamed = []
    for newer in find_complete_checkpoints(folder):
        if parse_step(newer) >= parse_step(path) and newer.resolve() != path.resolve():
            delete_folder(aside := newer.with_name(f"replaced_{newer.name}"))
            renamed.append(newer.rename(aside))
    return renamed


def set_aside_damaged(path: Path) -> Path:
    """Rename a damaged checkpoint to `damaged_step_N`, so that it no longer counts as complete, and return the new path."""
    aside = path.with_name(f"{DAMAGED}{path.name}")
    with convert_to_save_error(path):
        delete_folder(aside)
        path.rename(aside)
        flush(path.parent)
    return aside


def find_unmarked(folder: Path) -> list[Path]:
    """Return the folders with a checkpoint's name that have lost their marker: a checkpoint gets its name after its marker."""
    paths = folder.glob(f"{PREFIX}*") if folder.is_dir() else ()
    return [
        path for path in sorted(paths) if is_step_name(path.name) and path.is_dir() and not (path / MARKER).exists()
    ]


def prune_checkpoints(folder: Path, keep: int, spared: Collection[Path | None] = ()) -> None:
    """Delete complete checkpoints except the `keep` newest (-1 keeps all) and those in `spared`. Call this once per folder."""
    prune(find_complete_checkpoints(folder), keep, spared)


def prune_exports(
    folder: Path, keep: int, step: int, spared: Collection[Path | None] = (), export_file: str = "config.json"
) -> None:
    """Delete all exports `step_N` of a run except the `keep` newest and those in `spared`. Call this only on rank 0.

    Exports of steps after `step`, the run's current one, count as the oldest, because the run has resumed from an earlier step
    and does not continue from them. Modification times are ignored, because a clock may be set back. Exports with other names,
    such as `final`, are kept. A folder is an export if it contains `export_file`.
    """
    exports = [file.parent for file in folder.glob(f"{PREFIX}*/{export_file}") if is_step_name(file.parent.name)]
    exports.sort(key=lambda export: (parse_step(export) <= step, parse_step(export)))
    prune(exports, keep, spared)


def prune(complete: Sequence[Path], keep: int, spared: Collection[Path | None]) -> None:
    """Delete all folders of `complete`, sorted from oldest to newest, except the last `keep` and those in `spared`."""
    if keep < 0:
        return
    for path in complete[: max(len(complete) - keep, 0)]:
        if path not in spared:
            delete_folder(path)


def delete_folder(path: Path) -> None:
    """Rename a folder before deleting it, so that a partially deleted folder is never mistaken for a checkpoint."""
    if (doomed := mark_deleted(path)) is not None:
        remove(doomed)


def mark_deleted(path: Path) -> Path | None:
    """Rename a folder to mark it for deletion, and return the new path; None if the folder does not exist."""
    if not os.path.lexists(path):
        return None
    doomed = path.with_name(f"{DELETING}{path.name}")
    remove(doomed)
    return path.rename(doomed)


@contextlib.contextmanager
def convert_to_save_error(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if (cause := to_os_error(error)) is None:
            raise
        raise SaveError(f"{path}: cannot be written: {cause}; older checkpoints are unchanged") from error
