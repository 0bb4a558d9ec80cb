"""Every shipped recipe for real models, run with a tiny model and tiny data: first a dry run, then two steps."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dsreason.cli.main import main
from dsreason.config.load import load_config
from dsreason.config.schema import RunConfig, SFTConfig
from dsreason.config.schema_data import SourceConfig
from dsreason.config.schema_grpo import GRPOConfig
from dsreason.config.shipped import list_shipped
from tests.integration.command import dsreason, metrics
from tests.integration.recipe_data import write_media, write_source

pytestmark = [pytest.mark.integration, pytest.mark.long]

RECIPES = [name for name in list_shipped("launch/recipes") if not name.startswith(("builtin_", "world_", "eval"))]


def command(recipe: str) -> str:
    return "grpo" if recipe.endswith("_grpo.toml") else "sft"


@pytest.fixture(scope="session")
def media(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_media(tmp_path_factory.mktemp("media"))


Swap = Callable[[str], list[str]]


@pytest.fixture
def swap(
    media: Path,
    tmp_path: Path,
    tiny_qwen2_5_vl: Path,
    tiny_qwen3_vl: Path,
    tiny_cosmos3_omni: Path,
    tiny_cosmos3_edge: Path,
    tiny_qwen3_5: Path,
) -> Swap:
    """Build the `--set` options that replace a recipe's model and data with tiny ones of the same family and format."""

    def make_options(recipe: str) -> list[str]:
        schema: type[RunConfig] = GRPOConfig if command(recipe) == "grpo" else SFTConfig
        config = load_config(schema, Path(recipe), default_recipe=recipe)
        model = {
            "nvidia/Cosmos-Reason1": tiny_qwen2_5_vl,
            "nvidia/Cosmos-Reason2": tiny_qwen3_vl,
            "nvidia/Cosmos3": tiny_cosmos3_omni,
            "Qwen/Qwen3-VL-8B": tiny_qwen3_vl,
            "Qwen/Qwen3.5": tiny_qwen3_5,
        }
        path = config.model.path
        changes = {"model.path": tiny_cosmos3_edge if path.endswith("-Edge") else model[path.rpartition("-")[0]]}
        for number, source in enumerate(config.data.list_sources()):
            section = f"data.sources.{number}" if config.data.sources else "data"
            written = write_source(source, media, tmp_path / "data" / str(number))
            changes |= {f"{section}.{key}": value for key, value in written.items()}
        if isinstance(config.data.validation, SourceConfig):
            changes["data.validation.path"] = changes["data.path"]
        options = [f"--set={key}={json.dumps(str(value))}" for key, value in changes.items()]
        if config.data.template_arguments:
            options.append("--set=data.template_arguments={}")  # the tiny model's template has no arguments
        return [*options, "--set=rollout.tensor_parallel_size=1"] if schema is GRPOConfig else options

    return make_options


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_passes_dry_run_with_substituted_paths(
    recipe: str, swap: Swap, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["--config", recipe, "--output-dir", "out", "--dry-run", *swap(recipe)]
    monkeypatch.setattr(sys, "argv", ["dsreason", command(recipe), *options])
    with pytest.raises(SystemExit) as ended:
        main()
    readouterr = capsys.readouterr()
    assert ended.value.code == 0, readouterr.err
    document = json.loads(readouterr.out)
    assert document["model"]["path"].startswith("/")
    assert not (tmp_path / "out").exists()


SMALLER = {
    "model.max_length": 2048,
    "train.precision": "fp32",
    "train.max_steps": 2,
    "train.max_tokens_per_micro_batch": 2048,
    "data.workers": 1,
    "data.validation": 2,
    "validation.before_training": False,
    "validation.max_completion_length": 4,
    "checkpoint.last": False,
    "checkpoint.keep_best": False,
    "checkpoint.every": 0,
}
SMALLER_SFT = {"train.global_batch_size": 4}
SMALLER_GRPO = {
    "grpo.num_generations": 2,
    "grpo.prompts_per_step": 2,
    "rollout.max_completion_length": 8,
    "reward.workers": 1,
}


ENDS = {
    "av_caption_vqa_reason2_8b_sft.toml",
    "cosmos_reason1_7b_grpo.toml",
}
"""One recipe per trainer; the other recipes run nightly."""


@pytest.mark.parametrize(
    "recipe", [pytest.param(name, marks=pytest.mark.long if name in ENDS else pytest.mark.nightly) for name in RECIPES]
)
def test_recipe_trains_end_to_end(recipe: str, swap: Swap, tmp_path: Path) -> None:
    changes = SMALLER | (SMALLER_GRPO if command(recipe) == "grpo" else SMALLER_SFT)
    options = [*swap(recipe), *(f"--set={key}={json.dumps(value)}" for key, value in changes.items())]
    ended = dsreason(command(recipe), "--config", recipe, "--output-dir", "out", "--nproc", 1, *options, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    steps = [line for line in metrics(tmp_path / "out") if "train/loss" in line]
    assert [line["step"] for line in steps] == [1, 2]
    assert all(math.isfinite(line["train/loss"]) for line in steps)
    rewards = json.loads((tmp_path / "out" / "config.json").read_text()).get("reward", {"functions": {}})["functions"]
    assert [name for name in rewards if not all(f"reward/{name}/mean" in line for line in steps)] == []
    assert (tmp_path / "out" / "export" / "final" / "model.safetensors").is_file()
