"""Clips that each rank computes, and properties of a clip that follow from its index."""

from __future__ import annotations

import pytest
import torch

from dsreason.world.schema import WorldConfig
from dsreason.world.training.clips import (
    ClipIndex,
    ClipShare,
    build_conditioning,
    draw_clip_noise,
    draw_num_given_frames,
    draw_start_noise,
    group_local_clips,
    to_lossless_bfloat16,
)

PLACES = [ClipIndex(prompt, clip) for prompt in range(3) for clip in range(2)]
SHAPE = (2, 3, 4, 4)


def config(**world: object) -> WorldConfig:
    return WorldConfig.model_validate({"world": {"prompts_per_step": 3, "num_generations": 2, **world}})


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 5, 7, 8])
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("count", [1, 5, 6])
def test_clips_count_once_and_forward_counts_match(num_ranks: int, size: int, count: int) -> None:
    ranks = [group_local_clips(PLACES[:count], ClipShare(rank, num_ranks), size) for rank in range(num_ranks)]
    counted = [place for groups in ranks for group, counts in groups if counts for place in group]
    assert counted == PLACES[:count]
    assert len({len(groups) for groups in ranks}) == 1
    assert all(0 < len(group) <= size for groups in ranks for group, _ in groups)


def test_rank_without_clips_runs_placeholder() -> None:
    assert group_local_clips(PLACES[:1], ClipShare(0, 2), 4) == [((ClipIndex(0, 0),), False)]
    assert group_local_clips(PLACES[:1], ClipShare(1, 2), 4) == [((ClipIndex(0, 0),), True)]


def test_noise_follows_seed_step_index_and_purpose() -> None:
    noise = draw_clip_noise(PLACES, SHAPE, 1, 5, "start")
    assert noise.dtype == torch.float32
    for begin, end in ((0, 2), (1, 6), (4, 5)):
        assert draw_clip_noise(PLACES[begin:end], SHAPE, 1, 5, "start").equal(noise[begin:end])
    other_items = [draw_clip_noise(PLACES, SHAPE, *key) for key in ((2, 5, "start"), (1, 6, "start"), (1, 5, "step 0"))]
    clips = [*noise, *(clip for other in other_items for clip in other)]
    assert all(not a.equal(b) for i, a in enumerate(clips) for b in clips[:i])


def test_same_noise_is_shared_within_group() -> None:
    noise = draw_start_noise(PLACES, SHAPE, config(same_noise=True), 4)
    assert noise[0].equal(noise[1])
    assert not noise[0].equal(noise[2])
    assert noise[::2].equal(draw_start_noise(PLACES, SHAPE, config(), 4)[::2])


def test_conditioning_frame_count_is_drawn_per_group() -> None:
    clean = {place: torch.full(SHAPE, float(place.prompt + 1)) for place in PLACES}
    settings = config(conditional_frames=(0, 2))
    drawn = {draw_num_given_frames(settings, step, prompt) for step in range(20) for prompt in range(3)}
    assert drawn == {0, 1, 2}
    conditioning = build_conditioning(PLACES, clean.__getitem__, settings, 7)
    assert conditioning is not None
    assert conditioning.mask.shape == (6, 1, 3, 1, 1)
    for row, place in enumerate(PLACES):
        count = draw_num_given_frames(settings, 7, place.prompt)
        assert conditioning.mask[row].flatten().tolist() == [1.0] * count + [0.0] * (3 - count)
        assert conditioning.latents[row, :, :count].eq(place.prompt + 1).all()
        assert conditioning.latents[row, :, count:].eq(0).all()


def test_no_clip_is_read_without_conditioning_frames() -> None:
    assert build_conditioning(PLACES, {}.__getitem__, config(), 7) is None


def test_velocities_are_stored_in_bfloat16_when_lossless() -> None:
    exact = torch.randn(2, 3).bfloat16().float()
    assert to_lossless_bfloat16(exact).dtype == torch.bfloat16
    assert to_lossless_bfloat16(exact).float().equal(exact)
    guided = exact + 0.001
    assert to_lossless_bfloat16(guided) is guided
