"""Uploads during a run, in one thread per target, so that neither training nor other targets have to wait.

    with open_uploads(config.checkpoint) as uploads:
        …                                            # train; when a checkpoint or an export is complete:
        uploads.add(folder, last=step == total_steps)
        prune(…, spared=uploads.list_in_use())       # keep folders whose upload is not complete

At its end, the block waits until all uploads have finished or the job is asked to stop. If a folder has not been uploaded by
then, the block raises an error with the command that uploads it. If the run fails, the block waits only briefly, for the logs.
"""

from __future__ import annotations

import json
import logging
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any

from huggingface_hub.utils import disable_progress_bars
from rich.filesize import decimal

from dsreason.config.schema_checkpoint import CheckpointConfig, UploadKind, UploadWhat
from dsreason.errors import DsReasonError, Stopped, StorageError
from dsreason.files.address import HubAddress, UploadAddress
from dsreason.files.atomic import write_file
from dsreason.files.disk import read_json_object
from dsreason.job.failures import CRASH_LOG, build_failure
from dsreason.job.launch import is_first_rank
from dsreason.monitor.progress import track_in_lines
from dsreason.secrets import hide_secrets
from dsreason.storage.package import (
    LOGS,
    find_run_of_folder,
    get_folder_kind,
    get_folder_name,
    get_write_time,
    is_logs,
    list_finished,
    open_package_or_logs,
)
from dsreason.storage.storage import get_folder_target, upload

log = logging.getLogger(__name__)

WAITING = "not uploaded yet"
RECORD = "uploads.json"
"""Name of the record in a run folder: target → uploaded folder → modification time of the uploaded content."""
RECORDING = Lock()
"""Lock to hold while changing the record, because each target has its own thread."""
REPORT_EVERY_S = 30.0
TICK = 0.2
"""Seconds between two checks for a stop request."""
LOGS_TIME_S = 12.0
"""Seconds that a failed or stopped run waits for its logs to be uploaded; must be less than the watchdog's `CLOSING_TIME`."""


@contextmanager
def open_uploads(config: CheckpointConfig, stopped_by: Callable[[], str] = str) -> Iterator[Uploads]:
    """Yield the object that manages a run's uploads. Only the first rank uploads; on other ranks, the object has no targets.

    Leave the block after the last collective, so that no rank waits for an upload.

    Args:
        stopped_by: function that returns the name of the signal that asked the job to stop; "" if there was none.

    Raises:
        Stopped: at the end of the block, the job had been asked to stop before all folders were uploaded.
        StorageError: at the end of the block, a folder had not been uploaded. This is only logged if the run itself failed.
    """
    targets = config.targets if is_first_rank() else ()
    uploads = Uploads([Uploader(target.address, what=target.what, include=target.include) for target in targets])
    if any(isinstance(uploader.target, HubAddress) for uploader in uploads.uploaders):
        disable_progress_bars()  # the library's bars would overwrite the run's progress bar
    try:
        yield uploads
    except BaseException as error:
        uploads.finish_logs(error)
        if missing := uploads.describe_missing():
            log.warning("%s", missing)
        raise
    uploads.finish(stopped_by)


class Uploads:
    """A run's uploads to all its targets. A failure at one target does not affect the others."""

    def __init__(self, uploaders: Sequence[Uploader]) -> None:
        self.uploaders = uploaders

    def add(self, folder: Path, *, last: bool) -> None:
        """Queue a complete folder, `<run>/checkpoints/step_N` or `<run>/export/…`, for upload to all targets."""
        for uploader in self.uploaders:
            uploader.add(folder, last=last)

    def add_not_uploaded(self, run: Path) -> None:
        """Queue complete folders that earlier jobs of the run did not upload, for targets that receive all folders."""
        for uploader in self.uploaders:
            uploader.add_not_uploaded(run)

    def list_in_use(self) -> set[Path]:
        """Return the folders that must not be deleted, because their upload is queued or in progress, or will be retried."""
        return {folder for uploader in self.uploaders for folder in uploader.list_in_use()}

    def finish(self, stopped_by: Callable[[], str] = str) -> None:
        """Wait for all uploads and retry failed ones once; raise Stopped or StorageError if a folder has not been uploaded."""
        thread = Thread(target=self._finish_each, name="finishing uploads", daemon=True)
        thread.start()
        while thread.is_alive() and not stopped_by():
            thread.join(TICK)
        if missing := self.describe_missing():
            name = stopped_by()
            raise (
                Stopped(f"stopped by {name} before all uploads had finished; {missing}")
                if name
                else StorageError(missing)
            )

    def _finish_each(self) -> None:
        for uploader in self.uploaders:
            with suppress(StorageError):  # `missing` reports the failure
                uploader.finish()

    def finish_logs(self, error: BaseException) -> None:
        """Log the error that ends a run, then spend at most `LOGS_TIME_S` on uploading the logs to targets that include logs.

        Errors during these uploads are only logged.
        """
        threads = [uploader.make_logs_thread() for uploader in self.uploaders if uploader.has_logs()]
        if threads:
            logging.getLogger(CRASH_LOG).critical("the run ends: %s", build_failure(error).text)
        until = time.monotonic() + LOGS_TIME_S
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))

    def describe_missing(self) -> str:
        """Report, by target, the folders that were not uploaded, with reasons and upload commands; "" if there are none."""
        return "\n".join(uploader.describe_missing() for uploader in self.uploaders if uploader.list_in_use())


class Uploader:
    """Uploads of a run's checkpoints, exports and logs to one target.

    Args:
        what: folders to upload: "all", or "final" for only the folders added with `last=True`.
        include: kinds of folders to upload. Logs are uploaded after every other folder and at the end of the run.
    """

    def __init__(
        self,
        target: UploadAddress,
        *,
        what: UploadWhat = "final",
        include: Sequence[UploadKind] = ("export",),
    ) -> None:
        self.target, self.what, self.include = target, what, include
        self._lock = Lock()
        self._run: Path | None = None
        self._unfinished: dict[Path, str] = {}  # folder → reason why it has not been uploaded
        self._uploaded: dict[Path, int] = {}  # folder uploaded by this job → modification time of its content
        self._queue: SimpleQueue[Path | None] = SimpleQueue()
        self._thread: Thread | None = None

    def add(self, folder: Path, *, last: bool) -> None:
        """Queue a complete folder, `<run>/checkpoints/step_N` or `<run>/export/…`, and retry all uploads that have failed so far.

        A folder whose current content has already been uploaded is skipped.
        """
        self._run = find_run_of_folder(folder)
        if last or self.what == "all":
            for source in (folder, self._run / LOGS):
                if self._is_included(source):
                    self._enqueue(source)

    def _is_included(self, folder: Path) -> bool:
        kind = get_folder_kind(folder)
        return kind in self.include and (kind != "logs" or is_logs(folder))

    def _enqueue(self, folder: Path) -> None:
        with self._lock:
            if self._unfinished.get(folder) == WAITING or self._is_uploaded(folder):
                return
            failed = [path for path, reason in self._unfinished.items() if reason != WAITING and path != folder]
            due = [folder, *failed]
            self._unfinished |= dict.fromkeys(due, WAITING)
        for due_folder in due:
            self._queue.put(due_folder)
        if self._thread is None:
            # A daemon thread does not make a failed run wait for uploads.
            self._thread = Thread(target=self._run_queue, name="uploads", daemon=True)
            self._thread.start()

    def add_not_uploaded(self, run: Path) -> None:
        """Queue complete folders that earlier jobs of the run did not upload, if this target receives all folders.

        Every job calls this at its start for all its targets, so that its logs can be uploaded even if it saves nothing else.
        """
        self._run = run
        if self.what == "all":
            for folder in list_finished(run):
                self.add(folder, last=False)

    def list_in_use(self) -> set[Path]:
        """Return the folders that must not be deleted, because their upload is queued or in progress, or will be retried."""
        with self._lock:
            return set(self._unfinished)

    def finish(self) -> None:
        """Wait for all uploads, and retry failed ones once. The logs are uploaded last, because they report on the other uploads.

        Raises:
            StorageError: a folder has not been uploaded; the message lists all such folders.
        """
        if self._thread is not None:
            if waiting := self.list_in_use():
                log.info("waiting for uploads to %s: %s", self.target, ", ".join(sorted(map(str, waiting))))
            self._queue.put(None)
            self._thread.join()
            self._thread = None
        for folder in sorted(folder for folder in self.list_in_use() if get_folder_kind(folder) != "logs"):
            self._upload(folder)
        if self._run is not None and self.has_logs():
            self._upload(self._run / LOGS)
        if self.list_in_use():
            raise StorageError(self.describe_missing())

    def has_logs(self) -> bool:
        """Return whether the run has logs and this target includes them."""
        return self._run is not None and self._is_included(self._run / LOGS)

    def make_logs_thread(self) -> Thread:
        """Return a daemon thread that uploads the logs in parallel with other uploads. The thread has not been started."""
        assert self._run is not None
        logs = self._run / LOGS
        with self._lock:
            self._unfinished[logs] = WAITING
        return Thread(target=self._upload, args=[logs], name="logs", daemon=True)

    def describe_missing(self) -> str:
        """Report the folders that have not been uploaded, each with the reason and an upload command."""
        with self._lock:
            unfinished = dict(self._unfinished)
        lines = [
            f"{len(unfinished)} of this run's folders could not be uploaded to {self.target}; the files on disk are complete"
        ]
        for folder, why in sorted(unfinished.items()):
            command = shlex.join(["dsreason", "push", str(folder), "--to", str(self._get_target(folder))])
            lines += [f"  {folder}: {why}", f"    to upload it: {command}"]
        return "\n".join(lines)

    def _get_target(self, folder: Path) -> UploadAddress:
        return get_folder_target(self.target, get_folder_name(folder))

    def _run_queue(self) -> None:
        while (folder := self._queue.get()) is not None:
            self._upload(folder)

    def _is_uploaded(self, folder: Path) -> bool:
        """Return whether a folder's current content has been uploaded; always False for logs, because they grow."""
        if get_folder_kind(folder) == "logs":
            return False
        record = select_target(read_json_object(find_run_of_folder(folder) / RECORD), str(self.target))
        return bool(self._uploaded.get(folder, record.get(get_folder_name(folder))) == get_write_time(folder))

    def _note_uploaded(self, folder: Path, when: int) -> None:
        """Record that a folder has been uploaded, for this job and for later jobs of the run."""
        if get_folder_kind(folder) != "logs":
            self._record(folder, when)
        with self._lock:
            self._unfinished.pop(folder, None)
            self._uploaded[folder] = when

    def _record(self, folder: Path, when: int) -> None:
        run, target = find_run_of_folder(folder), str(self.target)
        with RECORDING:
            record = read_json_object(run / RECORD)
            present = {name: at for name, at in select_target(record, target).items() if (run / name).is_dir()}
            record[target] = present | {get_folder_name(folder): when}
            try:
                write_file(run / RECORD, json.dumps(record, indent=1) + "\n")
            except OSError as error:
                log.warning("cannot write %s (%s); a later job will check the uploads again", run / RECORD, error)

    def _upload(self, folder: Path) -> None:
        place = self._get_target(folder)
        try:
            when = get_write_time(folder)
            begin = time.monotonic()
            name = f"uploading {folder} to {place}"
            with (
                open_package_or_logs(folder) as package,
                track_in_lines(name, package.num_bytes, "bytes", log.info, REPORT_EVERY_S) as advance,
            ):
                sent = upload(package, place, advance)
            if get_write_time(folder) != when:
                raise StorageError(f"{folder} was changed during the upload")
        except DsReasonError as error:
            self._record_failure(folder, str(error))
        except Exception as error:  # noqa: BLE001 (otherwise an error in a thread would go unnoticed)
            self._record_failure(folder, hide_secrets(f"{type(error).__name__}: {error}"))
        else:
            self._note_uploaded(folder, when)
            seconds = time.monotonic() - begin
            speed = decimal(round(sent.num_bytes / max(seconds, 1e-9)))
            log.info("uploaded %s to %s: %s in %.0f s, %s/s", folder, place, decimal(sent.num_bytes), seconds, speed)

    def _record_failure(self, folder: Path, reason: str) -> None:
        with self._lock:
            self._unfinished[folder] = reason
        log.warning(
            "%s was not uploaded: %s; the upload will be retried with the next one and at the end of the run",
            folder,
            reason,
        )


def select_target(record: dict[str, Any], target: str) -> dict[str, Any]:
    """Return a target's entry in the record `uploads.json`: folder name → modification time. A damaged entry counts as empty."""
    entry = record.get(target)
    return entry if isinstance(entry, dict) else {}
