"""Contents of the repository: recipes and DeepSpeed files must load, and no stray or private files may be tracked."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Literal

import pytest

from dsreason.config.deepspeed import resolve_deepspeed
from dsreason.config.load import load_config
from dsreason.config.schema import JobConfig, RunConfig, SFTConfig
from dsreason.config.schema_dpo import DPOConfig
from dsreason.config.schema_eval import EvalConfig
from dsreason.config.schema_grpo import GRPOConfig
from dsreason.data.adapters import find_adapter
from dsreason.rewards.functions import find_reward
from dsreason.world.rewards.functions import find_clip_reward
from dsreason.world.schema import WorldConfig

ROOT = Path(__file__).parents[2]
EVAL_RECIPES = sorted((ROOT / "launch" / "recipes").glob("*eval*.toml"))
RECIPES = sorted(set((ROOT / "launch" / "recipes").glob("*.toml")) - set(EVAL_RECIPES))
FOR_GPUS = [recipe for recipe in RECIPES if "builtin" not in recipe.stem]
DS_CONFIGS = sorted((ROOT / "ds_configs").glob("*.json"))

MAX_BYTES = 500_000

# Split into pieces, so that this file does not match its own patterns.
PERSONAL = {
    "a folder of one machine": "|".join(
        [r"(?<![\w.~}-])/" + "work/", "/" + r"home/\w", "/" + r"Users/\w", "/" + r"root/\w", "/" + r"opt/(pypi|wheels)"]
    ),
    "a package index": "|".join([r"https?://\S*" + "pypi", r"\barti" + "factory", r"index-url[ =]\w+:"]),
    "a workplace tool": "|".join([r"\bfarm" + r"-\w", r"\bissues" + r" show\b", r"\.lib" + r"rary/"]),
}


def load(recipe: Path, overrides: Sequence[str] = ()) -> JobConfig:
    schema: type[JobConfig] = GRPOConfig if recipe.stem.endswith("grpo") else SFTConfig
    if recipe.stem.endswith("dpo"):
        schema = DPOConfig
    if "world" in recipe.stem:
        schema = WorldConfig
    return load_config(schema, recipe, overrides, default_recipe="builtin_sft.toml")


def tracked_files() -> list[Path]:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("needs git and a checkout: it looks at the tracked files")
    out = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in out.split("\0") if name and (ROOT / name).is_file()]


def head_of(recipe: Path) -> str:
    """Return the comment at the beginning of a recipe as one line."""
    lines = takewhile(lambda line: line.startswith("#"), recipe.read_text().splitlines())
    return "\n".join(line.removeprefix("#") for line in lines)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_recipe_loads_and_its_names_exist(recipe: Path) -> None:
    config = load(recipe)
    assert config.deepspeed in {file.name for file in DS_CONFIGS}
    if isinstance(config, RunConfig):
        for source in config.data.list_sources():
            find_adapter(source.adapter)
    if isinstance(config, GRPOConfig):
        for name in config.reward.functions:
            find_reward(name, config.reward.options.get(name))
    if isinstance(config, WorldConfig):
        for name in config.reward.functions:
            if ":" not in name:  # the name of a server's reward
                find_clip_reward(name, config.reward.options.get(name))


@pytest.mark.parametrize("recipe", FOR_GPUS, ids=lambda path: path.name)
def test_recipe_names_its_gpu_count(recipe: Path) -> None:
    assert re.search(r"(Sized for [1-9]\d* GPUs?|GPUs: [1-9]\d*) of 80 GB", head_of(recipe))


@pytest.mark.parametrize("recipe", FOR_GPUS, ids=lambda path: path.name)
def test_recipe_has_one_command_that_starts_it(recipe: Path) -> None:
    (line,) = re.findall(r"^   (dsreason .*)$", head_of(recipe).replace("\\\n", " "), re.MULTILINE)
    _, name, *options = shlex.split(line)
    assert name == ("world" if "world" in recipe.stem else recipe.stem.rpartition("_")[2])
    raw = list(zip(options[::2], options[1::2], strict=True))
    assert {option for option, _ in raw} <= {"--config", "--set", "--output-dir"}
    assert dict(raw)["--config"] == recipe.name
    load(recipe, [value for option, value in raw if option == "--set"])


@pytest.mark.parametrize("recipe", EVAL_RECIPES, ids=lambda path: path.name)
def test_evaluation_recipe_loads_with_model_and_questions(recipe: Path) -> None:
    overrides = ["model.path=tiny:qwen2_5_vl"]
    if recipe.name == "eval.toml":  # the command line selects the questions
        overrides.append('datasets=["robovqa"]')
    config = load_config(EvalConfig, recipe, overrides, default_recipe="eval.toml")
    for source in config.sources:
        find_adapter(source.adapter)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("ds_config", DS_CONFIGS, ids=lambda path: path.name)
def test_recipe_accepts_every_deepspeed_file(ds_config: Path, device: Literal["cpu", "cuda"], recipe: Path) -> None:
    config = load(recipe)
    resolved = resolve_deepspeed(str(ds_config), config, device=device, world_size=4)
    # The trainer shortens the last round itself, so DeepSpeed gets complete rounds.
    round_size = resolved["train_micro_batch_size_per_gpu"] * 4
    assert resolved["train_batch_size"] == resolved["gradient_accumulation_steps"] * round_size
    assert 0 <= resolved["train_batch_size"] - config.samples_per_step < round_size
    assert resolved["zero_optimization"]["stage"] in (2, 3)
    assert '"auto"' not in str(resolved).replace("'", '"')


def test_recipes_and_deepspeed_files_are_shipped() -> None:
    assert {"builtin_sft.toml", "cosmos_reason1_7b_sft.toml"} <= {recipe.name for recipe in RECIPES}
    assert {file.name for file in DS_CONFIGS} >= {"zero2.json", "zero3.json", "zero3_offload.json"}


def test_no_tracked_file_is_large() -> None:
    assert [str(file.relative_to(ROOT)) for file in tracked_files() if file.stat().st_size > MAX_BYTES] == []


def test_tracked_files_name_no_machine_or_workplace() -> None:
    result = []
    for file in tracked_files():
        text = file.read_text(encoding="utf-8", errors="replace")
        for subject, pattern in PERSONAL.items():
            result += [f"{file.relative_to(ROOT)}: {subject}: {match[0]}" for match in re.finditer(pattern, text)]
    assert result == []


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("a folder of one machine", 'Path("/' + 'work/main")'),
        ("a folder of one machine", "/" + "home/anna/data"),
        ("a package index", "https://" + "pypi.example.org/simple"),
        ("a workplace tool", "farm" + "-nodes"),
    ],
)
def test_private_name_patterns_match_examples(what: str, text: str) -> None:
    assert re.search(PERSONAL[what], text)
