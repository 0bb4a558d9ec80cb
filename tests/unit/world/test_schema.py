"""World-model settings that are refused before any file is read."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from dsreason.world.schema import WorldConfig


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"world": {"trained_steps": []}}, "at least 1 item"),
        ({"lora": {"alpha": 64}}, "alpha .64. cannot be set without rank: .*all weights would be trained.* remove it"),
        (
            {"lora": {"alpha": 8, "targets": ["to_q", "to_k"]}},
            r"alpha .8. and targets .to_q, to_k. cannot be set without rank.*them",
        ),
    ],
)
def test_settings_without_effect_are_rejected(sections: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        WorldConfig.model_validate(sections)


def test_lora_rank_zero_disables_recipe_adapter() -> None:
    """Check `--set lora.rank=0` for a recipe with an alpha, because no --set can remove that key."""
    assert WorldConfig.model_validate({"lora": {"rank": 0, "alpha": 64}}).lora.rank == 0
