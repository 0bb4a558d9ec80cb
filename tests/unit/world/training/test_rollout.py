"""Plans of sampling steps, the assignment of rewards and advantages to clips, and the noise levels used in training."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dsreason.config.schema import OptimConfig
from dsreason.errors import DsReasonError, RewardError
from dsreason.world.families import FAMILIES
from dsreason.world.noise import compute_linear_sigmas
from dsreason.world.rewards.scorer import ClipScores
from dsreason.world.schema import WorldConfig
from dsreason.world.training import rollout
from dsreason.world.training.clips import ClipIndex, ClipMicroBatch, ClipShare, SampledClips
from dsreason.world.training.gradients import EpsilonCheck
from dsreason.world.training.inputs import Inputs
from dsreason.world.training.nft import add_noise, count_times, draw_levels
from dsreason.world.training.rollout import (
    PendingBatch,
    ScoredClip,
    add_advantages,
    collect_scores,
    plan_steps,
    split_places,
)
from dsreason.world.training.sft import draw_times
from dsreason.world.training.show import Look, average_looks, look_at
from dsreason.world.training.update import RatioCheck
from dsreason.world.training.velocity import ClipMaker, build_velocity
from dsreason.world.types import ClipSize, Conditioning, WorldRow

LOOK = Look(0.5, 0.0, np.zeros((3, 4, 8, 8), np.float32))


def make_config(**world: Any) -> WorldConfig:
    settings = {"prompts_per_step": 3, "num_generations": 2, "sampling_steps": 10, "schedule": "linear", **world}
    return WorldConfig.model_validate({"world": settings})


def make_maker(config: WorldConfig) -> ClipMaker:
    """Make a clip maker on the linear schedule that has no model yet."""
    unused: Any = None
    return ClipMaker(
        config=config,
        family=FAMILIES["cosmos_predict2_5"],
        model_path=Path(),
        transformer=unused,
        codec=unused,
        inputs=Inputs(config, unused, unused, ClipSize(9, 32, 32, 16.0), (2, 3, 4, 4)),
        share=ClipShare(0, 1),
        scorer=None,
        device=torch.device("cpu"),
    )


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout, "gather_objects", lambda value: [value])
    monkeypatch.setattr(rollout, "share_errors", nullcontext)


def batch_of(*places: ClipIndex) -> ClipMicroBatch:
    rows = tuple(WorldRow(f"row {place.prompt}", f"prompt {place.prompt}") for place in places)
    noise = torch.zeros(len(places), 2, 3, 4, 4)
    return ClipMicroBatch(places, True, rows, noise, torch.zeros(len(places), 1, 1))


@pytest.mark.parametrize(
    ("settings", "trained"),
    [
        ({}, range(10)),
        ({"trained_steps": (6, 0, 2)}, (0, 2, 6)),
        ({"sde": "cps", "noise_level": 0.8}, range(9)),  # its last step adds no noise
        ({"algorithm": "nft"}, ()),
    ],
)
def test_only_trained_steps_are_noisy(settings: dict[str, Any], trained: Any) -> None:
    plan = plan_steps(make_config(**settings), compute_linear_sigmas(10, 3.0), 1)
    assert plan.trained == tuple(trained)
    assert [number for number, step in enumerate(plan.steps) if step.std > 0] == list(trained)
    levels = compute_linear_sigmas(10, 3.0)
    for number, step in enumerate(plan.steps):
        if number not in plan.trained:
            assert (step.a, step.b) == pytest.approx((1.0, float(levels[number + 1] - levels[number])))


def test_window_is_drawn_from_first_half() -> None:
    config, sigmas = make_config(window=2), compute_linear_sigmas(10, 3.0)
    windows = [plan_steps(config, sigmas, step).trained for step in range(40)]
    assert {window[0] for window in windows} == {0, 1, 2, 3}
    assert all(window[1] == window[0] + 1 for window in windows)
    assert windows == [plan_steps(config, sigmas, step).trained for step in range(40)]


def test_prompts_are_divided_among_optimizer_steps() -> None:
    parts = split_places(make_config(optimizer_steps_per_rollout=2).world)
    assert [sorted({place.prompt for place in part}) for part in parts] == [[0], [1, 2]]
    assert [len(part) for part in parts] == [2, 4]


def test_rewards_prompts_and_clips_stay_together() -> None:
    """Use the clips of three prompts in batches that do not end at group boundaries."""
    config = make_config().world
    rewards = {
        ClipIndex(0, 0): 1,
        ClipIndex(0, 1): 0,
        ClipIndex(1, 0): 0,
        ClipIndex(1, 1): 3,
        ClipIndex(2, 0): 5,
        ClipIndex(2, 1): 5,
    }
    places = list(rewards)
    batches = [batch_of(*places[3:6]), batch_of(*places[:3])]

    def scores(batch: ClipMicroBatch) -> ClipScores:
        values = torch.tensor([float(rewards[place]) for place in batch.places])
        return ClipScores(values, {"mine": values * 2})

    scored = collect_scores([PendingBatch(batch, partial(scores, batch), [LOOK] * 3) for batch in batches])
    assert [clip.place for clip in scored] == places
    samples = [SampledClips(batch, batch.start, {}, torch.zeros(3), {}) for batch in batches]
    ((last, first),) = add_advantages(config, [samples], scored)
    assert first.advantages.tolist() == pytest.approx([0.707, -0.707, -0.707], abs=1e-3)
    assert last.advantages.tolist() == pytest.approx([0.707, 0, 0], abs=1e-3)
    metrics = rollout.summarise(config, scored)
    assert metrics["reward/mean"] == pytest.approx(14 / 6)
    assert metrics["reward/mine/mean"] == pytest.approx(28 / 6)
    assert metrics["reward/zero_std_fraction"] == pytest.approx(1 / 3)


def test_ddrl_uses_exponential_advantages() -> None:
    config = make_config(algorithm="ddrl", exponential_advantages=True).world
    scored = [ScoredClip(ClipIndex(p, c), float(c), {}, LOOK) for p in range(3) for c in range(2)]
    batch = batch_of(*(clip.place for clip in scored))
    ((sample,),) = add_advantages(config, [[SampledClips(batch, batch.start, {}, torch.zeros(6), {})]], scored)
    assert sample.advantages[:2].tolist() == pytest.approx([-np.exp(0.707), -np.exp(-0.707)], abs=1e-3)


def test_failing_or_nan_reward_stops_the_run() -> None:
    def failing() -> ClipScores:
        raise RewardError("mine: no")

    batch = batch_of(ClipIndex(0, 0))
    with pytest.raises(RewardError, match="mine: no"):
        collect_scores([PendingBatch(batch, failing, [LOOK])])
    with pytest.raises(RewardError, match="row 0"):
        collect_scores([PendingBatch(batch, lambda: ClipScores(torch.tensor([float("nan")]), {}), [LOOK])])


@pytest.mark.parametrize(("times", "expected"), [(None, 9), (4, 4), (20, 10)])
def test_training_uses_noise_levels_of_the_sampler(times: int | None, expected: int) -> None:
    maker = make_maker(make_config(algorithm="nft", nft_times=times))
    places = [ClipIndex(0, 0), ClipIndex(0, 1)]
    drawn = draw_levels(maker, places, 3)
    levels = maker.sigmas[:-1].float().tolist()
    assert count_times(maker.config.world) == expected
    assert drawn.shape == (2, expected)
    assert all(len(set(row)) == expected and set(row) <= set(levels) for row in drawn.tolist())
    assert drawn[0].tolist() != drawn[1].tolist()
    assert draw_levels(maker, places[1:], 3)[0].equal(drawn[1])


def test_noised_clip_interpolates_between_clip_and_noise() -> None:
    maker = make_maker(make_config(algorithm="nft"))
    batch = batch_of(ClipIndex(0, 0), ClipIndex(2, 1))
    clean = torch.full((2, 2, 3, 4, 4), 3.0)
    x, s, noise = add_noise(maker, SampledClips(batch, clean, {}, torch.zeros(2), {}), 4, 1)
    torch.testing.assert_close(x, (1 - s.view(-1, 1, 1, 1, 1)) * clean + s.view(-1, 1, 1, 1, 1) * noise)
    assert s.tolist() == draw_levels(maker, batch.places, 1)[:, 4].tolist()


def test_noise_levels_of_real_clips_are_shifted() -> None:
    places = [ClipIndex(prompt, 0) for prompt in range(2000)]
    plain, shifted = draw_times(places, 1.0, 0, 1), draw_times(places, 3.0, 0, 1)
    assert plain.mean().item() == pytest.approx(0.5, abs=0.02)
    torch.testing.assert_close(shifted, 3 * plain / (1 + 2 * plain))
    assert shifted.min() > 0
    assert shifted.max() < 1


def test_ratio_check_applies_only_to_first_update() -> None:
    check = RatioCheck()
    check.check(5e-5, 1)
    check.check(0.5, 2)  # later updates are not on-policy
    with pytest.raises(DsReasonError, match="step 1: .* differs from 1 by 0.01"):
        RatioCheck().check(0.01, 1)


def test_guidance_moves_away_from_negative_prompt() -> None:
    """Expect v + (scale - 1)(v - v_negative), with each clip's text and conditioning frames in both halves."""
    calls = []

    def velocity(transformer: Any, x: Any, s: Any, text: Any, conditioning: Any, start: Any) -> Any:
        calls.append((s.tolist(), conditioning, start))
        return x * 0 + text.view(-1, 1, 1, 1, 1)

    family: Any = SimpleNamespace(velocity=velocity)
    inputs: Any = SimpleNamespace(negative=lambda count: torch.full((count, 1, 1), 1.0))
    maker = replace(make_maker(make_config()), family=family, inputs=inputs)
    batch = batch_of(ClipIndex(0, 0), ClipIndex(1, 0))
    text = torch.tensor([2.0, 5.0]).view(2, 1, 1)
    mask = torch.tensor([[1.0, 0, 0], [1, 1, 0]]).view(2, 1, 3, 1, 1)
    value = Conditioning(mask * torch.tensor([3.0, 4.0]).view(2, 1, 1, 1, 1), mask)
    start = batch.start + torch.tensor([6.0, 7.0]).view(2, 1, 1, 1, 1)
    batch = ClipMicroBatch(batch.places, True, batch.rows, start, text, value)
    v = build_velocity(maker, batch, 3.0)(batch.start, torch.tensor([0.25, 0.75]))
    assert v[:, 0, 0, 0, 0].tolist() == [2 + 2 * (2 - 1), 5 + 2 * (5 - 1)]
    ((times, conditioning, noise),) = calls
    assert times == [0.25, 0.75, 0.25, 0.75]
    halves = zip((conditioning.mask, conditioning.latents, noise), (mask, value.latents, start), strict=True)
    for both, half in halves:
        assert both.equal(torch.cat([half, half]))
    assert build_velocity(maker, batch, 1.0)(batch.start, torch.ones(2))[:, 0, 0, 0, 0].tolist() == [2, 5]
    assert calls[1][1] is value


def test_clip_statistics_measure_brightness_motion_and_diversity() -> None:
    dark, bright = (
        torch.zeros(1, 3, 9, 16, 16, dtype=torch.uint8),
        torch.full((1, 3, 9, 16, 16), 255, dtype=torch.uint8),
    )
    moving = torch.zeros(1, 3, 2, 16, 16, dtype=torch.uint8)
    moving[:, :, 1] = 255
    (a,), (b,), (c,) = look_at(dark), look_at(bright), look_at(moving)
    assert (a.brightness, b.brightness, c.motion) == (0.0, 1.0, 1.0)
    assert average_looks([[a, a], [b, b]], "clips")["clips/diversity"] == 0.0
    assert average_looks([[a, b]], "clips") == pytest.approx(
        {"clips/brightness": 0.5, "clips/motion": 0.0, "clips/diversity": 0.5}
    )
    assert "val/diversity" not in average_looks([[a]], "val")


@pytest.mark.parametrize(
    ("norm", "eps", "clip", "expected", "warned"),
    [
        (1.1e-5, 1e-8, 1.0, 11.0, False),
        (9e-6, 1e-8, 1.0, 9.0, True),
        (9e-6, 1e-12, 1.0, 9e4, False),
        (5.0, 1e-8, 1e-6, 1.0, True),  # the value after clipping
        (5.0, 1e-8, 0.0, 5e6, False),
        (0.0, 1e-8, 1.0, 0.0, False),  # all rewards were equal
    ],
)
def test_gradients_near_epsilon_are_reported_once(
    norm: float, eps: float, clip: float, expected: float, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Measure the root-mean-square gradient of 10,000 trained weights."""
    layer = torch.nn.Linear(100, 100)
    layer.bias.requires_grad_(False)
    engine: Any = SimpleNamespace(module=layer)
    check = EpsilonCheck(OptimConfig(eps=eps, max_grad_norm=clip))
    for step in (1, 2):
        assert check.measure(engine, norm, step) == pytest.approx(expected)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * warned


def test_suggested_epsilon_is_small_compared_with_gradients(caplog: pytest.LogCaptureFixture) -> None:
    engine: Any = SimpleNamespace(module=torch.nn.Linear(100, 100, bias=False))
    check = EpsilonCheck(OptimConfig())
    assert np.isnan(check.measure(engine, float("inf"), 1))
    check.measure(engine, 5e-7, 1)
    assert "only 0.5 times optim.eps (1e-08)" in caplog.text
    assert "set optim.eps = 1e-11" in caplog.text
