"""`[lora]`: the defaults of `[optim]` that it changes, and the settings that it cannot be combined with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dsreason.config.load import dump_config, load_config, read_values
from dsreason.config.schema import RunConfig, SFTConfig
from dsreason.config.schema_grpo import GRPOConfig
from dsreason.errors import ConfigError

GRPO: dict[str, Any] = {"reward": {"functions": {"exact_match": 1.0}}}


@pytest.mark.parametrize(("schema", "lr"), [(SFTConfig, 1e-4), (GRPOConfig, 2e-5)])
def test_unset_optim_values_default_to_adapter_values(schema: type[RunConfig], lr: float) -> None:
    other_items = GRPO if schema is GRPOConfig else {}
    plain = read_values(schema, other_items, "run.toml")
    assert (plain.optim.lr, plain.optim.weight_decay) == (1e-5, 0.01)
    config = read_values(schema, other_items | {"lora": {"rank": 8}, "optim": {"warmup": 5}}, "run.toml")
    assert (config.optim.lr, config.optim.weight_decay, config.optim.warmup) == (lr, 0.0, 5)
    document = dump_config(config)
    assert document["optim"]["lr"] == lr
    assert read_values(schema, document, "config.json") == config


def test_explicit_optim_values_are_kept() -> None:
    settings = {"lora": {"rank": 8}, "optim": {"lr": 3e-6, "weight_decay": 0.1}}
    config = read_values(SFTConfig, settings, "run.toml")
    assert (config.optim.lr, config.optim.weight_decay) == (3e-6, 0.1)


@pytest.mark.parametrize(
    ("schema", "document", "text"),
    [
        (
            SFTConfig,
            {"lora": {"rank": 8}, "model": {"freeze": ["visual"]}},
            "model.freeze (visual) has no effect with lora.rank (8)",
        ),
        (SFTConfig, {"model": {"quantize": "nf4"}}, 'model.quantize ("nf4") requires lora.rank'),
        (
            SFTConfig,
            {"lora": {"targets": ["q_proj"], "alpha": 4}},
            "alpha (4) and targets (q_proj) cannot be set without rank",
        ),
        (SFTConfig, {"lora": {"rank": 8, "targets": ["("]}}, "'(' is not a valid regular expression"),
        (SFTConfig, {"lora": {"rank": 8, "rank_pattern": {"[": 4}}}, "'[' is not a valid regular expression"),
        (SFTConfig, {"lora": {"rank": 8, "rank_pattern": {"visual": 0}}}, "lora.rank_pattern.visual"),
        (SFTConfig, {"lora": {"rank": 8, "dropout": 1.0}}, "lora.dropout: must be less than 1; got 1.0"),
        (
            GRPOConfig,
            GRPO | {"lora": {"rank": 8, "dropout": 0.1}},
            "lora.dropout (0.1) is not supported: the rollout engine samples",
        ),
        (
            GRPOConfig,
            GRPO | {"lora": {"rank": 8}, "grpo": {"kl_coef": 0.1, "reference_reset_every": 5}},
            "grpo.reference_reset_every (5) cannot be used with lora.rank (8)",
        ),
    ],
)
def test_contradictory_lora_settings_are_rejected(schema: type[RunConfig], document: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read_values(schema, document, "run.toml")
    assert text in str(raised.value)


def test_rank_0_disables_recipe_adapters(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[lora]\nrank = 16\ntargets = ["q_proj"]\n')
    config = load_config(SFTConfig, file, ["lora.rank=0"], default_recipe="builtin_sft.toml")
    assert config.lora.rank == 0
    assert config.optim.lr == 1e-5


@pytest.mark.parametrize(("given", "scale"), [({"rank": 16}, 32.0), ({"rank": 16, "alpha": 8}, 8.0)])
def test_alpha_defaults_to_twice_the_rank(given: dict[str, Any], scale: float) -> None:
    assert read_values(SFTConfig, {"lora": given}, "run.toml").lora.scale == scale
