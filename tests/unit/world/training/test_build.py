"""Rewards opened on each rank, and the steps from which a run may resume."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from types import SimpleNamespace

import pytest

from dsreason.errors import ConfigError
from dsreason.world.schema import WorldConfig
from dsreason.world.training import build
from dsreason.world.training.clips import ClipShare


def test_rewards_open_once_per_context_parallel_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that only one of the ranks that compute a clip together opens the user's reward, which starts processes."""
    opened = []
    monkeypatch.setattr(build, "share_errors", nullcontext)
    monkeypatch.setattr(build, "open_scorer", lambda reward: opened.append(reward) or nullcontext("scorer"))
    config = WorldConfig.model_validate({"train": {"context_parallel_size": 4}, "reward": {"functions": {"red": 1.0}}})
    shares = [build.compute_share(config, SimpleNamespace(rank=rank, size=8)) for rank in range(8)]  # type: ignore[arg-type]
    with ExitStack() as stack:
        scorers = [build.open_group_scorer(config, share, stack) for share in shares]
    assert scorers == ["scorer", None, None, None] * 2
    assert len(opened) == 2
    with ExitStack() as stack:
        assert build.open_group_scorer(WorldConfig(), ClipShare(0, 1), stack) is None


@pytest.mark.parametrize(("algorithm", "step", "fits"), [("nft", 3, False), ("nft", 4, True), ("sft", 3, True)])
def test_run_does_not_resume_inside_rollout(algorithm: str, step: int, fits: bool) -> None:
    config = WorldConfig.model_validate({"world": {"algorithm": algorithm, "optimizer_steps_per_rollout": 2}})
    with nullcontext() if fits else pytest.raises(ConfigError, match=r"rollout \(2\): the checkpoint is from step 3"):
        build.check_start(config, step)
