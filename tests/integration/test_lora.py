"""Adapters on real ranks: the model equals its base at the start, and only adapters are trained, saved, merged, and disabled
for the reference."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dsreason.errors import CheckpointError, DsReasonError
from tests.distributed import run_on_ranks
from tests.integration.lora import describe, lora_config, trained_adapters
from tests.integration.rows import write_mixed_rows
from tests.integration.test_gradient_invariance import first_step

pytestmark = pytest.mark.integration

STAGES = ("zero2", "zero2_offload", "zero3", "zero3_offload")
STEPS = 3
SYNCS = 100


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_qwen3_vl: Path) -> Path:
    """Create a folder with `model/`, `rows/`, and a DeepSpeed JSON for every ZeRO stage."""
    folder = tmp_path_factory.mktemp("lora")
    shutil.copytree(tiny_qwen3_vl, folder / "model")
    write_mixed_rows(folder / "rows")
    for stage in ("zero2", "zero3", "zero3_offload"):
        shutil.copyfile(Path(__file__).parents[2] / "ds_configs" / f"{stage}.json", folder / f"{stage}.json")
    zero2 = json.loads((folder / "zero2.json").read_text())
    zero2["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    (folder / "zero2_offload.json").write_text(json.dumps(zero2))
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the measurements of each rank, by ZeRO stage."""
    by_rank = run_on_ranks(explore, 2, str(folder))
    return {stage: [rank[stage] for rank in by_rank] for stage in STAGES}


def build(folder: str, stage: str, base: str = "model", **sections: Any) -> tuple[Any, Any, Any]:
    """Return the engine, the batches of the first step, and the configuration."""
    from dsreason.job.ranks import init_world

    world = init_world()
    value = {"deepspeed": f"{folder}/{stage}.json"} | sections
    config = lora_config(f"{folder}/rows/rows.jsonl", f"{folder}/{base}", **value)
    return (*first_step(config, Path(folder) / base, world), config)


def train(engine: Any, batches: Any, steps: int) -> None:
    from dsreason.engine.engine import set_learning_rate
    from dsreason.job.ranks import init_world
    from dsreason.train.sft.loop import accumulate_gradients

    set_learning_rate(engine, 1e-2)
    for _ in range(steps):
        accumulate_gradients(engine, batches, init_world())
        engine.step()


@torch.no_grad()
def logprobs(policy: Any, batches: Any) -> torch.Tensor:
    return torch.cat([policy(batch) for batch in batches.micro_batches]).clone()


def frozen(engine: Any) -> dict[str, torch.Tensor]:
    """Return this rank's parts of the parameters that are not trained."""
    from dsreason.engine.engine import is_partitioned

    return {
        name: (p.ds_tensor if is_partitioned(p) else p.detach()).clone()
        for name, p in engine.module.named_parameters()
        if not p.requires_grad
    }


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def explore(folder: str) -> dict[str, dict[str, Any]]:
    return {stage: explore_stage(folder, stage) for stage in STAGES}


def explore_stage(folder: str, stage: str) -> dict[str, Any]:
    from dsreason.models.load import load_model
    from dsreason.models.policy import Policy

    engine, batches, config = build(folder, stage)
    plain = Policy(load_model(Path(folder) / "model", dtype=torch.float32)).eval()
    base, first = logprobs(plain, batches), frozen(engine)
    recorded = explore_start(engine, batches, plain, base)
    policy = logprobs(engine, batches)
    recorded |= explore_merge(engine, plain, SYNCS if stage == "zero3" else 2)
    recorded["merged"] = float((logprobs(plain, batches) - policy).abs().max())
    recorded["same bits"] = same(frozen(engine), first) and torch.equal(logprobs(engine, batches), policy)
    return recorded | explore_files(folder, stage, engine, batches, config)


def explore_start(engine: Any, batches: Any, plain: Any, base: torch.Tensor) -> dict[str, Any]:
    """Measure the policy before the first step, the gradients of this step, and the reference after the last step."""
    from dsreason.engine.merged import iter_merged_parameters
    from dsreason.engine.reference import BaseReference
    from dsreason.job.ranks import init_world
    from dsreason.train.sft.loop import accumulate_gradients
    from tests.engines import full_gradients

    weights = dict(plain.model.named_parameters())
    recorded: dict[str, Any] = {"start": float((logprobs(engine, batches) - base).abs().max())}
    recorded["untouched"] = all(torch.equal(tensor, weights[name]) for name, tensor in iter_merged_parameters(engine))
    accumulate_gradients(engine, batches, init_world())
    gradients = full_gradients(engine)
    recorded["trained"] = sorted(gradients)
    recorded["B without gradient"] = [name for name, g in gradients.items() if "lora_B" in name and not g.any()]
    recorded["A with gradient"] = [name for name, g in gradients.items() if "lora_A" in name and g.any()]
    engine.step()
    train(engine, batches, STEPS - 1)
    recorded["moved"] = float((logprobs(engine, batches) - base).abs().max())
    with BaseReference(engine).in_place():
        recorded["reference"] = float((logprobs(engine, batches) - base).abs().max())
    return recorded


def explore_merge(engine: Any, plain: Any, syncs: int) -> dict[str, Any]:
    """Load the merged weights into the engine `plain`."""
    from dsreason.engine.merged import iter_merged_parameters, list_constant_names

    for _ in range(syncs):
        merged = {name: tensor.clone() for name, tensor in iter_merged_parameters(engine, 0.5)}
    names = [name for name, _ in plain.model.named_parameters()]
    plain.model.load_state_dict(merged, strict=False)
    return {"constant": list_constant_names(engine), "names": list(merged) == names}


def explore_files(folder: str, stage: str, engine: Any, batches: Any, config: Any, **model: Any) -> dict[str, Any]:
    """Write a checkpoint and exports, then continue training, once uninterrupted and once resumed. `model` has keys of
    `[model]`."""
    from dsreason.checkpoints.checkpoint import load_checkpoint
    from dsreason.checkpoints.checkpoint_folder import TrainerState
    from dsreason.checkpoints.export import export_engine
    from dsreason.job.ranks import init_world
    from tests.engines import save_checkpoint

    world, base = init_world(), Path(folder) / "model"
    state = TrainerState(step=STEPS, model_path=str(base), adapter=describe(engine, config, base))
    checkpoint = save_checkpoint(engine, Path(folder) / stage, STEPS, state, world, with_frozen=False)
    for dtype in ("fp32", "bf16"):
        output = Path(folder) / f"{stage}_{dtype}"
        export_engine(engine, base, output, world, dtype=dtype, adapter=state.adapter)
    recorded = {"logprobs": logprobs(engine, batches).numpy()}
    train(engine, batches, STEPS)
    recorded["unbroken"] = logprobs(engine, batches).numpy()
    engine.destroy()
    engine, batches, _ = build(folder, stage, model=model)
    load_checkpoint(engine, checkpoint, world, with_frozen=False)
    train(engine, batches, STEPS)
    recorded["resumed"] = logprobs(engine, batches).numpy()
    engine.destroy()
    return recorded


@pytest.mark.parametrize("stage", STAGES)
class TestStage:
    def test_start_is_bitwise_equal_to_base(self, found: Any, stage: str) -> None:
        for recorded in found[stage]:
            assert recorded["start"] == 0.0
            assert recorded["untouched"]

    def test_only_adapters_are_trained(self, found: Any, stage: str) -> None:
        for recorded in found[stage]:
            assert len(recorded["trained"]) == 2 * 26
            assert all("lora_" in name for name in recorded["trained"])
            assert not recorded["B without gradient"]
            assert not recorded["A with gradient"]  # B is still 0, so the gradient of A is 0
            assert recorded["moved"] > 1e-2

    def test_reference_equals_base(self, found: Any, stage: str) -> None:
        assert [recorded["reference"] for recorded in found[stage]] == [0.0, 0.0]

    def test_merging_is_exact_and_keeps_base_unchanged(self, found: Any, stage: str) -> None:
        for recorded in found[stage]:
            assert recorded["merged"] <= 1e-5
            assert recorded["same bits"]
            assert recorded["names"]
            assert "model.language_model.norm.weight" in recorded["constant"]
            assert not [name for name in recorded["constant"] if "_proj.weight" in name]

    def test_resume_after_three_steps_is_exact(self, found: Any, stage: str) -> None:
        for recorded in found[stage]:
            assert (recorded["resumed"] == recorded["unbroken"]).all()
            assert np.abs(recorded["unbroken"] - recorded["logprobs"]).max() > 1e-3

    def test_checkpoint_contains_only_adapters(self, found: Any, folder: Path, stage: str) -> None:
        files = (folder / stage / f"step_{STEPS}").glob("*.pt")
        base = (folder / "model" / "model.safetensors").stat().st_size
        assert sum(file.stat().st_size for file in files) < base

    @pytest.mark.parametrize("dtype", ["fp32", "bf16"])
    def test_checkpoint_export_matches_engine_export(
        self, found: Any, folder: Path, tmp_path: Path, stage: str, dtype: str
    ) -> None:
        from dsreason.checkpoints.export import export_checkpoint

        output = export_checkpoint(folder / stage / f"step_{STEPS}", tmp_path / "out", dtype=dtype)
        live = folder / f"{stage}_{dtype}"
        for name in ("model.safetensors", "adapter/adapter_model.safetensors"):
            assert same(load_file(output / name), load_file(live / name))
        settings = [json.loads((item / "adapter" / "adapter_config.json").read_text()) for item in (output, live)]
        assert settings[0] == settings[1]
        assert "LoRA of rank 8" in (output / "README.md").read_text()


def test_all_zero_stages_give_equal_results(found: dict[str, list[dict[str, Any]]]) -> None:
    for stage in STAGES:
        for dsreason_result, reference in zip(found[stage], found["zero3"], strict=True):
            assert dsreason_result["logprobs"] == pytest.approx(reference["logprobs"], abs=1e-3)


def resume_elsewhere(folder: str, model: str) -> tuple[list[np.ndarray], str]:
    """Resume on a different number of ranks; return the log-probabilities, and the error for another base model."""
    from dsreason.checkpoints.checkpoint import load_checkpoint
    from dsreason.job.ranks import init_world
    from dsreason.train.common.run_folder import check_base

    world, after = init_world(), []
    for stage in STAGES:
        engine, batches, config = build(folder, stage)
        checkpoint = Path(folder) / stage / f"step_{STEPS}"
        load_checkpoint(engine, checkpoint, world, with_frozen=False)
        train(engine, batches, STEPS)
        after.append(logprobs(engine, batches).numpy())
        if stage == STAGES[-1]:
            try:
                check_base(checkpoint, describe(engine, config, model))
            except CheckpointError as error:
                return after, str(error)
        engine.destroy()
    return after, ""


def test_resume_on_different_rank_count_checks_base(
    found: dict[str, list[dict[str, Any]]], folder: Path, tmp_path: Path
) -> None:
    from dsreason.models.tiny import build_tiny

    build_tiny("qwen3_vl", tmp_path / "other", seed=1)
    ((after, text),) = run_on_ranks(resume_elsewhere, 1, str(folder), str(tmp_path / "other"))
    for stage, values in zip(STAGES, after, strict=True):
        two = np.concatenate([recorded["unbroken"] for recorded in found[stage]])
        assert np.sort(values) == pytest.approx(np.sort(two), abs=1e-3)
    assert "its adapters were trained on" in text
    assert "whose files differ" in text


def test_peft_adapter_matches_merged_export(found: Any, folder: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForImageTextToText

    ids = torch.arange(40, 72)[None]
    logits = []
    for place in ("model", "zero3_fp32"):
        model = AutoModelForImageTextToText.from_pretrained(folder / place, attn_implementation="sdpa").eval()
        if place == "model":
            model = PeftModel.from_pretrained(model, folder / "zero3_fp32" / "adapter")
        with torch.no_grad():
            logits.append(model(input_ids=ids).logits)
    assert float((logits[0] - logits[1]).abs().max()) <= 1e-5


def test_export_is_rejected_when_base_files_changed(found: Any, folder: Path, tmp_path: Path) -> None:
    from dsreason.checkpoints.export import export_checkpoint
    from dsreason.checkpoints.marker import write_marker
    from dsreason.models.tiny import build_tiny

    checkpoint = shutil.copytree(folder / "zero3" / f"step_{STEPS}", tmp_path / f"step_{STEPS}")
    build_tiny("qwen3_vl", tmp_path / "other", seed=1)
    state = checkpoint / "trainer_state.json"
    state.write_text(state.read_text().replace(str(folder / "model"), str(tmp_path / "other")))
    write_marker(checkpoint)
    with pytest.raises(CheckpointError, match="have changed since"):
        export_checkpoint(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def unlike(folder: str) -> str:
    from dsreason.job.ranks import init_world

    world = init_world()
    try:
        build(folder, "zero3", train={"seed": world.rank})
    except DsReasonError as error:
        return str(error)
    return ""


def test_ranks_with_different_initial_adapters_are_rejected(folder: Path) -> None:
    texts = run_on_ranks(unlike, 2, str(folder))
    assert all(text.startswith("the initial adapters of rank 1 differ from those of rank 0") for text in texts)


def checkpointed(folder: str) -> list[dict[str, np.ndarray]]:
    """Return the gradients of nonzero adapters without recomputation, with recomputation, and with its inputs kept on the
    host."""
    from dsreason.job.ranks import init_world
    from dsreason.train.sft.loop import accumulate_gradients
    from tests.engines import full_gradients

    gradients = []
    for second, offload in ((False, False), (True, False), (True, True)):
        sections = {"model": {"gradient_checkpointing": second}, "train": {"activation_offload": offload}}
        with trained_adapters():
            engine, batches, _ = build(folder, "zero3", **sections)
        accumulate_gradients(engine, batches, init_world())
        gradients.append({name: gradient.numpy() for name, gradient in full_gradients(engine).items()})
        engine.destroy()
    return gradients


def test_recomputation_does_not_change_gradients(folder: Path) -> None:
    for plain, second, elsewhere in run_on_ranks(checkpointed, 2, str(folder)):
        assert all(gradient.any() for gradient in plain.values())
        assert all(second[name] == pytest.approx(plain[name], rel=1e-5, abs=1e-7) for name in plain)
        assert all(np.array_equal(elsewhere[name], second[name]) for name in second)
