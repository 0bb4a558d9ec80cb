"""Background writing of checkpoints: their content is copied to host memory, and a thread writes the copies to disk."""

from __future__ import annotations

import concurrent.futures
import contextlib
import copy
import logging
import shutil
import socket
import time
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
from torch import Tensor

from dsreason.checkpoints.checkpoint import build_state_writer, make_partial_folder
from dsreason.checkpoints.checkpoint_folder import TrainerState, delete_folder, finish, prune_checkpoints
from dsreason.checkpoints.digests import compute_digest
from dsreason.engine.average import WeightAverage
from dsreason.engine.host_memory import StagedCopy
from dsreason.errors import DsReasonError, SaveError
from dsreason.files.atomic import flush
from dsreason.files.step_names import format_step
from dsreason.job.ranks import World, connect_to_store, gather_objects, run_once_per_folder, wait_for_ranks
from dsreason.monitor.memory import GIB, count_available_bytes

log = logging.getLogger(__name__)

SPARE_MEMORY = 1.1
"""Free host memory that a copy requires, as a multiple of its size."""
SPARE_DISK = 1.01
"""Free disk space that a checkpoint requires, as a multiple of its size."""
PATIENCE_S = 5.0
"""Seconds within which all ranks must be ready to complete a checkpoint after an error."""
LEAVING = "dsreason_checkpoint/leaving"
"""Prefix for the keys in the job's store by which ranks announce that they are about to leave."""


class SnapshotEngine(TorchCheckpointEngine):
    """A replacement for DeepSpeed's checkpoint engine that collects the files to save and writes them when `write` is called.

    `copy` copies their content to host memory if enough is free. Later checkpoints reuse the copies' memory, because allocating
    memory takes longer than copying.
    """

    def __init__(self, *, copying: bool) -> None:
        super().__init__()
        self.copying = copying
        self.copied = False
        """Whether the content of the last checkpoint has been copied, so that training may continue while it is written."""
        self.writer: Any = None
        self.buffers: dict[tuple[str, int], Tensor] = {}
        self.staged = StagedCopy()
        self.files: list[tuple[Path, Any]] = []

    @contextmanager
    def in_place(self, engine: DeepSpeedEngine) -> Iterator[None]:
        """In the block, make `engine.save_checkpoint` fill `files` instead of writing to disk."""
        self.files, self.copied, self.writer = [], False, engine.checkpoint_engine
        engine.checkpoint_engine, copy_script = self, engine._copy_recovery_script
        # DeepSpeed would copy a script into the checkpoint; if the disk is full, that would fail on one rank only.
        engine._copy_recovery_script = lambda path: None
        try:
            yield
        finally:
            engine.checkpoint_engine, engine._copy_recovery_script = self.writer, copy_script

    def save(self, state_dict: Any, path: str) -> None:
        self.files.append((Path(path), state_dict))

    def copy(self, beside: int = 0) -> None:
        """Copy the files' content if this host has enough memory for the copies of all its ranks. Collective.

        Args:
            beside: number of additional bytes that this rank will copy, which DeepSpeed does not save.
        """
        if not self.copying:
            return
        lacking = beside + max(0, self.size - sum(buffer.nbytes for buffer in self.buffers.values()))
        host = socket.gethostname()
        hosts = gather_objects((host, lacking, count_available_bytes()))  # measured before any rank starts to copy
        here = [(size, available) for name, size, available in hosts if name == host]
        needed, free = sum(size for size, _ in here), min(available for _, available in here)
        if needed and SPARE_MEMORY * needed > free:
            log.info(
                "%s: the ranks need %.1f GiB of memory for copies of the checkpoint, but only %.1f GiB are free; training waits "
                "until the checkpoint is written",
                *(host, needed / GIB, free / GIB),
            )
            return
        self.files = [(path, self.on_host(path.name, content)) for path, content in self.files]
        self.copied = True

    def on_host(self, file: str, content: Any) -> Any:
        """Return a copy of the content that reuses the buffers of the file's previous copy. Shared tensors stay shared."""
        copies: dict[int, Any] = {}
        for number, tensor in enumerate(iter_tensors(content)):
            if id(tensor) not in copies:
                copies[id(tensor)] = self._to_host((file, number), tensor.detach())
        return copy.deepcopy(content, copies)

    def _to_host(self, key: tuple[str, int], source: Tensor) -> Tensor:
        buffer = self.buffers.get(key)
        if buffer is None or buffer.shape != source.shape or buffer.dtype != source.dtype:
            buffer = self.buffers[key] = torch.empty(source.shape, dtype=source.dtype)
        if source.is_cuda:
            self.staged.copy(buffer, source)
        else:
            buffer.copy_(source)
        return buffer

    @property
    def size(self) -> int:
        """Total size of the tensors to write, in bytes."""
        return sum(tensor.nbytes for _, content in self.files for tensor in iter_tensors(content))

    def write(self) -> list[Path]:
        """Write the files with DeepSpeed's checkpoint engine, flush them to disk, and return their paths."""
        files, self.files = self.files, []
        for path, content in files:
            self.writer.save(content, str(path))
            flush(path)
        return [path for path, _ in files]


def iter_tensors(value: Any) -> Iterator[Tensor]:
    """Yield all tensors in nested dicts, lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from iter_tensors(item)


@dataclass
class Writing:
    """A checkpoint that is being written to disk."""

    final: Path
    partial: Path
    future: Future[dict[str, str]]
    """Digests of the files that this rank writes, by file name."""
    started: float
    stall: float
    """Seconds during which training waited."""


class CheckpointWriter:
    """A writer that saves an engine's checkpoints, one at a time. `start`, `poll` and `wait` are collective.

        writer.start(step, state)      # training continues
        for … : writer.poll()          # once per step: completes the checkpoint once all ranks have written it
        writer.wait()

    If a write fails on any rank, the next call of one of these methods raises SaveError on every rank and deletes the partial
    checkpoint; older checkpoints are unchanged. If `background` is False, `start` writes the checkpoint before it returns.

    Args:
        averages: weight averages to save in checkpoints as well, by name.
        with_frozen: whether to save frozen weights in checkpoints.
    """

    def __init__(
        self,
        engine: DeepSpeedEngine,
        folder: Path,
        world: World,
        *,
        background: bool = True,
        averages: Mapping[str, WeightAverage] | None = None,
        with_frozen: bool = True,
    ) -> None:
        self.engine, self.folder, self.world = engine, folder, world
        self.averages, self.with_frozen = averages or {}, with_frozen
        self.snapshot = SnapshotEngine(copying=background)
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self.writing: Writing | None = None
        self.pruning: Future[None] | None = None
        self.completing = 0.0
        """Seconds for which all ranks waited until the last checkpoint had its marker and final name."""

    def start(self, step: int, state: TrainerState) -> None:
        """Copy a checkpoint's content and start writing it to `<folder>/step_<step>`.

        If another checkpoint is being written, call `wait` first.

        Raises:
            SaveError: the disk has too little free space for the checkpoint; nothing is written.
        """
        if self.writing is not None:
            raise RuntimeError(f"{self.writing.final} is still being written; call wait() first")
        started = time.perf_counter()
        partial = make_partial_folder(self.folder, step, self.world)
        with self.snapshot.in_place(self.engine):
            self.engine.save_checkpoint(
                str(self.folder), tag=partial.name, save_latest=False, exclude_frozen_parameters=not self.with_frozen
            )
        beside = sum(average.nbytes for average in self.averages.values())
        self.snapshot.copy(beside)
        averages = {
            label: average.copy_shards() if self.snapshot.copied else average.shares
            for label, average in self.averages.items()
        }
        write_state = build_state_writer(self.engine, partial, state, self.world, averages)
        sizes = gather_objects(self.snapshot.size + beside)
        size = sum(sizes[rank] for rank in self.world.ranks_here)
        run_once_per_folder(self.world, lambda: self._check_room(partial, size))

        def write() -> dict[str, str]:
            files = self.snapshot.write() + write_state()
            return {file.relative_to(partial).as_posix(): compute_digest(file) for file in files}

        future = self.thread.submit(write)
        if not self.snapshot.copied:
            concurrent.futures.wait([future])
        self.writing = Writing(self.folder / format_step(step), partial, future, started, time.perf_counter() - started)

    def poll(self) -> Path | None:
        """If all ranks have written the current checkpoint, complete it and return its path; otherwise return None."""
        if self.writing is None:
            return None
        outcomes = gather_objects(get_outcome(self.writing.future))
        failures = [(rank, outcome) for rank, outcome in enumerate(outcomes) if isinstance(outcome, str)]
        if failures:
            self._give_up(self.writing, *failures[0])
        if None in outcomes:
            return None
        here = [outcomes[rank] for rank in self.world.ranks_here]
        digests = {name: digest for outcome in here if isinstance(outcome, dict) for name, digest in outcome.items()}
        return self._finish(self.writing, digests)

    def wait(self) -> Path | None:
        """Wait until all ranks have written the current checkpoint, complete it and return its path; None if there is none."""
        if self.writing is None:
            return None
        concurrent.futures.wait([self.writing.future])
        wait_for_ranks()
        return self.poll()

    def finish_pending(self) -> None:
        """After an error, complete the current checkpoint if all ranks call this; otherwise leave it to the next run."""
        if self.writing is None or not wait_for_all_ranks(self.world, "finish the pending checkpoint"):
            return
        log.info("completing %s before the run ends", self.writing.final)
        try:
            self.wait()
        except (DsReasonError, RuntimeError) as error:  # RuntimeError if a rank ends in the meantime
            log.warning("the pending checkpoint could not be completed: %s", error)

    def prune(self, keep: int, spared: Collection[Path | None]) -> None:
        """Delete all checkpoints except the `keep` newest and `spared`, in the background. Call this on one rank per folder."""
        self.pruning = self.thread.submit(self._prune, keep, spared)

    def _prune(self, keep: int, spared: Collection[Path | None]) -> None:
        try:
            prune_checkpoints(self.folder, keep, spared)
        except OSError as error:  # not a reason to end the run
            log.warning("old checkpoints could not be deleted: %s", error)

    def close(self) -> None:
        """Wait until all writes and deletions have finished."""
        self.thread.shutdown()

    def _check_room(self, partial: Path, size: int) -> None:
        """If the disk has too little free space for `size` bytes, delete `partial` and raise SaveError."""
        needed, free = SPARE_DISK * size, shutil.disk_usage(partial).free
        if needed > free and self.pruning is not None:
            concurrent.futures.wait([self.pruning])  # old checkpoints are still being deleted
            free = shutil.disk_usage(partial).free
        if needed <= free:
            return
        give_up(partial)
        raise SaveError(
            f"{partial.parent}: the checkpoint needs {size / GIB:.2f} GiB, but only {free / GIB:.2f} GiB are free on this disk; "
            "older checkpoints are unchanged. Free disk space, lower checkpoint.keep, or move the run, then continue with "
            "--resume auto"
        )

    def _finish(self, writing: Writing, digests: Mapping[str, str]) -> Path:
        self.writing = None
        started = time.perf_counter()
        run_once_per_folder(self.world, lambda: finish(writing.partial, writing.final, self.world.ranks_here, digests))
        now = time.perf_counter()
        self.completing = now - started
        log.info(
            "%s: written in %.1f s, during which training waited %.2f s",
            *(writing.final, now - writing.started, writing.stall + self.completing),
        )
        return writing.final

    def _give_up(self, writing: Writing, rank: int, text: str) -> NoReturn:
        self.writing = None
        concurrent.futures.wait([writing.future])
        wait_for_ranks()
        run_once_per_folder(self.world, lambda: give_up(writing.partial))
        free = shutil.disk_usage(self.folder).free / GIB
        raise SaveError(
            f"{writing.final}: rank {rank} could not write the checkpoint: {text} ({free:.2f} GiB are free on this disk); older "
            "checkpoints are unchanged. Fix the problem, then continue with --resume auto"
        )


def wait_for_all_ranks(world: World, purpose: str) -> bool:
    """Return whether all ranks call this within `PATIENCE_S`. It uses the store, because a collective would hang without a rank.

    Args:
        purpose: what the ranks do next; ranks with different purposes do not wait for each other.
    """
    store = connect_to_store()
    keys = [f"{LEAVING}/{purpose}/{rank}" for rank in range(world.size)]
    deadline = time.monotonic() + PATIENCE_S
    arrived = False
    with contextlib.suppress(dist.DistError):  # the process that holds the store has ended
        store.set(keys[world.rank], "")
        while not (arrived := store.check(keys)) and time.monotonic() < deadline:
            time.sleep(0.05)
    return arrived


def get_outcome(future: Future[dict[str, str]]) -> dict[str, str] | str | None:
    """Return None while the future is running, then its result if it has succeeded or its error message if it has failed."""
    if not future.done():
        return None
    error = future.exception()
    return future.result() if error is None else f"{type(error).__name__}: {error}".strip()


def give_up(partial: Path) -> None:
    """Delete a checkpoint that could not be written; if this fails too, the next run deletes it."""
    with contextlib.suppress(OSError):
        delete_folder(partial)
