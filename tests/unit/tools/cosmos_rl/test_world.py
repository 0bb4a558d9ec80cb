"""Imports of world-model files: DiffusionNFT in diffusers' format, and files of the older FlowGRPO and DDRL trainer."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

from dsreason.config.load import read_document, read_values
from dsreason.config.shipped import get_shipped_file
from dsreason.tools.cosmos_rl.convert import convert
from dsreason.world.schema import WorldConfig
from tests.unit.tools.cosmos_rl.test_keys import SHARED, needs_configs


def file(name: str) -> dict[str, Any]:
    return tomllib.loads((SHARED / name).read_text())


def recipe(name: str) -> dict[str, Any]:
    return read_document(get_shipped_file("launch/recipes", name), name)


def compared(found: dict[str, Any], shipped: dict[str, Any], *sections: str) -> dict[str, tuple[Any, Any]]:
    """Return the differences between an import and a hand-written recipe, both with all defaults."""
    dsreason_result, reference = (read_values(WorldConfig, document, "x").model_dump() for document in (found, shipped))
    return {
        f"{section}.{name}": (value, reference[section][name])
        for section in sections
        for name, value in dsreason_result[section].items()
        if value != reference[section][name]
    }


@needs_configs
def test_diffusion_nft_import_matches_handwritten_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COSMOS_CACHE", "/cache")
    result = convert(file("cosmos-predict2-5-2b-720-nft.toml"))
    shipped = recipe("world_cosmos_predict2_5_2b_nft.toml")
    different = compared(result.config, shipped, "model", "data", "optim", "train", "world", "reward")
    assert different == {
        "data.path": ("/cache/diffusion_nft/pickscore/train.txt", "train.txt"),
        "data.validation": ("/cache/diffusion_nft/pickscore/test.txt", "test.txt"),
        "optim.eps": (1e-8, 1e-12),  # the recipe says why
        "train.micro_batch_size": (6, 1),
    }
    assert result.config["lora"]["rank"] == 32
    assert result.num_gpus == 8


@needs_configs
def test_mock_flow_grpo_import_matches_handwritten_recipe() -> None:
    result = convert(file("cosmos-predict2-5-2b-480-grpo-mock-data.toml"))
    shipped = recipe("world_cosmos_predict2_5_2b_mock.toml")
    different = compared(result.config, shipped, "model", "data", "optim", "train", "world", "reward")
    assert different == {
        "data.workers": (8, 2),
        "train.max_steps": (2001, 10),
        "world.prompts_per_step": (1, 8),  # 8 GPUs with a clip each
    }


def test_different_sampler_is_reported() -> None:
    result = convert(tomllib.loads("[model.rl]\nsolver_option = '2ab'\ns_churn = 1.0"))
    message = {finding.key: finding for finding in result.findings}
    assert message["model.rl.solver_option"].verdict == "differs"
    assert "similar but not identical to EDM's" in message["model.rl.solver_option"].text
    assert result.config["world"]["sde"] == "flow"


DDRL = """
[model]
fsdp_shard_size = 32
dp_replicate_size = 8
[model.rl]
enabled = true
sample_steps = 20
train_on = [0, 2, 4, 6, 8, 10, 12, 14, 16, 18]
data_beta = 0.01
kl_beta = 0.0
use_same_seed = false
min_num_conditional_frames = 0
exp_reward = true
[model_parallel]
context_parallel_size = 2
[model.net]
use_crossattn_projection = true
[optimizer]
lr = 2e-5
[scheduler]
f_min = [1.0]
warm_up_steps = [50]
[dataloader_train]
type = "local"
[dataloader_train.video_dataloader]
dataset_dir = "clips"
num_frames = 61
video_size = [1280, 720]
offline_text_embedding = true
[dataloader_val]
type = "local"
[dataloader_val.video_dataloader]
dataset_dir = "held_out"
[job]
name = "cosmos-predict2-5-14b-720-reason-embedding-ddrl"
"""


def test_ddrl_file_is_converted() -> None:
    result = convert(tomllib.loads(DDRL))
    result.check("x")
    world = result.config["world"]
    assert (world["algorithm"], world["data_coef"], world["exponential_advantages"]) == ("ddrl", 0.01, True)
    assert world["trained_steps"] == list(range(0, 20, 2))
    assert world["prompts_per_step"] == 32 * 8 // (8 * 2)
    assert world["conditional_frames"] == [0, 1]
    assert result.config["model"]["path"] == "nvidia/Cosmos-Predict2.5-14B"
    expected = {
        "format": "folder",
        "path": "clips",
        "validation": "held_out",
        "frames": 61,
        "height": 720,
        "width": 1280,
    }
    assert {name: result.config["data"][name] for name in expected} == expected
    assert (result.config["optim"]["lr"], result.config["optim"]["warmup"]) == (2e-5, 50)
    assert [finding for finding in result.findings if finding.verdict == "not read"] == []
    read_values(WorldConfig, result.config, "x")


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        ("fsdp_shard_size = 32", "fsdp_shard_size = 3", "cannot be divided into groups of 8 clips"),
        ("data_beta = 0.01", "data_beta = 0", "only in ddrl"),
        ("video_size = [1280, 720]", "", ""),
        ("video_size = [1280, 720]", "video_size = [720]", "must be [width, height]; got [720]"),
        ("f_min = [1.0]", "f_min = [0.1]", "the learning rate is constant"),
        ('dataset_dir = "clips"', "", ""),
        ("enabled = true", "on_policy = false", "sampled from the weights"),
    ],
)
def test_unsupported_settings_of_older_trainer_are_rejected(before: str, after: str, text: str) -> None:
    result = convert(tomllib.loads(DDRL.replace(before, after)))
    errors = [finding.text for finding in result.findings if finding.verdict == "error"]
    assert any(text in error for error in errors) if text else errors == []


NFT = """
[policy]
model_name_or_path = "nvidia/Cosmos-Predict2.5-2B"
is_diffusers = true
[policy.parallelism]
tp_size = 1
[rollout]
n_generation = 4
[train]
train_batch_per_replica = 8
[train.train_policy]
type = "grpo"
trainer_type = "diffusion_nft"
use_remote_reward = true
dataset.name = "prompts.txt"
kl_beta = 0.1
"""


@pytest.mark.parametrize(
    ("addition", "expected"),
    [
        ("[policy.diffusers]\nweight_copy_decay_type = 2", {"world.nft_decay": "late"}),
        ("[policy.diffusers]\ntimesteps_fraction = 0.3", {"world.nft_times": 3}),
        ("[policy.diffusers.sample]\nguidance_scale = 7.0", {"world.guidance_scale": 8.0}),
        (
            "[policy.diffusers]\ninference_size = [480, 832]\ntrain_frames = 33",
            {"data.height": 480, "data.width": 832, "data.frames": 33},
        ),
    ],
)
def test_diffusion_nft_settings_are_converted(addition: str, expected: dict[str, Any]) -> None:
    result = convert(tomllib.loads(NFT + addition))
    result.check("x")
    read_values(WorldConfig, result.config, "x")
    for key, value in expected.items():
        section, name = key.split(".")
        assert result.config[section][name] == value


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        ("[train]", "[train]\noptm_lr = [1e-5, 1e-6]", "only the transformer is trained, with one learning rate"),
        ("n_generation = 4", "n_generation = 3", "cannot be divided into groups of 3"),
        ('"diffusion_nft"', '"flow_grpo"', 'must be "diffusion_nft"'),
        ("use_remote_reward = true", 'reward_function = ["x"]', "not available for clips"),
        ("kl_beta = 0.1", "advantage_low = -3.0", "clipped symmetrically"),
        ("kl_beta = 0.1", "[policy.diffusers]\nweight_copy_decay_type = 7", "must be one of 0, 1, 2; got 7"),
        ("kl_beta = 0.1", "[policy.diffusers]\ninference_size = [1]", "must be [height, width]; got [1]"),
    ],
)
def test_unsupported_settings_of_diffusion_nft_are_rejected(before: str, after: str, text: str) -> None:
    result = convert(tomllib.loads(NFT.replace(before, after)))
    assert any(text in finding.text for finding in result.findings if finding.verdict == "error")


def test_supervised_clips_are_converted() -> None:
    supervised = NFT.replace('type = "grpo"', 'type = "sft"').replace('trainer_type = "diffusion_nft"', "")
    result = convert(tomllib.loads(supervised.replace("prompts.txt", "clips")))
    result.check("x")
    assert result.config["world"]["algorithm"] == "sft"
    assert (result.config["train"]["global_batch_size"], result.config["data"]["format"]) == (8, "folder")
    read_values(WorldConfig, result.config, "x")
