"""Where files are looked for, and that what is shipped is sound."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dsreason.config import shipped
from dsreason.config.load import load_config
from dsreason.config.schema import SFTConfig
from dsreason.config.schema_world import WorldConfig
from dsreason.config.shipped import find_file, shipped_file, shipped_names, shipped_root
from dsreason.errors import ConfigError

WORLD = [name for name in shipped_names("launch/recipes") if "world" in name]
RECIPES = [name for name in shipped_names("launch/recipes") if name not in WORLD]


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_bare_name_is_found_among_the_shipped_files() -> None:
    assert find_file("zero3.json", "ds_configs") == shipped_file("ds_configs", "zero3.json")


def test_the_current_folder_wins_over_the_shipped_files() -> None:
    Path("zero3.json").write_text("{}")
    assert find_file("zero3.json", "ds_configs") == Path("zero3.json")


def test_a_path_is_never_looked_for_among_the_shipped_files() -> None:
    with pytest.raises(ConfigError, match=r"^other/zero3\.json: no such file; correct the path"):
        find_file("other/zero3.json", "ds_configs")


def test_a_missing_name_is_told_with_the_shipped_names() -> None:
    with pytest.raises(ConfigError) as caught:
        find_file("zero33.json", "ds_configs")
    assert str(caught.value) == (
        "zero33.json: neither in the current folder nor among the shipped files; did you mean zero3.json? "
        f"(shipped in ds_configs: {', '.join(shipped_names('ds_configs'))})"
    )


def test_a_folder_is_no_file() -> None:
    Path("configs").mkdir()
    with pytest.raises(ConfigError, match="configs: is a folder; give a file in it"):
        find_file("configs", "ds_configs")


def test_an_installed_wheel_brings_its_own_files(tmp_path: Path) -> None:
    package = tmp_path / "site-packages" / "dsreason"
    package.mkdir(parents=True)
    assert shipped_root(package) == tmp_path / "site-packages"
    (package / "_shipped" / "ds_configs").mkdir(parents=True)
    assert shipped_root(package) == package / "_shipped"


def test_every_shipped_deepspeed_file_is_json() -> None:
    names = shipped_names("ds_configs")
    assert {"zero2.json", "zero3.json", "zero3_offload.json"} <= set(names)
    for name in names:
        assert isinstance(json.loads(shipped_file("ds_configs", name).read_text()), dict)


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
def test_a_recipe_that_names_one_of_cosmos_rl_has_its_values(name: str) -> None:
    file = f"world_cosmos_predict2_5_{name}.toml"
    assert "with the values of cosmos-rl's" in shipped_file("launch/recipes", file).read_text()
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


def test_without_a_path_the_default_recipe_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipes = tmp_path / "launch" / "recipes"
    recipes.mkdir(parents=True)
    (recipes / "builtin_sft.toml").write_text("[train]\nseed = 7\nlr = 1")
    monkeypatch.setattr(shipped, "shipped_root", lambda: tmp_path)
    with pytest.raises(ConfigError, match=r"^builtin_sft\.toml \(shipped\): train\.lr: unknown key"):
        load_config(SFTConfig, None, default_recipe="builtin_sft.toml")
    (recipes / "builtin_sft.toml").write_text("[train]\nseed = 7")
    assert load_config(SFTConfig, None, default_recipe="builtin_sft.toml").train.seed == 7
