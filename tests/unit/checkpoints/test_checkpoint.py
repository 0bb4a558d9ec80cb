"""Search, pruning and reading of checkpoint folders. Tests that need ranks are in tests/integration/test_checkpoint.py."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dsreason.checkpoints.checkpoint_folder import (
    SavedRun,
    TrainerState,
    check_written,
    choose_checkpoint,
    find_checkpoint,
    find_complete_checkpoints,
    finish,
    finish_interrupted,
    prune_checkpoints,
    read_checkpoint,
    set_aside_newer,
)
from dsreason.checkpoints.export import parse_size, set_dtype, write_model_folder
from dsreason.checkpoints.export_digests import DIGESTS_FILE
from dsreason.checkpoints.marker import check_sizes
from dsreason.checkpoints.rng import load_rng_state, take_rng_state
from dsreason.checkpoints.shards import iter_checkpoint_tensors
from dsreason.errors import CheckpointError, ConfigError, SaveError
from tests.disks import set_read_only, small_disk
from tests.unit.checkpoints.made_folders import make_export


def write_checkpoint(folder: Path, step: int, *, complete: bool = True) -> Path:
    path = folder / f"step_{step}"
    path.mkdir(parents=True)
    (path / "trainer_state.json").write_text("{}")
    if complete:
        (path / "COMPLETE").write_text(json.dumps({"files": {"trainer_state.json": 2}}))
    return path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_highest_complete_step_is_found(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 9)
    newest = write_checkpoint(tmp_path, 100)
    write_checkpoint(tmp_path, 200, complete=False)
    (tmp_path / ".saving_step_300").mkdir()
    (tmp_path / ".saving_step_300" / "COMPLETE").write_text("{}")
    assert find_checkpoint(tmp_path) == newest


@pytest.mark.parametrize("folder", ["empty", "absent"])
def test_find_checkpoint_returns_none_without_checkpoints(tmp_path: Path, folder: str) -> None:
    (tmp_path / "empty").mkdir()
    assert find_checkpoint(tmp_path / folder) is None


@pytest.mark.parametrize(
    ("keep", "best", "left"),
    [
        (-1, None, [1, 2, 10, 20]),
        (2, None, [10, 20]),
        (2, 1, [1, 10, 20]),
        (2, 20, [10, 20]),
        (1, 2, [2, 20]),
        (9, None, [1, 2, 10, 20]),
        (0, 10, [10]),
    ],
)
def test_the_newest_and_the_best_are_kept(tmp_path: Path, keep: int, best: int | None, left: list[int]) -> None:
    for step in (10, 2, 20, 1):
        write_checkpoint(tmp_path, step)
    prune_checkpoints(tmp_path, keep, () if best is None else {tmp_path / f"step_{best}"})
    assert [path.name for path in find_complete_checkpoints(tmp_path)] == [f"step_{step}" for step in left]
    assert names(tmp_path) == sorted(f"step_{step}" for step in left)


def test_resuming_older_checkpoint_sets_newer_aside(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        write_checkpoint(tmp_path, step)
    assert set_aside_newer(tmp_path, tmp_path / "step_2") == [
        tmp_path / "replaced_step_4",
        tmp_path / "replaced_step_6",
    ]
    write_checkpoint(tmp_path, 4)
    prune_checkpoints(tmp_path, 1)
    assert names(tmp_path) == ["replaced_step_4", "replaced_step_6", "step_4"]
    # The older folder of that name is deleted.
    assert set_aside_newer(tmp_path, tmp_path / "step_2") == [tmp_path / "replaced_step_4"]


def test_resuming_another_run_sets_conflicting_checkpoints_aside(tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path / "other", 4)
    for step in (2, 4, 6):
        write_checkpoint(tmp_path / "own", step)
    set_aside_newer(tmp_path / "own", other)
    assert names(tmp_path / "own") == ["replaced_step_4", "replaced_step_6", "step_2"]
    assert names(tmp_path / "other") == ["step_4"]


@pytest.mark.parametrize("given", ["run/checkpoints/step_2", "run/checkpoints", "run"])
def test_checkpoint_is_found_from_run_or_folder(tmp_path: Path, given: str) -> None:
    path = write_checkpoint(tmp_path / "run" / "checkpoints", 2)
    assert choose_checkpoint(tmp_path / "other", str(tmp_path / given)) == path


def test_resuming_from_folder_without_checkpoint_is_rejected(tmp_path: Path) -> None:
    assert choose_checkpoint(tmp_path, None) is choose_checkpoint(tmp_path, "auto") is None
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        choose_checkpoint(tmp_path, str(tmp_path))


def test_incomplete_folders_do_not_count_as_newest(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write_checkpoint(tmp_path, step, complete=step < 3)
    prune_checkpoints(tmp_path, 1)
    assert names(tmp_path) == ["step_2", "step_3"]


def test_leftovers_of_an_interrupted_run_are_removed(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 1)
    for name in (".saving_step_2", ".deleting_step_1", ".saving_universal"):
        write_checkpoint(tmp_path / name, 5)
    assert finish_interrupted(tmp_path) == []
    assert names(tmp_path) == ["step_1"]


def saved_run(**changes: Any) -> SavedRun:
    run = SavedRun(TrainerState(), world_size=2, zero_stage=3, precision="bf16", parameters={})
    return replace(run, **changes)


def write_partial(folder: Path, step: int, *, ranks: int, written: int, marker: bool = False) -> Path:
    """Write a checkpoint whose job was killed after `written` of its `ranks` ranks had written their files."""
    partial = folder / f".saving_step_{step}"
    partial.mkdir(parents=True)
    (partial / "trainer_state.json").write_text(
        json.dumps(asdict(saved_run(state=TrainerState(step), world_size=ranks)))
    )
    (partial / ".rng_rank_1.safetensors").write_text("half")
    for rank in range(written):
        (partial / f"rng_rank_{rank}.safetensors").write_text("numbers")
    if marker:
        sizes = {path.name: path.stat().st_size for path in partial.glob("[!.]*")}
        (partial / "COMPLETE").write_text(json.dumps({"files": sizes}))
    return partial


@pytest.mark.parametrize("marker", [True, False], ids=["before the rename", "before the marker"])
@pytest.mark.parametrize("older", [True, False], ids=["of a step that was there", "of a new step"])
def test_fully_written_checkpoint_is_recovered(tmp_path: Path, marker: bool, older: bool) -> None:
    if older:
        write_checkpoint(tmp_path, 4)
    write_partial(tmp_path, 4, ranks=2, written=2, marker=marker)
    assert finish_interrupted(tmp_path) == [tmp_path / "step_4"]
    assert names(tmp_path) == ["step_4"]
    assert read_checkpoint(tmp_path / "step_4").world_size == 2
    check_sizes(tmp_path / "step_4")


@pytest.mark.parametrize("missing", ["trainer_state.json", "rng_rank_1.safetensors"])
def test_partially_written_checkpoint_is_deleted(tmp_path: Path, missing: str) -> None:
    (write_partial(tmp_path, 4, ranks=2, written=2) / missing).unlink()
    (write_partial(tmp_path, 6, ranks=2, written=2, marker=True) / missing).write_text("half a file")
    assert finish_interrupted(tmp_path) == []
    assert names(tmp_path) == []


class Killed(BaseException):
    """An exception that no code handles, to simulate SIGKILL."""


@pytest.mark.parametrize("at", range(5))
def test_kill_during_replacement_leaves_a_complete_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    write_checkpoint(tmp_path, 4)
    partial, calls = write_partial(tmp_path, 4, ranks=2, written=2), count()

    def killing(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if next(calls) == at:
                raise Killed
            return original(*arguments)

        return call

    with monkeypatch.context() as patched, contextlib.suppress(Killed):
        patched.setattr(Path, "rename", killing(Path.rename))
        patched.setattr(shutil, "rmtree", killing(shutil.rmtree))
        finish(partial, tmp_path / "step_4", range(2))
    finish_interrupted(tmp_path)
    assert names(tmp_path) == ["step_4"]
    check_sizes(tmp_path / "step_4")


def test_changed_sizes_and_missing_files_are_named(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, 1)
    check_sizes(path)
    (path / "trainer_state.json").write_text("{}\n")
    with pytest.raises(CheckpointError, match=r"step_1/trainer_state.json: has 3 bytes, but COMPLETE lists 2"):
        check_sizes(path)
    (path / "trainer_state.json").unlink()
    with pytest.raises(CheckpointError, match=r"step_1/trainer_state.json: is missing"):
        check_sizes(path)


def test_incomplete_or_garbled_checkpoint_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="COMPLETE is missing"):
        read_checkpoint(write_checkpoint(tmp_path, 1, complete=False))
    garbled = write_checkpoint(tmp_path, 2)
    (garbled / "trainer_state.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"step_2/trainer_state.json: is not a valid checkpoint state"):
        read_checkpoint(garbled)


def test_random_state_resumes_exactly(tmp_path: Path) -> None:
    random.gauss(0, 1)  # leaves a second value in the state
    np.random.standard_normal()
    device = torch.device("cpu")
    take_rng_state(device)(tmp_path / "rng")

    def draw() -> list[float]:
        return [random.gauss(0, 1), random.random(), float(np.random.standard_normal()), float(torch.rand(()))]

    drawn = draw()
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    assert draw() != drawn
    load_rng_state(tmp_path / "rng", device)
    assert draw() == drawn


@pytest.mark.parametrize(("text", "size"), [("4GB", 4_000_000_000), ("1.5 MB", 1_500_000), ("7KB", 7000)])
def test_sizes_count_in_thousands(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["4XB", "4gb", "4", "abc", "-4GB", "0GB", "0.0 MB"])
def test_invalid_size_is_rejected(text: str) -> None:
    with pytest.raises(ConfigError, match="max-shard-size"):
        parse_size(text)


def test_dtype_is_set_throughout_the_config() -> None:
    config = {"dtype": "bfloat16", "text_config": {"torch_dtype": "bfloat16", "layers": [1]}}
    assert set_dtype(config, "float32") == {
        "dtype": "float32",
        "text_config": {"torch_dtype": "float32", "layers": [1]},
    }


def test_an_interrupted_export_leaves_no_folder(tmp_path: Path) -> None:
    source = tmp_path / "base"
    source.mkdir()
    (source / "config.json").write_text('{"model_type": "qwen3"}')

    def broken():
        yield "a", torch.zeros(3)
        raise RuntimeError("the disk is gone")

    with pytest.raises(RuntimeError, match="disk"):
        write_model_folder(broken(), source, tmp_path / "out")
    assert names(tmp_path) == ["base"]
    write_model_folder(iter([("a", torch.ones(3))]), source, tmp_path / "out", dtype="fp32")
    assert names(tmp_path / "out") == ["config.json", DIGESTS_FILE, "model.safetensors"]


@pytest.mark.parametrize(("trouble", "reason"), [("full", "No space left"), ("read-only", "Read-only file system")])
def test_failed_export_is_reported_and_cleaned_up(tmp_path: Path, trouble: str, reason: str) -> None:
    source = make_export(tmp_path / "base")
    (source / "config.json").write_text('{"model_type": "qwen3"}')
    with small_disk(tmp_path / "disk") as disk:
        make_export(disk / "older")
        if trouble == "read-only":
            set_read_only(disk)
        with pytest.raises(SaveError) as caught:
            write_model_folder(iter([("a", torch.ones(1_000_000))]), source, disk / "new", dtype="fp32")
        assert names(disk) == ["older"]
    assert str(caught.value).startswith(f"{disk}/new: cannot be written (")
    assert reason in str(caught.value)
    assert caught.value.exit_code == 1


def test_checkpoint_split_across_hosts_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "rng_rank_0.safetensors").touch()
    with pytest.raises(
        CheckpointError, match="does not contain rng_rank_1.safetensors: the 2 ranks of this run wrote to folders on"
    ):
        next(iter_checkpoint_tensors(tmp_path, saved_run(ranks=[0])))


def test_long_list_of_missing_files_is_shortened(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"rng_rank_2.safetensors, and 99997 more: the 100000 ranks of this run"):
        check_written(tmp_path, 100_000, range(100_000), "copy them")
