"""Times drawn on video frames, which do not change the shape of the model's input."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoConfig, AutoProcessor

from dsreason.data.prompts import PromptEncoder
from dsreason.data.types import Sample
from dsreason.evaluation.timestamps import TimestampEncoder, compute_frame_times, stamp
from dsreason.families import get_family
from dsreason.models.mrope import compute_position_ids
from tests.unit.media.videos import read_number, write_video


def grey_frames(count: int, height: int = 56, width: int = 168) -> np.ndarray:
    return np.random.default_rng(0).integers(60, 200, (count, height, width, 3)).astype(np.uint8)


def test_frame_is_unchanged_and_border_is_black() -> None:
    frames = grey_frames(2)
    stamped = stamp(frames, [0.0, 12.5], border=28)
    assert stamped.shape == (2, 84, 168, 3)
    assert np.array_equal(stamped[:, :56], frames)
    border = stamped[:, 56:]
    assert (border == 0).mean() > 0.7
    assert border.max() == 255
    assert (border[..., 0] == border[..., 1]).all() and (border[..., 1] == border[..., 2]).all()


def test_merged_frames_have_labels_side_by_side() -> None:
    stamped = stamp(grey_frames(4), [0.0, 0.5, 1.0, 1.5], border=28, sections=2)
    left, right = stamped[:, 56:, :84], stamped[:, 56:, 84:]
    assert [part.any() for part in left] == [True, False, True, False]
    assert [part.any() for part in right] == [False, True, False, True]


def test_label_shows_time_with_two_decimals() -> None:
    frames = grey_frames(1)
    same = stamp(frames, [1.004], sections=1)
    assert np.array_equal(same, stamp(frames, [1.0], sections=1))
    assert not np.array_equal(same, stamp(frames, [1.01], sections=1))


@pytest.mark.parametrize("width", [28, 56, 112])
def test_overly_wide_label_is_drawn_smaller(width: int) -> None:
    border = stamp(grey_frames(1, width=width), [1234.56])[0, 56:]
    columns = np.flatnonzero(border.any(axis=(0, 2)))
    section = width // 2
    assert columns.max() < section
    assert section * 0.7 < columns.max() - columns.min() + 1  # the text fills the width and is not cut off


def test_times_count_from_start_of_file() -> None:
    assert compute_frame_times({"frames_indices": [0, 10, 25], "fps": 10.0, "total_num_frames": 16}) == [0.0, 1.0, 2.5]


@pytest.fixture(scope="module")
def encoders(tiny: Path) -> tuple[PromptEncoder, TimestampEncoder]:
    config = AutoConfig.from_pretrained(tiny)
    family = get_family(config.model_type)
    positions = partial(compute_position_ids, family.grids, config=config)
    processor = AutoProcessor.from_pretrained(tiny)
    return PromptEncoder(processor, family, positions, 4096), TimestampEncoder(processor, family, positions, 4096)


def question(*parts: dict) -> Sample:
    return Sample("q", [{"role": "user", "content": [*parts, {"type": "text", "text": "When?"}]}])


def test_stamped_video_is_one_token_row_higher(encoders, tmp_path) -> None:
    bare, stamping = encoders
    factor = bare._get_pixel_limits("video").factor
    sample = question({"type": "video", "video": str(write_video(tmp_path / "a.mp4", 40)), "fps": 2})
    plain, stamped = bare.encode_prompt(sample), stamping.encode_prompt(sample)
    frames, with_border = plain.media[0][0], stamped.media[0][0]
    assert with_border.shape[1:3] == (frames.shape[1] + factor, frames.shape[2])
    assert np.array_equal(with_border[:, : frames.shape[1]], frames)
    grid, higher = (prompt.encoded.mm_kwargs["video_grid_thw"][0].tolist() for prompt in (plain, stamped))
    assert higher == [grid[0], grid[1] + 2, grid[2]]
    assert len(stamped.encoded) - len(plain.encoded) == grid[0] * grid[2] // 2
    assert stamping.measure(sample) == len(stamped.encoded)
    rows = stamped.encoded.mm_kwargs["pixel_values_videos"]
    assert len(rows) == np.prod(higher)


def test_trimmed_video_is_stamped_with_original_times(encoders, tmp_path) -> None:
    path = write_video(tmp_path / "a.mp4", 60)  # 10 frames per second, each of which shows its number
    part = {"type": "video", "video": str(path), "nframes": 2, "video_start": 2.0, "video_end": 4.5}
    frames, _ = encoders[1].encode_prompt(question(part)).media[0]
    border = encoders[1]._get_pixel_limits("video").factor
    bare = frames[:, :-border]
    assert [read_number(frame) for frame in bare] == [20, 45]
    assert np.array_equal(frames, stamp(bare, [2.0, 4.5], border=border))


def test_images_get_no_time_label(encoders, tmp_path) -> None:
    Image.new("RGB", (64, 64), "red").save(tmp_path / "a.png")
    sample = question({"type": "image", "image": str(tmp_path / "a.png")})
    plain, stamped = (encoder.encode_prompt(sample).encoded for encoder in encoders)
    assert torch.equal(plain.mm_kwargs["pixel_values"], stamped.mm_kwargs["pixel_values"])
    assert torch.equal(plain.input_ids, stamped.input_ids)
