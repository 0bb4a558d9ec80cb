"""Checks of README.md and docs/: examples are valid, link targets and keys exist, and all keys are described."""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer.main

from data_adapters import jsonl
from dsreason.cli.main import app
from dsreason.config.keys import iter_keys, join_path
from dsreason.config.load import load_config
from dsreason.config.schema import SFTConfig
from dsreason.config.schema_data import DataConfig
from dsreason.config.schema_dpo import DPOConfig
from dsreason.config.schema_eval import EvalConfig
from dsreason.config.schema_grpo import GRPOConfig
from dsreason.config.shipped import find_file
from dsreason.data.adapters import find_adapter, list_shipped_adapters
from dsreason.data.types import Sample
from dsreason.losses.presets import PRESETS
from dsreason.rewards import BUILT_IN
from dsreason.rewards.functions import find_reward
from dsreason.tools.cosmos_rl.loading import find_import, load_run
from dsreason.world.rewards.functions import BUILT_IN as CLIP_REWARDS
from dsreason.world.rewards.functions import find_clip_reward
from dsreason.world.schema import WorldConfig
from tests.docs import PAGES, ROOT, Block, blocks, commands, write_files

LANGUAGES = {"sh", "toml", "yaml", "python", "json", "mermaid"}
RECIPES = {name: f"builtin_{name}.toml" for name in ("sft", "grpo", "dpo", "world")} | {"eval": "eval.toml"}
SCHEMAS: dict[str, Any] = {
    "sft": SFTConfig,
    "grpo": GRPOConfig,
    "dpo": DPOConfig,
    "eval": EvalConfig,
    "world": WorldConfig,
}
NEEDED = {
    "sft": [],
    "grpo": ["reward.functions={format = 1.0}"],
    "dpo": [],
    "eval": ["datasets=['robovqa']", "model.path=tiny:qwen3_vl"],
    "world": [],
}
"""Required settings that an excerpt of a configuration may omit."""
PATHS = re.compile(r"`((?:dsreason|data_adapters|ds_configs|launch|docs|tests|benchmarks)/[\w./-]*)`")
KEYS = re.compile(r"`([a-z]+(?:\.[a-z_]+)+)(?: = ([^`]*))?`")
MAX_README_LINES = 120
MAX_PNG_BYTES = 200_000


def by_name(item: Block | Path) -> str:
    return item.name


def load(kind: str, file: Path | None, *overrides: str) -> Any:
    """Load the configuration in `file` with `NEEDED` settings added; import it if it is a cosmos-rl file."""
    if imported := find_import(file):
        return load_run(imported.trainer, SCHEMAS[imported.trainer], file, overrides, default_recipe="")[0]
    text = file.read_text() if file else ""
    needed = [
        item for item in NEEDED[kind] if not re.search(rf"^\W*{re.split(r'[.=]', item)[0]}\b", text, re.MULTILINE)
    ]
    return load_config(SCHEMAS[kind], file, [*needed, *overrides], default_recipe=RECIPES[kind])


# ---------------------------------------------------------------- pages


def test_readme_fits_on_one_page() -> None:
    assert len(PAGES[0].read_text(encoding="utf-8").splitlines()) <= MAX_README_LINES


def test_pictures_are_small() -> None:
    pictures = list((ROOT / "docs").glob("*.png"))
    assert pictures
    assert all(picture.stat().st_size <= MAX_PNG_BYTES for picture in pictures)


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_every_code_block_names_its_language(page: Path) -> None:
    assert {block.language for block in blocks(page=page)} <= LANGUAGES
    assert page.read_text(encoding="utf-8").count("```") == 2 * len(blocks(page=page))


def headings(page: Path) -> set[str]:
    """Return the anchors that GitHub creates for headings: `## What the curves mean` → `what-the-curves-mean`."""
    matches = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in matches}


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_every_link_target_exists(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]*)\)", page.read_text(encoding="utf-8")):
        file, _, anchor = target.partition("#")
        linked = page.parent / file if file else page
        assert linked.exists(), target
        assert not anchor or anchor in headings(linked), target


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_every_named_project_file_exists(page: Path) -> None:
    findall = PATHS.findall(page.read_text(encoding="utf-8"))
    assert [path for path in findall if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "keys.md"], ids=by_name)
def test_every_named_key_exists_and_accepts_value(page: Path) -> None:
    expected = {kind: {join_path(key) for key in iter_keys(schema)} for kind, schema in SCHEMAS.items()}
    sections = {key.partition(".")[0] for keys in expected.values() for key in keys if "." in key}
    for key, value in KEYS.findall(page.read_text(encoding="utf-8")):
        if key.partition(".")[0] not in sections or key.endswith((".md", ".py", ".html")):
            continue
        kinds = [kind for kind, keys in expected.items() if key in keys]
        assert kinds, key
        if value:
            load(kinds[0], None, f"{key}={value}")


# ---------------------------------------------------------------- configurations


@pytest.mark.parametrize("block", blocks("toml", "yaml"), ids=by_name)
def test_configuration_example_and_its_references_load(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files(block.page, tmp_path)
    monkeypatch.chdir(tmp_path)
    file = tmp_path / f"example.{block.language}"
    file.write_text(block.text, encoding="utf-8")
    config = load(block.words[0], file)
    if isinstance(config, WorldConfig):
        check_world_rewards(config)
        return
    sources = config.sources if isinstance(config, EvalConfig) else config.data.list_sources()
    for source in sources:
        find_adapter(source.adapter)
    if isinstance(config, GRPOConfig):
        for name in config.reward.functions:
            find_reward(name, config.reward.options.get(name))


def check_world_rewards(config: WorldConfig) -> None:
    for name in config.reward.functions:
        if ":" not in name:
            find_clip_reward(name, config.reward.options.get(name))


# ---------------------------------------------------------------- commands


def parsed(words: list[str]) -> tuple[str, dict[str, Any]]:
    """Parse a command line; return the command and its parameters without running it."""
    command: Any = typer.main.get_command(app)
    name = ""
    while isinstance(getattr(command, "commands", None), dict):
        name, *words = words
        command = command.commands[name]
    return name, command.make_context(name, words).params


def started(words: list[str]) -> list[str] | None:
    """Return the arguments of `dsreason` in a command line; None if the command does not start dsreason."""
    program, *remainder = words
    if program in ("dsreason", ".venv/bin/dsreason"):
        return remainder
    if program in ("torchrun", "deepspeed"):
        return remainder[remainder.index("dsreason") + 1 :]
    if program == "launch/torchrun.sh" or remainder[:1] == ["launch/slurm.sbatch"]:
        config, folder, *more = remainder if program == "launch/torchrun.sh" else remainder[1:]
        return ["sft", "--config", config, "--output-dir", folder, "--resume", "auto", *more]
    return None


def check_other(words: list[str]) -> None:
    program, *remainder = words
    assert program in ("make", "kubectl", "tensorboard", "pkill"), words
    if program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert {word for word in remainder if "=" not in word} <= set(targets)
    if program == "kubectl":
        assert (ROOT / remainder[-1]).is_file()


def check_configuration(name: str, options: dict[str, Any]) -> None:
    kind = options["command"].value if options.get("command") else name
    kind = kind if kind in SCHEMAS else "sft"
    if options.get("ds_config"):
        find_file(options["ds_config"], "ds_configs")
    if options.get("config") or options.get("overrides"):
        file = options.get("config") and find_file(str(options["config"]), "launch/recipes")
        kind = next((item for item in ("world", "dpo", "grpo") if file and f"[{item}]" in file.read_text()), kind)
        load(kind, file, *(options.get("overrides") or ()))


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_every_command_and_its_configuration_is_valid(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files(page, tmp_path)
    monkeypatch.chdir(tmp_path)
    for line, words in commands(page):
        for word in words:
            assert not word.startswith("launch/") or (ROOT / word).is_file(), (line, word)
        dsreason_result = started(words)
        if dsreason_result is None:
            check_other(words)
        else:
            check_configuration(*parsed(dsreason_result))


# ---------------------------------------------------------------- Python and rows


@pytest.mark.parametrize("block", blocks("python"), ids=by_name)
def test_python_examples_run(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    example = ModuleType("example")
    monkeypatch.setitem(sys.modules, "example", example)
    exec(compile(block.text, block.name, "exec", dont_inherit=True), vars(example))
    kind = block.words[0] if block.words else ""
    if kind == "reward":
        for function in written_in(example):
            check_reward(function)
    if kind == "adapter":
        check_adapter(block, tmp_path)


def written_in(module: ModuleType) -> list[Callable[..., Any]]:
    return [var for var in vars(module).values() if inspect.isfunction(var) and var.__module__ == module.__name__]


def check_reward(function: Callable[..., Any]) -> None:
    sample = Sample("1", [], answer="left")
    worth = function("left, please", sample)
    worth = asyncio.run(worth) if inspect.isawaitable(worth) else worth
    score, metrics = worth if isinstance(worth, tuple) else (worth, {})
    assert score == 1.0
    assert metrics in ({}, {"words": 2})


def check_adapter(block: Block, folder: Path) -> None:
    """Convert the example row in the comment after `to_sample`; pass it as a file to adapters with their own `rows`."""
    (written,) = re.findall(r"def to_sample\(.*\):  # (.*)", block.text)
    row = json.loads(written)
    (folder / "example.py").write_text(block.text)
    (folder / "rows").mkdir()
    (folder / "rows" / "1.json").write_text(written)
    adapter = find_adapter("example.py")
    data = DataConfig(adapter="example.py", path="rows", split="train[:1]")
    if "def rows" in block.text:
        assert [adapter.rows(data).row(0)] == [row]
    sample = adapter.to_sample(row, data)
    assert isinstance(sample, Sample)
    assert sample.messages[-1]["content"] in row.values()


@pytest.mark.parametrize("block", blocks("json"), ids=by_name)
def test_json_row_is_accepted_by_jsonl_adapter(block: Block) -> None:
    for line in block.text.splitlines():
        row = json.loads(line)
        sample = jsonl.to_sample(row)
        assert sample.answer == row.get("answer", row.get("chosen"))
        assert (sample.rejected is None) == ("rejected" not in row)


# ---------------------------------------------------------------- tables


def table_after(page: str, heading: str) -> list[list[str]]:
    """Return the cells of the first table after a heading, row by row, without backticks."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8").partition(f"## {heading}\n")[2]
    match = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert match, heading
    return [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in match[0].splitlines()[2:]]


def test_preset_table_matches_code() -> None:
    yes = {True: "yes", False: "no"}
    assert table_after("grpo.md", "Presets") == [
        [
            name,
            preset.advantage,
            ", ".join("none" if clip == float("inf") else f"{clip:g}" for clip in (preset.clip_low, preset.clip_high)),
            f"{preset.kl_coef:g}",
            yes[preset.overlong_filter],
            yes[preset.dynamic_sampling],
        ]
        for name, preset in PRESETS.items()
    ]


@pytest.mark.parametrize(
    ("page", "heading", "names"),
    [
        ("grpo.md", "Rewards", BUILT_IN),
        ("data.md", "Adapters", list_shipped_adapters()),
        ("world.md", "Rewards", CLIP_REWARDS),
    ],
)
def test_every_builtin_reward_is_listed(page: str, heading: str, names: list[str]) -> None:
    listed = {name.strip(" `") for row in table_after(page, heading) for name in row[0].split(",")}
    assert set(names) <= listed


# ---------------------------------------------------------------- keys.md


@pytest.fixture(scope="module")
def make_keys() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_keys", ROOT / "docs" / "make_keys.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses need their module to be registered
    spec.loader.exec_module(module)
    return module


def test_key_reference_is_up_to_date(make_keys: ModuleType) -> None:
    assert (ROOT / "docs" / "keys.md").read_text(encoding="utf-8") == make_keys.reference(), "run `make docs`"


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
def test_every_key_is_described(make_keys: ModuleType, schema: Any) -> None:
    sections = make_keys.sections_of(schema)
    empty = [
        f"{section.path}.{key}"
        for section in sections
        for key, field in section.keys.items()
        if "description" not in field
    ]
    assert empty == []
    assert sum(len(section.keys) for section in sections) > 50


@pytest.mark.parametrize(
    ("field", "shown", "bounds"),
    [
        ({"type": "integer", "minimum": 1}, "integer", "≥ 1"),
        ({"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"type": "null"}]}, "number", "> 0"),
        ({"enum": ["a", "b"], "type": "string"}, "`a`, `b`", ""),
        ({"type": "array", "items": {"type": "string"}, "minItems": 1}, "list of text", "not empty"),
        ({"prefixItems": [{"type": "number", "maximum": 1}] * 2, "type": "array"}, "2 numbers", "≤ 1"),
        ({"type": "object", "additionalProperties": {"type": "number"}}, "table of numbers", ""),
        ({"type": "object", "additionalProperties": True}, "table", ""),
    ],
)
def test_types_and_bounds_read_plainly(make_keys: ModuleType, field: dict[str, Any], shown: str, bounds: str) -> None:
    assert (make_keys.shown_type(field), make_keys.shown_bounds(field)) == (shown, bounds)
