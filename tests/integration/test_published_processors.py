"""The engine sees the same input as the trainer if the processors' files are those of published checkpoints.

Media are not resized to the limits in these files: small images have fewer tokens than Qwen3-VL's processor would give them,
and frames have different sizes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.pixels import PATCH_SIZES, build_published
from tests.distributed import run_on_ranks

pytestmark = [pytest.mark.integration, pytest.mark.long]


def explore(family: str, folder: Path) -> dict[str, Any]:
    from tests.integration.test_vllm_engine import Explorer, Setup

    explorer = Explorer(Setup(family, 1, 1, tied=False), folder)
    tokens = {name: len(prompt.encoded.input_ids) for name, prompt in explorer.prompts.items()}
    return {"differences": explorer.differences(0), "tokens": tokens}


@pytest.mark.parametrize("family", PATCH_SIZES)
def test_engine_logprobs_match_policy(family: str, tmp_path: Path) -> None:
    from dsreason.models.tiny import build_tiny

    tiny = build_tiny(family, tmp_path / "tiny", tie_embeddings=False)
    build_published(tiny, family, tmp_path / "model")
    (result,) = run_on_ranks(explore, 1, family, tmp_path)
    assert max(result["differences"].values()) <= 1e-5
    # Two frames of 384x384 or 336x336 pixels take 144 tokens, the smallest square with at least 128. The videos have 4
    # and 6 frames.
    assert 2 * 144 < result["tokens"]["video at 2 fps"] < 3 * 144 < result["tokens"]["video at 4 fps"] < 4 * 144
    assert result["tokens"]["image"] - result["tokens"]["text"] < 64
