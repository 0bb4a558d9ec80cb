"""Functions that download data sets from the Hugging Face Hub, in the layout that `dsreason eval --data` and the adapters read.

A file `<path>` in the repository is written to `<data_dir>/<task>/<path>`. An archive of clips (`<ds>/clips.tar.gz`,
`<ds>/clips/part0.tar.gz`) is unpacked to `<data_dir>/<task>/<ds>/clips/` and removed. An interrupted download is resumed, even by
a later call. `.fetched.json` records each complete file's content, as its hash on the Hub.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from threading import Event

from dsreason.errors import DataError
from dsreason.files.archives import extract
from dsreason.files.atomic import write_file
from dsreason.files.disk import find_existing, read_json_object
from dsreason.files.hub import convert_dataset_errors
from dsreason.files.lock import hold_folder
from dsreason.monitor.progress import track
from dsreason.problems import find_nearest
from dsreason.tools.datasets.hub import RemoteFile, download, get_size, list_files

REPOSITORIES = {
    "benchmark": "nvidia/Cosmos-Reason1-Benchmark",
    "sft": "nvidia/Cosmos-Reason1-SFT-Dataset",
    "rl": "nvidia/Cosmos-Reason1-RL-Dataset",
}
DATASETS = ("robovqa", "av", "agibot", "bridgev2", "holoassist", "robofail")

RECORD, PARTIALS = ".fetched.json", ".partial"
"""Names of the file that maps the path of each complete file to its hash, and of the folder with partial downloads."""
DOWNLOADS = 4
"""Number of simultaneous downloads."""
SPARE_BYTES = 100 * 1024**2


@dataclass(frozen=True)
class FetchPlan:
    """Plan for a download."""

    repo: str
    revision: str
    """Commit hash; pinning it ensures that all files are from the same version."""
    folder: Path
    files: list[RemoteFile]
    missing: list[RemoteFile]
    """Those of `files` that are not in the folder yet."""
    without_clips: list[str]
    """Requested data sets that have annotations but no clips in the repository."""

    @property
    def num_bytes(self) -> int:
        """Number of bytes that remain to be downloaded, not counting the bytes in partial downloads."""
        begun = (min(get_size(locate_partial(self.folder, file)), file.size) for file in self.missing)
        return sum(file.size for file in self.missing) - sum(begun)

    @property
    def disk_bytes(self) -> int:
        """Bytes needed on the disk: an archive and its unpacked files briefly coexist, and clips hardly compress."""
        return self.num_bytes + sum(file.size for file in self.missing if file.is_archive)


def plan_fetch(
    task: str,
    *,
    data_dir: Path,
    repo: str | None = None,
    revision: str | None = None,
    datasets: Sequence[str] = (),
    patterns: Sequence[str] = (),
) -> FetchPlan:
    """Select the files to download from the repository, and find those that are missing locally. Nothing is written.

    Args:
        task: benchmark, sft or rl; names the folder below `data_dir`, and selects the repository if `repo` is None.
        datasets: folders in the repository to select files from; empty selects all.
        patterns: patterns for the paths to select (`*.json`, `robovqa/*`); empty selects all.

    Raises:
        DataError: the repository, revision, data set or file does not exist, access is denied, or the connection fails.
    """
    repo = repo or REPOSITORIES[task]
    commit, listed = list_files(repo, revision)
    files = select_files(listed, repo, datasets, patterns)
    folder = data_dir / task
    record = read_json_object(folder / RECORD)
    return FetchPlan(
        repo=repo,
        revision=commit,
        folder=folder,
        files=files,
        missing=[file for file in files if not is_fetched(folder, file, record)],
        without_clips=list_without_clips(files, listed),
    )


def fetch(plan: FetchPlan) -> None:
    """Download the missing files, and unpack archives of clips.

    Raises:
        ConfigError: another process fetches into the same folder; both would append to the same partial downloads.
        DataError: access is denied, the connection fails, content is damaged, or the disk has too
            little space, which is checked first.
    """
    if not plan.missing:
        return
    free = shutil.disk_usage(find_existing(plan.folder)).free
    if plan.disk_bytes + SPARE_BYTES > free:
        raise DataError(
            f"{plan.folder}: {plan.repo} needs {format_bytes(plan.disk_bytes)} of disk space, but only "
            f"{format_bytes(free)} are free; "
            "choose another --data-dir, or select fewer files with --dataset and --file"
        )
    with (
        hold_folder(plan.folder),
        track(f"fetching {plan.repo}", plan.num_bytes, "bytes") as advance,
        ThreadPoolExecutor(DOWNLOADS) as threads,
    ):
        stopped = Event()

        def received(count: int) -> None:
            if stopped.is_set():
                raise CancelledError
            advance(count)

        downloads = {
            threads.submit(download, plan.repo, plan.revision, file, locate_partial(plan.folder, file), received): file
            for file in plan.missing
        }
        try:
            for done in as_completed(downloads):
                with convert_dataset_errors(plan.repo, plan.revision):
                    done.result()
                    put_in_place(plan.folder, downloads[done])
        finally:
            stopped.set()  # the other downloads stop, and the next call resumes them
            threads.shutdown(wait=True, cancel_futures=True)
    partials = plan.folder / PARTIALS
    if partials.is_dir() and not any(partials.iterdir()):
        partials.rmdir()


# ---------------------------------------------------------------- selection of files


def select_files(
    listed: Sequence[RemoteFile], repo: str, datasets: Sequence[str], patterns: Sequence[str]
) -> list[RemoteFile]:
    """Select the requested files; hidden files such as `.gitattributes` are never selected.

    Raises:
        DataError: a data set does not exist, a pattern matches nothing, or the repository has no files.
    """
    files = [file for file in listed if not file.path.startswith(".")]
    folders = sorted({file.path.split("/")[0] for file in files if "/" in file.path})
    if absent := [name for name in datasets if name not in folders]:
        raise DataError(f"{repo}: has no data set {', '.join(absent)}; it has {', '.join(folders) or 'no folders'}")
    if datasets:
        files = [file for file in files if file.path.split("/")[0] in datasets]
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(file.path, pattern) for file in files):
            suggestion = find_nearest(pattern, [file.path for file in files])
            raise DataError(
                f"--file {pattern}: matches none of the {len(files)} files of {repo}"
                + (f"; did you mean {suggestion}?" if suggestion else "; to list them, use --dry-run without --file")
            )
    if patterns:
        files = [file for file in files if any(fnmatch.fnmatchcase(file.path, pattern) for pattern in patterns)]
    if not files:
        raise DataError(f"{repo}: contains no files")
    return files


def list_without_clips(files: Sequence[RemoteFile], listed: Sequence[RemoteFile]) -> list[str]:
    folders = sorted({file.path.split("/")[0] for file in files if "/" in file.path})
    having = {file.path.split("/")[0] for file in listed if file.is_archive or "/clips/" in file.path}
    return [name for name in folders if name in DATASETS and name not in having]


# ---------------------------------------------------------------- processing of a file


def locate_partial(folder: Path, file: RemoteFile) -> Path:
    """Return the path of a partial download. It depends on the file's content, so another version is never resumed."""
    return folder / PARTIALS / hashlib.sha256(f"{file.path} {file.content}".encode()).hexdigest()


def put_in_place(folder: Path, file: RemoteFile) -> None:
    partial = locate_partial(folder, file)
    if file.is_archive:
        unpack_clips(partial, folder / file.clips, file.path)
        partial.unlink()
    else:
        target = folder / file.path
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(partial, target)
    write_file(folder / RECORD, json.dumps({**read_json_object(folder / RECORD), file.path: file.content}, indent=2))


def unpack_clips(archive: Path, clips: Path, name: str) -> None:
    """Unpack all files in the archive directly into the folder `clips`, without the archive's folders.

    Raises:
        DataError: the archive is damaged, has paths that lead out of its folder, or has two files with the same name.
    """
    clips.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=clips.parent, prefix=".unpacking-") as scratch:
        try:
            extract(archive, Path(scratch))
        except DataError as error:
            archive.unlink()
            raise DataError(f"{name}: {error}; the archive was removed, so run the same command again") from error
        members = [file for file in Path(scratch).rglob("*") if file.is_file() and not file.name.startswith(".")]
        by_name = {file.name: file for file in members}
        if len(by_name) < len(members):
            raise DataError(
                f"{name}: contains {len(members)} files, but only {len(by_name)} distinct names; unpack it manually"
            )
        clips.mkdir(exist_ok=True)
        for member in members:
            os.replace(member, clips / member.name)


# ---------------------------------------------------------------- existing files


def is_fetched(folder: Path, file: RemoteFile, record: dict[str, str]) -> bool:
    if record.get(file.path) != file.content:
        return False
    if file.is_archive:
        return (folder / file.clips).is_dir()
    target = folder / file.path
    return target.is_file() and target.stat().st_size == file.size


def format_bytes(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 5e7 else f"{count / 1e6:.2f} MB"
