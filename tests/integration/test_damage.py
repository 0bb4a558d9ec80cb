"""Damage to each file of a checkpoint: the next command continues from the one before, or refuses and names the file."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from dsreason.errors import CheckpointError
from tests.damage import DAMAGE, flip_bit
from tests.distributed import run_on_ranks
from tests.integration.command import dsreason
from tests.integration.rows import write_mixed_rows
from tests.integration.test_resume import CONFIG, TRAINED

pytestmark = [pytest.mark.integration, pytest.mark.long]

OPTIMIZER = "zero_pp_rank_1_mp_rank_00_optim_states.pt"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_qwen2_5_vl: Path) -> Path:
    """Return a folder with a finished run in `whole/`: six steps on 2 ranks, checkpoints after steps three and six."""
    folder = tmp_path_factory.mktemp("damage")
    rows = write_mixed_rows(folder / "data")
    trained = TRAINED["all but the vision tower"]
    (folder / "run.toml").write_text(CONFIG.format(model=tiny_qwen2_5_vl, rows=rows, trained=trained))
    ended = train(folder, "whole")
    assert ended.returncode == 0, ended.stderr
    return folder


def train(folder: Path, run: str, *options: object) -> Any:
    return dsreason("sft", "--config", "run.toml", "--output-dir", run, "--nproc", 2, *options, cwd=folder)


def copy_damaged(folder: Path, run: str, name: str = OPTIMIZER) -> Path:
    shutil.copytree(folder / "whole", folder / run)
    flip_bit(folder / run / "checkpoints/step_6" / name)
    return folder / run


def choose_damaged(whole: str, scratch: str) -> dict[str, tuple[str, str]]:
    """Return, for each damage to each file of the newest checkpoint, its error and the checkpoint that `auto` selects."""
    from dsreason.checkpoints.selection import choose_sound
    from dsreason.job.ranks import init_world, run_on_rank_zero, wait_for_ranks

    world, results = init_world(), {}
    names = sorted(path.name for path in (Path(whole) / "step_6").iterdir())
    for kind, damage in DAMAGE.items():
        for name in names:
            checkpoints = Path(scratch) / kind / name
            if world.is_main:
                shutil.copytree(whole, checkpoints)
                damage(checkpoints / "step_6" / name)
            wait_for_ranks()
            with pytest.raises(CheckpointError) as error:
                choose_sound(checkpoints, str(checkpoints / "step_6"), world)
            selected = choose_sound(checkpoints, "auto", world)
            run_on_rank_zero(lambda folder=checkpoints: shutil.rmtree(folder))  # type: ignore[misc]
            results[f"{kind} {name}"] = str(error.value), selected.name if selected else ""
    return results


def test_damage_to_any_checkpoint_file_is_named(folder: Path, tmp_path: Path) -> None:
    results = run_on_ranks(choose_damaged, 2, str(folder / "whole/checkpoints"), str(tmp_path))
    assert results[0] == results[1]
    assert len(results[0]) == 4 * 8  # state and marker, and of each rank: weights, optimizer, random-number state
    for case, (message, selected) in results[0].items():
        assert case.split()[1] in message
        assert selected == "step_3", case


def test_resume_continues_from_sound_checkpoint(folder: Path) -> None:
    run = copy_damaged(folder, "auto")
    ended = train(folder, "auto", "--resume", "auto")
    assert ended.returncode == 0, ended.stderr
    assert f"step_6/{OPTIMIZER}: does not match its digest" in ended.stderr
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["damaged_step_6", "step_3", "step_6"]
    expected, result = (load_file(folder / name / "export/final/model.safetensors") for name in ("whole", "auto"))
    assert all(expected[name].equal(result[name]) for name in expected)
    verified = dsreason("checkpoint", "verify", "auto", cwd=folder)
    assert verified.returncode == 0, verified.stdout
    assert verified.stdout.count(": sound") == 3


def test_requested_damaged_checkpoint_is_refused(folder: Path) -> None:
    copy_damaged(folder, "named")
    for ended in (
        train(folder, "named", "--resume", "named/checkpoints/step_6"),
        dsreason("export", "--checkpoint", "named", "--output", "out", cwd=folder),
    ):
        assert ended.returncode == 2
        assert f"step_6/{OPTIMIZER}: does not match its digest" in ended.stderr
        assert "Traceback" not in ended.stderr
    verified = dsreason("checkpoint", "verify", "named", cwd=folder)
    assert verified.returncode == 1
    assert f"damaged: named/checkpoints/step_6/{OPTIMIZER}" in verified.stdout
