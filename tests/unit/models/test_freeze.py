"""Freezing by regular expression."""

from __future__ import annotations

import pytest
from torch import nn

from dsreason.errors import ConfigError
from dsreason.models.freeze import check_freeze, freeze

NAMES = [
    "visual.patch_embed.proj.weight",
    "visual.blocks.0.attn.qkv.weight",
    *(f"model.layers.{i}.{part}.weight" for i in range(12) for part in ("self_attn.q_proj", "mlp.up_proj")),
    "model.norm.weight",
    "lm_head.weight",
]


def matching(*parts: str) -> set[str]:
    return {name for name in NAMES if name.startswith(parts)}


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        ([], set()),
        ([r"visual\..*"], matching("visual.")),
        ([r"model\.layers\.[0-1]\."], matching("model.layers.0.", "model.layers.1.")),  # not 10 and 11
        (["self_attn"], {name for name in NAMES if "self_attn" in name}),  # matches anywhere in a name
        (["^visual", "lm_head"], matching("visual.", "lm_head")),
        (["visual", "patch_embed"], matching("visual.")),  # overlapping patterns
        (["patch_embed", "visual"], matching("visual.")),
    ],
)
def test_freeze_patterns_match_anywhere_in_names(patterns: list[str], expected: set[str]) -> None:
    assert check_freeze(NAMES, patterns) == expected


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (r"vision\..*", r"'vision\\\.\.\*' matches none of 28 parameters; similar names: .*visual"),
        ("self_atn", "matches none.*self_attn"),
        ("model.layer.0", r"similar names: .*model\.layers\.0"),
        ("", "empty pattern"),
    ],
)
def test_bad_pattern_is_rejected_with_suggestions(pattern: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_freeze(NAMES, ["visual", pattern])


def test_all_bad_patterns_are_reported_at_once() -> None:
    with pytest.raises(ConfigError, match="(?s)'nowhere'.*'elsewhere'"):
        check_freeze(NAMES, ["nowhere", "elsewhere"])


def small_model() -> nn.ModuleDict:
    return nn.ModuleDict({"visual": nn.Linear(2, 2), "text": nn.Linear(2, 2)})


def test_freeze_disables_only_matching_gradients() -> None:
    model = small_model()
    assert freeze(model, ["visual"]) == 2
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {"text.weight", "text.bias"}


def test_no_pattern_freezes_nothing() -> None:
    model = small_model()
    assert freeze(model, []) == 0
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("patterns", [["."], ["visual", "text"]])
def test_freezing_all_parameters_is_rejected(patterns: list[str]) -> None:
    model = small_model()
    with pytest.raises(ConfigError, match="freezes all 4 parameters"):
        freeze(model, patterns)
    assert all(p.requires_grad for p in model.parameters())
