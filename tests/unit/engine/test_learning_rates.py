"""Learning rates by module."""

from __future__ import annotations

from itertools import permutations
from types import SimpleNamespace
from typing import Any

import pytest
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from dsreason.config.schema import OptimConfig
from dsreason.engine.engine import build_parameter_groups, take_optimizer_step
from dsreason.engine.learning_rates import assign_multipliers, describe_learning_rates, get_multipliers
from dsreason.errors import ConfigError

NAMES = [
    "model.visual.patch_embed.proj.weight",
    "model.visual.blocks.0.attn.weight",
    "model.visual.blocks.1.attn.weight",
    "model.visual.merger.linear.weight",
    "model.language_model.layers.0.mlp.weight",
    "lm_head.weight",
]


def assign(multipliers: dict[str, float], *frozen: str) -> dict[str, float]:
    return assign_multipliers({name: not name.startswith(frozen) for name in NAMES}, multipliers)


def test_narrowest_pattern_wins_in_any_order() -> None:
    """The longest pattern is not the narrowest: `merger` lies in `model.visual`, and `blocks\\.1` in `blocks`."""
    patterns = [(r"model\.visual", 0.1), ("merger", 1.0), ("blocks", 0.25), (r"blocks\.1", 4.0)]
    for order in permutations(patterns):
        assert assign(dict(order)) == dict(zip(NAMES, [0.1, 0.25, 4.0, 1.0, 1.0, 1.0], strict=True))


def test_all_multipliers_are_one_without_patterns() -> None:
    assert assign({}) == dict.fromkeys(NAMES, 1.0)


@pytest.mark.parametrize(
    ("multipliers", "frozen", "messages"),
    [
        ({"model.projector": 1.0}, (), ["pattern 'model.projector' matches none of 6 parameters", "; similar names: "]),
        ({"": 0.1}, (), ["contains an empty pattern"]),
        ({"visual": 0.1, r"model\.visual": 0.1}, (), [r"'visual' and 'model\.visual' match the same 4 parameters"]),
        ({"visual": 0.1, "weight": 0.2, r"\.0": 1}, (), [r"'visual' and '\.0' both match model.visual.blocks.0.attn.weight"]),
        (
            {"blocks": 0.1, r"blocks\.0": 1.0, r"blocks\.1": 2.0},
            (),
            [r"'blocks' has no effect", r"the narrower 'blocks\.0' and 'blocks\.1'; remove 'blocks', or restrict"],
        ),
        ({"visual": 0.1}, ("model.visual",), ["'visual' has no effect: none of the parameters that it matches (4) is trained"]),
        (
            {"visual": 0.1, "merger": 1.0},
            ("model.visual.patch", "model.visual.blocks"),
            ["'visual' has no effect", "the narrower 'merger'"],
        ),
        ({"nowhere": 0.1, "elsewhere": 0.1}, (), ["'nowhere' matches none", "'elsewhere' matches none"]),
    ],
)  # fmt: skip
def test_pattern_without_effect_is_rejected(
    multipliers: dict[str, float], frozen: tuple[str, ...], messages: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        assign(multipliers, *frozen)
    assert all(message in str(caught.value) for message in messages), caught.value


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)


def build_model() -> nn.Module:
    """Build a model with a tower of 3 blocks, of 20 (proj) + 8 (norm) = 28 parameters each, and a head of 10 parameters."""
    return nn.ModuleDict(
        {"visual": nn.ModuleDict({"blocks": nn.ModuleList(Part() for _ in range(3))}), "head": nn.Linear(4, 2)}
    )


def test_groups_without_multipliers_are_matrices_and_vectors() -> None:
    model = build_model()
    groups = build_parameter_groups(model, OptimConfig(weight_decay=0.1))
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    for group, is_matrix in zip(groups, (True, False), strict=True):
        expected = [parameter for parameter in model.parameters() if (parameter.ndim == 2) == is_matrix]
        assert list(map(id, group["params"])) == list(map(id, expected))


def test_groups_are_ordered_by_multiplier() -> None:
    """The order must not depend on the order of the patterns, because checkpoints store the groups in this order."""
    patterns = {"visual": 2.0, r"blocks\.1": 0.5}
    for multipliers in (patterns, dict(reversed(patterns.items()))):
        groups = build_parameter_groups(build_model(), OptimConfig(lr_multipliers=multipliers, weight_decay=0.1))
        described = [(group["lr_multiplier"], group["weight_decay"], len(group["params"])) for group in groups]
        assert described == [(0.5, 0.1, 1), (0.5, 0.0, 3), (1.0, 0.1, 1), (1.0, 0.0, 1), (2.0, 0.1, 2), (2.0, 0.0, 6)]


def test_step_reports_learning_rate_of_each_multiplier() -> None:
    groups = [{"lr_multiplier": 0.1}, {"lr_multiplier": 0.1}, {"lr_multiplier": 1.0}, {"lr_multiplier": 16.0}]
    optimizer = SimpleNamespace(param_groups=groups, overflow=False)
    engine: Any = SimpleNamespace(optimizer=optimizer, step=lambda: None, get_global_grad_norm=lambda: 1.5)
    assert take_optimizer_step(engine, 0.5) == {
        "train/learning_rate": 0.5,
        "train/learning_rate_x0.1": 0.05,
        "train/learning_rate_x16": 8.0,
        "train/grad_norm": 1.5,
    }
    assert [group["lr"] for group in groups] == [0.05, 0.05, 0.5, 8.0]


def test_table_splits_modules_only_where_rates_differ() -> None:
    model = build_model()
    model.get_submodule("visual.blocks.2").requires_grad_(False)
    table = describe_learning_rates(model, OptimConfig(lr=1e-4, lr_multipliers={"norm": 0.1}))
    assert table.splitlines() == [
        "module                  parameters  trained  learning rate",
        "visual.blocks.0-1.proj          40       40  0.0001",
        "visual.blocks.0-1.norm          16       16  1e-05 (0.1 x 0.0001)",
        "visual.blocks.2                 28        0  frozen",
        "head                            10       10  0.0001",
        "total                           94       66",
    ]


def test_table_of_uniform_model_has_one_row() -> None:
    table = describe_learning_rates(build_model(), OptimConfig(lr=1e-4, lr_multipliers={".": 0.5}))
    assert table.splitlines()[1].split() == ["all", "94", "94", "5e-05", "(0.5", "x", "0.0001)"]


def test_adapters_have_multipliers_of_their_weights() -> None:
    """Each adapter of rank 2 on a matrix [4, 4] has 2 x 4 + 4 x 2 = 16 parameters."""
    model = inject_adapter_in_model(LoraConfig(r=2, target_modules=r".*blocks\..*proj"), build_model())
    optim = OptimConfig(lr=1e-4, lr_multipliers={r"blocks\.0\.proj\.weight$": 4.0})
    multipliers = get_multipliers(dict(model.named_parameters()), optim)
    scaled = {name for name, multiplier in multipliers.items() if multiplier == 4.0}
    assert scaled == {
        f"visual.blocks.0.proj.{part}.weight" for part in ("base_layer", "lora_A.default", "lora_B.default")
    }
    rows = [line.split(maxsplit=3) for line in describe_learning_rates(model, optim).splitlines()[1:]]
    assert rows == [
        ["visual.blocks.0", "44", "16", "0.0004 (4 x 0.0001)"],
        ["visual.blocks.1-2", "88", "32", "0.0001"],
        ["head", "10", "0", "frozen"],
        ["total", "142", "48"],
    ]


def test_multiplier_without_adapters_is_rejected() -> None:
    model = inject_adapter_in_model(LoraConfig(r=2, target_modules=r".*blocks\..*proj"), build_model())
    with pytest.raises(ConfigError, match="none of the parameters that it matches .2. is trained"):
        get_multipliers(dict(model.named_parameters()), OptimConfig(lr_multipliers={"head": 0.1}))
