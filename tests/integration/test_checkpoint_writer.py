"""Checkpoints written while training continues: they contain the weights of their step, and a failed write is reported."""

from __future__ import annotations

import gc
import resource
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.disks import set_read_only, small_disk
from tests.distributed import run_on_ranks
from tests.integration.test_checkpoint import STAGES, build, train
from tests.unit.checkpoints.made_folders import make_export

pytestmark = pytest.mark.integration


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """Map the path of each tensor and number in nested containers to its value."""
    if isinstance(value, dict):
        return {k: v for key, item in value.items() for k, v in flat(item, f"{name}.{key}").items()}
    if isinstance(value, (list, tuple)):
        return {k: v for i, item in enumerate(value) for k, v in flat(item, f"{name}[{i}]").items()}
    return {name: value} if isinstance(value, (torch.Tensor, int, float)) else {}


def content(checkpoint: Path) -> dict[str, Any]:
    """Read the tensors in the files that DeepSpeed has written."""
    from dsreason.checkpoints.shards import load_safely

    with load_safely():
        return flat({path.name: torch.load(path) for path in sorted(checkpoint.glob("*.pt"))})


def write_beside_training(folder: str) -> list[tuple[str, list[str], int]]:
    """Write two checkpoints per ZeRO stage, and delay each write while training changes everything that it contains.

    Return the differences from a checkpoint that training waited for, and the number of compared values.
    """
    from dsreason.checkpoints.checkpoint_folder import TrainerState
    from dsreason.checkpoints.checkpoint_writer import CheckpointWriter
    from tests.engines import save_checkpoint

    result = []
    for stage in STAGES:
        engine, world = build(stage)
        writer = CheckpointWriter(engine, Path(folder) / stage / "beside", world)
        for step in (2, 4):
            train(engine, world, range(step - 2, step))
            expected = save_checkpoint(engine, Path(folder) / stage / "waited", step, TrainerState(step=step), world)
            may_write = threading.Event()
            writer.thread.submit(may_write.wait)
            writer.start(step, TrainerState(step=step))
            assert writer.poll() is None
            train(engine, world, range(step, step + 1))
            assert writer.poll() is None
            assert not list((Path(folder) / stage / "beside").glob(f"step_{step}"))
            may_write.set()
            written = writer.wait()
            before, after = content(expected), content(written)
            assert before.keys() == after.keys()
            differing = [
                name
                for name in before
                if not (
                    torch.equal(before[name], after[name])
                    if torch.is_tensor(before[name])
                    else before[name] == after[name]
                )
            ]
            result.append((f"{stage} step {step}", differing, len(before)))
        writer.close()
    return result


def test_checkpoint_is_unaffected_by_later_training(tmp_path: Path) -> None:
    for on_rank in run_on_ranks(write_beside_training, 2, str(tmp_path)):
        for name, differing, compared in on_rank:
            assert differing == [], name
            assert compared > 20, name


def fail_to_write(folder: str) -> list[str]:
    """Return the errors of writes for which the disk has no room, from the first byte or only later, on one rank."""
    from dsreason.checkpoints.checkpoint_folder import TrainerState, find_complete_checkpoints
    from dsreason.checkpoints.checkpoint_writer import CheckpointWriter
    from dsreason.errors import SaveError
    from dsreason.job.ranks import wait_for_ranks

    engine, world = build("zero3")
    train(engine, world, range(1))
    writer = CheckpointWriter(engine, Path(folder), world)
    writer.start(1, TrainerState(step=1))
    writer.wait()

    def failure(step: int) -> str:
        with pytest.raises(SaveError) as caught:
            writer.start(step, TrainerState(step=step))
            while writer.poll() is None:
                pass
        assert writer.poll() is None  # an error is reported only once
        assert [path.name for path in find_complete_checkpoints(Path(folder))] == ["step_1"]
        assert not list(Path(folder).glob(".saving*"))
        wait_for_ranks()  # all ranks must be done before one of them begins the next write
        return str(caught.value)

    errors = []
    with mock.patch("shutil.disk_usage", return_value=mock.Mock(free=10_000)):
        errors.append(failure(2))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if world.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, limits[1]))  # writing beyond 5000 bytes fails
    errors.append(failure(3))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    deleted = threading.Event()
    writer.pruning = writer.thread.submit(lambda: time.sleep(0.5) or deleted.set())
    usage = mock.Mock(side_effect=lambda path: mock.Mock(free=10**12 if deleted.is_set() else 10_000))
    with mock.patch("shutil.disk_usage", usage):  # the checkpoint that is being deleted frees the space
        writer.start(4, TrainerState(step=4))
    assert writer.wait() == Path(folder) / "step_4"
    return errors


def test_failed_write_is_reported_on_every_rank(tmp_path: Path) -> None:
    first, second = run_on_ranks(fail_to_write, 2, str(tmp_path))
    assert first == second
    no_room, too_large = first
    assert "GiB, but only 0.00 GiB are free" in no_room
    assert "step_3: rank 1 could not write the checkpoint: " in too_large
    assert "older checkpoints are unchanged" in no_room and "older checkpoints are unchanged" in too_large


def leave_with_an_error(folder: str) -> list[str]:
    """Start a checkpoint, then leave with an error on all ranks, or on only one; return the complete checkpoints of both
    cases."""
    from dsreason.checkpoints.checkpoint_folder import TrainerState, find_complete_checkpoints, finish_interrupted
    from dsreason.checkpoints.checkpoint_writer import CheckpointWriter
    from dsreason.checkpoints.marker import check_sizes
    from dsreason.job.ranks import wait_for_ranks

    engine, world = build("zero3")
    train(engine, world, range(1))
    result = []
    for name, leaving in (("all", (0, 1)), ("alone", (1,))):
        writer, may_write = CheckpointWriter(engine, Path(folder) / name, world), threading.Event()
        writer.thread.submit(may_write.wait)
        writer.start(1, TrainerState(step=1))
        threading.Timer(0.3, may_write.set).start()
        with (
            mock.patch("dsreason.checkpoints.checkpoint_writer.LEAVING", name),
            mock.patch("dsreason.checkpoints.checkpoint_writer.PATIENCE_S", 1.0),
        ):
            if world.rank in leaving:
                writer.finish_pending()
        writer.close()
        wait_for_ranks()
        result += [f"{name}/{path.name}" for path in find_complete_checkpoints(Path(folder) / name)]
        wait_for_ranks()
    if world.is_main:  # the next job also does this when it starts
        assert finish_interrupted(Path(folder) / "alone") == [Path(folder) / "alone/step_1"]
        check_sizes(Path(folder) / "alone/step_1")
    return result


def test_pending_checkpoint_survives_an_error(
    tmp_path: Path,
) -> None:
    assert run_on_ranks(leave_with_an_error, 2, str(tmp_path)) == [["all/step_1"]] * 2


def copy_with_little_memory(folder: str) -> list[bool]:
    """Return whether training continues during a write if the memory suffices for many copies, for one copy, and for two
    copies."""
    from dsreason.checkpoints.checkpoint_folder import TrainerState
    from dsreason.checkpoints.checkpoint_writer import CheckpointWriter

    engine, world = build("zero3")
    copied, size = [], 0
    for times in (100, 1.5, 3):
        writer = CheckpointWriter(engine, Path(folder) / str(times), world)
        free = mock.patch(
            "dsreason.checkpoints.checkpoint_writer.count_available_bytes", return_value=int(times * (size or 10**6))
        )
        with free:
            writer.start(1, TrainerState(step=1))
        copied.append(writer.snapshot.copied)
        assert writer.wait() is not None
        size = sum(buffer.nbytes for buffer in writer.snapshot.buffers.values()) or size
        writer.close()
    return copied


def test_background_write_requires_memory_for_all_ranks(tmp_path: Path) -> None:
    assert run_on_ranks(copy_with_little_memory, 2, str(tmp_path)) == [[True, False, True]] * 2


def make_base(folder: Path) -> None:
    make_export(folder)
    (folder / "config.json").write_text('{"model_type": "qwen3_vl"}')


def save_on_a_bad_disk(folder: str) -> list[str]:
    """Return the errors when a disk reports too little space, fills up during the write, and rejects all writes."""
    from dsreason.checkpoints.checkpoint_folder import TrainerState, find_complete_checkpoints
    from dsreason.checkpoints.export import export_engine
    from dsreason.checkpoints.marker import check_sizes
    from dsreason.errors import SaveError
    from dsreason.job.ranks import run_on_rank_zero, wait_for_ranks
    from tests.engines import save_checkpoint

    engine, world = build("zero3")
    disk = Path(folder)
    save_checkpoint(engine, disk, 1, TrainerState(step=1), world)
    filler = disk / "filler"
    run_on_rank_zero(lambda: filler.write_bytes(bytes(shutil.disk_usage(disk).free - 4096)) and None)

    def failure(save: Callable[[], object]) -> str:
        with pytest.raises(SaveError) as caught:
            save()
        assert [path.name for path in find_complete_checkpoints(disk)] == ["step_1"]
        check_sizes(disk / "step_1")
        assert not list(disk.glob(".*"))
        text = str(caught.value)
        del caught
        gc.collect()  # a disk cannot be remounted read-only while the error keeps files open
        wait_for_ranks()
        return text

    errors = [failure(lambda: save_checkpoint(engine, disk, 2, TrainerState(step=2), world))]
    with mock.patch("shutil.disk_usage", return_value=mock.Mock(free=10**9)):
        errors.append(failure(lambda: save_checkpoint(engine, disk, 3, TrainerState(step=3), world)))
    base = disk.with_name("base")
    run_on_rank_zero(lambda: make_base(base))
    errors.append(failure(lambda: export_engine(engine, base, disk / "export", world, dtype="fp32")))
    run_on_rank_zero(lambda: set_read_only(disk))
    errors.append(failure(lambda: save_checkpoint(engine, disk, 4, TrainerState(step=4), world)))
    errors.append(failure(lambda: export_engine(engine, base, disk / "export", world, dtype="fp32")))
    run_on_rank_zero(lambda: set_read_only(disk, to=False))
    run_on_rank_zero(filler.unlink)
    assert save_checkpoint(engine, disk, 5, TrainerState(step=5), world) == disk / "step_5"
    return errors


def test_disk_errors_are_reported_on_every_rank(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "2m") as disk:
        first, second = run_on_ranks(save_on_a_bad_disk, 2, str(disk))
    assert first == second
    expected, filled, export, read_only, read_only_export = first
    assert "the checkpoint needs" in expected and "are free on this disk" in expected
    assert "step_3: rank " in filled and "could not write the checkpoint: " in filled
    assert export.startswith(f"{disk}/export: cannot be written (") and "No space left" in export
    assert "Read-only file system" in read_only and "older checkpoints are unchanged" in read_only
    assert "Read-only file system" in read_only_export
