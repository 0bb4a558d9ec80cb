"""Markers of checkpoints, the comparison of files with them, and `dsreason checkpoint verify`."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from dsreason.checkpoints import digests, selection
from dsreason.checkpoints.checkpoint_folder import SavedRun, TrainerState, finish, finish_interrupted
from dsreason.checkpoints.digests import ALGORITHM, compute_digest
from dsreason.checkpoints.export_digests import write_digests
from dsreason.checkpoints.marker import MARKER, check_content, read_marker, write_marker
from dsreason.checkpoints.selection import choose_sound, is_checked_by
from dsreason.cli.main import app
from dsreason.config.schema import SFTConfig
from dsreason.errors import CheckpointError, ConfigError
from dsreason.files.disk import hash_end
from dsreason.job.ranks import World
from dsreason.train.common.preflight import check_resume
from tests.damage import DAMAGE, cut, flip_bit
from tests.unit.checkpoints.made_folders import make_export

WEIGHTS, STATE = "mp_rank_00_model_states.pt", "trainer_state.json"
ALONE = World(0, 0, 1, torch.device("cpu"))


def save(folder: Path, step: int) -> Path:
    """Write a complete checkpoint whose weights are larger than the 64 KiB at the end that older versions hashed."""
    path = folder / f"step_{step}"
    path.mkdir(parents=True)
    run = SavedRun(TrainerState(step), world_size=1, zero_stage=3, precision="fp32", parameters={})
    (path / STATE).write_text(json.dumps(asdict(run)))
    (path / WEIGHTS).write_bytes(bytes([step]) * 300_000)
    write_marker(path)
    return path


def make_older(path: Path) -> Path:
    """Rewrite the marker as older versions did."""
    sizes = read_marker(path).sizes
    (path / MARKER).write_text(json.dumps({"files": sizes, "ends": {name: hash_end(path / name) for name in sizes}}))
    return path


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the collectives with versions for a single rank, which need no process group."""
    monkeypatch.setattr(selection, "run_once_per_folder", lambda world, call: call())
    monkeypatch.setattr(selection, "run_on_rank_zero", lambda call: call())
    monkeypatch.setattr(selection, "share_errors", contextlib.nullcontext)


@pytest.mark.parametrize("name", [WEIGHTS, STATE])
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_any_damage_to_a_file_is_named(tmp_path: Path, damage: Callable[[Path], None], name: str) -> None:
    path = save(tmp_path, 4)
    check_content(path)
    damage(path / name)
    with pytest.raises(CheckpointError, match=f"step_4/{name}: (does not match its digest|has .* bytes|is missing)"):
        check_content(path)


def test_damaged_marker_never_disables_the_check(tmp_path: Path) -> None:
    """If a bit of the marker is also flipped, the check still reports either the damaged file or the marker."""
    path = save(tmp_path, 4)
    sound = (path / MARKER).read_bytes()
    flip_bit(path / WEIGHTS)
    for position in range(len(sound)):
        (path / MARKER).write_bytes(sound)
        flip_bit(path / MARKER, position, bit=position % 7)
        with pytest.raises(CheckpointError, match="step_4"):
            check_content(path)


@pytest.mark.parametrize("document", [{"xxh3_129": {}}, {"ends": {}}, {ALGORITHM: {STATE: "0"}}, {ALGORITHM: "all"}])
def test_unusual_marker_is_rejected(tmp_path: Path, document: dict[str, Any]) -> None:
    path = save(tmp_path, 4)
    (path / MARKER).write_text(json.dumps({"files": read_marker(path).sizes} | document))
    with pytest.raises(
        CheckpointError, match=f"{MARKER}: (has the unknown key 'xxh3_129'|lists digests and sizes of diff)"
    ):
        check_content(path)


def test_older_marker_verifies_less(tmp_path: Path) -> None:
    path = make_older(save(tmp_path, 4))
    flip_bit(path / WEIGHTS)
    check_content(path)
    assert "only its size and its last 64 KiB can be verified" in read_marker(path).gaps
    flip_bit(path / WEIGHTS, -1)
    with pytest.raises(CheckpointError, match=f"{WEIGHTS}: does not match its digest"):
        check_content(path)


def test_digests_of_the_ranks_are_kept(tmp_path: Path) -> None:
    """Every change to a file after its rank has written it counts as damage."""
    save(tmp_path, 4).rename(partial := tmp_path / ".saving_step_4")
    (partial / MARKER).unlink()
    (partial / "rng_rank_0.safetensors").write_bytes(b"numbers")
    digests = {name: compute_digest(partial / name) for name in (WEIGHTS, STATE)}
    flip_bit(partial / WEIGHTS)
    finish(partial, tmp_path / "step_4", [0], digests)
    with pytest.raises(CheckpointError, match=f"{WEIGHTS}: does not match"):
        check_content(tmp_path / "step_4")


def test_damaged_partial_checkpoint_is_not_recovered(tmp_path: Path) -> None:
    partial = save(tmp_path, 4).rename(tmp_path / ".saving_step_4")
    (partial / "rng_rank_0.safetensors").write_bytes(b"numbers")
    write_marker(partial)
    flip_bit(partial / WEIGHTS)
    assert finish_interrupted(tmp_path) == []


@pytest.mark.parametrize("has_marker", [True, False])
def test_recovery_reads_each_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_marker: bool) -> None:
    partial = save(tmp_path, 4).rename(tmp_path / ".saving_step_4")
    (partial / "rng_rank_0.safetensors").write_bytes(b"numbers")
    write_marker(partial)
    if not has_marker:
        (partial / MARKER).unlink()
    files, hash_piece = list[str](), digests._hash_piece

    def note(descriptor: int, start: int) -> bytes:
        files.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        return hash_piece(descriptor, start)

    monkeypatch.setattr(digests, "_hash_piece", note)
    assert finish_interrupted(tmp_path) == [tmp_path / "step_4"]
    assert sorted(files) == sorted([WEIGHTS, STATE, "rng_rank_0.safetensors"])
    check_content(tmp_path / "step_4")


def test_files_and_folders_are_flushed_before_the_marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, flushed = save(tmp_path, 4), []
    (path / "zero").mkdir()
    (path / "zero" / "exp_avg.pt").write_bytes(b"moments")
    fsync = os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda number: flushed.append(os.readlink(f"/proc/self/fd/{number}")) or fsync(number)
    )
    write_marker(path)
    marked = next(index for index, name in enumerate(flushed) if MARKER in name)
    expected = [path / WEIGHTS, path / STATE, path / "zero/exp_avg.pt", path / "zero", path]
    assert {str(file) for file in expected} <= set(flushed[:marked])
    assert flushed[-1] == str(path)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", [WEIGHTS, STATE, MARKER])
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_auto_resumes_from_newest_sound_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None], name: str
) -> None:
    for step in (2, 4, 6):
        save(tmp_path, step)
    damage(tmp_path / "step_4" / name)
    damage(tmp_path / "step_6" / name)
    assert choose_sound(tmp_path, "auto", ALONE) == tmp_path / "step_2"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged_step_4", "damaged_step_6", "step_2"]
    for step in (4, 6):
        assert any(f"step_{step}/{name}" in line and f"damaged_step_{step}" in line for line in caplog.messages)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("resume", ["step_6", "."])
def test_requested_damaged_checkpoint_is_refused(tmp_path: Path, resume: str) -> None:
    folder = tmp_path / "checkpoints"
    for step in (4, 6):
        save(folder, step)
    flip_bit(folder / "step_6" / WEIGHTS)
    with pytest.raises(CheckpointError, match=f"step_6/{WEIGHTS}: does not match its digest"):
        choose_sound(tmp_path / "other", str(folder / resume), ALONE)
    assert sorted(path.name for path in folder.iterdir()) == ["step_4", "step_6"]


@pytest.mark.usefixtures("alone")
def test_run_with_damaged_checkpoints_only_is_refused(tmp_path: Path) -> None:
    flip_bit(save(tmp_path, 4) / WEIGHTS)
    for _ in range(2):  # the second time, the checkpoint has been renamed
        with pytest.raises(CheckpointError, match=r"--resume auto: all checkpoints .* are damaged \(damaged_step_4"):
            choose_sound(tmp_path, "auto", ALONE)
    assert choose_sound(tmp_path / "new", "auto", ALONE) is None


@pytest.mark.usefixtures("alone")
def test_older_checkpoint_is_resumed_with_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_older(save(tmp_path, 4))
    with caplog.at_level(logging.WARNING):
        assert choose_sound(tmp_path, "auto", ALONE) == tmp_path / "step_4"
    assert "step_4: an older version wrote it, so only its size and its last 64 KiB" in caplog.text


@pytest.mark.usefixtures("alone")
def test_unreadable_checkpoint_is_not_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path, 4)
    monkeypatch.setattr(os, "access", lambda file, mode: mode == os.F_OK or Path(file).name != WEIGHTS)
    with pytest.raises(ConfigError, match=f"{WEIGHTS}: this user may not read it"):
        choose_sound(tmp_path, "auto", ALONE)
    assert path.exists()


@pytest.mark.parametrize("here", [(0, 1, 2), (3, 4)])
def test_each_file_is_checked_by_one_rank(here: tuple[int, ...]) -> None:
    names = [f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(9)] + [STATE, WEIGHTS]
    worlds = [World(rank, 0, 5, torch.device("cpu"), here) for rank in here]
    assert all(sum(is_checked_by(name, world) for world in worlds) == 1 for name in names)
    for world in worlds[: len(here) if here[0] == 0 else 0]:
        assert is_checked_by(names[world.rank], world)


def test_preflight_passes_over_incomplete_newest_checkpoint(tmp_path: Path) -> None:
    config = SFTConfig(output_dir=str(tmp_path))
    for step in (2, 4):
        save(tmp_path / "checkpoints", step)
    cut(tmp_path / "checkpoints/step_4" / WEIGHTS)
    assert check_resume(config, "auto") == tmp_path / "checkpoints/step_2"
    with pytest.raises(CheckpointError, match=f"step_4/{WEIGHTS}: has 150000 bytes"):
        check_resume(config, str(tmp_path / "checkpoints/step_4"))


def verify(*paths: Path) -> Result:
    return CliRunner().invoke(app, ["checkpoint", "verify", *map(str, paths)])


def test_verify_lists_each_checkpoint_and_export(tmp_path: Path) -> None:
    for step in (2, 10):
        save(tmp_path / "checkpoints", step)
    make_older(tmp_path / "checkpoints/step_2")
    export = make_export(tmp_path / "export/final")
    write_digests(make_export(tmp_path / "export/step_2"))
    result = verify(tmp_path)
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert [line.partition(":")[0].removeprefix(str(tmp_path)) for line in lines] == [
        *("/checkpoints/step_2", "/checkpoints/step_10", "/export/step_2", "/export/final")
    ]
    assert "sound (2 files, 300.3 kB); an older version wrote it" in lines[0]
    assert lines[1].endswith("sound (2 files, 300.3 kB)")
    assert lines[2].endswith("bytes)")
    assert "it has no digests" in lines[3]
    assert verify(export).exit_code == verify(tmp_path / "checkpoints").exit_code == 0


def test_verify_names_damage_and_fails(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        save(tmp_path / "checkpoints", step)
    flip_bit(tmp_path / "checkpoints/step_2" / WEIGHTS)
    (tmp_path / "checkpoints/step_6" / MARKER).unlink()
    write_digests(make_export(tmp_path / "export/step_2"))
    flip_bit(tmp_path / "export/step_2/model.safetensors", -1)
    result = verify(tmp_path)
    assert result.exit_code == 1
    two, four, six, export = result.output.splitlines()
    assert f"step_2: damaged: {tmp_path}/checkpoints/step_2/{WEIGHTS}: does not match" in two
    assert "step_4: sound" in four
    assert "step_6: damaged" in six
    assert "COMPLETE is missing" in six
    assert "step_2: damaged" in export
    assert "model.safetensors: does not match its digest" in export


def test_verify_rejects_folder_without_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="contains no checkpoint and no export") as error:
        CliRunner().invoke(app, ["checkpoint", "verify", str(tmp_path)], catch_exceptions=False)
    assert error.value.exit_code == 2
