"""Problems of world-model runs that are reported before a model is loaded."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from dsreason.errors import CheckpointError, ConfigError, DataError, DsReasonError
from dsreason.world.schema import WorldConfig
from dsreason.world.training.preflight import build_step_order, check, describe_modules, find_model, total_steps

TINY = {"frames": 9, "height": 32, "width": 32, "limit": 64}


def made(**sections: Any) -> WorldConfig:
    document: dict[str, Any] = {
        "model": {"max_prompt_length": 64},
        "data": TINY,
        "world": {"prompts_per_step": 4, "num_generations": 2, "sampling_steps": 4},
        "reward": {"functions": {"brightness": 1.0}},
        "train": {"precision": "fp32"},
    }
    for name, section in sections.items():
        document[name] = {**document.get(name, {}), **section}
    return WorldConfig.model_validate(document)


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("DSREASON_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.mark.parametrize("algorithm", ["sft", "flow_grpo", "ddrl", "nft"])
def test_valid_run_of_every_algorithm_passes(algorithm: str) -> None:
    check(made(world={"algorithm": algorithm}))


@pytest.mark.parametrize(
    ("sections", "error", "text"),
    [
        ({"reward": {"functions": {}}}, ConfigError, "world.algorithm .flow_grpo. needs a reward"),
        ({"reward": {"functions": {"brightnes": 1.0}}}, DsReasonError, "brightnes"),
        ({"world": {"algorithm": "sft"}, "reward": {"functions": {}}}, ConfigError, "checkpoint.best_metric"),
        ({"world": {"algorithm": "nft", "same_noise": True}}, ConfigError, "world.same_noise"),
        (
            {"world": {"prompts_per_step": 2, "optimizer_steps_per_rollout": 3}},
            ConfigError,
            "is greater than world.prompts",
        ),
        (
            {"world": {"algorithm": "ddrl"}, "data": {**TINY, "on_bad_row": "skip"}},
            ConfigError,
            r"data.on_bad_row .* only if world.algorithm is .sft., but world.algorithm \(ddrl\) needs",
        ),
        (
            {"world": {"conditional_frames": (0, 1)}, "data": {**TINY, "on_bad_row": "skip"}},
            ConfigError,
            r"data.on_bad_row .* only if world.algorithm is .sft., but world.conditional_frames \(0, 1\) needs",
        ),
        ({"world": {"noise_level": 0.0}}, ConfigError, "world.noise_level .0. adds no noise"),
        ({"world": {"sde": "cps", "noise_level": 0.8, "trained_steps": (3,)}}, ConfigError, "contains step 3"),
        ({"world": {"conditional_frames": (0, 3)}}, ConfigError, "accepts at most 2 given frames"),
        ({"world": {"conditional_frames": (1, 0)}}, ConfigError, "must be a minimum and a maximum"),
        ({"model": {"path": "tiny:wan"}, "world": {"conditional_frames": (0, 1)}}, ConfigError, "accepts only text"),
        ({"world": {"conditional_frames": (1, 1)}, "data": {**TINY, "frames": 1}}, ConfigError, "leaves none of the 1"),
        ({"train": {"context_parallel_size": 3}}, ConfigError, "does not divide the model's 4 attention heads"),
        (
            {"world": {"prompts_per_step": 100}, "data": TINY},
            DataError,
            "but one global batch needs 100 .world.prompts_per_step.",
        ),
        (
            {"lora": {"rank": 4, "targets": ("to_q", "to_kk")}},
            ConfigError,
            "no linear layer 'to_kk'; did you mean to_k",
        ),
        ({"model": {"path": "tiny:flux"}}, DsReasonError, "tiny:flux"),
        (
            {"model": {"path": "tiny:wan", "freeze_text_projection": True}},
            ConfigError,
            "Wan 2.1 has no text projection",
        ),
        ({"model": {"path": "/nowhere/model"}}, DsReasonError, "/nowhere/model"),
    ],
)
def test_invalid_setting_is_reported(sections: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        check(made(**sections))


@pytest.mark.parametrize(
    "file",
    [
        "scheduler/scheduler_config.json",
        "vae/config.json",
        "text_encoder/config.json",
        "tokenizer/tokenizer_config.json",
        "transformer/diffusion_pytorch_model.safetensors",
        "model_index.json",
    ],
)
def test_missing_component_is_reported_before_ranks_start(file: str, tmp_path: Path) -> None:
    folder = shutil.copytree(find_model(made()), tmp_path / "model")
    (folder / file).unlink()
    with pytest.raises(CheckpointError, match=Path(file).stem):
        check(made(model={"path": str(folder)}))


@pytest.mark.parametrize(
    ("sections", "names"),
    [
        ({"world": {"algorithm": "nft", "kl": "mean", "window": 2}}, "world.window, world.kl"),
        ({"world": {"data_coef": 0.1}, "train": {"global_batch_size": 3}}, "world.data_coef, train.global_batch_size"),
    ],
)
def test_settings_unused_by_algorithm_are_reported(
    sections: dict[str, Any], names: str, caplog: pytest.LogCaptureFixture
) -> None:
    check(made(**sections))
    assert f"does not use {names}" in caplog.text


def test_default_settings_cause_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    for algorithm in ("sft", "flow_grpo", "ddrl", "nft"):
        check(made(world={"algorithm": algorithm}))
    assert "does not use" not in caplog.text


@pytest.mark.parametrize("sde", ["cps", "ddim"])
def test_noise_level_above_one_is_rejected(sde: str) -> None:
    with pytest.raises(ValidationError, match=rf"noise_level \(1.5\) must be at most 1 with sde = '{sde}'"):
        made(world={"sde": sde, "noise_level": 1.5})


@pytest.mark.parametrize("algorithm", ["sft", "ddrl"])
def test_prompts_are_rejected_when_clips_are_needed(algorithm: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("a red square\n" * 40)
    data = {**TINY, "format": "prompts", "path": str(file)}
    with pytest.raises(DataError, match=rf"world.algorithm \({algorithm}\) needs clips"):
        check(made(world={"algorithm": algorithm}, data=data))
    check(made(data=data))


def test_quantized_weights_are_rejected_with_kl(tmp_path: Path) -> None:
    file = tmp_path / "quantized.json"
    file.write_text('{"zero_optimization": {"stage": 3, "zero_quantized_weights": true}}')
    config = made(world={"kl_coef": 0.1}).model_copy(update={"deepspeed": str(file)})
    with pytest.raises(
        ConfigError, match="zero_quantized_weights rounds the weights, but exact weights are required for world.kl_coef"
    ):
        check(config)
    check(made().model_copy(update={"deepspeed": str(file)}))


def test_max_steps_counts_optimizer_steps() -> None:
    config = made(world={"prompts_per_step": 4, "optimizer_steps_per_rollout": 2}, train={"max_steps": 6})
    order = build_step_order(config, 64)
    assert (order.num_steps, total_steps(config, order)) == (3, 6)
    with pytest.raises(
        ValueError, match=r"max_steps \(3\) must be a multiple of world.optimizer_steps_per_rollout \(2\)"
    ):
        made(world={"optimizer_steps_per_rollout": 2}, train={"max_steps": 3})
    made(world={"algorithm": "sft", "optimizer_steps_per_rollout": 2}, train={"max_steps": 3})
    sft = made(world={"algorithm": "sft"}, train={"global_batch_size": 16, "epochs": 2})
    assert total_steps(sft, build_step_order(sft, 64)) == 8


def test_lr_multipliers_apply_to_transformer_parameters() -> None:
    with pytest.raises(ConfigError, match="'atn1' matches none of .* similar names: attn1"):
        check(made(optim={"lr_multipliers": {"atn1": 0.5}}))
    with pytest.raises(ConfigError, match="'patch_embed' has no effect: none of the parameters that it matches"):
        check(made(optim={"lr_multipliers": {"patch_embed": 0.5}}, lora={"rank": 2}))
    settings = made(optim={"lr": 1e-4, "lr_multipliers": {"attn1": 0.5}}, model={"freeze_text_projection": True})
    check(settings)
    rates = {line.split()[0]: line.split()[3] for line in describe_modules(settings).splitlines()[1:-1]}
    assert rates["transformer_blocks.0-1.attn1"] == "5e-05"
    assert rates["transformer_blocks.0-1.attn2"] == "0.0001"
    assert rates["crossattn_proj"] == "frozen"


def test_lr_multipliers_apply_to_adapters() -> None:
    settings = made(optim={"lr": 1e-4, "lr_multipliers": {r"attn1\.to_q": 2.0}}, lora={"rank": 2})
    table = describe_modules(settings)
    assert "transformer_blocks.0-1.attn1.to_q " in table
    assert "0.0002 (2 x 0.0001)" in table
