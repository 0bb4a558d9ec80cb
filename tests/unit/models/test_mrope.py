"""Hand-computed positions. Grids are in patches; 2 x 2 patches make a token."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import pytest
import torch

from dsreason.errors import DataError
from dsreason.families import FAMILIES
from dsreason.models.mrope import compute_position_ids

SEEING = [name for name, family in FAMILIES.items() if family.vision is not None]
CONFIG = SimpleNamespace(
    vision_config=SimpleNamespace(spatial_merge_size=2, tokens_per_second=2),
    dtype=torch.float32,
)


def positions(family: str, types: list[int], config: SimpleNamespace = CONFIG, **media: object) -> list[list[int]]:
    mm_kwargs = {key: torch.tensor(value) for key, value in media.items()}
    return compute_position_ids(FAMILIES[family].grids, torch.tensor(types), mm_kwargs, config).tolist()


@pytest.mark.parametrize("family", list(FAMILIES))
def test_text_position_increases_on_all_axes(family: str) -> None:
    assert positions(family, [0, 0, 0]) == [[0, 1, 2]] * 3


@pytest.mark.parametrize("family", SEEING)
def test_text_after_image_continues_from_longer_side(family: str) -> None:
    # two text tokens, an image of 1 x 2 x 3 tokens, two text tokens
    result = positions(family, [0, 0, *[1] * 6, 0, 0], image_grid_thw=[[1, 4, 6]])
    assert result == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6],
    ]


@pytest.mark.parametrize("family", SEEING)
def test_adjacent_images_have_distinct_positions(family: str) -> None:
    result = positions(family, [1, 1, 1, 0], image_grid_thw=[[1, 2, 4], [1, 2, 2]])
    assert result == [[0, 0, 2, 3], [0, 0, 2, 3], [0, 1, 2, 3]]


def test_qwen2_5_text_continues_from_largest_axis() -> None:
    # 3 groups of frames of 1 x 2 tokens, 2 s apart: 2 s * 2 per second = 4
    result = positions("qwen2_5_vl", [0, *[2] * 6, 0, 0], video_grid_thw=[[3, 2, 4]], second_per_grid_ts=[2.0])
    assert result == [
        [0, 1, 1, 5, 5, 9, 9, 10, 11],  # transformers 5.19 has 3, 4 instead
        [0, 1, 1, 1, 1, 1, 1, 10, 11],
        [0, 1, 2, 1, 2, 1, 2, 10, 11],
    ]


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (1.0, [0, 2, 4, 6]),
        (0.5, [0, 1, 2, 3]),
        (0.25, [0, 0, 1, 1]),  # 0, 0.5, 1, 1.5 are truncated
        (2 / 3, [0, 1, 2, 4]),  # 1.33, 2.67, 4.0: float32 2/3 is a little more than 2/3
    ],
)
def test_qwen2_5_video_time_is_truncated(seconds: float, expected: list[int]) -> None:
    result = positions("qwen2_5_vl", [2] * 4, video_grid_thw=[[4, 2, 2]], second_per_grid_ts=[seconds])
    assert result[0] == expected


def test_qwen2_5_grid_interval_defaults_to_one_second() -> None:
    assert positions("qwen2_5_vl", [2, 2], video_grid_thw=[[2, 2, 2]])[0] == [0, 2]


def test_qwen2_5_seconds_are_rounded_to_dtype() -> None:
    media = {"video_grid_thw": [[8, 2, 2]], "second_per_grid_ts": [2 / 7]}
    half = SimpleNamespace(vision_config=CONFIG.vision_config, dtype=torch.bfloat16)
    assert positions("qwen2_5_vl", [2] * 8, **media)[0] == [0, 0, 1, 1, 2, 2, 3, 4]
    assert positions("qwen2_5_vl", [2] * 8, half, **media)[0] == [0, 0, 1, 1, 2, 2, 3, 3]  # 2/7 becomes 0.28516


def test_qwen2_5_videos_have_separate_times() -> None:
    result = positions(
        "qwen2_5_vl",
        [2, 2, 0, 1, 2, 2],
        image_grid_thw=[[1, 2, 2]],
        video_grid_thw=[[2, 2, 2], [2, 2, 2]],
        second_per_grid_ts=[1.0, 3.0],
    )
    assert result == [[0, 2, 3, 4, 5, 11], [0, 0, 3, 4, 5, 5], [0, 0, 3, 4, 5, 5]]


def test_qwen3_video_has_grid_per_frame_group() -> None:
    # text (the time), a group of 1 x 2 tokens, text, a group; then text
    result = positions("qwen3_vl", [0, 2, 2, 0, 0, 2, 2, 0], video_grid_thw=[[2, 2, 4]])
    assert result == [
        [0, 1, 1, 3, 4, 5, 5, 7],
        [0, 1, 1, 3, 4, 5, 5, 7],
        [0, 1, 2, 3, 4, 5, 6, 7],
    ]


@pytest.mark.parametrize("family", SEEING)
@pytest.mark.parametrize(
    ("types", "media", "message"),
    [
        ([0, 1], {}, "token 1 is a placeholder without its image"),
        ([0, 0], {"image_grid_thw": [[1, 2, 2]]}, "1 image and 0 video grids have no placeholder"),
        (
            [0, 1, 0],
            {"image_grid_thw": [[1, 2, 4]]},
            r"image at token 1 has 2 tokens \(1 x 1 x 2\), but the text has 1",
        ),
    ],
)
def test_placeholders_not_matching_media_are_rejected(
    family: str, types: list[int], media: dict[str, object], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        positions(family, types, **media)


@pytest.mark.parametrize("family", SEEING)
def test_position_function_can_be_pickled_for_workers(family: str) -> None:
    rule = FAMILIES[family].grids
    assert pickle.loads(pickle.dumps(rule)) is rule
