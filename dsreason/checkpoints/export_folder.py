"""Export folders: drafts, which only one process at a time can write, and the files copied from the base model's folder."""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from dsreason.checkpoints.export_digests import write_digests
from dsreason.errors import CheckpointError, ConfigError, SaveError
from dsreason.files.atomic import flush
from dsreason.files.disk import check_link, find_existing, remove
from dsreason.files.lock import LOCK_FILE, FolderLock, LockWriteError

log = logging.getLogger(__name__)

TAKEN = re.compile(
    r"(generation_|processor_|preprocessor_|video_preprocessor_|tokenizer_)?config\.json|"
    r"tokenizer\.(json|model)|special_tokens_map\.json|added_tokens\.json|"
    r"vocab\.(json|txt|bpe)|merges\.txt|(spiece|sentencepiece|sentencepiece\.bpe|spm|tiktoken)\.model|"
    r"chat_template\.(json|jinja)|additional_chat_templates/[^/.][^/]*\.jinja|"
    r"(?i:(licen[cs]e|notice)(\.md|\.txt)?)"
)
"""Pattern for the base-model files that an export copies: the files from which transformers reads the config, tokenizer and
processor, and the license, which must accompany a changed model."""
CODE = re.compile(r"[A-Za-z_]\w*\.py")
"""Pattern for files with a model's own code, which an export copies only with `model.trust_remote_code`."""


ATTEMPTS = 100
"""Number of attempts to lock a folder that other processes keep deleting."""


@contextmanager
def write_folder_atomically(output: Path, *, durable: bool = True) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `output` once the block has succeeded.

    Args:
        durable: whether to add a file with digests, and to sync all files to disk before renaming, so that a complete folder
            survives a power failure.

    Raises:
        CheckpointError: `output` is not empty.
        ConfigError: another process is writing the folder.
        SaveError: the folder cannot be written; it has been removed.
    """
    if output.is_symlink() or output.is_dir():
        output = Path(os.path.realpath(output))  # replace the target, so that a link to another disk remains a link
    try:
        existing = find_existing(output.parent)
        with hold_draft(output) as draft:
            check_target_empty(output)
            yield draft
            if durable:
                write_digests(draft)
                flush_folder(draft)
            check_target_empty(output)
            draft.rename(output)
            if durable:
                flush_parents(output, existing)
    except (OSError, SafetensorError) as error:
        raise SaveError(f"{output}: cannot be written ({error}); free disk space, or choose another folder") from error


@contextmanager
def hold_draft(output: Path) -> Iterator[Path]:
    """Yield a new folder beside `output`, and delete it at the end of the block. A lock keeps other processes from creating one.

    Drafts left by killed processes are deleted first. Each draft has a unique name, so a process that has lost its lock cannot
    rename another process's draft.
    """
    drafts = output.with_name(f".{output.name}.partial")
    try:
        with FolderLock(lambda error: log.warning("%s", error)) as lock:
            try:
                lock_drafts(drafts, lock)
            except LockWriteError as error:
                raise SaveError(f"{output}: cannot be written now: {error}") from None
            except ConfigError as error:
                raise ConfigError(f"{output}: cannot be written now: {error}") from None
            delete_drafts(drafts)
            draft = drafts / os.urandom(4).hex()
            draft.mkdir()
            try:
                yield draft
            finally:
                shutil.rmtree(draft, ignore_errors=True)
    finally:
        with suppress(OSError):  # another process has taken the lock
            drafts.rmdir()


def lock_drafts(drafts: Path, lock: FolderLock) -> None:
    """Create the folder for drafts and lock it; retry if another process, on its way out, deletes it in the meantime."""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            if drafts.is_symlink() or not drafts.is_dir():
                drafts.unlink(missing_ok=True)
                drafts.mkdir(parents=True, exist_ok=True)
            lock.take(drafts)
            return
        except (FileNotFoundError, FileExistsError, IsADirectoryError):
            if attempt == ATTEMPTS:
                raise
        except LockWriteError as error:
            if attempt == ATTEMPTS or not error.no_folder:
                raise


def delete_drafts(drafts: Path) -> None:
    for path in drafts.iterdir():
        if path.name != LOCK_FILE:
            remove(path)


def flush_folder(folder: Path) -> None:
    """Sync a folder to disk, including all files and folders in it."""
    for path in (*folder.rglob("*"), folder):
        flush(path)


def flush_parents(output: Path, existing: Path) -> None:
    """Sync the parent folders of `output` to disk, up to `existing`, the nearest one that existed before."""
    for folder in output.absolute().parents:
        flush(folder)
        if folder == existing:
            return


def check_target(source: Path, output: Path, *, with_code: bool) -> None:
    check_target_empty(output)
    if not (source / "config.json").is_file():
        raise CheckpointError(
            f"{source}: config.json is missing from this folder, which the model was loaded from; restore the base model"
        )
    check_base_links(source, with_code=with_code)


def check_base_links(source: Path, *, with_code: bool) -> None:
    """Raise CheckpointError if a file that exports copy from the base model's folder is a link leading outside that folder."""
    for path in list_base_files(source, with_code=with_code):
        check_link(path, source)


def check_target_empty(output: Path) -> None:
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise CheckpointError(f"{output}: exists and is not empty; remove it, or choose another output folder")


def list_base_files(source: Path, *, with_code: bool) -> list[Path]:
    """Return the base model's config, tokenizer, processor and license files, and its code if `with_code`."""
    paths = sorted([*source.iterdir(), *source.glob("additional_chat_templates/*")])
    names = {path: path.relative_to(source).as_posix() for path in paths if path.is_file()}
    return [file for file, name in names.items() if TAKEN.fullmatch(name) or (with_code and CODE.fullmatch(name))]


def copy_base_files(source: Path, output: Path, *, with_code: bool) -> None:
    """Copy the files that `list_base_files` returns, and no others.

    Raises:
        CheckpointError: one of these files is a link that leads outside the folder.
    """
    for file in list_base_files(source, with_code=with_code):
        copy_file(source, file.relative_to(source).as_posix(), output)


def copy_file(source: Path, name: str, output: Path) -> None:
    """Copy the file `name` from a folder; raise CheckpointError if it is a link that leads outside the folder."""
    check_link(source / name, source)
    (output / name).parent.mkdir(exist_ok=True)
    shutil.copyfile(source / name, output / name)
