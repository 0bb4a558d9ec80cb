"""Adapters with a 4-bit base on real ranks: the results equal those of adapters with the dequantized matrices as their base."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dsreason.errors import CheckpointError
from tests.distributed import run_on_ranks
from tests.integration.lora import describe, trained_adapters
from tests.integration.rows import write_mixed_rows
from tests.integration.test_lora import build, explore_files, explore_merge, frozen, logprobs, same, train
from tests.unit.models.nf4.test_blocks import reference

pytestmark = pytest.mark.integration

STAGES = ("zero2", "zero3", "zero3_offload")
QUANTIZED = re.compile(r"\.language_model\..*_proj\.weight$")
STEPS, SYNCS = 3, 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_qwen3_vl: Path) -> Path:
    """Create a folder with `model/`, `plain/` (matrices dequantized from the reference NF4), `rows/` and DeepSpeed JSONs."""
    folder = tmp_path_factory.mktemp("qlora")
    for name in ("model", "plain"):
        shutil.copytree(tiny_qwen3_vl, folder / name)
    file = folder / "plain" / "model.safetensors"
    weights = load_file(file)
    choice = [name for name in weights if QUANTIZED.search(name)]
    assert len(choice) == 14
    save_file(
        weights | {name: torch.from_numpy(reference(weights[name])) for name in choice}, file, metadata={"format": "pt"}
    )
    write_mixed_rows(folder / "rows")
    for stage in STAGES:
        shutil.copyfile(Path(__file__).parents[2] / "ds_configs" / f"{stage}.json", folder / f"{stage}.json")
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the measurements of each rank, by ZeRO stage."""
    by_rank = run_on_ranks(explore, 2, str(folder))
    return {stage: [rank[stage] for rank in by_rank] for stage in STAGES}


def quantized(folder: str, stage: str, **model: Any) -> tuple[Any, Any, Any]:
    return build(folder, stage, model={"quantize": "nf4", **model})


def gradients_of(engine: Any, batches: Any) -> dict[str, np.ndarray]:
    from dsreason.job.ranks import init_world
    from dsreason.train.sft.loop import accumulate_gradients
    from tests.engines import full_gradients

    accumulate_gradients(engine, batches, init_world())
    return {name: gradient.numpy() for name, gradient in full_gradients(engine).items()}


def base_weights(engine: Any) -> dict[str, torch.Tensor]:
    from dsreason.engine.merged import iter_unmerged_parameters

    return {name: tensor.clone() for name, tensor, _ in iter_unmerged_parameters(engine, 0.1)}


def explore(folder: str) -> dict[str, dict[str, Any]]:
    return {stage: explore_stage(folder, stage) for stage in STAGES}


def explore_stage(folder: str, stage: str) -> dict[str, Any]:
    from dsreason.engine.reference import BaseReference
    from dsreason.models.load import load_model
    from dsreason.models.policy import Policy

    recorded: dict[str, Any] = {"gradients": {}}
    weights = load_file(Path(folder) / "plain" / "model.safetensors")
    for second in (False, True):
        with trained_adapters():
            engine, batches, _ = quantized(folder, stage, gradient_checkpointing=second)
        recorded["gradients"][second] = gradients_of(engine, batches)
        engine.destroy()
    with trained_adapters():
        engine, batches, _ = build(folder, stage, "plain")
    recorded["gradients"]["plain"] = gradients_of(engine, batches)
    engine.destroy()

    plain = Policy(load_model(Path(folder) / "plain", dtype=torch.float32)).eval()
    original = Policy(load_model(Path(folder) / "model", dtype=torch.float32)).eval()
    engine, batches, config = quantized(folder, stage)
    base, first = logprobs(plain, batches), frozen(engine)
    recorded["start"] = float((logprobs(engine, batches) - base).abs().max())
    recorded["changed by 4 bits"] = float((logprobs(original, batches) - base).abs().max())
    recorded["types"] = {name: tensor.dtype for name, tensor in first.items()}
    recorded["shares"] = {name: tensor.numel() for name, tensor in first.items()}
    train(engine, batches, STEPS)
    policy = logprobs(engine, batches)
    recorded["moved"] = float((policy - base).abs().max())
    with BaseReference(engine).in_place():
        recorded["reference"] = float((logprobs(engine, batches) - base).abs().max())
    recorded |= explore_merge(engine, plain, SYNCS)
    recorded["merged"] = float((logprobs(plain, batches) - policy).abs().max())
    recorded["same bits"] = same(frozen(engine), first)
    recorded["base"] = all(torch.equal(tensor, weights[name]) for name, tensor in base_weights(engine).items())
    return recorded | explore_files(folder, stage, engine, batches, config, quantize="nf4")


@pytest.mark.parametrize("stage", STAGES)
class TestStage:
    def test_start_is_bitwise_equal_to_dequantized_base(self, found: Any, stage: str) -> None:
        for recorded in found[stage]:
            assert recorded["start"] == 0.0
            assert recorded["changed by 4 bits"] > 1e-2

    def test_gradients_match_adapters_on_plain_matrices(self, found: Any, stage: str) -> None:
        for recorded in found[stage]:
            plain = recorded["gradients"]["plain"]
            assert len(plain) == 2 * 26
            for second in (False, True):
                local = recorded["gradients"][second]
                assert local.keys() == plain.keys()
                assert all(difference(local[name], plain[name]) <= 1e-6 for name in plain)

    def test_quantized_matrices_are_sharded_under_zero3(self, found: Any, folder: Path, stage: str) -> None:
        weights = load_file(folder / "model" / "model.safetensors")
        for recorded in found[stage]:
            small = {name for name, dtype in recorded["types"].items() if dtype == torch.uint8}
            assert small == {
                name for name in recorded["types"] if re.search(r"language_model.*_proj\.base_layer\.weight", name)
            }
            for name in small:
                values = weights[name.removeprefix("model.").replace(".base_layer", "")].numel()
                assert recorded["shares"][name] == values // 64 * 36 // (1 if stage == "zero2" else 2)

    def test_training_does_not_change_quantized_codes(self, found: Any, stage: str) -> None:
        for recorded in found[stage]:
            assert recorded["moved"] > 1e-2
            assert recorded["same bits"]
            assert recorded["base"]

    def test_reference_equals_dequantized_base(self, found: Any, stage: str) -> None:
        assert [recorded["reference"] for recorded in found[stage]] == [0.0, 0.0]

    def test_merged_weights_match_trained_policy(self, found: Any, stage: str) -> None:
        for recorded in found[stage]:
            assert recorded["merged"] <= 1e-5
            assert recorded["names"]

    def test_resume_after_three_steps_is_exact(self, found: Any, stage: str) -> None:
        for recorded in found[stage]:
            assert (recorded["resumed"] == recorded["unbroken"]).all()
            assert np.abs(recorded["unbroken"] - recorded["logprobs"]).max() > 1e-3

    def test_checkpoint_export_matches_engine_and_documents_merge(
        self, found: Any, folder: Path, tmp_path: Path, stage: str
    ) -> None:
        from dsreason.checkpoints.export import export_checkpoint

        for dtype in ("fp32", "bf16"):
            output, live = tmp_path / dtype, folder / f"{stage}_{dtype}"
            export_checkpoint(folder / stage / f"step_{STEPS}", output, dtype=dtype)
            for name in ("model.safetensors", "adapter/adapter_model.safetensors"):
                assert same(load_file(output / name), load_file(live / name))
            assert (
                "merged into the base model's weights, quantised to NF4 and dequantised as in training"
                in (output / "README.md").read_text()
            )
            for item in (output, live):
                assert "load_in_4bit=True" in (item / "adapter" / "README.md").read_text()


def difference(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def alone(folder: str) -> dict[str, Any]:
    """Measure gradients, a resumed run, and the errors for a different `model.quantize`, on one rank."""
    from dsreason.checkpoints.checkpoint import load_checkpoint
    from dsreason.job.ranks import init_world
    from dsreason.train.common.run_folder import check_base

    world = init_world()
    with trained_adapters():
        engine, batches, _ = quantized(folder, "zero3")
    recorded: dict[str, Any] = {"gradients": gradients_of(engine, batches)}
    engine.destroy()
    checkpoint = Path(folder) / "zero3" / f"step_{STEPS}"
    engine, batches, _ = quantized(folder, "zero3")
    load_checkpoint(engine, checkpoint, world, with_frozen=False)
    train(engine, batches, STEPS)
    recorded["resumed"] = logprobs(engine, batches).numpy()
    engine.destroy()
    engine, _, config = build(folder, "zero3")
    try:
        check_base(checkpoint, describe(engine, config, Path(folder) / "model"))
    except CheckpointError as error:
        recorded["refused"] = str(error)
    return recorded


@pytest.fixture(scope="module")
def one_rank(found: Any, folder: Path) -> dict[str, Any]:
    (recorded,) = run_on_ranks(alone, 1, str(folder))
    return dict(recorded)


def test_two_ranks_match_single_rank_gradients(
    found: dict[str, list[dict[str, Any]]], one_rank: dict[str, Any]
) -> None:
    for recorded in found["zero3"]:
        two, item = recorded["gradients"][False], one_rank["gradients"]
        assert all(difference(two[name], item[name]) <= 1e-5 for name in item)


def test_resume_on_different_rank_count_matches(
    found: dict[str, list[dict[str, Any]]], one_rank: dict[str, Any]
) -> None:
    two = np.concatenate([recorded["unbroken"] for recorded in found["zero3"]])
    assert np.sort(one_rank["resumed"]) == pytest.approx(np.sort(two), abs=1e-3)


def test_resume_with_other_base_precision_is_rejected(one_rank: dict[str, Any]) -> None:
    assert 'quantize "nf4", but it is now unset' in one_rank["refused"]


def test_checkpoint_contains_only_adapters(found: Any, folder: Path) -> None:
    for stage in STAGES:
        state = json.loads((folder / stage / f"step_{STEPS}" / "trainer_state.json").read_text())
        assert state["state"]["adapter"]["quantize"] == "nf4"
        files = (folder / stage / f"step_{STEPS}").glob("*.pt")
        assert sum(file.stat().st_size for file in files) < (folder / "model" / "model.safetensors").stat().st_size
