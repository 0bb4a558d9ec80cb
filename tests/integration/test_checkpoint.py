"""Checkpoints on real ranks: resuming is exact on the same number of ranks, losses agree on another, and errors are clear."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from dsreason.checkpoints.marker import write_marker
from dsreason.errors import CheckpointError
from tests.distributed import run_on_ranks
from tests.integration.test_engine import (
    TinyLM,
    ds_config,
    run_step,
    samples,
    summed_loss,
)

pytestmark = pytest.mark.integration

STAGES = ("zero2", "zero3", "zero3_offload", "zero3_multipliers")
MULTIPLIERS = {"up": 0.1, "norm": 4.0}


def build(
    stage: str,
    *,
    bf16: bool = False,
    freeze: str = "frozen",
    multipliers: dict[str, float] | None = None,
    **settings: Any,
) -> tuple[Any, Any]:
    from dsreason.config.schema import OptimConfig
    from dsreason.engine.engine import build_engine
    from dsreason.job.ranks import init_world, seed_everything

    world = init_world()
    seed_everything(5, world.rank)
    model = TinyLM()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(freeze))
    if multipliers is None:
        multipliers = MULTIPLIERS if stage == "zero3_multipliers" else {}
    optim = OptimConfig(lr=1e-2, weight_decay=0.1, max_grad_norm=0.5, lr_multipliers=multipliers)
    return build_engine(model, optim, ds_config(stage, bf16=bf16, clip=0.5) | settings), world


def train(engine: Any, world: Any, steps: range) -> list[float]:
    """Train the given steps; return the loss of the whole batch before each step, as the bits of a float."""
    from dsreason.engine.engine import set_learning_rate
    from dsreason.job.ranks import reduce_sum

    losses = []
    for step in steps:
        set_learning_rate(engine, 1e-2 / (1 + step))
        with torch.no_grad():
            losses.append(reduce_sum(float(summed_loss(engine, samples()[world.rank :: world.size]))))
        run_step(engine, world, samples()[step % 3 :] + samples()[: step % 3], 1)
        engine.step()
    return losses


def everything(engine: Any) -> dict[str, Any]:
    """Return the full float32 parameters and this rank's optimizer states as numpy arrays."""
    from deepspeed.utils import safe_get_full_fp32_param

    result = {}
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            result[name] = safe_get_full_fp32_param(parameter).cpu().numpy().copy()
    for i, state in enumerate(engine.optimizer.optimizer.state.values()):
        for key in ("exp_avg", "exp_avg_sq"):
            result[f"local.{i}.{key}"] = state[key].cpu().numpy().copy()
    result["steps"] = [float(state["step"]) for state in engine.optimizer.optimizer.state.values()]
    result["decay"] = [group["weight_decay"] for group in engine.optimizer.param_groups]
    result["rates"] = [group["lr"] for group in engine.optimizer.param_groups]
    return result


def save_run(folder: str, bf16: bool) -> dict[str, Any]:
    """For every ZeRO stage, train three steps, save a checkpoint, and train three more steps."""
    from dsreason.checkpoints.checkpoint_folder import TrainerState
    from tests.engines import save_checkpoint

    results = {}
    for stage in STAGES:
        engine, world = build(stage, bf16=bf16)
        train(engine, world, range(3))
        state = TrainerState(step=3, consumed_samples=24, best_metric=0.5, extra={"a": [1]})
        save_checkpoint(engine, Path(folder) / stage, 3, state, world)
        drawn = torch.rand(3).tolist()
        losses = train(engine, world, range(3, 6))
        results[stage] = {"losses": losses, "drawn": drawn, **everything(engine)}
    return results


def resume_run(folder: str, bf16: bool) -> dict[str, Any]:
    from dsreason.checkpoints.checkpoint import load_checkpoint
    from dsreason.checkpoints.checkpoint_folder import find_checkpoint

    results = {}
    for stage in STAGES:
        engine, world = build(stage, bf16=bf16)
        checkpoint = find_checkpoint(Path(folder) / stage)
        assert checkpoint is not None
        state = load_checkpoint(engine, checkpoint, world)
        assert (state.step, state.consumed_samples, state.best_metric, state.extra) == (
            3,
            24,
            0.5,
            {"a": [1]},
        )
        assert engine.global_steps == 3
        drawn = torch.rand(3).tolist()
        losses = train(engine, world, range(3, 6))
        results[stage] = {"losses": losses, "drawn": drawn, **everything(engine)}
    return results


@pytest.fixture(scope="module", params=[False, True], ids=["fp32", "bf16"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bool, list[Any]]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return folder, request.param, run_on_ranks(save_run, 2, str(folder), request.param)


def test_resume_on_same_rank_count_is_exact(saved: tuple[Path, bool, list[Any]]) -> None:
    folder, bf16, before = saved
    after = run_on_ranks(resume_run, 2, str(folder), bf16)
    for rank in range(2):
        for stage in STAGES:
            a, b = before[rank][stage], after[rank][stage]
            for name in a:
                assert (a[name] == b[name]).all() if hasattr(a[name], "all") else a[name] == b[name], (stage, name)


@pytest.mark.parametrize("ranks", [1, 4])
def test_resume_on_different_rank_count_gives_equal_losses(saved: tuple[Path, bool, list[Any]], ranks: int) -> None:
    folder, bf16, before = saved
    after = run_on_ranks(resume_run, ranks, str(folder), bf16)
    for stage in STAGES:
        a, b = before[0][stage], after[0][stage]
        assert b["losses"] == pytest.approx(a["losses"], rel=1e-5)
        assert b["losses"][0] == pytest.approx(a["losses"][0], rel=1e-6)
        assert set(b["steps"]) == {6.0}
        assert (b["decay"], b["rates"]) == (a["decay"], a["rates"])
        assert set(a["decay"]) == {0.1, 0.0}
        assert len(a["rates"]) == (5 if stage == "zero3_multipliers" else 2)
        for name in (name for name in a if name.endswith(("weight", "bias"))):
            assert b[name] == pytest.approx(a[name], rel=1e-5, abs=1e-7), (stage, name)


def damage_run(folder: str) -> dict[str, str]:
    """Return the error message for each way in which a checkpoint can be unusable."""
    from dsreason.checkpoints.checkpoint import load_checkpoint
    from dsreason.checkpoints.checkpoint_folder import TrainerState
    from dsreason.checkpoints.selection import check_together
    from tests.engines import save_checkpoint

    engine, world = build("zero3")
    train(engine, world, range(1))
    base = save_checkpoint(engine, Path(folder), 1, TrainerState(step=1), world)

    def failure(path: Path, **other: Any) -> str:
        fresh, _ = build(other.pop("stage", "zero3"), **other)
        with pytest.raises(CheckpointError) as caught:
            check_together(path, world)
            load_checkpoint(fresh, path, world)
        return str(caught.value)

    def damaged(name: str) -> Path:
        from dsreason.job.ranks import wait_for_ranks

        path = Path(folder) / name / "step_1"
        wait_for_ranks()
        if world.is_main:
            shutil.copytree(base, path)
            optimizer = path / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
            match name:
                case "missing":
                    optimizer.unlink()
                case "truncated":
                    optimizer.write_bytes(optimizer.read_bytes()[:-100])
                case "garbled":
                    optimizer.write_bytes(bytes(optimizer.stat().st_size))
                case "unmarked":
                    (path / "COMPLETE").unlink()
                case "pickle":
                    plant_code(path, optimizer)
        wait_for_ranks()
        return path

    texts = {name: failure(damaged(name)) for name in ("missing", "truncated", "garbled", "unmarked", "pickle")}
    texts["freeze"] = failure(base, freeze="up")
    texts["stage"] = failure(base, stage="zero2")
    texts["multipliers"] = failure(base, multipliers={"up": 0.1})
    texts["absent"] = failure(Path(folder) / "step_7")
    assert not Path("planted").exists()
    return texts


class Planted:
    """An object that writes a file when it is unpickled."""

    def __reduce__(self) -> Any:
        return Path.write_text, (Path("planted"), "code ran")


def plant_code(path: Path, file: Path) -> None:
    torch.save(Planted(), file)
    write_marker(path)


def test_unusable_checkpoint_error_states_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    per_rank = run_on_ranks(damage_run, 2, str(tmp_path))
    assert per_rank[0] == per_rank[1]
    texts = per_rank[0]
    assert "missing/step_1/zero_pp_rank_1_mp_rank_00_optim_states.pt: is missing" in texts["missing"]
    assert "truncated/step_1/zero_pp_rank_1_mp_rank_00_optim_states.pt: has" in texts["truncated"]
    assert "garbled/step_1/zero_pp_rank_1_mp_rank_00_optim_states.pt: does not match its digest" in texts["garbled"]
    assert "is not a complete checkpoint (COMPLETE is missing)" in texts["unmarked"]
    assert "Weights only load failed" in texts["pickle"]
    assert "frozen in the checkpoint, trained now: frozen.bias, frozen.weight" in texts["freeze"]
    assert "trained in the checkpoint, frozen now: up.bias, up.weight" in texts["freeze"]
    assert "ZeRO stage 3, but this run uses stage 2" in texts["stage"]
    assert (
        "2 optimizer groups of other parameters than the 4 groups of this run; set optim.lr_m" in texts["multipliers"]
    )
    assert "step_7: the checkpoint folder does not exist" in texts["absent"]
