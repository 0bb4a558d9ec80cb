"""What clips are made of: which form of the prompts is kept, and which clips are read."""

from __future__ import annotations

import pytest

from dsreason.config.schema_world import WorldConfig
from dsreason.train.world.inputs import keeps_projected

UPSTREAM = ["to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2"]


@pytest.mark.parametrize(
    ("rank", "targets", "projected"),
    [
        (32, [], True),
        (32, UPSTREAM, True),
        (32, [*UPSTREAM, "crossattn_proj.0"], False),
        (32, ["to_q", "0"], False),  # the end of a name does, and this is one of the layer's
        (0, [], False),
    ],
)
def test_projected_text_is_kept_unless_its_layer_is_trained(rank: int, targets: list[str], projected: bool) -> None:
    config = WorldConfig.model_validate({"lora": {"rank": rank, "targets": targets}})
    assert keeps_projected(config) is projected
