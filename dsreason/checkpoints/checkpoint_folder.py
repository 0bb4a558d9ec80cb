"""The folders of checkpoints: which are complete, and how they get and lose their names. Nothing here needs torch.

<folder>/step_N/            DeepSpeed's files, trainer_state.json, rng_rank_R.safetensors: the last that a rank writes
<folder>/step_N/COMPLETE    written last: every file with its size and a digest of its end; a folder without it is never picked up
<folder>/.saving_step_N/    one that is being written; `recover` looks at what a killed run left
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, NonNegativeInt, TypeAdapter, ValidationError

from dsreason.errors import CheckpointError, SaveError
from dsreason.files.atomic import flush, write_file
from dsreason.files.disk import as_os_error, digest_of_end, read_small, remove
from dsreason.files.step_names import PREFIX, is_step_name, named_step, step_name
from dsreason.problems import first_problem, listed

MARKER = "COMPLETE"
STATE_FILE = "trainer_state.json"
CARD, STEPS = "README.md", "optimizer steps"
"""An export's model card, and the row in it that tells after how many its weights were taken."""
SAVING, DELETING = ".saving_", ".deleting_"
MAX_RANKS = 100_000
"""No run has more; the files of every rank are looked for one by one."""


@dataclass(frozen=True)
class SavedAdapter:
    """What a checkpoint of adapters says of them, and of the model that they were trained on."""

    base: str
    """As `model.path` names it."""
    revision: str | None
    fingerprint: str
    """Of the base model's folder."""
    settings: dict[str, Any]
    """peft's, as in adapter_config.json."""
    scales: dict[str, float]
    """Factor of each layer's adapter, by the name of the layer."""
    quantize: Literal["nf4"] | None = None
    """How the base model's matrices were held, see `model.quantize`."""


@dataclass
class TrainerState:
    """Where a run stands, beside weights, optimizer and random numbers."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    step: NonNegativeInt = 0
    """Finished optimizer steps."""
    epoch: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    consumed_samples: Annotated[int, Field(ge=0, le=2**62)] = 0
    best_metric: float | None = None
    best_name: str = ""
    """Which metric `best_metric` is a value of."""
    best_step: NonNegativeInt | None = None
    model_path: str = ""
    """Folder the model was loaded from; export takes config, tokenizer and processor from it."""
    adapter: SavedAdapter | None = None
    """Where adapters are trained. The checkpoint then has these alone, and an export takes the other weights from there, too."""
    extra: dict[str, Any] = field(default_factory=dict)
    """What else the run wants back; JSON values only."""


@dataclass(frozen=True)
class Parameter:
    shape: list[NonNegativeInt]
    trained: bool


@dataclass(frozen=True)
class SavedRun:
    """Content of trainer_state.json."""

    state: TrainerState
    world_size: Annotated[int, Field(ge=1, le=MAX_RANKS)]
    zero_stage: Annotated[int, Field(ge=1, le=3)]
    precision: Literal["bf16", "fp32"]
    parameters: dict[str, Parameter]
    ranks: list[NonNegativeInt] = field(default_factory=list)
    """Those that wrote into this folder; older checkpoints do not say it, and are of all."""
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def ranks_here(self) -> Sequence[int]:
        return self.ranks or range(self.world_size)


def choose_checkpoint(folder: Path, resume: str | None) -> Path | None:
    """Return what `--resume` means for a run with its checkpoints in `folder`: the newest complete one, or the one of that path.

    The path may also be a run or its checkpoints folder. None: start fresh. Raises CheckpointError.
    """
    if resume is None:
        return None
    if resume == "auto":
        return find_checkpoint(folder)
    path = Path(resume)
    if not path.name.startswith(PREFIX):
        inside = path if path.name == "checkpoints" else path / "checkpoints"
        newest = find_checkpoint(inside)
        if newest is None:
            raise CheckpointError(f"--resume {resume}: no complete checkpoint in {inside}; give D/checkpoints/step_N")
        path = newest
    check_complete(path)
    return path


def find_checkpoint(folder: Path) -> Path | None:
    """The complete checkpoint of the highest step, None if there is none."""
    complete = complete_checkpoints(folder)
    return complete[-1] if complete else None


def newer_checkpoint(folder: Path, file: Path) -> Path | None:
    """The checkpoint of the highest step where it is newer than the export that `file` is in, as where a run goes on.

    The export's card tells its step. Times decide where it does not, and where the export has the higher step: that may be
    one whose checkpoint was not kept, or an older run's.
    """
    newest = find_checkpoint(folder)
    if newest is None:
        return None
    step = exported_step(file.parent)
    if step is None or named_step(newest) < step:
        is_newer = (newest / MARKER).stat().st_mtime > file.stat().st_mtime
    else:
        is_newer = named_step(newest) > step
    return newest if is_newer else None


def exported_step(export: Path) -> int | None:
    """After which step an export's weights were taken, as its card tells; None if there is no such card."""
    try:
        text = read_small(export / CARD).decode("utf-8", errors="replace")
    except OSError:
        return None
    steps_row = re.search(rf"^\| {STEPS} \| ([0-9]{{1,18}}) \|$", text, re.MULTILINE)
    return int(steps_row[1]) if steps_row else None


def complete_checkpoints(folder: Path) -> list[Path]:
    """Oldest step first."""
    if not folder.is_dir():
        return []
    complete = [path for path in folder.iterdir() if is_step_name(path.name) and (path / MARKER).is_file()]
    return sorted(complete, key=named_step)


def unfinished_steps(folder: Path) -> list[int]:
    """Of checkpoints that are being written."""
    return [named_step(Path(path.name.removeprefix(SAVING))) for path in folder.glob(f"{SAVING}{PREFIX}*")]


def check_complete(path: Path) -> None:
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such checkpoint folder")
    if not (path / MARKER).is_file():
        raise CheckpointError(f"{path}: is not a complete checkpoint ({MARKER} is missing); choose another one")


def read_checkpoint(path: Path) -> SavedRun:
    """Return what a complete checkpoint says of its run."""
    check_complete(path)
    saved = read_state(path)
    if is_step_name(path.name) and named_step(path) != saved.state.step:
        raise CheckpointError(
            f"{path}: holds the checkpoint of step {saved.state.step}, says its {STATE_FILE}; give it the name "
            f"{step_name(saved.state.step)} again, or choose another one"
        )
    return saved


def read_state(folder: Path) -> SavedRun:
    """trainer_state.json of a checkpoint. CheckpointError names what cannot be used in it."""
    file = folder / STATE_FILE
    try:
        saved = TypeAdapter(SavedRun).validate_json(read_small(file), strict=True)
        if max(saved.ranks_here) >= saved.world_size:
            raise ValueError(f"ranks is {saved.ranks}, and world_size {saved.world_size}")
    except (OSError, ValueError) as cause:
        problem = first_problem(cause) if isinstance(cause, ValidationError) else cause
        raise CheckpointError(f"{file}: is not the state of a checkpoint ({problem}); choose another one") from cause
    return saved


def check_sizes(path: Path) -> dict[str, int]:
    """Compare every file with what the marker says; the names and sizes."""
    files = read_json(path / MARKER).get("files")
    if not isinstance(files, dict):
        raise CheckpointError(f"{path / MARKER}: does not list the files; choose another checkpoint")
    for name, size in files.items():
        if not (parts := Path(name).parts) or parts[0] == "/" or ".." in parts:
            raise CheckpointError(
                f"{path / MARKER}: names {name!r:.300}, which is no file in it; choose another checkpoint"
            )
        file = path / name
        if not os.path.isfile(file):  # unlike Path.is_file, False for a name that is too long
            raise CheckpointError(f"{path}/{name:.300}: is missing; choose another checkpoint")
        if type(size) is not int or file.stat().st_size != size:
            raise CheckpointError(
                f"{file}: has {file.stat().st_size} bytes instead of {size!r:.100}; choose another checkpoint"
            )
    if STATE_FILE not in files:
        raise CheckpointError(f"{path / MARKER}: does not name {STATE_FILE}; choose another checkpoint")
    return files


def check_content(path: Path) -> dict[str, int]:
    """As `check_sizes`, and that every file is the one that was written: those of another step or run have the same sizes.

    It reads the end of every file: not for every rank of a large run.
    """
    files = check_sizes(path)
    ends = read_json(path / MARKER).get("ends", {})  # older checkpoints have none
    if not (isinstance(ends, dict) and (not ends or ends.keys() == files.keys())):
        raise CheckpointError(f"{path / MARKER}: has digests of other files than it names; choose another checkpoint")
    for name, digest in ends.items():
        if digest_of_end(path / name) != digest:
            raise CheckpointError(
                f"{path / name}: is not the file that was written with {MARKER}: damaged, or of another checkpoint; put that "
                "file back, or choose another checkpoint"
            )
    return files


def write_marker(folder: Path, **facts: str) -> None:
    """Say that all files which are in a folder now are complete, and which they are; `facts` stand beside them."""
    files = [path for path in sorted(folder.rglob("[!.]*")) if path.is_file() and path.name != MARKER]
    names = {path.relative_to(folder).as_posix(): path for path in files}
    sizes = {name: path.stat().st_size for name, path in names.items()}
    ends = {name: digest_of_end(path) for name, path in names.items()}
    write_json(folder / MARKER, {**facts, "files": sizes, "ends": ends})


def finish(partial: Path, final: Path, ranks: Iterable[int]) -> None:
    """Make what the ranks of this folder have written a checkpoint, in place of an older one of that name.

    On one rank of each folder.
    """
    missing = unwritten(partial, ranks)
    if missing:
        raise CheckpointError(
            f"{partial}: has no {', '.join(missing)}, which ranks that write into this folder should have written"
        )
    with as_save_error(final):
        write_marker(partial)
        replaced = mark_deleted(final)  # the old one goes once the new one has its marker: `recover` finds that
        partial.rename(final)
        flush(final.parent)
        if replaced is not None:
            remove(replaced)


def unwritten(folder: Path, ranks: Iterable[int]) -> list[str]:
    """The files that are still missing of ranks that have not written everything."""
    return [name for name in map(rng_file, ranks) if not (folder / name).is_file()]


def check_written(folder: Path, world_size: int, ranks: Iterable[int], advice: str) -> None:
    """CheckpointError with `advice` where the folder lacks what these ranks have written on other hosts."""
    if missing := unwritten(folder, ranks):
        raise CheckpointError(
            f"{folder}: has no {listed(missing, 3, separator=', ')}: the {world_size} ranks of this run wrote to folders of "
            f"several hosts; {advice}"
        )


def rng_file(rank: int) -> str:
    return f"rng_rank_{rank}.safetensors"


def recover(folder: Path) -> list[Path]:
    """Clean up what a killed run left: a checkpoint that all ranks had written is named, and other leftovers are deleted.

    On rank 0 only, before training. Returns the checkpoints that were named.
    """
    recovered = []
    for partial in sorted(folder.glob(f"{SAVING}{PREFIX}*")):
        final = folder / partial.name.removeprefix(SAVING)
        with contextlib.suppress(CheckpointError):
            if (partial / MARKER).is_file():
                check_content(partial)
            saved = read_state(partial)
            if final.name == step_name(saved.state.step):
                finish(partial, final, saved.ranks_here)
                recovered.append(final)
    for prefix in (SAVING, DELETING):
        for path in folder.glob(f"{prefix}*"):
            remove(path)
    return recovered


def set_aside_newer(folder: Path, path: Path) -> list[Path]:
    """Rename the checkpoints in `folder` after that at `path`, which a run goes on from: it trains their steps again.

    One of the same step is set aside too where `path` is another run's. On rank 0 only, before training. Returns their
    new names, `replaced_step_N`.
    """
    renamed = []
    for newer in complete_checkpoints(folder):
        if named_step(newer) >= named_step(path) and newer.resolve() != path.resolve():
            delete_folder(aside := newer.with_name(f"replaced_{newer.name}"))
            renamed.append(newer.rename(aside))
    return renamed


def prune_checkpoints(folder: Path, keep: int, spared: Collection[Path | None] = ()) -> None:
    """Delete all but the `keep` newest complete checkpoints (-1: none is deleted) and those `spared`. On rank 0 only."""
    prune(complete_checkpoints(folder), keep, spared)


def prune_exports(
    folder: Path, keep: int, step: int, spared: Collection[Path | None] = (), export_file: str = "config.json"
) -> None:
    """The same of exports `step_N` of a run at `step`. Those of later steps count as the oldest: the run was resumed at an
    earlier step and does not go on from them. Nothing depends on the times of files, as a clock may be set back. One of
    another name, such as `final`, is not touched. Each has an `export_file`. On rank 0 only."""
    exports = [file.parent for file in folder.glob(f"{PREFIX}*/{export_file}") if is_step_name(file.parent.name)]
    exports.sort(key=lambda export: (named_step(export) <= step, named_step(export)))
    prune(exports, keep, spared)


def prune(complete: Sequence[Path], keep: int, spared: Collection[Path | None]) -> None:
    """`complete`: oldest first."""
    if keep < 0:
        return
    for path in complete[: max(len(complete) - keep, 0)]:
        if path not in spared:
            delete_folder(path)


def delete_folder(path: Path) -> None:
    """Delete, under another name first, so that no half of it is ever taken for a checkpoint."""
    if (doomed := mark_deleted(path)) is not None:
        remove(doomed)


def mark_deleted(path: Path) -> Path | None:
    """Give a folder, if there is one, the name of what is being deleted."""
    if not os.path.lexists(path):
        return None
    doomed = path.with_name(f"{DELETING}{path.name}")
    remove(doomed)
    return path.rename(doomed)


@contextlib.contextmanager
def as_save_error(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if (cause := as_os_error(error)) is None:
            raise
        raise SaveError(f"{path}: cannot be written: {cause}; older checkpoints are as they were") from error


def write_json(path: Path, value: Any) -> None:
    write_file(path, json.dumps(value, indent=1) + "\n", durable=True)


def read_json(path: Path, advice: str = "choose another checkpoint") -> dict[str, Any]:
    try:
        document = json.loads(read_small(path))
    except (OSError, ValueError, RecursionError) as cause:
        raise CheckpointError(f"{path}: cannot be read ({cause}); {advice}") from cause
    if not isinstance(document, dict):
        raise CheckpointError(f"{path}: holds a {type(document).__name__}; {advice}")
    return document
