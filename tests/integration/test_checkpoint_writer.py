"""Checkpoints written beside training: they hold the weights of their step, and a write that fails is told."""

from __future__ import annotations

import resource
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.distributed import run_on_ranks
from tests.integration.test_checkpoint import STAGES, build, train

pytestmark = pytest.mark.integration


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """Every tensor and number in nested containers by its place."""
    if isinstance(value, dict):
        return {k: v for key, item in value.items() for k, v in flat(item, f"{name}.{key}").items()}
    if isinstance(value, (list, tuple)):
        return {k: v for i, item in enumerate(value) for k, v in flat(item, f"{name}[{i}]").items()}
    return {name: value} if isinstance(value, (torch.Tensor, int, float)) else {}


def content(checkpoint: Path) -> dict[str, Any]:
    """What DeepSpeed's files hold."""
    from dsreason.runtime.shards import safe_loading

    with safe_loading():
        return flat({path.name: torch.load(path) for path in sorted(checkpoint.glob("*.pt"))})


def write_beside_training(folder: str) -> list[tuple[str, list[str], int]]:
    """For every stage: two checkpoints in turn whose writing is held up while training changes all they hold.

    Returns what differs from a checkpoint that training waited for, and the number of values compared.
    """
    from dsreason.runtime.checkpoint import TrainerState
    from dsreason.runtime.checkpoint_writer import CheckpointWriter, save_checkpoint

    found = []
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
            found.append((f"{stage} step {step}", differing, len(before)))
        writer.close()
    return found


def test_a_checkpoint_holds_the_step_it_is_of_though_training_went_on(tmp_path: Path) -> None:
    for found in run_on_ranks(write_beside_training, 2, str(tmp_path)):
        for name, differing, compared in found:
            assert differing == [], name
            assert compared > 20, name


def fail_to_write(folder: str) -> list[str]:
    """The errors of writes for which the disk has no room, from the first byte on or in the middle, on one rank."""
    from dsreason.errors import SaveError
    from dsreason.runtime.checkpoint import TrainerState, complete_checkpoints
    from dsreason.runtime.checkpoint_writer import CheckpointWriter
    from dsreason.runtime.world import barrier

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
        assert writer.poll() is None  # told once
        assert [path.name for path in complete_checkpoints(Path(folder))] == ["step_1"]
        assert not list(Path(folder).glob(".saving*"))
        barrier()  # before another rank begins the next
        return str(caught.value)

    errors = []
    with mock.patch("shutil.disk_usage", return_value=mock.Mock(free=10_000)):
        errors.append(failure(2))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if world.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, limits[1]))  # what it writes beyond fails
    errors.append(failure(3))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    writer.start(4, TrainerState(step=4))
    assert writer.wait() == Path(folder) / "step_4"
    return errors


def test_a_failed_write_is_told_on_every_rank_and_older_checkpoints_stay(tmp_path: Path) -> None:
    first, second = run_on_ranks(fail_to_write, 2, str(tmp_path))
    assert first == second
    no_room, too_large = first
    assert "GiB, and 0.00 GiB are free" in no_room
    assert "step_3: rank 1 could not write it: " in too_large
    assert "older checkpoints are as they were" in no_room and "older checkpoints are as they were" in too_large
