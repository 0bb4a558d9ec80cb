"""DPO configurations: their defaults, and the combinations that are rejected."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from dsreason.config.schema import SFTConfig
from dsreason.config.schema_dpo import DPOConfig


def dpo(**section: Any) -> DPOConfig:
    return DPOConfig.model_validate({"dpo": section})


@pytest.mark.parametrize(
    ("section", "weights", "sft"),
    [
        ({}, {"sigmoid": 1.0}, 0.0),
        ({"loss": "ipo", "sft_weight": 0.5}, {"ipo": 1.0}, 0.5),
        ({"loss": "mpo"}, {"sigmoid": 0.8, "bco": 0.2}, 1.0),
        ({"loss": "mpo", "sft_weight": 0.3}, {"sigmoid": 0.8, "bco": 0.2}, 0.3),
        ({"loss_weights": {"hinge": 2.0, "bco": 0.5}}, {"hinge": 2.0, "bco": 0.5}, 0.0),
    ],
)
def test_loss_resolves_to_weights_and_sft_term(section: dict[str, Any], weights: dict[str, float], sft: float) -> None:
    config = dpo(**section).dpo
    assert (config.weights, config.sft) == (weights, sft)


@pytest.mark.parametrize(
    ("sections", "text"),
    [
        (
            {"dpo": {"loss": "ipo", "label_smoothing": 0.1}},
            "is defined only for sigmoid and robust, but the loss is ipo",
        ),
        ({"dpo": {"label_smoothing": 0.5}}, "less than 0.5"),
        ({"dpo": {"loss": "ipo", "loss_weights": {"ipo": 1.0}}}, "are mutually exclusive"),
        ({"dpo": {"loss": "mpo", "reference": "none"}}, "bco compares rewards with their mean"),
        ({"dpo": {"reference": "adapter_off"}}, "without its adapters, but lora.rank is 0"),
        ({"dpo": {"reference_file": "a.jsonl"}}, 'requires reference = "precomputed", but reference is "model"'),
        ({"checkpoint": {"best_metric": "val/accuracy"}}, "requires generated answers; set validation.generate = true"),
        ({"checkpoint": {"best_metric": "val/reward/mean"}}, "val/preference_accuracy"),
    ],
)
def test_contradictory_dpo_settings_are_rejected(sections: dict[str, Any], text: str) -> None:
    with pytest.raises(ValidationError, match=text):
        DPOConfig.model_validate(sections)


def test_preference_accuracy_is_rejected_outside_dpo() -> None:
    with pytest.raises(ValidationError, match="val/preference_accuracy. is measured only by dpo"):
        SFTConfig.model_validate({"checkpoint": {"best_metric": "val/preference_accuracy"}})


@pytest.mark.parametrize(
    ("packing", "attention", "shares"), [(True, "auto", True), (True, "sdpa", False), (False, "auto", False)]
)
def test_pair_shares_prompt_only_with_dsreason_attention(packing: bool, attention: str, shares: bool) -> None:
    config = DPOConfig.model_validate({"train": {"packing": packing}, "model": {"attention": attention}})
    assert config.shares_prompts is shares


def test_adapter_off_reference_is_accepted_with_adapters() -> None:
    config = DPOConfig.model_validate({"dpo": {"reference": "adapter_off"}, "lora": {"rank": 4}})
    assert (config.optim.lr, config.optim.weight_decay) == (2e-5, 0.0)
