"""Checkpoints that are written while training goes on: copied to host memory first, then to disk by a thread."""

from __future__ import annotations

import concurrent.futures
import contextlib
import copy
import logging
import shutil
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
from torch import Tensor

from dsreason.errors import SaveError
from dsreason.runtime.checkpoint import (
    TrainerState,
    begin,
    complete,
    delete_folder,
    flush,
    own_files,
    prune_checkpoints,
)
from dsreason.runtime.memory import GIB
from dsreason.runtime.world import World, barrier, gather_objects, on_rank_zero

log = logging.getLogger(__name__)

SPARE_MEMORY = 1.1
"""Times a copy's size that must be free for it."""
SPARE_DISK = 1.01


class SnapshotEngine(TorchCheckpointEngine):
    """Stands in for DeepSpeed's checkpoint engine: takes what is to be saved, and writes it when `write` is called.

    What is taken is copied, where there is memory for it. The copies' memory is used again for the next checkpoint: fresh
    memory costs more than copying.
    """

    def __init__(self, *, copying: bool) -> None:
        super().__init__()
        self.copying = copying
        self.copied = False
        """Whether all files of the last checkpoint are copies."""
        self.writer: Any = None
        self.buffers: dict[tuple[str, int], Tensor] = {}
        self.files: list[tuple[Path, Any]] = []

    @contextmanager
    def in_place(self, engine: DeepSpeedEngine) -> Iterator[None]:
        """Inside, `engine.save_checkpoint` fills `files` instead of the disk."""
        self.files, self.copied, self.writer = [], self.copying, engine.checkpoint_engine
        engine.checkpoint_engine, copy_script = self, engine._copy_recovery_script
        engine._copy_recovery_script = lambda path: (
            None
        )  # of DeepSpeed's own code; it fails on a full disk, on one rank
        try:
            yield
        finally:
            engine.checkpoint_engine, engine._copy_recovery_script = self.writer, copy_script

    def save(self, state_dict: Any, path: str) -> None:
        name = Path(path).name
        there = sum(buffer.nbytes for (file, _), buffer in self.buffers.items() if file == name)
        needed = size_of(state_dict) - there
        if self.copying and SPARE_MEMORY * needed > psutil.virtual_memory().available:
            log.info("no %.1f GiB of memory for a copy of %s: training waits until it is written", needed / GIB, name)
            self.copied = False
        self.files.append((Path(path), Copier(self.buffers, name).copy(state_dict) if self.copied else state_dict))

    @property
    def size(self) -> int:
        """Bytes of the tensors that are to be written."""
        return sum(size_of(content) for _, content in self.files)

    def write(self) -> None:
        """Give the files to DeepSpeed's engine, and wait until the disk has them."""
        files, self.files = self.files, []
        for path, content in files:
            self.writer.save(content, str(path))
            flush(path)


@dataclass
class Copier:
    """Copies a file's content to host memory, tensors into the buffers of the file's last copy."""

    buffers: dict[tuple[str, int], Tensor]
    name: str
    count: int = 0
    seen: dict[int, Tensor] = field(default_factory=dict)
    """Tensors that stand in several places stay one."""

    def copy(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._tensor(value)
        if type(value) in (dict, OrderedDict):
            return type(value)((key, self.copy(item)) for key, item in value.items())
        if type(value) in (list, tuple):
            return type(value)(self.copy(item) for item in value)
        return copy.deepcopy(value)

    def _tensor(self, tensor: Tensor) -> Tensor:
        if id(tensor) in self.seen:
            return self.seen[id(tensor)]
        key, source = (self.name, self.count), tensor.detach()
        self.count += 1
        buffer = self.buffers.get(key)
        if buffer is None or buffer.shape != source.shape or buffer.dtype != source.dtype:
            buffer = self.buffers[key] = torch.empty(source.shape, dtype=source.dtype)
        buffer.copy_(source)
        self.seen[id(tensor)] = buffer
        return buffer


def size_of(value: Any) -> int:
    """Bytes of the tensors in nested dicts, lists and tuples."""
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, dict):
        return sum(map(size_of, value.values()))
    return sum(map(size_of, value)) if isinstance(value, (list, tuple)) else 0


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
    """

    def __init__(self, engine: DeepSpeedEngine, folder: Path, world: World, *, background: bool = True) -> None:
        self.engine, self.folder, self.world = engine, folder, world
        self.snapshot = SnapshotEngine(copying=background)
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self.writing: Writing | None = None
        self.pruning: Future[None] | None = None

    def start(self, step: int, state: TrainerState) -> None:
        """Copy what makes `<folder>/step_<step>`, and have it written; an earlier one on its way must be waited for first.

        SaveError where the disk has no room for it; nothing is written then.
        """
        if self.writing is not None:
            raise RuntimeError(f"{self.writing.final} is being written; wait for it first")
        started = time.perf_counter()
        partial = begin(self.folder, step, self.world)
        with self.snapshot.in_place(self.engine):
            self.engine.save_checkpoint(str(self.folder), tag=partial.name, save_latest=False)
        writes = [self.snapshot.write, *own_files(self.engine, partial, state, self.world)]
        on_rank_zero(partial_check(partial, sum(gather_objects(self.snapshot.size))))
        future = self.thread.submit(run_all, writes)
        if not self.snapshot.copied:
            concurrent.futures.wait([future])
        self.writing = Writing(self.folder / f"step_{step}", partial, future, started, time.perf_counter() - started)

    def poll(self) -> Path | None:
        """The checkpoint that all ranks have written since the last call; it is complete now."""
        if self.pruning is not None and self.pruning.done():
            self._say_pruned(self.pruning)
        if self.writing is None:
            return None
        outcomes = gather_objects(outcome(self.writing.future))
        failed = [(rank, text) for rank, text in enumerate(outcomes) if text]
        if failed:
            self._give_up(*failed[0])
        return None if None in outcomes else self._complete(self.writing)

    def wait(self) -> Path | None:
        """As `poll`, once every rank has written what is on its way."""
        if self.writing is None:
            return None
        concurrent.futures.wait([self.writing.future])
        barrier()
        return self.poll()

    def prune(self, keep: int, spared: Collection[Path | None]) -> None:
        """Delete, beside training, all but the `keep` newest checkpoints and those `spared`. On rank 0 only."""
        self.pruning = self.thread.submit(prune_checkpoints, self.folder, keep, spared)

    def close(self) -> None:
        """Wait for what is being deleted."""
        self.thread.shutdown()
        if self.pruning is not None:
            self._say_pruned(self.pruning)

    def _say_pruned(self, pruning: Future[None]) -> None:
        """Old checkpoints that stay are no reason to end a run."""
        self.pruning = None
        if error := outcome(pruning):
            log.warning("old checkpoints could not be deleted: %s", error)

    def _complete(self, writing: Writing) -> Path:
        self.writing = None
        complete(writing.partial, writing.final, self.world)
        seconds = time.perf_counter() - writing.started
        log.info("%s written in %.1f s, for which training waited %.2f s", writing.final, seconds, writing.stall)
        return writing.final

    def _give_up(self, rank: int, text: str) -> None:
        writing, self.writing = self.writing, None
        concurrent.futures.wait([writing.future])
        barrier()
        on_rank_zero(lambda: remove(writing.partial))
        free = shutil.disk_usage(self.folder).free / GIB
        raise SaveError(
            f"{writing.final}: rank {rank} could not write it: {text} ({free:.2f} GiB are free there); older checkpoints are "
            "as they were. Mend that, and continue with --resume auto"
        )


def run_all(calls: Sequence[Callable[[], None]]) -> None:
    for call in calls:
        call()


def outcome(future: Future[None]) -> str | None:
    """None while it runs; then "", or what went wrong."""
    if not future.done():
        return None
    error = future.exception()
    return "" if error is None else f"{type(error).__name__}: {error}".strip()


def remove(partial: Path) -> None:
    """What was written of a checkpoint that failed; where even that fails, the next start does it."""
    with contextlib.suppress(OSError):
        delete_folder(partial)


def partial_check(partial: Path, size: int) -> Callable[[], None]:
    """Refuses, and removes the folder again, where the disk has no room for `size` bytes."""

    def check() -> None:
        free = shutil.disk_usage(partial).free
        if SPARE_DISK * size <= free:
            return
        remove(partial)
        raise SaveError(
            f"{partial.parent}: the checkpoint takes {size / GIB:.2f} GiB, and {free / GIB:.2f} GiB are free there; older "
            "checkpoints are as they were. Make room, lower checkpoint.keep, or move the run, and continue with --resume auto"
        )

    return check


def save_checkpoint(engine: DeepSpeedEngine, folder: Path, step: int, state: TrainerState, world: World) -> Path:
    """Write `<folder>/step_<step>` (all ranks together), whole or not at all, and return it."""
    writer = CheckpointWriter(engine, folder, world, background=False)
    writer.start(step, state)
    path = writer.wait()
    writer.close()
    return path
