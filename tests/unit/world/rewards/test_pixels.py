"""Built-in rewards on clips whose scores can be computed by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsreason.errors import DataError
from dsreason.world.data.builtin import Square, draw_clip
from dsreason.world.rewards import pixels
from dsreason.world.types import ClipSize, WorldRow

ROWS = [WorldRow("0", "a red square"), WorldRow("1", "A Blue square, not red")]


def plain(*rgb: float, frames: int = 3, side: int = 4) -> Tensor:
    """Return a clip `[1, 3, T, S, S]` of one colour."""
    return torch.tensor(rgb).view(1, 3, 1, 1, 1).expand(1, 3, frames, side, side).clone()


def test_brightness_is_the_mean_of_all_channels() -> None:
    clips = torch.cat([plain(0.2, 0.4, 0.6), plain(1, 1, 1)])
    assert pixels.brightness(clips, ROWS).tolist() == pytest.approx([0.4, 1.0])


def test_sharpness_ranges_from_blank_frame_to_chessboard() -> None:
    place = torch.arange(6)
    board = ((place[:, None] + place) % 2).float().expand(1, 3, 2, 6, 6)
    slope = (place / 10).expand(1, 3, 2, 6, 6)
    assert pixels.sharpness(torch.cat([plain(1, 1, 1, frames=2, side=6), slope, board]), []).tolist() == pytest.approx(
        [0, 0, 4], abs=1e-6
    )


def test_motion_and_flicker_match_expected_values() -> None:
    fade = torch.cat([plain(*[value] * 3, frames=1) for value in (0.1, 0.2, 0.3)], 2)
    blink = torch.cat([plain(*[value] * 3, frames=1) for value in (0.1, 0.5, 0.1)], 2)
    clips = torch.cat([fade, blink])
    assert pixels.motion(clips, []).tolist() == pytest.approx([0.1, 0.4])
    assert pixels.flicker(clips, []).tolist() == pytest.approx([0, 0.8], abs=1e-6)
    assert pixels.motion(clips[:, :, :1], []).tolist() == [0, 0]
    assert pixels.flicker(clips[:, :, :1], []).tolist() == [0, 0]


def test_colour_scores_first_channel_in_prompt() -> None:
    left, right = plain(0.9, 0.1, 0.5, side=2), plain(0.0, 0.0, 0.1, side=2)
    clips = torch.cat([left, right], -1).repeat(2, 1, 1, 1, 1)  # red exceeds by 0.4, blue by 0.1
    assert pixels.colour(clips, ROWS).tolist() == pytest.approx([0.8, 0.2])
    assert pixels.red(clips, ROWS).tolist() == pytest.approx([0.8, 0.8])


def test_error_names_the_prompt_without_colour() -> None:
    with pytest.raises(DataError, match=r'train.txt:7: its prompt "a coloured ship" names no colour'):
        pixels.colour(plain(0, 0, 0), [WorldRow("train.txt:7", "a coloured ship")])


def test_solid_scores_coloured_but_not_dark_areas() -> None:
    clips = torch.cat([plain(1, 0, 0), plain(0.16, 0, 0), plain(0.5, 0.5, 0.5)])
    assert pixels.solid(clips, []).tolist() == pytest.approx([1, 0.01 / (45 / 1024), 0], abs=1e-5)
    assert pixels.solid(clips, [], share=1.0).tolist() == pytest.approx([0.85, 0.01, 0], abs=1e-6)


def test_following_requires_motion_and_colour() -> None:
    size = ClipSize(9, 32, 32, 16.0)
    square = Square("red", "left", 0.9, 0.1, (0.5, 0.5))
    clips = torch.stack([draw_clip(square, size)] * 2).float() / 255
    assert pixels.follow(clips, ROWS).tolist() == pytest.approx([1, 0], abs=0.01)
    assert pixels.red_solid(clips, ROWS).tolist() == pytest.approx([1, 1], abs=0.01)
    assert pixels.follow(clips * 0.2, ROWS)[0] < 0.1 < 0.9 < pixels.colour(clips * 0.2, ROWS)[0]
