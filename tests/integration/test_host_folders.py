"""Two simulated hosts: two ranks in separate folders, each of which keeps only the checkpoint files of its own rank."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsreason.errors import CheckpointError
from tests.distributed import run_on_ranks
from tests.integration.test_checkpoint import STAGES, build, everything, train

pytestmark = [pytest.mark.integration, pytest.mark.long]

RUN = Path("run")


def own_host(folder: str) -> Any:
    """Make this rank the only one of its host, and return its world."""
    from dsreason.job.ranks import init_world
    from dsreason.train.common.run_folder import find_folders

    host = Path(folder) / f"host_{os.environ['RANK']}"
    host.mkdir()
    os.chdir(host)
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    return find_folders(RUN, init_world())


def find(folder: str) -> tuple[Any, Any]:
    """Return the ranks that share the folder, first with a separate folder per host, then with the same folder for all."""
    from dsreason.train.common.run_folder import find_folders

    world = own_host(folder)
    shared = find_folders(Path(folder) / "shared", replace(world, folder_ranks=()))
    return world.folder_ranks, shared.folder_ranks


def test_hosts_detect_whether_they_share_a_folder(tmp_path: Path) -> None:
    assert run_on_ranks(find, 2, str(tmp_path)) == [((0,), ()), ((1,), ())]
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["host_0", "host_1", "run", "run", "shared"]


def save_and_resume(folder: str) -> list[list[str]]:
    """Train, save and continue training; check that a resumed run gives the same result, and return each checkpoint's files."""
    from dsreason.checkpoints.checkpoint import load_checkpoint
    from dsreason.checkpoints.checkpoint_folder import TrainerState
    from tests.engines import save_checkpoint

    world, files = own_host(folder), []
    settings = {"checkpoint": {"use_node_local_storage": True}}
    for stage in STAGES:
        engine, _ = build(stage, **settings)
        train(engine, world, range(3))
        path = save_checkpoint(engine, RUN / stage, 3, TrainerState(step=3), world)
        expected = train(engine, world, range(3, 5)), everything(engine)
        engine, _ = build(stage, **settings)
        assert load_checkpoint(engine, path, world).step == 3
        result = train(engine, world, range(3, 5)), everything(engine)
        assert result[0] == expected[0]
        for name, value in expected[1].items():
            assert (value == result[1][name]).all() if hasattr(value, "all") else value == result[1][name], (
                stage,
                name,
            )
        files.append(sorted(file.name for file in path.iterdir()))
    return files


def test_hosts_store_their_parts_and_resume_exactly(tmp_path: Path) -> None:
    for rank, stages in enumerate(run_on_ranks(save_and_resume, 2, str(tmp_path))):
        for names in stages:
            assert {"COMPLETE", "trainer_state.json", f"rng_rank_{rank}.safetensors"} <= set(names)
            assert any(name.endswith("model_states.pt") for name in names)
            shards = [name for name in names if name.endswith("optim_states.pt")]
            assert len(shards) == 1
            assert f"zero_pp_rank_{rank}_" in shards[0]


def resume_with_parts(folder: str) -> list[str]:
    """Return what `--resume` finds or reports if hosts have complete checkpoints of different steps."""
    from dsreason.checkpoints.checkpoint import check_parts
    from dsreason.checkpoints.checkpoint_folder import get_rng_file
    from dsreason.checkpoints.marker import MARKER
    from dsreason.checkpoints.selection import choose_common
    from dsreason.job.ranks import wait_for_ranks

    world, result = own_host(folder), []
    checkpoints = RUN / "checkpoints"

    def choose(resume: str) -> str:
        wait_for_ranks()
        try:
            return str(choose_common(checkpoints, resume, world))
        except CheckpointError as error:
            return str(error)

    result.append(choose("auto"))
    for step in (2, 4, 6)[: 2 + world.rank]:  # host 0 had not written step 6 when the job ended
        (checkpoints / f"step_{step}").mkdir(parents=True)
        (checkpoints / f"step_{step}" / MARKER).write_text('{"files": {}}')
        (checkpoints / f"step_{step}" / "trainer_state.json").write_text("{}")
        (checkpoints / f"step_{step}" / get_rng_file(world.rank)).touch()
    if world.rank == 1:
        (checkpoints / "step_4" / MARKER).unlink()
    result += [choose("auto"), choose(str(checkpoints / "step_2")), choose(str(checkpoints / "step_4"))]
    with pytest.raises(CheckpointError) as caught:
        check_parts(checkpoints / "step_2", 4, world)
    result.append(str(caught.value).replace(get_rng_file(1 - world.rank), "other"))
    wait_for_ranks()
    if world.rank == 1:
        shutil.rmtree(checkpoints)
    result.append(choose("auto"))
    return result


def test_resume_uses_checkpoint_complete_on_all_hosts(tmp_path: Path) -> None:
    results = run_on_ranks(resume_with_parts, 2, str(tmp_path))
    assert results[0] == results[1]
    fresh, newest, choice, incomplete, other_size, lost = results[0]
    assert fresh == "None"
    assert newest == choice == "run/checkpoints/step_2"
    assert "complete on all of them (rank 0: step_2, step_4; rank 1: step_2, step_6)" in incomplete
    assert other_size.startswith(
        "run/checkpoints/step_2: does not contain other, rng_rank_2.safetensors, rng_rank_3.safetensors: the 4 "
    )
    assert "resume with 4 ranks on the same hosts in the same order" in other_size
    assert "complete on all of them (rank 0: step_2, step_4; rank 1: none)" in lost
