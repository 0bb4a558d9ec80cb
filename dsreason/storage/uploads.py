"""Uploads while a run goes on: one folder after the other, in a thread, so that training never waits.

    with uploading(config.checkpoint) as uploads:
        …                                            # train; after a checkpoint or an export is complete:
        uploads.add(folder, last=step == total_steps)
        prune(…, keep=uploads.in_use())              # what is still to be uploaded must not be deleted

On the way out it waits; what cannot be uploaded is a StorageError that names the command for doing it later.
"""

from __future__ import annotations

import json
import logging
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from threading import Lock, Thread

from huggingface_hub.utils import disable_progress_bars
from rich.filesize import decimal

from dsreason.config.schema import CheckpointConfig
from dsreason.errors import DsReasonError, StorageError
from dsreason.files.address import HubAddress, S3Address, parse_target
from dsreason.files.atomic import write_file
from dsreason.files.disk import json_object
from dsreason.job.launch import is_first_rank
from dsreason.monitor.progress import track_in_lines
from dsreason.secrets import hide_secrets
from dsreason.storage.package import CHECKPOINTS, finished_folders, name_of, open_package, written_at
from dsreason.storage.storage import place_in, upload

log = logging.getLogger(__name__)

WAITING = "not uploaded yet"
RECORD = "uploads.json"
"""In the folder of a run, by target and folder: when what was uploaded had been written."""
REPORT_EVERY_S = 30.0


@contextmanager
def uploading(config: CheckpointConfig) -> Iterator[Uploader]:
    """Uploads of a run, which the first rank does. Leave it after the ranks have parted: then nobody waits for an upload.

    Raises:
        StorageError: on the way out, unless the run itself has failed; what is missing in storage then is only logged.
    """
    target = parse_target(config.upload) if config.upload and is_first_rank() else None
    if isinstance(target, HubAddress):
        disable_progress_bars()  # they would draw over the run's own
    uploader = Uploader(target, what=config.upload_what, include=config.upload_include)
    try:
        yield uploader
    except BaseException:
        if uploader.in_use():
            log.warning("%s", uploader.missing())
        raise
    uploader.finish()


class Uploader:
    """Uploads checkpoints and exports of a run to `target` (None: nothing is uploaded).

    Args:
        what: "final" takes only what was added as the last of the run.
        include: of "export" and "checkpoint".
    """

    def __init__(
        self, target: S3Address | HubAddress | None, *, what: str = "final", include: tuple[str, ...] = ("export",)
    ) -> None:
        self.target, self.what, self.include = target, what, include
        self._lock = Lock()
        self._unfinished: dict[Path, str] = {}  # folder: why it is not uploaded
        self._uploaded: dict[Path, int] = {}  # by this job: when what is in storage had been written
        self._queue: SimpleQueue[Path | None] = SimpleQueue()
        self._thread: Thread | None = None

    def add(self, folder: Path, *, last: bool) -> None:
        """Upload a complete `<run>/checkpoints/step_N` or `<run>/export/…` when its turn comes. Returns at once.

        What could not be uploaded before is tried again after it. What is in storage as it is on disk is left out.
        """
        kind = "checkpoint" if folder.parent.name == CHECKPOINTS else "export"
        if self.target is None or kind not in self.include or not (last or self.what == "all"):
            return
        with self._lock:
            if self._unfinished.get(folder) == WAITING or self._is_uploaded(folder):
                return
            failed = [other for other, why in self._unfinished.items() if why != WAITING and other != folder]
            due = [folder, *failed]
            self._unfinished |= dict.fromkeys(due, WAITING)
        for one in due:
            self._queue.put(one)
        if self._thread is None:
            self._thread = Thread(target=self._work, name="uploads", daemon=True)  # a failed run does not wait for it
            self._thread.start()

    def add_not_uploaded(self, run: Path) -> None:
        """Add what an earlier job of a run has left complete on disk and not uploaded. The last comes when the run ends."""
        if self.target is not None and self.what == "all":
            for folder in finished_folders(run):
                self.add(folder, last=False)

    def in_use(self) -> set[Path]:
        """Folders that must not be deleted: they wait, are being uploaded, or could not be and are tried again."""
        with self._lock:
            return set(self._unfinished)

    def finish(self) -> None:
        """Wait for all uploads, and try once more what has failed. StorageError names what is missing in storage."""
        if self._thread is not None:
            if waiting := self.in_use():
                log.info("waiting for uploads: %s", ", ".join(sorted(map(str, waiting))))
            self._queue.put(None)
            self._thread.join()
            self._thread = None
        for folder in sorted(self.in_use()):
            self._upload(folder)
        if self.in_use():
            raise StorageError(self.missing())

    def missing(self) -> str:
        """What is not in storage, why, and the command for each."""
        with self._lock:
            unfinished = dict(self._unfinished)
        lines = [f"{len(unfinished)} of this run's folders are not in {self.target}; they are complete on disk"]
        for folder, why in sorted(unfinished.items()):
            command = shlex.join(["dsreason", "push", str(folder), "--to", str(self._place(folder))])
            lines += [f"  {folder}: {why}", f"    upload it with: {command}"]
        return "\n".join(lines)

    def _place(self, folder: Path) -> S3Address | HubAddress:
        assert self.target is not None
        return place_in(self.target, name_of(folder))

    def _work(self) -> None:
        while (folder := self._queue.get()) is not None:
            self._upload(folder)

    def _is_uploaded(self, folder: Path) -> bool:
        record = json_object(folder.parent.parent / RECORD).get(str(self.target), {})
        return bool(self._uploaded.get(folder, record.get(name_of(folder))) == written_at(folder))

    def _note_uploaded(self, folder: Path, when: int) -> None:
        """Remember it, also for a later job of the run."""
        run, target = folder.parent.parent, str(self.target)
        record = json_object(run / RECORD)
        present = {name: at for name, at in record.get(target, {}).items() if (run / name).is_dir()}
        try:
            write_file(run / RECORD, json.dumps(record | {target: present | {name_of(folder): when}}, indent=1) + "\n")
        except OSError as error:
            log.warning("%s: cannot be written (%s): a later job will look at the uploads again", run / RECORD, error)
        with self._lock:
            del self._unfinished[folder]
            self._uploaded[folder] = when

    def _upload(self, folder: Path) -> None:
        place = self._place(folder)
        try:
            when = written_at(folder)
            package = open_package(folder)
            begin = time.monotonic()
            name = f"uploading {folder} to {place}"
            with track_in_lines(name, package.num_bytes, "bytes", log.info, REPORT_EVERY_S) as advance:
                sent = upload(package, place, advance)
            if written_at(folder) != when:
                raise StorageError(f"{folder} was rewritten while it was uploaded")
        except DsReasonError as error:
            self._failed(folder, str(error))
        except Exception as error:  # noqa: BLE001 (in a thread nobody would hear of it)
            self._failed(folder, hide_secrets(f"{type(error).__name__}: {error}"))
        else:
            self._note_uploaded(folder, when)
            seconds = time.monotonic() - begin
            speed = decimal(round(sent.num_bytes / max(seconds, 1e-9)))
            log.info("uploaded %s to %s: %s in %.0f s, %s/s", folder, place, decimal(sent.num_bytes), seconds, speed)

    def _failed(self, folder: Path, why: str) -> None:
        with self._lock:
            self._unfinished[folder] = why
        log.warning("%s: not uploaded: %s; it will be retried with the next upload and at the end", folder, why)
