"""Packages to upload: a run's logs or one of its complete checkpoints or exports, plus a marker that is uploaded last."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import SafetensorError, safe_open

from dsreason.checkpoints.checkpoint_folder import check_complete, find_complete_checkpoints
from dsreason.checkpoints.export_digests import DIGESTS_FILE, check_digests, list_unlisted
from dsreason.checkpoints.marker import MARKER, check_content, read_json
from dsreason.config.schema_checkpoint import UploadKind
from dsreason.errors import CheckpointError, ConfigError, StorageError
from dsreason.files.disk import check_link, check_links
from dsreason.files.step_names import PREFIX, is_step_name, parse_step
from dsreason.job.leftovers import make_temporary_folder
from dsreason.problems import join_first

log = logging.getLogger(__name__)

MANIFEST = "UPLOADED.json"
"""Name of the marker for a complete upload that is not a checkpoint. The marker exists only in the storage, not locally."""
CHECKPOINTS, EXPORTS, LOGS = "checkpoints", "export", "logs"
HIDDEN = re.compile(r"(^|/)\.")
"""Pattern for relative paths of hidden files and files in hidden folders, which may hold credentials: `.env`, `.git/config`."""
BESIDE_LOGS = ("config.json", "metrics.jsonl", "run.html", "tensorboard")
"""Files and folders in a run folder that are uploaded together with the logs."""


@dataclass(frozen=True)
class Sent:
    """The number of files and bytes uploaded, not counting files that the storage already had with the same content."""

    files: int
    num_bytes: int


@dataclass(frozen=True)
class Package:
    """A local folder, the files to upload from it (relative path → size in bytes), and the marker that is uploaded after them."""

    folder: Path
    files: Mapping[str, int]
    marker: str
    stamps: Mapping[str, tuple[int, int] | None] = field(default_factory=dict)
    """(Inode, modification time) of each file and the marker when the package was opened; None if it did not exist."""

    @property
    def name(self) -> str:
        return get_folder_name(self.folder)

    @property
    def num_bytes(self) -> int:
        return sum(self.files.values())

    def build_marker(self, sums: Mapping[str, str]) -> bytes:
        """Build the marker's content: that of the checkpoint's own marker, or a manifest with each file's size and SHA-256.

        Raises:
            StorageError: a file has been replaced or deleted since the package was opened, so the upload may be a mixture.
        """
        if changed := [name for name, stamp in self.stamps.items() if read_stamp(self.folder / name) != stamp]:
            raise StorageError(f"{self.folder / changed[0]}: was changed during the upload; upload the folder again")
        if self.marker == MARKER:
            return (self.folder / self.marker).read_bytes()
        files = {name: {"size": size, "sha256": sums[name]} for name, size in self.files.items()}
        return (json.dumps({"files": files}, indent=1) + "\n").encode()


def make_package(folder: Path, files: Mapping[str, int], marker: str) -> Package:
    return Package(folder, files, marker, {name: read_stamp(folder / name) for name in (*files, marker)})


def read_stamp(file: Path) -> tuple[int, int] | None:
    try:
        status = file.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns


def get_folder_kind(folder: Path) -> UploadKind:
    """Derive a folder's kind from its path in the run, such as `logs`, `checkpoints/step_4` or `export/final`."""
    if folder.name == LOGS:
        return "logs"
    return "checkpoint" if folder.parent.name == CHECKPOINTS else "export"


def find_run_of_folder(folder: Path) -> Path:
    """Return the run folder that contains `folder`."""
    return folder.parent if get_folder_kind(folder) == "logs" else folder.parent.parent


def get_folder_name(folder: Path) -> str:
    """Return a folder's path relative to its run folder, such as `checkpoints/step_4`."""
    folder = folder.absolute()
    return folder.name if get_folder_kind(folder) == "logs" else f"{folder.parent.name}/{folder.name}"


@contextmanager
def open_package_or_logs(folder: Path) -> Iterator[Package]:
    """Yield the package in `folder`; for logs, which the run may still be writing, yield a temporary copy."""
    if not is_logs(folder):
        yield open_package(folder)
        return
    with make_temporary_folder() as temporary:
        yield open_export(copy_logs(folder, Path(temporary)))


def is_logs(folder: Path) -> bool:
    folder = folder.absolute()
    return folder.name == LOGS and folder.is_dir() and (folder.parent / "metrics.jsonl").is_file()


def copy_logs(folder: Path, place: Path) -> Path:
    """Copy the ranks' logs and `BESIDE_LOGS` to a new folder in `place`, and return the new folder.

    Raises:
        CheckpointError: a link inside one of the copied folders points outside it. The folders themselves may be links.
    """
    copy = place / LOGS
    check_links(folder)
    shutil.copytree(folder, copy, symlinks=True, ignore=list_special_files)
    for name in BESIDE_LOGS:
        beside = folder.parent / name
        if beside.is_file():
            check_link(beside, folder.parent)
        if beside.is_dir():
            check_links(beside)
            shutil.copytree(beside, copy / name, symlinks=True, ignore=list_special_files)
        elif beside.is_file():
            shutil.copyfile(beside, copy / name)
    return copy


def list_special_files(folder: str, names: list[str]) -> list[str]:
    """Return the names that belong to neither files nor folders but, for example, to FIFOs, which cannot be copied."""
    return [name for name in names if not (os.path.isfile(f"{folder}/{name}") or os.path.isdir(f"{folder}/{name}"))]


def open_package(folder: Path) -> Package:
    """Open the checkpoint or export in `folder`.

    Raises:
        CheckpointError: the folder is incomplete or damaged, or contains links that point outside it.
        ConfigError: the folder is neither a checkpoint nor an export.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder}: the folder does not exist; choose an export, a checkpoint or the folder of a run")
    is_checkpoint = folder.absolute().parent.name == CHECKPOINTS or (folder / "trainer_state.json").is_file()
    if is_checkpoint or (folder / MARKER).is_file():
        check_links(folder)
        check_complete(folder)
        # The marker does not list files that were added later (`universal/`); they can be recreated.
        return make_package(folder, check_content(folder).sizes, MARKER)
    has_model = (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))
    if not (has_model or (folder / DIGESTS_FILE).is_file()):
        raise ConfigError(
            f"{folder}: is neither an export (config.json and *.safetensors) nor a checkpoint (step_N) nor the folder of a run "
            f"({CHECKPOINTS}/ or {EXPORTS}/); choose one of these"
        )
    return open_export(folder)


def open_export(folder: Path) -> Package:
    """Open an export as a package; raise CheckpointError if a file is missing or damaged."""
    check_links(folder)
    check_digests(folder)
    files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    files.pop(MANIFEST, None)
    if hidden := [name for name in files if HIDDEN.search(name)]:
        log.warning("%s: hidden files are not uploaded: %s", folder, join_first(hidden, 5, separator=", "))
        files = {name: path for name, path in files.items() if name not in hidden}
    if unlisted := list_unlisted(folder, files):
        names = join_first(unlisted, 5, separator=", ")
        log.warning("%s: files that are not in %s, but `push` uploads them, too: %s", folder, DIGESTS_FILE, names)
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards = read_json(index, "export the model again").get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
            raise CheckpointError(
                f"{index}: weight_map must map tensors to files; got {shards!r:.200}; export the model again"
            )
        if missing := set(shards.values()) - files.keys():
            raise CheckpointError(
                f"{folder}: {min(missing):.300} is missing, but is listed in {index.name}; export the model again"
            )
    for name, path in files.items():
        if name.endswith(".safetensors"):
            check_not_truncated(path)
    sizes = {name: path.stat().st_size for name, path in files.items()}
    return make_package(folder, sizes, MANIFEST)


def check_not_truncated(weights: Path) -> None:
    """Raise CheckpointError if the safetensors file is truncated or otherwise does not match its header."""
    try:
        with safe_open(weights, framework="numpy"):
            pass
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(
            f"{weights} is truncated, damaged or a Git LFS pointer ({error}); download or export the model again"
        ) from error


def get_write_time(folder: Path) -> int:
    """Return the modification time, in nanoseconds, of a complete checkpoint or an export; 0 for logs and other folders."""
    last_files = [file for file in (folder / MARKER, folder / "config.json") if file.is_file()]
    return last_files[0].stat().st_mtime_ns if last_files else 0


def is_run(folder: Path) -> bool:
    return (folder / CHECKPOINTS).is_dir() or (folder / EXPORTS).is_dir() or is_logs(folder / LOGS)


def list_finished(run: Path) -> list[Path]:
    """Return a run's complete checkpoints, sorted by step, followed by its exports, sorted by step."""
    return find_complete_checkpoints(run / CHECKPOINTS) + list_exports(run)


def list_exports(run: Path) -> list[Path]:
    """Return a run's exports, sorted by step."""
    exports = {file.parent for name in ("config.json", DIGESTS_FILE) for file in run.glob(f"{EXPORTS}/[!.]*/{name}")}
    return sorted(exports, key=_get_step_key)


def list_unfinished(run: Path) -> list[Path]:
    """Return a run's incomplete checkpoints."""
    return sorted(path for path in run.glob(f"{CHECKPOINTS}/*{PREFIX}*") if not (path / MARKER).is_file())


def _get_step_key(folder: Path) -> tuple[int, str]:
    return (parse_step(folder), "") if is_step_name(folder.name) else (2**63, folder.name)  # `final` comes last
