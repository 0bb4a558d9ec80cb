"""Any configuration is either accepted, or rejected with an error that names the file or option; an accepted one can be
written and read again."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from dsreason.cli.job import find_trainers
from dsreason.config.deepspeed import resolve_deepspeed
from dsreason.config.load import dump_config, load_config, read_values
from dsreason.config.schema import SFTConfig
from dsreason.config.schema_eval import EvalConfig
from dsreason.errors import ConfigError
from dsreason.tools.cosmos_rl.convert import LANGUAGE_KEYS, PREDICT_KEYS, WORLD_KEYS
from dsreason.tools.cosmos_rl.loading import find_import
from dsreason.tools.cosmos_rl.write import write_toml
from tests.fuzz.fuzzing import Fuzz, changed, damaged, texts, values

pytestmark = [pytest.mark.integration, pytest.mark.long]

ROOT = Path(__file__).parents[2]
SCHEMAS = {name: trainer.schema for name, trainer in find_trainers().items()} | {"eval": EvalConfig}
RECIPES = {
    file.name: (name, tomllib.loads(file.read_text()))
    for file in sorted((ROOT / "launch" / "recipes").glob("*.toml"))
    for name in SCHEMAS
    if name in file.stem.split("_")
}
SHARDING = [json.loads(file.read_text()) for file in sorted((ROOT / "ds_configs").glob("*.json"))]
BLOCKS = {
    **{"optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "betas": [0.9, 0.95]}}, "gradient_clipping": 1.0},
    **{"scheduler": {"type": "WarmupLR", "params": {}}, "bf16": {"enabled": True}, "train_batch_size": "auto"},
}
COSMOS = [
    (LANGUAGE_KEYS, {"policy": {}, "train": {"train_policy": {"type": "sft"}}}),
    (LANGUAGE_KEYS, {"policy": {}, "rollout": {}, "train": {"train_policy": {"type": "grpo"}}}),
    (LANGUAGE_KEYS, {"policy": {}, "train": {"train_policy": {"type": "sft", "trainer_type": "dpo"}}}),
    (WORLD_KEYS, {"policy": {"is_diffusers": True}, "train": {"train_policy": {"trainer_type": "diffusion_nft"}}}),
    (PREDICT_KEYS, {"model_parallel": {}, "dataloader_train": {}}),
]
words = st.sampled_from(
    ["auto", "null", "", ".", "..", "~", "/", "a.b", "../x", "\x1b[2J", "-1", "1e9", "nan", "true", "[", "{"]
)
odd = st.one_of(
    values, words, texts, st.sampled_from([0, -1, 1, 2, 10**9, 1.5, float("inf"), True, [], {}, [[]], [{}]])
)


def test_any_configuration_is_loaded_or_rejected(fuzz: Fuzz) -> None:
    fuzz(lambda case: case[0](*case[1:]), st.one_of(runs, texts_of_runs, deepspeed, cosmos))


def refused_by_name(read: Callable[[], Any]) -> Any:
    """Return the result of reading; None if the input was rejected and every line of the error names the file or the `--set`
    option."""
    try:
        return read()
    except ConfigError as error:
        assert "run." in str(error) or "--set" in str(error), str(error)
        return None


# ---------------------------------------------------------------- ours


@st.composite
def overrides_of(draw: st.DrawFn, document: dict[str, Any]) -> list[str]:
    keys = st.sampled_from(
        [f"{section}.{key}" for section, inside in document.items() for key in inside] + ["a", "a.0"]
    )
    displayed = st.one_of(odd.map(lambda value: json.dumps(value, default=str)), words, texts)
    return draw(
        st.lists(
            st.builds(
                lambda key, end, value: f"{key}{end}={value}", keys, st.sampled_from(["", ".0", ".x"]), displayed
            ),
            max_size=2,
        )
    )


@st.composite
def run(draw: st.DrawFn) -> Any:
    name, document = RECIPES[draw(st.sampled_from([*RECIPES]))]
    return check_run, name, "run.json", json.dumps(draw(changed(document, odd))).encode(), draw(overrides_of(document))


@st.composite
def text_of_run(draw: st.DrawFn) -> Any:
    file = draw(st.sampled_from([*RECIPES]))
    content = (ROOT / "launch" / "recipes" / file).read_bytes()
    return (
        check_run,
        RECIPES[file][0],
        draw(st.sampled_from(["run.toml", "run.yaml"])),
        draw(damaged(st.just(content))),
        [],
    )


runs, texts_of_runs = run(), text_of_run()


def check_run(name: str, file: str, content: bytes, overrides: list[str]) -> None:
    Path(file).write_bytes(content)
    schema = SCHEMAS[name]
    config = refused_by_name(lambda: load_config(schema, Path(file), overrides, default_recipe=f"builtin_{name}.toml"))
    if config is not None:
        dumped = json.loads(json.dumps(dump_config(config), allow_nan=False))
        assert dump_config(read_values(schema, dumped, "run.json")) == dumped


# ---------------------------------------------------------------- DeepSpeed's and cosmos-rl's

deepspeed = st.tuples(
    st.just(lambda document: check_deepspeed(document)),
    st.sampled_from(SHARDING).flatmap(lambda one: changed({**BLOCKS, **one}, odd)),
)


def check_deepspeed(document: Any) -> None:
    Path("run.json").write_text(json.dumps(document))
    resolved = refused_by_name(
        lambda: resolve_deepspeed("run.json", SFTConfig(), device="cpu", world_size=2, config_name="run.toml")
    )
    if resolved is not None:
        json.dumps(resolved)


@st.composite
def cosmos_file(draw: st.DrawFn) -> Any:
    keys, start = draw(st.sampled_from(COSMOS))
    raw = draw(st.dictionaries(st.sampled_from([*keys]), odd, max_size=4))
    document = json.loads(json.dumps(start))
    for key, value in raw.items():
        here = document
        *sections, name = key.split(".")
        for section in sections:
            inside = here.setdefault(section, {})
            here = inside if isinstance(inside, dict) else here
        here[name] = value
    return check_import, draw(st.one_of(st.just(document), changed(document, odd)))


cosmos = cosmos_file()


def check_import(document: Any) -> None:
    Path("run.json").write_text(json.dumps(document))

    def read() -> Any:
        imported = find_import(Path("run.json"))
        return imported and (imported, read_values(SCHEMAS[imported.trainer], imported.config, "run.json"))

    if result := refused_by_name(read):
        imported, config = result
        written = tomllib.loads(write_toml(imported, "run.toml"))
        assert dump_config(read_values(SCHEMAS[imported.trainer], written, "run.toml")) == dump_config(config)
