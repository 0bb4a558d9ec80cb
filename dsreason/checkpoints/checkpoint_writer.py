"""Checkpoints that are written while training goes on: copied to host memory first, then to disk by a thread."""

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

from dsreason.checkpoints.checkpoint import make_partial_folder, state_writer
from dsreason.checkpoints.checkpoint_folder import TrainerState, delete_folder, finish, prune_checkpoints
from dsreason.engine.average import WeightAverage
from dsreason.engine.host_memory import StagedCopy
from dsreason.errors import DsReasonError, SaveError
from dsreason.files.atomic import flush
from dsreason.files.step_names import step_name
from dsreason.job.ranks import World, barrier, connect_to_store, gather_objects, on_one_rank_per_folder
from dsreason.monitor.memory import GIB, available_bytes

log = logging.getLogger(__name__)

SPARE_MEMORY = 1.1
"""Times a copy's size that must be free for it."""
SPARE_DISK = 1.01
PATIENCE_S = 5.0
"""Seconds in which all ranks must arrive after an error, to complete a checkpoint together."""
LEAVING = "dsreason_checkpoint/leaving"
"""Key in the job's store."""


class SnapshotEngine(TorchCheckpointEngine):
    """Stands in for DeepSpeed's checkpoint engine: takes what is to be saved, and writes it when `write` is called.

    `copy` copies what was taken, where there is memory for it. The copies' memory is used again for the next checkpoint:
    fresh memory costs more than copying.
    """

    def __init__(self, *, copying: bool) -> None:
        super().__init__()
        self.copying = copying
        self.copied = False
        """Whether all files of the last checkpoint are copies."""
        self.writer: Any = None
        self.buffers: dict[tuple[str, int], Tensor] = {}
        self.staged = StagedCopy()
        self.files: list[tuple[Path, Any]] = []

    @contextmanager
    def in_place(self, engine: DeepSpeedEngine) -> Iterator[None]:
        """Inside, `engine.save_checkpoint` fills `files` instead of the disk."""
        self.files, self.copied, self.writer = [], False, engine.checkpoint_engine
        engine.checkpoint_engine, copy_script = self, engine._copy_recovery_script
        # It copies a script of DeepSpeed into the checkpoint, and would fail on a full disk, on one rank.
        engine._copy_recovery_script = lambda path: None
        try:
            yield
        finally:
            engine.checkpoint_engine, engine._copy_recovery_script = self.writer, copy_script

    def save(self, state_dict: Any, path: str) -> None:
        self.files.append((Path(path), state_dict))

    def copy(self, beside: int = 0) -> None:
        """Copy what was taken, if this host has the memory for the copies of all of its ranks. Collective.

        Args:
            beside: bytes that this rank will copy of what DeepSpeed does not save.
        """
        if not self.copying:
            return
        lacking = beside + max(0, self.size - sum(buffer.nbytes for buffer in self.buffers.values()))
        host = socket.gethostname()
        hosts = gather_objects((host, lacking, available_bytes()))  # measured before any rank begins to copy
        here = [(size, available) for name, size, available in hosts if name == host]
        needed, free = sum(size for size, _ in here), min(available for _, available in here)
        if needed and SPARE_MEMORY * needed > free:
            log.info(
                "the ranks of %s need %.1f GiB for copies of their checkpoint, and %.1f GiB are free there: training waits "
                "until it is written",
                *(host, needed / GIB, free / GIB),
            )
            return
        self.files = [(path, self.on_host(path.name, content)) for path, content in self.files]
        self.copied = True

    def on_host(self, file: str, content: Any) -> Any:
        """A copy of the content, its tensors in the buffers of the file's last copy. A tensor that stands twice stays one."""
        copies: dict[int, Any] = {}
        for number, tensor in enumerate(tensors_in(content)):
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
        """Bytes of the tensors that are to be written."""
        return sum(tensor.nbytes for _, content in self.files for tensor in tensors_in(content))

    def write(self) -> None:
        """Give the files to DeepSpeed's engine, and wait until the disk has them."""
        files, self.files = self.files, []
        for path, content in files:
            self.writer.save(content, str(path))
            flush(path)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in nested dicts, lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)


@dataclass
class Writing:
    """One checkpoint on its way to disk."""

    final: Path
    partial: Path
    future: Future[None]
    started: float
    stall: float
    """Seconds that training waited."""


class CheckpointWriter:
    """Saves checkpoints of an engine, one at a time. `start`, `poll` and `wait` are collective.

        writer.start(step, state)      # training goes on
        for … : writer.poll()          # once a step: completes what all ranks have written
        writer.wait()

    A write that failed on any rank is a SaveError on every rank at the next of these calls; what was written of it is
    removed, and older checkpoints are as they were. With `background` off, `start` writes before it returns.

    Args:
        averages: other weights that checkpoints hold, by name.
        with_frozen: whether checkpoints hold the weights that are not trained.
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
        """Seconds that all ranks waited for the last checkpoint to get its marker and name."""

    def start(self, step: int, state: TrainerState) -> None:
        """Copy what makes `<folder>/step_<step>`, and have it written; an earlier one on its way must be waited for first.

        SaveError if the disk has no room for it; nothing is written then.
        """
        if self.writing is not None:
            raise RuntimeError(f"{self.writing.final} is being written; wait for it first")
        started = time.perf_counter()
        partial = make_partial_folder(self.folder, step, self.world)
        with self.snapshot.in_place(self.engine):
            self.engine.save_checkpoint(
                str(self.folder), tag=partial.name, save_latest=False, exclude_frozen_parameters=not self.with_frozen
            )
        beside = sum(average.nbytes for average in self.averages.values())
        self.snapshot.copy(beside)
        averages = {
            label: average.copies() if self.snapshot.copied else average.shares
            for label, average in self.averages.items()
        }
        write_state = state_writer(self.engine, partial, state, self.world, averages)
        sizes = gather_objects(self.snapshot.size + beside)
        size = sum(sizes[rank] for rank in self.world.ranks_here)
        on_one_rank_per_folder(self.world, lambda: self._check_room(partial, size))

        def write() -> None:
            self.snapshot.write()
            write_state()

        future = self.thread.submit(write)
        if not self.snapshot.copied:
            concurrent.futures.wait([future])
        self.writing = Writing(self.folder / step_name(step), partial, future, started, time.perf_counter() - started)

    def poll(self) -> Path | None:
        """The checkpoint that all ranks have written since the last call; it is complete now."""
        if self.writing is None:
            return None
        outcomes = gather_objects(outcome(self.writing.future))
        failed = [(rank, text) for rank, text in enumerate(outcomes) if text]
        if failed:
            self._give_up(self.writing, *failed[0])
        return None if None in outcomes else self._complete(self.writing)

    def wait(self) -> Path | None:
        """As `poll`, once every rank has written what is on its way."""
        if self.writing is None:
            return None
        concurrent.futures.wait([self.writing.future])
        barrier()
        return self.poll()

    def complete_pending(self) -> None:
        """After an error, complete what is on its way if all ranks call this; else the next start looks at it."""
        if self.writing is None or not all_ranks_arrive(self.world):
            return
        log.info("completing %s before the run ends", self.writing.final)
        try:
            self.wait()
        except (DsReasonError, RuntimeError) as error:  # the latter where a rank ends meanwhile
            log.warning("the checkpoint that was being written is not complete: %s", error)

    def prune(self, keep: int, spared: Collection[Path | None]) -> None:
        """Delete, beside training, all but the `keep` newest checkpoints and those `spared`. On one rank of each folder."""
        self.pruning = self.thread.submit(self._prune, keep, spared)

    def _prune(self, keep: int, spared: Collection[Path | None]) -> None:
        try:
            prune_checkpoints(self.folder, keep, spared)
        except OSError as error:  # no reason to end a run
            log.warning("old checkpoints could not be deleted: %s", error)

    def close(self) -> None:
        """Wait for what is being deleted."""
        self.thread.shutdown()

    def _check_room(self, partial: Path, size: int) -> None:
        """SaveError, and the folder is removed again, where the disk has no room for `size` bytes."""
        needed, free = SPARE_DISK * size, shutil.disk_usage(partial).free
        if needed > free and self.pruning is not None:
            concurrent.futures.wait([self.pruning])  # old checkpoints are still being deleted
            free = shutil.disk_usage(partial).free
        if needed <= free:
            return
        give_up(partial)
        raise SaveError(
            f"{partial.parent}: the checkpoint takes {size / GIB:.2f} GiB, and {free / GIB:.2f} GiB are free there; older "
            "checkpoints are as they were. Make room, lower checkpoint.keep, or move the run, and continue with --resume auto"
        )

    def _complete(self, writing: Writing) -> Path:
        self.writing = None
        begun = time.perf_counter()
        on_one_rank_per_folder(self.world, lambda: finish(writing.partial, writing.final, self.world.ranks_here))
        ended = time.perf_counter()
        self.completing = ended - begun
        log.info(
            "%s written in %.1f s, for which training waited %.2f s",
            *(writing.final, ended - writing.started, writing.stall + self.completing),
        )
        return writing.final

    def _give_up(self, writing: Writing, rank: int, text: str) -> NoReturn:
        self.writing = None
        concurrent.futures.wait([writing.future])
        barrier()
        on_one_rank_per_folder(self.world, lambda: give_up(writing.partial))
        free = shutil.disk_usage(self.folder).free / GIB
        raise SaveError(
            f"{writing.final}: rank {rank} could not write it: {text} ({free:.2f} GiB are free there); older checkpoints are "
            "as they were. Fix that, and continue with --resume auto"
        )


def all_ranks_arrive(world: World) -> bool:
    """Return whether all ranks call this within PATIENCE_S. Through the job's store: a collective hangs where one does not."""
    store = connect_to_store()
    keys = [f"{LEAVING}/{rank}" for rank in range(world.size)]
    deadline = time.monotonic() + PATIENCE_S
    arrived = False
    with contextlib.suppress(dist.DistError):  # whoever holds the store has ended
        store.set(keys[world.rank], "")
        while not (arrived := store.check(keys)) and time.monotonic() < deadline:
            time.sleep(0.05)
    return arrived


def outcome(future: Future[None]) -> str | None:
    """None while it runs; then "", or what went wrong."""
    if not future.done():
        return None
    error = future.exception()
    return "" if error is None else f"{type(error).__name__}: {error}".strip()


def give_up(partial: Path) -> None:
    """What was written of a checkpoint that failed; where even that fails, the next start does it."""
    with contextlib.suppress(OSError):
        delete_folder(partial)
