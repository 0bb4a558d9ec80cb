"""The meaning of `--model`: runs and checkpoints of dsreason, names in the results, and temporary exports."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from dsreason.checkpoints.marker import MARKER
from dsreason.errors import CheckpointError
from dsreason.evaluation.ask import models
from dsreason.evaluation.ask.models import export_temporarily, find_run_weights, is_checkpoint, name_model


def checkpoint(run: Path, step: int, *, seconds: float) -> Path:
    folder = run / "checkpoints" / f"step_{step}"
    folder.mkdir(parents=True)
    (folder / MARKER).write_text("")
    os.utime(folder / MARKER, (seconds, seconds))
    return folder


def final_export(run: Path, *, seconds: float) -> Path:
    folder = run / "export" / "final"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    os.utime(folder / "config.json", (seconds, seconds))
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "outputs" / "mine"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"config": {}, "deepspeed": {}}))
    return folder


# ---------------------------------------------------------------- which weights


def test_finished_run_resolves_to_final_export(run: Path) -> None:
    checkpoint(run, 20, seconds=100)
    final = final_export(run, seconds=200)
    assert find_run_weights(str(run)) == final


def test_continued_run_resolves_to_newer_checkpoint(run: Path) -> None:
    final_export(run, seconds=200)
    checkpoint(run, 20, seconds=100)
    newest = checkpoint(run, 40, seconds=300)
    assert find_run_weights(str(run)) == newest


@pytest.mark.parametrize("inside", ["", "checkpoints", "checkpoints/step_40"])
def test_unexported_run_resolves_to_newest_complete_checkpoint(run: Path, inside: str) -> None:
    checkpoint(run, 20, seconds=100)
    newest = checkpoint(run, 40, seconds=200)
    (run / "checkpoints" / "step_60").mkdir()  # being written
    weights = find_run_weights(str(run / inside))
    assert weights == newest
    assert is_checkpoint(weights)


def test_checkpoint_path_resolves_to_itself(run: Path) -> None:
    older = checkpoint(run, 20, seconds=100)
    checkpoint(run, 40, seconds=200)
    final_export(run, seconds=300)
    assert find_run_weights(str(older)) == older


def test_run_without_weights_is_rejected(run: Path) -> None:
    (run / "checkpoints").mkdir()
    with pytest.raises(CheckpointError, match="mine: the run has neither export/final nor a complete checkpoint yet"):
        find_run_weights(str(run))


@pytest.mark.parametrize("name", ["tiny:qwen3_vl", "nvidia/Cosmos-Reason2-2B", "s3://bucket/model", "hf", "nowhere"])
def test_other_model_paths_are_not_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hf" / "checkpoints").mkdir(parents=True)  # in a format that is not dsreason's
    (tmp_path / "hf" / "config.json").write_text('{"model_type": "qwen3_vl"}')
    assert find_run_weights(name) is None


# ---------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("nvidia/Cosmos-Reason2-2B", "Cosmos-Reason2-2B"),
        ("tiny:qwen3_vl", "tiny-qwen3_vl"),
        ("outputs/mine/export/final", "mine-final"),
        ("outputs/mine/export/final/", "mine-final"),
        ("outputs/mine/export/step_20", "mine-step_20"),
        ("outputs/mine/checkpoints/step_20", "mine-step_20"),
        ("outputs/mine/export", "mine-export"),
        ("hf_runs/b/checkpoint-500", "b-checkpoint-500"),
        ("s3://bucket/mine/export/final", "mine-final"),
        ("final", "final"),
        ("/final", "final"),
    ],
)
def test_generic_name_is_prefixed_with_run_name(model: str, name: str) -> None:
    assert name_model(model) == name


def test_model_name_does_not_depend_on_cwd(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    final = final_export(run, seconds=1)
    for place, value in ((run, "export/final"), (final.parent, "final"), (final, "."), (final, "../final")):
        monkeypatch.chdir(place)
        assert name_model(value) == "mine-final"


# ---------------------------------------------------------------- exports


@pytest.fixture
def small_exports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace exports with a file that contains the checkpoint's name."""

    def export(checkpoint: Path, output: Path, *, dtype: str, durable: bool) -> Path:
        output.mkdir()
        (output / "model.safetensors").write_text(f"{checkpoint} {dtype}")
        return output

    monkeypatch.setattr(models, "export_checkpoint", export)


def test_concurrent_exports_are_separate_and_removed(small_exports: None, run: Path, tmp_path: Path) -> None:
    results = tmp_path / "results"
    with export_temporarily(run, results, "fp32") as first:
        with export_temporarily(run, results, "fp32") as second:
            assert first != second
        assert (first / "model.safetensors").read_text() == f"{run} fp32"
        assert not second.exists()
    assert list(results.iterdir()) == []


def test_next_export_deletes_that_of_killed_process(small_exports: None, run: Path, tmp_path: Path) -> None:
    remaining = tmp_path / f"{models.EXPORT}killed"
    (remaining / "model").mkdir(parents=True)
    (remaining / models.LOCK).write_text("")  # an unlocked lock file
    with export_temporarily(run, tmp_path, "fp32"):
        assert not remaining.exists()


def test_failed_export_leaves_no_files(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(checkpoint: Path, output: Path, *, dtype: str, durable: bool) -> Path:
        raise CheckpointError("damaged")

    monkeypatch.setattr(models, "export_checkpoint", fail)
    with pytest.raises(CheckpointError, match="damaged"), export_temporarily(run, tmp_path / "results", "fp32"):
        pass
    assert list((tmp_path / "results").iterdir()) == []


def test_unwritable_export_folder_is_reported(run: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(CheckpointError, match=r"file: cannot hold the export of .*mine"),
        export_temporarily(run, tmp_path / "file", "fp32"),
    ):
        pass
