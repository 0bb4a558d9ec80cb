"""The lookup of shipped files, and checks of their content."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from dsreason.config import shipped
from dsreason.config.load import load_config
from dsreason.config.schema import RunConfig, SFTConfig
from dsreason.config.schema_eval import EvalConfig
from dsreason.config.schema_grpo import GRPOConfig
from dsreason.config.shipped import find_file, find_shipped_root, get_shipped_file, list_shipped
from dsreason.data.order import WeightedRows
from dsreason.errors import ConfigError
from dsreason.world.schema import WorldConfig

WORLD = [name for name in list_shipped("launch/recipes") if "world" in name]
RECIPES = [name for name in list_shipped("launch/recipes") if name not in WORLD]


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_bare_name_resolves_to_shipped_file() -> None:
    assert find_file("zero3.json", "ds_configs") == get_shipped_file("ds_configs", "zero3.json")


def test_current_folder_takes_precedence_over_shipped_files() -> None:
    Path("zero3.json").write_text("{}")
    assert find_file("zero3.json", "ds_configs") == Path("zero3.json")


def test_path_is_never_resolved_to_shipped_file() -> None:
    with pytest.raises(ConfigError, match=r"^other/zero3\.json does not exist; correct the path"):
        find_file("other/zero3.json", "ds_configs")


def test_unknown_file_error_lists_shipped_files() -> None:
    with pytest.raises(ConfigError) as caught:
        find_file("zero33.json", "ds_configs")
    assert str(caught.value) == (
        "zero33.json exists neither in the current folder nor among the shipped files; did you mean zero3.json? "
        f"(available in ds_configs: {', '.join(list_shipped('ds_configs'))})"
    )


def test_folder_is_rejected_as_file() -> None:
    Path("configs").mkdir()
    with pytest.raises(ConfigError, match="configs is a folder; specify a file in this folder"):
        find_file("configs", "ds_configs")


def test_installed_wheel_uses_its_shipped_files(tmp_path: Path) -> None:
    package = tmp_path / "site-packages" / "dsreason"
    package.mkdir(parents=True)
    assert find_shipped_root(package) == tmp_path / "site-packages"
    (package / "_shipped" / "ds_configs").mkdir(parents=True)
    assert find_shipped_root(package) == package / "_shipped"


def test_every_shipped_deepspeed_file_is_json() -> None:
    names = list_shipped("ds_configs")
    assert {"zero2.json", "zero3.json", "zero3_offload.json"} <= set(names)
    for name in names:
        assert isinstance(json.loads(get_shipped_file("ds_configs", name).read_text()), dict)


@pytest.mark.parametrize("name", [name for name in RECIPES if "sft" in name])
def test_every_shipped_sft_recipe_loads(name: str) -> None:
    load_config(SFTConfig, Path(name), default_recipe=name)


@pytest.mark.parametrize("name", WORLD)
def test_every_shipped_world_recipe_loads(name: str) -> None:
    load_config(WorldConfig, Path(name), default_recipe=name)


UPSTREAM = {
    "2b_ddrl": "pre-trained, 1e-05, (0.9, 0.99), 50, 20, 8, (0, 1), 0.0, 0.01, rollout",
    "14b_ddrl": "pre-trained, 1e-05, (0.9, 0.99), 50, 20, 8, (0, 1), 0.0, 0.01, rollout",
    "2b_flow_grpo": "pre-trained, 1e-05, (0.9, 0.99), 50, 10, 8, (1, 1), 0.01, None, rollout",
    "2b_nft": "post-trained, 0.0003, (0.9, 0.999), 0, 10, 12, (0, 0), 1.0, None, rollout",
}


@pytest.mark.parametrize("name", UPSTREAM)
def test_recipe_has_values_of_cosmos_rl_original(name: str) -> None:
    file = f"world_cosmos_predict2_5_{name}.toml"
    assert "with the values of cosmos-rl's" in get_shipped_file("launch/recipes", file).read_text()
    config = load_config(WorldConfig, Path(file), default_recipe=file)
    world, revision = config.world, str(config.model.revision).removeprefix("diffusers/base/")
    values = (
        revision,
        config.optim.lr,
        config.optim.betas,
        config.optim.warmup,
        world.sampling_steps,
        world.num_generations,
    )
    values += (world.conditional_frames, world.kl_coef, world.data_coef, world.data_noise)
    assert ", ".join(map(str, values)) == UPSTREAM[name]


PUBLISHED = {
    "cosmos_reason1_7b_sft": "2e-06 constant 20, 128 x 1 of 4096, fps 1.0 max_pixels 81920, every 100 keep 2",
    "cosmos_reason1_7b_llava_sft": "1e-06 constant 20, 128 x 1 of 4096, fps 1.0 max_pixels 81920, every 100 keep 2",
    "cosmos_reason2_2b_sft": "1e-06 constant 20, 128 x 1 of 4096, fps 1.0 total_pixels 3774873, every 100 keep 2",
    "cosmos_reason2_8b_sft": "1e-06 constant 20, 128 x 1 of 4096, fps 1.0 total_pixels 3774873, every 100 keep 2",
    "av_captions_reason1_7b_sft": "2e-06 constant 20, 128 x 20 of 4096, fps 2.0 max_pixels 112897, every 25 keep 2",
    "physical_plausibility_reason1_7b_sft": (
        "1e-06 constant 20, 256 x 10 of 4096, fps 1.0 max_pixels 81920, every 20 keep 2"
    ),
    "physical_plausibility_reason2_8b_sft": (
        "1e-06 cosine 0.03, 256 x 10 of 4096, fps 1.0 total_pixels 3774873, every 20 keep 2"
    ),
    "warehouse_reason1_7b_sft": "1e-05 constant 20, 256 x 1 of 8192, max_pixels 518400, every 50 keep 2",
    "intelligent_transportation_reason2_2b_sft": "2e-05 cosine 0, 256 x 3 of 32768, nframes 8, every 20 keep 2",
    "av_caption_vqa_reason2_8b_sft": (
        "2e-07 cosine 0.03, 256 x 3 of 4096, nframes 16 min_pixels 3136 max_pixels 360000, every 20 keep 2"
    ),
    "cosmos_reason1_7b_grpo": "2e-06 constant 20, 128 x 80 of 10240, fps 1.0 max_pixels 81920, every 100 keep 2",
    "physical_plausibility_reason1_7b_grpo": (
        "2e-06 constant 20, 128 x 80 of 10240, fps 1.0 max_pixels 81920, every 100 keep 2"
    ),
}
"""Learning rate, schedule and warmup; samples per step x epochs; tokens; vision settings; checkpoints. Our recipes keep fewer
checkpoints than the originals, and the LLaVA recipes save less often."""
BLENDED = (1_100_000, 10_000, 12_000)
"""Number of rows of each source in the published blend."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_cosmos_reason_recipe_has_published_values(name: str) -> None:
    schema: type[RunConfig] = GRPOConfig if name.endswith("_grpo") else SFTConfig
    config = load_config(schema, Path(f"{name}.toml"), default_recipe=f"{name}.toml")
    optim = config.optim
    (vision,) = {source.vision for source in config.data.list_sources()}
    displayed = " ".join(f"{key} {value}" for key, value in vision.model_dump(exclude_none=True).items())
    values = f"{optim.lr} {optim.schedule} {optim.warmup}"
    values += f", {config.samples_per_step} x {config.train.epochs} of {config.model.max_length}, {displayed}"
    assert f"{values}, every {config.checkpoint.every} keep {config.checkpoint.keep}" == PUBLISHED[name]
    assert (optim.weight_decay, optim.max_grad_norm, config.train.precision) == (0.01, 1.0, "bf16")
    assert optim.eps == (1e-8 if "warehouse" in name else 1e-6)
    assert optim.betas == ((0.9, 0.95) if name.endswith("_grpo") else (0.9, 0.999))


@pytest.mark.parametrize(
    ("file", "kl_coef", "reward"),
    [
        ("cosmos_reason1_7b_grpo.toml", 0.0, "single_choice"),
        ("physical_plausibility_reason1_7b_grpo.toml", 0.05, "ordinal_choice"),
    ],
)
def test_grpo_recipe_has_published_sampling_and_rewards(file: str, kl_coef: float, reward: str) -> None:
    config = load_config(GRPOConfig, Path(file), default_recipe=file)
    assert (config.grpo.num_generations, config.grpo.kl_coef) == (8, kl_coef)
    assert (config.rollout.temperature, config.rollout.max_completion_length) == (0.9, 6144)
    assert config.reward.functions == {reward: 1.0, "format": 1.0}


COSMOS3 = "1e-06 (0.9, 0.95) 0.1, 5 from 0.05 cosine to 0.1, 64 x 50 of 16000, fps 2.0, clip 1.0"
LLAVA_OV = "1e-05 (0.9, 0.95) 0.1, 1000 from 0.05 cosine to 0.5, 8 x 500 of 16000, fps None, clip 1.0"
COSMOS_FRAMEWORK = {
    "physical_plausibility_cosmos3_nano_sft": ("nvidia/Cosmos3-Nano", COSMOS3),
    "physical_plausibility_cosmos3_super_sft": ("nvidia/Cosmos3-Super", COSMOS3),
    "physical_plausibility_cosmos3_edge_sft": ("nvidia/Cosmos3-Edge", COSMOS3),
    "llava_onevision_qwen3_vl_8b_sft": ("Qwen/Qwen3-VL-8B-Instruct", LLAVA_OV),
}
"""Model; learning rate, betas and weight decay; warmup and schedule; samples per step x steps; tokens; frames; clipping."""


@pytest.mark.parametrize("name", COSMOS_FRAMEWORK)
def test_cosmos_framework_recipe_has_published_values(name: str) -> None:
    config = load_config(SFTConfig, Path(f"{name}.toml"), default_recipe=f"{name}.toml")
    optim, train = config.optim, config.train
    values = f"{optim.lr} {optim.betas} {optim.weight_decay}, {optim.warmup} from {optim.warmup_start} {optim.schedule}"
    values += f" to {optim.min_lr_share}, {config.samples_per_step} x {train.max_steps} of {config.model.max_length}"
    values += f", fps {config.data.vision.fps}, clip {optim.max_grad_norm}"
    assert (config.model.path, values) == COSMOS_FRAMEWORK[name]
    assert (train.max_tokens_per_micro_batch, train.precision, optim.eps) == (16000, "bf16", 1e-8)
    assert optim.lr_multipliers == ({r"model\.visual": 0.1} if "llava" in name else {})


@pytest.mark.parametrize("size", ["nano", "super", "edge"])
def test_cosmos3_grpo_trains_the_rows_of_sft(size: str) -> None:
    name = f"physical_plausibility_cosmos3_{size}"
    sft = load_config(SFTConfig, Path(f"{name}_sft.toml"), default_recipe=f"{name}_sft.toml")
    grpo = load_config(GRPOConfig, Path(f"{name}_grpo.toml"), default_recipe=f"{name}_grpo.toml")
    assert grpo.data.path == sft.data.path == "data/videophy2_train"
    assert grpo.data.validation == sft.data.validation
    assert grpo.model.freeze == sft.model.freeze
    assert (grpo.reward.functions, grpo.reward.options) == ({"ordinal_choice": 1.0}, {"ordinal_choice": {"step": 0.25}})


def test_videophy2_evaluation_reads_first_digit() -> None:
    config = load_config(EvalConfig, Path("eval_videophy2.toml"), default_recipe="eval_videophy2.toml")
    assert (config.evaluation.parser, config.evaluation.answer_type, config.generation.max_retries) == (
        "digit",
        "letter",
        0,
    )
    (source,) = config.sources
    assert (source.path, source.kind, source.vision.fps) == ("data/videophy2_val", "ordinal", 2.0)


def test_source_blend_matches_the_published_one() -> None:
    name = "av_caption_vqa_reason2_8b_sft.toml"
    sources = load_config(SFTConfig, Path(name), default_recipe=name).data.sources
    rows = [
        WeightedRows(np.arange(count), source.weight).per_epoch for count, source in zip(BLENDED, sources, strict=True)
    ]
    assert [round(count / sum(rows), 2) for count in rows] == [0.3, 0.5, 0.2]


def test_default_recipe_is_loaded_without_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipes = tmp_path / "launch" / "recipes"
    recipes.mkdir(parents=True)
    (recipes / "builtin_sft.toml").write_text("[train]\nseed = 7\nlr = 1")
    monkeypatch.setattr(shipped, "find_shipped_root", lambda: tmp_path)
    with pytest.raises(ConfigError, match=r"^builtin_sft\.toml \(shipped\): train\.lr: unknown key"):
        load_config(SFTConfig, None, default_recipe="builtin_sft.toml")
    (recipes / "builtin_sft.toml").write_text("[train]\nseed = 7")
    assert load_config(SFTConfig, None, default_recipe="builtin_sft.toml").train.seed == 7
