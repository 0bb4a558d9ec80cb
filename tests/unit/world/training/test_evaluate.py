"""Evaluations of a world model: the weights they load, and the settings that distinguish two evaluations."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dsreason.errors import CheckpointError, ConfigError
from dsreason.files.lock import hold_folder
from dsreason.world.base import FILE, describe_base
from dsreason.world.evaluation.results import MODEL_KEYS, find_differences, open_results
from dsreason.world.families import FAMILIES
from dsreason.world.lora import add_lora, build_lora_metadata, save_lora
from dsreason.world.models import load_transformer
from dsreason.world.schema import (
    WorldConfig,
    WorldLoRAConfig,
    WorldModelConfig,
    WorldRewardConfig,
    WorldTrainConfig,
    WorldValidationConfig,
)
from dsreason.world.training.evaluate import (
    adapt_to_evaluation,
    check,
    collect_settings,
    find_evaluated_model,
    identify_weights,
    load_model,
    split_into_batches,
)

pytest.importorskip("diffusers")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "model"
    FAMILIES["cosmos_predict2_5"].build_tiny(folder)
    return folder


def velocity(transformer: nn.Module) -> Tensor:
    x = torch.randn(1, 16, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    text = torch.randn(1, 8, 128, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return FAMILIES["cosmos_predict2_5"].velocity(transformer, x, torch.tensor([0.5]), text)


def test_adapter_is_evaluated_on_its_base_model(base: Path, tmp_path: Path) -> None:
    trained = load_transformer(base, torch.float32)
    add_lora(trained, rank=2, alpha=6.0, targets=["to_q", "to_v"], seed=0)
    for name, parameter in trained.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, generator=torch.Generator().manual_seed(len(name)))
    adapter = {name: p.detach() for name, p in trained.named_parameters() if "lora_" in name}
    export = tmp_path / "export"
    export.mkdir()
    save_lora(adapter, export, build_lora_metadata(trained))
    (export / FILE).write_text(describe_base({"path": str(base)}, base))

    evaluated = find_evaluated_model(WorldConfig(model=WorldModelConfig(path=str(export))))
    assert evaluated == (base, export)
    loaded = load_model(*evaluated, torch.float32, torch.device("cpu"))
    torch.testing.assert_close(velocity(loaded), velocity(trained), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(velocity(loaded), velocity(load_transformer(base, torch.float32)), atol=1e-3)
    assert not any(parameter.requires_grad for parameter in loaded.parameters())

    (export / FILE).unlink()
    with pytest.raises(CheckpointError, match=rf"is an adapter without {FILE}"):
        find_evaluated_model(WorldConfig(model=WorldModelConfig(path=str(export))))


def test_evaluation_keeps_all_clips_and_plain_weights() -> None:
    config = WorldConfig(
        validation=WorldValidationConfig(max_samples=7, show=1),
        train=WorldTrainConfig(context_parallel_size=4),
        lora=WorldLoRAConfig(rank=8),
    )
    result = adapt_to_evaluation(config)
    assert (result.validation.show, result.train.context_parallel_size, result.lora.rank) == (7, 1, 0)


def test_speed_settings_do_not_distinguish_evaluations() -> None:
    config = WorldConfig()
    faster = config.model_copy(update={"train": config.train.model_copy(update={"micro_batch_size": 8})})
    assert collect_settings(faster, "w") == collect_settings(config, "w")
    other = config.model_copy(update={"train": config.train.model_copy(update={"seed": 8})})
    assert collect_settings(other, "w") != collect_settings(config, "w")


@pytest.mark.parametrize("change", [{"time_limit": 700.0}, {"enqueue_url": "https://b"}, {"fetch_url": "https://b"}])
def test_evaluation_continues_after_reward_connection_changes(change: dict[str, object]) -> None:
    config = WorldConfig()
    other = config.model_copy(update={"reward": config.reward.model_copy(update=change)})
    assert collect_settings(other, "w") == collect_settings(config, "w")


def test_changed_evaluation_settings_are_rejected_early(base: Path, tmp_path: Path) -> None:
    config = WorldConfig(model=WorldModelConfig(path=str(base)))
    open_results(tmp_path, collect_settings(adapt_to_evaluation(config), identify_weights(base, None)), overwrite=False)
    check(config, tmp_path, overwrite=False)
    with hold_folder(tmp_path), pytest.raises(ConfigError, match="is in use by process"):
        check(config, tmp_path, overwrite=True)
    other = config.model_copy(update={"world": config.world.model_copy(update={"guidance_scale": 3.0})})
    with pytest.raises(ConfigError, match=r"a different world\.guidance_scale \(was 1\.0, is now 3\.0\)"):
        check(other, tmp_path, overwrite=False)
    check(other, tmp_path, overwrite=True)


def halve(weights: Path) -> None:
    tensors = {name: tensor * 0.5 for name, tensor in load_file(weights).items()}
    save_file(tensors, weights, metadata={"format": "pt"})


def test_replaced_weights_are_rejected(base: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(base, model)
    config, results = WorldConfig(model=WorldModelConfig(path=str(model))), tmp_path / "results"
    open_results(results, collect_settings(adapt_to_evaluation(config), identify_weights(model, None)), overwrite=False)
    halve(next((model / "transformer").glob("*.safetensors")))
    with pytest.raises(
        ConfigError, match=r"a different model\.weights \(was '\w{16}', is now '\w{16}'\); choose another --results"
    ):
        check(config, results, overwrite=False)


def test_adapters_of_one_model_are_distinguished(tmp_path: Path) -> None:
    save_file({"a": torch.ones(3)}, tmp_path / "pytorch_lora_weights.safetensors")
    (tmp_path / "README.md").write_text("")
    before = identify_weights(tmp_path, tmp_path)
    (tmp_path / "README.md").write_text("of another day")
    assert identify_weights(tmp_path, tmp_path) == before
    halve(tmp_path / "pytorch_lora_weights.safetensors")
    assert identify_weights(tmp_path, tmp_path) != before


@pytest.mark.parametrize("name", ["judge.py:score", "judge:score", "package.judge:score"])
def test_edited_reward_code_changes_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / ("package/judge.py" if "package" in name else "judge.py")
    file.parent.mkdir(exist_ok=True)
    config = WorldConfig(reward=WorldRewardConfig(functions={name: 1.0, "red": 1.0}))
    result = []
    for text in ("one", "another"):
        file.write_text(text)  # the file is not imported, because it is not Python code
        result.append(collect_settings(config, "w"))
    assert [*find_differences(*result)] == [f"reward.code.{name}"]


def test_compared_evaluations_may_differ_only_in_model() -> None:
    assert {*find_differences(collect_settings(WorldConfig(), "a"), collect_settings(WorldConfig(), "b"))} <= {
        *MODEL_KEYS
    }


def test_last_batch_of_rows_may_be_smaller() -> None:
    assert split_into_batches([3, 5, 6, 7, 9], 2) == [[3, 5], [6, 7], [9]]
