"""Time that digests of whole files add to saving a checkpoint and to resuming from it.

    python benchmarks/checkpoint_digests.py [--gib 1.0] [--rounds 5] [--nproc 1]

Each round saves the checkpoint of `checkpoint_stall.py` in the background and in the foreground, without and with digests. It
then loads the checkpoint without and with a check of all its files, once from the page cache and once after the files have been
dropped from it. The sides take turns. Their shortest times are compared, because other work on the machine only adds time; the
ratio of the medians follows. A resume consists of the rank's start (imports, joining the job, building the engine) and the load.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

import checkpoint_stall
import psutil

if TYPE_CHECKING:
    from dsreason.job.ranks import World

SIDES = ("without", "with")
GOAL = 1.1


def drop_from_cache(folder: Path) -> None:
    for file in folder.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


class Measurement:
    """The engine, its checkpoint writers, and the seconds measured in all rounds, by metric and side."""

    def __init__(self, folder: Path, gib: float, world: World) -> None:
        from dsreason.checkpoints.checkpoint_writer import CheckpointWriter, compute_digest

        self.folder, self.world = folder, world
        self.engine, width = checkpoint_stall.build_linear_engine(gib)
        checkpoint_stall.run_step(self.engine, width)
        self.start = time.time() - psutil.Process().create_time()
        self.writers = {
            kind: CheckpointWriter(self.engine, folder / kind, world, background=kind == "background")
            for kind in ("background", "foreground")
        }
        self.digests = {"without": lambda file: "none", "with": compute_digest}
        self.seconds: dict[tuple[str, str], list[float]] = defaultdict(list)

    def save(self, kind: str, side: str) -> Path:
        from dsreason.checkpoints import checkpoint_writer
        from dsreason.checkpoints.checkpoint_folder import TrainerState
        from dsreason.job.ranks import wait_for_ranks

        writer = self.writers[kind]
        with mock.patch.object(checkpoint_writer, "compute_digest", self.digests[side]):
            wait_for_ranks()
            started = time.perf_counter()
            writer.start(1, TrainerState(step=1))
            stalled = time.perf_counter() - started
            path = writer.wait()
        written = time.perf_counter() - started
        if kind == "background":
            self.seconds["background save: stall", side].append(stalled + writer.completing)
        self.seconds[f"{kind} save: written", side].append(written)
        return path

    def load(self, path: Path, side: str, *, cold: bool) -> None:
        from dsreason.checkpoints.checkpoint import load_checkpoint
        from dsreason.checkpoints.selection import check_together
        from dsreason.job.ranks import wait_for_ranks

        if cold and self.world.is_main:
            drop_from_cache(path)
        wait_for_ranks()
        started = time.perf_counter()
        if side == "with":
            check_together(path, self.world)
        load_checkpoint(self.engine, path, self.world)
        source = "disk" if cold else "page cache"
        self.seconds[f"load from {source}", side].append(time.perf_counter() - started)

    def run_round(self, order: tuple[str, ...]) -> None:
        from dsreason.checkpoints.marker import write_marker

        for kind in self.writers:
            for side in order:
                path = self.save(kind, side)
        if self.world.is_main:
            write_marker(path)  # with real digests, whatever the last side was
        for cold in (False, True):
            for side in order:
                self.load(path, side, cold=cold)
        if self.world.is_main:
            for kind in self.writers:
                shutil.rmtree(self.folder / kind / "step_1")


def run_rank(arguments: argparse.Namespace) -> None:
    from dsreason.job.ranks import init_world

    world = init_world()
    measurement = Measurement(Path(arguments.folder), arguments.gib, world)
    for number in range(arguments.rounds + 1):
        measurement.run_round(SIDES if number % 2 else SIDES[::-1])
    seconds = measurement.seconds
    if world.is_main:
        print(f"{arguments.gib:.2f} GiB per checkpoint, {world.size} ranks, load {os.getloadavg()[0]:.1f}")
        for name in dict.fromkeys(name for name, _ in seconds):
            without, checked = (min(seconds[name, side][1:]) for side in SIDES)
            medians = [statistics.median(seconds[name, side][1:]) for side in SIDES]
            print(
                f"{name:26}{without:8.3f} s without, {checked:8.3f} s with: {checked / without:.3f} "
                f"(medians {medians[1] / medians[0]:.3f})"
            )
            if name.startswith("load"):
                ratio = (measurement.start + checked) / (measurement.start + without)
                print(f"  resume, i.e. {measurement.start:.1f} s of start and the load: {ratio:.3f} (goal {GOAL})")


if __name__ == "__main__":
    checkpoint_stall.start(__file__, __doc__, run_rank)
